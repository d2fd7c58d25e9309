"""Publishes that wait for room in a full queue whose policy is ``wait`` (A4), sans-I/O.

A `WaitingPublish` stands in the line of every queue that it goes to. It is admitted when it is the first in all of them
and all of them have room, so a later publish never passes an earlier one in any queue. A commit is refused instead of
waiting. Dead letters do not wait, nor does what the program publishes that embeds the broker.

A queue knows only how many wait for it. It asks the room to look at its line when a message has left it, and when the
first deadline is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.ports import Journal
from qflow_client.broker.core.queue import Queue

__all__ = ["Publisher", "Refusal", "WaitingPublish", "WaitingRoom", "refusal"]


class Refusal(NamedTuple):
    """Why a message is not taken now.

    Attributes:
        queue: which refuses it.
        reason: for people.
        waits: whether it waits for room instead.
    """

    queue: Queue
    reason: str
    waits: bool


class Publisher(Protocol):
    """The channel of a publish that waits."""

    def admit(self, waiting: WaitingPublish) -> None:
        """There is room in all of its queues: enqueue it."""

    def give_up(self, waiting: WaitingPublish, reason: str) -> bool:
        """It has waited for too long, or can never be taken.

        Returns:
            Whether the client is informed.
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


class WaitingRoom:
    """The lines of all queues.

    Args:
        clock: monotonic seconds.
        max_wait: seconds that a publish waits at most.
        journal: has the account of memory; ``None`` if there is none.
    """

    def __init__(self, clock: Callable[[], float], max_wait: float, journal: Journal | None) -> None:
        self._clock = clock
        self._journal = journal
        self._max_wait = max_wait
        # By queue, first come, first served, with some that wait no more. No line is empty.
        self._lines: dict[Queue, deque[WaitingPublish]] = {}

    def wait(self, message: StoredMessage, queues: tuple[Queue, ...], publisher: Publisher, tag: int) -> WaitingPublish:
        """Let a publish wait until all of its destinations take it.

        Args:
            message: what was published.
            queues: where it goes.
            publisher: whose it is.
            tag: its publish sequence number; 0 without confirms.
        """
        deadline = self._clock() + self._max_wait
        waiting = WaitingPublish(message, queues, publisher, tag, deadline)
        if self._journal is not None:
            self._journal.waiting += message.footprint
        for queue in queues:
            self._lines.setdefault(queue, deque()).append(waiting)
            queue.wait(deadline, 1)
        return waiting

    def stop(self, waiting: WaitingPublish) -> None:
        """A publish waits no more; those behind it are looked at soon."""
        waiting.is_over = True
        if self._journal is not None:
            self._journal.waiting -= waiting.message.footprint
        now = self._clock()
        for queue in waiting.queues:
            queue.wait(now, -1)
            self._head(queue)

    def _head(self, queue: Queue) -> WaitingPublish | None:
        """The first in line; ``None`` if none waits."""
        line = self._lines.get(queue)
        while line:
            if not line[0].is_over:
                return line[0]
            line.popleft()
            if not line:
                del self._lines[queue]
        return None

    def admit(self, queue: Queue, now: float) -> None:
        """Admit those that come first in their lines and find room, and give up those whose time is over."""
        while (waiting := self._head(queue)) is not None:
            queues = tuple(each for each in waiting.queues if not each.is_deleted)
            refused: Refusal | None
            if any(self._head(each) is not waiting for each in queues):
                refused = Refusal(queue, f"publishes wait before it in queue '{queue.name}'", True)
            else:
                refused = refusal(queues, waiting.message.size, has_line=False)
                if refused is not None and any(_makes_wait(each, waiting.message.size) for each in queues):
                    # The others that refuse it now may have room later.
                    refused = refused._replace(waits=True)
            if refused is None:
                self.stop(waiting)
                waiting.queues = queues
                waiting.publisher.admit(waiting)
                if self._journal is not None:
                    self._journal.divide()
                continue
            if refused.waits and now < waiting.deadline:
                queue.wait(waiting.deadline)
                break
            self.stop(waiting)
            reason = f"{refused.reason}; waited {self._max_wait} s" if refused.waits else refused.reason
            if not waiting.publisher.give_up(waiting, reason):
                refused.queue.contents.count_drop(DropReason.REFUSED)


def refusal(queues: Iterable[Queue], size: int, *, has_line: bool = True) -> Refusal | None:
    """Why a message of `size` body bytes is not taken now: if one of its destinations refuses it, none gets it.

    It waits if all that refuse it would have it wait, or if others wait before it.

    Args:
        queues: its destinations.
        size: body bytes.
        has_line: whether those count that wait already.
    """
    found = None
    for queue in queues:
        reason = queue.refusal(size) if queue.may_refuse else None
        if reason is None and has_line and queue.has_line:
            reason = f"publishes wait for room in queue '{queue.name}'"
        elif reason is not None and (queue.is_refusing or not _makes_wait(queue, size)):
            return Refusal(queue, reason, False)
        if found is None and reason is not None:
            found = Refusal(queue, reason, True)
    return found


def _makes_wait(queue: Queue, size: int) -> bool:
    """Whether it is a queue's policy that a message of `size` body bytes waits."""
    return queue.overflow is not None and queue.overflow.lets_wait(size)
