"""Functions to decode and encode methods and content headers.

The decoder of pamqp accepts truncated strings, so this module decodes methods itself, with pamqp's tables of fields. It
also has its own encoders for the most frequent frames, because the encoders of pamqp are slower.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Any

import pamqp.base
import pamqp.commands
import pamqp.decode
import pamqp.header

from qflow_client.amqp.fields import decode_table
from qflow_client.amqp.frames import (
    BODY_FRAME,
    CHANNEL_CLOSE,
    CONNECTION_CLOSE,
    FRAME_OVERHEAD,
    HEADER_FRAME,
    METHOD_FRAME,
    frame,
)
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode

__all__ = [
    "DELIVERY_MODE_FLAG",
    "EXPIRATION_FLAG",
    "HAS_EXPIRATION",
    "HAS_HEADERS",
    "HAS_REPLY_TO",
    "HEADERS_FLAG",
    "PROPERTIES",
    "REPLY_TO_FLAG",
    "TIMESTAMP_FLAG",
    "UNDECODABLE",
    "ack",
    "check_properties",
    "close",
    "content_frames",
    "decode_method",
    "encode_header",
    "layout",
    "method",
    "method_name",
    "nack",
    "offset",
    "property_size",
    "queue_declare_ok",
    "return_",
    "short",
    "short_property",
    "shortened",
    "time_to_live",
]

_HEAD = Struct(">BHI")
_QUEUE_OK = Struct(">II")
_TAG_BIT = Struct(">QB")
_SIZES = {"octet": 1, "short": 2, "long": 4, "longlong": 8, "timestamp": 8}
#: Exceptions that the decoders raise for invalid bytes, including tables that are nested too deeply.
UNDECODABLE = (ValueError, struct.error, ArithmeticError, OSError, LookupError, TypeError, RecursionError)


def short(text: str) -> bytes:
    """Encode a short string."""
    raw = text.encode()
    return bytes((len(raw),)) + raw


def shortened(text: str) -> str:
    """Return as much of a text as fits into a short string."""
    return text.encode()[:255].decode(errors="ignore")


def method(channel: int, value: pamqp.base.Frame) -> bytes:
    """Encode the frame of any method."""
    return frame(METHOD_FRAME, channel, value.index.to_bytes(4, "big") + value.marshal())


def method_name(payload: bytes) -> str:
    """Return the name of the method in a method frame's payload, such as ``Basic.Publish``."""
    kind: type[pamqp.base.Frame] | None = pamqp.commands.INDEX_MAPPING.get(int.from_bytes(payload[:4], "big"))
    return kind.name if kind is not None else f"unknown method {payload[:4].hex()}"


def _syntax(name: str, text: str) -> ConnectionException:
    return ConnectionException(ReplyCode.SYNTAX_ERROR, f"{name}: {text}")


def decode_method(payload: bytes) -> pamqp.base.Frame:
    """Decode the payload of a method frame to a method object of pamqp.

    Raises:
        ConnectionException: 540 if AMQP 0-9-1 has no such method. 502 if the fields do not fit the method.
    """
    if len(payload) < 4:
        raise _syntax("method frame", f"{len(payload)} bytes cannot hold a class and a method id")
    kind = pamqp.commands.INDEX_MAPPING.get(int.from_bytes(payload[:4], "big"))
    if kind is None:
        class_id, method_id = struct.unpack_from(">HH", payload)
        raise ConnectionException(ReplyCode.NOT_IMPLEMENTED, f"method {method_id} of class {class_id} is not known")
    # The constructor is not called, because for some methods it issues a warning. Every field is set below.
    value: pamqp.base.Frame = object.__new__(kind)
    at, end, bits = 4, len(payload), 0
    for field in value.__slots__:
        data_type = value.amqp_type(field)
        if data_type == "bit":
            if bits == 8:
                at, bits = at + 1, 0
            if at >= end:
                raise _syntax(value.name, f"the frame ends before {field}")
            setattr(value, field, bool(payload[at] >> bits & 1))
            bits += 1
            continue
        if bits:
            at, bits = at + 1, 0
        size = _field_size(data_type, payload, at)
        if at + size > end:
            raise _syntax(value.name, f"the frame ends before the end of {field}")
        try:
            if data_type == "table":
                # pamqp's decoder is slow, because it copies the rest of a table for each field.
                decoded: Any = decode_table(payload, at)[0]
            else:
                decoded = pamqp.decode.by_type(payload[at : at + size], data_type)[1]
            setattr(value, field, decoded)
        except UNDECODABLE as error:
            raise _syntax(value.name, f"{field} cannot be decoded: {error}") from error
        at += size
    if at + (1 if bits else 0) != end:
        raise _syntax(value.name, f"{end - at - (1 if bits else 0)} bytes are left at the end")
    return value


