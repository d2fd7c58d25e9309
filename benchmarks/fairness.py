"""Measures how equally a queue that turns ON and OFF serves producers, and its overshoot, with and without turns (F4).

Each producer is a `Producer` in its own process that sends as fast as it can.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.report import aligned
from qflow_client import Producer
from qflow_client.broker import Broker

__all__ = ["flap", "main"]

#: Requirement of ``--check``: maximum difference between the most and the least served producer, as a part of the
#: messages of the most served producer.
MOST = 0.2
STOP, RESUME, CAPACITY = 100, 50, 20
_START = 60.0


def _feed(url: str, name: bytes) -> None:
    with Producer(url, routing_key="q", capacity=CAPACITY, max_producer_flow_control_wait=None) as producer:
        while True:
            producer.send(name)


def flap(interval: float, producers: int, messages: int) -> dict[str, Any]:
    """Run one measurement.

    Args:
        interval: seconds between two producers that the queue unblocks; 0 to unblock all producers at once.
        messages: number of messages to consume, one by one, as fast as possible.
    """
    context = multiprocessing.get_context("spawn")
    with Broker(resume_interval=interval) as broker, ExitStack() as stack:
        broker.declare_queue("q", arguments={"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME})
        for number in range(producers):
            process = context.Process(target=_feed, args=(broker.url, b"%d" % number), daemon=True)
            process.start()
            stack.callback(_end, process)
        broker.wait_until(lambda b: len([each for each in b.producers() if each.published]) == producers, _START)
        # Some producers started before others. If all are unblocked at once, first wait until all are blocked.
        broker.wait_until(lambda b: len(b.queue("q").blocked) == producers or interval > 0, _START)
        broker.purge("q")
        times_on = broker.queue("q").flow_stopped_count
        served: Counter[bytes] = Counter()
        peaks = []
        began = time.perf_counter()
        for at in range(messages):
            broker.wait_until(lambda b: b.queue("q").depth, _START)
            message = broker.get("q")
            assert message is not None
            served[message.body] += 1
            if not at % 10:
                peaks.append(broker.queue("q").depth)
        seconds = time.perf_counter() - began
        queue = broker.queue("q")
    shares = served.values()
    return {
        "interval ms": interval * 1000,
        "difference": (max(shares) - min(shares)) / max(shares) if len(served) == producers else 1.0,
        "least": min(shares),
        "most": max(shares),
        "times ON": queue.flow_stopped_count - times_on,
        "depth p50": sorted(peaks)[len(peaks) // 2],
        "depth p99": sorted(peaks)[int(len(peaks) * 0.99)],
        "peak": max(peaks),
        "msg/s": messages / seconds,
    }


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if with ``--check`` the difference is too large."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--producers", type=int, default=10, help="how many (%(default)s)")
    parser.add_argument("--messages", type=int, default=30_000, help="of a run (%(default)s)")
    parser.add_argument("--intervals", default="0,1,5", help="milliseconds, separated by commas (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--check", action="store_true", help=f"fail unless each difference is <= {MOST:.0%}%")
    options = parser.parse_args(arguments)
    intervals = [float(each) / 1000 for each in options.intervals.split(",")]
    found = [flap(interval, options.producers, options.messages) for interval in intervals]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        rows = [tuple(f"{value:,.2f}" if value < 1 else f"{value:,.0f}" for value in row.values()) for row in found]
        print(aligned("A queue that flaps", [tuple(found[0]), *rows]))
    return int(options.check and any(row["difference"] > MOST for row in found))


if __name__ == "__main__":
    sys.exit(main())
