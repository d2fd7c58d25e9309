"""Calls a blocking function for an event loop, on a thread of its own.

A function that hangs must not use a thread of the loop's executor: the application may need all threads of the
executor, and `asyncio.run` waits for all of them before it returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

__all__ = ["DISK_PATIENCE", "call_on_thread"]

#: Maximum seconds to end the channel and the outbox after the deadline of a close. A cancelled `close` or `open` also
#: waits at most this long for the outbox.
DISK_PATIENCE = 0.6

_T = TypeVar("_T")


def call_on_thread(function: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Call a function on a new daemon thread. Return a future of the running loop for its result.

    Raises:
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        report: Callable[[], object]
        try:
            report = partial(future.set_result, function())
        except BaseException as error:
            report = partial(future.set_exception, error)
        # If the loop is closed, no task waits for the result.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if future.cancelled() else report())

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
