"""Metrics of a relay for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sqlalchemy import Connection, Engine, create_engine, event, text

from benchmarks.postgresql import PostgresqlServer
from qflow_client import telemetry
from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox, OutboxRelay, backlog

from .support import FAST, add, eventually, permit, sqlite_engine

engine = sqlite_engine
LIMIT = "statement_timeout"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """A reader of the metrics of relays that a test creates."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter", lambda *args, **more: provider.get_meter(*args, **more))
    monkeypatch.setattr(telemetry, "_backlogs", None)
    # On a slow machine, a query may take longer than a reader waits.
    monkeypatch.setattr("qflow_client.sqlalchemy.backlog._PATIENCE", 20.0)
    yield reader
    provider.shutdown()


def values(reader: InMemoryMetricReader) -> dict[str, float]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name.removeprefix("qflow.relay."): point.value  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name.startswith("qflow.relay.")
        for point in metric.data.data_points
        if point.attributes == {"qflow.producer.name": "of the shop"}
    }


def test_E12_metrics_show_how_many_outbox_rows_wait_while_the_broker_blocks_the_relay(
    engine: Engine, outbox: Outbox, broker: Broker, reader: InMemoryMetricReader
) -> None:
    with OutboxRelay(engine, broker.url, outbox=outbox, name="of the shop", **FAST) as relay:
        eventually(lambda: relay.health().state == "ready")
        broker.flow(False)
        eventually(lambda: relay.health().state == "blocked")
        add(engine, outbox, *"12345", key="k")
        with engine.begin() as connection:
            connection.execute(outbox.tables.rows.update(), {"created_at": datetime.now(UTC) - timedelta(hours=1)})
        found = values(reader)
        assert found["depth"] == 5
        assert 3590 < found["oldest.age"] < 3700
        broker.flow(True)


def test_E14_metrics_count_the_rows_that_a_relay_publishes(
    engine: Engine, outbox: Outbox, broker: Broker, reader: InMemoryMetricReader
) -> None:
    add(engine, outbox, b"1", b"2", key="k")
    add(engine, outbox, b"poison", to="nowhere")
    permit(engine, outbox, 1)
    with OutboxRelay(engine, broker.url, outbox=outbox, name="of the shop", **FAST) as relay:
        eventually(lambda: relay.counts.confirmed == 2 and relay.counts.set_aside == 1)
        found = values(reader)
        assert found == {
            "confirmed": 2,
            "marked": 1,
            "set_aside": 1,
            "tenures": 1,
            "partitions": 16,
            "depth": 0,
            "oldest.age": 0,
        }
    # What waits is said by relays that run.
    assert values(reader) == {"confirmed": 2, "marked": 1, "set_aside": 1, "tenures": 1, "partitions": 0}


@pytest.mark.parametrize("isolation_level", ["SERIALIZABLE", "AUTOCOMMIT", "autocommit of the driver"])
def test_postgresql_ends_a_slow_query_for_metrics_at_every_isolation_level_of_the_application(
    postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, isolation_level: str
) -> None:
    def timeout(connection: Connection, _tables: object) -> tuple[int, float]:
        return 0, float(connection.execute(text(f"SHOW {LIMIT}")).scalar_one().removesuffix("s"))

    monkeypatch.setattr(backlog, "measure", timeout)
    monkeypatch.setattr(backlog, "_PATIENCE", 20.0)
    level = {} if "driver" in isolation_level else {"isolation_level": isolation_level}
    engine = create_engine(postgresql.url, **level)
    if not level:
        event.listen(engine, "connect", lambda driver, _record: setattr(driver, "autocommit", True))
    # The application may use the connection before the query does.
    event.listen(engine, "engine_connect", lambda connection: connection.execute(text("SELECT 1")))

    def state() -> tuple[Any, ...]:
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            shown = [connection.execute(text(f"SHOW {name}")).scalar_one() for name in ("transaction_isolation", LIMIT)]
            return driver, driver.autocommit, *shown

    before = state()
    assert backlog.Backlog(engine, Outbox().tables).read() == (0, backlog._LONGEST)
    # The application gets its connection as it was.
    assert state() == before
    engine.dispose()
