"""Finds the expired messages of a queue, sans-I/O."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from qflow_client.broker.core.contents import EntryObserver
from qflow_client.broker.core.entries import Completion, DropReason, QueueEntry
from qflow_client.flow import FlowSource

__all__ = ["Expiry"]


class Expiry(EntryObserver):
    """The entries of one queue that expire, ordered by their expiry times.

    An entry that leaves the queue stays in a heap until its expiry time, or until a sweep removes it. A sweep begins if
    the number of entries in the heap has doubled since the previous sweep. Each added entry continues the sweep.

    Args:
        message_ttl: time to live of every message of the queue, in seconds; ``None`` for no limit.
        clock: returns monotonic seconds.
        wake_at: called with the time at which `take_due` has to be called.
    """

    __slots__ = ("_clock", "_heap", "_message_ttl", "_old", "_sweep_at", "_unacked", "_wake_at", "is_behind")

    #: Minimum number of entries for a sweep, and the number of entries that a sweep examines for each added entry.
    MIN_SWEEP = 64
    STEP = 4

    def __init__(self, message_ttl: float | None, clock: Callable[[], float], wake_at: Callable[[float], None]) -> None:
        self._message_ttl = message_ttl
        self._clock = clock
        self._wake_at = wake_at
        self._heap: list[tuple[float, int, QueueEntry]] = []
        # The heap that the current sweep empties. The sweep removes the last entries first, so the rest stays a heap.
        self._old: list[tuple[float, int, QueueEntry]] = []
        # The expiry times of unacked entries that are in no heap, because these times have passed.
        self._unacked: dict[QueueEntry, float] = {}
        self._sweep_at = self.MIN_SWEEP
        # Whether the last `take_due` left expired entries in the queue. If so, the queue delivers no messages.
        self.is_behind = False

    @property
    def next_at(self) -> float:
        """The earliest expiry time; infinite if no entry expires."""
        at = self._heap[0][0] if self._heap else math.inf
        return min(at, self._old[0][0]) if self._old else at

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        self.recovered(entry, 0.0)

    def recovered(self, entry: QueueEntry, age: float) -> None:
        seconds, own = self._message_ttl, entry.message.ttl
        if own is not None:
            seconds = own / 1000 if seconds is None else min(own / 1000, seconds)
        if seconds is not None:
            self._add(entry, self._clock() + seconds - age)

    def returned(self, entry: QueueEntry) -> None:
        at = self._unacked.pop(entry, None)
        if at is not None:
            self._add(entry, at)

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        self._unacked.pop(entry, None)

    def _add(self, entry: QueueEntry, at: float) -> None:
        heapq.heappush(self._heap, (at, entry.sequence, entry))
        if self._old:
            for each in [self._old.pop() for _ in range(min(self.STEP, len(self._old)))]:
                if not each[2].is_gone:
                    heapq.heappush(self._heap, each)
            if not self._old:
                self._sweep_at = max(self.MIN_SWEEP, 2 * len(self._heap))
        elif len(self._heap) > self._sweep_at:
            self._old, self._heap = self._heap, []
        self._wake_at(at)

    def shrink(self, most: int) -> bool:
        """Forget up to `most` entries, because the queue is deleted. Return True if others are left."""
        for heap in (self._heap, self._old):
            del heap[-most:]
        return bool(self._heap or self._old)

    def take_due(self, most: int) -> list[QueueEntry]:
        """Return the ready entries that have expired, in the order of their expiry times, and forget them.

        An unacked entry is not returned. When it is requeued, `returned` adds it again with the same expiry time.

        Args:
            most: maximum number of entries to examine. If more entries have expired, `is_behind` becomes true, and the
                queue has to call this method again soon.
        """
        now = self._clock()
        if self.next_at > now:
            # `_add` may have removed the last expired entries, if a purge took them out of the queue.
            self.is_behind = False
            return []
        due: list[QueueEntry] = []
        for _ in range(most):
            heap, old = self._heap, self._old
            if old and (not heap or old[0] < heap[0]):
                heap = old
            if not heap or heap[0][0] > now:
                break
            at, _, entry = heapq.heappop(heap)
            if entry.is_unacked and not entry.is_gone:
                self._unacked[entry] = at
            elif not entry.is_gone:
                due.append(entry)
        self.is_behind = self.next_at <= now
        if self.is_behind:
            self._wake_at(now)
        return due
