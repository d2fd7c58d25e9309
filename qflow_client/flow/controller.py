"""A controller combines a limiter, a gate, and a waiting line.

A `FlowController` controls the entrance of *elements* (for example messages) into one resource (for example a queue).
The elements come from *sources*. There are two kinds of sources:

* A source that can wait *before* its element enters calls `try_acquire`. If the element cannot enter, the source waits
    in line with a `Ticket`. Only an element that is larger than the limit can exceed it.
* A source that cannot wait (F3) calls `offer`. The element always enters immediately. If the limit is exceeded or the
    gate is closed, the controller blocks the source.

This module uses no threads, tasks or clocks. The caller must prevent concurrent calls, and passes the current time.
There may be room after `release`, at the time of `ready_at`, or when a hold is lifted or a limit is changed. At each of
these times, the caller must call `grant` until the result is ``None``, and then `resume`.
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

# A collection with fewer entries than this is not cleaned up.
_SWEEP_FROM = 64


class Ticket:
    """A place in the line of a controller.

    Args:
        size: size of the waiting element.
        source: source of the element, for a `Line` that treats sources differently, such as `WeightedLine`.
    """

    __slots__ = ("_controller", "_in_front", "cancelled", "size", "source")

    def __init__(self, size: int, source: str = "") -> None:
        #: The size of the waiting element.
        self.size = size
        #: The source of the element.
        self.source = source
        #: Whether the ticket was withdrawn. The line drops withdrawn tickets when they reach its head, or earlier.
        self.cancelled = False
        # The controller in whose line the ticket waits; ``None`` if the ticket does not wait.
        self._controller: FlowController | None = None
        # Whether the ticket waits in front of the line.
        self._in_front = False


class Line(Protocol):
    """The order in which tickets are served (F4). Every ticket must eventually reach the head of the line."""

    def push(self, ticket: Ticket) -> None:
        """Add a ticket."""

    def head(self) -> Ticket | None:
        """Return the next ticket that is not cancelled, or ``None`` if no ticket waits."""

    def pop(self) -> None:
        """Remove the ticket that the last call of `head` has returned."""

    def clear(self) -> None:
        """Remove all tickets. This must also work after an interrupted call of another method."""


class FifoLine:
    """A line that serves tickets in the order of their arrival (F4)."""

    __slots__ = ("_sweep_at", "_tickets")

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        # At this length, `push` removes the cancelled tickets. They can accumulate behind a ticket that waits long.
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
    """A line that serves waiting sources in proportion to their weights (F4, start-time fair queuing).

    No source starves. The tickets of one source are served in the order of their arrival. A *turn* of a source serves
    one ticket, whatever the size of its element. A cancelled ticket takes no turn.

    Args:
        weights: how many turns a source has for each turn of a source with weight 1. The default weight is 1.

    Raises:
        ValueError: a weight is 0, negative or not finite.
    """

    __slots__ = ("_finish", "_heap", "_lines", "_serial", "_sweep_at", "_time", "_weights")

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = weights or {}
        # The waiting tickets of each source.
        self._lines: dict[str, FifoLine] = {}
        # For the next turn of each waiting source: its start in virtual time, a serial number, and the source.
        self._heap: list[tuple[float, int, str]] = []
        # The virtual time at which the last turn of each source ends. All entries are removed when no source waits.
        self._finish: dict[str, float] = {}
        # When `_finish` has this number of entries, the entries with a past time are removed.
        self._sweep_at = _SWEEP_FROM
        # The present virtual time, which is the start of the last turn. In virtual time a turn lasts ``1 / weight``.
        self._time = 0.0
        # The last serial number. Serial numbers sort turns with equal starts.
        self._serial = 0

    @property
    def weights(self) -> Mapping[str, float]:
        """How many turns a source has for each turn of a source with weight 1. A new mapping applies to future turns.

        Raises:
            ValueError: a new weight is 0, negative or not finite.
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
            # All tickets of the source are cancelled, so remove the source without counting a turn.
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
        del self._lines[heapq.heappop(self._heap)[2]]
        if not self._heap:
            self._finish.clear()
            self._time = 0.0


