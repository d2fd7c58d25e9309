"""The jobs for peers, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["MESSAGE_ID", "Job", "Peer", "Stopwatch", "Timing", "headers", "one_by_one", "timestamp"]

#: Every message has an id of this form with 29 bytes, like the ids of this library, so that peers are comparable.
MESSAGE_ID = "0123456789abcdef-%012x"


def headers(number: int) -> dict[str, Any]:
    """Return the headers of a message in a job with `varying`. Their length is constant."""
    return {"number": number | 1 << 24, "carrier": "UA"}


def timestamp(number: int) -> int:
    """Return the timestamp of a message in a job with `varying`."""
    return 1_700_000_000 + number


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        queue: queue to which all messages are published, with `mandatory`, through the default exchange.
        window: maximum unconfirmed messages, for peers that can have more than one.
        confirmed: whether to use publisher confirms. Otherwise the run ends when the broker has answered the close.
        varying: whether each message has its own `headers` and `timestamp`. Not all peers support this.
        sample: interval of messages whose time from publish to confirm is measured; 0 for none.
        persistent: whether messages are persistent. Only the plain socket supports transient messages.
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
    """The times of one run.

    Attributes:
        seconds: wall-clock seconds from the first publish to the last confirm.
        cpu_seconds: CPU seconds of this process from the first publish to the last confirm.
        latencies: seconds from publish to confirm of the sampled messages.
        fairness: progress of the least served thread when the first thread was done, divided by the mean progress.
    """

    seconds: float
    cpu_seconds: float
    latencies: tuple[float, ...] = ()
    fairness: float | None = None


class Stopwatch:
    """A stopwatch that starts on creation."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._began = time.perf_counter()

    def stop(self, latencies: list[float] | None = None, fairness: float | None = None) -> Timing:
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu
        return Timing(seconds, cpu_seconds, tuple(latencies or ()), fairness)


def one_by_one(job: Job, publish: Callable[[], object]) -> list[float]:
    """Call `publish` for each message of the job. With confirms, `publish` waits for the confirm of its message.

    Returns:
        The seconds of each sampled call.
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
        distribution: name of the distribution of the peer's library; empty for none.
        varies: whether the peer supports separate properties for each message.
    """

    title: str
    distribution: str
    varies: bool

    def run(self, job: Job) -> Timing:
        """Run a job: connect, publish, wait for the last confirm, disconnect.

        Raises:
            Exception: a message was not confirmed.
        """
