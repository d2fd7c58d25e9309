"""The outbox: admitted messages on disk until they are settled, so that the death of a process loses none."""

from __future__ import annotations

from qflow_client.outbox.errors import NotDurable, OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox

__all__ = ["NotDurable", "Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"]
