"""Two other decoders, and that of this package, read the same field tables. Errors name the keys of invalid values."""

from __future__ import annotations

import decimal
import enum
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pamqp.decode
import pika.data
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client.amqp import fields
from qflow_client.amqp.fields import MAX_DEPTH, decode_table, encode_octet, encode_table, encode_timestamp

from .support import HEADERS, as_pamqp_reads, as_pika_reads


def encode(table: Any) -> bytes:
    return encode_table(table, "headers")


def decode(data: bytes) -> dict[str, Any]:
    table, stop = decode_table(data, 0)
    assert stop == len(data)
    return table


# Encoding.


@given(HEADERS)
@example({"float": 0.1, "large": 1e300, "small": -5e-324, "none": None, "list": [1, [], {}, [2]], "": {"": ""}})
@example({"k" * 255: "ü" * 300, "ints": [-(1 << 31), (1 << 31) - 1, 1 << 31, -(1 << 63), (1 << 63) - 1]})
def test_pika_pamqp_and_our_decoder_read_an_encoded_table_with_the_same_values(headers: dict[str, Any]) -> None:
    data = encode(headers)
    assert pamqp.decode.field_table(data) == (len(data), as_pamqp_reads(headers))
    assert pika.data.decode_table(data, 0) == (as_pika_reads(headers), len(data))
    assert decode(data) == headers


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (b"VVV", [None] * 3),
        (b"V\0t\1V", [None, None, True, None]),
        (b"t\0VV", [False, None, None]),
    ],
)
def test_many_consecutive_nulls_in_a_table_are_decoded_at_their_positions(items: bytes, expected: list[Any]) -> None:
    array = len(items).to_bytes(4, "big") + items
    table = b"\1a" + b"A" + array + b"\1b" + b"V"
    assert decode(len(table).to_bytes(4, "big") + table) == {"a": expected, "b": None}


class Colour(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    LARGE = 3


class Fraction(float):
    """A float of another type, as in numpy."""


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (True, b"t\1"),
        (False, b"t\0"),
        (0, b"I\0\0\0\0"),
        (-1, b"I\xff\xff\xff\xff"),
        ((1 << 31) - 1, b"I\x7f\xff\xff\xff"),
        (-(1 << 31), b"I\x80\0\0\0"),
        (1 << 31, b"l\0\0\0\0\x80\0\0\0"),
        (-(1 << 31) - 1, b"l\xff\xff\xff\xff\x7f\xff\xff\xff"),
        ((1 << 63) - 1, b"l\x7f\xff\xff\xff\xff\xff\xff\xff"),
        (-(1 << 63), b"l\x80\0\0\0\0\0\0\0"),
        (Size.LARGE, b"I\0\0\0\3"),
        (0.1, b"d" + struct.pack(">d", 0.1)),
        (Fraction(0.5), b"d" + struct.pack(">d", 0.5)),
        (-0.0, b"d\x80\0\0\0\0\0\0\0"),
        ("", b"S\0\0\0\0"),
        ("ü", b"S\0\0\0\2\xc3\xbc"),
        (Colour.RED, b"S\0\0\0\3red"),
        (b"\xff", b"x\0\0\0\1\xff"),
        (bytearray(b"ab"), b"x\0\0\0\2ab"),
        pytest.param(memoryview(b"a.b.")[::2], b"x\0\0\0\2ab", id="memoryview"),
        (None, b"V"),
        (datetime(1970, 1, 1, tzinfo=UTC), b"T\0\0\0\0\0\0\0\0"),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), b"T" + struct.pack(">Q", 253_402_300_799)),
        (datetime(2013, 1, 1, 7, 15, tzinfo=timezone(timedelta(hours=2))), b"T" + struct.pack(">Q", 1_357_017_300)),
        (Decimal("-1.25"), b"D\2\xff\xff\xff\x83"),
        (Decimal("1.10"), b"D\2\0\0\0\x6e"),
        (Decimal("2E+9"), b"D\0\x77\x35\x94\0"),
        (Decimal("-2147483648E-255"), b"D\xff\x80\0\0\0"),
        (Decimal("-0"), b"D\0\0\0\0\0"),
        ([], b"A\0\0\0\0"),
        ([None, True], b"A\0\0\0\3Vt\1"),
        ((None, [None]), b"A\0\0\0\7VA\0\0\0\1V"),
        ({}, b"F\0\0\0\0"),
        ({"k": None}, b"F\0\0\0\3\1kV"),
        (MappingProxyType({"k": None}), b"F\0\0\0\3\1kV"),
    ],
    ids=repr,
)
def test_each_python_type_is_encoded_with_its_amqp_field_type(value: object, data: bytes) -> None:
    assert encode({"v": value}) == (2 + len(data)).to_bytes(4, "big") + b"\1v" + data
    assert encode({"v": [value]}) == (7 + len(data)).to_bytes(4, "big") + b"\1vA" + len(data).to_bytes(4, "big") + data


