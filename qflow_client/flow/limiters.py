"""Limiters: how much may be inside at the same time, or how much may pass per second (F2).

A limiter only counts. The controller decides which source to stop and which element is next. Sizes are 0 or more, in
any unit that the caller chooses (usually bytes). Times are in seconds of the caller's clock, which must not go back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

__all__ = ["CompositeLimiter", "Limiter", "RateLimiter", "SizeLimiter", "WindowLimiter", "check_at_least_1"]


def check_at_least_1(name: str, value: float) -> None:
    """Reject a limit below 1 that is not a finite number with a `ValueError` that names it."""
    if not 1 <= value < math.inf:
        raise ValueError(f"{name} must be at least 1 and finite, not {value!r}")


class Limiter(ABC):
    """The interface of a limit.

    There are two ways to use a limiter. *Strict*: `try_add` takes no element without room, so the limit is never
    exceeded. *Overflowing* (F3): call `add` immediately, and stop the source if it returns True. Let the source
    continue when `resumable` is true, or at the time that `resumes_at` returns.
    """

    __slots__ = ()

    @abstractmethod
    def refusal(self, size: int, now: float) -> str | None:
        """Return why an element may not enter now.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            The kind of the hold for this reason; ``None`` if the element may enter.
        """

    @abstractmethod
    def add(self, size: int, now: float) -> bool:
        """Take an element in, even if there is no room.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            True if it overflows, so that its source has to be stopped (F3).
        """

    def try_add(self, size: int, now: float) -> str | None:
        """Call `refusal`, and then `add` if the element may enter. An element enters completely or not at all.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            ``None`` if the element is inside now. Otherwise the kind of the hold, and nothing has changed.
        """
        kind = self.refusal(size, now)
        if kind is None:
            self.add(size, now)
        return kind

    @abstractmethod
    def remove(self, size: int, count: int = 1) -> None:
        """Give back the room of elements.

        Args:
            size: the total size of the elements.
            count: the number of elements.

        Raises:
            ValueError: less than that is inside.
        """

    @property
    @abstractmethod
    def resumable(self) -> bool:
        """Whether sources that an overflow stopped may continue. The current time is not considered."""

    def resumes_at(self, now: float) -> float | None:
        """Return when time alone will let stopped sources continue after an overflow.

        Args:
            now: seconds.

        Returns:
            Seconds; `now` if they may continue immediately, ``None`` if time alone changes nothing.
        """
        return now if self.resumable else None

    @abstractmethod
    def ready_at(self, size: int, now: float) -> float | None:
        """Return when time alone will let an element enter.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            Seconds; `now` if it may enter immediately, ``None`` if time alone changes nothing.
        """


class WindowLimiter(Limiter):
    """Limits the elements inside to `capacity`, whatever their size (F2 C6).

    Args:
        capacity: elements, at least 1.
        kind: the kind of the hold for a full window.

    Raises:
        ValueError: a capacity below 1.
    """

    __slots__ = ("_capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        self.capacity = capacity
        #: The kind of the hold for a full window.
        self.kind = kind
        #: Elements inside.
        self.used = 0

    @property
    def capacity(self) -> int:
        """The most elements that may be inside. If it is set lower, no element enters until enough have left.

        Raises:
            ValueError: set to less than 1.
        """
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        check_at_least_1("capacity", capacity)
        self._capacity = capacity

    def refusal(self, size: int, now: float) -> str | None:
        return None if self.used < self._capacity else self.kind

    def add(self, size: int, now: float) -> bool:
        self.used += 1
        return self.used > self._capacity

    def try_add(self, size: int, now: float) -> str | None:
        # Inlined for speed, because every send calls this.
        if self.used < self._capacity:
            self.used += 1
            return None
        return self.kind

    def remove(self, size: int, count: int = 1) -> None:
        if count > self.used:
            raise ValueError(f"{count} elements cannot leave a window with {self.used} elements")
        self.used -= count

    @property
    def resumable(self) -> bool:
        return self.used <= self._capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class SizeLimiter(Limiter):
    """Limits the total size of the elements inside to `capacity`. A larger element enters alone (F2 C6).

    Args:
        capacity: the limit in the unit of the sizes, at least 1.
        kind: the kind of the hold for a full limiter.

    Raises:
        ValueError: a capacity below 1.
    """

    __slots__ = ("_capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        self.capacity = capacity
        #: The kind of the hold for a full limiter.
        self.kind = kind
        #: The total size of the elements inside.
        self.used = 0

    @property
    def capacity(self) -> int:
        """The largest total size inside. If it is set lower, no element enters until enough has left.

        Raises:
            ValueError: set to less than 1.
        """
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        check_at_least_1("capacity", capacity)
        self._capacity = capacity

    def refusal(self, size: int, now: float) -> str | None:
        return None if self.used + size <= self._capacity or not self.used else self.kind

    def add(self, size: int, now: float) -> bool:
        self.used += size
        return self.used > self._capacity

    def remove(self, size: int, count: int = 1) -> None:
        if size > self.used:
            raise ValueError(f"a size of {size} cannot leave a limiter that contains {self.used}")
        self.used -= size

    @property
    def resumable(self) -> bool:
        return self.used <= self._capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class RateLimiter(Limiter):
    """Limits elements to `rate` per second on average, and to `burst` without a pause (F2 F6).

    It uses the generic cell rate algorithm (ITU-T I.371). Its only state is the time at which the bucket will be full
    again, so the time at which the next element may pass is known exactly. If an element passes too soon (F3), its cost
    is a debt. Its source may continue when there is no debt.

    Args:
        rate: elements per second, or size per second if `by_size`; more than 0.
        burst: number of elements (size if `by_size`) that may pass without a pause after an idle time; at least 1.
        by_size: True if the cost of an element is its size, False if it is 1. An element that costs more than `burst`
            passes when the bucket is full, and its cost is a debt then.
        kind: the kind of the hold for an empty bucket.

    Raises:
        ValueError: a rate or a burst that is not allowed.
    """

    __slots__ = ("_at", "_burst", "_full_at", "_rate", "by_size", "kind")

    def __init__(self, rate: float, *, burst: float = 1, by_size: bool = False, kind: str = "rate") -> None:
        #: Whether the cost of an element is its size instead of 1.
        self.by_size = by_size
        #: The kind of the hold for an empty bucket.
        self.kind = kind
        # When the bucket is full again; in the past after a rest.
        self._full_at = -math.inf
        # When the last element passed.
        self._at = -math.inf
        self._rate, self._burst = rate, burst
        # The setters check the values.
        self.rate, self.burst = rate, burst

    @property
    def rate(self) -> float:
        """How much may pass per second. A new rate applies from the last element on, and a debt stays.

        Raises:
            ValueError: set to 0 or less, or to a value that is not finite.
        """
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be more than 0 per second and finite, not {rate!r}")
        lacked = self._lacked
        self._rate = rate
        self._full_at = self._at + lacked / rate

    @property
    def burst(self) -> float:
        """How much may pass without a pause after an idle time.

        If it is changed, the content of the bucket (up to the new size) and a debt stay.

        Raises:
            ValueError: set to less than 1, or to a value that is not finite.
        """
        return self._burst

    @burst.setter
    def burst(self, burst: float) -> None:
        check_at_least_1("burst", burst)
        lacked = max(0.0, self._lacked + burst - self._burst)
        self._burst = burst
        self._full_at = self._at + lacked / self._rate

    @property
    def _lacked(self) -> float:
        """How far the bucket was from full after the last element had passed."""
        return (self._full_at - self._at) * self._rate if self._full_at > self._at else 0.0

    @property
    def _even_at(self) -> float:
        """The time when there is no debt any more."""
        return self._full_at - self._burst / self._rate

    def _passes_at(self, size: int) -> float:
        cost = min(size, self._burst) if self.by_size else 1
        return self._full_at - (self._burst - cost) / self._rate

    def refusal(self, size: int, now: float) -> str | None:
        return None if now >= self._passes_at(size) else self.kind

    def add(self, size: int, now: float) -> bool:
        overflows = now < self._passes_at(size)
        # A caller that read the clock earlier may come later.
        if now > self._at:
            self._at = now
        full_at = self._full_at
        self._full_at = (full_at if full_at > now else now) + (size if self.by_size else 1) / self._rate
        return overflows

    def remove(self, size: int, count: int = 1) -> None:
        """Do nothing: a rate does not depend on elements that leave."""

    @property
    def resumable(self) -> bool:
        """Whether there was no debt when the last element passed."""
        return self._even_at <= self._at

    def resumes_at(self, now: float) -> float | None:
        return max(now, self._even_at)

    def ready_at(self, size: int, now: float) -> float | None:
        return max(now, self._passes_at(size))


class CompositeLimiter(Limiter):
    """Combines several limiters: an element enters if all of them let it in (F2).

    Args:
        parts: the limiters; the first that refuses an element gives the reason.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Limiter]) -> None:
        #: The limiters, in the order in which they are checked.
        self.parts = tuple(parts)

    def refusal(self, size: int, now: float) -> str | None:
        for part in self.parts:
            kind = part.refusal(size, now)
            if kind is not None:
                return kind
        return None

    def add(self, size: int, now: float) -> bool:
        overflows = False
        # Every part must count the element, so there is no short cut.
        for part in self.parts:
            if part.add(size, now):
                overflows = True
        return overflows

    def remove(self, size: int, count: int = 1) -> None:
        for part in self.parts:
            part.remove(size, count)

    @property
    def resumable(self) -> bool:
        return all(part.resumable for part in self.parts)

    def resumes_at(self, now: float) -> float | None:
        return _latest(now, (part.resumes_at(now) for part in self.parts))

    def ready_at(self, size: int, now: float) -> float | None:
        return _latest(now, (part.ready_at(size, now) for part in self.parts))


def _latest(now: float, times: Iterable[float | None]) -> float | None:
    latest = now
    for at in times:
        if at is None:
            return None
        latest = max(latest, at)
    return latest
