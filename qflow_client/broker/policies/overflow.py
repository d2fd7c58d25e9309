"""The overflow policies, which define what a queue does at its maximum."""

from __future__ import annotations

from dataclasses import dataclass

from qflow_client.broker.core.entries import DropReason, QueueView
from qflow_client.broker.core.overflow import Overflow
from qflow_client.broker.policies.conflation import LastValues
from qflow_client.broker.policies.policy import QueuePolicy

__all__ = ["Conflate", "DropHead", "FlowToDisk", "Reject", "RejectPublish", "Ring", "Wait", "make_overflow"]


@dataclass(frozen=True, slots=True)
class FlowToDisk(Overflow):
    """Accepts every message. Keeps bodies up to the maximum in memory, and further bodies only on disk (A2)."""

    pages_bodies = True

    @property
    def name(self) -> str:
        return QueuePolicy.FLOW_TO_DISK

    def trim(self, queue: QueueView, most: int) -> bool:
        pager = queue.pager
        if pager is not None and (self.max_size is not None or self.max_count is not None):
            pager.evict(pager.size if self.max_size is None else self.max_size, self.max_count)
        return False


@dataclass(frozen=True, slots=True)
class Reject(Overflow):
    """Refuses messages that do not fit into the queue (``qpid.policy_type=reject``)."""

    @property
    def name(self) -> str:
        return QueuePolicy.REJECT

    def refusal(self, queue: QueueView, size: int, count: int, largest: int) -> str | None:
        contents = queue.contents
        return self._full(queue, contents.depth, contents.size, (count, size))


@dataclass(frozen=True, slots=True)
class Wait(Reject):
    """Lets messages that do not fit wait for room (A4). Refuses a message that is larger than `max_size`."""

    @property
    def name(self) -> str:
        return QueuePolicy.WAIT

    def lets_wait(self, size: int) -> bool:
        return self.max_size is None or size <= self.max_size


@dataclass(frozen=True, slots=True)
class _Dropping(Overflow):
    """Drops queued messages to make room for new messages."""

    def make_room(self, queue: QueueView, size: int, most: int) -> bool:
        return self._drop(queue, 1, size, most)

    def trim(self, queue: QueueView, most: int) -> bool:
        return self._drop(queue, 0, 0, most)

    def _drop(self, queue: QueueView, count: int, size: int, most: int) -> bool:
        """Drop up to `most` messages to make room for `count` new messages with `size` bytes in total.

        Return True if further messages must be dropped.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Ring(_Dropping):
    """Drops the oldest messages to make room for a new message (``qpid.policy_type=ring`` and ``ring_strict``).

    Attributes:
        strict: whether a new message is refused if one of the messages that must be dropped for it is unacked.
    """

    strict: bool = False

    @property
    def name(self) -> str:
        return QueuePolicy.RING_STRICT if self.strict else QueuePolicy.RING

    def refusal(self, queue: QueueView, size: int, count: int, largest: int) -> str | None:
        if self.max_size is not None and largest > self.max_size:
            return (
                f"a message of {largest} bytes is larger than queue '{queue.name}', which holds {self.max_size} bytes"
            )
        contents = queue.contents
        if self.strict and contents.reaches_unacked(
            *self._excess(contents.depth - len(contents.leaving) + count, contents.size - contents.leaving_size + size)
        ):
            return (
                f"queue '{queue.name}' is full: to make room, it would have to drop a message that a consumer has not "
                "acknowledged yet"
            )
        return None

    def _drop(self, queue: QueueView, count: int, size: int, most: int) -> bool:
        contents = queue.contents
        # Messages in `Contents.leaving` need no room.
        count -= len(contents.leaving)
        size -= contents.leaving_size
        while max(self._excess(contents.depth + count, contents.size + size)) > 0:
            oldest = contents.oldest()
            if oldest is None or (self.strict and oldest.is_unacked):
                break
            if not most:
                return True
            most -= 1
            queue.dropping.drop(oldest, DropReason.MAXLEN)
        return False


@dataclass(frozen=True, slots=True)
class Conflate(Ring):
    """Keeps the last message of each key. At the maximum, drops the oldest messages.

    Attributes:
        key: name of the header that contains the key; ``None`` if the routing key is the key.
    """

    key: str | None = None

    @property
    def name(self) -> str:
        return QueuePolicy.CONFLATE

    def last_values(self) -> LastValues:
        return LastValues(self.key)


@dataclass(frozen=True, slots=True)
class DropHead(_Dropping):
    """Drops the oldest ready messages, like RabbitMQ (``x-overflow=drop-head``). Unacked messages do not count."""

    counts_ready = True

    @property
    def name(self) -> str:
        return "drop-head"

    def _drop(self, queue: QueueView, count: int, size: int, most: int) -> bool:
        contents = queue.contents
        while max(self._excess(contents.ready_count + count, contents.ready_size + size)) > 0:
            first = contents.first()
            if first is None:
                break
            if not most:
                return True
            most -= 1
            queue.dropping.drop(first, DropReason.MAXLEN)
        return False


@dataclass(frozen=True, slots=True)
class RejectPublish(Overflow):
    """Refuses messages that do not fit, like RabbitMQ (``x-overflow=reject-publish``). Unacked messages do not count.

    Attributes:
        dead_letters: whether refused messages go to the dead-letter exchange (``x-overflow=reject-publish-dlx``).
    """

    is_silent = True

    dead_letters: bool = False

    @property
    def name(self) -> str:
        return "reject-publish-dlx" if self.dead_letters else "reject-publish"

    @property
    def dead_letters_refused(self) -> bool:
        return self.dead_letters

    def refusal(self, queue: QueueView, size: int, count: int, largest: int) -> str | None:
        contents = queue.contents
        return self._full(queue, contents.ready_count, contents.ready_size, (count, size))


def make_overflow(
    policy: QueuePolicy, max_count: int | None, max_size: int | None, conflate_key: str | None
) -> Overflow | None:
    """Return the overflow policy of a queue, or ``None`` for `QueuePolicy.FLOW`, which has no effect at a maximum.

    Args:
        max_count: maximum number of messages; ``None`` for no maximum.
        max_size: maximum body bytes; ``None`` for no maximum.
        conflate_key: see `Conflate.key`.
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
