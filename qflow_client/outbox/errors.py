"""What an outbox raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qflow_client.errors import QflowError

if TYPE_CHECKING:
    from qflow_client.receipt import Receipt

__all__ = ["OutboxError", "OutboxFull", "OutboxInUse"]


class OutboxError(QflowError):
    """The outbox cannot be used; the text names the file.

    Attributes:
        receipt: of the message that a `send` has admitted and could not make durable. It is on its way all the same,
            and made durable as soon as that is possible. ``None`` if nothing was admitted.
        receipts: of what the same `send_many` had admitted before.
    """

    receipt: Receipt | None = None
    receipts: Sequence[Receipt] = ()


class OutboxInUse(OutboxError):
    """Another process, or another producer in this one, uses the outbox."""


class OutboxFull(OutboxError):
    """The outbox has no room for the message. It was not put, and not sent."""
