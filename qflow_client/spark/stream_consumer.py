"""RabbitMQ streams over AMQP 0-9-1: where one begins and ends, and reading a range of its offsets.

It runs pika's own event loop and not its `BlockingConnection`, which on closing rejects what is still on its way;
streams know no reject, and RabbitMQ closes the connection over one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import pika
import pika.exceptions
import pyarrow as pa

from qflow_client.errors import ConnectionFailed, QflowError
from qflow_client.spark.deliveries import MOST_BYTES, MOST_ROWS, Row, batch_of, row_of
from qflow_client.spark.intake import connect_first

__all__ = ["Cursor", "StreamConsumer", "StreamError"]

_OFFSET = "x-stream-offset"
# Deliveries that are not acknowledged, which asks for more. RabbitMQ sends whole chunks, so it may be more.
_PREFETCH = 1000
# Seconds that a stream which seems to be empty gets to show that it is not.
_EMPTY = 1.0
# Seconds that a broker gets to say goodbye.
_GOODBYE = 5.0
# Seconds that a range may bring nothing, such as from a replica that has not got it yet.
_PATIENCE = 30.0


class StreamError(QflowError):
    """A stream does not have what is asked for; the text names it and the offsets."""


class Cursor:
    """Which deliveries of a stream belong to a range of offsets, and which offsets were passed over.

    A chunk may begin before the offset that is asked for. A gap need not be a loss: some entries of a stream, such as
    the offsets that consumers store in it, are no messages.

    Args:
        start: the first offset.
        end: the one behind the last.
    """

    def __init__(self, start: int, end: int) -> None:
        #: The offset that is expected next.
        self.at = start
        self.end = end
        #: Offsets of the range that did not come, each as the first and the one behind the last.
        self.gaps: list[tuple[int, int]] = []

    @property
    def done(self) -> bool:
        """Whether no more is to be expected."""
        return self.at >= self.end

    def take(self, offset: int) -> bool:
        """Take note of a delivery; whether it belongs to the range, and is new."""
        if offset < self.at or self.done:
            return False
        if offset > self.at:
            self.gaps.append((self.at, min(offset, self.end)))
        self.at = offset + 1
        return offset < self.end


class _Opened:
    """A connection and what has become of it; raises from its constructor what pika reports to callbacks."""

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
            self.loop.call_later(_GOODBYE, self.loop.stop)
            self.loop.start()
        self.loop.close()


class StreamConsumer:
    """A connection on which a stream is consumed. A context manager; everything on one thread.

    Args:
        urls: of the brokers to try.
        timeout: seconds that the broker may take to answer.
        stream: its name.

    Raises:
        ConnectionFailed: none of the brokers can be connected to.
    """

    def __init__(self, urls: Sequence[str], timeout: float, stream: str) -> None:
        self._stream = stream
        self._timeout = timeout
        self._opened = connect_first(urls, timeout, _Opened)
        # What `_run` waits for.
        self._done: Callable[[], object] = bool

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._opened.close()

    def _moved(self, *_: object) -> None:
        if self._done():
            self._opened.loop.stop()

    def _run(self, done: Callable[[], object], patience: float) -> bool:
        """Handle what comes until something is true; whether it is, or the time was up.

        Raises:
            ConnectionFailed: the connection or a channel is lost.
            StreamError: it is no stream.
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
        """Do something that the broker answers, and wait for the answer."""
        answers: list[object] = []

        def answered(frame: object) -> None:
            answers.append(frame)
            self._moved()

        method(*arguments, **keywords, callback=answered)
        if not self._run(lambda: answers, self._timeout):
            raise ConnectionFailed(f"stream {self._stream!r}: the broker did not answer in {self._timeout:g} s")

    def _barrier(self, channel: Any) -> None:
        """Wait for an answer, behind which nothing is on its way that was there before."""
        self._call(channel.queue_declare, self._stream, passive=True)

    @contextmanager
    def _consuming(self, offset: str | int | datetime, prefetch: int, take: Callable[..., None]) -> Iterator[Any]:
        """A channel on which the stream is consumed from an offset on.

        Raises:
            ConnectionFailed: there is no such stream, or it may not be consumed.
        """
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
            hint = "; it is a queue: name it by the option queue" if f"invalid arg '{_OFFSET}'" in str(reason) else ""
            self._opened.failure = pika.exceptions.AMQPError(f"{reason}{hint}")
            self._opened.loop.stop()

    def _cancelled(self, frame: Any) -> None:
        self._opened.failure = pika.exceptions.ConsumerCancelled("the stream was deleted")
        self._opened.loop.stop()

    def _offset_of(self, properties: Any) -> int | None:
        """The offset of a delivery; ``None`` if it has none, which ends all that is under way."""
        if properties.headers is not None and _OFFSET in properties.headers:
            return int(properties.headers[_OFFSET])
        # To pika an exception would be a lost connection.
        self._opened.failure = StreamError(
            f"{self._stream!r} gives its messages no {_OFFSET}, so it is no stream: name it by the option queue"
        )
        self._opened.loop.stop()
        return None

    def _probe(self, offset: str | int | datetime, *, to_the_end: bool) -> tuple[int, int] | None:
        """The first and the last offset that are delivered from an offset on; ``None`` if none is.

        Args:
            offset: as RabbitMQ has it.
            to_the_end: whether the last is to be the stream's, and not just some.
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
            if not found and not self._run(lambda: found, _EMPTY):
                return None
            known = 0
            while to_the_end and tags[0] > known:
                known = tags[0]
                channel.basic_ack(known, multiple=True)
                self._barrier(channel)
        return found[0], found[1]

    def begin(self) -> int | None:
        """The first offset that there is; ``None`` for a stream that is empty."""
        found = self._probe("first", to_the_end=False)
        return None if found is None else found[0]

    def end(self) -> int | None:
        """The offset behind the last message; ``None`` for a stream that is empty, if only because of its retention."""
        found = self._probe("last", to_the_end=True)
        return None if found is None else found[1] + 1

    def since(self, when: datetime) -> int | None:
        """The first offset of the chunk in which there are messages from a time on; ``None`` if there are none yet."""
        found = self._probe(when, to_the_end=False)
        return None if found is None else found[0]

    def reaches(self, offset: int) -> bool:
        """Whether the stream has come up to an offset: that the one before it, or a later one, is there."""
        return offset == 0 or self._probe(offset - 1, to_the_end=False) is not None

    def read(self, start: int, end: int, *, lossless: bool = True) -> Iterator[pa.RecordBatch]:
        """The messages from an offset to another, in order.

        Args:
            start: the first offset.
            end: the one behind the last.
            lossless: whether it is an error that some of them are no longer there.

        Raises:
            StreamError: some are not there.
            ConnectionFailed: the connection is lost.
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
                # Nobody published an empty table rather than none.
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
            # Some, or all, may have come with the answer to the consume.
            finished = False
            while not finished:
                before = received
                while not self._run(is_enough, _PATIENCE):
                    if received == before:
                        raise StreamError(
                            f"stream {self._stream!r} ends at offset {cursor.at}, and those to {end} are asked for; it "
                            "was deleted and made again, or no replica that has them can be reached"
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
    """What to say of offsets that are no longer there: from the first to the one behind the last."""
    return StreamError(
        f"stream {stream!r} no longer has the offsets {first} to {last - 1}: its retention (x-max-length-bytes, "
        "x-max-age) has removed them; set failOnDataLoss to false to go on without them"
    )
