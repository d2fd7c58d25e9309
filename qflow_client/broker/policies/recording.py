"""Creates the lines that a broker writes to its flow log.

Here a hold is a time in which a channel is blocked (flowed), or a queue delays the channel's confirms. The recorder
writes a line when a queue turns ON or OFF, and when a hold begins or ends. At the end of each period the recorder
writes a line for each current hold, and a line for each queue that has messages or has changed. If a queue causes the
hold, each line after the first divides the time since the previous line among the publishers that filled the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from qflow_client.broker.core.entries import QueueView
from qflow_client.flow import Capacity, FlowSource, StopResume

__all__ = ["FlowRecorder"]

# Maximum number of publishers in the line of a hold. The times of further publishers are added up as `_OTHERS`.
_MAX_CAUSES = 16
_OTHERS = "(others)"

# The key of a hold: the channel, the queue's name (empty if something else blocks the channel), and the reason.
_Key = tuple[FlowSource, str, str]


class _Record:
    """The activity of one queue since its previous ``depth`` line, and other values for the queue's next lines."""

    def __init__(self, depth: int, size: int) -> None:
        self.arrived = self.arrived_bytes = self.left = self.left_bytes = 0
        # Number of arrived messages for each publisher, not added to `pending` and `filled_by` yet.
        self.arrivals: dict[str, int] = {}
        # Number of arrived messages for each publisher since the previous ``depth`` line, without those in `arrivals`.
        self.pending: Counter[str] = Counter()
        # Number of arrived messages for each publisher since the queue last turned OFF, without those in `arrivals`.
        self.filled_by: Counter[str] = Counter()
        self.peak, self.peak_bytes = depth, size
        # Time at which the queue turned ON, in microseconds since 1970. None while the queue is OFF.
        self.on_since: int | None = None
        # Maximum depth and bytes since the queue turned ON.
        self.on_peak = self.on_peak_bytes = 0
        # Depth and bytes in the previous ``depth`` line, or at the creation of this record.
        self.told = (depth, size)
        # Start of the time that the next ``depth`` line will cover, in microseconds since 1970.
        self.told_at = -1


class _Hold:
    """A current hold, caused by `count` flow controllers. Its next line covers the time from `begun`."""

    __slots__ = ("begun", "count", "queue", "since")

    def __init__(self, at: int) -> None:
        self.since = self.begun = at
        self.count = 1
        # The queue that delays confirms. A queue that is being deleted may have the same name. None for other reasons.
        self.queue: QueueView | None = None


