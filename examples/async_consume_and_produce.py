"""A consumer of aio-pika and a producer share one connection. The broker stops the producer, and acks continue."""

from __future__ import annotations

import asyncio

from qflow_client import AsyncProducer, connect_async
from qflow_client.broker import Broker


async def main(url: str) -> None:
    async with await connect_async(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=20)
        orders = await channel.get_queue("orders")
        async with AsyncProducer(connection=connection, routing_key="invoices") as producer:
            done, stopped = asyncio.Event(), asyncio.Event()
            seen = 0

            async def on_order(message) -> None:
                nonlocal seen
                # Only this call waits while the queue of invoices is too full. The rest of the connection continues.
                await producer.send(b"invoice for " + message.body, timeout=60)
                await message.ack()
                seen += 1
                if seen == 500:
                    done.set()

            async def watch() -> None:
                async for event in producer.flow_events():
                    print(event)
                    if event.flowed:
                        stopped.set()

            watching = asyncio.create_task(watch())
            await orders.consume(on_order)
            invoices = await channel.get_queue("invoices")
            # The consumer of the invoices comes late.
            await asyncio.wait_for(stopped.wait(), 60)
            taken = 0
            while taken < 500:
                message = await invoices.get(fail=False, no_ack=True)
                if message is None:
                    await asyncio.sleep(0.001)
                    continue
                taken += 1
            await asyncio.wait_for(done.wait(), 60)
        await watching
        print(seen, "orders,", taken, "invoices")


# This example needs a queue that stops its producers early, so it always starts its own broker.
with Broker() as broker:
    broker.declare_queue("orders")
    broker.declare_queue("invoices", arguments={"qpid.flow_stop_count": 50, "qpid.flow_resume_count": 10})
    for number in range(500):
        broker.publish(b"order %d" % number, "orders")
    asyncio.run(main(broker.url))
    flowed = broker.queue("invoices").flow_stopped_count
    print("the queue of invoices stopped its producer", flowed, "times")
    assert flowed > 0
    assert broker.queue("orders").acked == 500
