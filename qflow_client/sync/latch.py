"""A latch on which threads wait."""

from __future__ import annotations

import threading

__all__ = ["Latch"]


class Latch:
    """Is set once, for any number of threads.

    `threading.Event` is not used, because Ctrl-C inside it can leave its lock held. Then the thread that sets it, the
    I/O thread, would never return.
    """

    __slots__ = ("_locks", "is_set")

    def __init__(self) -> None:
        #: Whether the latch is set.
        self.is_set = False
        # One lock for each waiting thread.
        self._locks: list[threading.Lock] = []

    def set(self) -> None:
        """Wake all waiting threads. A second call completes an interrupted first one."""
        self.is_set = True
        for lock in tuple(self._locks):
            try:
                lock.release()
            except RuntimeError:
                # The lock is released already.
                continue

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            Whether the latch is set.
        """
        if not self.is_set:
            lock = threading.Lock()
            lock.acquire()
            self._locks.append(lock)
            # If the latch was set meanwhile, `set` may have missed this lock.
            if not self.is_set:
                lock.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX)))
            self._locks.remove(lock)
        return self.is_set
