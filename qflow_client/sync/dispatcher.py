"""A separate thread for the application's callbacks."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from qflow_client.logs import log

__all__ = ["Dispatcher"]

# A callback, and a function that returns its argument when the callback is next.
_Calls = queue.SimpleQueue[tuple[Callable[[Any], object], Callable[[], Any]] | None]


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        callback, take = call
        argument = take()
        try:
            callback(argument)
        except BaseException as error:
            # A mistake of the application, or its sys.exit, must not prevent the following calls.
            log(logging.ERROR, "callback %r failed on %r", callback, argument, error=error)
        # Drop the references to the called objects.
        del call, callback, take, argument


class Dispatcher:
    """Calls callbacks in order on one thread, until it is deleted or stopped.

    An exception of a callback is logged and has no other effect.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it is started.

        Do not call this inside a step: it waits for the thread, which may collect garbage.
        """
        if self._thread is not None:
            return
        thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)
        # Nothing runs between this check and the assignment.
        if self._thread is None:
            self._thread = thread
        if self._thread is thread:
            # The thread is needed until the very end of the process.
            weakref.finalize(self, self._calls.put, None).atexit = False
            thread.start()

    def call(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Schedule ``callback(argument)`` after all earlier calls."""
        self._calls.put((callback, lambda: argument))

    def call_with_next(self, callback: Callable[[Any], object], take: Callable[[], Any]) -> None:
        """Same as `call`, but ``take()`` returns the argument when the callback is next."""
        self._calls.put((callback, take))

    @property
    def is_current_thread(self) -> bool:
        """Return True if the caller is one of the callbacks."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> None:
        """End the thread after the scheduled calls, and wait for its end, unless one of these calls is the caller.

        Args:
            timeout: seconds to wait at most.
        """
        self._calls.put(None)
        if self._thread is not None and not self.is_current_thread:
            self._thread.join(timeout)
