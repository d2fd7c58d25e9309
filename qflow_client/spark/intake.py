"""`Intake` stores messages of a queue in a `Spool` and acknowledges them. It skips second copies that it recognises."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

from qflow_client.errors import ConnectionFailed
from qflow_client.skin import connection_failed, none_of
from qflow_client.spark.deliveries import COLUMNS, MOST_BYTES, MOST_ROWS, Row, batch_of, row_of
from qflow_client.spark.spool import Piece, Spool, read_piece
from qflow_client.sync.link import url_parameters

__all__ = ["Consumer", "Intake", "connect", "connect_first", "drain"]

Connection = TypeVar("Connection")

# Maximum seconds to collect messages before `Intake` writes them to the spool as one file.
_MAX_FILE_DELAY = 0.05
# If no message is delivered for this number of seconds, `is_drained` asks the broker whether the queue is empty.
_QUIET_SECONDS = 0.2
# If the broker reports this number of times that the queue has messages, but delivers none, `is_drained` fails.
_MAX_ANSWERS = 50

# First byte of each key (`_key`) that contains a message id.
_BY_ID = b"i"

# The columns from which `_key` makes the key.
_KEY = ("message_id", "body", "exchange", "routing_key", "correlation_id", "content_type")


def connect_first(
    urls: Sequence[str], timeout: float, opening: Callable[[pika.URLParameters], Connection]
) -> Connection:
    """Return the result of `opening` for the first broker that can be reached within `timeout` seconds.

    Raises:
        ConnectionFailed: no broker can be reached.
    """
    errors = []
    for url in urls:
        parameters = url_parameters(url)
        parameters.socket_timeout = parameters.stack_timeout = timeout
        try:
            return opening(parameters)
        except ConnectionFailed as error:
            errors.append(error)
        except (pika.exceptions.AMQPError, OSError) as error:
            errors.append(connection_failed(url, repr(error)))
    raise none_of(errors)


def connect(urls: Sequence[str], timeout: float) -> pika.BlockingConnection:
    """Connect with pika's `BlockingConnection` to the first broker that can be reached."""
    return connect_first(urls, timeout, pika.BlockingConnection)


