"""An outbox in the application's database. A message is published if and only if its transaction commits (E14).

`Outbox.add` writes a message into a table, in the caller's transaction. `OutboxRelay` publishes the committed messages,
in a thread of the application or in the command ``qflow relay``. The package needs the extra ``sqlalchemy``.
"""

from __future__ import annotations

from qflow_client.sqlalchemy.inbox import Inbox
from qflow_client.sqlalchemy.outbox import FailedRow, Outbox, OutboxStatus
from qflow_client.sqlalchemy.relay import OutboxRelay, RelayCounts, RelayError, engine_of

__all__ = ["FailedRow", "Inbox", "Outbox", "OutboxRelay", "OutboxStatus", "RelayCounts", "RelayError", "engine_of"]
