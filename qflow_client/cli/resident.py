"""The check of `qflow broker` how much memory its process really uses.

The memory account has the memory of messages and clients. It does not have the memory that the allocator keeps, or that
libraries use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["ALARM", "ResidentWatch", "resident_size"]

#: The name of the alarm.
ALARM: Final = "resident"

# The process may use this factor times `memory_limit` beyond its idle size. The allocator does not return all freed
# memory. So the alarm also depends on the memory account: if the account is low, publishers cannot free more memory.
_FACTOR: Final = 1.2
_STATM: Final = Path("/proc/self/statm")


def resident_size() -> int | None:
    """Return the resident bytes of this process; None if the system does not report them."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class ResidentWatch:
    """Decides whether to block publishers because the process is too large.

    Args:
        idle: resident bytes before the first client.
        limit: value of `memory_limit` in bytes; more than 0.
    """

    def __init__(self, idle: int, limit: int) -> None:
        self._limit = limit
        #: The resident bytes above which publishers are blocked.
        self.most = idle + int(_FACTOR * limit)
        #: Whether publishers are blocked.
        self.is_over = False

    def look(self, resident: int, counted: int) -> bool:
        """Decide again.

        Args:
            resident: current resident bytes.
            counted: current bytes in the memory account.

        Returns:
            Whether the decision has changed.
        """
        before = self.is_over
        # Hysteresis: it ends only an eighth of the limit lower, so that it does not switch often.
        least, margin = (self._limit // 4, self._limit // 8) if before else (self._limit // 2, 0)
        self.is_over = resident > self.most - margin and counted > least
        return self.is_over is not before
