"""The refusals of a broker that has no room: when to try again, and for how long.

After the first refusal nothing leaves until a pause is over. Then one message leaves as a *probe*. If the broker
refuses the probe, another one leaves after a longer pause. If the broker confirms it, there is room again and
everything leaves.

A message is tried again until `retry_for` seconds have passed since its first refusal. These seconds are counted by a
clock that stands still while no retry is possible: while there is no connection, or the broker has stopped it (E5).
The pause before a probe runs on meanwhile.

A message that is given up is *nacked* if a refusal was the last answer, and *unknown* if its next copy was written on a
channel that ended without an answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Protocol

from qflow_client.receipt import Outcome, Receipt

__all__ = ["Pauses", "Refusals", "means_no_room"]

# What a broker that is out of room says besides 311 and 506, which mean that by themselves.
_NO_ROOM = re.compile(r"\b(disk|memory|space|full|resources?)\b", re.IGNORECASE)


def means_no_room(code: int, text: str) -> bool:
    """Return whether a channel was closed because the broker has no room now, rather than over a message.

    Args:
        code: the reply code.
        text: the reply text.
    """
    return code in (311, 506) or (code == 406 and _NO_ROOM.search(text) is not None)


class Pauses(Protocol):
    """How long to wait before the next try."""

    def begin(self, now: float) -> None:
        """Begin with the shortest pause."""

    def pause(self, now: float) -> float | None:
        """The next pause in seconds."""


class Refusals:
    """The unsettled messages that the broker has refused, and the probe.

    Args:
        pauses: before a probe leaves; ``None`` if refused messages are settled instead.
        retry_for: seconds after its first refusal in which a message is tried again.
    """

    __slots__ = (
        "_first_refused",
        "_pauses",
        "_retry_for",
        "_stopped_at",
        "_stopped_for",
        "_unanswered",
        "probe",
        "retry_at",
    )

    def __init__(self, pauses: Pauses | None, retry_for: float) -> None:
        self._pauses = pauses
        self._retry_for = retry_for
        # By number, when the broker first refused a message, by the clock of `_clock`.
        self._first_refused: dict[int, float] = {}
        # Numbers of refused messages that were written again, on a channel that ended before the broker answered.
        self._unanswered: set[int] = set()
        #: When the next probe may leave; ``None`` while the broker has room.
        self.retry_at: float | None = None
        #: The message in flight that shows whether there is room; ``None`` if there is none.
        self.probe: Receipt | None = None
        # When the clock stopped, None while it runs; and for how many seconds it has stood still before.
        self._stopped_at: float | None = None
        self._stopped_for = 0.0

    @property
    def retries(self) -> bool:
        """Whether refused messages leave again."""
        return self._pauses is not None

    # The clock.

    def stop_clock(self, now: float) -> None:
        """Count no time from now on: no retry is possible."""
        if self._stopped_at is None:
            self._stopped_at = now

    def start_clock(self, now: float) -> None:
        """Count the time again."""
        if self._stopped_at is not None:
            self._stopped_for += now - self._stopped_at
            self._stopped_at = None

    def _clock(self, now: float) -> float:
        return (now if self._stopped_at is None else self._stopped_at) - self._stopped_for

    # Messages.

    def note(self, receipt: Receipt, now: float) -> bool:
        """Take note of a refusal.

        Returns:
            Whether the message is settled now, because its time is over or it was returned; else it is tried again.
        """
        self._first_refused.setdefault(receipt._number, self._clock(now))
        self._unanswered.discard(receipt._number)
        is_over = self.is_over(receipt, now)
        if is_over:
            self.forget(receipt)
        return is_over

    def forget(self, receipt: Receipt) -> None:
        """Forget the refusal of a message that is settled."""
        del self._first_refused[receipt._number]

    def is_refused(self, receipt: Receipt) -> bool:
        """Whether the broker has refused a message that is not settled."""
        return receipt._number in self._first_refused

    def end_channel(self, unsettled: Collection[int], unanswered: Iterable[Receipt]) -> None:
        """Take note that a channel has ended.

        Args:
            unsettled: numbers of the messages that may leave again.
            unanswered: what was written on the channel, and the broker did not answer.
        """
        self.forget_others(unsettled)
        self._unanswered.update(receipt._number for receipt in unanswered if self.is_refused(receipt))
        self.probe = None

    def note_answered(self, receipt: Receipt) -> None:
        """Take note that the end of the channel was the broker's answer to this message."""
        self._unanswered.discard(receipt._number)

    def outcome(self, receipt: Receipt) -> Outcome:
        """Return what is known of a refused message that is not tried again."""
        if receipt._reply is not None:
            return Outcome.RETURNED
        return Outcome.UNKNOWN if receipt._number in self._unanswered else Outcome.NACKED

    def is_over(self, receipt: Receipt, now: float) -> bool:
        """Whether a message is not tried again: it was refused for too long, or was returned."""
        since = self._first_refused.get(receipt._number, math.inf)
        return receipt._reply is not None or self._clock(now) >= since + self._retry_for

    def next_over(self, now: float) -> list[float]:
        """Return when the first refused message besides the probe is given up; empty if none is, or none any more."""
        # The first refused comes first. Of messages that are settled the time has passed, or does no harm.
        probe = 0 if self.probe is None else self.probe._number
        clock = self._clock(now)
        ends = (at + self._retry_for - clock for number, at in self._first_refused.items() if number != probe)
        left = next((left for left in ends if left > 0.0), None)
        return [] if left is None else [now + left]

    def forget_others(self, unsettled: Collection[int]) -> None:
        """Forget the refusals of all messages but those with these numbers."""
        self._first_refused = {number: at for number, at in self._first_refused.items() if number in unsettled}
        self._unanswered.intersection_update(self._first_refused)

    # The probe.

    def delay_probe(self, again: Iterable[Receipt], now: float, *, was_probe: bool) -> bool:
        """Send no probe until the next pause is over.

        Args:
            again: the messages that leave again.
            now: seconds.
            was_probe: whether the broker has refused a probe. Otherwise a pause that goes on stays as it is.

        Returns:
            True if the broker had room before.
        """
        assert self._pauses is not None
        is_first = self.retry_at is None
        if is_first:
            self._pauses.begin(now)
        if is_first or was_probe:
            # The pause ends at the latest when the time of the oldest refused message is over.
            clock = self._clock(now)
            oldest = min((self._first_refused[each._number] for each in again if self.is_refused(each)), default=clock)
            left = max(0.0, oldest + self._retry_for - clock)
            self.retry_at = now + min(self._pauses.pause(now) or 0.0, left)
        return is_first

    def may_probe(self, now: float) -> bool:
        """Whether a message may leave: there is room, or a probe is due."""
        return self.retry_at is None or (self.probe is None and now >= self.retry_at)

    def note_sent(self, receipt: Receipt) -> None:
        """Take note that a message is sent. It is the probe if the broker had no room."""
        if self.retry_at is not None:
            self.probe = receipt

    def forget_sent(self, receipt: Receipt) -> None:
        """Take note that a message is not in flight any more, or never was."""
        if receipt is self.probe:
            self.probe = None

    def check_probe(self) -> None:
        """End the pauses if the broker has confirmed the probe."""
        if self.probe is not None and self.probe.done:
            self.probe = self.retry_at = None
