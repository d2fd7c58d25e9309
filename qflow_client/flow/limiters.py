"""Limiters: how much may be inside at once, or how much may pass in a time (F2).

A limiter only counts. Whom to stop and whose turn it is, is the controller's business. Sizes are 0 or more, in whatever
unit the caller chose (bytes, as a rule); times are in the caller's seconds, of a clock that does not go back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

__all__ = ["CompositeLimiter", "Limiter", "RateLimiter", "SizeLimiter", "WindowLimiter", "check_at_least_1"]


def check_at_least_1(name: str, value: float) -> None:
    """Refuse a limit that nothing could pass, or everything, with a `ValueError` that names it."""
    if not 1 <= value < math.inf:
        raise ValueError(f"{name} must be at least 1 and finite, not {value!r}")


class Limiter(ABC):
    """What a limit must answer.

    There are two ways to use one. *Strict*: `try_add`, which takes nothing that there is no room for; the limit is
    never passed. *Overflowing* (F3): `add` at once, stop the source if that returned True, and let it go on when
    `resumable`, or at the time that `resumes_at` names.
    """

    __slots__ = ()

    @abstractmethod
    def refusal(self, size: int, now: float) -> str | None:
        """Why an element may not enter now.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            The kind of the hold that it means; ``None`` if the element may enter.
        """

    @abstractmethod
    def add(self, size: int, now: float) -> bool:
        """Take an element in, whether or not there is room.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            True if it overflows, so that its source is to be stopped (F3).
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
        """Give back what elements had taken.

        Args:
            size: of all of them together.
            count: how many they are.

        Raises:
            ValueError: so much is not inside.
        """

    @property
    @abstractmethod
    def resumable(self) -> bool:
        """Whether sources that were stopped by an overflow may go on, as far as can be said without the time."""

    def resumes_at(self, now: float) -> float | None:
        """When time alone will let sources go on that were stopped by an overflow.

        Args:
            now: seconds.

        Returns:
            Seconds; `now` if they may go on at once, ``None`` if time alone never lets them.
        """
        return now if self.resumable else None

    @abstractmethod
    def ready_at(self, size: int, now: float) -> float | None:
        """When time alone will let an element in.

        Args:
            size: of the element.
            now: seconds.

        Returns:
            Seconds; `now` if it may enter at once, ``None`` if time alone never lets it.
        """


class WindowLimiter(Limiter):
    """At most `capacity` elements inside at once, whatever their size (F2 C6).

    Args:
        capacity: elements, at least 1.
        kind: of the hold that a full window means.

    Raises:
        ValueError: a capacity below 1.
    """

    __slots__ = ("_capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        self.capacity = capacity
        #: The kind of the hold that a full window means.
        self.kind = kind
        #: Elements inside.
        self.used = 0

    @property
    def capacity(self) -> int:
        """The most elements that may be inside. Settable: a lower one lets nothing in until enough has left.

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
        # Written out, because every send comes here.
        if self.used < self._capacity:
            self.used += 1
            return None
        return self.kind

    def remove(self, size: int, count: int = 1) -> None:
        if count > self.used:
            raise ValueError(f"{count} elements cannot leave a window that holds {self.used}")
        self.used -= count

    @property
    def resumable(self) -> bool:
        return self.used <= self._capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class SizeLimiter(Limiter):
    """Elements of together at most `capacity` inside at once; one that is larger than all of it enters alone (F2 C6).

    Args:
        capacity: in the unit of the sizes, at least 1.
        kind: of the hold that a full limiter means.

    Raises:
        ValueError: a capacity below 1.
    """

    __slots__ = ("_capacity", "kind", "used")

    def __init__(self, capacity: int, *, kind: str = "capacity") -> None:
        self.capacity = capacity
        #: The kind of the hold that a full limiter means.
        self.kind = kind
        #: The size of all that is inside.
        self.used = 0

    @property
    def capacity(self) -> int:
        """The most that may be inside. Settable: a lower one lets nothing in until enough has left.

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
            raise ValueError(f"a size of {size} cannot leave a limiter that holds {self.used}")
        self.used -= size

    @property
    def resumable(self) -> bool:
        return self.used <= self._capacity

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class RateLimiter(Limiter):
    """At most `rate` elements a second on average, and `burst` of them at once (F2 F6).

    It is the generic cell rate algorithm (ITU-T I.371): one number decides, the time at which the bucket will be full
    again, and the time at which the next element may pass is known exactly. What passes too soon (F3) is owed, and its
    source may go on once nothing is owed.

    Args:
        rate: elements per second, or size per second if `by_size`; more than 0.
        burst: how much may pass at once after a rest, in elements or, if `by_size`, in size; at least 1.
        by_size: let an element cost its size instead of one. One that costs more than `burst` passes when the bucket is
            full, and what it costs is then owed.
        kind: of the hold that an empty bucket means.

    Raises:
        ValueError: a rate or a burst that is not allowed.
    """

    __slots__ = ("_at", "_burst", "_full_at", "_rate", "by_size", "kind")

    def __init__(self, rate: float, *, burst: float = 1, by_size: bool = False, kind: str = "rate") -> None:
        #: Whether an element costs its size instead of one.
        self.by_size = by_size
        #: The kind of the hold that an empty bucket means.
        self.kind = kind
        # When all that was spent has been regained; in the past after a rest.
        self._full_at = -math.inf
        # When the last element passed.
        self._at = -math.inf
        self._rate, self._burst = rate, burst
        # Checked there.
        self.rate, self.burst = rate, burst

    @property
    def rate(self) -> float:
        """What may pass per second. Settable: a new one counts from the last element on, and what is owed is kept.

        Raises:
            ValueError: set to 0 or less, or to what is not finite.
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
        """What may pass at once after a rest. Settable: what the bucket held, up to the new size, and owed is kept.

        Raises:
            ValueError: set to less than 1, or to what is not finite.
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
        """How much the bucket was short of full when the last element had passed."""
        return (self._full_at - self._at) * self._rate if self._full_at > self._at else 0.0

    @property
    def _even_at(self) -> float:
        """When nothing is owed."""
        return self._full_at - self._burst / self._rate

    def _passes_at(self, size: int) -> float:
        cost = min(size, self._burst) if self.by_size else 1
        return self._full_at - (self._burst - cost) / self._rate

    def refusal(self, size: int, now: float) -> str | None:
        return None if now >= self._passes_at(size) else self.kind

    def add(self, size: int, now: float) -> bool:
        overflows = now < self._passes_at(size)
        # Who read the clock first does not always come first.
        if now > self._at:
            self._at = now
        full_at = self._full_at
        self._full_at = (full_at if full_at > now else now) + (size if self.by_size else 1) / self._rate
        return overflows

    def remove(self, size: int, count: int = 1) -> None:
        """Nothing: what has passed has passed."""

    @property
    def resumable(self) -> bool:
        """Whether nothing was owed when the last element passed."""
        return self._even_at <= self._at

    def resumes_at(self, now: float) -> float | None:
        return max(now, self._even_at)

    def ready_at(self, size: int, now: float) -> float | None:
        return max(now, self._passes_at(size))


class CompositeLimiter(Limiter):
    """Several limiters that must all agree (F2).

    Args:
        parts: the limiters; the first that refuses says why.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Limiter]) -> None:
        #: The limiters, in the order in which they are asked.
        self.parts = tuple(parts)

    def refusal(self, size: int, now: float) -> str | None:
        for part in self.parts:
            kind = part.refusal(size, now)
            if kind is not None:
                return kind
        return None

    def add(self, size: int, now: float) -> bool:
        overflows = False
        # Every part must count it, so no short cut.
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
