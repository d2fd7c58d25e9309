"""Passes log messages of this package, and of pika on its I/O threads, to the log handlers of the application.

A log handler is code of the application. The handler may block, raise an exception, or send with the same producer. So
no handler runs on a thread that a connection needs, or inside a step of a producer (see `core.step`). The calling
thread creates a record, and a separate thread passes the record to the handlers.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import traceback
from contextlib import suppress
from queue import Empty
from typing import Any

from qflow_client.core.reporting import LogEntry, is_logged, log_entry
from qflow_client.forks import after_fork_in_child
from qflow_client.guard import is_serving

__all__ = ["flush_logs", "log", "take_over", "write_log"]

logger = logging.getLogger("qflow_client")

# Maximum number of records that wait for a slow handler. Further records are dropped, and their number is logged.
_MOST = 1000
# Maximum seconds that the process waits at its end for unwritten records.
_AT_EXIT = 1.0


class _Writer:
    """Passes records to handlers in order, on a thread that is started for the first record.

    The class uses no lock. Otherwise a finalizer that logs could wait for a lock of the thread that it interrupts.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._dropped = 0

    @property
    def _records(self) -> Any:
        """The queue of records, created on first use, because gevent may patch `queue` after this module's import."""
        made = self.__dict__.get("made")
        # `setdefault` is one operation, so two threads get the same queue.
        return self.__dict__.setdefault("made", queue.SimpleQueue()) if made is None else made

    def put(self, record: logging.LogRecord) -> None:
        if self._records.qsize() >= _MOST:
            self._dropped += 1
            return
        self._records.put(record)
        # Start no thread while the interpreter ends, because the thread would never run, and `start` would wait for it.
        if self._thread is None and not sys.is_finalizing():
            thread = threading.Thread(target=self._run, name="qflow-log", daemon=True)
            # This check and the assignment call no function, so no other code runs between them. Assign the thread
            # before it runs, because the handler of its first record may call `flush`.
            if self._thread is None:
                self._thread = thread
            if self._thread is thread:
                self._start(thread)

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except BaseException as error:
            self._thread = None
            # If there are too many threads, or the process ends, the record waits for the next `put` or for `flush`.
            if not isinstance(error, RuntimeError):
                raise

    def flush(self, timeout: float) -> bool:
        if self._thread is threading.current_thread():
            return False
        if self._thread is None:
            with suppress(Empty):
                while True:
                    self._take(self._records.get_nowait())
            return True
        # Wait with a queue, not with a `threading.Event`. If Ctrl-C interrupts the wait for an event, the event's lock
        # may stay locked. Then the writing thread would wait for this lock forever.
        written: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._records.put(written)
        try:
            written.get(timeout=timeout)
        except Empty:
            return False
        return True

    def _run(self) -> None:
        while True:
            # Do not keep the record in a variable while the thread waits, because the record keeps objects alive.
            self._take(self._records.get())

    def _take(self, record: Any) -> None:
        if not isinstance(record, logging.LogRecord):
            record.put(None)
            return
        try:
            logging.getLogger(record.name).handle(record)
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text = "%d log records were dropped, because the log handlers are too slow"
                logger.handle(_record(log_entry(logging.WARNING, text, dropped)))
        except BaseException:
            _complain()


def _complain() -> None:
    # Print the current exception, as the handlers of `logging` do.
    if logging.raiseExceptions and sys.stderr is not None:
        traceback.print_exc()


_writer = _Writer()


def _after_fork_in_child() -> None:
    # The writing thread exists only in the parent, and writes the waiting records. So the child needs a new `_Writer`.
    global _writer
    _writer = _Writer()


after_fork_in_child(_after_fork_in_child)


def _record(entry: LogEntry, error: BaseException | None = None) -> logging.LogRecord:
    level, text, arguments, code, line = entry
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logger.makeRecord(logger.name, level, code.co_filename, line, text, arguments, exc_info, code.co_name)


def log(level: int, text: str, *arguments: object, error: BaseException | None = None) -> None:
    """Log a message on the logging thread. The function returns immediately, and raises no exception of a handler.

    Args:
        arguments: values for the format string `text`. These values must not change, because they are formatted later.
        error: exception whose traceback is logged.
    """
    _put(log_entry(level, text, *arguments, depth=2), error)


def write_log(entries: list[LogEntry]) -> None:
    """Log the entries that a `ProducerProtocol` has recorded, in the same way as `log`."""
    for entry in entries:
        _put(entry)


def _put(entry: LogEntry, error: BaseException | None = None) -> None:
    try:
        if is_logged(entry[0]):
            _writer.put(_record(entry, error))
    except Exception:
        # The application may have its own record factory or class of records, which has raised the exception.
        _complain()


def take_over(package: str) -> None:
    """Log the records of a library's loggers on the logging thread if the loop of a connection has created them."""
    for name in tuple(logging.root.manager.loggerDict):
        if name == package or name.startswith(f"{package}."):
            filters = logging.getLogger(name).filters
            # The first filter, so that the filters of the application see each record once, on the logging thread.
            if _take_over not in filters:
                filters.insert(0, _take_over)


def _take_over(record: logging.LogRecord) -> bool:
    """Filter the records of a logger: the writer handles the records of a connection's loop again."""
    if not is_serving():
        return True
    try:
        # Format the text now, because the arguments may change.
        record.msg, record.args = record.getMessage(), None
        _writer.put(record)
    except Exception:
        # The text cannot be formatted. As in `logging`, the call that logs must not fail.
        _complain()
    return False


def flush_logs(timeout: float) -> bool:
    """Wait until all earlier records are handled. Return False after `timeout` seconds, and on the logging thread."""
    return _writer.flush(timeout)


atexit.register(flush_logs, _AT_EXIT)
