"""The objects in queues: messages, their entries in queues, and their confirms.

All queues that have a message share one `StoredMessage`. Each queue has its own `QueueEntry` for the message, with the
place of the message in the queue. The `typing.Protocol` classes describe a queue and its parts for the modules that
`queue.py` imports.
"""

from __future__ import annotations

from collections import deque
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
    """The reason why a queue dropped a message, refused a message, or did not dead-letter a message."""

    #: A consumer rejected the message without requeue.
    REJECTED = "rejected"
    #: The message waited longer than its time to live.
    EXPIRED = "expired"
    #: The queue was full: it dropped the message to make room, or it refused the message and dead-lettered it.
    MAXLEN = "maxlen"
    #: The queue has a later message with the same key (overflow policy `conflate`).
    CONFLATED = "conflated"
    #: Memory exceeded its limit, and the queue has the option `drop_transient` (A1).
    MEMORY = "memory"
    #: The body of the message was only on disk, and is damaged there.
    DAMAGED = "damaged"
    #: The queue refused the message, and no publisher was informed: for example, the message was a dead letter.
    REFUSED = "refused"
    #: A dead letter came to a queue in which it had died before, and no consumer had rejected it since then.
    CYCLE = "cycle"
    #: The message died but was not dead-lettered, because the queue had already dead-lettered another copy of it to the
    #: same target. The message is also counted under the reason of its death.
    COPY = "copy"


class Address:
    """The exchange, the routing key and the mandatory flag of a published message."""

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
        # Number of queues and of `Journal.hold` calls that keep the message.
        self.holders = 0
        self.queues: list[int] = []
        # Number that identifies the message on disk; 0 if the message does not have to be on disk.
        self.number = 0
        # Whether a batch of records for the disk has included the message.
        self.is_taken = False
        self.is_written = False
        # The confirm, if it waits for the disk; otherwise None.
        self.completion: Completion | None = None
        # Whether the message has to be on disk while any queue has it, even a queue that is not durable.
        self.is_spooled = False
        # Whether the body will be removed from memory when the message is on disk.
        self.is_evicting = False
        # Whether the body is damaged on disk, and no longer in memory.
        self.is_lost = False
        # Entries that could not be dropped to free memory; tried again if a queue gets, loses or reads the message.
        self.aside: Sequence[QueueEntry] = ()


class StoredMessage:
    """A message. Its content never changes. Its body can be on disk and not in memory.

    Args:
        target: the exchange and routing key with which the message was published.
        header: the payload of its content header frame.
    """

    __slots__ = ("body", "dead_lettered", "header", "record", "size", "target")

    #: The queues that have dead-lettered a copy of the message, each with the exchange and routing key of the dead
    #: letter. All copies since the last rejection share this set. The first dead letter sets the attribute.
    dead_lettered: set[tuple[str, str, str]]

    def __init__(self, target: Address, header: bytes, body: bytes) -> None:
        self.target = target
        self.header = header
        # The body of the message; None while the body is only on disk.
        self.body: bytes | None = body
        # Body bytes. Thresholds and maxima use this size.
        self.size = len(body)
        # The journal's data about the message; None if there is no journal, or the journal does not have the message.
        self.record: Record | None = None

    @property
    def is_lost(self) -> bool:
        return self.record is not None and self.record.is_lost

    @property
    def footprint(self) -> int:
        """Approximate bytes of memory of a message that waits for a transaction or for room, and is in no queue yet."""
        return self.size + len(self.header) + 512

    @property
    def is_persistent(self) -> bool:
        """Whether the message survives a restart of the broker in durable queues."""
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
    """The confirm of one message. A flow state that is ON (C5), the disk or an operator can hold (delay) the confirm.

    Args:
        tag: the publish sequence number of the message on its channel.
        complete: called with the tag when the last hold is released after `arm`.
    """

    __slots__ = ("_armed", "_complete", "holds", "tag")

    def __init__(self, tag: int, complete: Callable[[int], None]) -> None:
        self.tag = tag
        self._complete = complete
        self.holds = 0
        # Whether every destination queue has the message. Until then the confirm is not sent, even without holds.
        self._armed = False

    def release(self) -> None:
        self.holds -= 1
        if not self.holds and self._armed:
            self._complete(self.tag)

    def arm(self) -> bool:
        """Record that all destination queues have the message. Return True if there are no holds."""
        self._armed = True
        return not self.holds


class QueueEntry:
    """A message in one queue."""

    __slots__ = ("is_gone", "is_unacked", "message", "queue", "redelivered", "sequence")

    def __init__(self, queue: QueueView, message: StoredMessage, sequence: int) -> None:
        self.queue = queue
        self.message = message
        # Place of the entry in the order of the queue. A requeue does not change this number.
        self.sequence = sequence
        self.redelivered = False
        # Whether the message was delivered, and is not settled yet.
        self.is_unacked = False
        # Whether the entry has left, or is marked because it will leave soon. An ack of such an entry changes nothing.
        self.is_gone = False


