"""Consumes RabbitMQ streams over AMQP 0-9-1. This module finds offsets, and reads the messages in a range of offsets.

The `BlockingConnection` of pika is not suitable, because it rejects deliveries that arrive while it closes a channel.
Streams do not support rejects, so RabbitMQ would close the connection with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Self

import pika
import pika.exceptions
import pyarrow as pa

from qflow_client.errors import ConnectionFailed, QflowError
from qflow_client.spark.deliveries import MOST_BYTES, MOST_ROWS, Row, batch_of, row_of
from qflow_client.spark.intake import connect_first

__all__ = ["Cursor", "StreamConsumer", "StreamError"]

_OFFSET = "x-stream-offset"
# Prefetch count. RabbitMQ sends whole chunks, so there may be more unacknowledged deliveries than this number.
_PREFETCH = 1000
# Maximum seconds to wait for a message if a stream seems to be empty.
_EMPTY_TIMEOUT = 1.0
# Maximum seconds to wait for the broker's answer to a close.
_CLOSE_TIMEOUT = 5.0
# Maximum seconds to wait for the next message of a range. In a cluster, the connected node may get the message late.
_READ_TIMEOUT = 30.0


class StreamError(QflowError):
    """A stream does not have the requested messages, or is no stream but a queue. The text names the stream."""


class Cursor:
    """Decides which deliveries of a stream belong to a range of offsets, and finds the missing offsets.

    RabbitMQ delivers whole chunks, which may begin before the requested offset. A gap does not prove that a message was
    lost. Some entries of a stream are not messages, such as the offsets that consumers store.
    """

    def __init__(self, start: int, end: int) -> None:
        #: The next expected offset.
        self.at = start
        self.end = end
        #: The gaps in the range. Each gap is a pair: the first missing offset, and the offset after the gap.
        self.gaps: list[tuple[int, int]] = []

    @property
    def done(self) -> bool:
        return self.at >= self.end

    def take(self, offset: int) -> bool:
        """Record a delivery. Return True if the delivery belongs to the range and is new."""
        if offset < self.at or self.done:
            return False
        if offset > self.at:
            self.gaps.append((self.at, min(offset, self.end)))
        self.at = offset + 1
        return offset < self.end


class _Opened:
    """A connection of pika. If pika cannot open it, the constructor raises pika's error. `failure` is a later error."""

    def __init__(self, parameters: pika.URLParameters) -> None:
        self.failure: BaseException | None = None
        self.connection = pika.SelectConnection(
            parameters,
            on_open_callback=self._stop,
            on_open_error_callback=self._failed,
            on_close_callback=self._failed,
        )
        self.loop: Any = self.connection.ioloop
        self.loop.start()
        if self.failure is not None:
            self.loop.close()
            raise self.failure

    def _stop(self, *_: object) -> None:
        self.loop.stop()

    def _failed(self, _: object, reason: BaseException | str) -> None:
        self.failure = reason if isinstance(reason, BaseException) else pika.exceptions.AMQPConnectionError(reason)
        self.loop.stop()

    def close(self) -> None:
        if self.connection.is_open:
            self.connection.close()
            self.loop.call_later(_CLOSE_TIMEOUT, self.loop.stop)
            self.loop.start()
        self.loop.close()


