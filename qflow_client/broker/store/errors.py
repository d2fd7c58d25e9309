"""The error of the message store. This module does not import SQLite."""

from __future__ import annotations

from qflow_client.errors import QflowError

__all__ = ["StoreError"]


class StoreError(QflowError):
    """The message store cannot be used. The error contains the path of the store."""
