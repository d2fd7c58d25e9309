"""Handles Ctrl-C and SIGTERM, so that a command ends cleanly and reports its progress."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

__all__ = ["Stopped", "Stopping"]


class Stopped(BaseException):
    """A signal (SIGINT or SIGTERM) ends the command, for example in a block of `Stopping.breakable`."""


class Stopping:
    """Handles SIGINT and SIGTERM during a `with` block in the main thread. A block in another thread has no effect.

    If a signal handler raises an exception, the result of the interrupted call may be lost. So the handler raises
    `Stopped` only in a `breakable` block.
    """

    def __init__(self) -> None:
        #: The first signal that came during the block; ``None`` if no signal has come.
        self.signal: signal.Signals | None = None
        self._breakable = False
        self._before: dict[signal.Signals, Any] = {}
        # Wakes the thread of `on_stop`. A signal handler may call `SimpleQueue.put`, which is reentrant.
        self._came: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None

    @property
    def exit_code(self) -> int:
        """The exit code: 128 plus the number of the signal, as in shells, or 0 if no signal came."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
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
        """Let a signal raise `Stopped` anywhere in the block. If a signal came earlier, raise `Stopped` immediately."""
        self._breakable = True
        try:
            if self.signal is not None:
                raise Stopped
            yield
        finally:
            self._breakable = False

    def on_stop(self, action: Callable[[], object]) -> None:
        """Start a thread that calls `action` when a signal comes, or immediately if a signal has already come."""

        def watch() -> None:
            if self._came.get():
                action()

        self._watcher = threading.Thread(target=watch, name="qflow-stopping", daemon=True)
        self._watcher.start()
