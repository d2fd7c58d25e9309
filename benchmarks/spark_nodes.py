"""Kills each RabbitMQ node of a cluster (kill -9) while Spark writes to a quorum queue and reads from it.

The executors of a standalone Spark cluster run two streaming queries. One query writes numbered rows with the sink. The
other query reads the queue with the source, into Parquet files. If the connection of the source is lost, its query ends
with an error, and the program starts the query again from its checkpoint. The query of the sink must not end.

The nodes are killed one after the other, and each killed node is started again. Before each kill, both queries must
have committed more batches since the previous kill, and a task of the sink must have sent rows to the node. If it was
not killed before, the node of the queue's leader is killed. At the end, the audit compares the Parquet files with the
rows.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pika

from benchmarks.proof import print_proof
from benchmarks.soak.audit import describe, expect_enough, expect_none
from benchmarks.soak.messages import Copy, body_of, read_copy
from qflow_client.cli.demo.audit import AuditLine
from qflow_client.testing.cluster import RabbitMQCluster
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.spark.support import in_background

if TYPE_CHECKING:
    from tests.spark.cluster import Cluster, Program

__all__ = ["Kill", "Read", "Run", "audit"]

_QUEUE = "qflow-spark-nodes"
_WORKERS, _CORES = 2, 2
# A batch of the sink has two files. Each file is the input of one task.
_ROWS_OF_FILE, _FILES_OF_BATCH = 4000, 2
# Number of batches that each query must commit before each kill, and after the last kill.
_BATCHES = 2
# Bytes that a task must have sent to a node before the kill.
_SENT = 50_000
# Returns the received bytes of each connection of a node, and whether the connection has a name. Only connections of
# the sink have a name. A connection may just have closed.
_CONNECTIONS = (
    "[catch begin [{_, Sent}, {_, Client}] = rabbit_networking:connection_info(Each, [recv_oct, client_properties]), "
    '{Sent, lists:keymember(<<"connection_name">>, 1, Client)} end || Each <- rabbit_networking:connections_local()].'
)
# Maximum seconds of each wait.
_PATIENCE = 600.0

_PROGRAM = """
import sys
from pathlib import Path
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from qflow_client.spark import register

url, queue, files, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
spark = SparkSession.builder.getOrCreate()
register(spark, max_concurrent_tasks=files)

def start(writer, name, **options):
    return writer.options(checkpointLocation=f"{folder}/{name}", **options).start()

def start_source():
    options = {"url": url, "queue": queue, "spoolPath": f"{folder}/spool", "maxMessagesPerTrigger": 5000}
    rows = spark.readStream.format("amqp").options(**options).load()
    rows = rows.select("body", "headers", "message_id", "redelivered")
    return start(rows.writeStream.format("parquet"), "source", path=f"{folder}/out")

lines = spark.readStream.format("text").option("maxFilesPerTrigger", files).load(f"{folder}/lines")
options = {"url": url, "hostOrder": "shuffled", "liveness": 2, "routingKey": queue, "messageId": "position"}
options |= {"rate": 2000, "summaryPath": f"{folder}/summary"}
sink = start(lines.selectExpr("unbase64(value) as body").writeStream.format("amqp"), "sink", **options)
source = start_source()
while not (folder / "stop").exists():
    try:
        source.awaitTermination(1)
    except StreamingQueryException as error:
        if "ConnectionFailed" not in str(error):
            raise
        print("source ended:", *[line for line in str(error).splitlines() if "ConnectionFailed" in line], flush=True)
        source = start_source()
    if sink.exception() is not None:
        raise sink.exception()
sink.stop()
source.stop()
# Only Spark knows which files belong to committed batches.
spark.read.parquet(f"{folder}/out").coalesce(1).write.parquet(f"{folder}/result")
spark.stop()
"""


class Read(NamedTuple):
    """One row of the source's output. `redelivered` means that the broker has delivered the message before."""

    copy: Copy
    message_id: str | None
    redelivered: bool


class Kill(NamedTuple):
    """A kill of a node, and what the node had at that time: the queue's leader, and connections of sink and source."""

    node: str
    is_leader: bool
    sink: int
    source: int


