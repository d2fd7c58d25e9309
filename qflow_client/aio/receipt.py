"""`AsyncReceipt` is the class of an `AsyncProducer`'s receipts. Tasks can wait for the outcome of a message."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from qflow_client.forks import after_fork_in_child
from qflow_client.locks import RLock
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import check_timeout

__all__ = ["AsyncReceipt", "wake_in_its_loop"]

# Guards the registration of futures, because tasks in the loops of several threads may wait for one receipt. Reentrant,
# because a finalizer may interrupt a registration and register another future.
_registering = RLock()


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held the lock. No thread of the child would release it.
    global _registering
    _registering = RLock()


after_fork_in_child(_after_fork_in_child)


class AsyncReceipt(Receipt):
    """The receipt of one message of an `AsyncProducer`.

    ``await receipt`` waits for the outcome without a limit; `result` takes a timeout. Any task of any loop may wait.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Outcome]:
        if self._outcome is None:
            future = self._settled()
            try:
                yield from future
            except BaseException:
                self._forget(future)
                raise
        return self._verdict()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the message is settled.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Returns:
            True if the message is settled; False after the timeout.

        Raises:
            TypeError, ValueError: `timeout` is not a number.
        """
        check_timeout(timeout)
        if self._outcome is None:
            future = self._settled()
            try:
                async with asyncio.timeout(timeout):
                    await future
            except TimeoutError:
                pass
            finally:
                self._forget(future)
        return self._outcome is not None

    async def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Returns:
            `Outcome.CONFIRMED`, or `Outcome.SENT` in a producer without confirms.

        Raises:
            ConfirmTimeout: the message is not settled yet, but may still be settled later.
            DeliveryError: the message has an outcome other than these; each outcome has its own subclass of this error.
            TypeError, ValueError: `timeout` is not a number.
        """
        if not await self.wait(timeout):
            assert timeout is not None
            raise self._unanswered(timeout)
        return self._verdict()

    def _settled(self) -> asyncio.Future[None]:
        """Return a future of the running loop. The future is done when the message is settled."""
        future: asyncio.Future[None] = asyncio.Future(loop=asyncio.get_running_loop())
        with _registering:
            while True:
                first = self._waiter
                if first is None or first.done():
                    new: asyncio.Future[None] | _Waiters = future
                else:
                    new = first if type(first) is _Waiters else _Waiters((first,))
                    new.add(future)
                    # Remove the future when it is done, because a task may wait again and again with short timeouts.
                    future.add_done_callback(new.discard)
                # Try again if a finalizer has meanwhile registered another future.
                if self._waiter is first:
                    self._waiter = new
                    break
        if self._outcome is not None:
            # Another thread may have settled the message before the future was registered.
            _wake(future)
        return future

    def _forget(self, future: asyncio.Future[None]) -> None:
        """Drop a future, because its task no longer waits. The future may still be pending."""
        with _registering:
            if self._waiter is future:
                self._waiter = None
            elif type(self._waiter) is _Waiters:
                self._waiter.discard(future)


class _Waiters(set[asyncio.Future[None]]):
    """Wakes several tasks that wait for one receipt. The engine uses this object like a future."""

    __slots__ = ()

    def done(self) -> bool:
        return False

    def set_result(self, result: None) -> None:
        # Not `tuple(self)`: in Python 3.11, `tuple` may run finalizers while it iterates, and these may change the set.
        for future in list(self):
            wake_in_its_loop(future)


def wake_in_its_loop(future: asyncio.Future[None]) -> None:
    """Wake a task that waits for a receipt. The loop of the task may differ from the producer's loop."""
    loop = future.get_loop()
    if loop is _get_running_loop():
        _wake(future)
    else:
        # If the loop is closed, `call_soon_threadsafe` raises RuntimeError. Then no task of this loop waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
