"""The calls that wait, for all producers and drop-ins: `send`, `flush`, `wait_unflowed` and `close`.

Each call is a generator. It takes steps of the protocol. When it has to wait, it yields the time until which to wait.
Each skin has a driver for these generators, because a thread, a task and a polled connection wait in different ways.
The driver

1. resumes the generator in the context where steps of the protocol are taken (under the lock, or in the loop), see
   `resume`;
2. then waits until the call's waiter is set, or until the time that was yielded;
3. resumes the generator with the present time, and repeats this until there is a result;
4. undoes the call if an exception such as ``KeyboardInterrupt`` is raised meanwhile: it withdraws the ticket, or
   forgets the waiter.

A generator never undoes its call itself, because the garbage collector may close an abandoned generator on any thread.
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

#: Yields the time until which to wait, in seconds; is resumed with the present time.
Call = Generator[float, float, _T]

# If the broker has not answered for this many seconds, a caller that ignores holds stops waiting for confirms.
_LULL = 0.5


class CannotWait(NamedTuple):
    """The error for a message that may not wait and cannot be admitted immediately."""

    error: type[ProducerFlowed]
    #: What the caller can do, for the error's text.
    advice: str


def resume(call: Call[_T], now: float | None) -> tuple[float | None, _T | None]:
    """Run a call until it has to wait or ends.

    Args:
        call: the call.
        now: seconds; ``None`` to begin.

    Returns:
        The time until which to wait, and ``None``. At the end, ``None`` and the result.
    """
    try:
        return call.send(now), None  # type: ignore[arg-type]  # that is how a generator begins
    except StopIteration as end:
        return None, end.value


def send(
    line: SendLine, ticket: SendTicket, now: float, *, cannot_wait: CannotWait | None = None, notices: bool = True
) -> Call[Receipt]:
    """Wait in line until a message is admitted.

    Args:
        line: of the producer.
        ticket: the ticket of the message; its waiter is set when the ticket is decided.
        now: seconds.
        cannot_wait: the error for the message of a callback that may not wait. The ticket has a timeout of 0 then, and
            is at the front of the line for a moment.
        notices: whether to return in time to log notices about waiting calls of `send`. Otherwise the skin calls
            `SendLine.notice`.

    Returns:
        The receipt.

    Raises:
        FlowControlTimeout, ProducerFlowed, ProducerClosed: the message was not sent and never will be.
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
    """Wait until all messages that are admitted now are settled.

    Args:
        protocol: the producer's state.
        waiter: the waiter to set when the messages are settled.
        deadline: the end of the wait, in seconds.

    Returns:
        Whether all of them are settled.
    """
    if protocol.waiters.when_flushed(waiter):
        yield deadline
    return not protocol.waiters.forget(waiter)


def wait_unflowed(
    protocol: ProducerProtocol, waiter: object, deadline: float, now: float, *, in_callback: bool = False
) -> Call[bool]:
    """Wait until the producer is unflowed.

    Args:
        protocol: the producer's state.
        waiter: the waiter to set when the producer is unflowed.
        deadline: the end of the wait, in seconds.
        now: seconds.
        in_callback: as for `Waiters.when_unflowed`.

    Returns:
        Whether the producer is unflowed.

    Raises:
        ProducerClosed: the producer is closed and will never be unflowed.
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
    """Admit nothing from now on, and wait until all messages are settled.

    Args:
        protocol: the producer's state.
        waiter: the waiter to set when the messages are settled.
        deadline: the end of the wait, in seconds.
        now: seconds.
        reason: why nothing is admitted.
        waits_for_holds: False to wait only while the broker continues to answer.
    """
    protocol.close(reason, now)
    if waits_for_holds:
        yield from flush(protocol, waiter, deadline)
    else:
        yield from drain(protocol, waiter, deadline, now)


def drain(protocol: ProducerProtocol, waiter: object, deadline: float, now: float) -> Call[None]:
    """Wait until all messages are settled, or the broker stops answering.

    Args:
        protocol: the producer's state.
        waiter: the waiter to set when the state must be checked again.
        deadline: the end of the wait, in seconds.
        now: seconds.
    """
    before = -1
    while now < deadline and not _has_stalled(protocol, before, now):
        before = protocol.unsettled
        if not protocol.waiters.when_settled(waiter):
            return
        now = yield min(deadline, now + _LULL)
        if not protocol.waiters.forget(waiter):
            return


def _has_stalled(protocol: ProducerProtocol, before: int, now: float) -> bool:
    """Return whether a caller that ignores holds should stop waiting.

    A fast producer has the holds ``capacity`` and ``transport`` most of the time, because it waits for answers that are
    on their way. So these two holds end the wait only if no answer comes for a while. The holds ``paused`` and ``rate``
    do not delay admitted messages. The holds ``disconnected`` and ``refused`` delay all of them.

    Args:
        protocol: the producer's state.
        before: how many messages were unsettled at the last check; -1 at the first check.
        now: seconds.
    """
    protocol.controller.look(now)
    late = any(map(protocol.gate.is_held_by, (HoldKind.CAPACITY, HoldKind.TRANSPORT)))
    stopped = protocol.is_stopped or any(map(protocol.gate.is_held_by, (HoldKind.DISCONNECTED, HoldKind.REFUSED)))
    return stopped or (late and protocol.unsettled == before)
