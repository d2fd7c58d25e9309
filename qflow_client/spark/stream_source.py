"""The readers of streaming queries: `StreamReader` reads a queue, and `OffsetStreamReader` reads a RabbitMQ stream.

Messages of a queue are acknowledged when Spark has committed them. A RabbitMQ stream keeps its messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from qflow_client.errors import ConnectionFailed
from qflow_client.spark.deliveries import check_schema
from qflow_client.spark.intake import Consumer, connect
from qflow_client.spark.offset_source import OffsetOptions, OffsetRange, beginning, ranges_of, rows_in
from qflow_client.spark.source import MOST_UNACKED, Part, SourceOptions, part_of, ranges, rows_of
from qflow_client.spark.spool import Spool, SpoolError
from qflow_client.spark.stream_consumer import StreamConsumer, StreamError

__all__ = ["OffsetStreamReader", "StreamReader"]

T = TypeVar("T")

# Seconds for which the reader reuses the end of a RabbitMQ stream. Spark may ask for it a hundred times per second.
_END_CACHE_SECONDS = 0.1


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a queue batch by batch. Spark's offsets are the offsets of the spool."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        # The next two fields are None until Spark requests an offset. They stay None in tasks, which only call `read`.
        self._spool: Spool | None = None
        self._consumer: Consumer | None = None
        # The end of the spool at the start, or a later offset that Spark got. No valid checkpoint has a greater offset.
        self._greatest = 0
        # Whether the trigger is ``availableNow``, so that the query ends by itself.
        self._ends = False
        # The offset at which the query ends; ``None`` if it is not known yet.
        self._target: int | None = None

    def _open(self, offset: int = 0) -> Consumer:
        """Open the spool and the consumer, if they are not open. `offset` comes from Spark's checkpoint.

        Raises:
            SpoolError: `offset` does not belong to this spool. The consumer is not started, because its messages could
                fill the spool up to `offset`. Then the next start would read wrong messages without an error.
        """
        options = self._options
        assert options.most is not None
        if self._spool is None:
            self._spool = options.spool("stream").__enter__()
            self._greatest = self._spool.end
        if offset > self._greatest:
            raise SpoolError(
                f"the checkpoint is at offset {offset}, but the spool {options.spool_path} ended at {self._greatest} "
                "when the query began; they belong together, so restore or delete both"
            )
        if self._consumer is None:
            connection = connect(options.urls, options.connect_timeout)
            # Prefetch two batches, so that the next batch arrives while Spark processes the current batch.
            self._consumer = Consumer(connection, options.queue, self._spool, min(2 * options.most, MOST_UNACKED))
        return self._consumer

    def initialOffset(self) -> dict[str, int]:
        self._open()
        assert self._spool is not None
        # Messages before `acknowledged` were committed by an earlier query, but may still be in the spool.
        return {"offset": max(self._spool.begin, self._spool.acknowledged)}

    def getDefaultReadLimit(self) -> ReadLimit:
        assert self._options.most is not None
        return ReadMaxRows(self._options.most)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        begin = start["offset"]
        consumer = self._open(begin)
        # When Spark calls this method, it has committed the previous batch, which ends at `begin`.
        consumer.done(begin)
        end = self._end_of_all(consumer, begin) if self._ends else consumer.end()
        most = getattr(limit, "max_rows", None)
        offset = max(begin, end if most is None else min(end, begin + most))
        self._greatest = max(self._greatest, offset)
        return {"offset": offset}

    def reportLatestOffset(self) -> dict[str, int] | None:
        return None if self._consumer is None else {"offset": self._consumer.end()}

    def prepareForTriggerAvailableNow(self) -> None:
        self._ends = True

    def _end_of_all(self, consumer: Consumer, begin: int) -> int:
        """Return `_target`. If it is unknown, wait for a message after `begin`, and return the end of the spool."""
        if self._target is None:
            while consumer.received < consumer.ready and consumer.end() <= begin:
                # If the queue is drained, the missing messages have expired, or other consumers have them.
                if not consumer.wait_beyond(begin):
                    break
            if consumer.received >= consumer.ready or consumer.end() <= begin:
                consumer.wait_spooled()
                self._target = consumer.end()
        return consumer.end() if self._target is None else self._target

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Part]:
        consumer = self._open(end["offset"])
        options = self._options
        return [
            part_of(consumer.pieces(first, last), options.shared)
            for first, last in ranges(start["offset"], end["offset"], options.partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows_of(partition, self._schema)

    def commit(self, end: dict[str, int]) -> None:
        if self._consumer is not None:
            self._consumer.done(end["offset"])

    def stop(self) -> None:
        if self._consumer is not None:
            self._consumer.stop()
        if self._spool is not None:
            self._spool.__exit__(None, None, None)


class OffsetStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a RabbitMQ stream batch by batch. Spark's offsets are the offsets of the stream."""

    def __init__(self, options: OffsetOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        # None until Spark requests an offset. It stays None in tasks, which only call `read`.
        self._consumer: StreamConsumer | None = None
        # The offset after the last message of the stream, and the time at which this offset was found.
        self._end: tuple[int, float] | None = None
        # Whether the trigger is ``availableNow``. With this trigger the query ends at the first value of `_end`.
        self._end_stays = False

    def _ask(self, question: Callable[[StreamConsumer], T]) -> T:
        """Call `question` with `_consumer`, or with a new consumer if there is none or its connection is lost."""
        if self._consumer is not None:
            with suppress(ConnectionFailed):
                return self._ask_with(self._consumer, question)
        return self._ask_with(self._options.consumer(), question)

    def _ask_with(self, consumer: StreamConsumer, question: Callable[[StreamConsumer], T]) -> T:
        """Call `question` with a consumer, and keep the consumer in `_consumer`. After an error, close it instead."""
        self._consumer = None
        try:
            answer = question(consumer)
        except BaseException:
            consumer.close()
            raise
        self._consumer = consumer
        return answer

    def initialOffset(self) -> dict[str, int]:
        options = self._options
        return {"offset": self._ask(lambda consumer: beginning(options, consumer))}

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.most
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def _find_end(self, begin: int) -> int:
        known = self._end
        if known is None or not (
            known[0] > begin or self._end_stays or time.monotonic() < known[1] + _END_CACHE_SECONDS
        ):
            end = self._ask(StreamConsumer.end)
            if end is None:
                # The stream is empty. Only the offset of its next message will show whether this is a new stream.
                end = begin
            elif end < begin and not self._ask(lambda consumer: consumer.reaches(begin)):
                raise StreamError(
                    f"the checkpoint is at offset {begin}, but stream {self._options.stream!r} ends at {end}: it was "
                    "deleted and made again, or startingOffsets is beyond its end; give the query another checkpoint, "
                    "or an offset that exists"
                )
            self._end = known = max(begin, end), time.monotonic()
        return known[0]

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        begin = start["offset"]
        end = max(begin, self._find_end(begin))
        most = getattr(limit, "max_rows", None)
        return {"offset": end if most is None else min(end, begin + most)}

    def reportLatestOffset(self) -> dict[str, int] | None:
        return None if self._end is None else {"offset": self._end[0]}

    def prepareForTriggerAvailableNow(self) -> None:
        self._end_stays = True

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[OffsetRange]:
        return ranges_of(self._options, start["offset"], end["offset"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows_in(self._options, partition, self._schema)

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing, because the stream keeps its messages."""

    def stop(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
