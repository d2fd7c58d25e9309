"""Checks how much memory the process of `qflow broker` really uses.

The broker counts the memory of its messages and clients. The count does not include the memory that libraries use, or
the freed memory that the allocator keeps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["ALARM", "ResidentWatch", "resident_size"]

ALARM: Final = "resident"

# The process may use its idle size plus this factor times `memory_limit`. If it uses more while the counted memory is
# low, the allocator keeps freed memory. Then there is no alarm, because blocking publishers would not free memory.
_FACTOR: Final = 1.2
_STATM: Final = Path("/proc/self/statm")


def resident_size() -> int | None:
    """Return the resident bytes of this process, or None if the system does not report them."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class ResidentWatch:
    """Decides whether to block publishers because the process uses too much memory.

    Args:
        idle: resident bytes of the process before the first client connects.
        limit: value of the setting `memory_limit` in bytes; more than 0.
    """

    def __init__(self, idle: int, limit: int) -> None:
        self._limit = limit
        #: Maximum resident bytes. If the process uses more, publishers are blocked unless the counted memory is low.
        self.most = idle + int(_FACTOR * limit)
        #: Whether publishers are blocked because the process uses too much memory.
        self.is_over = False

    def look(self, resident: int, counted: int) -> bool:
        """Decide whether to block publishers. Return True if the decision has changed. The arguments are in bytes."""
        before = self.is_over
        # While the alarm lasts, the limits are lower, so that small changes of the values do not toggle the alarm.
        least, margin = (self._limit // 4, self._limit // 8) if before else (self._limit // 2, 0)
        self.is_over = resident > self.most - margin and counted > least
        return self.is_over is not before
