"""Measures the memory of a producer over millions of messages, and over minutes in which it is flowed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.embedded import EMBEDDED, broker_url
from benchmarks.flow import resident
from qflow_client import AsyncProducer, Producer

__all__ = ["main", "publish", "publish_async", "stay_flowed"]

_MIB = 1 << 20
# Half of the maximum range of the resident memory, in MiB.
_MOST_MIB = 5.0


def _summary(samples: list[int]) -> dict[str, Any]:
    # Leave out the first tenth, in which caches and the allocator fill.
    steady = samples[len(samples) // 10 :]
    return {
        "first_mib": round(steady[0] / _MIB, 2),
        "last_mib": round(steady[-1] / _MIB, 2),
        "spread_mib": round((max(steady) - min(steady)) / _MIB, 2),
    }


def publish(url: str, messages: int) -> dict[str, Any]:
    samples = []
    began = time.perf_counter()
    with Producer(url, routing_key="qflow-memory", mandatory=False) as producer:
        body = b"x" * 100
        for number in range(messages):
            producer.send(body)
            if not number % max(1, messages // 100):
                samples.append(resident())
        producer.flush()
    return {"messages": messages, "seconds": round(time.perf_counter() - began, 1), **_summary(samples)}


def publish_async(url: str, messages: int) -> dict[str, Any]:
    samples = []
    began = time.perf_counter()

    async def run() -> None:
        async with AsyncProducer(url, routing_key="qflow-memory", mandatory=False) as producer:
            body = b"x" * 100
            for number in range(messages):
                await producer.send(body)
                if not number % max(1, messages // 100):
                    samples.append(resident())
            await producer.flush()

    asyncio.run(run())
    return {"messages": messages, "seconds": round(time.perf_counter() - began, 1), **_summary(samples)}


def stay_flowed(url: str, seconds: float) -> dict[str, Any]:
    """Keep a producer flowed while a program tries to send."""
    samples = []
    refused = 0
    with Producer(url, routing_key="qflow-memory", mandatory=False) as producer:
        producer.pause("benchmark")
        events = producer.on_flow(lambda _event: None)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                producer.send(b"x" * 100, timeout=0.01)
            except TimeoutError:
                refused += 1
            if not refused % 50:
                samples.append(resident())
        events()
    return {"seconds": seconds, "refused": refused, **_summary(samples)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if with ``--check`` the memory changed too much."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    parser.add_argument("--messages", type=int, default=5_000_000, help="for each producer (%(default)s)")
    parser.add_argument("--flowed", type=float, default=600.0, help="seconds (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--check", action="store_true", help=f"fail unless it stays within {2 * _MOST_MIB:g} MiB")
    options = parser.parse_args(arguments)
    found = {}
    # Publish to a queue that does not exist, because a queue that grows would slow down the broker.
    with broker_url(options.url) as url:
        for name, run in (
            ("Producer", lambda: publish(url, options.messages)),
            ("AsyncProducer", lambda: publish_async(url, options.messages)),
            ("flowed", lambda: stay_flowed(url, options.flowed)),
        ):
            found[name] = run()
            if not options.json:
                print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))
    return int(options.check and any(values["spread_mib"] > 2 * _MOST_MIB for values in found.values()))


if __name__ == "__main__":
    sys.exit(main())
