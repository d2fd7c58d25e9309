"""What has to be true at the end of the demonstration. No I/O: tallies in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qflow_client import HoldKind
from qflow_client.broker import Enforcement

__all__ = ["AuditLine", "ConsumerTally", "ProducerTally", "QueueTally", "Run", "audit", "to_json"]

#: The holds by which a broker slows a producer down.
BY_THE_BROKER = (HoldKind.CHANNEL_FLOW, HoldKind.CAPACITY)

# A producer that does not heed Channel.Flow is still held by its own capacity where confirms are held back, too.
_HELD_BY = {
    Enforcement.CHANNEL_FLOW: HoldKind.CHANNEL_FLOW,
    Enforcement.COMPLETION: HoldKind.CAPACITY,
    Enforcement.BOTH: HoldKind.CHANNEL_FLOW,
}


@dataclass(frozen=True, slots=True)
class ProducerTally:
    """What one producer says of itself.

    Attributes:
        name: of the producer.
        capacity: the most unsettled messages that it may have.
        sent: messages that were admitted.
        confirmed: those of them that the broker confirmed.
        checksum: of the bodies; the sum is the same in any order.
        holds: kinds of the holds that are on it.
        times_flowed: how often it became flowed.
        seconds_flowed: seconds that it was, by hold kind.
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
    """What the consumer got.

    Attributes:
        consumed: messages, second copies included.
        repeated: how many of them were second copies.
        missing: how many messages never came.
        unknown: how many nobody had sent.
        checksum: of the bodies.
    """

    consumed: int = 0
    repeated: int = 0
    missing: int = 0
    unknown: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class QueueTally:
    """What the broker says of the queue.

    Attributes:
        enforcement: how it holds its producers.
        stop: the stop threshold in messages.
        resume: the resume threshold in messages.
        depth: messages in it at the end.
        peak_depth: the most messages there ever were.
        flow_stopped: whether its flow state is ON at the end.
        flow_stopped_count: how often it turned ON.
    """

    enforcement: Enforcement
    stop: int
    resume: int
    depth: int
    peak_depth: int
    flow_stopped: bool
    flow_stopped_count: int


@dataclass(frozen=True, slots=True)
class Run:
    """All that is known of one run.

    Attributes:
        messages: how many were to be sent.
        producers: the producers.
        consumer: the consumer.
        queue: the queue between them.
    """

    messages: int
    producers: Sequence[ProducerTally]
    consumer: ConsumerTally
    queue: QueueTally

    @property
    def highest_allowed(self) -> int:
        """The depth that no run may exceed: the stop threshold and the sum of the capacities (C6)."""
        return self.queue.stop + sum(producer.capacity for producer in self.producers)


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One statement about a run.

    Attributes:
        statement: what has to be true.
        measured: what was found.
        difference: by how much it is wrong; empty if it is true.
    """

    statement: str
    measured: str
    difference: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is true."""
        return not self.difference


def audit(run: Run) -> list[AuditLine]:
    """Hold a run against what it has to show."""
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
            "every message came exactly once",
            f"{consumer.repeated:,} repeated, {consumer.missing:,} missing, {consumer.unknown:,} unknown",
            f"{wrong:,} wrong" if wrong else "",
        ),
        AuditLine(
            "bodies are as they were sent",
            f"checksum {consumer.checksum:x}",
            f"checksum {checksum:x} was sent" if consumer.checksum != checksum else "",
        ),
        AuditLine(
            f"peak above the stop threshold, {queue.stop:,}",
            f"{queue.peak_depth:,}",
            f"{queue.stop + 1 - queue.peak_depth:,} too few" if queue.peak_depth <= queue.stop else "",
        ),
        AuditLine(
            f"peak at most the worst case, {run.highest_allowed:,}",
            f"{queue.peak_depth:,}",
            f"{queue.peak_depth - run.highest_allowed:,} too many" if queue.peak_depth > run.highest_allowed else "",
        ),
        AuditLine(
            "queue empty and OFF in the end",
            f"depth {queue.depth:,}, {'ON' if queue.flow_stopped else 'OFF'}",
            f"{queue.depth:,} left" if queue.depth else "still ON" if queue.flow_stopped else "",
        ),
    ]
    kind = _HELD_BY[queue.enforcement]
    for producer in run.producers:
        seconds = producer.seconds_flowed.get(kind, 0.0)
        lines.append(
            AuditLine(
                f"{producer.name} was flowed by {kind}",
                f"{seconds:.2f} s",
                "" if seconds > 0 else "0 s, which is not more than 0 s",
            )
        )
        lines.append(
            AuditLine(
                f"{producer.name} was unflowed again",
                f"{producer.times_flowed:,} times, now held by {', '.join(producer.holds) or 'nothing'}",
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
    """The audit for machines.

    Args:
        run: what was audited.
        lines: what `audit` found.
        seconds: how long the run took.
    """
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
