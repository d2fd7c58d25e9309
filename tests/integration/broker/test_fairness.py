"""Fairness among producers at a queue that turns ON and OFF often (F4), counted in messages and not in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from qflow_client import AsyncProducer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker
from tests.effort import rounds

PRODUCERS = 10
TAKEN = rounds(3000, least=1500)


async def feed(producer: AsyncProducer, name: bytes) -> None:
    try:
        while True:
            await producer.send(name, timeout=None)
    except ProducerClosed:
        return


async def let_go(producer: AsyncProducer) -> None:
    try:
        await producer.close(0)
    except UndeliveredMessages:
        # Messages that are in flight at the end do not count.
        return


async def flap(stop: int, resume: int, capacity: int) -> tuple[Counter[bytes], int]:
    """Let all producers send as fast as possible, and get the messages one by one.

    Returns:
        The number of messages of each producer that were got, and how often the queue turned ON.
    """
    served: Counter[bytes] = Counter()
    async with Broker() as broker, AsyncExitStack() as stack:
        broker.declare_queue("q", arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": resume})
        for number in range(PRODUCERS):
            producer = AsyncProducer(broker.url, routing_key="q", capacity=capacity)
            await producer.__aenter__()
            feeding = asyncio.create_task(feed(producer, b"%d" % number))
            stack.push_async_callback(asyncio.wait_for, feeding, 60)
            stack.push_async_callback(let_go, producer)
        await broker.wait_until_async(lambda b: len([each for each in b.producers() if each.published]) == PRODUCERS)
        # Messages that may have arrived before all producers were connected do not count.
        for number in range(-stop - PRODUCERS * capacity, TAKEN):
            await broker.wait_until_async(lambda b: b.queue("q").depth, timeout=60)
            message = broker.get("q")
            assert message is not None
            if number >= 0:
                served[message.body] += 1
            await asyncio.sleep(0)
        queue = broker.queue("q")
        assert queue.peak_depth <= stop + PRODUCERS * capacity
        return served, queue.flow_stopped_count


@pytest.mark.parametrize(
    ("stop", "resume", "capacity"),
    [(20, 10, 4), (20, 18, 4), pytest.param(20, 10, 10, id="the first producer could fill the queue alone")],
)
def test_F4_a_queue_that_turns_on_and_off_often_serves_ten_equal_producers_equally(stop, resume, capacity):
    served, times_on = asyncio.run(flap(stop, resume, capacity))
    assert times_on >= 10
    assert len(served) == PRODUCERS
    assert max(served.values()) - min(served.values()) <= 0.2 * max(served.values()), served
