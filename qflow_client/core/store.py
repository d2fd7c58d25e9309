"""The interface of an outbox, which keeps messages on disk. `qflow_client.outbox` implements this interface.

A store keeps each admitted message until it is settled. Messages that wait in the store without being admitted are the
*backlog*, which uses no room in the window. Messages of the backlog are admitted before messages that wait in line. The
core calls the methods of a store inside its steps (see `step`), so no method is allowed to wait for a disk.
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
    """Keeps messages until they are settled."""

    # Room.

    @property
    def limiter(self) -> Limiter | None:
        """Limits admission by the room on disk. ``None`` if the store rejects messages for which there is no room."""

    def check_room(self, payload: bytes | Message, exchange: str, routing_key: str) -> None:
        """Raise an error if there is no room for a message, and the message cannot wait for room.

        Raises:
            OutboxFull: there is no room and `limiter` is ``None``, or the message is larger than the whole store.
        """

    # Admitted messages.

    def admitting(self, receipt: Receipt, number: int) -> None:
        """Store the message that will be admitted next, with this number. Raise `OutboxFull` if there is no room."""

    @property
    def keeps_all_back(self) -> bool:
        """Whether no message can be written before the next commit. If so, new messages do not wake the I/O thread."""

    def count_writable(self, unsent: deque[Receipt]) -> int:
        """Return how many of the first messages of `Admission.unsent` can be written now.

        When a commit raises this number, the producer's engine has to call `ProducerProtocol.data_to_write` again.
        """

    def settled(self, receipts: Sequence[Receipt]) -> None:
        """Remove settled messages, except those with the outcome *stored*. A repeated call changes nothing."""

    # The backlog.

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait in the backlog."""

    def admit_backlog(self, now: float) -> None:
        """Admit messages of the backlog, and settle messages of the backlog that have waited for too long."""

    def spill_line(self, now: float) -> None:
        """Move messages that wait in line into the backlog (``when_flowed="spill"``), and update the outbox's hold."""

    def when_flushed(self, waiter: Any) -> None:
        """Keep a waiter. Wake it when all messages of the present backlog, and all admitted messages, are settled."""

    def forget_waiter(self, waiter: Any) -> bool:
        """Drop a waiter of `when_flushed`. Return True if the waiter was still waiting for the backlog."""

    def next_timer(self, now: float) -> float | None:
        """Return when the limits admit the next message of the backlog; ``None`` if time alone does not allow it."""

    # The end.

    def end(self, reason: str) -> None:
        """Keep the backlog for the next producer, because there will be no further channel."""

    def heal(self, unsettled: Sequence[Receipt]) -> None:
        """Repair the state after an unfinished step. `unsettled` has all receipts that are admitted and unsettled."""
