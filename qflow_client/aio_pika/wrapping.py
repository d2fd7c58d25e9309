"""Adds flow control to connections and channels that aio-pika itself has created.

A connection of aio-pika has no `Tap` at its socket. A `QueueCarrier` replaces the tap. aiormq reads the socket and puts
the frames of a channel into the channel's queue `frames`. aiormq writes the entries of the connection's `write_queue`.
The carrier removes frames about publishing before they reach `frames`. To write, the carrier puts a `_Turn` into
`write_queue`. When aiormq's writer reads the `_Turn`, the `_Turn` gets the next bytes from the protocol. So a message
can be kept back until aiormq passes its bytes to asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload
from weakref import WeakSet

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractRobustChannel
from aiormq import spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from qflow_client.aio_pika.channel import Channel
from qflow_client.aio_pika.flow import AIO_PIKA, AIO_PIKA_ROBUST, ChannelFlow
from qflow_client.aio_pika.robust_channel import RobustChannel
from qflow_client.amqp.frames import CHANNEL_CLOSE
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.redaction import shown
from qflow_client.skin import WRITE_CHUNK

__all__ = ["QueueCarrier", "wrap"]

_monotonic = time.monotonic

_ConnectionT = TypeVar("_ConnectionT", bound=AbstractConnection)


class _Blocked:
    """Tracks whether the broker blocks a connection of aiormq, and informs the channels with flow control."""

    def __init__(self, connection: Any) -> None:
        # The broker's reason; ``None`` while the connection is not blocked.
        self.reason: str | None = None if connection._Connection__connection_unblocked.is_set() else ""
        self.carriers: WeakSet[QueueCarrier] = WeakSet()
        self._told = connection._Connection__handle_connection_blocked
        self._ended = connection._Connection__handle_connection_unblocked
        connection._Connection__handle_connection_blocked = self._on_blocked
        connection._Connection__handle_connection_unblocked = self._on_unblocked

    @staticmethod
    def of(connection: Any) -> _Blocked:
        found: _Blocked | None = getattr(connection, "flow_blocked", None)
        if found is None:
            found = connection.flow_blocked = _Blocked(connection)
        return found

    async def _on_blocked(self, frame: Any) -> None:
        await self._told(frame)
        self.reason = frame.reason or ""
        for carrier in tuple(self.carriers):
            carrier.pass_event(lambda protocol, now: protocol.on_blocked(self.reason or "", now))

    async def _on_unblocked(self, frame: Any) -> None:
        await self._ended(frame)
        self.reason = None
        for carrier in tuple(self.carriers):
            carrier.pass_event(lambda protocol, now: protocol.on_unblocked(now))


class _Turn:
    """An entry of the connection's `write_queue`. It creates its bytes only when aiormq writes the entry."""

    should_close = False
    should_drain = True

    def __init__(self, carrier: QueueCarrier) -> None:
        self._carrier = carrier

    @property
    def payload(self) -> bytes:
        return self._carrier.begin_turn()

    def drain(self) -> None:
        """Called by aiormq when the bytes were passed to the socket, or to asyncio's buffer for the socket."""
        self._carrier.end_turn()


class _WriteQueue:
    """Replaces a channel's `write_queue`, and calls `closes` when the channel puts ``Channel.Close`` into it."""

    def __init__(self, queue: Any, closes: Callable[[], object]) -> None:
        self._queue = queue
        self._closes = closes

    async def put(self, frame: Any) -> None:
        self._look(frame)
        await self._queue.put(frame)

    def put_nowait(self, frame: Any) -> None:
        self._look(frame)
        self._queue.put_nowait(frame)

    def _look(self, frame: Any) -> None:
        if frame.payload[7:11] == CHANNEL_CLOSE:
            self._closes()


