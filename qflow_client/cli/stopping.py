"""Ctrl-C and SIGTERM, so that a command can end in order and say how far it got."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Stopped", "Stopping"]


class Stopped(BaseException):
    """A signal came while the command was waiting for something that may be broken off."""


class Stopping:
    """Takes SIGINT and SIGTERM for the time of a `with` block, in the main thread; elsewhere it changes nothing.

    A handler that raises wherever it happens to be could lose what a call was about to return. This one raises only in
    `breakable`, and otherwise has `on_stop` called, on a thread of its own.
    """

    def __init__(self) -> None:
        #: The signal that came; ``None`` so far.
        self.signal: signal.Signals | None = None
        self._breakable = False
        self._before: dict[signal.Signals, Any] = {}
        # Its put is the one way of waking a thread that a signal handler may use at any time.
        self._came: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None

    @property
    def exit_code(self) -> int:
        """As shells have it: 128 and the signal's number; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._came.put(False)
        if self._watcher is not None:
            self._watcher.join()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._came.put(True)
        if self._breakable:
            self._breakable = False
            raise Stopped

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """What is done in the block may be broken off anywhere.

        Raises:
            Stopped: a signal came, then or before.
        """
        self._breakable = True
        try:
            if self.signal is not None:
                raise Stopped
            yield
        finally:
            self._breakable = False

    def on_stop(self, action: Callable[[], object]) -> None:
        """Have something done once a signal comes, on a thread of its own; at once if it came before."""

        def watch() -> None:
            if self._came.get():
                action()

        self._watcher = threading.Thread(target=watch, name="qflow-stopping", daemon=True)
        self._watcher.start()
