"""Publishes that wait for room in a full queue whose policy is ``wait`` (A4), sans-I/O."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from qflow_client.broker.message import StoredMessage

if TYPE_CHECKING:
    from qflow_client.broker.queue import Queue

__all__ = ["Publisher", "WaitingLine", "WaitingPublish"]


class Publisher(Protocol):
    """Whose publish waits."""

    def admit(self, waiting: WaitingPublish) -> None:
        """There is room in all of its queues: enqueue it."""

    def give_up(self, waiting: WaitingPublish, reason: str) -> bool:
        """It has waited for too long, or can never be taken.

        Returns:
            Whether the publisher is told.
        """


class WaitingPublish:
    """A publish that stands in the lines of all queues that it goes to, so that nothing that comes later passes it.

    Args:
        message: what was published.
        queues: where it goes.
        publisher: whose it is.
        tag: its publish sequence number; 0 without confirms.
        deadline: seconds of the clock at which it gives up.
    """

    __slots__ = ("deadline", "is_over", "message", "publisher", "queues", "tag")

    def __init__(
        self, message: StoredMessage, queues: tuple[Queue, ...], publisher: Publisher, tag: int, deadline: float
    ) -> None:
        self.message = message
        self.queues = queues
        self.publisher = publisher
        self.tag = tag
        self.deadline = deadline
        # Whether it waits no more, for whatever reason.
        self.is_over = False


class WaitingLine:
    """The publishes that wait to enter one queue, first come, first served."""

    __slots__ = ("_line", "_over")

    def __init__(self) -> None:
        self._line: deque[WaitingPublish] = deque()
        # How many in the line wait no more.
        self._over = 0

    def __len__(self) -> int:
        return len(self._line) - self._over

    def push(self, waiting: WaitingPublish) -> None:
        """Stand at the end."""
        self._line.append(waiting)

    def head(self) -> WaitingPublish | None:
        """Whose turn it is; ``None`` if nobody waits."""
        line = self._line
        while line and line[0].is_over:
            line.popleft()
            self._over -= 1
        return line[0] if line else None

    def leave(self) -> None:
        """One in the line is over."""
        self._over += 1
