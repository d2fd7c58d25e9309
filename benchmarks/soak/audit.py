"""The conditions at the end of a soak test. This module compares journals with the queue, without I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from benchmarks.soak.messages import Copy
from qflow_client import Outcome
from qflow_client.cli.demo.audit import AuditLine

__all__ = [
    "ACCEPTED",
    "MOST_OVERRUN",
    "OUTCOMES",
    "REFUSED",
    "Journal",
    "Overruns",
    "Soak",
    "audit",
    "audit_messages",
    "describe",
    "expect_enough",
    "expect_none",
    "percentile",
    "to_json",
]

#: Values in `Journal.calls` for the result of a call of `send`; 0 means no call.
REFUSED, ACCEPTED = 1, 2
#: The value of an outcome in `Journal.outcomes` is its index in this tuple plus 1; 0 means no outcome.
OUTCOMES = tuple(Outcome)

#: Maximum seconds that a call may return after its deadline, in addition to the seconds in which its process could not
#: run.
MOST_OVERRUN = 1.0

# Maximum number of wrong messages that a line of the audit names.
_NAMED = 5


@dataclass(slots=True)
class Overruns:
    """Calls that returned after their deadline.

    Attributes:
        deadlines: number of calls with a deadline.
        late: deadline and return time of each late call, in seconds of the monotonic clock.
    """

    deadlines: int = 0
    late: list[tuple[float, float]] = field(default_factory=list)

    def note(self, due: float, back: float) -> None:
        """Record the return of a call with a deadline."""
        self.deadlines += 1
        if back > due:
            self.late.append((due, back))


@dataclass(slots=True)
class Journal:
    """The records of one sender. Message numbers are the indices of the byte arrays.

    Attributes:
        calls: for each message number, the result of `send`.
        told_again: numbers of messages with more than one outcome.
        overtaken: numbers of messages that the broker has nacked while a later message of the sender was in flight on
            the same channel. Nacked messages are sent again, so the later message may come first.
        overruns: late calls of the sender.
    """

    sender: int
    calls: bytearray = field(default_factory=lambda: bytearray(1))
    outcomes: bytearray = field(default_factory=lambda: bytearray(1))
    told_again: list[int] = field(default_factory=list)
    overtaken: set[int] = field(default_factory=set)
    overruns: Overruns = field(default_factory=Overruns)

    def begin(self, count: int = 1) -> int:
        """Reserve numbers for `count` messages, and return the first number."""
        self.calls.extend(bytes(count))
        self.outcomes.extend(bytes(count))
        return len(self.calls) - count

    def called(self, number: int, how: int) -> None:
        """Record the return of `send`."""
        self.calls[number] = how

    def told(self, number: int, outcome: Outcome) -> None:
        if self.outcomes[number]:
            self.told_again.append(number)
        self.outcomes[number] = OUTCOMES.index(outcome) + 1

    def outcome(self, number: int) -> Outcome | None:
        return OUTCOMES[self.outcomes[number] - 1] if self.outcomes[number] else None


@dataclass(slots=True)
class Soak:
    """The results of one run.

    Attributes:
        queue: messages in the durable queue, in order.
        overruns: for each process, its late calls, and a function. The function returns for how many seconds between
            two times the process could not run.
        troubles: forbidden events, such as an undocumented exception.
        connection_faults: number of connections with a fault.
        least_connection_faults: required number of connections with a fault. With fewer faults, the test proves
            nothing.
        broker_kills: number of kills of the broker.
        least_broker_kills: required number of kills of the broker.
    """

    journals: Sequence[Journal]
    queue: Sequence[Copy]
    overruns: Sequence[tuple[Overruns, Callable[[float, float], float]]] = ()
    troubles: Sequence[str] = ()
    connection_faults: int = 0
    least_connection_faults: int = 0
    broker_kills: int = 0
    least_broker_kills: int = 0

    def late(self) -> list[tuple[float, float]]:
        """Return the seconds by which calls were late: in total, and without the time when processes could not run."""
        return [
            (back - due, max(0.0, back - due - lag(due, back)))
            for overruns, lag in self.overruns
            for due, back in overruns.late
        ]


def percentile(values: Iterable[float], part: float) -> float:
    """Return the value that `part` of the values do not exceed; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def audit(soak: Soak) -> list[AuditLine]:
    late = soak.late()
    by_library = [own for _, own in late]
    too_late = [f"{own:.2f} s" for own in by_library if own > MOST_OVERRUN]
    return [
        *audit_messages(soak),
        expect_none(
            f"back more than {MOST_OVERRUN:g} s after the deadline",
            f"{len(late):,} of {sum(overruns.deadlines for overruns, _ in soak.overruns):,} deadlines overrun, "
            f"p99.9 {percentile(by_library, 0.999):.3f} s",
            too_late,
        ),
        expect_none("what must not happen", "exceptions, processes", soak.troubles),
        expect_enough("connection faults", soak.connection_faults, soak.least_connection_faults),
        expect_enough("broker kills", soak.broker_kills, soak.least_broker_kills),
    ]


