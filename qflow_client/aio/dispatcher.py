"""Schedules the application's callbacks on the event loop, for `AsyncProducer` and `qflow_client.aio_pika`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from qflow_client.logs import log

__all__ = ["Dispatcher"]


class Dispatcher:
    """Makes the loop call callbacks in order. An error in one callback does not prevent the next call.

    The dispatcher logs an `Exception` of a callback. Any other exception, such as `SystemExit`, goes to the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_running = False

    def call(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Schedule ``callback(argument)`` after all earlier calls."""
        self._loop.call_soon(self._run, callback, lambda: argument)

    def call_with_next(self, callback: Callable[[Any], object], take: Callable[[], Any]) -> None:
        """Schedule ``callback(take())`` after all earlier calls. ``take()`` is called just before the callback."""
        self._loop.call_soon(self._run, callback, take)

    async def stop(self) -> None:
        """Wait until the scheduled calls have run. In a closed loop these calls never run, so return immediately."""
        if self._loop.is_closed():
            return
        due = asyncio.Event()
        self._loop.call_soon(due.set)
        await due.wait()

    def _run(self, callback: Callable[[Any], object], take: Callable[[], Any]) -> None:
        argument = take()
        self.is_running = True
        try:
            callback(argument)
        except Exception as error:
            log(logging.ERROR, "callback %r failed on %r", callback, argument, error=error)
        finally:
            self.is_running = False
