"""What a queue does at its maximum: the one place where such a rule is plugged in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qflow_client.broker.policies import QueuePolicy

if TYPE_CHECKING:
    from qflow_client.broker.queue import Queue

__all__ = ["Conflate", "DropHead", "FlowToDisk", "Overflow", "Reject", "RejectPublish", "Ring", "Wait", "make_overflow"]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A rule for messages that come to a full queue. This one lets everything in.

    `refusal` is asked of every destination queue before any of them takes the message, so that if one refuses, none
    gets it. `make_room` comes just before the enqueue, `trim` after the message was offered to consumers.

    Attributes:
        max_count: messages; ``None`` for no maximum.
        max_size: body bytes; ``None`` for no maximum.
    """

    max_count: int | None = None
    max_size: int | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return "flow"

    def lets_wait(self, size: int) -> bool:
        """Whether a message of `size` body bytes that is refused waits for room."""
        return False

    @property
    def is_silent(self) -> bool:
        """Whether who publishes without confirms is not told of a refusal, which is counted all the same."""
        return False

    @property
    def dead_letters_refused(self) -> bool:
        """Whether what is refused goes to the dead-letter exchange."""
        return False

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        """Why `count` more messages of together `size` body bytes may not enter; ``None`` if they may.

        With what leaves at the same time counted against them; `largest` is the size of the largest that enters.
        """
        return None

    def make_room(self, queue: Queue, size: int) -> None:
        """Do what it takes to let a message of `size` body bytes in, which was not refused."""

    def trim(self, queue: Queue) -> None:
        """Drop what is too much and could not be delivered."""

    def _excess(self, depth: int, size: int) -> tuple[int, int]:
        """By how many messages, and how many bytes, a depth is beyond the maximum; 0 or less if it is not."""
        return (
            depth - self.max_count if self.max_count is not None else 0,
            size - self.max_size if self.max_size is not None else 0,
        )

    def _full(self, queue: Queue, depth: int, size: int, coming: tuple[int, int]) -> str | None:
        """That messages do not fit; ``None`` if they do.

        Args:
            queue: whose name is told.
            depth: messages that count.
            size: their body bytes.
            coming: messages and body bytes that are to be added.
        """
        beyond_count, beyond_size = self._excess(depth + coming[0], size + coming[1])
        if beyond_count > 0:
            return f"queue '{queue.name}' is full: {depth} messages of at most {self.max_count}"
        if beyond_size > 0:
            return (
                f"queue '{queue.name}' is full: {size} bytes of at most {self.max_size}, "
                f"and {coming[1]} more do not fit"
            )
        return None


@dataclass(frozen=True, slots=True)
class FlowToDisk(Overflow):
    """Take everything, and keep no more than the maximum of it in memory: bodies go to disk (A2)."""

    @property
    def name(self) -> str:
        return QueuePolicy.FLOW_TO_DISK

    def trim(self, queue: Queue) -> None:
        pager = queue.pager
        if pager is not None and (self.max_size is not None or self.max_count is not None):
            pager.evict(pager.size if self.max_size is None else self.max_size, self.max_count)


@dataclass(frozen=True, slots=True)
class Reject(Overflow):
    """Refuse what does not fit (``qpid.policy_type=reject``)."""

    @property
    def name(self) -> str:
        return QueuePolicy.REJECT

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        return self._full(queue, queue.depth, queue.size, (count, size))


@dataclass(frozen=True, slots=True)
class Wait(Reject):
    """Let what does not fit wait for room (A4); what never fits is refused."""

    @property
    def name(self) -> str:
        return QueuePolicy.WAIT

    def lets_wait(self, size: int) -> bool:
        return self.max_size is None or size <= self.max_size