class QueueCarrier:
    """Transfers the frames of one channel between aiormq's queues and a `ProducerProtocol`.

    `ChannelFlow` uses this object in place of a `TapTransport` and its `Tap`.
    """

    # `ChannelFlow` sets these attributes. They have no effect, because aiormq handles heartbeats and the frame size.
    heartbeat = 0.0
    frame_max = 0

    def __init__(self, channel: Any) -> None:
        self.tap = self
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop = channel.loop
        # The attached protocol; ``None`` before `attach` and after `detach`.
        self._protocol: ProducerProtocol | None = None
        self._after: Callable[[], bool] = bool
        # Number of messages that aiormq itself has published on the channel. All of them are confirmed.
        self._before: int = channel.delivery_tag
        self._blocked = _Blocked.of(channel.connection)
        self._write_queue = channel.write_queue
        self._pass_on = channel.frames.put
        # The Basic.Return and the header of an incomplete returned message; ``None`` if there is no such message.
        self._returned: tuple[spec.Basic.Return, ContentHeader | None] | None = None
        # The received part of the body of the incomplete returned message. A `bytearray` grows without copies.
        self._body = bytearray()
        #: Whether a `_Turn` is in the write queue, or waits for room in this queue.
        self.awake = False
        #: True from `begin_turn` until asyncio has taken the bytes and accepts more (`end_turn`).
        self.full = False
        self._putting: asyncio.Task[None] | None = None

    @property
    def is_blocked(self) -> bool:
        return self._blocked.reason is not None

    def attach(self, _number: int, protocol: ProducerProtocol, now: float) -> None:
        """Start flow control. All messages that aiormq itself has published must be confirmed before this call."""
        channel = self._channel
        self._protocol = protocol
        for queue in channel.rpc_frames, channel.frames:
            self._take_flow(queue, now)
        channel.frames.put = self._take
        channel.write_queue = _WriteQueue(self._write_queue, self._end_writing)
        self._blocked.carriers.add(self)
        if self._blocked.reason is not None:
            protocol.on_blocked(self._blocked.reason, now)

    def _end_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.end_writing()

    def _take_flow(self, queue: asyncio.Queue[Any], now: float) -> None:
        """Handle the ``Channel.Flow`` frames that aiormq has received and not handled yet."""
        assert self._protocol is not None
        waiting = [queue.get_nowait() for _ in range(queue.qsize())]
        for item in waiting:
            queue.task_done()
            frame = item[1] if isinstance(item, tuple) else item
            if isinstance(frame, spec.Channel.Flow):
                self._protocol.on_flow(bool(frame.active), now)
            else:
                queue.put_nowait(item)

    def detach(self, _number: int) -> None:
        self._protocol = None
        self._blocked.carriers.discard(self)
        if self._putting is not None:
            self._putting.cancel()

    def add_after(self, after: Callable[[], bool]) -> None:
        """Set the function to call after every event that may have changed the protocol's state."""
        self._after = after

    def remove_after(self, _after: Callable[[], bool]) -> None:
        self._after = bool

    def pass_event(self, change: Callable[[ProducerProtocol, float], object]) -> None:
        """Pass an event to the protocol, pass on the protocol's reports, and write the output."""
        if self._protocol is not None:
            change(self._protocol, _monotonic())
            self._after()
            self.pump()

    async def _take(self, item: tuple[int, Any]) -> None:
        """Handle a frame of the channel. This method replaces `frames.put`."""
        if self._protocol is None or not self._take_frame(item[1]):
            await self._pass_on(item)

    def _take_frame(self, frame: Any) -> bool:
        """Handle a frame that concerns publishing. Return False if aiormq has to get the frame."""
        match frame:
            case spec.Basic.Ack() if self._is_ours(frame):
                tag = self._tag(frame)
                self.pass_event(lambda protocol, now: protocol.on_ack(tag, bool(frame.multiple), now))
            case spec.Basic.Nack() if self._is_ours(frame):
                tag = self._tag(frame)
                self.pass_event(lambda protocol, now: protocol.on_nack(tag, bool(frame.multiple), now))
            case spec.Channel.Flow():
                self.pass_event(lambda protocol, now: protocol.on_flow(bool(frame.active), now))
            case spec.Basic.Return():
                self._returned, self._body = (frame, None), bytearray()
            case ContentHeader() | ContentBody() if self._returned is not None:
                self._take_content(frame)
            case spec.Channel.Close():
                code, text = int(frame.reply_code or 0), frame.reply_text or ""
                method = int(frame.class_id or 0), int(frame.method_id or 0)
                self.pass_event(lambda protocol, now: protocol.channel_closed(code, text, method, now))
                return False
            case _:
                return False
        return True

    def _is_ours(self, answer: Any) -> bool:
        return not answer.delivery_tag or answer.delivery_tag > self._before

    def _tag(self, answer: Any) -> int:
        # A delivery tag of 0 means all messages.
        return int(answer.delivery_tag and answer.delivery_tag - self._before)

    def _take_content(self, frame: ContentHeader | ContentBody) -> None:
        assert self._returned is not None
        method, header = self._returned
        if isinstance(frame, ContentHeader):
            self._returned = method, frame
            header = frame
        else:
            self._body += frame.value
        if header is not None and len(self._body) >= (header.body_size or 0):
            self._returned = None
            code, text = int(method.reply_code or 0), method.reply_text or ""
            names = method.exchange or "", method.routing_key or ""
            payload, body = header.marshal(), bytes(self._body)
            self.pass_event(lambda protocol, _now: protocol.on_return(code, text, *names, payload, body))

    def pump(self) -> None:
        """Put a `_Turn` into the write queue, unless one waits already or there is nothing to write."""
        protocol = self._protocol
        if self.awake or protocol is None or not (protocol.has_answer or protocol.unwritten > 0):
            return
        self.awake = True
        try:
            self._write_queue.put_nowait(_Turn(self))
        except asyncio.QueueFull:
            self._putting = self._loop.create_task(self._write_queue.put(_Turn(self)))

    wake = pump

    def begin_turn(self) -> bytes:
        protocol = self._protocol
        if protocol is None:
            return b""
        data = protocol.data_to_write(WRITE_CHUNK)
        protocol.advance(len(data), _monotonic())
        self.full = True
        return data

    def end_turn(self) -> None:
        """Record that aiormq's writer has passed the bytes to asyncio, and that asyncio accepts more."""
        protocol = self._protocol
        self.full = self.awake = False
        if protocol is not None:
            self._after()
            if protocol.has_answer or (protocol.unwritten > 0 and not protocol.is_stopped):
                self.pump()


