"""Lets tasks wait in calls of `core.calls`, for `AsyncProducer` and `qflow_client.aio_pika`.

`Turns` runs these calls. The waiter of a call is a future. The engine or `ChannelFlow` sets the future's result.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import monotonic as _monotonic
from typing import Any, TypeVar

from qflow_client.core.calls import Call, resume
from qflow_client.core.calls import send as send_call
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket
from qflow_client.guard import LOOPS, NOT_TAKEN
from qflow_client.message import Message
from qflow_client.receipt import Receipt

__all__ = ["Deadlines", "Turns", "Waiter", "wake_at"]

_T = TypeVar("_T")


def wake_at(loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> asyncio.TimerHandle:
    """Set the result of a future at a deadline, but not earlier. A plain timer of the loop may fire slightly too early.

    Args:
        deadline: the deadline in seconds of `time.monotonic`.

    Returns:
        The timer. It does nothing if `waiter` is done, so the caller need not cancel it.
    """
    return loop.call_later(deadline - _monotonic(), _set_at, loop, deadline, waiter)


def _set_at(loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> None:
    if waiter.done():
        return
    if _monotonic() < deadline:
        wake_at(loop, deadline, waiter)
    else:
        waiter.set_result(None)


class Deadlines:
    """Sets the result of each future that is not done within a time limit. All futures have the same limit.

    One timer serves all futures. A timer for each future would cost 3 µs.

    Args:
        seconds: the time limit of each future; ``None`` for no limit.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float | None) -> None:
        self._loop = loop
        self._seconds = seconds
        # The waiting futures and their deadlines, in the order of the deadlines.
        self._times: dict[asyncio.Future[None], float] = {}
        # The time at which the timer fires, in seconds of `time.monotonic`; minus infinity without a timer.
        self._next = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiter: asyncio.Future[None], now: float) -> None:
        """Start the time limit of a future.

        Args:
            waiter: the future. The caller must pass the future to `remove` when it is done.
            now: the present time in seconds of `time.monotonic`, which must not decrease from call to call.
        """
        if self._seconds is None:
            return
        if now >= self._next:
            # The timer is late because the loop is busy, or there is no timer. So do here what the timer does.
            self._set_due()
        at = self._times[waiter] = now + self._seconds
        if self._timer is None:
            self._arm(at)

    def remove(self, waiter: asyncio.Future[None]) -> None:
        self._times.pop(waiter, None)

    def end(self) -> None:
        """Cancel the timer if no future needs it. A later `add` starts a new timer."""
        if all(waiter.done() for waiter in self._times):
            self._disarm()

    def _arm(self, at: float) -> None:
        self._timer = self._loop.call_later(at - _monotonic(), self._set_due)
        self._next = at

    def _disarm(self) -> None:
        # Forget the timer before it is cancelled. If Ctrl-C left a cancelled timer here, `add` would start no timer.
        timer, self._timer, self._next = self._timer, None, -math.inf
        if timer is not None:
            timer.cancel()

    def _set_due(self) -> None:
        self._disarm()
        now = _monotonic()
        for waiter, at in tuple(self._times.items()):
            if at > now:
                self._arm(at)
                break
            self._times.pop(waiter, None)
            if not waiter.done():
                waiter.set_result(None)


class Waiter(asyncio.Future[None]):
    """Lets one task wait until the result is set."""

    async def wait_until(self, deadline: float) -> None:
        """Wait until the result is set, or until a deadline in seconds of `time.monotonic`."""
        timeout = None if deadline == math.inf else max(0.0, deadline - _monotonic())
        await asyncio.wait((self,), timeout=timeout)


