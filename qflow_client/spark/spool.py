"""A durable spool: messages in the order in which they came, each with an offset, until they are forgotten.

A queue gives each message once, and Spark may ask for the same rows again. Between them is this: a folder of Arrow
files, each of which is there whole or not at all. It knows neither AMQP nor Spark.
"""

from __future__ import annotations

import bisect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pyarrow as pa

from qflow_client.errors import QflowError
from qflow_client.files import lock, open_private

__all__ = ["Piece", "Spool", "SpoolError", "read_piece"]

_VERSION = 1


class SpoolError(QflowError):
    """A spool cannot be used; the text names the folder and why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one file.

    Attributes:
        path: the file.
        start: the first row, from 0 in the file.
        count: how many.
        data: the rows themselves, as an Arrow stream; ``None`` where they are to be read from the file.
    """

    path: str
    start: int
    count: int
    data: bytes | None = None


class Spool:
    """A folder of messages. A context manager, which keeps everybody else out of it.

    Args:
        path: the folder; made if it is not there.
        holds: what it is for, by name, such as the queue; refused if it was made for something else.

    Raises:
        SpoolError: it is in use, or was made for something else.
    """

    def __init__(self, path: str | Path, holds: dict[str, Any]) -> None:
        self.path = Path(path)
        self._holds = {"version": _VERSION} | holds
        self._lock: IO[str] | None = None
        # The first offset of each file, in order, and how many rows it has.
        self._starts: list[int] = []
        self._counts: list[int] = []
        #: The offset that the next message gets.
        self.end = 0
        #: Up to which offset messages may have been acknowledged already.
        self.acknowledged = 0

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(open_private(self.path / "lock", os.O_WRONLY | os.O_APPEND), "a")
        except OSError as error:
            raise SpoolError(f"the spool {self.path} cannot be used: {error.strerror}") from error
        try:
            lock(self._lock)
            self._load()
        except BlockingIOError:
            self._lock.close()
            raise SpoolError(f"the spool {self.path} is in use by another query; give each its own spoolPath") from None
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def _load(self) -> None:
        known = self._read_state("holds")
        if known is None:
            self._write_state("holds", self._holds)
        elif known != self._holds:
            raise SpoolError(f"the spool {self.path} was made for {known}, and not for {self._holds}; give another")
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
        """Write a file that is there whole or not at all, whatever happens."""
        part = self.path / f"{name}.part"
        # One may be left of a process that died.
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
        """The first offset that is still there."""
        return self._starts[0] if self._starts else self.end

    @property
    def complete(self) -> bool:
        """Whether `finish` was called: nothing will be added."""
        return self._read_state("complete") is not None

    def finish(self) -> None:
        """Say that nothing will be added."""
        self._write_state("complete", True)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add messages; they are on the disk when it returns. The first gets the offset `end`."""
        start, count = self.end, rows.num_rows
        self._write(_name(start, count), _stream(rows))
        self._starts.append(start)
        self._counts.append(count)
        self.end = start + count

    def mark_acknowledged(self, before: int) -> None:
        """Keep in mind that messages before an offset may be acknowledged from now on."""
        if before > self.acknowledged:
            self._write_state("marks", {"acknowledged": before})
            self.acknowledged = before

    def forget(self, before: int) -> None:
        """Delete the files that have nothing but messages before an offset, and leave the last, which tells the end."""
        while len(self._starts) > 1 and self._starts[0] + self._counts[0] <= before:
            (self.path / _name(self._starts[0], self._counts[0])).unlink()
            del self._starts[0], self._counts[0]

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Where the messages from one offset to another are.

        Raises:
            SpoolError: some are not there.
        """
        if start < end and not self.begin <= start < end <= self.end:
            raise SpoolError(
                f"the spool {self.path} has the offsets from {self.begin} to {self.end}, and those from {start} to "
                f"{end} are asked for; spool and checkpoint belong together, so restore or delete both"
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
    """The same piece with its rows in it, for who cannot read the file."""
    rows = read_piece(piece)
    return Piece(piece.path, 0, piece.count, _stream(rows).to_pybytes())


def read_piece(piece: Piece) -> pa.RecordBatch:
    """The rows of a piece.

    Raises:
        SpoolError: its file is not there.
    """
    try:
        source = piece.data if piece.data is not None else Path(piece.path).read_bytes()
    except FileNotFoundError:
        raise SpoolError(
            f"{piece.path} is not there: somebody deleted it, or driver and executors do not share the file system; "
            "set sharedSpool to false then"
        ) from None
    except PermissionError:
        raise SpoolError(
            f"{piece.path} can be read by its owner alone, and the executor runs as another user; set sharedSpool to "
            "false then"
        ) from None
    with pa.ipc.open_stream(source) as reader:
        return reader.read_next_batch().slice(piece.start, piece.count)
