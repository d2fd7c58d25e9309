"""The entries of one queue, sans-I/O: which are ready and in which order, which consumers have, and which are leaving.

`Contents.ready` has the ready entries in the order of their sequence numbers, with some that are gone and are skipped
later: an entry can leave from any place without a search. Depth and size count all entries that have not left (D6).

Very many entries do not leave in one go. Those that were purged, or were in a queue that is deleted, stand in `leaving`
and leave in slices. Until then they count in depth and size, for flow states and in the account of memory, but no
consumer gets them.

What follows the entries (flow states, the journal, a flow log) is an `EntryObserver`. It is called after the change is
counted, and changes nothing here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

from qflow_client.broker.core.entries import Completion, DropReason, QueueEntry, QueueView, StoredMessage
from qflow_client.flow import FlowSource

__all__ = ["Contents", "EntryObserver", "LastValueMap"]


class EntryObserver:
    """Follows the entries of one queue. This one ignores them."""

    __slots__ = ()

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        """An entry has come.

        Args:
            entry: which is ready.
            source: the publishing channel; ``None`` for none.
            completion: its confirm, which may be held; ``None`` if there is none.
        """

    def recovered(self, entry: QueueEntry, age: float) -> None:
        """An entry that was in the queue when the broker ended is back.

        Args:
            entry: which is ready.
            age: seconds that it has been there.
        """
        self.entered(entry, None, None)

    def lent(self, entry: QueueEntry) -> None:
        """A consumer has an entry."""

    def returned(self, entry: QueueEntry) -> None:
        """An entry that a consumer had is about to be ready again."""

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        """An entry has left; the reason is ``None`` if it was not dropped."""


class LastValueMap(EntryObserver, ABC):
    """Knows which entry of a queue is the last of its key."""

    @abstractmethod
    def last(self, message: StoredMessage) -> QueueEntry | None:
        """The last entry of a message's key that is still in the queue; ``None`` if there is none."""

    @abstractmethod
    def restore(self, entry: QueueEntry) -> bool:
        """An entry that is put back is the last of its key, unless there is one.

        Returns:
            Whether there is a later entry of the same key.
        """


