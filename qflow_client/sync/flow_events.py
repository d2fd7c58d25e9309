"""Flow events as an iterator."""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import Self

from qflow_client.events import FlowEvent
from qflow_client.skin import Losses

__all__ = ["FlowEvents"]


class FlowEvents:
    """The flow events of a producer, in order.

    One thread at a time puts events, and another one reads them. There is no lock. If both threads take the last event
    at the same time, one of them finds an empty queue.

    Args:
        name: the producer's.
        limit: the most events that may wait for the reader.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._events: queue.SimpleQueue[FlowEvent | None] = queue.SimpleQueue()
        #: The events that the reader has lost.
        self.losses = Losses(name, limit, "flow_events() is not read fast enough")

    def put(self, event: FlowEvent | None) -> None:
        """Append an event. If too many events wait, it replaces the oldest one. ``None`` is the end, and comes last."""
        if event is not None and self._events.qsize() >= self._limit:
            # The reader may have taken it meanwhile.
            with suppress(queue.Empty):
                self._events.get_nowait()
                self.losses.add()
        self._events.put(event)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FlowEvent:
        event = self._events.get()
        if event is None:
            # For the next calls.
            self._events.put(None)
            raise StopIteration
        self.losses.report(self._events.qsize())
        return event
