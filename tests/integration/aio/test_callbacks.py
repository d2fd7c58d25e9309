from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from qflow_client import (
    AsyncProducer,
    FlowControlTimeout,
    FlowEvent,
    FlowEventKind,
    FlowManager,
    Outcome,
    ProducerClosed,
    ProducerFlowed,
    Receipt,
    UndeliveredMessages,
)
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from tests.collecting import collect
from tests.integration.producer.tools import bodies

from .tools import Run, held, in_line, kinds, soon


async def test_callbacks_are_called_by_the_event_loop_in_order_and_never_inside_producer_calls(broker: Broker) -> None:
    told: list[str] = []
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        producer.on_flow(lambda event: told.append(f"one {event.kind}"))
        stop = producer.on_flow(lambda event: told.append(f"two {event.kind}"))
        producer.pause()
        producer.resume()
        assert told == []
        await soon(lambda: len(told) == 4)
        assert told == ["one flowed", "two flowed", "one unflowed", "two unflowed"]
        stop()
        stop()
        producer.pause()
        await soon(lambda: len(told) > 4)
        assert told[4:] == ["one flowed"]
        producer.resume()


async def test_a_flow_callback_may_call_any_method_of_the_producer(broker: Broker) -> None:
    receipts: list[Any] = []
    tasks: list[asyncio.Task[Any]] = []
    async with AsyncProducer(broker.url, routing_key="q") as producer:

        def callback(event: FlowEvent) -> None:
            assert producer.flow_state is not None
            if event.kind is FlowEventKind.UNFLOWED:
                receipts.append(producer.send_nowait(b"from a callback"))
                tasks.append(asyncio.get_running_loop().create_task(producer.flush()))
            else:
                producer.resume()
            producer.capacity = 10

        producer.on_flow(callback)
        producer.pause()
        await soon(lambda: tasks)
        await tasks[0]
        assert receipts[0].outcome is Outcome.CONFIRMED


async def test_on_delivery_may_send_and_may_close_the_producer(broker: Broker) -> None:
    told: list[Receipt] = []
    closing: list[asyncio.Task[None]] = []

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        if len(told) < 10:
            producer.send_nowait(b"%d" % len(told))
        else:
            closing.append(asyncio.get_running_loop().create_task(producer.close()))

    producer = AsyncProducer(broker.url, routing_key="q", on_delivery=on_delivery)
    await producer.connect()
    await producer.send(b"0")
    await soon(lambda: closing)
    await closing[0]
    assert len(told) == 10
    assert bodies(broker) == [b"%d" % number for number in range(10)]


async def test_a_send_from_another_thread_during_a_callback_does_not_count_as_a_send_of_the_callback(
    broker: Broker,
) -> None:
    errors: list[BaseException | None] = []

    def on_delivery(_receipt: Receipt) -> None:
        with ThreadPoolExecutor(1) as other:
            errors.append(other.submit(producer.send_nowait, b"2").exception())

    async with AsyncProducer(broker.url, routing_key="q", on_delivery=on_delivery) as producer:
        await producer.send(b"1")
        producer.pause()
        await soon(lambda: errors)
        producer.resume()
    assert [type(error) for error in errors] == [ProducerFlowed]
    assert bodies(broker) == [b"1"]


def test_a_system_exit_in_on_delivery_loses_no_receipt_and_ends_the_loop(
    run: Run, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Receipt] = []

    def on_delivery(receipt: Receipt) -> None:
        told.append(receipt)
        sys.exit("the end")

    async def main() -> None:
        broker.withhold_confirms()
        async with AsyncProducer(broker.url, routing_key="q", on_delivery=on_delivery) as producer:
            for _ in range(3):
                await producer.send(b"")
            await asyncio.to_thread(broker.wait_until, lambda b: b.queue("q").depth == 3)
            broker.release_confirms()
            await asyncio.sleep(60)

    with pytest.raises(SystemExit, match="the end"):
        run(main())
    assert len(told) == 3
    assert flush_logs(20)
    assert caplog.text.count("on_delivery failed on <AsyncReceipt") == 3


async def test_on_delivery_may_send_even_if_confirms_arrive_faster_than_receipts_are_reported(broker: Broker) -> None:
    why: list[list[str]] = []
    later: list[asyncio.Task[Any]] = []
    ended: list[str] = []

    def on_delivery(receipt: Receipt) -> None:
        why.append([hold.source for hold in producer.flow_state.holds])
        if len(why) == 1:
            later.append(asyncio.get_running_loop().create_task(producer.send(b"later", timeout=None)))
            producer.send_nowait(b"from a callback")
            # Not beyond what may be unsettled (C6).
            with pytest.raises(ProducerFlowed, match="capacity"):
                producer.send_nowait(b"no")
            ended.append("on_delivery")

    broker.withhold_confirms()
    producer = AsyncProducer(broker.url, routing_key="q", on_delivery=on_delivery, capacity=10)
    async with producer:
        for _ in range(10):
            await producer.send(b"first")
        await asyncio.to_thread(broker.wait_until, lambda b: b.queue("q").depth == 10)
        # More than that are going to be settled and not told.
        producer.capacity = 1
        broker.release_confirms()
        await soon(lambda: later)
        await (await later[0])
        await producer.flush()
        await soon(lambda: producer._protocol.parts.unreported.count == 0)
        assert not producer.flow_state.flowed
    assert len(why) == 12
    assert "on_delivery" in why[0]
    assert ended == ["on_delivery"]
    assert bodies(broker) == [b"first"] * 10 + [b"from a callback", b"later"]