def _end(flows: WeakSet[ChannelFlow]) -> None:
    for flow in tuple(flows):
        flow.left = True
        flow.ended()


def _adopt(connection: Any) -> None:
    """Prepare a connection for channels with flow control."""
    if hasattr(connection, "flow_settings"):
        return
    flows: WeakSet[ChannelFlow] = WeakSet()
    drop_in = AIO_PIKA_ROBUST if isinstance(connection, aio_pika.RobustConnection) else AIO_PIKA
    connection.flow_settings = drop_in.settings()
    connection.flows = flows
    connection.carrier_of = QueueCarrier
    connection.closed().add_done_callback(lambda _closed: _end(flows))


@overload
def wrap(target: AbstractRobustChannel) -> RobustChannel: ...
@overload
def wrap(target: AbstractChannel) -> Channel: ...
@overload
def wrap(target: _ConnectionT) -> _ConnectionT: ...
def wrap(target: Any) -> Any:
    """Add flow control to a connection or a channel of aio-pika.

    After this call, `publish` of the channel's exchanges waits like `publish` of `qflow_client.aio_pika`, even after a
    robust connection has restored the channel. If you wrap a connection, only the channels that it opens later get flow
    control. So wrap the existing channels too. A wrapped channel differs from a channel of `qflow_client.aio_pika`:

    - If the socket accepts no bytes, asyncio buffers 64 KiB or more. For a buffered message, `publish` raises
      `ConfirmTimeout`, not `FlowControlTimeout`, and the message may still be sent later.
    - If the broker already blocks the connection before this call, the broker's reason is not known.
    - While the broker blocks the connection, `connection.close()` has no time limit. `channel.close()` has one.
    - The settings come from the environment, not from the connection's URL.
    - A wrapped channel is slower, because aiormq's queues and tasks transfer every confirm.

    Args:
        target: an open `Connection`, `RobustConnection`, `Channel` or `RobustChannel` of aio-pika.

    Returns:
        The same object. The class of a channel is now `qflow_client.aio_pika.Channel` or `RobustChannel`.

    Raises:
        TypeError: `target` is no connection or channel of aio-pika.
        ValueError: `target` is not open, or is a channel with unconfirmed messages.
        RuntimeError: no event loop is running.
    """
    if isinstance(target, aio_pika.Connection):
        return _wrap_connection(target)
    if isinstance(target, Channel):
        return target
    kinds = {aio_pika.Channel: Channel, aio_pika.RobustChannel: RobustChannel}
    kind = kinds.get(type(target))
    if kind is None:
        raise TypeError(f"wrap() takes a connection or a channel of aio-pika's, not {shown(target)}")
    asyncio.get_running_loop()
    if target.is_closed:
        raise ValueError(f"{target!r} is not open; wrap a channel that is")
    unconfirmed = len(target._channel.channel.confirmations)
    if unconfirmed:
        raise ValueError(f"{target!r} has {unconfirmed} unconfirmed messages; wrap it before you publish")
    _adopt(target._connection)
    target.__class__ = kind
    target.adopt()
    return target


def _wrap_connection(connection: Any) -> Any:
    if issubclass(connection.CHANNEL_CLASS, Channel):
        return connection
    kinds = {aio_pika.Channel: Channel, aio_pika.RobustChannel: RobustChannel}
    kind = kinds.get(connection.CHANNEL_CLASS)
    if kind is None:
        raise TypeError(f"wrap() takes a connection with aio-pika's channels, not with {connection.CHANNEL_CLASS!r}")
    asyncio.get_running_loop()
    if connection.is_closed or connection.transport is None:
        raise ValueError(f"{connection!r} is not open; wrap a connection that is")
    _adopt(connection)
    connection.CHANNEL_CLASS = kind
    return connection
