"""What is due when, sans-I/O: one heap for all that the virtual host is to look at at some time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from qflow_client.broker.core.ports import Timed

__all__ = ["Timers"]


class Timers:
    """A heap of what is to be looked at.

    Args:
        clock: monotonic seconds.
        looked: called after each.
    """

    #: Seconds after which `tick` returns though more is due.
    MAX_TICK = 0.005

    def __init__(self, clock: Callable[[], float], looked: Callable[[], None]) -> None:
        self._clock = clock
        self._looked = looked
        # Time, a number for those of the same time, what.
        self._timers: list[tuple[float, int, Timed]] = []
        self._numbers = count()

    def wake_at(self, what: Timed, at: float) -> None:
        """Look at something at a time."""
        heapq.heappush(self._timers, (at, next(self._numbers), what))

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in seconds of the clock; infinite if never."""
        return self._timers[0][0] if self._timers else math.inf

    def tick(self, now: float) -> None:
        """Look at what is to be looked at by now; if that takes long, at the rest in the next call.

        Args:
            now: seconds of the clock.
        """
        end = self._clock() + self.MAX_TICK
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].tick(now)
            self._looked()
            if self._clock() >= end:
                break
