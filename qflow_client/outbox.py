"""The outbox: admitted messages on disk until they are settled, so that the death of a process loses none.

It knows nothing of producers, threads' roles or event loops; a skin uses it so:

1. Under its own lock, in the order of admission, `Outbox.put` notes a message and gives it a sequence number. That is
   cheap, and touches no disk.
2. Without the lock, and before `send` returns, `Outbox.wait_durable` makes it durable, together with all that others
   have put meanwhile: of several threads, one commits for all. An event loop puts at will, has `Outbox.commit` run once
   for all of it (on a thread of its own if `synchronous` is ``"full"``), and lets those go on whose sequence is not
   above what it returned.
3. Whoever reads acks calls `Outbox.settle` with what was settled, in whatever order. That too is only noted, and leaves
   the disk with the next commit; who owns the I/O calls `commit` where nobody puts any more, so that the file does not
   keep for long what is done. A message that is settled and still in the file when the process dies is sent once more,
   and marked.
4. What is put may be written to the broker from then on. Messages that are to wait first (``when_flowed="spill"``) are
   put with ``permit=False``; they hold nothing in memory. To take them up: `Outbox.read` the next, `Outbox.permit` all
   up to the last of them, `commit`, and only then write. So it is known of each message that is found after a crash
   whether it may have been written, and so be a second copy.
5. After a start, before anything new: `Outbox.read` what is left, batch by batch, in order; send each with
   `StoredMessage.to_send`, which bears its message id and, if it may be a second copy, the mark; `settle` as ever.
6. A message that cannot be read any more is set aside by whoever meets it first: it stays in the file and keeps its
   room, `Outbox.damaged` names it, and all others go on without it until `Outbox.drop` takes it out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qflow_client.database import Database, LockFile
from qflow_client.errors import QflowError
from qflow_client.fields import encode_short_string
from qflow_client.frames import FrameError, body_size, content_header, decode_message, plain_content_header
from qflow_client.message import Message, republished

if TYPE_CHECKING:
    from qflow_client.receipt import Receipt

__all__ = ["Outbox", "OutboxError", "OutboxFull", "OutboxInUse", "StoredMessage"]

# "qOut", and the version of the tables.
_APPLICATION_ID = 0x714F7574
_VERSION = 1
_TABLES = (
    # What is asked for most stands before what is large.
    """CREATE TABLE message (
        sequence INTEGER PRIMARY KEY,
        size INTEGER NOT NULL,
        held INTEGER NOT NULL,
        at REAL NOT NULL,
        exchange TEXT NOT NULL,
        routing_key TEXT NOT NULL,
        header BLOB NOT NULL,
        body BLOB NOT NULL
    )""",
    # A sequence that was given, above all that have left the file; and up to where also held messages may be written.
    "CREATE TABLE state (last INTEGER NOT NULL, permitted INTEGER NOT NULL)",
    "INSERT INTO state VALUES (0, 0)",
)
# In the column `held`: it waits for `permit`; it is damaged, and is not read any more.
_HELD, _SET_ASIDE = 1, 2
_INSERT = "INSERT OR IGNORE INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
# Messages that are settled before `wait_durable` takes them out, too.
_SETTLED_TOGETHER = 500
_TOTALS = "SELECT count(*), coalesce(sum(size), 0) FROM message"
# Text as bytes: SQLite gives no row at all if one text among them is no UTF-8.
_READ = """SELECT sequence, size, held, at, CAST(exchange AS BLOB), CAST(routing_key AS BLOB), header, body
    FROM message WHERE sequence > ? {} ORDER BY sequence LIMIT ?"""
_TYPES = ((int,), (int,), (int,), (float,), (bytes,), (bytes,), (bytes,), (bytes,))
_NOT_SET_ASIDE = f"AND NOT held & {_SET_ASIDE}"
# Rows that are looked through at once.
_LOOKED_AT = 1000
# Seconds after which a thread looks whether it is still to be called.
_LOST = 1.0
# Above every sequence.
_EVER = 1 << 62
# Bytes that a message takes besides its own.
_ROW = 64
# The file is given this much of the disk at most, unless told otherwise.
_MAX_BYTES = 1 << 30


class OutboxError(QflowError):
    """The outbox cannot be used; the text names the file.

    Attributes:
        receipt: of the message that a `send` has admitted and could not make durable. It is on its way all the same,
            and made durable as soon as that is possible. ``None`` if nothing was admitted.
        receipts: of what the same `send_many` had admitted before.
    """

    receipt: Receipt | None = None
    receipts: Sequence[Receipt] = ()


class OutboxInUse(OutboxError):
    """Another process, or another producer in this one, uses the outbox."""


class OutboxFull(OutboxError):
    """The outbox has no room for the message. It was not put, and not sent."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in an outbox.

    Attributes:
        sequence: its place; they rise in the order of admission, also from one process to the next.
        at: when it was put, in seconds since 1970.
        exchange: where it is to be published.
        routing_key: with which key.
        message: with its message id.
        size: bytes that it counts for in the outbox.
        may_be_second_copy: whether it may have been written to a broker before.
    """

    sequence: int
    at: float
    exchange: str
    routing_key: str
    message: Message
    size: int
    may_be_second_copy: bool

    def to_send(self) -> Message:
        """The message as it is to be sent now: with the header ``x-qflow-republished`` if it may be a second copy."""
        return republished(self.message) if self.may_be_second_copy else self.message


class _Turn:
    """A thread that waits until its message is on disk."""

    __slots__ = ("called", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        # Released once it is, or once it is for this thread to see to it.
        self.called = threading.Lock()
        self.called.acquire()


# A message as it stands in the file.
_Row = tuple[int, int, int, float, str, str, bytes, bytes]


class Outbox:
    """Messages on disk, in a file of SQLite. For any number of threads of one process.

    Args:
        path: of the file; made if there is none. Its lock is a file beside it, which stays.
        max_bytes: of the messages in it, properties and 64 bytes each included; the file itself may be somewhat larger.
        synchronous: ``"normal"`` survives the death of the process, however it comes; ``"full"`` also that of the
            machine, and waits for the disk with each commit.

    Raises:
        OutboxInUse: another process, or another producer in this one, uses it.
        OutboxError: the file cannot be opened, is damaged, or is something else.
        ValueError: `synchronous` is neither, or `max_bytes` is not above 0.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = _MAX_BYTES, synchronous: str = "normal"
    ) -> None:
        if synchronous not in ("normal", "full"):
            raise ValueError(f"synchronous must be 'normal' or 'full', not {synchronous!r}")
        if not max_bytes > 0:
            raise ValueError(f"max_bytes must be more than 0, not {max_bytes!r}")
        #: Of the file.
        self.path = Path(os.fspath(path))
        #: The most bytes that may be in it.
        self.max_bytes = max_bytes
        # Around what is only noted; and around every use of the file, also while this process waits for the disk.
        self._lock = threading.Lock()
        self._file_lock = threading.Lock()
        # Who commits for all, and who waits for that. Not simply for the lock of the file: whoever comes just as that
        # is free would take it, and commit for itself alone.
        self._turns_lock = threading.Lock()
        self._committer: _Turn | None = None
        self._turns: list[_Turn] = []
        self._lock_file = LockFile(
            self.path,
            error=OutboxError,
            in_use=OutboxInUse,
            told=("another producer", "give each producer an outbox of its own"),
        )
        try:
            self._file = _open(self.path, synchronous=synchronous)
            ((last, permitted),) = self._file.rows("SELECT last, permitted FROM state")
            last = max(last, self._file.one("SELECT max(sequence) FROM message") or 0)
            ((count, size),) = self._file.rows(_TOTALS)
            aside = self._file.rows("SELECT sequence FROM message WHERE held & ? ORDER BY sequence", _SET_ASIDE)
        except BaseException:
            self._lock_file.release()
            raise
        # Put and not durable yet, in order, and of that what a commit has taken, which one that fails leaves there; the
        # last that was put, and the last that is durable.
        self._rows: list[_Row] = []
        self._inserting: list[_Row] = []
        self._last: int = last
        self._durable: int = last
        # Settled and still in the file: first and last of each run, and how many messages at the most; and likewise
        # what a commit has taken.
        self._settled: list[tuple[int, int]] = []
        self._settled_count = 0
        self._deleting: list[tuple[int, int]] = []
        # Up to where held messages may be written: wanted, and on disk.
        self._permitted: int = permitted
        self._permitted_durable: int = permitted
        # The same two when it was opened: what might be written then is a second copy if it is sent now.
        self._written_before: tuple[int, int] = last, permitted
        self._count = int(count)
        self._size = int(size)
        # By sequence, why it was set aside.
        self._damaged: dict[int, str] = dict.fromkeys((sequence for (sequence,) in aside), "it was set aside before")
        # Set by what failed, or was broken off: the next commit counts anew.
        self._is_unsure = False

    @property
    def last(self) -> int:
        """The sequence that was given last; 0 before any."""
        return self._last

    @property
    def durable(self) -> int:
        """The last sequence up to which everything that was put is on disk."""
        return self._durable

    @property
    def size(self) -> int:
        """Bytes of the messages in it: those that are put, and those whose settling is not committed."""
        return self._size

    @property
    def left(self) -> int:
        """Messages in it that are not known to be settled, damaged ones apart; about, while others use it."""
        left = len(self) - self._settled_count
        return left if left > 0 else 0

    @property
    def damaged(self) -> dict[int, str]:
        """The messages that were found damaged, and why, by sequence. They take their room, and count for nothing else.

        See `drop`.
        """
        return self._damaged.copy()

    def __len__(self) -> int:
        return self._count - len(self._damaged)

    # In.

    def has_room(self, size: int) -> bool:
        """Whether there is room for a body of so many bytes; its properties may go beyond `max_bytes`."""
        return self._size + size + _ROW <= self.max_bytes

    def check_room(self, size: int, *, waits: bool) -> None:
        """Refuse a message for which there is no room.

        Args:
            size: of its body.
            waits: whether it can wait until there is.

        Raises:
            OutboxFull: there is none now, if it cannot wait; or there never will be.
        """
        if not self.has_room(size) and (not waits or size + _ROW > self.max_bytes):
            raise self._full(size)

    def _full(self, size: int) -> OutboxFull:
        return OutboxFull(
            f"{self.path}: no room for a message of {size} bytes: {self._size} of at most {self.max_bytes} bytes are "
            f"taken by {self._count} messages"
        )

    def put(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        message_id: str,
        *,
        permit: bool = True,
        overdraw: bool = False,
    ) -> int:
        """Note a message; it is durable with the next commit.

        Args:
            payload: the body, or a message with properties. Its own message id, if it has one, counts.
            exchange: where it is to be published.
            routing_key: with which key.
            message_id: for a message without.
            permit: whether it may be written to a broker from now on; else it is held until `permit`.
            overdraw: take it even if there is no room, because `has_room` was asked.

        Returns:
            Its sequence.

        Raises:
            OutboxFull: there is no room. With `commit`, what was settled makes some.
            TypeError, ValueError: what AMQP cannot carry.
        """
        identity = encode_short_string(message_id, "message_id")
        if type(payload) is bytes:
            header, body = plain_content_header(len(payload), identity), payload
        else:
            message = payload if isinstance(payload, Message) else Message(payload)
            header, body = content_header(message, identity), message.body
        size = len(header) + len(body) + len(exchange) + len(routing_key) + _ROW
        at = time.time()
        row = 0 if permit else _HELD, at, exchange, routing_key, header, body
        try:
            with self._lock:
                sequence = 0
                if overdraw or self._size + size <= self.max_bytes:
                    # In this order: Ctrl-C may leave a sequence without a message, but never give one to two.
                    self._last = sequence = self._last + 1
                    self._rows.append((sequence, size, *row))
                    self._size += size
                    self._count += 1
        except BaseException:
            # It may have come between the message and its count.
            self._is_unsure = True
            raise
        if not sequence:
            raise self._full(size)
        return sequence

    def permit(self, sequence: int) -> None:
        """Allow held messages up to one to be written to a broker, once that is committed.

        Args:
            sequence: of the last of them.
        """
        with self._lock:
            self._permitted = max(self._permitted, sequence)

    def settle(self, first: int, last: int | None = None) -> None:
        """Note that messages are settled; they leave the file with the next commit.

        Args:
            first: the sequence of the first.
            last: that of the last; ``None`` for the first alone.
        """
        last = first if last is None else last
        with self._lock:
            runs = self._settled
            if runs and runs[-1][1] == first - 1:
                runs[-1] = runs[-1][0], last
            else:
                runs.append((first, last))
            self._settled_count += last - first + 1

    # To the disk.

    @property
    def dirty(self) -> bool:
        """Whether a commit would change anything on disk."""
        return bool(
            self._rows
            or self._settled
            or self._inserting
            or self._deleting
            or self._permitted != self._permitted_durable
        )

    def wait_durable(self, sequence: int) -> None:
        """Return when a message is on disk: commit it with all that is noted, unless another thread just did.

        Args:
            sequence: of the message.

        Raises:
            OutboxError: it could not be written. It stays noted, and the next commit tries again.
        """
        if self._durable >= sequence:
            return
        turn = _Turn(sequence)
        try:
            with self._turns_lock:
                if self._committer is None:
                    self._committer = turn
                else:
                    self._turns.append(turn)
            if self._committer is not turn:
                while not turn.called.acquire(timeout=_LOST):
                    with self._turns_lock:
                        if self._durable >= sequence or not self._file_lock.locked():
                            # Ctrl-C has taken away who was to call.
                            if turn in self._turns:
                                self._turns.remove(turn)
                            self._committer = turn
                            break
            # Another thread may have taken it along.
            if self._durable < sequence:
                with self._file_lock:
                    if self._durable < sequence:
                        self._commit(all_of_it=self._settled_count >= _SETTLED_TOGETHER)
        finally:
            self._leave(turn)

    def _leave(self, turn: _Turn) -> None:
        """Wake those whose messages are on disk, and then who commits next."""
        with self._turns_lock:
            if self._committer is not turn:
                # It had to wait; or Ctrl-C has come first.
                if turn in self._turns:
                    self._turns.remove(turn)
                return
            waiting = []
            for each in self._turns:
                if each.sequence <= self._durable:
                    each.called.release()
                else:
                    waiting.append(each)
            self._turns = waiting
            # Last, so that what the others put next goes into its commit.
            self._committer = waiting.pop(0) if waiting else None
            if self._committer is not None:
                self._committer.called.release()

    def commit(self) -> int:
        """Make everything durable that is noted.

        Returns:
            The last sequence that is durable.

        Raises:
            OutboxError: it could not be written. It stays noted, and the next commit tries again.
        """
        with self._file_lock:
            if self.dirty:
                self._commit()
            return self._durable

    def _commit(self, *, all_of_it: bool = True) -> None:
        """Write what is noted; or only what is put."""
        file = self._file
        freed_count = freed_size = 0
        # Ctrl-C can break it off anywhere. What it has taken it takes again then: to insert or to delete a message for
        # a second time changes nothing.
        with self._lock:
            self._inserting += self._rows
            self._rows = []
            last = self._last
            permitted = self._permitted_durable
            if all_of_it:
                self._deleting += self._settled
                self._settled = []
                self._settled_count = 0
                permitted = self._permitted
        rows = self._inserting
        settled = self._deleting if all_of_it else ()
        try:
            if len(rows) == 1 and not all_of_it:
                # A statement is a transaction of its own.
                file.execute(_INSERT, *rows[0])
            else:
                with file.transaction():
                    file.execute_many(_INSERT, rows)
                    for run in settled:
                        ((count, size),) = file.rows(f"{_TOTALS} WHERE sequence BETWEEN ? AND ?", *run)
                        freed_count += count
                        freed_size += size
                        file.execute("DELETE FROM message WHERE sequence BETWEEN ? AND ?", *run)
                    if settled or permitted != self._permitted_durable:
                        file.execute("UPDATE state SET last = ?, permitted = ?", last, permitted)
            self._inserting = []
            if all_of_it:
                self._deleting = []
            self._permitted_durable = permitted
            if self._is_unsure:
                ((count, size),) = file.rows(_TOTALS)
                with self._lock:
                    self._count = count + len(self._rows)
                    self._size = size + sum(row[1] for row in self._rows)
                self._is_unsure = False
            elif freed_count:
                with self._lock:
                    self._count -= freed_count
                    self._size -= freed_size
        except BaseException:
            self._is_unsure = True
            raise
        self._durable = last

    # Out.

    def read(self, after: int = 0, limit: int = 1000, max_bytes: int | None = None) -> list[StoredMessage]:
        """Messages that are on disk and not known to be settled, in order.

        One that is damaged is not among them, and never will be: it is set aside, see `damaged`.

        Args:
            after: a sequence; those behind it.
            limit: how many at the most.
            max_bytes: how many bytes at the most, but always one message; ``None`` for no limit.

        Raises:
            OutboxError: the file cannot be read.
        """
        with self._file_lock:
            if self.dirty:
                self._commit()
            if max_bytes is not None:
                limit = self._how_many(after, limit, max_bytes)
            found, damaged = _read(self._file, after, limit, self._written_before, _NOT_SET_ASIDE)
            if damaged:
                aside = [(_SET_ASIDE, sequence) for sequence in damaged]
                with self._file.transaction():
                    self._file.execute_many("UPDATE message SET held = held | ? WHERE sequence = ?", aside)
                self._damaged |= damaged
            return found

    def _how_many(self, after: int, limit: int, max_bytes: int) -> int:
        """How many messages behind one have together so many bytes, but at least one."""
        sizes = self._file.rows(
            f"SELECT CAST(size AS INTEGER) FROM message WHERE sequence > ? {_NOT_SET_ASIDE} ORDER BY sequence LIMIT ?",
            after,
            limit,
        )
        totals = accumulate(size for (size,) in sizes)
        return max(1, sum(1 for total in totals if total <= max_bytes))

    def expire(self, before: float) -> list[StoredMessage]:
        """Take out messages that are too old to be sent.

        Args:
            before: seconds since 1970; those that were put earlier.

        Returns:
            What was taken out, in order, for whoever has to be told. It leaves the disk with the next commit.

        Raises:
            OutboxError: the file cannot be read.
        """
        found: list[StoredMessage] = []
        while batch := [each for each in self.read(found[-1].sequence if found else 0) if each.at < before]:
            found += batch
        for each in found:
            self.settle(each.sequence)
        return found

    def drop(self, sequence: int) -> None:
        """Take a message out, whatever it is; it is gone with the next commit.

        Args:
            sequence: of the message.

        Raises:
            OutboxError: it is not there, or the file cannot be read.
        """
        with self._file_lock:
            if self.dirty:
                self._commit()
            if self._file.one("SELECT 1 FROM message WHERE sequence = ?", sequence) is None:
                raise _not_there(self.path, sequence)
        self.settle(sequence)
        self._damaged.pop(sequence, None)

    # The end.

    def close(self) -> None:
        """Commit, and let others have it.

        Raises:
            OutboxError: what is noted could not be written; it is closed all the same.
        """
        with self._file_lock:
            if self._lock_file.released:
                return
            try:
                if self.dirty:
                    self._commit()
            finally:
                try:
                    self._file.close()
                finally:
                    self._lock_file.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def look(path: str | os.PathLike[str], after: int = 0, limit: int = 1000) -> list[StoredMessage]:
        """What is in an outbox, also while a producer uses it: as `read`, and nothing is changed or locked.

        Of what is damaged `look_damaged` tells.

        Args:
            path: of the file.
            after: a sequence; those behind it.
            limit: how many at the most.

        Raises:
            OutboxError: there is none, or it cannot be read.
        """
        with _looking(path) as file:
            return _read(file, after, limit, (_EVER, file.one("SELECT permitted FROM state")))[0]

    @staticmethod
    def look_damaged(path: str | os.PathLike[str]) -> dict[int, str]:
        """The damaged messages in an outbox, and what is wrong with each, by sequence; also while a producer uses it.

        Args:
            path: of the file.

        Raises:
            OutboxError: there is none, or it cannot be read.
        """
        damaged: dict[int, str] = {}
        with _looking(path) as file:
            after = -1
            while rows := file.rows(_READ.format(""), after, _LOOKED_AT):
                after = rows[-1][0]
                for row in rows:
                    try:
                        _decode(row)
                    except FrameError as error:
                        damaged[row[0]] = str(error)
                    else:
                        if row[2] & _SET_ASIDE:
                            damaged[row[0]] = "it was found damaged, and can be read now"
        return damaged

    @staticmethod
    def find(path: str | os.PathLike[str], sequence: int) -> StoredMessage:
        """One message of an outbox, also while a producer uses it.

        Args:
            path: of the file.
            sequence: of the message.

        Raises:
            OutboxError: it is not there, or cannot be read.
        """
        with _looking(path) as file:
            found, damaged = _read(file, sequence - 1, 1, (_EVER, file.one("SELECT permitted FROM state")))
        if sequence in damaged:
            raise OutboxError(f"{os.fspath(path)}: message {sequence} is damaged: {damaged[sequence]}")
        if not found or found[0].sequence != sequence:
            raise _not_there(path, sequence)
        return found[0]