class Contents:
    """The entries of one queue."""

    #: So many entries may be gone and still be among the ready ones, even if they are most of them.
    MAX_GAPS = 64
    #: Entries that leave in one go.
    AT_ONCE = 1000

    __slots__ = (
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
        "size",
        "unacked",
        "unacked_size",
        "values",
    )

    def __init__(self) -> None:
        self.observers: tuple[EntryObserver, ...] = ()
        # The last entry of each key, one of the observers; None if the queue does not conflate.
        self.values: LastValueMap | None = None
        # Entries to be delivered, by sequence, and how many among them are gone.
        self.ready: deque[QueueEntry] = deque()
        self.gaps = 0
        # Entries with consumers, in the order of delivery, and their body bytes.
        self.unacked: dict[QueueEntry, None] = {}
        self.unacked_size = 0
        # Entries that are to leave, and their body bytes.
        self.leaving: deque[QueueEntry] = deque()
        self.leaving_size = 0
        # All of them together, in messages and body bytes (D6).
        self.depth = 0
        self.size = 0
        self.peak_depth = 0
        self.peak_size = 0
        # Messages so far: enqueued, which numbers them; and dropped, by reason.
        self.published = 0
        self.drops: dict[DropReason, int] = {}

    # Coming.

    def append(self, queue: QueueView, message: StoredMessage) -> QueueEntry:
        """Take a message in; no observer is called.

        Args:
            queue: whose contents these are.
            message: what comes.
        """
        self.published = sequence = self.published + 1
        self.depth = depth = self.depth + 1
        self.size = size = self.size + message.size
        if depth > self.peak_depth:
            self.peak_depth = depth
        if size > self.peak_size:
            self.peak_size = size
        entry = QueueEntry(queue, message, sequence)
        self.ready.append(entry)
        return entry

    def conflate(self, message: StoredMessage) -> None:
        """Drop the last message of a key for the one that comes, unless a consumer has it."""
        last = self.values.last(message) if self.values is not None else None
        if last is not None and not last.is_unacked and not last.is_gone:
            self.take_out(last)
            self.left(last, DropReason.CONFLATED)

    # Between the queue and its consumers.

    def first(self) -> QueueEntry | None:
        """The entry to be delivered next; those that are gone are taken away before it."""
        ready = self.ready
        while ready and ready[0].is_gone:
            ready.popleft()
            self.gaps -= 1
        return ready[0] if ready else None

    def lend(self, entry: QueueEntry) -> None:
        """A consumer has an entry, which was taken from `ready`."""
        entry.is_unacked = True
        self.unacked[entry] = None
        self.unacked_size += entry.message.size
        for observer in self.observers:
            observer.lent(entry)

    def take_back(self, entry: QueueEntry) -> None:
        """A consumer has an entry no more; where it goes, the caller decides."""
        del self.unacked[entry]
        self.unacked_size -= entry.message.size

    def requeue(self, entries: Iterable[QueueEntry]) -> None:
        """Put entries that consumers had back in their places, and drop an entry if a later value has replaced it."""
        back = sorted((entry for entry in entries if not entry.is_gone), key=_sequence, reverse=True)
        for entry in back:
            self.take_back(entry)
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
        ready, behind = self.ready, list[QueueEntry]()
        for entry in reversed(back):
            while ready and ready[0].sequence < entry.sequence:
                behind.append(ready.popleft())
            behind.append(entry)
        ready.extendleft(reversed(behind))

    # Leaving.

    def count_drop(self, reason: DropReason) -> None:
        """Take note of a message that is dropped."""
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def left(self, entry: QueueEntry, reason: DropReason | None = None) -> None:
        """An entry that stands nowhere any more has left, however it did (J6).

        Args:
            entry: which.
            reason: why it was dropped; ``None`` if it was not.
        """
        entry.is_gone = True
        self.depth -= 1
        self.size -= entry.message.size
        if reason is not None:
            self.count_drop(reason)
        for observer in self.observers:
            observer.left(entry, reason)

    def take_out(self, entry: QueueEntry) -> None:
        """An entry is about to leave, ready or with a consumer."""
        if entry.is_unacked:
            self.take_back(entry)
        elif entry is self.first():
            self.ready.popleft()
        else:
            self.gaps += 1
            if self.gaps > self.MAX_GAPS and self.gaps > len(self.ready) // 2:
                self.ready = deque(each for each in self.ready if not each.is_gone and each is not entry)
                self.gaps = 0

    def purge(self, *, mark: bool) -> int:
        """Let all ready entries leave in slices; `let_leave` is to follow.

        Args:
            mark: whether anything keeps entries by itself, so that they are to be known as gone at once.

        Returns:
            How many there were.
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
        """Let all entries leave in slices that consumers have; what these settle later changes nothing."""
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
        """Let so many of the entries leave that are to."""
        leaving = self.leaving
        for _ in range(min(count, len(leaving))):
            entry = leaving.popleft()
            self.leaving_size -= entry.message.size
            self.left(entry)

    # What there is.

    @property
    def ready_count(self) -> int:
        """Messages to be delivered."""
        return self.depth - len(self.unacked) - len(self.leaving)

    @property
    def ready_size(self) -> int:
        """Their body bytes."""
        return self.size - self.unacked_size - self.leaving_size

    @property
    def dropped(self) -> int:
        """Messages dropped so far, for whatever reason. Copies have another reason, too, and are counted once."""
        return sum(self.drops.values()) - self.drops.get(DropReason.COPY, 0)

    def oldest_first(self) -> Iterator[QueueEntry]:
        """All entries, ready and unacked, in the queue's order."""
        ready = [entry for entry in self.ready if not entry.is_gone]
        return iter(sorted((*self.unacked, *ready), key=_sequence) if self.unacked else ready)

    def oldest(self) -> QueueEntry | None:
        """The oldest entry, ready or unacked."""
        entry = self.first()
        if self.unacked:
            oldest = min(self.unacked, key=_sequence)
            if entry is None or oldest.sequence < entry.sequence:
                return oldest
        return entry


def _sequence(entry: QueueEntry) -> int:
    return entry.sequence
