"""The flow state of a queue, sans-I/O: which channels it flows (blocks), and which confirms it holds.

A `QueueFlow` is one family of marks. Above its stop it is ON: it blocks the channel that publishes, or holds the
confirm, or both. At its resume it is OFF: it releases all confirms and unblocks the channels, all at once or one after
the other (F4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from qflow_client.broker.core.entries import Completion, QueueEntry
from qflow_client.flow import FlowController, FlowSource, ThresholdLimiter, Thresholds

__all__ = ["CountedSource", "QueueFlow", "Turns"]


class CountedSource(FlowSource):
    """A source that tells how much it was let publish.

    Args:
        name: for people; need not be unique.
    """

    __slots__ = ("published",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        #: Messages so far.
        self.published = 0


class Turns:
    """When the next publisher of a queue is unflowed, so that they do not all come back at once (F4).

    Args:
        interval: seconds between two.
        clock: seconds.
        wake_at: called with the time at which to ask again.
    """

    __slots__ = ("_clock", "_interval", "_next_at", "_wake_at")

    def __init__(self, interval: float, clock: Callable[[], float], wake_at: Callable[[float], None]) -> None:
        self._interval = interval
        self._clock = clock
        self._wake_at = wake_at
        self._next_at = -math.inf

    def take(self) -> bool:
        """Whether it is the turn of one now."""
        now = self._clock()
        if now < self._next_at:
            self._wake_at(self._next_at)
            return False
        self._next_at = now + self._interval
        return True


class QueueFlow(FlowController):
    """One family of marks on a queue: flows the channels, and holds the confirms, of publishes past them.

    Args:
        thresholds: the marks.
        name: of the queue.
        count: messages in the queue.
        size: their body bytes.
        turns: whose turn it is to be unblocked, and when; ``None`` unblocks all at once.
    """

    __slots__ = ("_turns", "depth", "held")

    def __init__(
        self, thresholds: Thresholds, name: str, count: int = 0, size: int = 0, turns: Turns | None = None
    ) -> None:
        self.depth = ThresholdLimiter(thresholds, count=count, size=size)
        self._turns = turns
        super().__init__(self.depth, name=name)
        # Entries whose confirms wait for OFF, the oldest first (C5).
        self.held: dict[QueueEntry, Completion] = {}

    def resume(self, now: float | None = None) -> None:
        """Unblock the sources that may go on, all at once or one after the other, the oldest first (F4)."""
        blocked = self._blocked
        if not blocked:
            return
        if self._turns is None:
            if len(blocked) > 1 and self._may_go_on(now):
                # The first fills the room below the mark before the others: let it be the one that has published least.
                self._blocked = dict.fromkeys(sorted(blocked, key=_published))
            super().resume(now)
            return
        while blocked and self._may_go_on(now) and self._turns.take():
            self.forget(next(iter(blocked)))

    def release_held(self) -> None:
        """Let go of all confirms."""
        held, self.held = self.held, {}
        for completion in held.values():
            completion.release()

    def let_go(self) -> None:
        """Release all channels and confirms, whatever the state."""
        for source in self.blocked:
            self.forget(source)
        self.release_held()


def _published(source: FlowSource) -> int:
    return source.published if isinstance(source, CountedSource) else 0
