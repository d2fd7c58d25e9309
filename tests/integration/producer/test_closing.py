from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import aiormq
import pytest

from qflow_client import (
    FlowControlTimeout,
    FlowEvent,
    FlowEventKind,
    Outcome,
    OutcomeUnknown,
    Producer,
    ProducerClosed,
    Receipt,
    UndeliveredMessages,
)
from qflow_client.amqp.tap import Tap
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs

from .tools import (
    PATIENCE,
    Flows,
    Growing,
    Proxy,
    Wire,
    bodies,
    ends_within,
    eventually,
    hold,
    holds,
    send_unconfirmed,
    start,
    start_send,
    stop,
    takes,
    wait_closed,
    wait_done,
    wait_in_line,
)


def test_leaving_the_with_block_flushes_and_closes_the_connection_cleanly(
    make_producer: Callable[..., Producer], broker: Broker, wire: Wire
) -> None:
    with make_producer() as producer:
        receipts = [producer.send(b"%d" % number) for number in range(2000)]
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert broker.queue("q").depth == 2000
    assert producer.closed
    broker.wait_until(lambda b: not b.connections())
    assert wire.count("in", "Connection.Close") == 1


def test_closing_a_producer_during_an_alarm_does_not_end_the_alarm_and_logs_no_error(
    producer: Producer, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    flows = Flows(producer)
    hold(broker, producer, "connection_blocked")
    producer.close()
    flows.wait_for(FlowEventKind.CLOSED)
    assert flows.kinds == [FlowEventKind.FLOWED, FlowEventKind.CLOSED]
    assert [event.hold.kind for event in flows.events if event.hold] == ["connection_blocked"] * 2
    assert flush_logs(PATIENCE)
    assert "producer: closed after being blocked (flowed) for" in caplog.text
    libraries = ("pika", "aio_pika", "aiormq")
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record for record in errors if record.name.startswith(libraries)] == []


@pytest.mark.parametrize("kind", ["paused", "rate"])
def test_a_producer_that_is_closed_during_its_own_hold_reports_that_the_hold_has_ended(
    make_producer: Callable[..., Producer], kind: str
) -> None:
    producer = make_producer(rate=0.01, rate_burst=1)
    flows = Flows(producer, kinds=[kind])
    if kind == "paused":
        producer.pause("stocktaking")
    else:
        producer.send(b"1")
        with pytest.raises(FlowControlTimeout):
            producer.send(b"2", timeout=0)
    producer.close()
    assert not producer.flow_state.flowed
    flows.wait_for(FlowEventKind.CLOSED)
    assert flows.kinds == [FlowEventKind.FLOWED, FlowEventKind.CLOSED]


def test_close_is_idempotent_and_later_sends_raise_an_error(producer: Producer, broker: Broker) -> None:
    producer.send(b"1")
    producer.close()
    producer.close()
    producer.close(timeout=0)
    assert producer.closed
    for send in (producer.send, producer.send_nowait):
        with takes(0.0), pytest.raises(ProducerClosed) as caught:
            send(b"2")
        assert caught.value.message == b"2"
    with pytest.raises(ProducerClosed):
        producer.wait_unflowed()
    producer.flush()
    assert bodies(broker) == [b"1"]
    assert "closed" in repr(producer)
    # What it was remains to be seen.
    assert (producer.unsettled, producer.in_flight) == (0, 0)
    assert not producer.flow_state.flowed
    assert producer.flow_state.closed == "the producer is closed"


def test_leaving_the_with_block_raises_undelivered_messages(broker: Broker) -> None:
    with pytest.raises(UndeliveredMessages, match="not delivered"), Producer(broker.url, routing_key="nowhere") as p:
        p.send(b"")
    assert p.closed


def test_close_keeps_its_deadline_and_its_error_says_that_the_broker_did_not_confirm_in_time(
    producer: Producer, broker: Broker
) -> None:
    receipts = send_unconfirmed(producer, broker, b"0", b"1", b"2")
    with takes(0.3), pytest.raises(UndeliveredMessages, match="the broker had not answered in time") as caught:
        producer.close(timeout=0.3)
    assert caught.value.receipts == tuple(receipts)
    assert [message.body for message in caught.value.unknown] == [b"0", b"1", b"2"]
    assert caught.value.unsent == ()
    assert {receipt.outcome for receipt in receipts} == {Outcome.UNKNOWN}
    # The error of a later send names only the close.
    with pytest.raises(ProducerClosed, match=r"^the producer is closed$"):
        producer.send(b"")


