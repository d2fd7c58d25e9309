"""The bytes to write on one channel, and how many of them are already written.

Messages come in batches. A batch is one bytes object with two lists of offsets: the ends of its messages and the ends
of its frames. Between two frames, another channel can write. A message of a batch can be withdrawn if none of its bytes
is written. When the broker stops the channel (``Channel.Flow``), a partly written message is completed. Then the reply
is written, and no further message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["Outbound"]


class Outbound:
    """One batch, the number of its written bytes, and control frames to write after it."""

    __slots__ = ("_at", "_borders", "_controls", "_data", "_done", "_ends", "_goes_on", "_rest", "_taken", "stopped")

    def __init__(self) -> None:
        # The bytes to write now: the batch, further frames of its last message, or control frames.
        self._data = b""
        # The number of written bytes of `_data`.
        self._at = 0
        # The offsets in `_data` at which messages and frames end.
        self._ends: Sequence[int] = ()
        self._borders: Sequence[int] = ()
        # The further frames of the last message, if the batch does not complete it.
        self._rest: Sequence[bytes] = ()
        # How many frames of `_rest` were already moved to `_data`.
        self._taken = 0
        # Whether `_data` begins in the middle of a message.
        self._goes_on = False
        # Number of messages that were completely written before `_data`.
        self._done = 0
        self._controls: list[bytes] = []
        #: True while no further message can begin.
        self.stopped = False

    def put(
        self, parts: Iterable[bytes], ends: Sequence[int], borders: Sequence[int], rest: Sequence[bytes] = ()
    ) -> None:
        """Set the next batch of messages. The previous batch must be completely written.

        Args:
            ends: offsets at which the messages end.
            borders: offsets at which frames end. Other channels can write there. The last offset is the length of the
                batch.
            rest: further frames of the last message, if the batch does not complete it.
        """
        data = b"".join(parts)
        # Use one assignment, here and below, so that Ctrl-C cannot come in the middle of the change.
        self._data, self._ends, self._borders, self._rest, self._taken = data, ends, borders, rest, 0

    def skip(self) -> None:
        """Count a message whose bytes the caller writes itself. All bytes of this object must already be written."""
        self._done += 1

    def put_control(self, frame: bytes) -> None:
        """Add a control frame after the messages of the batch. To write it earlier, call `discard_unbegun` first."""
        self._controls.append(frame)

    def discard_unbegun(self) -> None:
        """Remove the messages of the batch that have no written byte."""
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
        """Whether all bytes are written."""
        # `_has_rest` is inlined here and below, because a call would take longer.
        return not (self._data or self._taken < len(self._rest) or self._controls)

    @property
    def size(self) -> int:
        """The number of unwritten bytes."""
        rest = islice(self._rest, self._taken, None)
        return len(self._data) - self._at + sum(map(len, rest)) + sum(map(len, self._controls))

    @property
    def given(self) -> int:
        """The number of messages that were added so far, without the messages that `discard_unbegun` has removed."""
        is_open = self._taken < len(self._rest) or (bool(self._data) and self._has_open_end)
        return self._done + len(self._ends) + is_open

    @property
    def begun(self) -> int:
        """The number of messages that have at least one written byte."""
        has_begun = self._goes_on or (self._at > 0 and self._has_messages)
        return self._done + has_begun + bisect_left(self._ends, self._at)

    @property
    def finished(self) -> int:
        """The number of completely written messages."""
        return self._done + bisect_right(self._ends, self._at)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame is partly written, so no other channel can write now."""
        at = self._at
        return at > 0 and self._borders[bisect_left(self._borders, at)] != at

    @property
    def unfinished(self) -> bytes:
        """The unwritten bytes of a partly written frame. Empty at a frame boundary."""
        if not self.mid_frame:
            return b""
        return self._view(self._borders[bisect_left(self._borders, self._at)])

    def _view(self, end: int) -> bytes:
        """Return the unwritten bytes before the offset `end`, without a copy of the rest of a large message."""
        # If each partial write made such a copy, the writes would take time with the square of the message's size.
        return memoryview(self._data)[self._at : end]  # type: ignore[return-value]  # callers only slice and write it

    def stop(self) -> bool:
        """Stop after the current message. Return True if neither a message nor a control frame is partly written."""
        self.stopped = True
        return self.begun == self.finished and not self._at

    def data(self, limit: int) -> bytes:
        """Return the next bytes to write; empty if everything is written.

        Args:
            limit: approximate maximum number of bytes. It applies only to `rest`, because a batch is not divided.
        """
        if self._at:
            self._end_if_written()
        if not self._data:
            if self._has_rest:
                self._take_rest(limit)
            elif self._controls:
                data, controls = b"".join(self._controls), list[bytes]()
                borders = [len(data)]
                self._data, self._controls, self._borders = data, controls, borders
        return self._view(len(self._data)) if self._at else self._data

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
        """Remove the data if it is completely written. If Ctrl-C interrupts this method, the next call repeats it."""
        if not self._at or self._at < len(self._data):
            return
        goes_on, done = self._has_rest, self._done + len(self._ends)
        self._goes_on, self._done, self._data, self._at, self._ends, self._borders = goes_on, done, b"", 0, (), ()