@dataclass(frozen=True, slots=True)
class _Dropping(Overflow):
    """Drop what is there for what comes."""

    def make_room(self, queue: Queue, size: int) -> None:
        self._drop(queue, 1, size)

    def trim(self, queue: Queue) -> None:
        self._drop(queue, 0, 0)

    def _drop(self, queue: Queue, count: int, size: int) -> None:
        """Drop until so much more fits, or nothing is left."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Ring(_Dropping):
    """Drop the oldest messages for the new one (``qpid.policy_type=ring`` and ``ring_strict``).

    Attributes:
        strict: refuse the new message if the oldest one is with a consumer.
    """

    strict: bool = False

    @property
    def name(self) -> str:
        return QueuePolicy.RING_STRICT if self.strict else QueuePolicy.RING

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        if self.max_size is not None and largest > self.max_size:
            return f"a message of {largest} bytes is larger than queue '{queue.name}', which holds {self.max_size}"
        beyond_count, beyond_size = self._excess(queue.depth + count, queue.size + size)
        if self.strict and (beyond_count > 0 or beyond_size > 0):
            # As many of the oldest as must go, and none of them may be with a consumer.
            for entry in queue.oldest_first():
                if beyond_count <= 0 and beyond_size <= 0:
                    break
                if entry.is_unacked:
                    return f"queue '{queue.name}' is full, and its oldest message is with a consumer"
                beyond_count -= 1
                beyond_size -= entry.message.size
        return None

    def _drop(self, queue: Queue, count: int, size: int) -> None:
        while queue.depth and max(self._excess(queue.depth + count, queue.size + size)) > 0:
            queue.drop_oldest()


@dataclass(frozen=True, slots=True)
class Conflate(Ring):
    """Keep the last message of each key, and drop the oldest at the maximum.

    Attributes:
        key: the header that has the key; ``None`` for the routing key.
    """

    key: str | None = None

    @property
    def name(self) -> str:
        return QueuePolicy.CONFLATE


@dataclass(frozen=True, slots=True)
class DropHead(_Dropping):
    """Drop the oldest of the ready messages, as RabbitMQ does (``x-overflow=drop-head``): only they count."""

    @property
    def name(self) -> str:
        return "drop-head"

    def _drop(self, queue: Queue, count: int, size: int) -> None:
        while queue.ready_count and max(self._excess(queue.ready_count + count, queue.ready_size + size)) > 0:
            queue.drop_head()


@dataclass(frozen=True, slots=True)
class RejectPublish(Overflow):
    """Refuse what does not fit, as RabbitMQ does (``x-overflow=reject-publish``): only ready messages count.

    Attributes:
        dead_letters: whether what is refused goes to the dead-letter exchange (``reject-publish-dlx``).
    """

    dead_letters: bool = False

    @property
    def name(self) -> str:
        return "reject-publish-dlx" if self.dead_letters else "reject-publish"

    @property
    def is_silent(self) -> bool:
        return True

    @property
    def dead_letters_refused(self) -> bool:
        return self.dead_letters

    def refusal(self, queue: Queue, size: int, count: int, largest: int) -> str | None:
        return self._full(queue, queue.ready_count, queue.ready_size, (count, size))


def make_overflow(
    policy: QueuePolicy, max_count: int | None, max_size: int | None, conflate_key: str | None
) -> Overflow | None:
    """The rule that a policy means; ``None`` if it lets everything in.

    Args:
        policy: which.
        max_count: messages; ``None`` for no maximum.
        max_size: body bytes; ``None`` for no maximum.
        conflate_key: the header that has the key; ``None`` for the routing key.
    """
    match policy:
        case QueuePolicy.FLOW_TO_DISK:
            return FlowToDisk(max_count, max_size)
        case QueuePolicy.REJECT:
            return Reject(max_count, max_size)
        case QueuePolicy.WAIT:
            return Wait(max_count, max_size)
        case QueuePolicy.RING | QueuePolicy.RING_STRICT:
            return Ring(max_count, max_size, strict=policy is QueuePolicy.RING_STRICT)
        case QueuePolicy.CONFLATE:
            return Conflate(max_count, max_size, key=conflate_key)
    return None
