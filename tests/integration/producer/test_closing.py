from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from qflow_client import (
    FlowControlTimeout,
    FlowEvent,
    FlowEventKind,
    Outcome,
    Producer,
    ProducerClosed,
    Receipt,
    UndeliveredMessages,
)
from qflow_client.broker import Broker

from .tools import Stopwatch, Wire, bodies, eventually, start, wait_held, wait_in_line


def test_leaving_with_flushes_and_says_good_bye(broker: Broker, wire: Wire) -> None:
    with Producer(broker.url, routing_key="q") as producer:
        receipts = [producer.send(b"%d" % number) for number in range(2000)]
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert broker.queue("q").depth == 2000
    assert producer.closed
    broker.wait_until(lambda b: not b.connections())
    assert wire.count("in", "Connection.Close") == 1


def test_close_is_idempotent_and_sends_are_refused_after_it(producer: Producer, broker: Broker) -> None:
    producer.send(b"1")
    producer.close()
    producer.close()
    producer.close(timeout=0)
    assert producer.closed
    for send in (producer.send, producer.send_nowait):
        with Stopwatch() as watch, pytest.raises(ProducerClosed) as caught:
            send(b"2")
        assert watch.kept(0.0)
        assert caught.value.message == b"2"
    with pytest.raises(ProducerClosed):
        producer.wait_unflowed()
    producer.flush()
    assert bodies(broker) == [b"1"]
    assert "closed" in repr(producer)
    # What it was remains to be seen.
    assert (producer.unsettled, producer.in_flight) == (0, 0)
    assert producer.flow_state.flowed
    assert producer.flow_state.closed == "the producer is closed"


def test_closing_with_failures_raises_once(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="nowhere")
    producer.send(b"")
    with pytest.raises(UndeliveredMessages):
        producer.close()
    producer.close()


def test_leaving_with_raises_what_was_not_delivered(broker: Broker) -> None:
    with pytest.raises(UndeliveredMessages, match="not delivered"), Producer(broker.url, routing_key="nowhere") as p:
        p.send(b"")
    assert p.closed


def test_close_keeps_its_deadline_while_confirms_are_missing(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    receipts = [producer.send(b"%d" % number) for number in range(3)]
    broker.wait_until(lambda b: b.queue("q").depth == 3)
    with Stopwatch() as watch, pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.3)
    assert watch.kept(0.3)
    assert caught.value.receipts == tuple(receipts)
    assert [message.body for message in caught.value.unknown] == [b"0", b"1", b"2"]
    assert caught.value.unsent == ()
    assert {receipt.outcome for receipt in receipts} == {Outcome.UNKNOWN}


@pytest.mark.parametrize("way", ["channel_flow", "connection_blocked"])
def test_close_keeps_its_deadline_while_flowed(producer: Producer, broker: Broker, way: str) -> None:
    broker.withhold_confirms()
    receipt = producer.send(b"written")
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    if way == "channel_flow":
        broker.flow(False)
    else:
        broker.block("alarm")
    wait_held(producer, way)
    waiting = start(producer.send, b"waits", timeout=None)
    wait_in_line(producer, 1)
    with Stopwatch() as watch, pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.3)
    assert watch.kept(0.3)
    assert caught.value.receipts == (receipt,)
    # It never was admitted, and says so itself.
    assert isinstance(waiting.wait(), ProducerClosed)
    assert bodies(broker) == [b"written"]


def test_close_waits_for_what_is_late(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    receipt = producer.send(b"")
    closing = start(producer.close, timeout=None)
    eventually(lambda: producer._protocol._flushes)
    with pytest.raises(ProducerClosed):
        producer.send(b"")
    assert closing.is_alive()
    broker.release_confirms()
    closing.result()
    assert receipt.outcome is Outcome.CONFIRMED


def test_close_lets_the_waiting_go_at_once(producer: Producer, broker: Broker) -> None:
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


def test_an_idle_producer_that_is_flowed_closes_at_once(producer: Producer, broker: Broker) -> None:
    broker.flow(False)
    wait_held(producer, "channel_flow")
    with Stopwatch() as watch:
        producer.close()
    assert watch.kept(0.0)


def test_leaving_by_an_exception_does_not_wait_for_holds_and_says_what_is_lost(broker: Broker) -> None:
    broker.withhold_confirms()
    producer = Producer(broker.url, routing_key="q")
    producer.send(b"1")
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    broker.flow(False)
    wait_held(producer, "channel_flow")
    with Stopwatch() as watch, pytest.raises(KeyError) as caught, producer:
        raise KeyError("the application's own")
    assert watch.kept(0.0)
    (note,) = caught.value.__notes__
    assert "qflow_client" in note
    assert "1 admitted messages were not delivered" in note
    undelivered = caught.value.undelivered  # type: ignore[attr-defined]  # put there for whoever looks
    assert [message.body for message in undelivered.unknown] == [b"1"]
    assert producer.closed


def test_leaving_by_an_exception_while_nothing_holds_delivers_everything(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q")
    for _ in range(1000):
        producer.send(b"")
    with pytest.raises(KeyError) as caught, producer:
        raise KeyError
    assert broker.queue("q").depth == 1000
    assert not hasattr(caught.value, "__notes__")


def test_leaving_by_the_timeout_of_a_send_is_no_second_wait(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q")
    broker.flow(False)
    wait_held(producer, "channel_flow")
    with Stopwatch() as watch, pytest.raises(FlowControlTimeout), producer:
        producer.send(b"", timeout=0.1)
    assert watch.kept(0.1)


def test_closing_from_a_flow_callback(make_producer: Callable[..., Producer], broker: Broker) -> None:
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


def test_closing_from_on_delivery(make_producer: Callable[..., Producer], broker: Broker) -> None:
    told: list[Receipt] = []
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
    eventually(lambda: len(told) == len(receipts))
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}


@pytest.mark.parametrize("turn", range(5))
def test_closing_from_several_threads_at_once_while_others_send(
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
    eventually(lambda: all(receipt.done for receipt in receipts))
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert broker.queue("q").depth == len(receipts)


def test_closing_after_the_connection_was_lost_raises_what_nobody_knows_of(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    receipts = [producer.send(b"%d" % number) for number in range(3)]
    broker.wait_until(lambda b: b.queue("q").depth == 3)
    broker.drop_connections()
    eventually(lambda: producer.closed)
    with Stopwatch() as watch, pytest.raises(UndeliveredMessages) as caught:
        producer.close()
    assert watch.kept(0.0)
    assert caught.value.receipts == tuple(receipts)
    producer.close()


def test_the_broker_goes_away_while_the_producer_closes(producer: Producer, broker: Broker) -> None:
    broker.withhold_confirms()
    producer.send(b"")
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    closing = start(producer.close, timeout=None)
    eventually(lambda: producer._protocol._flushes)
    broker.drop_connections()
    assert isinstance(closing.wait(), UndeliveredMessages)
