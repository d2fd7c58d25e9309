"""The event loop of a broker, and calls to it from other threads.

`Runner.call_in_steps` does long work in steps, between which the loop can do other work. After each change of the
broker, `Runner.changed` makes the waiting calls check their conditions again. `EmbeddedBroker` has one `Runner`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from qflow_client.locks import RLock

__all__ = ["Runner"]

_Result = TypeVar("_Result")
_Step = Callable[[], Coroutine[Any, Any, None]]


def _is_in_task() -> bool:
    """Whether a task runs in this thread.

    If a loop runs without a task, as in Playwright's synchronous API, a blocking call is allowed.
    """
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


class Runner:
    """The event loop of one broker, and the calls to it from other threads."""

    #: Seconds that `call_in_steps` may use in one iteration of the loop.
    SLICE = 0.005

    def __init__(self) -> None:
        # The loop (None if no loop runs), and the id of the loop's thread. `leave` and the code that schedules calls
        # hold the lock. Otherwise the loop could end before a scheduled call runs, and the caller would wait forever.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._loop_lock = RLock()
        # The process with the loop. A forked child has a copy of this object, but no thread that runs the loop.
        self._pid = 0
        # The thread, and a future that ends the thread when its result is set. None if `run` did not start the loop.
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None
        # Number of changes so far. The lock of `_changed` protects this number.
        self._version = 0
        self._changed = threading.Condition()
        self._async_waiters: set[asyncio.Future[None]] = set()

    # Starting and stopping.

    def run(self, start: _Step, stop: _Step) -> None:
        """Run a loop on its own thread.

        Args:
            start: runs first on that loop, before this method returns. If `start` fails, the thread ends, and `run`
                raises the exception.
            stop: runs on the loop before the thread ends, if Ctrl-C interrupts this method.
        """
        started: Future[None] = Future()
        thread = threading.Thread(target=self._run, args=(start, stop, started), name="qflow-broker", daemon=True)
        try:
            thread.start()
            started.result()
        except BaseException:
            # If `start` has failed, or has not finished yet, `_run` ends the thread. Otherwise end the thread here.
            if not started.cancel() and started.exception() is None:
                self._thread = thread
                self.end(stop)
            if thread.ident is not None:
                thread.join()
            raise
        self._thread = thread

    def _run(self, start: _Step, stop: _Step, started: Future[None]) -> None:
        async def main() -> None:
            failure = None
            try:
                await start()
            except BaseException as error:
                failure = error
            if not started.set_running_or_notify_cancel():
                if failure is None:
                    await stop()
            elif failure is not None:
                started.set_exception(failure)
            else:
                self._stopped = asyncio.get_running_loop().create_future()
                started.set_result(None)
                await self._stopped

        asyncio.run(main())

    def end(self, stop: _Step) -> None:
        """End the thread that `run` started. `stop` runs on the loop before the thread ends."""
        self._check_process()
        loop, thread = self._loop, self._thread
        assert thread is not None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(stop), loop).result()
        thread.join()

    async def _end(self, stop: _Step) -> None:
        await stop()
        assert self._stopped is not None
        self._stopped.set_result(None)

    def enter(self) -> None:
        """Make `call` run functions on the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._pid = os.getpid()

    def leave(self) -> None:
        """Make `call` run functions directly on the calling thread from now on."""
        with self._loop_lock:
            self._loop = None

    @property
    def is_running(self) -> bool:
        """Whether the loop runs, so that `call` runs functions on it."""
        return self._loop is not None

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function on the loop. On that loop, or if no loop runs, call the function directly."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        return done.result() if self._post(run) else function()

    def _post(self, function: Callable[[], None]) -> bool:
        """Schedule a function on the loop. On the loop itself, or if no loop runs, return False instead."""
        self._check_process()
        with self._loop_lock:
            if self._loop is None or threading.get_ident() == self._loop_thread:
                return False
            self._loop.call_soon_threadsafe(function)
            return True

    def _check_process(self) -> None:
        # Check this before any lock, because another thread may have held the lock during the fork.
        if self._loop is not None and self._pid != os.getpid():
            raise RuntimeError(
                f"the broker runs in process {self._pid}, and this is process {os.getpid()}: a child process can only "
                "connect to its url"
            )

    def call_in_steps(self, steps: Iterator[object]) -> None:
        """Run steps on the loop, for at most about `SLICE` seconds in each iteration.

        On that loop, or if no loop runs, run all steps directly. If a step raises an exception, raise it again.
        """
        done: Future[None] = Future()

        def go_on() -> None:
            end = time.monotonic() + self.SLICE
            try:
                for _ in steps:
                    loop = self._loop
                    if loop is not None and time.monotonic() >= end:
                        loop.call_soon(go_on)
                        return
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        if self._post(go_on):
            done.result()
            return
        for _ in steps:
            pass

    # Waiting.

    @property
    def version(self) -> int:
        """Number of changes so far, as counted by `changed`."""
        return self._version

    def changed(self) -> None:
        """Record a change, and wake all calls of `wait_until` and `wait_until_async`."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        for waiter in tuple(self._async_waiters):
            if not waiter.done():
                waiter.set_result(None)

    def wait_until(self, predicate: Callable[[], object], describe: Callable[[], str], timeout: float) -> None:
        """Wait until a condition is true, see `Broker.wait_until`. The `TimeoutError` contains `describe()`."""
        self._check_process()
        if (self._loop is not None and threading.get_ident() == self._loop_thread) or _is_in_task():
            raise RuntimeError("wait_until would block the running event loop; await wait_until_async instead")
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                version = self._version
            if predicate():
                return
            if not self._await_change(version, end):
                raise TimeoutError(_not_reached(describe, timeout))

    def _await_change(self, version: int, end: float) -> bool:
        """Wait until the version differs from `version`. Return False if it does not differ at the time `end`."""
        with self._changed:
            left = end - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._version != version, left)

    async def wait_until_async(
        self, predicate: Callable[[], object], describe: Callable[[], str], timeout: float
    ) -> None:
        """Wait like `wait_until`, but without blocking the running event loop, even if it is the broker's loop.

        On the broker's loop the predicate runs directly. On another loop the predicate runs on a helper thread.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            await self._wait_on_thread(predicate, describe, timeout)
            return
        end = loop.time() + timeout
        while not predicate():
            waiter: asyncio.Future[None] = loop.create_future()
            self._async_waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, max(0.0, end - loop.time()))
            except TimeoutError:
                raise TimeoutError(_not_reached(describe, timeout)) from None
            finally:
                self._async_waiters.discard(waiter)

    async def _wait_on_thread(
        self, predicate: Callable[[], object], describe: Callable[[], str], timeout: float
    ) -> None:
        is_cancelled = False
        try:
            await asyncio.to_thread(self.wait_until, lambda: is_cancelled or predicate(), describe, timeout)
        except asyncio.CancelledError:
            # End the wait of the thread. Otherwise `asyncio.run` would wait for the thread until the timeout.
            is_cancelled = True
            with self._changed:
                self._version += 1
                self._changed.notify_all()
            raise


def _not_reached(describe: Callable[[], str], timeout: float) -> str:
    return f"the condition was not true within {timeout} s; the state of the broker:{describe()}"