@pytest.mark.usefixtures("new_york")
def test_a_naive_datetime_in_a_table_counts_as_local_time_like_the_timestamp_of_a_message() -> None:
    assert decode(encode({"v": datetime(2013, 7, 1, 0, 15)})) == {"v": datetime(2013, 7, 1, 4, 15, tzinfo=UTC)}


def test_the_encoding_of_a_decimal_does_not_depend_on_the_decimal_context_of_the_thread() -> None:
    with decimal.localcontext(decimal.Context(prec=2, traps=[decimal.Inexact, decimal.Rounded])):
        data = encode({"v": Decimal("-12345.6789")})
        value = decode(data)["v"]
    assert str(value) == "-12345.6789"


def test_any_mapping_can_be_encoded_as_a_table_and_the_order_of_its_keys_is_kept() -> None:
    assert list(decode(encode(MappingProxyType({"b": 2, "a": 1})))) == ["b", "a"]


@pytest.mark.parametrize(
    ("encode", "highest"), [(encode_octet, (1 << 8) - 1), (encode_timestamp, (1 << 64) - 1)], ids=["octet", "timestamp"]
)
def test_an_error_about_an_unsigned_integer_outside_its_range_shows_its_name_and_value(
    encode: Callable[[int, str], bytes], highest: int
) -> None:
    assert int.from_bytes(encode(0, "age"), "big") == 0
    assert int.from_bytes(encode(highest, "age"), "big") == highest
    for value in -1, highest + 1:
        with pytest.raises(ValueError, match=f"^age must be from 0 to {highest}, not {value}$"):
            encode(value, "age")


def test_a_field_name_longer_than_255_bytes_raises_an_error() -> None:
    for key in ("k" * 255, "ü" * 127 + "k"):
        assert decode(encode({key: 1})) == {key: 1}
    for key in ("k" * 256, "ü" * 128):
        for _ in range(2):
            with pytest.raises(ValueError, match="its key has 256 bytes; AMQP carries at most 255"):
                encode({key: 1})


def test_memory_does_not_grow_with_the_number_of_different_field_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "_keys", {})
    monkeypatch.setattr(fields, "_MAX_KEYS", 3)
    for number in range(7):
        assert decode(encode({str(number): number, "always": 1})) == {str(number): number, "always": 1}
        assert len(fields._keys) <= 3


# Values that cannot be encoded.

WEST = timezone(timedelta(hours=-12))


