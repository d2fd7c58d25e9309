"""How long a process was kept from running while it wanted to: what a busy machine adds to every deadline.

A process of its own looks at other processes every few milliseconds. Linux counts, for each thread, how long it was
ready to run and did not (``/proc/PID/task/TID/schedstat``). A thread that holds Python's lock keeps the others from
running, so what befell one befell its process. That the watching process itself wakes late is counted, too: then the
machine stood still. What a thread does while it runs is its own affair, and not counted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["LagWatch", "Stretches"]

# Seconds between two looks, and by which what is found may be out of place.
_PERIOD = 0.02
# Less is how long any process sleeps too long.
_LEAST = 0.002

_Stretch = tuple[float, float]


class Stretches:
    """Stretches of time in which something held.

    Args:
        found: begin and end of each, in any order; they may overlap.
    """

    def __init__(self, found: Iterable[_Stretch]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        # Seconds of all before each.
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
        """How many seconds of a stretch of time it held."""
        return max(0.0, self._until(end) - self._until(begin))

    @property
    def total(self) -> float:
        """Seconds of all of them."""
        return self._before[-1]

    @property
    def longest(self) -> float:
        """Seconds of the longest."""
        return max((end - begin for begin, end in zip(self._begins, self._ends, strict=True)), default=0.0)


class LagWatch:
    """Watches processes while the block lasts.

    Args:
        pids: of the processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(theirs, self._pids), name="lag", daemon=True)
        self._found: dict[int, Stretches] = {}

    def __enter__(self) -> Self:
        self._process.start()
        # Its first look has been taken.
        self._pipe.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(None)
            self._found = {pid: Stretches(found) for pid, found in self._pipe.recv().items()}
        self._process.join()

    def of(self, pid: int) -> Stretches:
        """When one of the processes was kept from running; known at the end of the block."""
        return self._found.get(pid) or Stretches(())

    def within(self, pid: int) -> Callable[[float, float], float]:
        """A function of begin and end: how many seconds of that time a process was kept from running."""
        stretches = self.of(pid)
        # What befell it last is seen at the next look.
        return lambda begin, end: min(end - begin, stretches.within(begin, end + _PERIOD))


def _watch(pipe: Connection, pids: Sequence[int]) -> None:
    found: dict[int, list[_Stretch]] = {pid: [] for pid in pids}
    waited: dict[Path, int] = {}
    first = True
    before = time.monotonic()
    while first or not pipe.poll(_PERIOD):
        now = time.monotonic()
        # It may have slept too long itself.
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
    """Seconds that a thread of a process was ready and did not run since the last look, at the most."""
    longest = 0
    # It may have ended, as may any of its threads.
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                so_far = int((task / "schedstat").read_bytes().split()[1])
                longest = max(longest, so_far - waited.get(task, so_far))
                waited[task] = so_far
    return longest / 1e9
