"""Creates reports on flow logs of any size. Spark sums up the lines of the logs, in one job or continuously.

Each task sums up its lines to a small number of facts. Spark merges the facts that agree in `table`, `keys` and
`bucket`, see `Fact`. The order does not matter, so a cluster creates the same report as one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from qflow_client.report import FlowReport
from qflow_client.report.advice import samples_in, windows
from qflow_client.report.reading import COLUMNS, FlowLogError, FlowLogs, Part, line_of, parts_of, raws
from qflow_client.report.report import make_report
from qflow_client.report.tables import Fact, Tables, bin_width

__all__ = ["flow_events", "flow_report", "flow_report_of_stream", "flow_report_stream"]

_KEYS = tuple(f"k{number}" for number in range(1, 6))
_MORE = tuple(f"more_{number}" for number in range(1, 7))
_GROUP = ("table", *_KEYS, "bucket")
_SUMS = ("count", "total", *_MORE)
_MOSTS = ("most", "most_2")
_FACTS = (*_GROUP, *_SUMS, *_MOSTS)

_TYPES = {"text": "string", "number": "bigint", "counts": "map<string,bigint>"}
_EVENTS = ", ".join(f"`{name}` {_TYPES[kind]}" for name, kind in COLUMNS)

# Maximum bytes of a part of an uncompressed local file of lines. Each task reads one part.
_PART = 64 << 20
# Maximum number of facts in one batch of a task's output.
_FACTS_IN_BATCH = 20_000

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class _Logs:
    """The logs to read: finished files on this machine, and files at other addresses, such as ``s3a://…``."""

    def __init__(self, spark: SparkSession, paths: _Paths) -> None:
        self._spark = spark
        given = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        self._remote = [path for path in given if "://" in path]
        local = [path for path in given if "://" not in path]
        # Leave out files whose names begin with an underscore, because Spark does not read them.
        self._local = [path for path in FlowLogs(local).files if not path.name.startswith("_")] if local else []
        if not self._local and not self._remote:
            raise FlowLogError(f"{', '.join(given)}: no file is finished; FlowLog.rotate() and close() finish a file")

    def _parquet(self, paths: list[str]) -> DataFrame:
        return self._spark.read.schema(_EVENTS).parquet(*paths)

    def events(self) -> DataFrame:
        lines = [str(path) for path in self._local if path.suffix != ".parquet"] + self._remote
        columnar = [str(path) for path in self._local if path.suffix == ".parquet"]
        frames = [self._spark.read.schema(_EVENTS).json(lines)] if lines else []
        return _united([*frames, self._parquet(columnar)] if columnar else frames)

    def facts(self, width: int) -> DataFrame:
        """Return the facts of all lines. `width` is the width of the bins of each time series, in microseconds."""
        frames = []
        parts = [part for path in self._local if path.suffix != ".parquet" for part in parts_of(path, _PART)]
        if parts:
            # The tasks read the files directly. Through the JVM each line would be copied three times.
            numbers = self._spark.range(0, len(parts), 1, len(parts))
            frames.append(numbers.mapInArrow(_summing(None, width, _lines_of_parts(parts)), _SCHEMA))
        lines = [self._spark.read.text(self._remote)] if self._remote else []
        columnar = [str(path) for path in self._local if path.suffix == ".parquet"]
        if columnar:
            lines.append(self._parquet(columnar).select(sf.to_json(sf.struct("*")).alias("value")))
        return _united([*frames, *(each.mapInArrow(_summing(None, width), _SCHEMA) for each in lines)])

    def span(self) -> tuple[int, int]:
        """Return the times of the first and last line in µs since 1970; estimates if all files are local."""
        if not self._remote:
            return FlowLogs(self._local).span()
        first, last = self.events().select(sf.min("at"), sf.max("at")).collect()[0]
        return first or 0, last or 0


def _united(frames: list[DataFrame]) -> DataFrame:
    united = frames[0]
    for frame in frames[1:]:
        united = united.unionByName(frame)
    return united


