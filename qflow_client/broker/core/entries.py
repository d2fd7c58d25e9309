"""What queues hold: messages, their places in queues, and their confirms.

One `StoredMessage` is shared by all queues that hold it. Each queue has a `QueueEntry` of its own for it, which keeps
the place in that queue's order. A `Completion` is the confirm of one publish; it is sent when the last queue releases
it. Nothing here decides: queues, the journal and channels change these objects, and the fields say which of them does.

The protocols at the end are how those below a queue see it and what it holds: an overflow policy, a pager and a
delivery know `QueueView`, never the class `Queue`, so that imports lead in one direction only.
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
    "Owner",
    "QueueEntry",
    "QueueView",
    "Record",
    "StoredMessage",
]


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
    #: Its body was on disk only, and is damaged there (E10).
    DAMAGED = "damaged"
    #: The queue was full, and the sender was not informed: a dead letter, or a publish without confirms.
    REFUSED = "refused"
    #: It came as a dead letter, had died here before, and no consumer had rejected it since.
    CYCLE = "cycle"
    #: It died here and was not dead-lettered, because another copy of the same message had gone from here to the same
    #: target. It is counted by the reason of its death, too.
    COPY = "copy"


class Address:
    """Where a message is published to."""

    __slots__ = ("exchange", "immediate", "mandatory", "names", "routing_key")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool = False, immediate: bool = False) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.mandatory = mandatory
        self.immediate = immediate
        # The exchange and the routing key as short strings.
        self.names = short(exchange) + short(routing_key)


class Record:
    """What the journal knows of a message."""

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
        # Queues that it is in, and the numbers of those of them that survive the broker, if it does.
        self.holders = 0
        self.queues: list[int] = []
        # Its number on disk, above those of all that came before; 0 if it need not be there.
        self.number = 0
        # Whether a batch has it, or had; and whether it is on disk.
        self.is_taken = False
        self.is_written = False
        # Its confirm, which waits for the disk; None if there is none.
        self.completion: Completion | None = None
        # Whether it is to be on disk as long as any queue has it; and whether memory is to be rid of its body then.
        self.is_spooled = False
        self.is_evicting = False
        # Whether its body is damaged on disk, and in memory no more.
        self.is_lost = False
        # Its entries that could not be dropped when memory was beyond its limit, until that may have changed.
        self.aside: Sequence[QueueEntry] = ()


class StoredMessage:
    """A message, shared by all queues that have it. What was published never changes, but the body may be on disk only.

    Args:
        target: where it was published to.
        header: the payload of its content header frame, as it came.
        body: the content.
    """

    __slots__ = ("body", "dead_lettered", "header", "record", "size", "target")

    #: The queues that have dead-lettered a copy of it, each with the exchange and the routing key. All copies share the
    #: set. Only there if a queue has.
    dead_lettered: set[tuple[str, str, str]]

    def __init__(self, target: Address, header: bytes, body: bytes) -> None:
        self.target = target
        self.header = header
        # None while it is on disk only.
        self.body: bytes | None = body
        # Body bytes, which is what thresholds and maxima are about.
        self.size = len(body)
        # What the journal knows of it; None if there is no journal, or no queue has it.
        self.record: Record | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its body was on disk only, and is damaged there."""
        return self.record is not None and self.record.is_lost

    @property
    def footprint(self) -> int:
        """Bytes that it takes in memory while no queue has it, about."""
        return self.size + len(self.header) + 512

    @property
    def is_persistent(self) -> bool:
        """Whether it is to survive the broker, in queues that do."""
        return is_persistent(self.header)

    @property
    def ttl(self) -> int | None:
        """Milliseconds that it may wait in a queue; ``None`` for ever."""
        return time_to_live(self.header) if self.header[12] & HAS_EXPIRATION else None

    @property
    def properties(self) -> pamqp.commands.Basic.Properties:
        """The basic properties, decoded on every use."""
        return decode_properties(self.header)


class Completion:
    """The confirm of one message, held back by flow states that were ON when it came (C5), by the disk or an operator.

    Args:
        tag: the publish sequence number on its channel.
        complete: called with the tag when the last hold is gone.
    """

    __slots__ = ("_armed", "_complete", "holds", "tag")

    def __init__(self, tag: int, complete: Callable[[int], None]) -> None:
        self.tag = tag
        self._complete = complete
        # How many of these hold it.
        self.holds = 0
        # Set when every destination has the message; before, no number of holds means anything.
        self._armed = False

    def release(self) -> None:
        """One of those that hold it releases it."""
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

    __slots__ = ("is_gone", "is_unacked", "message", "queue", "redelivered", "sequence")

    def __init__(self, queue: QueueView, message: StoredMessage, sequence: int) -> None:
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


