"""``df.write.format("amqp")``."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from qflow_client.broker import Broker
from qflow_client.errors import SettingsError
from qflow_client.message import Message
from qflow_client.spark.columns import RowError, Rows, SchemaError
from qflow_client.spark.datasource import AmqpDataSource
from qflow_client.spark.options import SinkOptions
from qflow_client.spark.sink import Task, write_task
from tests.effort import rounds
from tests.spark.support import (
    PATIENCE,
    SlowConsumer,
    bodies,
    eventually,
    failing,
    headers_of,
    in_background,
    when_stopped,
    write,
)


class Source(AmqpDataSource):
    """The data source that `register` creates for a session with two slots."""

    max_concurrent_tasks = 2
    is_local = True


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(count, numPartitions=partitions).select(sf.col("id").cast("string").alias("body"))


def test_all_rows_are_in_the_queue_when_the_write_returns(spark: SparkSession, broker: Broker) -> None:
    write(numbers(spark, 4000, 4), broker.url, routingKey="rows")
    assert sorted(map(int, bodies(broker, "rows"))) == list(range(4000))
    eventually(lambda: not broker.connections())


def test_a_write_returns_only_after_the_last_confirm(spark: SparkSession, broker: Broker) -> None:
    broker.withhold_confirms()
    done = in_background(write, numbers(spark, 10), broker.url, routingKey="rows")
    broker.wait_until(lambda b: b.queue("rows").depth == 10, timeout=PATIENCE)
    assert not done.done()
    broker.release_confirms()
    done.result(PATIENCE)


def test_each_column_sets_the_property_with_its_name(spark: SparkSession, broker: Broker) -> None:
    at = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
    frame = spark.createDataFrame(
        [(bytearray(b"\x00\xff"), "rows", "", {"a": 1}, "m-1", "text/plain", 60_000, 7, "c-1", at, 1)],
        "body binary, routing_key string, exchange string, headers map<string,int>, message_id string, "
        "content_type string, expiration long, priority int, correlation_id string, timestamp timestamp, "
        "delivery_mode int",
    )
    write(frame, broker.url)
    (message,) = broker.messages("rows")
    properties = message.properties
    assert message.body == b"\x00\xff"
    assert (properties.message_id, properties.content_type, properties.expiration) == ("m-1", "text/plain", "60000")
    assert (properties.priority, properties.correlation_id, properties.delivery_mode) == (7, "c-1", 1)
    assert properties.headers == {"a": 1}
    assert properties.timestamp == at


def test_a_null_column_sets_no_property(spark: SparkSession, broker: Broker) -> None:
    frame = spark.createDataFrame(
        [("a", None, None, None, None)],
        "body string, routing_key string, headers map<string,string>, delivery_mode int, message_id string",
    )
    write(frame, broker.url, routingKey="rows")
    (message,) = broker.messages("rows")
    assert message.properties.headers is None
    assert message.properties.delivery_mode == 2
    assert message.properties.message_id


def test_a_struct_can_set_headers_of_different_types(spark: SparkSession, broker: Broker) -> None:
    frame = numbers(spark, 1).withColumn(
        "headers", sf.struct(sf.lit(1).alias("n"), sf.lit("x").alias("s"), sf.lit(0.5).alias("d"))
    )
    write(frame, broker.url, routingKey="rows")
    assert broker.messages("rows")[0].properties.headers == {"n": 1, "s": "x", "d": 0.5}


def test_the_option_bodyFormat_json_puts_all_columns_that_are_no_properties_into_the_body(
    spark: SparkSession, broker: Broker
) -> None:
    frame = spark.sql(
        """select 'rows' as routing_key, 1 as n, 'é' as s, cast(null as string) as nothing, 2.5D as d,
        cast('NaN' as double) as nan, cast(1.10 as decimal(5,2)) as price, date'2026-11-21' as day, x'00ff' as raw,
        array(1, null) as list, map('k', date'2026-01-01') as map, struct(1 as a, cast(null as int) as b) as nested,
        true as flag, timestamp_ntz'2026-11-21 10:00:00' as at"""
    )
    write(frame, broker.url, bodyFormat="json")
    (message,) = broker.messages("rows")
    assert message.properties.content_type == "application/json"
    assert json.loads(message.body) == {
        "n": 1,
        "s": "é",
        "d": 2.5,
        "nan": "NaN",
        "price": "1.10",
        "day": "2026-11-21",
        "raw": "AP8=",
        "list": [1, None],
        "map": {"k": "2026-01-01"},
        "nested": {"a": 1},
        "flag": True,
        "at": "2026-11-21T10:00:00",
    }


@pytest.mark.parametrize(
    ("schema", "options", "words"),
    [
        ("body int", {}, "column body is int; it must be binary or string"),
        ("text string", {}, r"column text \(string\) is neither the body, nor routing, nor a property of AMQP"),
        ("priority int", {}, "there is no column body"),
        ("body string, priority string", {}, "column priority is string; it must be a whole number"),
        ("body string, headers map<int,string>", {}, "its keys must be string"),
        ("body string, headers map<string,array<int>>", {}, "its values must be string, binary"),
        ("body string, headers string", {}, "column headers is string; it must be a map from string, or a struct"),
        ("body string, message_id string", {"messageId": "hash"}, "a column message_id: remove one"),
        ("day interval day to second", {"bodyFormat": "json"}, "which JSON does not have"),
        ("priority int", {"bodyFormat": "json"}, "no column is left for the body"),
        ("body string", {"capcity": "10"}, "there is no option 'capcity'; the options are bodyFormat, capacity,"),
        ("body string", {"capacity": "x"}, "capacity='x': it must be a whole number of messages, at least 1"),
        ("body string", {"capacity": "0"}, "capacity='0'|capacity=0: it must be"),
        ("body string", {"capacity": "1"}, "for the whole job, and 2 tasks run at once; it must be at least 2, or set"),
        ("body string", {"capacityBytes": "1"}, "capacityBytes=1: it is for the whole job, and 2 tasks run at once"),
        ("body string", {"capacity": "10", "capacityPerTask": "5"}, "set only one"),
        ("body string", {"confirms": "false"}, "leave confirms on"),
        ("body string", {"outbox": "orders.outbox"}, "leave outbox out"),
        ("body string", {"whenFlowed": "raise"}, "leave whenFlowed at 'block'"),
        ("body string", {"maxProducerFlowControlWait": "0"}, "maxProducerFlowControlWait above 0"),
        ("body string", {"messageId": "random"}, "messageId='random': it must be 'column' or 'hash'"),
        ("body string", {"capacity": "auto", "capacityMax": "1"}, "capacityMax=1: it is for the whole job"),
        ("body string", {"summaryPath": "/missing/file"}, "summaryPath='/missing/file': No such file or directory"),
        ("body string", {"url": "http://localhost"}, "it must be an amqp:// or amqps:// URL"),
    ],
)
def test_the_writer_rejects_invalid_columns_and_options_before_the_job_runs(
    spark: SparkSession, schema: str, options: dict[str, str], words: str
) -> None:
    # There is no broker. The writer connects only after all columns and options are valid.
    source = Source(CaseInsensitiveDict({"url": "amqp://guest:secret@127.0.0.1:1/"} | options))
    with pytest.raises((SettingsError, SchemaError), match=words) as caught:
        source.writer(spark.createDataFrame([], schema).schema, overwrite=False)
    assert "secret" not in str(caught.value)


def test_Spark_reports_invalid_columns_and_options_before_the_job_runs(spark: SparkSession) -> None:
    url = "amqp://guest:secret@127.0.0.1:1/"
    for schema, options, words in (
        ("body string", {"capacity": 1}, "the whole job, and 2 tasks run at once"),
        ("text string", {}, "column text"),
    ):
        with pytest.raises(AnalysisException, match=words) as caught:
            write(spark.createDataFrame([], schema), url, **options)
        assert "secret" not in str(caught.value)


def test_C6_with_the_capacity_auto_the_tasks_divide_capacityMax() -> None:
    options = SinkOptions.load({"capacity": "auto", "capacityMax": "11"}, 2)
    assert (options.producer.capacity, options.producer.capacity_max) == ("auto", 5)


def test_a_job_whose_messages_are_confirmed_does_not_fail_if_its_summary_cannot_be_appended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(CaseInsensitiveDict({"summaryPath": str(tmp_path / "summary"), "jobId": "nightly"}))
    writer = source.writer(StructType().add("body", "string"), overwrite=False)
    (tmp_path / "summary").unlink()
    (tmp_path / "summary").mkdir()
    writer.commit([])
    assert f"the summary of job nightly is not in {tmp_path}/summary: Is a directory" in caplog.messages


def test_position_ids_of_a_batch_function_need_a_jobId(monkeypatch: pytest.MonkeyPatch) -> None:
    # Spark sets the ids of the query and the batch also in the tasks of a write in foreachBatch.
    context = SimpleNamespace(getLocalProperty=lambda name: "0", partitionId=lambda: 0, attemptNumber=lambda: 0)
    monkeypatch.setattr("qflow_client.spark.sink.TaskContext", SimpleNamespace(get=lambda: context))
    writer = Source(CaseInsensitiveDict({"messageId": "position"})).writer(StructType().add("body", "string"), False)
    with pytest.raises(SettingsError, match="foreachBatch: set jobId to a name of the write and the number"):
        writer.write(iter([]))


def test_a_decimal_in_a_JSON_body_has_no_exponent() -> None:
    schema = StructType().add("price", "decimal(38,10)")
    values = pa.array([Decimal(0), Decimal("-0.0000000001")], pa.decimal128(38, 10))
    batch = pa.RecordBatch.from_arrays([values], ["price"])
    sent = [payload for payload, _, _ in Rows(schema, "json", "column").messages(batch, 0, None, None)]
    bodies = [payload.body for payload in sent if isinstance(payload, Message)]
    assert bodies == [b'{"price":"0.0000000000"}', b'{"price":"-0.0000000001"}']


@pytest.mark.parametrize("column", ["timestamp", "headers"])
def test_with_the_option_messageId_hash_the_time_zone_of_the_session_does_not_change_the_id(column: str) -> None:
    schema = StructType().add("body", "string")
    schema.add(column, "timestamp" if column == "timestamp" else StructType().add("at", "timestamp"))
    ids = set()
    for zone in ("UTC", "America/New_York"):
        at = pa.array([1_700_000_000_000_000], pa.timestamp("us", tz=zone))
        values = at if column == "timestamp" else pa.StructArray.from_arrays([at], ["at"])
        batch = pa.RecordBatch.from_arrays([pa.array(["x"]), values], ["body", column])
        ((message, _, _),) = Rows(schema, "column", "hash").messages(batch, 0, None, None)
        assert isinstance(message, Message)
        ids.add(message.message_id)
    # Earlier versions have sent these ids if the time zone of the session was UTC.
    known = {"timestamp": "3b9f3aa0c1ce21a2fa53c723c2696506", "headers": "d4e222bf111c1eebd85b057d1ea153c4"}
    assert ids == {known[column]}


def test_a_time_after_the_year_9999_is_an_error_that_names_the_partition() -> None:
    schema = StructType().add("body", "string").add("timestamp", "timestamp")
    times = pa.array([1_700_000_000_000_000_000], pa.timestamp("us", tz="UTC"))
    batch = pa.RecordBatch.from_arrays([pa.array(["x"]), times], ["body", "timestamp"])
    with Broker() as broker:
        options = SinkOptions.load({"url": broker.url}, 1)
        with pytest.raises(RowError, match="partition 0, row 0: date value out of range"):
            write_task(options, Rows(schema, "column", "column"), [batch], Task(job="job"))


def test_the_mode_overwrite_raises_an_error(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match=r'use mode\("append"\)'):
        numbers(spark, 1).write.format("amqp").mode("overwrite").save()


def test_a_row_that_cannot_be_sent_fails_the_job_and_the_error_names_the_row(
    spark: SparkSession, broker: Broker
) -> None:
    frame = numbers(spark, 20, 1).withColumn("priority", sf.when(sf.col("body") == "13", 999).otherwise(1))
    with pytest.raises(Exception, match="partition 0, row 13: priority must be from 0 to 255, not 999"):
        write(frame, broker.url, routingKey="rows")
    frame = numbers(spark, 20, 1).select(sf.when(sf.col("body") != "13", sf.col("body")).alias("body"))
    with pytest.raises(Exception, match="partition 0, row 13: body is null"):
        write(frame, broker.url, routingKey="rows")


def test_unroutable_rows_fail_the_job(spark: SparkSession, broker: Broker) -> None:
    with pytest.raises(Exception, match=r"returned \(312 NO_ROUTE\)"):
        write(numbers(spark, 30_000, 1), broker.url, routingKey="nobody", capacity=100)
    eventually(lambda: not broker.connections())


def test_C6_the_depth_never_exceeds_the_stop_threshold_by_more_than_the_capacity_of_the_job(
    spark: SparkSession,
) -> None:
    # The job has four times as many partitions as tasks that run at the same time.
    rows, partitions, stop, capacity = rounds(20_000, least=8000), 8, 1000, 400
    with Broker() as broker:
        broker.declare_queue("rows", arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": 700})
        with SlowConsumer(broker.url, "rows", when_stopped(broker, "rows")) as consumer:
            write(numbers(spark, rows, partitions), broker.url, routingKey="rows", capacity=capacity)
            consumer.wait_for(rows)
        queue = broker.queue("rows")
    assert stop < queue.peak_depth <= stop + capacity
    assert queue.flow_stopped_count > 1
    assert sorted(map(int, consumer.bodies)) == list(range(rows))


def test_C6_without_consumers_the_depth_exceeds_the_stop_threshold_by_exactly_the_capacity_of_the_job(
    spark: SparkSession,
) -> None:
    # Only missing confirms hold the tasks, so the queue gets exactly the capacity above the threshold.
    with Broker(enforcement="completion") as broker:
        broker.declare_queue("rows", arguments={"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 70})
        job = in_background(
            write,
            numbers(spark, 1000, 8),
            broker.url,
            routingKey="rows",
            capacity=50,
            maxProducerFlowControlWait=600,
        )
        broker.wait_until(lambda b: b.queue("rows").depth == 150, timeout=PATIENCE)
        assert [channel.unconfirmed for channel in broker.producers()] == [25, 25]
        spark.sparkContext.cancelAllJobs()
        with pytest.raises(Exception, match="cancelled"):
            job.result(PATIENCE)
        eventually(lambda: not broker.connections())
        assert broker.queue("rows").peak_depth == 150


def test_a_task_that_waits_too_long_fails_with_FlowControlTimeout(spark: SparkSession) -> None:
    with Broker() as broker:
        broker.declare_queue("rows", arguments={"qpid.flow_stop_count": 10, "qpid.flow_resume_count": 5})
        words = r"FlowControlTimeout: the message was not sent within \S+ s, .* is blocked \(flowed\): "
        with pytest.raises(Exception, match=words):
            write(numbers(spark, 1000, 1), broker.url, routingKey="rows", maxProducerFlowControlWait=0.2, capacity=20)


def test_Spark_repeats_a_failed_task_and_the_repeated_messages_are_marked(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    # Use long rows, because short rows wait in Spark's buffers.
    frame = numbers(spark, 4000, 2).select(sf.rpad("body", 2000, " ").alias("body"))
    # The task fails in the middle of the second partition, when some of its rows are in the queue.
    frame = frame.mapInArrow(failing(tmp_path, broker.url, 3000, 2001), "body string")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 100)
    try:
        write(frame, broker.url, routingKey="rows", messageId="position", summaryPath=tmp_path / "summary")
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")

    messages = broker.messages("rows")
    copies = Counter(int(message.body) for message in messages)
    assert sorted(copies) == list(range(4000))
    assert 0 < sum(copies.values()) - 4000 <= 1000
    unmarked: Counter[object] = Counter()
    for message in messages:
        is_marked = headers_of(message.properties).get("x-qflow-republished") is True
        unmarked[message.properties.message_id] += not is_marked
    assert len(unmarked) == 4000
    # All copies of a message except one are marked. The last messages of the failed task may arrive after the copies.
    assert max(unmarked.values()) == 1
    (summary,) = map(json.loads, (tmp_path / "summary").read_text().splitlines())
    assert (summary["rows"], summary["tasks"], summary["retried"]) == (4000, 2, 1)


def test_with_the_option_messageId_hash_only_equal_rows_have_equal_ids(spark: SparkSession, broker: Broker) -> None:
    frame = spark.createDataFrame(
        [("a", "1"), ("a", "2"), ("a", "1"), ("b", None)], "body string, correlation_id string"
    ).withColumn("headers", sf.create_map(sf.lit("k"), sf.col("correlation_id")))
    for _ in range(2):
        write(frame, broker.url, routingKey="rows", messageId="hash")
    ids = Counter(message.properties.message_id for message in broker.messages("rows"))
    assert sorted(ids.values()) == [2, 2, 4]


def test_with_the_option_messageId_position_two_jobs_with_the_same_jobId_give_the_same_ids(
    spark: SparkSession, broker: Broker
) -> None:
    for _ in range(2):
        write(numbers(spark, 10, 2), broker.url, routingKey="rows", messageId="position", jobId="nightly-1")
    by_body: dict[bytes, set[object]] = {}
    for message in broker.messages("rows"):
        by_body.setdefault(message.body, set()).add(message.properties.message_id)
    assert {len(ids) for ids in by_body.values()} == {1}
    assert set.union(*by_body.values()) == {f"nightly-1-{partition}-{row}" for partition in (0, 1) for row in range(5)}


def test_the_summary_of_the_driver_adds_up_the_reports_of_the_tasks(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    broker.flow(False)
    done = in_background(
        write, numbers(spark, 100), broker.url, routingKey="rows", summaryPath=tmp_path / "s", jobId="held"
    )
    broker.wait_until(
        lambda b: len(b.producers()) == 2 and all(c.flowed and c.flow_ok for c in b.producers()), timeout=PATIENCE
    )
    broker.flow(True)
    done.result(PATIENCE)
    (summary,) = map(json.loads, (tmp_path / "s").read_text().splitlines())
    assert summary["job"] == "held"
    assert (summary["rows"], summary["bytes"], summary["tasks"]) == (100, 190, 2)
    assert summary["times_flowed"] >= 2
    assert summary["seconds_flowed"]["channel_flow"] > 0


def test_the_connection_of_each_task_has_its_own_name(spark: SparkSession, broker: Broker) -> None:
    broker.withhold_confirms()
    done = in_background(write, numbers(spark, 10), broker.url, routingKey="rows", name="nightly", jobId="j")
    broker.wait_until(lambda b: b.queue("rows").depth == 10, timeout=PATIENCE)
    names = {str(connection.client_properties.get("connection_name")) for connection in broker.connections()}
    broker.release_confirms()
    done.result(PATIENCE)
    assert names == {"nightly task j-0.0", "nightly task j-1.0"}
    eventually(lambda: not broker.connections())