def flow_events(spark: SparkSession, paths: _Paths) -> DataFrame:
    """Return the lines of flow logs as a DataFrame with a column for each field.

    Args:
        paths: folders, and files with the endings ``.jsonl``, ``.jsonl.gz`` or ``.parquet``. In a local folder, only
            finished files are read. Folders at other addresses (``s3a://…``) must contain JSON lines.

    Raises:
        FlowLogError: there are no finished flow logs, or a path is wrong.
    """
    return _Logs(spark, paths).events()


_Raws = Iterator[list[Any]]


def _lines_of_rows(batches: Iterator[Any]) -> _Raws:
    # Take bytes, because a damaged line may not be UTF-8. Then `line_of` counts it as unreadable.
    return (batch.column(0).cast("large_binary").to_pylist() for batch in batches)


def _lines_of_parts(parts: Sequence[Part]) -> Callable[[Iterator[Any]], _Raws]:
    """Return a function that gets indexes of `parts` as rows, and reads the lines of these parts."""

    def read(batches: Iterator[Any]) -> _Raws:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from raws(parts[number])

    return read


def _summing(
    window: int | None, width: int, lines: Callable[[Iterator[Any]], _Raws] = _lines_of_rows
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that sums up lines to facts, for the whole time or for each window.

    Args:
        window: length of each window in microseconds; ``None`` to sum up the whole time.
        width: width of the bins of each time series, in microseconds.
    """

    def sum_up(batches: Iterator[Any]) -> Iterator[Any]:
        parts: dict[int, Tables] = {}
        for some in lines(batches):
            for raw in some:
                line = line_of(raw)
                begin = 0 if window is None or line is None else line["at"] // window * window
                tables = parts.get(begin)
                if tables is None:
                    tables = parts[begin] = Tables(width)
                if line is None:
                    tables.unreadable += 1
                else:
                    tables.add(line)
        rows: list[tuple[Any, ...]] = []
        for begin, tables in parts.items():
            for fact in tables.facts():
                rows.append((begin, *_row(fact)))
                if len(rows) == _FACTS_IN_BATCH:
                    yield _batch(rows)
                    rows.clear()
        if rows:
            yield _batch(rows)

    return sum_up


def _row(fact: Fact) -> tuple[Any, ...]:
    keys = (*fact.keys, *[""] * (len(_KEYS) - len(fact.keys)))
    more = (*fact.more, *[0] * (len(_MORE) - len(fact.more)))
    # Append the number of keys to the name of the table, so that `_fact` can remove the empty keys.
    table = f"{fact.table}/{len(fact.keys)}"
    return (table, *keys, fact.bucket, fact.count, fact.total, *more, fact.most, fact.most_2)


def _fact(row: tuple[Any, ...]) -> Fact:
    table, _, keys = row[0].partition("/")
    bucket, count, total, *more = row[6:15]
    most, most_2 = row[15:]
    return Fact(table, tuple(row[1 : 1 + int(keys)]), bucket, count, total, most, most_2, tuple(more))


def _batch(rows: list[tuple[Any, ...]]) -> Any:
    import pyarrow

    types = [pyarrow.string() if name == "table" or name in _KEYS else pyarrow.int64() for name in ("begin", *_FACTS)]
    columns = [pyarrow.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    return pyarrow.RecordBatch.from_arrays(columns, ["begin", *_FACTS])


_SCHEMA = ", ".join(
    f"`{name}` {'string' if name == 'table' or name in _KEYS else 'bigint'}" for name in ("begin", *_FACTS)
)


def _added(facts: DataFrame, *more: Any) -> DataFrame:
    sums = [sf.sum(name).alias(name) for name in _SUMS]
    return facts.groupBy(*more, *_GROUP).agg(*sums, *(sf.max(name).alias(name) for name in _MOSTS))


def _tables(facts: DataFrame, width: int) -> Tables:
    tables = Tables(width)
    for batch in _added(facts).select(*_FACTS).toArrow().to_batches():
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            tables.merge(_fact(row))
    tables.widen()
    return tables


def flow_report(
    spark: SparkSession,
    paths: _Paths,
    *,
    maximum: int | None = None,
    delay: float | None = None,
    queues: Iterable[str] | None = None,
    round_trip: float = 0.005,
) -> FlowReport:
    """Create a report on flow logs of any size, the same as `qflow_client.report.flow_report` creates without Spark.

    Args:
        paths: the same as for `flow_events`.
        maximum: recommend settings with which each queue has at most this number of messages (C6).
        delay: recommend settings with which a message is in a queue for at most this number of seconds.
        queues: names of the queues to recommend settings for; ``None`` for all queues with recorded messages.
        round_trip: seconds between the publishing of a message and its confirm in the replays.

    Raises:
        FlowLogError: there are no finished flow logs, or a path is wrong.
        ValueError: advice is requested, and `maximum`, `delay` or `round_trip` is not more than 0.
    """
    logs = _Logs(spark, paths)
    width = bin_width(*logs.span())
    tables = _tables(logs.facts(width), width)
    samples = None
    if maximum is not None or delay is not None:
        wanted = windows(tables, queues)
        samples = samples_in(_sample_lines(logs.events(), wanted), wanted)
    return make_report(tables, samples, maximum=maximum, delay=delay, round_trip=round_trip)


def _sample_lines(events: DataFrame, wanted: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    condition = sf.lit(False)
    for queue, (begin, end) in wanted.items():
        condition |= (sf.col("queue") == queue) & sf.col("at").between(begin, end)
    names = ("at", "kind", "queue", "us", "depth", "peak", "arrived", "left", "arrivals")
    rows = events.where((sf.col("kind") == "depth") & condition).select(*names)
    return (row.asDict() for row in rows.toLocalIterator())


def flow_report_stream(
    spark: SparkSession,
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    window: float = 60.0,
    late: float = 600.0,
    trigger: dict[str, Any] | None = None,
) -> Any:
    """Start and return a streaming query that sums up flow logs, for `flow_report_of_stream`.

    The query writes the sums of a time window when it expects no more lines of this window. Lines arrive late, because
    a `FlowLog` finishes a file after `max_seconds`, and because files of other machines are copied to `folder`.

    Args:
        folder: folder of the flow logs.
        output: folder for the sums (facts) and the checkpoint.
        window: length of a window in seconds. The bins of each time series have at least this width.
        late: maximum delay of a line in seconds, relative to the latest line. Lines with a longer delay may be dropped.
            In the query's progress, ``numRowsDroppedByWatermark`` is the number of dropped facts.
        trigger: arguments for Spark's ``trigger``, such as ``{"availableNow": True}``. By default batches start as soon
            as possible.

    Raises:
        ValueError: `window` or `late` is less than 0.001 seconds.
    """
    for name, seconds in (("window", window), ("late", late)):
        if not seconds >= 0.001:
            raise ValueError(f"{name}={seconds!r}: it must be at least 0.001 seconds")
    path = Path(output)
    width = int(window * 1000) * 1000
    lines = spark.readStream.option("pathGlobFilter", "*.jsonl").text(os.fspath(folder))
    facts = lines.mapInArrow(_summing(width, width), _SCHEMA).withColumn("begin", sf.timestamp_micros("begin"))
    facts = facts.withWatermark("begin", f"{int(late * 1000)} milliseconds")
    summed = _added(facts, sf.window("begin", f"{width // 1000} milliseconds"))
    writer = (
        summed.select(sf.unix_micros("window.start").alias("begin"), *_FACTS)
        .writeStream.format("parquet")
        .outputMode("append")
        .option("path", str(path / "facts"))
        .option("checkpointLocation", str(path / "checkpoint"))
    )
    return (writer.trigger(**trigger) if trigger is not None else writer).start()


def flow_report_of_stream(spark: SparkSession, output: str | os.PathLike[str]) -> FlowReport:
    """Create a report without advice from the facts that `flow_report_stream` has written to `output` so far.

    Raises:
        FlowLogError: no window is complete yet.
    """
    path = Path(output) / "facts"
    if not any(path.glob("*.parquet")):
        raise FlowLogError(
            f"{path}: no window is complete yet; a window is complete when a line arrives that is later by `late`"
        )
    facts = spark.read.schema(_SCHEMA).parquet(str(path))
    first, last = facts.where(sf.col("begin") > 0).select(sf.min("begin"), sf.max("begin")).collect()[0]
    return make_report(_tables(facts, bin_width(first or 0, last or 0)), None)
