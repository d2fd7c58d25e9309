from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from qflow_client import (
    FlowControlTimeout,
    FlowEvent,
    FlowEventKind,
    Outcome,
    Producer,
    ProducerClosed,
    ProducerFlowed,
    Receipt,
    UndeliveredMessages,
)
from qflow_client.broker import Broker

from .tools import (
    Flows,
    Growing,
    Stopwatch,
    bodies,
    eventually,
    start,
    wait_closed,
    wait_held,
    wait_in_line,
)

FLOWED, UNFLOWED = FlowEventKind.FLOWED, FlowEventKind.UNFLOWED
RAISED, LIFTED = FlowEventKind.HOLD_RAISED, FlowEventKind.HOLD_LIFTED


def test_events_tell_what_why_and_for_how_long_in_order(make_producer: Callable[..., Producer], broker: Broker) -> None:
    producer = make_producer(name="orders")
    flows = Flows()
    producer.on_flow(flows)
    before = time.time()
    broker.flow(False)
    wait_held(producer, "channel_flow")
    broker.block("low on memory")
    wait_held(producer, "connection_blocked")
    broker.flow(True)
    flows.wait_for(LIFTED)
    broker.unblock()
    flows.wait_for(UNFLOWED)
    assert flows.kinds == [FLOWED, RAISED, LIFTED, UNFLOWED]
    assert [event.hold.kind for event in flows.events if event.hold] == [
        "channel_flow",
        "connection_blocked",
        "channel_flow",
        "connection_blocked",
    ]
    assert [[hold.kind for hold in event.holds] for event in flows.events] == [
        ["channel_flow"],
        ["channel_flow", "connection_blocked"],
        ["connection_blocked"],
        [],
    ]
    first, _, _, last = flows.events
    assert first.producer == "orders"
    assert before - 0.1 <= first.at <= last.at <= time.time() + 0.1
    assert last.hold is not None
    assert last.hold.detail == "low on memory"
    assert last.seconds == pytest.approx(last.at - last.since, abs=1e-3)
    assert [event.flowed for event in flows.events] == [True, True, True, False]
    for word in ("orders", "unflowed", "connection_blocked", "low on memory"):
        assert word in str(last)


def test_callbacks_run_on_one_thread_of_their_own(producer: Producer, broker: Broker) -> None:
    one, two = Flows(), Flows()
    producer.on_flow(one)
    producer.on_flow(two)
    for _ in range(20):
        broker.flow(False)
        broker.flow(True)

    # From two threads of the application besides.
    def pause_and_resume() -> None:
        for _ in range(50):
            producer.pause()
            producer.resume()

    jobs = [start(pause_and_resume) for _ in range(2)]
    for job in jobs:
        job.result()
    eventually(lambda: one.kinds[-1:] == [UNFLOWED] and not producer.flow_state.flowed)
    eventually(lambda: two.events == one.events)
    assert one.threads == two.threads
    assert len(one.threads) == 1
    assert one.threads.isdisjoint({"MainThread", *(job.name for job in jobs)})
    assert not any(name.startswith("qflow-io") for name in one.threads)
    # What each says agrees with what the one before it said.
    held = 0
    for event in one.events:
        held += 1 if event.kind in (FLOWED, RAISED) else -1
        assert held == len(event.holds)


def test_a_callback_may_call_any_method(producer: Producer, broker: Broker) -> None:
    done = Growing()

    def callback(event: FlowEvent) -> None:
        if event.kind is FLOWED:
            with pytest.raises(FlowControlTimeout):
                producer.send(b"no", timeout=0.01)
            assert producer.flow_state.flowed
            assert not producer.wait_unflowed(timeout=0.01)
            producer.pause("again")
            producer.resume()
            producer.capacity = 10
            assert producer.available == 10
            producer.on_flow(lambda _event: None)()
            broker.flow(True)
        elif event.kind is UNFLOWED:
            receipt = producer.send(b"yes")
            done.append(receipt.result(timeout=10))
            producer.flush(timeout=10)
            producer.close()
            done.append(producer.closed)

    producer.on_flow(callback)
    broker.flow(False)
    done.wait_for(lambda done: len(done) == 2, "both")
    assert list(done) == [Outcome.CONFIRMED, True]
    with pytest.raises(ProducerClosed):
        producer.send(b"")


