"""E2: a thread holds a lock of the application and calls a producer, while a step of that producer waits for the lock.

An example: garbage collection runs during a step, and a finalizer logs a record. Another thread holds the lock of the
log handler, because it sends an earlier record with the same producer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qflow_client import AsyncProducer, FlowControlTimeout, NestedCall, Producer, UndeliveredMessages, guard
from qflow_client.broker import Broker
from qflow_client.core.admission import Admission
from qflow_client.logs import flush_logs
from qflow_client.sync.engine import Waiter

from .tools import PATIENCE, bodies, eventually, start, start_send


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is the same, however long the wait."""
    monkeypatch.setattr(guard, "PATIENCE", 0.05)


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A call that waits goes on once this is set, and not before, whatever the time."""
    event, wait_until = threading.Event(), Waiter.wait_until

    def wait(waiter: Waiter, deadline: float) -> None:
        if event.is_set():
            wait_until(waiter, deadline)
        else:
            assert event.wait(PATIENCE)

    monkeypatch.setattr(Waiter, "wait_until", wait)
    return event


@pytest.fixture
def full(broker: Broker) -> Iterator[Producer]:
    """A producer whose window is full, because the broker does not confirm its message ``admitted``."""
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        broker.withhold_confirms()
        producer.send(b"admitted")
        yield producer


class Handler:
    """A log handler: its lock is taken for each record."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @contextmanager
    def logs_in_a_step_of(self, producer: Producer | AsyncProducer) -> Iterator[None]:
        """Have a thread wait for the lock inside a step, until the caller releases it; the caller gets it before."""
        steps = producer._engine.lock
        # The caller may drop it.
        del producer
        inside = threading.Event()

        def step() -> None:
            inside.set()
            with self.lock:
                pass

        thread = threading.Thread(target=lambda: steps.take(step))
        with self.lock:
            thread.start()
            assert inside.wait(PATIENCE)
            yield
        thread.join(PATIENCE)
        assert not thread.is_alive()


REFUSED: dict[str, Callable[[Producer], object]] = {
    "send": lambda producer: producer.send(b"refused", timeout=0.05),
    "send_nowait": lambda producer: producer.send_nowait(b"refused"),
    "flush": lambda producer: producer.flush(timeout=0.05),
    "wait_unflowed": lambda producer: producer.wait_unflowed(timeout=0.05),
    "close": lambda producer: producer.close(timeout=0.05),
}


@pytest.mark.parametrize("call", REFUSED)
def test_E2_a_call_in_a_log_handler_that_would_deadlock_with_the_producer_raises_after_a_limited_time(
    broker: Broker, full: Producer, call: str
) -> None:
    with (
        Handler().logs_in_a_step_of(full),
        pytest.raises(NestedCall, match="holds a lock that a producer waits for") as raised,
    ):
        REFUSED[call](full)
    if "send" in call:
        assert (raised.value.message, raised.value.exchange, raised.value.routing_key) == (b"refused", "", "q")
    broker.release_confirms()
    full.close(timeout=PATIENCE)
    # What was refused was not sent, and what was admitted was.
    assert bodies(broker) == [b"admitted"]


def test_E2_a_call_waits_only_for_a_limited_time_for_a_producer_call_on_another_event_loop(broker: Broker) -> None:
    async def main() -> None:
        async with AsyncProducer(broker.url, routing_key="q", capacity=1) as producer:
            broker.withhold_confirms()
            await producer.send(b"admitted")
            with Handler().logs_in_a_step_of(producer):
                with pytest.raises(NestedCall, match="holds a lock that a producer waits for") as raised:
                    producer.send_nowait(b"refused")
                assert raised.value.message == b"refused"
                producer.pause()
                assert not producer.flow_state.flowed
            broker.release_confirms()
            await producer.flush(timeout=PATIENCE)
            assert producer.flow_state.flowed

    asyncio.run(main())
    assert bodies(broker) == [b"admitted"]


