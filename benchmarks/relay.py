"""Compares the relay of an outbox in PostgreSQL with a naive loop and other relays: confirmed, durable rows per second.

PostgreSQL is a private server with default durability. ``--check`` fails below the requirements.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import pika
from sqlalchemy import Engine, create_engine, text

from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url
from benchmarks.postgresql import server
from benchmarks.relay_peers import Peers
from qflow_client.broker import Broker
from qflow_client.receipt import Receipt
from qflow_client.sqlalchemy import Outbox, OutboxRelay
from qflow_client.sqlalchemy.tenure import Tenure

__all__ = ["Result", "measure"]

_QUEUE = "qflow.relay.benchmark"
_KEYS = 100
# Maximum seconds for each step.
_PATIENCE = 600.0
# Number of rows of the slow loops.
_SLOW = 2000
# Number of rows of one round at a small depth.
_SMALL = 1000
_ROUNDS = 15
# Commits per second and number of commits in the measurement of the latency.
_COMMITS = (500, 3000)
#: Requirements: rows per second, ratio to the naive loop, ratio of the rates at the large and the small depth, and
#: milliseconds from commit to confirm at p99. Two measurements of one depth also differ by a tenth.
BARS = (5000.0, 10.0, 0.9, 20.0)


@dataclass(frozen=True, slots=True)
class Result:
    """The results.

    Attributes:
        relay: rows per second of the relay from a full table.
        naive: rows per second of a loop that selects a row, publishes it, waits for the confirm, deletes it and
            commits.
        naive_100: rows per second of the naive loop with 100 rows in a transaction.
        txoutbox: rows per second of txoutbox with its storage, and aio-pika; ``None`` if it is not installed.
        faststream_outbox: rows per second of faststream-outbox with FastStream's broker, which keeps no order; ``None``
            if it is not installed.
        django_reliable_outbox: rows per second of django-reliable-outbox, and pika; ``None`` if it is not installed.
        to_naive: `relay` divided by `naive`.
        small: median rate of the relay at a depth of 1000.
        large: rate of the relay at the large depth, over as many rows as `relay`.
        depth: the large depth.
        to_small: `large` divided by `small`.
        latency_p50: median milliseconds from the return of a commit to the confirm.
        latency_p99: 99th percentile of the milliseconds from the return of a commit to the confirm.
        flowed_commits: transactions per second of a database with waiting rows whose relay is flowed.
    """

    relay: float
    naive: float
    naive_100: float
    txoutbox: float | None
    faststream_outbox: float | None
    django_reliable_outbox: float | None
    to_naive: float
    small: float
    large: float
    depth: int
    to_small: float
    latency_p50: float
    latency_p99: float
    flowed_commits: float

    def missed(self) -> list[str]:
        rate, ratio, depth, latency = BARS
        found = []
        if self.relay < rate:
            found.append(f"{self.relay:,.0f} rows/s, below {rate:,.0f}")
        if self.to_naive < ratio:
            found.append(f"{self.to_naive:.1f} times the naive loop, below {ratio:.0f}")
        if self.to_small < depth:
            found.append(f"{self.to_small:.2f} of the rate at a small depth, below {depth:.2f}")
        if self.latency_p99 > latency:
            found.append(f"{self.latency_p99:.1f} ms from commit to confirm, above {latency:.0f}")
        return found


class _Bench:
    def __init__(self, engine: Engine, url: str) -> None:
        self.engine = engine
        self.url = url
        self.outbox = Outbox()

    def fill(self, rows: int) -> None:
        """Fill the table with rows, and empty the queue."""
        table = self.outbox.tables.full_name
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"TRUNCATE {table}"))
            self._copy(connection, rows)
            connection.execute(text(f"VACUUM ANALYZE {table}"))
        with pika.BlockingConnection(pika.URLParameters(self.url)) as amqp:
            channel = amqp.channel()
            channel.queue_declare(_QUEUE, durable=True)
            channel.queue_purge(_QUEUE)

    def _copy(self, connection: Any, rows: int) -> None:
        """Create rows as `Outbox.add` does, by copying one row per key."""
        sample = Outbox(name="sample")
        sample.metadata.drop_all(connection)
        sample.metadata.create_all(connection)
        for key in range(_KEYS):
            sample.add(connection, b"x" * 100, routing_key=_QUEUE, ordering_key=str(key))
        names = "partition, ordering_key, exchange, routing_key, properties, body"
        connection.execute(
            text(
                f"INSERT INTO {self.outbox.tables.full_name} ({names}) SELECT {names} FROM sample,"
                f" generate_series(1, {-(-rows // _KEYS)}) number ORDER BY number, id LIMIT {rows}"
            )
        )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > until:
                raise RuntimeError(f"timed out after {_PATIENCE:g} s while waiting for {what}")
            time.sleep(0.001)

    def relay(self, rows: int, depth: int) -> float:
        """Return rows per second of the relay over the first rows of a table, from the first confirm on."""
        self.fill(depth)
        with OutboxRelay(self.engine, self.url, outbox=self.outbox) as relay:
            self._until(lambda: relay.counts.confirmed > 0, "a confirm")
            first, began = relay.counts.confirmed, time.perf_counter()
            self._until(lambda: relay.counts.confirmed >= rows, "all confirms")
            return (relay.counts.confirmed - first) / (time.perf_counter() - began)

    def small(self) -> float:
        """Return rows per second of a running relay, from commits of 1000 rows to the last confirm."""
        self.fill(0)
        rates = []
        with _confirms() as confirmed, OutboxRelay(self.engine, self.url, outbox=self.outbox) as relay:
            self._until(lambda: len(relay.partitions) == 16, "the partitions of the relay")
            for number in range(1, _ROUNDS + 1):
                with self.engine.begin() as connection:
                    self._copy(connection, _SMALL)
                    connection.execute(text(f"NOTIFY {self.outbox.tables.channel}"))
                began = time.perf_counter()
                expected = number * _SMALL
                self._until(lambda: len(confirmed) >= expected, "all confirms")  # noqa: B023  # called at once
                rates.append(_SMALL / (time.perf_counter() - began))
        return median(rates)

    def naive(self, rows: int, batch: int) -> float:
        """Return rows per second of a simple loop, without a relay."""
        self.fill(rows)
        query = text(
            "SELECT id, exchange, routing_key, body FROM qflow_outbox ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED"
        )
        with (
            pika.BlockingConnection(pika.URLParameters(self.url)) as amqp,
            self.engine.connect() as connection,
        ):
            channel = amqp.channel()
            channel.confirm_delivery()
            properties = pika.BasicProperties(delivery_mode=2)
            began = time.perf_counter()
            while found := connection.execute(query, {"batch": batch}).all():
                for row in found:
                    channel.basic_publish(row.exchange, row.routing_key, row.body, properties, mandatory=True)
                    connection.execute(text("DELETE FROM qflow_outbox WHERE id = :id"), {"id": row.id})
                connection.commit()
            return rows / (time.perf_counter() - began)

    def latency(self) -> tuple[float, float]:
        """Return milliseconds from the return of a commit to the confirm: median and p99."""
        rate, count = _COMMITS
        self.fill(0)
        committed: dict[str, float] = {}
        with _confirms() as confirmed, OutboxRelay(self.engine, self.url, outbox=self.outbox) as relay:
            self._until(lambda: len(relay.partitions) == 16, "the partitions of the relay")
            began = time.perf_counter()
            with self.engine.connect() as connection:
                for number in range(count):
                    time.sleep(max(0.0, began + number / rate - time.perf_counter()))
                    message_id = self.outbox.add(connection, b"x" * 100, routing_key=_QUEUE, ordering_key=str(number))
                    connection.commit()
                    committed[message_id] = time.perf_counter()
            self._until(lambda: len(confirmed) >= count, "all confirms")
        at = dict(confirmed)
        taken = [1000 * max(0.0, at[each] - since) for each, since in committed.items()]
        return median(taken), quantiles(taken, n=100)[98]

    def flowed(self) -> float:
        """Return transactions per second of the database while the relay is flowed and rows wait."""
        query = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        with Broker() as broker, self.engine.connect() as connection:
            broker.declare_queue(_QUEUE)
            with OutboxRelay(self.engine, broker.url, outbox=self.outbox):
                broker.wait_until(lambda broker: broker.producers)
                broker.flow(False)
                self._copy(connection, 10_000)
                connection.execute(text(f"NOTIFY {self.outbox.tables.channel}"))
                connection.commit()
                time.sleep(2)
                before = connection.execute(query).scalar_one()
                connection.commit()
                time.sleep(10)
                after: int = connection.execute(query).scalar_one()
                broker.flow(True)
        return float(after - before - 1) / 10


@contextmanager
def _confirms() -> Iterator[list[tuple[str, float]]]:
    """Yield a list that collects the confirmed message ids and their times."""
    settled = Tenure.settled
    confirmed: list[tuple[str, float]] = []

    def note(self: Tenure, receipt: Receipt) -> None:
        confirmed.append((str(receipt.message_id), time.perf_counter()))
        settled(self, receipt)

    Tenure.settled = note  # type: ignore[method-assign]
    try:
        yield confirmed
    finally:
        Tenure.settled = settled  # type: ignore[method-assign]


def measure(url: str, *, rows: int = 50_000, depth: int = 1_000_000) -> Result:
    """Measure everything in one run.

    Args:
        rows: number of rows for the fast measurements.
    """
    with server() as database:
        engine = create_engine(database.url)
        bench = _Bench(engine, url)
        bench.outbox.metadata.create_all(engine)
        naive = [bench.naive(_SLOW, 1)]
        relay = bench.relay(rows, rows)
        naive.append(bench.naive(_SLOW, 1))
        naive_100 = bench.naive(_SLOW, 100)
        bench.fill(0)
        peers = Peers(engine.url, url, _QUEUE, _KEYS)
        txoutbox = peers.txoutbox(5 * _SLOW)
        faststream_outbox = peers.faststream_outbox(5 * _SLOW)
        django_reliable_outbox = peers.django_reliable_outbox(_SLOW)
        small = bench.small()
        large = bench.relay(rows, depth)
        p50, p99 = bench.latency()
        flowed = bench.flowed()
        engine.dispose()
    slow = median(naive)
    return Result(
        relay=relay,
        naive=slow,
        naive_100=naive_100,
        txoutbox=txoutbox,
        faststream_outbox=faststream_outbox,
        django_reliable_outbox=django_reliable_outbox,
        to_naive=relay / slow,
        small=small,
        large=large,
        depth=depth,
        to_small=large / small,
        latency_p50=p50,
        latency_p99=p99,
        flowed_commits=flowed,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"amqp:// URL of the broker, or {EMBEDDED} (%(default)s)")
    parser.add_argument("--rows", type=int, default=50_000, help="of the fast ways (%(default)s)")
    parser.add_argument("--depth", type=int, default=1_000_000, help="the large one (%(default)s)")
    parser.add_argument("--check", action="store_true", help="fail below the bars")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with broker_url(arguments.url) as url:
        result = measure(url, rows=arguments.rows, depth=arguments.depth)
    if arguments.json:
        print(json.dumps(asdict(result)))
    else:
        print("\n".join(f"{name}: {value}" for name, value in asdict(result).items()))
    missed = result.missed()
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
