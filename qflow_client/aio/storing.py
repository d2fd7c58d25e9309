"""What an `AsyncProducer` with an outbox has besides."""

from __future__ import annotations

from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.storing import Spilled

__all__ = ["SpilledReceipt"]


class SpilledReceipt(Spilled, AsyncReceipt):
    """The fate of one message that an `AsyncProducer` put into its outbox, to send it later."""

    __slots__ = ("__weakref__", "_id", "_path", "_sequence")
