"""What has to be true at the end of a soak. No I/O: journals and the queue in, lines out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    "percentile",
    "to_json",
]

#: What became of a call of `send`, by number, in `Journal.calls`; 0 if there was none.
REFUSED, ACCEPTED = 1, 2
#: What became of a message, in `Journal.outcomes`: an index of these and 1; 0 if nobody was told.
OUTCOMES = tuple(Outcome)

#: Seconds that a call may come back after its deadline, besides those in which its process was kept from running.
MOST_OVERRUN = 1.0

# Of many that are wrong the first are named.
_NAMED = 5


@dataclass(slots=True)
class Overruns:
    """Calls that came back after their deadline.

    Attributes:
        deadlines: calls that had one.
        late: when each that came late was due, and when it came, in monotonic seconds.
    """

    deadlines: int = 0
    late: list[tuple[float, float]] = field(default_factory=list)

    def note(self, due: float, back: float) -> None:
        """A call with a deadline has come back."""
        self.deadlines += 1
        if back > due:
            self.late.append((due, back))


@dataclass(slots=True)
class Journal:
    """What one sender has noted, by number.

    Attributes:
        sender: its number.
        calls: how each `send` ended.
        outcomes: how each message ended.
        told_again: numbers of which it was told more than once.
        overruns: of its calls.
    """

    sender: int
    calls: bytearray = field(default_factory=lambda: bytearray(1))
    outcomes: bytearray = field(default_factory=lambda: bytearray(1))
    told_again: list[int] = field(default_factory=list)
    overruns: Overruns = field(default_factory=Overruns)

    def begin(self, count: int = 1) -> int:
        """The number of the next message, of so many."""
        self.calls.extend(bytes(count))
        self.outcomes.extend(bytes(count))
        return len(self.calls) - count

    def called(self, number: int, how: int) -> None:
        """`send` has come back."""
        self.calls[number] = how

    def told(self, number: int, outcome: Outcome) -> None:
        """The message is settled."""
        if self.outcomes[number]:
            self.told_again.append(number)
        self.outcomes[number] = OUTCOMES.index(outcome) + 1

    def outcome(self, number: int) -> Outcome | None:
        """How a message ended."""
        return OUTCOMES[self.outcomes[number] - 1] if self.outcomes[number] else None


@dataclass(slots=True)
class Soak:
    """All that is known of one run.

    Attributes:
        journals: of the senders.
        queue: what was in the durable queue, in its order.
        overruns: of each process, and how many seconds between two moments its threads were kept from running.
        troubles: what happened that must not, such as an exception that is not documented.
        connection_faults: how many connections were harmed on purpose.
        least_connection_faults: how many have to be, or nothing was shown.
        broker_kills: how often the broker was killed.
        least_broker_kills: how often it has to be.
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
        """By how many seconds calls came late, in full and less those in which their process was kept from running."""
        return [
            (back - due, max(0.0, back - due - lag(due, back)))
            for overruns, lag in self.overruns
            for due, back in overruns.late
        ]


def percentile(values: Iterable[float], part: float) -> float:
    """The value that `part` of them do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def audit(soak: Soak) -> list[AuditLine]:
    """Hold a run against what it has to show."""
    late = soak.late()
    by_library = [own for _, own in late]
    too_late = [f"{own:.2f} s" for own in by_library if own > MOST_OVERRUN]
    return [
        *audit_messages(soak),
        _none(
            f"back more than {MOST_OVERRUN:g} s after the deadline",
            f"{len(late):,} of {sum(overruns.deadlines for overruns, _ in soak.overruns):,} deadlines overrun, "
            f"p99.9 {percentile(by_library, 0.999):.3f} s",
            too_late,
        ),
        _none("what must not happen", "exceptions, processes", soak.troubles),
        _enough("connection faults", soak.connection_faults, soak.least_connection_faults),
        _enough("broker kills", soak.broker_kills, soak.least_broker_kills),
    ]


def describe(line: AuditLine) -> str:
    """Return a line of an audit as text."""
    return f"{'ok   ' if line.passed else 'WRONG'}  {line.statement} ({line.measured})  {line.difference}".rstrip()


def audit_messages(soak: Soak) -> list[AuditLine]:
    """Hold what became of the messages of a run against what it has to show."""
    journals = {journal.sender: journal for journal in soak.journals}
    # The best that came of each message: how often it is there, and how often without a mark.
    copies = {sender: bytearray(len(journal.calls)) for sender, journal in journals.items()}
    highest = dict.fromkeys(journals, 0)
    unmarked: set[tuple[int, int]] = set()
    broken, unmarked_again, out_of_order, never_sent = [], [], [], []
    second = 0
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
        elif number < highest[sender]:
            out_of_order.append(f"{who} after {highest[sender]}")
        else:
            highest[sender] = number
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
        _none("confirmed and missing", f"{confirmed:,} confirmed", missing),
        _none("accepted without an outcome", f"{accepted:,} accepted", without_outcome),
        _none("told of more than once", f"{accepted:,} accepted", told_again),
        _none("second copies without a mark", f"{second:,} second copies", unmarked_again),
        _none("first copies out of the order of their sender", f"{len(journals):,} senders", out_of_order),
        _none("never accepted, and in the queue", f"{len(soak.queue):,} in the queue", never_sent),
        _none("not as it was sent", f"{len(soak.queue):,} in the queue", broken),
        _enough("messages confirmed", confirmed, 1),
    ]


def _none(statement: str, measured: str, wrong: Sequence[str]) -> AuditLine:
    named = ", ".join(chain(wrong[:_NAMED], ["…"] if len(wrong) > _NAMED else []))
    return AuditLine(f"{statement}: 0", measured, f"{len(wrong):,}: {named}" if wrong else "")


def _enough(statement: str, found: int, least: int) -> AuditLine:
    return AuditLine(
        f"{statement}: {least:,} or more", f"{found:,}", f"{least - found:,} too few" if found < least else ""
    )


def to_json(soak: Soak, lines: Sequence[AuditLine]) -> dict[str, Any]:
    """The audit for machines."""
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
        "audit": [
            {
                "statement": each.statement,
                "measured": each.measured,
                "passed": each.passed,
                "difference": each.difference,
            }
            for each in lines
        ],
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(percentile(values, 0.5), 4),
        "p99": round(percentile(values, 0.99), 4),
        "p99.9": round(percentile(values, 0.999), 4),
        "max": round(max(values, default=0.0), 4),
    }
