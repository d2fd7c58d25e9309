"""``option("stream", …)``: RabbitMQ streams, read by offset, on a real RabbitMQ."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from qflow_client import Message, Producer
from qflow_client.errors import SettingsError
from qflow_client.spark.datasource import AmqpDataSource
from qflow_client.spark.deliveries import SCHEMA
from qflow_client.spark.offset_source import OffsetOptions
from qflow_client.spark.stream_consumer import StreamConsumer, StreamError
from qflow_client.spark.stream_source import OffsetStreamReader
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.spark.support import eventually

pytestmark = pytest.mark.rabbitmq

Declare = Callable[..., str]


@pytest.fixture
def declare(node: RabbitMQNode, request: pytest.FixtureRequest) -> Declare:
    name = f"stream-{request.node.name}"

    def declare(**arguments: Any) -> str:
        given = {"x-queue-type": "stream"} | {key.replace("_", "-"): value for key, value in arguments.items()}
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            # Delete a stream that an earlier attempt has left.
            connection.channel().queue_delete(name)
            connection.channel().queue_declare(name, durable=True, arguments=given)
        return name

    return declare


@pytest.fixture
def stream(declare: Declare) -> str:
    return declare()


def fill(node: RabbitMQNode, stream: str, count: int, first: int = 0, size: int = 0) -> None:
    with Producer(node.url, routing_key=stream) as producer:
        for number in range(first, first + count):
            producer.send(str(number).ljust(size))


def options(node: RabbitMQNode, stream: str, given: dict[str, Any]) -> dict[str, str]:
    # On a busy machine the broker may be slow.
    everything = {"url": node.url, "stream": stream, "connectTimeout": 60} | given
    return {name: str(value) for name, value in everything.items()}


def load(spark: SparkSession, node: RabbitMQNode, stream: str, **given: Any) -> DataFrame:
    return spark.read.format("amqp").options(**options(node, stream, given)).load()


def rows(frame: DataFrame) -> list[tuple[int, int]]:
    return [(row.offset, int(row.body)) for row in frame.select("offset", "body").collect()]


def same(first: int, last: int) -> list[tuple[int, int]]:
    return [(number, number) for number in range(first, last)]


def test_several_tasks_read_a_stream_in_order_and_another_job_can_read_the_stream_again(
    spark: SparkSession, node: RabbitMQNode, stream: str
) -> None:
    fill(node, stream, 2000)
    frame = load(spark, node, stream, numPartitions=3)
    parts = frame.selectExpr("spark_partition_id() as part", "offset", "cast(body as string) as body").collect()
    assert [(row.offset, int(row.body)) for row in parts] == same(0, 2000)
    assert [sum(row.part == part for row in parts) for part in range(3)] == [666, 667, 667]
    # The frame stays the same when messages arrive. The stream keeps all messages for other readers.
    fill(node, stream, 10, 2000)
    assert rows(frame) == same(0, 2000)
    assert rows(load(spark, node, stream)) == same(0, 2010)
    assert rows(load(spark, node, stream, startingOffsets=234, endingOffsets=1321)) == same(234, 1321)
    assert rows(load(spark, node, stream, startingOffsets="latest")) == []
    assert rows(load(spark, node, stream, startingTimestamp=int(time.time() * 1000) + 3_600_000)) == []
    assert rows(load(spark, node, stream, startingTimestamp=0)) == same(0, 2010)
    with pytest.raises(AnalysisException, match="ends at offset 2010, but the offsets from 2012 to 2010 were "):
        load(spark, node, stream, startingOffsets=2012).collect()


def test_an_empty_stream_gives_no_rows(spark: SparkSession, node: RabbitMQNode, stream: str) -> None:
    assert rows(load(spark, node, stream)) == []


def test_the_columns_of_a_row_contain_the_properties_of_the_message_and_its_offset(
    spark: SparkSession, node: RabbitMQNode, stream: str
) -> None:
    with Producer(node.url, routing_key=stream) as producer:
        producer.send(Message(b"\xff", headers={"s": "x", "n": 1}, message_id="m-1", priority=3))
        producer.send(Message(b"", message_id="m-2"))
    first, second = load(spark, node, stream).collect()
    assert (first.body, first.headers, first.message_id, first.priority) == (b"\xff", {"s": "x", "n": "1"}, "m-1", 3)
    assert (first.routing_key, first.exchange, first.offset, first.redelivered) == (stream, "", 0, False)
    assert (second.body, second.headers, second.offset) == (b"", None, 1)
    frame = (
        spark.read.format("amqp").options(**options(node, stream, {})).schema("offset long, message_id string").load()
    )
    assert [tuple(row) for row in frame.collect()] == [(0, "m-1"), (1, "m-2")]


def start(frame: DataFrame, folder: Path, **trigger: Any) -> StreamingQuery:
    writer = frame.selectExpr("cast(body as string) as body", "offset").writeStream.format("parquet")
    writer = writer.option("path", str(folder / "out")).option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger or {"availableNow": True}).start()


def follow(spark: SparkSession, node: RabbitMQNode, stream: str, **given: Any) -> DataFrame:
    given = {"startingOffsets": "earliest"} | given
    return spark.readStream.format("amqp").options(**options(node, stream, given)).load()


def written(spark: SparkSession, folder: Path) -> list[tuple[int, int]]:
    return sorted(rows(spark.read.parquet(str(folder / "out"))))


def test_a_streaming_query_reads_in_batches_and_the_next_run_continues_from_the_checkpoint(
    spark: SparkSession, node: RabbitMQNode, stream: str, tmp_path: Path
) -> None:
    fill(node, stream, 2000)
    query = start(follow(spark, node, stream, maxMessagesPerTrigger=800), tmp_path)
    query.awaitTermination()
    assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [
        *(800, 800, 400)
    ]
    assert written(spark, tmp_path) == same(0, 2000)
    fill(node, stream, 10, 2000)
    start(follow(spark, node, stream), tmp_path).awaitTermination()
    assert written(spark, tmp_path) == same(0, 2010)


def test_a_running_streaming_query_reads_new_messages_of_a_stream(
    spark: SparkSession, node: RabbitMQNode, stream: str, tmp_path: Path
) -> None:
    fill(node, stream, 50)
    # The first batch determines the first offset. `latest` is the end of the stream when the query begins.
    query = start(follow(spark, node, stream, startingOffsets="latest"), tmp_path, processingTime="0 seconds")
    try:
        eventually(lambda: query.status["message"] == "Waiting for data to arrive")
        for first in (50, 150):
            fill(node, stream, 100, first)
            eventually(lambda: written_so_far(spark, tmp_path) == same(50, first + 100))  # noqa: B023  # called at once
    finally:
        query.stop()


def written_so_far(spark: SparkSession, folder: Path) -> list[tuple[int, int]]:
    # A file of rows may exist before it is complete. The sink lists only complete files.
    return written(spark, folder) if any((folder / "out" / "_spark_metadata").glob("[0-9]*")) else []


def test_a_repeated_batch_has_the_same_rows_even_if_new_messages_have_arrived(
    spark: SparkSession, node: RabbitMQNode, stream: str, tmp_path: Path
) -> None:
    batches: dict[int, list[tuple[int, int]]] = {}

    def keep(frame: DataFrame, batch: int) -> None:
        found = rows(frame)
        assert batches.setdefault(batch, found) == found
        if batch == 2 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise RuntimeError("injected")

    def run() -> None:
        frame = follow(spark, node, stream, maxMessagesPerTrigger=400, numPartitions=2)
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    fill(node, stream, 1500)
    with pytest.raises(StreamingQueryException, match="injected"):
        run()
    assert batches.keys() == {0, 1, 2}
    fill(node, stream, 100, 1500)
    run()
    assert [row for batch in sorted(batches) for row in batches[batch]] == same(0, 1600)
    # Remove the commits of the last two batches. The checkpoint still has their offsets.
    for batch in (2, 3):
        for name in (str(batch), f".{batch}.crc"):
            (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    fill(node, stream, 100, 1600)
    run()
    assert [row for batch in sorted(batches) for row in batches[batch]] == same(0, 1700)


def numbers(found: list[tuple[int, int]]) -> range:
    """Check that the numbers have no gaps and are in the order of the offsets, and return them."""
    found_numbers = [number for _, number in sorted(found)]
    whole = range(found_numbers[0], found_numbers[-1] + 1)
    assert found_numbers == [*whole]
    return whole


def test_reading_messages_removed_by_retention_fails_unless_failOnDataLoss_is_false(
    spark: SparkSession, node: RabbitMQNode, declare: Declare
) -> None:
    stream = declare(x_max_length_bytes=50_000, x_stream_max_segment_size_bytes=10_000)
    for first in range(0, 1000, 100):
        fill(node, stream, 100, first, size=200)
    with StreamConsumer([node.url], 60, stream) as consumer:
        eventually(consumer.begin)
    # Either task of a batch may raise this error.
    gone = r"no longer has the offsets \d+ to \d+: its retention .* set failOnDataLoss to false"
    with pytest.raises(AnalysisException, match=gone):
        load(spark, node, stream, startingOffsets=0).collect()
    left = numbers(rows(load(spark, node, stream, startingOffsets=0, failOnDataLoss="false")))
    # RabbitMQ may remove a segment at any time after it has begun a later one.
    assert left.start > 0
    assert left.stop == 1000
    assert rows(load(spark, node, stream, startingOffsets=0, endingOffsets=5, failOnDataLoss="false")) == []
    query = reader(node, stream)
    part, *_ = query.partitions({"offset": 0}, {"offset": 1000})
    with pytest.raises(StreamError, match=gone):
        list(query.read(part))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"queue": "rows"}, "queue and stream both name what to read"),
        ({"startingOffsets": "-1"}, r"startingOffsets='-1': it must be 'earliest', 'latest' or an offset"),
        ({"startingOffsets": "5", "startingTimestamp": "5"}, "startingOffsets and startingTimestamp both set"),
        ({"startingTimestamp": "now"}, "startingTimestamp='now': it must be a time, in whole milliseconds"),
        ({"endingOffsets": "earliest"}, "endingOffsets='earliest': it must be 'latest' or an offset"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss='no': it must be 'true' or 'false'"),
        ({"maxMessagesPerTrigger": "5"}, "no option 'maxmessagespertrigger'"),
        ({"spoolPath": "x"}, "no option 'spoolpath'"),
    ],
)
def test_the_error_for_an_invalid_option_of_a_stream_names_the_option(given: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        AmqpDataSource(CaseInsensitiveDict({"stream": "events"} | given)).reader(SCHEMA)


def test_the_option_stream_rejects_a_queue_and_the_option_queue_rejects_a_stream(
    spark: SparkSession, node: RabbitMQNode, stream: str, tmp_path: Path
) -> None:
    with pytest.raises(AnalysisException, match=r"'nobody' ended: .*404"):
        load(spark, node, "nobody").collect()
    queue = f"{stream}-queue"
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        connection.channel().queue_declare(queue, durable=True)
    with pytest.raises(AnalysisException, match="it is a queue: name it with the option queue"):
        load(spark, node, queue).collect()
    found = spark.read.format("amqp").options(url=node.url, queue=stream, spoolPath=str(tmp_path / "spool")).load()
    with pytest.raises(AnalysisException, match="it is a stream: name it with the option stream"):
        found.collect()


def reader(node: RabbitMQNode, stream: str, **given: Any) -> OffsetStreamReader:
    told = OffsetOptions.load(options(node, stream, given), streaming=True, slots=3)
    return OffsetStreamReader(told, SCHEMA)


def test_an_idle_streaming_query_gets_new_offsets_even_after_a_lost_connection(node: RabbitMQNode, stream: str) -> None:
    everything = ReadAllAvailable()
    query = reader(node, stream)
    try:
        assert query.initialOffset() == query.latestOffset({"offset": 0}, everything) == {"offset": 0}
        fill(node, stream, 20)
        eventually(lambda: query.latestOffset({"offset": 0}, everything) == {"offset": 20})
        assert query.latestOffset({"offset": 5}, ReadMaxRows(7)) == {"offset": 12}
        parts = query.partitions({"offset": 5}, {"offset": 20})
        assert [
            [int(body) for rows in query.read(part) for body in rows.column("body").to_pylist()] for part in parts
        ] == [*([*range(first, first + 5)] for first in (5, 10, 15))]
        node.ctl("close_all_connections", "a broker that is restarted")
        fill(node, stream, 5, 20)
        eventually(lambda: query.latestOffset({"offset": 20}, everything) == {"offset": 25})
        assert query.reportLatestOffset() == {"offset": 25}
    finally:
        query.stop()


def test_a_query_with_availableNow_reads_only_messages_that_existed_when_it_began(
    node: RabbitMQNode, declare: Declare
) -> None:
    stream = declare()
    fill(node, stream, 20)
    query = reader(node, stream, startingTimestamp=0)
    try:
        query.prepareForTriggerAvailableNow()
        assert query.initialOffset() == {"offset": 0}
        assert query.latestOffset({"offset": 0}, ReadMaxRows(15)) == {"offset": 15}
        fill(node, stream, 5, 20)
        assert query.latestOffset({"offset": 15}, ReadMaxRows(15)) == {"offset": 20}
        assert query.latestOffset({"offset": 20}, ReadMaxRows(15)) == {"offset": 20}
    finally:
        query.stop()
    # An empty stream may be the old stream after retention. The first message shows that the stream is a new one.
    declare()
    query = reader(node, stream)
    try:
        assert query.latestOffset({"offset": 20}, ReadMaxRows(15)) == {"offset": 20}
        fill(node, stream, 5)

        def is_noticed() -> bool:
            try:
                query.latestOffset({"offset": 20}, ReadMaxRows(15))
            except StreamError as error:
                return "checkpoint is at offset 20" in str(error)
            return False

        eventually(is_noticed)
    finally:
        query.stop()