class StreamConsumer:
    """A connection that consumes a stream. Use it as a context manager, and on only one thread.

    Args:
        timeout: maximum seconds to connect to each broker, and for each answer of the broker.

    Raises:
        ConnectionFailed: no broker can be reached. Methods: the connection or a channel is lost, or an answer is late.
    """

    def __init__(self, urls: Sequence[str], timeout: float, stream: str) -> None:
        self._stream = stream
        self._timeout = timeout
        self._opened = connect_first(urls, timeout, _Opened)
        # `_run` processes events until this function returns a true value.
        self._done: Callable[[], object] = bool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    def _moved(self, *_: object) -> None:
        if self._done():
            self._opened.loop.stop()

    def _run(self, done: Callable[[], object], patience: float) -> bool:
        """Process events until `done` returns True. Return False if this takes longer than `patience` seconds.

        Raises:
            StreamError: the deliveries have no offsets, because the queue is not a stream.
        """
        opened = self._opened
        if not done() and opened.failure is None:
            self._done = done
            timer = opened.loop.call_later(patience, opened.loop.stop)
            opened.loop.start()
            opened.loop.remove_timeout(timer)
        if isinstance(opened.failure, StreamError):
            raise opened.failure
        if opened.failure is not None:
            raise ConnectionFailed(f"reading stream {self._stream!r} ended: {opened.failure!r}") from opened.failure
        return bool(done())

    def _call(self, method: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        """Call a method of pika, and wait for the broker's answer."""
        answers: list[object] = []

        def answered(frame: object) -> None:
            answers.append(frame)
            self._moved()

        method(*arguments, **keywords, callback=answered)
        if not self._run(lambda: answers, self._timeout):
            raise ConnectionFailed(f"stream {self._stream!r}: the broker did not answer in {self._timeout:g} s")

    def _barrier(self, channel: Any) -> None:
        """Wait until all deliveries that the broker sent before this call have arrived."""
        self._call(channel.queue_declare, self._stream, passive=True)

    @contextmanager
    def _consuming(self, offset: str | int | datetime, prefetch: int, take: Callable[..., None]) -> Iterator[Any]:
        """Open a channel that consumes from an offset, and close the channel at the end of the ``with`` block."""
        opened = self._opened
        channel: Any = opened.connection.channel(on_open_callback=self._moved)
        if not self._run(lambda: channel.is_open, self._timeout):
            raise ConnectionFailed(f"stream {self._stream!r}: the broker did not open a channel in {self._timeout:g} s")
        channel.add_on_close_callback(self._closed)
        channel.add_on_cancel_callback(self._cancelled)
        self._call(channel.basic_qos, prefetch_count=prefetch)
        self._call(channel.basic_consume, self._stream, take, arguments={_OFFSET: offset})
        try:
            yield channel
        finally:
            if channel.is_open:
                channel.close()

    def _closed(self, channel: Any, reason: Any) -> None:
        if isinstance(reason, pika.exceptions.ChannelClosedByBroker):
            hint = "; it is a queue: name it with the option queue" if f"invalid arg '{_OFFSET}'" in str(reason) else ""
            self._opened.failure = pika.exceptions.AMQPError(f"{reason}{hint}")
            self._opened.loop.stop()

    def _cancelled(self, frame: Any) -> None:
        self._opened.failure = pika.exceptions.ConsumerCancelled("the stream was deleted")
        self._opened.loop.stop()

    def _offset_of(self, properties: Any) -> int | None:
        """Return the offset of a delivery. If the offset is missing, store an error for `_run`, and return ``None``."""
        if properties.headers is not None and _OFFSET in properties.headers:
            return int(properties.headers[_OFFSET])
        # Do not raise an exception here, because pika would treat it as a lost connection.
        self._opened.failure = StreamError(
            f"messages of {self._stream!r} have no {_OFFSET}, so it is a queue: name it with the option queue"
        )
        self._opened.loop.stop()
        return None

    def _probe(self, offset: str | int | datetime, *, to_the_end: bool) -> tuple[int, int] | None:
        """Consume from an ``x-stream-offset``. Return the first and last delivered offset; ``None`` without deliveries.

        If `to_the_end` is False, `_probe` stops early, so only the first of the two offsets is reliable.
        """
        found: list[int] = []
        tags = [0]

        def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            at = self._offset_of(properties)
            if at is None:
                return
            found[1:] = [at] if found else [at, at]
            tags[0] = method.delivery_tag
            self._moved()

        with self._consuming(offset, _PREFETCH if to_the_end else 1, take) as channel:
            self._barrier(channel)
            if not found and not self._run(lambda: found, _EMPTY_TIMEOUT):
                return None
            known = 0
            while to_the_end and tags[0] > known:
                known = tags[0]
                channel.basic_ack(known, multiple=True)
                self._barrier(channel)
        return found[0], found[1]

    def begin(self) -> int | None:
        """Return the first offset of the stream, or ``None`` if the stream is empty."""
        found = self._probe("first", to_the_end=False)
        return None if found is None else found[0]

    def end(self) -> int | None:
        """Return the offset after the last message, or ``None`` if the stream is empty."""
        found = self._probe("last", to_the_end=True)
        return None if found is None else found[1] + 1

    def since(self, when: datetime) -> int | None:
        """Return the first offset of the first chunk that is not older than a time; ``None`` if all are older."""
        found = self._probe(when, to_the_end=False)
        return None if found is None else found[0]

    def reaches(self, offset: int) -> bool:
        """Return True if `offset` is 0, or if a message exists at ``offset - 1`` or later."""
        return offset == 0 or self._probe(offset - 1, to_the_end=False) is not None

    def read(self, start: int, end: int, *, lossless: bool = True) -> Iterator[pa.RecordBatch]:
        """Yield the messages from one offset to another in order, in batches.

        Args:
            end: offset after the last message to yield.
            lossless: whether to raise an error if retention has removed some of the messages.

        Raises:
            StreamError: retention has removed messages (with `lossless`), or no further message came within 30 seconds.
        """
        cursor = Cursor(start, end)
        rows: list[Row] = []
        offsets: list[int] = []
        size = received = 0

        def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal size, received
            offset = self._offset_of(properties)
            if offset is None:
                return
            del properties.headers[_OFFSET]
            received += 1
            if cursor.take(offset):
                # The table is empty if it contained only the offset, because the publisher sent no headers.
                properties.headers = properties.headers or None
                rows.append(row_of(method, properties, body))
                offsets.append(offset)
                size += len(body)
            if not received % (_PREFETCH // 2):
                channel.basic_ack(method.delivery_tag, multiple=True)
            self._moved()

        def is_enough() -> bool:
            return cursor.done or len(rows) >= MOST_ROWS or size >= MOST_BYTES

        if cursor.done:
            return
        with self._consuming(start, _PREFETCH, take):
            # `_consuming` may already have received all messages, so enter the loop even if `cursor` is done.
            finished = False
            while not finished:
                before = received
                while not self._run(is_enough, _READ_TIMEOUT):
                    if received == before:
                        raise StreamError(
                            f"stream {self._stream!r} ends at offset {cursor.at}, but offsets to {end} were "
                            "requested; it was deleted and made again, or no replica with these offsets can be "
                            "reached"
                        )
                    before = received
                finished = cursor.done
                if cursor.gaps and lossless:
                    self._check(cursor.gaps)
                cursor.gaps.clear()
                if rows:
                    batch = batch_of(rows, offsets)
                    rows.clear()
                    offsets.clear()
                    size = 0
                    yield batch

    def _check(self, gaps: list[tuple[int, int]]) -> None:
        begin = self.begin()
        for first, last in gaps:
            if begin is None or begin > first:
                raise lost(self._stream, first, last if begin is None else min(begin, last))


def lost(stream: str, first: int, last: int) -> StreamError:
    """Return the error for the offsets from `first` to ``last - 1``, which retention has removed."""
    return StreamError(
        f"stream {stream!r} no longer has the offsets {first} to {last - 1}: its retention (x-max-length-bytes, "
        "x-max-age) has removed them; set failOnDataLoss to false to continue without them"
    )
