"""Decides which bodies stay in memory (A2), and which messages are dropped at the memory limit (A1). No I/O.

A `Pager` has the entries of a queue whose bodies are in memory. It first evicts the bodies of unacked entries, then the
newest bodies, and last the bodies that were read ahead. If memory exceeds three quarters of the limit, `relieve` evicts
bodies of all queues in equal parts. If memory exceeds the limit, `relieve` also drops transient messages where a policy
allows it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from qflow_client.broker.core.entries import DroppableEntries, QueueEntry, QueueView, StoredMessage

__all__ = ["Droppable", "Pager", "bring_back", "level", "relieve"]


def level(sizes: Iterable[int], total: int) -> int:
    """Return a limit. If larger sizes are reduced to this limit, the sum of all sizes is at most `total`.

    Args:
        sizes: present sizes.
        total: maximum sum.
    """
    left = sorted(sizes)
    while left and left[0] * len(left) <= total:
        total -= left.pop(0)
    return total // len(left) if left else total


class Pager:
    """The entries of a queue whose bodies are in memory.

    Args:
        evict: removes the body of a message from memory as soon as it is on disk.
    """

    __slots__ = ("_ahead", "_evict", "_fresh", "_lent", "size")

    def __init__(self, evict: Callable[[StoredMessage], None]) -> None:
        self._evict = evict
        # Unacked entries, new entries whose bodies were never removed, and entries that were read ahead. In each of the
        # three, the last entry is needed last.
        self._lent: dict[QueueEntry, None] = {}
        self._fresh: dict[QueueEntry, None] = {}
        self._ahead: dict[QueueEntry, None] = {}
        # Total body bytes of these entries.
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
        """Remove bodies from memory until at most `size` bytes and `count` bodies are left.

        The bodies of unacked entries are removed first, then the newest bodies.
        """
        for each in (self._lent, self._fresh, self._ahead):
            while each and (self.size > size or (count is not None and len(self) > count)):
                entry = each.popitem()[0]
                self.size -= entry.message.size
                self._evict(entry.message)


class Droppable:
    """The ready, non-persistent entries of a queue, which may be dropped if memory exceeds its limit (A1).

    An entry that cannot be dropped now is set aside with its message, until it may be droppable.
    """

    __slots__ = ("_entries", "_is_in_order")

    def __init__(self) -> None:
        self._entries: dict[QueueEntry, None] = {}
        # Whether the entries are in the order of the queue.
        self._is_in_order = True

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: QueueEntry) -> None:
        """An entry with a persistent message is ignored."""
        if not entry.message.is_persistent:
            self._entries[entry] = None
            bring_back(entry.message)

    def ready_again(self, entry: QueueEntry) -> None:
        self._is_in_order = False
        self.add(entry)

    def forget(self, entry: QueueEntry) -> None:
        self._entries.pop(entry, None)

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Yield the present entries in the order of the queue. Skip entries that have left in the meantime."""
        if not self._is_in_order:
            self._entries = dict.fromkeys(sorted(self._entries, key=lambda entry: entry.sequence))
            self._is_in_order = True
        return (entry for entry in tuple(self._entries) if entry in self._entries)

    def offer(self, entry: QueueEntry) -> Sequence[QueueEntry]:
        """Remove an entry that should be dropped. If it cannot be dropped now, set it aside.

        Returns:
            All entries of its message, to be dropped together. Empty if the body is not in memory, or will be removed
            from memory. Also empty if another queue with the message does not allow the drop, or was not asked yet.
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
    """Move the set-aside entries of a message back to their containers, because they may be droppable now."""
    record = message.record
    if record is not None and record.aside:
        aside, record.aside = record.aside, ()
        for entry in aside:
            giver = _giver(entry)
            if giver is not None:
                giver.ready_again(entry)


def _giver(entry: QueueEntry) -> DroppableEntries | None:
    """Return the container of an entry that may be dropped, or ``None`` if it must stay."""
    return None if entry.is_gone or entry.is_unacked else entry.queue.droppable


class Account(Protocol):
    """The memory account that `relieve` keeps below its limit."""

    #: Maximum bytes of messages in memory, and the bytes above which bodies are evicted.
    limit: int
    evict_above: int
    #: Maximum bytes that are written to disk in one batch.
    MAX_BATCH: int

    @property
    def held(self) -> int:
        """Used bytes of memory, without bodies that will be removed when they are written."""

    def divide(self) -> None:
        """Start a new batch if there are enough records."""


def relieve(account: Account, queues: Iterable[QueueView]) -> None:
    """Keep memory below the limit. Evict bodies to disk (A2 A3), and above the limit drop messages (A1)."""
    if account.held > account.evict_above:
        _evict(account, queues)
    if account.held > account.limit:
        _drop_transient(account, queues)


def _evict(account: Account, queues: Iterable[QueueView]) -> None:
    """Evict bodies to disk in equal parts."""
    pagers = [queue.pager for queue in queues if queue.pager is not None]
    while (excess := account.held - account.evict_above) > 0:
        sizes = [pager.size for pager in pagers]
        total = sum(sizes)
        if not total:
            break
        # A body in several queues is in memory once, but is counted in each of these queues.
        less = min(excess, account.MAX_BATCH) * max(total, account.held) // account.held
        share = level(sizes, max(0, total - less))
        for pager in pagers:
            pager.evict(share)
        account.divide()


def _drop_transient(account: Account, queues: Iterable[QueueView]) -> None:
    """Drop ready, transient messages until memory is below the limit (A1), where the policies of the queues allow it.

    The queue with the most ready bytes drops its oldest messages first. A message in several queues is dropped only if
    all of them allow it, because otherwise no memory is freed. For the same reason a message is not dropped if its body
    is on disk, or is being written.
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
