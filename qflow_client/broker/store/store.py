"""The message store: durable queues, exchanges, bindings and persistent messages in one SQLite file.

Each row has a checksum of its values. A message has a second checksum of its list of queues, because the list changes.
A row with a wrong checksum is never used. A damaged row, and the rows that depend on it, are set aside: the store moves
them to the table ``damaged``. At each start the broker logs how many rows this table has, and the errors of the first
rows. If the structure of the file is damaged, rows could be missing without notice. So a `Store` refuses the file.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import Any
from zlib import crc32

from qflow_client.amqp.fields import decode_short_string, decode_table
from qflow_client.broker.store.errors import StoreError
from qflow_client.broker.store.journal import Batch, Found, FoundMessage, Put
from qflow_client.broker.store.topologylog import Change
from qflow_client.database import Database, LockFile, OpenFiles, check_name
from qflow_client.redaction import is_url

__all__ = ["BodyReader", "Store"]

# "qBrk" in ASCII.
_APPLICATION_ID = 0x7142726B
_VERSION = 2
# Numbers of deleted queues that were not empty yet when they were deleted, until the next start of a broker.
_DELETED_TABLE = """CREATE TABLE deleted (
        number INTEGER PRIMARY KEY,
        checksum INTEGER NOT NULL
    )"""
_TABLES = (
    """CREATE TABLE queue (
        number INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        auto_delete INTEGER NOT NULL,
        arguments BLOB NOT NULL,
        checksum INTEGER NOT NULL
    )""",
    """CREATE TABLE exchange (
        name TEXT PRIMARY KEY,
        type TEXT NOT NULL,
        auto_delete INTEGER NOT NULL,
        internal INTEGER NOT NULL,
        arguments BLOB NOT NULL,
        checksum INTEGER NOT NULL
    )""",
    """CREATE TABLE binding (
        source TEXT NOT NULL,
        kind TEXT NOT NULL,
        destination TEXT NOT NULL,
        routing_key TEXT NOT NULL,
        arguments BLOB NOT NULL,
        checksum INTEGER NOT NULL,
        UNIQUE (source, kind, destination, routing_key, arguments)
    )""",
    # `queues` is a JSON list of queue numbers. Large columns come last, so that SQLite can skip them.
    """CREATE TABLE message (
        number INTEGER PRIMARY KEY,
        queues TEXT NOT NULL,
        queues_checksum INTEGER NOT NULL,
        at REAL NOT NULL,
        checksum INTEGER NOT NULL,
        names BLOB NOT NULL,
        header BLOB NOT NULL,
        body BLOB NOT NULL
    )""",
    _DELETED_TABLE,
    # Damaged rows of all tables. `name` is the table and row number, `why` the error, and `content` the row as text.
    """CREATE TABLE damaged (
        number INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        why TEXT NOT NULL,
        content TEXT NOT NULL,
        body BLOB
    )""",
)
_CHANGES: Mapping[str, tuple[str, ...]] = {
    "queue": ("INSERT INTO queue VALUES (?, ?, ?, ?, ?)",),
    "no_queue": ("DELETE FROM queue WHERE name = ?", "DELETE FROM binding WHERE kind = 'queue' AND destination = ?"),
    "deleted": ("INSERT INTO deleted VALUES (?, ?)",),
    "exchange": ("INSERT INTO exchange VALUES (?, ?, ?, ?, ?, ?)",),
    "no_exchange": (
        "DELETE FROM exchange WHERE name = ?",
        "DELETE FROM binding WHERE source = ?",
        "DELETE FROM binding WHERE kind = 'exchange' AND destination = ?",
    ),
    "binding": ("INSERT OR IGNORE INTO binding VALUES (?, ?, ?, ?, ?, ?)",),
    "no_binding": (
        """DELETE FROM binding
            WHERE source = ? AND kind = ? AND destination = ? AND routing_key = ? AND arguments = ?""",
    ),
}
# One statement inserts many rows, because the store's thread waits for the GIL after each statement. While the event
# loop is busy, each of these waits is long.
_PUT = "INSERT INTO message VALUES "
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"
_MOVE = """UPDATE message SET queues = json_extract(value, '$[1]'), queues_checksum = json_extract(value, '$[2]')
    FROM json_each(?) WHERE number = json_extract(value, '$[0]')"""
_REMOVE = "DELETE FROM message WHERE number IN (SELECT value FROM json_each(?))"
_BODIES = """SELECT number, at, checksum, names, header, body FROM message
    WHERE number IN (SELECT value FROM json_each(?))"""
# Read texts as bytes, because sqlite3 fails for a whole page of rows if one text is not UTF-8.
_QUEUES = "SELECT rowid, number, CAST(name AS BLOB), auto_delete, arguments, checksum FROM queue ORDER BY number"
_DELETED = "SELECT rowid, number, checksum FROM deleted"
_EXCHANGES = """SELECT rowid, CAST(name AS BLOB), CAST(type AS BLOB), auto_delete, internal, arguments, checksum
    FROM exchange ORDER BY rowid"""
_BINDINGS = """SELECT rowid, CAST(source AS BLOB), CAST(kind AS BLOB), CAST(destination AS BLOB),
    CAST(routing_key AS BLOB), arguments, checksum FROM binding ORDER BY rowid"""
_MESSAGES = """SELECT number, CAST(queues AS BLOB), queues_checksum, at, checksum, names, header, body FROM message
    WHERE number > ? ORDER BY number LIMIT ?"""
_WRONG = "its checksum is wrong"
_WAY_OUT = "restore it from a copy, or move it away to begin with an empty store"
# Words in the errors of SQLite that mean that the structure of the file is damaged.
_STRUCTURE = ("malformed", "not a database", "no such", "syntax error")
# The first version of SQLite with ``UPDATE ... FROM``.
_OLDEST_SQLITE = (3, 33)
# Minimum size of an SQLite file in bytes.
_MIN_FILE_SIZE = 512
# Maximum number of messages in one statement.
_PORTION = 128
# Maximum bytes of the messages in one statement, except for a single larger message. The module sqlite3 caches one
# statement for each number of messages. Each cached statement keeps its last values, so the values must be small.
_PORTION_BYTES = 128 << 10
# Start of the data for the checksum of a message: number, time, length of the names, length of the header.
_HEAD = Struct(">qdII")
# Maximum number of messages that one statement of `Store.messages` reads.
_PAGE = 100


class Store:
    """The store file of one broker. Only one thread at a time may use a `Store`.

    Args:
        path: path of the file. The file is created if it does not exist.
        synchronous: the failures that commits survive: ``"normal"`` or ``"full"``, see `Synchronous`.

    Raises:
        StoreError: the file cannot be opened, is damaged, is not a store, or is used by another broker; or Python has
            an SQLite before 3.33. All methods raise `StoreError` if the file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str], *, synchronous: str = "full") -> None:
        #: The absolute path of the file, because the process may change its working directory.
        # A URL stays unchanged, so that `LockFile` recognises and rejects it.
        self.path = Path(path) if is_url(path) else Path(path).absolute()
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise StoreError(
                f"{self.path}: a store needs SQLite 3.33 or later, and this Python has {sqlite3.sqlite_version}; use "
                "another Python, or run the broker without a store"
            )
        self._lock = LockFile(
            self.path,
            error=StoreError,
            in_use=StoreError,
            told=("another broker", "give each broker a store of its own"),
        )
        #: For each row in the table ``damaged``, its name and error, such as ``queue 3: its checksum is wrong``.
        self.damaged: list[str] = []
        try:
            check_name(self.path, StoreError, "brokers")
            with _explained():
                if self.path.exists() and 0 < self.path.stat().st_size < _MIN_FILE_SIZE:
                    raise StoreError(f"{self.path} is damaged: it is cut off; {_WAY_OUT}")
                self._file = _open(self.path, synchronous=synchronous.upper())
                # Before the next check, which is slow if the file is large: the file may be replaced meanwhile.
                self._open_files = OpenFiles(self._file, self._lock)
                found = self._file.one("PRAGMA quick_check(1)")
                if found != "ok":
                    raise StoreError(f"{self.path} is damaged: {found}; {_WAY_OUT}")
                self._check_tables()
                # Delete messages that are in no durable queue. An earlier run wrote them, for example to free memory.
                self._file.execute("DELETE FROM message WHERE queues = '[]'")
                rows = self._file.rows("SELECT name, why FROM damaged ORDER BY number")
                self.damaged += [f"{name}: {why}" for name, why in rows]
        except BaseException:
            if hasattr(self, "_file"):
                self._file.close()
            self._lock.release()
            raise

    def _check_tables(self) -> None:
        there = [sql for (sql,) in self._file.rows("SELECT CAST(sql AS BLOB) FROM sqlite_master")]
        for table in _TABLES:
            if table.encode() in there:
                continue
            if table is _DELETED_TABLE:
                # Earlier commits did not have this table.
                self._file.execute(table)
            else:
                raise StoreError(f"{self.path} is damaged: the definition of a table has changed; {_WAY_OUT}")

    def write(self, batch: Batch) -> None:
        """Write all changes of a batch, or none."""
        gone = self.first_gone()
        if gone is not None:
            # Without the other files, SQLite still writes all commits to the file when it closes the file.
            way_out = "let consumers empty the queues and restart" if gone == self.path else "stop and restart"
            raise StoreError(
                f"{gone} was deleted, moved or replaced while the broker uses it; put it back, or {way_out} the broker"
            )
        file = self._file
        with file.calling, file.transaction():
            for change in batch.changes:
                self._change(change)
            for puts in _portions(batch.puts):
                file.execute(_PUT + ", ".join([_ROW] * len(puts)), *chain.from_iterable(map(_row, puts)))
            if batch.moves:
                moves = [(number, *_listed(number, queues)) for number, queues in batch.moves.items()]
                file.execute(_MOVE, json.dumps(moves))
            if batch.removals:
                file.execute(_REMOVE, json.dumps(batch.removals))

    def _change(self, change: Change) -> None:
        values = change.values
        if not change.kind.startswith("no_"):
            values = (*values, _checksum(values))
        for statement in _CHANGES[change.kind]:
            self._file.execute(statement, *values)

    def topology(self) -> Found:
        """Return the queues, exchanges and bindings. Set aside damaged rows, and bindings of missing objects."""
        with _explained():
            queues = [
                (number, name, bool(auto_delete), decode_table(arguments, 0)[0])
                for _, (number, name, auto_delete, arguments) in self._sound("queue", _QUEUES)
            ]
            exchanges = [
                (name, kind, bool(auto_delete), bool(internal), decode_table(arguments, 0)[0])
                for _, (name, kind, auto_delete, internal, arguments) in self._sound("exchange", _EXCHANGES)
            ]
            there = {("queue", queue[1]) for queue in queues} | {("exchange", exchange[0]) for exchange in exchanges}
            bindings = []
            for row, (source, kind, destination, key, arguments) in self._sound("binding", _BINDINGS):
                missing = [
                    f"{what} {name!r}"
                    for what, name in (("exchange", source), (kind, destination))
                    if (what, name) not in there and not (what == "exchange" and name.startswith("amq."))
                ]
                if missing:
                    self._set_aside("binding", row, f"the store does not have its {' or its '.join(missing)}")
                else:
                    bindings.append((source, kind, destination, key, decode_table(arguments, 0)[0]))
            deleted = {number for _, (number,) in self._sound("deleted", _DELETED)}
            return Found(queues, exchanges, bindings, deleted, self._file.one("SELECT max(number) FROM message") or 0)

    def _sound(self, table: str, statement: str) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number and the values of each undamaged row in a table. Set damaged rows aside."""
        for row, *found, checksum in self._file.rows(statement):
            try:
                values = [each.decode() if isinstance(each, bytes) else each for each in found[:-1]] + found[-1:]
                why = "" if _checksum(values) == checksum else _WRONG
            except Exception as error:
                values, why = found, str(error)
            if why:
                self._set_aside(table, row, why)
            else:
                yield row, values

    def _set_aside(self, table: str, row: int, why: str) -> None:
        file, name = self._file, f"{table} {row}"
        with file.calling, file.transaction():
            columns = [column[1] for column in file.rows(f"PRAGMA table_info({table})") if column[1] != "body"]
            shown = " || ' ' || ".join(f"quote({column})" for column in columns)
            body = "body" if table == "message" else "NULL"
            file.execute(
                f"INSERT INTO damaged SELECT NULL, ?, ?, {shown}, {body} FROM {table} WHERE rowid = ?", name, why, row
            )
            file.execute(f"DELETE FROM {table} WHERE rowid = ?", row)
        self.damaged.append(f"{name}: {why}")

    def set_aside_messages(self, numbers: Iterable[int], why: str = _WRONG) -> None:
        """Move messages to the table ``damaged``."""
        for number in numbers:
            self._set_aside("message", number, why)

    def end_deletions(self, numbers: Sequence[int]) -> None:
        """Remove the messages of deleted queues, and forget these queues."""
        with self._file.calling, self._file.transaction():
            self._file.execute(_REMOVE, json.dumps(numbers))
            self._file.execute("DELETE FROM deleted")

    def messages(self) -> Iterator[FoundMessage]:
        """Yield the undamaged messages in the order of their numbers. Set damaged messages aside."""
        last = 0
        while True:
            with _explained():
                rows = self._file.rows(_MESSAGES, last, _PAGE)
            if not rows:
                return
            for number, queues, queues_checksum, at, checksum, names, header, body in rows:
                try:
                    if _message_checksum(number, at, names, header, body) != checksum:
                        raise ValueError(_WRONG)
                    if crc32(queues, number & 0xFFFFFFFF) != queues_checksum:
                        raise ValueError("the checksum of its queues is wrong")
                    exchange, end = decode_short_string(names, 0)
                    routing_key, _ = decode_short_string(names, end)
                    found = FoundMessage(number, json.loads(queues), at, exchange, routing_key, header, body)
                except Exception as error:
                    self._set_aside("message", number, str(error))
                else:
                    yield found
            last = rows[-1][0]

    def first_gone(self) -> Path | None:
        """Return the path of a file of this store that was deleted, moved or replaced; ``None`` if there is none."""
        return self._open_files.first_gone()

    def check_path(self) -> None:
        """Raise `StoreError` if the path has another file or none. Any thread may call this method."""
        if self.first_gone() == self.path:
            raise StoreError(f"{self.path} was deleted, moved or replaced while the broker uses it")

    def close(self) -> None:
        if not self._lock.released:
            self._file.close()
            self._lock.release()


class BodyReader:
    """Reads bodies from the file of a store, even while a `Store` writes. Only one thread at a time may use a reader.

    Raises:
        StoreError: the file cannot be opened or, in `read`, cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(path, read_only=True)

    def read(self, numbers: Sequence[int]) -> dict[int, bytes | None]:
        """Return bodies by message number, without messages that are not in the store. A damaged body is ``None``."""
        found: dict[int, bytes | None] = {}
        for number, at, checksum, names, header, body in self._file.rows(_BODIES, json.dumps(numbers)):
            try:
                is_sound = _message_checksum(number, at, names, header, body) == checksum
            except (TypeError, ValueError, struct_error):
                is_sound = False
            found[number] = body if is_sound else None
        return found

    def close(self) -> None:
        self._file.close()


