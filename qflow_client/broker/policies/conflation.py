"""The last value of each key, for queues that keep only that."""

from __future__ import annotations

from qflow_client.broker.core.entries import QueueEntry, StoredMessage
from qflow_client.broker.core.wire import decode_headers

__all__ = ["LastValues"]


class LastValues:
    """Which entry of a queue is the last of its key.

    Args:
        header: which has the key; messages without it have none. ``None`` for the routing key.
    """

    __slots__ = ("_header", "_keys", "_last")

    def __init__(self, header: str | None) -> None:
        self._header = header
        self._last: dict[str, QueueEntry] = {}
        # Keys of the entries in the queue that have one, so that they are found when these leave.
        self._keys: dict[QueueEntry, str] = {}

    def key_of(self, message: StoredMessage) -> str | None:
        """A message's key; ``None`` if it has none."""
        if self._header is None:
            return message.target.routing_key
        value = decode_headers(message.header).get(self._header)
        return None if value is None else str(value)

    def last(self, key: str | None) -> QueueEntry | None:
        """The last entry of a key that is still in the queue; ``None`` if there is none."""
        return None if key is None else self._last.get(key)

    def add(self, entry: QueueEntry, key: str | None) -> None:
        """An entry is the last of its key now."""
        if key is not None:
            self._last[key] = entry
            self._keys[entry] = key

    def forget(self, entry: QueueEntry) -> None:
        """An entry has left the queue."""
        key = self._keys.pop(entry, None)
        if key is not None and self._last.get(key) is entry:
            del self._last[key]

    def restore(self, entry: QueueEntry) -> None:
        """An entry that is put back is the last of its key, unless there is one."""
        key = self._keys.get(entry)
        if key is not None:
            self._last.setdefault(key, entry)

    def is_outdated(self, entry: QueueEntry) -> bool:
        """Whether there is a later entry of the same key."""
        key = self._keys.get(entry)
        return key is not None and self._last.get(key, entry) is not entry
