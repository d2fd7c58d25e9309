"""Metrics and spans of both producers, as an OpenTelemetry SDK receives them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry import metrics, propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from qflow_client import (
    AsyncProducer,
    FlowControlTimeout,
    HoldKind,
    Message,
    MessageFailed,
    MessageReturned,
    Outcome,
    Position,
    Producer,
    ProducerClosed,
    ProducerFlowed,
    UndeliveredMessages,
    telemetry,
)
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from tests.effort import rounds

from .tools import PATIENCE, eventually, hold, start, start_send, wait_in_line

ROOT = Path(__file__).parents[3]


class Collected:
    """What a reader collects, by metric."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        self._reader = reader

    def __call__(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in (data.resource_metrics if data else ()) for scope in resource.scope_metrics]
        assert all(scope.scope.name == "qflow_client" for scope in scopes)
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def values(self, name: str, *by: str) -> dict[Any, Any]:
        """The values of a metric, by an attribute or several."""
        found = {}
        for point in self()[name].data.data_points:
            key = tuple(point.attributes.get(each) for each in by)
            assert key not in found
            found[key[0] if len(by) == 1 else key] = point.value
        return found

    def value(self, name: str) -> Any:
        """The value of a metric that has one."""
        (point,) = self()[name].data.data_points
        return point.value


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """An SDK for metrics."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    # The API takes a provider once for the whole process.
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(metrics, "get_meter", lambda *args, **more: provider.get_meter(*args, **more))
    monkeypatch.setattr(telemetry, "_metrics", None)
    yield Collected(reader)
    provider.shutdown()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[ReadableSpan]]]:
    """An SDK for traces; waits for so many spans that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda *args, **more: provider.get_tracer(*args, **more))

    def wait(count: int) -> list[ReadableSpan]:
        eventually(lambda: len(exporter.get_finished_spans()) >= count, f"{count} spans")
        finished = list(exporter.get_finished_spans())
        assert len(finished) == count
        return finished

    yield wait
    provider.shutdown()


SENT = "messaging.client.sent.messages"
DURATION = "messaging.client.operation.duration"


def about(producer: Producer, broker: Broker) -> dict[str, Any]:
    return {
        "messaging.system": "rabbitmq",
        "qflow.producer.name": producer.name,
        "server.address": "127.0.0.1",
        "server.port": broker.port,
    }


SEND = {"messaging.operation.name": "send", "messaging.operation.type": "send"}


