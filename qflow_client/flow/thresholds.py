"""The thresholds of a queue's flow state: `StopResume` as in Qpid C++, and `Capacity` as in Qpid Java.

Between the thresholds the state does not change. Both classes are immutable. `ThresholdLimiter` has the flow state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qflow_client.flow.limiters import Limiter

__all__ = [
    "Capacity",
    "StopResume",
    "ThresholdLimiter",
    "Thresholds",
    "check_capacity",
    "check_order",
    "check_resume",
]


class Thresholds(Protocol):
    """Thresholds for a queue's depth. In all methods `count` is in messages and `size` in body bytes."""

    def stops(self, count: int, size: int) -> bool:
        """Whether a flow state changes from OFF to ON at this depth."""

    def resumes(self, count: int, size: int) -> bool:
        """Whether a flow state changes from ON to OFF at this depth. The result must be False if `stops` is True."""

    def holds_publisher(self, on: bool, count: int, size: int) -> bool:
        """Whether to hold the publisher of a message that has just arrived.

        Args:
            on: the flow state after this message.
            count: depth in messages after this message.
            size: depth in body bytes after this message.
        """


def check_order(stop_name: str, stop: int, resume_name: str, resume: int) -> None:
    """Raise `ValueError` if a stop threshold is below its resume threshold."""
    if stop < resume:
        raise _refused(stop_name, stop, resume_name, resume, "the stop threshold must not be below the resume")


def check_resume(stop_name: str, stop: int, resume_name: str, resume: int) -> None:
    """Raise `ValueError` if a resume threshold is above its stop threshold, or can never be reached (C2)."""
    check_order(stop_name, stop, resume_name, resume)
    if stop > 0 and resume < 1:
        why = "the resume threshold must be at least 1, or it is never reached"
        raise _refused(stop_name, stop, resume_name, resume, why)


def check_capacity(name: str, capacity: int, resume_name: str, resume: int) -> None:
    """Raise `ValueError` if a resume capacity is negative or above its capacity."""
    if not 0 <= resume <= capacity:
        raise _refused(name, capacity, resume_name, resume, "the resume capacity must be from 0 to the capacity")


def _refused(stop_name: str, stop: int, resume_name: str, resume: int, why: str) -> ValueError:
    return ValueError(f"{stop_name}={stop} and {resume_name}={resume}: {why}")


