"""Measures how many rows wait in an outbox, and how long the oldest row has waited.

`measure` queries the database. `Backlog` is for frequent readers, such as metrics. A `Backlog` queries the database on
a separate thread, at most every ten seconds. Queries use at most one percent of the time. If the database does not
answer, a reader waits for at most one second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, DateTime, Engine, select, text
from sqlalchemy import func as sql
from sqlalchemy.orm import Session

from qflow_client.locks import Lock
from qflow_client.sqlalchemy.tables import Tables, dialect_of

__all__ = ["Backlog", "measure"]

# After a query of d seconds, no query starts for max(_PERIOD, _RARITY * d) seconds.
_PERIOD = 10.0
_RARITY = 100.0
# A reader waits at most `_PATIENCE` seconds for a result. PostgreSQL ends a query after `_LONGEST` seconds.
_PATIENCE = 1.0
_LONGEST = 30

_monotonic = time.monotonic

logger = logging.getLogger("qflow_client")


def measure(connection: Connection | Session, tables: Tables) -> tuple[int, float]:
    """Return the number of waiting rows, and the age of the oldest row in seconds (by the clock of the database)."""
    rows = tables.rows
    depth = connection.execute(select(sql.count()).select_from(rows)).scalar_one()
    # On PostgreSQL, `now()` is the start of this transaction, and a visible row may be newer. So use the present time.
    is_postgresql = dialect_of(connection, rows) == "postgresql"
    now = sql.clock_timestamp(type_=DateTime(timezone=True)) if is_postgresql else sql.now()
    oldest = connection.execute(select(rows.c.created_at, now).order_by(rows.c.id).limit(1)).first()
    return depth, 0.0 if oldest is None else max(0.0, (oldest[1] - oldest[0]).total_seconds())


@contextmanager
def _limited(connection: Connection) -> Iterator[None]:
    """Let PostgreSQL end each query of the ``with`` block after `_LONGEST` seconds. Then restore the connection."""
    if connection.dialect.name != "postgresql":
        yield
        return
    driver: Any = connection.connection.driver_connection
    # `SET LOCAL` has an effect only in a transaction.
    was_autocommit = driver.autocommit
    if was_autocommit:
        driver.autocommit = False
    try:
        connection.execute(text(f"SET LOCAL statement_timeout = '{_LONGEST}s'"))
        yield
    finally:
        driver.rollback()
        if was_autocommit:
            driver.autocommit = True


class Backlog:
    """Caches the result of `measure` for one outbox. Any number of threads can read the same object."""

    def __init__(self, engine: Engine, tables: Tables) -> None:
        self._engine = engine
        self._tables = tables
        self._lock = Lock()
        # The thread of the running query; ``None`` while no query runs.
        self._thread: threading.Thread | None = None
        self._next_at = 0.0
        self._found: tuple[int, float] | None = None

    def read(self) -> tuple[int, float] | None:
        """Return the result of the latest query, or ``None`` if this query has failed or still runs after a second."""
        with self._lock:
            if self._thread is None and _monotonic() >= self._next_at:
                self._thread = threading.Thread(target=self._ask, name="qflow-outbox-backlog", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE)
            if thread.is_alive():
                return None
        return self._found

    def _ask(self) -> None:
        began, found = _monotonic(), None
        try:
            with self._engine.connect() as connection, _limited(connection):
                found = measure(connection, self._tables)
        except Exception as error:
            # Do not log the error text, because it may contain data of a row.
            logger.debug("outbox relay: the backlog could not be counted: %s", type(error).__name__)
        finally:
            now = _monotonic()
            with self._lock:
                self._found, self._thread = found, None
                self._next_at = now + max(_PERIOD, _RARITY * (now - began))
