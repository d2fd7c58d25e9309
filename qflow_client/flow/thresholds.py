"""The thresholds of a queue's flow state, in two forms that follow their sources.

* `StopResume` is Qpid C++'s (C1-C4): ON above a stop threshold, OFF below every resume threshold.
* `Capacity` is Qpid Java's (J1 J2): ON above a capacity in bytes, OFF at a resume capacity or below.

Between the thresholds the state does not change. Both forms are immutable values. `ThresholdLimiter` has the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qflow_client.flow.limiters import Limiter

__all__ = ["Capacity", "StopResume", "ThresholdLimiter", "Thresholds"]


class Thresholds(Protocol):
    """A pair of thresholds for a queue's depth. `count` is in messages, `size` in body bytes."""

    def stops(self, count: int, size: int) -> bool:
        """Whether a flow state that was OFF becomes ON at this depth."""

    def resumes(self, count: int, size: int) -> bool:
        """Whether a flow state that was ON becomes OFF at this depth; never at a depth at which `stops` is true."""

    def holds_publisher(self, on: bool, count: int, size: int) -> bool:
        """Whether the publisher of the message that led to this depth is held.

        Args:
            on: the flow state with that message.
            count: messages.
            size: body bytes.
        """


def _refused(stop_name: str, stop: int, resume_name: str, resume: int, why: str) -> ValueError:
    return ValueError(f"{stop_name}={stop} and {resume_name}={resume}: {why}")


@dataclass(frozen=True, slots=True)
class StopResume:
    """Qpid C++'s flow thresholds: strictly above a stop is ON, strictly below every resume is OFF (C1 C2).

    A dimension (count or size) whose stop is 0 is ignored. If both are 0, flow control is off for the queue.

    Attributes:
        stop_count: messages; the state becomes ON when there are more.
        resume_count: messages; the state can become OFF when there are fewer. ``None`` means 7/8 of the stop, rounded
            down, at least 1.
        stop_size: body bytes; the state becomes ON when there are more.
        resume_size: body bytes; as `resume_count`.

    Raises:
        ValueError: a stop below its resume, or a resume below 1 under a stop above 0; the text contains both values.
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
            if stop < resume:
                raise _refused(stop_name, stop, resume_name, resume, "the stop threshold must not be below the resume")
            if stop > 0 and resume < 1:
                raise _refused(
                    stop_name,
                    stop,
                    resume_name,
                    resume,
                    "the resume threshold must be at least 1, or it is never reached",
                )

    @classmethod
    def from_limits(
        cls, max_count: int = 0, max_size: int = 0, *, stop_percent: int = 80, resume_percent: int = 70
    ) -> StopResume:
        """The default thresholds of a queue with a maximum (C4): percentages of it, rounded down, at least 1.

        Args:
            max_count: messages; 0 for no maximum.
            max_size: body bytes; 0 for no maximum.
            stop_percent: of the maximum, for the stop; 0 together with `resume_percent` 0 sets no thresholds.
            resume_percent: of the maximum, for the resume.

        Returns:
            The thresholds; none for a dimension without a maximum.

        Raises:
            ValueError: a percentage outside 0 to 100, a stop below the resume, or a negative maximum.
        """
        for name, maximum in (("max_count", max_count), ("max_size", max_size)):
            if maximum < 0:
                raise ValueError(f"{name}={maximum}: it must be at least 0 (0 means no maximum)")
        for name, percent in (("stop_percent", stop_percent), ("resume_percent", resume_percent)):
            if not 0 <= percent <= 100:
                raise ValueError(f"{name}={percent}: it must be from 0 to 100")
        if stop_percent < resume_percent:
            raise _refused(
                "stop_percent", stop_percent, "resume_percent", resume_percent, "the stop must not be below the resume"
            )
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
        """Return True while the state is ON: every publisher is held then."""
        return on


@dataclass(frozen=True, slots=True)
class Capacity:
    """Qpid Java's producer flow control: ON above `capacity` bytes, OFF at `resume` bytes or below (J1 J2).

    Attributes:
        capacity: body bytes; 0 for no maximum.
        resume: body bytes (Qpid's ``flowResumeCapacity``); ``None`` means the capacity.

    Raises:
        ValueError: a resume above the capacity, or a negative value; the text contains both values.
    """

    capacity: int = 0
    resume: int | None = None

    def __post_init__(self) -> None:
        if self.capacity < 0:
            raise ValueError(f"capacity={self.capacity}: it must be at least 0 (0 means no maximum)")
        if self.resume is None:
            object.__setattr__(self, "resume", self.capacity)
        assert self.resume is not None
        if not 0 <= self.resume <= self.capacity:
            raise _refused(
                "capacity",
                self.capacity,
                "flow_resume_capacity",
                self.resume,
                "the resume capacity must be from 0 to the capacity",
            )

    @property
    def is_set(self) -> bool:
        """Whether any threshold is set."""
        return self.capacity > 0

    def stops(self, count: int, size: int) -> bool:
        return 0 < self.capacity < size

    def resumes(self, count: int, size: int) -> bool:
        assert self.resume is not None
        return not self.capacity or size <= self.resume

    def holds_publisher(self, on: bool, count: int, size: int) -> bool:
        """Return True only if the message exceeds the capacity. Publishers between the thresholds are not held."""
        return self.stops(count, size)


class ThresholdLimiter(Limiter):
    """A queue's depth and flow state, as a limiter that overflows (F3) and never refuses an element.

    Args:
        thresholds: the thresholds.
        count: messages that are in the queue already.
        size: their body bytes.
    """

    __slots__ = ("count", "on", "peak_count", "peak_size", "size", "thresholds", "times_on")

    def __init__(self, thresholds: Thresholds, *, count: int = 0, size: int = 0) -> None:
        #: The present thresholds. Read-only; use `change` to replace them.
        self.thresholds = thresholds
        #: The depth in messages.
        self.count = count
        #: The depth in body bytes.
        self.size = size
        #: The highest depth so far, in messages.
        self.peak_count = count
        #: The highest depth so far, in body bytes.
        self.peak_size = size
        #: The flow state (C7: ``flowStopped``).
        self.on = False
        #: How often the state went from OFF to ON (C7: ``flowStoppedCount``).
        self.times_on = 0
        self._look()

    def change(self, thresholds: Thresholds) -> None:
        """Replace the thresholds. The state changes immediately if necessary (D4).

        Call `FlowController.resume` next, to unblock the sources that may continue.

        Args:
            thresholds: the new thresholds.
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
        """Whether the state is OFF."""
        return not self.on

    def ready_at(self, size: int, now: float) -> float | None:
        return now
