"""The receipts of an `AsyncProducer`. Tasks can wait for their outcome."""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop
from collections.abc import Generator
from contextlib import suppress
from types import coroutine
from typing import Any

from qflow_client.forks import after_fork_in_child
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import check_timeout

__all__ = ["AsyncReceipt"]

# Guards the registration of futures, because the loops of several threads may wait for one receipt. It is reentrant,
# because a finalizer may run at that moment.
_registering = threading.RLock()


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held the lock. The child does not have this thread.
    global _registering
    _registering = threading.RLock()


after_fork_in_child(_after_fork_in_child)


class AsyncReceipt(Receipt):
    """The receipt of one message that an `AsyncProducer` sent.

    ``await receipt`` waits for the outcome without a limit; `result` takes a timeout. Any number of tasks may wait, in
    any event loop.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Outcome]:
        if self._outcome is None:
            yield from self._settled()
        return self._verdict()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the message is settled.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            True if the message is settled; False after the timeout.

        Raises:
            TypeError, ValueError: `timeout` is not a number.
        """
        check_timeout(timeout)
        if self._outcome is None:
            try:
                async with asyncio.timeout(timeout):
                    await self._settled()
            except TimeoutError:
                pass
        return self._outcome is not None

    async def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            `Outcome.CONFIRMED`, or `Outcome.SENT` in a producer without confirms.

        Raises:
            ConfirmTimeout: the message is not settled yet. It may still be settled later.
            DeliveryError: the message has another outcome; each outcome has its own subclass.
            TypeError, ValueError: `timeout` is not a number.
        """
        if not await self.wait(timeout):
            assert timeout is not None
            raise self._unanswered(timeout)
        return self._verdict()

    @coroutine
    def _settled(self) -> Generator[Any, None, None]:
        future = _Settled(loop=asyncio.get_running_loop())
        self._register(future)
        if self._outcome is not None:
            # Another thread may have settled the message before it could see the future.
            return
        try:
            yield from future
        finally:
            if isinstance(self._waiter, _Waiters):
                self._waiter.discard(future)

    def _register(self, future: _Settled) -> None:
        with _registering:
            while True:
                first = self._waiter
                if isinstance(first, _Waiters):
                    first.add(future)
                    return
                new = future if first is None or first.done() else _Waiters((first, future))
                # A finalizer that ran meanwhile may have registered another future.
                if self._waiter is first:
                    self._waiter = new
                    return


class _Settled(asyncio.Future[None]):
    """Wakes one task that waits for a receipt, in any loop."""

    def set_result(self, result: None) -> None:
        loop = self.get_loop()
        if loop is _get_running_loop():
            super().set_result(result)
        else:
            # A closed loop has no task that waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, self)


class _Waiters(set[_Settled]):
    """Wakes several tasks that wait for one receipt."""

    __slots__ = ()

    def done(self) -> bool:
        return False

    def set_result(self, result: None) -> None:
        for future in tuple(self):
            _wake(future)


def _wake(future: _Settled) -> None:
    if not future.done():
        future.set_result(None)
