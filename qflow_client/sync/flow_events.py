"""The iterator that `Producer.flow_events` returns."""

from __future__ import annotations

import queue
from typing import Self

from qflow_client.events import FlowEvent
from qflow_client.skin import BaseFlowEvents

__all__ = ["FlowEvents"]


class FlowEvents(BaseFlowEvents):
    """An iterator over flow events, for one thread."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(name, limit, queue.SimpleQueue())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FlowEvent:
        event: FlowEvent | None = self._events.get()
        if event is None:
            # ``None`` marks the end. Put it back for later calls.
            self._events.put(None)
            raise StopIteration
        self.losses.report(self._events.qsize())
        return event