class FlowSource:
    """A source that cannot wait. A controller whose gate is closed, or whose limit is exceeded, blocks it (F3, J4).

    Several controllers can block a source at the same time. The source is unblocked when no controller blocks it any
    more. Subclasses define `on_blocked` and `on_unblocked`. These methods are allowed to call the controllers, but must
    not raise exceptions, because other sources still have to be unblocked.

    Args:
        name: name for people; need not be unique.
    """

    __slots__ = ("_reserved", "blocked_by", "name")

    def __init__(self, name: str) -> None:
        #: Name for people; need not be unique.
        self.name = name
        #: The controllers that block this source, as keys, oldest first.
        self.blocked_by: dict[FlowController, None] = {}
        # The room that forwarded elements still occupy in the resources they left, as (controller, blocker, size).
        self._reserved: list[tuple[FlowController, FlowController, int]] = []

    @property
    def is_blocked(self) -> bool:
        """Whether at least one controller blocks the source."""
        return bool(self.blocked_by)

    def on_blocked(self) -> None:
        """Called when the source becomes blocked. The source should offer no elements until `on_unblocked`."""

    def on_unblocked(self) -> None:
        """Called when no controller blocks the source any more. The source can offer elements inside this call."""

    def block(self, controller: FlowController) -> None:
        """Record that a controller blocks the source. Usually only the controller calls this.

        If the controller already blocks the source, nothing changes.
        """
        first = not self.blocked_by
        self.blocked_by.setdefault(controller)
        if first:
            self.on_blocked()

    def unblock(self, controller: FlowController) -> None:
        """Record that a controller does not block the source any more. Usually only the controller calls this.

        The room that was reserved because of this controller is released (F3).
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
            size: size of the element.
            downstream: controller of the next resource.
            now: seconds.
            held: controller of the resource that the element leaves, if it occupies room there. If `downstream` blocks
                this source now, the room is released when `downstream` unblocks the source (F3), otherwise now.

        Returns:
            True if `downstream` blocks this source now.

        Raises:
            ValueError: no element is inside `held`, or the total size inside is less than `size`.
        """
        blocked = downstream.offer(self, size, now)
        if held is not None:
            if blocked:
                self._reserved.append((held, downstream, size))
            else:
                held.release(size)
        return blocked


