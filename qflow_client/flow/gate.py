"""The gate: open exactly when nobody holds it.

A gate decides one thing, whether something may pass *now*, from the set of *holds* that are on it. Every hold has a
kind (why) and a source (who), so that two reasons, or two sources with the same reason, never lift each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Gate", "Hold"]


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason for which a gate is closed.

    Attributes:
        kind: why, as one word, such as ``"paused"``.
        since: when it was raised, in the seconds of the clock that the caller uses.
        source: who raised it; a second hold of the same kind from another source is a hold of its own.
        detail: what the source said, for people to read.
    """

    kind: str
    since: float
    source: str = ""
    detail: str = ""

    def __str__(self) -> str:
        words = ": ".join(filter(None, (self.source, self.detail)))
        return f"{self.kind} ({words})" if words else str(self.kind)


class Gate:
    """A set of holds; open exactly when it is empty.

    Neither thread-safe nor tied to a clock: the caller guards it and says what time it is.
    """

    __slots__ = ("_closed_at", "_held_for", "_holds", "is_open", "is_shut", "observer", "times_closed")

    def __init__(self) -> None:
        # In the order in which they were raised.
        self._holds: dict[tuple[str, str], Hold] = {}
        # Seconds that each kind has held, for holds that are over.
        self._held_for: dict[str, float] = {}
        # Since when there are holds; the first of them may be gone while later ones stay. None while there is none.
        self._closed_at: float | None = None
        #: True exactly when there is no hold, and it is not shut. Only to be read; a plain attribute, because a hot
        #: path does.
        self.is_open = True
        #: Whether it was shut for good. Only to be read.
        self.is_shut = False
        #: How often the first hold came.
        self.times_closed = 0
        #: Called with every hold that is raised (``True``) or lifted (``False``), after the fact, and when; ``None`` if
        #: nobody wants to know. It must not raise, nor call a controller of this gate.
        self.observer: Callable[[Hold, bool, float], object] | None = None

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The present holds, the oldest first."""
        return tuple(self._holds.values())

    @property
    def closed_since(self) -> float | None:
        """Since when there are holds, in the caller's seconds; ``None`` while there is none."""
        return self._closed_at

    def hold(self, kind: str, *, now: float, source: str = "", detail: str = "") -> bool:
        """Raise a hold. A hold that is already there stays as it is.

        Args:
            kind: why, as one word.
            now: seconds.
            source: who raises it, and alone can lift it.
            detail: for people to read.

        Returns:
            True if it is new.
        """
        key = (kind, source)
        if key in self._holds:
            return False
        hold = self._holds[key] = Hold(kind, now, source, detail)
        self.is_open = False
        if self._closed_at is None:
            self.times_closed += 1
            self._closed_at = now
        if self.observer is not None:
            self.observer(hold, True, now)
        return True

    def lift(self, kind: str, *, now: float, source: str = "") -> Hold | None:
        """Lift a hold.

        Args:
            kind: of the hold.
            now: seconds.
            source: who raised it.

        Returns:
            The hold that is gone, or ``None`` if there was no such hold.
        """
        hold = self._holds.pop((kind, source), None)
        if not self._holds:
            # Whether or not there was this hold: one that was interrupted right here by Ctrl-C has left it to the next.
            self.is_open = not self.is_shut
            self._closed_at = None
        if hold is None:
            return None
        self._held_for[kind] = self._held_for.get(kind, 0.0) + (now - hold.since)
        if self.observer is not None:
            self.observer(hold, False, now)
        return hold

    def heal(self) -> None:
        """Repair what a `hold` or a `lift` has left that was interrupted."""
        since = min((hold.since for hold in self._holds.values()), default=None)
        self.is_open = since is None and not self.is_shut
        if since is None or self._closed_at is None:
            self._closed_at = since

    def shut(self) -> None:
        """Close it for good. That is no hold, because it is no flow control."""
        self.is_shut = True
        self.is_open = False

    def forget_past(self) -> None:
        """Count closings, and how long holds held, from now on; those that go on stay counted."""
        self._held_for.clear()
        self.times_closed = int(bool(self._holds))

    def is_held_by(self, kind: str) -> bool:
        """Whether any source holds the gate for this reason."""
        return any(key[0] == kind for key in self._holds)

    def seconds_held(self, now: float) -> dict[str, float]:
        """For how long the gate was held so far.

        Args:
            now: seconds.

        Returns:
            Seconds by kind, the present holds included.
        """
        seconds = dict(self._held_for)
        # A copy, so that a thread without the caller's guard can ask, too.
        for hold in self.holds:
            seconds[hold.kind] = seconds.get(hold.kind, 0.0) + (now - hold.since)
        return seconds
