"""The event loop that a broker runs on, and calls to it from other threads.

`Runner.call` runs a function on the loop and returns its result; on the loop itself, and before and after it runs, it
calls the function in place. `Runner.call_in_steps` does so with work that takes long, in turns with the loop's other
work. `Runner.changed` wakes every waiter, which looks at its predicate again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Runner"]

_Result = TypeVar("_Result")
_Step = Callable[[], Coroutine[Any, Any, None]]


def _is_in_task() -> bool:
    """Whether a task runs here. Where a loop runs without one, as in Playwright's synchronous API, a call may block."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


class Runner:
    """The loop of one broker, and the calls to it from other threads."""

    #: Seconds of a turn of the loop for `call_in_steps`.
    SLICE = 0.005

    def __init__(self) -> None:
        # The loop, and the thread of that loop; None before and after. While it is taken away, the lock keeps calls
        # from coming to it: they would be waited for without end.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._loop_lock = threading.RLock()
        # Only set if the loop is its own: the thread that runs it, and what is done when that thread may end.
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None
        # Guarded by the condition.
        self._version = 0
        self._changed = threading.Condition()
        self._async_waiters: set[asyncio.Future[None]] = set()

    # Coming and going.

    def run(self, start: _Step) -> None:
        """Run a loop on a thread of its own.

        Args:
            start: what is done first on that loop, before this returns; what it raises ends the thread, and comes here.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(start, started), name="qflow-broker", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise

    def _run(self, start: _Step, started: Future[None]) -> None:
        async def main() -> None:
            try:
                await start()
            except BaseException as error:
                started.set_exception(error)
                return
            self._stopped = asyncio.get_running_loop().create_future()
            started.set_result(None)
            await self._stopped

        asyncio.run(main())

    def end(self, stop: _Step) -> None:
        """End the thread that `run` began.

        Args:
            stop: what is done before on its loop.
        """
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
        """Calls come to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def leave(self) -> None:
        """Calls come to no loop any more: they are done where they are made."""
        with self._loop_lock:
            self._loop = None

    @property
    def is_running(self) -> bool:
        """Whether there is a loop that calls come to."""
        return self._loop is not None

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run something on the loop; here and now if this is it, or if there is none."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        with self._loop_lock:
            loop = self._loop if threading.get_ident() != self._loop_thread else None
            if loop is not None:
                loop.call_soon_threadsafe(run)
        if loop is None:
            run()
        return done.result()

    def call_in_steps(self, steps: Iterator[object]) -> None:
        """Take steps on the loop, for `SLICE` seconds in each of its turns; all here and now where `call` would.

        Raises:
            BaseException: what a step raises.
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

        with self._loop_lock:
            is_elsewhere = self._loop is not None and threading.get_ident() != self._loop_thread
            if is_elsewhere and self._loop is not None:
                self._loop.call_soon_threadsafe(go_on)
        if not is_elsewhere:
            for _ in steps:
                pass
            return
        done.result()

    # Waiting.

    @property
    def version(self) -> int:
        """Goes up whenever anything has happened."""
        return self._version

    def changed(self) -> None:
        """Something has happened."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        for waiter in tuple(self._async_waiters):
            if not waiter.done():
                waiter.set_result(None)

    def wait_until(self, predicate: Callable[[], object], describe: Callable[[], str], timeout: float) -> None:
        """Wait for something to become true; it is looked at again whenever anything has happened.

        Args:
            predicate: runs on the calling thread.
            describe: the state that there is, for the error.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true.
            RuntimeError: called in a task, or on the broker's loop, which it would block.
        """
        if (self._loop is not None and threading.get_ident() == self._loop_thread) or _is_in_task():
            raise RuntimeError("wait_until would block the event loop that runs here; await wait_until_async instead")
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                version = self._version
            if predicate():
                return
            if not self._await_change(version, end):
                raise TimeoutError(_not_reached(describe, timeout))

    def _await_change(self, version: int, end: float) -> bool:
        """Wait until anything has happened since a version; ``False`` if it is `end` first, or already."""
        with self._changed:
            left = end - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._version != version, left)

    async def wait_until_async(
        self, predicate: Callable[[], object], describe: Callable[[], str], timeout: float
    ) -> None:
        """`wait_until` for the loop that calls come to, or any other.

        Args:
            predicate: runs on that loop, or on a thread that waits in place of another.
            describe: the state that there is, for the error.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            await asyncio.to_thread(self.wait_until, predicate, describe, timeout)
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


def _not_reached(describe: Callable[[], str], timeout: float) -> str:
    return f"not reached within {timeout} s; the broker is at:{describe()}"
