"""What a queue does at its maximum: the interface that an overflow policy implements.

A queue asks its policy three times: `Overflow.refusal` before any of a message's queues takes it, `Overflow.make_room`
just before the message enters, and `Overflow.trim` after the message was offered to consumers. A policy changes the
queue only through `QueueView`. The policies themselves are in `qflow_client.broker.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qflow_client.broker.core.contents import LastValueMap
from qflow_client.broker.core.entries import QueueView

__all__ = ["Overflow"]


@dataclass(frozen=True, slots=True)
class Overflow:
    """A rule for messages that come to a full queue. This one lets everything in.

    `refusal` is asked of every destination queue before any of them takes the message, so that if one refuses, none
    gets it. `make_room` comes just before the enqueue, `trim` after the message was offered to consumers.

    Attributes:
        max_count: messages; ``None`` for no maximum.
        max_size: body bytes; ``None`` for no maximum.
    """

    max_count: int | None = None
    max_size: int | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return "flow"

    def lets_wait(self, size: int) -> bool:
        """Whether a message of `size` body bytes that is refused waits for room."""
        return False

    @property
    def is_silent(self) -> bool:
        """Whether a refusal is only counted if the publisher has no confirms, and does not close its channel."""
        return False

    @property
    def dead_letters_refused(self) -> bool:
        """Whether what is refused goes to the dead-letter exchange."""
        return False

    @property
    def counts_ready(self) -> bool:
        """Whether only ready messages count against the maximum, so that a requeue may exceed it."""
        return False

    @property
    def pages_bodies(self) -> bool:
        """Whether bodies of the queue may be on disk only (A2)."""
        return False

    def last_values(self) -> LastValueMap | None:
        """A new map of each key's last entry, if the queue keeps only that; ``None`` if it keeps all."""
        return None

    def refusal(self, queue: QueueView, size: int, count: int, largest: int) -> str | None:
        """Why `count` more messages of together `size` body bytes may not enter; ``None`` if they may.

        With what leaves at the same time counted against them; `largest` is the size of the largest that enters.
        """
        return None

    def make_room(self, queue: QueueView, size: int) -> None:
        """Do what it takes to let a message of `size` body bytes in, which was not refused."""

    def trim(self, queue: QueueView) -> None:
        """Drop what is too much and could not be delivered."""

    def _excess(self, depth: int, size: int) -> tuple[int, int]:
        """By how many messages, and how many bytes, a depth is beyond the maximum; 0 or less if it is not."""
        return (
            depth - self.max_count if self.max_count is not None else 0,
            size - self.max_size if self.max_size is not None else 0,
        )

    def _full(self, queue: QueueView, depth: int, size: int, coming: tuple[int, int]) -> str | None:
        """That messages do not fit; ``None`` if they do.

        Args:
            queue: whose name is told.
            depth: messages that count.
            size: their body bytes.
            coming: messages and body bytes that are to be added.
        """
        beyond_count, beyond_size = self._excess(depth + coming[0], size + coming[1])
        if beyond_count > 0:
            return f"queue '{queue.name}' is full: {depth} messages of at most {self.max_count}"
        if beyond_size > 0:
            return (
                f"queue '{queue.name}' is full: {size} bytes of at most {self.max_size}, "
                f"and {coming[1]} more do not fit"
            )
        return None
