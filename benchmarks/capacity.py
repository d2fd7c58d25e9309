"""Compares ``capacity="auto"`` with fixed windows: throughput, latency and overshoot.

There are three setups. ``fast`` is the broker itself. ``far`` adds a network delay. ``slow`` is a queue whose consumer
takes fewer messages than the producer sends, on a broker that holds confirms above a mark.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from statistics import mean, median
from typing import Any, Literal

from benchmarks.delay import delayed
from benchmarks.embedded import EMBEDDED, broker_url
from benchmarks.flow import percentile
from benchmarks.report import aligned, broker_name, formatted, show_progress
from benchmarks.wire import Wire, fresh_queue
from qflow_client import Producer, Receipt, UndeliveredMessages
from qflow_client.settings import hide_password

__all__ = ["PLACES", "Measurement", "Plan", "Row", "document", "main", "measure", "parser", "summarize", "table"]

Capacity = int | Literal["auto"]

FAST, SLOW, FAR = "fast", "slow", "far"
PLACES = (FAST, SLOW, FAR)
#: Stop and resume threshold of the queue in the slow setup, in messages.
STOP, RESUME = 1000, 700
# Maximum length of the other queues, so that neither memory nor their length influences the results.
_KEEP = 20_000
# Number of sends between two readings of the window.
_LOOK = 50
# Product names of brokers that can delay confirms while a queue is full.
_COMPLETES = ("qflow", "qpid")


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        places: setups to measure.
        capacities: capacities of the producers.
        warm_up: seconds of load before the measurement.
        seconds: seconds of the measurement.
        repeat: number of rounds; in each round every capacity runs once in every setup.
        size: bytes of a body.
        round_trip: seconds of a round trip to the far broker.
        consumed: messages per second that the consumer of the slow setup takes.
    """

    places: tuple[str, ...]
    capacities: tuple[Capacity, ...]
    warm_up: float
    seconds: float
    repeat: int
    size: int
    round_trip: float
    consumed: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run.

    Attributes:
        place: name of the setup.
        round: number of the round, from 0.
        rate: confirmed messages per second.
        window: average capacity in messages.
        latencies: seconds from a send to its confirm, for every fiftieth confirmed message.
        overshoot: maximum number of messages beyond the stop threshold; ``None`` without a threshold.
        overshoot_later: `overshoot` after the warm-up.
    """

    place: str
    capacity: Capacity
    round: int
    rate: float
    window: float
    latencies: tuple[float, ...]
    overshoot: int | None = None
    overshoot_later: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One capacity in one setup; values are medians over the rounds unless stated otherwise.

    Attributes:
        place: name of the setup.
        rate: messages per second.
        slowest: messages per second in the worst round.
        fastest: messages per second in the best round.
        to_best: rate divided by the rate of the best fixed capacity in the same round; ``None`` without fixed
            capacities.
        window: average capacity in messages.
        latency: median latency of the messages of all rounds, in seconds; ``None`` if no message was confirmed.
        latency_p99: 99th percentile of the latency, in seconds.
        overshoot: messages beyond the stop threshold in the worst round; ``None`` without a threshold.
        overshoot_later: `overshoot` after the warm-up.
    """

    place: str
    capacity: Capacity
    rate: float
    slowest: float
    fastest: float
    to_best: float | None
    window: float
    latency: float | None
    latency_p99: float | None
    overshoot: int | None
    overshoot_later: int | None


def measure(plan: Plan, url: str) -> list[Measurement]:
    """Run every capacity in every setup, alternately."""
    measurements = []
    with ExitStack() as stack:
        wire = stack.enter_context(Wire(url))
        far = stack.enter_context(delayed(url, plan.round_trip / 2)) if FAR in plan.places else url
        for at in range(plan.repeat):
            for place in plan.places:
                for capacity in plan.capacities:
                    show_progress(f"round {at + 1} of {plan.repeat}, {place}, {capacity}")
                    if place == SLOW:
                        measurements.append(_run_slow(plan, wire, url, capacity, at))
                    else:
                        measurements.append(_run(plan, wire, far if place == FAR else url, place, capacity, at))
    return measurements


def _run(plan: Plan, wire: Wire, url: str, place: str, capacity: Capacity, at: int) -> Measurement:
    # Names of the same argument for this broker and for RabbitMQ; each broker ignores the other name.
    kept = {"qpid.max_count": _KEEP, "qpid.policy_type": "ring", "x-max-length": _KEEP}
    with fresh_queue(wire, kept) as queue, Producer(url, routing_key=queue, capacity=capacity) as producer:
        load = _Load(producer, plan.size)
        load.run(plan.warm_up)
        return Measurement(place, capacity, at, *load.run(plan.seconds))


