"""Kills producers with an outbox (kill -9) at random times: which messages are lost, out of order, or not marked.

Each life of a producer sends numbered messages from several senders, and reports each message when `send` has returned.
The next life continues with the same outbox. At the end the queue is read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pika

from benchmarks.embedded import EMBEDDED, broker_url
from benchmarks.proof import print_proof
from qflow_client import Outbox, Producer
from qflow_client.message import REPUBLISHED

__all__ = ["Verdict", "audit", "print_verdict", "read_queue", "run"]

_QUEUE = "qflow.kills"
# Default for the maximum seconds from the start of a producer to its kill.
_LONGEST = 0.3
# Maximum seconds for each step.
_PATIENCE = 60.0
_SENDERS = 4

# This program forks for each life, so that no life waits for imports. The actions of a life are random, with the number
# of the life as the seed.
_LIVES = f"""
import asyncio, os, random, sys, threading
from qflow_client import AsyncProducer, Producer

url, path = sys.argv[1:]

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def live(life):
    chance = random.Random(life)
    settings = dict(
        routing_key="{_QUEUE}",
        outbox=path,
        capacity=chance.choice([1, 20, 1000]),
        when_flowed=chance.choice(["block", "spill"]),
        max_producer_flow_control_wait=None,
    )
    many = chance.choice([1, 1, 7])
    bodies = lambda sender, number: [b"%d %d %d" % (life, sender, each) for each in range(number, number + many)]
    if chance.random() < 0.5:
        with Producer(url, **settings) as producer:
            def send(sender):
                number = 0
                while True:
                    producer.send_many(bodies(sender, number))
                    number += many
                    tell(life, sender, number)
            for sender in range(1, {_SENDERS}):
                threading.Thread(target=send, args=(sender,), daemon=True).start()
            send(0)
    async def main():
        async with AsyncProducer(url, **settings) as producer:
            async def send(sender):
                number = 0
                while True:
                    await producer.send_many(bodies(sender, number))
                    number += many
                    tell(life, sender, number)
            await asyncio.gather(*map(send, range({_SENDERS})))
    asyncio.run(main())

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        live(int(line))
    tell("child", child)
    _, status = os.waitpid(child, 0)
    tell("ended", os.WTERMSIG(status) if os.WIFSIGNALED(status) else "by itself")
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results for the messages.

    Attributes:
        kills: number of killed producers.
        told: number of messages for which `send` had returned.
        first_copies: number of different messages in the queue.
        second_copies: number of further copies in the queue.
        lost: number of messages for which `send` had returned and that are not in the queue.
        out_of_order: number of first copies that came after a later message of the same sender and life. A marked copy
            must also not come after a message of a later life.
        unmarked: number of messages with more than one copy without a mark.
        left: number of messages in the outbox at the end.
        left_behind: total number of messages that killed producers left in the outbox.
    """

    kills: int
    told: int
    first_copies: int
    second_copies: int
    lost: int
    out_of_order: int
    unmarked: int
    left: int
    left_behind: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no message is lost, out of order, unmarked, or still in the outbox."""
        return not (self.lost or self.out_of_order or self.unmarked or self.left)


def audit(told: dict[tuple[int, int], int], queue: Iterable[tuple[bytes, bool]]) -> dict[str, int]:
    """Compare the sent messages with the queue.

    The broker may handle the last bytes of a killed producer after messages of the next producer. These late messages
    have no mark.

    Args:
        told: for each life and sender, the minimum number of sent messages.
        queue: the body of each copy in order, and whether the copy is marked.

    Returns:
        The counts of a `Verdict`.
    """
    copies: Counter[tuple[int, int, int]] = Counter()
    unmarked: Counter[tuple[int, int, int]] = Counter()
    # For each life and sender, the highest number so far.
    last: dict[tuple[int, int], int] = {}
    life_now = -1
    out_of_order = 0
    for body, is_marked in queue:
        life, sender, number = map(int, body.split())
        copies[life, sender, number] += 1
        unmarked[life, sender, number] += not is_marked
        if copies[life, sender, number] == 1:
            highest = last.get((life, sender), -1)
            out_of_order += number < highest or (is_marked and life < life_now)
            last[life, sender] = max(number, highest)
            life_now = max(life, life_now)
    sent = {(*who, number) for who, count in told.items() for number in range(count)}
    return {
        "told": len(sent),
        "first_copies": len(copies),
        "second_copies": copies.total() - len(copies),
        "lost": len(sent - copies.keys()),
        "out_of_order": out_of_order,
        "unmarked": sum(count > 1 for count in unmarked.values()),
    }


