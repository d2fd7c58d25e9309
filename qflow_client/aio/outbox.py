"""What an `AsyncProducer` with an outbox has besides."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from copy import copy

from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.outbox.errors import OutboxError
from qflow_client.outbox.spilled import Spilled
from qflow_client.outbox.storage import Storage

__all__ = ["Commits", "SpilledReceipt"]


class SpilledReceipt(Spilled, AsyncReceipt):
    """The fate of one message that an `AsyncProducer` put into its outbox, to send it later."""

    __slots__ = ("__weakref__", "_id", "_path", "_sequence")


class Commits:
    """Has tasks wait until what they put into the outbox is on disk, with one commit for all that run in a turn.

    Args:
        loop: the loop.
        storage: the producer's; need not be open yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, storage: Storage) -> None:
        self._loop = loop
        self._storage = storage
        # Who waits until a sequence is on disk, in order, and whether the commit is asked for.
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_due = False

    async def wait_durable(self, receipt: AsyncReceipt) -> None:
        """Return when all that was put until now is on disk.

        Args:
            receipt: of the last of it.

        Raises:
            OutboxError: it could not be written; the error has the receipt.
        """
        outbox = self._storage.outbox
        sequence = outbox.last
        if outbox.durable >= sequence:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((sequence, waiter))
        if not self._is_due:
            # Behind the tasks that run in this turn: what they send goes into the same commit.
            self._is_due = True
            self._loop.call_soon(self._ask)
        try:
            await waiter
        except OutboxError as error:
            error.receipt = receipt
            raise

    def _ask(self) -> None:
        self._is_due = False
        self._storage.writer.commit_now()

    def committed(self, durable: int, error: Exception | None) -> None:
        """Have the loop wake who waits for a commit; called on the outbox's thread."""
        if self._waiting:
            # A loop that is closed has nobody who waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake, durable, error)

    def _wake(self, durable: int, error: Exception | None) -> None:
        waiting = self._waiting
        while waiting and (error is not None or waiting[0][0] <= durable):
            sequence, waiter = waiting.popleft()
            if waiter.done():
                continue
            if error is None or sequence <= durable:
                waiter.set_result(None)
            else:
                # One for each, because each is given its receipt.
                waiter.set_exception(copy(error))

    def end(self) -> None:
        """Wake who waits still: the outbox is closed, and its thread, which would have told them, has ended."""
        if self._waiting:
            outbox = self._storage.outbox
            self._wake(
                outbox.durable, OutboxError(f"{outbox.path}: the producer was closed before the message was on disk")
            )