def _run_slow(plan: Plan, wire: Wire, url: str, capacity: Capacity, at: int) -> Measurement:
    marks = {
        "qpid.flow_stop_count": STOP,
        "qpid.flow_resume_count": RESUME,
        "x-qflow-enforcement": "completion",
    }
    with fresh_queue(wire, marks) as queue, _consumer(url, queue, plan.consumed) as consumer:
        producer = Producer(url, routing_key=queue, capacity=capacity)
        load = _Load(producer, plan.size)
        try:
            load.run(plan.warm_up)
            overshoot = _peak(consumer) - STOP
            published = load.run(plan.seconds)
            later = _peak(consumer) - STOP
        finally:
            _give_up(producer)
    return Measurement(SLOW, capacity, at, *published, overshoot=max(overshoot, later), overshoot_later=later)


def _give_up(producer: Producer) -> None:
    try:
        producer.close(timeout=0)
    except UndeliveredMessages:
        # The undelivered messages do not matter here.
        pass


class _Load:
    def __init__(self, producer: Producer, size: int) -> None:
        self._producer = producer
        self._body = b"x" * size
        # Messages whose confirm is timed, with the time of their send.
        self._watched: deque[tuple[float, Receipt]] = deque()

    def run(self, seconds: float) -> tuple[float, float, tuple[float, ...]]:
        """Return confirmed messages per second, mean capacity, and latencies."""
        producer, body, watched, send = self._producer, self._body, self._watched, self._producer.send
        windows, latencies = [], []
        sent, before, began = 0, producer.unsettled, time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            receipt = send(body, timeout=None)
            watched.append((time.perf_counter(), receipt))
            for _ in range(_LOOK - 1):
                send(body, timeout=None)
                while watched and watched[0][1].done:
                    latencies.append(time.perf_counter() - watched.popleft()[0])
            sent += _LOOK
            windows.append(producer.capacity)
        rate = (sent + before - producer.unsettled) / (now - began)
        return rate, mean(windows), tuple(latencies)


