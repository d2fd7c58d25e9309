"""The output of a channel without a producer."""

from __future__ import annotations

from collections import deque

from qflow_client.amqp.outbound import Outbound


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
