"""Opens the SQLite files of this package, and locks files for one process. All errors contain the path of the file."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qflow_client.errors import QflowError
from qflow_client.files import lock, make_private, open_private, unlock
from qflow_client.forks import after_fork_in_child, before_fork
from qflow_client.locks import RLock
from qflow_client.redaction import is_url, shown

__all__ = ["BUSY", "Database", "LockFile", "OpenFiles", "check_name"]

# The exceptions of `sqlite3`. With a damaged file, Python may also fail to decode the text of SQLite's error. SQLite's
# error for a lack of memory is a `MemoryError`.
_FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
#: Maximum seconds to wait for a file that another process has locked, if there is no earlier deadline.
BUSY = 10.0
# Seconds that SQLite waits for a lock, and seconds of the pause after this wait. Then the statement is repeated.
_BUSY_SLICE = 0.04
_PAUSE = 0.01
# Maximum seconds for which a fork waits for calls of SQLite on other threads.
_FORK_PATIENCE = 1.0
# SQLite's error codes for a locked file.
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY)
# A lock file is empty, or contains the id of the last process with the lock, or null bytes after a machine crash.
_LOCK = re.compile(rb"\d*\s*|\0*")


def _is_locked(failure: Exception) -> bool:
    # Errors that come from Python's module `sqlite3`, and not from SQLite, have no code.
    return getattr(failure, "sqlite_errorcode", None) in _LOCKED


class Database:
    """A connection to a SQLite file in WAL mode. Only one thread at a time may use the connection.

    Args:
        path: path of the file. If it does not exist, it is created, unless `read_only`.
        application_id: number that SQLite keeps in the file. It shows which class of this package uses the file.
        synchronous: with ``NORMAL``, a crash of the machine may lose commits; with ``FULL``, no crash loses commits.
        read_only: whether to open an existing file for reading. Another process may write to it at the same time.
        timeout: maximum seconds to wait for the lock of another process while the file is opened.

    Raises:
        QflowError: (of the class `error`) the file cannot be opened, is damaged, or has another id or version.
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
        timeout: float = BUSY,
    ) -> None:
        _refuse_url(path, error)
        self.path = Path(os.fspath(path))
        #: The time of `time.monotonic`, in seconds, at which a statement stops waiting for the lock of another process.
        #: Only the thread that uses the file may set this time.
        self.deadline = time.monotonic() + timeout
        #: A second deadline like `deadline`, which any thread may set at any time.
        self.stop_at = math.inf
        self._error = error
        self._pid = os.getpid()
        #: Held during each call of SQLite and during transactions. A fork during a call could copy a locked mutex of
        #: SQLite into the child, which would then wait for it forever. A child that ends a transaction of its parent
        #: damages the file. Reentrant, because a signal handler may fork.
        self.calling = RLock()
        _databases.add(self)
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        try:
            if not read_only:
                # Create a private file first, because SQLite gives its further files the permissions of this file.
                make_private(self.path)
        except OSError as failure:
            raise error(f"{self.path}: {failure.strerror}") from failure
        try:
            with self.calling:
                self._file = sqlite3.connect(
                    uri, uri=True, timeout=_BUSY_SLICE, isolation_level=None, check_same_thread=False
                )
        except sqlite3.Error as failure:
            raise error(f"{self.path}: {failure}") from failure
        try:
            if not read_only:
                with self.calling, self.transaction():
                    if not self.one("SELECT count(*) FROM sqlite_master") and not self.one("PRAGMA user_version"):
                        self.execute(f"PRAGMA application_id = {application_id}")
                        self.execute(f"PRAGMA user_version = {version}")
                        for statement in tables:
                            self.execute(statement)
            if self.one("PRAGMA application_id") != application_id:
                raise error(f"{self.path} is a database of another application; name another file")
            found = self.one("PRAGMA user_version")
            if found != version:
                raise error(
                    f"{self.path} has tables of version {found}, but this qflow_client reads version {version}; name "
                    "another file"
                )
            if not read_only:
                self.execute("PRAGMA journal_mode = WAL")
                self.execute(f"PRAGMA synchronous = {synchronous}")
        except BaseException:
            self.close()
            raise
        self.deadline = math.inf

    def check_process(self) -> None:
        """Raise an error in a forked child, because the open file belongs to the parent."""
        if os.getpid() != self._pid:
            raise self._error(
                f"{self.path} was opened in process {self._pid}; it cannot be used in process {os.getpid()}, which "
                "must open it again"
            )

    def _failed(self, failure: Exception) -> QflowError:
        # A `MemoryError` has no text.
        return self._error(f"{self.path}: {str(failure) or type(failure).__name__}")

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        self.check_process()
        try:
            with self.calling:
                return self._file.execute(statement, values)
        except _FAILURES as failure:
            if _is_locked(failure):
                return self._execute_when_free(statement, values, failure)
            raise self._failed(failure) from failure

    def _execute_when_free(self, statement: str, values: Any, failure: Exception) -> sqlite3.Cursor:
        give_up_at = time.monotonic() + BUSY
        while time.monotonic() < min(give_up_at, self.deadline, self.stop_at):
            time.sleep(_PAUSE)
            try:
                with self.calling:
                    return self._file.execute(statement, values)
            except _FAILURES as error:
                failure = error
                if not _is_locked(failure):
                    break
        raise self._failed(failure) from failure

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        self.check_process()
        try:
            with self.calling:
                self._file.executemany(statement, rows)
        except _FAILURES as failure:
            raise self._failed(failure) from failure

    def rows(self, statement: str, *values: object) -> list[Any]:
        try:
            cursor = self.execute(statement, *values)
            with self.calling:
                return cursor.fetchall()
        except _FAILURES as failure:
            raise self._failed(failure) from failure

    def one(self, statement: str, *values: object) -> Any:
        """Return the first value of the first row of a result, or ``None`` if there are no rows."""
        rows = self.rows(statement, *values)
        return rows[0][0] if rows else None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the ``with`` block as a transaction, which makes all changes or none.

        Use it as ``with file.calling, file.transaction():``. This method must not hold the lock `calling` itself: if
        Ctrl-C came after the ``yield`` and before the block, the lock would stay locked as long as the error is kept.
        """
        try:
            self.execute("BEGIN IMMEDIATE")
            yield
            self.execute("COMMIT")
        except BaseException:
            # Report the first error, not an error of the rollback. In a forked child, the transaction is the parent's.
            with suppress(sqlite3.Error, QflowError):
                self.check_process()
                with self.calling:
                    if self._file.in_transaction:
                        self._file.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file. Do nothing in a forked child, because the open file belongs to the parent."""
        if os.getpid() == self._pid:
            with self.calling:
                self._file.close()


