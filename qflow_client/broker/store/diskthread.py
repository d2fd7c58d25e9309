"""A thread for calls that wait for the disk. Even if a call never returns, the process can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

__all__ = ["DiskThread"]

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class DiskThread(Executor):
    """An executor with one thread. At exit, Python waits for a `ThreadPoolExecutor`, but not for this thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Start time of the running call; None if no call is running.
        self._since: float | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[_P, _Result], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._calls.put(partial(_do, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the thread when all submitted calls are done. This method ignores its arguments, and never waits."""
        self._calls.put(None)

    def hangs(self, timeout: float) -> bool:
        """Whether the running call has taken more than `timeout` seconds."""
        since = self._since
        return since is not None and time.monotonic() - since > timeout

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._since = time.monotonic()
            call()
            self._since = None
            # Delete the reference. Otherwise the arguments of the call would stay in memory until the next call.
            del call


def _do(future: Future[_Result], function: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
