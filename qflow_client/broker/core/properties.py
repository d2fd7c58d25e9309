"""Functions that read the properties of a well-formed content header, or return a changed copy of the header."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pamqp.commands

from qflow_client.amqp.fields import decode_short_string, decode_table, decode_timestamp
from qflow_client.broker.core.wire import (
    DELIVERY_MODE_FLAG,
    EXPIRATION_FLAG,
    HEADERS_FLAG,
    PROPERTIES,
    REPLY_TO_FLAG,
    TIMESTAMP_FLAG,
    layout,
    offset,
    property_size,
    short,
)

__all__ = ["decode_headers", "decode_properties", "is_persistent", "with_headers", "with_reply_to"]

#: Bytes of a value in a field table, for each type of fixed size. Other values begin with their size in four bytes.
_FIELD_SIZES = dict(zip(b"tbBsuIilLfdDTV\0", (1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 5, 8, 0, 0), strict=True))
_PROPERTY_NAMES = dict(zip((flag for flag, _ in PROPERTIES), pamqp.commands.Basic.Properties.__slots__, strict=True))


def decode_properties(header: bytes) -> pamqp.commands.Basic.Properties:
    """Return the basic properties in the payload of a well-formed content header frame.

    A timestamp that `datetime` cannot represent is omitted.
    """
    properties = pamqp.commands.Basic.Properties()
    at = 14
    for flag, size in layout(int.from_bytes(header[12:14], "big")):
        value: Any
        if size == 0:
            value, at = decode_short_string(header, at)
        elif size < 0:
            value, at = decode_table(header, at)
        elif flag == TIMESTAMP_FLAG:
            value, at = decode_timestamp(header, at)
            value = value if isinstance(value, datetime) else None
        else:
            value, at = header[at], at + 1
        setattr(properties, _PROPERTY_NAMES[flag], value)
    return properties


def decode_headers(header: bytes) -> dict[str, Any]:
    """Decode only the property ``headers`` of a content header. The result is empty if there are no headers."""
    if not int.from_bytes(header[12:14], "big") & HEADERS_FLAG:
        return {}
    return decode_table(header, offset(header, HEADERS_FLAG))[0]


def _with_properties(header: bytes, changes: dict[int, bytes | None]) -> bytes:
    """Return a content header with some properties replaced or removed. The other properties stay as received."""
    properties: dict[int, bytes | None] = {}
    at = 14
    for flag, size in layout(int.from_bytes(header[12:14], "big")):
        stop = at + property_size(header, at, size)
        properties[flag] = header[at:stop]
        at = stop
    there = {flag: raw for flag, raw in (properties | changes).items() if raw is not None}
    return b"".join((header[:12], sum(there).to_bytes(2, "big"), *(there[flag] for flag in sorted(there)[::-1])))


def with_headers(header: bytes, headers: dict[bytes, bytes]) -> bytes:
    """Return a content header with entries of its table ``headers`` added or replaced, and without ``expiration``.

    `headers` has, for each name, the encoded value with its type.
    """
    fields: dict[bytes, bytes] = {}
    if int.from_bytes(header[12:14], "big") & HEADERS_FLAG:
        at = offset(header, HEADERS_FLAG)
        end = at + property_size(header, at, -1)
        at += 4
        while at < end:
            kind_at = at + 1 + header[at]
            size = _FIELD_SIZES.get(header[kind_at])
            if size is None:
                size = 4 + int.from_bytes(header[kind_at + 1 : kind_at + 5], "big")
            stop = kind_at + 1 + size
            fields[header[at + 1 : kind_at]] = header[kind_at:stop]
            at = stop
    table = b"".join(b"%c%b%b" % (len(name), name, value) for name, value in (fields | headers).items())
    changes = {HEADERS_FLAG: len(table).to_bytes(4, "big") + table, EXPIRATION_FLAG: None}
    return _with_properties(header, changes)


def with_reply_to(header: bytes, name: str) -> bytes:
    """Return a copy of a content header with `name` as ``reply_to``. Everything else stays as received."""
    return _with_properties(header, {REPLY_TO_FLAG: short(name)})


def is_persistent(header: bytes) -> bool:
    """Whether the property ``delivery_mode`` of a well-formed content header is 2 (persistent)."""
    flags = header[12]
    if not flags & DELIVERY_MODE_FLAG >> 8:
        return False
    # If no property comes before delivery_mode, its offset is known.
    if not flags & 0xE0:
        return header[14] == 2
    return header[offset(header, DELIVERY_MODE_FLAG)] == 2
