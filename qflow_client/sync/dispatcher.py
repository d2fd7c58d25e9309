"""The thread on which a `Producer` calls the application's callbacks. `Engine` schedules the calls."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from qflow_client.background import join
from qflow_client.logs import log

__all__ = ["Dispatcher"]

# Scheduled calls. Each has a callback, and a function that returns the argument. ``None`` ends the thread.
_Calls = queue.SimpleQueue[tuple[Callable[[Any], object], Callable[[], Any]] | None]


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        callback, take = call
        argument = take()
        try:
            callback(argument)
        except BaseException as error:
            # An exception of the application, even `SystemExit`, must not prevent later calls.
            log(logging.ERROR, "callback %r failed on %r", callback, argument, error=error)
        # Keep no reference to the callback or its argument while waiting for the next call.
        del call, callback, take, argument


class Dispatcher:
    """Calls callbacks in order on one thread, until the dispatcher is deleted or stopped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it was started before.

        The caller holds no lock of the engine: `start` waits for the new thread, where a finalizer may need the lock.
        """
        if self._thread is not None:
            return
        thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)
        # CPython runs no other code between this check and the assignment, so only one call starts its thread.
        if self._thread is None:
            self._thread = thread
        if self._thread is thread:
            # Exit handlers still need the thread, so `finalize` does not end the thread at exit.
            weakref.finalize(self, self._calls.put, None).atexit = False
            thread.start()

    def call(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Schedule ``callback(argument)`` after all earlier calls."""
        self._calls.put((callback, lambda: argument))

    def call_with_next(self, callback: Callable[[Any], object], take: Callable[[], Any]) -> None:
        """Schedule ``callback(take())`` after all earlier calls. ``take()`` is called just before the callback."""
        self._calls.put((callback, take))

    @property
    def is_current_thread(self) -> bool:
        """Whether the current thread is the one that calls the callbacks."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> None:
        """Make the thread end after the scheduled calls.

        Wait for the end for at most `timeout` seconds. A callback that calls this method does not wait.
        """
        self._calls.put(None)
        if self._thread is not None and not self.is_current_thread:
            join(self._thread, timeout)
