"""A thousand tasks share one producer. Each task awaits the outcomes of its own messages."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack

from qflow_client import AsyncProducer, Outcome
from qflow_client.broker import Broker


async def main(url: str) -> None:
    async with AsyncProducer(url, routing_key="orders", capacity=200) as producer:

        async def till(number: int) -> int:
            confirmed = 0
            for order in range(5):
                receipt = await producer.send(f"till {number}, order {order}", timeout=30)
                confirmed += await receipt is Outcome.CONFIRMED
            return confirmed

        confirmed = sum(await asyncio.gather(*map(till, range(1000))))
        print(confirmed, "confirmed, and never more than", producer.capacity, "of them unsettled")
        assert confirmed == 5000


with ExitStack() as stack:
    url = os.environ.get("QFLOW_URL")
    if url is None:
        broker = stack.enter_context(Broker())
        broker.declare_queue("orders")
        url = broker.url
    asyncio.run(main(url))
