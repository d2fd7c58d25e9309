"""How messages leave a queue that no consumer has acked, sans-I/O: they expire, are dropped, or are purged.

What expires, is rejected or makes room may be dead-lettered; what is purged, is lost, or gives its memory may not.
"""

from __future__ import annotations

from collections.abc import Callable

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.entries import DropReason, QueueEntry, StoredMessage
from qflow_client.broker.core.expiry import Expiry

__all__ = ["Dropping"]


class Dropping:
    """Drops entries of one queue.

    Args:
        contents: of the queue.
        died: called with a message that is dead-lettered, and why; ``None`` if none is.
        wake: called when more is to leave soon: `let_leave` is to be called again.
    """

    __slots__ = ("_contents", "_died", "_wake", "expiry", "has_letters")

    def __init__(
        self,
        contents: Contents,
        died: Callable[[StoredMessage, DropReason], None] | None,
        wake: Callable[[], None],
    ) -> None:
        self._contents = contents
        self._died = died
        # Whether there is a dead-letter exchange.
        self.has_letters = died is not None
        self._wake = wake
        # Entries that expire; None until there is one.
        self.expiry: Expiry | None = None

    def expire(self) -> None:
        """Drop ready entries whose time has come; if they are more than may leave at once, the others do soon."""
        if self.expiry is None:
            return
        due = self.expiry.take_due(Contents.AT_ONCE)
        for entry in due:
            self._contents.take_out(entry)
            self._contents.left(entry, DropReason.EXPIRED)
        for entry in due:
            self.dead_letter(entry.message, DropReason.EXPIRED)

    def dead_letter(self, message: StoredMessage, reason: DropReason) -> None:
        """Send a message that was dropped, or refused, to the dead-letter exchange, if there is one."""
        if self._died is not None:
            self._died(message, reason)

    def drop(self, entry: QueueEntry, reason: DropReason) -> None:
        """Drop an entry that may be dead-lettered."""
        self._contents.take_out(entry)
        self._contents.left(entry, reason)
        self.dead_letter(entry.message, reason)

    def drop_oldest(self) -> None:
        """Drop the oldest entry, even one that a consumer has. There must be one."""
        if self._contents.leaving:
            self.let_leave()
            return
        entry = self._contents.oldest()
        assert entry is not None
        self.drop(entry, DropReason.MAXLEN)

    def drop_head(self) -> None:
        """Drop the oldest ready entry. There must be one."""
        entry = self._contents.first()
        assert entry is not None
        self.drop(entry, DropReason.MAXLEN)

    def drop_for_memory(self, entry: QueueEntry) -> None:
        """Drop a ready entry whose memory is needed (A1); no dead letter takes its place."""
        # One that is gone is leaving already.
        if not entry.is_gone:
            self._contents.take_out(entry)
            self._contents.left(entry, DropReason.MEMORY)

    def drop_lost(self, message: StoredMessage) -> None:
        """Drop a message whose body is lost, wherever it is here."""
        for entry in [each for each in self._contents.oldest_first() if each.message is message]:
            self._contents.take_out(entry)
            self._contents.left(entry, DropReason.DAMAGED)

    def end(self) -> None:
        """The queue is deleted, and all entries have left."""
        self._died = self.expiry = None
        self._wake = _nothing

    def let_leave(self) -> None:
        """Let some of the entries leave that are to."""
        if self._contents.leaving:
            self._contents.let_leave()
            if self._contents.leaving:
                self._wake()


def _nothing() -> None:
    """Called in place of a queue that is deleted."""
