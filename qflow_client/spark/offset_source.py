"""Reads a RabbitMQ stream. Each task reads a fixed range of offsets, so a retried task reads the same messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from qflow_client.errors import SettingsError
from qflow_client.spark.deliveries import check_schema, in_columns
from qflow_client.spark.options import Option, broker_of, broker_options, one_of, read, text_of, whole
from qflow_client.spark.source import ranges
from qflow_client.spark.stream_consumer import StreamConsumer, StreamError, lost

__all__ = ["OffsetOptions", "OffsetRange", "OffsetReader", "beginning", "ranges_of", "rows_in"]

EARLIEST = "earliest"
LATEST = "latest"


def _offset(*words: str) -> Option:
    def parse(text: str) -> str | int:
        if text in words:
            return text
        if not text.isascii() or not text.isdigit():
            raise ValueError(text)
        return int(text)

    return Option(parse, f"{', '.join(map(repr, words))} or an offset, a whole number, at least 0")


def _when(text: str) -> datetime:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    try:
        return datetime.fromtimestamp(int(text) / 1000, UTC)
    except OverflowError as error:
        raise ValueError(text) from error


_COMMON = {
    "stream": text_of("the name of a stream", 255),
    "startingOffsets": _offset(EARLIEST, LATEST),
    "startingTimestamp": Option(_when, "a time, in whole milliseconds since 1970"),
    "numPartitions": whole("partitions"),
    "failOnDataLoss": one_of("true", "false"),
}
_BATCH = {"endingOffsets": _offset(LATEST)}
_STREAM = {"maxMessagesPerTrigger": whole("messages")}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetOptions:
    """The options of a job that reads a RabbitMQ stream.

    Attributes:
        connect_timeout: maximum seconds to connect to each broker.
        start: position at which to start: `EARLIEST`, `LATEST`, an offset or a time.
        end: offset after the last message to read; ``None`` to read up to the current end of the stream.
        most: maximum number of offsets in a batch; ``None`` for no limit.
        partitions: number of tasks that read a batch.
        lossless: whether it is an error if retention has removed messages.
    """

    urls: tuple[str, ...] = field(repr=False)
    connect_timeout: float
    stream: str
    start: str | int | datetime
    end: int | None
    most: int | None
    partitions: int
    lossless: bool

    @classmethod
    def load(cls, given: Mapping[str, str], *, streaming: bool, slots: int | None) -> OffsetOptions:
        """Read a job's options on the driver, because missing settings come from the driver's environment.

        Args:
            slots: number of tasks that run at the same time, the default of ``numPartitions``; ``None`` if unknown.

        Raises:
            SettingsError: an option is unknown, a value is not allowed, or two options exclude each other.
        """
        values = read(given, broker_options() | _COMMON | (_STREAM if streaming else _BATCH))
        if "startingTimestamp" in values and "startingOffsets" in values:
            raise SettingsError("startingOffsets and startingTimestamp both set where to begin: set only one")
        urls, connect_timeout = broker_of(values)
        start = values.get("startingOffsets", LATEST if streaming else EARLIEST)
        end = values.get("endingOffsets", LATEST)
        return cls(
            urls=urls,
            connect_timeout=connect_timeout,
            stream=values["stream"],
            start=values.get("startingTimestamp", start),
            end=None if end == LATEST else end,
            most=values.get("maxMessagesPerTrigger"),
            partitions=values.get("numPartitions", slots or 1),
            lossless=values.get("failOnDataLoss", "true") == "true",
        )

    def consumer(self) -> StreamConsumer:
        """Return a connected consumer of the stream."""
        return StreamConsumer(self.urls, self.connect_timeout, self.stream)


def beginning(options: OffsetOptions, consumer: StreamConsumer) -> int:
    """Return the offset at which a job starts to read, according to `options.start`."""
    if isinstance(options.start, int):
        return options.start
    found = consumer.begin() if options.start == EARLIEST else None
    if isinstance(options.start, datetime):
        found = consumer.since(options.start)
    if found is None:
        found = consumer.end()
    return found or 0


class OffsetRange(InputPartition):
    """The range of offsets that one task reads."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(None)
        self.start = start
        self.end = end


def ranges_of(options: OffsetOptions, start: int, end: int) -> list[OffsetRange]:
    """Divide a range of offsets among the tasks. Spark needs at least one range, which may be empty."""
    return [OffsetRange(*each) for each in ranges(start, end, options.partitions)] or [OffsetRange(end, end)]


def rows_in(options: OffsetOptions, part: InputPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task, with the requested columns."""
    assert isinstance(part, OffsetRange)
    if part.start < part.end:
        with options.consumer() as consumer:
            for rows in consumer.read(part.start, part.end, lossless=options.lossless):
                yield in_columns(rows, schema)


class OffsetReader(DataSourceReader):
    """Reads a stream between two offsets in a batch job."""

    def __init__(self, options: OffsetOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[OffsetRange]:
        options = self._options
        with options.consumer() as consumer:
            start, last = beginning(options, consumer), consumer.end() or 0
            end = last if options.end is None else options.end
            if not start <= end <= last:
                raise StreamError(
                    f"stream {options.stream!r} ends at offset {last}, but the offsets from {start} to {end} were "
                    "requested; set startingOffsets and endingOffsets to offsets that exist"
                )
            begin = consumer.begin() or 0
        if start < begin and start < end and options.lossless:
            raise lost(options.stream, start, min(begin, end))
        return ranges_of(options, max(start, min(begin, end)), end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows_in(self._options, partition, self._schema)
