"""Converts the rows of a DataFrame to messages, and checks the columns and their types."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from qflow_client.errors import QflowError
from qflow_client.message import Message

__all__ = ["Row", "RowError", "Rows", "SchemaError"]

#: Payload, exchange and routing key of one row. ``None`` stands for the exchange or routing key of the job.
Row = tuple[bytes | Message, str | None, str | None]

_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_SCALARS = (StringType, BinaryType, BooleanType, *_WHOLE, FloatType, DoubleType, TimestampType)
# Types of single values that can be converted to JSON.
_JSON = (*_SCALARS, DecimalType, DateType, TimestampNTZType)

# For each column, its allowed types and a description of the types.
_COLUMNS: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "body": ((BinaryType, StringType), "binary or string"),
    "exchange": ((StringType,), "string"),
    "routing_key": ((StringType,), "string"),
    "content_type": ((StringType,), "string"),
    "content_encoding": ((StringType,), "string"),
    "headers": ((MapType, StructType), "a map from string, or a struct"),
    "delivery_mode": (_WHOLE, "a whole number"),
    "priority": (_WHOLE, "a whole number"),
    "correlation_id": ((StringType,), "string"),
    "reply_to": ((StringType,), "string"),
    "expiration": ((StringType, *_WHOLE), "string or a whole number, of milliseconds"),
    "message_id": ((StringType,), "string"),
    "timestamp": ((TimestampType, *_WHOLE), "timestamp, or a whole number of seconds since 1970"),
    "type": ((StringType,), "string"),
    "user_id": ((StringType,), "string"),
    "app_id": ((StringType,), "string"),
}
# `_digest` depends on the `repr` of this object. In sessions with the time zone UTC, pyarrow returns it with each time.
_UTC = ZoneInfo("UTC")
_NO_BODY = "body is null; leave such rows out, or give them a body: coalesce(body, '')"
_ROUTES = ("body", "exchange", "routing_key")


class SchemaError(QflowError, TypeError):
    """A column of a DataFrame is missing or not supported. The text contains the name and the type of the column."""


class RowError(QflowError, ValueError):
    """AMQP cannot represent a row. The text contains the partition, the number of the row from 0, and the reason."""


class Rows:
    """Converts rows to messages.

    Args:
        body_format: with ``"column"`` the column ``body`` is the body. With ``"json"`` the body is a JSON object with
            all columns except the exchange, the routing key and the properties.
        message_id: with ``"column"`` the message id is the value of the column ``message_id``, if there is one. With
            ``"hash"`` it is a digest of all data to send. With ``"position"`` it contains the row's number. Otherwise
            the producer assigns the message id.

    Raises:
        SchemaError: a column has the wrong type or is not allowed, or no column can be the body.
    """

    def __init__(self, schema: StructType, body_format: str, message_id: str) -> None:
        names = schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(f"two columns are named {', '.join(twice)}")
        self._names = tuple(names)
        self._is_json = body_format == "json"
        self._message_id = message_id
        # For each column of a JSON body, its name and a function that converts a value (``None`` for no conversion).
        self._members: list[tuple[str, Callable[[Any], Any] | None]] = []
        for field in schema.fields:
            self._check(field.name, field.dataType)
        if not self._is_json and "body" not in names:
            raise SchemaError(
                f"there is no column body (binary or string); the columns are {', '.join(names) or 'none'}; rename "
                "one to body, or set bodyFormat to json"
            )
        if self._is_json and not self._members:
            raise SchemaError(
                "bodyFormat=json: every column is a property, and no column is left for the body; add one"
            )
        if "message_id" in names and message_id not in ("column", "producer"):
            raise SchemaError(f"messageId={message_id} and a column message_id: remove one of the two")
        self._properties = tuple(
            name
            for name in names
            if name in _COLUMNS and name not in _ROUTES and (name != "message_id" or message_id == "column")
        )

    def _check(self, name: str, kind: DataType) -> None:
        known = _COLUMNS.get(name)
        if known is None or (name == "body" and self._is_json):
            if not self._is_json:
                raise SchemaError(
                    f"column {name} ({kind.simpleString()}) is neither the body, nor routing, nor a property of "
                    f"AMQP ({', '.join(_COLUMNS)}); drop it, or set bodyFormat to json to put it into the body"
                )
            self._members.append((name, _json_converter(name, kind)))
            return
        types, words = known
        if not isinstance(kind, types):
            raise SchemaError(f"column {name} is {kind.simpleString()}; it must be {words}")
        if name == "headers":
            _check_headers(kind)

    def messages(self, batch: pa.RecordBatch, number: int, id_prefix: str | None, mark: str | None) -> Iterator[Row]:
        """Yield the data to send for each row of a batch, in order.

        Args:
            number: number of the batch's first row in the partition, from 0.
            id_prefix: text before the row's number in a message id. ``None`` if message ids do not contain the number.
            mark: name of a header that every message gets with the value true; ``None`` to add no header.

        Raises:
            OverflowError: Python cannot represent a time.
            TypeError, ValueError: AMQP cannot represent a row.
        """
        columns = dict(zip(self._names, batch.columns, strict=True))
        bodies = self._json(columns) if self._is_json else _bodies(columns["body"])
        nothing: Sequence[None] = [None] * batch.num_rows
        exchanges = columns["exchange"].to_pylist() if "exchange" in columns else nothing
        keys = columns["routing_key"].to_pylist() if "routing_key" in columns else nothing
        is_bare = not self._properties and not self._is_json and self._message_id in ("column", "producer")
        if is_bare and mark is None:
            for body, exchange, key in zip(bodies, exchanges, keys, strict=True):
                if body is None:
                    raise ValueError(_NO_BODY)
                yield body, exchange, key
            return
        names = self._properties
        values = [_VALUES.get(name, _plain)(columns[name]) for name in names]
        content_type = "application/json" if self._is_json else None
        for at, (body, exchange, key, *row) in enumerate(zip(bodies, exchanges, keys, *values, strict=True), number):
            if body is None:
                raise ValueError(_NO_BODY)
            given = dict(zip(names, row, strict=True))
            if content_type is not None:
                given.setdefault("content_type", content_type)
            if id_prefix is not None:
                given["message_id"] = f"{id_prefix}{at}"
            elif self._message_id == "hash":
                given["message_id"] = _digest(body, exchange, key, row)
            if mark is not None:
                given["headers"] = {**(given.get("headers") or {}), mark: True}
            if given.get("delivery_mode", 0) is None:
                del given["delivery_mode"]
            yield Message(body, **given), exchange, key

    def _json(self, columns: dict[str, pa.Array]) -> Iterator[bytes]:
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
        names = [name for name, _ in self._members]
        values = []
        for name, convert in self._members:
            column = columns[name].to_pylist()
            values.append(column if convert is None else [None if each is None else convert(each) for each in column])
        for row in zip(*values, strict=True):
            # Leave null values out of the JSON object, as Spark's to_json does.
            yield encode({name: value for name, value in zip(names, row, strict=True) if value is not None}).encode()


def _bodies(column: pa.Array) -> list[bytes | None]:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    bodies: list[bytes | None] = column.to_pylist()
    return bodies


def _plain(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _expirations(column: pa.Array) -> list[str | None]:
    return [None if value is None else str(value) for value in column.to_pylist()]


def _headers(column: pa.Array) -> list[dict[str, Any] | None]:
    # `to_pylist` returns a map as a list of pairs, and a struct as a dict.
    return [None if value is None else dict(value) for value in column.to_pylist()]


_VALUES: dict[str, Callable[[pa.Array], list[Any]]] = {"expiration": _expirations, "headers": _headers}


def _digest(body: bytes, exchange: str | None, key: str | None, row: Sequence[Any]) -> str:
    """Return a message id that is a digest of the data to send. Equal rows have equal message ids."""
    digest = blake2b(body, digest_size=16)
    rest: list[Any] = [exchange, key]
    for value in row:
        rest.append(
            sorted((name, _utc(each)) for name, each in value.items()) if isinstance(value, dict) else _utc(value)
        )
    if any(value is not None for value in rest):
        digest.update(repr(rest).encode())
    return digest.hexdigest()


def _utc(value: Any) -> Any:
    """Return a time in UTC, and any other value as it is. Spark's times have the time zone of the session."""
    return value.astimezone(_UTC) if isinstance(value, datetime) else value


