"""Receipts of messages that wait on disk."""

from __future__ import annotations

from typing import Any

from qflow_client.amqp.frames import Route
from qflow_client.message import Message, RoutedMessage
from qflow_client.outbox.outbox import Outbox
from qflow_client.receipt import RECEIPT_OVERHEAD, Receipt

__all__ = ["Spilled"]


class Spilled(Receipt):
    """The receipt of a message that waits in the outbox. Its body is not in memory before it is admitted.

    Each producer has a class of its own for such receipts, derived from this one and from the class of its other
    receipts.
    """

    __slots__ = ()

    # The producers' classes have the slots.
    _id: str | None
    _path: Any
    _sequence: int

    def spill(self, path: Any, sequence: int, own_id: str | None) -> None:
        """Record where the message is.

        Args:
            path: of the outbox.
            sequence: the sequence of the message.
            own_id: the message id that the application assigned; ``None`` if the producer assigns one.
        """
        self._path = path
        self._sequence = sequence  # type: ignore[misc]  # as said above
        self._id = own_id  # type: ignore[misc]  # likewise

    def load(self, payload: bytes | Message, route: Route) -> None:
        """Keep the message in memory from now on, because it is about to be sent."""
        self._payload, self._route = payload, route

    @property
    def message_id(self) -> str | None:
        """The message id on the wire."""
        return self._id or super().message_id

    @property
    def message(self) -> RoutedMessage:
        """Same as `Receipt.message`; it is read from the outbox until the message is sent.

        Raises:
            OutboxError: it cannot be read, or another producer has removed it.
        """
        if self._payload is not None:
            return super().message
        stored = Outbox.find(self._path, self._sequence)
        return RoutedMessage.copy_of(stored.message, stored.exchange, stored.routing_key)

    @property
    def size(self) -> int:
        """The length of the body in bytes."""
        return super().size if self._payload is not None else len(self.message.body)

    @property
    def held_bytes(self) -> int:
        """About how many bytes of memory the receipt and its message use; the body may be only on disk."""
        return super().held_bytes if self._payload is not None else RECEIPT_OVERHEAD