class Owner(Protocol):
    """The connection that an exclusive queue belongs to."""

    @property
    def name(self) -> str:
        """For people."""


class Consumer(Protocol):
    """A queue gives messages to its consumers."""

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
        """The queue is deleted, and the consumer with it."""


class BodyPager(Protocol):
    """Decides which bodies of one queue stay in memory (A2)."""

    #: Body bytes of the entries whose bodies are in memory.
    size: int

    def add(self, entry: QueueEntry) -> None:
        """An entry has come."""

    def came(self, entry: QueueEntry) -> None:
        """An entry to be delivered has its body again."""

    def lend(self, entry: QueueEntry) -> None:
        """A consumer has an entry; its body is in memory."""

    def take_back(self, entry: QueueEntry) -> None:
        """An entry is to be delivered again."""

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue."""

    def evict(self, size: int, count: int | None = None) -> None:
        """Let bodies go until at most so many bytes, and so many bodies, are left."""


class DroppableEntries(Protocol):
    """The entries of one queue that may be dropped if memory is beyond its limit (A1)."""

    def add(self, entry: QueueEntry) -> None:
        """An entry has come, after all others."""

    def take_back(self, entry: QueueEntry) -> None:
        """An entry is to be delivered again, or looked at again."""

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue, or a consumer has it."""

    def __len__(self) -> int: ...

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Those that there are now, in the queue's order."""

    def offer(self, entry: QueueEntry) -> Sequence[QueueEntry]:
        """All entries of the message of one of them, if they can be dropped together; else none."""


class QueueContents(Protocol):
    """What is in a queue."""

    #: Messages and body bytes, ready and unacked together (D6).
    depth: int
    size: int

    @property
    def ready_count(self) -> int:
        """Messages to be delivered."""

    @property
    def ready_size(self) -> int:
        """Their body bytes."""

    def oldest_first(self) -> Iterator[QueueEntry]:
        """All entries, ready and unacked, in the queue's order."""


class QueueDropping(Protocol):
    """Drops messages of a queue."""

    #: Whether what is dropped is dead-lettered.
    has_letters: bool

    def drop_oldest(self) -> None:
        """Drop the oldest entry, even one that a consumer has. There must be one."""

    def drop_head(self) -> None:
        """Drop the oldest ready entry. There must be one."""

    def drop_for_memory(self, entry: QueueEntry) -> None:
        """Drop a ready entry because memory is beyond its limit."""


class QueueDispatcher(Protocol):
    """Gives the messages of a queue to its consumers."""

    #: All consumers.
    consumers: dict[Consumer, None]
    #: Deliveries so far.
    delivered: int

    def settle(self, entry: QueueEntry, *, acked: bool) -> None:
        """A delivered entry was acked, or rejected for good."""

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put delivered entries back in their places."""

    def pause(self, change: int) -> None:
        """Deliver nothing until as many calls had -1 as had 1."""

    def dispatch(self) -> None:
        """Deliver what can be delivered."""


class QueueView(Protocol):
    """A queue as its overflow policy, its observers and its deliveries know it."""

    @property
    def name(self) -> str:
        """Of the queue."""

    @property
    def depth(self) -> int:
        """Messages, ready and unacked together (D6)."""

    @property
    def size(self) -> int:
        """Their body bytes."""

    @property
    def contents(self) -> QueueContents:
        """What is in it."""

    @property
    def dropping(self) -> QueueDropping:
        """Drops messages."""

    @property
    def dispatcher(self) -> QueueDispatcher:
        """Gives messages to consumers."""

    @property
    def thresholds(self) -> Sequence[Thresholds]:
        """The families of marks that are set."""

    @property
    def pager(self) -> BodyPager | None:
        """Decides which bodies stay in memory; ``None`` if all of them do."""

    @property
    def droppable(self) -> DroppableEntries | None:
        """The entries that may be dropped for memory; ``None`` if none may."""

    def refusal(self, size: int, count: int = 1, largest: int | None = None) -> str | None:
        """The reason why messages may not enter now; ``None`` if they may."""

    def trim(self) -> None:
        """Drop what is beyond the maximum, if the overflow policy drops messages that are in the queue."""