async def test_receipts_that_wait_for_on_delivery_are_bounded(broker: Broker) -> None:
    most = [0]

    def on_delivery(receipt: Receipt) -> None:
        most[0] = max(most[0], producer._protocol.parts.unreported.count + producer.unsettled)

    producer = AsyncProducer(broker.url, routing_key="q", on_delivery=on_delivery, capacity=10)
    async with producer:

        async def send() -> None:
            for _ in range(100):
                await producer.send(b"", timeout=None)

        await asyncio.gather(*(send() for _ in range(20)))
    assert 0 < most[0] <= 20
    assert producer._protocol.parts.unreported.count == 0


async def test_failures_reported_to_on_delivery_are_not_raised_again(broker: Broker) -> None:
    told: list[Receipt] = []
    broker.withhold_confirms()
    producer = await AsyncProducer(broker.url, routing_key="q", on_delivery=told.append).connect()
    receipts = [await producer.send(b"", routing_key="nowhere"), await producer.send(b"")]
    await soon(lambda: broker.queue("q").depth == 1)
    # Messages without an answer were reported, perhaps after the last listener had ended.
    with pytest.raises(UndeliveredMessages) as caught:
        await producer.close(timeout=0)
    assert told == receipts
    assert caught.value.receipts == tuple(receipts)


@pytest.mark.parametrize("name", ["on_flow", "on_delivery"])
async def test_a_coroutine_function_as_a_callback_raises_an_error_because_it_would_not_be_awaited(
    broker: Broker, name: str
) -> None:
    async def callback(_what: Any) -> None:
        """Never runs."""

    producer = AsyncProducer(broker.url)
    take = producer.on_flow if name == "on_flow" else lambda each: AsyncProducer(broker.url, on_delivery=each)
    with pytest.raises(TypeError, match="plain function"):
        take(callback)


async def test_every_iterator_over_flow_events_gets_all_events_and_ends_with_the_producer(broker: Broker) -> None:
    producer = AsyncProducer(broker.url, routing_key="q")
    events = [producer.flow_events() for _ in range(2)]
    # Events before it is connected are kept.
    producer.pause("early")

    async def read(each: Any) -> list[str]:
        return [str(event.kind) async for event in each]

    readers = [asyncio.create_task(read(each)) for each in events]
    both = asyncio.create_task(read(events[0]))
    async with producer:
        producer.resume()
        await producer.wait_unflowed(timeout=20)
    seen, also, rest = await asyncio.gather(*readers, both)
    assert sorted(seen + rest) == sorted(also)
    assert "unflowed" in also
    assert [event async for event in producer.flow_events()] == []


async def test_an_abandoned_iterator_over_flow_events_leaves_no_state(broker: Broker) -> None:
    async with AsyncProducer(broker.url, routing_key="q") as producer:

        async def first() -> FlowEvent:
            async for event in producer.flow_events():
                return event
            raise AssertionError

        reading = asyncio.create_task(first())
        await asyncio.sleep(0)
        producer.pause()
        assert (await reading).kind is FlowEventKind.FLOWED
        producer.resume()
        del reading
        collect()
        assert len(producer._engine.listeners.iterators) == 0


async def test_D5_flow_managers_and_other_threads_can_hold_an_async_producer(broker: Broker) -> None:
    manager = FlowManager("ops")
    async with AsyncProducer(broker.url, routing_key="q", manager=manager) as producer:
        assert list(manager.resources) == [producer]
        # From the loop's own thread at once, …
        manager.stop_all("audit")
        assert kinds(producer) == ["paused"]
        manager.start_all()
        assert kinds(producer) == []
        # … from others in its next turn.
        for call, wanted in (
            (manager.stop_all, ["paused"]),
            (manager.start_all, []),
            (producer.pause, ["paused"]),
            (producer.resume, []),
        ):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            await soon(lambda wanted=wanted: kinds(producer) == wanted)  # type: ignore[misc]  # mypy infers no type
        manager.stop_all("before it")
        async with AsyncProducer(broker.url, routing_key="q", manager=manager) as late:
            assert kinds(late) == ["paused"]
            manager.start_all()
            await (await late.send(b""))
    assert list(manager.resources) == []
    manager.stop_all()


