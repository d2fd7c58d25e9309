"""Computes how long the broker's answers can wait, so that one read gets many answers.

A broker often answers only a few messages at a time. Waking up the client costs more time than handling these answers,
because of thread switches, system calls and cold caches. So a busy producer waits for more answers, just as network
adapters coalesce their interrupts.
"""

from __future__ import annotations

__all__ = ["delay"]

# With fewer messages in flight than this, answers are read immediately.
_MIN_IN_FLIGHT = 256
# The delay of the next read in seconds.
_DELAY = 0.001
# Acks are small. So if a read gets more bytes than this, it probably contains returned messages, which would soon fill
# the buffer of the socket. After such a read, the next read is not delayed.
_LARGE_READ = 1 << 13


def delay(size: int, in_flight: int) -> float:
    """Return the seconds to wait before the next read, on a connection that only one producer uses.

    Args:
        size: size of the answers in the last read in bytes.
        in_flight: number of unsettled messages that are at least partly written.
    """
    return _DELAY if in_flight >= _MIN_IN_FLIGHT and size <= _LARGE_READ else 0.0