def _field_size(data_type: str, payload: bytes, at: int) -> int:
    if data_type == "shortstr":
        return 1 + payload[at] if at < len(payload) else 1
    if data_type in ("longstr", "table"):
        return 4 + int.from_bytes(payload[at : at + 4], "big")
    return _SIZES[data_type]


# The flags of basic properties in bytes 12 and 13 of a content header.
HEADERS_FLAG = 1 << 13
DELIVERY_MODE_FLAG = 1 << 12
REPLY_TO_FLAG = 1 << 9
EXPIRATION_FLAG = 1 << 8
TIMESTAMP_FLAG = 1 << 6
_USER_ID_FLAG = 1 << 4
#: Flags of basic properties, as bits of byte 12 of a content header.
HAS_HEADERS, HAS_REPLY_TO, HAS_EXPIRATION = HEADERS_FLAG >> 8, REPLY_TO_FLAG >> 8, EXPIRATION_FLAG >> 8
#: Flag and size in bytes of each basic property, in the order on the wire. Size 0 means a short string, -1 a table.
PROPERTIES = (
    (1 << 15, 0),
    (1 << 14, 0),
    (HEADERS_FLAG, -1),
    (DELIVERY_MODE_FLAG, 1),
    (1 << 11, 1),
    (1 << 10, 0),
    (REPLY_TO_FLAG, 0),
    (EXPIRATION_FLAG, 0),
    (1 << 7, 0),
    (TIMESTAMP_FLAG, 8),
    (1 << 5, 0),
    (_USER_ID_FLAG, 0),
    (1 << 3, 0),
    (1 << 2, 0),
)
#: Caches: the result of `layout` for each combination of flags, and encoded header tables that were found valid.
_layouts: dict[int, tuple[tuple[int, int], ...]] = {}
_sound_tables: set[bytes] = set()
_MAX_SOUND_TABLES = 1024
# Maximum size of a cached table in bytes. So all cached tables together take at most 1 MiB.
_MAX_SOUND_TABLE = 1024


def check_properties(header: bytes) -> str | None:
    """Check that a content header is well-formed and that its ``expiration`` is valid.

    Returns:
        The property ``user_id``, which the caller compares with the login; ``None`` if it is absent.

    Raises:
        ChannelException: 406 if the ``expiration`` is not a number of milliseconds.
        ConnectionException: 502 if the header is not well-formed.
    """
    end = len(header)
    flags = int.from_bytes(header[12:14], "big")
    if not flags:
        if end != 14:
            raise _syntax("content header", f"{end - 14} bytes follow the flags, which announce no property")
        return None
    properties = _layouts.get(flags) or layout(flags)
    user_id = None
    at = 14
    is_ascii = header[14:].isascii()
    for flag, size in properties:
        start = at
        if size > 0:
            at += size
        elif at >= end:
            at = end + 1
        elif size == 0:
            at += 1 + header[at]
        else:
            at += 4 + int.from_bytes(header[at : at + 4], "big")
        if at > end:
            raise _syntax("content header", "the frame ends before the end of the properties")
        if size < 0:
            _check_table(header[start:at])
        elif size == 0 and (flag == _USER_ID_FLAG or not is_ascii):
            text = _text(header[start + 1 : at])
            if flag == _USER_ID_FLAG:
                user_id = text
    if at != end:
        raise _syntax("content header", f"{end - at} bytes follow the properties")
    if flags & EXPIRATION_FLAG:
        time_to_live(header)
    return user_id


def layout(flags: int) -> tuple[tuple[int, int], ...]:
    """Return the entries of `PROPERTIES` for the flags that are set."""
    if flags & 3:
        raise _syntax("content header", f"property flags 0x{flags:04x} name properties that class basic does not have")
    found = _layouts[flags] = tuple(entry for entry in PROPERTIES if flags & entry[0])
    return found


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _syntax("content header", f"a short string is not UTF-8: {error}") from error


