"""The additional code of an `AsyncProducer` with an outbox."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.message import Message, give_back, with_position
from qflow_client.outbox.errors import NotDurable
from qflow_client.outbox.spilled import Spilled
from qflow_client.outbox.storage import GRACE, Storage
from qflow_client.position import Position
from qflow_client.producer import resolve, split
from qflow_client.skin import deadline_of, keep_admitted

if TYPE_CHECKING:
    from qflow_client.aio.producer import AsyncProducer

__all__ = ["Commits", "SpilledReceipt", "store_many"]

# How many messages of a `send_many` are put into the outbox before it waits for the disk.
_AT_ONCE = 500


class SpilledReceipt(Spilled, AsyncReceipt):
    """The receipt of a message that an `AsyncProducer` put into its outbox, to send it later."""

    __slots__ = ("__weakref__", "_id", "_path", "_sequence")


class _Wait(NamedTuple):
    """A task that waits for the disk."""

    #: The last sequence of its messages.
    sequence: int
    #: When it stops waiting, in seconds of `time.monotonic`.
    deadline: float
    #: Its result is why the messages are not on disk; "" if they are.
    waiter: asyncio.Future[str]


class Commits:
    """Lets tasks wait until their messages are on disk. There is one commit for all tasks of an iteration of the loop.

    Args:
        loop: the loop.
        storage: the producer's outbox, which may be opened later.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, storage: Storage) -> None:
        self._loop = loop
        self._storage = storage
        # In the order of their sequences.
        self._waits: deque[_Wait] = deque()
        # Whether a request for a commit is scheduled.
        self._is_due = False
        # One timer for all deadlines, because they are rarely reached. It is set for the earliest deadline; ``None``
        # without deadlines.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    async def wait_durable(self, receipt: AsyncReceipt, deadline: float) -> None:
        """Return when all messages that were put until now are on disk.

        Args:
            receipt: the receipt of the last of these messages.
            deadline: the caller's deadline, in seconds of `time.monotonic`.

        Raises:
            NotDurable: the message could not be written, or the deadline has passed by more than `GRACE` seconds.
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
            # After the tasks of this iteration, so that their messages go into the same commit.
            self._is_due = True
            self._loop.call_soon(self._request)
        why = await wait.waiter
        if why:
            raise NotDurable(why, receipt)

    def _request(self) -> None:
        self._is_due = False
        self._storage.writer.commit_now()

    def committed(self, durable: int, error: Exception | None) -> None:
        """Let the loop wake the tasks that wait for a commit. The writer's thread calls this."""
        if self._waits:
            # In a closed loop no task waits.
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

    # Deadlines.

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, at
        if at < math.inf:
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        """Wake the tasks whose deadlines have passed."""
        now = time.monotonic()
        path = self._storage.outbox.path
        for wait in self._waits:
            if wait.deadline <= now and not wait.waiter.done():
                wait.waiter.set_result(f"{path}: the disk does not answer")
        self._waits = deque(wait for wait in self._waits if not wait.waiter.done())
        self._set_timer(min((wait.deadline for wait in self._waits), default=math.inf))

    def end(self) -> None:
        """Wake the tasks that still wait: the outbox is closed, and its writer has ended."""
        if self._waits:
            outbox = self._storage.outbox
            self._wake(outbox.durable, f"{outbox.path}: the producer was closed")


async def store_many(
    producer: AsyncProducer,
    messages: Iterable[bytes | str | Message | tuple[bytes | str | Message, Position]],
    receipts: list[AsyncReceipt],
    timeout: float | None,
    options: dict[str, Any],
) -> list[AsyncReceipt]:
    """`send_many` with an outbox. It waits for the disk once for many messages.

    Args:
        producer: sends them.
        messages: as for `send_many`.
        receipts: the receipts are appended to this list, which is returned.
        timeout: seconds that each may stay blocked; ``None`` for no limit.
        options: the other arguments of `send`.
    """
    engine, settings = producer._engine, producer.settings
    try:
        for each in messages:
            message, position = split(each)
            payload, to, key = resolve(message, options["exchange"], options["routing_key"])
            if position is not None:
                producer._check_position(position)
                payload = with_position(payload, position)
            receipt: Any = engine.admit(
                payload,
                settings.exchange if to is None else to,
                settings.routing_key if key is None else key,
                deadline_of(timeout),
            )
            if receipt is None:
                sent_to = options | {"exchange": to, "routing_key": key}
                try:
                    receipt = await producer.send(payload, timeout=timeout, **sent_to)
                except Exception as error:
                    keep_admitted(error, receipts)
                    raise
            receipts.append(receipt)
            if len(receipts) % _AT_ONCE == 0:
                await engine.made_durable(receipt, deadline_of(timeout))
    except Exception as error:
        give_back(error)
        # After a `NotDurable` the disk is not tried again. The caller needs any other error, so a second error from the
        # disk must not replace it.
        if receipts and not isinstance(error, NotDurable):
            with suppress(NotDurable):
                await engine.made_durable(receipts[-1], time.monotonic())
        raise
    if receipts:
        await engine.made_durable(receipts[-1], deadline_of(timeout))
    return receipts
