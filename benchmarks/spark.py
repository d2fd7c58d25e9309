"""Writes rows from Spark to a queue: compares the sink with hand-written code, and measures the depth of the queue.

There are three measurements.

- ``rates``: the sink, `foreachPartition` with a pika that waits for each confirm, and plain sockets in as many
  processes, alternately.
- ``depth``: C6 for a job with a consumer that is slower than the job. The broker is that of this repository, or a
  RabbitMQ whose queue has a maximum.
- ``scale``: the sink's rate, and the memory of its tasks, for jobs of very different sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import pika
from pamqp import commands

from benchmarks.embedded import DEFAULT_URL, broker_url
from benchmarks.peers.base import Job
from benchmarks.peers.plain import PlainSocket
from benchmarks.wire import Wire, fresh_queue
from qflow_client.broker import Broker
from qflow_client.testing.rabbitmq import RabbitMQNode

__all__ = [
    "BAR",
    "Consumer",
    "depth",
    "largest_of_tasks",
    "main",
    "processor_seconds",
    "rates",
    "scale",
    "session",
]

#: Requirement of ``rates --check``, relative to the rate of `foreachPartition`.
BAR = 8.0

_WINDOW = 1000


@contextmanager
def session(slots: int) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    from qflow_client.spark import check_java, register

    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{slots}]").config("spark.driver.memory", "2g")
    spark = builder.config("spark.ui.enabled", False).config("spark.ui.showConsoleProgress", False).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    try:
        yield spark
    finally:
        spark.stop()


def rows(spark: Any, count: int, size: int, partitions: int) -> Any:
    """Return a DataFrame in which each body begins with the number of its row."""
    from pyspark.sql import functions as sf

    numbers = spark.range(count, numPartitions=partitions)
    return numbers.select(sf.rpad(sf.col("id").cast("string"), size, " ").alias("body"))


def sink(frame: Any, url: str, queue: str, capacity: int, credit_queue: str | None = None) -> None:
    """Write a DataFrame with the data source."""
    options = {"url": url, "routingKey": queue, "capacity": str(capacity)}
    if credit_queue is not None:
        options["creditQueue"] = credit_queue
    frame.write.format("amqp").options(**options).mode("append").save()


def by_hand(frame: Any, url: str, queue: str) -> None:
    """Write a DataFrame as tutorials do, with confirms."""

    def publish(partition: Iterator[Any]) -> None:
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            persistent = pika.BasicProperties(delivery_mode=2)
            for row in partition:
                channel.basic_publish("", queue, row.body.encode(), persistent, mandatory=True)

    frame.foreachPartition(publish)


def _plain(url: str, queue: str, size: int, count: int) -> None:
    PlainSocket().run(Job(url, queue, b"x" * size, count, _WINDOW, True))


def sockets(url: str, queue: str, size: int, count: int, processes: int) -> float:
    """Return the seconds of plain sockets in separate processes, without the start of the processes."""
    # A forked process would inherit the connection to the JVM.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = [(url, queue, size, count // processes)] * processes
        pool.starmap(_plain, [(url, queue, size, 100)] * processes)
        begin = time.monotonic()
        pool.starmap(_plain, parts, chunksize=1)
        return time.monotonic() - begin


@contextmanager
def counted_queue(url: str, most: int | None = None) -> Iterator[tuple[str, Callable[[], int]]]:
    """Declare a queue during the block; yield its name, and a function that returns its number of messages.

    Args:
        most: maximum number of messages, beyond which the oldest are dropped; ``None`` for no maximum.
    """
    arguments: dict[str, Any] = {} if most is None else {"x-max-length": most, "x-overflow": "drop-head"}
    # The queue is durable, as is usual with confirms.
    with Wire(url) as wire, fresh_queue(wire, arguments, durable=True) as name:
        yield name, lambda: wire.depth(name)


def rates(options: argparse.Namespace) -> int:
    """Run the measurement ``rates``, and return the exit code."""
    measured: dict[str, list[float]] = {"sink": [], "foreachPartition": [], "plain sockets": []}
    with broker_url(options.url) as url, session(options.partitions) as spark:
        few = max(options.partitions, options.rows // 100)
        many_rows, few_rows = (rows(spark, count, options.size, options.partitions) for count in (options.rows, few))

        def run(name: str, count: int, write: Callable[[str], float | None]) -> None:
            with counted_queue(url) as (queue, depth_of):
                begin = time.monotonic()
                seconds = write(queue) or time.monotonic() - begin
                in_it = depth_of()
                # The messages of the plain sockets' warm-up are in the queue too.
                if in_it < count:
                    raise SystemExit(f"error: queue {queue!r} has {in_it} messages after {name} wrote {count} rows")
                measured[name].append(count / seconds)

        for at in range(options.repeat + 1):
            run("sink", options.rows, lambda queue: sink(many_rows, url, queue, _WINDOW * options.partitions))
            run("foreachPartition", few, lambda queue: by_hand(few_rows, url, queue))
            run(
                "plain sockets",
                options.rows // options.partitions * options.partitions,
                lambda queue: sockets(url, queue, options.size, options.rows, options.partitions),
            )
            if at == 0:
                # The first round only warms up the JVM's code and the Python workers.
                for rates_of in measured.values():
                    rates_of.clear()
    ratios = {
        name: median(ours / theirs for ours, theirs in zip(measured["sink"], measured[name], strict=True))
        for name in ("foreachPartition", "plain sockets")
    }
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("run", "url")}
        print(json.dumps({"benchmark": "spark", "settings": settings, "rates": measured, "ratios": ratios}))
    else:
        for name, found in measured.items():
            ratio = f"; the sink is {ratios[name]:.2f} of it" if name in ratios else ""
            print(f"{name:18}{median(found):10,.0f} rows/s ({min(found):,.0f} to {max(found):,.0f}){ratio}")
    missed = options.check and ratios["foreachPartition"] < BAR
    if missed:
        print(
            f"missed: the sink has {ratios['foreachPartition']:.2f} of foreachPartition; the bar is {BAR}",
            file=sys.stderr,
        )
    return int(missed)


class Consumer:
    """Consumes messages at a limited rate on a separate thread, and records their numbers."""

    _PREFETCH = 400

    def __init__(self, url: str, queue: str, count: int, rate: float) -> None:
        #: Number of copies of each message.
        self.times = bytearray(count)
        self.received = 0
        self._left = count
        self._rate = rate
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()
        self._channel.basic_qos(prefetch_count=self._PREFETCH)
        self._channel.basic_consume(queue, self._take)
        self._begin = time.monotonic()
        self._unacked = self._last_tag = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _take(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        number = int(body.split(None, 1)[0])
        self._left -= not self.times[number]
        self.times[number] += 1
        self.received += 1
        self._unacked += 1
        self._last_tag = method.delivery_tag
        if self._unacked == self._PREFETCH // 2:
            time.sleep(max(0.0, self._begin + self.received / self._rate - time.monotonic()))
            self._ack()

    def _ack(self) -> None:
        self._unacked = 0
        self._channel.basic_ack(self._last_tag, multiple=True)

    def _run(self) -> None:
        while self._left:
            self._connection.process_data_events(0.1)
            if self._unacked:
                self._ack()
        self.done.set()
        self._connection.close()


class Watch:
    """Records the maximum number of ready messages of a queue, for a broker that does not record the peak."""

    _PERIOD = 0.02

    def __init__(self, url: str, queue: str) -> None:
        self.peak = 0
        self.looks = 0
        self._url, self._queue = url, queue
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with Wire(self._url) as wire:
            while not self._stop.wait(self._PERIOD):
                self.peak = max(self.peak, wire.depth(self._queue))
                self.looks += 1

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(60)
        return self.peak


def _slowly_consumed(spark: Any, options: argparse.Namespace, url: str, partitions: int) -> tuple[float, bool]:
    """Write to a queue that is consumed; return the seconds, and whether each row was consumed exactly once."""
    consumer = Consumer(url, "rows", options.rows, options.rate)
    begin = time.monotonic()
    sink(rows(spark, options.rows, options.size, partitions), url, "rows", options.capacity, options.credit_queue)
    written = time.monotonic() - begin
    consumer.done.wait(600)
    return written, set(consumer.times) == {1}


def _depth_here(spark: Any, options: argparse.Namespace, partitions: int) -> tuple[float, bool, int, str]:
    stop, resume = options.stop, options.stop * 7 // 10
    with Broker() as broker:
        broker.declare_queue("rows", arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": resume})
        written, once = _slowly_consumed(spark, options, broker.url, partitions)
        queue = broker.queue("rows")
        return written, once, queue.peak_depth, f"stopped {queue.flow_stopped_count} times"


def _depth_rabbitmq(spark: Any, options: argparse.Namespace, partitions: int) -> tuple[float, bool, int, str]:
    """Measure with RabbitMQ, which has no thresholds. A full queue refuses messages, and producers send them again."""
    with RabbitMQNode() as node:
        with Wire(node.url) as wire:
            full = {"x-max-length": options.stop, "x-overflow": "reject-publish"}
            wire.call(commands.Queue.Declare(queue="rows", durable=True, arguments=full))
        watch = Watch(node.url, "rows")
        written, once = _slowly_consumed(spark, options, node.url, partitions)
        return written, once, watch.stop(), f"ready, seen in {watch.looks} looks"


def depth(options: argparse.Namespace) -> int:
    """Run the measurement ``depth``, and return the exit code."""
    failed = False
    measure = _depth_rabbitmq if options.broker == "rabbitmq" else _depth_here
    with session(max(2, options.slots)) as spark:
        for partitions in options.partitions:
            written, once, peak, more = measure(spark, options, partitions)
            right = once and peak <= options.stop + options.capacity
            failed |= not right
            print(
                f"{partitions} partitions: {options.rows:,} rows in {written:.0f} s, each consumed "
                f"{'once' if once else 'NOT once'}; peak {peak} ({more}), stop {options.stop} + capacity "
                f"{options.capacity}: {'as promised' if right else 'NOT AS PROMISED'}",
                flush=True,
            )
    return int(failed)


def _descendants() -> Iterator[tuple[Path, bool]]:
    """Yield the ``/proc`` folders of all descendants of this process, and whether each has no children (Linux)."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # The process may have ended.
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    waiting = [os.getpid()]
    while waiting:
        mine = children.get(waiting.pop(), [])
        waiting += mine
        for process in mine:
            yield Path("/proc", str(process)), process not in children


