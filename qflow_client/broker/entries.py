"""What queues hold, and whom they deal with: entries, confirms that wait, and what is asked of the others."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from qflow_client.broker.message import StoredMessage

if TYPE_CHECKING:
    from qflow_client.broker.queue import Queue

__all__ = ["Completion", "Consumer", "DropReason", "Owner", "QueueEntry", "Surroundings"]


class DropReason(StrEnum):
    """Why a message left a queue, or never came in, and no consumer has acked it."""

    #: A consumer rejected it for good.
    REJECTED = "rejected"
    #: It waited for too long.
    EXPIRED = "expired"
    #: It made room for another.
    MAXLEN = "maxlen"
    #: A later message of its key has come.
    CONFLATED = "conflated"
    #: Memory was beyond its limit, and the policy said so (A1).
    MEMORY = "memory"
    #: The queue was full, and whoever sent it was not told: a dead letter, or a publish without confirms.
    REFUSED = "refused"
    #: It came as a dead letter, had died here before, and no consumer had rejected it since.
    CYCLE = "cycle"
    #: It died here and was not dead-lettered, because another copy of the same message had gone from here to the same
    #: target. It is counted by the reason of its death, too.
    COPY = "copy"


class Owner(Protocol):
    """Whom an exclusive queue belongs to."""

    @property
    def name(self) -> str:
        """For people."""


class Surroundings(Protocol):
    """What a queue needs around it."""

    @property
    def window(self) -> int:
        """Bytes of bodies that each queue may read ahead (A3)."""

    def clock(self) -> float:
        """Monotonic seconds."""

    def wake_at(self, queue: Queue, at: float) -> None:
        """See to it that `Queue.tick` is called at that time."""

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """A message was dropped, and the queue has a dead-letter exchange."""

    def unused(self, queue: Queue) -> None:
        """Nobody has used the queue for as long as that is allowed."""

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """There may be room for publishes that wait, or the time of some is over."""


class Consumer(Protocol):
    """Who takes messages from a queue."""

    #: Whether the queue counts on it; kept by the queue.
    is_active: bool

    @property
    def no_ack(self) -> bool:
        """Whether a delivery settles the message."""

    @property
    def can_take(self) -> bool:
        """Whether it has credit, is not stopped, and its connection takes bytes."""

    def deliver(self, entry: QueueEntry) -> None:
        """Take a message; `can_take` was true."""

    def cancelled_by_queue(self) -> None:
        """Called when the queue is deleted under it."""


class Completion:
    """The confirm of one message, held back by the flow states that were ON when it was enqueued (C5).

    Args:
        tag: the publish sequence number on its channel.
        complete: called with the tag when the last hold is gone.
    """

    __slots__ = ("_armed", "_complete", "holds", "tag")

    def __init__(self, tag: int, complete: Callable[[int], None]) -> None:
        self.tag = tag
        self._complete = complete
        # How many flow states hold it.
        self.holds = 0
        # Set when every destination has the message; before, no number of holds means anything.
        self._armed = False

    def release(self) -> None:
        """One flow state has let it go."""
        self.holds -= 1
        if not self.holds and self._armed:
            self._complete(self.tag)

    def arm(self) -> bool:
        """All destinations have the message.

        Returns:
            True if nothing holds it.
        """
        self._armed = True
        return not self.holds


class QueueEntry:
    """A message in one queue."""

    __slots__ = ("completion", "is_gone", "is_unacked", "message", "queue", "redelivered", "sequence")

    def __init__(self, queue: Queue, message: StoredMessage, sequence: int) -> None:
        self.queue = queue
        self.message = message
        # Its place in the queue's order, kept when it is put back.
        self.sequence = sequence
        # Whether it was delivered before.
        self.redelivered = False
        # Whether it is with a consumer.
        self.is_unacked = False
        # Whether it has left the queue; an ack that comes later changes nothing.
        self.is_gone = False
        # What its dequeue releases; None unless its confirm is held.
        self.completion: Completion | None = None
