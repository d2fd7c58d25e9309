"""The errors of an outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qflow_client.errors import QflowError

if TYPE_CHECKING:
    from qflow_client.receipt import Receipt

__all__ = ["NotDurable", "OutboxError", "OutboxFull", "OutboxInUse"]


class OutboxError(QflowError):
    """The outbox cannot be used; the text contains its path.

    `send` always raises one of two subclasses: `OutboxFull` if the message was not sent, `NotDurable` if it was.

    Attributes:
        receipt: the receipt of a message that was admitted, see `NotDurable`; ``None`` if none was.
        receipts: the receipts of all messages that the same `send_many` has admitted, including `receipt`.
    """

    receipt: Receipt | None = None
    receipts: Sequence[Receipt] = ()


class OutboxInUse(OutboxError):
    """Another process, or another producer in this one, uses the outbox."""


class OutboxFull(OutboxError):
    """The outbox has no room for the message. The message was not admitted, and never will be sent.

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
    """The message was admitted, but may not be on disk, because the disk failed or the time was over.

    Do not send it again. It will be sent to the broker, and will be written to disk as soon as that is possible. It is
    lost only if the process dies before that, and before the broker confirms it.

    Attributes:
        receipt: the receipt of the message, with its outcome.
    """

    receipt: Receipt

    def __init__(self, why: str, receipt: Receipt) -> None:
        super().__init__(f"{why}; the message is admitted, but may not be on disk: do not send it again")
        self.receipt = receipt