def largest_of_tasks() -> list[int]:
    """Return the maximum memory of each Python worker of Spark, in MiB."""
    found = []
    for folder, is_worker in _descendants():
        with suppress(OSError):
            if is_worker and b"pyspark.daemon" in (folder / "cmdline").read_bytes():
                lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                found.append(int(lines["VmHWM"].split()[0]) // 1024)
    return sorted(found)


def processor_seconds() -> float:
    """Return the CPU seconds of all descendants of this process, such as Spark's JVM and workers."""
    ticks = 0
    for folder, _ in _descendants():
        with suppress(OSError):
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def scale(options: argparse.Namespace) -> int:
    """Run the measurement ``scale``, and return the exit code."""
    with broker_url(options.url) as url, session(options.partitions) as spark:
        capacity = _WINDOW * options.partitions
        with counted_queue(url, options.most) as (queue, _):
            sink(rows(spark, 20_000, options.size, options.partitions), url, queue, capacity)
        for count in options.rows:
            # The jobs run one after the other in the same workers, so that the additional memory of a larger job is
            # visible.
            for _ in range(options.repeat):
                with counted_queue(url, options.most) as (queue, depth_of):
                    begin, before = time.monotonic(), processor_seconds()
                    sink(rows(spark, count, options.size, options.partitions), url, queue, capacity)
                    seconds, used = time.monotonic() - begin, processor_seconds() - before
                    if depth_of() != min(count, options.most):
                        raise SystemExit(
                            f"error: queue {queue!r} has {depth_of()} messages after the sink wrote {count} rows"
                        )
                told: dict[str, Any] = {
                    "rows": count,
                    "seconds": round(seconds, 2),
                    "rows_per_second": round(count / seconds),
                }
                # CPU seconds of Spark, and with `EMBEDDED` also of the broker.
                told["processor_seconds"] = round(used, 1)
                print(json.dumps(told | {"largest_memory_of_tasks_mib": largest_of_tasks()}), flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    kinds = made.add_subparsers(required=True)
    of_rates = kinds.add_parser("rates", help="rows per second, and ratios")
    of_rates.add_argument("--url", default=DEFAULT_URL, help="of the broker, or: embedded")
    of_rates.add_argument("--rows", type=int, default=300_000, help="per run; by hand a hundredth (%(default)s)")
    of_rates.add_argument("--size", type=int, default=100, help="of a body, in bytes (%(default)s)")
    of_rates.add_argument("--partitions", type=int, default=2, help="and slots (%(default)s)")
    of_rates.add_argument("--repeat", type=int, default=5, help="rounds, of which the median counts (%(default)s)")
    of_rates.add_argument("--json", action="store_true", help="print one JSON document")
    of_rates.add_argument("--check", action="store_true", help=f"fail below {BAR} of foreachPartition")
    of_rates.set_defaults(run=rates)
    of_depth = kinds.add_parser("depth", help="how far a slow consumer's queue goes past its stop threshold (C6)")
    of_depth.add_argument("--rows", type=int, default=3_000_000, help="of each job (%(default)s)")
    of_depth.add_argument("--size", type=int, default=10, help="of a body, in bytes (%(default)s)")
    of_depth.add_argument("--partitions", type=int, nargs="+", default=[2, 8], help="of each job in turn (2 8)")
    of_depth.add_argument("--stop", type=int, default=5000, help="the queue's threshold (%(default)s)")
    of_depth.add_argument("--capacity", type=int, default=2000, help="of the job (%(default)s)")
    of_depth.add_argument("--rate", type=float, default=15_000, help="messages a second consumed (%(default)s)")
    of_depth.add_argument("--broker", choices=["embedded", "rabbitmq"], default="embedded", help="(%(default)s)")
    of_depth.add_argument("--slots", type=int, default=2, help="tasks at once (%(default)s)")
    of_depth.add_argument("--credit-queue", help="hold the capacity as credits in this queue")
    of_depth.set_defaults(run=depth)
    of_scale = kinds.add_parser("scale", help="rows per second and memory of jobs of very different sizes")
    of_scale.add_argument("--url", default=DEFAULT_URL, help="of the broker, or: embedded")
    of_scale.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7], help="of each job in turn")
    of_scale.add_argument("--size", type=int, default=100, help="of a body, in bytes (%(default)s)")
    of_scale.add_argument("--partitions", type=int, default=2, help="and slots (%(default)s)")
    of_scale.add_argument("--most", type=int, default=20_000, help="messages that the queue keeps (%(default)s)")
    of_scale.add_argument("--repeat", type=int, default=1, help="how often each is run (%(default)s)")
    of_scale.set_defaults(run=scale)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit code: 1 if rows were lost, if the limit did not hold, or if with ``--check`` the requirement is missed.
    """
    options = parser().parse_args(arguments)
    result: int = options.run(options)
    return result


if __name__ == "__main__":
    sys.exit(main())
