"""Runs two relays under load.

One is suspended, then cut off from the database, then from the broker, for a minute each.

Messages that are committed in this time must arrive within the time of a lease, in order for each key, and no message
twice without a mark. A cut swallows packets without closing the connection. ``--broker rabbitmq`` starts a private
RabbitMQ node. The default broker is that of this repository, with its message store.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pika
from sqlalchemy import Engine, create_engine, text

from benchmarks.kills import print_verdict
from benchmarks.postgresql import server
from benchmarks.relay_kills import (
    APPLICATION,
    QUEUE,
    RELAY,
    Counts,
    Program,
    audit,
    connected,
    make_tables,
    start_broker,
    wait_for,
)
from qflow_client.message import REPUBLISHED
from qflow_client.sqlalchemy import Outbox
from qflow_client.sqlalchemy.tables import PARTITIONS
from qflow_client.testing.proxy import FaultProxy

__all__ = ["OUTAGES", "OutageVerdict", "run"]

#: The outages of one relay.
OUTAGES = ("suspended", "cut off from the database", "cut off from the broker")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageVerdict(Counts):
    """The results for the messages. `is_good` ignores `latest`.

    Attributes:
        lease: lease of the relays in seconds.
        latest: for each outage, the maximum seconds from the addition of a message in this time to its arrival.
    """

    lease: float
    latest: dict[str, float]

    @property
    def is_in_time(self) -> bool:
        """Whether no message arrived later than a lease."""
        return max(self.latest.values()) <= self.lease


class _Consumer(threading.Thread):
    def __init__(self, url: str) -> None:
        super().__init__(name="consumer", daemon=True)
        self._connection = connected(url)
        self._is_ending = False
        self.copies: list[tuple[bytes, bool]] = []
        #: Arrival time of the first copy of each message, in seconds since 1970.
        self.arrived: dict[bytes, float] = {}

    def run(self) -> None:
        channel = self._connection.channel()
        channel.basic_consume(QUEUE, self._take, auto_ack=True)
        while not self._is_ending:
            self._connection.process_data_events(time_limit=0.1)
        # The first copy of each message has arrived before `end` is called.
        self._connection.close()

    def _take(self, _channel: Any, _method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        self.arrived.setdefault(body, time.time())
        self.copies.append((body, bool((properties.headers or {}).get(REPUBLISHED))))

    def end(self) -> None:
        self._is_ending = True
        self.join()


def run(*, seconds: float = 60.0, lease: float = 30.0, broker: str = "embedded") -> OutageVerdict:
    """Run each outage once.

    Args:
        seconds: duration of each outage.
        lease: lease of the relays in seconds.
        broker: ``"embedded"`` or ``"rabbitmq"``.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        database = stack.enter_context(server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qflow-relay-outages-")))
        outbox, engine = Outbox(), create_engine(database.url)
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            outbox.metadata.create_all(connection)
            make_tables(connection)
        url, _ = start_broker(stack, broker, folder)
        with connected(url) as amqp:
            amqp.channel().queue_declare(QUEUE, durable=True)
        consumer = _Consumer(url)
        consumer.start()
        to_broker = stack.enter_context(FaultProxy(url))
        # The proxy also passes on bytes that are not AMQP.
        to_database = stack.enter_context(FaultProxy(f"amqp://127.0.0.1:{database.port}"))
        far = engine.url.set(port=to_database.port).render_as_string(hide_password=False)
        victim = Program(RELAY, far, to_broker.url, "100", str(lease))
        other = Program(RELAY, database.url, url, "100", str(lease))
        application = Program(APPLICATION, database.url, QUEUE)
        for program in (victim, other, application):
            program.start()
            stack.callback(program.kill)
        times = {}
        for outage in OUTAGES:
            wait_for(lambda: _shared(engine, outbox) == 2, "two relays that share the work")
            before = time.time()
            if outage == "suspended":
                victim.signal(signal.SIGSTOP)
            else:
                (to_database if outage == "cut off from the database" else to_broker).black_hole()
            # The outage lasts for these seconds.
            threading.Event().wait(seconds)
            times[outage] = before, time.time()
            victim.signal(signal.SIGCONT)
            for proxy in (to_database, to_broker):
                if outage != "suspended":
                    proxy.cut()
                proxy.heal()
        wait_for(lambda: _shared(engine, outbox) == 2, "two relays that share the work again")
        application.kill()
        wait_for(lambda: _depth(engine, outbox) == 0, "an empty outbox")
        victim.kill()
        other.kill()
        with engine.connect() as connection:
            added: dict[bytes, float] = {
                body.encode(): at.timestamp()
                for body, at in connection.execute(text("SELECT body, added_at FROM orders"))
            }
            set_aside = outbox.status(connection).failed
        wait_for(lambda: added.keys() <= consumer.arrived.keys(), "the arrival of all committed messages")
        consumer.end()
    latest = {
        outage: max((consumer.arrived[body] - at for body, at in added.items() if first <= at <= last), default=0.0)
        for outage, (first, last) in times.items()
    }
    counts = audit(added, consumer.copies)
    return OutageVerdict(lease=lease, latest=latest, set_aside=set_aside, seconds=time.monotonic() - began, **counts)


def _shared(engine: Engine, outbox: Outbox) -> int:
    """Return the number of relays that share all partitions; 0 if a partition has no relay."""
    query = text(
        "SELECT count(*), count(DISTINCT pid) FROM pg_locks"
        " WHERE locktype = 'advisory' AND granted AND classid = :class AND objid < :count"
    )
    with engine.connect() as connection:
        given = {"class": outbox.tables.relay_keys(connection)[0] % (1 << 32), "count": PARTITIONS}
        held, relays = connection.execute(query, given).one()
    return int(relays) if held == PARTITIONS else 0


def _depth(engine: Engine, outbox: Outbox) -> int:
    with engine.connect() as connection:
        return outbox.status(connection).depth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay_outages", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each outage (%(default)s)")
    parser.add_argument("--lease", type=float, default=30.0, help="of the relays, in seconds (%(default)s)")
    parser.add_argument("--broker", choices=("embedded", "rabbitmq"), default="embedded")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    verdict = run(seconds=arguments.seconds, lease=arguments.lease, broker=arguments.broker)
    print_verdict(verdict, as_json=arguments.json)
    return 0 if verdict.is_good and verdict.is_in_time else 1


if __name__ == "__main__":
    sys.exit(main())
