"""Splits received data into AMQP 0-9-1 frames, and encodes the frames of published messages.

A message with a body has at least three frames: method, content header and body. The application sets no properties of
a *plain* message. The frames of plain messages with the same exchange, routing key and length differ only in the
message id and the body. `PublishEncoder` caches the other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Any, Protocol

from qflow_client.amqp.fields import (
    decode_octet,
    decode_short_string,
    decode_table,
    decode_timestamp,
    encode_octet,
    encode_short_string,
    encode_table,
    encode_timestamp,
)

__all__ = [
    "ACK",
    "BODY_FRAME",
    "CHANNEL_CLOSE",
    "CHANNEL_CLOSE_OK",
    "CHANNEL_FLOW",
    "CHANNEL_FLOW_OK",
    "CHANNEL_OPEN",
    "CHANNEL_OPEN_OK",
    "CONFIRM_SELECT",
    "CONFIRM_SELECT_OK",
    "CONNECTION_BLOCKED",
    "CONNECTION_CLOSE",
    "CONNECTION_START",
    "CONNECTION_TUNE_OK",
    "CONNECTION_UNBLOCKED",
    "CONNECTION_UPDATE_SECRET",
    "CONNECTION_UPDATE_SECRET_OK",
    "FRAME_END",
    "FRAME_MIN_SIZE",
    "FRAME_OVERHEAD",
    "HEADER_FRAME",
    "HEARTBEAT",
    "HEARTBEAT_FRAME",
    "LAST_DIGITS",
    "METHOD_FRAME",
    "NACK",
    "PUBLISH",
    "RETURN",
    "Content",
    "FrameError",
    "FrameSplitter",
    "Prepared",
    "PublishEncoder",
    "Route",
    "add_header",
    "content_header",
    "decode_properties",
    "flow_ok",
    "frame",
    "plain_content_header",
    "properties",
]

METHOD_FRAME = 1
HEADER_FRAME = 2
BODY_FRAME = 3
HEARTBEAT_FRAME = 8
FRAME_END = 0xCE
#: Bytes of a frame without its payload: type, channel, size and end.
FRAME_OVERHEAD = 8
#: Every peer must accept frames up to this size (AMQP 0-9-1, section 1.4.2.7 "frame-min-size").
FRAME_MIN_SIZE = 4096

# The first four bytes of the payload of a method frame: class id and method id.
CONNECTION_START = bytes((0, 10, 0, 10))
CONNECTION_TUNE_OK = bytes((0, 10, 0, 31))
CONNECTION_CLOSE = bytes((0, 10, 0, 50))
CONNECTION_BLOCKED = bytes((0, 10, 0, 60))
CONNECTION_UNBLOCKED = bytes((0, 10, 0, 61))
# These two methods and the two above are extensions of RabbitMQ.
CONNECTION_UPDATE_SECRET = bytes((0, 10, 0, 70))
CONNECTION_UPDATE_SECRET_OK = bytes((0, 10, 0, 71))
CHANNEL_OPEN = bytes((0, 20, 0, 10))
CHANNEL_OPEN_OK = bytes((0, 20, 0, 11))
CHANNEL_FLOW = bytes((0, 20, 0, 20))
CHANNEL_FLOW_OK = bytes((0, 20, 0, 21))
CHANNEL_CLOSE = bytes((0, 20, 0, 40))
CHANNEL_CLOSE_OK = bytes((0, 20, 0, 41))
PUBLISH = bytes((0, 60, 0, 40))
RETURN = bytes((0, 60, 0, 50))
ACK = bytes((0, 60, 0, 80))
NACK = bytes((0, 60, 0, 120))
CONFIRM_SELECT = bytes((0, 85, 0, 10))
CONFIRM_SELECT_OK = bytes((0, 85, 0, 11))

_FRAME_HEAD = Struct(">BHI")
# Class, weight, body size and property flags. `_HEADER_FRAME_HEAD` also has the head of the frame.
_HEADER_HEAD = Struct(">HHQH")
_HEADER_FRAME_HEAD = Struct(">BHIHHQH")
_BODY_SIZE = Struct(">Q")
_BASIC = 60


# The first byte of a protocol header: the "A" of "AMQP".
_HEADER = 65


class FrameError(Exception):
    """Received bytes are not an AMQP frame, or a frame is too large (reply code 501, FRAME-ERROR)."""


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Return a complete frame."""
    return b"%b%b\xce" % (_FRAME_HEAD.pack(kind, channel, len(payload)), payload)


