"""The bytes that are being written on one channel, and how many of them are written.

The channel's messages come in batches. A batch is one bytes object with two lists of offsets: the ends of its messages,
and the ends of its frames, where another channel may write. Messages of a batch can be taken back if none of their
bytes is written. When the broker stops the channel (``Channel.Flow``), the partly written message is completed, then
the reply is written, and then nothing more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["Outbound"]


class Outbound:
    """One batch, an offset into it, and control frames that are written between two messages."""

    __slots__ = ("_at", "_borders", "_controls", "_data", "_done", "_ends", "_goes_on", "_rest", "_taken", "stopped")

    def __init__(self) -> None:
        # The bytes that are being written, how many of them are written, and the offsets at which messages and frames
        # end.
        self._data = b""
        self._at = 0
        self._ends: list[int] = []
        self._borders: list[int] = []
        # The further frames of a message that the data does not complete, and how many of these frames have been in the
        # data.
        self._rest: Sequence[bytes] = ()
        self._taken = 0
        # Whether the data begins inside a message.
        self._goes_on = False
        # Messages that were written before this data.
        self._done = 0
        self._controls: list[bytes] = []
        #: While this is True, no message may begin.
        self.stopped = False

    def put(self, parts: Iterable[bytes], ends: list[int], borders: list[int], rest: Sequence[bytes] = ()) -> None:
        """Set the next batch of messages. The previous batch must be completely written.

        Args:
            parts: its bytes.
            ends: the offsets at which its messages end.
            borders: the offsets at which its frames end and another channel may write; the last one is the length of
                the batch.
            rest: the other frames of the last message, if the batch does not complete it.
        """
        data = b"".join(parts)
        # One assignment, here and below, so that Ctrl-C leaves all of it or nothing.
        self._data, self._ends, self._borders, self._rest, self._taken = data, ends, borders, rest, 0

    def put_control(self, frame: bytes) -> None:
        """Write a frame after the messages of the batch. To write it earlier, call `discard_unbegun` first."""
        self._controls.append(frame)

    def discard_unbegun(self) -> None:
        """Forget those messages of the batch that have not begun to be written."""
        begun = self.begun
        if begun == self.given:
            return
        ends = self._ends[: begun - self._done]
        size = ends[-1] if ends else 0
        data = self._data[:size]
        borders = self._borders[: bisect_right(self._borders, size)]
        self._data, self._ends, self._borders, self._rest, self._taken = data, ends, borders, (), 0
        self._end_if_written()

    @property
    def _has_open_end(self) -> bool:
        return self._has_messages and (not self._ends or self._ends[-1] < len(self._data))

    @property
    def _has_messages(self) -> bool:
        return self._goes_on or bool(self._ends) or self._has_rest

    @property
    def _has_rest(self) -> bool:
        return self._taken < len(self._rest)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be written."""
        return not (self._data or self._has_rest or self._controls)

    @property
    def size(self) -> int:
        """How many bytes are not written."""
        rest = islice(self._rest, self._taken, None)
        return len(self._data) - self._at + sum(map(len, rest)) + sum(map(len, self._controls))

    @property
    def given(self) -> int:
        """How many messages were put, without those that were taken back."""
        is_open = self._has_rest or (bool(self._data) and self._has_open_end)
        return self._done + len(self._ends) + is_open

    @property
    def begun(self) -> int:
        """How many messages are begun: at least one byte is written."""
        has_begun = self._goes_on or (self._at > 0 and self._has_messages)
        return self._done + has_begun + bisect_left(self._ends, self._at)

    @property
    def finished(self) -> int:
        """How many messages are completely written."""
        return self._done + bisect_right(self._ends, self._at)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame is partly written, so that nothing else may be written on the connection."""
        at = self._at
        return at > 0 and self._borders[bisect_left(self._borders, at)] != at

    @property
    def unfinished(self) -> bytes:
        """The unwritten rest of partly written frames; empty at a frame border."""
        if not self.mid_frame:
            return b""
        return self._data[self._at : self._borders[bisect_left(self._borders, self._at)]]

    def stop(self) -> bool:
        """Start no further message. Return True if no message is partly written."""
        self.stopped = True
        return self.begun == self.finished and not self._at

    def data(self, limit: int) -> bytes:
        """Return the next bytes to write; empty if the batch is completely written.

        Args:
            limit: a message's further frames are returned up to about this many bytes.
        """
        self._end_if_written()
        if not self._data:
            if self._has_rest:
                self._take_rest(limit)
            elif self._controls:
                data, controls = b"".join(self._controls), list[bytes]()
                borders = [len(data)]
                self._data, self._controls, self._borders = data, controls, borders
        return self._data[self._at :] if self._at else self._data

    def _take_rest(self, limit: int) -> None:
        rest, first = self._rest, self._taken
        borders: list[int] = []
        size, stop = 0, first
        while stop < len(rest) and size < limit:
            size += len(rest[stop])
            borders.append(size)
            stop += 1
        data = b"".join(rest[first:stop])
        ends = [size] if stop == len(rest) else []
        self._data, self._ends, self._borders, self._taken = data, ends, borders, stop

    def advance(self, count: int) -> None:
        """Record that `count` bytes of `data` are written."""
        self._at += count
        self._end_if_written()

    def _end_if_written(self) -> None:
        """End the batch if it is completely written. After Ctrl-C the next call completes this."""
        if not self._at or self._at < len(self._data):
            return
        goes_on, done = self._has_rest, self._done + len(self._ends)
        self._goes_on, self._done, self._data, self._at, self._ends, self._borders = goes_on, done, b"", 0, [], []
