"""Measures the cost of the outbox: a producer's throughput with and without it, in the same run.

``python -m benchmarks.outbox`` uses the file system of the current folder; see ``--help``. With ``--store`` it measures
only the store: messages per second that are put, made durable and settled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pika

from benchmarks.embedded import EMBEDDED, broker_url
from qflow_client import AsyncProducer, Outbox, Producer

__all__ = ["WAYS", "Comparison", "compare", "run"]

_QUEUE = "qflow.outbox.benchmark"

# Minimum throughput with an outbox, as a part of the throughput without an outbox, for senders that share commits.
_SHARE = 0.25

# Number of messages that are settled together, as with an ack of several messages.
_SETTLED_TOGETHER = 100


def run(
    folder: Path,
    *,
    messages: int = 50_000,
    size: int = 100,
    batch: int = 1,
    threads: int = 1,
    synchronous: str = "normal",
) -> float:
    """Put messages, wait until each is durable, and settle them.

    Args:
        size: bytes of a body.
        batch: number of messages that are put before a thread waits.
        threads: number of threads that put and wait.

    Returns:
        Messages per second.
    """
    body = bytes(size)
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        Outbox(Path(place) / "outbox", synchronous=synchronous) as box,
    ):

        def send(share: int) -> None:
            unsettled: list[int] = []
            for number in range(share):
                unsettled.append(box.put(body, "", "orders", f"0123456789abcdef-{number:012x}"))
                if (number + 1) % batch == 0:
                    box.wait_durable(unsettled[-1])
                if len(unsettled) >= _SETTLED_TOGETHER:
                    for sequence in unsettled:
                        box.settle(sequence)
                    unsettled.clear()
            for sequence in unsettled:
                box.settle(sequence)

        workers = [threading.Thread(target=send, args=(messages // threads,)) for _ in range(threads)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        box.commit()
        took = time.perf_counter() - began
        assert len(box) == 0
    return messages // threads * threads / took


def _runs(messages: int) -> Iterator[dict[str, int | str]]:
    for synchronous, share in (("normal", 1), ("full", 25)):
        for batch, threads in ((1, 1), (500, 1), (1, 8)):
            yield {
                "synchronous": synchronous,
                "batch": batch,
                "threads": threads,
                "messages": messages if batch > 1 else messages // share,
            }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cost of the outbox for one way of sending.

    Attributes:
        without: median of the messages per second without an outbox.
        with_outbox: median of the messages per second with an outbox.
        share: median over the rounds of the rate with an outbox divided by the rate without an outbox.
    """

    way: str
    without: int
    with_outbox: int
    share: float


def _threads(count: int, at_once: int = 1) -> Callable[..., float]:
    def send(url: str, body: bytes, messages: int, **settings: Any) -> float:
        with Producer(url, routing_key=_QUEUE, **settings) as producer:

            def work() -> None:
                for _ in range(messages // count // at_once):
                    if at_once > 1:
                        producer.send_many([body] * at_once)
                    else:
                        producer.send(body)

            workers = [threading.Thread(target=work) for _ in range(count)]
            began = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            producer.flush()
            return time.perf_counter() - began

    return send


def _tasks(count: int) -> Callable[..., float]:
    async def main(url: str, body: bytes, messages: int, **settings: Any) -> float:
        async with AsyncProducer(url, routing_key=_QUEUE, **settings) as producer:

            async def work() -> None:
                for _ in range(messages // count):
                    await producer.send(body)

            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(count)))
            await producer.flush()
            return time.perf_counter() - began

    def send(url: str, body: bytes, messages: int, **settings: Any) -> float:
        return asyncio.run(main(url, body, messages, **settings))

    return send


#: Ways to send, and whether their senders share commits. With one thread each message waits for its own commit.
WAYS: dict[str, tuple[Callable[..., float], bool]] = {
    "1 thread": (_threads(1), False),
    "1 thread with send_many": (_threads(1, 100), True),
    "8 threads": (_threads(8), True),
    "64 threads": (_threads(64), True),
    "1 task": (_tasks(1), False),
    "200 tasks": (_tasks(200), True),
}


def compare(
    folder: Path, url: str, way: str, *, messages: int, size: int, rounds: int, synchronous: str = "normal"
) -> Comparison:
    """Send with and without an outbox, alternately.

    Args:
        url: URL of the broker, on which the benchmark declares its queue.
        way: one of `WAYS`.
        size: bytes of a body.
        rounds: number of rounds with two runs each.
    """
    send, _ = WAYS[way]
    rates: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=folder) as place, pika.BlockingConnection(pika.URLParameters(url)) as control:
        channel = control.channel()
        channel.queue_declare(_QUEUE, durable=True)
        for number in range(rounds):
            pair = []
            for outbox in (None, Path(place) / f"outbox-{number}"):
                took = send(url, bytes(size), messages, outbox=outbox, outbox_synchronous=synchronous)
                channel.queue_purge(_QUEUE)
                pair.append(messages / took)
            rates.append((pair[0], pair[1]))
        channel.queue_delete(_QUEUE)
    return Comparison(
        way,
        round(median(without for without, _ in rates)),
        round(median(with_outbox for _, with_outbox in rates)),
        round(median(with_outbox / without for without, with_outbox in rates), 3),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outbox", description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=100, help="bytes of a body")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="whose file system is measured")
    parser.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (%(default)s)")
    parser.add_argument("--synchronous", choices=("normal", "full"), default="normal", help="(%(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas (%(default)s)")
    parser.add_argument("--check", action="store_true", help=f"fail where senders share commits and get below {_SHARE}")
    parser.add_argument("--store", action="store_true", help="measure the store alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.store:
        return _main_of_store(arguments)
    comparisons = []
    with broker_url(arguments.url) as url:
        for way in arguments.ways.split(","):
            comparisons.append(
                compare(
                    arguments.folder,
                    url,
                    way,
                    messages=arguments.messages,
                    size=arguments.size,
                    rounds=arguments.rounds,
                    synchronous=arguments.synchronous,
                )
            )
            if not arguments.json:
                each = comparisons[-1]
                print(f"{each.way:28} {each.without:>9,}/s without  {each.with_outbox:>9,}/s with  {each.share:.2f}")
    if arguments.json:
        print(json.dumps([asdict(each) for each in comparisons]))
    missed = [each.way for each in comparisons if WAYS[each.way][1] and each.share < _SHARE]
    return 1 if arguments.check and missed else 0


def _main_of_store(arguments: argparse.Namespace) -> int:
    results = []
    for options in _runs(arguments.messages):
        rate = run(arguments.folder, size=arguments.size, **options)  # type: ignore[arg-type]  # of one table
        results.append(options | {"size": arguments.size, "messages_per_second": round(rate)})
        if not arguments.json:
            print("  ".join(f"{name}={value}" for name, value in results[-1].items()))
    if arguments.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
