"""What a relay counts, for OpenTelemetry."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sqlalchemy import create_engine

from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Outbox, OutboxRelay

from .support import FAST, add, eventually, permit


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


def test_E14_metrics_count_what_a_relay_does(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter", lambda *args, **more: provider.get_meter(*args, **more))
    engine = create_engine(f"sqlite:///{tmp_path}/application.db")
    outbox = Outbox()
    outbox.metadata.create_all(engine)
    add(engine, outbox, b"1", b"2", key="k")
    add(engine, outbox, b"poison", to="nowhere")
    permit(engine, outbox, 1)
    with OutboxRelay(engine, broker.url, outbox=outbox, name="of the shop", **FAST) as relay:
        eventually(lambda: relay.counts.confirmed == 2 and relay.counts.set_aside == 1)
        assert values(reader) == {"confirmed": 2, "marked": 1, "set_aside": 1, "tenures": 1, "partitions": 16}
    assert values(reader)["partitions"] == 0
    engine.dispose()
    provider.shutdown()
