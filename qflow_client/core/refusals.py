"""The refusals of a broker without room: when, and for how long, messages are sent again.

After the first refusal, no frames are made until a pause is over. Frames that are already made are still written, so
later messages may overtake the refused message. After the pause, one message is sent as a *probe*. No other message is
sent until the broker answers the probe. If the broker refuses the probe, the next probe is sent after a longer pause,
up to a limit. If the broker confirms the probe, there is room again, and all messages are sent.

A message is sent again until `retry_for` seconds have passed since its first refusal. The clock for these seconds stops
while no retry is possible (E5). So it stops while there is no channel, and while the broker blocks the connection or
stops the channel. A pause before a probe continues while the clock is stopped.

When the time for retries is over, the message is settled. If the broker has refused its last copy, the message is
*nacked*. If the channel ended before the broker answered the last copy, the message is *unknown*.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Protocol

from qflow_client.receipt import Outcome, Receipt

__all__ = ["Pauses", "Refusals", "means_no_room"]

# Words in the reply text of a broker without room. With the reply codes 311 and 506, these words are not needed.
_NO_ROOM = re.compile(r"\b(disk|memory|space|full|resources?)\b", re.IGNORECASE)


def means_no_room(code: int, text: str) -> bool:
    """Return whether a reply in ``Channel.Close`` means that the broker has no room, not that a message is wrong."""
    return code in (311, 506) or (code == 406 and _NO_ROOM.search(text) is not None)


class Pauses(Protocol):
    """Computes the pauses before probes."""

    def begin(self, now: float) -> None:
        """Start again with the shortest pause."""

    def pause(self, now: float) -> float | None:
        """Return the next pause in seconds. ``None`` means 0 seconds."""


class Refusals:
    """The unsettled messages that the broker has refused, and the probe.

    Args:
        pauses: computes the pauses before probes; ``None`` if refused messages are settled instead.
        retry_for: seconds for which a message is sent again after its first refusal.
    """

    __slots__ = (
        "_first_refused",
        "_pauses",
        "_retry_for",
        "_stopped_at",
        "_stopped_for",
        "_unanswered",
        "probe",
        "probe_at",
    )

    def __init__(self, pauses: Pauses | None, retry_for: float) -> None:
        self._pauses = pauses
        self._retry_for = retry_for
        # When each message was first refused, in seconds of `_clock`. The keys are message numbers.
        self._first_refused: dict[int, float] = {}
        # Numbers of refused messages that were written again, on a channel that ended before the broker answered.
        self._unanswered: set[int] = set()
        #: The earliest time for the next probe, unchanged while a probe is in flight; ``None`` if the broker has room.
        self.probe_at: float | None = None
        #: The probe, from its sending until its answer is handled or its channel ends; ``None`` if there is none.
        self.probe: Receipt | None = None
        # When the clock stopped; ``None`` while it runs.
        self._stopped_at: float | None = None
        # The total time of the earlier stops of the clock in seconds.
        self._stopped_for = 0.0

    @property
    def retries(self) -> bool:
        """Whether refused messages are sent again."""
        return self._pauses is not None

    # The clock.

    def stop_clock(self, now: float) -> None:
        if self._stopped_at is None:
            self._stopped_at = now

    def start_clock(self, now: float) -> None:
        if self._stopped_at is not None:
            self._stopped_for += now - self._stopped_at
            self._stopped_at = None

    def _clock(self, now: float) -> float:
        return (now if self._stopped_at is None else self._stopped_at) - self._stopped_for

    # Messages.

    def note_refusal(self, receipt: Receipt, now: float) -> bool:
        """Record the refusal of a message. Return True if it must be settled, see `is_over`."""
        self._first_refused.setdefault(receipt._number, self._clock(now))
        self._unanswered.discard(receipt._number)
        is_over = self.is_over(receipt, now)
        if is_over:
            self.forget(receipt)
        return is_over

    def forget(self, receipt: Receipt) -> None:
        del self._first_refused[receipt._number]

    def is_refused(self, receipt: Receipt) -> bool:
        return receipt._number in self._first_refused

    def end_channel(self, unsettled: Collection[int], unanswered: Iterable[Receipt]) -> None:
        """Record that a channel has ended.

        Args:
            unsettled: numbers of the messages that can be sent again.
            unanswered: messages that were written on the channel, and that the broker has not answered.
        """
        self.forget_others(unsettled)
        self._unanswered.update(receipt._number for receipt in unanswered if self.is_refused(receipt))
        self.probe = None

    def note_answered(self, receipt: Receipt) -> None:
        """Record that the end of the channel was the broker's answer to this message."""
        self._unanswered.discard(receipt._number)

    def outcome(self, receipt: Receipt) -> Outcome:
        """Return the outcome of a refused message that is not sent again."""
        if receipt._reply is not None:
            return Outcome.RETURNED
        return Outcome.UNKNOWN if receipt._number in self._unanswered else Outcome.NACKED

    def is_over(self, receipt: Receipt, now: float) -> bool:
        """Whether a message is not sent again, because its time for retries is over or the broker has returned it."""
        since = self._first_refused.get(receipt._number, math.inf)
        return receipt._reply is not None or self._clock(now) >= since + self._retry_for

    def next_over(self, now: float) -> list[float]:
        """Return the time when the next message, except the probe, reaches `retry_for`, as a list; empty if none."""
        # The entries are in the order of the first refusals. An entry of a settled message causes a needless timer.
        probe = 0 if self.probe is None else self.probe._number
        clock = self._clock(now)
        ends = (at + self._retry_for - clock for number, at in self._first_refused.items() if number != probe)
        left = next((left for left in ends if left > 0.0), None)
        return [] if left is None else [now + left]

    def forget_others(self, unsettled: Collection[int]) -> None:
        """Forget the refusals of all messages except those with these numbers."""
        self._first_refused = {number: at for number, at in self._first_refused.items() if number in unsettled}
        self._unanswered.intersection_update(self._first_refused)

    # The probe.

    def delay_probe(self, again: Iterable[Receipt], now: float, *, new_pause: bool) -> bool:
        """Delay the next probe until a pause is over. Return True at the first refusal since the broker had room.

        Args:
            again: the messages to be sent again.
            new_pause: True after the refusal of a probe or the end of a channel. If False, a running pause continues.
        """
        assert self._pauses is not None
        is_first = self.probe_at is None
        if is_first:
            self._pauses.begin(now)
        if is_first or new_pause:
            # The pause ends no later than the time for retries of the message that was refused first.
            clock = self._clock(now)
            oldest = min((self._first_refused[each._number] for each in again if self.is_refused(each)), default=clock)
            left = max(0.0, oldest + self._retry_for - clock)
            self.probe_at = now + min(self._pauses.pause(now) or 0.0, left)
        return is_first

    def may_probe(self, now: float) -> bool:
        """Whether a message can be sent: the broker has room, or it is time for a probe."""
        return self.probe_at is None or (self.probe is None and now >= self.probe_at)

    def note_sent(self, receipt: Receipt) -> None:
        """Record that a message is sent. If the broker has no room, this message is the probe."""
        if self.probe_at is not None:
            self.probe = receipt

    def forget_sent(self, receipt: Receipt) -> None:
        if receipt is self.probe:
            self.probe = None

    def check_probe(self) -> None:
        """End the pauses if the probe is settled, because the broker then has room again."""
        if self.probe is not None and self.probe.done:
            self.probe = self.probe_at = None
