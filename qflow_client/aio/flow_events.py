"""The asynchronous iterator that `AsyncProducer.flow_events` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from qflow_client.events import FlowEvent
from qflow_client.skin import BaseFlowEvents

__all__ = ["FlowEvents"]


class FlowEvents(BaseFlowEvents):
    """An asynchronous iterator over flow events.

    Args:
        check_loop: raises an error if the running loop is not the producer's loop.
    """

    def __init__(self, name: str, limit: int, check_loop: Callable[[], object]) -> None:
        super().__init__(name, limit, asyncio.Queue())
        self._check_loop = check_loop

    def forget(self) -> None:
        """End the iteration in a forked child. The tasks that wait for the old queue belong to the parent."""
        self._events = asyncio.Queue()
        self.put(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FlowEvent:
        if self._events.empty():
            self._check_loop()
        event: FlowEvent | None = await self._events.get()
        if event is None:
            # ``None`` marks the end. Put it back for later calls and other waiting tasks.
            self._events.put_nowait(None)
            raise StopAsyncIteration
        self.losses.report(self._events.qsize())
        return event
