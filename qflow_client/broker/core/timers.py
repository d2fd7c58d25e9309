"""Timers of the virtual host, sans-I/O: `Timers` calls queues and other objects, but no sessions, at certain times."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from qflow_client.broker.core.ports import Timed

__all__ = ["Timers"]


class Timers:
    """A heap of timers.

    Args:
        clock: returns monotonic seconds.
        looked: called after each `tick` of an object.
    """

    #: Seconds after which `tick` returns, even if the time of more timers has come.
    MAX_TICK = 0.005

    def __init__(self, clock: Callable[[], float], looked: Callable[[], None]) -> None:
        self._clock = clock
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
        """Call the objects whose time has come. If this takes longer than `MAX_TICK`, the next `tick` continues."""
        end = self._clock() + self.MAX_TICK
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].tick(now)
            self._looked()
            if self._clock() >= end:
                break
