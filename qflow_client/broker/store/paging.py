"""Decides which bodies stay in memory (A2), and which messages are dropped at the memory limit (A1). No I/O.

To evict a body means to remove the body from memory as soon as it is on disk. Each queue with the policy `flow_to_disk`
has a `Pager`. A pager first evicts the bodies of unacked entries. It then evicts bodies that were in memory when their
entries were added to the pager, and finally all other bodies. If memory exceeds three quarters of the limit, `relieve`
evicts bodies from the largest of these queues. If memory is still above the limit, `relieve` drops transient messages
from queues with the option `drop_transient`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from qflow_client.broker.core.entries import DroppableEntries, QueueEntry, QueueView, StoredMessage

__all__ = ["Droppable", "Pager", "bring_back", "level", "relieve"]


def level(sizes: Iterable[int], total: int) -> int:
    """Return the limit to which larger sizes must be reduced, so that the sum of all sizes is at most `total`."""
    left = sorted(sizes)
    while left and left[0] * len(left) <= total:
        total -= left.pop(0)
    return total // len(left) if left else total


class Pager:
    """The entries of one queue whose bodies can still be evicted, and the order in which this is done."""

    __slots__ = ("_ahead", "_evict", "_fresh", "_lent", "size")

    def __init__(self, evict: Callable[[StoredMessage], None]) -> None:
        self._evict = evict
        # Unacked entries. In this dictionary, as in `_fresh` and `_ahead`, the last entry is evicted first.
        self._lent: dict[QueueEntry, None] = {}
        # Ready entries whose bodies were in memory when the entries were added to the pager.
        self._fresh: dict[QueueEntry, None] = {}
        # Ready entries whose bodies were read ahead from disk, or that were unacked earlier.
        self._ahead: dict[QueueEntry, None] = {}
        # Total body bytes of the entries in the three dictionaries.
        self.size = 0

    def __len__(self) -> int:
        return len(self._lent) + len(self._fresh) + len(self._ahead)

    def add(self, entry: QueueEntry) -> None:
        self._fresh[entry] = None
        self.size += entry.message.size

    def came(self, entry: QueueEntry) -> None:
        if entry not in self._ahead and entry not in self._fresh:
            self._ahead[entry] = None
            self.size += entry.message.size

    def lend(self, entry: QueueEntry) -> None:
        self.forget(entry)
        self._lent[entry] = None
        self.size += entry.message.size

    def ready_again(self, entry: QueueEntry) -> None:
        self.forget(entry)
        if entry.message.body is not None:
            self.came(entry)

    def forget(self, entry: QueueEntry) -> None:
        for each in (self._lent, self._ahead, self._fresh):
            if entry in each:
                del each[entry]
                self.size -= entry.message.size
                return

    def evict(self, size: int, count: int | None = None) -> None:
        """Evict bodies until at most `size` bytes remain, in at most `count` bodies (``None`` for any number)."""
        for each in (self._lent, self._fresh, self._ahead):
            while each and (self.size > size or (count is not None and len(self) > count)):
                entry = each.popitem()[0]
                self.size -= entry.message.size
                self._evict(entry.message)


class Droppable:
    """The ready, non-persistent entries of a queue, which may be dropped if memory exceeds `Account.limit` (A1).

    An entry that cannot be dropped now is moved to `Record.aside` of its message. `bring_back` moves the entry back.
    """

    __slots__ = ("_entries", "_is_in_order")

    def __init__(self) -> None:
        self._entries: dict[QueueEntry, None] = {}
        # Whether the entries are in the order of the queue.
        self._is_in_order = True

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: QueueEntry) -> None:
        """Add an entry, and call `bring_back` for its message. An entry with a persistent message is ignored."""
        if not entry.message.is_persistent:
            self._entries[entry] = None
            bring_back(entry.message)

    def ready_again(self, entry: QueueEntry) -> None:
        self._is_in_order = False
        self.add(entry)

    def forget(self, entry: QueueEntry) -> None:
        self._entries.pop(entry, None)

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Return an iterator of the entries in the order of the queue. It skips entries that were removed meanwhile."""
        if not self._is_in_order:
            self._entries = dict.fromkeys(sorted(self._entries, key=lambda entry: entry.sequence))
            self._is_in_order = True
        return (entry for entry in tuple(self._entries) if entry in self._entries)

    def offer(self, entry: QueueEntry) -> Sequence[QueueEntry]:
        """Remove an entry. If its message cannot be dropped now, put the entry into `Record.aside`, see `bring_back`.

        Return all entries of the message, which the caller then drops together. Return no entries if the body is not in
        memory or is being evicted, or if another queue must keep the message or has not offered its entry yet.
        """
        message, record = entry.message, entry.message.record
        assert record is not None
        del self._entries[entry]
        given = [each for each in record.aside if _giver(each) is not None]
        given.append(entry)
        if message.body is None or record.is_evicting or len(given) < record.holders:
            record.aside = given
            return ()
        record.aside = ()
        return given


