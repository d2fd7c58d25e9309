"""The exceptions of an outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qflow_client.errors import QflowError

if TYPE_CHECKING:
    from qflow_client.receipt import Receipt

__all__ = ["NotDurable", "OutboxError", "OutboxFull", "OutboxInUse"]


class OutboxError(QflowError):
    """The outbox cannot be used. The text contains its path.

    `send` always raises one of two subclasses: `OutboxFull` if the message was not sent, `NotDurable` if it was.

    Attributes:
        receipt: the receipt of the admitted message, see `NotDurable`; ``None`` if no message was admitted.
        receipts: the receipts of all messages that the same call of `send_many` has admitted, including `receipt`.
    """

    receipt: Receipt | None = None
    receipts: Sequence[Receipt] = ()


class OutboxInUse(OutboxError):
    """Another process, or another producer in this one, uses the outbox."""


class OutboxFull(OutboxError):
    """The outbox has no room for the message. The message was not admitted and will not be sent.

    Attributes:
        message: the rejected message, as it was passed; ``None`` if the call only asked for room of a given size.
        exchange: its exchange; ``None`` if there was no message.
        routing_key: its routing key; ``None`` if there was no message.
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

    Do not send it again. It will be sent to the broker, and written to disk as soon as possible. It is lost only if the
    process dies while it is neither on disk nor confirmed.

    Attributes:
        receipt: the receipt of the message, with its outcome.
    """

    receipt: Receipt

    def __init__(self, why: str, receipt: Receipt) -> None:
        super().__init__(f"{why}; the message is admitted, but may not be on disk: do not send it again")
        self.receipt = receipt
