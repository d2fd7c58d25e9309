"""A file of our own in SQLite: made, recognised, and with errors that name it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qflow_client.errors import QflowError

__all__ = ["Database"]

# Seconds for which another process may keep the file.
_BUSY = 10.0


class Database:
    """One connection to one file, in WAL mode. For one thread at a time.

    Args:
        path: of the file; made if there is none.
        application_id: by which it is recognised.
        version: of its tables.
        tables: the statements that make them.
        error: what is raised whatever is wrong with it.
        synchronous: ``NORMAL`` survives the death of the process, ``FULL`` also that of the machine.
        read_only: look only, also while another process writes; the file must be there.

    Raises:
        QflowError: that is, `error`: it cannot be opened, is damaged, or is something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        application_id: int,
        version: int,
        tables: Sequence[str],
        error: type[QflowError],
        synchronous: str = "NORMAL",
        read_only: bool = False,
    ) -> None:
        #: Of the file.
        self.path = Path(os.fspath(path))
        self._error = error
        self._pid = os.getpid()
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        try:
            self._file = sqlite3.connect(uri, uri=True, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as failure:
            raise error(f"{self.path}: {failure}") from failure
        try:
            if not read_only:
                with self.transaction():
                    if not self.one("SELECT count(*) FROM sqlite_master") and not self.one("PRAGMA user_version"):
                        self.execute(f"PRAGMA application_id = {application_id}")
                        self.execute(f"PRAGMA user_version = {version}")
                        for statement in tables:
                            self.execute(statement)
            if self.one("PRAGMA application_id") != application_id:
                raise error(f"{self.path} is a database of something else; name another file")
            found = self.one("PRAGMA user_version")
            if found != version:
                raise error(
                    f"{self.path} has tables of version {found}, and this qflow_client knows {version}; name another"
                )
            if not read_only:
                self.execute("PRAGMA journal_mode = WAL")
                self.execute(f"PRAGMA synchronous = {synchronous}")
        except BaseException:
            self._file.close()
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise self._error(
                f"{self.path} was opened in process {self._pid}, and this is process {os.getpid()}, which must open it "
                "by itself"
            )

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        """Execute one statement."""
        self._check_process()
        try:
            return self._file.execute(statement, values)
        except sqlite3.Error as failure:
            raise self._error(f"{self.path}: {failure}") from failure

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute one statement with many values."""
        self._check_process()
        try:
            self._file.executemany(statement, rows)
        except sqlite3.Error as failure:
            raise self._error(f"{self.path}: {failure}") from failure

    def rows(self, statement: str, *values: object) -> list[Any]:
        """All rows of a result."""
        try:
            return self.execute(statement, *values).fetchall()
        except sqlite3.Error as failure:
            raise self._error(f"{self.path}: {failure}") from failure

    def one(self, statement: str, *values: object) -> Any:
        """The first value of the first row of a result; ``None`` if there is none."""
        rows = self.rows(statement, *values)
        return rows[0][0] if rows else None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is done in the block, or nothing of it."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close it; in a fork do nothing, because what is open is the parent's."""
        if os.getpid() == self._pid:
            self._file.close()