def test_an_exception_in_a_callback_is_logged_and_costs_nothing(
    producer: Producer, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def callback(event: FlowEvent) -> None:
        if event.kind is FLOWED:
            raise RuntimeError(f"mistake at {event.kind}")
        sys.exit(f"the end at {event.kind}")

    flows = Flows()
    producer.on_flow(callback)
    producer.on_flow(flows)
    with caplog.at_level(logging.ERROR, "qflow_client"):
        broker.flow(False)
        flows.wait_for(FLOWED)
        broker.flow(True)
        flows.wait_for(UNFLOWED)
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert told == ["mistake at flowed", "the end at unflowed"]
    assert producer.send(b"").result(timeout=10) is Outcome.CONFIRMED
    producer.pause()
    flows.wait_for(FLOWED, 2)


def test_a_callback_that_takes_its_time_holds_nobody_up(producer: Producer, broker: Broker) -> None:
    go_on = threading.Event()
    producer.on_flow(lambda _event: go_on.wait(20))
    broker.flow(False)
    # No event tells of it now.
    eventually(lambda: producer.flow_state.flowed)
    broker.flow(True)
    assert producer.wait_unflowed(timeout=10)
    assert producer.send(b"").result(timeout=10) is Outcome.CONFIRMED
    go_on.set()


def test_who_unsubscribed_hears_no_more(producer: Producer, broker: Broker) -> None:
    gone, stays = Flows(), Flows()
    unsubscribe = producer.on_flow(gone)
    producer.on_flow(stays)
    producer.pause()
    stays.wait_for(FLOWED)
    heard = gone.kinds
    unsubscribe()
    unsubscribe()
    producer.resume()
    producer.pause()
    stays.wait_for(FLOWED, 2)
    assert gone.kinds == heard == [FLOWED]


def test_each_of_two_subscriptions_of_one_callback_ends_by_itself(producer: Producer, broker: Broker) -> None:
    flows = Flows()
    one, two = producer.on_flow(flows), producer.on_flow(flows)
    producer.pause()
    flows.wait_for(FLOWED, 2)
    one()
    one()
    producer.resume()
    flows.wait_for(UNFLOWED)
    two()
    producer.pause()
    last = Flows()
    producer.on_flow(last)
    producer.resume()
    last.wait_for(UNFLOWED)
    assert flows.kinds == [FLOWED, FLOWED, UNFLOWED]


def test_flow_events_iterates_until_the_producer_is_closed(producer: Producer, broker: Broker) -> None:
    events, other = producer.flow_events(), producer.flow_events()
    job = start(list, events)
    broker.flow(False)
    wait_held(producer, "channel_flow")
    broker.flow(True)
    assert producer.wait_unflowed(timeout=10)
    producer.close()
    seen = job.result()
    assert [event.kind for event in seen][:2] == [FLOWED, UNFLOWED]
    assert list(other) == seen
    # It has ended.
    assert list(producer.flow_events()) == []


def test_an_iterator_that_is_left_leaves_nothing_behind(producer: Producer) -> None:
    producer.pause()
    events, never_begun = producer.flow_events(), producer.flow_events()
    producer.resume()
    for event in events:
        assert event.kind is UNFLOWED
        break
    assert len(producer._queues) == 2
    del events, never_begun
    gc.collect()
    assert len(producer._queues) == 0


def test_flow_events_ends_when_the_connection_is_lost_and_the_producer_closed(
    producer: Producer, broker: Broker
) -> None:
    job = start(list, producer.flow_events())
    broker.drop_connections()
    wait_closed(producer)
    producer.close()
    kinds = [event.kind for event in job.result()]
    assert FLOWED in kinds
    assert UNFLOWED not in kinds


def test_a_clean_close_is_no_flow_event(producer: Producer, broker: Broker) -> None:
    events = producer.flow_events()
    producer.send(b"")
    producer.close()
    assert list(events) == []
    assert producer.flow_state.times_flowed == 0


def test_flow_state_counts(producer: Producer, broker: Broker) -> None:
    flowed = producer.flow_state.times_flowed
    for turn in range(1, 4):
        broker.flow(False)
        wait_held(producer, "channel_flow")
        state = producer.flow_state
        assert state.flowed
        assert state.since is not None
        assert abs(time.time() - state.since) < 5
        assert state.times_flowed == flowed + turn
        broker.flow(True)
        assert producer.wait_unflowed(timeout=10)
    assert not producer.flow_state.flowed
    assert producer.flow_state.since is None
    assert producer.flow_state.seconds_flowed["channel_flow"] > 0


def test_a_log_handler_may_send_by_the_producer_that_logs(producer: Producer, broker: Broker, stack: ExitStack) -> None:
    class Ships(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                producer.send_nowait(record.getMessage())
            except ProducerFlowed:
                unsent.append(record.getMessage())

    unsent = Growing()
    logger = logging.getLogger("qflow_client")
    handler = Ships(logging.INFO)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    stack.callback(logger.setLevel, before)
    stack.callback(logger.removeHandler, handler)
    job = start(producer.pause, "stock-taking")
    job.result()
    start(producer.resume).result()
    # On the I/O thread too.
    broker.flow(False)
    wait_held(producer, "channel_flow")
    broker.flow(True)
    broker.wait_until(lambda b: b.queue("q").depth == 2)
    assert ["no longer held" in body.decode() for body in bodies(broker)] == [True, True]
    assert [text.split(": ", 1)[1] for text in unsent] == ["held: paused (stock-taking)", "held: channel_flow"]


def test_a_log_that_takes_no_more_holds_up_nobody_who_does_not_log(
    producer: Producer, stack: ExitStack, broker: Broker
) -> None:
    class Stuck(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            stuck.set()
            return go_on.wait(20)

    stuck, go_on = threading.Event(), threading.Event()
    logger = logging.getLogger("qflow_client")
    handler = Stuck(logging.INFO)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    stack.callback(logger.setLevel, before)
    stack.callback(logger.removeHandler, handler)
    job = start(producer.pause)
    assert stuck.wait(20)
    with Stopwatch() as watch, pytest.raises(FlowControlTimeout):
        producer.send(b"", timeout=0.1)
    assert watch.kept(0.1)
    assert job.is_alive()
    go_on.set()
    job.result()


def test_on_delivery_gets_every_receipt_once(make_producer: Callable[..., Producer], broker: Broker) -> None:
    told: list[Receipt] = []
    threads = set()

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        threads.add(threading.current_thread().name)
        assert receipt.done

    producer = make_producer(on_delivery=on_delivery)
    jobs = [start(lambda: [producer.send(b"") for _ in range(500)]) for _ in range(4)]
    receipts = [receipt for job in jobs for receipt in job.result()]
    returned = producer.send(b"", routing_key="nowhere")
    assert returned.wait(timeout=10)
    broker.nack_publishes()
    nacked = producer.send(b"")
    # Failures have been told, and do not come up again.
    producer.close()
    assert len(told) == len(set(map(id, told))) == 2002
    assert set(map(id, told)) == set(map(id, [*receipts, returned, nacked]))
    assert (returned.outcome, nacked.outcome) == (Outcome.RETURNED, Outcome.NACKED)
    assert len(threads) == 1
    assert threads.isdisjoint({"MainThread"})


def test_on_delivery_is_told_what_was_lost_with_the_connection(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    told = Growing()
    producer = make_producer(on_delivery=told.append)
    broker.withhold_confirms()
    receipts = [producer.send(b"") for _ in range(5)]
    broker.wait_until(lambda b: b.queue("q").depth == 5)
    broker.drop_connections()
    told.wait_for(lambda told: told == receipts, "all five, in order")
    assert {receipt.outcome for receipt in told} == {Outcome.UNKNOWN}
    producer.close()
    assert len(told) == 5


def test_an_exception_in_on_delivery_is_logged_and_costs_nothing(
    make_producer: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    told = []

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        raise RuntimeError("mistake") if len(told) % 2 else SystemExit("the end")

    producer = make_producer(on_delivery=on_delivery)
    with caplog.at_level(logging.ERROR, "qflow_client"):
        for _ in range(10):
            producer.send(b"")
        producer.close()
    assert len(told) == 10
    assert sum("on_delivery" in record.getMessage() for record in caplog.records) == 10


def test_on_delivery_may_send_on(make_producer: Callable[..., Producer], broker: Broker) -> None:
    sent: list[Receipt] = []

    def on_delivery(receipt: Receipt) -> None:
        if len(sent) < 50:
            sent.append(producer.send(b"%d" % len(sent), timeout=5))

    producer = make_producer(on_delivery=on_delivery, capacity=1)
    producer.send(b"first")
    broker.wait_until(lambda b: b.queue("q").depth == 51)
    producer.flush(timeout=10)


def test_on_delivery_may_send_on_while_others_send_faster_than_it_is_told(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    sent: list[Receipt] = []
    told: list[Receipt] = []
    go_on = threading.Event()

    def on_delivery(receipt: Receipt) -> None:
        go_on.wait(20)
        told.append(receipt)
        if len(sent) < 50:
            sent.append(producer.send(b"from a callback", timeout=10))

    producer = make_producer(on_delivery=on_delivery, capacity=4)
    jobs = [start(lambda: [producer.send(b"", timeout=None) for _ in range(100)]) for _ in range(3)]
    wait_held_by_callbacks(producer)
    wait_in_line(producer, 3)
    go_on.set()
    for job in jobs:
        job.result()
    eventually(lambda: len(told) == 350)
    assert broker.queue("q").depth == 350
    assert not producer.flow_state.flowed


def wait_held_by_callbacks(producer: Producer) -> None:
    eventually(lambda: "on_delivery" in [hold.source for hold in producer.flow_state.holds])


def test_what_on_delivery_is_not_told_of_yet_is_bounded(make_producer: Callable[..., Producer], broker: Broker) -> None:
    go_on = threading.Event()
    told: list[Receipt] = []

    def on_delivery(receipt: Receipt) -> None:
        go_on.wait(20)
        told.append(receipt)

    producer = make_producer(on_delivery=on_delivery, capacity=10)
    job = start(lambda: [producer.send(b"", timeout=None) for _ in range(100)])
    wait_held_by_callbacks(producer)
    wait_in_line(producer, 1)
    assert 10 < producer._protocol._untold + producer.unsettled <= 20
    with pytest.raises(FlowControlTimeout, match="callbacks are slower than confirms"):
        producer.send(b"", timeout=0)
    go_on.set()
    job.result()
    producer.close()
    assert len(told) == 100


@pytest.mark.parametrize("raises", [True, False])
def test_a_send_of_on_delivery_that_must_not_wait_does_not(
    make_producer: Callable[..., Producer], broker: Broker, raises: bool
) -> None:
    found = Growing()

    def on_delivery(receipt: Receipt) -> None:
        if not found:
            found.append(producer.send_nowait(b"2"))
            producer.pause()
            try:
                producer.send_nowait(b"no")
            except ProducerFlowed as error:
                found.append(type(error))
            try:
                producer.send(b"no", timeout=0)
            except ProducerFlowed as error:
                found.append(type(error))

    producer = make_producer(on_delivery=on_delivery, when_flowed="raise" if raises else "block")
    producer.send(b"1")
    found.wait_for(lambda found: len(found) == 3, "both refusals")
    assert list(found)[1:] == [ProducerFlowed, ProducerFlowed if raises else FlowControlTimeout]
    producer.close()
    assert bodies(broker) == [b"1", b"2"]


def test_failures_that_on_delivery_is_not_told_of_in_time_come_up_in_close(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    go_on, begun = threading.Event(), threading.Event()
    told = Growing()

    def on_delivery(receipt: Receipt) -> None:
        if told:
            begun.set()
            go_on.wait(20)
        told.append(receipt)

    producer = make_producer(on_delivery=on_delivery)
    _first, *late = [producer.send(b"%d" % number, routing_key="nowhere") for number in range(5)]
    assert begun.wait(20)
    for receipt in late:
        assert receipt.wait(20)
    with Stopwatch() as watch, pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.3)
    assert watch.seconds < 1.3
    assert caught.value.receipts == tuple(late), "the first was told, and that is enough"
    go_on.set()
    told.wait_for(lambda told: len(told) == 5, "all the same")


def test_close_waits_for_callbacks_that_take_their_time(make_producer: Callable[..., Producer]) -> None:
    told = []
    go_on = threading.Event()

    def on_delivery(receipt: Receipt) -> None:
        go_on.wait(20)
        told.append(receipt)

    producer = make_producer(on_delivery=on_delivery)
    for _ in range(5):
        producer.send(b"", routing_key="nowhere")
    closing = start(producer.close, timeout=20)
    # The connection has ended, so only the callbacks keep it.
    eventually(lambda: not producer._link._thread.is_alive())
    assert closing.is_alive()
    go_on.set()
    closing.result()
    assert len(told) == 5