def bring_back(message: StoredMessage) -> None:
    """Move a message's entries from `Record.aside` back to the `Droppable` of each entry's queue."""
    record = message.record
    if record is not None and record.aside:
        aside, record.aside = record.aside, ()
        for entry in aside:
            giver = _giver(entry)
            if giver is not None:
                giver.ready_again(entry)


def _giver(entry: QueueEntry) -> DroppableEntries | None:
    """Return the `Droppable` of an entry's queue, or ``None`` if the entry must not be dropped now."""
    return None if entry.is_gone or entry.is_unacked else entry.queue.droppable


class Account(Protocol):
    """The part of the `Journal` that `relieve` uses."""

    limit: int
    evict_above: int
    MAX_BATCH: int

    @property
    def held(self) -> int:
        """Bytes of memory in use, without the bodies that are being evicted."""

    def divide(self) -> None:
        """Start a new batch for the disk if the current batch is full."""


def relieve(account: Account, queues: Iterable[QueueView]) -> None:
    """Evict bodies if memory exceeds `Account.evict_above` (A2 A3). Drop messages if memory exceeds the limit (A1)."""
    if account.held > account.evict_above:
        _evict(account, queues)
    if account.held > account.limit:
        _drop_transient(account, queues)


def _evict(account: Account, queues: Iterable[QueueView]) -> None:
    """Evict bodies from the queues with the most body bytes in memory."""
    pagers = [queue.pager for queue in queues if queue.pager is not None]
    while (excess := account.held - account.evict_above) > 0:
        sizes = [pager.size for pager in pagers]
        total = sum(sizes)
        if not total:
            break
        # Scale the excess, because a message in several queues has one body in memory, but each pager counts the body.
        less = min(excess, account.MAX_BATCH) * max(total, account.held) // account.held
        share = level(sizes, max(0, total - less))
        for pager in pagers:
            pager.evict(share)
        account.divide()


def _drop_transient(account: Account, queues: Iterable[QueueView]) -> None:
    """Drop ready, transient messages of queues with `drop_transient` until memory is within the limit (A1).

    In each round, drop the oldest droppable message of the queue with the most ready bytes. A message in several queues
    is dropped only if all these queues allow the drop. Otherwise its body would stay in memory for the other queues. A
    message whose body is being evicted or was evicted is not dropped, because this would free almost no memory.
    """
    givers = [
        (-queue.contents.ready_size, number, queue, queue.droppable.oldest_first())
        for number, queue in enumerate(queues)
        if queue.droppable
    ]
    heapq.heapify(givers)
    while givers and account.held > account.limit:
        _, number, queue, entries = givers[0]
        entry = next(entries, None)
        if entry is None:
            heapq.heappop(givers)
            continue
        assert queue.droppable is not None
        for each in queue.droppable.offer(entry):
            each.queue.dropping.drop_for_memory(each)
        heapq.heapreplace(givers, (-queue.contents.ready_size, number, queue, entries))
