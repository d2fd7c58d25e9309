"""What a producer's state asks of an outbox, which keeps its messages on disk.

A store keeps each admitted message until it is settled. Other messages may wait in the store without being admitted:
the backlog. The backlog takes no part of the window, and is admitted before any sender that waits in line.

The state calls these methods inside its own steps, so none of them waits for a disk. Without a store none is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from qflow_client.flow import Limiter
from qflow_client.message import Message
from qflow_client.receipt import Receipt

__all__ = ["Store"]


class Store(Protocol):
    """Where messages are kept until they are settled."""

    # Room.

    @property
    def limiter(self) -> Limiter | None:
        """Limits admission by the room on disk; ``None`` if a message for which there is no room is refused instead."""

    def check_room(self, payload: bytes | Message, exchange: str, routing_key: str) -> None:
        """Refuse a message for which there is no room, now or ever.

        Args:
            payload: the message.
            exchange: where to publish.
            routing_key: with which key.

        Raises:
            OutboxFull: there is none. It is not raised for a message that can wait for room.
        """

    # Admitted messages.

    def admitting(self, receipt: Receipt, number: int) -> None:
        """Keep a message that is about to be admitted under a number.

        Raises:
            OutboxFull: there is no room.
        """

    @property
    def keeps_all_back(self) -> bool:
        """Whether nothing can be written before the store takes a step, so that the owner need not be woken."""

    def count_writable(self, unsent: deque[Receipt]) -> int:
        """How many of the messages that were never written may be written now, from the first on.

        When there are more, the owner has to ask for bytes to write once more.

        Args:
            unsent: the messages, in the order of admission.
        """

    def settled(self, receipts: Sequence[Receipt]) -> None:
        """Remove settled messages. A second call with the same receipts changes nothing."""

    # The backlog.

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait on disk."""

    def admit_backlog(self, now: float) -> None:
        """Admit messages of the backlog, and settle those that have waited for too long."""

    def spill_line(self, now: float) -> None:
        """Move messages that wait in line into the backlog."""

    def when_flushed(self, waiter: Any) -> None:
        """Wake a waiter once all messages that are in the backlog now, and all that are admitted, are settled."""

    def forget_waiter(self, waiter: Any) -> bool:
        """Drop a waiter of `when_flushed`; whether it was still kept."""

    def next_timer(self, now: float) -> float | None:
        """When the limits let the next message of the backlog in; ``None`` if time alone changes nothing."""

    # The end.

    def end(self, reason: str) -> None:
        """Leave the backlog to the next producer: there will be no further channel."""

    def heal(self, unsettled: Sequence[Receipt]) -> None:
        """Repair what an unfinished step has left; these receipts are all that is admitted and unsettled."""
