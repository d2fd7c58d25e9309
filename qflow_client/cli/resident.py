"""`qflow broker` watches how much memory its process really takes.

The account of memory knows what messages and clients take. It does not know what the allocator keeps, or libraries do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["ALARM", "ResidentWatch", "resident_size"]

#: The name of the alarm.
ALARM: Final = "resident"

# How many times `memory_limit` the process may take beyond its idle size. A part of that is not given back by the
# allocator, so the alarm depends on the account as well: if little is counted, no publisher can make more room.
_FACTOR: Final = 1.2
_STATM: Final = Path("/proc/self/statm")


def resident_size() -> int | None:
    """Return the resident bytes of this process; None where the system does not say."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class ResidentWatch:
    """Decides whether publishers are blocked because the process is too large.

    Args:
        idle: resident bytes before the first client came.
        limit: bytes of `memory_limit`; more than 0.
    """

    def __init__(self, idle: int, limit: int) -> None:
        self._limit = limit
        #: The resident bytes above which publishers are blocked.
        self.most = idle + int(_FACTOR * limit)
        #: Whether they are blocked.
        self.is_over = False

    def look(self, resident: int, counted: int) -> bool:
        """Decide anew.

        Args:
            resident: resident bytes now.
            counted: bytes in the account of memory now.

        Returns:
            Whether the decision has changed.
        """
        before = self.is_over
        # An eighth less ends it, so it does not come and go.
        least, margin = (self._limit // 4, self._limit // 8) if before else (self._limit // 2, 0)
        self.is_over = resident > self.most - margin and counted > least
        return self.is_over is not before
