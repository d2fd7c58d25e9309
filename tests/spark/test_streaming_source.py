"""``spark.readStream.format("amqp")``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable

from qflow_client import Message, Producer
from qflow_client.broker import Broker
from qflow_client.spark.deliveries import SCHEMA
from qflow_client.spark.source import SourceOptions
from qflow_client.spark.spool import SpoolError
from qflow_client.spark.stream_source import StreamReader
from tests.spark.support import PATIENCE, eventually


def fill(broker: Broker, count: int, first: int = 0, *, ids: bool = True) -> None:
    with Producer(broker.url, routing_key="rows", message_ids=ids) as producer:
        for number in range(first, first + count):
            producer.send(Message(str(number), correlation_id="c"))


def load(spark: SparkSession, broker: Broker, folder: Path, **options: Any) -> DataFrame:
    given = {"url": broker.url, "queue": "rows", "spoolPath": folder / "spool"} | options
    return spark.readStream.format("amqp").options(**{name: str(value) for name, value in given.items()}).load()


def start(frame: DataFrame, folder: Path, *, all_there_is: bool = True) -> StreamingQuery:
    writer = (
        frame.selectExpr("cast(body as string) as body", "offset", "redelivered")
        .writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )
    return (
        writer.trigger(availableNow=True) if all_there_is else writer.trigger(processingTime="100 milliseconds")
    ).start()


def written(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(int(row.body) for row in spark.read.parquet(str(folder / "out")).collect())


def committed(folder: Path) -> int:
    """Return the offset up to which a query has committed."""
    commits = [int(path.name) for path in (folder / "checkpoint" / "commits").glob("[0-9]*")]
    if not commits:
        return 0
    text = (folder / "checkpoint" / "offsets" / str(max(commits))).read_text()
    return int(json.loads(text.splitlines()[-1])["offset"])


def test_a_streaming_query_reads_all_messages_in_batches_and_acks_each_committed_batch(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    fill(broker, 2000)
    query = start(load(spark, broker, tmp_path, maxMessagesPerTrigger=900), tmp_path)
    query.awaitTermination()
    batches = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    # A batch contains the messages that have arrived when Spark asks, up to the maximum.
    assert sum(batches) == 2000
    assert max(batches) <= 900
    assert written(spark, tmp_path) == list(range(2000))
    queue = broker.queue("rows")
    assert (queue.depth, queue.acked) == (0, 2000)
    # The next run reads the messages that have arrived since.
    fill(broker, 10, 2000)
    start(load(spark, broker, tmp_path), tmp_path).awaitTermination()
    assert written(spark, tmp_path) == list(range(2010))
    assert broker.queue("rows").depth == 0


def test_a_running_streaming_query_reads_new_messages_and_also_acks_its_last_batch(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    query = start(load(spark, broker, tmp_path, sharedSpool="false"), tmp_path, all_there_is=False)
    try:
        fill(broker, 100)
        broker.wait_until(lambda b: b.queue("rows").acked == 100, timeout=PATIENCE)
        fill(broker, 100, 100)
        broker.wait_until(lambda b: b.queue("rows").acked == 200, timeout=PATIENCE)
    finally:
        query.stop()
    assert written(spark, tmp_path) == list(range(200))
    eventually(lambda: not broker.connections())


def test_the_next_run_of_a_failed_query_reads_the_same_batch_again_and_no_message_twice(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    # Without ids, only the number of equal messages counts.
    fill(broker, 1000, ids=False)
    fill(broker, 500, ids=False)
    seen = tmp_path / "seen"
    seen.mkdir()

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            offsets = batch.column(1).to_pylist()
            if 700 in offsets and len(list(tmp_path.glob("failed-*"))) < 2:
                (tmp_path / f"failed-{len(list(tmp_path.glob('failed-*')))}").touch()
                (seen / "batch").write_text(repr(batch.column(0).to_pylist()))
                raise RuntimeError("injected")
            if 700 in offsets and (seen / "batch").exists():
                assert (seen / "batch").read_text() == repr(batch.column(0).to_pylist())
            yield batch

    def frame() -> DataFrame:
        found = load(spark, broker, tmp_path, maxMessagesPerTrigger=500, numPartitions=1)
        return found.select("body", "offset", "redelivered").mapInArrow(
            fail_once, "body binary, offset long, redelivered boolean"
        )

    with pytest.raises(StreamingQueryException, match="injected"):
        start(frame(), tmp_path).awaitTermination()
    # The messages of the failed batch and all later messages are still in the queue.
    done = committed(tmp_path)
    assert done <= 700
    broker.wait_until(lambda b: b.queue("rows").ready == 1500 - done, timeout=PATIENCE)
    start(frame(), tmp_path).awaitTermination()
    assert Counter(written(spark, tmp_path)) == Counter([*range(1000), *range(500)])
    assert broker.queue("rows").depth == 0


def test_a_query_whose_spool_does_not_match_the_checkpoint_fails_and_acks_no_message(
    broker: Broker, tmp_path: Path
) -> None:
    fill(broker, 20)
    given = {"url": broker.url, "queue": "rows", "spoolPath": str(tmp_path / "spool")}
    query = StreamReader(SourceOptions.load(given, streaming=True, slots=1, local=True), SCHEMA)
    try:
        assert query.initialOffset() == {"offset": 0}
        # The spool gets more messages than the checkpoint's offset.
        eventually(lambda: query.reportLatestOffset() == {"offset": 20})
        words = r"checkpoint is at offset 10, but the spool .* ended at 0 when the query began; they belong together"
        with pytest.raises(SpoolError, match=words):
            query.latestOffset({"offset": 10}, ReadAllAvailable())
        with pytest.raises(SpoolError, match=words):
            query.partitions({"offset": 0}, {"offset": 10})
    finally:
        query.stop()
    assert broker.queue("rows").depth == 20


def test_a_second_run_with_a_spool_that_does_not_match_the_checkpoint_also_fails_and_acks_no_message(
    broker: Broker, tmp_path: Path
) -> None:
    fill(broker, 20)
    given = {"url": broker.url, "queue": "rows", "spoolPath": str(tmp_path / "spool")}
    for _ in range(2):
        query = StreamReader(SourceOptions.load(given, streaming=True, slots=1, local=True), SCHEMA)
        query.prepareForTriggerAvailableNow()
        try:
            with pytest.raises(SpoolError, match="checkpoint is at offset 10"):
                query.partitions({"offset": 0}, {"offset": 10})
            with pytest.raises(SpoolError, match="checkpoint is at offset 10"):
                query.latestOffset({"offset": 10}, ReadAllAvailable())
            # The query must not consume. Otherwise the second run would find enough messages in the spool.
            assert query.reportLatestOffset() is None
        finally:
            query.stop()
    assert broker.queue("rows").depth == 20
    assert not list((tmp_path / "spool").glob("*.arrow"))
