"""Runs peers alternately, so that disturbances of the machine affect all peers, and checks that no message is lost."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers import Job, Peer
from benchmarks.wire import Wire, fresh_queue

__all__ = ["Lost", "Measurement", "Plan", "measure", "rates", "slow_count", "within_bytes"]

# Number of messages of a peer's first try. The first try separates slow peers from fast peers.
_PROBE = 50
# Target seconds of a slow peer's run.
_SLOW_RUN = 0.8
# If a run with all messages takes longer than this number of seconds, the peer is slow. This is much more than
# `_SLOW_RUN`, because a full queue is slower, and compared peers should fill the queue equally.
_TOO_LONG = 4.0
# Maximum body bytes in one run. A larger queue would raise the broker's memory alarm.
_MOST_BYTES = 1 << 28
# Maximum seconds until unconfirmed messages are in the queue.
_ARRIVE = 10.0


class Lost(Exception):
    """The queue does not have the published messages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        messages: messages per run for fast peers.
        sizes: sizes of bodies in bytes.
        window: maximum number of unconfirmed messages.
        repeat: number of rounds; every peer runs once in each round.
        confirmed: whether to use publisher confirms.
        varying: whether each message has its own headers and timestamp; peers that do not support it are left out.
        sample: interval of messages whose confirm is timed; 0 for none.
    """

    url: str
    messages: int
    sizes: tuple[int, ...]
    window: int
    repeat: int
    confirmed: bool
    varying: bool = False
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one peer.

    Attributes:
        size: bytes of a body.
        round: number of the round, from 0.
        count: number of published messages.
        seconds: seconds from the first publish to the last confirm.
        cpu_seconds: CPU seconds of the client process from the first publish to the last confirm.
        latencies: seconds from publish to confirm of the sampled messages.
        fairness: see `Timing`.
    """

    peer: str
    size: int
    round: int
    count: int
    seconds: float
    cpu_seconds: float
    latencies: tuple[float, ...] = ()
    fairness: float | None = None

    @property
    def rate(self) -> float:
        return self.count / self.seconds


def measure(
    plan: Plan,
    peers: Mapping[str, Peer],
    say: Callable[[str], None],
    failed: dict[tuple[str, int], Exception] | None = None,
) -> list[Measurement]:
    """Run every peer `plan.repeat` times with every size, alternately.

    Args:
        peers: the peers of a round in order, with their names as keys.
        failed: gets the error of each peer that fails at its first try. The peer is then left out for this size.
            ``None`` to raise the error.

    Raises:
        Lost: a run left a different number of messages in the queue than it published.
    """
    measurements = []
    with Wire(plan.url) as wire:
        for size in plan.sizes:
            counts = {}
            for name, peer in peers.items():
                say(f"{size} bytes: warm-up of {name}")
                try:
                    counts[name] = min(_warm_up(plan, wire, peer, size), within_bytes(size))
                except Lost:
                    raise
                except Exception as error:
                    if failed is None:
                        raise
                    failed[name, size] = error
            for at in range(plan.repeat):
                for name, count in counts.items():
                    say(f"{size} bytes: round {at + 1} of {plan.repeat}, {name}")
                    measurements.append(_run(plan, wire, name, peers[name], size, at, count))
    return measurements


def slow_count(messages: int, rate: float) -> int:
    """Return the number of messages for a peer with this rate: all, or as many as do not take too long."""
    return messages if messages <= rate * _TOO_LONG else max(1, int(rate * _SLOW_RUN))


def within_bytes(size: int) -> int:
    """Return the maximum number of messages of this size for the memory of the broker and of this process."""
    return max(1, _MOST_BYTES // max(1, size))


def _warm_up(plan: Plan, wire: Wire, peer: Peer, size: int) -> int:
    count = min(_PROBE, plan.messages, within_bytes(size))
    rate = _run(plan, wire, "", peer, size, -1, count).rate
    # A first try is too short for fast peers.
    if count < plan.messages <= rate * _TOO_LONG * 2:
        count = min(20 * count, plan.messages, within_bytes(size))
        rate = _run(plan, wire, "", peer, size, -1, count).rate
    return slow_count(plan.messages, rate)


def _run(plan: Plan, wire: Wire, name: str, peer: Peer, size: int, at: int, count: int) -> Measurement:
    # The queue is exclusive, so that it is deleted with this connection, however the benchmark ends.
    with fresh_queue(wire, exclusive=True) as queue:
        # Collect the garbage first, so that no peer pays for the garbage of another peer.
        gc.collect()
        job = Job(plan.url, queue, b"x" * size, count, plan.window, plan.confirmed, plan.varying, plan.sample)
        timing = peer.run(job)
        _check(wire, queue, count, peer.title, 0.0 if plan.confirmed else _ARRIVE)
    return Measurement(name, size, at, count, timing.seconds, timing.cpu_seconds, timing.latencies, timing.fairness)


def _check(wire: Wire, queue: str, count: int, title: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while (depth := wire.depth(queue)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    if depth != count:
        raise Lost(f"queue {queue!r} has {depth} messages after {title} published {count}")


def rates(measurements: Sequence[Measurement], peer: str, size: int) -> list[float]:
    """Return messages per second of one peer, in the order of the rounds."""
    return [each.rate for each in measurements if each.peer == peer and each.size == size]
