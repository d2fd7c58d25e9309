"""Measures the cost of telemetry: the rate of `Producer.send` without an SDK, with metrics and with spans, in turn."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median

from benchmarks.embedded import EMBEDDED, broker_url

__all__ = ["KINDS", "main", "run"]

#: The variants, the reference first.
KINDS = ("no SDK", "metrics", "metrics, tracing")


def _install(kind: str) -> None:
    # The SDK is global for a process, so every measurement has its own process.
    if "metrics" in kind:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        metrics.set_meter_provider(MeterProvider(metric_readers=[InMemoryMetricReader()]))
    if "tracing" in kind:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
        trace.set_tracer_provider(provider)


def _measure(url: str, kind: str, count: int, size: int, result: Connection) -> None:
    _install(kind)
    from qflow_client import Producer

    body = b"x" * size
    # The broker drops the messages, because a full queue would slow down the later variants.
    with Producer(
        url, exchange="amq.fanout", routing_key="", mandatory=False, capacity=1000, tracing="tracing" in kind
    ) as producer:

        def publish(number: int) -> tuple[float, float]:
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(number):
                producer.send(body)
            producer.flush()
            return number / (time.perf_counter() - began), (time.process_time() - cpu) / number * 1e6

        publish(min(count, 2000))
        result.send(publish(count))


def run(url: str, *, count: int, size: int, repeat: int) -> dict[str, list[tuple[float, float]]]:
    """For each variant and round, return messages per second, and CPU microseconds of the producer per message."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(repeat):
        for kind in KINDS:
            ours, theirs = context.Pipe()
            # A span costs as much as many sends, so send fewer messages.
            number = count // 5 if "tracing" in kind else count
            process = context.Process(target=_measure, args=(url, kind, max(1, number), size, theirs))
            process.start()
            theirs.close()
            found[kind].append(ours.recv())
            process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    parser.add_argument("--messages", type=int, default=100_000, help="messages of a measurement (%(default)s)")
    parser.add_argument("--size", type=int, default=100, help="bytes of a body (%(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    with broker_url(options.url) as url:
        found = run(url, count=options.messages, size=options.size, repeat=options.repeat)
    base = found[KINDS[0]]
    results = {
        kind: {
            "rate": median(rate for rate, _ in each),
            "cpu_us": median(cpu for _, cpu in each),
            # The ratio is computed within each round, because the speed of a machine changes.
            "rate_ratio": median(rate / first for (rate, _), (first, _) in zip(each, base, strict=True)),
            "cpu_ratio": median(cpu / first for (_, cpu), (_, first) in zip(each, base, strict=True)),
        }
        for kind, each in found.items()
    }
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for kind, of in results.items():
            print(
                f"{kind}: {of['rate']:,.0f} messages/s ({of['rate_ratio']:.2f} of {KINDS[0]}), "
                f"{of['cpu_us']:.2f} µs CPU each ({of['cpu_ratio']:.2f})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
