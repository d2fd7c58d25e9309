"""The flow state of a queue, sans-I/O: the channels that it blocks (flows), and the confirms that it holds (delays).

A `QueueFlow` is the flow state for one set of thresholds. Above a stop threshold or a capacity, the state turns ON.
While it is ON, the `QueueFlow` blocks publishing channels, holds confirms of messages, or does both. Below the resume
thresholds, or at or below the resume capacity, the state turns OFF. The `QueueFlow` then releases all held confirms.
It unblocks the channels, together or one after the other (F4). `QueueFlows` has all flow states of a queue.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qflow_client.broker.core.contents import EntryObserver
from qflow_client.broker.core.entries import Completion, DropReason, QueueEntry, QueueView
from qflow_client.broker.core.limits import QueueLimits
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.ports import FlowObserver
from qflow_client.broker.core.settings import FlowScope
from qflow_client.flow import FlowController, FlowSource, ThresholdLimiter, Thresholds

__all__ = ["CountedSource", "FlowOptions", "QueueFlow", "QueueFlows", "Spacing"]

_log = get_logger(__name__)


class CountedSource(FlowSource):
    """A `FlowSource`, such as a channel, that counts its published messages."""

    __slots__ = ("published",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.published = 0


class Spacing:
    """Lets blocked channels of a queue continue one after the other, so that they do not publish all at once (F4).

    Args:
        interval: seconds between two channels that continue.
        clock: returns monotonic seconds.
        wake_at: called with the time at which `let_next` has to be called again.
    """

    __slots__ = ("_clock", "_interval", "_next_at", "_wake_at")

    def __init__(self, interval: float, clock: Callable[[], float], wake_at: Callable[[float], None]) -> None:
        self._interval = interval
        self._clock = clock
        self._wake_at = wake_at
        self._next_at = -math.inf

    def let_next(self) -> bool:
        """Return True if the next channel may be unblocked now, and start the interval. Otherwise call `wake_at`."""
        now = self._clock()
        if now < self._next_at:
            self._wake_at(self._next_at)
            return False
        self._next_at = now + self._interval
        return True


class QueueFlow(FlowController):
    """The flow state for one set of thresholds, with the channels that it blocks and the confirms that it holds.

    Args:
        thresholds: the depths at which the flow state changes.
        count: number of messages in the queue.
        size: body bytes in the queue.
        spacing: spaces out the unblocking; ``None`` unblocks all channels together.
        run: does work in slices, see `Slices.run`.
    """

    limiter: ThresholdLimiter

    __slots__ = ("_released", "_run", "_spacing", "held")

    def __init__(
        self,
        thresholds: Thresholds,
        name: str,
        count: int = 0,
        size: int = 0,
        spacing: Spacing | None = None,
        *,
        run: Callable[[Iterator[None]], None],
    ) -> None:
        self._spacing = spacing
        self._run = run
        super().__init__(ThresholdLimiter(thresholds, count=count, size=size), name=name)
        # The confirms that are held until the state turns OFF or the entry leaves (C5). The oldest comes first.
        self.held: dict[QueueEntry, Completion] = {}
        # The confirms that are no longer held, and that `_release_in_steps` still has to release. Oldest first.
        self._released: deque[Completion] = deque()

    def resume(self, now: float | None = None) -> None:
        """Unblock the channels that can continue: all together, or one by one in the order of blocking (F4)."""
        blocked = self._blocked
        if not blocked:
            return
        if self._spacing is None:
            if len(blocked) > 1 and self._may_go_on(now):
                # The first unblocked channel can use all the room, so begin with the channel that published least.
                self._blocked = dict.fromkeys(sorted(blocked, key=_published))
            super().resume(now)
            return
        while blocked and self._may_go_on(now) and self._spacing.let_next():
            self.forget(next(iter(blocked)))

    def release_held(self) -> None:
        """Release all held confirms, in slices if there are very many."""
        is_running = bool(self._released)
        self._released.extend(self.held.values())
        self.held = {}
        if self._released and not is_running:
            self._run(self._release_in_steps())

    def _release_in_steps(self) -> Iterator[None]:
        try:
            while self._released:
                self._released.popleft().release()
                yield
        except Exception:
            if self._released:
                # If the release of one confirm fails, the later confirms must still be released.
                self._run(self._release_in_steps())
            raise

    def let_go(self) -> None:
        """Unblock all channels and release all held confirms, even if the state is ON."""
        for source in self.blocked:
            self.forget(source)
        self.release_held()


class FlowOptions(NamedTuple):
    """Which channels a queue blocks, and how these channels are unblocked.

    Attributes:
        scope: which channels are blocked (D12).
        recent: seconds for which a channel counts as a publisher of the queue after each of its messages (D12).
        resume_interval: seconds between two channels that are unblocked (F4); 0 unblocks all together.
    """

    scope: FlowScope = FlowScope.OFFENDER
    recent: float = 10.0
    resume_interval: float = 0.0


class QueueFlows(EntryObserver):
    """All flow states of one queue, and the time at which the queue turned ON (D10).

    Args:
        queue: the queue that the flow states belong to.
        clock: returns monotonic seconds.
        wake_at: called with the time at which `tick` has to be called.
        observer: gets the arrivals, departures and changes to ON or OFF; ``None`` if there is none.
        on_overdue: called when `is_overdue` has changed, except by `set_limits`.
        run: does work in slices, see `Slices.run`.
    """

    __slots__ = (
        "_clock",
        "_delays_completion",
        "_flows_channels",
        "_on_overdue",
        "_publishers",
        "_queue",
        "_recent",
        "_run",
        "_spacing",
        "_times_on_before",
        "_wake_at",
        "families",
        "is_overdue",
        "limits",
        "observer",
        "on_since",
        "times_overdue",
    )

    def __init__(
        self,
        queue: QueueView,
        limits: QueueLimits,
        options: FlowOptions,
        clock: Callable[[], float],
        wake_at: Callable[[float], None],
        *,
        observer: FlowObserver | None,
        on_overdue: Callable[[], None],
        run: Callable[[Iterator[None]], None],
    ) -> None:
        self._queue = queue
        self.limits = limits
        self._recent = options.recent
        self._spacing = spacing = Spacing(options.resume_interval, clock, wake_at) if options.resume_interval else None
        self._clock = clock
        self._wake_at = wake_at
        self.observer = observer
        self._on_overdue = on_overdue
        self._run = run
        # One flow state for each configured set of thresholds.
        self.families = tuple(
            QueueFlow(thresholds, queue.name, spacing=spacing, run=run) for thresholds in limits.thresholds
        )
        # Sum of `times_on` of the flow states that were removed.
        self._times_on_before = 0
        # Time at which the queue turned ON; usually None if it is OFF. An overdue queue can keep the time, see `left`.
        self.on_since: float | None = None
        # Whether the queue has been ON for longer than `max_flow_wait`. If so, it does not hold back producers (D10).
        self.is_overdue = False
        self.times_overdue = 0
        # Time of the last message of each publishing channel; None if the scope is not PUBLISHERS (D12).
        self._publishers: dict[FlowSource, float] | None = {} if options.scope is FlowScope.PUBLISHERS else None
        # Whether the queue blocks publishing channels while it is ON, and whether it then holds confirms.
        self._flows_channels = self._delays_completion = False
        self._read_enforcement()

    # Limits.

    def set_limits(self, limits: QueueLimits) -> None:
        """Set new limits. The caller then trims the queue and calls `change_marks`, see `Queue.change`."""
        self.limits = limits
        if limits.max_flow_wait is None:
            self.is_overdue = False
        self._read_enforcement()

    def _read_enforcement(self) -> None:
        enforcement = self.limits.enforcement
        self._flows_channels = enforcement.flows_channels and not self.is_overdue
        self._delays_completion = enforcement.delays_completion and not self.is_overdue

    def change_marks(self) -> None:
        """Update the flow states after a change of the limits (D4)."""
        there = {type(family.limiter.thresholds): family for family in self.families}
        held_confirms = any(family.held for family in self.families)
        now = self._clock()
        families = []
        for thresholds in self.limits.thresholds:
            family = there.pop(type(thresholds), None)
            if family is None:
                queue = self._queue
                family = QueueFlow(thresholds, queue.name, queue.depth, queue.size, self._spacing, run=self._run)
                was_on = False
            else:
                was_on = family.limiter.on
                family.limiter.change(thresholds)
            families.append(family)
            if family.limiter.on and not was_on:
                self._turned_on(family, now)
        for family in there.values():
            family.let_go()
            self._times_on_before += family.limiter.times_on
        self.families = tuple(families)
        enforcement = self.limits.enforcement
        for family in families:
            if not family.limiter.on or not enforcement.delays_completion:
                family.release_held()
            if not enforcement.flows_channels:
                for source in family.blocked:
                    family.forget(source)
            family.resume()
        if held_confirms and self.observer is not None and not any(family.held for family in families):
            self.observer.lets_confirms_go(self._queue)
        if self.on_since is not None:
            if not self.is_on:
                self._turned_off()
            elif self.limits.max_flow_wait is not None:
                self._wake_at(self.on_since + self.limits.max_flow_wait)

    # Messages.

    def entered(self, entry: QueueEntry, source: FlowSource | None, completion: Completion | None) -> None:
        size, observer, families = entry.message.size, self.observer, self.families
        if observer is not None:
            observer.arrived(self._queue, source, size)
        if not families:
            return
        now = self._clock()
        publisher = source
        if not self._flows_channels:
            source = None
        if not self._delays_completion:
            completion = None
        for family in families:
            was_on = family.limiter.on
            if source is None:
                family.limiter.add(size, now)
            else:
                family.offer(source, size, now)
            if not family.limiter.on:
                continue
            if completion is not None:
                family.held[entry] = completion
                completion.holds += 1
                if observer is not None:
                    observer.keeps_confirms(self._queue, publisher)
            if not was_on:
                self._turned_on(family, now)
        if self._publishers is not None and source is not None:
            self._publishers.pop(source, None)
            self._publishers[source] = now

    def left(self, entry: QueueEntry, reason: DropReason | None) -> None:
        size = entry.message.size
        if self.observer is not None:
            self.observer.left(self._queue, size)
        held_confirms = False
        for family in self.families:
            if family.held:
                held_confirms = True
                if (completion := family.held.pop(entry, None)) is not None:
                    completion.release()
            family.release(size)
            if family.held and not family.limiter.on:
                family.release_held()
        if held_confirms and self.observer is not None and not any(family.held for family in self.families):
            self.observer.lets_confirms_go(self._queue)
        if self.on_since is not None and not self.is_on and not (self.is_overdue and reason is DropReason.MAXLEN):
            # A message that is dropped at the maximum does not end the overdue state (D10).
            self._turned_off()

    # ON and OFF.

    def _turned_on(self, family: QueueFlow, now: float) -> None:
        if self.on_since is None:
            self.on_since = now
            if self.observer is not None:
                self.observer.turned_on(self._queue)
            if self.limits.max_flow_wait is not None:
                self._wake_at(now + self.limits.max_flow_wait)
        if self._publishers is None or not self._flows_channels:
            return
        for source, when in tuple(self._publishers.items()):
            if now - when > self._recent:
                del self._publishers[source]
            else:
                family.block(source)

    def _turned_off(self) -> None:
        self.on_since = None
        if self.observer is not None:
            self.observer.turned_off(self._queue)
        if self.is_overdue:
            self._set_overdue(False)
            _log.info("queue '%s' is OFF: its policy is %s again", self._queue.name, self.limits.policy)

    def _turn_overdue(self) -> None:
        """Stop holding back producers, because the queue has been ON for longer than `max_flow_wait` (D10)."""
        assert self.limits.overdue_overflow is not None
        self.times_overdue += 1
        self._set_overdue(True)
        _log.warning(
            "queue '%s' has been ON for %s s: it releases its producers, and its policy is %s until it is OFF",
            self._queue.name,
            self.limits.max_flow_wait,
            self.limits.overdue_overflow.name,
        )
        self.let_go()
        if self.observer is not None:
            self.observer.lets_confirms_go(self._queue)

    def _set_overdue(self, overdue: bool) -> None:
        self.is_overdue = overdue
        self._read_enforcement()
        self._on_overdue()

    def tick(self, now: float) -> None:
        """Stop holding back producers if `max_flow_wait` is over (D10). Unblock the next channel if it is due (F4)."""
        wait = self.limits.max_flow_wait
        if wait is not None and self.on_since is not None and not self.is_overdue:
            if now >= self.on_since + wait:
                self._turn_overdue()
            else:
                self._wake_at(self.on_since + wait)
        if self._spacing is not None:
            for family in self.families:
                family.resume()

    def let_go(self) -> None:
        for family in self.families:
            family.let_go()

    def end(self) -> None:
        """Drop all references. Call this after `let_go`, when all entries have left the deleted queue."""
        self.families = ()
        self.observer = self._spacing = None
        del self._queue, self._wake_at, self._on_overdue, self._run

    def forget(self, source: FlowSource) -> None:
        """Forget a publishing channel that has ended."""
        if self._publishers is not None:
            self._publishers.pop(source, None)

    @property
    def is_on(self) -> bool:
        """Whether any flow state of the queue is ON (C7)."""
        return any(family.limiter.on for family in self.families)

    @property
    def times_on(self) -> int:
        """How often a flow state of the queue turned from OFF to ON, in total (C7)."""
        return self._times_on_before + sum(family.limiter.times_on for family in self.families)

    @property
    def blocked(self) -> tuple[FlowSource, ...]:
        """The channels that the queue blocks, in the order of blocking for each flow state."""
        return tuple(dict.fromkeys(source for family in self.families for source in family.blocked))

    @property
    def held_confirms(self) -> int:
        """The number of messages whose confirms the queue holds (C5)."""
        return len({entry for family in self.families for entry in family.held})


def _published(source: FlowSource) -> int:
    return source.published if isinstance(source, CountedSource) else 0
