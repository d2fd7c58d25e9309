"""The exceptions of an outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qflow_client.errors import QflowError

if TYPE_CHECKING:
    from qflow_client.receipt import Receipt

__all__ = ["NotDurable", "OutboxError", "OutboxFull", "OutboxInUse"]


class OutboxError(QflowError):
    """The outbox cannot be used. The text of the error contains the path of the outbox.

    `send` raises two subclasses: `OutboxFull` if the message was not admitted, and `NotDurable` if it was admitted.

    Attributes:
        receipt: the receipt of the admitted message, see `NotDurable`; ``None`` if no message was admitted.
        receipts: the receipts of all messages that the same call of `send_many` has admitted, including `receipt`.
    """

    receipt: Receipt | None = None
    receipts: Sequence[Receipt] = ()


class OutboxInUse(OutboxError):
    """Another process, or another producer in this process, uses the outbox."""


class OutboxFull(OutboxError):
    """The outbox has no room for the message. The message was not admitted and will not be sent.

    Attributes:
        message: the rejected message, as the application has passed it.
        exchange: exchange of the rejected message.
        routing_key: routing key of the rejected message.
    """

    def __init__(
        self, text: str, message: Any = None, *, exchange: str | None = None, routing_key: str | None = None
    ) -> None:
        super().__init__(text)
        self.message = message
        self.exchange = exchange
        self.routing_key = routing_key


class NotDurable(OutboxError):
    """The message was admitted, but may not be on disk, because the disk failed or did not answer in time.

    Do not send the message again. The producer sends it to the broker, and writes it to disk as soon as possible. The
    message is lost only if the process dies before the message is on disk or confirmed.

    Attributes:
        receipt: the receipt of the message, which later gets the message's outcome.
    """

    receipt: Receipt

    def __init__(self, why: str, receipt: Receipt) -> None:
        super().__init__(f"{why}; the message is admitted, but may not be on disk: do not send it again")
        self.receipt = receipt
