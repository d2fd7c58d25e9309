"""A thread of its own for the application's callbacks."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from qflow_client.logs import log

__all__ = ["Dispatcher"]

# A callback, and what returns its argument when its turn has come.
_Calls = queue.SimpleQueue[tuple[Callable[[Any], object], Callable[[], Any]] | None]


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        callback, take = call
        argument = take()
        try:
            callback(argument)
        except BaseException as error:
            # The application's mistake, or its sys.exit, must not cost it what follows.
            log(logging.ERROR, "callback %r failed on %r", callback, argument, error=error)
        # What was called may be let go of.
        del call, callback, take, argument


class Dispatcher:
    """Calls callbacks in order, on one thread, which ends with it if it is not stopped before.

    A callback that raises is logged and does no harm.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it was. Not inside a step: it waits for the thread, which may find garbage."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)
        # Nobody comes between the look and the store.
        if self._thread is None:
            self._thread = thread
        if self._thread is thread:
            # The end of the process needs it to the last.
            weakref.finalize(self, self._calls.put, None).atexit = False
            thread.start()

    def call(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Have ``callback(argument)`` called after all that was asked for before."""
        self._calls.put((callback, lambda: argument))

    def call_with_next(self, callback: Callable[[Any], object], take: Callable[[], Any]) -> None:
        """As `call`, but with the argument that ``take()`` returns when the turn of the call has come."""
        self._calls.put((callback, take))

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is one of the callbacks."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> None:
        """Let it end after the calls that are due, and wait for that, unless called from one of them.

        Args:
            timeout: seconds to wait at the most.
        """
        self._calls.put(None)
        if self._thread is not None and not self.is_current_thread:
            self._thread.join(timeout)