class Intake:
    """Stores the messages of a queue in a spool. Only one thread may call the methods, except `wake`.

    If a connection ends before a spooled message is acknowledged, the broker delivers the message again. The intake
    recognises this message by its message id, and does not spool it again. If a message has no id and was certainly not
    acknowledged, its content identifies it. For n messages with the same content, n copies are recognised.

    Args:
        prefetch: maximum number of unacknowledged messages, from 1 to 65535.
        limit: offset at which the spool is full. Further messages stay in the queue. ``None`` for no limit.

    Raises:
        ConnectionFailed: the queue does not exist, or the user is not allowed to consume it. The methods also raise it
            if the connection is lost.
    """

    def __init__(
        self, connection: pika.BlockingConnection, queue: str, spool: Spool, prefetch: int, limit: int | None = None
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._spool = spool
        self._limit = limit
        # Time of the last delivery or ack. After an ack, the broker may deliver more messages.
        self._quiet_since = time.monotonic()
        # How often `is_drained` has found ready messages in the queue since the last delivery.
        self._answers = 0
        #: Number of delivered messages.
        self.received = 0
        # Messages that are not in the spool yet (oldest first), with their delivery tags and their total body bytes.
        self._rows: list[Row] = []
        self._tags: list[int] = []
        self._bytes = 0
        # Time when the first message of `_rows` came.
        self._since = 0.0
        # Tag of the first delivery beyond the limit, if any. Deliveries beyond the limit are not acknowledged.
        self._unwanted: int | None = None
        self._cancelled = False
        # Delivery tags of the spooled and unacknowledged messages, by offset.
        self._unacked: dict[int, int] = {}
        # Offsets of the messages of earlier runs that the broker may deliver again, by `_key`.
        self._known: dict[bytes, deque[int]] = {}
        self._remember()
        #: Whether a second copy was recognised since the last call of `acknowledge`.
        self.has_known = False
        #: Whether all unacknowledged messages of ended connections were redelivered. If so, only ids are compared.
        self.settled = False
        try:
            self._channel: BlockingChannel = connection.channel()
            self._channel.basic_qos(prefetch_count=prefetch)
            self._channel.add_on_cancel_callback(self._cancel)
            #: Number of ready messages in the queue before the consumer started.
            self.ready = self._count_ready()
            # RabbitMQ refuses ``x-priority`` for a stream. For a queue, 0 is the default. Without this refusal, a
            # restarted query would read only the new messages of a stream.
            self._consumer_tag = self._channel.basic_consume(queue, self._take, arguments={"x-priority": 0})
            self._settle(self.ready == 0)
        except pika.exceptions.AMQPError as error:
            hint = (
                "; it is a stream: name it with the option stream" if "invalid arg 'x-priority'" in str(error) else ""
            )
            raise ConnectionFailed(f"queue {queue!r} cannot be consumed: {error}{hint}") from error

    def _remember(self) -> None:
        spool = self._spool
        for piece in spool.pieces(spool.begin, spool.end):
            # Leave out the column timestamp, because Python cannot represent all its values.
            for row in read_piece(piece).select([*_KEY, "offset"]).to_pylist():
                if row["message_id"] is not None or row["offset"] >= spool.acknowledged:
                    self._known.setdefault(_key(row), deque()).append(row["offset"])

    def _count_ready(self) -> int:
        return int(self._channel.queue_declare(self._queue, passive=True).method.message_count)

    def _settle(self, settled: bool) -> None:
        if settled and not self.settled:
            self.settled = True
            # From now on, a message with the content of a spooled message may be a new message. But a message with the
            # id of a spooled message is a second copy.
            self._known = {key: offsets for key, offsets in self._known.items() if key[:1] == _BY_ID}

    def _cancel(self, method: Any) -> None:
        self._cancelled = True

    def _take(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        self.received += 1
        self._quiet_since, self._answers = time.monotonic(), 0
        row = row_of(method, properties, body)
        if method.redelivered and self._known:
            offsets = self._known.get(_key(dict(zip(COLUMNS.names, row, strict=False))))
            if offsets:
                self._unacked[offsets.popleft()] = method.delivery_tag
                self.has_known = True
                self._settle(self.received >= self.ready)
                return
        self._settle(self.received >= self.ready or not method.redelivered)
        if self._limit is not None and self._spool.end + len(self._rows) >= self._limit:
            self._unwanted = self._unwanted or method.delivery_tag
            return
        if not self._rows:
            self._since = time.monotonic()
        self._rows.append(row)
        self._tags.append(method.delivery_tag)
        self._bytes += len(body)
        if len(self._rows) >= MOST_ROWS or self._bytes >= MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        start = self._spool.end
        offsets = range(start, start + len(self._rows))
        self._spool.append(batch_of(self._rows, offsets))
        self._unacked.update(zip(offsets, self._tags, strict=True))
        self._rows.clear()
        self._tags.clear()
        self._bytes = 0

    def run_once(self, patience: float) -> None:
        """Process events until a message comes, a function passed to `wake` runs, or `patience` seconds have passed."""
        if self._rows:
            patience = min(patience, self._since + _MAX_FILE_DELAY - time.monotonic())
        try:
            if patience > 0:
                self._connection.process_data_events(patience)
            if self._rows and time.monotonic() >= self._since + _MAX_FILE_DELAY:
                self.flush()
            if self._cancelled or not self._channel.is_open:
                raise pika.exceptions.AMQPError("the queue was deleted, or the channel closed")
        except pika.exceptions.AMQPError as error:
            raise ConnectionFailed(f"consuming queue {self._queue!r} ended: {error!r}") from error

    def finish(self) -> None:
        """Stop consuming, and write the remaining messages to the spool."""
        try:
            self._channel.basic_cancel(self._consumer_tag)
        except pika.exceptions.AMQPError as error:
            raise ConnectionFailed(f"consuming queue {self._queue!r} ended: {error!r}") from error
        self.flush()

    def wake(self, action: Callable[[], None]) -> None:
        """Make `run_once` call a function. Do nothing if the connection is lost. Any thread may call this method."""
        with suppress(pika.exceptions.ConnectionWrongStateError):
            self._connection.add_callback_threadsafe(action)

    def acknowledge(self, before: int) -> None:
        """Acknowledge all messages before an offset, and wait for the broker. On error, some may be acknowledged."""
        self.has_known = False
        tags = sorted(tag for offset, tag in self._unacked.items() if offset < before)
        if not tags:
            return
        self._spool.mark_acknowledged(before)
        self._unacked = {offset: tag for offset, tag in self._unacked.items() if offset >= before}
        rest = [*self._unacked.values(), *self._tags, self._unwanted or math.inf]
        try:
            if tags[-1] < min(rest):
                self._channel.basic_ack(tags[-1], multiple=True)
            else:
                for tag in tags:
                    self._channel.basic_ack(tag)
            # The broker answers ``Queue.Declare`` only after it has processed the acks.
            self._count_ready()
            self._quiet_since = time.monotonic()
        except pika.exceptions.AMQPError as error:
            raise ConnectionFailed(f"acknowledging to queue {self._queue!r} failed: {error}") from error

    def is_drained(self) -> bool:
        """Return True if the queue has no ready messages, and no delivery is on its way. Call this after `run_once`.

        Raises:
            ConnectionFailed: the connection is lost, or the queue has messages that the broker does not deliver.
        """
        if time.monotonic() < self._quiet_since + _QUIET_SECONDS:
            return False
        before = self.received
        try:
            ready = self._count_ready()
            # Deliveries that the broker sent before its answer have arrived. Process them.
            self._connection.process_data_events(0)
        except pika.exceptions.AMQPError as error:
            raise ConnectionFailed(f"consuming queue {self._queue!r} ended: {error}") from error
        if self.received > before:
            return False
        self._answers += ready > 0
        if self._answers >= _MAX_ANSWERS:
            raise ConnectionFailed(
                f"queue {self._queue!r} has {ready} ready messages, but the broker delivers none of them; "
                "end the other consumers of the queue, because one of them may be the single active consumer"
            )
        return ready == 0

    @property
    def pending(self) -> int:
        """The number of delivered messages that are not in the spool yet."""
        return len(self._rows)

    @property
    def known_again(self) -> int:
        """The number of spooled messages that the broker may still deliver again."""
        return sum(map(len, self._known.values()))


def drain(connection: pika.BlockingConnection, queue: str, spool: Spool, limit: int | None) -> None:
    """Store the current messages of a queue in a spool, and acknowledge them when they are on disk.

    Args:
        spool: spool for the messages. The messages that the spool already contains count towards `limit`.
        limit: maximum number of messages in the spool; ``None`` for all ready messages.
    """
    prefetch = MOST_ROWS
    if limit is not None:
        # The broker delivers the unacknowledged messages of the spool again before new messages. A full spool has
        # `limit - spool.acknowledged` unacknowledged messages, so prefetch at most this number.
        prefetch = max(1, min(prefetch, limit - spool.acknowledged))
    intake = Intake(connection, queue, spool, prefetch, limit)
    while intake.received < intake.ready and (limit is None or spool.end < limit or intake.known_again):
        intake.run_once(_QUIET_SECONDS)
        # With a limit, delay the last `prefetch` acks, because the broker delivers one more message for each ack.
        intake.acknowledge(spool.end if limit is None else min(spool.end, limit - prefetch))
        if intake.is_drained():
            break
    intake.finish()
    intake.acknowledge(spool.end)


class Consumer:
    """An `Intake` on a separate thread, for a streaming query.

    Args:
        spool: spool for the messages. Until the call of `stop`, only the thread of this object may change the spool.
        prefetch: maximum number of unacknowledged messages. A message is acknowledged when Spark has committed it.
    """

    def __init__(self, connection: pika.BlockingConnection, queue: str, spool: Spool, prefetch: int) -> None:
        self._connection = connection
        self._spool = spool
        self._intake = Intake(connection, queue, spool, prefetch)
        # Protects `_stopping`, `_done`, `_acknowledged` and the deletion of files in the spool. The thread notifies
        # this condition when it has received or acknowledged messages, and when it ends.
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._stopping = False
        #: Number of delivered messages that the intake has processed.
        self.received = 0
        # Whether `wait_beyond` asks if the queue is drained, and the answer of the thread.
        self._is_asked = self._is_drained = False
        # Offset up to which Spark has committed messages, and offset up to which messages are acknowledged.
        self._done = self._acknowledged = 0
        self._thread = threading.Thread(target=self._run, name=f"qflow-intake {queue}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    done, stopping = self._done, self._stopping
                if done > self._acknowledged or self._intake.has_known:
                    self._intake.acknowledge(done)
                    with self._changed:
                        self._acknowledged = done
                        self._changed.notify_all()
                if self._intake.settled:
                    with self._changed:
                        self._spool.forget(done)
                if stopping:
                    break
                self._intake.run_once(_QUIET_SECONDS)
                if self._is_asked and not self._intake.pending:
                    self._is_drained = self._intake.is_drained()
                if self._intake.received != self.received or self._is_drained:
                    with self._changed:
                        self.received = self._intake.received
                        self._changed.notify_all()
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            if self._connection.is_open:
                self._connection.close()

    @property
    def ready(self) -> int:
        """The number of ready messages in the queue when this object was created."""
        return self._intake.ready

    def end(self) -> int:
        """Return the offset after the last message in the spool. If an error has ended the thread, raise it."""
        if self._error is not None:
            raise self._error
        return self._spool.end

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Return the result of `Spool.pieces`. The thread deletes no files during the call."""
        with self._changed:
            return self._spool.pieces(start, end)

    def done(self, before: int) -> None:
        """Acknowledge the messages before an offset, and wait for the acks. Raise the same errors as `end`."""
        with self._changed:
            if before > self._done and not self._stopping:
                self._done = before
                self._intake.wake(_nothing)
            # Wait for the acks, because Spark may end this process when the method has returned.
            while self._acknowledged < min(before, self._done) and not self._stopping:
                self._changed.wait()
        self.end()

    def wait_beyond(self, offset: int) -> bool:
        """Wait until the spool has the message at an offset. Return False after `stop`, or if the queue is drained."""
        self._is_drained, self._is_asked = False, True
        with self._changed:
            while self._spool.end <= offset and not self._stopping and not self._is_drained:
                # A write to the spool does not notify `_changed`. So check again after `_MAX_FILE_DELAY`.
                self._changed.wait(_MAX_FILE_DELAY)
        self._is_asked = False
        return self.end() > offset

    def wait_spooled(self) -> None:
        """Wait until all delivered messages are in the spool."""
        with self._changed:
            while self._intake.pending and not self._stopping:
                self._changed.wait(_MAX_FILE_DELAY)

    def stop(self, timeout: float = 5.0) -> None:
        """Acknowledge the messages that Spark has committed, and close the connection."""
        with self._changed:
            already = self._stopping
            self._stopping = True
        if not already:
            self._intake.wake(_nothing)
        self._thread.join(timeout)


def _nothing() -> None:
    """Do nothing. Scheduling this function as a callback wakes the thread."""


def _key(row: Mapping[str, Any]) -> bytes:
    """Return the key by which a message is recognised: its message id, or else a digest of its content."""
    name, body, *rest = [row[column] for column in _KEY]
    if name is not None:
        return _BY_ID + str(name).encode()
    digest = blake2b(body, digest_size=16)
    digest.update(repr(rest).encode())
    return b"=" + digest.digest()
