"""Compares the cost of a Celery application's ``apply_async`` on kombu's py-amqp transport and on ours."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import celery
import kombu.pools
from celery import Celery

from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url
from benchmarks.shares import print_shares

__all__ = ["LOOPS", "main", "measure", "ratios", "run_loop"]

_QUEUE = "qflow-benchmark-celery"


def _take(number: int) -> None:
    raise AssertionError("the task must not run, because the benchmark has no worker")


#: For each loop, the scheme of the URL and the value of ``confirm_publish``.
LOOPS: dict[str, tuple[str, Any]] = {
    "pyamqp, unconfirmed": ("pyamqp", False),
    "qflow, unconfirmed": ("qflow", False),
    "pyamqp, confirm each": ("pyamqp", True),
    "qflow, confirm each": ("qflow", True),
    "qflow, pipelined": ("qflow", "pipelined"),
}


def run_loop(name: str, url: str, count: int) -> float:
    """Run one loop, and return its calls per second. With pipelined confirms, the time includes the last confirm."""
    scheme, confirms = LOOPS[name]
    app = Celery("benchmark", broker=url.replace("amqp", scheme, 1))
    app.conf.update(
        task_ignore_result=True,
        task_default_delivery_mode="transient",
        broker_transport_options={"confirm_publish": confirms},
    )
    task = app.task(_take, name="take", shared=False)
    try:
        # The first call creates the queue, the connection and everything else.
        task.apply_async((0,), queue=_QUEUE)
        began = time.perf_counter()
        for number in range(count):
            task.apply_async((number,), queue=_QUEUE)
        if confirms == "pipelined":
            with app.producer_or_acquire() as producer:
                producer.channel.wait_for_confirms()
        seconds = time.perf_counter() - began
        with app.connection_for_write() as connection:
            end = time.monotonic() + 30
            queue = connection.default_channel
            while (depth := queue.queue_declare(_QUEUE, passive=True).message_count) != count + 1:
                if time.monotonic() > end:
                    raise RuntimeError(f"queue {_QUEUE!r} has {depth} of {count + 1} messages after 30 s")
                time.sleep(0.05)
            queue.queue_delete(_QUEUE)
    finally:
        app.close()
        kombu.pools.reset()
    return count / seconds


#: The compared pairs of loops, and the minimum ratios of their rates.
_RATIOS = {
    "unconfirmed": ("qflow, unconfirmed", "pyamqp, unconfirmed", 1.0),
    "confirm each": ("qflow, confirm each", "pyamqp, confirm each", 1.0),
    "pipelined": ("qflow, pipelined", "pyamqp, confirm each", 1.4),
}


def measure(url: str, count: int, rounds: int) -> list[dict[str, float]]:
    """For each round, return the calls per second of every loop. In a round each loop runs once."""
    return [{name: run_loop(name, url, count) for name in LOOPS} for _ in range(rounds)]


def ratios(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each ratio over the rounds. A disturbance in a round affects both loops."""
    return {name: median(rates[one] / rates[other] for rates in rounds) for name, (one, other, _) in _RATIOS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rates and the ratios; with ``--check`` return 1 if a ratio is below its minimum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"or {EMBEDDED!r}")
    parser.add_argument("--messages", type=int, default=2000, help="per run")
    parser.add_argument("--repeat", type=int, default=7, help="rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail if a ratio is below its minimum")
    parser.add_argument(
        "--shares", action="store_true", help="show whose the processor time is, by package, instead; needs py-spy"
    )
    arguments = parser.parse_args(argv)
    with broker_url(arguments.url) as url:
        if arguments.shares:
            print_shares("celery", list(LOOPS), url, arguments.messages)
            return 0
        rounds = measure(url, arguments.messages, arguments.repeat)
    found = ratios(rounds)
    if arguments.json:
        versions = {"celery": celery.__version__, "kombu": kombu.__version__}
        json.dump(versions | {"rounds": rounds, "ratios": found}, sys.stdout, indent=2)
        print()
    else:
        print(f"Celery {celery.__version__}, kombu {kombu.__version__}, medians of {arguments.repeat} rounds")
        for name in LOOPS:
            print(f"{name:30} {median(rates[name] for rates in rounds):10,.0f} calls/s")
        for name, (one, other, least) in _RATIOS.items():
            print(f"{name:30} {found[name]:10.2f}  ({one} / {other}; at least {least})")
    return int(arguments.check and any(found[name] < least for name, (_, _, least) in _RATIOS.items()))


if __name__ == "__main__":
    sys.exit(main())
