"""A thread for calls that may take as long as the disk does; it never keeps the process from ending."""

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
    """One thread, one call after the other. Those of `concurrent.futures` are waited for when the process ends.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # When the call that runs began; None if none does.
        self._since: float | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[_P, _Result], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Result]:
        """Have something called there."""
        future: Future[_Result] = Future()
        self._calls.put(partial(_do, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End when all calls are done; it never waits for that, whatever `wait` says."""
        self._calls.put(None)

    def hangs(self, timeout: float) -> bool:
        """Whether it has been at one call for longer than some seconds."""
        since = self._since
        return since is not None and time.monotonic() - since > timeout

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._since = time.monotonic()
            call()
            self._since = None
            # What it has done is not kept until there is something else to do.
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
