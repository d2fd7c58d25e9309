"""`Storage` observes the entries of one queue for its `Journal`, `BodyPager` and `DroppableEntries`, sans-I/O.

The journal has each message of the queue. A dead-lettered message stays in the journal until its dead letter has
arrived (`Storage.letter_done`), so a crash before then does not lose a stored message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from qflow_client.broker.core.contents import Contents, EntryObserver
from qflow_client.broker.core.entries import (
    BodyPager,
    Completion,
    DroppableEntries,
    DropReason,
    QueueEntry,
    StoredMessage,
)
from qflow_client.broker.core.limits import QueueLimits
from qflow_client.broker.core.ports import Journal
from qflow_client.flow import FlowSource

__all__ = ["Storage"]

_WITH_LETTER = (DropReason.EXPIRED, DropReason.MAXLEN, DropReason.REJECTED)


class Storage(EntryObserver):
    """Links one queue to the journal, to its pager, and to its droppable entries.

    Args:
        number: number of the queue in the message store; 0 if the queue does not survive a restart.
        has_letters: whether the queue has a dead-letter exchange.
        window: returns the maximum body bytes that each queue may read from the disk before they are delivered (A3).
    """

    __slots__ = (
        "_contents",
        "_enter",
        "_has_letters",
        "_is_reading",
        "_journal",
        "_leave",
        "_letters",
        "_max_window",
        "_number",
        "_window",
        "droppable",
        "may_lack",
        "pager",
    )

    def __init__(
        self, journal: Journal, number: int, has_letters: bool, contents: Contents, window: Callable[[], int]
    ) -> None:
        self._journal = journal
        self._enter, self._leave = journal.enter, journal.leave
        self._number = number
        self._has_letters = has_letters
        self._contents = contents
        self._window = window
        self._max_window: int | None = None
        # Decides which bodies stay in memory; None if the queue does not have the policy `flow_to_disk` (A2).
        self.pager: BodyPager | None = None
        # The entries that may be dropped if memory exceeds its limit (A1); None if no entry may be dropped.
        self.droppable: DroppableEntries | None = None
        # Dropped messages that stay in the journal, because their dead letters have not arrived yet.
        self._letters: dict[StoredMessage, None] = {}
        # Whether the body of a message can be on disk and not in memory.
        self.may_lack = journal.has_store
        self._is_reading = False

    def set_limits(self, limits: QueueLimits) -> None:
        """Create or remove `pager` and `droppable`, as the new limits require."""
        overflow = limits.overflow
        if overflow is None or not overflow.pages_bodies:
            self.pager = self._max_window = None
        else:
            self._max_window = overflow.max_size
            if self.pager is None:
                self.pager = self._page()
        # A queue with the policy `flow_to_disk` evicts bodies to disk instead of dropping messages.
        if not limits.drop_transient or not self._journal.limit or self.pager is not None:
            self.droppable = None
        elif self.droppable is None:
            self.droppable = self._journal.make_droppable()
            for entry in self._contents.ready:
                if not entry.is_gone:
                    self.droppable.add(entry)

    def _page(self) -> BodyPager:
        pager = self._journal.make_pager()
        for entry in self._contents.oldest_first():
            if entry.message.body is not None:
                (pager.lend if entry.is_unacked else pager.add)(entry)
        return pager

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        self._enter(self._number, entry.message, completion)
        if self.pager is not None:
            self.pager.add(entry)
        if self.droppable is not None:
            self.droppable.add(entry)

    def recovered(self, entry: QueueEntry, age: float) -> None:
        # The journal already has the message.
        if self.pager is not None and entry.message.body is not None:
            self.pager.add(entry)
        if self.droppable is not None:
            self.droppable.add(entry)

    def lent(self, entry: QueueEntry) -> None:
        if self.pager is not None and entry.message.body is not None:
            self.pager.lend(entry)
        if self.droppable is not None:
            self.droppable.forget(entry)

    def returned(self, entry: QueueEntry) -> None:
        if self.pager is not None:
            self.pager.ready_again(entry)
        if self.droppable is not None:
            self.droppable.ready_again(entry)

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        if self.pager is not None:
            self.pager.forget(entry)
        if self.droppable is not None:
            self.droppable.forget(entry)
        if self._has_letters and reason in _WITH_LETTER:
            self._letters[entry.message] = None
        else:
            self._leave(self._number, entry.message)

    def letter_done(self, message: StoredMessage) -> None:
        """Remove a dropped message from the journal, because its dead letter has arrived or was discarded."""
        if message in self._letters:
            del self._letters[message]
            self._leave(self._number, message)

    def queue_deleted(self) -> None:
        """Record that the queue is deleted, if some of its messages are still in the journal."""
        if self._number and (self._contents.leaving or self._letters):
            self._journal.topology.messages_leave(self._number)

    def hold_missing(self, message: StoredMessage) -> None:
        """If the body of a message is only on disk, keep the message in the journal after it leaves the queue."""
        if message.body is None:
            self._journal.hold(message)

    def read_ahead(self, then: Callable[[], object]) -> None:
        """Read missing bodies of the first ready entries, unless a read is running. `then` is called after the read."""
        if self._is_reading:
            return
        window = self._window()
        entries = self._missing(window if self._max_window is None else min(window, self._max_window))
        if not entries:
            return

        def has_read() -> bool:
            self._is_reading = False
            if self.pager is not None:
                for entry in entries:
                    if not entry.is_gone and not entry.is_unacked and entry.message.body is not None:
                        self.pager.came(entry)
            then()
            return True

        self._is_reading = True
        self._journal.want((entry.message for entry in entries), has_read)

    def _missing(self, window: int) -> Sequence[QueueEntry]:
        """Return the entries whose bodies are not in memory, among the first `window` body bytes of ready entries."""
        found: list[QueueEntry] = []
        ready = self._contents.ready
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
