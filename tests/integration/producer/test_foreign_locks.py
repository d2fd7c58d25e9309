"""E2: a lock of the application, which a thread holds in a call, and for which a step of the producer waits.

So it comes about: the collector finds garbage while a thread takes a step, a finalizer logs, and the handler's lock is
held by a thread that sends the record before it by the same producer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from qflow_client import AsyncProducer, FlowControlTimeout, NestedCall, Producer, guard
from qflow_client.broker import Broker

from .tools import PATIENCE, bodies, eventually, start, wait_in_line


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is the same, however long the wait."""
    monkeypatch.setattr(guard, "PATIENCE", 0.05)


class Handler:
    """A log handler: its lock is taken for each record."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @contextmanager
    def logs_in_a_step_of(self, producer: Producer | AsyncProducer) -> Iterator[None]:
        """Have a thread wait for the lock inside a step, until the caller releases it; the caller gets it before."""
        steps = producer._engine.lock if isinstance(producer, Producer) else guard.LOOPS
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
def test_E2_a_call_does_not_wait_for_ever_for_a_step_that_waits_for_its_caller(broker: Broker, call: str) -> None:
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        broker.withhold_confirms()
        producer.send(b"admitted")
        with Handler().logs_in_a_step_of(producer), pytest.raises(NestedCall, match="a lock that it holds") as raised:
            REFUSED[call](producer)
        if "send" in call:
            assert (raised.value.message, raised.value.exchange, raised.value.routing_key) == (b"refused", "", "q")
        broker.release_confirms()
        producer.close(timeout=PATIENCE)
    # What was refused was not sent, and what was admitted was.
    assert bodies(broker) == [b"admitted"]


def test_E2_a_call_on_one_loop_does_not_wait_for_ever_for_a_step_on_another(broker: Broker) -> None:
    async def main() -> None:
        async with AsyncProducer(broker.url, routing_key="q", capacity=1) as producer:
            broker.withhold_confirms()
            await producer.send(b"admitted")
            with Handler().logs_in_a_step_of(producer):
                with pytest.raises(NestedCall, match="a lock that it holds") as raised:
                    producer.send_nowait(b"refused")
                assert raised.value.message == b"refused"
                producer.pause()
                assert not producer.flow_state.flowed
            broker.release_confirms()
            await producer.flush(timeout=PATIENCE)
            assert producer.flow_state.flowed

    asyncio.run(main())
    assert bodies(broker) == [b"admitted"]


@pytest.mark.parametrize("call", ["pause", "capacity", "on_flow"])
def test_E2_what_needs_no_answer_is_done_once_the_step_has_ended(broker: Broker, call: str) -> None:
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


def test_E2_a_send_that_waits_in_line_is_given_up_at_its_deadline(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        broker.withhold_confirms()
        producer.send(b"admitted")
        sender = start(producer.send, b"refused", timeout=0.3)
        wait_in_line(producer, 1)
        with Handler().logs_in_a_step_of(producer):
            assert isinstance(sender.wait(), NestedCall)
        broker.release_confirms()
        # Its place in line is the next one's.
        producer.send(b"next", timeout=PATIENCE).result(PATIENCE)
    assert bodies(broker) == [b"admitted", b"next"]


def test_E2_a_send_waits_for_a_step_that_decides_about_its_message(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        broker.withhold_confirms()
        producer.send(b"admitted")
        sender = start(producer.send, b"refused", timeout=0.1)
        wait_in_line(producer, 1)
        (ticket,) = producer._protocol.line.tickets
        with Handler().logs_in_a_step_of(producer):
            assert ticket.claim()
            eventually(lambda: len(ticket._claims) > 2, "the sender would give up, and may not")
        # Nothing has made room after all.
        assert isinstance(sender.wait(), FlowControlTimeout)
        broker.release_confirms()


def test_E2_a_close_whose_steps_cannot_be_taken_ends_the_producer_later(broker: Broker) -> None:
    producer = Producer(broker.url, routing_key="q", capacity=1)
    broker.withhold_confirms()
    producer.send(b"admitted")
    handler = Handler()
    closer = start(producer.close, timeout=0.3)
    eventually(lambda: producer.closed, "the close has begun")
    with handler.logs_in_a_step_of(producer):
        assert isinstance(closer.wait(), NestedCall)
    broker.release_confirms()
    producer.close(timeout=PATIENCE)
    assert bodies(broker) == [b"admitted"]
    eventually(lambda: not broker.connections())
