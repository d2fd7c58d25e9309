"""AMQP 0-9-1 frames as bytes: splitting what comes in, and publish frames that are encoded once.

A publish is three frames and more: method, content header, body. Between two messages to the same exchange and routing
key with the same properties and the same length, nothing differs but the message id and the body; the rest is kept.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import UTC, datetime
from struct import Struct
from struct import error as struct_error

import pamqp.encode
import pamqp.header

from qflow_client.message import Message

__all__ = [
    "ACK",
    "BODY_FRAME",
    "CHANNEL_CLOSE",
    "CHANNEL_CLOSE_OK",
    "CHANNEL_FLOW",
    "CHANNEL_FLOW_OK",
    "CONNECTION_BLOCKED",
    "CONNECTION_UNBLOCKED",
    "FRAME_END",
    "FRAME_MIN_SIZE",
    "FRAME_OVERHEAD",
    "HEADER_FRAME",
    "HEARTBEAT",
    "HEARTBEAT_FRAME",
    "METHOD_FRAME",
    "NACK",
    "PUBLISH",
    "RETURN",
    "FrameError",
    "FrameSplitter",
    "PublishEncoder",
    "Route",
    "decode_message",
    "flow_ok",
    "frame",
    "properties",
]

METHOD_FRAME = 1
HEADER_FRAME = 2
BODY_FRAME = 3
HEARTBEAT_FRAME = 8
FRAME_END = 0xCE
#: Bytes of a frame that are not payload: type, channel, size and end.
FRAME_OVERHEAD = 8
#: The largest frame that every peer must take (AMQP 0-9-1, section 1.4.2.7 "frame-min-size").
FRAME_MIN_SIZE = 4096

# Class and method ids, as the first four bytes of a method frame's payload.
CONNECTION_BLOCKED = bytes((0, 10, 0, 60))
CONNECTION_UNBLOCKED = bytes((0, 10, 0, 61))
CHANNEL_FLOW = bytes((0, 20, 0, 20))
CHANNEL_FLOW_OK = bytes((0, 20, 0, 21))
CHANNEL_CLOSE = bytes((0, 20, 0, 40))
CHANNEL_CLOSE_OK = bytes((0, 20, 0, 41))
PUBLISH = bytes((0, 60, 0, 40))
RETURN = bytes((0, 60, 0, 50))
ACK = bytes((0, 60, 0, 80))
NACK = bytes((0, 60, 0, 120))

_FRAME_HEAD = Struct(">BHI")
_HEADER_HEAD = Struct(">HHQH")
_LONGLONG = Struct(">Q")
_BASIC = 60


class FrameError(Exception):
    """Bytes that are not an AMQP frame, or a frame that is too large (AMQP reply code 501, FRAME-ERROR)."""


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One whole frame."""
    return b"%b%b\xce" % (_FRAME_HEAD.pack(kind, channel, len(payload)), payload)


HEARTBEAT = frame(HEARTBEAT_FRAME, 0, b"")


def flow_ok(channel: int, active: bool) -> bytes:
    """The whole ``Channel.Flow-Ok`` frame."""
    return frame(METHOD_FRAME, channel, CHANNEL_FLOW_OK + bytes((active,)))


class FrameSplitter:
    """Finds the frames in a stream of bytes, however it is cut.

    Args:
        frame_max: the largest frame to accept, in bytes with head and end; 0 for no limit. The attribute of that name
            can be set between two calls of `feed`: it is negotiated in the middle of the stream.
    """

    __slots__ = ("_needed", "_pieces", "data", "frame_max", "pending")

    def __init__(self, frame_max: int = 0) -> None:
        self.frame_max = frame_max
        #: The bytes that the offsets yielded by `feed` refer to.
        self.data = b""
        #: Bytes of a frame that has begun and not ended.
        self.pending = 0
        # Those bytes, as they came, and how many there must be before it makes sense to look at them again.
        self._pieces: list[bytes] = []
        self._needed = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, int]]:
        """Take bytes in.

        Must be run to its end before the next call.

        Yields:
            For every whole frame: its type, its channel, and where its payload starts and stops in `data`. The frame
            itself is ``data[start - 7 : stop + 1]``.

        Raises:
            FrameError: the end of a frame is not where its size says, its type is unknown, or it is too large.
        """
        if self.pending:
            self._pieces.append(data)
            self.pending += len(data)
            if self.pending < self._needed:
                self.data = b""
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
            self.pending = 0
        self.data = data
        unpack = _FRAME_HEAD.unpack_from
        at, end = 0, len(data)
        while end - at >= FRAME_OVERHEAD:
            kind, channel, size = unpack(data, at)
            if (kind > BODY_FRAME and kind != HEARTBEAT_FRAME) or kind == 0:
                raise FrameError(f"frame type {kind} is none of AMQP 0-9-1's")
            if self.frame_max and size + FRAME_OVERHEAD > self.frame_max:
                raise FrameError(f"a frame of {size + FRAME_OVERHEAD} bytes is larger than frame-max {self.frame_max}")
            start = at + 7
            stop = start + size
            if stop >= end:
                self._needed = size + FRAME_OVERHEAD
                break
            if data[stop] != FRAME_END:
                raise FrameError(f"a frame of type {kind} ends with 0x{data[stop]:02x} instead of 0xce")
            at = stop + 1
            yield kind, channel, start, stop
        else:
            if at == end:
                return
            if ((kind := data[at]) > BODY_FRAME and kind != HEARTBEAT_FRAME) or kind == 0:
                raise FrameError(f"frame type {kind} is none of AMQP 0-9-1's")
            self._needed = FRAME_OVERHEAD
        self._pieces.append(data[at:])
        self.pending = end - at


