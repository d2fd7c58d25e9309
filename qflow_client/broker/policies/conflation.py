"""Finds the last entry of each key (a routing key, or a header) in a queue with the overflow policy `conflate`."""

from __future__ import annotations

from qflow_client.broker.core.contents import LastValueMap
from qflow_client.broker.core.entries import Completion, DropReason, QueueEntry, StoredMessage
from qflow_client.broker.core.properties import decode_headers
from qflow_client.flow import FlowSource

__all__ = ["LastValues"]


class LastValues(LastValueMap):
    """The last entry of each key in a queue.

    Args:
        header: name of the header that contains the key; ``None`` if the routing key is the key.
    """

    __slots__ = ("_header", "_keys", "_last")

    def __init__(self, header: str | None) -> None:
        self._header = header
        self._last: dict[str, QueueEntry] = {}
        # The key of each entry in the queue, so that `left` and `restore` need not decode the headers again.
        self._keys: dict[QueueEntry, str] = {}

    def _key_of(self, message: StoredMessage) -> str | None:
        if self._header is None:
            return message.target.routing_key
        value = decode_headers(message.header).get(self._header)
        return None if value is None else str(value)

    def last(self, message: StoredMessage) -> QueueEntry | None:
        key = self._key_of(message)
        return None if key is None else self._last.get(key)

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        key = self._key_of(entry.message)
        if key is not None:
            self._last[key] = entry
            self._keys[entry] = key

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        key = self._keys.pop(entry, None)
        if key is not None and self._last.get(key) is entry:
            del self._last[key]

    def restore(self, entry: QueueEntry) -> bool:
        key = self._keys.get(entry)
        return key is not None and self._last.setdefault(key, entry) is not entry
