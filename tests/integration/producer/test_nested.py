"""E2: signal handlers, finalizers and log handlers call producers at any moment, and no step is entered twice."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import logging
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest

import qflow_client
from qflow_client import AsyncProducer, NestedCall, Producer, ProducerClosed, ProducerFlowed
from qflow_client.broker import Broker
from tests.effort import rounds
from tests.interrupting import EVERY, each_interrupt

from .tools import PATIENCE, PATIENCE_WITH_JOBS, bodies, eventually, start, wait_held


def pause(producer: Producer | AsyncProducer) -> None:
    producer.pause("nested")
    producer.resume()


#: How many nested sends a test of finalizers waits for.
ENOUGH = rounds(200, least=20)

# What may be called at any moment, besides to send.
CALLS: dict[str, Callable[[Producer], object]] = {
    "flush": lambda producer: producer.flush(timeout=PATIENCE),
    "wait_unflowed": lambda producer: producer.wait_unflowed(timeout=0.01),
    "close": lambda producer: producer.close(timeout=PATIENCE),
    "capacity": lambda producer: setattr(producer, "capacity", 2),
    "pause": lambda producer: pause(producer),
    "flow_state": lambda producer: producer.flow_state,
    "numbers": lambda producer: (producer.in_flight, producer.available, producer.unsettled, repr(producer)),
    "on_flow": lambda producer: producer.on_flow(print)(),
    "flow_events": lambda producer: producer.flow_events(),
    "send_many": lambda producer: producer.send_many([b"n1", b"n2", b"n3"], timeout=0),
}


def in_time(run: Callable[[], Any]) -> Any:
    """Run on a thread, and fail if that hangs. Return the result."""
    job = start(run)
    job.join(PATIENCE_WITH_JOBS)
    if job.is_alive():
        # pytest cannot report a failure while each allocation collects garbage.
        gc.set_threshold(700, 10, 10)
        faulthandler.dump_traceback(2)
        pytest.fail("it hangs; where it does is on standard error")
    return job.result()


@pytest.fixture
def two(broker: Broker) -> Iterator[tuple[Producer, Producer]]:
    """Two producers. The first has a small window."""
    with Producer(broker.url, routing_key="q", capacity=2) as one, Producer(broker.url, routing_key="q") as other:
        yield one, other


@pytest.mark.parametrize("call", ["send", *CALLS])
@pytest.mark.parametrize("inside", ["send", "full", "pause", "flush"])
def test_E2_a_signal_handler_may_call_any_producer_method_inside_any_other_call(
    broker: Broker, call: str, inside: str
) -> None:
    receipts: list[Any] = []
    refused: list[ProducerFlowed] = []
    calls = 0

    def run() -> None:
        nonlocal calls
        with Producer(broker.url, routing_key="q", capacity=2) as one, Producer(broker.url, routing_key="q") as other:

            def handler() -> None:
                nonlocal calls
                calls += 1
                for producer in (one, other):
                    try:
                        if call == "send":
                            receipts.append(producer.send(b"nested", timeout=0))
                        elif producer is one or call != "close":
                            CALLS[call](producer)
                    except ProducerFlowed as error:
                        refused.append(error)
                        receipts.extend(error.receipts)

            def outer() -> None:
                match inside:
                    case "send":
                        receipts.append(one.send(b"own", timeout=PATIENCE))
                    case "full":
                        receipts.extend(one.send_many([b"own"] * 4, timeout=PATIENCE))
                    case "pause":
                        one.pause()
                        one.resume()
                    case "flush":
                        one.flush(PATIENCE)

            for interrupt in each_interrupt(least=6, every=EVERY):
                try:
                    interrupt(outer, handler=handler)
                except ProducerClosed as error:
                    assert call == "close"
                    receipts.extend(error.receipts)
                    return
            one.flush(PATIENCE)
            other.flush(PATIENCE)

    in_time(run)
    assert calls > 6 / EVERY or call == "close"
    for receipt in receipts:
        receipt.result(PATIENCE)
    ids = [receipt.message_id for receipt in receipts]
    assert len(set(ids)) == len(ids)


def test_E2_a_signal_handler_can_remove_the_flow_callback_that_it_has_added(two: tuple[Producer, Producer]) -> None:
    one = two[0]
    leftovers: list[Any] = []
    events: list[Any] = []

    def handler() -> None:
        one.on_flow(leftovers.append)()

    def run() -> None:
        for interrupt in each_interrupt(least=20, every=EVERY):
            interrupt(lambda: one.send_many([b"own"] * 4, timeout=PATIENCE), handler=handler)
        one.flush(PATIENCE)
        # Callbacks are called in the order in which they were added.
        one.on_flow(events.append)
        eventually(lambda: not one._engine._put_off)
        for _ in range(2):
            # Events of the sends may still be on their way before the first pause, but not after it.
            leftovers.clear()
            events.clear()
            pause(one)
            eventually(
                lambda: [event.kind for event in events if event.hold.kind == "paused"] == ["flowed", "unflowed"]
            )

    in_time(run)
    assert not leftovers


def test_E2_a_nested_call_that_is_postponed_after_the_connection_ended_is_done_by_the_next_call(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q", reconnect_timeout=0) as producer:
        broker.drop_connections()
        eventually(lambda: producer._engine.link is not None and producer._engine.link.ended)
        nested = producer._engine.lock.take(producer.flow_events)
        producer.capacity = 7
        assert producer.capacity == 7
        last = producer._engine.lock.take(producer.flow_events)
    in_time(lambda: [*nested, *last].clear())


def test_E2_a_nested_call_that_is_postponed_while_the_connection_ends_is_done(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(broker.url, routing_key="q", reconnect_timeout=0) as producer:
        link = producer._engine.link
        assert link is not None
        asked = threading.Event()
        ending = link.services.stop
        monkeypatch.setattr(link.services, "stop", lambda: asked.wait(PATIENCE))
        broker.drop_connections()
        eventually(lambda: producer.closed)
        producer._engine.lock.take(lambda: setattr(producer, "capacity", 7))
        # The I/O thread ends without another look at what others ask of it.
        link.services._calls.clear()
        asked.set()
        ending()
        eventually(lambda: producer.capacity == 7)


def test_E2_a_nested_call_of_a_closed_producer_leaves_nothing_postponed(broker: Broker) -> None:
    with Producer(broker.url, routing_key="q") as producer:
        pass
    for _ in range(3):
        producer._engine.lock.take(lambda: producer.on_flow(print)())
    assert not producer._engine._put_off
    assert not producer._services._calls


class Garbage:
    """Is collected, and then calls what it was given."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.cycle = self

    def __del__(self) -> None:
        self.call()