@dataclass(frozen=True)
class Run:
    """The results of one run.

    Attributes:
        rows: number of rows that the sink has confirmed. The rows are numbered from 0.
        read: the output of the source.
        source_ends: how often the query of the source ended because its connection was lost.
        nodes: required number of different killed nodes.
    """

    rows: int
    read: Sequence[Read]
    kills: Sequence[Kill]
    source_ends: int
    nodes: int = 3


def audit(run: Run) -> list[AuditLine]:
    """Return the conditions that a run must meet, each with its measured value."""
    intact = [each for each in run.read if each.copy.intact]
    ids: dict[int, set[str | None]] = {}
    for each in intact:
        ids.setdefault(each.copy.number, set()).add(each.message_id)
    # Copies without a mark. The broker has delivered those in `again` before.
    unmarked, again = (
        Counter(each.copy.number for each in intact if not each.copy.marked and each.redelivered is redelivered)
        for redelivered in (False, True)
    )
    second = len(intact) - len(ids)
    second_again = sum(copies - (number not in unmarked) for number, copies in again.items())
    marked = sum(each.copy.marked for each in intact)
    return [
        expect_none("confirmed and missing", f"{run.rows:,} confirmed", [n for n in range(run.rows) if n not in ids]),
        expect_none(
            "second copies neither marked nor redelivered",
            f"{second:,} second copies, {second_again:,} of them redelivered; {marked:,} of all rows read are marked",
            [number for number, copies in unmarked.items() if copies > 1],
        ),
        expect_none(
            "never sent, and read", f"{len(run.read):,} read", [number for number in ids if number >= run.rows]
        ),
        expect_none(
            "not as it was sent",
            f"{len(run.read):,} read",
            [f"at place {place}" for place, each in enumerate(run.read) if not each.copy.intact],
        ),
        expect_none(
            "without exactly one message id",
            f"{len(ids):,} rows",
            [number for number, found in ids.items() if len(found) > 1 or None in found],
        ),
        expect_enough("different nodes killed", len({kill.node for kill in run.kills}), run.nodes),
        expect_enough("kills that cut a connection of the sink", sum(kill.sink > 0 for kill in run.kills), run.nodes),
        expect_enough("kills of the queue's leader", sum(kill.is_leader for kill in run.kills), 1),
        expect_enough("kills that ended the query of the source", run.source_ends, 1),
    ]


