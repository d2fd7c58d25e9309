"""`CommitWaits` lets threads wait until the writer has committed their messages.

A thread that commits by itself cannot return before the disk answers. So a call with a short time limit lets the writer
commit, and stops waiting at the limit. There is no lock, because a signal handler or a finalizer may interrupt a
waiting thread and call `send` (E2). Each access to the dict of `_Wait` objects is a single operation. A thread adds and
removes its own wait, and the writer removes a wait before it wakes the thread.
"""

from __future__ import annotations

import threading

__all__ = ["CommitWaits"]


class _Wait:
    __slots__ = ("sequence", "wake", "why")

    def __init__(self, sequence: int) -> None:
        #: The thread waits until all messages up to this sequence are on disk.
        self.sequence = sequence
        #: Why the messages are not on disk; "" if they are. Valid after `wake` is released.
        self.why = ""
        #: Released when the commit has succeeded or failed.
        self.wake = threading.Lock()
        self.wake.acquire()


class CommitWaits:
    """The threads of a producer that wait for a commit."""

    def __init__(self) -> None:
        # The waits as keys, in the order in which they began.
        self._waits: dict[_Wait, None] = {}

    def begin(self, sequence: int) -> _Wait:
        """Register a wait for a sequence. Afterwards the caller has to request a commit from the writer."""
        wait = _Wait(sequence)
        self._waits[wait] = None
        return wait

    def end(self, wait: _Wait, timeout: float) -> str:
        """Wait at most `timeout` seconds for the commit. Return why the messages are not on disk; "" if they are."""
        try:
            is_known = wait.wake.acquire(timeout=timeout)
        finally:
            self._waits.pop(wait, None)
        return wait.why if is_known else f"the message is not on disk after {timeout:.3g} s"

    def committed(self, durable: int, error: Exception | None) -> None:
        """Wake the threads whose messages are on disk, or all threads if the commit failed."""
        for wait in list(self._waits):
            if wait.sequence > durable:
                if error is None:
                    continue
                wait.why = str(error)
            self._waits.pop(wait, None)
            wait.wake.release()
