"""Measures how long a process was ready but could not run: the part of a delay that a busy machine causes.

A separate process checks other processes every few milliseconds. For each thread Linux counts how long it was ready and
did not run (``/proc/PID/task/TID/schedstat``). A thread that holds the GIL stops the other threads, so the value of one
thread applies to its process. If the checking process itself wakes late, this is counted too, because the whole machine
stood still. The running time of a thread is not counted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

__all__ = ["LagWatch", "Stretches"]

# Seconds between two checks, which is also the possible error of a time.
_PERIOD = 0.02
# Delays below this number of seconds are normal for every sleep.
_LEAST = 0.002

_Stretch = tuple[float, float]


class Stretches:
    """Periods of time.

    Args:
        found: start and end of each period. The periods may overlap, and need no order.
    """

    def __init__(self, found: Iterable[_Stretch]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        # For each period, the total seconds of all earlier periods.
        self._before: list[float] = [0.0]
        for begin, end in sorted(found):
            if self._ends and begin <= self._ends[-1]:
                if end > self._ends[-1]:
                    self._before[-1] += end - self._ends[-1]
                    self._ends[-1] = end
                continue
            self._begins.append(begin)
            self._ends.append(end)
            self._before.append(self._before[-1] + end - begin)

    def _until(self, at: float) -> float:
        index = bisect_right(self._begins, at)
        return self._before[index] - max(0.0, self._ends[index - 1] - at) if index else 0.0

    def within(self, begin: float, end: float) -> float:
        """Return the seconds of the periods between two times."""
        return max(0.0, self._until(end) - self._until(begin))

    @property
    def total(self) -> float:
        return self._before[-1]

    @property
    def longest(self) -> float:
        return max((end - begin for begin, end in zip(self._begins, self._ends, strict=True)), default=0.0)


class LagWatch:
    """Watches processes during the ``with`` block."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(theirs, self._pids), name="lag", daemon=True)
        self._found: dict[int, Stretches] = {}

    def __enter__(self) -> Self:
        self._process.start()
        # Wait until the process has done its first check.
        self._pipe.recv()
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(None)
            self._found = {pid: Stretches(found) for pid, found in self._pipe.recv().items()}
        self._process.join()

    def of(self, pid: int) -> Stretches:
        """Return the periods in which one process could not run. They are known after the ``with`` block."""
        return self._found.get(pid) or Stretches(())

    def within(self, pid: int) -> Callable[[float, float], float]:
        """Return a function that returns for how many seconds between two times the process could not run."""
        stretches = self.of(pid)
        # The last period is found at the next check.
        return lambda begin, end: min(end - begin, stretches.within(begin, end + _PERIOD))


def _watch(pipe: Connection, pids: Sequence[int]) -> None:
    found: dict[int, list[_Stretch]] = {pid: [] for pid in pids}
    waited: dict[Path, int] = {}
    first = True
    before = time.monotonic()
    while first or not pipe.poll(_PERIOD):
        now = time.monotonic()
        # This process itself may have slept too long.
        late = now - before - _PERIOD
        for pid in pids:
            longest = max(late, _longest_wait(pid, waited))
            if longest > _LEAST and not first:
                found[pid].append((now - longest, now))
        before = now
        if first:
            pipe.send(None)
            first = False
    pipe.recv()
    pipe.send(found)


def _longest_wait(pid: int, waited: dict[Path, int]) -> float:
    """Return the maximum seconds that a thread of a process was ready and did not run since the last check."""
    longest = 0
    # The process or a thread may have ended.
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                so_far = int((task / "schedstat").read_bytes().split()[1])
                longest = max(longest, so_far - waited.get(task, so_far))
                waited[task] = so_far
    return longest / 1e9