def _short(text: str, name: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, not {type(text).__name__}: {text!r}")
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"{name} has {len(raw)} bytes; AMQP carries at most 255: {text[:40]!r}…")
    return bytes((len(raw),)) + raw


# The basic properties that come before and after the message id on the wire, with their flag bits.
_BEFORE_ID = (("correlation_id", 1 << 10), ("reply_to", 1 << 9), ("expiration", 1 << 8))
_AFTER_ID = (("type", 1 << 5), ("user_id", 1 << 4), ("app_id", 1 << 3), ("cluster_id", 1 << 2))
_MESSAGE_ID = 1 << 7


def properties(message: Message) -> tuple[int, bytes, bytes]:
    """A message's properties but the message id, encoded.

    Returns:
        The property flags, and the values that come before and after the message id.

    Raises:
        ValueError: headers that cannot be encoded as a field table.
    """
    flags = 0
    before = bytearray()
    if message.content_type is not None:
        flags |= 1 << 15
        before += _short(message.content_type, "content_type")
    if message.content_encoding is not None:
        flags |= 1 << 14
        before += _short(message.content_encoding, "content_encoding")
    if message.headers is not None:
        flags |= 1 << 13
        try:
            before += pamqp.encode.field_table(dict(message.headers))
        except (AttributeError, OverflowError, RecursionError, TypeError, ValueError, struct_error) as error:
            raise ValueError(f"headers cannot be encoded as an AMQP field table: {error}") from error
    if message.delivery_mode is not None:
        flags |= 1 << 12
        before.append(message.delivery_mode)
    if message.priority is not None:
        flags |= 1 << 11
        before.append(message.priority)
    for name, flag in _BEFORE_ID:
        value = getattr(message, name)
        if value is not None:
            flags |= flag
            before += _short(value, name)
    after = bytearray()
    if message.timestamp is not None:
        flags |= 1 << 6
        after += _LONGLONG.pack(_seconds(message.timestamp))
    for name, flag in _AFTER_ID:
        value = getattr(message, name)
        if value is not None:
            flags |= flag
            after += _short(value, name)
    return flags, bytes(before), bytes(after)


def _seconds(timestamp: int | datetime) -> int:
    if isinstance(timestamp, datetime):
        return calendar.timegm(timestamp.astimezone(UTC).utctimetuple())
    return timestamp


class Route:
    """An exchange and a routing key, with the frames that every message to them shares."""

    __slots__ = ("exchange", "method", "parts", "routing_key")

    #: Body lengths whose parts are kept.
    MAX_PARTS = 256

    def __init__(self, channel: int, exchange: str, routing_key: str, mandatory: bool) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        names = _short(exchange, "exchange") + _short(routing_key, "routing_key")
        # The whole Basic.Publish frame.
        self.method = frame(METHOD_FRAME, channel, b"%b\0\0%b%b" % (PUBLISH, names, bytes((mandatory,))))
        # For each body length, what comes before the number of a message id, and between it and the body.
        self.parts: dict[int, tuple[bytes, bytes]] = {}