_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _wait_for_calls() -> None:
    """Wait until no thread uses SQLite. A disk that does not answer stops no fork.

    Do not keep the locks during the fork. Python may call other functions before the fork, and they may wait for a
    thread that waits for these locks. Without them, this thread usually forks before another thread can run.
    """
    deadline = time.monotonic() + _FORK_PATIENCE
    locks, held = [each.calling for each in tuple(_databases)], list[bool]()
    try:
        for lock_ in locks:
            # Acquire and record the result in one call into C, so that Ctrl-C cannot come between the two.
            held.extend(map(lock_.acquire, (True,), (max(0.0, deadline - time.monotonic()),)))
    finally:
        for lock_, is_held in zip(locks, held, strict=False):
            if is_held:
                lock_.release()


before_fork(_wait_for_calls)
# A child cannot use these files. A lock that `_wait_for_calls` did not get stays locked in the child.
after_fork_in_child(_databases.clear)


def _refuse_url(path: str | os.PathLike[str], error: type[QflowError]) -> None:
    # Reject a URL here, because all other errors contain the path, and a URL may contain a password.
    if is_url(path):
        raise error(f"{shown(path)}: it must be the path of a file, not a URL")


class LockFile:
    """A lock that one object at a time can have. If its process crashes, the operating system releases the lock.

    Args:
        path: path of the file that the lock protects.
        error: class of the error if the lock file cannot be used.
        in_use: class of the error if another process, or another object of this process, has the lock.
        told: two parts of the error text of `in_use`: the kind of object that uses the file, and advice.

    Raises:
        QflowError: the lock file cannot be used (class `error`), or the lock is taken (class `in_use`).
    """

    released = True

    def __init__(self, path: Path, *, error: type[QflowError], in_use: type[QflowError], told: tuple[str, str]) -> None:
        _refuse_url(path, error)
        # Use the real path, so that a file and the symbolic links to it have the same lock file.
        self.path = Path(f"{os.path.realpath(path)}-lock")
        try:
            # Without O_NONBLOCK, the opening of a named pipe could wait for its other end.
            self._descriptor = open_private(self.path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
        except OSError as failure:
            words = failure.strerror or ""
            where = "" if str(self.path) in words else f": {self.path}"
            raise error(f"{path}: {words}{where}") from failure
        try:
            #: The locked file. If the path has another file later, that is not this lock.
            self.opened = os.fstat(self._descriptor)
            content = os.pread(self._descriptor, 100, 0) if stat.S_ISREG(self.opened.st_mode) else None
            if content is None or not _LOCK.fullmatch(content):
                # Do not write to the file, because it may belong to another program.
                raise error(f"{path}: {self.path} is not a lock file of qflow_client; move it away")
            try:
                lock(self._descriptor)
            except BlockingIOError:
                holder = os.pread(self._descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
                # Do not compare process ids, because processes in different containers may have the same id.
                is_own = any(each.path == self.path and not each.released for each in tuple(_lock_files))
                whose = "in this process" if is_own else f"in process {holder}"
                raise in_use(f"{path} is used by {told[0]} {whose}; {told[1]}") from None
            except OSError as failure:
                raise error(f"{path}: it cannot be locked: {failure.strerror}") from failure
            # The spaces overwrite the end of a longer process id, so the file need not be truncated. The lock works
            # without the id, for which a full disk has no room.
            with suppress(OSError):
                os.pwrite(self._descriptor, f"{os.getpid():<20}".encode(), 0)
            self._pid = os.getpid()
            self.released = False
            _lock_files.add(self)
        except BaseException:
            self.released = True
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        if not self.released and self._pid != os.getpid():
            # This process is a forked child whose fork handlers have not run yet.
            self.forget()
        if not self.released:
            # Unlock explicitly, because the copy of the open file in a forked child would keep the lock. Unlock before
            # the close: if Ctrl-C comes after the unlock, a second `release` unlocks again, which does no harm.
            with suppress(OSError):
                unlock(self._descriptor)
            self.released = True
            os.close(self._descriptor)

    def __del__(self) -> None:
        # If Ctrl-C came before the new object was assigned to a variable, only this method can release the lock.
        self.release()

    def forget(self) -> None:
        """Close the copy of the file in a forked child. The parent keeps the lock."""
        if not self.released:
            self.released = True
            os.close(self._descriptor)


_lock_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


def check_name(path: Path, error: type[QflowError], users: str) -> None:
    """Reject a file with several names: users with different names have different locks and `-wal` files."""
    if path.is_file() and (path.stat().st_nlink > 1 or os.path.ismount(os.path.realpath(path))):
        raise error(
            f"{path} has several hard links, or is a mount point, so two {users} could overwrite messages of each "
            "other; give the file one name, and mount its directory instead of the file"
        )


class OpenFiles:
    """The open file of a `Database`, its lock file and its `-wal` file, and whether their paths still have them.

    SQLite itself would continue to write to a deleted file. Without the lock file, another process may have opened the
    database. Without the `-wal` file, a crash loses commits.

    The path of the `Database` must be absolute, because the process may change its working directory.
    """

    def __init__(self, file: Database, lock_file: LockFile) -> None:
        path = file.path
        # SQLite creates the `-wal` file at the first read.
        file.one("PRAGMA user_version")
        wal = Path(f"{os.path.realpath(path)}-wal")
        self._files = [(path, path.stat()), (lock_file.path, lock_file.opened)]
        if wal.exists():
            self._files.append((wal, wal.stat()))

    def first_gone(self) -> Path | None:
        """Return the first path that no longer has the open file, or ``None``."""
        return next((path for path, opened in self._files if not _is_at(path, opened)), None)


def _is_at(path: Path, opened: os.stat_result) -> bool:
    """Return whether a path still has the file that was opened there. Return True if this is not known."""
    try:
        return os.path.samestat(path.stat(), opened)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _after_fork_in_child() -> None:
    for lock_file in tuple(_lock_files):
        lock_file.forget()


after_fork_in_child(_after_fork_in_child)
