"""The outbox keeps admitted messages on disk until they are settled, so that the death of a process loses none.

`Outbox` (`outbox.py`) manages the file, and the changes that are noted in memory for it (`noted.py`). One thread at a
time uses the file (`access.py`). An outbox can be used alone. In a producer, `Storage` opens it and attaches an
`OutboxStore` to the producer's state, which calls it by the interface `qflow_client.core.store.Store`. Messages that
wait on disk without being admitted are the `Backlog`. A `Writer` thread commits settled messages, and reads the
backlog.

The life of a message: the state admits it, and in the same step the store notes it in the outbox. `send` waits until
the message is on disk. When the broker confirms the message, the state settles it and the store notes that. The next
commit deletes the message. After a crash before that commit, the next producer sends the message.
"""

from __future__ import annotations

from qflow_client.outbox.errors import NotDurable, OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox

__all__ = ["NotDurable", "Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"]
