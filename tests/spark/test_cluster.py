"""A standalone cluster of two workers, which have the package from ``spark-submit --py-files`` alone."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from tests.spark.cluster import Cluster, bare_python, zipped
from tests.spark.support import SlowConsumer, eventually, headers_of, when_stopped

# It starts a cluster and, on it, drivers and executors, each a JVM: long enough for any machine.
pytestmark = pytest.mark.timeout(1200)
PATIENCE = 500.0

# Slots of all workers.
SLOTS = 4

WRITE = """
import sys
import qflow_client
from pyspark.sql import SparkSession
from qflow_client.spark import register

url, rows, slots, capacity = sys.argv[1], *map(int, sys.argv[2:])
spark = SparkSession.builder.getOrCreate()
register(spark)

def places(_):
    import qflow_client
    yield qflow_client.__file__

executors = spark.sparkContext.parallelize(range(slots), slots).mapPartitions(places).collect()
for place in {qflow_client.__file__, *executors}:
    print("package:", place)
frame = spark.range(rows, numPartitions=slots).selectExpr("cast(id as string) as body")
options = {"url": url, "routingKey": "rows", "capacity": str(capacity), "creditQueue": "credits"}
frame.write.format("amqp").options(**options).mode("append").save()
spark.stop()
"""

STREAM = """
import sys
from pyspark.sql import SparkSession
from qflow_client.spark import register

url, folder, slots, capacity = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
register(spark, max_concurrent_tasks=int(slots))
lines = spark.readStream.format("text").option("maxFilesPerTrigger", slots).load(f"{folder}/lines")
options = {"url": url, "routingKey": "rows", "capacity": capacity, "messageId": "position"}
query = lines.selectExpr("value as body").writeStream.format("amqp").options(**options)
query = query.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
spark.stop()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, bare_python(folder / "python"), workers=2, cores=SLOTS // 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zipped(tmp_path_factory.mktemp("package"))


def test_C6_tasks_on_two_workers_share_the_capacity_that_is_held_as_credits(cluster: Cluster, package: Path) -> None:
    rows, stop, capacity = 5000, 600, 300
    with Broker() as broker:
        broker.declare_queue("rows", arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": 400})
        with SlowConsumer(broker.url, "rows", when_stopped(broker, "rows")) as consumer:
            program = cluster.submit(
                WRITE, broker.url, str(rows), str(SLOTS), str(capacity), py_files=package, cores=SLOTS
            )
            said = program.wait(PATIENCE)
            consumer.wait_for(rows)
        queue = broker.queue("rows")
        assert broker.queue("credits").depth == 256
    assert stop < queue.peak_depth <= stop + capacity
    assert sorted(map(int, consumer.bodies)) == list(range(rows))
    # Nothing but what was submitted.
    places = {line.removeprefix("package: ") for line in said.splitlines() if line.startswith("package: ")}
    assert places
    assert all(f"{package.name}/qflow_client/__init__.py" in place for place in places), places


def test_an_executor_that_is_killed_in_a_batch_costs_nothing_and_repeats_are_marked(
    cluster: Cluster, package: Path, tmp_path: Path
) -> None:
    lines, capacity, batches = 200, 80, 2
    (tmp_path / "lines").mkdir()
    for file in range(SLOTS * batches):
        path = tmp_path / "lines" / f"{file}.txt"
        path.write_text("".join(f"{file * lines + line}\n" for line in range(lines)))
        os.utime(path, (1_700_000_000 + file,) * 2)
    with Broker() as broker:
        broker.declare_queue("rows")
        broker.withhold_confirms()
        program = cluster.submit(
            STREAM, broker.url, str(tmp_path), str(SLOTS), str(capacity), py_files=package, cores=SLOTS
        )
        # Each task has sent its part of the capacity, and waits.
        eventually(lambda: broker.queue("rows").depth >= capacity or not program.runs, timeout=PATIENCE)
        assert program.runs, cluster.logs()
        assert broker.queue("rows").depth == capacity
        # Those of the job before may take a while to end.
        eventually(lambda: len(cluster.executors(0)) == 1, timeout=PATIENCE)
        (executor,) = cluster.executors(0)
        os.kill(executor, signal.SIGKILL)
        # The tasks that it had begin anew, and wait likewise.
        eventually(lambda: broker.queue("rows").depth >= capacity * 3 // 2 or not program.runs, timeout=PATIENCE)
        assert program.runs, cluster.logs()
        broker.release_confirms()
        program.wait(PATIENCE)
        messages = broker.messages("rows")
    bodies: dict[object, set[bytes]] = defaultdict(set)
    unmarked: Counter[object] = Counter()
    for message in messages:
        name = message.properties.message_id
        bodies[name].add(message.body)
        unmarked[name] += headers_of(message.properties).get("x-qflow-republished") is not True
    # Each row has an id, and no two rows the same.
    assert sorted(int(body) for (body,) in bodies.values()) == list(range(lines * SLOTS * batches))
    assert len(messages) > len(bodies)
    # Of what is there twice, all but one say so.
    assert max(unmarked.values()) == 1
