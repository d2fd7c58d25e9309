"""The outbox: admitted messages on disk until they are settled, so that the death of a process loses none.

`Outbox` (`outbox.py`) is the file with what is noted for it (`noted.py`). One thread at a time uses it (`access.py`).
It can be used alone. In a producer, `Storage` opens it and attaches an `OutboxStore` to the producer's state, which
calls it by the interface `qflow_client.core.store.Store`. Messages that wait on disk without being admitted are the
`Backlog`. A `Writer` thread commits what is settled, and reads the backlog.

What happens to a message: the state admits it, and in the same step the store notes it in the outbox. `send` waits
until that is on disk. When the broker confirms the message, the state settles it, the store notes that, and the next
commit deletes the message. A crash before that leaves it to the next producer.
"""

from __future__ import annotations

from qflow_client.outbox.errors import NotDurable, OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox

__all__ = ["NotDurable", "Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"]
