"""What a thread waits on."""

from __future__ import annotations

import threading

__all__ = ["Latch"]


class Latch:
    """Set once, for any number of threads.

    Not `threading.Event`: Ctrl-C inside that can leave its lock held, and then whoever sets it, which is the I/O
    thread, would wait for ever.
    """

    __slots__ = ("_locks", "is_set")

    def __init__(self) -> None:
        #: Whether it was set.
        self.is_set = False
        # One for each thread that waits.
        self._locks: list[threading.Lock] = []

    def set(self) -> None:
        """Have everybody go on. A second time does what an interrupted first one has not done."""
        self.is_set = True
        for lock in tuple(self._locks):
            try:
                lock.release()
            except RuntimeError:
                # It was.
                continue

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        Args:
            timeout: seconds; ``None`` for ever.

        Returns:
            Whether it is.
        """
        if not self.is_set:
            lock = threading.Lock()
            lock.acquire()
            self._locks.append(lock)
            # Set meanwhile: then this one may have been overlooked.
            if not self.is_set:
                lock.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX)))
            self._locks.remove(lock)
        return self.is_set
