"""The receipt of a message that a `Producer` with an outbox sends later."""

from __future__ import annotations

from qflow_client.outbox.spilled import Spilled
from qflow_client.sync.receipt import SyncReceipt

__all__ = ["SpilledReceipt"]


class SpilledReceipt(Spilled, SyncReceipt):
    """The receipt of a message that a `Producer` put into its outbox in order to send it later."""

    __slots__ = ("__weakref__", "_id", "_path", "_sequence")
