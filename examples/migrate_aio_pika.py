"""A program that publishes with aio-pika, and the same program with a changed import, when the broker says stop."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika

import qflow_client.aio_pika
from qflow_client import FlowControlTimeout
from qflow_client.broker import Broker

COUNT = 300


async def program(aio_pika: Any, url: str, queue: str) -> None:
    """Publish more messages than the queue should have. The program has no code for flow control."""
    async with await aio_pika.connect_robust(url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        for number in range(COUNT):
            await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), queue)
            await asyncio.sleep(0.001)


async def main(broker: Broker) -> None:
    await program(aio_pika, broker.url, "before")
    await broker.wait_until_async(lambda broker: broker.queue("before").depth == COUNT)
    print(f"aio-pika: {COUNT} messages in a queue that said stop after 50")

    # Only the import changes. The URL may set the time to wait.
    try:
        await program(qflow_client.aio_pika, f"{broker.url}?max_producer_flow_control_wait=0.5", "impatient")
        raise AssertionError("published although the broker said stop")
    except FlowControlTimeout as error:
        print("nobody consumes:", error)
    assert 50 < broker.queue("impatient").depth < COUNT

    # With a consumer the program waits and then continues.
    publishing = asyncio.create_task(program(qflow_client.aio_pika, broker.url, "patient"))
    taken: list[bytes] = []
    # The consumer comes late.
    await broker.wait_until_async(lambda broker: broker.queue("patient").flow_stopped, timeout=60)
    async with asyncio.timeout(60), await qflow_client.aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.get_queue("patient")
        async with queue.iterator() as messages:
            async for message in messages:
                await asyncio.sleep(0.002)
                await message.ack()
                taken.append(message.body)
                if len(taken) == COUNT:
                    break
    await publishing
    assert taken == [b"%d" % number for number in range(COUNT)]
    assert broker.queue("patient").flow_stopped_count
    print(f"somebody consumes: all {COUNT}, in order, never more than {broker.queue('patient').peak_depth} at a time")


with Broker() as broker:
    for name in "before", "impatient", "patient":
        broker.declare_queue(name, arguments={"qpid.flow_stop_count": 50, "qpid.flow_resume_count": 25})
    asyncio.run(main(broker))
