"""`Latch` lets threads wait for the end of a close, or until a message is settled."""

from __future__ import annotations

import threading

__all__ = ["Latch"]


class Latch:
    """A flag that is never cleared after it was set. Any number of threads can wait until it is set.

    `Latch` replaces `threading.Event`. If Ctrl-C interrupts a wait for an `Event`, the lock of the `Event` may stay
    locked. Then the I/O thread, which sets the `Event`, would wait for this lock forever.
    """

    __slots__ = ("_locks", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        # One lock for each waiting thread.
        self._locks: list[threading.Lock] = []

    def set(self) -> None:
        """Set the latch, and wake all waiting threads. If Ctrl-C interrupts `set`, a second call can complete it."""
        self.is_set = True
        for lock in tuple(self._locks):
            try:
                lock.release()
            except RuntimeError:
                # Another call has already released the lock.
                continue

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set, at most `timeout` seconds (``None`` for no limit). Return True if it is set."""
        if not self.is_set:
            lock = threading.Lock()
            lock.acquire()
            self._locks.append(lock)
            # If another thread has called `set` meanwhile, that call may not have released this lock.
            if not self.is_set:
                lock.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX)))
            self._locks.remove(lock)
        return self.is_set
