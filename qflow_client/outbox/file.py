"""The file of an outbox: its tables, the format of messages in it, and functions that read and write them.

A position shows how far a source of messages has been read (E13). The first write of a position creates the table of
positions, even in a file of an earlier version of this package. Earlier versions ignore the table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from qflow_client.amqp.frames import FrameError, body_size
from qflow_client.database import Database
from qflow_client.message import Message, decode_message, republished
from qflow_client.outbox.errors import OutboxError

# The application id of the file ("qOut" in ASCII), and the version of its tables.
_APPLICATION_ID = 0x714F7574
_VERSION = 1
_TABLES = (
    # Small columns that are read most often come first, because SQLite reads a row from its beginning.
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
    # `last` is at least the sequence of each deleted message, so that no sequence is assigned twice. Held messages (put
    # with ``permit=False``) may be written to a broker up to the sequence `permitted`.
    "CREATE TABLE state (last INTEGER NOT NULL, permitted INTEGER NOT NULL)",
    "INSERT INTO state VALUES (0, 0)",
)
# The column of values has no type, so that an INTEGER and a TEXT keep their types.
MAKE_POSITIONS = "CREATE TABLE IF NOT EXISTS position (source TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID"
# Bits of the column `held`. HELD: put with ``permit=False``. _SET_ASIDE: damaged, so that `Outbox.read` skips it.
HELD, _SET_ASIDE = 1, 2
# If an interrupted write is repeated, some rows exist already. These rows stay unchanged.
INSERT = "INSERT OR IGNORE INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_TOTALS = "SELECT count(*), coalesce(sum(size), 0) FROM message"
# Text is read as bytes, because `sqlite3` returns no rows at all if one text is not UTF-8.
_READ = """SELECT sequence, size, held, at, CAST(exchange AS BLOB), CAST(routing_key AS BLOB), header, body
    FROM message WHERE sequence > ? {} ORDER BY sequence LIMIT ?"""
_TYPES = ((int,), (int,), (int,), (float,), (bytes,), (bytes,), (bytes,), (bytes,))
NOT_SET_ASIDE = f"AND NOT held & {_SET_ASIDE}"
# Number of rows that `look_damaged` reads at once.
_LOOKED_AT = 1000
# The range of `datetime`, in seconds since 1970.
_YEAR_1, _YEAR_10000 = -62135596800.0, 253402300800.0
# A number above every sequence.
_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in an outbox.

    Attributes:
        sequence: number of the message. Sequences increase in the order of admission, even across processes.
        at: time when the message was put, in seconds since 1970.
        exchange: exchange of the message.
        routing_key: routing key of the message.
        message: the message, with its message id.
        size: bytes that the message uses in the outbox.
        may_be_second_copy: whether the message may have been written to a broker before.
    """

    sequence: int
    at: float
    exchange: str
    routing_key: str
    message: Message
    size: int
    may_be_second_copy: bool

    def to_send(self) -> Message:
        """Return the message to send. A possible second copy gets the header ``x-qflow-republished``."""
        return republished(self.message) if self.may_be_second_copy else self.message


#: `Row` is a message as a row of the file. `Content` is a row without sequence and size.
Row = tuple[int, int, int, float, str, str, bytes, bytes]
Content = tuple[int, float, str, str, bytes, bytes]


def as_stored(row: Row) -> StoredMessage:
    """Convert the row of a message that is not in the file yet, and so cannot be a second copy."""
    sequence, size, _, at, exchange, routing_key, header, body = row
    return StoredMessage(sequence, at, exchange, routing_key, decode_message(header, body), size, False)


def open_file(path: Path, **options: Any) -> Database:
    """Open the file of an outbox, and create it if it does not exist. The options are those of `Database`."""
    return Database(
        path, application_id=_APPLICATION_ID, version=_VERSION, tables=_TABLES, error=OutboxError, **options
    )


