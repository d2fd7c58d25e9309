"""A standalone cluster of two workers, which get the package only from ``spark-submit --py-files``."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from qflow_client.broker import Broker, BrokerMessage
from tests.spark.cluster import Cluster, Program, bare_python, zipped
from tests.spark.support import SlowConsumer, eventually, headers_of, when_stopped

# The test starts a cluster with drivers and executors, each with a JVM. This takes long on a slow machine.
pytestmark = pytest.mark.timeout(1200)
PATIENCE = 500.0

# Slots of all workers.
SLOTS = 4

# One program runs two jobs, each with its own broker, because a cluster, a driver and executors take long to start.
PROGRAM = """
import sys
import qflow_client
from pyspark.sql import SparkSession
from qflow_client.spark import register

rows, slots = map(int, sys.argv[1:3])
url, capacity = sys.argv[3:5]
spark = SparkSession.builder.getOrCreate()
register(spark)

def places(_):
    import qflow_client
    yield qflow_client.__file__

executors = spark.sparkContext.parallelize(range(slots), slots).mapPartitions(places).collect()
for place in {qflow_client.__file__, *executors}:
    print("package:", place)
frame = spark.range(rows, numPartitions=slots).selectExpr("cast(id as string) as body")
options = {"url": url, "routingKey": "rows", "capacity": capacity, "creditQueue": "credits"}
frame.write.format("amqp").options(**options).mode("append").save()

url, capacity, folder = sys.argv[5:]
register(spark, max_concurrent_tasks=slots)
lines = spark.readStream.format("text").option("maxFilesPerTrigger", slots).load(f"{folder}/lines")
options = {"url": url, "routingKey": "rows", "capacity": capacity, "messageId": "position"}
query = lines.selectExpr("value as body").writeStream.format("amqp").options(**options)
query = query.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
spark.stop()
"""


ROWS, STOP, CAPACITY = 5000, 600, 300
# The streaming query: lines of each file, number of batches, and capacity of the job.
LINES, BATCHES, STREAM_CAPACITY = 200, 2, 80


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder, bare_python(folder / "python"), workers=2, cores=SLOTS // 2) as cluster:
        yield cluster


def test_C6_two_workers_keep_the_capacity_of_a_job_and_a_killed_executor_loses_no_row(
    cluster: Cluster, tmp_path: Path
) -> None:
    package = zipped(tmp_path)
    (tmp_path / "lines").mkdir()
    for file in range(SLOTS * BATCHES):
        path = tmp_path / "lines" / f"{file}.txt"
        path.write_text("".join(f"{file * LINES + line}\n" for line in range(LINES)))
        os.utime(path, (1_700_000_000 + file,) * 2)
    with Broker() as first, Broker() as second:
        first.declare_queue("rows", arguments={"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": 400})
        second.declare_queue("rows")
        second.withhold_confirms()
        given = (ROWS, SLOTS, first.url, CAPACITY, second.url, STREAM_CAPACITY, tmp_path)
        program = cluster.submit(PROGRAM, *map(str, given), py_files=package, cores=SLOTS)
        share_the_capacity(first, program)
        survive_a_killed_executor(second, program, cluster)
        said = program.wait(PATIENCE)
        messages = second.messages("rows")
    # All processes use the submitted package.
    places = {line.removeprefix("package: ") for line in said.splitlines() if line.startswith("package: ")}
    assert places
    assert all(f"{package.name}/qflow_client/__init__.py" in place for place in places), places
    check_repeats(messages)


def share_the_capacity(broker: Broker, program: Program) -> None:
    with SlowConsumer(broker.url, "rows", when_stopped(broker, "rows")) as consumer:
        eventually(lambda: len(consumer.bodies) >= ROWS or not program.runs, timeout=PATIENCE)
    queue = broker.queue("rows")
    assert STOP < queue.peak_depth <= STOP + CAPACITY
    assert sorted(map(int, consumer.bodies)) == list(range(ROWS))
    # The tasks return the credits when all their messages are confirmed.
    eventually(lambda: broker.queue("credits").depth == 256, timeout=PATIENCE)


def survive_a_killed_executor(broker: Broker, program: Program, cluster: Cluster) -> None:
    # Each task has sent its share of the capacity, and waits.
    eventually(lambda: broker.queue("rows").depth >= STREAM_CAPACITY or not program.runs, timeout=PATIENCE)
    assert program.runs, cluster.logs()
    assert broker.queue("rows").depth == STREAM_CAPACITY
    (executor,) = cluster.executors(0)
    os.kill(executor, signal.SIGKILL)
    # The tasks of the killed executor start again, send their share, and wait.
    eventually(lambda: broker.queue("rows").depth >= STREAM_CAPACITY * 3 // 2 or not program.runs, timeout=PATIENCE)
    assert program.runs, cluster.logs()
    broker.release_confirms()


def check_repeats(messages: Sequence[BrokerMessage]) -> None:
    bodies: dict[object, set[bytes]] = defaultdict(set)
    unmarked: Counter[object] = Counter()
    for message in messages:
        name = message.properties.message_id
        bodies[name].add(message.body)
        unmarked[name] += headers_of(message.properties).get("x-qflow-republished") is not True
    # Each row has a unique id.
    assert sorted(int(body) for (body,) in bodies.values()) == list(range(LINES * SLOTS * BATCHES))
    assert len(messages) > len(bodies)
    # All copies of a message except one are marked.
    assert max(unmarked.values()) == 1
