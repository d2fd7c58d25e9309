"""Locks that a ``with`` statement always releases, even if a signal handler raises an exception (E2).

On most versions of Python, these are the locks of `threading`. On Python 3.14, a ``with`` statement can leave a lock
of `threading` locked for ever: Python may run a signal handler after the call of ``__enter__`` and before the block.
If the handler raises an exception there, ``__exit__`` is not called (CPython issue 148874).
"""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["KeptLock", "Lock", "RLock"]


class KeptLock:
    """A lock for a ``with`` statement of Python 3.14.

    Python runs no signal handler at the end of a method that is written in Python. `map` calls `acquire` in C, so no
    handler runs between that call and the end of ``__enter__``. ``__exit__`` is the lock's own method, and it has
    released the lock when Python looks for signals.
    """

    __slots__ = ("__exit__", "_lock", "acquire", "release")

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.acquire, self.release, self.__exit__ = lock.acquire, lock.release, lock.__exit__

    def __enter__(self) -> None:
        [*map(self.acquire, (True,))]

    def locked(self) -> bool:
        """Return whether the lock is locked, for a lock that is not recursive."""
        return bool(self._lock.locked())


if sys.version_info[:2] == (3, 14):

    def Lock() -> KeptLock:
        """Return a lock as `threading.Lock` does."""
        return KeptLock(threading.Lock())

    def RLock() -> KeptLock:
        """Return a lock as `threading.RLock` does."""
        return KeptLock(threading.RLock())

else:
    Lock, RLock = threading.Lock, threading.RLock