@pytest.mark.parametrize("way", ["channel_flow", "connection_blocked"])
def test_close_of_a_producer_keeps_its_deadline_while_the_producer_is_flowed(
    producer: Producer, broker: Broker, way: str
) -> None:
    (receipt,) = send_unconfirmed(producer, broker, b"written")
    hold(broker, producer, way)
    waiting = start_send(producer, b"waits")
    with takes(0.3), pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.3)
    assert caught.value.receipts == (receipt,)
    # It never was admitted, and says so itself.
    assert isinstance(waiting.wait(), ProducerClosed)
    assert bodies(broker) == [b"written"]


@pytest.mark.parametrize("is_settled", [True, False])
def test_close_of_a_producer_keeps_its_deadline_when_the_peer_is_dead(
    make_producer: Callable[..., Producer], proxy: Proxy, broker: Broker, is_settled: bool
) -> None:
    producer = make_producer(proxy.url(broker))
    producer.send(b"").result(timeout=20)
    proxy.freeze()
    if not is_settled:
        producer.send(b"")
    with ends_within(1.2), nullcontext() if is_settled else pytest.raises(UndeliveredMessages):
        producer.close(timeout=0.2)


def test_close_of_a_producer_keeps_its_deadline_while_a_callback_is_slow(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    go_on = threading.Event()
    producer = make_producer(on_delivery=lambda _receipt: go_on.wait(20))
    producer.send(b"").result(timeout=20)
    with ends_within(1.2):
        producer.close(timeout=0.2)
    go_on.set()


def test_close_waits_for_a_slow_connection_close_of_the_broker_until_the_deadline(
    make_producer: Callable[..., Producer],
    proxy: Proxy,
    broker: Broker,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("skin", "aio.link"):
        monkeypatch.setattr(f"qflow_client.{module}.GOOD_BYE", PATIENCE)
    monkeypatch.setattr(aiormq.Connection, "READER_CLOSE_TIMEOUT", PATIENCE)
    producer = make_producer(proxy.url(broker))
    producer.send(b"").result(timeout=20)
    proxy.stop_reading()
    closing = start(producer.close, timeout=20)
    # More than a close has that has no time left.
    closing.join(0.6)
    assert closing.is_alive()
    proxy.go_on_reading()
    closing.result()
    assert wire.count("in", "Connection.Close") == 1


def test_frames_for_the_channel_of_a_closed_producer_are_dropped(
    producer: Producer, broker: Broker, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The close waits for the broker, although its timeout is 0.
    monkeypatch.setattr("qflow_client.skin.BRIEF", PATIENCE)
    send_unconfirmed(producer, broker, b"")
    detach = Tap.detach

    def leave(tap: Tap, number: int) -> None:
        detach(tap, number)
        broker.flow(False)
        broker.release_confirms()

    monkeypatch.setattr(Tap, "detach", leave)
    with caplog.at_level(logging.WARNING), pytest.raises(UndeliveredMessages):
        producer.close(timeout=0)
    assert (wire.count("out", "Channel.Flow"), wire.count("out", "Basic.Ack")) == (1, 1)
    wire.wait_for("in", "Connection.Close")
    assert flush_logs(20)
    assert not caplog.records


@pytest.mark.usefixtures("one_connection")
def test_an_internal_error_of_a_producer_leaves_no_caller_waiting(
    producer: Producer, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("a mistake of ours")

    (receipt,) = send_unconfirmed(producer, broker, b"1")
    monkeypatch.setattr(Tap, "data_to_write", fail)
    with suppress(ProducerClosed):
        producer.send(b"2")
    with pytest.raises(OutcomeUnknown):
        receipt.result(timeout=20)
    # The broker knows too.
    broker.wait_until(lambda b: not b.connections())
    with pytest.raises(ProducerClosed, match="a mistake of ours"):
        producer.send(b"3")
    assert flush_logs(20)
    assert "a mistake of ours" in caplog.text


def test_close_waits_for_late_confirms(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    receipt = producer.send(b"")
    closing = start(producer.close, timeout=None)
    eventually(lambda: producer._protocol.waiters.settled)
    with pytest.raises(ProducerClosed):
        producer.send(b"")
    assert closing.is_alive()
    broker.release_confirms()
    closing.result()
    assert receipt.outcome is Outcome.CONFIRMED


def test_close_ends_waiting_sends_with_an_error_immediately(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    producer.send(b"")
    producer.pause()
    jobs = [start(producer.send, b"%d" % number, timeout=None) for number in range(5)]
    wait_in_line(producer, 5)
    closing = start(producer.close, timeout=None)
    assert [type(job.wait()) for job in jobs] == [ProducerClosed] * 5
    assert closing.is_alive()
    broker.release_confirms()
    closing.result()


def test_an_idle_flowed_producer_closes_immediately(producer: Producer, broker: Broker) -> None:
    hold(broker, producer)
    with takes(0.0):
        producer.close()


def test_leaving_the_with_block_by_an_exception_does_not_wait_for_holds_and_reports_lost_messages(
    producer: Producer, broker: Broker
) -> None:
    send_unconfirmed(producer, broker, b"1")
    hold(broker, producer)
    with ends_within(5.0), pytest.raises(KeyError) as caught, producer:
        raise KeyError("the application's own")
    (note,) = caught.value.__notes__
    assert "qflow_client" in note
    assert "1 admitted messages were not delivered" in note
    undelivered = caught.value.undelivered  # type: ignore[attr-defined]  # set on the exception
    assert [message.body for message in undelivered.unknown] == [b"1"]
    assert producer.closed


def test_leaving_the_with_block_by_an_exception_waits_for_confirms_even_if_the_window_is_full(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full window holds a fast producer most of the time, and the confirms are on their way."""
    # So long as a slow machine may take to send them.
    monkeypatch.setattr("qflow_client.core.calls._LULL", PATIENCE)
    broker.withhold_confirms()
    producer = Producer(broker.url, routing_key="q", capacity=3)
    receipts = [producer.send(b"%d" % number) for number in range(3)]
    assert holds(producer) == ["capacity"]

    def release() -> None:
        eventually(lambda: producer._protocol.waiters.settled)
        broker.release_confirms()

    job = start(release)
    with pytest.raises(KeyError) as caught, producer:
        raise KeyError
    job.result()
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert not hasattr(caught.value, "__notes__")


def test_leaving_the_with_block_by_an_exception_does_not_wait_for_withheld_confirms(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=3)
    send_unconfirmed(producer, broker, b"0", b"1", b"2")
    with ends_within(2.0), pytest.raises(FlowControlTimeout, match="capacity") as caught, producer:
        producer.send(b"no", timeout=0)
    assert len(caught.value.undelivered.unknown) == 3  # type: ignore[attr-defined]  # set on the exception


@pytest.mark.parametrize("how", ["flow", "alarm"])
def test_leaving_the_with_block_by_an_exception_stops_waiting_when_a_hold_begins(broker: Broker, how: str) -> None:
    producer = Producer(broker.url, routing_key="q")
    send_unconfirmed(producer, broker, b"")

    def stop_later() -> None:
        eventually(lambda: producer._protocol.waiters.settled)
        stop(broker, how)

    job = start(stop_later)
    with ends_within(2.0), pytest.raises(KeyError) as caught, producer:
        raise KeyError
    job.result()
    assert len(caught.value.undelivered.unknown) == 1  # type: ignore[attr-defined]  # as above


@pytest.mark.parametrize("paused", [False, True])
def test_leaving_the_with_block_by_an_exception_delivers_all_messages_even_of_a_paused_producer(
    broker: Broker, paused: bool
) -> None:
    producer = Producer(broker.url, routing_key="q", rate=10_000, rate_burst=1000)
    # Less than the window holds.
    for _ in range(500):
        producer.send(b"")
    if paused:
        producer.pause()
    with pytest.raises(KeyError) as caught, producer:
        raise KeyError
    assert broker.queue("q").depth == 500
    assert not hasattr(caught.value, "__notes__")


@dataclass(frozen=True)
class _Frozen(Exception):
    """An exception that takes no note and no attribute."""


@pytest.mark.parametrize("error", [_Frozen(), SystemExit(0), KeyError("mistake")])
def test_an_exception_in_the_with_block_is_never_replaced_and_lost_messages_are_logged(
    broker: Broker, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    producer = Producer(broker.url, routing_key="nowhere", name="orders")
    producer.send(b"")
    with pytest.raises(type(error)) as caught, producer:
        raise error
    assert caught.value is error
    assert flush_logs(20)
    (record,) = (record for record in caplog.records if record.name.startswith("qflow_client"))
    assert record.levelname == "ERROR"
    assert "orders" in record.getMessage()
    assert "1 admitted messages were not delivered" in record.getMessage()


def test_leaving_the_with_block_by_a_flow_control_timeout_does_not_wait_again(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q")
    hold(broker, producer)
    with takes(0.1), pytest.raises(FlowControlTimeout), producer:
        producer.send(b"", timeout=0.1)


def test_a_producer_can_be_closed_in_a_flow_callback(make_producer: Callable[..., Producer], broker: Broker) -> None:
    producer = make_producer()
    closed = threading.Event()

    def callback(event: FlowEvent) -> None:
        if event.kind is FlowEventKind.FLOWED and not producer.closed:
            producer.close()
            closed.set()

    producer.on_flow(callback)
    producer.send(b"")
    producer.pause()
    assert closed.wait(20)
    assert producer.closed
    assert bodies(broker) == [b""]


def test_a_producer_can_be_closed_in_on_delivery(make_producer: Callable[..., Producer], broker: Broker) -> None:
    told = Growing()
    closed = threading.Event()

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        producer.close()
        closed.set()

    producer = make_producer(on_delivery=on_delivery)
    receipts = []
    with suppress(ProducerClosed):
        for number in range(100):
            receipts.append(producer.send(b"%d" % number))
    assert closed.wait(20)
    # All that was admitted is told all the same.
    told.wait_for(lambda told: len(told) == len(receipts), "every receipt")
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}


@pytest.mark.parametrize("turn", range(5))
def test_a_producer_can_be_closed_by_several_threads_while_others_send(
    make_producer: Callable[..., Producer], broker: Broker, turn: int
) -> None:
    producer = make_producer()
    receipts: list[Receipt] = []

    def work() -> None:
        with suppress(ProducerClosed):
            while True:
                receipts.append(producer.send(b""))

    senders = [start(work) for _ in range(4)]
    broker.wait_until(lambda b: b.queue("q").published > 100)
    closers = [start(producer.close) for _ in range(3)]
    for job in closers + senders:
        job.result()
    wait_done(receipts)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert broker.queue("q").depth == len(receipts)


@pytest.mark.usefixtures("one_connection")
def test_closing_after_a_lost_connection_raises_messages_with_an_unknown_outcome(
    producer: Producer, broker: Broker
) -> None:
    receipts = send_unconfirmed(producer, broker, b"0", b"1", b"2")
    broker.drop_connections()
    wait_closed(producer)
    with takes(0.0), pytest.raises(UndeliveredMessages) as caught:
        producer.close()
    assert caught.value.receipts == tuple(receipts)
    producer.close()


@pytest.mark.usefixtures("one_connection")
def test_a_producer_closes_even_if_the_broker_ends_during_the_close(producer: Producer, broker: Broker) -> None:
    send_unconfirmed(producer, broker, b"")
    closing = start(producer.close, timeout=None)
    eventually(lambda: producer._protocol.waiters.settled)
    broker.drop_connections()
    assert isinstance(closing.wait(), UndeliveredMessages)


def test_a_close_reports_messages_that_a_stuck_io_thread_never_settles(broker: Broker) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    producer = Producer(broker.url, routing_key="q")

    def hang() -> None:
        stuck.set()
        go_on.wait(PATIENCE)

    producer._services.add_callback_threadsafe(hang)
    assert stuck.wait(PATIENCE)
    try:
        receipt = producer.send(b"lost")
        with pytest.raises(UndeliveredMessages) as caught:
            producer.close(timeout=0)
        assert caught.value.receipts == (receipt,)
        # The thread may have been writing it.
        assert [message.body for message in caught.value.unknown] == [b"lost"]
    finally:
        go_on.set()
    # The thread goes on where it was, and settles the message.
    assert receipt.wait(PATIENCE)
    assert receipt.outcome in (Outcome.FAILED, Outcome.UNKNOWN)
    broker.wait_until(lambda b: not b.connections())
    assert receipt.outcome is Outcome.UNKNOWN or not bodies(broker)


def test_the_waits_of_a_close_for_stuck_threads_end_within_a_second_after_its_timeout(
    broker: Broker, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer(broker.url, routing_key="q", outbox=path, on_delivery=lambda _receipt: None)
    waits: list[float] = []
    with monkeypatch.context() as patched:
        # As if no thread ended: the I/O thread, for which `close` waits twice, the callback thread and the writer.
        patched.setattr(threading.Thread, "join", lambda _thread, timeout: waits.append(timeout))
        producer.close(timeout=0)
    assert len(waits) == 4
    assert sum(waits) < 0.9
