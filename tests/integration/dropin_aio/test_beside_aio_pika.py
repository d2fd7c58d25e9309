"""The same program with aio-pika and with the drop-in, against a broker that sends ``Channel.Flow``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika as original
import pytest

import qflow_client.aio_pika as drop_in
from qflow_client import FlowControlTimeout
from qflow_client.broker import Broker
from tests.integration.aio.tools import soon

COUNT = 500


async def have_come(_count: int) -> None:
    """Do not wait."""


async def program(module: Any, url: str, queue: str, have_come: Callable[[int], Awaitable[None]] = have_come) -> None:
    """Publish far more messages than the queue may hold. `have_come` waits until a number of them has arrived."""
    async with await module.connect_robust(url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        for number in range(COUNT):
            await channel.default_exchange.publish(module.Message(b"%d" % number), queue)
            await have_come(number + 1)
            await asyncio.sleep(0.001)


@pytest.fixture
def queues(broker: Broker) -> None:
    for queue in "theirs", "ours":
        broker.declare_queue(queue, arguments={"qpid.flow_stop_count": 10, "qpid.flow_resume_count": 5})


@pytest.mark.usefixtures("queues")
async def test_C3_aio_pika_publishes_during_a_stop_and_the_drop_in_waits_until_its_deadline(broker: Broker) -> None:
    await program(original, broker.url, "theirs")
    await soon(lambda: broker.queue("theirs").depth == COUNT)

    async def have_come(count: int) -> None:
        # Wait for each message. Otherwise the program could write all messages before a slow broker sends the stop.
        await soon(lambda: broker.queue("ours").published == count)

    with pytest.raises(FlowControlTimeout, match="channel_flow"):
        await program(drop_in, f"{broker.url}?max_producer_flow_control_wait=0.3", "ours", have_come)
    # The queue gets one message above the threshold, and the messages in flight until the client reads the stop.
    assert 11 <= broker.queue("ours").peak_depth < COUNT


@pytest.mark.usefixtures("queues")
async def test_J7_a_queue_declare_after_a_stop_fails_in_aio_pika_and_works_in_the_drop_in(broker: Broker) -> None:
    async def declares(module: Any, queue: str) -> None:
        async with await module.connect(broker.url) as connection:
            channel = await connection.channel()
            broker.withhold_confirms()
            publishing = [
                asyncio.ensure_future(channel.default_exchange.publish(module.Message(b""), queue)) for _ in range(11)
            ]
            await soon(lambda: broker.queue(queue).flow_stopped)
            await asyncio.sleep(0)
            try:
                await channel.declare_queue(queue, passive=True)
            finally:
                broker.release_confirms()
                for each in publishing:
                    each.cancel()
                await asyncio.gather(*publishing, return_exceptions=True)

    with pytest.raises(original.exceptions.AMQPError):
        await declares(original, "theirs")
    await declares(drop_in, "ours")


@pytest.mark.usefixtures("queues")
async def test_C3_the_drop_in_continues_to_publish_when_a_stop_ends(broker: Broker) -> None:
    publishing = asyncio.ensure_future(program(drop_in, broker.url, "ours"))
    # The publisher may be slower than this consumer, so first wait until the queue is ON.
    await soon(lambda: broker.queue("ours").flow_stopped)
    taken: list[bytes] = []

    def take() -> bool:
        message = broker.get("ours")
        if message is not None:
            taken.append(message.body)
        return len(taken) == COUNT

    await soon(take, timeout=60)
    await publishing
    assert taken == [b"%d" % number for number in range(COUNT)]
    assert broker.queue("ours").flow_stopped_count >= 1
