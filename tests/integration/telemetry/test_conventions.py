"""Names of metrics and attributes, compared with the package of OpenTelemetry's semantic conventions.

Each release of the SDK needs one release of this package. An SDK that is older than the conventions in `SCHEMA_URL`
works too, but its package does not have all of their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, network_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas

from qflow_client import Message, Producer, UndeliveredMessages, telemetry
from qflow_client.broker import Broker

#: The newest release of the conventions' package that these tests know. It has the schema `SCHEMA_URL`.
KNOWN = (0, 66)
PACKAGE = "opentelemetry-semantic-conventions"
INSTALLED = tuple(int(re.findall(r"\d+", part)[0]) for part in version(PACKAGE).split(".")[:2])

ATTRIBUTES = {
    value
    for module in (error_attributes, messaging_attributes, network_attributes, server_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}
METRICS = {value for value in vars(messaging_metrics).values() if isinstance(value, str)}
if INSTALLED < KNOWN:
    # The package of the oldest supported SDK does not have these names yet.
    ATTRIBUTES |= {"messaging.operation.name", "messaging.operation.type"}
    METRICS |= {"messaging.client.operation.duration", "messaging.client.sent.messages"}


def not_ours(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("qflow.")}


def release(schema: str) -> tuple[int, ...]:
    """Return the release number in the URL of a schema. In old URLs it follows a `v`."""
    return tuple(int(part) for part in schema.rpartition("/")[2].removeprefix("v").split("."))


def test_telemetry_uses_the_newest_opentelemetry_schema() -> None:
    newest = list(Schemas)[-1].value
    if INSTALLED > KNOWN and newest != telemetry.SCHEMA_URL:
        pytest.skip(f"the conventions are {newest} now, and {telemetry.SCHEMA_URL} here")
    if INSTALLED < KNOWN:
        assert release(newest) < release(telemetry.SCHEMA_URL)
    else:
        assert newest == telemetry.SCHEMA_URL


def test_telemetry_uses_the_names_of_the_opentelemetry_conventions_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider(metric_readers=[reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    # The API takes a provider once for the whole process.
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    monkeypatch.setattr(metrics, "get_meter", lambda *args, **more: meters.get_meter(*args, **more))
    monkeypatch.setattr(trace, "get_tracer", lambda *args, **more: tracers.get_tracer(*args, **more))
    monkeypatch.setattr(telemetry, "_metrics", None)
    with Broker() as broker, Producer(broker.url, routing_key="q", declare="q", tracing=True) as producer:
        producer.send(Message(b"x", correlation_id="order 7")).wait(20)
        producer.send(b"x", routing_key="nowhere").wait(20)
        with pytest.raises(UndeliveredMessages):
            producer.flush()
        data = reader.get_metrics_data()
    assert data is not None
    measured = [each for found in data.resource_metrics for scope in found.scope_metrics for each in scope.metrics]
    assert not_ours(metric.name for metric in measured) == {
        "messaging.client.sent.messages",
        "messaging.client.operation.duration",
    }
    assert not_ours(metric.name for metric in measured) <= METRICS
    names = {name for metric in measured for point in metric.data.data_points for name in point.attributes or {}}
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    in_spans = {name for span in spans for name in span.attributes or {}}
    assert not_ours(names | in_spans) <= ATTRIBUTES
    expected = {"messaging.message.conversation_id", "network.peer.address", "network.peer.port", "error.type"}
    assert expected <= in_spans
    for provider in (meters, tracers):
        provider.shutdown()
