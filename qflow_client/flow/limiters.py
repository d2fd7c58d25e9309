"""Limiters limit how many elements are inside (admitted and not yet released), or how many enter per second (F2).

A limiter counts elements or their sizes. The controller decides which source to block and which element is next. Sizes
are 0 or more, in a unit that the caller chooses (usually bytes). Times are in seconds of the caller's monotonic clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

__all__ = ["CompositeLimiter", "Limiter", "RateLimiter", "SizeLimiter", "WindowLimiter", "check_at_least_1"]


def check_at_least_1(name: str, value: float) -> None:
    """Raise a `ValueError` with the name of a limit if its value is below 1 or not finite."""
    if not 1 <= value < math.inf:
        raise ValueError(f"{name} must be at least 1 and finite, not {value!r}")


class Limiter(ABC):
    """The interface of all limiters.

    There are two ways to use a limiter. *Strict*: `try_add` admits an element only if there is room, so the limit is
    never exceeded. *Overflowing* (F3): `add` admits every element. If its result is True, the caller stops the source.
    The source can continue when `resumable` is true, or at the time that `resumes_at` returns.
    """

    __slots__ = ()

    @abstractmethod
    def refusal(self, size: int, now: float) -> str | None:
        """Return the reason why an element is not allowed to enter now.

        Returns:
            The kind of the hold for this reason; ``None`` if the element is allowed to enter.
        """

    @abstractmethod
    def add(self, size: int, now: float) -> bool:
        """Admit an element even if there is no room.

        Returns:
            True if the limit is exceeded. Then the source of the element has to be stopped (F3).
        """

    def try_add(self, size: int, now: float) -> str | None:
        """Admit an element if there is room.

        Returns:
            ``None`` if the element was admitted. Otherwise the kind of the hold, as from `refusal`.
        """
        kind = self.refusal(size, now)
        if kind is None:
            self.add(size, now)
        return kind

    @abstractmethod
    def remove(self, size: int, count: int = 1) -> None:
        """Release the room of elements that leave.

        Args:
            size: the total size of the elements.
            count: the number of elements.

        Raises:
            ValueError: fewer than `count` elements are inside, or their total size is less than `size`.
        """

    @property
    @abstractmethod
    def resumable(self) -> bool:
        """Whether sources that were stopped after an overflow can continue. The current time is not considered."""

    def resumes_at(self, now: float) -> float | None:
        """Return the time at which stopped sources can continue if nothing else happens.

        Returns:
            Seconds. `now` if stopped sources can continue immediately; ``None`` if time alone changes nothing.
        """
        return now if self.resumable else None

    @abstractmethod
    def ready_at(self, size: int, now: float) -> float | None:
        """Return the time at which an element can enter if nothing else happens.

        Returns:
            Seconds; `now` if the element can enter immediately; ``None`` if time alone does not make room for it.
        """


class _CapacityLimiter(Limiter):
    """Limits the number of elements inside, or their total size, to `capacity`."""

    __slots__ = ("_capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        self.capacity = capacity
        #: Kind of the hold while the limiter is full.
        self.kind = kind
        #: Number of elements inside, or their total size.
        self.used = 0

    @property
    def capacity(self) -> int:
        """The maximum of `used`. After a reduction, `try_add` admits no element until enough elements have left.

        Raises:
            ValueError: the new value is below 1.
        """
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        check_at_least_1("capacity", capacity)
        self._capacity = capacity

    @property
    def resumable(self) -> bool:
        return self.used <= self._capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class WindowLimiter(_CapacityLimiter):
    """Allows at most `capacity` elements to be inside at the same time. Their sizes do not matter (F2 C6).

    Args:
        capacity: maximum number of elements, at least 1.
        kind: kind of the hold while the window is full.

    Raises:
        ValueError: the capacity is below 1.
    """

    __slots__ = ()

    def refusal(self, size: int, now: float) -> str | None:
        return None if self.used < self._capacity else self.kind

    def add(self, size: int, now: float) -> bool:
        self.used += 1
        return self.used > self._capacity

    def try_add(self, size: int, now: float) -> str | None:
        # `refusal` and `add` are inlined for speed, because `try_acquire` calls this method for each element.
        if self.used < self._capacity:
            self.used += 1
            return None
        return self.kind

    def remove(self, size: int, count: int = 1) -> None:
        if count > self.used:
            raise ValueError(f"{count} elements cannot leave a window with {self.used} elements")
        self.used -= count


class SizeLimiter(_CapacityLimiter):
    """Limits the total size of the elements inside (F2 C6). `try_add` admits a larger one only if nothing is inside.

    Args:
        capacity: maximum total size, at least 1.
        kind: kind of the hold while the limiter is full.

    Raises:
        ValueError: the capacity is below 1.
    """

    __slots__ = ()

    def refusal(self, size: int, now: float) -> str | None:
        return None if self.used + size <= self._capacity or not self.used else self.kind

    def add(self, size: int, now: float) -> bool:
        self.used += size
        return self.used > self._capacity

    def remove(self, size: int, count: int = 1) -> None:
        if size > self.used:
            raise ValueError(f"a size of {size} cannot leave a limiter that contains {self.used}")
        self.used -= size


class RateLimiter(Limiter):
    """Limits elements to `rate` per second on average, and to `burst` elements without a pause (F2 F6).

    The limiter works like a bucket that fills at `rate`, up to `burst`. Each element takes its cost out of the bucket.
    The limiter stores the time when the bucket will be full, as the generic cell rate algorithm does (ITU-T I.371). If
    an element passes too early (F3), the missing part of its cost is a debt. The source waits until the debt is 0.

    Args:
        rate: elements per second, or size per second if `by_size`; more than 0.
        burst: number of elements (or total size if `by_size`) that pass without a pause after an idle time; at least 1.
        by_size: whether the cost of an element is its size. Otherwise the cost is 1. An element that costs more than
            `burst` passes when the bucket is full, and leaves a debt.
        kind: kind of the hold while the bucket has too little for the next element.

    Raises:
        ValueError: the rate is 0, negative or not finite, or the burst is below 1 or not finite.
    """

    __slots__ = ("_at", "_burst", "_full_at", "_rate", "by_size", "kind")

    def __init__(self, rate: float, *, burst: float = 1, by_size: bool = False, kind: str = "rate") -> None:
        #: Whether the cost of an element is its size. Otherwise the cost is 1.
        self.by_size = by_size
        #: Kind of the hold while the bucket has too little for the next element.
        self.kind = kind
        # When the bucket is full again. The time is in the past if the bucket is full.
        self._full_at = -math.inf
        # When the last element passed.
        self._at = -math.inf
        self._rate, self._burst = rate, burst
        # The setters check the values.
        self.rate, self.burst = rate, burst

    @property
    def rate(self) -> float:
        """Elements (or size) per second. A new rate applies to the time since the last element. A debt stays the same.

        Raises:
            ValueError: the new value is 0, negative or not finite.
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
        """Number of elements, or their total size, that can pass without a pause after an idle time.

        After a change, the bucket keeps its content, up to the new size. A debt stays the same.

        Raises:
            ValueError: the new value is below 1, or not finite.
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
        """How much was missing in the bucket after the last element."""
        return (self._full_at - self._at) * self._rate if self._full_at > self._at else 0.0

    @property
    def _even_at(self) -> float:
        """The time at which the debt is 0."""
        return self._full_at - self._burst / self._rate

    def _passes_at(self, size: int) -> float:
        cost = min(size, self._burst) if self.by_size else 1
        return self._full_at - (self._burst - cost) / self._rate

    def refusal(self, size: int, now: float) -> str | None:
        return None if now >= self._passes_at(size) else self.kind

    def add(self, size: int, now: float) -> bool:
        overflows = now < self._passes_at(size)
        # `now` can be earlier than in the previous call, if this caller read the clock before that call.
        if now > self._at:
            self._at = now
        full_at = self._full_at
        self._full_at = (full_at if full_at > now else now) + (size if self.by_size else 1) / self._rate
        return overflows

    def remove(self, size: int, count: int = 1) -> None:
        """Do nothing, because a rate does not depend on elements that leave."""

    @property
    def resumable(self) -> bool:
        """Whether the last element left no debt."""
        return self._even_at <= self._at

    def resumes_at(self, now: float) -> float | None:
        return max(now, self._even_at)

    def ready_at(self, size: int, now: float) -> float | None:
        return max(now, self._passes_at(size))


class CompositeLimiter(Limiter):
    """Combines several limiters. An element enters if every limiter has room for it (F2).

    Args:
        parts: the limiters. If several limiters refuse an element, the first of them gives the reason.
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
        # Do not stop at the first True, because every part must count the element.
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
