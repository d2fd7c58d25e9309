"""Makes the bytes that a producer writes, and takes back messages that are not written.

The bytes come from `Unconfirmed.outbound`. If `outbound` is empty, the next messages get their tags and frames.
Messages to be sent again come first, then messages that were never written, each group in the order of admission (E1).
A store may delay unsent messages until they are on disk. If the broker stops the channel, messages without a written
byte go back to the collection that they came from.
"""

from __future__ import annotations

from qflow_client.core.admission import Admission
from qflow_client.core.channel import Channel
from qflow_client.core.resending import Resending
from qflow_client.core.unconfirmed import Unconfirmed

__all__ = ["Writing"]

_UNLIMITED = 1 << 62


class Writing:
    """Makes the bytes that one producer writes."""

    __slots__ = ("_admission", "_channel", "_resending", "_unconfirmed", "has_ended")

    def __init__(self, admission: Admission, unconfirmed: Unconfirmed, resending: Resending, channel: Channel) -> None:
        self._admission = admission
        self._unconfirmed = unconfirmed
        self._resending = resending
        self._channel = channel
        #: True after `ProducerProtocol.end_writing`: no further message begins on this channel, even without holds.
        self.has_ended = False

    def next_bytes(self, limit: int, now: float) -> bytes:
        """Return the next bytes to write, see `ProducerProtocol.data_to_write`."""
        outbound = self._unconfirmed.outbound
        data = outbound.data(limit)
        if data or outbound.stopped or self._channel.number is None:
            return data
        resending, admission = self._resending, self._admission
        source = resending.again or admission.unsent
        if not source:
            return b""
        is_idle = resending.is_idle
        most = len(source) if is_idle else resending.count_sendable(source, not self._unconfirmed.flight, now)
        if admission.store is not None and source is admission.unsent:
            most = min(most, admission.store.count_writable(source))
        if not most:
            return b""
        if not is_idle:
            resending.note_sent(source[0], now)
        self._unconfirmed.make(source, limit, most)
        return outbound.data(limit)

    def take(self, now: float) -> bytes:
        """Return the next bytes to write, and record that they are written; empty if nothing can be written now."""
        outbound, unsent = self._unconfirmed.outbound, self._admission.unsent
        if (
            len(unsent) == 1
            and outbound.is_empty
            and not outbound.stopped
            and self._channel.number is not None
            and self._resending.is_idle
            and self._admission.store is None
            and (data := self._unconfirmed.make_one(unsent, is_written=True))
        ):
            return data
        data = self.next_bytes(_UNLIMITED, now)
        outbound.advance(len(data))
        return data

    def put_control(self, frame: bytes) -> None:
        size = len(frame)
        self._unconfirmed.outbound.put_control(frame)
        self._admission.unwritten += size

    def take_back(self) -> None:
        """Take back all messages that have frames but no written byte."""
        self._unconfirmed.outbound.discard_unbegun()
        self.move_back()

    def move_back(self) -> None:
        """Move messages back to the collections that they came from, if their frames were removed from `outbound`."""
        unconfirmed, unsent = self._unconfirmed, self._admission.unsent
        # `beyond` returns the last message first. So put each message in front of those that were moved before.
        while (receipt := unconfirmed.beyond()) is not None:
            if not self._resending.put_back(receipt):
                unsent.appendleft(receipt)
            unconfirmed.flight.popitem()