class Consumer(Protocol):
    """A consumer, to which a queue delivers messages."""

    #: Whether the queue delivers to the consumer. The `Dispatcher` sets this flag.
    is_active: bool

    @property
    def no_ack(self) -> bool:
        """Whether a delivery settles the message."""

    @property
    def can_take(self) -> bool:
        """Whether the consumer has credit, its channel delivers, and its connection accepts more bytes."""

    def deliver(self, entry: QueueEntry) -> None:
        """Deliver a message to the consumer. The caller has checked `can_take`."""

    def cancelled_by_queue(self) -> None:
        """End the consumer, because its queue was deleted."""


class BodyPager(Protocol):
    """Decides which bodies of one queue stay in memory (A2)."""

    #: Body bytes of the entries whose bodies are in memory.
    size: int

    def add(self, entry: QueueEntry) -> None:
        """Record that an entry was added to the queue."""

    def came(self, entry: QueueEntry) -> None:
        """Record that the body of a ready entry is in memory again."""

    def lend(self, entry: QueueEntry) -> None:
        """Record that an entry with its body in memory was delivered, and is now unacked."""

    def ready_again(self, entry: QueueEntry) -> None:
        """Record that an entry is ready again."""

    def forget(self, entry: QueueEntry) -> None:
        """Record that an entry has left the queue."""

    def evict(self, size: int, count: int | None = None) -> None:
        """Remove bodies from memory until at most `size` bytes and `count` bodies remain (``None``: any number)."""


class DroppableEntries(Protocol):
    """The entries of one queue that may be dropped if memory exceeds its limit (A1)."""

    def add(self, entry: QueueEntry) -> None:
        """Record that an entry was added at the end of the queue."""

    def ready_again(self, entry: QueueEntry) -> None:
        """Record that an entry is ready again, or is no longer in `Record.aside`."""

    def forget(self, entry: QueueEntry) -> None:
        """Record that an entry has left the queue, or is now unacked."""

    def __len__(self) -> int: ...

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Yield the droppable entries, in the order of the queue."""

    def offer(self, entry: QueueEntry) -> Sequence[QueueEntry]:
        """Return all entries of the message if they can be dropped together. If not, move `entry` to `Record.aside`."""


class QueueContents(Protocol):
    """The ready, unacked and leaving entries of a queue, see `contents.py`."""

    #: Number and body bytes of all messages: ready, unacked and leaving (D6).
    depth: int
    size: int
    #: The entries that are removed a slice at a time (see `contents.py`), and their body bytes.
    leaving: deque[QueueEntry]
    leaving_size: int

    @property
    def ready_count(self) -> int:
        """The number of ready messages."""

    @property
    def ready_size(self) -> int:
        """Body bytes of the ready messages."""

    def first(self) -> QueueEntry | None:
        """Return the oldest ready entry; ``None`` if there is none."""

    def oldest(self) -> QueueEntry | None:
        """Return the oldest of the ready and the unacked entries; ``None`` if there is none."""

    def reaches_unacked(self, count: int, size: int) -> bool:
        """Whether the oldest entries that add up to `count` messages and `size` bytes include an unacked entry."""

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Yield the ready and the unacked entries in the order of the queue."""


class QueueDropping(Protocol):
    """Drops messages of a queue."""

    #: Whether the queue dead-letters dropped messages.
    has_letters: bool

    def drop(self, entry: QueueEntry, reason: DropReason) -> None:
        """Drop an entry, and dead-letter its message if the queue has a dead-letter exchange."""

    def drop_for_memory(self, entry: QueueEntry) -> None:
        """Drop a ready entry because memory exceeds its limit."""


class QueueDispatcher(Protocol):
    """Gives the messages of a queue to its consumers."""

    consumers: dict[Consumer, None]
    delivered: int

    def settle(self, entry: QueueEntry, *, acked: bool) -> None:
        """Settle a delivered entry that was acked, or rejected without requeue."""

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put delivered entries back at their places in the queue."""

    def pause(self, change: int) -> None:
        """Change the pause counter by 1 or -1. The queue delivers no messages while the counter is not 0."""

    def dispatch(self, drops: int | None = None) -> None:
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
        """Body bytes of the messages: ready, unacked and leaving (D6)."""

    @property
    def contents(self) -> QueueContents:
        """The ready, unacked and leaving entries of the queue."""

    @property
    def dropping(self) -> QueueDropping:
        """The object that drops messages of the queue."""

    @property
    def dispatcher(self) -> QueueDispatcher:
        """The object that gives messages to the queue's consumers."""

    @property
    def thresholds(self) -> Sequence[Thresholds]:
        """The flow thresholds that are set."""

    @property
    def pager(self) -> BodyPager | None:
        """The object that decides which bodies stay in memory; ``None`` if the queue never evicts bodies."""

    @property
    def droppable(self) -> DroppableEntries | None:
        """The entries that may be dropped to free memory; ``None`` if no entry may be dropped."""

    def trim(self, drops: int) -> None:
        """After a requeue, drop the messages beyond the maximum. See `Queue.trim`."""