class FlowController:
    """The entrance of one resource (F1). The caller must prevent concurrent calls, and passes the current time.

    Args:
        limiter: the limit for elements.
        gate: gate for reasons other than the limit. The default is a new gate. The controller raises and lifts
            holds of the limiter's kinds without a source. Other code must use other kinds, or pass a source.
        line: order in which waiting tickets are served. The default is first come, first served (F4).
        name: name for people; need not be unique.
    """

    __slots__ = ("_blocked", "_front", "_ignored", "_limited", "_line", "gate", "limiter", "name", "waiting")

    def __init__(self, limiter: Limiter, *, gate: Gate | None = None, line: Line | None = None, name: str = "") -> None:
        #: The limit for elements.
        self.limiter = limiter
        #: The gate. Code that lifts one of its own holds must call `grant` and `resume` afterwards.
        self.gate = gate if gate is not None else Gate()
        #: Name for people; need not be unique.
        self.name = name
        self._line: Line = line if line is not None else FifoLine()
        # The ticket in front of the line; ``None`` if there is none.
        self._front: Ticket | None = None
        # The `Hold.source` of the holds that the ticket in front of the line ignores.
        self._ignored = ""
        # The kinds of the holds that the controller has raised for the limiter, as keys. Usually there is at most one
        # key. If the kind changes, there are two keys until the older hold is lifted. A key is added before its hold is
        # raised, and removed after its hold is lifted. So the controller finds every hold, even after Ctrl-C.
        self._limited: dict[str, None] = {}
        #: Number of tickets that wait in line or in front of the line. Read-only.
        self.waiting = 0
        # Blocked sources, oldest first.
        self._blocked: dict[FlowSource, None] = {}

    @property
    def blocked(self) -> tuple[FlowSource, ...]:
        """The sources that this controller blocks, oldest first."""
        return tuple(self._blocked)

    # Sources that wait.

    def try_acquire(self, size: int, now: float) -> bool:
        """Admit an element if it can enter immediately. A new element never enters before a waiting element (F4)."""
        if self.waiting:
            return False
        # The hold for the limiter may be outdated, because time has passed or elements were released.
        if not self.gate.is_open and (not self._limited or not self._look(size, now)):
            return False
        kind = self.limiter.try_add(size, now)
        if kind is None:
            return True
        self._limit(kind, now)
        return False

    def stand_in_line(self, ticket: Ticket, now: float) -> None:
        """Put a ticket in line. A later call of `grant` admits its element, and returns the ticket.

        Raises:
            ValueError: the ticket is already in a line, or was withdrawn.
        """
        self._check_new(ticket)
        self._line.push(ticket)
        ticket._controller = self
        self.waiting += 1
        if self.waiting == 1:
            self._look(ticket.size, now)

    def stand_in_front(self, ticket: Ticket, now: float, *, ignoring: str) -> None:
        """Put a ticket in front of the line, so that it is served next.

        Callbacks use this method, because senders in line may be waiting for the callback to return.

        Args:
            ignoring: the ticket ignores the holds that have this `Hold.source`.

        Raises:
            ValueError: the ticket is already in a line, or was withdrawn, or another ticket is in front.
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
        """Remove a ticket from the line. Call `grant` next, because the next element may be smaller and fit.

        Returns:
            True if the ticket was in this line. False if it was never in line, or was granted, dismissed or withdrawn.
        """
        if ticket._controller is not self:
            return False
        ticket.cancelled = True
        if ticket is self._front:
            self._front = None
        self._gone(ticket)
        return True

    def dismiss(self) -> Ticket | None:
        """Remove the next ticket without admitting its element. Return ``None`` if no ticket waits."""
        ticket = self._head()
        if ticket is not None:
            self._pop(ticket)
        return ticket

    def set_line(self, tickets: Iterable[Ticket]) -> None:
        """Replace all waiting tickets.

        Args:
            tickets: the new tickets in the order of their arrival.
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

    def release_line(self) -> None:
        """Do not use the line any more, because the application may give it to another producer."""
        self._line = FifoLine()

    def grant(self, now: float) -> Ticket | None:
        """Admit the element of the next ticket, if it can enter now.

        If there is room, the limiter's hold is lifted. But while tickets wait and only this hold exists, it stays.

        Returns:
            The ticket of the admitted element; ``None`` if no element was admitted.
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
        """Record that elements have left, and unblock sources that can continue (J6).

        Args:
            size: total size of the elements.
            count: number of elements.

        Raises:
            ValueError: fewer than `count` elements are inside, or their total size is less than `size`.
        """
        self.limiter.remove(size, count)
        if self._blocked:
            self.resume()

    def look(self, now: float) -> bool:
        """Raise or lift the limiter's hold, depending on whether the next element could enter.

        If the next ticket can be granted now, the hold stays until `grant` is called.

        Returns:
            Whether a new element of size 1 could enter now.
        """
        return self._look(self.next_size, now) and not self.waiting

    def ready_at(self, now: float) -> float | None:
        """Return the time at which to call `grant` and `resume` again, or ``None`` if time alone changes nothing."""
        times = []
        if self._limited:
            times.append(self.limiter.ready_at(self.next_size, now))
        if self._blocked and not self._is_held:
            times.append(self.limiter.resumes_at(now))
        return min((at for at in times if at is not None), default=None)

    @property
    def next_size(self) -> int:
        """The size of the next ticket, or 1 if no ticket waits."""
        head = self._head()
        # The default is not 0, because an element of size 0 always fits, even into a full `SizeLimiter`.
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
        if self.gate.is_shut:
            # Nothing enters any more, so do not raise a hold that nothing would lift.
            return
        limited = self._limited
        limited[kind] = None
        # This changes nothing if the hold already exists.
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
        """Accept an element. Block its source if the limit is exceeded (F3 J3), or if other code has closed the gate.

        The element enters even if the gate is closed, because its source cannot keep it. A blocked source stays blocked
        until the limiter lets sources continue, and the gate has no hold except the limiter's.

        Returns:
            Whether this controller blocks the source now.
        """
        if self.limiter.add(size, now) or (not self.gate.is_open and self._is_held):
            self._block(source, now)
        return source in self._blocked

    def _block(self, source: FlowSource, now: float | None) -> None:
        self._blocked.setdefault(source)
        source.block(self)
        self._look_again(source, now)

    def _look_again(self, source: FlowSource, now: float | None) -> None:
        """Unblock a source that was just blocked, if `FlowSource.on_blocked` has made room (J5)."""
        if self._may_go_on(now):
            self._unblock(source)

    def resume(self, now: float | None = None) -> None:
        """Unblock the sources that can continue, oldest first. Call this after any change that may make room.

        Args:
            now: seconds; ``None`` if the time is unknown. Then sources that wait until a certain time stay blocked.
        """
        if not self._blocked or not self._may_go_on(now):
            # Each `release` calls this method, so do not list all sources if none of them can continue.
            return
        for source in tuple(self._blocked):
            # An unblocked source may immediately offer elements, so check again before each source.
            if not self._may_go_on(now):
                return
            self._unblock(source)

    def block(self, source: FlowSource, now: float | None = None) -> None:
        """Block a source that offers no element now (D12). Do nothing if the sources can continue.

        Args:
            source: the source to block.
            now: seconds; ``None`` if the time is unknown, as for `resume`.
        """
        if not self._may_go_on(now):
            self._block(source, now)

    def forget(self, source: FlowSource) -> None:
        """Unblock a source, even if the limit is exceeded. For example, call this when the source has ended."""
        self._unblock(source)

    @property
    def _is_held(self) -> bool:
        """Whether the gate is shut, or has a hold that does not belong to the limiter."""
        return self._holds_back(None)

    def _holds_back(self, ticket: Ticket | None) -> bool:
        """Whether the gate is shut, or has a hold that is neither the limiter's nor ignored by the ticket."""
        gate = self.gate
        if gate.is_open or gate.is_shut:
            return gate.is_shut
        ignored = self._ignored if ticket is not None and ticket is self._front else ""
        return any(hold.source != ignored if hold.source else hold.kind not in self._limited for hold in gate.holds)

    def _may_go_on(self, now: float | None) -> bool:
        if not self.limiter.resumable and (now is None or self.limiter.resumes_at(now) != now):
            return False
        return not self._is_held

    def _unblock(self, source: FlowSource) -> None:
        if source in self._blocked:
            del self._blocked[source]
            source.unblock(self)
