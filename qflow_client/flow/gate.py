"""The gate: open if and only if it has no holds.

A gate answers one question: may an element pass *now*? The answer depends on the set of its *holds*. Every hold has a
kind (the reason) and a source (its owner). So two reasons, or two sources with the same reason, never lift each other's
holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Gate", "Hold"]


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason why a gate is closed.

    Attributes:
        kind: the reason, as one word, such as ``"paused"``.
        since: when it was raised, in seconds of the caller's clock.
        source: the owner of the hold; a hold of the same kind from another source is a separate hold.
        detail: an explanation by the source, for people to read.
    """

    kind: str
    since: float
    source: str = ""
    detail: str = ""

    def __str__(self) -> str:
        words = ": ".join(filter(None, (self.source, self.detail)))
        return f"{self.kind} ({words})" if words else str(self.kind)


class Gate:
    """A set of holds; open if and only if the set is empty.

    It is not thread-safe and reads no clock: the caller guards it against concurrent calls and passes the time.
    """

    __slots__ = ("_closed_at", "_held_for", "_holds", "is_open", "is_shut", "observer", "times_closed")

    def __init__(self) -> None:
        # In the order in which they were raised.
        self._holds: dict[tuple[str, str], Hold] = {}
        # Seconds for which there were holds of each kind, without the present holds.
        self._held_for: dict[str, float] = {}
        # Since when there are holds; ``None`` while there are none. The first of these holds may be lifted already.
        self._closed_at: float | None = None
        #: True if and only if there is no hold and the gate is not shut. Read-only; a plain attribute for speed.
        self.is_open = True
        #: Whether the gate was shut for good. Read-only.
        self.is_shut = False
        #: How often the gate changed from no hold to a hold.
        self.times_closed = 0
        #: Called after a hold was raised (``True``) or lifted (``False``), with the time; ``None`` for no observer. It
        #: must not raise, and must not call a controller of this gate.
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
        """Raise a hold. An existing hold stays unchanged.

        Args:
            kind: the reason, as one word.
            now: seconds.
            source: the owner; only the same source can lift the hold.
            detail: a text for people.

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
            source: the owner of the hold.

        Returns:
            The lifted hold; ``None`` if there was no such hold.
        """
        hold = self._holds.pop((kind, source), None)
        if not self._holds:
            # Set this also if there was no such hold: an earlier call may have been interrupted by Ctrl-C just before
            # this line.
            self.is_open = not self.is_shut
            self._closed_at = None
        if hold is None:
            return None
        self._held_for[kind] = self._held_for.get(kind, 0.0) + (now - hold.since)
        if self.observer is not None:
            self.observer(hold, False, now)
        return hold

    def heal(self) -> None:
        """Repair the state after an interrupted `hold` or `lift`."""
        since = min((hold.since for hold in self._holds.values()), default=None)
        self.is_open = since is None and not self.is_shut
        if since is None or self._closed_at is None:
            self._closed_at = since

    def shut(self) -> None:
        """Close the gate for good. This is not a hold, because it is not flow control."""
        self.is_shut = True
        self.is_open = False

    def forget_past(self) -> None:
        """Restart the count of closings and the times of holds. The present holds stay counted."""
        self._held_for.clear()
        self.times_closed = int(bool(self._holds))

    def is_held_by(self, kind: str) -> bool:
        """Whether a hold of this kind exists, from any source."""
        return any(key[0] == kind for key in self._holds)

    def seconds_held(self, now: float) -> dict[str, float]:
        """Return for how long the gate was held so far.

        Args:
            now: seconds.

        Returns:
            Seconds by kind, including the present holds.
        """
        seconds = dict(self._held_for)
        # `holds` is a copy, so a thread without the caller's guard can call this, too.
        for hold in self.holds:
            seconds[hold.kind] = seconds.get(hold.kind, 0.0) + (now - hold.since)
        return seconds
