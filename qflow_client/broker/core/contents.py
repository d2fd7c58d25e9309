"""`Contents` has the entries of one queue, sans-I/O. Each entry is ready, unacked or leaving.

`Contents.ready` has the ready entries in the order of their sequence numbers. If an entry leaves from the middle, it is
only marked as gone, and removed from `Contents.ready` later. So no search for its place is needed. Depth and size count
all entries that have not left (D6).

If many entries have to leave, they leave in slices. Entries that were purged, or whose queue was deleted, are in
`Contents.leaving` until they leave. No consumer gets these entries, but depth, size, flow states and the memory limit
still count them.

Each `EntryObserver` (`queue.py` lists them) is called after the counts have changed, and must not change the contents.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator

from qflow_client.broker.core.entries import Completion, DropReason, QueueEntry, QueueView, StoredMessage
from qflow_client.flow import FlowSource

__all__ = ["Contents", "EntryObserver", "LastValueMap"]


class EntryObserver:
    """Observes the entries of one queue. This base class does nothing."""

    __slots__ = ()

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        """An entry was added.

        Args:
            source: the publishing channel; ``None`` if there is none.
            completion: the confirm of the message, which the observer can delay; ``None`` if there is none.
        """

    def recovered(self, entry: QueueEntry, age: float) -> None:
        """An entry was restored: the queue had it when the broker stopped. It was enqueued `age` seconds ago."""
        self.entered(entry, None, None)

    def lent(self, entry: QueueEntry) -> None:
        """An entry was delivered, and is now unacked."""

    def returned(self, entry: QueueEntry) -> None:
        """An unacked entry is about to become ready again."""

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        """An entry has left the queue. The reason is ``None`` if the entry was not dropped."""


class LastValueMap(EntryObserver, ABC):
    """Finds the last entry of each key in a queue."""

    @abstractmethod
    def last(self, message: StoredMessage) -> QueueEntry | None:
        """Return the last entry in the queue that has the same key as a message; ``None`` if there is none."""

    @abstractmethod
    def restore(self, entry: QueueEntry) -> bool:
        """Make a requeued entry the last of its key. If this key has a later entry, change nothing and return True."""


class Contents:
    """The entries of one queue."""

    #: `ready` is built again if more than this number, and also more than half, of its entries are gone.
    MAX_GAPS = 64
    #: Maximum number of entries that leave in one slice (see `Slices`), or that one call drops.
    AT_ONCE = 1000

    __slots__ = (
        "_by_age",
        "depth",
        "drops",
        "gaps",
        "leaving",
        "leaving_size",
        "observers",
        "peak_depth",
        "peak_size",
        "published",
        "ready",
        "restored",
        "size",
        "unacked",
        "unacked_size",
        "values",
    )

    def __init__(self) -> None:
        self.observers: tuple[EntryObserver, ...] = ()
        # The observer that finds the last entry of each key; None if the queue keeps all entries of a key.
        self.values: LastValueMap | None = None
        self.ready: deque[QueueEntry] = deque()
        # Number of entries in `ready` that are gone.
        self.gaps = 0
        # Unacked entries, in the order of delivery, and their body bytes.
        self.unacked: dict[QueueEntry, None] = {}
        self.unacked_size = 0
        # Heap of the unacked entries and of some that were unacked before; None until `oldest_unacked` needs it.
        self._by_age: list[tuple[int, QueueEntry]] | None = None
        self.leaving: deque[QueueEntry] = deque()
        self.leaving_size = 0
        # Totals of ready, unacked and leaving entries: messages and body bytes (D6).
        self.depth = 0
        self.size = 0
        self.peak_depth = 0
        self.peak_size = 0
        # Number of enqueued messages, also the sequence number of the newest entry, and how many came from the store.
        self.published = self.restored = 0
        self.drops: dict[DropReason, int] = {}

    # Adding.

    def restore(self, queue: QueueView, message: StoredMessage) -> QueueEntry:
        """Add a message of the store to the contents of a queue, without calling the observers."""
        self.published += 1
        self.restored += 1
        self.depth += 1
        self.size += message.size
        self.peak_depth = max(self.peak_depth, self.depth)
        self.peak_size = max(self.peak_size, self.size)
        entry = QueueEntry(queue, message, self.published)
        self.ready.append(entry)
        return entry

    def conflate(self, message: StoredMessage) -> None:
        """Drop the last message with the same key as `message`. An unacked message is not dropped."""
        last = self.values.last(message) if self.values is not None else None
        if last is not None and not last.is_unacked and not last.is_gone:
            self.take_out(last)
            self.left(last, DropReason.CONFLATED)

    # Deliveries.

    def first(self) -> QueueEntry | None:
        """Remove the entries at the head that are gone, and return the entry to deliver next."""
        ready = self.ready
        while ready and ready[0].is_gone:
            ready.popleft()
            self.gaps -= 1
        return ready[0] if ready else None

    def lend(self, entry: QueueEntry) -> None:
        """Mark an entry as unacked. The caller has removed the entry from `ready`."""
        entry.is_unacked = True
        self.unacked[entry] = None
        self.unacked_size += entry.message.size
        if self._by_age is not None:
            heapq.heappush(self._by_age, (entry.sequence, entry))
        for observer in self.observers:
            observer.lent(entry)

    def remove_unacked(self, entry: QueueEntry) -> None:
        """Remove an entry from the unacked entries. The caller then requeues the entry or lets it leave."""
        del self.unacked[entry]
        if self._by_age is not None and len(self._by_age) > self.MAX_GAPS + 2 * len(self.unacked):
            self._by_age = None
        self.unacked_size -= entry.message.size

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put unacked entries back at their places. Drop an entry if `values` has a later entry with the same key."""
        back = sorted((entry for entry in entries if not entry.is_gone), key=_sequence, reverse=True)
        for entry in back:
            self.remove_unacked(entry)
            entry.is_unacked = False
            entry.redelivered = True
        if self.values is not None:
            for entry in back:
                if self.values.restore(entry):
                    self.left(entry, DropReason.CONFLATED)
            back = [entry for entry in back if not entry.is_gone]
        for observer in self.observers:
            for entry in back:
                observer.returned(entry)
        ready = self.ready
        # Merge `back` into `ready`. The first `rest` entries of `ready` are not merged yet. After them come the merged
        # entries in order. `rotate` moves an entry in about 1 ns; a loop would take 60 ns.
        rest = len(ready)
        for entry in reversed(back):
            if rest and ready[0].sequence < entry.sequence:
                high = 1
                while high < rest and ready[high].sequence < entry.sequence:
                    high *= 2
                place = bisect_left(ready, entry.sequence, high // 2, min(high, rest), key=_sequence)
                ready.rotate(-place)
                rest -= place
            ready.append(entry)
        ready.rotate(len(ready) - rest)

    # Leaving.

    def count_drop(self, reason: DropReason) -> None:
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def left(self, entry: QueueEntry, reason: DropReason | None = None) -> None:
        """Mark a removed entry as gone, subtract it from the totals, and call the observers (J6)."""
        entry.is_gone = True
        self.depth -= 1
        self.size -= entry.message.size
        if reason is not None:
            self.count_drop(reason)
        for observer in self.observers:
            observer.left(entry, reason)

    def take_out(self, entry: QueueEntry) -> None:
        """Take an entry out of the ready or unacked entries. The caller has to call `left` next."""
        if entry.is_unacked:
            self.remove_unacked(entry)
        elif entry is self.first():
            self.ready.popleft()
        else:
            self.gaps += 1
            if self.gaps > self.MAX_GAPS and self.gaps > len(self.ready) // 2:
                self.ready = deque(each for each in self.ready if not each.is_gone and each is not entry)
                self.gaps = 0

    def purge(self, *, mark: bool) -> int:
        """Move all ready entries to `leaving`, and return their number. The caller has to call `let_leave` afterwards.

        Args:
            mark: whether to mark the entries as gone now. This is necessary if an observer also refers to the entries.
        """
        entries, size = self.ready, self.ready_size
        if self.gaps:
            entries = deque(entry for entry in entries if not entry.is_gone)
        self.ready = deque()
        self.gaps = 0
        count = len(entries)
        self._leave(entries, size, mark=mark)
        return count

    def purge_unacked(self) -> None:
        """Move all unacked entries to `leaving`. Later acks of these entries change nothing."""
        self._by_age = None
        entries, size = deque(self.unacked), self.unacked_size
        self.unacked.clear()
        self.unacked_size = 0
        self._leave(entries, size, mark=True)

    def _leave(self, entries: deque[QueueEntry], size: int, *, mark: bool) -> None:
        if mark:
            for entry in entries:
                entry.is_gone = True
        if self.leaving:
            self.leaving.extend(entries)
        else:
            self.leaving = entries
        self.leaving_size += size

    def let_leave(self, count: int = AT_ONCE) -> None:
        """Let up to `count` entries of `leaving` leave the queue."""
        leaving = self.leaving
        for _ in range(min(count, len(leaving))):
            entry = leaving.popleft()
            self.leaving_size -= entry.message.size
            self.left(entry)

    # Counts and order.

    @property
    def ready_count(self) -> int:
        return self.depth - len(self.unacked) - len(self.leaving)

    @property
    def ready_size(self) -> int:
        return self.size - self.unacked_size - self.leaving_size

    @property
    def dropped(self) -> int:
        """Number of messages dropped so far. `COPY` is left out: it counts dead letters that were not sent."""
        return sum(self.drops.values()) - self.drops.get(DropReason.COPY, 0)

    def oldest_first(self) -> Iterator[QueueEntry]:
        """Yield the ready and the unacked entries in the order of the queue."""
        ready = [entry for entry in self.ready if not entry.is_gone]
        return iter(sorted((*self.unacked, *ready), key=_sequence) if self.unacked else ready)

    def oldest(self) -> QueueEntry | None:
        """Return the oldest of the ready and the unacked entries; ``None`` if there is none."""
        entry, unacked = self.first(), self.oldest_unacked()
        if unacked is not None and (entry is None or unacked.sequence < entry.sequence):
            return unacked
        return entry

    def oldest_unacked(self) -> QueueEntry | None:
        """Return the oldest unacked entry; ``None`` if there is none."""
        if not self.unacked:
            self._by_age = None
            return None
        if self._by_age is None:
            self._by_age = [(entry.sequence, entry) for entry in self.unacked]
            heapq.heapify(self._by_age)
        while self._by_age[0][1] not in self.unacked:
            heapq.heappop(self._by_age)
        return self._by_age[0][1]

    def reaches_unacked(self, count: int, size: int) -> bool:
        """Whether the oldest entries that add up to `count` messages and `size` bytes include an unacked entry."""
        unacked = self.oldest_unacked()
        if unacked is None:
            return False
        for entry in self.ready:
            if (count <= 0 and size <= 0) or unacked.sequence < entry.sequence:
                break
            if not entry.is_gone:
                count -= 1
                size -= entry.message.size
        return count > 0 or size > 0


def _sequence(entry: QueueEntry) -> int:
    return entry.sequence
