"""This library with its defaults: message ids and mandatory are on."""

from __future__ import annotations

import asyncio
import threading
import time
from queue import SimpleQueue
from typing import Any

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing, headers, timestamp
from qflow_client import AsyncProducer, Message, Producer

__all__ = ["EightThreads", "OneTask", "OneThread", "SixtyFourThreads", "Tasks"]


class _Sampler:
    """Waits for the receipts of sampled messages on a separate thread."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.put: SimpleQueue[tuple[Any, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (entry := self.put.get()) is not None:
            receipt, began = entry
            receipt.result()
            self.latencies.append(time.perf_counter() - began)

    def stop(self) -> list[float]:
        self.put.put(None)
        self._thread.join()
        return self.latencies


class OneThread:
    """`Producer.send` from one thread. A flush at the end raises if a message is not confirmed."""

    title = "qflow_client.Producer"
    distribution = ""
    varies = True
    threads = 1

    def run(self, job: Job) -> Timing:
        producer = Producer(job.url, routing_key=job.queue, capacity=job.window, confirms=job.confirmed)
        with producer:
            send, body = producer.send, job.body
            sampler = _Sampler() if job.sample else None
            sent = [0] * self.threads
            # Number of messages that each thread had sent when the first thread was done.
            standings: list[list[int]] = []

            # All threads begin at the same time, so that no thread has an advantage.
            ready = threading.Barrier(self.threads + 1)

            def work(thread: int, first: int, last: int) -> None:
                ready.wait()
                if sampler is not None:
                    for at in range(first, last):
                        began = time.perf_counter()
                        receipt = send(body)
                        if not at % job.sample:
                            sampler.put.put((receipt, began))
                elif job.varying:
                    for at in range(first, last):
                        send(Message(body, message_id=MESSAGE_ID % at, headers=headers(at), timestamp=timestamp(at)))
                elif self.threads == 1:
                    for _ in range(first, last):
                        send(body)
                else:
                    for at in range(last - first):
                        send(body)
                        sent[thread] = at
                    standings.append(list(sent))

            edges = [job.count * at // self.threads for at in range(self.threads + 1)]
            threads = [threading.Thread(target=work, args=(at, edges[at], edges[at + 1])) for at in range(self.threads)]
            for thread in threads:
                thread.start()
            ready.wait()
            watch = Stopwatch()
            for thread in threads:
                thread.join()
            producer.flush()
            latencies = sampler.stop() if sampler is not None else None
            fairness = min(standings[0]) * self.threads / sum(standings[0]) if standings and any(standings[0]) else None
            if job.confirmed:
                return watch.stop(latencies, fairness)
        return watch.stop(latencies, fairness)


class EightThreads(OneThread):
    title = "qflow_client.Producer, 8 threads"
    threads = 8


class SixtyFourThreads(OneThread):
    title = "qflow_client.Producer, 64 threads"
    threads = 64


class OneTask:
    """`AsyncProducer.send` from one task. A flush at the end raises if a message is not confirmed."""

    title = "qflow_client.AsyncProducer"
    distribution = ""
    varies = True

    def run(self, job: Job) -> Timing:
        return asyncio.run(self._run(job))

    async def _run(self, job: Job) -> Timing:
        producer = AsyncProducer(job.url, routing_key=job.queue, capacity=job.window, confirms=job.confirmed)
        latencies: list[float] = []
        async with producer:
            watch = Stopwatch()
            await self._publish(producer, job, latencies)
            await producer.flush()
            if job.confirmed:
                return watch.stop(latencies)
        return watch.stop(latencies)

    async def _publish(self, producer: AsyncProducer, job: Job, latencies: list[float]) -> None:
        send, body = producer.send, job.body
        if job.varying:
            for at in range(job.count):
                await send(Message(body, message_id=MESSAGE_ID % at, headers=headers(at), timestamp=timestamp(at)))
        elif job.sample:
            clock = time.perf_counter
            sampled = set()

            async def time_it(receipt: Any, began: float) -> None:
                await receipt
                latencies.append(clock() - began)

            for at in range(job.count):
                began = clock()
                receipt = await send(body)
                if not at % job.sample:
                    sampled.add(asyncio.create_task(time_it(receipt, began)))
            await asyncio.gather(*sampled)
        else:
            for _ in range(job.count):
                await send(body)


class Tasks(OneTask):
    """One task per place in the window. Each task waits for the receipt of its message."""

    title = "qflow_client.AsyncProducer, a window of tasks"
    varies = False

    async def _publish(self, producer: AsyncProducer, job: Job, latencies: list[float]) -> None:
        send, body, clock = producer.send, job.body, time.perf_counter
        numbers = iter(range(job.count))

        async def work() -> None:
            for at in numbers:
                if job.sample and not at % job.sample:
                    began = clock()
                    await (await send(body))
                    latencies.append(clock() - began)
                else:
                    await (await send(body))

        await asyncio.gather(*(work() for _ in range(min(job.window, job.count))))
