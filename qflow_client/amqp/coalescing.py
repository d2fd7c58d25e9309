"""For how long the broker's answers may gather before they are read.

A broker answers as it goes, often a handful of messages at a time, and to be woken for each handful costs a client more
than the answers do: changes of threads, system calls, and caches that somebody else has filled meanwhile. So network
adapters coalesce their interrupts, and a busy producer its reads.
"""

from __future__ import annotations

__all__ = ["delay"]

# Messages in flight below which every answer is read as it comes.
_LEAST = 256
# Seconds.
_DELAY = 0.001
# Bytes in one read above which the next is not put off. Acks are small: what is large is messages that come back, and
# of those a socket that is not read holds no more than its buffer.
_LARGE = 1 << 13


def delay(size: int, in_flight: int) -> float:
    """For how long what comes next may wait, on a connection of one producer.

    Args:
        size: of the answers that have been taken, in bytes.
        in_flight: messages that are written, or being written, and not settled.

    Returns:
        Seconds; 0 to read what comes as it comes.
    """
    return _DELAY if in_flight >= _LEAST and size <= _LARGE else 0.0
