"""The interface of an overflow policy, which decides what a queue does at its maximum.

A queue calls three methods of its policy. `Overflow.refusal` is called before a published message, or the messages of
a transaction, enter any queue. If one queue refuses a published message, no queue gets it. `Overflow.make_room` is
called just before a message enters this queue, and `Overflow.trim` after the message was offered to consumers. A policy
changes the queue only through `QueueView`. The policies are in `qflow_client.broker.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qflow_client.broker.core.contents import LastValueMap
from qflow_client.broker.core.entries import QueueView

__all__ = ["Overflow"]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A rule for messages that come to a full queue. This base class accepts every message.

    Attributes:
        max_count: maximum number of messages; ``None`` for no maximum.
        max_size: maximum body bytes; ``None`` for no maximum.
    """

    #: Whether the queue silently drops a refused message of a channel without confirms. If not, the channel is closed.
    is_silent: ClassVar[bool] = False
    #: Whether the policy drops messages, and its maximum counts only ready messages. A requeue can exceed this maximum.
    counts_ready: ClassVar[bool] = False
    #: Whether the queue keeps some bodies only on disk (A2).
    pages_bodies: ClassVar[bool] = False

    max_count: int | None = None
    max_size: int | None = None

    @property
    def name(self) -> str:
        """The name of the policy."""
        return "flow"

    def lets_wait(self, size: int) -> bool:
        """Return True if a message of `size` body bytes waits when the queue has no room for it."""
        return False

    @property
    def dead_letters_refused(self) -> bool:
        """Whether refused messages go to the dead-letter exchange."""
        return False

    def last_values(self) -> LastValueMap | None:
        """Return a new map from keys (see `conflation`) to their last entries; ``None`` if the policy has no keys."""
        return None

    def refusal(self, queue: QueueView, size: int, count: int, largest: int) -> str | None:
        """Return why the queue refuses `count` messages with `size` body bytes in total; ``None`` if all may enter.

        For a transaction, the messages that it acks, or rejects without requeue, are subtracted from `count` and
        `size`. `largest` is the body size of the largest new message in bytes.
        """
        return None

    def make_room(self, queue: QueueView, size: int, most: int) -> bool:
        """Make room for an accepted message with `size` body bytes.

        Return True if there is not enough room after `most` messages were dropped.
        """
        return False

    def trim(self, queue: QueueView, most: int) -> bool:
        """Drop the messages beyond the maximum, or evict their bodies. With `counts_ready`, a requeue calls this too.

        Return True if the queue still exceeds the maximum after `most` messages were dropped.
        """
        return False

    def _excess(self, depth: int, size: int) -> tuple[int, int]:
        """Return the numbers of messages and body bytes beyond the maximum; 0 or less means that all of them fit."""
        return (
            depth - self.max_count if self.max_count is not None else 0,
            size - self.max_size if self.max_size is not None else 0,
        )

    def _full(self, queue: QueueView, depth: int, size: int, coming: tuple[int, int]) -> str | None:
        """Return why `coming` (messages, body bytes) do not fit on top of `depth` and `size`; ``None`` if they fit."""
        beyond_count, beyond_size = self._excess(depth + coming[0], size + coming[1])
        if beyond_count > 0:
            return f"queue '{queue.name}' is full: {depth} messages of at most {self.max_count}"
        if beyond_size > 0:
            return (
                f"queue '{queue.name}' is full: {size} bytes of at most {self.max_size}, "
                f"and {coming[1]} more do not fit"
            )
        return None
