"""When the messages of a queue expire, sans-I/O."""

from __future__ import annotations

import heapq
import math

from qflow_client.broker.core.entries import QueueEntry

__all__ = ["Expiry"]


class Expiry:
    """The entries of one queue that expire, whose time comes first first.

    Entries that have left the queue stay here until their time comes, or until they are most of what is here.
    """

    __slots__ = ("_heap", "_sweep_at", "_times")

    #: So few entries are not swept.
    MIN_SWEEP = 64

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, QueueEntry]] = []
        # The times of all entries, those that consumers have too.
        self._times: dict[QueueEntry, float] = {}
        self._sweep_at = self.MIN_SWEEP

    @property
    def next_at(self) -> float:
        """When there is something to take out; infinite if never."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, entry: QueueEntry, at: float) -> None:
        """Take note of when an entry expires.

        Args:
            entry: which is in the queue.
            at: seconds of the clock.
        """
        self._times[entry] = at
        heapq.heappush(self._heap, (at, entry.sequence, entry))
        if max(len(self._heap), len(self._times)) > self._sweep_at:
            self._times = {each: time for each, time in self._times.items() if not each.is_gone}
            self._heap = [(time, each.sequence, each) for each, time in self._times.items() if not each.is_unacked]
            heapq.heapify(self._heap)
            self._sweep_at = max(self.MIN_SWEEP, 2 * len(self._times))

    def time_of(self, entry: QueueEntry) -> float | None:
        """When an entry in the queue expires; ``None`` if never."""
        return self._times.get(entry)

    def take_due(self, now: float, most: int) -> list[QueueEntry]:
        """Take out entries whose time has come and that are still ready, in the order of their times.

        One that is with a consumer does not expire; if it is put back, it is to be added again.

        Args:
            now: seconds of the clock.
            most: so many are looked at; if there are more, `next_at` is not after `now` then.
        """
        # One that was put back is here twice.
        due: dict[QueueEntry, None] = {}
        heap = self._heap
        for _ in range(most):
            if not heap or heap[0][0] > now:
                break
            _, _, entry = heapq.heappop(heap)
            if entry.is_unacked and not entry.is_gone:
                continue
            self._times.pop(entry, None)
            if not entry.is_gone:
                due[entry] = None
        return list(due)
