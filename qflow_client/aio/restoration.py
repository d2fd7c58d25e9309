"""Waits until aio-pika restores a lost shared connection, or the application closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from qflow_client.aio.connection import TappedRobustConnection

__all__ = ["Restoration"]


class Restoration:
    """Calls a producer's `Link` when its lost shared connection is open again, and when it has to stop waiting.

    Args:
        limit: the longest wait for a restored connection in seconds; ``None`` for no limit.
        restored: called each time the connection is open again.
        give_up: called with a reason when the application has closed the connection, or after `limit`.
    """

    def __init__(
        self,
        connection: TappedRobustConnection,
        limit: float | None,
        restored: Callable[[], object],
        give_up: Callable[[str], object],
    ) -> None:
        self._connection = connection
        self._limit = limit
        self._restored = restored
        self._give_up = give_up
        # Done when the application has closed the connection; ``None`` while the link does not wait.
        self._closed: asyncio.Future[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, why: str) -> None:
        """Start to wait for the restoration. `why` is the reason for the loss."""
        self._connection.reconnect_callbacks.add(self._on_restored)
        self._closed = asyncio.ensure_future(self._connection.closed())
        self._closed.add_done_callback(partial(self._on_closed, why))
        if self._limit is not None:
            late = f"{why}; it was not restored within {self._limit:.3g} s"
            self._timer = asyncio.get_running_loop().call_later(self._limit, self._give_up, late)

    def end(self) -> None:
        """Stop waiting, because the channel is open again or will not be opened again."""
        if self._closed is not None:
            self._closed.cancel()
            self._closed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget(self) -> None:
        """Stop waiting, and do not call the link any more."""
        self.end()
        self._connection.reconnect_callbacks.discard(self._on_restored)

    def _on_restored(self, *_: Any) -> None:
        self._restored()

    def _on_closed(self, why: str, closed: asyncio.Future[Any]) -> None:
        if not closed.cancelled():
            self._give_up(f"{why}; then it was closed")
