"""A driver that is killed in the middle of a streaming query from one queue to another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qflow_client import Producer
from qflow_client.broker import Broker
from tests.spark.support import eventually

ROOT = Path(__file__).parents[2]
ROWS = 5000

QUERY = """
import sys
from pyspark.sql import SparkSession
from qflow_client.spark import register

url, folder, until_end = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
register(spark)
frame = spark.readStream.format("amqp").options(
    url=url, queue="in", spoolPath=f"{folder}/spool", maxMessagesPerTrigger=1000
).load()
# The message ids of the source are those of the sink.
writer = frame.select("body", "message_id").writeStream.format("amqp").options(url=url, routingKey="out")
writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
trigger = {"availableNow": True} if until_end == "yes" else {"processingTime": "0 seconds"}
writer.trigger(**trigger).start().awaitTermination()
"""


def run(broker: Broker, folder: Path, until_end: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", QUERY, broker.url, str(folder), until_end]
    # A group of its own, with its JVM and its workers in it.
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.timeout(300)
def test_nothing_is_missing_after_a_restart_and_repeats_have_the_same_message_id(tmp_path: Path) -> None:
    with Broker() as broker:
        broker.declare_queue("in")
        broker.declare_queue("out")
        with Producer(broker.url, routing_key="in") as producer:
            for number in range(ROWS):
                producer.send(str(number))
        killed = run(broker, tmp_path, "no")
        try:
            broker.wait_until(lambda b: b.queue("out").depth > 1500, timeout=90)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
        eventually(lambda: not broker.connections())
        assert broker.queue("in").depth > 0
        assert run(broker, tmp_path, "yes").wait(100) == 0
        assert broker.queue("in").depth == 0
        rows = {(int(message.body), message.properties.message_id) for message in broker.messages("out")}
        assert sorted(number for number, _ in rows) == list(range(ROWS))
