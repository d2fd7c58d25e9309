"""Threads that wait for a commit of the writer.

A thread that commits by itself cannot leave before the disk answers. So a call with a short deadline has the writer
commit, and waits for that until its deadline. There is no lock: a signal handler or a finalizer may interrupt a thread
that waits here, and send (E2). Threads append, and only the writer removes.
"""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["CommitWaits"]


class _Wait:
    """A thread that waits."""

    __slots__ = ("sequence", "wake", "why")

    def __init__(self, sequence: int) -> None:
        #: The last sequence of its messages.
        self.sequence = sequence
        #: Why they are not on disk; "" if they are.
        self.why = ""
        #: Released when that is known.
        self.wake = threading.Lock()
        self.wake.acquire()


class CommitWaits:
    """The waits of a producer's threads."""

    def __init__(self) -> None:
        self._waits: deque[_Wait] = deque()

    def begin(self, sequence: int) -> _Wait:
        """Begin to wait for a sequence. The writer is to be asked for a commit afterwards."""
        wait = _Wait(sequence)
        self._waits.append(wait)
        return wait

    @staticmethod
    def end(wait: _Wait, timeout: float) -> str:
        """Wait.

        Args:
            wait: the wait.
            timeout: seconds.

        Returns:
            Why the messages are not on disk; "" if they are.
        """
        return wait.why if wait.wake.acquire(timeout=timeout) else f"not on disk after {timeout:.3g} s"

    def committed(self, durable: int, error: Exception | None) -> None:
        """Wake the threads whose messages are on disk, and after a failed commit all others; for the writer."""
        waits = self._waits
        # Threads may have appended out of order. One that is behind a higher sequence is woken with that.
        while waits and (error is not None or waits[0].sequence <= durable):
            wait = waits.popleft()
            if wait.sequence > durable:
                wait.why = str(error)
            wait.wake.release()
