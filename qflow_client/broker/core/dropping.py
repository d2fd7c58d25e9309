"""`Dropping` drops messages of a queue, sans-I/O.

If the queue has a dead-letter exchange, a message is dead-lettered if the reason is `REJECTED`, `EXPIRED` or `MAXLEN`
(see `DropReason`). Messages that are purged, or dropped for any other reason, are never dead-lettered.
"""

from __future__ import annotations

from collections.abc import Callable

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.entries import DropReason, QueueEntry, StoredMessage
from qflow_client.broker.core.expiry import Expiry

__all__ = ["Dropping", "drops_each"]


def drops_each(queues: int) -> int:
    """Return how many messages each queue may drop at once, if `queues` queues drop messages at the same time."""
    return max(1, Contents.AT_ONCE // max(1, queues))


class Dropping:
    """Drops entries of one queue.

    Args:
        died: called with a message to dead-letter and the reason; ``None`` if the queue does not dead-letter.
        wake: called if `Queue.tick` has to be called soon, for example because `Contents.leaving` is not empty yet.
    """

    __slots__ = ("_contents", "_died", "expiry", "has_letters", "has_surplus", "wake")

    def __init__(
        self,
        contents: Contents,
        died: Callable[[StoredMessage, DropReason], None] | None,
        wake: Callable[[], None],
    ) -> None:
        self._contents = contents
        self._died = died
        # Whether the queue has a dead-letter exchange.
        self.has_letters = died is not None
        # Whether the queue exceeds its maximum. `Queue.tick` then drops more messages.
        self.has_surplus = False
        self.wake = wake
        # The entries that expire; None if neither the queue nor any message so far has a time to live.
        self.expiry: Expiry | None = None

    @property
    def is_behind(self) -> bool:
        """Whether entries must still be dropped, because they have expired or exceed the maximum."""
        return self.has_surplus or (self.expiry is not None and self.expiry.is_behind)

    def expire(self, most: int | None = None) -> None:
        """Drop up to `most` expired ready entries. If there are more, `Queue.tick` drops them soon."""
        if self.expiry is None:
            return
        due = self.expiry.take_due(Contents.AT_ONCE if most is None else most)
        for entry in due:
            self._contents.take_out(entry)
            self._contents.left(entry, DropReason.EXPIRED)
        for entry in due:
            self.dead_letter(entry.message, DropReason.EXPIRED)

    def dead_letter(self, message: StoredMessage, reason: DropReason) -> None:
        """Send a dropped or refused message to the dead-letter exchange, if the queue has one."""
        if self._died is not None:
            self._died(message, reason)

    def drop(self, entry: QueueEntry, reason: DropReason) -> None:
        self._contents.take_out(entry)
        self._contents.left(entry, reason)
        self.dead_letter(entry.message, reason)

    def drop_for_memory(self, entry: QueueEntry) -> None:
        """Drop a ready entry to free memory (A1). There is no dead letter, because a dead letter needs memory too."""
        if not entry.is_gone:
            self._contents.take_out(entry)
            self._contents.left(entry, DropReason.MEMORY)

    def drop_lost(self, message: StoredMessage) -> None:
        """Drop the ready and unacked entries of a message whose body is damaged on disk."""
        for entry in [each for each in self._contents.oldest_first() if each.message is message]:
            self._contents.take_out(entry)
            self._contents.left(entry, DropReason.DAMAGED)

    def end(self) -> bool:
        """Release the references to other objects, because the queue is deleted and all its entries have left.

        Return False if this has to be called again, because `expiry` still refers to many entries.
        """
        if self.expiry is not None and self.expiry.shrink(Contents.AT_ONCE):
            self.wake()
            return False
        self._died = self.expiry = None
        self.wake = lambda: None
        return True

    def let_leave(self) -> None:
        """Remove the next slice of `Contents.leaving` from the queue. If entries remain, schedule the next call."""
        if self._contents.leaving:
            try:
                self._contents.let_leave()
            finally:
                if self._contents.leaving:
                    self.wake()
