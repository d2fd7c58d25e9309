"""Converts deliveries to rows, and rows to Arrow. This module defines the columns that a job reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pika
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from qflow_client.spark.columns import SchemaError

__all__ = ["COLUMNS", "MOST_BYTES", "MOST_ROWS", "SCHEMA", "Row", "batch_of", "check_schema", "in_columns", "row_of"]

#: The values of a message, one for each column in `COLUMNS` except the offset, the last column.
Row = tuple[Any, ...]

_TEXTS = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "type",
    "user_id",
    "app_id",
)

#: The columns of a message that a job reads, as Arrow types.
COLUMNS = pa.schema(
    [
        pa.field("body", pa.binary()),
        pa.field("exchange", pa.string()),
        pa.field("routing_key", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.string())),
        pa.field("delivery_mode", pa.int32()),
        pa.field("priority", pa.int32()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        *(pa.field(name, pa.string()) for name in _TEXTS),
        pa.field("redelivered", pa.bool_()),
        pa.field("offset", pa.int64()),
    ]
)

#: A batch ends when it has at least this number of messages.
MOST_ROWS = 2000
#: A batch ends earlier when its bodies have at least this total size in bytes.
MOST_BYTES = 8 << 20

_MAX_MICROSECONDS = (1 << 63) - 1

_TYPES: dict[pa.DataType, DataType] = {
    pa.binary(): BinaryType(),
    pa.bool_(): BooleanType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.string(): StringType(),
    pa.timestamp("us", tz="UTC"): TimestampType(),
    pa.map_(pa.string(), pa.string()): MapType(StringType(), StringType()),
}

#: `COLUMNS` as Spark types.
SCHEMA = StructType([StructField(field.name, _TYPES[field.type]) for field in COLUMNS])


def check_schema(schema: StructType) -> None:
    """Raise `SchemaError` if a column of a user's schema is not in `SCHEMA`, or has a type that is not allowed."""
    known = {field.name: field.dataType for field in SCHEMA}
    for field in schema:
        if field.name not in known:
            raise SchemaError(f"a message has no column {field.name}; the columns are {', '.join(known)}")
        allowed = (BinaryType(), StringType()) if field.name == "body" else (known[field.name],)
        if field.dataType not in allowed:
            words = " or ".join(each.simpleString() for each in allowed)
            raise SchemaError(f"column {field.name} is {words}, not {field.dataType.simpleString()}")


def row_of(method: Any, properties: pika.BasicProperties, body: bytes) -> Row:
    """Return a delivery as a row."""
    return (
        body,
        _string(method.exchange),
        _string(method.routing_key),
        _headers(properties.headers),
        properties.delivery_mode,
        properties.priority,
        _microseconds(properties.timestamp),
        *[_string(getattr(properties, name)) for name in _TEXTS],
        bool(method.redelivered),
    )


def batch_of(rows: Sequence[Row], offsets: Sequence[int]) -> pa.RecordBatch:
    """Return rows and their offsets as one Arrow batch. There must be at least one row."""
    columns = [*zip(*rows, strict=True), offsets]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, type=field.type) for values, field in zip(columns, COLUMNS, strict=True)],
        schema=COLUMNS,
    )


def in_columns(rows: pa.RecordBatch, schema: StructType) -> pa.RecordBatch:
    """Return the columns that `schema` names. If `schema` declares the body as a string, convert the body.

    Raises:
        SchemaError: `schema` declares the body as a string, and the body of a row is not UTF-8.
    """
    fields = [
        pa.field(field.name, pa.string() if isinstance(field.dataType, StringType) else COLUMNS.field(field.name).type)
        for field in schema
    ]
    try:
        columns = [
            rows.column(field.name).cast(field.type) if field.name == "body" else rows.column(field.name)
            for field in fields
        ]
    except pa.ArrowInvalid:
        raise SchemaError(
            f"column body is string, but the body at offset {_first_binary(rows)} is not UTF-8; read body as binary, "
            "and decode it in the query"
        ) from None
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _first_binary(rows: pa.RecordBatch) -> int | None:
    """Return the offset of the first row whose body is not UTF-8."""
    for body, offset in zip(rows.column("body"), rows.column("offset"), strict=True):
        try:
            body.as_py().decode()
        except UnicodeDecodeError:
            return int(offset.as_py())
    return None


def _headers(headers: Mapping[str, Any] | None) -> list[tuple[str, str | None]] | None:
    if headers is None:
        return None
    return [
        (_string(name), value if value is None or isinstance(value, str) else _text(value))
        for name, value in headers.items()
    ]


def _string(value: Any) -> Any:
    """Return the text of a short string. pika returns the bytes of a short string that is not UTF-8."""
    return _text(value) if isinstance(value, bytes) else value


def _text(value: Any) -> str:
    """Return the text of a header value that is not a string. Bytes are decoded, and other values become JSON."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="backslashreplace")
    return json.dumps(_decoded(value), ensure_ascii=False, default=str)


def _decoded(value: Any) -> Any:
    """Return a header value whose bytes, also in tables and lists, are decoded."""
    if isinstance(value, Mapping):
        return {_string(name): _decoded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return _text(value) if isinstance(value, (bytes, bytearray)) else value


def _microseconds(timestamp: Any) -> int | None:
    """Return a timestamp in µs since 1970; ``None`` if Spark's 64 bits cannot represent it."""
    microseconds = None if timestamp is None else int(timestamp) * 1_000_000
    return None if microseconds is None or microseconds > _MAX_MICROSECONDS else microseconds
