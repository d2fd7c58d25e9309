"""Spark Connect: a client connects to Spark with gRPC and registers the data source there."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from qflow_client.broker import Broker
from tests.spark.cluster import run_python

if os.environ.get("QFLOW_REQUIRE_SPARK") != "1" and importlib.util.find_spec("grpc") is None:
    pytest.skip("Spark Connect needs grpcio: pip install 'pyspark[connect]'", allow_module_level=True)

# The client runs in a separate process, because this process has a classic session.
pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql.connect.session import SparkSession as ConnectSession
from qflow_client.spark import register

url, folder, server = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
assert isinstance(spark, ConnectSession)
register(spark)
frame = spark.range(1000, numPartitions=2).selectExpr("cast(id as string) as body")

def write(**options):
    frame.write.format("amqp").options(url=url, routingKey="rows", **options).mode("append").save()

try:
    # How many slots the server has, the client is not told.
    write()
except Exception as error:
    assert "set maxConcurrentTasks" in str(error), error
else:
    raise AssertionError("a capacity that cannot be divided was divided")
write(maxConcurrentTasks="2")
write(creditQueue="credits")

stream = spark.readStream.format("amqp").options(url=url, queue="rows", spoolPath=f"{folder}/spool").load()
query = stream.select("body").writeStream.format("amqp").options(url=url, routingKey="copies", creditQueue="credits")
query = query.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()

options = {"url": url, "queue": "copies", "spoolPath": f"{folder}/copies"}
copies = spark.read.format("amqp").options(**options).load()
numbers = sorted(int(row.body) for row in copies.collect())
assert numbers == sorted([*range(1000), *range(1000)]), len(numbers)
print("done")
spark.stop()
"""


def test_the_sink_and_the_source_work_with_Spark_Connect(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    server = f"sc://127.0.0.1:{spark.conf.get('spark.connect.grpc.binding.port')}"
    broker.declare_queue("copies")
    assert run_python(PROGRAM, broker.url, str(tmp_path), server, timeout=500).split()[-1] == "done"
    broker.wait_until(lambda b: [b.queue(name).depth for name in ("rows", "copies")] == [0, 0], timeout=100)
