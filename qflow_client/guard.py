"""Ensures that steps of a producer run one at a time, and never inside another step (E2).

A step is one change of a producer's state, such as the handling of a received frame. Between any two instructions of a
step, Python may run *foreign code* on the same thread: a signal handler or a finalizer. Foreign code may send a
message. If a nested call waited for the lock of the interrupted step, the thread would wait for itself. If it took the
lock of another producer, two threads could wait for each other. So a thread is marked while it waits for a lock or has
the lock. If code on a marked thread needs a step, it gets an error, or the I/O thread executes the step later. In the
usual case, `send` needs no step (`send_at_once`). So even foreign code can send.

Foreign code inside a step may also wait for a lock of the application, such as the lock of a log handler. The thread
that has this lock may be in a call that waits for the end of the step. So a call of the application waits for another
step only until a deadline (`Guard.try_take`). Then the call gets an error, or the I/O thread executes the step later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from threading import get_ident
from typing import Final, TypeVar

from qflow_client.errors import NestedCall
from qflow_client.forks import after_fork_in_child
from qflow_client.locks import Lock

__all__ = ["LOOPS", "NOT_TAKEN", "Guard", "NotTaken", "check_can_wait", "is_inside", "is_serving", "serve", "take"]

_T = TypeVar("_T")

#: Minimum seconds that a call waits for another thread's step, whatever its deadline is. A step needs far less time.
PATIENCE = 1.0
# Maximum seconds that a call waits for another thread's step.
_MAX_WAIT = 60.0
# A long wait consists of at least this number of short waits. A suspended process loses only one short wait.
_WAIT_PIECES = 10


class NotTaken(Enum):
    """Returned if a step was not executed. An exception would be ambiguous: a signal handler may raise it too."""

    NOT_TAKEN = "not taken"


NOT_TAKEN: Final = NotTaken.NOT_TAKEN

# The threads that are inside a step.
_inside: set[int] = set()
# The threads that run the loop of a connection (`serve`).
_serving: set[int] = set()


def is_inside() -> bool:
    """Return True if this thread is inside a step of any producer."""
    return get_ident() in _inside


def is_serving() -> bool:
    """Return True if this thread runs the loop of a connection (`serve`)."""
    return get_ident() in _serving


def check_can_wait(
    what: str, message: object = None, exchange: str | None = None, routing_key: str | None = None
) -> None:
    """Raise `NestedCall` if this thread must not wait: inside a step, or in the loop of a connection."""
    me = get_ident()
    if me in _inside or me in _serving:
        raise NestedCall(what, message, exchange=exchange, routing_key=routing_key)


def take(step: Callable[[], _T]) -> _T:
    """Mark this thread as inside a step while a function runs. Unlike `Guard.take`, this function takes no lock."""
    me = get_ident()
    if me in _inside:
        raise NestedCall("a call")
    try:
        _inside.add(me)
        return step()
    finally:
        _inside.discard(me)


def serve(run: Callable[[], None]) -> None:
    """Run the loop of a connection. While it runs, `check_can_wait` raises an error on this thread."""
    me = get_ident()
    _serving.add(me)
    try:
        run()
    finally:
        _serving.discard(me)


def _wait(lock: threading.Lock, held: list[bool], deadline: float) -> None:
    """Try to acquire a lock until a deadline (see `Guard.try_take`), and append the result of each try to `held`."""
    begun = time.monotonic()
    until = max(begun + PATIENCE, min(deadline, begun + _MAX_WAIT))
    while not held[-1] and (len(held) <= _WAIT_PIECES or time.monotonic() < until):
        held.extend(map(lock.acquire, (True,), (PATIENCE / _WAIT_PIECES,)))


class Guard:
    """The lock for the state of a producer whose steps run on several threads."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()

    def take(self, step: Callable[[], _T]) -> _T:
        """Execute a step when no other thread executes one. Raise `NestedCall` if this thread is inside a step."""
        me = get_ident()
        if me in _inside:
            raise NestedCall("a call")
        try:
            _inside.add(me)
            with self._lock:
                return step()
        finally:
            _inside.discard(me)

    def try_take(self, step: Callable[[], _T], deadline: float = 0.0) -> _T | NotTaken:
        """Execute a step for a call of the application, with a limited wait. Any thread may call this method.

        Args:
            deadline: end of the wait for the step of another thread, in seconds of `time.monotonic`. The limit of the
                wait is at least `PATIENCE` and at most `_MAX_WAIT` seconds, whatever the deadline is.

        Returns:
            The result of the step. `NOT_TAKEN` if this thread is inside a step, or if the step of another thread has
            not ended in time. In both cases nothing has changed.
        """
        me = get_ident()
        if me in _inside:
            return NOT_TAKEN
        lock = self._lock
        held: list[bool] = []
        try:
            _inside.add(me)
            try:
                # Acquire and record the result in one call into C, so that no interrupt comes between the two.
                held += map(lock.acquire, (False,))
                if not held[-1]:
                    _wait(lock, held, deadline)
                return step() if held[-1] else NOT_TAKEN
            finally:
                # No Python function is called in this block before `release`, so no interrupt can prevent the release.
                if held and held[-1]:
                    lock.release()
        finally:
            _inside.discard(me)

    # Only threads of this package, which Ctrl-C never interrupts, use the context manager.

    def __enter__(self) -> None:
        _inside.add(get_ident())
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()
        _inside.discard(get_ident())


#: All asyncio producers share this guard, because they may share a connection. In one loop, steps never overlap.
LOOPS = Guard()


def _after_fork_in_child() -> None:
    LOOPS.__init__()  # type: ignore[misc]  # another thread may have had the lock
    # The child has only this thread. A marked thread stays marked, because it will complete the step that it is inside.
    me = get_ident()
    _inside.intersection_update({me})
    _serving.intersection_update({me})


after_fork_in_child(_after_fork_in_child)
