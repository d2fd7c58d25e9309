"""What a peer is asked to do, and what it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["MESSAGE_ID", "Job", "Peer", "Stopwatch", "Timing"]

#: Every message bears an id of this form, of 29 bytes as ours are, so that all peers send the same bytes.
MESSAGE_ID = "0123456789abcdef-%012x"


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        url: of the broker.
        queue: published to through the default exchange, mandatory and persistent.
        body: of every message.
        count: messages to publish.
        window: the most messages that are not confirmed, for peers that can have more than one.
        confirmed: use publisher confirms; without, the run ends when the broker has answered an orderly close.
    """

    url: str
    queue: str
    body: bytes
    count: int
    window: int
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """From the first publish to the last confirm: seconds by the clock, and seconds of CPU of this process."""

    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> Timing:
        """The time until now."""
        return Timing(time.perf_counter() - self._began, time.process_time() - self._cpu)


class Peer(Protocol):
    """One way to publish.

    Attributes:
        title: for people.
        distribution: the name under which its library is installed; empty for none.
    """

    title: str
    distribution: str

    def run(self, job: Job) -> Timing:
        """Do it: connect, publish, wait for the last confirm, disconnect.

        Raises:
            Exception: a message was not confirmed.
        """