@contextmanager
def open_to_look(path: str | os.PathLike[str]) -> Iterator[Database]:
    """Open the file of an outbox for reading, even if another process is using it."""
    path = Path(os.fspath(path))
    if not path.exists():
        raise OutboxError(f"{path}: there is no such outbox")
    try:
        file = open_file(path, read_only=True)
    except OutboxError as error:
        if getattr(error.__cause__, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
            raise
        # A process was killed while it created the file. SQLite must write to the file to roll the creation back.
        file = open_file(path)
    try:
        yield file
    finally:
        file.close()


def state(file: Database) -> tuple[int, int]:
    """Return the last assigned sequence, and the sequence up to which held messages may be sent."""
    rows = file.rows("SELECT last, permitted, (SELECT coalesce(max(sequence), 0) FROM message) FROM state")
    if len(rows) != 1 or not all(type(value) is int and 0 <= value < _EVER for value in rows[0]):
        raise OutboxError(f"{file.path} is damaged: its table 'state' has the rows {rows!r:.100}")
    last, permitted, found = rows[0]
    return max(last, found), permitted


def write_state(file: Database, last: int, permitted: int) -> None:
    """Write the last assigned sequence, and the sequence up to which held messages may be sent."""
    file.execute("UPDATE state SET last = ?, permitted = ?", last, permitted)


def has_positions(file: Database) -> bool:
    """Return whether the file has a table of positions."""
    return bool(file.one("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'position'"))


def read_positions(file: Database) -> dict[str, int | str | None]:
    """Return the position of each source; ``None`` for a damaged position. A damaged name raises an `OutboxError`."""
    # Text is read as bytes, as in `_READ`.
    rows = file.rows("""SELECT CAST(source AS BLOB), typeof(value),
        CASE typeof(value) WHEN 'integer' THEN value ELSE CAST(value AS BLOB) END FROM position""")
    found: dict[str, int | str | None] = {}
    for source, kind, value in rows:
        try:
            name = source.decode()
        except (AttributeError, UnicodeDecodeError) as error:  # damage may also turn a name into NULL
            raise OutboxError(f"{file.path}: the name of a source is damaged: {source!r}: {error}") from error
        found[name] = None
        if kind == "integer":
            found[name] = value
        elif kind == "text":
            with suppress(UnicodeDecodeError):
                found[name] = value.decode()
    return found


def write_positions(file: Database, positions: Mapping[str, int | str | None]) -> None:
    """Write the positions of sources; ``None`` deletes the position of a source."""
    for source, value in positions.items():
        if value is None:
            file.execute("DELETE FROM position WHERE source = ?", source)
        else:
            file.execute("INSERT OR REPLACE INTO position VALUES (?, ?)", source, value)


def totals(file: Database) -> tuple[int, int]:
    """Return the number of messages in the file, and their bytes."""
    ((count, size),) = file.rows(_TOTALS)
    return count, size


def take_out(file: Database, first: int, last: int) -> tuple[int, int]:
    """Delete the messages of a range of sequences. Return the number of deleted messages and their bytes."""
    ((count, size),) = file.rows(f"{_TOTALS} WHERE sequence BETWEEN ? AND ?", first, last)
    file.execute("DELETE FROM message WHERE sequence BETWEEN ? AND ?", first, last)
    return count, size


def is_there(file: Database, sequence: int) -> bool:
    """Return whether a message is in the file, even if it is held or set aside."""
    return file.one("SELECT 1 FROM message WHERE sequence = ?", sequence) is not None


def aside(file: Database) -> list[int]:
    """Return the sequences of the messages that are set aside."""
    rows = file.rows("SELECT sequence FROM message WHERE held & ? ORDER BY sequence", _SET_ASIDE)
    return [sequence for (sequence,) in rows]


def set_aside(file: Database, sequences: Iterable[int]) -> None:
    """Mark damaged messages, which `Outbox.read` then skips."""
    with file.calling, file.transaction():
        file.execute_many(
            "UPDATE message SET held = held | ? WHERE sequence = ?", [(_SET_ASIDE, sequence) for sequence in sequences]
        )


def how_many(file: Database, after: int, limit: int, max_bytes: int) -> int:
    """Return how many of the next `limit` messages after a sequence fit into `max_bytes` bytes; at least 1."""
    sizes = file.rows(
        f"SELECT CAST(size AS INTEGER) FROM message WHERE sequence > ? {NOT_SET_ASIDE} ORDER BY sequence LIMIT ?",
        after,
        limit,
    )
    return max(1, sum(1 for total in accumulate(size for (size,) in sizes) if total <= max_bytes))


def not_there(file: Database, sequence: int) -> OutboxError:
    """Return the error for a message that is not in the file any more."""
    return OutboxError(f"{file.path}: message {sequence} is no longer in the outbox")


def _decode(row: Sequence[Any]) -> tuple[str, str, Message]:
    """Return exchange, routing key and message. Raise `FrameError` if the row is damaged."""
    if any(type(value) not in types for value, types in zip(row, _TYPES, strict=True)):
        raise FrameError("a column contains a value of another type")
    at, exchange, routing_key, header, body = row[3:]
    if not _YEAR_1 <= at < _YEAR_10000:
        raise FrameError(f"the time {at!r} is no date")
    message = decode_message(header, body)
    if body_size(header) != len(body):
        raise FrameError(f"the body has {len(body)} bytes, but its content header says {body_size(header)}")
    if max(len(exchange), len(routing_key)) > 255:
        # Earlier versions of `Outbox.put` accepted such names.
        raise FrameError("the exchange or routing key has more than 255 bytes, which AMQP cannot carry")
    try:
        names = exchange.decode(), routing_key.decode()
    except UnicodeDecodeError as error:
        raise FrameError(f"the exchange or routing key cannot be decoded: {error}") from error
    return (*names, message)


def _rows(file: Database, after: int, limit: int, only: str = "") -> list[Any]:
    """Return the rows of messages after a sequence. Raise an `OutboxError` if damage has changed their order."""
    rows = file.rows(_READ.format(only), after, limit)
    for row in rows:
        # Otherwise the next read could return the same messages again, without end.
        if row[0] <= after:
            raise OutboxError(f"{file.path} is damaged: message {row[0]} comes after message {after}")
        after = row[0]
    return rows


def read(
    file: Database, after: int, limit: int, written: tuple[int, int], only: str = ""
) -> tuple[list[StoredMessage], dict[int, str]]:
    """Read at most `limit` messages after a sequence. Also return the errors of damaged messages, by sequence.

    Args:
        written: the pair (`last`, `permitted`). Messages up to the sequence `last` may have been written to a broker.
            Messages that were put with ``permit=False`` may have been written only up to `permitted`.
        only: a further SQL condition that begins with AND, such as `NOT_SET_ASIDE`; empty for all messages.
    """
    last, permitted = written
    found: list[StoredMessage] = []
    damaged: dict[int, str] = {}
    while (wanted := limit - len(found)) > 0:
        rows = _rows(file, after, wanted, only)
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


def look(file: Database, after: int, limit: int) -> list[StoredMessage]:
    """Return messages after the sequence `after`, at most `limit`, even if another process is using the file."""
    return _look(file, after, limit)[0]


def _look(file: Database, after: int, limit: int) -> tuple[list[StoredMessage], dict[int, str]]:
    return read(file, after, limit, (_EVER, state(file)[1]))


def look_damaged(file: Database) -> dict[int, str]:
    """Return, by sequence, the reason for each message that is damaged, or was set aside as damaged."""
    damaged: dict[int, str] = {}
    after = -1
    while rows := _rows(file, after, _LOOKED_AT):
        after = rows[-1][0]
        for row in rows:
            try:
                _decode(row)
            except FrameError as error:
                damaged[row[0]] = str(error)
            else:
                if row[2] & _SET_ASIDE:
                    damaged[row[0]] = "it was damaged before, but can be read now"
    return damaged


def find(file: Database, sequence: int) -> StoredMessage:
    """Return one message. Raise an `OutboxError` if the message is not in the file, or is damaged."""
    found, damaged = _look(file, sequence - 1, 1)
    if sequence in damaged:
        raise OutboxError(f"{file.path}: message {sequence} is damaged: {damaged[sequence]}")
    if not found or found[0].sequence != sequence:
        raise not_there(file, sequence)
    return found[0]
