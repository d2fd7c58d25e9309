"""``df.writeStream.format("amqp")``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from qflow_client.broker import Broker
from tests.spark.support import FILES, ROWS, failing


def run(frame: DataFrame, broker: Broker, checkpoint: Path, **options: Any) -> None:
    """Write all available rows in batches."""
    query = (
        frame.writeStream.format("amqp")
        .options(url=broker.url, routingKey="rows", **{name: str(value) for name, value in options.items()})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_all_rows_of_each_batch_arrive_and_each_batch_has_a_summary(
    spark: SparkSession, broker: Broker, lines: DataFrame, tmp_path: Path
) -> None:
    run(lines, broker, tmp_path / "checkpoint", summaryPath=tmp_path / "summary", messageId="position")
    messages = broker.messages("rows")
    assert sorted(int(message.body) for message in messages) == list(range(FILES * ROWS))
    summaries = list(map(json.loads, (tmp_path / "summary").read_text().splitlines()))
    assert [(summary["batch"], summary["rows"]) for summary in summaries] == [(n, ROWS) for n in range(FILES)]
    (query,) = {summary["job"] for summary in summaries}
    assert {message.properties.message_id for message in messages} == {
        f"{query}-{batch}-0-{row}" for batch in range(FILES) for row in range(ROWS)
    }


def test_the_next_run_of_a_failed_query_repeats_rows_with_the_same_message_ids(
    spark: SparkSession, broker: Broker, lines: DataFrame, tmp_path: Path
) -> None:
    # Fail in the middle of the second batch, and again when Spark repeats the task. The second error ends the query.
    frame = lines.mapInArrow(failing(tmp_path, broker.url, ROWS + 750, ROWS + 100, times=2), "body string")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 50)
    try:
        with pytest.raises(StreamingQueryException, match="injected 1"):
            run(frame, broker, tmp_path / "checkpoint", messageId="position")
        assert ROWS + 100 <= broker.queue("rows").depth < FILES * ROWS
        run(frame, broker, tmp_path / "checkpoint", messageId="position")
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")

    messages = broker.messages("rows")
    assert len(messages) > FILES * ROWS
    # The messages of a consumer that drops second copies by message id.
    once = {message.properties.message_id: int(message.body) for message in messages}
    assert sorted(once.values()) == list(range(FILES * ROWS))


def test_a_query_with_a_wrong_column_fails_and_the_error_names_the_column(
    spark: SparkSession, broker: Broker, lines: DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(StreamingQueryException, match="column text"):
        run(lines.withColumnRenamed("body", "text"), broker, tmp_path / "checkpoint")
