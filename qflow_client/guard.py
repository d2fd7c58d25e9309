"""Allows one step of a producer's state at a time, and no step inside another (E2).

While a thread takes a step, Python may run foreign code on the thread between any two instructions. This may be a
signal handler, or a finalizer that logs, and whose log handler sends. If that code waited for the step's lock, it would
wait for itself. If it took the lock of another producer, two threads could wait for each other. So a thread is marked
from before it waits for a lock until after it has released the lock. If code on a marked thread needs a step, it gets
an error, or the step is passed to the I/O thread. A send while there is room needs no step (`send_at_once`).

Foreign code inside a step may also wait for a lock of the application, such as that of a log handler. The thread that
holds that lock may be in a call that waits for the step. So a call of the application waits for a step only until its
deadline, see `Guard.try_take`. After that it gets an error, or the step is passed to the I/O thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from threading import get_ident
from types import TracebackType
from typing import Final, TypeVar

from qflow_client.errors import NestedCall
from qflow_client.forks import after_fork_in_child

__all__ = ["LOOPS", "NOT_TAKEN", "Guard", "NotTaken", "check_can_wait", "is_inside", "serve", "take"]

_T = TypeVar("_T")

#: The shortest time in seconds that a call of the application waits for the step of another thread. A step takes far
#: less.
PATIENCE = 1.0
# The longest.
_LONGEST = 60.0
# A wait has at least so many pieces. A process that is suspended meanwhile loses one of them.
_PIECES = 10


class NotTaken(Enum):
    """The result of a step that could not be taken; nothing has changed. An exception might be a signal handler's."""

    NOT_TAKEN = "not taken"


NOT_TAKEN: Final = NotTaken.NOT_TAKEN

# The threads that are inside a step, and the threads that connections depend on.
_inside: set[int] = set()
_serving: set[int] = set()


def is_inside() -> bool:
    """Return True if this thread is inside a step of any producer."""
    return get_ident() in _inside


def check_can_wait(
    what: str, message: object = None, exchange: str | None = None, routing_key: str | None = None
) -> None:
    """Raise an error in a place where a wait might never end.

    Args:
        what: the call, for people.
        message: the message that it should send.
        exchange: its exchange.
        routing_key: its routing key.

    Raises:
        NestedCall: this thread is inside a step, or a connection depends on it.
    """
    me = get_ident()
    if me in _inside or me in _serving:
        raise NestedCall(what, message, exchange=exchange, routing_key=routing_key)


def take(step: Callable[[], _T]) -> _T:
    """Take a step that only one thread takes.

    Raises:
        NestedCall: this thread is inside a step.
    """
    me = get_ident()
    if me in _inside:
        raise NestedCall("a call")
    try:
        _inside.add(me)
        return step()
    finally:
        _inside.discard(me)


def serve(run: Callable[[], None]) -> None:
    """Run the loop of a connection, and mark this thread as one that the connection depends on."""
    me = get_ident()
    _serving.add(me)
    try:
        run()
    finally:
        _serving.discard(me)


def _wait(lock: threading.Lock, held: list[bool], deadline: float) -> None:
    """Wait for a lock.

    Args:
        lock: the lock.
        held: its last element is True once this thread has the lock.
        deadline: as for `Guard.try_take`.
    """
    begun = time.monotonic()
    until = max(begun + PATIENCE, min(deadline, begun + _LONGEST))
    while not held[-1] and (len(held) <= _PIECES or time.monotonic() < until):
        held.extend(map(lock.acquire, (True,), (PATIENCE / _PIECES,)))


class Guard:
    """The lock for a state whose steps several threads take."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self, step: Callable[[], _T]) -> _T:
        """Take a step, on any thread.

        Raises:
            NestedCall: this thread is inside a step.
        """
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
        """Take a step for a call of the application, on any thread.

        Args:
            step: the step.
            deadline: until when to wait for the step of another thread, in seconds of `time.monotonic`; at least for
                `PATIENCE`, at most for `_LONGEST`.

        Returns:
            The result of the step. `NOT_TAKEN` if this thread is inside a step, or the step of another thread has not
            ended in time.
        """
        me = get_ident()
        if me in _inside:
            return NOT_TAKEN
        lock = self._lock
        held: list[bool] = []
        try:
            _inside.add(me)
            try:
                # One call into C, so no interrupt comes between taking the lock and recording that.
                held += map(lock.acquire, (False,))
                if not held[-1]:
                    _wait(lock, held, deadline)
                return step() if held[-1] else NOT_TAKEN
            finally:
                # Nothing is called before the lock is released, so no interrupt comes first.
                if held and held[-1]:
                    lock.release()
        finally:
            _inside.discard(me)

    # The context manager is only for threads of this package, because Ctrl-C never comes there.

    def __enter__(self) -> None:
        _inside.add(get_ident())
        self._lock.acquire()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        _inside.discard(get_ident())


#: Shared by all producers for asyncio: several may use one connection, and usually there is one loop.
LOOPS = Guard()


def _after_fork_in_child() -> None:
    LOOPS.__init__()  # type: ignore[misc]  # another thread may have held its lock
    # The child has only this thread of the parent. It may be inside a step, and will complete it.
    me = get_ident()
    _inside.intersection_update({me})
    _serving.intersection_update({me})


after_fork_in_child(_after_fork_in_child)
