"""Creates tables from the lines of flow logs.

All values are sums, minima, maxima and histograms of whole numbers, so the order of the lines does not matter. To add
one `Tables` to another, pass its `facts` to `Tables.merge`. The used memory grows with the number of producers,
connections and queues, not with the number of lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qflow_client.report.histogram import bucket_of, percentile

__all__ = ["SERIES_LENGTH", "Fact", "HoldKey", "HoldTotals", "QueueTotals", "Row", "Tables", "bin_width"]

Row = dict[str, Any]
#: The key of a hold: origin (``"producer"`` or ``"broker"``), producer, connection, queue, reason.
HoldKey = tuple[str, str, str, str, str]

#: Approximate maximum number of bins in a time series.
SERIES_LENGTH = 400
_PERCENTS = (50, 90, 99)
_SECOND = 1_000_000


def bin_width(first: int, last: int) -> int:
    """Return the width of the bins for a time series from `first` to `last`. All values are in microseconds."""
    width = _SECOND
    while (last - first) // width > SERIES_LENGTH:
        width *= 2
    return width


@dataclass(slots=True)
class Spread:
    """The number, sum, maximum and histogram of values, such as durations in microseconds."""

    count: int = 0
    total: int = 0
    largest: int = 0
    buckets: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, value: int) -> None:
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        self.buckets[bucket_of(value)] += 1

    def add_all(self, bucket: int, count: int, total: int, largest: int) -> None:
        """Add `count` values of one bucket. `total` is added to the sum. The maximum becomes at least `largest`."""
        self.count += count
        self.total += total
        self.largest = max(self.largest, largest)
        self.buckets[bucket] += count

    def facts(self, table: str, keys: tuple[str, ...]) -> Iterator[Fact]:
        """Yield a fact for each bucket. The first fact has the sum of all values, and the other facts have 0."""
        total, largest = self.total, self.largest
        for bucket, count in self.buckets.items():
            yield Fact(table, keys, bucket, count, total, largest)
            total = 0

    def columns(self, name: str, scale: int = _SECOND) -> Row:
        """Return columns whose names begin with `name`: the percentiles and the maximum, each divided by `scale`."""
        percents = {f"{name}_p{each}": percentile(self.buckets, each, self.largest) / scale for each in _PERCENTS}
        return percents | {f"{name}_max": self.largest / scale}


@dataclass(slots=True)
class HoldTotals:
    """The totals of all holds with one `HoldKey`."""

    raised: int = 0
    # Microseconds for which these holds held the producer, including holds that have not ended.
    us: int = 0
    ended: Spread = field(default_factory=Spread)
    notices: int = 0
    # Microseconds and messages of the unflowed periods directly before (`before_`) and after (`after_`) these holds.
    before_us: int = 0
    before_messages: int = 0
    after_us: int = 0
    after_messages: int = 0
    capacity: int = 0


@dataclass(slots=True)
class QueueTotals:
    """The totals of one queue over all its samples, which are the lines of the kind ``depth``."""

    samples: int = 0
    us: int = 0
    # Sum over all samples: the depth of the sample multiplied by the length of the sample in microseconds.
    depth_us: int = 0
    peak: int = 0
    peak_bytes: int = 0
    arrived: int = 0
    arrived_bytes: int = 0
    left: int = 0
    # Totals of the busy samples, which start and end with messages in the queue: microseconds, and messages that left.
    busy_us: int = 0
    busy_left: int = 0
    on: Spread = field(default_factory=Spread)
    overshoot: Spread = field(default_factory=Spread)
    overshoot_bytes: int = 0
    # The latest recorded thresholds: time of the line, stop and resume in messages, and stop and resume in bytes.
    marks: tuple[int, int, int, int, int] = (-1, 0, 0, 0, 0)

    @property
    def drain_rate(self) -> float:
        """The messages per second that left the queue in busy samples, or in all samples if no sample was busy."""
        if self.busy_us:
            return self.busy_left * _SECOND / self.busy_us
        return self.left * _SECOND / self.us if self.us else 0.0


@dataclass(frozen=True, slots=True)
class Fact:
    """Some totals of one `Tables`. `Tables.merge` adds them to another `Tables`. `table` defines what the numbers mean.

    Attributes:
        table: name of the `Tables` method that adds the fact, without the prefix ``_merge_``.
        keys: key of the totals to which the fact is added, such as a `HoldKey`. For ``marks``, also the thresholds.
        bucket: bucket of a histogram, or start of a bin in microseconds since 1970; 0 if there is neither.
        total: first sum, such as microseconds.
        most: first maximum, such as a depth.
        most_2: second maximum, if there are two.
        more: further sums, in an order that depends on `table`.
    """

    table: str
    keys: tuple[str, ...]
    bucket: int = 0
    count: int = 0
    total: int = 0
    most: int = 0
    most_2: int = 0
    more: tuple[int, ...] = ()


class Tables:
    """The totals of all added lines. `width` is the width in microseconds of the bins of each time series."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: dict[str, int] = defaultdict(int)
        self.lost = 0
        self.unreadable = 0
        self.first: int | None = None
        self.last: int | None = None
        self.holds: dict[HoldKey, HoldTotals] = defaultdict(HoldTotals)
        self.episodes: dict[str, Spread] = defaultdict(Spread)
        self.queues: dict[str, QueueTotals] = defaultdict(QueueTotals)
        # Number of messages that arrived in a queue from a producer. Keys: queue, producer.
        self.arrivals: dict[tuple[str, str], int] = defaultdict(int)
        # Microseconds of holds. Keys: queue, reason, held producer, and producer whose messages had filled the queue.
        self.waits: dict[tuple[str, str, str, str], int] = defaultdict(int)
        # Microseconds of holds. Keys: origin, queue, reason, start of the bin.
        self.held: dict[tuple[str, str, str, int], int] = defaultdict(int)
        # Greatest depth, number of arrived messages, and number of messages that left. Keys: queue, start of the bin.
        self.depths: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, line: Mapping[str, Any]) -> None:
        kind, at = line["kind"], line["at"]
        self.lines[kind] += 1
        if self.first is None or self.last is None:
            self.first = self.last = at
        elif at > self.last:
            self.last = at
        elif at < self.first:
            self.first = at
        take = _TAKERS.get(kind)
        if take is not None:
            take(self, line, at)

    def _hold(self, line: Mapping[str, Any]) -> HoldTotals:
        return self.holds[line["origin"], line["producer"], line["connection"], line["queue"], line["reason"]]

    def _raised(self, line: Mapping[str, Any], at: int) -> None:
        hold = self._hold(line)
        hold.raised += 1
        capacity = line.get("capacity")
        if capacity is not None and capacity > hold.capacity:
            hold.capacity = capacity
        free_us = line.get("free_us")
        if free_us is not None:
            hold.before_us += free_us
            hold.before_messages += line["free_messages"]
            before = self.holds[line["origin"], line["producer"], line["connection"], line["queue"], line["after"]]
            before.after_us += free_us
            before.after_messages += line["free_messages"]

    def _held(self, line: Mapping[str, Any], at: int) -> None:
        us = at - line["begun"]
        self._hold(line).us += us
        self._over_time(line, at, us)

    def _lifted(self, line: Mapping[str, Any], at: int) -> None:
        us = at - line["begun"]
        hold = self._hold(line)
        hold.us += us
        hold.ended.add(at - line["since"])
        flowed_since = line.get("flowed_since")
        if flowed_since is not None:
            self.episodes[line["producer"]].add(at - flowed_since)
        self._over_time(line, at, us)

    def _over_time(self, line: Mapping[str, Any], at: int, us: int) -> None:
        queue, reason = line["queue"], line["reason"]
        self.held[line["origin"], queue, reason, at // self.width * self.width] += us
        causes = line.get("causes")
        if causes:
            waiter = line["producer"]
            for causer, share in causes.items():
                self.waits[queue, reason, waiter, causer] += share

    def _waiting(self, line: Mapping[str, Any], at: int) -> None:
        self._hold(line).notices += 1

    def _depth(self, line: Mapping[str, Any], at: int) -> None:
        name, depth, us, left = line["queue"], line["depth"], line["us"], line["left"]
        arrived, peak = line["arrived"], line["peak"]
        queue = self.queues[name]
        queue.samples += 1
        queue.us += us
        queue.depth_us += depth * us
        queue.peak = max(queue.peak, peak)
        queue.peak_bytes = max(queue.peak_bytes, line["peak_bytes"])
        queue.arrived += arrived
        queue.arrived_bytes += line["arrived_bytes"]
        queue.left += left
        if depth and depth - arrived + left > 0:
            queue.busy_us += us
            queue.busy_left += left
        marks = (at, line["stop"], line["resume"], line["stop_bytes"], line["resume_bytes"])
        queue.marks = max(queue.marks, marks)
        for producer, count in line["arrivals"].items():
            self.arrivals[name, producer] += count
        self._add_depth(name, at, peak, arrived, left)

    def _off(self, line: Mapping[str, Any], at: int) -> None:
        queue = self.queues[line["queue"]]
        queue.on.add(at - line["since"])
        overshoot = line.get("overshoot")
        if overshoot is not None:
            queue.overshoot.add(overshoot)
        queue.overshoot_bytes = max(queue.overshoot_bytes, line.get("overshoot_bytes", 0))

    def _lost(self, line: Mapping[str, Any], at: int) -> None:
        self.lost += line["lost"]

    # Merging.

    def facts(self) -> Iterator[Fact]:
        """Yield all totals as facts. Another `Tables` can `merge` them in any order."""
        first, last = self.first or 0, self.last or 0
        for kind, count in self.lines.items():
            lost = self.lost if kind == "lost" else 0
            yield Fact("line", (kind,), count=count, total=lost, most=last, most_2=-first)
        if self.unreadable:
            yield Fact("unreadable", (), count=self.unreadable)
        for key, hold in self.holds.items():
            more = (hold.before_us, hold.before_messages, hold.notices, hold.after_us, hold.after_messages)
            yield Fact("hold", key, count=hold.raised, total=hold.us, most=hold.capacity, more=more)
            yield from hold.ended.facts("ended", key)
        for producer, spread in self.episodes.items():
            yield from spread.facts("episode", (producer,))
        for name, queue in self.queues.items():
            yield from _queue_facts(name, queue)
        for key_2, count in self.arrivals.items():
            yield Fact("arrival", key_2, total=count)
        for key_4, us in self.waits.items():
            yield Fact("wait", key_4, total=us)
        for (origin, name, reason, at), us in self.held.items():
            yield Fact("held", (origin, name, reason), at, total=us)
        for (name, at), (peak, arrived, left) in self.depths.items():
            yield Fact("depth", (name,), at, most=peak, more=(arrived, left))

    def merge(self, fact: Fact) -> None:
        _MERGERS[fact.table](self, fact)

    def _merge_line(self, fact: Fact) -> None:
        first, last = -fact.most_2, fact.most
        self.lines[fact.keys[0]] += fact.count
        self.lost += fact.total
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)

    def _merge_unreadable(self, fact: Fact) -> None:
        self.unreadable += fact.count

    def _merge_hold(self, fact: Fact) -> None:
        hold = self.holds[_hold_key(fact)]
        hold.raised += fact.count
        hold.us += fact.total
        hold.capacity = max(hold.capacity, fact.most)
        hold.before_us += fact.more[0]
        hold.before_messages += fact.more[1]
        hold.notices += fact.more[2]
        hold.after_us += fact.more[3]
        hold.after_messages += fact.more[4]

    def _merge_ended(self, fact: Fact) -> None:
        self.holds[_hold_key(fact)].ended.add_all(fact.bucket, fact.count, fact.total, fact.most)

    def _merge_episode(self, fact: Fact) -> None:
        self.episodes[fact.keys[0]].add_all(fact.bucket, fact.count, fact.total, fact.most)

    def _merge_held(self, fact: Fact) -> None:
        origin, queue, reason = fact.keys
        self.held[origin, queue, reason, fact.bucket // self.width * self.width] += fact.total

    def _merge_wait(self, fact: Fact) -> None:
        queue, reason, waited, filled = fact.keys
        self.waits[queue, reason, waited, filled] += fact.total

    def _merge_queue(self, fact: Fact) -> None:
        queue = self.queues[fact.keys[0]]
        queue.samples += fact.count
        queue.us += fact.total
        queue.peak_bytes = max(queue.peak_bytes, fact.most)
        queue.peak = max(queue.peak, fact.most_2)
        depth_us, arrived, arrived_bytes, left, busy_us, busy_left = fact.more[:6]
        queue.depth_us += depth_us
        queue.arrived += arrived
        queue.arrived_bytes += arrived_bytes
        queue.left += left
        queue.busy_us += busy_us
        queue.busy_left += busy_left

    def _merge_marks(self, fact: Fact) -> None:
        name, *marks = fact.keys
        queue = self.queues[name]
        stop, resume, stop_bytes, resume_bytes = map(int, marks)
        queue.marks = max(queue.marks, (fact.most, stop, resume, stop_bytes, resume_bytes))

    def _merge_arrival(self, fact: Fact) -> None:
        queue, producer = fact.keys
        self.arrivals[queue, producer] += fact.total

    def _merge_depth(self, fact: Fact) -> None:
        self._add_depth(fact.keys[0], fact.bucket, fact.most, *fact.more[:2])

    def _add_depth(self, name: str, at: int, peak: int, arrived: int, left: int) -> None:
        point = self.depths[name, at // self.width * self.width]
        point[0] = max(point[0], peak)
        point[1] += arrived
        point[2] += left

    def _merge_on(self, fact: Fact) -> None:
        queue = self.queues[fact.keys[0]]
        queue.on.add_all(fact.bucket, fact.count, fact.total, fact.most)

    def _merge_overbytes(self, fact: Fact) -> None:
        queue = self.queues[fact.keys[0]]
        queue.overshoot_bytes = max(queue.overshoot_bytes, fact.most)

    def _merge_over(self, fact: Fact) -> None:
        self.queues[fact.keys[0]].overshoot.add_all(fact.bucket, fact.count, fact.total, fact.most)

    def widen(self) -> None:
        """Adapt the width of the bins to the exact times of all lines. Call this after the last `add` or `merge`.

        The initial width is an estimate from the ends of the files, and may be too small. The new width is a multiple
        of the initial width, so each new bin consists of whole old bins.
        """
        if self.first is None or self.last is None:
            return
        width = self.width = max(self.width, bin_width(self.first, self.last))
        held, self.held = self.held, defaultdict(int)
        for (origin, queue, reason, at), us in held.items():
            self.held[origin, queue, reason, at // width * width] += us
        depths, self.depths = tuple(self.depths.items()), defaultdict(lambda: [0, 0, 0])
        for (name, at), point in depths:
            self._add_depth(name, at, *point)

    # Results.

    def capacities(self) -> dict[str, int]:
        """Return the largest recorded capacity of each producer. Producers without a recorded capacity are missing."""
        found: dict[str, int] = {}
        for (_, producer, _, _, _), hold in self.holds.items():
            if hold.capacity:
                found[producer] = max(hold.capacity, found.get(producer, 0))
        return found

    def publishers(self, queue: str) -> dict[str, int]:
        return {producer: count for (name, producer), count in sorted(self.arrivals.items()) if name == queue}

    def tables(self) -> dict[str, list[Row]]:
        """Return the rows of each table, in a fixed order. The keys are the names of the tables."""
        return {
            "holds": list(self._hold_rows()),
            "producers": list(self._producer_rows()),
            "queues": list(self._queue_rows()),
            "publishers": [
                {"queue": queue, "producer": producer, "messages": count}
                for (queue, producer), count in sorted(self.arrivals.items())
            ],
            "waits": [
                {"queue": queue, "reason": reason, "waited": waited, "filled": filled, "seconds": us / _SECOND}
                for (queue, reason, waited, filled), us in sorted(self.waits.items())
            ],
            "held_over_time": [
                {"at": at / _SECOND, "origin": origin, "queue": queue, "reason": reason, "seconds": us / _SECOND}
                for (origin, queue, reason, at), us in sorted(self.held.items())
            ],
            "depth_over_time": list(self._depth_rows()),
        }

    def _hold_rows(self) -> Iterator[Row]:
        for (origin, producer, connection, queue, reason), hold in sorted(self.holds.items()):
            ended = hold.ended
            yield {
                "origin": origin,
                "producer": producer,
                "connection": connection,
                "queue": queue,
                "reason": reason,
                "episodes": max(hold.raised, ended.count),
                "unfinished": max(0, hold.raised - ended.count),
                "seconds": hold.us / _SECOND,
                **ended.columns("seconds"),
                "notices": hold.notices,
                "rate_before": _rate(hold.before_messages, hold.before_us),
                "rate_after": _rate(hold.after_messages, hold.after_us),
            }

    def _producer_rows(self) -> Iterator[Row]:
        span = self.seconds
        for producer, spread in sorted(self.episodes.items()):
            yield {
                "producer": producer,
                "times_flowed": spread.count,
                "seconds_flowed": spread.total / _SECOND,
                "part_flowed": spread.total / _SECOND / span if span else None,
                **spread.columns("seconds"),
            }

    def _queue_rows(self) -> Iterator[Row]:
        for name, queue in sorted(self.queues.items()):
            yield {
                "queue": name,
                "samples": queue.samples,
                "seconds": queue.us / _SECOND,
                "messages": queue.arrived,
                "bytes": queue.arrived_bytes,
                "left": queue.left,
                "arrival_rate": _rate(queue.arrived, queue.us),
                "drain_rate": queue.drain_rate,
                "depth_mean": queue.depth_us / queue.us if queue.us else None,
                "depth_max": queue.peak,
                "bytes_max": queue.peak_bytes,
                "stop": queue.marks[1],
                "resume": queue.marks[2],
                "stop_bytes": queue.marks[3],
                "resume_bytes": queue.marks[4],
                "times_on": queue.on.count,
                "seconds_on": queue.on.total / _SECOND,
                **queue.on.columns("on_seconds"),
                **queue.overshoot.columns("overshoot", 1),
                "overshoot_bytes_max": queue.overshoot_bytes,
            }

    def _depth_rows(self) -> Iterator[Row]:
        """Yield a row for each queue and bin. `seconds_held` sums the broker's holds with the reason `channel_flow`."""
        held: dict[tuple[str, int], int] = defaultdict(int)
        for (origin, queue, reason, at), us in self.held.items():
            if origin == "broker" and reason == "channel_flow":
                held[queue, at] += us
        for (queue, at), (peak, arrived, left) in sorted(self.depths.items()):
            yield {
                "at": at / _SECOND,
                "queue": queue,
                "depth_max": peak,
                "arrival_rate": arrived * _SECOND / self.width,
                "leave_rate": left * _SECOND / self.width,
                "seconds_held": held[queue, at] / _SECOND,
            }

    @property
    def seconds(self) -> float:
        return 0.0 if self.first is None or self.last is None else (self.last - self.first) / _SECOND


def _rate(messages: int, us: int) -> float | None:
    return messages * _SECOND / us if us > 0 else None


def _queue_facts(name: str, queue: QueueTotals) -> Iterator[Fact]:
    sums = (queue.depth_us, queue.arrived, queue.arrived_bytes, queue.left, queue.busy_us, queue.busy_left)
    yield Fact("queue", (name,), 0, queue.samples, queue.us, queue.peak_bytes, queue.peak, sums)
    at, *marks = queue.marks
    yield Fact("marks", (name, *map(str, marks)), most=at)
    yield from queue.on.facts("on", (name,))
    yield from queue.overshoot.facts("over", (name,))
    yield Fact("overbytes", (name,), most=queue.overshoot_bytes)


_TAKERS = {
    "raised": Tables._raised,
    "held": Tables._held,
    "lifted": Tables._lifted,
    "waiting": Tables._waiting,
    "depth": Tables._depth,
    "off": Tables._off,
    "lost": Tables._lost,
}


_MERGERS = {
    "arrival": Tables._merge_arrival,
    "depth": Tables._merge_depth,
    "ended": Tables._merge_ended,
    "episode": Tables._merge_episode,
    "held": Tables._merge_held,
    "hold": Tables._merge_hold,
    "line": Tables._merge_line,
    "marks": Tables._merge_marks,
    "on": Tables._merge_on,
    "over": Tables._merge_over,
    "overbytes": Tables._merge_overbytes,
    "queue": Tables._merge_queue,
    "unreadable": Tables._merge_unreadable,
    "wait": Tables._merge_wait,
}


def _hold_key(fact: Fact) -> HoldKey:
    origin, producer, connection, queue, reason = fact.keys
    return origin, producer, connection, queue, reason


def sum_up(lines: Iterable[Mapping[str, Any]], width: int) -> Tables:
    """Return the totals of all lines. `width` is the initial width of the bins in microseconds, see `Tables.widen`."""
    tables = Tables(width)
    add = tables.add
    for line in lines:
        add(line)
    tables.widen()
    return tables
