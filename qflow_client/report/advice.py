"""Thresholds and capacities that keep a stated maximum (C6) and a stated delay, tried on what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from qflow_client.errors import QflowError
from qflow_client.flow import StopResume
from qflow_client.report.replay import ReplayResult, Sample, replay
from qflow_client.report.tables import QueueTotals, Row, Tables

__all__ = ["Advice", "AdviceError", "advise", "samples_in", "windows"]

#: How much of a queue's history is replayed: samples, and messages in them, around the time at which it was deepest.
SAMPLES = 2000
MESSAGES = 20_000
#: Round trips that a replay has at the most; with more, it is coarser.
ROUNDS = 20_000

# Of what a queue may hold, the part that is the capacities', and of the stop threshold, the resume.
_CAPACITY_PARTS = (16, 8, 4, 2)
_RESUME_PARTS = ((7, 8), (1, 2), (1, 4))


class AdviceError(QflowError):
    """No thresholds keep what was asked for; the text names the values."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set for a queue and its publishers, and what that would have done.

    Attributes:
        queue: its name.
        stop: the stop threshold, in messages.
        resume: the resume threshold.
        capacities: of the publishers.
        drain_rate: messages per second that its consumers took where they could.
        expected: what it would have done.
        recorded: what the marks that were in force would have done in the same replay; ``None`` if there were none.
        tried: everything that was replayed.
    """

    queue: str
    stop: int
    resume: int
    capacities: Mapping[str, int]
    drain_rate: float
    expected: ReplayResult
    recorded: ReplayResult | None
    tried: Sequence[ReplayResult]

    @property
    def worst_case(self) -> int:
        """The most messages that there can be in the queue (C6)."""
        return self.stop + sum(self.capacities.values())

    @property
    def longest_delay(self) -> float:
        """Seconds that a message waits in it then, if the consumers go on as they did."""
        return self.worst_case / self.drain_rate if self.drain_rate else inf

    def row(self) -> Row:
        """For the table of advice."""
        return {
            "queue": self.queue,
            "stop": self.stop,
            "resume": self.resume,
            "capacity": sum(self.capacities.values()),
            "worst_case": self.worst_case,
            "drain_rate": self.drain_rate,
            "longest_delay": self.longest_delay if self.longest_delay < inf else None,
            "seconds_held": self.expected.seconds_held,
            "seconds_held_recorded": None if self.recorded is None else self.recorded.seconds_held,
        }

    def capacity_rows(self) -> list[Row]:
        """For the table of capacities."""
        return [
            {"queue": self.queue, "producer": producer, "capacity": capacity}
            for producer, capacity in self.capacities.items()
        ]

    def replay_rows(self) -> list[Row]:
        """For the table of replays."""
        rows = [] if self.recorded is None else [_replay_row(self.queue, "recorded", self.recorded)]
        for each in self.tried:
            rows.append(_replay_row(self.queue, "advice" if each is self.expected else "tried", each))
        return rows


def _replay_row(queue: str, what: str, result: ReplayResult) -> Row:
    return {
        "queue": queue,
        "what": what,
        "stop": result.stop,
        "resume": result.resume,
        "capacity": sum(result.capacities.values()),
        "depth_max": result.peak,
        "overshoot_max": result.overshoot,
        "times_on": result.times_on,
        "seconds_flowed": result.seconds_flowed,
        "seconds_full": result.seconds_full,
        "delay_max": result.delay,
        "sent": result.sent,
        "unsent": result.unsent,
    }


def windows(tables: Tables, queues: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
    """For each queue, from when to when its samples are wanted: about when it was deepest; in microseconds."""
    found = {}
    for name in sorted(tables.queues) if queues is None else queues:
        queue = tables.queues.get(name)
        if queue is not None and queue.arrived:
            deepest = max((point[0], -at) for (each, at), point in tables.depths.items() if each == name)
            half = SAMPLES // 2 * max(1, queue.us // queue.samples)
            found[name] = (-deepest[1] - half, -deepest[1] + tables.width + half)
    return found


def samples_in(lines: Iterable[Mapping[str, Any]], wanted: Mapping[str, tuple[int, int]]) -> dict[str, list[Sample]]:
    """The samples of each queue around the time at which it was deepest, in order.

    Args:
        lines: in any order; others than samples are passed over.
        wanted: see `windows`.
    """
    found: dict[str, list[tuple[int, int, Sample]]] = {name: [] for name in wanted}
    for line in lines:
        window = wanted.get(line["queue"]) if line["kind"] == "depth" else None
        if window is not None and window[0] <= line["at"] <= window[1]:
            found[line["queue"]].append((line["at"], line["peak"], _sample(line)))
    return {name: _trimmed(samples) for name, samples in found.items() if samples}


def _sample(line: Mapping[str, Any]) -> Sample:
    before = line["depth"] - line["arrived"] + line["left"]
    was_busy = line["depth"] > 0 and before > 0
    return Sample(line["us"] / 1_000_000, dict(sorted(line["arrivals"].items())), line["left"], was_busy)


def _trimmed(timed: list[tuple[int, int, Sample]]) -> list[Sample]:
    """As many as a replay takes, those around the deepest first."""
    timed.sort(key=lambda each: (each[0], each[1], each[2].seconds, each[2].left))
    center, _, _ = max(timed, key=lambda each: (each[1], -each[0]))
    nearest = sorted(range(len(timed)), key=lambda at: (abs(timed[at][0] - center), at))
    taken: set[int] = set()
    messages = 0
    for at in nearest:
        messages += sum(timed[at][2].arrivals.values())
        if taken and (messages > MESSAGES or len(taken) >= SAMPLES):
            break
        taken.add(at)
    return [timed[at][2] for at in sorted(taken)]


def advise(
    name: str,
    queue: QueueTotals,
    samples: Sequence[Sample],
    publishers: Mapping[str, int],
    capacities: Mapping[str, int],
    *,
    maximum: int | None = None,
    delay: float | None = None,
    round_trip: float = 0.005,
) -> Advice:
    """Find the thresholds and capacities under which publishers would have been held least.

    Whatever is tried keeps the stop threshold plus all capacities within the maximum, and within what the consumers
    take in the time that a message may wait: so it holds whatever the publishers do, and not only in the replay.

    Args:
        name: of the queue.
        queue: what happened in it.
        samples: what is replayed.
        publishers: all that published to it, and how many messages.
        capacities: those that publishers had, as far as that is known.
        maximum: the most messages that the queue may ever have.
        delay: seconds that a message may be in it.
        round_trip: seconds from a publish to its confirm.

    Raises:
        AdviceError: that cannot be.
        ValueError: neither maximum nor delay is given, or one is not more than 0.
    """
    if maximum is None and delay is None:
        raise ValueError("give a maximum, a delay, or both")
    for what, value in (("maximum", maximum), ("delay", delay), ("round_trip", round_trip)):
        if value is not None and not value > 0:
            raise ValueError(f"{what}={value!r}: it must be more than 0")
    drain_rate = queue.drain_rate
    bound = min(inf if maximum is None else maximum, inf if delay is None else int(drain_rate * delay))
    count = len(publishers)
    if not samples or not count:
        raise AdviceError(f"queue '{name}': nothing was published to it while its depth was told")
    if bound < count + 1:
        asked = f"maximum={maximum}" if maximum == bound else f"delay={delay} s at {drain_rate:.4g} messages per second"
        raise AdviceError(
            f"queue '{name}': {asked} leaves room for {int(bound)} messages, and {count} publishers of capacity 1 with "
            f"a stop threshold of 1 can come to {count + 1}; allow more, or have fewer publishers"
        )
    seconds = sum(sample.seconds for sample in samples)
    step = max(round_trip, seconds / ROUNDS)
    tried = []
    for total in sorted({max(count, int(bound) // part) for part in _CAPACITY_PARTS}):
        if total >= bound:
            continue
        shares = _shared_out(total, publishers)
        stop = int(bound) - sum(shares.values())
        for resume in sorted({max(1, stop * part // whole) for part, whole in _RESUME_PARTS}):
            tried.append(replay(samples, StopResume(stop, resume), shares, drain_rate=drain_rate, round_trip=step))
    # Of those that are alike the one with the largest capacities: a replay does not know how far away a producer is.
    best = min(
        tried,
        key=lambda each: (round(each.seconds_held, 2), each.times_on, -sum(each.capacities.values()), -each.resume),
    )
    recorded = None
    if queue.marks[1]:
        known = {producer: capacities.get(producer, max(capacities.values(), default=1000)) for producer in publishers}
        marks = StopResume(queue.marks[1], queue.marks[2])
        recorded = replay(samples, marks, known, drain_rate=drain_rate, round_trip=step)
    return Advice(name, best.stop, best.resume, best.capacities, drain_rate, best, recorded, tried)


def _shared_out(total: int, publishers: Mapping[str, int]) -> dict[str, int]:
    """A capacity in parts, by how much each publishes, and at least 1 for each."""
    messages = sum(publishers.values())
    spare = total - len(publishers)
    shares = {name: 1 + spare * count // messages for name, count in publishers.items()}
    left = total - sum(shares.values())
    for name in sorted(publishers, key=lambda each: (-publishers[each], each))[:left]:
        shares[name] += 1
    return shares
