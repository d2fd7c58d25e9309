"""What is being written on one channel, and how far that has got.

The channel's messages come in batches. A batch is one piece of bytes with two lists of offsets: where its messages end,
and where its frames do, so that another channel may write. Messages of a batch that have not begun can be taken back:
when the broker stops the channel (``Channel.Flow``), the message that has begun ends, then the answer goes out, then
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

__all__ = ["Outbound"]


class Outbound:
    """One batch, an offset into it, and control frames that go between two messages."""

    __slots__ = ("_at", "_borders", "_controls", "_data", "_done", "_ends", "_goes_on", "_rest", "stopped")

    def __init__(self) -> None:
        # What is being written, how much of it is, and the offsets at which messages and frames end.
        self._data = b""
        self._at = 0
        self._ends: list[int] = []
        self._borders: list[int] = []
        # Further frames of the message that the data does not end.
        self._rest: deque[bytes] = deque()
        # Whether the data begins within a message.
        self._goes_on = False
        # Messages that were written before.
        self._done = 0
        self._controls: list[bytes] = []
        #: While True no message may begin.
        self.stopped = False

    def put(self, parts: Iterable[bytes], ends: list[int], borders: list[int], rest: Iterable[bytes] = ()) -> None:
        """Have a batch of messages written. The one before is written.

        Args:
            parts: its bytes.
            ends: the offsets at which its messages end.
            borders: the offsets at which its frames end, so far as another channel may write there; its length is last.
            rest: the other frames of the last message, if the batch does not end it.
        """
        self._data = b"".join(parts)
        self._ends, self._borders = ends, borders
        self._rest.extend(rest)

    def put_control(self, frame: bytes) -> None:
        """Have a frame written after the messages of the batch; `take_back` what it is to precede."""
        self._controls.append(frame)

    def take_back(self) -> int:
        """Forget the messages of the batch that have not begun.

        Returns:
            How many they are.
        """
        begun = self.begun - self._done
        is_open = bool(self._rest) or (bool(self._data) and self._has_open_end)
        count = len(self._ends) + is_open - begun
        if count:
            size = self._ends[begun - 1] if begun else 0
            if is_open:
                self._rest.clear()
            self._data = self._data[:size]
            del self._ends[begun:]
            self._borders = self._borders[: bisect_right(self._borders, size)]
            if self._at == size:
                self._end_batch()
        return count

    @property
    def _has_open_end(self) -> bool:
        return self._has_messages and (not self._ends or self._ends[-1] < len(self._data))

    @property
    def _has_messages(self) -> bool:
        return self._goes_on or bool(self._ends) or bool(self._rest)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be written."""
        return not (self._data or self._rest or self._controls)

    @property
    def size(self) -> int:
        """Bytes that are not written."""
        return len(self._data) - self._at + sum(map(len, self._rest)) + sum(map(len, self._controls))

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
        if not self._data:
            if self._rest:
                self._take_rest(limit)
            elif self._controls:
                self._data = b"".join(self._controls)
                self._controls = []
                self._borders = [len(self._data)]
        return self._data[self._at :] if self._at else self._data

    def _take_rest(self, limit: int) -> None:
        rest, taken, size, borders = self._rest, [], 0, []
        while rest and size < limit:
            taken.append(rest.popleft())
            size += len(taken[-1])
            borders.append(size)
        self._data, self._borders = b"".join(taken), borders
        if not rest:
            self._ends = [size]

    def advance(self, count: int) -> None:
        """Take note that so many bytes of `data` are written."""
        self._at += count
        if self._at and self._at == len(self._data):
            self._end_batch()

    def _end_batch(self) -> None:
        self._goes_on = bool(self._rest)
        self._done += len(self._ends)
        self._data, self._at, self._ends, self._borders = b"", 0, [], []
