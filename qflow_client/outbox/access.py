"""`FileAccess` gives one thread at a time access to an outbox's file, in the order of arrival.

A commit writes all noted messages, so threads can share a commit. After its commit, a thread releases every waiter
whose message is now on disk, and passes its turn on. A *sequence* is a message's number in the outbox.

A plain lock is not enough: when it is released, a thread that has just arrived may get it before the waiters.

Ctrl-C may come between any two instructions of the main thread. So a thread takes the file's lock only in its turn, in
a ``with`` statement. If Ctrl-C prevents a thread from passing its turn on, the lock is free nevertheless. A waiter
checks the lock after `_LOST` seconds, or at its deadline. If the lock is free, the waiter takes the turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from qflow_client.database import Database
from qflow_client.locks import Lock

__all__ = ["FileAccess"]

_T = TypeVar("_T")

# Seconds after which a waiter checks whether the thread before it was interrupted.
_LOST = 1.0


class _Turn:
    __slots__ = ("sequence", "wake")

    def __init__(self, sequence: float) -> None:
        #: When the message with this sequence is on disk, the thread need not use the file any more.
        self.sequence = sequence
        #: Released when it is the thread's turn, or when the thread does not need a turn any more.
        self.wake = threading.Lock()
        self.wake.acquire()


class FileAccess:
    """Gives threads exclusive access to a file."""

    def __init__(self, file: Database, durable: int) -> None:
        self._file = file
        #: The sequence up to which all messages are on disk; set by the thread that uses the file.
        self.durable = durable
        # Held while the file is used.
        self._lock = Lock()
        # Guards `_current` and `_waiting`.
        self._turns_lock = Lock()
        # The turn of the thread that uses the file, and the waiting turns, in order.
        self._current: _Turn | None = None
        self._waiting: list[_Turn] = []

    def run(self, action: Callable[[], _T], deadline: float, sequence: float = math.inf) -> _T | None:
        """Call an action with exclusive access to the file, and return its result.

        Args:
            deadline: the time of `time.monotonic`, in seconds, at which waits for other threads and processes end.
            sequence: if the message with this sequence is on disk, return ``None`` and do not call the action.

        Raises:
            TimeoutError: the turn did not come before the deadline, so the action was not called.
        """
        turn = _Turn(sequence)
        try:
            with self._turns_lock:
                if self._current is None:
                    self._current = turn
                else:
                    self._waiting.append(turn)
            if self._current is not turn:
                self._wait(turn, deadline)
            if self.durable >= sequence:
                return None
            with self._lock:
                if self.durable >= sequence:
                    # The previous thread has committed the message.
                    return None
                self._file.deadline = deadline
                return action()
        finally:
            self._leave(turn)

    def _wait(self, turn: _Turn, deadline: float) -> None:
        """Wait until it is the thread's turn, or until the thread does not need a turn any more."""
        while True:
            left = deadline - time.monotonic()
            if turn.wake.acquire(timeout=max(0.0, min(_LOST, left))):
                return
            with self._turns_lock:
                if self.durable >= turn.sequence:
                    return
                if not self._lock.locked():
                    # Ctrl-C has interrupted the previous thread before it passed its turn on.
                    if turn in self._waiting:
                        self._waiting.remove(turn)
                    self._current = turn
                    return
            if left <= _LOST:
                raise TimeoutError

    def _leave(self, turn: _Turn) -> None:
        """Release the waiters that do not need a turn any more, and then pass the turn on."""
        with self._turns_lock:
            if self._current is not turn:
                # The thread does not have the turn. If Ctrl-C or the deadline has ended `_wait`, remove the entry.
                if turn in self._waiting:
                    self._waiting.remove(turn)
                return
            waiting = []
            for each in self._waiting:
                if each.sequence <= self.durable:
                    each.wake.release()
                else:
                    waiting.append(each)
            self._waiting = waiting
            # Wake the next thread last, so that its commit may include new messages of the threads released above.
            self._current = waiting.pop(0) if waiting else None
            if self._current is not None:
                self._current.wake.release()
