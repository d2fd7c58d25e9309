"""Which bodies of a queue are in memory, sans-I/O: what goes to disk first, and what is read ahead (A2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from qflow_client.broker.entries import QueueEntry

if TYPE_CHECKING:
    from qflow_client.broker.journal import Journal

__all__ = ["Pager", "level", "missing"]


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
        journal: what brings bodies to disk.
    """

    __slots__ = ("_ahead", "_fresh", "_journal", "_lent", "ahead_size", "size")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # Those that consumers have, those that came and were in memory since, and those that were read ahead. The last
        # of each is the one to be wanted last.
        self._lent: dict[QueueEntry, None] = {}
        self._fresh: dict[QueueEntry, None] = {}
        self._ahead: dict[QueueEntry, None] = {}
        # Body bytes of all of them, and of those that were read ahead.
        self.size = 0
        self.ahead_size = 0

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
            self.ahead_size += entry.message.size

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
                self._less(each, entry)
                return

    def _less(self, where: dict[QueueEntry, None], entry: QueueEntry) -> None:
        self.size -= entry.message.size
        if where is self._ahead:
            self.ahead_size -= entry.message.size

    def evict(self, size: int, count: int | None = None) -> None:
        """Let bodies go until no more than so many bytes are left, and no more than so many of them.

        First what consumers have, then what came last.
        """
        for each in (self._lent, self._fresh, self._ahead):
            while each and (self.size > size or (count is not None and len(self) > count)):
                entry = each.popitem()[0]
                self._less(each, entry)
                self._journal.evict(entry.message)


def missing(ready: deque[QueueEntry], window: int) -> Sequence[QueueEntry]:
    """The first entries of a queue whose bodies are not in memory, within so many bytes from its head; one at least."""
    found: list[QueueEntry] = []
    for entry in islice(ready, len(ready)):
        if entry.is_gone:
            continue
        if window <= 0 and found:
            break
        window -= entry.message.size
        if entry.message.body is None:
            found.append(entry)
        elif window <= 0:
            break
    return found
