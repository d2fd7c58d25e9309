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
from tests.spark.support import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
ROWS = 3000

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
sink = {"url": url, "routingKey": "out", "capacity": "100", "maxProducerFlowControlWait": "1000"}
writer = frame.select("body", "message_id").writeStream.format("amqp").options(**sink)
writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
trigger = {"availableNow": True} if until_end == "yes" else {"processingTime": "0 seconds"}
writer.trigger(**trigger).start().awaitTermination()
"""


def run(broker: Broker, folder: Path, until_end: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", QUERY, broker.url, str(folder), until_end]
    # A group of its own, with its JVM and its workers in it.
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.timeout(1000)
def test_nothing_is_missing_after_a_restart_and_repeats_have_the_same_message_id(tmp_path: Path) -> None:
    with Broker() as broker:
        broker.declare_queue("in")
        # However late it is killed, it has not come to the end.
        broker.declare_queue("out", arguments={"qpid.flow_stop_count": 1500, "qpid.flow_resume_count": 1000})
        with Producer(broker.url, routing_key="in") as producer:
            for number in range(ROWS):
                producer.send(str(number))
        killed = run(broker, tmp_path, "no")
        try:
            broker.wait_until(lambda b: b.queue("out").depth > 1500, timeout=PATIENCE)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
        eventually(lambda: not broker.connections())
        # It acknowledged nothing that it had not sent on.
        assert broker.queue("in").depth >= ROWS - broker.queue("out").depth > 0
        broker.set_thresholds("out", flow_stop_count=0, flow_resume_count=0)
        assert run(broker, tmp_path, "yes").wait(PATIENCE) == 0
        broker.wait_until(lambda b: b.queue("in").depth == 0, timeout=100)
        rows = {(int(message.body), message.properties.message_id) for message in broker.messages("out")}
        assert sorted(number for number, _ in rows) == list(range(ROWS))
