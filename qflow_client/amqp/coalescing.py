"""Computes how long the broker's answers may gather before they are read.

A broker often answers a handful of messages at a time. To wake a client for each handful costs more than the answers
themselves, because of thread switches, system calls and cold caches. So network adapters coalesce their interrupts, and
a busy producer coalesces its reads.
"""

from __future__ import annotations

__all__ = ["delay"]

# With fewer messages in flight than this, every answer is read immediately.
_LEAST = 256
# The delay in seconds.
_DELAY = 0.001
# If one read yields more bytes than this, the next read is not delayed. Acks are small, so large reads contain returned
# messages. An unread socket holds only as many of them as fit into its buffer.
_LARGE = 1 << 13


def delay(size: int, in_flight: int) -> float:
    """Return how long the next answers may wait, on a connection of one producer.

    Args:
        size: the size of the answers that were read, in bytes.
        in_flight: messages that are written, or being written, and not settled.

    Returns:
        Seconds; 0 to read the next answers immediately.
    """
    return _DELAY if in_flight >= _LEAST and size <= _LARGE else 0.0
