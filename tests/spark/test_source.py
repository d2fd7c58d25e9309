"""``spark.read.format("amqp")``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

from qflow_client import Message, Producer
from qflow_client.broker import Broker
from qflow_client.errors import SettingsError
from qflow_client.spark.datasource import AmqpDataSource
from qflow_client.spark.deliveries import SCHEMA


def fill(broker: Broker, count: int, first: int = 0) -> None:
    with Producer(broker.url, routing_key="rows") as producer:
        for number in range(first, first + count):
            producer.send(str(number))


def load(spark: SparkSession, broker: Broker, spool: Path, **options: Any) -> DataFrame:
    given = {"url": broker.url, "queue": "rows", "spoolPath": spool} | options
    return spark.read.format("amqp").options(**{name: str(value) for name, value in given.items()}).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row.body) for row in frame.select("body").collect())


@pytest.mark.parametrize("shared", ["true", "false"])
def test_all_messages_in_the_queue_are_read_once_and_acknowledged(
    spark: SparkSession, broker: Broker, tmp_path: Path, shared: str
) -> None:
    fill(broker, 1000)
    frame = load(spark, broker, tmp_path / "spool", sharedSpool=shared, numPartitions=3)
    assert numbers(frame) == list(range(1000))
    queue = broker.queue("rows")
    assert (queue.depth, queue.acked) == (0, 1000)
    # The frame stays the same when messages arrive.
    fill(broker, 10, 1000)
    assert frame.count() == 1000
    assert [row.offset for row in frame.orderBy("offset").collect()] == list(range(1000))
    assert broker.queue("rows").depth == 10
    assert numbers(load(spark, broker, tmp_path / "next")) == list(range(1000, 1010))


def test_a_job_reads_at_most_maxMessages_and_all_other_messages_stay_in_the_queue(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    fill(broker, 1000)
    assert numbers(load(spark, broker, tmp_path / "spool", maxMessages=601)) == list(range(601))
    left = broker.messages("rows")
    assert [int(message.body) for message in left] == list(range(601, 1000))
    assert not any(message.redelivered for message in left)


def test_an_empty_queue_gives_no_rows(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    assert load(spark, broker, tmp_path / "spool").collect() == []


def test_the_columns_of_a_row_contain_the_properties_of_the_message(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    at = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
    with Producer(broker.url) as producer:
        message = Message(
            b"\xff\x00",
            content_type="text/plain",
            headers={"s": "x", "n": 1, "b": b"\x01", "t": {"a": [1, b"y"]}, "none": None, "at": at},
            priority=3,
            timestamp=at,
            message_id="m-1",
            correlation_id="c",
            expiration="60000",
        )
        producer.send(message, routing_key="rows")
        producer.send(Message(b"", delivery_mode=None), routing_key="rows")
    first, second = load(spark, broker, tmp_path / "spool").orderBy("offset").collect()
    assert first.body == b"\xff\x00"
    assert (first.exchange, first.routing_key, first.redelivered) == ("", "rows", False)
    assert first.headers == {
        "s": "x",
        "n": "1",
        "b": "\x01",
        "t": '{"a": [1, "y"]}',
        "none": None,
        "at": '"2026-11-21 10:00:00+00:00"',
    }
    assert first.timestamp.timestamp() == at.timestamp()
    assert (first.priority, first.delivery_mode, first.expiration) == (3, 2, "60000")
    assert (first.content_type, first.message_id, first.correlation_id) == ("text/plain", "m-1", "c")
    assert (second.body, second.headers, second.timestamp, second.delivery_mode) == (b"", None, None, None)


def test_a_schema_selects_columns_and_the_error_for_an_invalid_schema_names_the_column(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    fill(broker, 2)
    options = {"url": broker.url, "queue": "rows", "spoolPath": str(tmp_path / "spool")}
    frame = spark.read.format("amqp").options(**options).schema("offset long, body string").load()
    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [(0, "0"), (1, "1")]
    for schema, words in (("colour string", "no column colour"), ("priority string", "priority is int, not string")):
        with pytest.raises(AnalysisException, match=words):
            spark.read.format("amqp").options(**options).schema(schema).load().collect()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue": "rows"}, "the option spoolPath is missing"),
        ({"spoolPath": "x"}, "the option queue is missing"),
        ({"queue": "rows", "spoolPath": "x", "maxMessages": "0"}, "maxMessages='0': it must be a whole number"),
        ({"queue": "rows", "spoolPath": "x", "maxMessagesPerTrigger": "5"}, "no option 'maxmessagespertrigger'"),
        ({"queue": "rows", "spoolPath": "x", "capacity": "5"}, "no option 'capacity'"),
    ],
)
def test_the_error_for_an_invalid_option_of_a_source_names_the_option(options: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        AmqpDataSource(CaseInsensitiveDict(options)).reader(SCHEMA)


def test_Spark_reports_a_missing_option_of_the_source(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="the option spoolPath is missing"):
        spark.read.format("amqp").option("queue", "rows").load().collect()


def test_a_job_fails_if_its_queue_is_missing_or_its_spool_belongs_to_another_queue(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    with pytest.raises(AnalysisException, match=r"queue 'nobody' cannot be consumed.*404"):
        load(spark, broker, tmp_path / "a", queue="nobody").collect()
    fill(broker, 1)
    assert load(spark, broker, tmp_path / "b").count() == 1
    broker.declare_queue("others")
    with pytest.raises(AnalysisException, match=r"was made for .*'queue': 'rows'.*, not for .*'queue': 'others'"):
        load(spark, broker, tmp_path / "b", queue="others").collect()
