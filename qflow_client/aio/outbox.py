"""Receipts for an `AsyncProducer` with an outbox, and `Commits`, which lets tasks wait for the disk."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.aio.threads import DISK_PATIENCE, call_on_thread
from qflow_client.outbox.errors import NotDurable
from qflow_client.outbox.spilled import Spilled
from qflow_client.outbox.storage import GRACE, Storage
from qflow_client.skin import BRIEF

__all__ = ["Commits", "SpilledReceipt"]


class SpilledReceipt(Spilled, AsyncReceipt):
    """The receipt of a message that an `AsyncProducer` put into its outbox in order to send it later."""

    __slots__ = ("__weakref__", "_id", "_path", "_sequence")


class _Wait(NamedTuple):
    """A task that waits for the disk."""

    #: The sequence number of the last message for which the task waits.
    sequence: int
    #: The time at which the task stops waiting, in seconds of `time.monotonic`.
    deadline: float
    #: Wakes the task. The result is the reason why the messages are not on disk; "" if they are on disk.
    waiter: asyncio.Future[str]


class Commits:
    """Opens and closes an outbox, and lets tasks wait until their messages are on disk.

    Waits that begin in one iteration of the loop share a commit. The outbox is opened and closed on separate threads.

    Args:
        storage: the producer's outbox, which is not open yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, storage: Storage) -> None:
        self._loop = loop
        self._storage = storage
        # The waiting tasks, in the order of their sequence numbers.
        self._waits: deque[_Wait] = deque()
        # Whether a request for a commit is scheduled.
        self._is_due = False
        # The timer for the earliest deadline; ``None`` without a deadline.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    async def open(self) -> None:
        """Open the outbox. After an error, the outbox is closed.

        Raises:
            OutboxInUse, OutboxError: as for `Storage.open`, or the disk does not answer.
        """
        storage = self._storage
        opening: asyncio.Future[None] | None = None
        try:
            opening = call_on_thread(storage.open, f"qflow-outbox-open {storage.name}")
            await asyncio.wait((opening,), timeout=storage.patience)
            if not opening.done():
                raise storage.no_answer()
            opening.result()
        except BaseException as error:
            storage.close(0.0)
            if opening is not None:
                # `storage.close` may make `opening` fail. Read this error, because asyncio logs errors that are never
                # read.
                opening.add_done_callback(asyncio.Future.exception)
                if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
                    # Wait until the opening has ended. Otherwise the next producer could find the outbox in use.
                    await asyncio.wait((opening,), timeout=DISK_PATIENCE)
            raise

    async def close(self, patience: float) -> None:
        """Close the outbox. Wait until the next producer can use it, but at most about `patience` seconds.

        Then wake the tasks that still wait for the disk.
        """
        storage = self._storage
        try:
            try:
                closing = call_on_thread(partial(storage.close, patience), f"qflow-outbox-close {storage.name}")
            except RuntimeError:
                # No thread can be started. Without this call, the outbox would be in use until the process ends.
                storage.close(BRIEF)
                return
            try:
                # `Storage.close` returns within `patience` seconds, unless the disk does not answer.
                await asyncio.wait((closing,), timeout=None if patience == math.inf else patience + BRIEF)
            except asyncio.CancelledError:
                await asyncio.wait((closing,), timeout=DISK_PATIENCE)
                raise
            if closing.done():
                closing.result()
        finally:
            self._end()

    async def wait_durable(self, receipt: AsyncReceipt, deadline: float) -> None:
        """Wait until all messages that are in the outbox now are on disk.

        Args:
            receipt: the receipt of the caller's last message, which the error contains.
            deadline: the caller's deadline, in seconds of `time.monotonic`.

        Raises:
            NotDurable: a message could not be written, or is not on disk `GRACE` seconds after the deadline.
        """
        outbox = self._storage.outbox
        sequence = outbox.last
        if outbox.durable >= sequence:
            return
        wait = _Wait(sequence, max(deadline, time.monotonic()) + GRACE, self._loop.create_future())
        self._waits.append(wait)
        if wait.deadline < self._timer_at:
            self._set_timer(wait.deadline)
        if not self._is_due:
            # Request the commit after the present iteration of the loop, to include the messages of all tasks.
            self._is_due = True
            self._loop.call_soon(self._request)
        why = await wait.waiter
        if why:
            raise NotDurable(why, receipt)

    def _request(self) -> None:
        self._is_due = False
        self._storage.writer.commit_now()

    def committed(self, durable: int, error: Exception | None) -> None:
        """Wake the tasks whose messages are on disk, or all tasks after an error. The writer's thread calls this."""
        if self._waits:
            # If the loop is closed, `call_soon_threadsafe` raises RuntimeError, but no task waits any more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake, durable, "" if error is None else str(error))

    def _wake(self, durable: int, why: str) -> None:
        waits = self._waits
        while waits and (why or waits[0].sequence <= durable):
            wait = waits.popleft()
            if not wait.waiter.done():
                wait.waiter.set_result("" if wait.sequence <= durable else why)
        if not waits and self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, at
        if at < math.inf:
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        now = time.monotonic()
        path = self._storage.outbox.path
        for wait in self._waits:
            if wait.deadline <= now and not wait.waiter.done():
                wait.waiter.set_result(f"{path}: the disk does not answer")
        self._waits = deque(wait for wait in self._waits if not wait.waiter.done())
        self._set_timer(min((wait.deadline for wait in self._waits), default=math.inf))

    def _end(self) -> None:
        if self._waits:
            outbox = self._storage.outbox
            self._wake(outbox.durable, f"{outbox.path}: the producer was closed")
