from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

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
    flow_manager,
)
from qflow_client.broker import Broker
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.logs import flush_logs
from tests.collecting import collect
from tests.effort import rounds

from .tools import (
    PATIENCE,
    Flows,
    Growing,
    bodies,
    ends_within,
    eventually,
    finish,
    hold,
    send_unconfirmed,
    start,
    takes,
    wait_in_line,
)

FLOWED, UNFLOWED = FlowEventKind.FLOWED, FlowEventKind.UNFLOWED
RAISED, LIFTED = FlowEventKind.HOLD_RAISED, FlowEventKind.HOLD_LIFTED


def test_flow_events_report_each_hold_with_reason_and_duration_in_order(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(name="orders")
    flows = Flows(producer)
    before = time.time()
    hold(broker, producer)
    hold(broker, producer, "connection_blocked")
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


def test_callbacks_of_a_producer_run_on_a_separate_thread(producer: Producer, broker: Broker) -> None:
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
    finish(jobs)
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


def test_a_flow_callback_may_call_any_method_of_the_producer(producer: Producer, broker: Broker) -> None:
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
            done.append(receipt.result(timeout=20))
            producer.flush(timeout=20)
            producer.close()
            done.append(producer.closed)

    producer.on_flow(callback)
    broker.flow(False)
    done.wait_for(lambda done: len(done) == 2, "both")
    assert list(done) == [Outcome.CONFIRMED, True]
    with pytest.raises(ProducerClosed):
        producer.send(b"")


def test_an_exception_in_a_flow_callback_is_logged_and_loses_no_event_and_no_message(
    producer: Producer, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def callback(event: FlowEvent) -> None:
        raise RuntimeError(f"mistake at {event.kind}")

    flows = Flows()
    producer.on_flow(callback)
    producer.on_flow(flows)
    with caplog.at_level(logging.ERROR, "qflow_client"):
        broker.flow(False)
        flows.wait_for(FLOWED)
        broker.flow(True)
        flows.wait_for(UNFLOWED)
        assert flush_logs(20)
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info and record.name == "qflow_client"]
    assert told == ["mistake at flowed", "mistake at unflowed"]
    assert "failed on FlowEvent(kind=<FlowEventKind.FLOWED: 'flowed'>" in caplog.text
    assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED
    producer.pause()
    flows.wait_for(FLOWED, 2)


def test_system_exit_in_a_flow_callback_loses_no_event_and_the_producer_can_still_be_closed(
    make_producer: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    """SystemExit in a callback ends an asyncio loop, but not a thread."""

    def leave(what: object) -> None:
        sys.exit("the end")

    producer = make_producer(on_delivery=leave)
    producer.on_flow(leave)
    with caplog.at_level(logging.ERROR, "qflow_client"):
        for _ in range(10):
            producer.send(b"")
        producer.pause()
        producer.close()
        assert flush_logs(20)
    said = [record.getMessage() for record in caplog.records]
    assert sum("on_delivery failed" in each for each in said) == 10
    assert sum("FlowEventKind.FLOWED" in each for each in said) == 1
    assert producer.closed


def test_a_slow_flow_callback_delays_no_sender(producer: Producer, broker: Broker) -> None:
    go_on = threading.Event()
    producer.on_flow(lambda _event: go_on.wait(20))
    broker.flow(False)
    # No event tells of it now.
    eventually(lambda: producer.flow_state.flowed)
    broker.flow(True)
    assert producer.wait_unflowed(timeout=20)
    assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED
    go_on.set()


def test_two_subscriptions_of_one_flow_callback_end_independently(producer: Producer, broker: Broker) -> None:
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
    hold(broker, producer)
    broker.flow(True)
    assert producer.wait_unflowed(timeout=20)
    producer.close()
    seen = job.result()
    assert [event.kind for event in seen][:2] == [FLOWED, UNFLOWED]
    assert list(other) == seen
    # It has ended.
    assert list(producer.flow_events()) == []


def test_an_abandoned_iterator_over_flow_events_leaves_no_state(producer: Producer) -> None:
    producer.pause()
    events, never_begun = producer.flow_events(), producer.flow_events()
    producer.resume()
    for event in events:
        assert event.kind is UNFLOWED
        break
    assert len(producer._engine.listeners.iterators) == 2
    del events, never_begun
    collect()
    assert len(producer._engine.listeners.iterators) == 0


def test_holds_that_begin_while_a_close_waits_for_confirms_are_reported_as_flow_events(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer()
    events = producer.flow_events()
    broker.withhold_confirms()
    producer.send(b"")
    job = start(producer.close, 20)
    eventually(lambda: producer.closed)
    broker.flow(False)
    flowed = next(events)
    state = producer.flow_state
    broker.flow(True)
    unflowed = next(events)
    broker.release_confirms()
    job.result()
    assert [str(flowed.kind), str(unflowed.kind)] == ["flowed", "unflowed"]
    assert (state.flowed, state.times_flowed) == (True, 1)
    assert list(events) == []


@pytest.fixture
def add_handler(stack: ExitStack) -> Callable[[Callable[[logging.LogRecord], Any]], None]:
    """Has every log record of ours at least as loud as INFO handled by a function."""

    def add(handle: Callable[[logging.LogRecord], Any]) -> None:
        # Do not pass on the records of earlier tests.
        assert flush_logs(20)
        logger = logging.getLogger("qflow_client")
        handler = logging.Handler(logging.INFO)
        handler.handle = handle  # type: ignore[assignment,method-assign]
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        stack.callback(logger.setLevel, before)
        stack.callback(logger.removeHandler, handler)
        stack.callback(flush_logs, 20)

    return add


AddHandler = Callable[[Callable[[logging.LogRecord], Any]], None]


def test_a_log_handler_may_send_with_the_producer_that_logs(
    producer: Producer, broker: Broker, add_handler: AddHandler
) -> None:
    def ship(record: logging.LogRecord) -> None:
        try:
            producer.send(record.getMessage(), timeout=0.01)
        except FlowControlTimeout:
            unsent.append(record.getMessage())

    unsent = Growing()
    add_handler(ship)
    producer.pause("stock-taking")
    unsent.wait(1)
    producer.resume()
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    # The I/O thread has something to say too.
    broker.flow(False)
    unsent.wait(2)
    broker.flow(True)
    broker.wait_until(lambda b: b.queue("q").depth == 2)
    assert ["hold lifted after" in body.decode() for body in bodies(broker)] == [True, True]
    assert [text.split(": ", 1)[1] for text in unsent] == [
        "blocked (flowed): paused (stock-taking)",
        "blocked (flowed): channel_flow",
    ]


def test_a_log_handler_that_raises_an_error_affects_only_the_log(
    producer: Producer, broker: Broker, add_handler: AddHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: logging.LogRecord) -> None:
        # The worst there is: pika takes an OSError for the socket's.
        raise BrokenPipeError(f"the log host is gone; lost: {record.getMessage()}")

    add_handler(fail)
    hold(broker, producer)
    producer.pause("stock-taking")
    broker.flow(True)
    producer.resume()
    assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED
    assert flush_logs(20)
    said = capsys.readouterr().err
    assert said.count("BrokenPipeError: the log host is gone") == 4
    assert "blocked (flowed): paused (stock-taking)" in said


def test_a_log_handler_that_blocks_delays_no_sender(
    make_producer: Callable[..., Producer], broker: Broker, add_handler: AddHandler
) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def handle(_record: logging.LogRecord) -> bool:
        stuck.set()
        return go_on.wait(20)

    told = Growing()
    producer = make_producer(on_delivery=told.append)
    add_handler(handle)
    broker.flow(False)
    assert stuck.wait(20)
    # A stuck log handler does not block the manager,
    assert flow_manager.stop_all("stock-taking") == 1
    assert flow_manager.start_all() == 1
    # the I/O thread, the senders or the callbacks.
    broker.flow(True)
    producer.send(b"").result(timeout=20)
    told.wait(1)
    hold(broker, producer)
    with takes(0.1), pytest.raises(FlowControlTimeout):
        producer.send(b"", timeout=0.1)
    assert not go_on.is_set()
    go_on.set()


def test_on_delivery_gets_every_receipt_exactly_once(make_producer: Callable[..., Producer], broker: Broker) -> None:
    told: list[Receipt] = []
    threads = set()

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        threads.add(threading.current_thread().name)
        assert receipt.done

    producer = make_producer(on_delivery=on_delivery, on_refused="fail")
    count = rounds(500, least=100)
    jobs = [start(lambda: [producer.send(b"") for _ in range(count)]) for _ in range(4)]
    receipts = [receipt for job in jobs for receipt in job.result()]
    returned = producer.send(b"", routing_key="nowhere")
    assert returned.wait(timeout=20)
    broker.nack_publishes()
    nacked = producer.send(b"")
    # Failures have been told, and do not come up again.
    producer.close()
    assert len(told) == len(set(map(id, told))) == 4 * count + 2
    assert set(map(id, told)) == set(map(id, [*receipts, returned, nacked]))
    assert (returned.outcome, nacked.outcome) == (Outcome.RETURNED, Outcome.NACKED)
    assert len(threads) == 1
    assert threads.isdisjoint({"MainThread"})


@pytest.mark.usefixtures("one_connection")
def test_on_delivery_gets_the_receipts_of_messages_lost_with_the_connection(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    told = Growing()
    producer = make_producer(on_delivery=told.append)
    receipts = send_unconfirmed(producer, broker, *[b""] * 5)
    broker.drop_connections()
    told.wait_for(lambda told: told == receipts, "all five, in order")
    assert {receipt.outcome for receipt in told} == {Outcome.UNKNOWN}
    producer.close()
    assert len(told) == 5


def test_an_exception_in_on_delivery_is_logged_and_loses_no_receipt(
    make_producer: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    told = []

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        raise RuntimeError("mistake")

    producer = make_producer(on_delivery=on_delivery)
    with caplog.at_level(logging.ERROR, "qflow_client"):
        for _ in range(10):
            producer.send(b"")
        producer.close()
        assert flush_logs(20)
    assert len(told) == 10
    assert sum("on_delivery" in record.getMessage() for record in caplog.records) == 10


def test_a_callback_may_wait_for_a_producer_that_is_held_because_callbacks_are_slow(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    waited = Growing()

    def on_delivery(_receipt: Receipt) -> None:
        eventually(lambda: finished.is_set() or "on_delivery" in {hold.source for hold in producer.flow_state.holds})
        waited.append(producer.wait_unflowed(timeout=20))

    finished = threading.Event()
    producer = make_producer(capacity=2, on_delivery=on_delivery)
    for _ in range(40):
        producer.send(b"", timeout=20)
    finished.set()
    waited.wait(40)
    assert list(waited) == [True] * 40


def test_on_delivery_may_send_messages_with_the_producer(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    sent: list[Receipt] = []

    def on_delivery(receipt: Receipt) -> None:
        if len(sent) < 50:
            sent.append(producer.send(b"%d" % len(sent), timeout=20))

    producer = make_producer(on_delivery=on_delivery, capacity=1)
    producer.send(b"first")
    broker.wait_until(lambda b: b.queue("q").depth == 51)
    producer.flush(timeout=20)


def test_on_delivery_may_send_even_if_other_threads_send_faster_than_receipts_are_reported(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    sent: list[Receipt] = []
    told: list[Receipt] = []
    go_on = threading.Event()

    def on_delivery(receipt: Receipt) -> None:
        go_on.wait(20)
        told.append(receipt)
        if len(sent) < 50:
            sent.append(producer.send(b"from a callback", timeout=20))

    producer = make_producer(on_delivery=on_delivery, capacity=4)
    jobs = [start(lambda: [producer.send(b"", timeout=None) for _ in range(100)]) for _ in range(3)]
    wait_held_by_callbacks(producer)
    wait_in_line(producer, 3)
    go_on.set()
    finish(jobs)
    eventually(lambda: len(told) == 350)
    assert broker.queue("q").depth == 350
    assert producer.wait_unflowed(PATIENCE)
    assert not producer.flow_state.flowed


def wait_held_by_callbacks(producer: Producer) -> None:
    eventually(lambda: "on_delivery" in [hold.source for hold in producer.flow_state.holds])


def test_receipts_that_wait_for_on_delivery_are_bounded(make_producer: Callable[..., Producer], broker: Broker) -> None:
    go_on = threading.Event()
    told: list[Receipt] = []

    def on_delivery(receipt: Receipt) -> None:
        go_on.wait(20)
        told.append(receipt)

    producer = make_producer(on_delivery=on_delivery, capacity=10)
    job = start(lambda: [producer.send(b"", timeout=None) for _ in range(100)])
    wait_held_by_callbacks(producer)
    wait_in_line(producer, 1)

    def count(protocol: ProducerProtocol) -> int:
        return protocol.parts.unreported.count + len(protocol.reports.settled or ()) + protocol.unsettled

    # In a step, so that no receipt is counted twice or not at all.
    assert 10 < producer._engine.step(count) <= 20
    with pytest.raises(FlowControlTimeout, match="callbacks are slower than confirms"):
        producer.send(b"", timeout=0)
    go_on.set()
    job.result()
    producer.close()
    assert len(told) == 100


@pytest.mark.parametrize("raises", [True, False])
def test_a_send_in_on_delivery_with_timeout_0_raises_immediately(
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
                found.append((type(error), str(error).rpartition("; ")[2]))
            try:
                producer.send(b"no", timeout=0)
            except ProducerFlowed as error:
                found.append((type(error), str(error).rpartition("; ")[2]))

    producer = make_producer(on_delivery=on_delivery, when_flowed="raise" if raises else "block")
    producer.send(b"1")
    found.wait_for(lambda found: len(found) == 3, "both refusals")
    blocks = "set when_flowed='block' to wait"
    assert list(found)[1:] == [
        (ProducerFlowed, f"call send() and {blocks}" if raises else "call send() to wait"),
        (ProducerFlowed, blocks) if raises else (FlowControlTimeout, "set a longer timeout to wait"),
    ]
    producer.close()
    assert bodies(broker) == [b"1", b"2"]


def test_close_raises_failures_that_were_not_reported_to_on_delivery_in_time(
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
    with ends_within(1.3), pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.3)
    assert caught.value.receipts == tuple(late), "the first was told, and that is enough"
    go_on.set()
    told.wait_for(lambda told: len(told) == 5, "all the same")


def test_close_waits_for_slow_callbacks(make_producer: Callable[..., Producer]) -> None:
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
    link: Any = producer._engine.link
    eventually(lambda: not link._thread.is_alive())
    assert closing.is_alive()
    go_on.set()
    closing.result()
    assert len(told) == 5


def wait_passed_on(producer: Producer) -> None:
    """Wait until all events so far wait for their readers. The I/O thread passes them on, in a step."""
    eventually(lambda: not producer._protocol.reports.events)
    # A step of its own comes after that one.
    assert producer.flow_state is not None


def test_E6_flow_events_that_an_iterator_has_not_read_are_bounded_and_the_oldest_are_dropped(
    make_producer: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_producer(max_flow_events=10, name="orders")
    events, unread = producer.flow_events(), producer.flow_events()
    for number in range(50):
        producer.pause(str(number))
        producer.resume()
    wait_passed_on(producer)
    first = next(events)
    assert first.hold is not None
    assert first.hold.detail == "45"
    assert flush_logs(PATIENCE)
    text = "orders: 90 flow events were dropped, because flow_events() is not read fast enough; max_flow_events=10"
    assert caplog.text.count(text) == 1
    producer.close()
    seen = list(events)
    assert [event.hold.detail for event in seen if event.hold and event.kind is FLOWED] == ["46", "47", "48", "49"]
    assert seen[-1].kind is UNFLOWED
    assert len(seen) == 9
    # Of an iterator that was never read, the end of the producer tells.
    assert flush_logs(PATIENCE)
    assert caplog.text.count("90 flow events were dropped") == 2
    assert len(list(unread)) == 10
    assert list(unread) == []


def test_E6_flow_events_for_a_slow_callback_are_bounded_and_the_oldest_are_dropped(
    make_producer: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_producer(max_flow_events=10, name="orders")
    slow, quick = Growing(), Growing()
    go_on = threading.Event()

    def callback(event: FlowEvent) -> None:
        slow.append(event)
        go_on.wait(PATIENCE)

    producer.on_flow(callback)
    producer.on_flow(quick.append)
    producer.pause("first")
    slow.wait(1)
    for number in range(50):
        producer.resume()
        producer.pause(str(number))
    wait_passed_on(producer)
    assert producer._engine.dispatcher._calls.qsize() <= 21
    go_on.set()
    for told in (slow, quick):
        told.wait_for(lambda events: events and events[-1].hold.detail == "49", "the last event")
    details = [event.hold.detail for event in slow if event.kind is FLOWED]
    assert details == ["first", "45", "46", "47", "48", "49"]
    assert flush_logs(PATIENCE)
    assert caplog.text.count("orders: 90 flow events were dropped, because callback <function") == 1
    assert "callback_are_bounded" in caplog.text
    assert caplog.text.count("flow events were dropped") == 2, "each callback has its own"
