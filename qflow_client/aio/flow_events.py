"""Flow events as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from qflow_client.events import FlowEvent
from qflow_client.skin import Losses

__all__ = ["FlowEvents"]


class FlowEvents:
    """The flow events of a producer, in order.

    Args:
        name: the producer's.
        limit: the most events that may wait for the reader.
        check_loop: raises an error in a loop that cannot be woken.
    """

    def __init__(self, name: str, limit: int, check_loop: Callable[[], object] = bool) -> None:
        self._limit = limit
        self._check_loop = check_loop
        #: The events that the reader has lost.
        self.losses = Losses(name, limit, "flow_events() is not read fast enough")
        self._events: asyncio.Queue[FlowEvent | None] = asyncio.Queue()

    def put(self, event: FlowEvent | None) -> None:
        """Append an event. If too many events wait, it replaces the oldest one. ``None`` is the end, and comes last."""
        if event is not None and self._events.qsize() >= self._limit:
            self._events.get_nowait()
            self.losses.add()
        self._events.put_nowait(event)

    def forget(self) -> None:
        """End the iteration in a child process. The waiting tasks belong to the parent."""
        self._events = asyncio.Queue()
        self.put(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FlowEvent:
        if self._events.empty():
            self._check_loop()
        event = await self._events.get()
        if event is None:
            # For the next calls, and for other waiting tasks.
            self._events.put_nowait(None)
            raise StopAsyncIteration
        self.losses.report(self._events.qsize())
        return event
