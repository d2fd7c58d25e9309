"""Long answers take turns with AMQP clients, on whose event loop the HTTP API runs.

`Turns.each` passes objects through and gives the loop back after `MOST` objects, or after `LONGEST` seconds if that is
sooner. All answers that share a `Turns` have one slice between them in each turn of the loop, so a turn takes no longer
when many clients ask at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

__all__ = ["Turns"]

_T = TypeVar("_T")


class Turns:
    """Slices of long work, one in each turn of the event loop."""

    #: Objects in one slice.
    MOST = 500
    #: Seconds after which a slice ends, whatever it has done by then.
    LONGEST = 0.005

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait for a turn of the loop in which no other slice runs."""
        async with self._lock:
            await asyncio.sleep(0)

    async def each(self, things: Iterable[_T]) -> AsyncIterator[_T]:
        """The same objects, with pauses.

        Args:
            things: taken one at a time, so a generator may do its work as it goes.
        """
        left, end = 0, 0.0
        for thing in things:
            if left <= 0 or time.perf_counter() >= end:
                await self.next()
                left, end = self.MOST, time.perf_counter() + self.LONGEST
            left -= 1
            yield thing
