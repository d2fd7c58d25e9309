"""Runs peers in turn, so that what disturbs the machine disturbs all of them, and checks that no message is lost."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from pamqp import commands

from benchmarks.peers import Job, Peer
from benchmarks.wire import Wire

__all__ = ["Lost", "Measurement", "Plan", "measure", "rates", "slow_count", "within_bytes"]

# Messages of the first try of a peer, which tells slow ones from fast ones.
_PROBE = 50
# Seconds that one run of a slow peer is to take, and seconds beyond which a peer with all messages is slow. Far apart,
# because a queue that fills up gets slower: peers that compete are to fill it alike.
_SLOW_RUN = 0.8
_TOO_LONG = 4.0
# Of bodies, in one run: a queue that is larger would set off the broker's memory alarm.
_MOST_BYTES = 1 << 28
# Seconds that messages which the broker was not asked to confirm may take to be in the queue.
_ARRIVE = 10.0


class Lost(Exception):
    """The queue does not hold what was published."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        url: of the broker.
        messages: per run, for peers that are fast enough for it.
        sizes: of the bodies, in bytes.
        window: the most messages that are not confirmed.
        repeat: rounds; in each every peer runs once.
        confirmed: use publisher confirms.
        varying: give every message headers and a timestamp of its own; peers that cannot are left out.
        sample: measure how long the confirm of one message in so many takes; 0 for none.
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
        peer: its name.
        size: bytes of a body.
        round: from 0.
        count: messages that were published.
        seconds: from the first publish to the last confirm.
        cpu_seconds: of the client process in that time.
        latencies: seconds from publish to confirm of the messages that were sampled.
        fairness: as `Timing` has it.
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
        """Messages per second."""
        return self.count / self.seconds


def measure(
    plan: Plan,
    peers: Mapping[str, Peer],
    say: Callable[[str], None],
    failed: dict[tuple[str, int], Exception] | None = None,
) -> list[Measurement]:
    """Run every peer `plan.repeat` times with every size, in turn.

    Args:
        plan: what to do.
        peers: by name, in the order of a round.
        say: told of the progress, in words.
        failed: is given the peers that raised something with a size at the first try, by name and size, which are left
            out then; ``None`` to have that raised.

    Raises:
        Lost: a run left another number of messages in the queue than it published.
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
    """How many messages a peer of this rate is given: all, or as many as do not take too long."""
    return messages if messages <= rate * _TOO_LONG else max(1, int(rate * _SLOW_RUN))


def within_bytes(size: int) -> int:
    """How many messages of this size the broker's memory, and ours, is good for."""
    return max(1, _MOST_BYTES // max(1, size))


def _warm_up(plan: Plan, wire: Wire, peer: Peer, size: int) -> int:
    count = min(_PROBE, plan.messages, within_bytes(size))
    rate = _run(plan, wire, "", peer, size, -1, count).rate
    # A try that short says little of those who are fast.
    if count < plan.messages <= rate * _TOO_LONG * 2:
        count = min(20 * count, plan.messages, within_bytes(size))
        rate = _run(plan, wire, "", peer, size, -1, count).rate
    return slow_count(plan.messages, rate)


def _run(plan: Plan, wire: Wire, name: str, peer: Peer, size: int, at: int, count: int) -> Measurement:
    with _fresh_queue(wire) as queue:
        # Nobody pays for what another left behind.
        gc.collect()
        job = Job(plan.url, queue, b"x" * size, count, plan.window, plan.confirmed, plan.varying, plan.sample)
        timing = peer.run(job)
        _check(wire, queue, count, peer.title, 0.0 if plan.confirmed else _ARRIVE)
    return Measurement(name, size, at, count, timing.seconds, timing.cpu_seconds, timing.latencies, timing.fairness)


@contextmanager
def _fresh_queue(wire: Wire) -> Iterator[str]:
    queue = f"qflow-benchmark-{uuid4().hex[:12]}"
    # Exclusive: it goes with this connection, however the benchmark ends.
    wire.call(commands.Queue.Declare(queue=queue, exclusive=True))
    try:
        yield queue
    finally:
        wire.call(commands.Queue.Delete(queue=queue))


def _check(wire: Wire, queue: str, count: int, title: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while (depth := wire.depth(queue)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    if depth != count:
        raise Lost(f"{title} published {count} messages, and the queue holds {depth}")


def rates(measurements: Sequence[Measurement], peer: str, size: int) -> list[float]:
    """Messages per second of one peer, by round."""
    return [each.rate for each in measurements if each.peer == peer and each.size == size]
