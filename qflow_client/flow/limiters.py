"""Limiters: how much may be inside at once, or how much may pass in a time (F2).

A limiter only counts. Whom to stop and whose turn it is, is the controller's business. Sizes are in whatever unit the
caller chose (bytes, as a rule), times in the caller's seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

__all__ = ["CompositeLimiter", "Limiter", "RateLimiter", "SizeLimiter", "WindowLimiter"]


class Limiter(ABC):
    """What a limit must answer.

    There are two ways to use one. *Strict*: `try_add`, which takes nothing that there is no room for; the limit is
    never passed. *Overflowing* (F3): `add` at once, stop the source if that returned True, and let it go on when
    `resumable`.
    """

    __slots__ = ()

    @abstractmethod
    def refusal(self, size: int, now: float) -> str | None:
        """Why an element of this size may not enter now, as the kind of the hold it means; ``None`` if it may."""

    @abstractmethod
    def add(self, size: int, now: float) -> bool:
        """Take an element in, whether or not there is room.

        Returns:
            True if it overflows, so that its source is to be stopped.
        """

    def try_add(self, size: int, now: float) -> str | None:
        """`refusal`, and `add` if nothing refuses, in one call: all of it or nothing.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            ``None`` if the element is inside now; otherwise the kind of the hold, and nothing has changed.
        """
        kind = self.refusal(size, now)
        if kind is None:
            self.add(size, now)
        return kind

    @abstractmethod
    def remove(self, size: int, count: int = 1) -> None:
        """Give back what `count` elements of together `size` had taken."""

    @property
    @abstractmethod
    def resumable(self) -> bool:
        """Whether sources that were stopped by an overflow may go on."""

    @abstractmethod
    def ready_at(self, size: int, now: float) -> float | None:
        """When time alone will let an element of this size in: `now` if at once, ``None`` if time alone never will."""


class WindowLimiter(Limiter):
    """At most `capacity` elements inside at once, whatever their size."""

    __slots__ = ("capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 element, not {capacity!r}")
        # Settable: a lower one lets nothing in until enough has left.
        self.capacity = capacity
        self.kind = kind
        self.used = 0

    def refusal(self, size: int, now: float) -> str | None:
        return None if self.used < self.capacity else self.kind

    def add(self, size: int, now: float) -> bool:
        self.used += 1
        return self.used > self.capacity

    def try_add(self, size: int, now: float) -> str | None:
        # Written out, because every send comes here.
        if self.used < self.capacity:
            self.used += 1
            return None
        return self.kind

    def remove(self, size: int, count: int = 1) -> None:
        if count > self.used:
            raise ValueError(f"{count} elements cannot leave a window that holds {self.used}")
        self.used -= count

    @property
    def resumable(self) -> bool:
        return self.used <= self.capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.used < self.capacity else None


class SizeLimiter(Limiter):
    """Elements of together at most `capacity` inside at once; one that is larger than all of it enters alone."""

    __slots__ = ("capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be a size of at least 1, not {capacity!r}")
        # Settable: a lower one lets nothing in until enough has left.
        self.capacity = capacity
        self.kind = kind
        self.used = 0

    def refusal(self, size: int, now: float) -> str | None:
        return None if self.used + size <= self.capacity or not self.used else self.kind

    def add(self, size: int, now: float) -> bool:
        self.used += size
        return self.used > self.capacity

    def remove(self, size: int, count: int = 1) -> None:
        if size > self.used:
            raise ValueError(f"a size of {size} cannot leave a limiter that holds {self.used}")
        self.used -= size

    @property
    def resumable(self) -> bool:
        return self.used <= self.capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class RateLimiter(Limiter):
    """At most `rate` elements a second on average, and `burst` of them at once.

    It is the generic cell rate algorithm (ITU-T I.371): one number, the time at which the bucket will be full again,
    is all the state there is, and the time at which the next element may pass is known exactly.

    Args:
        rate: elements per second, or size per second if `by_size`.
        burst: how much may pass at once after a rest, in elements or, if `by_size`, in size.
        by_size: let an element cost its size instead of one. One that costs more than `burst` passes when the bucket is
            full, and what it costs is then owed.
    """

    __slots__ = ("_full_at", "burst", "by_size", "kind", "rate")

    def __init__(self, rate: float, *, burst: float = 1, by_size: bool = False, kind: str = "rate") -> None:
        if not rate > 0:
            raise ValueError(f"rate must be more than 0 per second, not {rate!r}")
        if not burst >= 1:
            raise ValueError(f"burst must be at least 1, not {burst!r}")
        self.rate = rate
        self.burst = burst
        self.by_size = by_size
        self.kind = kind
        # When all that was spent has been regained; in the past after a rest.
        self._full_at = float("-inf")

    def _passes_at(self, size: int) -> float:
        cost = min(size, self.burst) if self.by_size else 1
        return self._full_at - (self.burst - cost) / self.rate

    def refusal(self, size: int, now: float) -> str | None:
        return None if now >= self._passes_at(size) else self.kind

    def add(self, size: int, now: float) -> bool:
        overflows = now < self._passes_at(size)
        self._full_at = max(self._full_at, now) + (size if self.by_size else 1) / self.rate
        return overflows

    def remove(self, size: int, count: int = 1) -> None:
        """Nothing: what has passed has passed."""

    @property
    def resumable(self) -> bool:
        """Always: a source that is stopped by a rate waits for `ready_at`."""
        return True

    def ready_at(self, size: int, now: float) -> float | None:
        return max(now, self._passes_at(size))


class CompositeLimiter(Limiter):
    """Several limiters that must all agree."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Limiter]) -> None:
        self.parts = tuple(parts)

    def refusal(self, size: int, now: float) -> str | None:
        for part in self.parts:
            kind = part.refusal(size, now)
            if kind is not None:
                return kind
        return None

    def add(self, size: int, now: float) -> bool:
        # Every part must count it, so no short cut.
        overflows = [part.add(size, now) for part in self.parts]
        return any(overflows)

    def remove(self, size: int, count: int = 1) -> None:
        for part in self.parts:
            part.remove(size, count)

    @property
    def resumable(self) -> bool:
        return all(part.resumable for part in self.parts)

    def ready_at(self, size: int, now: float) -> float | None:
        latest = now
        for part in self.parts:
            at = part.ready_at(size, now)
            if at is None:
                return None
            latest = max(latest, at)
        return latest
