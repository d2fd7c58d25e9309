"""The objects in queues: messages, their entries in queues, and their confirms.

All queues that have a message share one `StoredMessage`. Each queue has its own `QueueEntry` for the message, with the
place of the message in the queue. A `Completion` is the confirm of one message. Queues, the disk or an operator may
hold (delay) it. It is sent when the last hold is released. Queues, the journal and channels change these objects.

The protocols at the end describe a queue and its parts for the modules that `queue.py` imports. An overflow policy, a
pager and a delivery use `QueueView` instead of the class `Queue`, so that imports go in one direction only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

import pamqp.commands

from qflow_client.broker.core.properties import decode_properties, is_persistent
from qflow_client.broker.core.wire import HAS_EXPIRATION, short, time_to_live
from qflow_client.flow import Thresholds

__all__ = [
    "Address",
    "BodyPager",
    "Completion",
    "Consumer",
    "DropReason",
    "DroppableEntries",
    "QueueEntry",
    "QueueView",
    "Record",
    "StoredMessage",
]


class DropReason(StrEnum):
    """The reason why a message left a queue without an ack, or did not enter it."""

    #: A consumer rejected it without requeue.
    REJECTED = "rejected"
    #: It waited longer than its time to live.
    EXPIRED = "expired"
    #: It made room for a new message.
    MAXLEN = "maxlen"
    #: A later message with the same key has arrived.
    CONFLATED = "conflated"
    #: Memory exceeded its limit, and the policy of the queue drops messages (A1).
    MEMORY = "memory"
    #: Its body was only on disk, and is damaged there (E10).
    DAMAGED = "damaged"
    #: The queue was full, and the sender was not informed: it was a dead letter, or was published without confirms.
    REFUSED = "refused"
    #: It came as a dead letter although it had already died in this queue, and no consumer had rejected it since.
    CYCLE = "cycle"
    #: It died in this queue and was not dead-lettered, because another copy of the same message had gone from this
    #: queue to the same target. The message is also counted under the reason of its death.
    COPY = "copy"


class Address:
    """The exchange and routing key of a published message."""

    __slots__ = ("exchange", "mandatory", "names", "routing_key")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool = False) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.mandatory = mandatory
        # The exchange and the routing key as short strings.
        self.names = short(exchange) + short(routing_key)


class Record:
    """The journal's data about a message."""

    __slots__ = (
        "aside",
        "completion",
        "holders",
        "is_evicting",
        "is_lost",
        "is_spooled",
        "is_taken",
        "is_written",
        "number",
        "queues",
    )

    def __init__(self) -> None:
        # Number of queues that have the message; and, if it survives a restart, the numbers of those that do so too.
        self.holders = 0
        self.queues: list[int] = []
        # Its number on disk, greater than all earlier numbers; 0 if it does not have to be on disk.
        self.number = 0
        # Whether a batch of records includes it, now or earlier.
        self.is_taken = False
        # Whether it is on disk.
        self.is_written = False
        # Its confirm, which waits for the disk; None if there is none.
        self.completion: Completion | None = None
        # Whether it has to be on disk as long as any queue has it.
        self.is_spooled = False
        # Whether its body is removed from memory when it is on disk.
        self.is_evicting = False
        # Whether its body is damaged on disk, and no longer in memory.
        self.is_lost = False
        # Its entries that could not be dropped to free memory. They are tried again when this may have changed.
        self.aside: Sequence[QueueEntry] = ()