@dataclass(frozen=True, slots=True)
class StopResume:
    """The flow thresholds of Qpid C++: ON above a stop threshold, OFF below all resume thresholds (C1 C2).

    If the depth is equal to a threshold, the state does not change. If a stop threshold is 0, its dimension (count or
    size) is ignored. If both stop thresholds are 0, the queue has no flow control.

    Attributes:
        stop_count: stop threshold in messages.
        resume_count: resume threshold in messages. ``None`` means 7/8 of `stop_count`, rounded down, at least 1.
        stop_size: stop threshold in body bytes.
        resume_size: resume threshold in body bytes. ``None`` means 7/8 of `stop_size`, rounded down, at least 1.

    Raises:
        ValueError: a threshold is negative, a resume threshold is above its stop threshold, or only the resume
            threshold is 0. The text of the error contains the invalid values.
    """

    stop_count: int = 0
    resume_count: int | None = None
    stop_size: int = 0
    resume_size: int | None = None

    def __post_init__(self) -> None:
        for unit in ("count", "size"):
            stop_name, resume_name = f"flow_stop_{unit}", f"flow_resume_{unit}"
            stop: int = getattr(self, f"stop_{unit}")
            resume: int | None = getattr(self, f"resume_{unit}")
            if stop < 0:
                raise ValueError(f"{stop_name}={stop}: it must be at least 0 (0 means no threshold)")
            if resume is None:
                resume = max(1, stop * 7 // 8) if stop else 0
                object.__setattr__(self, f"resume_{unit}", resume)
            check_resume(stop_name, stop, resume_name, resume)
            if resume < 0:
                raise ValueError(f"{resume_name}={resume}: it must be at least 0")

    @classmethod
    def from_limits(
        cls, max_count: int = 0, max_size: int = 0, *, stop_percent: int = 80, resume_percent: int = 70
    ) -> StopResume:
        """Return the default thresholds for a queue (C4): percentages of its maximum, rounded down, at least 1.

        Args:
            max_count: maximum number of messages; 0 for no maximum.
            max_size: maximum body bytes; 0 for no maximum.
            stop_percent: stop threshold in percent of the maximum. If both percentages are 0, there are no thresholds.
            resume_percent: resume threshold in percent of the maximum.

        Returns:
            The thresholds. A dimension without a maximum has no thresholds.

        Raises:
            ValueError: a percentage is not from 0 to 100, `stop_percent` < `resume_percent`, or a maximum is negative.
        """
        for name, maximum in (("max_count", max_count), ("max_size", max_size)):
            if maximum < 0:
                raise ValueError(f"{name}={maximum}: it must be at least 0 (0 means no maximum)")
        for name, percent in (("stop_percent", stop_percent), ("resume_percent", resume_percent)):
            if not 0 <= percent <= 100:
                raise ValueError(f"{name}={percent}: it must be from 0 to 100")
        check_order("stop_percent", stop_percent, "resume_percent", resume_percent)
        if not stop_percent:
            return cls()

        def of(maximum: int, percent: int) -> int:
            return max(1, maximum * percent // 100) if maximum else 0

        return cls(
            of(max_count, stop_percent),
            of(max_count, resume_percent),
            of(max_size, stop_percent),
            of(max_size, resume_percent),
        )

    @property
    def is_set(self) -> bool:
        """Whether any threshold is set."""
        return self.stop_count > 0 or self.stop_size > 0

    def stops(self, count: int, size: int) -> bool:
        return 0 < self.stop_count < count or 0 < self.stop_size < size

    def resumes(self, count: int, size: int) -> bool:
        assert self.resume_count is not None
        assert self.resume_size is not None
        return (not self.stop_count or count < self.resume_count) and (not self.stop_size or size < self.resume_size)

    def holds_publisher(self, on: bool, count: int, size: int) -> bool:
        """Return True while the state is ON, because every publisher is held in this state."""
        return on


@dataclass(frozen=True, slots=True)
class Capacity:
    """The producer flow control of Qpid Java: ON above `capacity` bytes, OFF at `resume` bytes or below (J1 J2).

    Attributes:
        capacity: depth in body bytes above which the state is ON; 0 for no limit.
        resume: depth in body bytes at or below which the state is OFF (``flowResumeCapacity``). Default: `capacity`.

    Raises:
        ValueError: `resume` is above `capacity`, or a value is negative. The error text contains the invalid values.
    """

    capacity: int = 0
    resume: int | None = None

    def __post_init__(self) -> None:
        if self.capacity < 0:
            raise ValueError(f"capacity={self.capacity}: it must be at least 0 (0 means no maximum)")
        if self.resume is None:
            object.__setattr__(self, "resume", self.capacity)
        assert self.resume is not None
        check_capacity("capacity", self.capacity, "flow_resume_capacity", self.resume)

    @property
    def is_set(self) -> bool:
        """Whether the capacity is limited."""
        return self.capacity > 0

    def stops(self, count: int, size: int) -> bool:
        return 0 < self.capacity < size

    def resumes(self, count: int, size: int) -> bool:
        assert self.resume is not None
        return not self.capacity or size <= self.resume

    def holds_publisher(self, on: bool, count: int, size: int) -> bool:
        """Return True if the depth is above the capacity. Between the thresholds, no more publishers are held."""
        return self.stops(count, size)


class ThresholdLimiter(Limiter):
    """The depth and flow state of a queue. This limiter never refuses a message (F3).

    Args:
        count: initial depth in messages.
        size: initial depth in body bytes.
    """

    __slots__ = ("count", "on", "peak_count", "peak_size", "size", "thresholds", "times_on")

    def __init__(self, thresholds: Thresholds, *, count: int = 0, size: int = 0) -> None:
        #: The thresholds. Read-only; `change` replaces them.
        self.thresholds = thresholds
        #: The depth in messages.
        self.count = count
        #: The depth in body bytes.
        self.size = size
        #: The maximum depth so far, in messages.
        self.peak_count = count
        #: The maximum depth so far, in body bytes.
        self.peak_size = size
        #: Whether the flow state is ON (``flowStopped``, C7).
        self.on = False
        #: How often the state has changed from OFF to ON (``flowStoppedCount``, C7).
        self.times_on = 0
        self._look()

    def change(self, thresholds: Thresholds) -> None:
        """Replace the thresholds, and update the state immediately (D4).

        The caller then calls `FlowController.resume`, which unblocks the sources that may publish again.
        """
        self.thresholds = thresholds
        self._look()

    def _look(self) -> None:
        if self.on:
            self.on = not self.thresholds.resumes(self.count, self.size)
        elif self.thresholds.stops(self.count, self.size):
            self.on = True
            self.times_on += 1

    def refusal(self, size: int, now: float) -> str | None:
        return None

    def add(self, size: int, now: float) -> bool:
        self.count += 1
        self.size += size
        if self.count > self.peak_count:
            self.peak_count = self.count
        if self.size > self.peak_size:
            self.peak_size = self.size
        self._look()
        return self.thresholds.holds_publisher(self.on, self.count, self.size)

    def remove(self, size: int, count: int = 1) -> None:
        if count > self.count or size > self.size:
            raise ValueError(
                f"{count} messages of {size} bytes cannot leave a queue of {self.count} messages, {self.size} bytes"
            )
        self.count -= count
        self.size -= size
        self._look()

    @property
    def resumable(self) -> bool:
        """Whether the flow state is OFF."""
        return not self.on

    def ready_at(self, size: int, now: float) -> float | None:
        return now
