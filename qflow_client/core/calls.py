"""The calls that wait, written once for all producers and drop-ins: `send`, `flush`, `wait_unflowed` and `close`.

Such a call is a generator. It takes steps of the protocol, and where it has to wait, it yields until when. A driver
runs it: each skin has one, because waiting is what differs between a thread, a task and a connection that is polled.
The driver

1. resumes the generator where steps of the protocol are taken (under the lock, in the loop), see `resume`;
2. then waits until the call's waiter is set, or until the time that was yielded;
3. resumes it with the present time, and so on until there is a result;
4. undoes the call if anything is raised meanwhile, such as ``KeyboardInterrupt``: it gives up the ticket, or forgets
   the waiter.

A generator never does that itself, because the collector may close one that was dropped, on any thread.
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

#: Yields until when to wait, in seconds; is resumed with the time.
Call = Generator[float, float, _T]

# If the broker has not answered for so many seconds, a caller that does not wait for holds stops waiting for confirms.
_LULL = 0.5


class CannotWait(NamedTuple):
    """The error for a message that cannot be admitted at once, if it may not wait."""

    error: type[ProducerFlowed]
    #: What the caller can do, for the error's text.
    advice: str


def resume(call: Call[_T], now: float | None) -> tuple[float | None, _T | None]:
    """Run a call until it has to wait, or has ended.

    Args:
        call: the call.
        now: seconds; ``None`` to begin.

    Returns:
        Until when to wait, or ``None`` and the result.
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
        ticket: of the message; its waiter is set once it is decided.
        now: seconds.
        cannot_wait: the error for the message of a callback that may not wait: its ticket has a timeout of 0, and
            stands in front of the line for an instant.
        notices: whether to return in time for notices that sends wait. Otherwise the skin calls `SendLine.notice`.

    Returns:
        The receipt.

    Raises:
        FlowControlTimeout, ProducerFlowed: the message was not sent and never will be.
        ProducerClosed: likewise.
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
        waiter: is set then.
        deadline: until when to wait, in seconds.

    Returns:
        Whether they are.
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
        waiter: is set then.
        deadline: until when to wait, in seconds.
        now: seconds.
        in_callback: as for `Waiters.when_unflowed`.

    Returns:
        Whether it is.

    Raises:
        ProducerClosed: it is closed, so it never will be.
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
        waiter: is set then.
        deadline: until when to wait, in seconds.
        now: seconds.
        reason: why nothing is admitted.
        waits_for_holds: False to wait only as long as the broker goes on answering.
    """
    protocol.close(reason, now)
    if waits_for_holds:
        yield from flush(protocol, waiter, deadline)
    else:
        yield from drain(protocol, waiter, deadline, now)


def drain(protocol: ProducerProtocol, waiter: object, deadline: float, now: float) -> Call[None]:
    """Wait until all messages are settled, or the broker does not answer any more.

    Args:
        protocol: the producer's state.
        waiter: is set in between.
        deadline: until when to wait, in seconds.
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
    """Return whether waiting without regard to holds has come to nothing.

    A fast producer is held by ``capacity`` and ``transport`` most of the time, and waits only for answers that are on
    their way, so these two end the wait only if no answer comes for a while. ``paused`` and ``rate`` keep no admitted
    message back. ``disconnected`` and ``refused`` keep back all of them.

    Args:
        protocol: the producer's state.
        before: how many messages were unsettled a while ago; -1 at first.
        now: seconds.
    """
    protocol.controller.look(now)
    late = any(map(protocol.gate.is_held_by, (HoldKind.CAPACITY, HoldKind.TRANSPORT)))
    stopped = protocol.is_stopped or any(map(protocol.gate.is_held_by, (HoldKind.DISCONNECTED, HoldKind.REFUSED)))
    return stopped or (late and protocol.unsettled == before)
