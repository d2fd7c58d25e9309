"""Which bodies of a queue are in memory, sans-I/O: what is evicted first (A2), and what is dropped at the limit (A1).

A `Pager` has the entries whose bodies are in memory. It evicts those that consumers have first, then the newest, and
those that were read ahead last. `relieve` evicts from all queues in equal parts above three quarters of the limit, and
drops transient messages, where a policy allows it, above the limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from qflow_client.broker.core.entries import DroppableEntries, QueueEntry, QueueView, StoredMessage

__all__ = ["Droppable", "Pager", "bring_back", "level", "relieve"]


def level(sizes: Iterable[int], total: int) -> int:
    """What each may have at most, so that all together have no more than `total`: the small keep what they have.

    Args:
        sizes: what each has.
        total: for all of them.
    """
    left = sorted(sizes)
    while left and left[0] * len(left) <= total:
        total -= left.pop(0)
    return total // len(left) if left else total


class Pager:
    """The entries of a queue whose bodies are in memory.

    Args:
        evict: lets the body of a message go as soon as it is on disk.
    """

    __slots__ = ("_ahead", "_evict", "_fresh", "_lent", "size")

    def __init__(self, evict: Callable[[StoredMessage], None]) -> None:
        self._evict = evict
        # Those that consumers have, those that came and were in memory since, and those that were read ahead. The last
        # of each is the one to be wanted last.
        self._lent: dict[QueueEntry, None] = {}
        self._fresh: dict[QueueEntry, None] = {}
        self._ahead: dict[QueueEntry, None] = {}
        # Body bytes of all of them.
        self.size = 0

    def __len__(self) -> int:
        return len(self._lent) + len(self._fresh) + len(self._ahead)

    def add(self, entry: QueueEntry) -> None:
        """An entry has come."""
        self._fresh[entry] = None
        self.size += entry.message.size

    def came(self, entry: QueueEntry) -> None:
        """An entry to be delivered has its body again."""
        if entry not in self._ahead and entry not in self._fresh:
            self._ahead[entry] = None
            self.size += entry.message.size

    def lend(self, entry: QueueEntry) -> None:
        """A consumer has an entry; its body is in memory."""
        self.forget(entry)
        self._lent[entry] = None
        self.size += entry.message.size

    def take_back(self, entry: QueueEntry) -> None:
        """An entry is to be delivered again."""
        self.forget(entry)
        if entry.message.body is not None:
            self.came(entry)

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue."""
        for each in (self._lent, self._ahead, self._fresh):
            if entry in each:
                del each[entry]
                self.size -= entry.message.size
                return

    def evict(self, size: int, count: int | None = None) -> None:
        """Let bodies go until no more than so many bytes are left, and no more than so many of them.

        First what consumers have, then what came last.
        """
        for each in (self._lent, self._fresh, self._ahead):
            while each and (self.size > size or (count is not None and len(self) > count)):
                entry = each.popitem()[0]
                self.size -= entry.message.size
                self._evict(entry.message)


class Droppable:
    """The entries of a queue that may be dropped if memory is beyond its limit (A1): to be delivered, not persistent.

    Those that were looked at and could not be dropped are set aside with their messages, until that may have changed.
    """

    __slots__ = ("_entries", "_is_in_order")

    def __init__(self) -> None:
        self._entries: dict[QueueEntry, None] = {}
        # Whether they are in the queue's order.
        self._is_in_order = True

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: QueueEntry) -> None:
        """An entry has come, after all others; it is passed over if its message is persistent."""
        if not entry.message.is_persistent:
            self._entries[entry] = None
            bring_back(entry.message)

    def take_back(self, entry: QueueEntry) -> None:
        """An entry is to be delivered again, or looked at again."""
        self._is_in_order = False
        self.add(entry)

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue, or a consumer has it."""
        self._entries.pop(entry, None)

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Those that there are now, in the queue's order, but for what has left before its turn."""
        if not self._is_in_order:
            self._entries = dict.fromkeys(sorted(self._entries, key=lambda entry: entry.sequence))
            self._is_in_order = True
        return (entry for entry in tuple(self._entries) if entry in self._entries)

    def offer(self, entry: QueueEntry) -> Sequence[QueueEntry]:
        """One of them is to be dropped, and is set aside if that is in vain.

        Returns:
            All entries of its message, which are to be dropped together; none if its body is not in memory, or about to
            go, or if a queue has it that does not give it, or was not asked yet.
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
    """The entries of a message that were set aside may be dropped now."""
    record = message.record
    if record is not None and record.aside:
        aside, record.aside = record.aside, ()
        for entry in aside:
            giver = _giver(entry)
            if giver is not None:
                giver.take_back(entry)


def _giver(entry: QueueEntry) -> DroppableEntries | None:
    """Where an entry belongs that may be dropped still; ``None`` if it may not."""
    return None if entry.is_gone or entry.is_unacked else entry.queue.droppable


class Account(Protocol):
    """The account of memory that `relieve` keeps within its limit."""

    #: Bytes of messages in memory; and the bytes above which bodies are evicted.
    limit: int
    evict_above: int
    #: Bytes that go to disk at once.
    MAX_BATCH: int

    @property
    def held(self) -> int:
        """Bytes in memory but for what is about to go."""

    def divide(self) -> None:
        """What was noted so far may go to disk."""


def relieve(account: Account, queues: Iterable[QueueView]) -> None:
    """Keep the messages in memory within the limit: bodies go to disk (A2 A3); beyond it some are dropped (A1).

    Args:
        account: of memory.
        queues: all that there are.
    """
    if account.held > account.evict_above:
        _evict(account, queues)
    if account.held > account.limit:
        _drop_transient(account, queues)


def _evict(account: Account, queues: Iterable[QueueView]) -> None:
    """Let bodies go to disk, in equal parts."""
    pagers = [queue.pager for queue in queues if queue.pager is not None]
    while (excess := account.held - account.evict_above) > 0:
        sizes = [pager.size for pager in pagers]
        total = sum(sizes)
        if not total:
            break
        # What several queues have is in memory once, and counts at each of them.
        less = min(excess, account.MAX_BATCH) * max(total, account.held) // account.held
        share = level(sizes, max(0, total - less))
        for pager in pagers:
            pager.evict(share)
        account.divide()


def _drop_transient(account: Account, queues: Iterable[QueueView]) -> None:
    """Drop what is not persistent and no consumer has, where the policy says so, until the limit is kept (A1).

    The queue with most to be delivered gives first, the oldest first. A message that is in other queues too goes only
    if all of them give it: else nothing would be gained. Nor is it from what is on disk, or on its way there.
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
