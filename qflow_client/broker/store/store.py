"""The message store: durable queues, exchanges, bindings and persistent messages in one SQLite file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qflow_client.amqp.fields import decode_short_string, decode_table
from qflow_client.broker.store.errors import StoreError
from qflow_client.broker.store.journal import Batch, Change, Found, FoundMessage, Put
from qflow_client.database import Database, LockFile

__all__ = ["BodyReader", "Store"]

# "qBrk", and the version of the tables.
_APPLICATION_ID = 0x7142726B
_VERSION = 1
_TABLES = (
    """CREATE TABLE queue (
        number INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        auto_delete INTEGER NOT NULL,
        arguments BLOB NOT NULL
    )""",
    """CREATE TABLE exchange (
        name TEXT PRIMARY KEY,
        type TEXT NOT NULL,
        auto_delete INTEGER NOT NULL,
        internal INTEGER NOT NULL,
        arguments BLOB NOT NULL
    )""",
    """CREATE TABLE binding (
        source TEXT NOT NULL,
        kind TEXT NOT NULL,
        destination TEXT NOT NULL,
        routing_key TEXT NOT NULL,
        arguments BLOB NOT NULL,
        UNIQUE (source, kind, destination, routing_key, arguments)
    )""",
    # The queues are a JSON list of their numbers. What is large stands last.
    """CREATE TABLE message (
        number INTEGER PRIMARY KEY,
        queues TEXT NOT NULL,
        at REAL NOT NULL,
        names BLOB NOT NULL,
        header BLOB NOT NULL,
        body BLOB NOT NULL
    )""",
)
_CHANGES: Mapping[str, tuple[str, ...]] = {
    "queue": ("INSERT INTO queue VALUES (?, ?, ?, ?)",),
    "no_queue": ("DELETE FROM queue WHERE name = ?", "DELETE FROM binding WHERE kind = 'queue' AND destination = ?"),
    "exchange": ("INSERT INTO exchange VALUES (?, ?, ?, ?, ?)",),
    "no_exchange": (
        "DELETE FROM exchange WHERE name = ?",
        "DELETE FROM binding WHERE source = ?",
        "DELETE FROM binding WHERE kind = 'exchange' AND destination = ?",
    ),
    "binding": ("INSERT OR IGNORE INTO binding VALUES (?, ?, ?, ?, ?)",),
    "no_binding": (
        """DELETE FROM binding
            WHERE source = ? AND kind = ? AND destination = ? AND routing_key = ? AND arguments = ?""",
    ),
}
# One statement for all rows: between two of them this thread gives the interpreter away, and may wait long for it when
# the event loop is busy. So all bytes are one value, and where in it they are is another, in JSON.
_PUT = """INSERT INTO message
    SELECT number, queues, at,
        substr(:parts, start, names),
        substr(:parts, start + names, header),
        substr(:parts, start + names + header, body)
    FROM (
        SELECT json_extract(value, '$[0]') AS number, json_extract(value, '$[1]') AS queues,
            json_extract(value, '$[2]') AS at, json_extract(value, '$[3]') AS start,
            json_extract(value, '$[4]') AS names, json_extract(value, '$[5]') AS header,
            json_extract(value, '$[6]') AS body
        FROM json_each(:rows)
    )"""
_MOVE = """UPDATE message SET queues = json_extract(value, '$[1]')
    FROM json_each(?) WHERE number = json_extract(value, '$[0]')"""
_REMOVE = "DELETE FROM message WHERE number IN (SELECT value FROM json_each(?))"
_BODIES = "SELECT number, body FROM message WHERE number IN (SELECT value FROM json_each(?))"
# Bytes of messages that are written by one statement; SQLite takes 1,000,000,000 in one value, and no more.
_PORTION = 16 << 20
# Rows that are read at once.
_PAGE = 100


class Store:
    """One file, for one broker. For one thread at a time.

    Args:
        path: of the file; made if there is none.
        synchronous: ``"normal"`` survives the death of the process, ``"full"`` also that of the machine.

    Raises:
        StoreError: the file cannot be opened, is damaged, is something else, or another broker uses it.
    """

    def __init__(self, path: str | os.PathLike[str], *, synchronous: str = "full") -> None:
        #: Of the file.
        self.path = Path(os.fspath(path))
        self._lock = LockFile(
            self.path,
            error=StoreError,
            in_use=StoreError,
            told=("another broker", "give each broker a store of its own"),
        )
        try:
            self._file = _open(self.path, synchronous=synchronous.upper())
            # What was there for want of memory only.
            self._file.execute("DELETE FROM message WHERE queues = '[]'")
        except BaseException:
            self._lock.release()
            raise

    # In.

    def write(self, batch: Batch) -> None:
        """Do all of a batch, or nothing of it.

        Raises:
            StoreError: it could not be written.
        """
        file = self._file
        with file.transaction():
            for change in batch.changes:
                self._change(change)
            for puts in _portions(batch.puts):
                rows, parts = _packed(puts)
                file.execute(_PUT, rows=rows, parts=parts)
            if batch.moves:
                file.execute(_MOVE, json.dumps(list(batch.moves.items())))
            if batch.removals:
                file.execute(_REMOVE, json.dumps(batch.removals))

    def _change(self, change: Change) -> None:
        for statement in _CHANGES[change.kind]:
            self._file.execute(statement, *change.values)

    # Out.

    def topology(self) -> Found:
        """What there is but the messages.

        Raises:
            StoreError: it cannot be read.
        """
        rows = self._file.rows
        return Found(
            [
                (number, name, bool(auto_delete), decode_table(arguments, 0)[0])
                for number, name, auto_delete, arguments in rows("SELECT * FROM queue ORDER BY number")
            ],
            [
                (name, kind, bool(auto_delete), bool(internal), decode_table(arguments, 0)[0])
                for name, kind, auto_delete, internal, arguments in rows("SELECT * FROM exchange ORDER BY rowid")
            ],
            [
                (source, kind, destination, key, decode_table(arguments, 0)[0])
                for source, kind, destination, key, arguments in rows("SELECT * FROM binding ORDER BY rowid")
            ],
            self._file.one("SELECT max(number) FROM message") or 0,
        )

    def messages(self) -> Iterator[FoundMessage]:
        """All messages, in the order of their numbers.

        Raises:
            StoreError: one cannot be read.
        """
        last = 0
        while rows := self._file.rows("SELECT * FROM message WHERE number > ? ORDER BY number LIMIT ?", last, _PAGE):
            for number, queues, at, names, header, body in rows:
                exchange, end = decode_short_string(names, 0)
                routing_key, _ = decode_short_string(names, end)
                yield FoundMessage(number, json.loads(queues), at, exchange, routing_key, header, body)
            last = rows[-1][0]

    # The end.

    def close(self) -> None:
        """Let others have it."""
        if not self._lock.released:
            self._file.close()
            self._lock.release()


class BodyReader:
    """Reads bodies from the file of a store, also while that is written. For one thread at a time.

    Args:
        path: of the file.

    Raises:
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(path, read_only=True)

    def read(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Bodies of messages by their numbers; those that are gone are missing.

        Raises:
            StoreError: they cannot be read.
        """
        return dict(self._file.rows(_BODIES, json.dumps(numbers)))

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _open(path: Path, **options: Any) -> Database:
    return Database(path, application_id=_APPLICATION_ID, version=_VERSION, tables=_TABLES, error=StoreError, **options)


def _portions(puts: Iterable[Put]) -> Iterator[list[Put]]:
    """Messages by what is written at once, at least one."""
    portion: list[Put] = []
    size = 0
    for put in puts:
        size += len(put.names) + len(put.header) + len(put.body)
        if portion and size > _PORTION:
            yield portion
            portion, size = [], len(put.names) + len(put.header) + len(put.body)
        portion.append(put)
    if portion:
        yield portion


def _packed(puts: Sequence[Put]) -> tuple[str, bytes]:
    """What is to be inserted: where each has its bytes, counted from 1, and the bytes."""
    rows: list[tuple[object, ...]] = []
    parts: list[bytes] = []
    at = 1
    for put in puts:
        names, header, body = put.names, put.header, put.body
        rows.append((put.number, put.queues, put.at, at, len(names), len(header), len(body)))
        parts += (names, header, body)
        at += len(names) + len(header) + len(body)
    return json.dumps(rows), b"".join(parts)
