"""Calls a blocking function on a separate thread, so that I/O threads and event loops do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["BackgroundCall", "Timer"]

_Answer = TypeVar("_Answer")


class BackgroundCall(Generic[_Answer]):
    """Calls a function, one call at a time. If a call is running, its result goes to the last caller of `ask`.

    Args:
        function: the function. It must not raise an exception.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._name = name
        self._lock = threading.Lock()
        # Whether a call is running, and the receiver of its answer; ``None`` if there is no receiver.
        self._is_running = False
        self._done: Callable[[_Answer], object] | None = None

    def ask(self, done: Callable[[_Answer], object]) -> None:
        """Call the function. If a call is running, use its result.

        Args:
            done: called with the result on any thread. It replaces the `done` of an earlier caller.
        """
        with self._lock:
            was_running, self._is_running, self._done = self._is_running, True, done
        if not was_running:
            self._begin()

    def cancel(self) -> None:
        """Forget the function that would receive the answer."""
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
        """If no thread could be started, `result` is the error."""
        self._answer(result)

    def _answer(self, answer: _Answer) -> None:
        with self._lock:
            done, self._done, self._is_running = self._done, None, False
        if done is not None:
            done(answer)


class Timer(Protocol):
    """The interface of a timer."""

    def cancel(self) -> object:
        """Cancel the call of the function."""
