"""Checks the conditions that a run of the demonstration must meet. This module does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qflow_client import HoldKind
from qflow_client.broker import Enforcement

__all__ = ["AuditLine", "ConsumerTally", "ProducerTally", "QueueTally", "Run", "audit", "to_json"]

#: The kinds of holds with which the broker of the demonstration slows a producer down.
BY_THE_BROKER = (HoldKind.CHANNEL_FLOW, HoldKind.CAPACITY)

# The kind of hold that each producer must have had. With `BOTH`, `Channel.Flow` may come before the window is full.
_HELD_BY = {
    Enforcement.CHANNEL_FLOW: HoldKind.CHANNEL_FLOW,
    Enforcement.COMPLETION: HoldKind.CAPACITY,
    Enforcement.BOTH: HoldKind.CHANNEL_FLOW,
}


@dataclass(frozen=True, slots=True)
class ProducerTally:
    """The numbers that one producer reports.

    Attributes:
        sent: number of messages that the producer accepted.
        checksum: sum of the CRC-32 of each sent body. The order of the bodies does not change this sum.
        holds: kinds of the holds that blocked the producer at the time of the report.
        seconds_flowed: seconds for which each kind of hold held the producer.
    """

    name: str
    capacity: int
    sent: int = 0
    confirmed: int = 0
    checksum: int = 0
    holds: tuple[str, ...] = ()
    times_flowed: int = 0
    seconds_flowed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerTally:
    """The numbers that the consumer reports.

    Attributes:
        consumed: number of consumed messages, including second copies (`repeated`).
        missing: number of messages that never arrived; 0 before the last report.
        unknown: number of messages whose id no producer has used.
        checksum: sum of the CRC-32 of each consumed body.
    """

    consumed: int = 0
    repeated: int = 0
    missing: int = 0
    unknown: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class QueueTally:
    """The state of the queue in the broker. The thresholds and depths are in messages."""

    enforcement: Enforcement
    stop: int
    resume: int
    depth: int
    peak_depth: int
    flow_stopped: bool
    flow_stopped_count: int


@dataclass(frozen=True, slots=True)
class Run:
    """The state of one run of the demonstration. `messages` is the total number to send."""

    messages: int
    producers: Sequence[ProducerTally]
    consumer: ConsumerTally
    queue: QueueTally

    @property
    def highest_allowed(self) -> int:
        """The maximum allowed depth: the stop threshold plus the sum of the capacities (C6)."""
        return self.queue.stop + sum(producer.capacity for producer in self.producers)


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One condition that a run must meet, and the measured value. `difference` is empty if the run meets it."""

    statement: str
    measured: str
    difference: str = ""

    @property
    def passed(self) -> bool:
        return not self.difference


def audit(run: Run) -> list[AuditLine]:
    """Return the conditions that a run must meet, each with its measured value."""
    sent = sum(producer.sent for producer in run.producers)
    confirmed = sum(producer.confirmed for producer in run.producers)
    checksum = sum(producer.checksum for producer in run.producers)
    consumer, queue = run.consumer, run.queue
    wrong = consumer.repeated + consumer.missing + consumer.unknown
    lines = [
        _equal("every message is sent", sent, run.messages),
        _equal("every sent message is confirmed", confirmed, sent),
        _equal("every confirmed message is consumed", consumer.consumed, confirmed),
        AuditLine(
            "every message arrived exactly once",
            f"{consumer.repeated:,} repeated, {consumer.missing:,} missing, {consumer.unknown:,} unknown",
            f"{wrong:,} wrong" if wrong else "",
        ),
        AuditLine(
            "the bodies are unchanged",
            f"checksum {consumer.checksum:x}",
            f"checksum {checksum:x} was sent" if consumer.checksum != checksum else "",
        ),
        AuditLine(
            f"the peak is above the stop threshold, {queue.stop:,}",
            f"{queue.peak_depth:,}",
            f"{queue.stop + 1 - queue.peak_depth:,} too few" if queue.peak_depth <= queue.stop else "",
        ),
        AuditLine(
            f"the peak is at most the worst case, {run.highest_allowed:,}",
            f"{queue.peak_depth:,}",
            f"{queue.peak_depth - run.highest_allowed:,} too many" if queue.peak_depth > run.highest_allowed else "",
        ),
        AuditLine(
            "the queue is empty and OFF at the end",
            f"depth {queue.depth:,}, {'ON' if queue.flow_stopped else 'OFF'}",
            f"{queue.depth:,} left" if queue.depth else "still ON" if queue.flow_stopped else "",
        ),
    ]
    kind = _HELD_BY[queue.enforcement]
    for producer in run.producers:
        seconds = producer.seconds_flowed.get(kind, 0.0)
        lines.append(
            AuditLine(
                f"{producer.name} was blocked (flowed) by {kind}",
                f"{seconds:.2f} s",
                "" if seconds > 0 else "it must be more than 0 s",
            )
        )
        lines.append(
            AuditLine(
                f"{producer.name} was released (unflowed) again",
                f"{producer.times_flowed:,} times; now held by {', '.join(producer.holds) or 'nothing'}",
                f"still held by {', '.join(producer.holds)}" if producer.holds else "",
            )
        )
    return lines


def _equal(statement: str, found: int, wanted: int) -> AuditLine:
    difference = found - wanted
    return AuditLine(
        statement,
        f"{found:,} of {wanted:,}",
        f"{abs(difference):,} too {'many' if difference > 0 else 'few'}" if difference else "",
    )


def to_json(run: Run, lines: Sequence[AuditLine], seconds: float) -> dict[str, Any]:
    """Return the audit as JSON types."""
    return {
        "passed": all(line.passed for line in lines),
        "messages": run.messages,
        "seconds": round(seconds, 3),
        "messages_per_second": round(run.consumer.consumed / seconds, 1) if seconds else None,
        "queue": asdict(run.queue) | {"highest_allowed": run.highest_allowed},
        "producers": [
            asdict(producer) | {"seconds_flowed": {kind: round(s, 3) for kind, s in producer.seconds_flowed.items()}}
            for producer in run.producers
        ],
        "consumer": asdict(run.consumer),
        "audit": [asdict(line) | {"passed": line.passed} for line in lines],
    }
