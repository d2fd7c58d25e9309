"""Calls a function that may block on a separate thread, so that no I/O thread and no event loop waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["BackgroundCall", "Timer"]

_Answer = TypeVar("_Answer")


class BackgroundCall(Generic[_Answer]):
    """Calls a function, one call at a time. If a call is running, a further caller gets its result.

    Args:
        function: the function; it must not raise.
        name: of the thread.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._name = name
        self._lock = threading.Lock()
        # Whether a call runs, and the receiver of its answer; ``None`` if there is no receiver.
        self._is_running = False
        self._done: Callable[[_Answer], object] | None = None

    def ask(self, done: Callable[[_Answer], object]) -> None:
        """Call the function, or wait for a running call.

        Args:
            done: called with the result, on any thread. The `done` of an earlier call is not called any more.
        """
        with self._lock:
            was_running, self._is_running, self._done = self._is_running, True, done
        if not was_running:
            self._begin()

    def cancel(self) -> None:
        """Drop the receiver of the answer."""
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
        """Make an answer of the function's result, or of the error if no thread could be started."""
        self._answer(result)

    def _answer(self, answer: _Answer) -> None:
        with self._lock:
            done, self._done, self._is_running = self._done, None, False
        if done is not None:
            done(answer)


class Timer(Protocol):
    """The interface of a timer."""

    def cancel(self) -> object:
        """Prevent the call of the function."""