def test_sent_messages_are_counted_by_destination_and_error(
    collected: Collected, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(name="orders", mandatory=True)
    for _ in range(5):
        producer.send(b"x")
    producer.send(b"x", exchange="amq.direct", routing_key="nowhere")
    producer.send(b"x", exchange="amq.fanout", routing_key="")
    assert [producer.send(b"x").result(20) for _ in range(2)] == [Outcome.CONFIRMED] * 2
    metric = collected()[SENT]
    assert (metric.unit, metric.data.is_monotonic) == ("{message}", True)
    points = [(dict(point.attributes), point.value) for point in metric.data.data_points]
    common = about(producer, broker) | SEND
    assert (common | {"messaging.destination.name": "q"}, 7) in points
    returned = {"error.type": "returned"}
    assert (common | returned | {"messaging.destination.name": "amq.direct:nowhere"}, 1) in points
    assert (common | returned | {"messaging.destination.name": "amq.fanout"}, 1) in points
    assert len(points) == 3
    assert collected.values("qflow.producer.settled", "qflow.outcome") == dict.fromkeys(map(str, Outcome), 0) | {
        "confirmed": 7,
        "returned": 2,
    }


def test_a_message_that_stays_in_the_outbox_is_not_counted_as_sent_before_the_next_producer_sends_it(
    collected: Collected, make_producer: Callable[..., Producer], broker: Broker, tmp_path: Path
) -> None:
    broker.withhold_confirms()
    first = make_producer(outbox=tmp_path / "outbox")
    first.send(b"x")
    with pytest.raises(UndeliveredMessages):
        first.close(timeout=0)
    counts = collected.values("qflow.producer.settled", "qflow.outcome")
    assert SENT not in collected() or not collected.values(SENT)
    assert counts["stored"] == 1
    broker.release_confirms()
    make_producer(outbox=tmp_path / "outbox").flush(PATIENCE)
    assert list(collected.values(SENT).values()) == [1]


def test_a_message_that_becomes_too_old_in_the_outbox_is_counted_as_failed(
    collected: Collected, make_producer: Callable[..., Producer], tmp_path: Path
) -> None:
    producer = make_producer(outbox=tmp_path / "outbox", when_flowed="spill", outbox_max_age=1e-6)
    producer.pause()
    receipts = [producer.send(b"x") for _ in range(3)]
    producer.resume()
    for receipt in receipts:
        with pytest.raises(MessageFailed):
            receipt.result(PATIENCE)
    assert collected.values("qflow.producer.settled", "qflow.outcome")["failed"] == 3
    assert SENT not in collected() or not collected.values(SENT)


def test_the_destination_name_in_telemetry_follows_the_opentelemetry_conventions() -> None:
    names = [telemetry.destination_name(*each) for each in (("e", "k"), ("e", ""), ("", "k"), ("", ""))]
    assert names == ["e:k", "e", "k", "amq.default"]


def test_the_number_of_metric_series_stays_bounded_with_any_number_of_routing_keys(
    collected: Collected, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(mandatory=False)
    for at in range(telemetry.MAX_DESTINATIONS + 10):
        producer.send(b"x", routing_key=f"k{at}").result(20)
    sent = collected.values(SENT, "messaging.destination.name")
    assert len(sent) == telemetry.MAX_DESTINATIONS + 1
    assert sent[None] == 10


def test_the_recorded_duration_of_a_message_lasts_from_the_call_of_send_to_the_confirm(
    collected: Collected, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer()
    producer.pause()
    job = start_send(producer, b"x")
    # What is measured is more than this, and there is nothing else to wait for.
    threading.Event().wait(0.2)
    producer.resume()
    job.result().result(20)
    metric = collected()[DURATION]
    assert metric.unit == "s"
    (point,) = metric.data.data_points
    assert dict(point.attributes) == about(producer, broker) | SEND | {"messaging.destination.name": "q"}
    assert point.count == 1
    assert 0.2 <= point.sum < 10
    assert list(point.explicit_bounds[:3]) in ([0.005, 0.01, 0.025], [0.0, 5.0, 10.0])


def test_send_durations_are_recorded_less_often_than_messages_are_sent_and_include_the_longest(
    collected: Collected, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer()
    hold(broker, producer)
    broker.flow(True)
    assert producer.wait_unflowed(20)
    count = rounds(1000, least=200)
    receipts = [producer.send(b"x") for _ in range(count)]
    for receipt in receipts:
        receipt.result(20)
    (point,) = collected()[DURATION].data.data_points
    assert 1 <= point.count < count
    assert 0 < point.min <= point.max < 10
    # Nothing is kept of what is settled.
    assert producer._protocol.admission.observer is not None
    assert producer._protocol.admission.observer.began == {}


def test_C7_metrics_count_failed_sends_holds_and_flowed_time_by_kind_of_hold(
    collected: Collected, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer()
    assert collected.value("qflow.producer.flow_stops") == 0
    hold(broker, producer)
    producer.pause()
    with pytest.raises(FlowControlTimeout):
        producer.send(b"x", timeout=0.01)
    with pytest.raises(FlowControlTimeout):
        producer.send(b"x", timeout=0)
    with pytest.raises(ProducerFlowed):
        producer.send_nowait(b"x")
    none = dict.fromkeys(map(str, HoldKind), 0)
    assert collected.values("qflow.producer.holds", "qflow.hold.kind") == none | {"channel_flow": 1, "paused": 1}
    assert collected.values("qflow.producer.refusals", "qflow.hold.kind") == none | {"channel_flow": 3}
    assert collected.value("qflow.producer.flow_stops") == 1
    producer.resume()
    broker.flow(True)
    assert producer.wait_unflowed(20)
    assert collected.values("qflow.producer.holds", "qflow.hold.kind") == none
    seconds = collected.values("qflow.producer.flowed.time", "qflow.hold.kind")
    assert {kind for kind, value in seconds.items() if value > 0} == {"channel_flow", "paused"}
    assert seconds["channel_flow"] > seconds["paused"] > 0
    assert seconds == collected.values("qflow.producer.flowed.time", "qflow.hold.kind")


def test_metrics_show_the_use_of_the_window_and_the_length_of_the_waiting_line(
    collected: Collected, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(capacity=10)
    producer.pause()
    job = start_send(producer, b"x")
    levels = ("capacity", "available", "unsettled", "in_flight", "waiting")
    assert [collected.value(f"qflow.producer.{each}") for each in levels] == [10, 10, 0, 0, 1]
    producer.resume()
    job.result().result(20)
    assert [collected.value(f"qflow.producer.{each}") for each in levels] == [10, 10, 0, 0, 0]


def test_metric_counters_do_not_decrease_when_a_producer_is_closed(
    collected: Collected, make_producer: Callable[..., Producer]
) -> None:
    first = make_producer()
    for _ in range(3):
        first.send(b"x").result(20)
    first.pause()
    with pytest.raises(FlowControlTimeout):
        first.send(b"x", timeout=0)
    first.close()
    assert collected.value(SENT) == 3
    assert "qflow.producer.capacity" not in collected()
    stops, time = collected.value("qflow.producer.flow_stops"), "qflow.producer.flowed.time"
    seconds = collected.values(time, "qflow.hold.kind")
    assert seconds["paused"] > 0
    second = make_producer()
    second.send(b"x").result(20)
    # Both have the same name, and so are one series.
    assert collected.value(SENT) == 4
    assert collected.value("qflow.producer.capacity") == 1000
    assert collected.value("qflow.producer.flow_stops") == stops
    assert collected.values(time, "qflow.hold.kind") == seconds
    assert collected.values("qflow.producer.refusals", "qflow.hold.kind")["paused"] == 1


def test_two_producers_with_the_same_name_share_one_metric_series(
    collected: Collected, make_producer: Callable[..., Producer]
) -> None:
    one, two = make_producer(), make_producer(capacity=10)
    one.send(b"x").result(20)
    two.send(b"x").result(20)
    assert collected.value(SENT) == 2
    assert collected.value("qflow.producer.capacity") == 1010


# Spans.


def traceparent(span: ReadableSpan) -> str:
    context = span.context
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def headers(broker: Broker) -> list[dict[str, Any]]:
    return [dict(message.properties.headers or {}) for message in broker.messages("q")]


def test_a_span_covers_a_message_from_send_to_confirm_and_its_context_is_in_the_headers(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(tracing=True)
    receipts = [
        producer.send(b"plain"),
        producer.send(Message(b"own", headers={"mine": 1}, message_id="m", priority=3, correlation_id="order 7")),
    ]
    for receipt in receipts:
        receipt.result(20)
    plain, own = sorted(spans(2), key=lambda span: span.start_time or 0)
    assert (plain.name, plain.kind, plain.parent) == ("send q", SpanKind.PRODUCER, None)
    assert plain.status.status_code is StatusCode.UNSET
    assert dict(plain.attributes or {}) == about(producer, broker) | SEND | {
        "messaging.destination.name": "q",
        "messaging.rabbitmq.destination.routing_key": "q",
        "messaging.message.id": receipts[0].message_id,
        "network.peer.address": "127.0.0.1",
        "network.peer.port": broker.port,
    }
    assert (own.attributes or {})["messaging.message.id"] == "m"
    assert (own.attributes or {})["messaging.message.conversation_id"] == "order 7"
    assert (plain.start_time or 0) < (plain.end_time or 0)
    assert headers(broker) == [{"traceparent": traceparent(plain)}, {"mine": 1, "traceparent": traceparent(own)}]
    (_, message) = broker.messages("q")
    assert (message.body, message.properties.message_id, message.properties.priority) == (b"own", "m", 3)


def test_the_span_of_a_message_shows_the_host_to_which_the_producer_has_moved(spans: Any, broker: Broker) -> None:
    with ExitStack() as brokers:
        first = brokers.enter_context(Broker())
        first.declare_queue("q")
        ports = [first.port, broker.port]
        with Producer([first.url, broker.url], routing_key="q", tracing=True) as producer:
            producer.send(b"x").result(20)
            brokers.close()
            producer.send(b"x").result(20)
    assert [(span.attributes or {})["network.peer.port"] for span in spans(2)] == ports

    async def work() -> None:
        async with AsyncProducer(broker.url, routing_key="q", tracing=True) as producer:
            await (await producer.send(b"x"))

    asyncio.run(work())
    assert [(span.attributes or {})["network.peer.port"] for span in spans(3)] == [*ports, broker.port]


def test_E13_a_message_with_tracing_keeps_its_position(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer], tmp_path: Path
) -> None:
    producer = make_producer(tracing=True, outbox=tmp_path / "outbox.db")
    producer.send(b"1", position=Position("rows", 1))
    assert producer.position("rows") == 1
    producer.send_many([(Message(b"2", headers={"mine": 1}), Position("rows", 2))])
    assert producer.position("rows") == 2
    producer.flush(timeout=20)
    first, second = sorted(spans(2), key=lambda span: span.start_time or 0)
    assert headers(broker) == [{"traceparent": traceparent(first)}, {"mine": 1, "traceparent": traceparent(second)}]
    producer.pause()
    given = Message(b"3")
    with pytest.raises(FlowControlTimeout) as flowed:
        producer.send(given, timeout=0, position=Position("rows", 3))
    assert flowed.value.message is given


def test_the_span_of_a_message_that_is_spilled_ends_when_the_message_is_in_the_outbox(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer], tmp_path: Path
) -> None:
    producer = make_producer(tracing=True, outbox=str(tmp_path / "outbox.db"), when_flowed="spill")
    producer.pause()
    receipt = producer.send(Message(b"spilled", headers={"mine": 1}))
    (span,) = spans(1)
    assert (span.attributes or {})["qflow.spilled"] is True
    assert (span.attributes or {})["messaging.message.id"] == receipt.message_id
    assert span.status.status_code is StatusCode.UNSET
    producer.resume()
    receipt.result(20)
    assert headers(broker) == [{"mine": 1, "traceparent": traceparent(span)}]
    spans(1)


def test_a_sender_gets_its_receipt_even_if_a_telemetry_exporter_raises(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, make_producer: Callable[..., Producer], tmp_path: Path
) -> None:
    class Raising(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise OSError("the collector is gone")

    provider = TracerProvider()
    provider.add_span_processor(Raising())
    monkeypatch.setattr(trace, "get_tracer", lambda *args, **more: provider.get_tracer(*args, **more))
    producer = make_producer(tracing=True, outbox=str(tmp_path / "outbox.db"), when_flowed="spill")
    producer.pause()
    receipts = [producer.send(b"%d" % number) for number in range(3)]
    assert len(receipts) == producer.stored == 3


def test_errors_of_telemetry_are_logged_at_most_once_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = (100.0, 101.0, 109.0, 110.0)
    monkeypatch.setattr(telemetry, "_monotonic", iter(times).__next__)
    observer = telemetry.Observer(cast("Any", None), "p", "amqp://localhost", cast("Any", None))
    for _ in times:
        assert observer.give(lambda: 1 // 0) is None
    assert flush_logs(PATIENCE)
    counts = [record.args[1] for record in caplog.records if "telemetry failed" in record.msg]  # type: ignore[index]  # a tuple
    assert counts == [1, 3]


@pytest.mark.parametrize("method", ["on_start", "on_end"])
def test_a_sender_gets_its_receipt_or_its_error_even_if_a_span_processor_raises(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, make_producer: Callable[..., Producer], method: str
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("the collector is gone")

    processor, provider = SpanProcessor(), TracerProvider()
    monkeypatch.setattr(processor, method, fail)
    provider.add_span_processor(processor)
    monkeypatch.setattr(trace, "get_tracer", lambda *args, **more: provider.get_tracer(*args, **more))
    producer = make_producer(tracing=True)
    message = Message(b"x", headers={"mine": 1})
    producer.send(message).result(20)
    producer.pause()
    with pytest.raises(FlowControlTimeout) as refused:
        producer.send(message, timeout=0.01)
    assert refused.value.message is message
    assert [each["mine"] for each in headers(broker)] == [1]


def test_a_message_is_sent_even_if_a_propagator_raises(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    def fail(*_arguments: object, **_keywords: object) -> None:
        raise OSError("no context")

    monkeypatch.setattr(propagate, "inject", fail)
    make_producer(tracing=True).send(Message(b"x", headers={"mine": 1})).result(20)
    assert headers(broker) == [{"mine": 1}]


PARENT = trace.NonRecordingSpan(trace.SpanContext(7, 8, False, trace.TraceFlags(1)))


def test_the_span_of_a_message_is_a_child_of_the_current_span_of_the_sending_thread(spans: Any, broker: Broker) -> None:
    with Producer(broker.url, routing_key="q", tracing=True) as producer:
        producer.pause()

        def work() -> None:
            with trace.use_span(PARENT):
                producer.send(b"x").result(20)

        job = start(work)
        wait_in_line(producer, 1)
        # It is admitted by this thread, which has no span.
        producer.resume()
        job.result()
    (span,) = spans(1)
    assert (span.context.trace_id, span.parent.span_id) == (7, 8)


def test_the_span_of_a_message_is_a_child_of_the_current_span_of_the_sending_task(spans: Any, broker: Broker) -> None:
    async def work() -> None:
        async with AsyncProducer(broker.url, routing_key="q", tracing=True) as producer:
            with trace.use_span(PARENT):
                receipts = [await producer.send(b"x"), producer.send_nowait(b"y")]
            for receipt in receipts:
                await receipt

    asyncio.run(work())
    assert [(span.context.trace_id, span.parent.span_id) for span in spans(2)] == [(7, 8)] * 2
    assert [each["traceparent"][:35] for each in headers(broker)] == [f"00-{7:032x}"] * 2


def test_a_tracing_context_that_the_application_put_into_the_message_is_kept_and_linked(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(tracing=True)
    theirs = {"traceparent": f"00-{7:032x}-{8:016x}-01"}
    producer.send(Message(b"x", headers=theirs)).result(20)
    assert headers(broker) == [theirs]
    (span,) = spans(1)
    assert span.kind is SpanKind.CLIENT
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(7, 8)]


def test_the_span_of_an_undelivered_message_has_the_status_error(
    spans: Any, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(tracing=True, mandatory=True)
    with pytest.raises(MessageReturned):
        producer.send(b"x", routing_key="nowhere").result(20)
    (span,) = spans(1)
    assert span.status.status_code is StatusCode.ERROR
    assert "returned (312 NO_ROUTE)" in str(span.status.description)
    assert (span.attributes or {})["error.type"] == "returned"


def test_the_span_of_a_message_that_is_not_admitted_has_the_status_error(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(tracing=True)
    producer.pause()
    message = Message(b"x", headers={"mine": 1})
    with pytest.raises(FlowControlTimeout) as refused:
        producer.send(message, timeout=0.01)
    assert refused.value.message is message
    (span,) = spans(1)
    assert (span.attributes or {})["error.type"] == "FlowControlTimeout"
    producer.resume()
    # Another try is another span.
    producer.send(refused.value.message).result(20)
    assert headers(broker) == [{"mine": 1, "traceparent": traceparent(spans(2)[1])}]
    producer.close()
    with pytest.raises(ProducerClosed) as closed:
        producer.send(b"x")
    assert closed.value.message == b"x"
    assert (spans(3)[2].attributes or {})["error.type"] == "ProducerClosed"


def test_the_message_of_a_receipt_can_be_sent_again_with_a_new_span(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(tracing=True)
    receipt = producer.send(Message(b"x", message_id="m"))
    receipt.result(20)
    producer.send(receipt.message).result(20)
    first, second = spans(2)
    assert first.context != second.context
    # It was created once, so it bears the context of that.
    assert headers(broker) == [{"traceparent": traceparent(first)}] * 2
    assert [link.context for link in second.links] == [
        trace.get_current_span(propagate.extract({"traceparent": traceparent(first)})).get_span_context()
    ]


def test_without_the_tracing_setting_there_are_no_spans_and_no_tracing_headers(
    spans: Any, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    make_producer().send(b"x").result(20)
    spans(0)
    assert headers(broker) == [{}]


def test_tracing_without_an_opentelemetry_sdk_adds_no_headers(
    broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    make_producer(tracing=True).send(b"x").result(20)
    assert headers(broker) == [{}]


# Whether there is an SDK.


def test_without_an_opentelemetry_sdk_messages_are_not_observed(make_producer: Callable[..., Producer]) -> None:
    producer = make_producer()
    producer.send(b"x").result(20)
    assert producer._protocol.admission.observer is None
    assert getattr(producer, "_producer", producer)._tracer is None


def run(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


_PROGRAM = """
import json, os, sys, warnings
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from qflow_client import Producer
from qflow_client.broker import Broker

reader = InMemoryMetricReader()

def sent():
    found = {}
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found[metric.name] = sum(getattr(p, "value", 0) for p in metric.data.data_points)
    return [found.get("messaging.client.sent.messages"), found.get("qflow.producer.capacity")]

with Broker() as broker:
    broker.declare_queue("q")
    with Producer(broker.url, routing_key="q") as producer:
        producer.send(b"x").result(20)
"""


@pytest.mark.program
def test_an_opentelemetry_sdk_installed_after_the_producer_counts_from_its_first_collection_on() -> None:
    assert run(
        _PROGRAM
        + """
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
        first = sent()
        producer.send(b"x").result(20)
        print(json.dumps([first, sent()]))
"""
    ) == [[None, 1000], [1, 1000]]


@pytest.mark.program
def test_the_telemetry_counts_of_a_forked_child_are_not_added_to_those_of_the_parent() -> None:
    assert run(
        _PROGRAM
        + """
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
        sent()
        producer.send(b"x").result(20)
        reads, writes = os.pipe()
        # What Python 3.12 says of forks, and is the point here, is not to be said.
        warnings.simplefilter("ignore", DeprecationWarning)
        if not os.fork():
            os.write(writes, json.dumps(sent()).encode())
            os._exit(0)
        os.wait()
        print(json.dumps([json.loads(os.read(reads, 100)), sent()]))
"""
    ) == [[None, None], [1, 1000]]
