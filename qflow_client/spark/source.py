"""Reads a queue. The driver stores the messages in a `Spool`, and each task reads a part of the spool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from qflow_client.errors import SettingsError
from qflow_client.spark.deliveries import check_schema, in_columns
from qflow_client.spark.intake import connect, drain
from qflow_client.spark.options import Option, broker_of, broker_options, one_of, read, text_of, whole
from qflow_client.spark.spool import Piece, Spool, inline, read_piece

__all__ = ["MOST_UNACKED", "Part", "Reader", "SourceOptions", "part_of", "ranges", "rows_of"]

#: Maximum number of unacknowledged messages, because AMQP's prefetch count has 16 bits.
MOST_UNACKED = 65_535

_SOURCE = {
    "queue": text_of("the name of a queue", 255),
    "spoolPath": text_of("the path of a folder on the driver"),
    "maxMessages": whole("messages"),
    "maxMessagesPerTrigger": whole("messages", MOST_UNACKED),
    "numPartitions": whole("partitions"),
    "sharedSpool": one_of("true", "false"),
}
_BATCH_ONLY, _STREAM_ONLY = "maxMessages", "maxMessagesPerTrigger"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a job that reads a queue.

    Attributes:
        connect_timeout: maximum seconds to connect to each broker.
        most: maximum number of messages in a batch job, or in each batch of a streaming query; ``None`` for no limit.
        partitions: maximum number of tasks that read a batch.
        shared: whether tasks can read the files of the spool.
    """

    urls: tuple[str, ...] = field(repr=False)
    connect_timeout: float
    queue: str
    spool_path: str
    most: int | None
    partitions: int
    shared: bool

    @classmethod
    def load(cls, given: Mapping[str, str], *, streaming: bool, slots: int | None, local: bool) -> SourceOptions:
        """Read a job's options. Call this on the driver, because missing settings come from the driver's environment.

        Args:
            slots: number of tasks that run at the same time, the default of ``numPartitions``; ``None`` if unknown.
            local: whether the tasks run on the driver's machine, the default of ``sharedSpool``.

        Raises:
            SettingsError: an option is unknown or missing, or a value is not allowed.
        """
        left_out = _BATCH_ONLY if streaming else _STREAM_ONLY
        known: dict[str, Option] = broker_options() | {
            name: option for name, option in _SOURCE.items() if name != left_out
        }
        values = read(given, known)
        for name in ("queue", "spoolPath"):
            if name not in values:
                raise SettingsError(f"the option {name} is missing: it must be {_SOURCE[name].allowed}")
        urls, connect_timeout = broker_of(values)
        return cls(
            urls=urls,
            connect_timeout=connect_timeout,
            queue=values["queue"],
            spool_path=values["spoolPath"],
            most=values.get(_STREAM_ONLY if streaming else _BATCH_ONLY, 10_000 if streaming else None),
            partitions=values.get("numPartitions", slots or 1),
            shared=values["sharedSpool"] == "true" if "sharedSpool" in values else local,
        )

    def spool(self, kind: str) -> Spool:
        """Return the spool of kind ``"batch"`` or ``"stream"``. A folder with a spool of the other kind is refused."""
        return Spool(self.spool_path, {"kind": kind, "queue": self.queue})


class Part(InputPartition):
    """The messages that one task reads."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(None)
        self.pieces = tuple(pieces)


def part_of(pieces: list[Piece], shared: bool) -> Part:
    """Return the `Part` for one task. Without `shared` (a spool that all tasks can read), it contains the rows."""
    return Part(pieces if shared else [inline(piece) for piece in pieces])


def ranges(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """Divide the offsets from `start` to ``end - 1`` into at most `count` ranges of nearly equal size."""
    count = min(count, end - start)
    for at in range(count):
        yield start + (end - start) * at // count, start + (end - start) * (at + 1) // count


def rows_of(part: InputPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task, with the requested columns."""
    assert isinstance(part, Part)
    for piece in part.pieces:
        yield in_columns(read_piece(piece), schema)


class Reader(DataSourceReader):
    """Moves the current messages of a queue into a spool. Spark can read a message from the spool several times."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[Part]:
        options = self._options
        with options.spool("batch") as spool:
            if not spool.complete:
                with connect(options.urls, options.connect_timeout) as connection:
                    drain(connection, options.queue, spool, options.most)
                spool.finish()
            parts = [
                part_of(spool.pieces(start, end), options.shared)
                for start, end in ranges(spool.begin, spool.end, options.partitions)
            ]
        # Spark needs at least one part, even if it is empty.
        return parts or [Part([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows_of(partition, self._schema)
