"""Flow events as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from typing import Self

from qflow_client.events import FlowEvent

__all__ = ["FlowEvents"]


class FlowEvents:
    """The flow events of a producer, as they come."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[FlowEvent | None] = asyncio.Queue()

    def put(self, event: FlowEvent | None) -> None:
        """Append an event; ``None`` is the end."""
        self._events.put_nowait(event)

    def forget(self) -> None:
        """In a child process: end. The tasks that wait are the parent's."""
        self._events = asyncio.Queue()
        self.put(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FlowEvent:
        event = await self._events.get()
        if event is None:
            # For further calls, and for other tasks that wait.
            self._events.put_nowait(None)
            raise StopAsyncIteration
        return event