class _Queries:
    """The two streaming queries, and the input of the sink's query."""

    def __init__(self, program: Program, spark: Cluster, folder: Path) -> None:
        self._program, self._spark, self._folder = program, spark, folder
        self._files = 0

    @property
    def rows(self) -> int:
        """The number of rows in the input."""
        return self._files * _ROWS_OF_FILE

    def confirmed(self) -> int:
        """Return the number of rows in the committed batches of the sink."""
        return sum(json.loads(line)["rows"] for line in (self._folder / "summary").read_text().splitlines())

    def batches(self) -> tuple[int, int]:
        """Return the number of committed batches of the sink and of the source."""
        sink, source = (len(list((self._folder / name / "commits").glob("[0-9]*"))) for name in ("sink", "source"))
        return sink, source

    def feed(self) -> None:
        """Add input, so that the sink always has a next batch."""
        while self._files < (self.batches()[0] + 3) * _FILES_OF_BATCH:
            lines = [base64.b64encode(body_of(0, self.rows + row)) for row in range(_ROWS_OF_FILE)]
            # Spark ignores files whose names begin with a dot.
            part = self._folder / "lines" / f".{self._files}"
            part.write_bytes(b"\n".join(lines))
            # Spark reads the oldest file first.
            os.utime(part, (1_700_000_000 + self._files,) * 2)
            part.rename(part.with_name(f"{self._files}.txt"))
            self._files += 1

    def wait(self, condition: Callable[[], object], what: str, *, feed: bool = True) -> None:
        """Wait until a condition is true, and add input during the wait."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if feed:
                self.feed()
            assert self._program.runs, f"the program ended before: {what}\n{self._spark.logs()}"
            assert time.monotonic() < deadline, f"not within {_PATIENCE:g} s: {what}\n{self._spark.logs()}"
            # The conditions concern other processes, so look again and again.
            time.sleep(0.1)

    def wait_batches(self) -> None:
        """Wait until each query has committed `_BATCHES` more batches."""
        before = self.batches()
        self.wait(
            lambda: all(now >= then + _BATCHES for now, then in zip(self.batches(), before, strict=True)),
            "more batches of both queries",
        )

    def end(self) -> tuple[str, Sequence[Read]]:
        """End the program, and return its output and the rows that the source has read."""
        from pyarrow.parquet import ParquetFile

        (self._folder / "stop").touch()
        said = self._program.wait(_PATIENCE)
        (result,) = (self._folder / "result").glob("*.parquet")
        return said, [
            Read(read_copy(row["body"], dict(row["headers"] or ())), row["message_id"], row["redelivered"])
            for batch in ParquetFile(result).iter_batches()
            for row in batch.to_pylist()
        ]


def _listed(node: RabbitMQNode, what: str, *columns: str) -> list[list[str]]:
    """Return the columns of a list of ``rabbitmqctl``."""
    return [line.split("\t") for line in node.ctl(what, "--no-table-headers", *columns).splitlines()]


def _kill_next(cluster: RabbitMQCluster, killed: Sequence[Kill], queries: _Queries) -> Kill:
    """Kill a node that was not killed before, if possible the leader's node, and start it again."""
    nodes = {node.name: node for node in cluster.nodes if node.name not in {kill.node for kill in killed}}
    ((leader,),) = _listed(cluster.nodes[0], "list_queues", "leader")
    name = leader if leader in nodes else min(nodes)
    node = nodes[name]
    sink, source = 0, 0

    def is_used() -> bool:
        nonlocal sink, source
        here = re.findall(r"\{(\d+), ?(true|false)\}", node.evaluate(_CONNECTIONS))
        sink = sum(named == "true" and int(sent) > _SENT for sent, named in here)
        source = sum(named == "false" for _, named in here)
        return sink > 0

    queries.wait(is_used, f"rows that a task sends to {name}")
    node.kill()
    started = in_background(node.start)
    queries.wait(started.done, f"the start of {name}")
    started.result()
    return Kill(name, name == leader, sink, source)


def run(folder: Path) -> Run:
    """Kill each node once while the queries run, and return the results."""
    # The unit tests use this module without Spark.
    from tests.spark.cluster import Cluster, bare_python, zipped

    (folder / "lines").mkdir()
    home = folder / "cluster"
    home.mkdir()
    with (
        RabbitMQCluster() as cluster,
        Cluster(home, bare_python(home / "python"), workers=_WORKERS, cores=_CORES) as spark,
    ):
        # The leader of the queue is on the second node. The source connects to the first node.
        with pika.BlockingConnection(pika.URLParameters(cluster.urls[1])) as connection:
            connection.channel().queue_declare(_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        arguments = (",".join(cluster.urls), _QUEUE, str(_FILES_OF_BATCH), str(folder))
        package = zipped(folder)
        # Spark does not send the package to the driver's process that reads the queue, so it is in `PYTHONPATH`, too.
        program = spark.submit(_PROGRAM, *arguments, py_files=package, cores=_WORKERS * _CORES, PYTHONPATH=str(package))
        queries = _Queries(program, spark, folder)
        kills: list[Kill] = []
        for _ in cluster.nodes:
            queries.wait_batches()
            kills.append(_kill_next(cluster, kills, queries))
            _say(f"killed and started: {kills[-1]}; {queries.batches()} batches of sink and source")
        queries.wait_batches()
        queries.wait(lambda: queries.confirmed() == queries.rows, "the last batch of the sink", feed=False)
        queries.wait(
            lambda: _listed(cluster.nodes[0], "list_queues", "messages") == [["0"]], "an empty queue", feed=False
        )
        said, read = queries.end()
    ends = re.findall("^source ended: .*", said, re.MULTILINE)
    _say("\n".join(ends))
    return Run(queries.rows, read, kills, len(ends))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_nodes", description=__doc__)
    parser.parse_args()
    from qflow_client.spark import check_java

    check_java()
    with tempfile.TemporaryDirectory(prefix="qflow-spark-nodes-") as folder:
        result = run(Path(folder))
    lines = audit(result)
    for line in lines:
        print(describe(line))
    if not all(line.passed for line in lines):
        return 1
    print_proof(result.rows, "rows through Spark and kills of nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
