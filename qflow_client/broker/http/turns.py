"""Divides long work into slices, because the HTTP API runs on the event loop that also serves AMQP clients.

`Turns.each` yields objects. After `Turns.MOST` objects or `Turns.LONGEST` seconds, it lets the loop do other work. If
several requests use the same `Turns`, only one of them gets a slice in each iteration of the loop. Therefore the length
of an iteration does not depend on the number of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

__all__ = ["Turns"]

_T = TypeVar("_T")


class Turns:
    """Divides long work into slices, with at most one slice in each iteration of the event loop."""

    #: Maximum number of objects in one slice.
    MOST = 500
    #: Seconds after which a slice yields no further object.
    LONGEST = 0.005

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait for an iteration of the loop in which no other slice of this `Turns` runs."""
        async with self._lock:
            await asyncio.sleep(0)

    async def each(self, things: Iterable[_T]) -> AsyncIterator[_T]:
        """Yield objects, with pauses between the slices. If `things` is a generator, its code also runs in slices."""
        left, end = 0, 0.0
        for thing in things:
            if left <= 0 or time.perf_counter() >= end:
                await self.next()
                left, end = self.MOST, time.perf_counter() + self.LONGEST
            left -= 1
            yield thing
