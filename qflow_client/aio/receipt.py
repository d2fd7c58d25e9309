"""Receipts that a task can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import check_timeout

__all__ = ["AsyncReceipt"]


class AsyncReceipt(Receipt):
    """The receipt of one message that an `AsyncProducer` sent.

    ``await receipt`` waits for the outcome without a limit; `result` takes a timeout. Any number of tasks may wait.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Outcome]:
        while self._outcome is None:
            yield from self._settled()
        return self._verdict()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the message is settled.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            Whether the message is settled.

        Raises:
            TypeError, ValueError: `timeout` is not a number.
        """
        check_timeout(timeout)
        if self._outcome is None:
            try:
                async with asyncio.timeout(timeout):
                    while self._outcome is None:
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
        """Return a future that is done when the message is settled, or possibly earlier."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        first = self._waiter
        if first is None or first.done():
            self._waiter = future
        else:
            # Each task has a separate future, because a cancelled task cancels the future that it waits for.
            first.add_done_callback(lambda _first: _wake(future))
        return future


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
