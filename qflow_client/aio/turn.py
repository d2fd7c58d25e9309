"""Places in line, as something that tasks can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic as _monotonic
from typing import Any

from qflow_client.core.admission import SendTicket
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.errors import FlowControlTimeout
from qflow_client.guard import LOOPS, is_inside
from qflow_client.message import Message

__all__ = ["Turns", "wake_at"]


def wake_at(loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> asyncio.TimerHandle:
    """Wake who waits, never before a time of our clock; the loop's own may be coarser.

    Args:
        loop: the loop.
        deadline: seconds, as `time.monotonic` counts them.
        waiter: is done then, if it is not before.

    Returns:
        The timer; it does nothing once `waiter` is done, whether it is cancelled or not.
    """
    return loop.call_later(deadline - _monotonic(), _time_is_up, loop, deadline, waiter)


def _time_is_up(loop: asyncio.AbstractEventLoop, deadline: float, waiter: asyncio.Future[None]) -> None:
    if waiter.done():
        return
    if _monotonic() < deadline:
        wake_at(loop, deadline, waiter)
    else:
        waiter.set_result(None)


class _Turn(asyncio.Future[None]):
    """A send's place in line: done once that is decided, or its time is up.

    Whoever cancels the send gives up its place in the same instant: it is admitted before, or never.

    Args:
        turns: gives up the place. Not its method: that is 80 bytes for each that waits.
        loop: the loop.
    """

    __slots__ = ("_turns", "ticket")

    def __init__(self, turns: Turns, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._turns = turns
        #: The place; ``None`` until it is taken.
        self.ticket: SendTicket | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.ticket is not None:
            self._turns.give_up(self.ticket)
        return cancelled


class Turns:
    """Has the sends of a producer, or a channel, wait for their turns, and has it said that they do.

    Args:
        loop: the loop.
        protocol: gives the state in which they stand in line.
        kick: has written what there is to write, and tells whom there is to tell.
        arm_timer: has the protocol told when its time comes.
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
        # One for all, or a thousand of them would keep the loop busy; None while none is to come.
        self._notice: asyncio.TimerHandle | None = None

    async def wait(
        self, payload: bytes | Message, exchange: str, routing_key: str, timeout: float | None, source: str = ""
    ) -> SendTicket:
        """Stand in line until it is decided what becomes of a message. Who is cancelled meanwhile does not send it.

        Args:
            payload: the message.
            exchange: where to publish.
            routing_key: with which key.
            timeout: seconds; ``None`` for ever.
            source: whose message it is, for a `WeightedLine`.

        Returns:
            The place; without a receipt, the message was not sent.

        Raises:
            FlowControlTimeout: the time is up.
        """
        protocol = self._protocol()
        turn = _Turn(self, self._loop)
        ticket = LOOPS.take(
            lambda: protocol.admission.stand_in_line(
                payload, exchange, routing_key, _monotonic(), timeout=timeout, waiter=turn, source=source
            )
        )
        turn.ticket = ticket
        self._kick()
        self._arm_timer()
        if not turn.done():
            timer = None if timeout is None else wake_at(self._loop, ticket.deadline, turn)
            if self._notice is None:
                period = protocol.settings.flow_control_wait_notify_period
                self._notice = self._loop.call_later(period, self._on_notice)
            try:
                await turn
            except BaseException:
                self.give_up(ticket)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        try:
            # Raises if nothing but its time has come. After a fork there is another protocol.
            LOOPS.take(lambda: self._protocol().admission.look_at(ticket, _monotonic()))
        except FlowControlTimeout:
            # It may have stood before one that goes now.
            self._kick()
            raise
        return ticket

    def give_up(self, ticket: SendTicket) -> None:
        """What was not admitted is not sent."""
        if is_inside():
            # A finalizer cancels a task, say.
            self._loop.call_soon(self.give_up, ticket)
            return
        LOOPS.take(lambda: self._protocol().admission.give_up(ticket, _monotonic()))
        self._kick()

    def _on_notice(self) -> None:
        self._notice = None
        now = _monotonic()
        at = LOOPS.take(lambda: self._protocol().admission.notice(now))
        if at is not None:
            self._kick()
            self._notice = self._loop.call_later(at - now, self._on_notice)

    def end(self) -> None:
        """Say no more that sends wait."""
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