class PublishEncoder:
    """Encodes messages for one channel.

    Args:
        channel: the AMQP channel number.
        frame_max: the negotiated frame size in bytes; 0 for no limit.
        id_prefix: what every message id given here begins with, at most 243 bytes; a number of 12 hexadecimal digits
            follows.
        mandatory: the ``mandatory`` bit of every publish.
    """

    __slots__ = ("_id_prefix", "_routes", "channel", "mandatory", "max_body")

    #: Routes that are kept; beyond that all are forgotten, so that ever new routing keys do not eat memory.
    MAX_ROUTES = 1024

    def __init__(self, channel: int, frame_max: int, *, id_prefix: str = "", mandatory: bool = False) -> None:
        self.channel = channel
        self.mandatory = mandatory
        # The longest body, and the largest header, that one frame carries.
        self.max_body = (frame_max or 1 << 31) - FRAME_OVERHEAD
        self._id_prefix = id_prefix.encode()
        if len(self._id_prefix) > 255 - 12:
            raise ValueError(f"id_prefix has {len(self._id_prefix)} bytes; a message id has room for {255 - 12}")
        self._routes: dict[tuple[str, str], Route] = {}

    def route(self, exchange: str, routing_key: str) -> Route:
        """The route, made on first use.

        Raises:
            ValueError: a name of more than 255 bytes.
        """
        key = (exchange, routing_key)
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= self.MAX_ROUTES:
                self._routes.clear()
            route = self._routes[key] = Route(self.channel, exchange, routing_key, self.mandatory)
        return route

    def plain(self, route: Route, body: bytes, number: int) -> bytes:
        """The frames of a persistent message whose only other property is its message id.

        Args:
            route: from `route`.
            body: the content, of at most `max_body` bytes.
            number: the number in the message id, below 2**48.
        """
        parts = route.parts.get(len(body))
        if parts is None:
            parts = self._plain_parts(route, len(body))
        if body:
            return b"%b%012x%b%b\xce" % (parts[0], number, parts[1], body)
        return b"%b%012x\xce" % (parts[0], number)

    def _plain_parts(self, route: Route, length: int) -> tuple[bytes, bytes]:
        prefix = self._id_prefix
        size = 14 + 1 + 1 + len(prefix) + 12
        head = b"".join(
            (
                route.method,
                _FRAME_HEAD.pack(HEADER_FRAME, self.channel, size),
                _HEADER_HEAD.pack(_BASIC, 0, length, 1 << 12 | _MESSAGE_ID),
                b"\2",
                bytes((len(prefix) + 12,)),
                prefix,
            )
        )
        tail = b"\xce" + _FRAME_HEAD.pack(BODY_FRAME, self.channel, length)
        if len(route.parts) >= Route.MAX_PARTS:
            route.parts.clear()
        route.parts[length] = head, tail
        return head, tail

    def message(self, route: Route, message: Message, number: int | None) -> list[bytes]:
        """The frames of a message with properties of its own, or with a body of any length.

        Args:
            route: from `route`.
            message: its own message id, if it has one, goes out.
            number: the number in the message id for a message that has none; ``None`` to send it without.

        Returns:
            The frames: the first piece has all up to the first body frame, each further piece is a body frame.

        Raises:
            ValueError: headers that cannot be encoded.
        """
        flags, before, after = properties(message)
        if message.message_id is not None:
            flags |= _MESSAGE_ID
            before += _short(message.message_id, "message_id")
        elif number is not None:
            flags |= _MESSAGE_ID
            before += b"%c%b%012x" % (len(self._id_prefix) + 12, self._id_prefix, number)
        body = message.body
        header = _HEADER_HEAD.pack(_BASIC, 0, len(body), flags) + before + after
        if len(header) > self.max_body:
            raise ValueError(
                f"the message's properties need a frame of {len(header) + FRAME_OVERHEAD} bytes, and the broker takes "
                f"{self.max_body + FRAME_OVERHEAD}; shorten its headers"
            )
        head = route.method + frame(HEADER_FRAME, self.channel, header)
        size = self.max_body
        if len(body) <= size:
            return [head + frame(BODY_FRAME, self.channel, body) if body else head]
        frames = [frame(BODY_FRAME, self.channel, body[at : at + size]) for at in range(0, len(body), size)]
        frames[0] = head + frames[0]
        return frames


def decode_message(header: bytes, body: bytes) -> Message:
    """A message from the payload of its content header frame and its content.

    Raises:
        FrameError: the header is none, or has what no `Message` can have.
    """
    decoded = pamqp.header.ContentHeader()
    try:
        decoded.unmarshal(header)
        values = decoded.properties
        return Message(
            body,
            content_type=values.content_type,
            content_encoding=values.content_encoding,
            headers=values.headers,
            delivery_mode=values.delivery_mode,
            priority=values.priority,
            correlation_id=values.correlation_id,
            reply_to=values.reply_to,
            expiration=values.expiration,
            message_id=values.message_id,
            timestamp=values.timestamp,
            type=values.message_type,
            user_id=values.user_id,
            app_id=values.app_id,
            cluster_id=values.cluster_id or None,
        )
    except (ArithmeticError, RecursionError, TypeError, ValueError, struct_error) as error:
        raise FrameError(f"a content header that cannot be decoded: {error}") from error