def describe(line: AuditLine) -> str:
    return f"{'ok   ' if line.passed else 'WRONG'}  {line.statement} ({line.measured})  {line.difference}".rstrip()


def audit_messages(soak: Soak) -> list[AuditLine]:
    """Check the messages of a run against the conditions."""
    journals = {journal.sender: journal for journal in soak.journals}
    # For each sender and message number, 1 if the queue has a copy of the message, and otherwise 0.
    copies = {sender: bytearray(len(journal.calls)) for sender, journal in journals.items()}
    highest = dict.fromkeys(journals, 0)
    unmarked: set[tuple[int, int]] = set()
    broken, unmarked_again, out_of_order, never_sent = [], [], [], []
    second = overtaken = 0
    for place, copy in enumerate(soak.queue):
        sender, number = copy.sender, copy.number
        if not copy.intact:
            broken.append(f"at place {place}")
            continue
        who = f"{number} of sender {sender}"
        if sender not in journals or number >= len(copies[sender]) or journals[sender].calls[number] != ACCEPTED:
            never_sent.append(who)
            continue
        if not copy.marked:
            if (sender, number) in unmarked:
                unmarked_again.append(who)
            unmarked.add((sender, number))
        if copies[sender][number]:
            second += 1
        elif number >= highest[sender]:
            highest[sender] = number
        elif number in journals[sender].overtaken:
            overtaken += 1
        else:
            out_of_order.append(f"{who} after {highest[sender]}")
        copies[sender][number] = 1
    accepted = confirmed = 0
    missing, without_outcome = [], []
    for sender, journal in journals.items():
        accepted += journal.calls.count(ACCEPTED)
        for number, call in enumerate(journal.calls):
            if call != ACCEPTED:
                continue
            outcome = journal.outcome(number)
            if outcome is None:
                without_outcome.append(f"{number} of sender {sender}")
            elif outcome is Outcome.CONFIRMED:
                confirmed += 1
                if not copies[sender][number]:
                    missing.append(f"{number} of sender {sender}")
    told_again = [f"{number} of sender {journal.sender}" for journal in soak.journals for number in journal.told_again]
    return [
        expect_none("confirmed and missing", f"{confirmed:,} confirmed", missing),
        expect_none("accepted without an outcome", f"{accepted:,} accepted", without_outcome),
        expect_none("told of more than once", f"{accepted:,} accepted", told_again),
        expect_none("second copies without a mark", f"{second:,} second copies", unmarked_again),
        expect_none(
            "first copies out of the order of their sender",
            f"{len(journals):,} senders, and {overtaken:,} nacked while a later one was in flight",
            out_of_order,
        ),
        expect_none("never accepted, and in the queue", f"{len(soak.queue):,} in the queue", never_sent),
        expect_none("not as it was sent", f"{len(soak.queue):,} in the queue", broken),
        expect_enough("messages confirmed", confirmed, 1),
    ]


def expect_none(statement: str, measured: str, wrong: Sequence[object]) -> AuditLine:
    """Return the condition that `wrong` is empty."""
    named = ", ".join(chain(map(str, wrong[:_NAMED]), ["…"] if len(wrong) > _NAMED else []))
    return AuditLine(f"{statement}: 0", measured, f"{len(wrong):,}: {named}" if wrong else "")


def expect_enough(statement: str, found: int, least: int) -> AuditLine:
    """Return the condition that `found` is at least `least`."""
    return AuditLine(
        f"{statement}: {least:,} or more", f"{found:,}", f"{least - found:,} too few" if found < least else ""
    )


def to_json(soak: Soak, lines: Sequence[AuditLine]) -> dict[str, Any]:
    late = soak.late()
    counts = {
        outcome.value: sum(journal.outcomes.count(at) for journal in soak.journals)
        for at, outcome in enumerate(OUTCOMES, 1)
    }
    in_queue = {(copy.sender, copy.number) for copy in soak.queue}
    return {
        "passed": all(line.passed for line in lines),
        "messages": {
            "accepted": sum(journal.calls.count(ACCEPTED) for journal in soak.journals),
            "refused": sum(journal.calls.count(REFUSED) for journal in soak.journals),
            "outcomes": {outcome: count for outcome, count in counts.items() if count},
            "in_queue": len(soak.queue),
            "second_copies": len(soak.queue) - len(in_queue),
            "marked": sum(copy.marked for copy in soak.queue),
        },
        "deadlines": {
            "calls": sum(overruns.deadlines for overruns, _ in soak.overruns),
            "overrun": len(late),
            "seconds": _summary([whole for whole, _ in late]),
            "seconds_less_lag": _summary([own for _, own in late]),
        },
        "connection_faults": soak.connection_faults,
        "broker_kills": soak.broker_kills,
        "troubles": list(soak.troubles),
        "audit": [asdict(line) | {"passed": line.passed} for line in lines],
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(percentile(values, 0.5), 4),
        "p99": round(percentile(values, 0.99), 4),
        "p99.9": round(percentile(values, 0.999), 4),
        "max": round(max(values, default=0.0), 4),
    }
