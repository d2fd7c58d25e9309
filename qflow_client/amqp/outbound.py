"""What is being written on one channel, and how far that has got.

The channel's messages come in batches. A batch is one piece of bytes with two lists of offsets: where its messages end,
and where its frames do, so that another channel may write. Messages of a batch that have not begun can be taken back:
when the broker stops the channel (``Channel.Flow``), the message that has begun ends, then the answer goes out, then
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["Outbound"]


class Outbound:
    """One batch, an offset into it, and control frames that go between two messages."""

    __slots__ = ("_at", "_borders", "_controls", "_data", "_done", "_ends", "_goes_on", "_rest", "_taken", "stopped")

    def __init__(self) -> None:
        # What is being written, how much of it is, and the offsets at which messages and frames end.
        self._data = b""
        self._at = 0
        self._ends: list[int] = []
        self._borders: list[int] = []
        # The frames of the message that the data does not end, and how many of them have been in the data.
        self._rest: Sequence[bytes] = ()
        self._taken = 0
        # Whether the data begins within a message.
        self._goes_on = False
        # Messages that were written before.
        self._done = 0
        self._controls: list[bytes] = []
        #: While True no message may begin.
        self.stopped = False

    def put(self, parts: Iterable[bytes], ends: list[int], borders: list[int], rest: Sequence[bytes] = ()) -> None:
        """Have a batch of messages written. The one before is written.

        Args:
            parts: its bytes.
            ends: the offsets at which its messages end.
            borders: the offsets at which its frames end, so far as another channel may write there; its length is last.
            rest: the other frames of the last message, if the batch does not end it.
        """
        data = b"".join(parts)
        # Together, here and below: Ctrl-C leaves all of it or nothing.
        self._data, self._ends, self._borders, self._rest, self._taken = data, ends, borders, rest, 0

    def put_control(self, frame: bytes) -> None:
        """Have a frame written after the messages of the batch; `discard_unbegun` what it is to precede."""
        self._controls.append(frame)

    def discard_unbegun(self) -> None:
        """Forget the messages of the batch that have not begun."""
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
        """Bytes that are not written."""
        rest = islice(self._rest, self._taken, None)
        return len(self._data) - self._at + sum(map(len, rest)) + sum(map(len, self._controls))

    @property
    def given(self) -> int:
        """Messages that were put, but for those that were taken back."""
        is_open = self._has_rest or (bool(self._data) and self._has_open_end)
        return self._done + len(self._ends) + is_open

    @property
    def begun(self) -> int:
        """Messages that have begun: at least one byte is written."""
        has_begun = self._goes_on or (self._at > 0 and self._has_messages)
        return self._done + has_begun + bisect_left(self._ends, self._at)

    @property
    def finished(self) -> int:
        """Messages whose last byte is written, too."""
        return self._done + bisect_right(self._ends, self._at)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has begun and not ended, so that nothing else may be written on the connection."""
        at = self._at
        return at > 0 and self._borders[bisect_left(self._borders, at)] != at

    @property
    def unfinished(self) -> bytes:
        """The rest of the frames that have begun; empty at a frame border."""
        if not self.mid_frame:
            return b""
        return self._data[self._at : self._borders[bisect_left(self._borders, self._at)]]

    def stop(self) -> bool:
        """Have no message begin any more; whether none has begun and not ended."""
        self.stopped = True
        return self.begun == self.finished and not self._at

    def data(self, limit: int) -> bytes:
        """The next bytes to write; empty if there are none before the next batch.

        Args:
            limit: bytes, about which are returned at the most of a message's further frames.
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
        """Take note that so many bytes of `data` are written."""
        self._at += count
        self._end_if_written()

    def _end_if_written(self) -> None:
        """End the batch if it is written; what Ctrl-C has left of an end is made good by the next call."""
        if not self._at or self._at < len(self._data):
            return
        goes_on, done = self._has_rest, self._done + len(self._ends)
        self._goes_on, self._done, self._data, self._at, self._ends, self._borders = goes_on, done, b"", 0, [], []
