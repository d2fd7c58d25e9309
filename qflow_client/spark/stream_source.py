"""Reading a queue as a stream: what is acknowledged is what Spark has committed."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from qflow_client.spark.intake import Consumer, connect
from qflow_client.spark.source import MOST_UNACKED, Part, SourceOptions, check_schema, part_of, ranges, rows_of
from qflow_client.spark.spool import Spool, SpoolError

__all__ = ["StreamReader"]

# Seconds without a delivery after which a query that ends by itself takes it that no more will come.
_PATIENCE = 2.0


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a queue batch by batch. An offset of Spark's is one of the spool."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        # Only set once Spark has asked for the first batch: `read` runs in a task, on a copy.
        self._spool: Spool | None = None
        self._consumer: Consumer | None = None
        # Set for a query that ends by itself: how many deliveries it waits for, and then the offset at which it ends.
        self._awaited: int | None = None
        self._target: int | None = None

    def _open(self) -> Consumer:
        if self._consumer is None:
            options = self._options
            assert options.most is not None
            if self._spool is None:
                self._spool = options.spool("stream").__enter__()
            connection = connect(options.urls, options.connect_timeout)
            # While Spark works on one batch, the next comes in.
            self._consumer = Consumer(connection, options.queue, self._spool, min(2 * options.most, MOST_UNACKED))
        return self._consumer

    def initialOffset(self) -> dict[str, int]:
        self._open()
        assert self._spool is not None
        # What a query before this one was done with may still lie there.
        return {"offset": max(self._spool.begin, self._spool.acknowledged)}

    def getDefaultReadLimit(self) -> ReadLimit:
        assert self._options.most is not None
        return ReadMaxRows(self._options.most)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        consumer = self._open()
        begin = start["offset"]
        # Spark asks for the next batch when it has committed the one before.
        consumer.done(begin)
        end = consumer.end()
        if begin > end:
            raise SpoolError(
                f"the checkpoint is at offset {begin}, and the spool {self._options.spool_path} ends at {end}; they "
                "belong together, so restore or delete both"
            )
        if self._awaited is not None:
            end = self._end_of_all(consumer, begin)
        most = getattr(limit, "max_rows", None)
        return {"offset": max(begin, end if most is None else min(end, begin + most))}

    def reportLatestOffset(self) -> dict[str, int] | None:
        return None if self._consumer is None else {"offset": self._consumer.end()}

    def prepareForTriggerAvailableNow(self) -> None:
        self._awaited = self._open().ready

    def _end_of_all(self, consumer: Consumer, begin: int) -> int:
        """The offset up to which to read for what was in the queue when the query began; waits for some of it."""
        if self._target is None:
            assert self._awaited is not None
            while consumer.received < self._awaited and consumer.end() <= begin:
                # Nothing for that long: others have it, or it has expired.
                if not consumer.wait_beyond(begin, _PATIENCE):
                    break
            if consumer.received >= self._awaited or consumer.end() <= begin:
                consumer.wait_spooled()
                self._target = consumer.end()
        return consumer.end() if self._target is None else self._target

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Part]:
        consumer = self._open()
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
