"""The news of a producer: settled receipts, flow events, log entries, and waiters to wake.

Nothing here decides anything. The state collects its news in `Reports`. The skin takes them after each step and passes
them on outside its lock.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, Protocol

from qflow_client.events import FlowEvent, FlowEventKind, HoldKind
from qflow_client.flow import Gate, Hold
from qflow_client.message import Message
from qflow_client.receipt import Outcome, Receipt

__all__ = ["LogEntry", "MessageObserver", "Reports", "is_logged", "log_entry"]

logger = logging.getLogger("qflow_client")

# A level, a text and its arguments; the code that logs it, and its line.
LogEntry = tuple[int, str, tuple[object, ...], CodeType, int]

# Holds that come and go with every burst are logged for debugging only.
_LOG_LEVELS: dict[str, int] = {
    HoldKind.CHANNEL_FLOW: logging.INFO,
    HoldKind.PAUSED: logging.INFO,
    HoldKind.CONNECTION_BLOCKED: logging.WARNING,
    HoldKind.DISCONNECTED: logging.WARNING,
    HoldKind.REFUSED: logging.WARNING,
}

# Fewer failures than this are not worth sweeping.
_SWEEP_FROM = 64


class MessageObserver(Protocol):
    """Is told of every message, to measure or trace it."""

    #: When the message of each number was admitted, or began to wait for that; in seconds.
    began: dict[int, float]
    #: The address and the port that the producer is connected to, or was last; ``None`` before.
    peer: tuple[str, int] | None

    def settled(self, receipts: Sequence[Receipt], now: float) -> None:
        """Called with receipts that are settled together; at least one. Second copies may come before older messages.

        Args:
            receipts: the receipts.
            now: seconds.
        """

    def spilled(self, payload: bytes | Message, receipt: Receipt) -> None:
        """Called with a message that was put into the outbox, to be sent later.

        Args:
            payload: what the application sent; later another is read from the outbox.
            receipt: its receipt, which is not settled.
        """

    def tell(self, *, now: float) -> None:
        """Called by the skin without a lock, after anything that may have settled receipts.

        Args:
            now: seconds.
        """


class Reports:
    """The news of one producer.

    Args:
        name: the producer's, for events and logs.
        gate: its holds.
        wall_offset: what to add to the caller's seconds for seconds since 1970.
        counts: returns how many messages were admitted, how many are unsettled, and the capacity.
        max_failed_bytes: the most bytes of failed receipts that are kept.
        max_events: the most flow events that wait until they can be passed on.
    """

    __slots__ = (
        "_counts",
        "_failed_bytes",
        "_gate",
        "_max_events",
        "_max_failed_bytes",
        "_reported",
        "_sweep_in",
        "_wall_offset",
        "dropped",
        "events",
        "failures",
        "is_ending",
        "logs",
        "lost_events",
        "name",
        "settled",
        "wake",
    )

    def __init__(
        self,
        name: str,
        gate: Gate,
        wall_offset: float,
        counts: Callable[[], tuple[int, int, int]],
        *,
        max_failed_bytes: int,
        max_events: int,
    ) -> None:
        self.name = name
        self._gate = gate
        self._wall_offset = wall_offset
        self._counts = counts
        # The skin takes these five lists. Waiters to wake:
        self.wake: list[Any] = []
        #: Settled receipts; ``None`` unless somebody wants all of them.
        self.settled: list[Receipt] | None = None
        #: Flow events; ``None`` unless somebody listens.
        self.events: list[FlowEvent] | None = None
        #: How many flow events were dropped since the skin took `events`, by the kind of their hold.
        self.lost_events: dict[str | None, int] = {}
        # The holds that are raised and reported.
        self._reported: set[Hold] = set()
        #: Log entries, for `qflow_client.logs`.
        self.logs: list[LogEntry] = []
        #: Failed receipts that the application has not been told of, the first that failed first.
        self.failures: deque[Receipt] = deque()
        #: How many failed receipts were dropped since `take_dropped`, and the application had not looked at them.
        self.dropped = 0
        #: Whether nothing more is admitted. Then all failures are kept: there are no more than unsettled messages.
        self.is_ending = False
        # The bytes of `failures`, and the most that there may be.
        self._failed_bytes = 0
        self._max_failed_bytes = max_failed_bytes
        self._max_events = max_events
        # After how many more failures the receipts that the application has looked at are taken out.
        self._sweep_in = _SWEEP_FROM

    @property
    def is_empty(self) -> bool:
        """Whether the skin has nothing to pass on; failures are for `flush` and `close`."""
        return not self.wake and not self.events and not self.settled and not self.logs

    # Receipts.

    def settle_unadmitted(self, receipt: Receipt, outcome: Outcome) -> None:
        """Settle a receipt that takes no room in the window."""
        receipt._outcome = outcome
        if receipt._waiter is not None:
            self.wake.append(receipt._waiter)
        self.add_settled((receipt,))

    def add_settled(self, receipts: Sequence[Receipt]) -> None:
        """Pass settled receipts on to `settled`, or the failed ones of them to `failures`."""
        if self.settled is not None:
            self.settled += receipts
        else:
            self.add_failures(receipt for receipt in receipts if receipt._failed)

    def add_failures(self, receipts: Iterable[Receipt]) -> None:
        """Keep failed receipts for the next `flush` or `close`.

        Older failures are dropped if there is no room for them. Receipts that fail together never displace each other.
        """
        failures = list(receipts)
        count = len(failures)
        size = sum([receipt.held_bytes for receipt in failures])
        if count > self._sweep_in:
            self._sweep()
        if not self.is_ending:
            self._make_room(size)
        # From here on nothing is called, so an interrupt leaves all or none of them.
        self._sweep_in -= count
        self._failed_bytes += size
        self.failures += failures

    def _sweep(self) -> None:
        """Forget the receipts that the application has looked at. A producer that never flushes would keep them.

        The next time is after as many more failures as are left, so the cost of a failure does not grow with them.
        """
        kept = deque(self._unseen())
        size = sum([receipt.held_bytes for receipt in kept])
        sweep_in = max(_SWEEP_FROM, len(kept))
        self.failures, self._failed_bytes, self._sweep_in = kept, size, sweep_in

    def _make_room(self, size: int) -> None:
        """Drop the oldest failures until there is room for so many bytes."""
        while self.failures and self._failed_bytes + size > self._max_failed_bytes:
            oldest = self.failures[0]
            freed = oldest.held_bytes
            # A message in the outbox is not lost: the next producer sends it.
            is_lost = not oldest._seen and oldest._outcome is not Outcome.STORED
            if is_lost and not self.dropped:
                self.log(
                    logging.WARNING,
                    "%s: failed messages take more than max_failed_bytes=%d; the oldest are dropped: look at receipts, "
                    "or call flush()",
                    self.name,
                    self._max_failed_bytes,
                )
            # From here to the end of the turn nothing is called, so an interrupt finds the counts right.
            del self.failures[0]
            self._failed_bytes -= freed
            self.dropped += is_lost

    def take_failures(self) -> list[Receipt]:
        """Return the failures that the application has not been told of, in the order of admission, and forget them."""
        failures = sorted(self._unseen(), key=lambda receipt: receipt._number)
        self.forget_failures()
        return failures

    def take_dropped(self) -> int:
        """Return how many failures were dropped, and count from 0 again."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def forget_failures(self) -> None:
        """Forget the failures, because the application is told of them in another way."""
        nothing: deque[Receipt] = deque()
        self.failures, self._failed_bytes = nothing, 0

    def _unseen(self) -> list[Receipt]:
        return [receipt for receipt in self.failures if not receipt._seen]

    # Holds, events and the log.

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The present holds as people see them: the oldest first, their times in seconds since 1970."""
        return tuple(map(self._on_the_wall_clock, self._gate.holds))

    def wall_time(self, now: float) -> float:
        """Seconds since 1970."""
        return now + self._wall_offset

    def _on_the_wall_clock(self, hold: Hold) -> Hold:
        return replace(hold, since=hold.since + self._wall_offset)

    def report_hold(self, hold: Hold, raised: bool, now: float, *, connecting: bool, ending: bool) -> None:
        """Log a hold that was raised or lifted, and add its flow event.

        Args:
            hold: the hold.
            raised: whether it was raised; else it was lifted.
            now: seconds.
            connecting: whether the producer has never had a channel. That it is not connected yet is no news.
            ending: whether the hold goes because the producer was closed.
        """
        level = _LOG_LEVELS.get(hold.kind, logging.DEBUG)
        if connecting and hold.kind == HoldKind.DISCONNECTED:
            level = logging.DEBUG
        if raised:
            logs = _entries(level, "%s: held: %s", self.name, hold)
            kind = FlowEventKind.FLOWED if len(self._gate.holds) == 1 else FlowEventKind.HOLD_RAISED
        elif ending:
            logs = _entries(level, "%s: closed while held for %.3g s: %s", self.name, now - hold.since, hold)
            kind = FlowEventKind.CLOSED
        else:
            logs = _entries(level, "%s: no longer held after %.3g s: %s", self.name, now - hold.since, hold)
            kind = FlowEventKind.HOLD_LIFTED if self._gate.holds else FlowEventKind.UNFLOWED
        events = [] if self.events is None else [self._make_event(kind, hold, hold.since, now)]
        reported = {each for each in self._reported if each is not hold} | ({hold} if raised else set())
        # From here on nothing is called, so an interrupt leaves all or none of them.
        self.logs += logs
        if self.events is not None:
            self.events += events
        self._reported = reported

    def heal(self, now: float, *, connecting: bool, ending: bool) -> None:
        """Report the holds that an unfinished step has raised or lifted and not reported; as `report_hold`."""
        present = frozenset(self._gate.holds)
        for hold in self._reported - present:
            self.report_hold(hold, False, now, connecting=connecting, ending=ending)
        for hold in present - self._reported:
            self.report_hold(hold, True, now, connecting=connecting, ending=ending)

    def go_on_from(self, other: Reports, now: float) -> None:
        """Report to the listeners of another producer from now on, first the holds that differ from those it reported.

        Args:
            other: the reports of that producer, which are left as they are.
            now: seconds.
        """
        self.events = None if other.events is None else []
        self._reported = other._reported
        self.heal(now, connecting=False, ending=False)

    def report_waiting(self, count: int, since: float, now: float) -> None:
        """Log that sends wait, and add the flow event.

        Args:
            count: how many wait.
            since: when the longest wait began, in seconds.
            now: seconds.
        """
        holds = self._gate.holds
        who = "a send has been waiting" if count == 1 else f"{count} sends have been waiting, the longest"
        why = ", ".join(map(str, holds)) or "others wait before it"
        self.log(logging.WARNING, f"%s: {who} for %.1f s: %s", self.name, now - since, why)
        if self.events is not None:
            self.events.append(self._make_event(FlowEventKind.WAITING, holds[0] if holds else None, since, now, count))

    def _make_event(
        self, kind: FlowEventKind, hold: Hold | None, since: float, now: float, waiting: int = 0
    ) -> FlowEvent:
        """Return an event, for which there is room in `events`."""
        assert self.events is not None
        offset = self._wall_offset
        told = None if hold is None else self._on_the_wall_clock(hold)
        admitted, unsettled, capacity = self._counts()
        event = FlowEvent(
            kind,
            self.name,
            told,
            self.holds,
            now + offset,
            since + offset,
            now - since,
            waiting,
            admitted,
            unsettled,
            capacity,
        )
        if len(self.events) >= 2 * self._max_events:
            # They could not be passed on for a while, such as before the event loop runs. Half of them are dropped at
            # once, so the cost of an event does not grow with their number.
            for old in self.events[: self._max_events]:
                hold_kind = None if old.hold is None else old.hold.kind
                self.lost_events[hold_kind] = self.lost_events.get(hold_kind, 0) + 1
            del self.events[: self._max_events]
        return event

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Add a log entry, unless its level is off."""
        self.logs += _entries(level, text, *arguments, depth=3)


def log_entry(level: int, text: str, *arguments: object, depth: int = 1) -> LogEntry:
    """Return an entry for the log.

    Args:
        level: of `logging`.
        text: with the places of the arguments.
        arguments: what must not change any more.
        depth: how many calls from here up the line is that logs it; 1 for that of the caller.
    """
    frame = sys._getframe(depth)
    return level, text, arguments, frame.f_code, frame.f_lineno


def is_logged(level: int) -> bool:
    """Return whether the log takes entries of a level.

    It asks as `logging.Logger.isEnabledFor` does, but takes no lock. That one takes the lock of `logging`. Another
    thread may hold it and run a signal handler or a finalizer that waits for this step.
    """
    return level > logger.manager.disable and level >= logger.getEffectiveLevel()


def _entries(level: int, text: str, *arguments: object, depth: int = 2) -> list[LogEntry]:
    return [log_entry(level, text, *arguments, depth=depth)] if is_logged(level) else []
