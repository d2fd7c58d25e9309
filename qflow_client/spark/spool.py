"""A durable spool, which stores messages in the order of their arrival. Each message has an offset.

A queue forgets acknowledged messages, but Spark may request the same rows again. So Spark reads rows from the spool,
which is a folder of Arrow files. Even after a crash, the spool has no incomplete file under its final name.
"""

from __future__ import annotations

import bisect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import pyarrow as pa

from qflow_client.errors import QflowError
from qflow_client.files import lock, open_private

__all__ = ["Piece", "Spool", "SpoolError", "read_piece"]

_VERSION = 1


class SpoolError(QflowError):
    """A spool cannot be used. The text contains the folder and the reason."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one file.

    Attributes:
        start: index of the piece's first row, from 0, in `data` or, without `data`, in the file.
        data: the rows as an Arrow stream; ``None`` if the rows have to be read from the file.
    """

    path: str
    start: int
    count: int
    data: bytes | None = None


class Spool:
    """A folder with messages. As a context manager, a spool locks its folder, unless the spool is complete.

    Args:
        path: the folder, which is created if it does not exist.
        holds: what the messages belong to, for example the kind and the name of a queue. A new folder records this. A
            folder that has recorded something else is refused.

    Raises:
        SpoolError: the folder cannot be used, is in use by another query, or was created with other `holds`.
    """

    def __init__(self, path: str | Path, holds: dict[str, Any]) -> None:
        self.path = Path(path)
        self._holds = {"version": _VERSION} | holds
        self._lock: IO[str] | None = None
        # The first offset and the number of rows of each file, in order.
        self._starts: list[int] = []
        self._counts: list[int] = []
        #: Offset of the next message.
        self.end = 0
        #: Messages before this offset may have been acknowledged.
        self.acknowledged = 0

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(open_private(self.path / "lock", os.O_WRONLY | os.O_APPEND), "a")
        except OSError as error:
            raise SpoolError(f"the spool {self.path} cannot be used: {error.strerror}") from error
        try:
            # A complete spool needs no lock, because it does not change any more.
            if not self.complete:
                lock(self._lock)
            self._load()
        except BlockingIOError:
            self._lock.close()
            raise SpoolError(
                f"the spool {self.path} is in use by another query, or by an action that has not filled it yet; give "
                "each query its own spoolPath, or try again when the action has ended"
            ) from None
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _load(self) -> None:
        known = self._read_state("holds")
        if known is None:
            self._write_state("holds", self._holds)
        elif known != self._holds:
            raise SpoolError(
                f"the spool {self.path} was made for {known}, not for {self._holds}; set another spoolPath"
            )
        for file in sorted(self.path.glob("*.arrow")):
            start, count = map(int, file.stem.split("-"))
            self._starts.append(start)
            self._counts.append(count)
        self.acknowledged = (self._read_state("marks") or {"acknowledged": 0})["acknowledged"]
        self.end = self._starts[-1] + self._counts[-1] if self._starts else 0

    def _read_state(self, name: str) -> Any:
        try:
            return json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def _write_state(self, name: str, value: Any) -> None:
        self._write(f"{name}.json", json.dumps(value).encode())

    def _write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file so that it is complete or does not exist, even after a crash."""
        part = self.path / f"{name}.part"
        # A killed process may have left a partial file.
        part.unlink(missing_ok=True)
        with os.fdopen(open_private(part, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.path / name)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def begin(self) -> int:
        """The offset of the first message that is not deleted."""
        return self._starts[0] if self._starts else self.end

    @property
    def complete(self) -> bool:
        """Whether `finish` was called."""
        return self._read_state("complete") is not None

    def finish(self) -> None:
        """Record on disk that no more messages will be added."""
        self._write_state("complete", True)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add messages, which are on disk when the method returns. The first message gets the offset `end`."""
        start, count = self.end, rows.num_rows
        self._write(_name(start, count), _stream(rows))
        self._starts.append(start)
        self._counts.append(count)
        self.end = start + count

    def mark_acknowledged(self, before: int) -> None:
        """Record on disk, before the ack, that messages before an offset may have been acknowledged."""
        if before > self.acknowledged:
            self._write_state("marks", {"acknowledged": before})
            self.acknowledged = before

    def forget(self, before: int) -> None:
        """Delete the files whose messages are all before an offset. Keep the last file, whose name shows `end`."""
        while len(self._starts) > 1 and self._starts[0] + self._counts[0] <= before:
            (self.path / _name(self._starts[0], self._counts[0])).unlink()
            del self._starts[0], self._counts[0]

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Return the pieces with the messages from offset `start` to ``end - 1``.

        Raises:
            SpoolError: some messages are not in the spool.
        """
        if start < end and not self.begin <= start < end <= self.end:
            raise SpoolError(
                f"the spool {self.path} has the offsets from {self.begin} to {self.end}, but those from {start} to "
                f"{end} were requested; spool and checkpoint belong together, so restore or delete both"
            )
        found = []
        at = max(0, bisect.bisect_right(self._starts, start) - 1)
        while start < end:
            first, count = self._starts[at], self._counts[at]
            taken = min(end, first + count) - start
            found.append(Piece(str(self.path / _name(first, count)), start - first, taken))
            start += taken
            at += 1
        return found


def _name(start: int, count: int) -> str:
    return f"{start:020}-{count}.arrow"


def _stream(rows: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def inline(piece: Piece) -> Piece:
    """Return a piece that contains its rows, for a task that cannot read the file."""
    rows = read_piece(piece)
    return Piece(piece.path, 0, piece.count, _stream(rows).to_pybytes())


def read_piece(piece: Piece) -> pa.RecordBatch:
    """Return the rows of a piece.

    Raises:
        SpoolError: the file does not exist, or this user is not allowed to read it.
    """
    try:
        source = piece.data if piece.data is not None else Path(piece.path).read_bytes()
    except FileNotFoundError:
        raise SpoolError(
            f"{piece.path} does not exist: it was deleted, or driver and executors do not share the file system; in "
            "that case set sharedSpool to false"
        ) from None
    except PermissionError:
        raise SpoolError(
            f"{piece.path} can be read only by its owner, and the executor runs as another user; set sharedSpool to "
            "false"
        ) from None
    with pa.ipc.open_stream(source) as reader:
        return reader.read_next_batch().slice(piece.start, piece.count)
