"""Shows warnings and errors from the library's log to the operator of a running command."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue
from threading import Thread

from rich.console import Console
from rich.text import Text

__all__ = ["warnings_shown"]

#: Maximum number of log records that wait for a slow terminal or pipe. Further records are dropped.
_MAX_WAITING = 1000
#: At the end of the block: maximum seconds to wait for room in the queue, and maximum seconds to wait for the thread.
_AT_EXIT = 1.0


class _Handler(logging.Handler):
    """Puts log records into a queue. The logging thread belongs to the broker, and must not wait for the terminal."""

    def __init__(self, records: Queue[logging.LogRecord | None]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            self._records.put_nowait(record)


@contextmanager
def warnings_shown(logger: str, console: Console) -> Iterator[None]:
    """Show the warnings and errors of a logger on `console` during the block. A live display on `console` stays intact.

    If the root logger has a handler, as with ``--debug``, show nothing, because that handler shows the records.
    """
    if logging.getLogger().handlers:
        yield
        return
    records: Queue[logging.LogRecord | None] = Queue(_MAX_WAITING)
    handler = _Handler(records)
    thread = Thread(target=_show, args=(records, console), name="qflow-warnings", daemon=True)
    thread.start()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(logger).removeHandler(handler)
        with suppress(Full):
            records.put(None, timeout=_AT_EXIT)
            thread.join(_AT_EXIT)


def _show(records: Queue[logging.LogRecord | None], console: Console) -> None:
    formatter = logging.Formatter()
    while (record := records.get()) is not None:
        # The text may contain names that clients chose. Escape control characters, which could control the terminal.
        text = "".join(
            each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in formatter.format(record)
        )
        console.print(Text(f"qflow: {record.levelname.lower()}: {text}"), soft_wrap=True)
