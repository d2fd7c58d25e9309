"""Controllers: a limiter and a gate, and whose turn it is.

A `FlowController` stands at the entrance of one resource. It serves two kinds of source:

* one that can wait *before* its element is taken: it asks with `try_acquire` and otherwise stands in line with a
  `Ticket`; the limit is then never passed;
* one that cannot (F3): `offer` takes its element at once, even beyond the limit, and blocks the source instead.

Nothing here knows threads, tasks or clocks: the caller guards the controller and says what time it is. It also says
when there may be room again, because a controller sees nothing of that by itself: after a release, at the time that
`ready_at` names, and after a hold of its gate was lifted or a capacity, a rate or marks were changed. It calls `grant`
until that has no more, for those in line, and `resume`, for those that are blocked; after a release, `resume` is called
already.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from qflow_client.flow.gate import Gate
from qflow_client.flow.limiters import Limiter

__all__ = ["FifoLine", "FlowController", "FlowSource", "Line", "Ticket", "WeightedLine"]

# Below this length a line, or what it remembers, is not worth sweeping.
_SWEEP_FROM = 64


class Ticket:
    """A place in the line of a controller.

    Args:
        size: of the element that waits.
        source: whose element it is; sources only matter to a `WeightedLine`.
    """

    __slots__ = ("_controller", "_in_front", "cancelled", "size", "source")

    def __init__(self, size: int, source: str = "") -> None:
        #: The size of the element that waits.
        self.size = size
        #: Whose element it is.
        self.source = source
        #: Whether it gave up; the line drops it when it comes to it.
        self.cancelled = False
        # In whose line it stands; None before and after.
        self._controller: FlowController | None = None
        # Whether it was to stand in front of it.
        self._in_front = False


class Line(Protocol):
    """An order in which tickets are served (F4). Every ticket that is pushed is at the head at some time."""

    def push(self, ticket: Ticket) -> None:
        """Put a ticket in its place."""

    def head(self) -> Ticket | None:
        """Whose turn it is, which is never a ticket that is cancelled.

        Returns:
            The ticket; ``None`` if nobody waits.
        """

    def pop(self) -> None:
        """Serve the ticket that `head` has just given."""

    def clear(self) -> None:
        """Drop all tickets, whatever state an interrupted step has left it in."""


class FifoLine:
    """First come, first served (F4)."""

    __slots__ = ("_sweep_at", "_tickets")

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        # How long the line gets before it is rid of cancelled tickets, which pile up behind one that waits for long.
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
    """Start-time fair queuing: sources that wait get turns in proportion to their weights, none starves (F4).

    Tickets of one source are served in the order in which they came. One that is cancelled costs its source no turn.
    A turn is an element, whatever its size.

    Args:
        weights: turns of a source for each turn of a source of weight 1; a source that is not named has weight 1.

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
        # The virtual time at which each source's last turn ended; forgotten once it is past, or when nobody waits.
        self._finish: dict[str, float] = {}
        # How many sources are remembered before those whose last turn is past are forgotten.
        self._sweep_at = _SWEEP_FROM
        # The virtual start of the turn that was served last.
        self._time = 0.0
        # Breaks ties by arrival.
        self._serial = 0

    @property
    def weights(self) -> Mapping[str, float]:
        """Turns of a source for each turn of one of weight 1. Settable as a whole, for the turns that come.

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
            # It cancelled all its tickets, and no turn of it is spent.
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
        """Take the source that is next out of the line."""
        del self._lines[heapq.heappop(self._heap)[2]]
        if not self._heap:
            self._finish.clear()
            self._time = 0.0


class FlowSource:
    """Where elements come from that cannot wait to be taken: it is told to stop instead (F3, J4).

    Any number of controllers may block it; it is unblocked only when none does. Subclasses say what that means. Their
    code may call back into the controllers, but must not raise: other sources wait behind it for being unblocked.

    Args:
        name: for people; need not be unique.
    """

    __slots__ = ("_reserved", "blocked_by", "name")

    def __init__(self, name: str) -> None:
        #: For people; need not be unique.
        self.name = name
        #: The controllers that block this source, as keys, the oldest first.
        self.blocked_by: dict[FlowController, None] = {}
        # What its own elements still occupy upstream: (controller, blocker, size), see `forward`.
        self._reserved: list[tuple[FlowController, FlowController, int]] = []

    @property
    def is_blocked(self) -> bool:
        """Whether any controller blocks it."""
        return bool(self.blocked_by)

    def on_blocked(self) -> None:
        """Called when it goes from unblocked to blocked: what it has is to stay where it is from now on."""

    def on_unblocked(self) -> None:
        """Called when the last controller has let it go: it may go on, even from in here."""

    def block(self, controller: FlowController) -> None:
        """Be blocked by a controller, which calls this; a second time changes nothing."""
        first = not self.blocked_by
        self.blocked_by.setdefault(controller)
        if first:
            self.on_blocked()

    def unblock(self, controller: FlowController) -> None:
        """Be let go by a controller, which calls this, and give back what was reserved for what it had blocked (F3)."""
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
            held: the controller in which the element occupies space on this side. The space is released at once if the
                element fits downstream, and only when `downstream` unblocks this source if it overflowed (F3). ``None``
                if it occupies none.

        Returns:
            True if this source is blocked by `downstream` now.

        Raises:
            ValueError: the element does not occupy that space in `held`.
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

    Neither thread-safe nor tied to a clock: the caller guards it and says what time it is.

    Args:
        limiter: what may be inside.
        gate: further reasons to let nobody in; a new one unless given. The limiter's kinds of hold, with no source,
            belong to the controller: others use other kinds, or name a source.
        line: the order in which waiting tickets are served; first come, first served unless given (F4).
        name: for people; need not be unique.
    """

    __slots__ = ("_blocked", "_front", "_ignored", "_limited", "_line", "gate", "limiter", "name", "waiting")

    def __init__(self, limiter: Limiter, *, gate: Gate | None = None, line: Line | None = None, name: str = "") -> None:
        #: What may be inside.
        self.limiter = limiter
        #: What else may hold. Who lifts such a hold calls `grant` and `resume` afterwards.
        self.gate = gate if gate is not None else Gate()
        #: For people; need not be unique.
        self.name = name
        self._line: Line = line if line is not None else FifoLine()
        # Who stands in front of the line, and whose holds do not keep it out.
        self._front: Ticket | None = None
        self._ignored = ""
        # The kinds of the holds that stand for the limiter on the gate, as keys: none or one, and two only until the
        # older is lifted. Noted before they are raised, forgotten after they are lifted: Ctrl-C leaves none behind.
        self._limited: dict[str, None] = {}
        #: How many tickets stand in line, or in front of it. Only to be read.
        self.waiting = 0
        # Sources that are blocked, oldest first.
        self._blocked: dict[FlowSource, None] = {}

    @property
    def blocked(self) -> tuple[FlowSource, ...]:
        """The sources that this controller blocks, oldest first."""
        return tuple(self._blocked)

    # Sources that wait.

    def try_acquire(self, size: int, now: float) -> bool:
        """Enter at once, or not at all: nobody who came later passes one who waits (F4).

        Args:
            size: of the element.
            now: seconds.

        Returns:
            True if the element is inside now.
        """
        if self.waiting:
            return False
        # The limiter's own hold may have been outlived by time or by a release.
        if not self.gate.is_open and (not self._limited or not self._look(size, now)):
            return False
        kind = self.limiter.try_add(size, now)
        if kind is None:
            return True
        self._limit(kind, now)
        return False

    def stand_in_line(self, ticket: Ticket, now: float) -> None:
        """Wait for a turn. `grant` says when it has come.

        Args:
            ticket: the place to take.
            now: seconds.

        Raises:
            ValueError: the ticket stands in line, or has given up.
        """
        self._check_new(ticket)
        self._line.push(ticket)
        ticket._controller = self
        self.waiting += 1
        if self.waiting == 1:
            self._look(ticket.size, now)

    def stand_in_front(self, ticket: Ticket, now: float, *, ignoring: str) -> None:
        """Wait for the next turn, in front of the line.

        It is for one for whose end others wait, so that it can wait neither for them nor for itself.

        Args:
            ticket: the place to take.
            now: seconds.
            ignoring: the source of the holds that do not keep it out.

        Raises:
            ValueError: the ticket stands in line, or has given up; or another stands in front.
        """
        self._check_new(ticket)
        if self._front is not None:
            raise ValueError("there is room for one ticket in front of the line, and another stands there")
        self._ignored = ignoring
        ticket._in_front = True
        self._front = ticket
        ticket._controller = self
        self.waiting += 1
        self._look(ticket.size, now)

    def _check_new(self, ticket: Ticket) -> None:
        if ticket._controller is not None or ticket.cancelled:
            raise ValueError("a ticket that stands in line or has given up cannot stand in line again: take a new one")

    def leave_line(self, ticket: Ticket) -> bool:
        """Give up waiting.

        `grant` is to be called next: who stood behind a large element may fit.

        Returns:
            True if it stood in this line; False if it was let in or sent away, or gave up before, and nothing happens.
        """
        if ticket._controller is not self:
            return False
        ticket.cancelled = True
        if ticket is self._front:
            self._front = None
        self._gone(ticket)
        return True

    def dismiss(self) -> Ticket | None:
        """Send whose turn is next away without letting it in.

        Returns:
            The ticket; ``None`` if nobody waits.
        """
        ticket = self._head()
        if ticket is not None:
            self._pop(ticket)
        return ticket

    def set_line(self, tickets: Iterable[Ticket]) -> None:
        """Have these, and no others, wait.

        Args:
            tickets: in the order in which they came.
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
        """Let in whose turn it is, if it may enter now.

        The limiter's hold stays while others wait behind it. With nobody in line, it is lifted if it is outlived.

        Args:
            now: seconds.

        Returns:
            The ticket, whose element is inside now; ``None`` if nobody waits or nobody may enter.
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
        """Take note that elements have left, and unblock whom that lets go on (J6).

        Args:
            size: of all of them together.
            count: how many they are.

        Raises:
            ValueError: so much is not inside.
        """
        self.limiter.remove(size, count)
        if self._blocked:
            self.resume()

    def look(self, now: float) -> bool:
        """Bring the gate up to date with the limiter: its hold comes and goes with whether the next one could enter.

        While somebody waits, it does not go before they are let in: that is for `grant`.

        Args:
            now: seconds.

        Returns:
            Whether the next one to come, of the smallest size above 0, could enter now.
        """
        return self._look(self.next_size, now) and not self.waiting

    def ready_at(self, now: float) -> float | None:
        """When to call `grant` and `resume` again if nothing else happens.

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
        """The size of whose turn is next; if nobody waits, the smallest above 0."""
        head = self._head()
        # Nothing always fits, and would say of a limiter that is exactly full that it has room.
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
        # Changes nothing if it is there.
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
        """Take an element at once, and block its source if it overflows (F3 J3) or something else holds the gate.

        The gate keeps no element out: one that is offered has nowhere else to be. Its source stays blocked until the
        limiter allows it to go on and nothing else holds.

        Args:
            source: where the element comes from.
            size: of the element.
            now: seconds.

        Returns:
            True if this controller blocks the source now.
        """
        if self.limiter.add(size, now) or (not self.gate.is_open and self._is_held):
            for _ in self._block_steps(source, now):
                pass
        return source in self._blocked

    def offer_steps(self, source: FlowSource, size: int, now: float) -> Iterator[str]:
        """`offer`, one atomic step at a time: each yield is a point at which another thread may come in between.

        Args:
            source: where the element comes from.
            size: of the element.
            now: seconds.

        Yields:
            The name of the step that was done.
        """
        if self.limiter.add(size, now) or self._is_held:
            yield "taken"
            yield from self._block_steps(source, now)

    def _block_steps(self, source: FlowSource, now: float | None) -> Iterator[str]:
        self._blocked.setdefault(source)
        source.block(self)
        yield "blocked"
        # What left between the two steps did not see that this source is blocked (J5).
        if self._may_go_on(now):
            self._unblock(source)

    def release_steps(self, size: int, count: int = 1) -> Iterator[str]:
        """`release`, one atomic step at a time.

        Args:
            size: of all elements together.
            count: how many they are.

        Yields:
            The name of the step that was done.
        """
        self.limiter.remove(size, count)
        if not self._blocked:
            return
        yield "removed"
        self.resume()

    def resume(self, now: float | None = None) -> None:
        """Unblock the sources that may go on, the oldest first.

        To be called at the time that `ready_at` names, and after a hold of the gate was lifted or a capacity, a rate or
        marks were changed. `release` does it by itself.

        Args:
            now: seconds; ``None`` if that is not known, and then nobody goes on whom only time lets.
        """
        for source in tuple(self._blocked):
            # One that was unblocked may at once have brought so much that the others have to stay.
            if not self._may_go_on(now):
                return
            self._unblock(source)

    def block(self, source: FlowSource, now: float | None = None) -> None:
        """Block a source that brought nothing now, such as one that did so recently (D12), unless all may go on.

        Args:
            source: whom to block.
            now: seconds; ``None`` if that is not known, as for `resume`.
        """
        if not self._may_go_on(now):
            for _ in self._block_steps(source, now):
                pass

    def forget(self, source: FlowSource) -> None:
        """Drop a source that is gone; as far as this controller is concerned, it is unblocked."""
        self._unblock(source)

    @property
    def _is_held(self) -> bool:
        """Whether something other than the limiter holds the gate."""
        return self._holds_back(None)

    def _holds_back(self, ticket: Ticket | None) -> bool:
        """Whether something other than the limiter keeps a ticket out."""
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
