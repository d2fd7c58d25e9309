"""The ticket of a message that waits to be admitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from qflow_client.errors import ProducerClosed, ProducerFlowed
from qflow_client.flow import Hold, Ticket
from qflow_client.message import Message
from qflow_client.receipt import Receipt

__all__ = ["SendTicket"]

_FlowedError = TypeVar("_FlowedError", bound=ProducerFlowed)


class SendTicket(Ticket):
    """The place in line of a message that waits to be admitted."""

    __slots__ = (
        "_claims",
        "deadline",
        "error",
        "exchange",
        "first",
        "notice_at",
        "payload",
        "receipt",
        "routing_key",
        "since",
        "waiter",
    )

    def __init__(
        self, payload: bytes | Message, exchange: str, routing_key: str, size: int, since: float, source: str = ""
    ) -> None:
        super().__init__(size, source)
        self.payload = payload
        self.exchange = exchange
        self.routing_key = routing_key
        #: The time at which the message began to wait, in seconds.
        self.since = since
        #: Whether the ticket goes to the front of the line, because a callback sends the message.
        self.first = False
        #: The latest time at which the wait ends, in seconds.
        self.deadline = math.inf
        #: The time at which a notice about the wait is due, in seconds.
        self.notice_at = math.inf
        #: The receipt; ``None`` at first. It gets a number when the message is admitted or put into the outbox.
        self.receipt: Receipt | None = None
        #: The error that has ended the wait, for the sender; ``None`` without an error.
        self.error: BaseException | None = None
        #: The object to put into `Reports.wake` to wake the sender.
        self.waiter: Any = None
        # The claims to decide about the message: True for the sender, False for the line. The first claim wins.
        self._claims: list[bool] = []

    def claim(self, *, for_sender: bool = False) -> bool:
        """Claim the right to decide about the message. Any thread can call this, even outside a step (see `step`).

        Args:
            for_sender: True for the sender, to withdraw the message; False for the line, to admit the message.

        Returns:
            Whether the claim was successful. Repeated calls return the same result.
        """
        self._claims.append(for_sender)
        return self._claims[0] is for_sender

    @property
    def is_admitted(self) -> bool:
        """Whether the message was admitted or put into the outbox. Any thread can read this, even outside a `step`."""
        receipt = self.receipt
        return receipt is not None and receipt._number > 0

    @property
    def decided(self) -> bool:
        """Whether the message was admitted or put into the outbox, got an error, or was withdrawn."""
        return self.is_admitted or self.error is not None or self.cancelled

    def flowed_error(
        self, kind: type[_FlowedError], holds: Sequence[Hold], waited: float, advice: str = ""
    ) -> _FlowedError:
        """Return the error for a message that is not sent because the producer is blocked (flowed)."""
        return kind(holds, waited, self.payload, advice, exchange=self.exchange, routing_key=self.routing_key)

    def closed_error(self, reason: str) -> ProducerClosed:
        """Return the error for a message that is not sent because the producer is closed."""
        return ProducerClosed(reason, self.payload, exchange=self.exchange, routing_key=self.routing_key)
