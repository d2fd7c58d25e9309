"""A driver is killed in the middle of a streaming query from one queue to another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from qflow_client import Producer
from qflow_client.broker import Broker
from qflow_client.spark import register
from tests.spark.support import PATIENCE, eventually

ROWS = 3000


def start(spark: SparkSession, url: str, folder: Path, **trigger: Any) -> StreamingQuery:
    source = {"url": url, "queue": "in", "spoolPath": str(folder / "spool"), "maxMessagesPerTrigger": "1000"}
    frame = spark.readStream.format("amqp").options(**source).load()
    # The sink uses the message ids of the source.
    sink = {"url": url, "routingKey": "out", "capacity": "100", "maxProducerFlowControlWait": "1000"}
    writer = frame.select("body", "message_id").writeStream.format("amqp").options(**sink)
    return writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(**trigger).start()


def main(url: str, folder: str) -> None:
    """The program that is killed. It never ends by itself."""
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    register(spark)
    start(spark, url, Path(folder), processingTime="0 seconds").awaitTermination()


def run(broker: Broker, folder: Path) -> subprocess.Popen[bytes]:
    program = "import sys; from tests.spark.test_killed import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", program, broker.url, str(folder)]
    # Start a process group, which also contains the JVM and the workers.
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.timeout(1000)
def test_after_a_kill_and_restart_of_the_driver_no_row_is_missing_and_repeats_have_the_same_id(
    spark: SparkSession, tmp_path: Path
) -> None:
    with Broker() as broker:
        broker.declare_queue("in")
        # With this threshold, the program cannot send all rows before it is killed.
        broker.declare_queue("out", arguments={"qpid.flow_stop_count": 1500, "qpid.flow_resume_count": 1000})
        with Producer(broker.url, routing_key="in") as producer:
            for number in range(ROWS):
                producer.send(str(number))
        killed = run(broker, tmp_path)
        try:
            broker.wait_until(lambda b: b.queue("out").depth > 1500, timeout=PATIENCE)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
        eventually(lambda: not broker.connections())
        # The program has acknowledged only messages that it had passed on.
        assert broker.queue("in").depth >= ROWS - broker.queue("out").depth > 0
        broker.set_thresholds("out", flow_stop_count=0, flow_resume_count=0)
        assert start(spark, broker.url, tmp_path, availableNow=True).awaitTermination(int(PATIENCE))
        broker.wait_until(lambda b: b.queue("in").depth == 0, timeout=100)
        rows = {(int(message.body), message.properties.message_id) for message in broker.messages("out")}
        assert sorted(number for number, _ in rows) == list(range(ROWS))