def _check_table(table: bytes) -> None:
    if table in _sound_tables:
        return
    try:
        decode_table(table, 0)
    except UNDECODABLE as error:
        raise _syntax("content header", f"headers cannot be decoded: {error}") from error
    if len(table) <= _MAX_SOUND_TABLE:
        if len(_sound_tables) >= _MAX_SOUND_TABLES:
            _sound_tables.clear()
        _sound_tables.add(table)


def time_to_live(header: bytes) -> int:
    """Return the time to live of a message in milliseconds. The message must have the property ``expiration``.

    Raises:
        ChannelException: 406 if the property is not a number of milliseconds.
    """
    text = short_property(header, EXPIRATION_FLAG)
    if not text.isascii() or not text.isdigit():
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED,
            f"invalid expiration {text!r}: it must be a whole number of milliseconds, as a string",
        )
    return int(text)


def property_size(header: bytes, at: int, size: int) -> int:
    """Return the size of a property in bytes, including its length field.

    Args:
        size: the size of the property in `PROPERTIES`: bytes, 0 for a short string, or -1 for a table.
    """
    if size > 0:
        return size
    return 1 + header[at] if size == 0 else 4 + int.from_bytes(header[at : at + 4], "big")


def offset(header: bytes, wanted: int) -> int:
    """Return the offset of the property with the flag `wanted` in a content header. The property must exist."""
    at = 14
    for flag, size in layout(int.from_bytes(header[12:14], "big")):
        if flag == wanted:
            break
        at += property_size(header, at, size)
    return at


def short_property(header: bytes, wanted: int) -> str:
    """Return the property with the flag `wanted`, which must exist and be a short string."""
    at = offset(header, wanted)
    return header[at + 1 : at + 1 + header[at]].decode()


def encode_header(size: int, properties: pamqp.commands.Basic.Properties | None) -> bytes:
    """Encode the payload of a content header frame for a body of `size` bytes."""
    return pamqp.header.ContentHeader(body_size=size, properties=properties).marshal()


def ack(channel: int, tag: int, multiple: bool) -> bytes:
    """Encode a ``Basic.Ack`` frame."""
    return b"\1%b\0\0\0\x0d\0\x3c\0\x50%b\xce" % (channel.to_bytes(2, "big"), _TAG_BIT.pack(tag, multiple))


def nack(channel: int, tag: int) -> bytes:
    """Encode a ``Basic.Nack`` frame for one message."""
    return b"\1%b\0\0\0\x0d\0\x3c\0\x78%b\xce" % (channel.to_bytes(2, "big"), _TAG_BIT.pack(tag, 0))


def return_(channel: int, code: ReplyCode, text: str, names: bytes) -> bytes:
    """Encode a ``Basic.Return`` frame; `names` are the exchange and the routing key as short strings."""
    return frame(METHOD_FRAME, channel, b"\0\x3c\0\x32" + code.to_bytes(2, "big") + short(text) + names)


def close(channel: int, code: int, text: str, cause: bytes) -> bytes:
    """Encode a ``Channel.Close`` frame, or on channel 0 a ``Connection.Close`` frame.

    A long `text` is shortened. `cause` has the class id and method id of the method at fault; missing bytes are zeros.
    """
    kind = CHANNEL_CLOSE if channel else CONNECTION_CLOSE
    payload = kind + code.to_bytes(2, "big") + short(shortened(text)) + cause.ljust(4, b"\0")
    return frame(METHOD_FRAME, channel, payload)


def queue_declare_ok(channel: int, name: str, message_count: int, consumer_count: int) -> bytes:
    """Encode a ``Queue.Declare-Ok`` frame."""
    return frame(METHOD_FRAME, channel, b"\0\x32\0\x0b" + short(name) + _QUEUE_OK.pack(message_count, consumer_count))


def content_frames(channel: int, header: bytes, body: bytes, frame_max: int) -> bytes:
    """Encode the header frame and the body frames of a message. `header` is the payload of the header frame."""
    head = b"%b%b\xce" % (_HEAD.pack(HEADER_FRAME, channel, len(header)), header)
    size = frame_max - FRAME_OVERHEAD
    if len(body) <= size:
        return b"%b%b%b\xce" % (head, _HEAD.pack(BODY_FRAME, channel, len(body)), body) if body else head
    parts = [head]
    parts.extend(frame(BODY_FRAME, channel, body[at : at + size]) for at in range(0, len(body), size))
    return b"".join(parts)
