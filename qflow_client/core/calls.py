"""The calls that can wait: `send`, `flush`, `wait_unflowed` and `close`. All producers and drop-ins share these calls.

Each call is a generator that calls steps (see `step`) of the protocol. When a call has to wait, it yields the latest
time at which it must be resumed. A `deadline` is the latest time at which the wait ends, in seconds. A *driver* runs
the generator. While the call waits, the driver blocks its thread, suspends an asyncio task, or processes the I/O of the
connection. A driver does the following:

1. It calls `resume` where steps are allowed: under the producer's lock, or on the thread or loop of the connection.
2. It waits until the call's waiter is set after a later step, or until the yielded time.
3. It calls `resume` with the present time. It repeats 2. and 3. until the call has a result.
4. If an exception such as ``KeyboardInterrupt`` is raised, the driver undoes the call: it withdraws the ticket, or
   forgets the waiter.

The generator has no ``finally`` block for this, because the garbage collector could run the block on any thread.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.sendline import SendLine
from qflow_client.core.tickets import SendTicket
from qflow_client.errors import FlowControlTimeout, ProducerClosed, ProducerFlowed
from qflow_client.events import HoldKind
from qflow_client.receipt import Receipt

__all__ = ["Call", "CannotWait", "close", "drain", "flush", "resume", "send", "wait_unflowed"]

_T = TypeVar("_T")

#: A call yields the latest time at which it must be resumed, in seconds. It is resumed with the present time.
Call = Generator[float, float, _T]

# Seconds after which `drain` checks again whether it should stop waiting.
_LULL = 0.5


class CannotWait(NamedTuple):
    """The error that is raised if a message cannot be admitted immediately and is not allowed to wait."""

    error: type[ProducerFlowed]
    #: What the caller can do, for the error's text.
    advice: str


def resume(call: Call[_T], now: float | None) -> tuple[float | None, _T | None]:
    """Run a call until it has to wait or ends.

    Args:
        now: the present time in seconds; ``None`` to begin.

    Returns:
        The latest time for the next call of `resume`, and ``None``. If the call has ended: ``None``, and its result.
    """
    try:
        return call.send(now), None  # type: ignore[arg-type]  # None starts the generator
    except StopIteration as end:
        return None, end.value


def send(
    line: SendLine, ticket: SendTicket, now: float, *, cannot_wait: CannotWait | None = None, notices: bool = True
) -> Call[Receipt]:
    """Wait in line until a message is admitted or put into the outbox, and return its receipt.

    Args:
        ticket: the ticket of the message; its waiter is set when the message is admitted or has failed.
        cannot_wait: the error to raise if the message has to wait; ``None`` if it may wait. Set only for a message that
            a callback sends. The ticket of this message has a timeout of 0, and goes to the front of the line.
        notices: whether this call logs notices about the wait. If not, the driver calls `SendLine.notice`.

    Raises:
        FlowControlTimeout, ProducerFlowed, ProducerClosed, OutboxFull, TypeError, ValueError: it will never be sent.
    """
    line.stand_in_line(ticket, now)
    try:
        while (at := line.look_at(ticket, now)) is not None:
            now = yield at if notices else ticket.deadline
    except FlowControlTimeout as error:
        if cannot_wait is None:
            raise
        raise ticket.flowed_error(cannot_wait.error, error.holds, 0.0, cannot_wait.advice) from None
    if ticket.error is not None:
        raise ticket.error
    assert ticket.receipt is not None
    return ticket.receipt


def flush(protocol: ProducerProtocol, waiter: object, deadline: float) -> Call[bool]:
    """Wait until every message now admitted or in the outbox's backlog is settled. Return False after the deadline."""
    if protocol.waiters.when_flushed(waiter):
        yield deadline
    return not protocol.waiters.forget(waiter)


def wait_unflowed(
    protocol: ProducerProtocol, waiter: object, deadline: float, now: float, *, in_callback: bool = False
) -> Call[bool]:
    """Wait until the producer is unflowed (not blocked). Return False after the deadline.

    Args:
        in_callback: see `Waiters.when_unflowed`.

    Raises:
        ProducerClosed: the producer is closed, so no message can be admitted any more.
    """
    if protocol.closed is None and protocol.waiters.when_unflowed(waiter, now, in_callback=in_callback):
        yield deadline
        if protocol.waiters.forget(waiter):
            return False
    if protocol.closed is not None:
        raise ProducerClosed(protocol.closed)
    return True


def close(
    protocol: ProducerProtocol, waiter: object, deadline: float, now: float, reason: str, *, waits_for_holds: bool
) -> Call[None]:
    """Admit no message from now on, and wait until all messages are settled.

    Args:
        waits_for_holds: whether to wait even if holds delay the messages. If not, the wait can end early, see `drain`.
    """
    protocol.close(reason, now)
    if waits_for_holds:
        yield from flush(protocol, waiter, deadline)
    else:
        yield from drain(protocol, waiter, deadline, now)


def drain(protocol: ProducerProtocol, waiter: object, deadline: float, now: float) -> Call[None]:
    """Wait until all admitted messages are settled. Stop earlier if a hold delays them, see `_has_stalled`."""
    before = -1
    while now < deadline and not _has_stalled(protocol, before, now):
        before = protocol.unsettled
        if not protocol.waiters.when_settled(waiter):
            return
        now = yield min(deadline, now + _LULL)
        if not protocol.waiters.forget(waiter):
            return


def _has_stalled(protocol: ProducerProtocol, before: int, now: float) -> bool:
    """Return whether `drain` should stop waiting.

    A fast producer has the holds ``capacity`` and ``transport`` most of the time, and soon loses them again. So these
    two holds end the wait only if no message was settled since the last check. The holds ``disconnected`` and
    ``refused``, and a stop by the broker, delay all messages, so each of these ends the wait. The holds ``paused``,
    ``rate`` and ``outbox`` do not delay admitted messages.

    Args:
        before: how many messages were unsettled at the last check; -1 at the first check.
    """
    controller, limits = protocol.controller, (HoldKind.CAPACITY, HoldKind.TRANSPORT)
    controller.look(now)
    # Ask the limiter too, because the controller of a closed producer raises no new hold.
    late = controller.limiter.refusal(1, now) in limits or any(map(protocol.gate.is_held_by, limits))
    stopped = protocol.is_stopped or any(map(protocol.gate.is_held_by, (HoldKind.DISCONNECTED, HoldKind.REFUSED)))
    return stopped or (late and protocol.unsettled == before)