@contextmanager
def _consumer(url: str, queue: str, rate: float) -> Iterator[Connection]:
    """Run a consumer in a process, which answers each request with the maximum depth since the previous request."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_consume, args=(url, queue, rate, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        # Wait until the consumer has started.
        ours.recv()
        yield ours
    finally:
        ours.close()
        process.join()


def _consume(url: str, queue: str, rate: float, parent: Connection) -> None:
    with Wire(url) as wire:
        parent.send(0)
        peak = taken = 0
        began = time.monotonic()
        while True:
            if parent.poll(max(0.0, began + taken / rate - time.monotonic())):
                try:
                    parent.recv()
                except EOFError:
                    return
                parent.send(peak)
                peak = 0
                continue
            got = wire.get(queue)
            taken += 1
            if got is not None:
                peak = max(peak, got + 1)


def _peak(consumer: Connection) -> int:
    consumer.send(None)
    return int(consumer.recv())


def summarize(measurements: Sequence[Measurement]) -> list[Row]:
    """Return a row for each setup and capacity, in the order of the measurement."""
    rows = []
    for place, capacity in dict.fromkeys((each.place, each.capacity) for each in measurements):
        own = [each for each in measurements if (each.place, each.capacity) == (place, capacity)]
        best = _best_fixed(measurements, place)
        ratios = [each.rate / best[each.round] for each in own if each.round in best]
        latencies = [latency for each in own for latency in each.latencies]
        overshoots = [each.overshoot for each in own if each.overshoot is not None]
        later = [each.overshoot_later for each in own if each.overshoot_later is not None]
        rows.append(
            Row(
                place,
                capacity,
                rate=median(each.rate for each in own),
                slowest=min(each.rate for each in own),
                fastest=max(each.rate for each in own),
                to_best=median(ratios) if ratios else None,
                window=median(each.window for each in own),
                latency=percentile(latencies, 0.5) if latencies else None,
                latency_p99=percentile(latencies, 0.99) if latencies else None,
                overshoot=max(overshoots, default=None),
                overshoot_later=max(later, default=None),
            )
        )
    return rows


def _best_fixed(measurements: Sequence[Measurement], place: str) -> dict[int, float]:
    """For the fixed capacity with the best median rate, return the rate of each round."""
    rates: dict[Capacity, dict[int, float]] = {}
    for each in measurements:
        if each.place == place and each.capacity != "auto":
            rates.setdefault(each.capacity, {})[each.round] = each.rate
    return max(rates.values(), key=lambda by_round: median(by_round.values()), default={})


_HEADINGS = (
    "place",
    "capacity",
    "msg/s",
    "lowest – highest",
    "/ best fixed",
    "window",
    "p50 ms",
    "p99 ms",
    "overshoot",
    "later",
)


def _milliseconds(seconds: float | None) -> str:
    return formatted(None if seconds is None else seconds * 1000, ",.2f")


def table(title: str, rows: Sequence[Row]) -> str:
    lines = [_HEADINGS]
    lines += [
        (
            row.place,
            str(row.capacity),
            f"{row.rate:,.0f}",
            f"{row.slowest:,.0f} – {row.fastest:,.0f}",
            formatted(row.to_best, ".3f"),
            f"{row.window:,.0f}",
            _milliseconds(row.latency),
            _milliseconds(row.latency_p99),
            formatted(row.overshoot, ",d"),
            formatted(row.overshoot_later, ",d"),
        )
        for row in rows
    ]
    return aligned(title, lines)


def document(
    plan: Plan, rows: Sequence[Row], measurements: Sequence[Measurement], server_properties: dict[str, Any]
) -> dict[str, Any]:
    return {
        "benchmark": "capacity",
        "settings": asdict(plan) | {"stop": STOP, "resume": RESUME},
        "python": platform.python_version(),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "machine": platform.machine()},
        "broker": broker_name(server_properties),
        "rows": [asdict(row) for row in rows],
        # Leave out the latencies, because the rows have the percentiles.
        "measurements": [asdict(replace(each, latencies=())) for each in measurements],
    }


def _capacities(text: str) -> tuple[Capacity, ...]:
    found: tuple[Capacity, ...] = tuple("auto" if part == "auto" else int(part) for part in text.split(","))
    if any(each != "auto" and each < 1 for each in found):
        raise argparse.ArgumentTypeError(f"a capacity must be auto or at least 1, not {text}")
    return tuple(dict.fromkeys(found))


def _places(text: str) -> tuple[str, ...]:
    places = tuple(dict.fromkeys(text.split(",")))
    for place in places:
        if place not in PLACES:
            raise argparse.ArgumentTypeError(f"unknown place {place!r}; the places are {', '.join(PLACES)}")
    return places


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    made.add_argument("--url", default=EMBEDDED, help=f"amqp:// URL of the broker, or {EMBEDDED}: ours (%(default)s)")
    made.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    made.add_argument("--places", type=_places, default=PLACES, help=f"separated by commas ({','.join(PLACES)})")
    made.add_argument(
        "--capacities",
        type=_capacities,
        default=("auto", 100, 1000, 10_000),
        help="separated by commas (auto,100,1000,10000)",
    )
    made.add_argument("--warm-up", type=_positive, default=2.0, help="seconds before anything counts (%(default)s)")
    made.add_argument("--seconds", type=_positive, default=3.0, help="that count, in each run (%(default)s)")
    made.add_argument("--repeat", type=int, default=5, help="rounds, of which the median counts (%(default)s)")
    made.add_argument("--size", type=int, default=100, help="of bodies, in bytes (%(default)s)")
    made.add_argument("--round-trip", type=_positive, default=20.0, help="milliseconds to the far broker (%(default)s)")
    made.add_argument(
        "--consumed", type=_positive, default=1000.0, help="messages per second of the slow consumer (%(default)s)"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    with broker_url(options.url) as url:
        with Wire(url) as wire:
            server_properties = wire.server_properties
        places = options.places
        product = str(server_properties.get("product", "a broker without a product name"))
        if SLOW in places and not product.lower().startswith(_COMPLETES):
            print(f"the place {SLOW} is not measured, because {product} does not withhold confirms", file=sys.stderr)
            places = tuple(place for place in places if place != SLOW)
        plan = Plan(
            places,
            options.capacities,
            options.warm_up,
            options.seconds,
            options.repeat,
            options.size,
            options.round_trip / 1000,
            options.consumed,
        )
        measurements = measure(plan, url)
    show_progress("")
    rows = summarize(measurements)
    if options.json:
        print(json.dumps(document(plan, rows, measurements, server_properties), indent=2))
    else:
        broker = " ".join(broker_name(server_properties).values()) or hide_password(options.url)
        print(table(f"confirmed, {plan.size}-byte bodies, median of {plan.repeat}; {broker}", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
