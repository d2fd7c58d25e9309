"""Finds the messages that are unsettled for longer than `delivery_timeout`. `Consequences` settles them.

To keep admission fast, a message does not store its time of admission. Instead, `expired_before` sets a *mark* at
intervals: the present time, and the number of the next message. All messages with lower numbers were admitted before
that time. When the mark is as old as `delivery_timeout`, all messages with lower numbers have expired. So no message
expires too early. A message expires at most one interval too late, if `expired_before` is called at `next_at`.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Expiry"]

# The largest number of marks that are set during one `delivery_timeout`.
_MARKS = 50
# The shortest interval between two marks in seconds.
_LEAST = 0.005


class Expiry:
    """Sets the marks of one producer, and finds its expired messages."""

    __slots__ = ("_marks", "_next_mark_at", "_period", "timeout")

    def __init__(self, timeout: float, now: float) -> None:
        #: Seconds from the admission of a message until it expires.
        self.timeout = timeout
        self._period = max(_LEAST, timeout / _MARKS)
        # The marks, the oldest first. The times and numbers of the marks increase.
        self._marks: deque[tuple[float, int]] = deque()
        self._next_mark_at = now

    def next_at(self) -> float:
        """Return when `expired_before` should be called next, in seconds."""
        if self._marks:
            return min(self._next_mark_at, self._marks[0][0] + self.timeout)
        return self._next_mark_at

    def expired_before(self, next_number: int, now: float) -> int:
        """Find the expired messages, and set a mark if it is time for one.

        Returns:
            The number below which all messages have expired; 0 if no mark is old enough. Until `forget` is called with
            this number, later calls return the same number or a higher one.
        """
        marks = self._marks
        if now >= self._next_mark_at:
            self._next_mark_at = now + self._period
            if not marks or marks[-1][1] != next_number:
                marks.append((now, next_number))
        before = 0
        for at, number in marks:
            if now < at + self.timeout:
                break
            before = number
        return before

    def forget(self, before: int) -> None:
        """Drop the marks with numbers up to `before`, because all messages with lower numbers are settled."""
        while self._marks and self._marks[0][1] <= before:
            self._marks.popleft()