def test_E2_an_exception_of_a_signal_handler_is_not_reported_as_a_message_that_was_not_sent(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Admission.send

    def interrupted(*arguments: Any) -> Any:
        send(*arguments)
        raise NestedCall("what the handler called")

    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        monkeypatch.setattr(Admission, "send", interrupted)
        with pytest.raises(NestedCall, match="what the handler called") as raised:
            producer._engine.admit(b"sent", "", "q")
        assert raised.value.message is None
    assert bodies(broker) == [b"sent"]


def test_E2_calls_that_are_postponed_because_the_producer_is_busy_keep_their_order(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        with Handler().logs_in_a_step_of(producer):
            producer.capacity = 2
            producer.pause()
            producer.capacity = 3
            producer.resume()
        producer.send_many([b"1", b"2", b"3"], timeout=PATIENCE)
        assert producer.capacity == 3


@pytest.mark.parametrize("call", ["pause", "capacity", "on_flow"])
def test_E2_a_call_without_a_result_is_postponed_while_the_producer_is_busy_and_then_done(
    broker: Broker, call: str
) -> None:
    told = threading.Event()
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        with Handler().logs_in_a_step_of(producer):
            if call == "pause":
                producer.pause()
            elif call == "capacity":
                producer.capacity = 2
            else:
                producer.on_flow(lambda _event: told.set())
            assert not producer.flow_state.flowed
        # The I/O thread calls in the order in which it is asked.
        done = threading.Event()
        producer._engine.call_later(done.set)
        assert done.wait(PATIENCE)
        if call == "pause":
            assert not producer.wait_unflowed(timeout=0.05)
        elif call == "capacity":
            producer.send_many([b"1", b"2"], timeout=PATIENCE)
        else:
            producer.pause()
            assert told.wait(PATIENCE)


def test_E2_a_send_that_waits_for_a_busy_producer_is_withdrawn_at_its_deadline(
    broker: Broker, full: Producer, goes_on: threading.Event
) -> None:
    sender = start_send(full, b"refused", timeout=0.05)
    with Handler().logs_in_a_step_of(full):
        goes_on.set()
        assert isinstance(sender.wait(), NestedCall)
    broker.release_confirms()
    # Its place in line is the next one's.
    full.send(b"next", timeout=PATIENCE).result(PATIENCE)
    full.close()
    assert bodies(broker) == [b"admitted", b"next"]


def test_E2_a_send_at_its_deadline_waits_for_another_thread_that_is_just_admitting_the_message(
    broker: Broker, full: Producer, goes_on: threading.Event
) -> None:
    sender = start_send(full, b"refused", timeout=0.05)
    (ticket,) = full._protocol.line.tickets
    with Handler().logs_in_a_step_of(full):
        assert ticket.claim()
        goes_on.set()
        eventually(lambda: len(ticket._claims) > 2, "the sender would give up, and may not")
    # Nothing has made room after all.
    assert isinstance(sender.wait(), FlowControlTimeout)
    broker.release_confirms()


def test_E2_a_waiting_send_that_ctrl_c_ends_is_not_admitted_by_another_thread(
    broker: Broker, full: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Waiter, "wait_until", interrupt)
    step = full._engine.lock.take
    with Handler().logs_in_a_step_of(full), monkeypatch.context() as patched:
        # It stands in line already.
        patched.setattr(full._engine.lock.__class__, "try_take", lambda _self, do, _deadline=0.0: do())
        with pytest.raises(KeyboardInterrupt):
            full.send(b"given up")
    monkeypatch.undo()
    broker.release_confirms()
    step(bool)
    full.close()
    assert bodies(broker) == [b"admitted"]


def test_E2_a_close_that_cannot_run_because_the_producer_is_busy_ends_the_producer_later(
    broker: Broker, caplog: pytest.LogCaptureFixture, goes_on: threading.Event
) -> None:
    producer = Producer(broker.url, routing_key="q", capacity=1)
    broker.withhold_confirms()
    producer.send(b"admitted")
    handler = Handler()
    closer = start(producer.close, timeout=0.05)
    eventually(lambda: producer.closed, "the close has begun")
    with handler.logs_in_a_step_of(producer):
        goes_on.set()
        assert isinstance(closer.wait(), NestedCall)
    with pytest.raises(UndeliveredMessages):
        producer.close(timeout=PATIENCE)
    eventually(lambda: not broker.connections())
    text = "shut down: 1 admitted messages were not delivered"
    # The producer has ended before it logs this line.
    eventually(lambda: flush_logs(PATIENCE) and text in caplog.text, text)


def test_E2_a_with_block_left_by_an_exception_while_the_producer_is_busy_ends_the_producer_later(
    broker: Broker,
) -> None:
    producer = Producer(broker.url, routing_key="q", close_timeout=0.05)
    with Handler().logs_in_a_step_of(producer), pytest.raises(LookupError), producer:
        raise LookupError
    assert producer._engine._all_ended.wait(PATIENCE)
    eventually(lambda: not broker.connections())


def test_E2_a_producer_without_references_ends_even_if_it_is_busy_for_a_long_time(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q", capacity=1)
    engine = producer._engine
    with Handler().logs_in_a_step_of(producer):
        with pytest.warns(ResourceWarning):
            del producer
        # Longer than a call of the application would wait.
        assert not engine._all_ended.wait(0.2)
    assert engine._all_ended.wait(PATIENCE)
    eventually(lambda: not broker.connections())