HEARTBEAT = frame(HEARTBEAT_FRAME, 0, b"")


def flow_ok(channel: int, active: bool) -> bytes:
    """Return a complete ``Channel.Flow-Ok`` frame."""
    return frame(METHOD_FRAME, channel, CHANNEL_FLOW_OK + bytes((active,)))


def _no_frame(kind: int) -> FrameError:
    """Return the error for data that is not a frame. `kind` is the first byte of the data."""
    text = f"frame type {kind} does not exist in AMQP 0-9-1"
    if kind == _HEADER:
        # If a broker does not support the client's version, it answers with the header of a version that it supports.
        text += "; the header of another AMQP version begins like this: use a port, or a broker, that speaks AMQP 0-9-1"
    return FrameError(text)


class FrameSplitter:
    """Finds the frames in a stream of bytes, which arrives in parts of any length.

    Args:
        frame_max: maximum size of a frame in bytes, with head and end; 0 for no limit. Client and broker negotiate this
            size in the first frames. So the attribute `frame_max` can be set between two calls of `feed`.
    """

    __slots__ = ("_needed", "_pieces", "data", "frame_max", "pending")

    def __init__(self, frame_max: int = 0) -> None:
        self.frame_max = frame_max
        #: The bytes to which the offsets of `feed` refer.
        self.data = b""
        #: Number of received bytes of the incomplete frame at the end of the stream.
        self.pending = 0
        # The received bytes of the incomplete frame.
        self._pieces: list[bytes] = []
        # The incomplete frame is checked again when it has this number of bytes.
        self._needed = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, int]]:
        """Add bytes to the stream. Consume the iterator completely before the next call.

        Yields:
            The type and channel of each complete frame, and the offsets of its payload in the attribute `data`. The
            frame is ``self.data[start - 7 : stop + 1]``.

        Raises:
            FrameError: a frame has an unknown type or a wrong end, or is too large.
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
                raise _no_frame(kind)
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
                raise _no_frame(kind)
            self._needed = FRAME_OVERHEAD
        self._pieces.append(data[at:])
        self.pending = end - at


# The flag of a property, and the functions that encode and decode the property.
_Property = tuple[int, Callable[[Any, str], bytes], Callable[[bytes, int], tuple[Any, int]]]


def _short_string(flag: int) -> _Property:
    return flag, encode_short_string, decode_short_string


_HEADERS = 1 << 13
_DELIVERY_MODE = 1 << 12
_MESSAGE_ID = 1 << 7

# The basic properties in the order of the wire. `Message` stores its attributes in this order too.
_PROPERTIES: dict[str, _Property] = {
    "content_type": _short_string(1 << 15),
    "content_encoding": _short_string(1 << 14),
    "headers": (_HEADERS, encode_table, decode_table),
    "delivery_mode": (_DELIVERY_MODE, encode_octet, decode_octet),
    "priority": (1 << 11, encode_octet, decode_octet),
    "correlation_id": _short_string(1 << 10),
    "reply_to": _short_string(1 << 9),
    "expiration": _short_string(1 << 8),
    "message_id": _short_string(_MESSAGE_ID),
    "timestamp": (1 << 6, encode_timestamp, decode_timestamp),
    "type": _short_string(1 << 5),
    "user_id": _short_string(1 << 4),
    "app_id": _short_string(1 << 3),
    "cluster_id": _short_string(1 << 2),
}


def properties(given: Mapping[str, Any], message_id: bytes = b"") -> tuple[int, bytes]:
    """Encode a message's properties. Return the property flags, and the encoded values.

    Args:
        given: the properties by name, in the order of the wire. Names that are not properties are ignored.
        message_id: the encoded message id to add if `given` has none; empty to add no message id.

    Raises:
        TypeError, ValueError: AMQP cannot represent a property.
    """
    flags, before, after = _split_properties(given)
    if message_id and not flags & _MESSAGE_ID:
        return flags | _MESSAGE_ID, before + message_id + after
    return flags, before + after


def _split_properties(given: Mapping[str, Any]) -> tuple[int, bytes, bytes]:
    """Encode like `properties`, but split the values in front of the message id. An id in `given` begins the end."""
    flags = 0
    values = []
    # Number of values before the message id.
    before = 0
    for name, value in given.items():
        known = _PROPERTIES.get(name)
        if known is None or value is None:
            continue
        flag, encode, _ = known
        flags |= flag
        values.append(encode(value, name))
        if flag > _MESSAGE_ID:
            before += 1
    return flags, b"".join(values[:before]), b"".join(values[before:])


#: The property flags of a message, the encoded properties before and after its message id, and the size of the assigned
#: id in bytes. If the producer assigns no id, the size is 0. An id of the application is in the third element.
Prepared = tuple[int, bytes, bytes, int]


class Content(Protocol):
    """A message with a body, and with one attribute for each property, in the order of the wire."""

    @property
    def body(self) -> bytes: ...


class Route:
    """The frame of ``Basic.Publish`` for an exchange and a routing key, on one channel."""

    __slots__ = ("cost", "exchange", "made_by", "method", "routing_key")

    def __init__(self, channel: int, exchange: str, routing_key: str, mandatory: bool) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        # The size of a plain message's frames without its body, in bytes; set by the encoder.
        self.cost = 0
        # The attribute `mark` of the encoder that made this route.
        self.made_by: object = None
        names = encode_short_string(exchange, "exchange") + encode_short_string(routing_key, "routing_key")
        # The complete Basic.Publish frame.
        self.method = frame(METHOD_FRAME, channel, b"%b\0\0%b%b" % (PUBLISH, names, bytes((mandatory,))))


#: The last two digits of a message id. The index is the last byte of the message's number. Formatting the digits for
#: each message would add 0.2 µs to the 3.3 µs that a message takes.
LAST_DIGITS = tuple(b"%02x" % number for number in range(256))


class PublishEncoder:
    """Encodes messages for one channel.

    Args:
        frame_max: negotiated maximum size of a frame in bytes; 0 for no limit.
        id_prefix: first part of all assigned message ids, at most 243 bytes. A number of 12 hexadecimal digits follows.
        mandatory: ``mandatory`` bit of all messages.
    """

    __slots__ = (
        "_hundreds",
        "_id_head",
        "_id_start",
        "_plain_middle",
        "_routes",
        "_sizes",
        "channel",
        "mandatory",
        "mark",
        "max_body",
    )

    #: Maximum number of cached routes. A full cache is cleared, so that many routing keys do not fill the memory.
    MAX_ROUTES = 1024
    #: Maximum number of body lengths with cached parts.
    MAX_SIZES = 1024

    def __init__(self, channel: int, frame_max: int, *, id_prefix: str = "", mandatory: bool = False) -> None:
        self.channel = channel
        self.mandatory = mandatory
        #: All routes of this encoder have this object as `made_by`, so routes of other encoders are recognised.
        self.mark = object()
        # Maximum bytes of the payload of a header or body frame.
        self.max_body = (frame_max or 1 << 31) - FRAME_OVERHEAD
        prefix = id_prefix.encode()
        if len(prefix) > 255 - 12:
            raise ValueError(f"id_prefix has {len(prefix)} bytes; a message id has room for {255 - 12}")
        # The start of an encoded message id: its length and prefix. The number follows.
        self._id_head = bytes((len(prefix) + 12,)) + prefix
        # Cached parts for the 256 numbers that differ only in their last two hexadecimal digits. `_hundreds` is the
        # number without these digits. `_id_start` is the message id without them. `_plain_middle` has the bytes of a
        # header frame from the flags up to these digits.
        self._hundreds = -1
        self._id_start = self._plain_middle = b""
        self._routes: dict[tuple[str, str], Route] = {}
        # Two cached parts for each body length. The first is the header frame of a plain message up to the flags. The
        # second has the bytes between the properties and the body, if the body fits into one frame.
        self._sizes: dict[int, tuple[bytes, bytes]] = {}

    def route(self, exchange: str, routing_key: str) -> Route:
        """Return the route for an exchange and a routing key. The route is made on first use.

        Raises:
            TypeError, ValueError: the exchange or the routing key is not a ``str``, or has more than 255 bytes.
        """
        key = (exchange, routing_key)
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= self.MAX_ROUTES:
                self._routes.clear()
            route = Route(self.channel, exchange, routing_key, self.mandatory)
            header = _HEADER_HEAD.size + 1 + len(self._id_head) + 12
            route.cost = len(route.method) + header + 2 * FRAME_OVERHEAD
            route.made_by = self.mark
            self._routes[key] = route
        return route

    def plain(self, length: int, number: int) -> tuple[bytes, bytes, bytes]:
        """Return parts of a plain message's frames. The only properties are `delivery_mode` and `message_id`.

        Args:
            length: length of the body, at most `max_body` bytes.
            number: number in the message id, below 2**48.

        Returns:
            Three parts. The second part begins with the flags. Between the second and the third part, the last two
            digits of the message id are missing. Numbers that differ only in these digits have the same parts. The
            caller adds these digits, the body and a frame end.
        """
        if number >> 8 != self._hundreds:
            self._next_hundreds(number >> 8)
        head, tail = self._sizes.get(length) or self._next_size(length)
        return head, self._plain_middle, tail

    def _next_hundreds(self, hundreds: int) -> None:
        id_start = b"%b%010x" % (self._id_head, hundreds)
        middle = (_DELIVERY_MODE | _MESSAGE_ID).to_bytes(2, "big") + b"\2" + id_start
        # Ctrl-C cannot come between these assignments, because they call no function. So the parts always match.
        self._id_start, self._plain_middle, self._hundreds = id_start, middle, hundreds

    def _next_size(self, length: int) -> tuple[bytes, bytes]:
        header = _HEADER_HEAD.size + 1 + len(self._id_head) + 12
        head = _HEADER_FRAME_HEAD.pack(HEADER_FRAME, self.channel, header, _BASIC, 0, length, 0)[:-2]
        # Without a body there is no body frame. In this case the frame end that the caller adds ends the header frame.
        tail = b"\xce" + _FRAME_HEAD.pack(BODY_FRAME, self.channel, length) if length else b""
        if len(self._sizes) >= self.MAX_SIZES:
            self._sizes.clear()
        self._sizes[length] = head, tail
        return head, tail

    def prepare(self, message: Content, *, has_id: bool) -> Prepared:
        """Encode the properties of a message.

        Args:
            has_id: whether to assign a message id to a message without one.

        Raises:
            TypeError, ValueError: AMQP cannot represent a property, or the properties do not fit into one frame.
        """
        flags, before, after = _split_properties(message.__dict__)
        id_size = 0
        if has_id and not flags & _MESSAGE_ID:
            id_size = len(self._id_head) + 12
            flags |= _MESSAGE_ID
        header = _HEADER_HEAD.size + len(before) + id_size + len(after)
        size = self.max_body
        if header > size:
            raise ValueError(
                f"the message's properties need a frame of {header + FRAME_OVERHEAD} bytes, and the broker accepts at "
                f"most {size + FRAME_OVERHEAD} bytes; shorten its headers"
            )
        return flags, before, after, id_size

    def cost(self, route: Route, length: int, prepared: Prepared) -> int:
        """Return the size of the frames of a message, in bytes."""
        _, before, after, id_size = prepared
        header = _HEADER_HEAD.size + len(before) + id_size + len(after)
        return len(route.method) + header + length + FRAME_OVERHEAD * (1 - -length // self.max_body)

    def frames(self, route: Route, body: bytes, prepared: Prepared, number: int) -> list[bytes]:
        """Return the frames of a message.

        Args:
            number: number in the message id, if an id is assigned.

        Returns:
            The first element contains the method frame, the header frame and the first body frame. Each further element
            is a body frame.
        """
        flags, before, after, id_size = prepared
        message_id = b""
        if id_size:
            if number >> 8 != self._hundreds:
                self._next_hundreds(number >> 8)
            message_id = self._id_start + LAST_DIGITS[number & 255]
        length = len(body)
        size = self.max_body
        header = _HEADER_HEAD.size + len(before) + id_size + len(after)
        head = _HEADER_FRAME_HEAD.pack(HEADER_FRAME, self.channel, header, _BASIC, 0, length, flags)
        if length <= size:
            _, tail = self._sizes.get(length) or self._next_size(length)
            return [b"".join((route.method, head, before, message_id, after, tail, body, b"\xce"))]
        frames = [frame(BODY_FRAME, self.channel, body[at : at + size]) for at in range(0, length, size)]
        frames[0] = b"".join((route.method, head, before, message_id, after, b"\xce", frames[0]))
        return frames


def content_header(message: Content, message_id: bytes = b"") -> bytes:
    """Return the payload of a message's content header frame.

    `properties` describes `message_id` and the errors.
    """
    flags, values = properties(message.__dict__, message_id)
    return _HEADER_HEAD.pack(_BASIC, 0, len(message.body), flags) + values


def plain_content_header(length: int, message_id: bytes) -> bytes:
    """Return the payload of the content header of a message that has only a `delivery_mode` and a `message_id`."""
    return b"%b\2%b" % (_HEADER_HEAD.pack(_BASIC, 0, length, _DELIVERY_MODE | _MESSAGE_ID), message_id)


def body_size(header: bytes) -> int:
    """Return the body length in the payload of a content header. Raise `struct.error` if the payload is too short."""
    return int(_BODY_SIZE.unpack_from(header, 4)[0])


def add_header(header: bytes, name: str, value: Any) -> bytes:
    """Return the payload of a content header frame with an added header. Other properties keep their bytes.

    Args:
        name: name of the header. An existing header with this name is replaced.

    Raises:
        IndexError, ValueError, struct.error: the payload is not a content header.
    """
    kind, weight, size, flags = _HEADER_HEAD.unpack_from(header)
    at = _HEADER_HEAD.size
    for before in "content_type", "content_encoding":
        if flags & _PROPERTIES[before][0]:
            at = decode_short_string(header, at)[1]
    added = encode_table({name: value}, "headers")
    stop = at
    if flags & _HEADERS:
        table, stop = decode_table(header, at)
        if name in table:
            if table[name] is value:
                # Do not encode the headers again: software that encodes other values may have written them.
                return header
            added = encode_table(table | {name: value}, "headers")
        else:
            entries = header[at + 4 : stop] + added[4:]
            added = len(entries).to_bytes(4, "big") + entries
    head = _HEADER_HEAD.pack(kind, weight, size, flags | _HEADERS)
    return b"".join((head, header[_HEADER_HEAD.size : at], added, header[stop:]))


def decode_properties(header: bytes) -> dict[str, Any]:
    """Return the properties in the payload of a content header frame, by name. Timestamps are in UTC.

    Raises:
        IndexError, ValueError, struct.error: the payload is not a content header.
    """
    kind, _, _, flags = _HEADER_HEAD.unpack_from(header)
    if kind != _BASIC or flags & 3:
        raise ValueError(f"class {kind} with property flags 0x{flags:04x} is not a content header of class basic")
    values: dict[str, Any] = {}
    at = _HEADER_HEAD.size
    for name, (flag, _, decode) in _PROPERTIES.items():
        if flags & flag:
            values[name], at = decode(header, at)
    if at != len(header):
        raise ValueError(f"{len(header) - at} bytes follow the last property")
    return values