@pytest.mark.parametrize(
    ("headers", "error", "text"),
    [
        (
            {"a": object},
            TypeError,
            "['a'] is <class 'object'>, of <class 'type'>; AMQP carries str, bool, int, float, ",
        ),
        ({"a": {"b": [1, "x", {2}]}}, TypeError, "['a']['b'][2] is {2}, of <class 'set'>; AMQP carries str, bool, int"),
        ({"a": "x" * 100 + "\ud800"}, ValueError, "['a'] cannot be encoded as UTF-8: 'utf-8' codec can't encode"),
        ({"a": ["\ud800"]}, ValueError, "['a'][0] cannot be encoded as UTF-8: 'utf-8' codec can't encode"),
        ({"\ud800": 1}, ValueError, "['\\ud800']: its key cannot be encoded as UTF-8: 'utf-8' codec can't encode"),
        ({1: 2}, TypeError, "[1]: its key must be a str, not int: 1"),
        ({"a": {None: 2}}, TypeError, "['a'][None]: its key must be a str, not NoneType: None"),
        ({b"a": 2}, TypeError, "[b'a']: its key must be a str, not bytes: b'a'"),
        ({"a": {"k" * 300: 2}}, ValueError, f"['a']['{'k' * 59}]: its key has 300 bytes; AMQP carries at most 255"),
        ({"a": 1 << 63}, ValueError, "['a'] has more than 64 bits: 0x8000000000000000; send it as a str"),
        ({"a": -(1 << 63) - 1}, ValueError, "['a'] has more than 64 bits: -0x8000000000000001; send it as a str"),
        ({"a": 10**5000}, ValueError, "['a'] has more than 64 bits: 0x"),
        ({"a": float("nan")}, ValueError, "['a'] is nan, which brokers do not accept; send None, or a str"),
        ({"a": [float("-inf")]}, ValueError, "['a'][0] is -inf, which brokers do not accept; send None, or a str"),
        (
            {"a": Decimal("NaN")},
            ValueError,
            "['a'] is Decimal('NaN'); AMQP carries 32 bits and 255 decimal places; round it",
        ),
        ({"a": Decimal("-Infinity")}, ValueError, "['a'] is Decimal('-Infinity'); AMQP carries 32 bits"),
        ({"a": Decimal("2147483648")}, ValueError, "['a'] is Decimal('2147483648'); AMQP carries 32 bits"),
        (
            {"a": Decimal("1E-256")},
            ValueError,
            "['a'] is Decimal('1E-256'); AMQP carries 32 bits and 255 decimal places",
        ),
        ({"a": Decimal("1E+999999")}, ValueError, "['a'] is Decimal('1E+999999'); AMQP carries 32 bits"),
        ({"a": datetime(1960, 1, 1, tzinfo=UTC)}, ValueError, "['a'] must be from 1970 to 9999, not datetime.datetime"),
        (
            {"a": datetime.max.replace(tzinfo=WEST)},
            ValueError,
            "['a'] must be from 1970 to 9999, not datetime.datetime",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_about_a_table_value_that_cannot_be_encoded_shows_its_keys_and_advice(
    headers: Any, error: type[Exception], text: str
) -> None:
    # Twice, because keys are cached.
    for _ in range(2):
        with pytest.raises(error) as caught:
            encode(headers)
        assert str(caught.value).startswith(f"headers{text}")
        assert len(str(caught.value)) <= 400
        assert type(caught.value) is error


def nested(depth: int, *, lists: bool = False) -> dict[str, Any]:
    """Return nested tables, or a table with nested lists."""
    value: Any = [] if lists else {}
    for _ in range(depth - 2):
        value = [value] if lists else {"k": value}
    return {"k": value}


@pytest.mark.parametrize("lists", [False, True])
def test_pika_pamqp_and_our_decoder_read_a_table_of_the_maximum_nesting_depth(lists: bool) -> None:
    headers = nested(MAX_DEPTH, lists=lists)
    data = encode(headers)
    assert pamqp.decode.field_table(data) == (len(data), headers)
    assert pika.data.decode_table(data, 0) == (headers, len(data))
    assert decode(data) == headers
    with pytest.raises(
        ValueError, match="is nested more than 100 tables and lists deep; a value that contains itself cannot"
    ):
        encode(nested(MAX_DEPTH + 1, lists=lists))


def test_encoding_a_table_that_contains_itself_raises_an_error() -> None:
    table: dict[str, Any] = {"a": 1}
    table["self"] = table
    items: list[Any] = [table]
    items.append(items)
    for headers, beginning in ((table, "headers['self']['self']"), ({"k": items}, "headers['k'][0]['self']['self']")):
        with pytest.raises(ValueError, match="a value that contains itself cannot be sent") as caught:
            encode(headers)
        assert str(caught.value).startswith(beginning)
        assert len(str(caught.value)) <= 400


class Changing(Mapping[str, int]):
    """A mapping to which another thread adds."""

    def __init__(self) -> None:
        self.values_of = {"a": 1}

    def __getitem__(self, key: str) -> int:
        return self.values_of.setdefault(key + "x", 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)


def test_headers_that_change_while_they_are_encoded_raise_value_error() -> None:
    with pytest.raises(ValueError, match="headers cannot be encoded: dictionary changed size during iteration"):
        encode(Changing())


class Nowhere(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        raise TypeError("there is no time here")

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> None:
        return None


def test_an_exception_that_a_table_value_raises_while_it_is_encoded_is_reported_with_its_keys() -> None:
    released = memoryview(b"gone")
    released.release()
    with pytest.raises(ValueError, match=r"headers\['a'\]\[0\]: operation forbidden on released memoryview"):
        encode({"a": [released]})
    with pytest.raises(TypeError, match=r"headers\['a'\]: there is no time here"):
        encode({"a": datetime(2013, 1, 1, tzinfo=Nowhere())})


# Decoding.

UNREADABLE = (IndexError, ValueError, struct.error)


def table_of(value: bytes) -> bytes:
    return (2 + len(value)).to_bytes(4, "big") + b"\1v" + value


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"b\xff", -1),
        (b"B\xff", 255),
        (b"s\xff\xfe", -2),
        (b"u\xff\xfe", 65534),
        (b"i\xff\xff\xff\xff", (1 << 32) - 1),
        (b"L\xff\xff\xff\xff\xff\xff\xff\xff", -1),
        (b"f\x3f\0\0\0", 0.5),
        (b"t\2", True),
        (b"S\0\0\0\1\xff", b"\xff"),
        (b"T\0\0\0\1\0\0\0\0", datetime(2106, 2, 7, 6, 28, 16, tzinfo=UTC)),
        (b"T" + struct.pack(">Q", 253_402_300_799), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (b"T" + struct.pack(">Q", 253_402_300_800), 253_402_300_800),
        (b"T\xff\xff\xff\xff\xff\xff\xff\xff", (1 << 64) - 1),
    ],
)
def test_field_types_that_our_encoder_never_writes_can_be_decoded(data: bytes, value: object) -> None:
    found = decode(table_of(data))["v"]
    assert found == value
    assert type(found) is type(value)


def test_a_table_is_decoded_from_the_middle_of_a_buffer() -> None:
    data = encode({"a": 1})
    assert decode_table(b"before" + data + b"after", 6) == ({"a": 1}, 6 + len(data))


EVERYTHING = encode(
    {
        "values": [True, 1, 1 << 40, 0.5, Decimal("1.5"), "text", b"bytes", datetime(2013, 1, 1, tzinfo=UTC), None],
        "table": {"inner": [[], {}]},
    }
)


def test_decoding_a_table_that_is_truncated_at_any_byte_raises_an_error() -> None:
    for size in range(len(EVERYTHING)):
        with pytest.raises(UNREADABLE):
            decode_table(EVERYTHING[:size], 0)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\0\0\0\4\1kI\0\0\0\1", "the last value of a table runs past its end"),
        (b"\0\0\0\x0c\1kA\0\0\0\2I\0\0\0\1", "the last value of an array runs past its end"),
        (b"\0\0\0\1\5k", "a short string runs past the end"),
        (table_of(b"S\0\0\0\2x"), "a value has a length of 2 bytes, but only 1 bytes are left"),
        (table_of(b"x\xff\xff\xff\xff"), "a value has a length of 4294967295 bytes, but only 0 bytes are left"),
        (table_of(b"Z"), "field type b'Z' does not exist"),
        (b"\0\0\0\2\1v", "field type b'' does not exist"),
    ],
)
def test_decoding_bytes_that_are_not_a_table_raises_an_error(data: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        decode_table(data, 0)


@pytest.mark.parametrize("letter", [b"F", b"A"])
def test_decoding_a_table_that_is_nested_too_deep_raises_an_error(letter: bytes) -> None:
    def nested_data(depth: int) -> bytes:
        value = b""
        for _ in range(depth - 1):
            inside = b"\1k" + value if letter == b"F" and value else value
            value = letter + len(inside).to_bytes(4, "big") + inside
        return table_of(value)

    assert decode(nested_data(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 5000):
        with pytest.raises(ValueError, match="tables and arrays are nested more than 100 deep"):
            decode_table(nested_data(depth), 0)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(table_of))
@example(EVERYTHING)
def test_arbitrary_bytes_decode_to_a_table_or_raise_the_documented_error(data: bytes) -> None:
    try:
        _, stop = decode_table(data, 0)
    except UNREADABLE:
        return
    assert stop <= len(data)


@given(st.lists(st.tuples(st.integers(0, len(EVERYTHING) - 1), st.integers(0, 255)), max_size=3))
def test_a_table_with_changed_bytes_decodes_to_a_table_or_raises_the_documented_error(
    others: list[tuple[int, int]],
) -> None:
    data = bytearray(EVERYTHING)
    for at, byte in others:
        data[at] = byte
    try:
        decode_table(bytes(data), 0)
    except UNREADABLE:
        pass
