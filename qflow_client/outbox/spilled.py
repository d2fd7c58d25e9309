"""`Spilled` is the receipt of a message that was put on disk and not into the window."""

from __future__ import annotations

from typing import Any

from qflow_client.amqp.frames import Route
from qflow_client.message import Message, RoutedMessage
from qflow_client.outbox.outbox import Outbox
from qflow_client.receipt import RECEIPT_OVERHEAD, Receipt

__all__ = ["Spilled"]


class Spilled(Receipt):
    """The receipt of a message that waits in the outbox. Until the message enters the window, the receipt has no body.

    Each kind of producer has a class that inherits from this class and from the producer's usual receipt class.
    """

    __slots__ = ()

    # The derived classes define these slots.
    _id: str | None
    _path: Any
    _sequence: int

    def spill(self, path: Any, sequence: int, own_id: str | None) -> None:
        """Record where the message is stored. `own_id` is the message id that the application assigned, or ``None``."""
        self._path = path
        self._sequence = sequence  # type: ignore[misc]  # the derived class has this slot
        self._id = own_id  # type: ignore[misc]  # the derived class has this slot

    def load(self, payload: bytes | Message, route: Route) -> None:
        """Keep the message in memory from now on, because it is about to be sent."""
        self._payload, self._route = payload, route

    @property
    def message_id(self) -> str | None:
        return self._id or super().message_id

    @property
    def message(self) -> RoutedMessage:
        """The message, as in `Receipt.message`. Until the message enters the window, each access reads it from disk.

        Raises:
            OutboxError: the message cannot be read, or another producer has removed it.
        """
        if self._payload is not None:
            return super().message
        stored = Outbox.find(self._path, self._sequence)
        return RoutedMessage.copy_of(stored.message, stored.exchange, stored.routing_key)

    @property
    def size(self) -> int:
        return super().size if self._payload is not None else len(self.message.body)

    @property
    def held_bytes(self) -> int:
        """Approximate bytes of memory that the receipt and its message use, without a body that is only on disk."""
        return super().held_bytes if self._payload is not None else RECEIPT_OVERHEAD
