"""The session of a relay with SQLite.

SQLite allows one writer at a time, and assigns the id of a row while the writer has the lock. So rows become visible in
the order of their ids. The new rows are therefore exactly the rows after the last row that was read. Once a minute, the
relay reads from the first row, to find rows with old ids, such as rows from a backup.

One relay at a time works on an outbox. The relay locks the file ``<database>.relay``, or ``<database>.<table>.relay``
if the table has another name than the default. If the relay's process ends, the operating system releases the lock.
For `Outbox.status`, the file contains the holds of the relay's producer.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, bindparam, case, delete, exists, insert, orm, text, update
from sqlalchemy import func as sql
from sqlalchemy import select as query
from sqlalchemy.exc import IntegrityError

from qflow_client.files import lock, open_private
from qflow_client.forks import after_fork_in_child
from qflow_client.sqlalchemy.sessions import FULL_PERIOD, PAGE_BYTES, Aside, RelayError, Row, wait_readable
from qflow_client.sqlalchemy.tables import PARTITIONS, Tables

__all__ = ["SqliteSession", "relay_of"]

_monotonic = time.monotonic

_PARTITIONS = frozenset(range(PARTITIONS))
# Every usual build of SQLite accepts this number of values in one statement.
_VALUES = 500
# Maximum size in bytes of the text with the holds of a relay.
_MAX_HOLDS_TEXT = 1000

# Descriptors of the locked files of this process. A forked child closes them, because its copy of a descriptor would
# keep the lock after the end of the parent.
_locks: set[int] = set()


def _close_locks_in_child() -> None:
    while _locks:
        os.close(_locks.pop())


after_fork_in_child(_close_locks_in_child)


def _path_of(connection: Connection | orm.Session) -> str:
    """Return the path of the database's file; an empty string if the database is in memory."""
    path: str = connection.execute(text("PRAGMA database_list")).first()[2]  # type: ignore[index]  # there is a row
    # A database of SQLite's VFS `memdb` has a name, but no file.
    return path if Path(path).is_file() else ""


def _lock_path(path: str, tables: Tables) -> str:
    """Return the path of the file that a relay locks. Each outbox of a database has its own file."""
    # SQLite ignores the case of ASCII letters in a name. `quote` replaces all other letters.
    name = quote(tables.rows.name, safe="").lower()
    return f"{path}.relay" if name == "qflow_outbox" else f"{path}.{name}.relay"


