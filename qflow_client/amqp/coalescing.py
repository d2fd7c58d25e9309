"""How long the broker's answers may gather before they are read, sans-I/O.

A broker answers as it goes, often a handful of messages at a time, and to be woken for each handful costs a client more
than the answers do: changes of threads, system calls, and caches that somebody else has filled meanwhile. So network
adapters coalesce their interrupts, and a busy producer its reads.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Coalescing"]

# Messages in flight below which every answer is read as it comes.
_LEAST = 256
# The part of the time for which a message waits for its answer anyway.
_PART = 0.1
# Seconds. Event loops count in milliseconds; and much more than that saves nothing more.
_SHORTEST = 0.001
_LONGEST = 0.002
# Bytes in one read above which the next is not put off. Acks are small: what is large is messages that come back, and
# of those a socket that is not read holds no more than its buffer.
_LARGE = 1 << 13


class Publishing(Protocol):
    """What there is to know of a producer."""

    @property
    def in_flight(self) -> int:
        """Messages that are written, or being written, and not settled."""

    @property
    def settled_so_far(self) -> int:
        """Messages that are settled; it only grows."""


class Coalescing:
    """Tells how long to wait before the next read.

    Args:
        publishing: who is answered, on a connection of its own.
    """

    __slots__ = ("_delay", "_due", "_publishing", "_since")

    def __init__(self, publishing: Publishing) -> None:
        self._publishing = publishing
        # When all that was in flight was last looked at, and how many messages are settled when all of that is; 0 if
        # there was little.
        self._since = 0.0
        self._due = 0
        # What came of it.
        self._delay = 0.0

    def delay(self, size: int, now: float) -> float:
        """For how long what comes next may wait, after answers have been taken.

        At least 256 messages must be in flight, and such a number must have taken 10 ms or longer to be answered. The
        delay is a tenth of that time, and 2 ms at the most. It is nothing after a read of more than 8 KiB.

        Args:
            size: of the answers that have been taken, in bytes.
            now: seconds.

        Returns:
            Seconds; 0 to read whatever comes as it comes.
        """
        in_flight = self._publishing.in_flight
        if in_flight < _LEAST:
            self._due = 0
            self._delay = 0.0
            return 0.0
        settled = self._publishing.settled_so_far
        if settled >= self._due:
            if self._due:
                delay = _PART * (now - self._since)
                self._delay = min(delay, _LONGEST) if delay >= _SHORTEST else 0.0
            self._since, self._due = now, settled + in_flight
        return self._delay if size <= _LARGE else 0.0
