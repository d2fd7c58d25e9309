"""A place in line, as something that a task can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from qflow_client.protocol import SendTicket

__all__ = ["Turn"]


class Turn(asyncio.Future[None]):
    """A send's place in line: done once that is decided, or its time is up.

    Whoever cancels the send gives up its place in the same instant: it is admitted before, or never.

    Args:
        give_up: gives up the place.
        loop: the loop.
    """

    __slots__ = ("_give_up", "ticket")

    def __init__(self, give_up: Callable[[SendTicket], object], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._give_up = give_up
        #: The place; ``None`` until it is taken.
        self.ticket: SendTicket | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.ticket is not None:
            self._give_up(self.ticket)
        return cancelled
