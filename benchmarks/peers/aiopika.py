"""aio-pika, and aiormq, on which aio-pika is based. Each peer has one task per place in the window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
import aiormq

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing

__all__ = ["AioPika", "Aiormq", "OneByOne"]


async def share(job: Job, tasks: int, publish: Callable[[], Awaitable[Any]]) -> list[float]:
    """Publish from several tasks; each waits for the answer before its next message.

    Returns:
        The seconds from the publish to the answer of each sampled message.
    """
    clock = time.perf_counter
    latencies = []
    numbers = iter(range(job.count))

    async def work() -> None:
        for at in numbers:
            if job.sample and not at % job.sample:
                began = clock()
                await publish()
                latencies.append(clock() - began)
            else:
                await publish()

    await asyncio.gather(*(work() for _ in range(min(tasks, job.count))))
    return latencies


class AioPika:
    """Calls `Exchange.publish`, which waits for the confirm, in a window of tasks."""

    title = "aio-pika, a window of tasks"
    distribution = "aio-pika"
    varies = False

    def run(self, job: Job) -> Timing:
        return asyncio.run(self._run(job))

    def _tasks(self, job: Job) -> int:
        return job.window if job.confirmed else 1

    async def _run(self, job: Job) -> Timing:
        async with await aio_pika.connect(job.url) as connection:
            channel = await connection.channel(publisher_confirms=job.confirmed)
            exchange = channel.default_exchange
            message = aio_pika.Message(
                job.body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, message_id=MESSAGE_ID % 1
            )
            watch = Stopwatch()
            latencies = await share(job, self._tasks(job), lambda: exchange.publish(message, job.queue))
            if not job.confirmed:
                await channel.close()
            return watch.stop(latencies)


class OneByOne(AioPika):
    """Publishes from one task, which waits for each confirm."""

    title = "aio-pika, one by one"

    def _tasks(self, job: Job) -> int:
        return 1


class Aiormq:
    """Calls `Channel.basic_publish`, which waits for the confirm, in a window of tasks."""

    title = "aiormq, a window of tasks"
    distribution = "aiormq"
    varies = False

    def run(self, job: Job) -> Timing:
        return asyncio.run(self._run(job))

    async def _run(self, job: Job) -> Timing:
        connection = await aiormq.connect(job.url)
        try:
            channel = await connection.channel(publisher_confirms=job.confirmed)
            properties = aiormq.spec.Basic.Properties(delivery_mode=2, message_id=MESSAGE_ID % 1)
            watch = Stopwatch()
            latencies = await share(
                job,
                job.window if job.confirmed else 1,
                lambda: channel.basic_publish(job.body, routing_key=job.queue, properties=properties, mandatory=True),
            )
            if not job.confirmed:
                await channel.close()
            return watch.stop(latencies)
        finally:
            await connection.close()