class _Turn(asyncio.Future[None]):
    """The waiter of a call of `send`. It is done when the ticket is decided (see `SendLine`), or at the deadline.

    A cancelled task withdraws its ticket immediately, so the message is admitted before the cancellation, or never.

    Args:
        turns: its `give_up` withdraws the ticket. A reference to the bound method would take 80 bytes more per call.
    """

    __slots__ = ("_turns", "ticket")

    def __init__(self, turns: Turns, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._turns = turns
        #: The `SendTicket` of the message; ``None`` before the ticket is made.
        self.ticket: SendTicket | None = None

    async def wait_until(self, deadline: float) -> None:
        if self.done():
            return
        timer = None if deadline == math.inf else wake_at(self.get_loop(), deadline, self)
        try:
            await self
        finally:
            if timer is not None:
                timer.cancel()

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.ticket is not None:
            self._turns.give_up(self.ticket)
        return cancelled


class Turns:
    """Runs the waiting calls of a producer or a channel of aio-pika, and logs notices about waiting calls of `send`.

    Args:
        kick: called after a step, to write the output and to wake waiters.
        arm_timer: starts the timer for the protocol's next `on_timer`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: Callable[[], ProducerProtocol],
        kick: Callable[[], object],
        arm_timer: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._protocol = protocol
        self._kick = kick
        self._arm_timer = arm_timer
        # The timer for the notices about all waiting calls of `send`; ``None`` while no call waits. With one timer for
        # each call, a thousand waiting calls would keep the loop busy.
        self._notice: asyncio.TimerHandle | None = None

    def begin(
        self, payload: bytes | Message, exchange: str, routing_key: str, timeout: float | None, source: str = ""
    ) -> tuple[SendTicket, Coroutine[Any, Any, Receipt]]:
        """Return the ticket of a message, and a coroutine that puts it in line and waits until it is admitted.

        If the caller is cancelled before the admission, the message is not sent.
        """
        protocol = self._protocol()
        turn = _Turn(self, self._loop)
        now = _monotonic()
        turn.ticket = ticket = protocol.line.make_ticket(
            payload, exchange, routing_key, now, timeout=timeout, waiter=turn, source=source
        )
        if self._notice is None:
            self._notice = self._loop.call_later(protocol.settings.flow_control_wait_notify_period, self._on_notice)
        call = send_call(protocol.line, ticket, now, notices=False)
        return ticket, self.drive(call, turn, lambda: self.give_up(ticket))

    async def drive(self, call: Call[_T], waiter: Waiter | _Turn, undo: Callable[[], object] | None = None) -> _T:
        """Run a call that waits.

        Args:
            undo: undoes the call after an error; by default, the protocol forgets `waiter`.
        """
        try:
            until, result = LOOPS.take(lambda: resume(call, None))
            self._kick()
            self._arm_timer()
            while until is not None:
                await waiter.wait_until(until)
                until, result = LOOPS.take(lambda: resume(call, _monotonic()))
        except BaseException:
            if undo is None:
                self._forget(waiter)
            else:
                undo()
            raise
        return result  # type: ignore[return-value]  # the call has ended

    def give_up(self, ticket: SendTicket) -> None:
        """Withdraw a ticket. If its message is not admitted yet, the message will not be sent."""
        step = LOOPS.try_take(lambda: self._protocol().line.give_up(ticket, _monotonic()))
        if step is NOT_TAKEN:
            # This thread is inside a step (see `core.step`), so try again later. In a closed loop no `send` waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.give_up, ticket)
            return
        # The withdrawal may have admitted later messages of the line. Write them.
        self._kick()

    def _forget(self, waiter: Waiter | _Turn) -> None:
        if LOOPS.try_take(lambda: self._protocol().waiters.forget(waiter)) is NOT_TAKEN:
            # This thread is inside a step, perhaps because the garbage collector closes a coroutine. Try again later.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._forget, waiter)

    def _on_notice(self) -> None:
        self._notice = None
        now = _monotonic()
        at = LOOPS.take(lambda: self._protocol().line.notice(now))
        if at is not None:
            self._kick()
            self._notice = self._loop.call_later(at - now, self._on_notice)

    def end(self) -> None:
        """Log no more notices."""
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
