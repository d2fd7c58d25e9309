"""A place in line, as something that a task can wait for."""

from __future__ import annotations

import asyncio
from time import monotonic as _monotonic
from typing import Any, Protocol

from qflow_client.protocol import SendTicket

__all__ = ["Turn", "wake_at"]


def wake_at(loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> asyncio.TimerHandle:
    """Wake who waits, never before a time of our clock; the loop's own may be coarser.

    Args:
        loop: the loop.
        deadline: seconds, as `time.monotonic` counts them.
        waiter: is done then, if it is not before.

    Returns:
        The timer; it does nothing once `waiter` is done, whether it is cancelled or not.
    """
    return loop.call_later(deadline - _monotonic(), _time_is_up, loop, deadline, waiter)


def _time_is_up(loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> None:
    if waiter.done():
        return
    if _monotonic() < deadline:
        wake_at(loop, deadline, waiter)
    else:
        waiter.set_result(None)


class _Owner(Protocol):
    def _give_up(self, ticket: SendTicket) -> object: ...


class Turn(asyncio.Future[None]):
    """A send's place in line: done once that is decided, or its time is up.

    Whoever cancels the send gives up its place in the same instant: it is admitted before, or never.

    Args:
        owner: in whose line it is, and who gives up the place. Not its method: that is 80 bytes for each that waits.
        loop: the loop.
    """

    __slots__ = ("_owner", "ticket")

    def __init__(self, owner: _Owner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._owner = owner
        #: The place; ``None`` until it is taken.
        self.ticket: SendTicket | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.ticket is not None:
            self._owner._give_up(self.ticket)
        return cancelled