class StoredMessage:
    """A message, shared by all queues that have it. Its content never changes, but the body may be only on disk.

    Args:
        target: the exchange and routing key with which it was published.
        header: the payload of its content header frame, as received.
    """

    __slots__ = ("body", "dead_lettered", "header", "record", "size", "target")

    #: The queues that have dead-lettered a copy of it, each with the exchange and routing key of the target. All copies
    #: share this set. The attribute does not exist before the first dead letter.
    dead_lettered: set[tuple[str, str, str]]

    def __init__(self, target: Address, header: bytes, body: bytes) -> None:
        self.target = target
        self.header = header
        # None while the body is only on disk.
        self.body: bytes | None = body
        # Body bytes. Thresholds and maxima use this size.
        self.size = len(body)
        # The journal's data; None if there is no journal, or no queue has the message.
        self.record: Record | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its body was only on disk and is damaged there."""
        return self.record is not None and self.record.is_lost

    @property
    def footprint(self) -> int:
        """Approximate bytes in memory while no queue has it."""
        return self.size + len(self.header) + 512

    @property
    def is_persistent(self) -> bool:
        """Whether it survives a restart of the broker in durable queues."""
        return is_persistent(self.header)

    @property
    def ttl(self) -> int | None:
        """Time to live in a queue, in milliseconds; ``None`` for no limit."""
        return time_to_live(self.header) if self.header[12] & HAS_EXPIRATION else None

    @property
    def properties(self) -> pamqp.commands.Basic.Properties:
        """The basic properties, decoded on every use."""
        return decode_properties(self.header)


class Completion:
    """The confirm of one message. Flow states that were ON (C5), the disk or an operator may hold (delay) it.

    Args:
        tag: the publish sequence number on its channel.
        complete: called with the tag when the last hold is released.
    """

    __slots__ = ("_armed", "_complete", "holds", "tag")

    def __init__(self, tag: int, complete: Callable[[int], None]) -> None:
        self.tag = tag
        self._complete = complete
        # Number of holds.
        self.holds = 0
        # Set when every destination has the message. Until then it is not complete, even without holds.
        self._armed = False

    def release(self) -> None:
        """Release one hold."""
        self.holds -= 1
        if not self.holds and self._armed:
            self._complete(self.tag)

    def arm(self) -> bool:
        """Record that all destinations have the message. Return True if there are no holds."""
        self._armed = True
        return not self.holds


class QueueEntry:
    """A message in one queue."""

    __slots__ = ("is_gone", "is_unacked", "message", "queue", "redelivered", "sequence")

    def __init__(self, queue: QueueView, message: StoredMessage, sequence: int) -> None:
        self.queue = queue
        self.message = message
        # Its place in the order of the queue; a requeue does not change it.
        self.sequence = sequence
        # Whether it was delivered before.
        self.redelivered = False
        # Whether a consumer has it and has not settled it.
        self.is_unacked = False
        # Whether it has left the queue. A later ack changes nothing.
        self.is_gone = False


class Consumer(Protocol):
    """A consumer, to which a queue delivers messages."""

    #: Whether the queue may deliver to it; the queue sets this.
    is_active: bool

    @property
    def no_ack(self) -> bool:
        """Whether a delivery settles the message."""

    @property
    def can_take(self) -> bool:
        """Whether it has credit and is not stopped, and its connection accepts more bytes."""

    def deliver(self, entry: QueueEntry) -> None:
        """Take a message. The caller has checked `can_take`."""

    def cancelled_by_queue(self) -> None:
        """End the consumer, because its queue was deleted."""


class BodyPager(Protocol):
    """Decides which bodies of one queue stay in memory (A2)."""

    #: Body bytes of the entries whose bodies are in memory.
    size: int

    def add(self, entry: QueueEntry) -> None:
        """An entry was added."""

    def came(self, entry: QueueEntry) -> None:
        """The body of a ready entry is in memory again."""

    def lend(self, entry: QueueEntry) -> None:
        """An entry was delivered to a consumer; its body is in memory."""

    def ready_again(self, entry: QueueEntry) -> None:
        """An entry is ready again."""

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue."""

    def evict(self, size: int, count: int | None = None) -> None:
        """Remove bodies from memory until at most `size` bytes and `count` bodies are left."""


class DroppableEntries(Protocol):
    """The entries of one queue that may be dropped if memory exceeds its limit (A1)."""

    def add(self, entry: QueueEntry) -> None:
        """An entry was added at the end."""

    def ready_again(self, entry: QueueEntry) -> None:
        """An entry is ready again, or has to be checked again."""

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue, or was delivered to a consumer."""

    def __len__(self) -> int: ...

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Yield the current entries, in the order of the queue."""

    def offer(self, entry: QueueEntry) -> Sequence[QueueEntry]:
        """Return all entries of this entry's message if they can be dropped together; otherwise return no entries."""


class QueueContents(Protocol):
    """The contents of a queue."""

    #: Messages and body bytes: ready, unacked and leaving together (D6).
    depth: int
    size: int

    @property
    def ready_count(self) -> int:
        """The number of messages to deliver."""

    @property
    def ready_size(self) -> int:
        """Body bytes of the messages to deliver."""

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Yield all entries, ready and unacked, in the order of the queue."""


class QueueDropping(Protocol):
    """Drops messages of a queue."""

    #: Whether the queue dead-letters dropped messages.
    has_letters: bool

    def drop_oldest(self) -> None:
        """Drop the oldest entry, even if it is unacked. The queue must not be empty."""

    def drop_head(self) -> None:
        """Drop the oldest ready entry. There must be a ready entry."""

    def drop_for_memory(self, entry: QueueEntry) -> None:
        """Drop a ready entry because memory exceeds its limit."""


class QueueDispatcher(Protocol):
    """Gives the messages of a queue to its consumers."""

    #: All consumers.
    consumers: dict[Consumer, None]
    #: Deliveries so far.
    delivered: int

    def settle(self, entry: QueueEntry, *, acked: bool) -> None:
        """Settle a delivered entry that was acked, or rejected without requeue."""

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put delivered entries back at their places."""

    def pause(self, change: int) -> None:
        """Change the pause counter by 1 or -1. Nothing is delivered while the counter is not 0."""

    def dispatch(self) -> None:
        """Deliver as many messages as the consumers take."""


class QueueView(Protocol):
    """The part of a queue that its overflow policy, its observers and its deliveries use."""

    @property
    def name(self) -> str:
        """The name of the queue."""

    @property
    def depth(self) -> int:
        """The number of messages: ready, unacked and leaving (D6)."""

    @property
    def size(self) -> int:
        """Body bytes of these messages."""

    @property
    def contents(self) -> QueueContents:
        """The contents of the queue."""

    @property
    def dropping(self) -> QueueDropping:
        """Drops messages of the queue."""

    @property
    def dispatcher(self) -> QueueDispatcher:
        """Gives messages to the queue's consumers."""

    @property
    def thresholds(self) -> Sequence[Thresholds]:
        """The families of marks that are set."""

    @property
    def pager(self) -> BodyPager | None:
        """Decides which bodies stay in memory; ``None`` if all bodies stay."""

    @property
    def droppable(self) -> DroppableEntries | None:
        """The entries that may be dropped for memory; ``None`` if no entry may."""

    def trim(self) -> None:
        """After a requeue, drop the messages beyond the maximum. See `Queue.trim`."""