class FlowRecorder:
    """Writes lines about the queues and channels that it observes.

    Args:
        write: function that is called with each line.
        wall_clock: function that returns seconds since 1970.
        period: seconds between two calls of `tick`.
        names: function that takes a channel, and returns the names of its publisher and its connection. By default,
            both names are the name of the channel.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], object],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        period: float = 1.0,
        names: Callable[[FlowSource], tuple[str, str]] | None = None,
    ) -> None:
        self.period = period
        self._write = write
        self._clock = clock
        self._offset = wall_clock() - clock()
        self._name_of = names if names is not None else lambda source: (source.name, source.name)
        self._names: dict[FlowSource, tuple[str, str]] = {}
        self._records: dict[QueueView, _Record] = {}
        self._holds: dict[_Key, _Hold] = {}
        # The records of `_records` by queue name, because the key of a hold contains only the name of the queue.
        self._by_name: dict[str, _Record] = {}

    def _now(self) -> int:
        return round((self._clock() + self._offset) * 1_000_000)

    def _record(self, queue: QueueView) -> _Record:
        record = self._records.get(queue)
        if record is None:
            record = self._records[queue] = self._by_name[queue.name] = _Record(queue.depth, queue.size)
            record.told_at = self._now()
        return record

    def _names_of(self, source: FlowSource) -> tuple[str, str]:
        names = self._names.get(source)
        if names is None:
            names = self._names[source] = self._name_of(source)
        return names

    # Calls from queues. `arrived` and `left` are called for every message, so they must be fast.

    def arrived(self, queue: QueueView, source: FlowSource | None, size: int) -> None:
        record = self._records.get(queue)
        if record is None:
            record = self._record(queue)
        record.arrived += 1
        record.arrived_bytes += size
        name = "" if source is None else self._names_of(source)[0]
        record.arrivals[name] = record.arrivals.get(name, 0) + 1
        contents = queue.contents
        if contents.depth > record.peak:
            record.peak = contents.depth
        if contents.size > record.peak_bytes:
            record.peak_bytes = contents.size
        if record.on_since is not None:
            record.on_peak = max(record.on_peak, contents.depth)
            record.on_peak_bytes = max(record.on_peak_bytes, contents.size)

    def left(self, queue: QueueView, size: int) -> None:
        record = self._record(queue)
        record.left += 1
        record.left_bytes += size

    def turned_on(self, queue: QueueView) -> None:
        record = self._record(queue)
        at = record.on_since = self._now()
        record.on_peak, record.on_peak_bytes = queue.depth, queue.size
        self._write(self._line(at, "on", queue.name) | {"depth": queue.depth, "bytes": queue.size})

    def turned_off(self, queue: QueueView) -> None:
        """Record that the queue has turned OFF. At the same time the queue stops delaying confirms."""
        self.lets_confirms_go(queue)
        record = self._record(queue)
        since, record.on_since = record.on_since, None
        if since is not None:
            marks = _marks(queue)
            line = self._line(self._now(), "off", queue.name) | {"since": since, "peak": record.on_peak}
            line["peak_bytes"] = record.on_peak_bytes
            for name, peak, stop in (
                ("overshoot", record.on_peak, marks["stop"]),
                ("overshoot_bytes", record.on_peak_bytes, marks["stop_bytes"]),
            ):
                if stop:
                    line[name] = max(0, peak - stop)
            self._write(line)
        self._account(record)
        record.filled_by.clear()

    def keeps_confirms(self, queue: QueueView, source: FlowSource | None) -> None:
        if source is not None:
            key = source, queue.name, "completion"
            hold = self._holds.get(key) or self._raise(key)
            hold.queue = queue

    def lets_confirms_go(self, queue: QueueView) -> None:
        for key in [key for key, hold in self._holds.items() if hold.queue is queue]:
            self._lift(key)

    def deleted(self, queue: QueueView) -> None:
        if queue not in self._records:
            return
        self.turned_off(queue)
        record = self._records.pop(queue)
        if self._by_name.get(queue.name) is record:
            del self._by_name[queue.name]
        # The messages are still leaving, but the queue has no line after this one.
        record.left += queue.depth
        record.left_bytes += queue.size
        self._tell(queue, record, 0, 0)

    # Calls from channels.

    def blocked(self, source: FlowSource, queue: str, reason: str) -> None:
        hold = self._holds.get((source, queue, reason))
        if hold is None:
            self._raise((source, queue, reason))
        else:
            hold.count += 1

    def unblocked(self, source: FlowSource, queue: str, reason: str) -> None:
        hold = self._holds.get((source, queue, reason))
        if hold is not None:
            hold.count -= 1
            if not hold.count:
                self._lift((source, queue, reason))

    def gone(self, source: FlowSource) -> None:
        for key in [key for key in self._holds if key[0] is source]:
            self._lift(key)
        self._names.pop(source, None)

    # Lines.

    def _line(self, at: int, kind: str, queue: str) -> dict[str, Any]:
        return {"at": at, "kind": kind, "origin": "broker", "queue": queue}

    def _hold_line(self, at: int, kind: str, key: _Key, hold: _Hold) -> dict[str, Any]:
        source, queue, reason = key
        line = self._line(at, kind, queue)
        line["producer"], line["connection"] = self._names_of(source)
        line["reason"], line["since"] = reason, hold.since
        if kind != "raised":
            line["begun"], hold.begun = hold.begun, at
            record = self._by_name.get(queue)
            if record is not None:
                self._account(record)
                causes = _shares(record.filled_by, at - line["begun"])
                if causes:
                    line["causes"] = causes
        return line

    def _raise(self, key: _Key) -> _Hold:
        hold = self._holds[key] = _Hold(self._now())
        self._write(self._hold_line(hold.since, "raised", key, hold))
        return hold

    def _lift(self, key: _Key) -> None:
        hold = self._holds.pop(key)
        self._write(self._hold_line(self._now(), "lifted", key, hold))

    def _account(self, record: _Record) -> None:
        record.filled_by.update(record.arrivals)
        record.pending.update(record.arrivals)
        record.arrivals.clear()

    def tick(self, now: float) -> None:
        at = self._now()
        for key, hold in self._holds.items():
            if at > hold.begun:
                self._write(self._hold_line(at, "held", key, hold))
        for queue, record in self._records.items():
            self._tell(queue, record, queue.depth, queue.size)

    def _tell(self, queue: QueueView, record: _Record, depth: int, size: int) -> None:
        at = self._now()
        if record.arrived or record.left or depth or record.told != (depth, size):
            self._account(record)
            arrivals, record.pending = record.pending, Counter()
            line = self._line(at, "depth", queue.name) | {
                "us": at - record.told_at,
                "depth": depth,
                "bytes": size,
                "peak": record.peak,
                "peak_bytes": record.peak_bytes,
                "arrived": record.arrived,
                "arrived_bytes": record.arrived_bytes,
                "left": record.left,
                "left_bytes": record.left_bytes,
                "arrivals": arrivals,
            }
            line.update(_marks(queue))
            record.arrived = record.arrived_bytes = record.left = record.left_bytes = 0
            record.told = (depth, size)
            self._write(line)
        record.peak, record.peak_bytes = depth, size
        record.told_at = at


def _shares(counts: dict[str, int], us: int) -> dict[str, int]:
    """Divide `us` microseconds in proportion to the counts. The name with the highest count gets the remainder."""
    total = sum(counts.values())
    if not total or us <= 0:
        return {}
    largest = sorted(counts, key=lambda name: (-counts[name], name))[:_MAX_CAUSES]
    shares = {name: us * counts[name] // total for name in largest}
    named = sum(counts[name] for name in largest)
    if named < total:
        shares[_OTHERS] = us * (total - named) // total
    shares[largest[0]] += us - sum(shares.values())
    return shares


def _marks(queue: QueueView) -> dict[str, int]:
    """Return the thresholds of a queue. Without a stop threshold in bytes, use the first `Capacity`."""
    marks = {"stop": 0, "resume": 0, "stop_bytes": 0, "resume_bytes": 0}
    for thresholds in queue.thresholds:
        if isinstance(thresholds, StopResume):
            found = (thresholds.stop_count, thresholds.resume_count, thresholds.stop_size, thresholds.resume_size)
            marks = dict(zip(marks, (each or 0 for each in found), strict=True))
    for thresholds in queue.thresholds:
        if isinstance(thresholds, Capacity) and not marks["stop_bytes"]:
            marks["stop_bytes"], marks["resume_bytes"] = thresholds.capacity, thresholds.resume or 0
    return marks
