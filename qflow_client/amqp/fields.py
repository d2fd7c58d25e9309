"""Encodes and decodes AMQP 0-9-1 data fields (section 4.2.5): octets, short strings, timestamps and field tables.

The encoder uses only field types that RabbitMQ and its usual clients decode in the same way. Integers are encoded as
``I`` (32 bits) or ``l`` (64 bits). The decoder accepts all field types of RabbitMQ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import isfinite
from struct import Struct
from struct import error as struct_error
from types import NoneType
from typing import Any

__all__ = [
    "MAX_DEPTH",
    "decode_octet",
    "decode_short_string",
    "decode_table",
    "decode_timestamp",
    "encode_octet",
    "encode_short_string",
    "encode_table",
    "encode_timestamp",
]

#: Maximum depth of nested tables and arrays. Most clients decode recursively, so they fail at some depth.
MAX_DEPTH = 100

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEFORE = timedelta(-1)
_SIZE = Struct(">I")
_LONGLONG = Struct(">Q")
_STRING = Struct(">cI").pack
_INT = Struct(">ci").pack
_LONG = Struct(">cq").pack
_DOUBLE = Struct(">cd").pack
_DECIMAL = Struct(">cBi").pack
_OCTETS = tuple(bytes((value,)) for value in range(256))

# Cache of encoded keys. Most messages have the same keys as the previous message.
_keys: dict[str, bytes] = {}
# The maximum number of cached keys. A full cache is cleared before another key is added.
_MAX_KEYS = 1024


def encode_octet(value: int, name: str) -> bytes:
    """Encode an integer of 8 bits. Raise `ValueError` with the name of the value if it is not from 0 to 255."""
    if not 0 <= value <= 255:
        raise ValueError(f"{name} must be from 0 to 255, not {value!r}")
    return _OCTETS[value]


def encode_short_string(text: str, name: str) -> bytes:
    """Encode a short string.

    Args:
        name: name of the value, for error texts.

    Raises:
        TypeError: the value is not a ``str``.
        ValueError: the text has more than 255 bytes, or is not valid Unicode.
    """
    if not isinstance(text, str):
        # The error shows only harmless values, because other values may contain a password.
        is_harmless = isinstance(text, (NoneType, float, int)) or (isinstance(text, bytes) and b"@" not in text)
        value = f": {text!r:.60}" if is_harmless else ""
        raise TypeError(f"{name} must be a str, not {type(text).__name__}{value}")
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise _no_text(name, error) from error
    if len(raw) > 255:
        raise ValueError(f"{name} has {len(raw)} bytes; AMQP carries at most 255: {text[:40]!r}…")
    return _OCTETS[len(raw)] + raw


def _no_text(name: str, error: UnicodeEncodeError) -> ValueError:
    return ValueError(f"{name} cannot be encoded as UTF-8: {error}")


def encode_timestamp(value: datetime | int, name: str) -> bytes:
    """Encode a time as a timestamp: whole seconds since 1970.

    Args:
        value: a time, or whole seconds since 1970. A naive ``datetime`` is local time.
        name: name of the value, for error texts.

    Raises:
        ValueError: a ``datetime`` is before 1970 or, in UTC, after 9999; or an integer is negative, or has more than 64
            bits.
    """
    if isinstance(value, datetime):
        try:
            since = value.astimezone(UTC) - _EPOCH
        except (OverflowError, ValueError):
            # In UTC, the time is before year 1 or after year 9999.
            since = _BEFORE
        if since.days < 0:
            raise ValueError(f"{name} must be from 1970 to 9999, not {value!r}")
        value = since.days * 86400 + since.seconds
    try:
        return _LONGLONG.pack(value)
    except struct_error:
        raise ValueError(f"{name} must be from 0 to {(1 << 64) - 1}, not {value!r}") from None


def encode_table(table: Mapping[str, Any], name: str) -> bytes:
    """Encode a field table.

    Args:
        table: a mapping. The values are ``str``, ``bool``, ``int``, ``float``, ``Decimal``, bytes, ``datetime`` (local
            time if it is naive) or ``None``. Lists, tuples and mappings of these types are allowed too.
        name: name of the table, for error texts. The texts also contain the keys that lead to the invalid value.

    Raises:
        TypeError: a key is not a ``str``, or a value has none of these types.
        ValueError: AMQP cannot represent a value, the table is nested too deep, or another thread changed it.
    """
    try:
        return _table(table, 1)
    except RuntimeError as error:
        # Another thread has changed the table, or the stack was nearly full.
        raise ValueError(f"{name} cannot be encoded: {error}") from error
    except (TypeError, ValueError) as error:
        raise _inside(name, error) from None


def _inside(key: str, error: Exception) -> Exception:
    """Return an error with `key` added to the path to the invalid value."""
    text = str(error)
    # Error texts of this module can follow a name directly. Other texts need a colon after the name.
    text = f"{key}{text}" if text.startswith((" ", ":", "[")) else f"{key}: {text}"
    if len(text) > 400:
        text = f"{text[:120]}…{text[-279:]}"
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def _table(table: Mapping[str, Any], depth: int) -> bytes:
    pieces = []
    for key, value in table.items():
        try:
            pieces.append(_keys.get(key) or _key(key))
            pieces.append(_value(value, depth))
        except (TypeError, ValueError) as error:
            raise _inside(f"[{key!r:.60}]", error) from None
    data = b"".join(pieces)
    return _SIZE.pack(len(data)) + data


def _key(key: str) -> bytes:
    raw = encode_short_string(key, ": its key")
    if len(_keys) >= _MAX_KEYS:
        _keys.clear()
    _keys[key] = raw
    return raw


def _array(items: Sequence[object], depth: int) -> bytes:
    pieces = []
    for index, item in enumerate(items):
        try:
            pieces.append(_value(item, depth))
        except (TypeError, ValueError) as error:
            raise _inside(f"[{index}]", error) from None
    return b"".join(pieces)


def _value(value: object, depth: int) -> bytes:
    """Encode a value, after the octet of its type. `depth` is the depth of the surrounding table or array."""
    if isinstance(value, str):
        try:
            raw = value.encode()
        except UnicodeEncodeError as error:
            raise _no_text("", error) from None
        return _STRING(b"S", len(raw)) + raw
    if value is True:
        return b"t\1"
    if value is False:
        return b"t\0"
    if isinstance(value, int):
        if -0x8000_0000 <= value < 0x8000_0000:
            return _INT(b"I", value)
        if -0x8000_0000_0000_0000 <= value < 0x8000_0000_0000_0000:
            return _LONG(b"l", value)
        raise ValueError(f" has more than 64 bits: {value:#x}; send it as a str")
    if value is None:
        return b"V"
    if isinstance(value, float):
        if not isfinite(value):
            # RabbitMQ closes the connection when it reads NaN or an infinite value.
            raise ValueError(f" is {value!r}, which brokers do not accept; send None, or a str")
        return _DOUBLE(b"d", value)
    if isinstance(value, datetime):
        return b"T" + encode_timestamp(value, "")
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        return _STRING(b"x", len(raw)) + raw
    if isinstance(value, Decimal):
        return _decimal(value)
    if depth >= MAX_DEPTH:
        raise ValueError(
            f" is nested more than {MAX_DEPTH} tables and lists deep; a value that contains itself cannot be sent"
        )
    if isinstance(value, (list, tuple)):
        raw = _array(value, depth + 1)
        return _STRING(b"A", len(raw)) + raw
    if isinstance(value, (dict, Mapping)):
        return b"F" + _table(value, depth + 1)
    raise TypeError(
        f" is {value!r:.60}, of {type(value)}; AMQP carries str, bool, int, float, Decimal, bytes, datetime, None, and "
        "lists and dicts of them"
    )


def _decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    # A number of 32 bits has at most ten digits. The exponent of an infinite ``Decimal`` and of NaN is a ``str``.
    if isinstance(exponent, int) and exponent >= -255 and len(digits) + max(exponent, 0) <= 10:
        number = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
        try:
            return _DECIMAL(b"D", max(-exponent, 0), -number if sign else number)
        except struct_error:
            pass
    raise ValueError(f" is {value!r:.60}; AMQP carries 32 bits and 255 decimal places; round it, or send it as a str")


def decode_octet(data: bytes, at: int) -> tuple[int, int]:
    """Return the octet at an offset, and the offset after it. Raise `IndexError` if the data is too short."""
    return data[at], at + 1


def decode_short_string(data: bytes, at: int) -> tuple[str, int]:
    """Decode the short string at an offset. Return the string and the offset after it.

    Raises:
        IndexError, ValueError: the data is too short, or is not UTF-8.
    """
    start = at + 1
    stop = start + data[at]
    if stop > len(data):
        raise ValueError("a short string runs past the end")
    return data[start:stop].decode(), stop


def decode_timestamp(data: bytes, at: int) -> tuple[datetime | int, int]:
    """Decode the timestamp at an offset. Return the time and the offset after it.

    The time is in UTC. If it is after 9999, it is returned in seconds since 1970. If the data is too short,
    `struct.error` is raised.
    """
    (value,) = _LONGLONG.unpack_from(data, at)
    try:
        return _EPOCH + timedelta(seconds=value), at + 8
    except OverflowError:
        return value, at + 8


def decode_table(data: bytes, at: int) -> tuple[dict[str, Any], int]:
    """Decode the field table at an offset. Return the table and the offset after it.

    Raises:
        IndexError, ValueError, struct.error: the data is not a valid field table.
    """
    return _read_table(data, at, 1)


def _read_table(data: bytes, at: int, depth: int) -> tuple[dict[str, Any], int]:
    at, stop = _extent(data, at)
    table = {}
    while at < stop:
        key, at = decode_short_string(data, at)
        table[key], at = _read_value(data, at, depth)
    if at != stop:
        raise ValueError("the last value of a table runs past its end")
    return table, stop


def _extent(data: bytes, at: int) -> tuple[int, int]:
    """Read the size of a value at an offset. Return the start and the end of this value."""
    (size,) = _SIZE.unpack_from(data, at)
    if at + 4 + size > len(data):
        raise ValueError(f"a value has a length of {size} bytes, but only {len(data) - at - 4} bytes are left")
    return at + 4, at + 4 + size


# The decoders of booleans, integers and floating-point numbers, by field type.
_NUMBERS = {
    b"t": Struct(">?"),
    b"b": Struct(">b"),
    b"B": Struct(">B"),
    b"s": Struct(">h"),
    b"u": Struct(">H"),
    b"I": Struct(">i"),
    b"i": Struct(">I"),
    b"l": Struct(">q"),
    b"L": Struct(">q"),
    b"f": Struct(">f"),
    b"d": Struct(">d"),
}
_SCALED = Struct(">Bi")
_NULLS = re.compile(rb"[V\0]+")


def _read_value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    kind = data[at : at + 1]
    at += 1
    number = _NUMBERS.get(kind)
    if number is not None:
        return number.unpack_from(data, at)[0], at + number.size
    match kind:
        case b"S":
            at, stop = _extent(data, at)
            try:
                return data[at:stop].decode(), stop
            except UnicodeDecodeError:
                return data[at:stop], stop
        case b"x":
            at, stop = _extent(data, at)
            return data[at:stop], stop
        case b"T":
            return decode_timestamp(data, at)
        case b"V" | b"\0":
            return None, at
        case b"D":
            places, unscaled = _SCALED.unpack_from(data, at)
            # Create the value from text, because arithmetic would round with the decimal context of the thread.
            return Decimal(f"{unscaled}E-{places}"), at + _SCALED.size
        case b"F" | b"A" if depth >= MAX_DEPTH:
            raise ValueError(f"tables and arrays are nested more than {MAX_DEPTH} deep")
        case b"F":
            return _read_table(data, at, depth + 1)
        case b"A":
            return _read_array(data, at, depth + 1)
    raise ValueError(f"field type {kind!r} does not exist")


def _read_array(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    at, stop = _extent(data, at)
    items: list[Any] = []
    while at < stop:
        # Decode a run of nulls in one step, because a frame may have 130,000 of them.
        if nulls := _NULLS.match(data, at, stop):
            items += [None] * (nulls.end() - at)
            at = nulls.end()
            continue
        item, at = _read_value(data, at, depth)
        items.append(item)
    if at != stop:
        raise ValueError("the last value of an array runs past its end")
    return items, stop
