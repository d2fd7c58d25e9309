"""Kills an application, two relays, PostgreSQL or the broker at random times, again and again.

The application commits rows and messages in the same transactions, and rolls some back. At the end its table has the
committed messages, and the queue the published ones. ``python -m benchmarks.relay_kills --broker rabbitmq`` kills a
private RabbitMQ node. The default broker is that of this repository, with its message store.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError

from benchmarks.kills import print_verdict, read_queue
from benchmarks.postgresql import server
from benchmarks.proof import print_proof
from qflow_client.sqlalchemy import Outbox
from qflow_client.testing.node import free_port
from qflow_client.testing.rabbitmq import RabbitMQNode

__all__ = [
    "APPLICATION",
    "QUEUE",
    "RELAY",
    "VICTIMS",
    "Counts",
    "Program",
    "RelayVerdict",
    "audit",
    "connected",
    "make_tables",
    "run",
    "start_broker",
    "wait_for",
]

#: Queue of all messages.
QUEUE = "qflow.relay.kills"
_ROOT = Path(__file__).parents[1]
# Maximum seconds for each step.
PATIENCE = 120.0
# Maximum seconds from the last start to the next kill.
_LONGEST = 0.5
VICTIMS = ("application", "relay", "postgresql", "broker")

#: Source of the application. It numbers the messages of each key in a table. Each transaction locks the rows of its
#: keys, so that transactions with the same key wait for each other.
APPLICATION = """
import random, sys, threading, time
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from qflow_client.sqlalchemy import Outbox

engine = create_engine(sys.argv[1], pool_size=5)
outbox = Outbox()

def work():
    while True:
        try:
            with engine.connect() as connection:
                transaction = connection.begin()
                keys = sorted({random.randrange(10) for _ in range(random.choice([1, 1, 3]))})
                for key in keys:
                    count = random.choice([1, 1, 5])
                    last = connection.execute(
                        text("UPDATE counters SET last = last + :count WHERE key = :key RETURNING last"),
                        {"count": count, "key": key},
                    ).scalar_one()
                    numbers = range(last - count + 1, last + 1)
                    bodies = ["%d %d %d" % (key, number, random.getrandbits(60)) for number in numbers]
                    connection.execute(text("INSERT INTO orders VALUES (:body)"), [{"body": body} for body in bodies])
                    outbox.add_many(connection, bodies, routing_key=sys.argv[2], ordering_key=str(key))
                if random.random() < 0.2:
                    transaction.rollback()
                else:
                    transaction.commit()
        except DBAPIError:
            time.sleep(0.02)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
sys.stdin.read()
"""

#: Source of a relay. Its arguments are the URLs of database and broker, the capacity, and the lease in seconds.
RELAY = """
import logging, sys
from qflow_client.sqlalchemy import OutboxRelay
logging.disable()
fast = {"reconnect_delay": 0.05, "reconnect_delay_max": 0.5}
with OutboxRelay(sys.argv[1], sys.argv[2], capacity=int(sys.argv[3]), lease=float(sys.argv[4]), **fast):
    sys.stdin.read()
