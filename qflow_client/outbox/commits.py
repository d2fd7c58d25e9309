"""`CommitWaits` lets threads wait until the writer has committed their messages. `Storage` calls it.

A thread that commits by itself cannot return before the disk answers. So a call with a short deadline lets the writer
commit, and stops waiting at the deadline. There is no lock, because a signal handler or a finalizer may interrupt a
waiting thread and call `send` (E2). Threads append `_Wait` objects, and only the writer removes them.
"""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["CommitWaits"]


class _Wait:
    __slots__ = ("sequence", "wake", "why")

    def __init__(self, sequence: int) -> None:
        #: The last sequence of the thread's messages.
        self.sequence = sequence
        #: Why the messages are not on disk; "" if they are.
        self.why = ""
        #: Released when the result is known.
        self.wake = threading.Lock()
        self.wake.acquire()


class CommitWaits:
    """The threads of a producer that wait for a commit."""

    def __init__(self) -> None:
        self._waits: deque[_Wait] = deque()

    def begin(self, sequence: int) -> _Wait:
        """Register a wait for a sequence. Afterwards the caller has to request a commit from the writer."""
        wait = _Wait(sequence)
        self._waits.append(wait)
        return wait

    @staticmethod
    def end(wait: _Wait, timeout: float) -> str:
        """Wait for the result of the commit.

        Args:
            timeout: maximum seconds to wait.

        Returns:
            Why the messages are not on disk; "" if they are.
        """
        return wait.why if wait.wake.acquire(timeout=timeout) else f"the message is not on disk after {timeout:.3g} s"

    def committed(self, durable: int, error: Exception | None) -> None:
        """Wake the threads whose messages are on disk, or all threads if the commit failed. Called by the writer."""
        waits = self._waits
        # The waits can be out of the order of sequences. Then a wait for a lower sequence ends later than necessary.
        while waits and (error is not None or waits[0].sequence <= durable):
            wait = waits.popleft()
            if wait.sequence > durable:
                wait.why = str(error)
            wait.wake.release()
