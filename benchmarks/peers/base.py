"""What a peer is asked to do, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["MESSAGE_ID", "Job", "Peer", "Stopwatch", "Timing", "headers", "one_by_one", "timestamp"]

#: Every message bears an id of this form, of 29 bytes as ours are, so that all peers send the same bytes.
MESSAGE_ID = "0123456789abcdef-%012x"


def headers(number: int) -> dict[str, Any]:
    """The headers of a message, where they vary: always as long."""
    return {"number": number | 1 << 24, "carrier": "UA"}


def timestamp(number: int) -> int:
    """The timestamp of a message, where it varies."""
    return 1_700_000_000 + number


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        url: of the broker.
        queue: published to through the default exchange, mandatory.
        body: of every message.
        count: messages to publish.
        window: the most messages that are not confirmed, for peers that can have more than one.
        confirmed: use publisher confirms; without, the run ends when the broker has answered an orderly close.
        varying: give every message `headers` and a `timestamp` of its own. Only for peers that say they can.
        sample: measure the time from publish to confirm of every message that is the first of so many; 0 for none.
        persistent: the delivery mode. Only the plain socket knows another.
    """

    url: str
    queue: str
    body: bytes
    count: int
    window: int
    confirmed: bool
    varying: bool = False
    sample: int = 0
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Timing:
    """What one run took.

    Attributes:
        seconds: by the clock, from the first publish to the last confirm.
        cpu_seconds: of this process in that time.
        latencies: seconds from publish to confirm of those messages that were sampled.
        fairness: of several threads, what the one that was served least had got through when the first was done, as a
            part of the mean.
    """

    seconds: float
    cpu_seconds: float
    latencies: tuple[float, ...] = ()
    fairness: float | None = None


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._began = time.perf_counter()

    def stop(self, latencies: list[float] | None = None, fairness: float | None = None) -> Timing:
        """The time until now."""
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu
        return Timing(seconds, cpu_seconds, tuple(latencies or ()), fairness)


def one_by_one(job: Job, publish: Callable[[], object]) -> list[float]:
    """Call what publishes one message, and with confirms waits for its confirm, as often as the job says.

    Returns:
        The seconds that the sampled calls took.
    """
    clock = time.perf_counter
    latencies = []
    for at in range(job.count):
        if job.sample and not at % job.sample:
            began = clock()
            publish()
            latencies.append(clock() - began)
        else:
            publish()
    return latencies


class Peer(Protocol):
    """One way to publish.

    Attributes:
        title: for people.
        distribution: the name under which its library is installed; empty for none.
        varies: whether it can give each message properties of its own.
    """

    title: str
    distribution: str
    varies: bool

    def run(self, job: Job) -> Timing:
        """Do it: connect, publish, wait for the last confirm, disconnect.

        Raises:
            Exception: a message was not confirmed.
        """
