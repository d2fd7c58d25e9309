"""The outbox keeps admitted messages on disk until they are settled. So no message is lost if the process dies.

`Outbox` (`outbox.py`) opens the file (`file.py`), and first notes changes in memory (`noted.py`). A commit writes the
changes to the file. Only one thread at a time uses the file (`access.py`). A program can use an `Outbox` without a
producer.

In a producer, `Storage` opens the outbox and creates an `OutboxStore`. The producer's protocol calls this store through
the interface `qflow_client.core.store.Store`. Messages that wait on disk and are not in the window yet are the
`Backlog`. A `Writer` thread commits changes and reads the backlog.

The life of a message: it enters the window, and in the same step the store notes it in the outbox. `send` returns when
the message is on disk. When the broker confirms the message, the protocol settles it and the store notes that. The next
commit deletes the message. If the process dies before that commit, the next producer sends the message again.
"""

from __future__ import annotations

from qflow_client.outbox.errors import NotDurable, OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox

__all__ = ["NotDurable", "Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"]
