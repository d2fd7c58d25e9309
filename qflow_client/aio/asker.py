"""Requests credentials for an `AsyncProducer`. Coroutine functions run in the loop, other functions on a thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from qflow_client.renewal import Asker, Failure

__all__ = ["AsyncAsker"]


class AsyncAsker(Asker):
    """Calls the application's function, and awaits the result if it is awaitable."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(function, name)
        self._is_coroutine = inspect.iscoroutinefunction(function)
        self._loop = asyncio.get_running_loop()
        # The task that awaits the result; ``None`` before the first task.
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        super().cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        if self._is_coroutine:
            self._run()
        else:
            super()._begin()

    def _take(self, result: Any) -> None:
        if inspect.isawaitable(result):
            # A closed loop raises RuntimeError, and then no task needs the credentials.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._await, result)
        else:
            super()._take(result)

    def _await(self, awaitable: Awaitable[Any]) -> None:
        self._task = self._loop.create_task(self._finish(awaitable))

    async def _finish(self, awaitable: Awaitable[Any]) -> None:
        try:
            result = await awaitable
        except (Exception, asyncio.CancelledError) as error:
            result = Failure.of(error)
        super()._take(result)
