"""The outbox keeps admitted messages on disk until they are settled. So they survive a crash of the process.

`Outbox` (`outbox.py`) opens the file (`file.py`), and notes changes in memory (`noted.py`). A commit writes the noted
changes to the file. One thread at a time uses the file (`access.py`). A program can use an `Outbox` without a producer.

In a producer, `Storage` opens the outbox and creates an `OutboxStore`. The `ProducerProtocol` calls this store through
the interface `qflow_client.core.store.Store`. Messages that wait on disk and are not in the window yet are the
`Backlog`. A `Writer` thread commits changes and reads the backlog.

When a message enters the window, the store notes the message in the outbox in the same step. `send` returns when the
message is on disk. When the broker confirms the message, the store notes the confirm, and a later commit deletes the
message. If the process ends before that commit, the next producer sends the message again.
"""

from __future__ import annotations

from qflow_client.outbox.errors import NotDurable, OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox

__all__ = ["NotDurable", "Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"]
