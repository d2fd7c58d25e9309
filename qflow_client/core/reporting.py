"""Collects the news of a producer: settled receipts, flow events, log entries, and waiters to wake.

The other modules of the core add their news to `Reports`. After each step (see `step`), the *skin* takes the news. The
skin is a producer's engine or a drop-in. The application's callbacks run later, without the producer's lock.
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

# The level, the format string, its arguments, and the code object and line number of the code that logs the entry.
LogEntry = tuple[int, str, tuple[object, ...], CodeType, int]

# Holds that are not in this mapping may change with every burst of messages, so their level is DEBUG.
_LOG_LEVELS: dict[str, int] = {
    HoldKind.CHANNEL_FLOW: logging.INFO,
    HoldKind.PAUSED: logging.INFO,
    HoldKind.CONNECTION_BLOCKED: logging.WARNING,
    HoldKind.DISCONNECTED: logging.WARNING,
    HoldKind.REFUSED: logging.WARNING,
}

# With fewer failures than this, `Reports._sweep` costs more than it saves.
_SWEEP_FROM = 64


class MessageObserver(Protocol):
    """Measures or traces the messages of a producer."""

    #: The time in seconds at which each message began to wait for admission, by message number. A message that did not
    #: wait has the time of its admission.
    began: dict[int, float]
    #: The broker's address and port on the present or most recent connection; ``None`` before the first connection.
    peer: tuple[str, int] | None

    def settled(self, receipts: Sequence[Receipt], now: float) -> None:
        """Called with receipts that are settled together, not always in the order of admission."""

    def spilled(self, payload: bytes | Message, receipt: Receipt) -> None:
        """Called with a message that was put into the outbox, to be sent later.

        Args:
            payload: the object that was passed to `send`. If it has a span, the span must end now, because the outbox
                later sends another object, which it reads from disk.
        """

    def failed_on_disk(self, receipt: Receipt) -> None:
        """Called with a settled receipt whose message was never admitted, for example because it was too old."""

    def record(self, *, now: float) -> None:
        """Record what was measured. The skin calls this method without a lock, after steps that may settle receipts."""


class Reports:
    """The news of one producer.

    Args:
        wall_offset: the number to add to the caller's times to get seconds since 1970.
        counts: returns how many messages were admitted, how many are unsettled, and the capacity.
        max_failed_bytes: the maximum size of the failed receipts that are kept, in bytes.
        max_events: if twice this number of flow events wait for the skin, only the newest `max_events` are kept.
    """

    __slots__ = (
        "_counts",
        "_failed_bytes",
        "_gate",
        "_is_starting",
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
        # Waiters to wake. The skin takes this list, `settled`, `events`, `lost_events` and `logs`.
        self.wake: list[Any] = []
        #: Settled receipts for `on_delivery`; ``None`` without an `on_delivery`.
        self.settled: list[Receipt] | None = None
        #: Flow events; ``None`` without listeners.
        self.events: list[FlowEvent] | None = None
        #: How many flow events were dropped since the skin took `events`, by the kind of their hold.
        self.lost_events: dict[str | None, int] = {}
        # The holds that were reported as raised, and not yet as lifted.
        self._reported: set[Hold] = set()
        # Whether the application waits for the first connection. During this wait ``disconnected`` has no events.
        self._is_starting = True
        #: Log entries, for `qflow_client.logs`.
        self.logs: list[LogEntry] = []
        #: Failed receipts that are not reported to the application yet, in the order of their failures.
        self.failures: deque[Receipt] = deque()
        #: How many unseen failed receipts were dropped since the last call of `take_dropped`.
        self.dropped = 0
        #: True when nothing is admitted any more. Then only the unsettled messages can fail, so all failures are kept.
        self.is_ending = False
        self._failed_bytes = 0
        self._max_failed_bytes = max_failed_bytes
        self._max_events = max_events
        # How many failures can be added before the next call of `_sweep`.
        self._sweep_in = _SWEEP_FROM

    @property
    def is_empty(self) -> bool:
        """Whether the skin has nothing to pass on. Failures do not count, because `flush` and `close` report them."""
        return not self.wake and not self.events and not self.settled and not self.logs

    # Receipts.

    def settle_unadmitted(self, receipt: Receipt, outcome: Outcome) -> None:
        """Settle the receipt of a message that is not in the window."""
        receipt._outcome = outcome
        if receipt._waiter is not None:
            self.wake.append(receipt._waiter)
        self.add_settled((receipt,))

    def add_settled(self, receipts: Sequence[Receipt]) -> None:
        """Add settled receipts to `settled`. If `settled` is ``None``, add the failed receipts to `failures`."""
        if self.settled is not None:
            self.settled += receipts
        else:
            self.add_failures(receipt for receipt in receipts if receipt._failed)

    def add_failures(self, receipts: Iterable[Receipt]) -> None:
        """Keep failed receipts for the next `flush` or `close`.

        If there is not enough room, older failures are dropped, unless `is_ending`. The receipts of this call are kept.
        """
        failures = list(receipts)
        count = len(failures)
        size = sum([receipt.held_bytes for receipt in failures])
        if count > self._sweep_in:
            self._sweep()
        if not self.is_ending:
            self._make_room(size)
        # No function is called from here on, so an interrupt comes before or after all of the changes.
        self._sweep_in -= count
        self._failed_bytes += size
        self.failures += failures

    def _sweep(self) -> None:
        """Forget the receipts that the application has seen. Otherwise a producer that never flushes would keep them.

        The next sweep comes when the number of failures has doubled, so the average cost of a failure stays constant.
        """
        kept = deque(self._unseen())
        size = sum([receipt.held_bytes for receipt in kept])
        sweep_in = max(_SWEEP_FROM, len(kept))
        self.failures, self._failed_bytes, self._sweep_in = kept, size, sweep_in

    def _make_room(self, size: int) -> None:
        while self.failures and self._failed_bytes + size > self._max_failed_bytes:
            oldest = self.failures[0]
            freed = oldest.held_bytes
            # A message in the outbox is not lost, because the next producer sends it.
            is_lost = not oldest._seen and oldest._outcome is not Outcome.STORED
            if is_lost and not self.dropped:
                self.log(
                    logging.WARNING,
                    "%s: failed messages take more than max_failed_bytes=%d; the oldest are dropped: check receipts, "
                    "or call flush()",
                    self.name,
                    self._max_failed_bytes,
                )
            # Nothing is called from here to the end of this iteration, so an interrupt finds correct counts.
            del self.failures[0]
            self._failed_bytes -= freed
            self.dropped += is_lost

    def take_failures(self) -> list[Receipt]:
        """Return and forget the failures that the application has not seen, in the order of admission."""
        failures = sorted(self._unseen(), key=lambda receipt: receipt._number)
        self.forget_failures()
        return failures

    def take_dropped(self) -> int:
        dropped, self.dropped = self.dropped, 0
        return dropped

    def forget_failures(self) -> None:
        nothing: deque[Receipt] = deque()
        self.failures, self._failed_bytes = nothing, 0

    def _unseen(self) -> list[Receipt]:
        return [receipt for receipt in self.failures if not receipt._seen]

    # Holds, events and the log.

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The present holds, the oldest first, with times in seconds since 1970 for the application."""
        return tuple(map(self._on_the_wall_clock, self._gate.holds))

    def wall_time(self, now: float) -> float:
        """Convert a time of the caller's clock into seconds since 1970."""
        return now + self._wall_offset

    def _on_the_wall_clock(self, hold: Hold) -> Hold:
        return replace(hold, since=hold.since + self._wall_offset)

    def report_hold(self, hold: Hold, raised: bool, now: float, *, connecting: bool, ending: bool) -> None:
        """Log a hold that was raised or lifted, and add its flow event.

        Args:
            raised: True if the hold was raised, False if it was lifted.
            connecting: whether the producer has never had a channel. If so, ``disconnected`` is logged at the level
                DEBUG.
            ending: whether the hold is lifted because the producer was closed.
        """
        level = _LOG_LEVELS.get(hold.kind, logging.DEBUG)
        if connecting and hold.kind == HoldKind.DISCONNECTED:
            level = logging.DEBUG
        # Do not count ``disconnected`` during the first wait for a connection, because this hold has no events then.
        count = len(self._gate.holds) - (self._is_starting and self._gate.is_held_by(HoldKind.DISCONNECTED))
        if raised:
            logs = _entries(level, "%s: blocked (flowed): %s", self.name, hold)
            kind = FlowEventKind.FLOWED if count == 1 else FlowEventKind.HOLD_RAISED
        elif ending:
            logs = _entries(
                level, "%s: closed after being blocked (flowed) for %.3g s: %s", self.name, now - hold.since, hold
            )
            kind = FlowEventKind.CLOSED
        else:
            logs = _entries(level, "%s: hold lifted after %.3g s: %s", self.name, now - hold.since, hold)
            kind = FlowEventKind.HOLD_LIFTED if count else FlowEventKind.UNFLOWED
        is_start = self._is_starting and hold.kind == HoldKind.DISCONNECTED
        events = [] if self.events is None or is_start else [self._make_event(kind, hold, hold.since, now)]
        reported = {each for each in self._reported if each is not hold} | ({hold} if raised else set())
        # No function is called from here on, so an interrupt comes before or after all of the changes.
        self.logs += logs
        if self.events is not None:
            self.events += events
        self._reported = reported
        self._is_starting = self._is_starting and (raised or not is_start)

    def start_in_background(self, now: float) -> None:
        """Add an event for ``disconnected``, because the application does not wait for the first connection."""
        self._is_starting = False
        if self.events is not None:
            hold = self._gate.holds[0]
            kind = FlowEventKind.FLOWED if len(self._gate.holds) == 1 else FlowEventKind.HOLD_RAISED
            self.events.append(self._make_event(kind, hold, hold.since, now))

    def heal(self, now: float, *, connecting: bool, ending: bool) -> None:
        """Report the hold changes that an unfinished step did not report. For the arguments see `report_hold`."""
        present = frozenset(self._gate.holds)
        for hold in self._reported - present:
            self.report_hold(hold, False, now, connecting=connecting, ending=ending)
        for hold in present - self._reported:
            self.report_hold(hold, True, now, connecting=connecting, ending=ending)

    def go_on_from(self, other: Reports, now: float) -> None:
        """Continue after `other`, the reports of the previous protocol. Report only the holds that differ."""
        self.events = None if other.events is None else []
        self._reported, self._is_starting = other._reported, other._is_starting
        self.heal(now, connecting=False, ending=False)

    def report_waiting(self, count: int, since: float, now: float) -> None:
        """Log that calls of `send` wait, and add the flow event.

        Args:
            count: how many calls of `send` wait.
            since: when the longest wait began, in seconds.
        """
        holds = self._gate.holds
        who = "a send has been waiting" if count == 1 else f"{count} sends have been waiting, the longest"
        why = ", ".join(map(str, holds)) or "other sends wait first"
        self.log(logging.WARNING, f"%s: {who} for %.1f s: %s", self.name, now - since, why)
        if self.events is not None:
            self.events.append(self._make_event(FlowEventKind.WAITING, holds[0] if holds else None, since, now, count))

    def _make_event(
        self, kind: FlowEventKind, hold: Hold | None, since: float, now: float, waiting: int = 0
    ) -> FlowEvent:
        """Return a new event, and make room for it in `events`."""
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
            # The skin has not taken the events, for example because the event loop does not run. Half of the events are
            # dropped at once, so the average cost of an event stays constant.
            for old in self.events[: self._max_events]:
                hold_kind = None if old.hold is None else old.hold.kind
                self.lost_events[hold_kind] = self.lost_events.get(hold_kind, 0) + 1
            del self.events[: self._max_events]
        return event

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Add a log entry, unless its level is disabled."""
        self.logs += _entries(level, text, *arguments, depth=3)


def log_entry(level: int, text: str, *arguments: object, depth: int = 1) -> LogEntry:
    """Return an entry for the log.

    Args:
        arguments: values for the format string `text`. The values must not change later.
        depth: the frame whose line is recorded: 1 for the caller of this function, 2 for the caller of the caller.
    """
    frame = sys._getframe(depth)
    return level, text, arguments, frame.f_code, frame.f_lineno


def is_logged(level: int) -> bool:
    """Return whether the logger is enabled for a level.

    The function does not call `logging.Logger.isEnabledFor`, which takes the lock of `logging`. The thread with this
    lock may be running a signal handler or a finalizer that waits for the present step.
    """
    return not logger.disabled and level > logger.manager.disable and level >= logger.getEffectiveLevel()


def _entries(level: int, text: str, *arguments: object, depth: int = 2) -> list[LogEntry]:
    return [log_entry(level, text, *arguments, depth=depth)] if is_logged(level) else []