"""

_BROKER = """
import logging, sys
from qflow_client.broker import Broker
logging.disable()
with Broker(port=int(sys.argv[1]), store=sys.argv[2]) as broker:
    print("ready", flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The results for the messages.

    Attributes:
        committed: number of messages of committed transactions.
        missing: number of committed messages that have not arrived.
        rolled_back_and_sent: number of arrived messages whose transaction was not committed.
        second_copies: number of further copies that arrived.
        unmarked: number of messages with more than one copy without a mark.
        out_of_order: number of first copies that came after a later message of the same key.
        set_aside: number of rows that a relay has set aside.
        seconds: duration of the run in seconds.
    """

    committed: int
    missing: int
    rolled_back_and_sent: int
    second_copies: int
    unmarked: int
    out_of_order: int
    set_aside: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no message is missing, unexpected, unmarked, out of order or set aside."""
        return not (self.missing or self.rolled_back_and_sent or self.unmarked or self.out_of_order or self.set_aside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayVerdict(Counts):
    """The results for the messages.

    Attributes:
        kills: number of kills, divided equally among the victims.
    """

    kills: int


def audit(committed: Iterable[bytes], queue: Iterable[tuple[bytes, bool]]) -> dict[str, int]:
    """Compare the committed messages with the queue.

    Args:
        committed: bodies of the committed messages: a key, the number of the message for this key, and a unique part.
        queue: the body of each copy in order, and whether the copy is marked.

    Returns:
        The first six values of `Counts`.
    """
    expected = set(committed)
    copies: Counter[bytes] = Counter()
    unmarked: Counter[bytes] = Counter()
    last: dict[bytes, int] = {}
    out_of_order = 0
    for body, is_marked in queue:
        copies[body] += 1
        unmarked[body] += not is_marked
        if copies[body] == 1:
            key, number, _ = body.split()
            out_of_order += int(number) < last.get(key, 0)
            last[key] = max(int(number), last.get(key, 0))
    return {
        "committed": len(expected),
        "missing": len(expected - copies.keys()),
        "rolled_back_and_sent": len(copies.keys() - expected),
        "second_copies": copies.total() - len(copies),
        "unmarked": sum(count > 1 for count in unmarked.values()),
        "out_of_order": out_of_order,
    }


class Program:
    """A process that runs until it is killed.

    Args:
        program: source code of the program.
        answers: whether the program prints ``ready`` when it is ready.
    """

    def __init__(self, program: str, *arguments: str, answers: bool = False) -> None:
        self._command = [sys.executable, "-c", program, *arguments]
        self._answers = answers
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._answers else subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
        )
        if self._answers:
            assert self._process.stdout is not None
            if self._process.stdout.readline() != b"ready\n":
                raise RuntimeError("the process of the broker ended before it was ready; see its output above")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true.

    Raises:
        RuntimeError: the condition did not become true within two minutes.
    """
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"timed out after {PATIENCE:g} s while waiting for {what}")
        threading.Event().wait(0.02)


def run(*, kills: int = 200, broker: str = "embedded", seed: int = 1) -> RelayVerdict:
    """Kill one victim after the other, each at a random time after the restart of the previous victim.

    Args:
        broker: ``"embedded"`` or ``"rabbitmq"``.
        seed: seed of the random order of the victims and of the random times.
    """
    began = time.monotonic()
    chance = random.Random(seed)
    # Kill each victim equally often, in random order.
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(kills)]
    chance.shuffle(victims)
    with ExitStack() as stack:
        database = stack.enter_context(server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qflow-relay-kills-")))
        outbox = Outbox()
        engine = create_engine(database.url)
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            outbox.metadata.create_all(connection)
            make_tables(connection)
        url, node = start_broker(stack, broker, folder)
        with connected(url) as amqp:
            amqp.channel().queue_declare(QUEUE, durable=True)
        application = Program(APPLICATION, database.url, QUEUE)
        relays = [Program(RELAY, database.url, url, str(capacity), "30") for capacity in (20, 1000)]
        for program in (application, *relays):
            program.start()
            stack.callback(program.kill)

        def depth() -> int:
            try:
                with engine.connect() as connection:
                    return outbox.status(connection).depth
            except DBAPIError:
                return -1

        def relayed() -> int:
            with suppress(DBAPIError), engine.connect() as connection:
                return outbox.status(connection).relayed
            return -1

        for victim in victims:
            before = relayed()
            wait_for(lambda: relayed() > before, "a row relayed")  # noqa: B023  # called at once
            # Wait for a random time, and not for an event.
            threading.Event().wait(chance.uniform(0, _LONGEST))
            target: Any = {"application": application, "broker": node}.get(victim)
            if victim == "postgresql":
                database.stop_immediately()
                database.start()
                continue
            if target is None:
                target = chance.choice(relays)
            target.kill()
            target.start()
        application.kill()
        wait_for(lambda: depth() == 0, "an empty outbox")
        for relay in relays:
            relay.kill()
        with engine.connect() as connection:
            committed = [body.encode() for body in connection.execute(text("SELECT body FROM orders")).scalars()]
            set_aside = outbox.status(connection).failed
        with connected(url) as amqp:
            counts = audit(committed, read_queue(amqp.channel(), QUEUE))
    return RelayVerdict(kills=kills, set_aside=set_aside, seconds=time.monotonic() - began, **counts)


def make_tables(connection: Connection) -> None:
    """Create the tables of the application: its keys, its committed messages, and their times."""
    for statement in (
        "CREATE TABLE counters (key int PRIMARY KEY, last int NOT NULL)",
        "INSERT INTO counters SELECT key, 0 FROM generate_series(0, 9) key",
        "CREATE TABLE orders (body text PRIMARY KEY, added_at timestamptz NOT NULL DEFAULT clock_timestamp())",
    ):
        connection.execute(text(statement))


def start_broker(stack: ExitStack, kind: str, folder: Path) -> tuple[str, Any]:
    """Start a broker, which runs until the stack is closed. Return its URL, and the object to kill."""
    if kind == "rabbitmq":
        node = stack.enter_context(RabbitMQNode())
        return node.url, node
    port = free_port(set())
    program = Program(_BROKER, str(port), str(folder / "store"), answers=True)
    program.start()
    stack.callback(program.kill)
    return f"amqp://guest:guest@127.0.0.1:{port}/%2F", program


def connected(url: str) -> pika.BlockingConnection:
    """Try to connect until the broker answers."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return pika.BlockingConnection(pika.URLParameters(url))
        except (pika.exceptions.AMQPError, OSError):
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="%(default)s unless given")
    parser.add_argument("--broker", choices=("embedded", "rabbitmq"), default="embedded")
    parser.add_argument("--seed", type=int, default=1, help="of the victims and the moments (%(default)s)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    verdict = run(kills=arguments.kills, broker=arguments.broker, seed=arguments.seed)
    print_verdict(verdict, as_json=arguments.json)
    if verdict.is_good:
        print_proof(verdict.kills, "kills of an application with a relay, or of its broker or database")
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
