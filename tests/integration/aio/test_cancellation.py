"""A task can be cancelled at any await. Nothing leaks, and only admitted messages are sent."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from qflow_client import AsyncProducer, FlowControlTimeout, Outcome, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker
from tests.effort import rounds
from tests.integration.producer.tools import bodies

from .tools import in_line, soon


async def test_a_waiting_send_that_is_cancelled_sends_nothing_and_the_next_send_is_admitted(broker: Broker) -> None:
    async with AsyncProducer(broker.url, routing_key="q", capacity=2, capacity_bytes=10) as producer:
        broker.withhold_confirms()
        await producer.send(b"123456")
        large = asyncio.create_task(producer.send(b"too large", timeout=None))
        small = asyncio.create_task(producer.send(b"fits", timeout=None))
        await in_line(producer, 2)
        large.cancel()
        # It stood before one that is small enough.
        await small
        with pytest.raises(asyncio.CancelledError):
            await large
        assert (producer.unsettled, producer.available) == (2, 0)
        broker.release_confirms()
        await producer.flush()
        assert producer.available == 2
    assert bodies(broker) == [b"123456", b"fits"]


async def test_a_message_whose_send_is_cancelled_before_admission_is_never_admitted(broker: Broker) -> None:
    """This is also true if the hold ends in the same loop iteration, before the cancelled task has run."""
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        producer.pause()
        tasks = [asyncio.create_task(producer.send(b"%d" % number, timeout=None)) for number in range(4)]
        await in_line(producer, 4)
        tasks[0].cancel()
        tasks[2].cancel()
        producer.resume()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, False]
        await producer.flush()
        assert producer.available == producer.capacity
    assert bodies(broker) == [b"1", b"3"]


async def test_a_message_whose_send_is_cancelled_after_admission_is_sent_and_its_failure_is_raised(
    broker: Broker,
) -> None:
    async with AsyncProducer(broker.url) as producer:
        producer.pause()
        tasks = [asyncio.create_task(producer.send(b"", routing_key=key, timeout=None)) for key in ("q", "nowhere")]
        await in_line(producer, 2)
        producer.resume()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(UndeliveredMessages, match="312") as caught:
            await producer.flush()
        assert len(caught.value.receipts) == 1
        assert producer.available == producer.capacity
    assert bodies(broker) == [b""]


async def test_a_send_that_is_cancelled_exactly_at_its_deadline_loses_no_capacity_and_no_message(
    broker: Broker,
) -> None:
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        producer.pause()
        for turn in range(30):
            task = asyncio.create_task(producer.send(b"no", timeout=0.001))
            await asyncio.sleep(0.0001 * turn)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, FlowControlTimeout)):
                await task
        assert producer._protocol.controller.waiting == 0
        assert producer._protocol.line.tickets == {}
        producer.resume()
        await (await producer.send(b"yes"))
    assert bodies(broker) == [b"yes"]


async def test_cancelled_waits_of_an_async_producer_leave_no_state(broker: Broker) -> None:
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        broker.withhold_confirms()
        receipt = await producer.send(b"")
        producer.pause()
        events = producer.flow_events()
        calls: list[Any] = [
            producer.flush(timeout=None),
            producer.wait_unflowed(),
            receipt.result(),
            receipt.wait(timeout=30),
            anext(events),
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {asyncio.CancelledError}
        protocol = producer._protocol
        assert (protocol.waiters.settled, protocol.waiters.unflowed) == ([], [])
        producer.resume()
        broker.release_confirms()
        assert await receipt is Outcome.CONFIRMED
        assert (await anext(events)).kind == "unflowed"


async def test_a_cancelled_close_withdraws_unsent_messages_and_reports_them(broker: Broker) -> None:
    producer = await AsyncProducer(broker.url, routing_key="q").connect()
    broker.withhold_confirms()
    receipt = await producer.send(b"1")
    await soon(lambda: broker.queue("q").depth)
    closing = asyncio.create_task(producer.close(timeout=None))
    await soon(lambda: producer._protocol.waiters.settled)
    second = asyncio.create_task(producer.close(timeout=None))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await closing
    assert receipt.outcome is Outcome.UNKNOWN
    assert caught.value.undelivered.receipts == (receipt,)  # type: ignore[attr-defined]  # set on the exception
    await second
    await soon(lambda: not broker.connections())


async def test_a_connect_that_is_cancelled_at_any_point_leaves_no_task_and_no_connection(broker: Broker) -> None:
    connected = 0
    for turns in range(60):
        producer = AsyncProducer(broker.url, routing_key="q")
        task = asyncio.create_task(producer.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns % 3 == 0:
            # The broker answers in its own time.
            await asyncio.sleep(0.0005 * (turns // 3))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert producer.closed
        else:
            connected += 1
        await producer.close()
    await soon(lambda: not broker.connections())
    assert connected < 60


async def test_the_error_of_a_send_after_a_cancelled_connect_names_the_cancellation(broker: Broker) -> None:
    producer = AsyncProducer(broker.url, routing_key="q")
    connecting = asyncio.create_task(producer.connect())
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    with pytest.raises(ProducerClosed, match=r"could not connect: CancelledError$"):
        await producer.send(b"")


@pytest.mark.parametrize("seed", range(rounds(4)))
async def test_random_cancellations_of_sends_lose_and_duplicate_no_message(broker: Broker, seed: int) -> None:
    dice = random.Random(seed)
    producer = await AsyncProducer(broker.url, routing_key="q", capacity=7, capacity_bytes=60).connect()
    sent: list[bytes] = []
    refused: list[bytes] = []
    cancelled: list[bytes] = []

    async def work(task: int) -> None:
        for number in range(40):
            body = b"%d.%d" % (task, number) + b"x" * dice.randrange(20)
            try:
                receipt = await producer.send(body, timeout=dice.choice((None, None, 0.002)))
                sent.append(body)
                if dice.random() < 0.5:
                    await receipt
            except FlowControlTimeout:
                refused.append(body)
            except asyncio.CancelledError:
                if body not in sent:
                    cancelled.append(body)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.001)
            match dice.randrange(3):
                case 0:
                    producer.pause()
                case 1:
                    producer.resume()
                case _:
                    producer.capacity = dice.randrange(1, 8)

    disturbing = asyncio.create_task(disturb())
    tasks = [asyncio.create_task(work(task)) for task in range(20)]
    while not all(task.done() for task in tasks):
        dice.choice(tasks).cancel()
        await asyncio.sleep(dice.choice((0, 0, 0.001)))
    await asyncio.gather(*tasks, return_exceptions=True)
    disturbing.cancel()
    with suppress(asyncio.CancelledError):
        await disturbing
    producer.resume()
    producer.capacity = 7
    await producer.flush(timeout=20)
    assert (producer.available, producer.unsettled) == (7, 0)
    assert producer._protocol.limits.byte_window is not None
    assert producer._protocol.limits.byte_window.used == 0
    assert producer._protocol.controller.waiting == 0
    assert producer._protocol.line.tickets == {}
    await producer.close()
    found = bodies(broker)
    assert len(found) == len(set(found))
    assert set(sent) <= set(found) <= {*sent, *cancelled}
    assert refused or cancelled


async def test_a_cancelled_send_many_reports_the_admitted_messages(broker: Broker) -> None:
    async with AsyncProducer(broker.url, routing_key="q", capacity=10) as producer:
        broker.withhold_confirms()
        sending = asyncio.create_task(producer.send_many([b"%d" % number for number in range(20)], timeout=None))
        await in_line(producer, 1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await sending
        receipts: Any = caught.value.receipts  # type: ignore[attr-defined]  # send_many's
        assert [receipt.message.body for receipt in receipts] == [b"%d" % number for number in range(10)]
        broker.release_confirms()
        await producer.flush()
    assert broker.queue("q").depth == 10
