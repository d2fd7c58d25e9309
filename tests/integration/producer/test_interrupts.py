"""Ctrl-C at any point of a call does not affect other callers. Tests in `tests/unit` interrupt the protocol itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from qflow_client import FlowControlTimeout, Outcome, Producer, UndeliveredMessages
from qflow_client.broker import Broker
from tests.effort import EFFORT
from tests.interrupting import each_interrupt

from .tools import PATIENCE, bodies, ends_within, start, start_send, wait_in_line

# A quick run interrupts some of the lines.
EVERY = 11 if EFFORT == "quick" else 1


def test_a_resume_of_a_producer_that_ctrl_c_interrupts_at_any_line_is_completed_by_the_next_call(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer()
    for interrupt in each_interrupt(least=60, every=EVERY):
        producer.pause()
        others = [start(producer.send, b"%d" % interrupt.at, timeout=None) for _ in range(2)]
        wait_in_line(producer, 2)
        interrupt(producer.resume)
        producer.resume()
        for other in others:
            assert other.result().result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert broker.queue("q").depth == 2 * (1 + (interrupt.at - 1) // EVERY)


def test_a_send_that_ctrl_c_interrupts_at_any_line_leaves_the_producer_usable(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(max_unwritten_bytes=1)
    for interrupt in each_interrupt(least=100, every=EVERY):
        producer.pause()
        other = start_send(producer, b"other")

        def send() -> None:
            with suppress(FlowControlTimeout):
                producer.send(b"own", timeout=0.001)

        interrupt(send)
        assert producer._protocol.controller.waiting == 1
        producer.resume()
        other.result().result(timeout=PATIENCE)
    assert bodies(broker) == [b"other"] * (1 + (interrupt.at - 1) // EVERY)


def test_a_close_that_ctrl_c_interrupts_is_completed_by_the_next_call(broker: Broker) -> None:
    for interrupt in each_interrupt(least=100, every=EVERY):
        producer = Producer(broker.url, routing_key="q")
        producer.send(b"")
        interrupt(producer.close)
        with ends_within(5), suppress(UndeliveredMessages):
            producer.close(timeout=5)
        assert producer.closed
    broker.wait_until(lambda b: not b.connections())


def test_a_second_ctrl_c_during_a_close_leaves_no_thread_waiting_for_the_end_of_the_close(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer(broker.url, routing_key="q")
    stop = producer._engine.dispatcher.stop

    def press(timeout: float) -> None:
        stop(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(producer._engine.dispatcher, "stop", press)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    start(producer.close, None).result()


@pytest.mark.parametrize("error", [ValueError, TypeError, TimeoutError])
def test_a_signal_handler_may_raise_any_exception_while_the_io_thread_is_woken(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with Producer(broker.url, routing_key="q") as producer:
        wake = producer._services.wake
        calls: list[None] = []

        def interrupted_once() -> None:
            calls.append(None)
            if len(calls) == 1:
                raise error("of a signal handler's")
            wake()

        monkeypatch.setattr(producer._services, "wake", interrupted_once)
        with pytest.raises(error):
            producer.send(b"1")
        broker.wait_until(lambda b: b.queue("q").depth == 1)