@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
def test_a_flow_manager_may_stop_a_producer_whose_event_loop_is_closed(run: Run, broker: Broker) -> None:
    manager = FlowManager()
    producers = []

    async def main() -> None:
        producer = AsyncProducer(broker.url, routing_key="q", manager=manager, reconnect_timeout=0)
        producers.append(await producer.connect())
        broker.drop_connections()
        await soon(lambda: producers[0].closed)

    run(main())
    thread = threading.Thread(target=manager.stop_all)
    thread.start()
    thread.join()
    assert manager.resources == tuple(producers)
    # From the thread in which the loop ran it is done at once, and there is no turn of the loop for callbacks.
    producers[0].on_flow(lambda _event: None)
    manager.stop_all("audit")
    assert [hold.detail for hold in producers[0].flow_state.holds if hold.kind == "paused"] == ["audit"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_producer_whose_event_loop_was_closed_while_calls_waited_can_be_resumed_and_shut_down(
    make_loop: Callable[[], asyncio.AbstractEventLoop], broker: Broker
) -> None:
    async def main() -> tuple[AsyncProducer, list[Any]]:
        producer = await AsyncProducer(broker.url, routing_key="q", manager=FlowManager()).connect()
        broker.withhold_confirms()
        receipt = await producer.send(b"1")
        producer.pause()
        calls = producer.send(b"2", timeout=None), producer.wait_unflowed(), producer.flush(), receipt.result()
        waiting = [asyncio.ensure_future(call) for call in calls]
        await in_line(producer, 1)
        await soon(lambda: receipt._waiter)
        return producer, waiting

    loop = make_loop()
    producer, waiting = loop.run_until_complete(main())
    left = asyncio.all_tasks(loop)
    loop.close()
    for task in left:
        # Otherwise asyncio logs that the task never ended.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # as asyncio itself does
    producer.resume()
    producer.shutdown()
    assert producer.closed
    assert not any(task.done() for task in waiting)
    # At the end of the process it would log the lost messages.
    producer._engine.end_soon()
    del producer, waiting, left, task
    collect()


async def test_one_log_notice_covers_all_waiting_async_senders(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "qflow_client")
    notices: list[FlowEvent] = []
    producer = AsyncProducer(broker.url, routing_key="q", flow_control_wait_notify_period=0.1)
    async with producer:
        producer.on_flow(lambda event: notices.append(event) if event.kind is FlowEventKind.WAITING else None)
        broker.flow(False)
        await held(producer, "channel_flow")
        tasks = [asyncio.create_task(producer.send(b"%d" % number, timeout=None)) for number in range(2000)]
        await in_line(producer, 2000)
        # Long enough that a notice comes meanwhile.
        short = asyncio.create_task(producer.send(b"no", timeout=0.5))
        await soon(lambda: len(notices) >= 3)
        with pytest.raises(FlowControlTimeout):
            await short
        # Of the oldest each time.
        assert len({event.since for event in notices}) == 1
        assert all(later.at - sooner.at > 0.09 for sooner, later in pairwise(notices))
        tasks[0].cancel()
        count = len(notices)
        await soon(lambda: len(notices) > count)
        broker.flow(True)
        await asyncio.gather(*tasks[1:])
        await producer.flush()
    assert flush_logs(20)
    assert "2001 sends have been waiting, the longest for" in caplog.text
    assert bodies(broker) == [b"%d" % number for number in range(1, 2000)]


async def test_callbacks_that_are_due_are_called_before_close_of_an_async_producer_returns(broker: Broker) -> None:
    told: list[FlowEventKind] = []
    producer = await AsyncProducer(broker.url, routing_key="q").connect()
    producer.on_flow(lambda event: told.append(event.kind))
    producer.pause()
    await producer.close()
    assert told[0] is FlowEventKind.FLOWED
    count = len(told)
    await asyncio.sleep(0.01)
    assert len(told) == count
    with pytest.raises(ProducerClosed):
        producer.send_nowait(b"")


async def test_E6_flow_events_for_a_callback_that_causes_more_events_are_bounded(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    async with AsyncProducer(broker.url, routing_key="q", max_flow_events=10, name="orders") as producer:

        def callback(event: FlowEvent) -> None:
            assert event.hold is not None
            told.append(event.hold.detail)
            if len(told) == 1:
                for number in range(50):
                    producer.resume()
                    producer.pause(str(number))

        producer.on_flow(callback)
        producer.pause("first")
        await soon(lambda: told[-1:] == ["49"])
        producer.resume()
    assert told[:1] + told[1::2] == ["first", "44", "45", "46", "47", "48", "49"]
    assert flush_logs(20)
    assert caplog.text.count("flow events were dropped") == 1
    assert "orders: 90 flow events were dropped, because callback <function" in caplog.text


def test_E6_flow_events_that_occur_before_the_event_loop_runs_are_bounded(
    broker: Broker, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    producer = AsyncProducer(broker.url, routing_key="q", max_flow_events=10, name="orders")
    told: list[FlowEvent] = []
    producer.on_flow(told.append, kinds=("paused",))
    for number in range(50):
        producer.pause(str(number))
        producer.resume()
    events = producer._protocol.reports.events
    assert events is not None
    assert len(events) <= 20

    async def main() -> None:
        async with producer:
            await soon(lambda: len(told) >= 10)

    run(main())
    assert [event.hold.detail for event in told if event.hold][-2:] == ["49", "49"]
    assert len(told) == 10
    assert flush_logs(20)
    assert "orders: 90 flow events were dropped, because callback" in caplog.text
