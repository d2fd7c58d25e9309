"""A gate, which is open while it has no holds and is not shut.

A gate answers one question: can an element pass *now*? The answer depends on the *holds* of the gate. Every hold has a
kind (the reason) and a source (the code that raised the hold). To lift a hold, code has to pass its kind and source.
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
        since: when the hold was raised, in seconds of the caller's clock.
        source: name of the code that raised the hold. Holds of the same kind from two sources are two holds.
        detail: an explanation for people.
    """

    kind: str
    since: float
    source: str = ""
    detail: str = ""

    def __str__(self) -> str:
        words = ": ".join(filter(None, (self.source, self.detail)))
        return f"{self.kind} ({words})" if words else str(self.kind)


class Gate:
    """A set of holds. The gate is open while the set is empty, unless `shut` was called.

    A gate is not thread-safe and reads no clock. The caller must prevent concurrent calls, and passes the current time.
    """

    __slots__ = ("_closed_at", "_held_for", "_holds", "is_open", "is_shut", "observer", "times_closed")

    def __init__(self) -> None:
        # The holds, in the order in which they were raised.
        self._holds: dict[tuple[str, str], Hold] = {}
        # How many seconds the past holds of each kind have lasted. The present holds are not included.
        self._held_for: dict[str, float] = {}
        # When the present period with holds began; ``None`` if there is no hold.
        self._closed_at: float | None = None
        #: True if and only if there is no hold and the gate is not shut. Read-only. Not a property, for speed.
        self.is_open = True
        #: Whether the gate is shut permanently. Read-only.
        self.is_shut = False
        #: How often the gate has changed from no hold to a hold, since `forget_past` was last called.
        self.times_closed = 0
        #: Called with three arguments: a hold, True if the hold was raised or False if it was lifted, and the time.
        #: ``None`` for no observer. The function must raise no exception, and must not call a controller of this gate.
        self.observer: Callable[[Hold, bool, float], object] | None = None

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The present holds, oldest first."""
        return tuple(self._holds.values())

    @property
    def closed_since(self) -> float | None:
        """When the current period with holds began, in seconds of the caller's clock; ``None`` if there is no hold."""
        return self._closed_at

    def hold(self, kind: str, *, now: float, source: str = "", detail: str = "") -> bool:
        """Raise a hold. If there is already a hold of this kind from this source, nothing changes.

        Args:
            source: a name for the caller. `lift` needs the same source.

        Returns:
            True if the hold is new.
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
        """Lift a hold, and return it. Return ``None`` if there is no such hold."""
        hold = self._holds.pop((kind, source), None)
        if not self._holds:
            # Do this even if `pop` found no hold: Ctrl-C may have interrupted an earlier call after its `pop`.
            self.is_open = not self.is_shut
            self._closed_at = None
        if hold is None:
            return None
        self._held_for[kind] = self._held_for.get(kind, 0.0) + (now - hold.since)
        if self.observer is not None:
            self.observer(hold, False, now)
        return hold

    def heal(self) -> None:
        """Repair `is_open` and `closed_since` after Ctrl-C has interrupted `hold` or `lift`."""
        since = min((hold.since for hold in self._holds.values()), default=None)
        self.is_open = since is None and not self.is_shut
        if since is None or self._closed_at is None:
            self._closed_at = since

    def shut(self) -> None:
        """Close the gate permanently. This is not a hold, because it is not flow control."""
        self.is_shut = True
        self.is_open = False

    def forget_past(self) -> None:
        """Forget the past holds. Then `times_closed` and `seconds_held` count only the present holds."""
        self._held_for.clear()
        self.times_closed = int(bool(self._holds))

    def is_held_by(self, kind: str) -> bool:
        """Whether a hold of this kind exists, from any source."""
        return any(key[0] == kind for key in self._holds)

    def seconds_held(self, now: float) -> dict[str, float]:
        """Return how many seconds the holds of each kind have lasted so far, including the present holds."""
        seconds = dict(self._held_for)
        # `self.holds` is a copy, so this method may run while another thread raises or lifts a hold.
        for hold in self.holds:
            seconds[hold.kind] = seconds.get(hold.kind, 0.0) + (now - hold.since)
        return seconds
