"""The error of the message store. The error has its own module, which can be imported without SQLite."""

from __future__ import annotations

from qflow_client.errors import QflowError

__all__ = ["StoreError"]


class StoreError(QflowError):
    """The message store cannot be opened, read or written, or the broker ended before a change was on disk."""
