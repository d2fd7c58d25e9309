"""Messages for tests: a value for every property, and the output of a channel without a producer."""

from __future__ import annotations

from collections import deque
from typing import Any

from qflow_client.amqp.outbound import Outbound

#: A value for every property of a message, in the order of the properties on the wire.
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "headers": {"k": 1, "nested": {"list": [1, "two", None, True]}},
    "delivery_mode": 1,
    "priority": 9,
    "correlation_id": "correlation",
    "reply_to": "reply",
    "expiration": "60000",
    "message_id": "id",
    "timestamp": 1_357_017_300,
    "type": "flight",
    "user_id": "guest",
    "app_id": "app",
    "cluster_id": "cluster",
}


class Messages(Outbound):
    """Messages of one frame each. `add` adds one message, and `data` combines the waiting messages to a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[bytes] = deque()

    def add(self, message: bytes) -> None:
        self._waiting.append(message)

    @property
    def size(self) -> int:
        return super().size + sum(map(len, self._waiting))

    def data(self, limit: int) -> bytes:
        if not super().data(limit) and self._waiting:
            parts: list[bytes] = []
            ends: list[int] = []
            size = 0
            while self._waiting and size < limit:
                parts.append(self._waiting.popleft())
                size += len(parts[-1])
                ends.append(size)
            self.put(parts, ends, ends)
        return super().data(limit)


class WritingChannel:
    """The channel of a `Tap`, with messages to write."""

    def __init__(self) -> None:
        self.outbound = Messages()

    @property
    def unfinished(self) -> bytes:
        return self.outbound.unfinished

    def data_to_write(self, limit: int) -> bytes:
        return self.outbound.data(limit)

    def advance(self, count: int, now: float) -> bool:
        self.outbound.advance(count)
        return not self.outbound.mid_frame
