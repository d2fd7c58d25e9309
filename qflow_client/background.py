"""Calls a blocking function on a separate thread, so that I/O threads and event loops do not wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from qflow_client.locks import Lock

__all__ = ["BackgroundCall", "Timer", "join"]

_Answer = TypeVar("_Answer")


def join(thread: threading.Thread, timeout: float) -> None:
    """Wait at most `timeout` seconds for the end of a thread. At the end of Python do not wait: no thread runs then."""
    if not sys.is_finalizing():
        thread.join(timeout)


class BackgroundCall(Generic[_Answer]):
    """Calls a function on a separate thread, one call at a time. The result goes to the `done` of the latest `ask`.

    Args:
        function: the function to call. It must not raise an exception.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._name = name
        self._lock = Lock()
        self._is_running = False
        # The function that gets the result of the running call; ``None`` after `cancel`, and without a running call.
        self._done: Callable[[_Answer], object] | None = None

    def ask(self, done: Callable[[_Answer], object]) -> None:
        """Begin a call of the function, or use the result of the running call. Return without waiting for the result.

        Args:
            done: called with the result, on any thread. A new `ask` before the result replaces this `done`.
        """
        with self._lock:
            was_running, self._is_running, self._done = self._is_running, True, done
        if not was_running:
            self._begin()

    def cancel(self) -> None:
        """Forget the `done` of the running call. The call continues, but its result is ignored."""
        with self._lock:
            self._done = None

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._take(error)

    def _run(self) -> None:
        self._take(self._function())

    def _take(self, result: Any) -> None:
        """Handle the result of the function, or the RuntimeError if no thread could be started."""
        self._answer(result)

    def _answer(self, answer: _Answer) -> None:
        with self._lock:
            done, self._done, self._is_running = self._done, None, False
        if done is not None:
            done(answer)


class Timer(Protocol):
    """A timer of an event loop or a thread."""

    def cancel(self) -> object:
        """Cancel the timer, so that its function is not called."""