def _open(path: Path, **options: Any) -> Database:
    return Database(
        path, application_id=_APPLICATION_ID, version=_VERSION, tables=_TABLES, error=OutboxError, **options
    )


@contextmanager
def _looking(path: str | os.PathLike[str]) -> Iterator[Database]:
    """A file that somebody else may be using."""
    path = Path(os.fspath(path))
    if not path.exists():
        raise OutboxError(f"{path}: there is no such outbox")
    file = _open(path, read_only=True)
    try:
        yield file
    finally:
        file.close()


def _not_there(path: str | os.PathLike[str], sequence: int) -> OutboxError:
    return OutboxError(f"{os.fspath(path)}: message {sequence} is not in it any more")


def _decode(row: Sequence[Any]) -> tuple[str, str, Message]:
    """Exchange, routing key and message of a row.

    Raises:
        FrameError: it is damaged.
    """
    if any(type(value) not in types for value, types in zip(row, _TYPES, strict=True)):
        raise FrameError("a column that holds something else")
    exchange, routing_key, header, body = row[4:]
    message = decode_message(header, body)
    if body_size(header) != len(body):
        raise FrameError(f"a body of {len(body)} bytes, and its content header says {body_size(header)}")
    try:
        names = exchange.decode(), routing_key.decode()
    except UnicodeDecodeError as error:
        raise FrameError(f"its exchange or routing key: {error}") from error
    return (*names, message)


def _read(
    file: Database, after: int, limit: int, written: tuple[int, int], only: str = ""
) -> tuple[list[StoredMessage], dict[int, str]]:
    """Messages from the file, and by sequence why others that were met on the way cannot be had.

    Those up to the first number, and held ones up to the second, may have been written.
    """
    last, permitted = written
    found: list[StoredMessage] = []
    damaged: dict[int, str] = {}
    while (wanted := limit - len(found)) > 0:
        rows = file.rows(_READ.format(only), after, wanted)
        for row in rows:
            sequence, size, held, at = row[:4]
            try:
                exchange, routing_key, message = _decode(row)
            except FrameError as error:
                damaged[sequence] = str(error)
                continue
            if not held & _SET_ASIDE:
                may_be = sequence <= last and (not held or sequence <= permitted)
                found.append(StoredMessage(sequence, at, exchange, routing_key, message, size, may_be))
        if len(rows) < wanted:
            break
        after = rows[-1][0]
    return found, damaged