def relay_of(connection: Connection | orm.Session, tables: Tables) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of working relays (``None`` if it is unknown), and the holds of each relay that has holds."""
    path = _path_of(connection)
    if not path:
        return None, ()
    try:
        descriptor = os.open(_lock_path(path, tables), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0, ()
    except OSError:
        # For example, this user is not allowed to open the file.
        return None, ()
    _locks.add(descriptor)
    try:
        lock(descriptor)
    except BlockingIOError:
        holds = os.read(descriptor, _MAX_HOLDS_TEXT).decode()
        return 1, (holds,) if holds else ()
    finally:
        _locks.discard(descriptor)
        os.close(descriptor)
    return 0, ()


class SqliteSession:
    """One session of a relay. It ignores `lease`, because the lock on the file ends with the process.

    Raises:
        RelayError: the driver is asynchronous, or the database is in memory.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be used.
    """

    is_notified = False

    def __init__(self, engine: Engine, tables: Tables, lease: float) -> None:
        if engine.dialect.is_async:
            raise RelayError(
                f'a relay needs a synchronous driver, not {engine.dialect.driver}: use create_engine("sqlite:///…")'
            )
        self._tables = tables
        self._last = 0
        self._is_fresh = True
        self._next_full = 0.0
        self.is_full = True
        self.has_more = False
        self._lock: int | None = None
        self._holds = ""
        self._connection = engine.connect()
        try:
            with self._connection.begin():
                path = _path_of(self._connection)
            if not path:
                raise RelayError(
                    "a relay needs a database in a file, because a database in memory belongs to one thread or process"
                )
            self._path = _lock_path(path, tables)
            with self._connection.begin(), suppress(IntegrityError):
                self._connection.execute(
                    insert(tables.relay),
                    [{"partition": partition, "permitted": 0, "relayed": 0} for partition in range(PARTITIONS)],
                )
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        pass

    def due(self) -> set[int]:
        return set(_PARTITIONS)

    def take(self, partitions: Iterable[int]) -> dict[int, int]:
        if self._lock is None:
            self._lock = open_private(self._path, os.O_RDWR)
            try:
                lock(self._lock)
            except BlockingIOError:
                self._unlock()
                return {}
            _locks.add(self._lock)
            self.say(self._holds)
        relay = self._tables.relay
        with self._connection.begin():
            found = self._connection.execute(query(relay.c.partition, relay.c.permitted)).all()
        return {partition: permitted for partition, permitted in found if partition in set(partitions)}

    def give_up(self, doubts: Mapping[int, int]) -> None:
        relay = self._tables.relay
        if self._lock is not None:
            with self._connection.begin():
                for partition, doubt in doubts.items():
                    chosen = relay.c.partition == partition
                    self._connection.execute(update(relay).where(chosen).values(permitted=doubt))
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            _locks.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def start_over(self) -> None:
        self._last, self._is_fresh = 0, True

    def is_full_due(self) -> bool:
        return not self._is_fresh and _monotonic() >= self._next_full

    def read(self, limit: int, gone: Sequence[int] = ()) -> list[Row]:
        if self._lock is None:
            return []
        rows, relay = self._tables.rows.c, self._tables.relay
        self.is_full = self._is_fresh
        if self._last == 0:
            self._next_full = _monotonic() + FULL_PERIOD
        found: list[Row] = []
        size = 0
        with self._connection.begin():
            for row in self._connection.execute(
                query(rows.id, rows.partition, rows.exchange, rows.routing_key, rows.properties, rows.body)
                .where(rows.id > self._last)
                .order_by(rows.id)
                .limit(limit)
            ):
                found.append(Row(*row))
                size += len(row.body)
                if size >= PAGE_BYTES:
                    break
        # Write in a separate transaction. If there is another writer, SQLite may refuse a write in a transaction that
        # has already read.
        if found or gone:
            with self._connection.begin():
                self._delete(gone)
                for partition, last in {row.partition: row.id for row in found}.items():
                    values = {"permitted": sql.max(relay.c.permitted, last)}
                    self._connection.execute(update(relay).where(relay.c.partition == partition).values(**values))
        self.has_more = len(found) == limit or size >= PAGE_BYTES
        self._is_fresh = self._is_fresh and self.has_more
        if found:
            self._last = found[-1].id
        return found

    def delete(self, gone: Sequence[int]) -> None:
        with self._connection.begin():
            self._delete(gone)

    def _delete(self, gone: Sequence[int]) -> None:
        rows, relay = self._tables.rows, self._tables.relay
        counts: Counter[int] = Counter()
        for begin in range(0, len(gone), _VALUES):
            chosen = delete(rows).where(rows.c.id.in_(gone[begin : begin + _VALUES])).returning(rows.c.partition)
            counts.update(self._connection.execute(chosen).scalars())
        for partition, count in counts.items():
            values = {"relayed": relay.c.relayed + count}
            self._connection.execute(update(relay).where(relay.c.partition == partition).values(**values))

    def set_aside(self, rows: Sequence[Aside]) -> None:
        table, failed = self._tables.rows, self._tables.failed
        names = (*self._tables.message_columns, "created_at", "reply")
        with self._connection.begin():
            for row in rows:
                given = case(
                    (exists().where(failed.c.id == row.id), query(sql.max(failed.c.id) + 1).scalar_subquery()),
                    else_=row.id,
                )
                new = row._asdict()
                values = (bindparam(name, new[name]) if name in new else table.c[name] for name in names)
                chosen = query(given, *values).where(table.c.id == row.id)
                self._connection.execute(insert(failed).from_select(["id", *names], chosen))
                self._connection.execute(delete(table).where(table.c.id == row.id))

    def ping(self) -> None:
        pass

    def say(self, holds: str) -> None:
        self._holds = holds
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, holds.encode()[:_MAX_HOLDS_TEXT], 0)

    def wait(self, wake: socket.socket, timeout: float) -> bool:
        wait_readable((wake.fileno(),), timeout)
        return False

    def close(self) -> None:
        self._unlock()
        self._connection.close()
