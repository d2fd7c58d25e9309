"""Timers of the virtual host, sans-I/O. `Timers` calls objects, such as queues, at the times that `wake_at` has set.

`Slices` does work that can take long, such as the deletion of 50,000 queues. Other work runs between two slices (E9).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from qflow_client.broker.core.ports import Timed

__all__ = ["Slices", "Timers"]


class Timers:
    """A heap of timers.

    Args:
        clock: returns monotonic seconds.
        looked: called after each `tick` of an object.
    """

    #: Seconds after which `tick` returns, even if more timers are due.
    MAX_TICK = 0.005

    def __init__(self, clock: Callable[[], float], looked: Callable[[], None]) -> None:
        self.clock = clock
        self._looked = looked
        # For each timer: its time, a number that orders timers with the same time, and the object to call.
        self._timers: list[tuple[float, int, Timed]] = []
        self._numbers = count()

    def wake_at(self, what: Timed, at: float) -> None:
        heapq.heappush(self._timers, (at, next(self._numbers), what))

    @property
    def next_tick(self) -> float:
        """The clock time at which `tick` has to be called; infinite if there is no timer."""
        return self._timers[0][0] if self._timers else math.inf

    def tick(self, now: float) -> None:
        """Call the objects that are due. If this takes longer than `MAX_TICK`, the next `tick` continues."""
        end = self.clock() + self.MAX_TICK
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].tick(now)
            self._looked()
            if self.clock() >= end:
                break


class Slices:
    """Does work in slices (some steps of a generator). The first slice runs immediately, and timers start the others.

    So work that fits in one slice is done immediately, even while larger work is not done yet.
    """

    #: Minimum number of steps in a slice. Further steps run while the slice takes less than `Timers.MAX_TICK`.
    AT_ONCE = 20

    def __init__(self, clock: Callable[[], float], timers: Timers) -> None:
        self._clock = clock
        self._timers = timers
        # `_fresh` has new work, and `_work` has the work that timers continue.
        self._work: deque[Iterator[None]] = deque()
        self._fresh: deque[Iterator[None]] = deque()
        self._is_running = False
        self._has_timer = False

    def run(self, work: Iterator[None]) -> None:
        """Do the steps of a generator. A step may call `run` too."""
        self._fresh.append(work)
        if not self._is_running:
            self._run_slice(self._fresh)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Delay work of the ``with`` block until the end of the block, and begin all of it in one slice."""
        was_running, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = was_running
            if not was_running:
                self._run_slice(self._fresh)

    def tick(self, now: float) -> None:
        self._has_timer = False
        self._run_slice(self._work)

    def _run_slice(self, work: deque[Iterator[None]]) -> None:
        end = self._clock() + Timers.MAX_TICK
        steps = 0
        self._is_running = True
        try:
            while work and (steps < self.AT_ONCE or self._clock() < end):
                steps += 1
                if next(work[0], self) is self:
                    work.popleft()
        except BaseException:
            work.popleft()
            raise
        finally:
            self._is_running = False
            self._work.extend(self._fresh)
            self._fresh.clear()
            if self._work and not self._has_timer:
                self._has_timer = True
                self._timers.wake_at(self, self._clock())