def _open(path: Path, **options: Any) -> Database:
    return Database(path, application_id=_APPLICATION_ID, version=_VERSION, tables=_TABLES, error=StoreError, **options)


@contextmanager
def _explained() -> Iterator[None]:
    """If a `StoreError` reports a damaged file, add the advice `_WAY_OUT` to its text."""
    try:
        yield
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, UnicodeDecodeError) or (
            isinstance(cause, sqlite3.Error) and any(words in str(error) for words in _STRUCTURE)
        ):
            raise StoreError(f"{error}; {_WAY_OUT}") from error
        raise


def _checksum(values: Iterable[object]) -> int:
    """Return the checksum of a row that is not a message."""
    return crc32(repr([int(each) if isinstance(each, bool) else each for each in values]).encode())


def _message_checksum(number: int, at: float, names: bytes, header: bytes, body: bytes) -> int:
    """Return the checksum of a message without the list of queues, which has its own checksum."""
    head = _HEAD.pack(number, at, len(names), len(header))
    return crc32(body, crc32(header, crc32(names, crc32(head))))


def _listed(number: int, queues: list[int]) -> tuple[str, int]:
    """Return the queues of a message as text for the database, and the checksum of the text."""
    # The `str` of a list of integers is valid JSON.
    listed = str(queues)
    return listed, crc32(listed.encode(), number & 0xFFFFFFFF)


def _portions(puts: Iterable[Put]) -> Iterator[list[Put]]:
    """Divide messages into lists, such that one statement can write each list (see `_PORTION_BYTES`)."""
    portion: list[Put] = []
    total = 0
    for put in puts:
        size = len(put.names) + len(put.header) + len(put.body)
        if portion and (len(portion) == _PORTION or total + size > _PORTION_BYTES):
            yield portion
            portion, total = [], 0
        portion.append(put)
        total += size
    if portion:
        yield portion


def _row(put: Put) -> tuple[object, ...]:
    number, at, names, header, body = put.number, put.at, put.names, put.header, put.body
    checksum = _message_checksum(number, at, names, header, body)
    return (number, *_listed(number, put.queues), at, checksum, names, header, body)
