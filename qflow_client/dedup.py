"""Lets consumers drop second copies of messages. To lose no message, a producer sometimes sends second copies.

If a producer loses its connection before the confirm of a message, it cannot know whether the message has arrived. So
the producer sends the message again with the same message id, and the broker may have two copies. A consumer with a
`Deduplicator` remembers the ids of the messages that it has handled, and drops second copies.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from qflow_client.database import Database
from qflow_client.errors import QflowError
from qflow_client.locks import Lock
from qflow_client.message import REPUBLISHED
from qflow_client.redaction import shown

__all__ = ["DeduplicationError", "Deduplicator", "FirstTime", "may_be_second_copy"]

# The application id of the file ("qDup" in ASCII), and the version of its tables.
_APPLICATION_ID = 0x71447570
_VERSION = 1


class DeduplicationError(QflowError):
    """The file of a `Deduplicator` cannot be used."""


def may_be_second_copy(headers: Mapping[str, Any] | None, redelivered: bool = False) -> bool:
    """Return True if the producer has sent the message again, or the broker has delivered the message again.

    Args:
        headers: headers of the message. A producer that sends a message again sets ``x-qflow-republished``.
        redelivered: flag ``redelivered`` of the delivery.
    """
    return redelivered or (headers is not None and bool(headers.get(REPUBLISHED)))


class _InProcess:
    def __init__(self, max_count: int, max_age: float) -> None:
        self._max_count = max_count
        self._max_age = max_age
        self.clock = time.monotonic
        # The time at which each message was handled, oldest first. A plain dict is slow if first entries are deleted.
        self._times: OrderedDict[str, float] = OrderedDict()

    def _prune(self) -> None:
        end = self.clock() - self._max_age
        times = self._times
        while times:
            oldest = next(iter(times))
            if times[oldest] > end and len(times) <= self._max_count:
                return
            del times[oldest]

    def __contains__(self, message_id: str) -> bool:
        at = self._times.get(message_id)
        return at is not None and at > self.clock() - self._max_age

    def __len__(self) -> int:
        self._prune()
        return len(self._times)

    def add(self, message_id: str) -> None:
        self._prune()
        if message_id not in self._times:
            self._times[message_id] = self.clock()
            self._prune()

    def close(self) -> None:
        self._times.clear()


class _OnDisk:
    def __init__(self, path: str | os.PathLike[str], max_count: int, max_age: float) -> None:
        self._max_count = max_count
        self._max_age = max_age
        self.clock = time.time
        self._file = Database(
            path,
            application_id=_APPLICATION_ID,
            version=_VERSION,
            # Each new id gets the next number, so the oldest ids can be deleted by number.
            tables=["CREATE TABLE handled (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, at REAL NOT NULL)"],
            error=DeduplicationError,
        )

    def __contains__(self, message_id: str) -> bool:
        end = self.clock() - self._max_age
        return self._file.one("SELECT 1 FROM handled WHERE id = ? AND at > ?", message_id, end) is not None

    def __len__(self) -> int:
        count: int = self._file.one("SELECT count(*) FROM handled WHERE at > ?", self.clock() - self._max_age)
        return count

    def add(self, message_id: str) -> None:
        file = self._file
        now = self.clock()
        with file.calling, file.transaction():
            if self._max_age < math.inf:
                end = now - self._max_age
                # Delete the expired ids one by one, beginning with the lowest number. Usually there are few.
                oldest = "SELECT number, at FROM handled ORDER BY number LIMIT 1"
                while (rows := file.rows(oldest)) and rows[0][1] <= end:
                    file.execute("DELETE FROM handled WHERE number = ?", rows[0][0])
                # After the clock was set back, an id that does not expire yet may have a lower number.
                file.execute("DELETE FROM handled WHERE id = ? AND at <= ?", message_id, end)
            added = file.execute("INSERT OR IGNORE INTO handled (id, at) VALUES (?, ?)", message_id, now)
            if added.rowcount:
                file.execute("DELETE FROM handled WHERE number <= ?", (added.lastrowid or 0) - self._max_count)

    def close(self) -> None:
        self._file.close()


class FirstTime:
    """The result of `Deduplicator.first_time`, for one ``with`` or ``async with`` block."""

    def __init__(self, deduplicator: Deduplicator, message_id: str | None, look_up: bool) -> None:
        self._deduplicator = deduplicator
        self._message_id = message_id
        self._look_up = look_up
        # True while this block handles a first copy with an id. The id is stored if the block ends without an error.
        self._is_first = False

    def __enter__(self) -> bool:
        while True:
            is_first, others = self._begin()
            if others is None:
                return is_first
            if others.thread == threading.get_ident():
                raise RuntimeError(
                    f"this thread already handles message {self._message_id!r}, so it would wait for itself; in a "
                    "coroutine, use `async with`"
                )
            ended = threading.Event()
            self._deduplicator._when_ended(others, ended.set)
            ended.wait()

    async def __aenter__(self) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            is_first, others = self._begin()
            if others is None:
                return is_first
            ended: asyncio.Future[None] = loop.create_future()
            self._deduplicator._when_ended(others, _teller(loop, ended))
            await ended

    def _begin(self) -> tuple[bool, _Handling | None]:
        if not self._message_id:
            return True, None
        is_first, others = self._deduplicator._begin(self._message_id, self._look_up)
        self._is_first = is_first
        return is_first, others

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._is_first:
            assert self._message_id is not None
            self._is_first = False
            self._deduplicator._end(self._message_id, handled=error is None)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)


def _teller(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> Callable[[], None]:
    def tell_here() -> None:
        # If the task was cancelled, `ended` is done already.
        if not ended.done():
            ended.set_result(None)

    def tell() -> None:
        # If the loop is closed, `call_soon_threadsafe` raises RuntimeError. Ignore it, because no task waits then.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell_here)

    return tell


class _Handling:
    """A message that the ``with`` block of a `FirstTime` is handling now."""

    __slots__ = ("has_ended", "thread", "waiters")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # Functions to call when the block has ended, with or without an error.
        self.waiters: list[Callable[[], None]] = []
        self.has_ended = False


class Deduplicator:
    """Remembers the ids of handled messages, so that a consumer handles each message once. Thread-safe.

    Use ``with deduplicator.first_time(message_id) as first:``, and in this block handle the message if ``first`` is
    True. The end of the block stores the id. If an exception leaves the block, or the process ends in it, the id is not
    stored. Then a redelivered copy is handled again. Acknowledge the message after the block. While a block handles the
    first copy, other blocks of this object for the same id wait before they start.

    The handling of a message and the storing of its id are not one transaction. If the process ends between the two,
    the message is handled twice. To prevent this, write the id in the same transaction as your results.

    Args:
        path: path of a SQLite file for the ids. Other processes on this machine may use the file at the same time. A
            crash of the process loses no ids. A crash of the machine may lose the newest ids. ``None`` to keep the ids
            in memory (about 200 bytes each).
        max_count: maximum number of ids. The oldest ids are forgotten first. Choose more than the number of messages
            that can come between two copies: the producer's unconfirmed messages, and messages of other producers.
        max_age: seconds after which an id is forgotten; ``None`` for no limit.

    Raises:
        DeduplicationError: the file cannot be used.
        ValueError: `max_count` or `max_age` is not above 0.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_count: int = 100_000, max_age: float | None = None
    ) -> None:
        if not max_count > 0:
            raise ValueError(f"max_count must be more than 0, not {shown(max_count)}")
        if max_age is not None and not max_age > 0:
            raise ValueError(f"max_age must be more than 0 seconds, not {shown(max_age)}")
        age = math.inf if max_age is None else max_age
        self._memory = _InProcess(max_count, age) if path is None else _OnDisk(path, max_count, age)
        self._lock = Lock()
        # The messages that ``with`` blocks are handling now; the keys are message ids.
        self._handling: dict[str, _Handling] = {}

    def first_time(self, message_id: str | None, *, look_up: bool = True) -> FirstTime:
        """Make a context manager for a block that handles a message.

        Args:
            message_id: id of the message. A message without an id is always handled, because it cannot be recognised.
            look_up: whether to look up the id. With ``False`` the message counts as the first copy, and its id is
                remembered. With ``look_up=may_be_second_copy(headers, redelivered)``, only few messages are looked up.
                But if the second copy arrives before the first, the message is handled twice. Neither the headers nor
                the flag of the first copy show that there are two copies.

        Returns:
            A context manager for ``with`` and ``async with``. The variable after ``as`` is ``True`` if the message has
            to be handled, and ``False`` if it is a second copy.

        Raises:
            DeduplicationError: the file cannot be used. The start or the end of the block raises this error.
            RuntimeError: the same thread is already handling a copy. The start of a ``with`` block raises this error.
        """
        return FirstTime(self, message_id, look_up)

    def __contains__(self, message_id: str) -> bool:
        with self._lock:
            return message_id in self._memory

    def __len__(self) -> int:
        with self._lock:
            return len(self._memory)

    def remember(self, message_id: str) -> None:
        """Remember the id of a handled message. Call this method only if the consumer cannot use `first_time`.

        Args:
            message_id: id of the message.

        Raises:
            DeduplicationError: the file cannot be used.
        """
        with self._lock:
            self._memory.add(message_id)

    def close(self) -> None:
        """Close the file, or forget the ids in memory."""
        with self._lock:
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _begin(self, message_id: str, look_up: bool) -> tuple[bool, _Handling | None]:
        """Return whether the block has to handle the message, and the `_Handling` for which it has to wait, if any."""
        with self._lock:
            others = self._handling.get(message_id)
            if others is not None:
                return False, others
            if look_up and message_id in self._memory:
                return False, None
            self._handling[message_id] = _Handling()
            return True, None

    def _when_ended(self, others: _Handling, tell: Callable[[], None]) -> None:
        with self._lock:
            if not others.has_ended:
                others.waiters.append(tell)
                return
        tell()

    def _end(self, message_id: str, *, handled: bool) -> None:
        with self._lock:
            try:
                if handled:
                    self._memory.add(message_id)
            finally:
                handling = self._handling.pop(message_id)
                handling.has_ended = True
        for tell in handling.waiters:
            tell()
