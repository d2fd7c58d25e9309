"""Controllers: each has a limiter, a gate, and an order of waiting sources.

A `FlowController` controls the entrance of one resource. It serves two kinds of source:

* A source that can wait *before* its element is taken calls `try_acquire`. If that fails, it waits in line with a
  `Ticket`. The limit is never exceeded.
* A source that cannot wait (F3) calls `offer`. The element is accepted immediately, even beyond the limit, and the
  source is blocked instead.

This module uses no threads, tasks or clocks. The caller guards the controller against concurrent calls and passes the
time. The caller also has to call the controller when there may be room again. There may be room after a release, at the
time that `ready_at` returns, after a hold of the gate was lifted, and after a change of a capacity, a rate or
thresholds. Then the caller calls `grant` until it returns no more tickets, for the sources in line, and `resume`, for
the blocked sources. A release calls `resume` itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from qflow_client.flow.gate import Gate
from qflow_client.flow.limiters import Limiter

__all__ = ["FifoLine", "FlowController", "FlowSource", "Line", "Ticket", "WeightedLine"]

# A shorter line, or a shorter list of remembered sources, is not worth sweeping.
_SWEEP_FROM = 64


class Ticket:
    """A place in the line of a controller.

    Args:
        size: the size of the element that waits.
        source: the source of the element; only a `WeightedLine` uses it.
    """

    __slots__ = ("_controller", "_in_front", "cancelled", "size", "source")

    def __init__(self, size: int, source: str = "") -> None:
        #: The size of the element that waits.
        self.size = size
        #: The source of the element.
        self.source = source
        #: Whether the ticket was withdrawn. The line drops such a ticket when it reaches the head.
        self.cancelled = False
        # The controller in whose line the ticket is; ``None`` before and after.
        self._controller: FlowController | None = None
        # Whether the ticket waits in front of the line.
        self._in_front = False


class Line(Protocol):
    """An order in which tickets are served (F4). Every pushed ticket reaches the head at some time."""

    def push(self, ticket: Ticket) -> None:
        """Put a ticket in its place."""

    def head(self) -> Ticket | None:
        """Return the ticket whose turn it is. It is never a cancelled ticket.

        Returns:
            The ticket; ``None`` if no ticket waits.
        """

    def pop(self) -> None:
        """Remove the ticket that `head` has just returned."""

    def clear(self) -> None:
        """Drop all tickets. This works in any state that an interrupted step may have left."""


class FifoLine:
    """First come, first served (F4)."""

    __slots__ = ("_sweep_at", "_tickets")

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        # The length at which cancelled tickets are removed. They accumulate after a ticket that waits for long.
        self._sweep_at = _SWEEP_FROM

    def push(self, ticket: Ticket) -> None:
        if len(self._tickets) >= self._sweep_at:
            self._tickets = deque(each for each in self._tickets if not each.cancelled)
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self._tickets))
        self._tickets.append(ticket)

    def head(self) -> Ticket | None:
        tickets = self._tickets
        while tickets and tickets[0].cancelled:
            tickets.popleft()
        return tickets[0] if tickets else None

    def pop(self) -> None:
        self._tickets.popleft()

    def clear(self) -> None:
        self._tickets.clear()


class WeightedLine:
    """Start-time fair queuing: waiting sources are served in proportion to their weights, and none starves (F4).

    Tickets of one source are served in the order of their arrival. A cancelled ticket costs its source no turn. A turn
    is one element of any size.

    Args:
        weights: turns of a source for each turn of a source of weight 1; the default weight is 1.

    Raises:
        ValueError: a weight that is not more than 0, or not finite.
    """

    __slots__ = ("_finish", "_heap", "_lines", "_serial", "_sweep_at", "_time", "_weights")

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = weights or {}
        # The tickets of each source in line.
        self._lines: dict[str, FifoLine] = {}
        # For each source in line, the virtual start of its next turn.
        self._heap: list[tuple[float, int, str]] = []
        # The virtual time at which each source's last turn ended. It is forgotten when it has passed, or when no source
        # waits.
        self._finish: dict[str, float] = {}
        # The number of remembered sources at which those with a past last turn are forgotten.
        self._sweep_at = _SWEEP_FROM
        # The virtual start of the last turn.
        self._time = 0.0
        # Breaks ties by arrival.
        self._serial = 0

    @property
    def weights(self) -> Mapping[str, float]:
        """Turns of a source for each turn of a source of weight 1. Can be set as a whole, for future turns.

        Raises:
            ValueError: set to a weight that is not more than 0, or not finite.
        """
        return MappingProxyType(self._weights)

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        for source, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {source!r} must be more than 0 and finite, not {weight!r}")
        self._weights = dict(weights)

    def push(self, ticket: Ticket) -> None:
        source = ticket.source
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = FifoLine()
            self._enter(source, max(self._time, self._finish.get(source, 0.0)))
        line.push(ticket)

    def head(self) -> Ticket | None:
        while self._heap:
            source = self._heap[0][2]
            ticket = self._lines[source].head()
            if ticket is not None:
                return ticket
            # The source cancelled all its tickets, and none of its turns is used up.
            self._leave()
        return None

    def pop(self) -> None:
        start, _, source = self._heap[0]
        line = self._lines[source]
        line.pop()
        self._time = start
        finish = self._finish[source] = start + 1.0 / self._weights.get(source, 1.0)
        if len(self._finish) >= self._sweep_at:
            self._finish = {each: end for each, end in self._finish.items() if end > start}
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self._finish))
        if line.head() is None:
            self._leave()
        else:
            heapq.heappop(self._heap)
            self._enter(source, finish)

    def clear(self) -> None:
        self._lines.clear()
        self._heap.clear()
        self._finish.clear()
        self._time = 0.0

    def _enter(self, source: str, start: float) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (start, self._serial, source))

    def _leave(self) -> None:
        """Take the next source out of the line."""
        del self._lines[heapq.heappop(self._heap)[2]]
        if not self._heap:
            self._finish.clear()
            self._time = 0.0


class FlowSource:
    """A source of elements that cannot wait before they are taken. It is stopped instead (F3, J4).

    Any number of controllers may block it. It is unblocked when no controller blocks it any more. Subclasses define the
    effect. Their code may call back into the controllers, but must not raise, because other sources wait to be
    unblocked after it.

    Args:
        name: a name for people, which need not be unique.
    """

    __slots__ = ("_reserved", "blocked_by", "name")

    def __init__(self, name: str) -> None:
        #: A name for people, which need not be unique.
        self.name = name
        #: The controllers that block this source, as keys, the oldest first.
        self.blocked_by: dict[FlowController, None] = {}
        # The room that its elements still occupy upstream: (controller, blocker, size), see `forward`.
        self._reserved: list[tuple[FlowController, FlowController, int]] = []

    @property
    def is_blocked(self) -> bool:
        """Whether any controller blocks the source."""
        return bool(self.blocked_by)

    def on_blocked(self) -> None:
        """Called when the source becomes blocked. It must keep its elements from now on."""

    def on_unblocked(self) -> None:
        """Called when no controller blocks the source any more. It may continue, even inside this call."""

    def block(self, controller: FlowController) -> None:
        """Record that a controller blocks the source; the controller calls this. A second call changes nothing."""
        first = not self.blocked_by
        self.blocked_by.setdefault(controller)
        if first:
            self.on_blocked()

    def unblock(self, controller: FlowController) -> None:
        """Record that a controller does not block the source any more; the controller calls this.

        The room that was reserved because of this controller is given back (F3).
        """
        if controller not in self.blocked_by:
            return
        del self.blocked_by[controller]
        freed = [entry for entry in self._reserved if entry[1] is controller]
        if freed:
            self._reserved = [entry for entry in self._reserved if entry[1] is not controller]
        if not self.blocked_by:
            self.on_unblocked()
        for upstream, _, size in freed:
            upstream.release(size)

    def forward(self, size: int, downstream: FlowController, now: float, *, held: FlowController | None = None) -> bool:
        """Pass an element on to the next resource.

        Args:
            size: of the element.
            downstream: the controller of the next resource.
            now: seconds.
            held: the controller on this side in which the element occupies room. The room is released immediately if
                the element fits downstream. If it overflows there, the room is released when `downstream` unblocks this
                source (F3). ``None`` if the element occupies no room.

        Returns:
            True if `downstream` blocks this source now.

        Raises:
            ValueError: the element does not occupy that room in `held`.
        """
        blocked = downstream.offer(self, size, now)
        if held is not None:
            if blocked:
                self._reserved.append((held, downstream, size))
            else:
                held.release(size)
        return blocked


class FlowController:
    """The entrance of one resource (F1).

    It is not thread-safe and reads no clock: the caller guards it against concurrent calls and passes the time.

    Args:
        limiter: limits the elements inside.
        gate: has the other reasons to admit no element; by default a new gate. Holds with the limiter's kinds and no
            source belong to the controller. Other code must use other kinds, or pass a source.
        line: the order in which waiting tickets are served; by default first come, first served (F4).
        name: a name for people, which need not be unique.
    """

    __slots__ = ("_blocked", "_front", "_ignored", "_limited", "_line", "gate", "limiter", "name", "waiting")

    def __init__(self, limiter: Limiter, *, gate: Gate | None = None, line: Line | None = None, name: str = "") -> None:
        #: Limits the elements inside.
        self.limiter = limiter
        #: Has all other holds. Code that lifts such a hold calls `grant` and `resume` afterwards.
        self.gate = gate if gate is not None else Gate()
        #: A name for people, which need not be unique.
        self.name = name
        self._line: Line = line if line is not None else FifoLine()
        # The ticket in front of the line, and the source of the holds that it ignores.
        self._front: Ticket | None = None
        self._ignored = ""
        # The kinds of the holds that the controller raised for the limiter, as keys. There is at most one, except for a
        # moment before the older of two is lifted. A kind is added before its hold is raised and removed after it is
        # lifted, so Ctrl-C leaves no hold behind.
        self._limited: dict[str, None] = {}
        #: How many tickets wait in line or in front of it. Read-only.
        self.waiting = 0
        # Blocked sources, the oldest first.
        self._blocked: dict[FlowSource, None] = {}

    @property
    def blocked(self) -> tuple[FlowSource, ...]:
        """The sources that this controller blocks, the oldest first."""
        return tuple(self._blocked)

    # Sources that wait.

    def try_acquire(self, size: int, now: float) -> bool:
        """Enter immediately, or not at all. A new element never enters before a waiting one (F4).

        Args:
            size: of the element.
            now: seconds.

        Returns:
            True if the element is inside now.
        """
        if self.waiting:
            return False
        # The reason for the limiter's own hold may be gone, after some time or after a release.
        if not self.gate.is_open and (not self._limited or not self._look(size, now)):
            return False
        kind = self.limiter.try_add(size, now)
        if kind is None:
            return True
        self._limit(kind, now)
        return False

    def stand_in_line(self, ticket: Ticket, now: float) -> None:
        """Put a ticket in line. `grant` returns the ticket when its element is inside.

        Args:
            ticket: the ticket.
            now: seconds.

        Raises:
            ValueError: the ticket is in a line already, or was withdrawn.
        """
        self._check_new(ticket)
        self._line.push(ticket)
        ticket._controller = self
        self.waiting += 1
        if self.waiting == 1:
            self._look(ticket.size, now)

    def stand_in_front(self, ticket: Ticket, now: float, *, ignoring: str) -> None:
        """Put a ticket in front of the line, so that it is served next.

        Used by callbacks. Other senders may be waiting for the callback to return, so it waits for none of them.

        Args:
            ticket: the ticket.
            now: seconds.
            ignoring: the source of the holds that the ticket ignores.

        Raises:
            ValueError: the ticket is in a line already, or was withdrawn; or another ticket is in front.
        """
        self._check_new(ticket)
        if self._front is not None:
            raise ValueError("only one ticket can stand in front of the line, and another ticket stands there")
        self._ignored = ignoring
        ticket._in_front = True
        self._front = ticket
        ticket._controller = self
        self.waiting += 1
        self._look(ticket.size, now)

    def _check_new(self, ticket: Ticket) -> None:
        if ticket._controller is not None or ticket.cancelled:
            raise ValueError("a ticket that stands in line or was withdrawn cannot stand in line again: take a new one")

    def leave_line(self, ticket: Ticket) -> bool:
        """Stop waiting. Call `grant` next, because elements that wait after a large one may fit now.

        Returns:
            True if the ticket was in this line. False if it was granted, dismissed or withdrawn before; nothing changes
            then.
        """
        if ticket._controller is not self:
            return False
        ticket.cancelled = True
        if ticket is self._front:
            self._front = None
        self._gone(ticket)
        return True

    def dismiss(self) -> Ticket | None:
        """Remove the ticket that is next in the waiting line. Its element is not admitted.

        Returns:
            The ticket; ``None`` if no ticket waits.
        """
        ticket = self._head()
        if ticket is not None:
            self._pop(ticket)
        return ticket

    def set_line(self, tickets: Iterable[Ticket]) -> None:
        """Replace all waiting tickets.

        Args:
            tickets: the new ones, in the order of their arrival.
        """
        self._front = None
        self._line.clear()
        self.waiting = 0
        for ticket in tickets:
            if ticket._in_front:
                self._front = ticket
            else:
                self._line.push(ticket)
            ticket._controller = self
            self.waiting += 1

    def grant(self, now: float) -> Ticket | None:
        """Admit the element of the next ticket, if it may enter now.

        The limiter's hold stays while other tickets wait. If no ticket is in line, a hold whose reason is gone is
        lifted.

        Args:
            now: seconds.

        Returns:
            The ticket, whose element is inside now; ``None`` if no ticket waits or none may enter.
        """
        ticket = self._head()
        if ticket is None:
            if self._limited:
                self.look(now)
            return None
        kind = self.limiter.refusal(ticket.size, now)
        if kind is not None:
            self._limit(kind, now)
            return None
        if not self.gate.is_open and self._holds_back(ticket):
            self._unlimit(now)
            return None
        self._pop(ticket)
        self.limiter.add(ticket.size, now)
        if self._limited and not self.waiting:
            self.look(now)
        return ticket

    def _head(self) -> Ticket | None:
        return self._front or self._line.head()

    def _pop(self, ticket: Ticket) -> None:
        if ticket is self._front:
            self._front = None
        else:
            self._line.pop()
        self._gone(ticket)

    def _gone(self, ticket: Ticket) -> None:
        ticket._controller = None
        self.waiting -= 1

    def release(self, size: int, count: int = 1) -> None:
        """Record that elements have left, and unblock the sources that may continue (J6).

        Args:
            size: the total size of the elements.
            count: the number of elements.

        Raises:
            ValueError: less than that is inside.
        """
        self.limiter.remove(size, count)
        if self._blocked:
            self.resume()

    def look(self, now: float) -> bool:
        """Raise or lift the limiter's hold on the gate, according to whether the next element could enter.

        While tickets wait, the hold is not lifted here: `grant` lifts it after it has admitted them.

        Args:
            now: seconds.

        Returns:
            Whether a new element of the smallest size above 0 could enter now.
        """
        return self._look(self.next_size, now) and not self.waiting

    def ready_at(self, now: float) -> float | None:
        """Return when to call `grant` and `resume` again if nothing else happens.

        Args:
            now: seconds.

        Returns:
            Seconds; ``None`` if time alone changes nothing.
        """
        times = []
        if self._limited:
            times.append(self.limiter.ready_at(self.next_size, now))
        if self._blocked and not self._is_held:
            times.append(self.limiter.resumes_at(now))
        return min((at for at in times if at is not None), default=None)

    @property
    def next_size(self) -> int:
        """The size of the next ticket; the smallest size above 0 if no ticket waits."""
        head = self._head()
        # Size 0 always fits, so an exactly full limiter would seem to have room.
        return head.size if head is not None else 1

    def _look(self, size: int, now: float) -> bool:
        kind = self.limiter.refusal(size, now)
        if kind is not None:
            self._limit(kind, now)
            return False
        head = self._head()
        if self._limited and (head is None or self._holds_back(head)):
            self._unlimit(now)
        return self.gate.is_open

    def _limit(self, kind: str, now: float) -> None:
        limited = self._limited
        limited[kind] = None
        # Changes nothing if the hold exists already.
        self.gate.hold(kind, now=now)
        if len(limited) > 1:
            self._unlimit(now, but=kind)

    def _unlimit(self, now: float, but: str | None = None) -> None:
        for kind in tuple(self._limited):
            if kind != but:
                self.gate.lift(kind, now=now)
                del self._limited[kind]

    # Sources that cannot wait.

    def offer(self, source: FlowSource, size: int, now: float) -> bool:
        """Accept an element immediately. Block its source if it overflows (F3 J3) or if another hold closes the gate.

        The gate keeps no element out, because an offered element has no other place. Its source stays blocked until the
        limiter allows it to continue and there is no other hold.

        Args:
            source: the source of the element.
            size: of the element.
            now: seconds.

        Returns:
            True if this controller blocks the source now.
        """
        if self.limiter.add(size, now) or (not self.gate.is_open and self._is_held):
            self._block(source, now)
        return source in self._blocked

    def _block(self, source: FlowSource, now: float | None) -> None:
        self._blocked.setdefault(source)
        source.block(self)
        self._look_again(source, now)

    def _look_again(self, source: FlowSource, now: float | None) -> None:
        """Unblock a source for which room was made after it overflowed and before it was blocked (J5)."""
        if self._may_go_on(now):
            self._unblock(source)

    def resume(self, now: float | None = None) -> None:
        """Unblock the sources that may continue, the oldest first.

        Call this at the time that `ready_at` returns, after a hold of the gate was lifted, and after a capacity, a rate
        or thresholds were changed. `release` already calls this method.

        Args:
            now: seconds; ``None`` if the time is not known. Then no source is unblocked that only waits for time to
                pass.
        """
        for source in tuple(self._blocked):
            # An unblocked source may immediately offer so much that the other sources have to stay blocked.
            if not self._may_go_on(now):
                return
            self._unblock(source)

    def block(self, source: FlowSource, now: float | None = None) -> None:
        """Block a source although it offers no element now, unless all sources may continue.

        An example is a source that offered an element recently (D12).

        Args:
            source: the source to block.
            now: seconds; ``None`` if the time is not known, as for `resume`.
        """
        if not self._may_go_on(now):
            self._block(source, now)

    def forget(self, source: FlowSource) -> None:
        """Drop a source that is gone. This controller does not block it any more."""
        self._unblock(source)

    @property
    def _is_held(self) -> bool:
        """Whether the gate has a hold that is not the limiter's."""
        return self._holds_back(None)

    def _holds_back(self, ticket: Ticket | None) -> bool:
        """Whether a hold that is not the limiter's keeps a ticket out."""
        gate = self.gate
        if gate.is_open or gate.is_shut:
            return gate.is_shut
        ignored = self._ignored if ticket is not None and ticket is self._front else ""
        return any(hold.source != ignored if hold.source else hold.kind not in self._limited for hold in gate.holds)

    def _may_go_on(self, now: float | None) -> bool:
        """Whether nothing keeps sources blocked."""
        if not self.limiter.resumable and (now is None or self.limiter.resumes_at(now) != now):
            return False
        return not self._is_held

    def _unblock(self, source: FlowSource) -> None:
        if source in self._blocked:
            del self._blocked[source]
            source.unblock(self)
