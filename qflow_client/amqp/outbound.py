"""What is to be written on one channel, in the order of the wire, and how far that has got.

The one place that knows which message has begun: a stop (``Channel.Flow``) lets the message that has begun end, then
the answer goes out, then nothing.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Outbound"]


class _More(bytes):
    """A frame that continues the message of the piece before it."""


class _Control(bytes):
    """A frame that belongs to no message."""


class Outbound:
    """A queue of whole frames, and an offset into the first of them."""

    __slots__ = ("_offered", "_offset", "_pieces", "_special", "begun", "finished", "size", "stopped")

    def __init__(self) -> None:
        # Each piece is one or more whole frames; plain ``bytes`` begin a message.
        self._pieces: deque[bytes] = deque()
        # Bytes of the first piece that are written.
        self._offset = 0
        # How many pieces of which size together `data` has returned since the last `advance`, if not all.
        self._offered = 0, 0
        # Pieces that are not plain.
        self._special = 0
        # Bytes that are not written.
        self.size = 0
        # Messages of which at least one byte is written, and those of which all are.
        self.begun = 0
        self.finished = 0
        # While True no message may begin.
        self.stopped = False

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has begun and not ended, so that nothing else may be written on the connection."""
        return self._offset > 0

    @property
    def unfinished(self) -> bytes:
        """The rest of the piece that has begun; empty at a frame border."""
        return self._pieces[0][self._offset :] if self._offset else b""

    def stop(self) -> bool:
        """Have no message begin any more; whether none has begun and not ended."""
        self.stopped = True
        return self.begun == self.finished and not self._offset

    def put(self, frames: bytes) -> None:
        """Append a whole message."""
        self._pieces.append(frames)
        self.size += len(frames)

    def put_frames(self, frames: list[bytes]) -> None:
        """Append a whole message as several frames, between which other channels may write."""
        self.put(frames[0])
        for more in frames[1:]:
            self.put(_More(more))
            self._special += 1

    def drop_after(self, count: int) -> None:
        """Keep so many messages, counted from the first that was ever put, and drop what was put after them.

        Nothing of that may have begun. It may have been put in part only, so the bytes are counted anew.
        """
        pieces = self._pieces
        # What has begun and is not all written has no beginning in the queue.
        last = self.begun + sum(type(piece) is bytes for piece in pieces)
        if self._offset and type(pieces[0]) is bytes:
            last -= 1
        while last > count:
            if type(pieces.pop()) is bytes:
                last -= 1
        self.size = sum(map(len, pieces)) - self._offset
        self._special = sum(type(piece) is not bytes for piece in pieces)

    def withdraw(self, number: int) -> bool:
        """Take out one message, counted from the first that was ever put, unless it has begun or is not there.

        Those behind it move up.

        Returns:
            Whether it is taken out.
        """
        if number <= self.begun:
            return False
        pieces = self._pieces
        count = self.begun
        for at, piece in enumerate(pieces):
            if type(piece) is bytes and not (at == 0 and self._offset):
                count += 1
                if count == number:
                    break
        else:
            return False
        del pieces[at]
        self.size -= len(piece)
        while at < len(pieces) and type(pieces[at]) is _More:
            self.size -= len(pieces[at])
            self._special -= 1
            del pieces[at]
        return True

    def put_control(self, frame: bytes) -> None:
        """Have a frame written before every message that has not begun."""
        pieces = self._pieces
        at = 1 if self._offset else 0
        while at < len(pieces) and type(pieces[at]) is not bytes:
            at += 1
        pieces.insert(at, _Control(frame))
        self._special += 1
        self.size += len(frame)

    def data(self, limit: int) -> bytes:
        """The next bytes to write, about `limit` of them at the most (a piece is not cut); empty if there are none."""
        pieces = self._pieces
        if not pieces:
            return b""
        if self.stopped:
            return self._data_while_stopped()
        if self.size <= limit:
            joined = b"".join(pieces)
        else:
            taken, size = [], 0
            # They are more than the limit, so it always breaks.
            for piece in pieces:  # pragma: no branch
                taken.append(piece)
                size += len(piece)
                if size >= limit:
                    break
            joined = b"".join(taken)
            self._offered = len(taken), size
        return joined[self._offset :] if self._offset else joined

    def _data_while_stopped(self) -> bytes:
        taken = []
        for at, piece in enumerate(self._pieces):
            if type(piece) is bytes and not (at == 0 and self._offset):
                break
            taken.append(piece)
        return b"".join(taken)[self._offset :]

    def advance(self, count: int) -> None:
        """Take note that so many bytes of `data` are written."""
        pieces = self._pieces
        offered, size = self._offered
        self._offered = 0, 0
        if count == self.size and not self._special and not self._offset:
            self.begun += len(pieces)
            self.finished += len(pieces)
            self.size = 0
            pieces.clear()
            return
        self.size -= count
        if offered and count == size and not self._special and not self._offset:
            # As many whole messages, one by one only to be rid of them.
            self.begun += offered
            self.finished += offered
            for _ in range(offered):
                pieces.popleft()
            return
        while count:
            piece = pieces[0]
            if not self._offset and type(piece) is bytes:
                self.begun += 1
            left = len(piece) - self._offset
            if count < left:
                self._offset += count
                return
            count -= left
            self._offset = 0
            pieces.popleft()
            if type(piece) is not bytes:
                self._special -= 1
            if type(piece) is not _Control and not (pieces and type(pieces[0]) is _More):
                self.finished += 1