def _check_headers(kind: DataType) -> None:
    fields = (
        [(field.name, field.dataType) for field in kind.fields]
        if isinstance(kind, StructType)
        else [("its values", kind.valueType)]
    )
    if isinstance(kind, MapType) and not isinstance(kind.keyType, StringType):
        raise SchemaError(f"column headers is {kind.simpleString()}; its keys must be string")
    for name, value in fields:
        if not isinstance(value, _SCALARS):
            raise SchemaError(
                f"column headers is {kind.simpleString()}; {name} must be string, binary, boolean, a number or "
                "timestamp"
            )


def _json_converter(name: str, kind: DataType) -> Callable[[Any], Any] | None:
    """Return a function that converts a value for JSON, or ``None`` if no conversion is needed."""
    if isinstance(kind, StructType):
        members = [(field.name, _json_converter(f"{name}.{field.name}", field.dataType)) for field in kind.fields]
        return lambda value: {
            member: (value[member] if convert is None else convert(value[member]))
            for member, convert in members
            if value[member] is not None
        }
    if isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise SchemaError(f"column {name} is {kind.simpleString()}; the keys of a JSON object must be string")
        of_value = _json_converter(f"{name}'s values", kind.valueType)
        return lambda value: {
            key: (each if of_value is None or each is None else of_value(each)) for key, each in value
        }
    if isinstance(kind, ArrayType):
        of_element = _json_converter(f"{name}'s elements", kind.elementType)
        return (
            None if of_element is None else lambda value: [None if each is None else of_element(each) for each in value]
        )
    if not isinstance(kind, _JSON):
        raise SchemaError(f"column {name} is {kind.simpleString()}, which JSON does not have; cast it, or drop it")
    if isinstance(kind, BinaryType):
        return lambda value: base64.b64encode(value).decode()
    if isinstance(kind, (DateType, TimestampType, TimestampNTZType)):
        return lambda value: value.isoformat()
    if isinstance(kind, DecimalType):
        # Convert a decimal to text, because often no float has exactly the same value. `str` may add an exponent.
        return lambda value: format(value, "f")
    if isinstance(kind, (FloatType, DoubleType)):
        return _finite
    return None


def _finite(value: float) -> float | str:
    # Infinity and NaN become text, as in Spark's to_json, because JSON has no such numbers.
    return value if value - value == 0 else {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, "NaN")
