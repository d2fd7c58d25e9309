"""pika, used as in its documentation."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel

from benchmarks.peers.base import MESSAGE_ID, Job, Stopwatch, Timing, headers, one_by_one, timestamp

__all__ = ["Blocking", "Select"]

# One object for all messages: the cheapest use of pika, with the same bytes as the other peers.
_PROPERTIES = pika.BasicProperties(delivery_mode=2, message_id=MESSAGE_ID % 1)


class Blocking:
    """`BlockingConnection`, which waits for the confirm of each message."""

    title = "pika BlockingConnection, one by one"
    distribution = "pika"
    varies = False

    def run(self, job: Job) -> Timing:
        connection = pika.BlockingConnection(pika.URLParameters(job.url))
        try:
            channel: BlockingChannel = connection.channel()
            if job.confirmed:
                channel.confirm_delivery()
            publish, queue, body = channel.basic_publish, job.queue, job.body
            watch = Stopwatch()
            latencies = one_by_one(job, lambda: publish("", queue, body, _PROPERTIES, mandatory=True))
            if not job.confirmed:
                channel.close()
            return watch.stop(latencies)
        finally:
            connection.close()


class _SelectRun:
    """One run on a `SelectConnection`: publishes whenever an ack makes room in the window."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._published = 0
        self._confirmed = 0
        # Delivery tags whose confirm is timed, with their publish times.
        self._sampled: deque[tuple[int, float]] = deque()
        self._latencies: list[float] = []
        self._channel: Any = None
        self._watch = Stopwatch()
        self.timing: Timing | None = None
        self.error: BaseException | None = None
        self._connection = pika.SelectConnection(
            pika.URLParameters(job.url),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_open_error_callback=self._ended,
            on_close_callback=self._ended,
        )

    def run(self) -> None:
        try:
            self._connection.ioloop.start()
        finally:
            self._connection.ioloop.close()

    def _ended(self, _connection: Any, error: Any) -> None:
        if self.timing is None:
            self.error = error if isinstance(error, BaseException) else ConnectionError(str(error))
        self._connection.ioloop.stop()

    def _opened(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._channel_closed)
        if self._job.confirmed:
            channel.confirm_delivery(self._answered, callback=lambda _frame: self._begin())
        else:
            self._begin()

    def _begin(self) -> None:
        self._watch = Stopwatch()
        if self._job.confirmed:
            self._fill()
        else:
            self._next_lot()

    def _fill(self) -> None:
        job, publish = self._job, self._channel.basic_publish
        until = min(job.count, self._confirmed + job.window)
        if job.varying:
            for at in range(self._published, until):
                properties = pika.BasicProperties(
                    delivery_mode=2, message_id=MESSAGE_ID % at, headers=headers(at), timestamp=timestamp(at)
                )
                publish("", job.queue, job.body, properties, mandatory=True)
        elif job.sample:
            for at in range(self._published, until):
                if not at % job.sample:
                    self._sampled.append((at + 1, time.perf_counter()))
                publish("", job.queue, job.body, _PROPERTIES, mandatory=True)
        else:
            for _ in range(self._published, until):
                publish("", job.queue, job.body, _PROPERTIES, mandatory=True)
        self._published = max(self._published, until)

    def _next_lot(self) -> None:
        # Without confirms, publish one window of messages per turn of the loop. pika would buffer all messages at once.
        self._confirmed = self._published
        self._fill()
        if self._published < self._job.count:
            self._connection.ioloop.add_callback(self._next_lot)
        else:
            self._channel.close()

    def _answered(self, frame: Any) -> None:
        method = frame.method
        if method.NAME != "Basic.Ack":
            self.error = ConnectionError(f"the broker answered {method.NAME}")
            self._connection.close()
            return
        # RabbitMQ acks the messages of one queue in order. So a single ack never has a tag above an unconfirmed tag.
        if method.multiple:
            self._confirmed = max(self._confirmed, method.delivery_tag)
        else:
            self._confirmed += 1
        while self._sampled and self._sampled[0][0] <= self._confirmed:
            self._latencies.append(time.perf_counter() - self._sampled.popleft()[1])
        if self._confirmed >= self._job.count:
            self.timing = self._watch.stop(self._latencies)
            self._connection.close()
        else:
            self._fill()

    def _channel_closed(self, _channel: Any, reason: BaseException) -> None:
        if not self._job.confirmed and self._published == self._job.count:
            self.timing = self._watch.stop()
        elif self.timing is None:
            self.error = reason
        if not (self._connection.is_closing or self._connection.is_closed):
            self._connection.close()


class Select:
    """`SelectConnection` with one thread and a window."""

    title = "pika SelectConnection"
    distribution = "pika"
    varies = True

    def run(self, job: Job) -> Timing:
        run = _SelectRun(job)
        run.run()
        if run.error is not None or run.timing is None:
            raise run.error or ConnectionError("the connection ended without an error before the run was complete")
        return run.timing
