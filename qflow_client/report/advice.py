"""Recommends thresholds and capacities with which a queue stays within a maximum depth (C6) or delay."""

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

#: Maximum number of samples in a replay. The replay uses the samples nearest to the time of the greatest depth.
SAMPLES = 2000
#: Maximum number of messages in the replayed samples, unless there is only one sample.
MESSAGES = 20_000
#: Approximate maximum number of round trips in a replay. If a replay would need more, each round trip lasts longer.
ROUNDS = 20_000

# For each of these numbers, `advise` tests capacities whose sum is the maximum depth divided by the number.
_CAPACITY_PARTS = (16, 8, 4, 2)
# The tested resume thresholds are these fractions (numerator, denominator) of the stop threshold.
_RESUME_PARTS = ((7, 8), (1, 2), (1, 4))


class AdviceError(QflowError):
    """No thresholds keep the requested limits, or the flow log has no messages for the queue."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommended settings for a queue and its publishers, and the effect of these settings in a replay.

    Attributes:
        stop: recommended stop threshold in messages.
        resume: recommended resume threshold in messages.
        capacities: recommended capacity of each publisher.
        drain_rate: number of messages per second that left the queue, according to the flow log.
        expected: result of the replay with the recommended settings.
        recorded: result of a replay with the recorded thresholds; ``None`` if the queue had no stop threshold.
        tried: results of all tested settings, including `expected`.
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
        """The maximum number of messages in the queue with the recommended settings (C6)."""
        return self.stop + sum(self.capacities.values())

    @property
    def longest_delay(self) -> float:
        """The seconds that a message waits behind `worst_case` messages if the consumers drain them at `drain_rate`."""
        return self.worst_case / self.drain_rate if self.drain_rate else inf

    def row(self) -> Row:
        """Return the row of this queue in the table ``advice``."""
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
        """Return the rows of this queue in the table ``capacities``."""
        return [
            {"queue": self.queue, "producer": producer, "capacity": capacity}
            for producer, capacity in self.capacities.items()
        ]

    def replay_rows(self) -> list[Row]:
        """Return the rows of this queue in the table ``replays``."""
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
    """Return the time window to replay for each queue with messages: start and end in microseconds since 1970.

    A queue of `queues` that has no messages gets an empty window, so that `advise` reports the reason.
    """
    found = {}
    for name in sorted(tables.queues) if queues is None else queues:
        queue = tables.queues.get(name)
        if queue is not None and queue.arrived:
            deepest = max((point[0], -at) for (each, at), point in tables.depths.items() if each == name)
            half = SAMPLES // 2 * max(1, queue.us // queue.samples)
            found[name] = (-deepest[1] - half, -deepest[1] + tables.width + half)
        elif queues is not None:
            found[name] = (0, -1)
    return found


def samples_in(lines: Iterable[Mapping[str, Any]], wanted: Mapping[str, tuple[int, int]]) -> dict[str, list[Sample]]:
    """Return the samples of each queue in its time window, in order of time. `wanted` is the result of `windows`."""
    found: dict[str, list[tuple[int, int, Sample]]] = {name: [] for name in wanted}
    for line in lines:
        window = wanted.get(line["queue"]) if line["kind"] == "depth" else None
        if window is not None and window[0] <= line["at"] <= window[1]:
            found[line["queue"]].append((line["at"], line["peak"], _sample(line)))
    return {name: _trimmed(samples) if samples else [] for name, samples in found.items()}


def _sample(line: Mapping[str, Any]) -> Sample:
    before = line["depth"] - line["arrived"] + line["left"]
    was_busy = line["depth"] > 0 and before > 0
    return Sample(line["us"] / 1_000_000, dict(sorted(line["arrivals"].items())), line["left"], was_busy)


def _trimmed(timed: list[tuple[int, int, Sample]]) -> list[Sample]:
    """Return the samples in order of time. If there are too many, keep those nearest in time to the greatest depth."""
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
    """Find the thresholds and capacities with which the replay holds the publishers for the shortest time.

    In all tested settings, the stop threshold plus all capacities is at most `maximum`. This sum is also at most the
    number of messages that leave the queue in `delay` seconds at the recorded drain rate. So at this drain rate the
    queue keeps both limits, no matter when the publishers send.

    Args:
        publishers: number of messages from each publisher to the queue.
        capacities: recorded capacities of producers, for the replay with the recorded thresholds.
        maximum: maximum number of messages in the queue; ``None`` for no maximum.
        delay: maximum seconds that a message may be in the queue; ``None`` for no maximum.
        round_trip: seconds between the publishing of a message and its confirm in the replays.

    Raises:
        AdviceError: no settings keep the limits, or the log has no samples or no publishers of the queue.
        ValueError: `maximum` and `delay` are both missing, or a value is not more than 0.
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
        raise AdviceError(
            f"queue '{name}': the log has no messages for this queue while its depth was recorded; check the name, or "
            "log again"
        )
    if bound < count + 1:
        asked = f"maximum={maximum}" if maximum == bound else f"delay={delay} s at {drain_rate:.4g} messages per second"
        raise AdviceError(
            f"queue '{name}': {asked} allows {int(bound)} messages, but {count} publishers with a capacity of 1 and a "
            f"stop threshold of 1 can reach {count + 1}; allow more messages, or use fewer publishers"
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
    # Of equal results, prefer large capacities, because real round trips may be longer than in the replay.
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
    """Divide a capacity among publishers in proportion to their numbers of messages. Each publisher gets at least 1."""
    messages = sum(publishers.values())
    spare = total - len(publishers)
    shares = {name: 1 + spare * count // messages for name, count in publishers.items()}
    left = total - sum(shares.values())
    for name in sorted(publishers, key=lambda each: (-publishers[each], each))[:left]:
        shares[name] += 1
    return shares