def test_E2_finalizers_on_any_thread_may_call_any_producer_method(two: tuple[Producer, Producer]) -> None:
    turns = itertools.count()
    nested: list[Any] = []
    threads: set[str] = set()
    failures: list[BaseException] = []
    calls = [call for name, call in CALLS.items() if name not in ("close", "capacity")]

    def finalize() -> None:
        if threading.current_thread().name == "qflow-broker":
            # Who waits there waits for the broker.
            return
        threads.add(threading.current_thread().name)
        turn = next(turns)
        try:
            if turn % 2:
                nested.append(two[turn // 2 % 2].send(b"nested", timeout=0))
            else:
                calls[turn // 2 % len(calls)](two[turn % 4 // 2])
        except ProducerFlowed as error:
            nested.extend(error.receipts)
        except BaseException as error:
            failures.append(error)

    def run() -> None:
        own: list[Any] = []
        while len(nested) < ENOUGH:
            for producer in two:
                Garbage(finalize)
                own.append(producer.send(b"own", timeout=PATIENCE))
        for producer in two:
            producer.flush(PATIENCE)
        receipts = [*own, *nested]
        for receipt in receipts:
            receipt.result(PATIENCE)
        ids = [receipt.message_id for receipt in receipts]
        assert len(set(ids)) == len(ids)

    thresholds = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    try:
        in_time(run)
    finally:
        gc.set_threshold(*thresholds)
    assert not failures


def test_E2_a_call_that_would_wait_on_the_io_thread_of_the_connection_raises_an_error(broker: Broker) -> None:
    errors: list[NestedCall] = []
    done = threading.Event()
    with Producer(broker.url, routing_key="q", capacity=1) as producer:
        receipt = producer.send(b"1")
        receipt.result(PATIENCE)
        producer.pause()

        def on_its_thread() -> None:
            for call in (
                lambda: producer.send(b"2"),
                lambda: producer.send_nowait(b"2"),
                lambda: producer.flush(),
                lambda: producer.close(),
                lambda: producer.wait_unflowed(),
            ):
                try:
                    call()
                except NestedCall as error:
                    errors.append(error)
            done.set()

        producer._services.add_callback_threadsafe(on_its_thread)
        assert done.wait(PATIENCE)
        assert [str(error).split(" ")[0] for error in errors] == [
            "send()",
            "send_nowait()",
            "flush()",
            "close()",
            "wait_unflowed()",
        ]
        assert [(error.message, error.exchange, error.routing_key) for error in errors[:2]] == [(b"2", "", "q")] * 2
        assert not producer.closed
        producer.resume()
    assert broker.queue("q").depth == 1


def test_E2_a_log_handler_that_waits_for_a_connection_does_not_stop_the_thread_that_connects_and_logs(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    class Sender(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "app":
                # The thread holds the lock of the handler while it waits.
                producer.send(record.getMessage().encode(), timeout=PATIENCE)

    caplog.set_level(logging.INFO)
    producer = Producer(broker.url, routing_key="q", reconnect_delay=0.5)
    sender = Sender()
    logging.getLogger().addHandler(sender)
    try:
        broker.drop_connections()
        wait_held(producer, "disconnected")
        logging.getLogger("app").info("hello")
    finally:
        logging.getLogger().removeHandler(sender)
    producer.close()
    assert bodies(broker) == [b"hello"]
    assert any(record.name.startswith("pika.") and "qflow-io" in str(record.threadName) for record in caplog.records)


def test_E2_a_signal_handler_may_send_with_another_producer_of_the_same_connection_inside_a_send(
    broker: Broker,
) -> None:
    connection = qflow_client.connect(broker.url)
    receipts: list[Any] = []

    def run() -> None:
        with (
            Producer(connection=connection, routing_key="q", capacity=2) as one,
            Producer(connection=connection, routing_key="q", capacity=2) as other,
        ):

            def handler() -> None:
                try:
                    receipts.append(other.send(b"nested", timeout=0))
                except ProducerFlowed:
                    return

            for interrupt in each_interrupt(least=6, every=EVERY):
                interrupt(lambda: receipts.append(one.send(b"own", timeout=PATIENCE)), handler=handler)
            one.flush(PATIENCE)
            other.flush(PATIENCE)

    try:
        in_time(run)
    finally:
        connection.close()
    assert all(receipt.delivered for receipt in receipts)
    assert len({receipt.message_id for receipt in receipts}) == len(receipts)


# What may be called on the loop at any moment, and is not to be awaited.
ASYNC_CALLS: dict[str, Callable[[AsyncProducer], object]] = {
    "send_nowait": lambda producer: producer.send_nowait(b"nested"),
    "capacity": lambda producer: setattr(producer, "capacity", 2),
    "pause": lambda producer: pause(producer),
    "flow_state": lambda producer: producer.flow_state,
    "numbers": lambda producer: (producer.in_flight, producer.available, producer.unsettled, repr(producer)),
    "on_flow": lambda producer: producer.on_flow(print)(),
    "flow_events": lambda producer: producer.flow_events(),
}


def begun(coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    """Run a coroutine until it waits for the first time, and return a coroutine that completes it."""
    try:
        first = [coroutine.send(None)]
    except StopIteration as end:
        first, value = [], end.value

    @types.coroutine
    def rest() -> Generator[Any, Any, Any]:
        yield from first
        return (yield from coroutine) if first else value

    async def complete() -> Any:
        return await rest()

    return complete()


@pytest.mark.parametrize("call", ASYNC_CALLS)
@pytest.mark.parametrize("inside", ["send_nowait", "send", "pause"])
def test_E2_a_signal_handler_may_call_any_producer_method_at_any_point_of_an_event_loop(
    broker: Broker, call: str, inside: str
) -> None:
    receipts: list[Any] = []
    calls = 0

    async def run() -> None:
        nonlocal calls
        async with AsyncProducer(broker.url, routing_key="q", capacity=2) as one:
            sends: list[asyncio.Task[Any]] = []

            def handler() -> None:
                nonlocal calls
                calls += 1
                try:
                    result = ASYNC_CALLS[call](one)
                except ProducerFlowed:
                    return
                if call == "send_nowait":
                    receipts.append(result)

            def outer() -> None:
                match inside:
                    case "send_nowait":
                        try:
                            receipts.append(one.send_nowait(b"own"))
                        except ProducerFlowed:
                            return
                    case "send":
                        sends.append(asyncio.get_running_loop().create_task(begun(one.send(b"own"))))
                    case "pause":
                        pause(one)

            for interrupt in each_interrupt(least=2, every=EVERY):
                interrupt(outer, handler=handler)
                await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE):
                receipts.extend(await asyncio.gather(*sends))
            await one.flush(PATIENCE)

    in_time(lambda: asyncio.run(run()))
    assert calls > 2 / EVERY
    assert all(receipt.delivered for receipt in receipts)
    assert len({receipt.message_id for receipt in receipts}) == len(receipts)


def test_E2_finalizers_on_the_thread_of_the_event_loop_may_call_any_producer_method(broker: Broker) -> None:
    turns = itertools.count()
    nested: list[Any] = []
    failures: list[BaseException] = []
    calls = [each for name, each in ASYNC_CALLS.items() if name not in ("send_nowait", "capacity")]

    async def run() -> None:
        async with (
            AsyncProducer(broker.url, routing_key="q", capacity=2) as one,
            AsyncProducer(broker.url, routing_key="q") as other,
        ):
            two = one, other

            def finalize() -> None:
                turn = next(turns)
                try:
                    if turn % 2:
                        # On any thread.
                        nested.append(two[turn // 2 % 2].send_nowait(b"nested"))
                    elif threading.current_thread().name != "qflow-broker":
                        calls[turn // 2 % len(calls)](two[turn % 4 // 2])
                except ProducerFlowed:
                    return
                except BaseException as error:
                    failures.append(error)

            own: list[Any] = []
            while len(nested) < ENOUGH:
                for producer in two:
                    Garbage(finalize)
                    own.append(await producer.send(b"own", timeout=PATIENCE))
            gc.set_threshold(*thresholds)
            for producer in two:
                await producer.flush(PATIENCE)
            receipts = [*own, *nested]
            assert all(receipt.delivered for receipt in receipts)
            ids = [receipt.message_id for receipt in receipts]
            assert len(set(ids)) == len(ids)

    thresholds = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    try:
        in_time(lambda: asyncio.run(run()))
    finally:
        gc.set_threshold(*thresholds)
    assert not failures