def run(folder: Path, *, kills: int = 200, url: str = EMBEDDED, seed: int = 1, longest: float = _LONGEST) -> Verdict:
    """Kill producers, one after the other.

    Args:
        folder: folder of the outbox.
        url: URL of the broker; `EMBEDDED` for this repository's broker.
        seed: seed of the random times.
        longest: maximum seconds from the start of a producer to its kill.
    """
    began = time.monotonic()
    chance = random.Random(seed)
    told: dict[tuple[int, int], int] = {}
    left_behind = 0
    with ExitStack() as stack:
        url = stack.enter_context(broker_url(url))
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "outbox"
        connection = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url)))
        channel = connection.channel()
        channel.queue_declare(_QUEUE, durable=True)
        channel.queue_purge(_QUEUE)
        stack.callback(channel.queue_delete, _QUEUE)
        lives = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _LIVES, url, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(lives.kill)
        for life in range(kills):
            for sender, number in _one_life(lives, life, chance.uniform(0, longest)):
                told[life, sender] = number
            # Keep the connection alive.
            connection.process_data_events(0)
            # A producer that was killed before it created its tables has stored nothing.
            if path.exists() and path.stat().st_size:
                left_behind += sum(1 for _ in _stored(path))
        with Producer(url, routing_key=_QUEUE, outbox=path) as producer:
            producer.flush(timeout=_PATIENCE)
        left = sum(1 for _ in _stored(path))
        counts = audit(told, read_queue(channel, _QUEUE))
    return Verdict(kills=kills, left=left, left_behind=left_behind, seconds=time.monotonic() - began, **counts)


def _stored(path: Path) -> Iterator[int]:
    after = 0
    while batch := Outbox.look(path, after, 10_000):
        after = batch[-1].sequence
        yield from (each.sequence for each in batch)


def _one_life(lives: subprocess.Popen[str], life: int, seconds: float) -> Iterator[tuple[int, int]]:
    """Start a producer, and kill it after some seconds. Yield its reports about its senders."""
    assert lives.stdin is not None
    assert lives.stdout is not None
    print(life, file=lives.stdin, flush=True)
    # The first reports may come before the process id of the child.
    told = []
    while (words := lives.stdout.readline().split())[0] != "child":
        told.append(words)
    # Wait for a random time, and not for an event.
    time.sleep(seconds)
    os.kill(int(words[1]), signal.SIGKILL)
    while (words := lives.stdout.readline().split())[0] != "ended":
        told.append(words)
    if words[1] != str(int(signal.SIGKILL)):
        raise RuntimeError(f"the producer of life {life} did not end by SIGKILL, but: {' '.join(words[1:])}")
    for _, sender, number in told:
        yield int(sender), int(number)


def read_queue(channel: pika.adapters.blocking_connection.BlockingChannel, queue: str) -> Iterator[tuple[bytes, bool]]:
    """Consume all messages of a queue: yield bodies in order, and whether each is marked as a second copy."""
    channel.basic_qos(prefetch_count=0)
    left = channel.queue_declare(queue, passive=True).method.message_count
    if not left:
        return
    for method, properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=_PATIENCE):
        if method is None or properties is None or body is None:
            raise RuntimeError(f"queue {queue!r} delivered none of its remaining {left} messages for {_PATIENCE:g} s")
        yield body, bool((properties.headers or {}).get(REPUBLISHED))
        left -= 1
        if not left:
            break
    channel.cancel()


def print_verdict(verdict: Any, *, as_json: bool) -> None:
    """Print the fields of a dataclass, for people or as JSON."""
    fields = asdict(verdict)
    if as_json:
        print(json.dumps(fields))
    else:
        print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in fields.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="%(default)s unless given")
    parser.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="whose file system has the outbox")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (%(default)s)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    verdict = run(arguments.folder, kills=arguments.kills, url=arguments.url, seed=arguments.seed)
    print_verdict(verdict, as_json=arguments.json)
    if verdict.is_good:
        print_proof(verdict.kills, "kills of producers with an outbox")
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
