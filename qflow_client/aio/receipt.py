"""The receipts of an `AsyncProducer`. Tasks can wait for their outcome."""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import check_timeout

__all__ = ["AsyncReceipt"]

# Held while a waiter is registered, because the loops of several threads may wait for one receipt.
_REGISTERING = threading.Lock()


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

    def _settled(self) -> asyncio.Future[None]:
        """Return a future that is done when the message is settled."""
        future = _Settled(loop=asyncio.get_running_loop())
        with _REGISTERING:
            first = self._waiter
            if first is None or (isinstance(first, _Settled) and first.done()):
                self._waiter = future
            else:
                if isinstance(first, _Settled):
                    self._waiter = _Waiters((first,))
                self._waiter.add(future)
        if self._outcome is not None:
            # Another thread may have settled the message before it could see the future.
            future.set_result(None)
        return future


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

    def add(self, future: _Settled, /) -> None:
        super().add(future)
        # Tasks that stop waiting leave nothing here.
        future.add_done_callback(self.discard)

    def done(self) -> bool:
        return False

    def set_result(self, result: None) -> None:
        for future in tuple(self):
            _wake(future)


def _wake(future: _Settled) -> None:
    if not future.done():
        future.set_result(None)
