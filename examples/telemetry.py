"""Measure and trace a producer with OpenTelemetry (needs opentelemetry-sdk)."""

from __future__ import annotations

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qflow_client import FlowControlTimeout, Producer
from qflow_client.broker import Broker

# Your application has exporters here, to its systems for metrics and traces.
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
finished = InMemorySpanExporter()
tracing = TracerProvider()
tracing.add_span_processor(SimpleSpanProcessor(finished))
trace.set_tracer_provider(tracing)


def collect() -> dict[str, float]:
    """Return the sum of each metric."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: sum(getattr(point, "value", 0) for point in metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


with Broker() as broker:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders", name="shop", tracing=True) as producer:
        with trace.get_tracer("shop").start_as_current_span("a customer orders"):
            producer.send(b"three apples").result(timeout=10)

        # The broker says stop. A send waits for 0.2 s at most.
        broker.flow(False)
        try:
            while True:
                producer.send(b"a pear", timeout=0.2)
        except FlowControlTimeout as error:
            print(error)
        measured = collect()
        for name, value in measured.items():
            print(f"{name:40} {value:g}")
        assert measured["messaging.client.sent.messages"] >= 1
        assert measured["qflow.producer.holds"] == 1
        assert measured["qflow.producer.refusals"] == 1
        assert measured["qflow.producer.flowed.time"] > 0
        broker.flow(True)

    # The headers have the context of the message's span. That span is a child of the customer's span.
    headers = broker.messages("orders")[0].properties.headers
    print(headers)
    assert headers is not None
    customer = next(span for span in finished.get_finished_spans() if span.name == "a customer orders")
    sent = next(span for span in finished.get_finished_spans() if span.name == "send orders")
    assert sent.parent == customer.context
    assert f"{sent.context.trace_id:032x}-{sent.context.span_id:016x}" in str(headers["traceparent"])
