"""`Dispatcher` gives the messages of one queue to its consumers, sans-I/O.

The queue delivers only to active consumers. A consumer that cannot take messages becomes inactive. When the consumer
can perhaps take messages again, its channel calls `Dispatcher.wake`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.dropping import Dropping
from qflow_client.broker.core.entries import Consumer, DropReason, QueueEntry
from qflow_client.broker.core.storage import Storage

__all__ = ["Dispatcher"]


class Dispatcher:
    """Gives the ready messages of one queue to its consumers, in turn.

    Args:
        storage: reads bodies that are only on disk; ``None`` if there is no journal.
        single_active: whether only the oldest consumer gets messages.
    """

    #: Maximum number of messages that one call of `deliver` delivers while several consumers are active.
    AT_ONCE = 5000

    __slots__ = (
        "_contents",
        "_dropping",
        "_pauses",
        "_single_active",
        "_storage",
        "acked",
        "active",
        "consumers",
        "delivered",
        "exclusive",
        "was_used",
    )

    def __init__(self, contents: Contents, dropping: Dropping, storage: Storage | None, *, single_active: bool) -> None:
        self._contents = contents
        self._dropping = dropping
        self._storage = storage
        self._single_active = single_active
        # An `OrderedDict` finds its first consumer in constant time, even after many removals. A dict does not.
        self.consumers: dict[Consumer, None] = OrderedDict()
        # Active consumers. The first active consumer gets the next message.
        self.active: OrderedDict[Consumer, None] = OrderedDict()
        self.exclusive: Consumer | None = None
        # Whether the queue has ever had a consumer. An auto-delete queue is not deleted before its first consumer ends.
        self.was_used = False
        # Number of closed channels that still return deliveries to the queue. The queue delivers only if there is none.
        self._pauses = 0
        self.delivered = 0
        self.acked = 0

    # Consumers.

    def add(self, consumer: Consumer, *, exclusive: bool) -> None:
        """Add a consumer. The caller calls `dispatch` afterwards."""
        self.consumers[consumer] = None
        self.was_used = True
        if exclusive:
            self.exclusive = consumer
        self.wake(consumer)

    def wake(self, consumer: Consumer) -> None:
        """Make a consumer active, because it can perhaps take messages again."""
        if not consumer.is_active and consumer in self.consumers and self._may_serve(consumer):
            consumer.is_active = True
            self.active[consumer] = None

    def _may_serve(self, consumer: Consumer) -> bool:
        return not self._single_active or next(iter(self.consumers)) is consumer

    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer. Its unsettled messages stay unacked. The caller calls `dispatch` afterwards."""
        self.consumers.pop(consumer, None)
        if consumer.is_active:
            consumer.is_active = False
            self.active.pop(consumer, None)
        if self.exclusive is consumer:
            self.exclusive = None
        if self._single_active and self.consumers:
            self.wake(next(iter(self.consumers)))

    def cancel_all_in_steps(self) -> Iterator[None]:
        """Cancel all consumers, because the queue is deleted. Each iteration cancels one consumer."""
        consumers = tuple(self.consumers)
        self.consumers.clear()
        self.active.clear()
        for consumer in consumers:
            consumer.cancelled_by_queue()
            yield

    # Deliveries.

    @property
    def is_paused(self) -> bool:
        """Whether closed channels still return deliveries to the queue."""
        return self._pauses > 0

    def pause(self, change: int) -> None:
        """Change the pause counter by 1 or -1. When the counter is 0 again, the caller calls `dispatch`."""
        self._pauses += change
        if self._dropping.has_surplus:
            self._dropping.wake()

    def catch_up(self) -> bool:
        """Drop expired messages. Return False if more must be dropped now, or if closed channels still return messages.

        In these cases `take` could return a message too early, or None although the queue has ready messages.
        """
        self._dropping.expire()
        return not self._pauses and not self._dropping.is_behind

    def dispatch(self, drops: int | None = None) -> None:
        """Drop expired messages, and deliver as many messages as the consumers take, in turn."""
        if self._dropping.expiry is not None:
            self._dropping.expire(drops)
        self.deliver()

    def deliver(self) -> None:
        """Deliver as many messages as the consumers take, without dropping expired messages first.

        After `AT_ONCE` messages, the method ends, and `Queue.tick` calls it again soon. A single consumer does not need
        this limit, because `Output.takes_deliveries` limits the deliveries to each connection.
        """
        contents, storage, dropping = self._contents, self._storage, self._dropping
        if self._pauses or dropping.has_surplus or (dropping.expiry is not None and dropping.expiry.is_behind):
            return
        ready, active = contents.ready, self.active
        if storage is not None and not storage.may_lack:
            storage = None
        left = self.AT_ONCE
        while ready and active and left:
            consumer = next(iter(active))
            if not consumer.can_take:
                del active[consumer]
                consumer.is_active = False
                continue
            if storage is not None and ready[0].message.body is None and not ready[0].is_gone:
                storage.read_ahead(self.dispatch)
                break
            entry = ready.popleft()
            if entry.is_gone:
                contents.gaps -= 1
                continue
            if len(active) > 1:
                active.move_to_end(consumer)
                left -= 1
            self.delivered += 1
            if consumer.no_ack:
                consumer.deliver(entry)
                contents.left(entry)
            else:
                contents.lend(entry)
                consumer.deliver(entry)
        if not left:
            dropping.wake()

    def take(self, *, no_ack: bool) -> QueueEntry | None:
        """Take the next ready entry, unacked unless `no_ack`. ``None`` if none is ready, or if `Dropping.is_behind`."""
        contents, dropping = self._contents, self._dropping
        dropping.expire()
        entry = contents.first()
        if entry is None or dropping.is_behind:
            return None
        contents.ready.popleft()
        self.delivered += 1
        if self._storage is not None:
            self._storage.hold_missing(entry.message)
        if no_ack:
            contents.left(entry)
        else:
            contents.lend(entry)
        return entry

    def settle(self, entry: QueueEntry, *, acked: bool) -> None:
        if entry.is_gone:
            return
        if acked:
            self.acked += 1
            contents = self._contents
            contents.remove_unacked(entry)
            contents.left(entry)
        else:
            self._dropping.drop(entry, DropReason.REJECTED)

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put delivered entries back at their places in the queue. The caller calls `dispatch` afterwards."""
        self._contents.requeue(entries)
