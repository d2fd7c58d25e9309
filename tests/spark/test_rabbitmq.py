"""Sink and source against a real RabbitMQ."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import pika
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from qflow_client import Producer
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.spark.support import FILES, PATIENCE, ROWS, SlowConsumer, eventually, in_background, waiting, write

pytestmark = pytest.mark.rabbitmq

#: Options for a job that waits as long as the test. The node and its commands may be slow.
WAITS = {"maxProducerFlowControlWait": str(PATIENCE), "reconnectTimeout": str(PATIENCE)}


@pytest.fixture
def queue(node: RabbitMQNode, request: pytest.FixtureRequest) -> str:
    name = f"qflow-{request.node.name}"
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        connection.channel().queue_declare(name, durable=True)
    # Write the queue to disk, because some tests kill the node.
    node.sync()
    return name


def ready(node: RabbitMQNode, queue: str) -> int:
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)


def test_each_row_of_a_job_arrives_once_in_a_queue_with_a_slow_consumer(
    spark: SparkSession, node: RabbitMQNode, queue: str
) -> None:
    rows, capacity = 10_000, 200
    # The job has more partitions than tasks that run at the same time.
    frame = spark.range(rows, numPartitions=4).select(sf.col("id").cast("string").alias("body"))
    begin = threading.Event()
    with SlowConsumer(node.url, queue, begin.is_set) as consumer:
        job = in_background(write, frame, node.url, routingKey=queue, capacity=capacity)
        # Wait for many times the capacity.
        eventually(lambda: job.done() or ready(node, queue) >= 20 * capacity)
        begin.set()
        consumer.wait_for(rows)
        job.result(PATIENCE)
    assert sorted(map(int, consumer.bodies)) == list(range(rows))
    assert ready(node, queue) == 0


def test_a_memory_alarm_holds_the_job_and_the_summary_contains_the_seconds_of_the_hold(
    spark: SparkSession, node: RabbitMQNode, queue: str, tmp_path: Path
) -> None:
    frame = spark.range(1000, numPartitions=2).select(sf.col("id").cast("string").alias("body"))
    node.raise_memory_alarm()
    try:
        job = in_background(write, frame, node.url, routingKey=queue, summaryPath=tmp_path / "summary", **WAITS)
        # RabbitMQ blocks a connection after the connection publishes.
        eventually(lambda: "blocked" in node.evaluate("rabbit_networking:connection_info_all([state])."))
        assert not job.done()
    finally:
        node.clear_memory_alarm()
    job.result(PATIENCE)
    summary = json.loads((tmp_path / "summary").read_text())
    assert summary["seconds_flowed"]["connection_blocked"] > 0
    assert ready(node, queue) == 1000


def test_a_job_reads_all_messages_of_a_queue_into_a_frame(
    spark: SparkSession, node: RabbitMQNode, queue: str, tmp_path: Path
) -> None:
    frame = spark.range(5000, numPartitions=2).select(sf.col("id").cast("string").alias("body"))
    write(frame, node.url, routingKey=queue)
    options = {"url": node.url, "queue": queue, "spoolPath": str(tmp_path / "spool")}
    found = spark.read.format("amqp").options(**options).load()
    assert sorted(int(row.body) for row in found.collect()) == list(range(5000))
    assert ready(node, queue) == 0


def test_a_streaming_query_that_reads_a_queue_loses_no_message_if_the_broker_is_killed(
    spark: SparkSession, node: RabbitMQNode, queue: str, tmp_path: Path
) -> None:
    def stream() -> DataFrame:
        options = {"url": node.url, "queue": queue, "spoolPath": str(tmp_path / "spool"), "maxMessagesPerTrigger": 500}
        return spark.readStream.format("amqp").options(**options).load()

    def start(frame: DataFrame, **trigger: object):
        writer = frame.selectExpr("cast(body as string) body", "message_id").writeStream.format("parquet")
        writer = writer.option("path", str(tmp_path / "out")).option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(**trigger).start()

    with Producer(node.url, routing_key=queue) as producer:
        for number in range(2000):
            producer.send(str(number))
    query = start(stream(), processingTime="0 seconds")
    eventually(lambda: len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) >= 2)
    node.kill()
    with pytest.raises(StreamingQueryException, match="ConnectionFailed"):
        query.awaitTermination(PATIENCE)
    node.start()
    assert start(stream(), availableNow=True).awaitTermination(PATIENCE)
    rows = [(int(row.body), row.message_id) for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    # A repeated message has the id of the first copy.
    assert sorted(number for number, _ in set(rows)) == list(range(2000))
    assert ready(node, queue) == 0


def test_a_streaming_query_that_writes_loses_no_row_if_the_broker_is_killed_and_marks_repeats(
    spark: SparkSession, node: RabbitMQNode, queue: str, lines: DataFrame, tmp_path: Path
) -> None:
    # The query waits in the middle of the second batch.
    frame = lines.mapInArrow(waiting(tmp_path, ROWS + 500), "body string")
    options = {"url": node.url, "routingKey": queue, "messageId": "position"} | WAITS
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 50)
    try:
        query = (
            frame.writeStream.format("amqp")
            .options(**options)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        eventually(lambda: ready(node, queue) > ROWS)
        node.kill()
        node.start()
        assert query.isActive
        (tmp_path / "go").touch()
        assert query.awaitTermination(PATIENCE)
    finally:
        (tmp_path / "go").touch()
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    rows: dict[str | None, int] = {}
    unmarked: Counter[str | None] = Counter()
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        channel = connection.channel()
        # All rows were confirmed, so the queue has all of them.
        for _, (_method, properties, body) in zip(range(ready(node, queue)), channel.consume(queue), strict=False):
            assert rows.setdefault(properties.message_id, int(body)) == int(body)
            unmarked[properties.message_id] += (properties.headers or {}).get("x-qflow-republished") is not True
    assert sorted(rows.values()) == list(range(FILES * ROWS))
    assert max(unmarked.values()) == 1
