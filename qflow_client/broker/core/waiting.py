"""`refusal` decides whether queues accept a message. `WaitingRoom` has the messages that wait for room. Sans-I/O.

A message waits if the policy of the full queue is ``wait`` (A4). A `WaitingPublish` is in the line of every destination
queue. The message is admitted when it is the first in all of these lines and all queues have room. So no message of a
client overtakes an earlier message in a queue. A commit of a transaction never waits: it is refused if a queue has no
room or has a line. Dead letters and messages of the embedding program never wait, and can overtake others.

`WaitingRoom.admit` checks the line of a queue. The virtual host calls `admit`, for example, after a message has left
the queue, or at the deadline of the line's first message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.dropping import drops_each
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.ports import Journal
from qflow_client.broker.core.queue import Queue

__all__ = ["Publisher", "Refusal", "WaitingPublish", "WaitingRoom", "refusal"]


class Refusal(NamedTuple):
    """The reason why a message is not accepted now.

    Attributes:
        queue: the queue that refuses the message.
        reason: the text for the client.
        waits: whether the message waits for room instead of being refused.
    """

    queue: Queue
    reason: str
    waits: bool


class Publisher(Protocol):
    """The channel of a waiting message."""

    def admit(self, waiting: WaitingPublish) -> None:
        """Enqueue a waiting message, because all of its queues have room."""

    def give_up(self, waiting: WaitingPublish, reason: str) -> bool:
        """Refuse a message, because its deadline has passed, or because a queue now refuses it immediately.

        Return False if the client is not informed, because the channel is closing.
        """


@dataclass(eq=False, slots=True)
class WaitingPublish:
    """A message that waits in the lines of all its destination queues, so no later message of a client overtakes it.

    Attributes:
        tag: publish sequence number of the message; 0 without confirms.
        deadline: monotonic time at which the message is refused.
        is_over: whether the wait is over, for any reason.
    """

    message: StoredMessage
    queues: tuple[Queue, ...]
    publisher: Publisher
    tag: int
    deadline: float
    is_over: bool = False


class WaitingRoom:
    """The lines of all queues with waiting messages.

    Args:
        clock: returns monotonic seconds.
        max_wait: maximum seconds that a message waits.
        journal: counts the bytes of waiting messages; ``None`` if there is no journal.
    """

    #: One call of `admit` handles about this number of messages. A message counts once for each of its queues.
    AT_ONCE = 1000

    def __init__(self, clock: Callable[[], float], max_wait: float, journal: Journal | None) -> None:
        self._clock = clock
        self._journal = journal
        self._max_wait = max_wait
        # The line of each queue, in order of arrival. Lines can contain messages that no longer wait. No line is empty.
        self._lines: dict[Queue, deque[WaitingPublish]] = {}

    def wait(self, message: StoredMessage, queues: tuple[Queue, ...], publisher: Publisher, tag: int) -> WaitingPublish:
        """Let a message wait until all of its destinations accept it, see `WaitingPublish`."""
        deadline = self._clock() + self._max_wait
        waiting = WaitingPublish(message, queues, publisher, tag, deadline)
        if self._journal is not None:
            self._journal.waiting += message.footprint
        for queue in queues:
            self._lines.setdefault(queue, deque()).append(waiting)
            queue.note_waiting(deadline, 1)
        return waiting

    def stop(self, waiting: WaitingPublish) -> None:
        """End the wait of a message, and let its queues check their lines again soon."""
        waiting.is_over = True
        if self._journal is not None:
            self._journal.waiting -= waiting.message.footprint
        now = self._clock()
        for queue in waiting.queues:
            queue.note_waiting(now, -1)
            self._head(queue)

    def discard_in_steps(self, waiting: Sequence[WaitingPublish]) -> Iterator[None]:
        """Discard a channel's messages, newest first. So no message enters a queue without the earlier messages."""
        for each in reversed(waiting):
            if not each.is_over:
                each.queues[0].contents.count_drop(DropReason.REFUSED)
                self.stop(each)
            yield

    def _head(self, queue: Queue) -> WaitingPublish | None:
        line = self._lines.get(queue)
        while line:
            if not line[0].is_over:
                return line[0]
            line.popleft()
            if not line:
                del self._lines[queue]
        return None

    def admit(self, queue: Queue, now: float) -> None:
        """Admit the first messages of a line while their queues have room. Refuse messages that must not wait longer.

        If more than `AT_ONCE` messages could be admitted or refused now, the queue soon asks for a further call.
        """
        left = self.AT_ONCE
        while (waiting := self._head(queue)) is not None:
            if left <= 0:
                queue.note_waiting(now)
                break
            queues = tuple(each for each in waiting.queues if not each.is_deleted)
            # While many entries have to leave a queue, `refusal` removes a slice of them. So stop after this message.
            has_slice = any(each.contents.leaving or each.dropping.is_behind for each in queues)
            left -= self.AT_ONCE if has_slice else len(waiting.queues)
            refused: Refusal | None
            if any(self._head(each) is not waiting for each in queues):
                refused = Refusal(queue, f"earlier publishes wait for room in queue '{queue.name}'", True)
            else:
                refused = refusal(queues, waiting.message.size, has_line=False)
                if refused is not None and any(_makes_wait(each, waiting.message.size) for each in queues):
                    # Wait: each queue that refuses the message now can have room later.
                    refused = refused._replace(waits=True)
            if refused is None:
                self.stop(waiting)
                waiting.queues = queues
                waiting.publisher.admit(waiting)
                if self._journal is not None:
                    self._journal.divide()
                continue
            if refused.waits and now < waiting.deadline:
                queue.note_waiting(waiting.deadline)
                break
            self.stop(waiting)
            reason = f"{refused.reason}; waited {self._max_wait} s" if refused.waits else refused.reason
            if not waiting.publisher.give_up(waiting, reason):
                refused.queue.contents.count_drop(DropReason.REFUSED)


def refusal(queues: Sequence[Queue], size: int, *, has_line: bool = True) -> Refusal | None:
    """Return why a message is refused or has to wait; ``None`` if all queues accept it.

    The message waits if each queue that does not accept it has the policy ``wait``, or has room and a line of messages.

    Args:
        size: body bytes.
        has_line: whether this message has to wait if other messages already wait for the queue.
    """
    found = None
    drops = Contents.AT_ONCE if len(queues) == 1 else drops_each(len(queues))
    for queue in queues:
        reason = queue.refusal(size, drops=drops) if queue.may_refuse else None
        if reason is None and has_line and queue.has_line:
            reason = f"other publishes wait for room in queue '{queue.name}'"
        elif reason is not None and (queue.is_refusing or not _makes_wait(queue, size)):
            return Refusal(queue, reason, False)
        if found is None and reason is not None:
            found = Refusal(queue, reason, True)
    return found


def _makes_wait(queue: Queue, size: int) -> bool:
    return queue.overflow is not None and queue.overflow.lets_wait(size)
