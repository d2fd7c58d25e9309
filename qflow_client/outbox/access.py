"""Exclusive access to an outbox's file, in the order of arrival, with a deadline for each wait.

One thread uses the file at a time. A thread that waits for a message to be on disk shares the commit of the thread
before it. When that thread has finished, every waiter whose message is on disk is released, and the next of the others
gets the file. Its commit includes everything that was noted meanwhile, so one of many threads commits for all.

It would not be enough to wait for the lock of the file. A thread that arrives when the lock is released would get it
first, and would commit only for itself.

Ctrl-C may come between any two instructions of a main thread. So the lock of the file is taken only by ``with``, and
only by the thread whose turn it is. If Ctrl-C ends a thread before it passes its turn on, the lock is free. The waiters
find that after `_LOST` seconds, or at their deadlines, and one of them continues.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from qflow_client.database import Database

__all__ = ["FileAccess"]

_T = TypeVar("_T")

# Seconds after which a waiter checks whether the thread before it was interrupted.
_LOST = 1.0


class _Turn:
    """A thread's turn to use the file."""

    __slots__ = ("sequence", "wake")

    def __init__(self, sequence: float) -> None:
        #: The thread needs no turn when this sequence is on disk.
        self.sequence = sequence
        #: Released when it is the thread's turn, or when the thread does not need a turn any more.
        self.wake = threading.Lock()
        self.wake.acquire()


class FileAccess:
    """Gives threads exclusive access to a file.

    Args:
        file: the file.
        durable: the last sequence that is on disk.
    """

    def __init__(self, file: Database, durable: int) -> None:
        self._file = file
        #: The sequence up to which everything is on disk; set by the thread that uses the file.
        self.durable = durable
        # Held while the file is used.
        self._lock = threading.Lock()
        # Guards the two attributes below.
        self._turns_lock = threading.Lock()
        # The turn of the thread that uses the file, and the waiting turns, in order.
        self._current: _Turn | None = None
        self._waiting: list[_Turn] = []

    def run(self, action: Callable[[], _T], deadline: float, sequence: float = math.inf) -> _T | None:
        """Call an action with exclusive access to the file.

        Args:
            action: what to do with the file.
            deadline: seconds of `time.monotonic` at which to stop waiting, for access and for other processes.
            sequence: the action is not needed once this sequence is on disk.

        Returns:
            What the action returns; ``None`` if it was not needed.

        Raises:
            TimeoutError: the deadline has passed, and the action was not called.
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
                    # The thread before has committed it meanwhile.
                    return None
                self._file.deadline = deadline
                return action()
        finally:
            self._leave(turn)

    def _wait(self, turn: _Turn, deadline: float) -> None:
        """Return when it is the thread's turn, or when the thread does not need a turn."""
        while True:
            left = deadline - time.monotonic()
            if turn.wake.acquire(timeout=max(0.0, min(_LOST, left))):
                return
            with self._turns_lock:
                if self.durable >= turn.sequence:
                    return
                if not self._lock.locked():
                    # An interrupt has ended the thread before without passing the turn on.
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
                # The thread had to wait; or Ctrl-C came before it was removed from the list.
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
            # This comes last, so that the messages that other threads put next go into its commit.
            self._current = waiting.pop(0) if waiting else None
            if self._current is not None:
                self._current.wake.release()
