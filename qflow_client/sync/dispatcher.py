"""A thread of its own for the application's callbacks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)


class Dispatcher:
    """Calls callbacks in order, on one thread that is started by the first of them.

    A callback that raises is logged and does no harm.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Have ``callback(argument)`` called after all that was asked for before."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        self._calls.put((callback, argument))

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is one of the callbacks."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> None:
        """Let it end after the calls that are due, and wait for that, unless called from one of them.

        Args:
            timeout: seconds to wait at the most.
        """
        thread = self._thread
        if thread is not None:
            self._calls.put(None)
            if not self.is_current_thread:
                thread.join(timeout)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            callback, argument = call
            try:
                callback(argument)
            except Exception:
                # The application's mistake must not cost it the events that follow.
                logger.exception("callback %r failed on %r", callback, argument)
