"""The messages to be sent again: their order, and how many of them can be sent now. `Writing` sends them.

`again` contains two kinds of messages: messages without an answer when their channel ended, and messages that the
broker refused. Both kinds were written before. So the messages are sent as second copies, in the order of admission,
before all messages that were never written (E1).

Three rules decide how many messages can be sent now (`count_sendable`):

1. A *suspect* may have ended an earlier channel (`suspects`). It is sent alone: no other message is on the wire.
2. If `again` begins with the *candidate* (a message that probably ends connections, see `suspects`), nothing is sent
   until the channel has been open for a while.
3. While the broker has no room, one message (the probe) is sent after each pause, and no other message (`refusals`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from operator import attrgetter

from qflow_client.core.refusals import Pauses, Refusals
from qflow_client.core.suspects import PoisonDetector, Suspects
from qflow_client.receipt import Receipt

__all__ = ["Resending"]


class Resending:
    """The messages to be sent again. `PoisonDetector` and `Refusals` describe the arguments."""

    __slots__ = ("again", "poison", "refusals", "suspects", "written_before")

    def __init__(self, hold_time: float, pauses: Pauses | None, retry_for: float) -> None:
        #: The messages to be sent again, in the order of admission.
        self.again: deque[Receipt] = deque()
        #: Numbers of messages that were written on an earlier channel, or refused on this one. If one of them is on
        #: the wire now, it is a second copy. Some of them may be settled by now.
        self.written_before: set[int] = set()
        self.suspects = Suspects()
        self.poison = PoisonDetector(hold_time)
        self.refusals = Refusals(pauses, retry_for)

    @property
    def is_idle(self) -> bool:
        """Whether all unsent messages can be sent: `again` is empty, the broker has room, no suspect is in flight."""
        return not self.again and self.refusals.probe_at is None and not self.suspects.is_one_on_wire

    # Changes of `again`.

    def end_channel(
        self, written: Iterable[Receipt], suspects: Iterable[Receipt], unanswered: Iterable[Receipt] = ()
    ) -> None:
        """Record that a channel has ended, and add messages to `again`.

        Args:
            written: unsettled messages of the channel that were written on it or on an earlier channel.
            suspects: messages that may have caused the end of the channel.
            unanswered: those messages of `written` that this channel has written, at least in part.
        """
        # If an interrupted call is repeated, `by_number` has each message only once.
        by_number = {receipt._number: receipt for receipt in (*self.again, *written)}
        numbers = set(by_number)
        # Update `refusals` first: if the call is repeated after `again` was changed, `unanswered` is incomplete.
        self.refusals.end_channel(numbers, unanswered)
        self.suspects.end_channel(numbers, suspects)
        self.again = deque(by_number[number] for number in sorted(by_number))
        self.written_before = numbers

    def put_refused(self, receipt: Receipt) -> None:
        self.written_before.add(receipt._number)
        self.put_back(receipt)

    def put_back(self, receipt: Receipt) -> bool:
        """If a message was written before, put it back into `again`, and return True. Otherwise return False."""
        self.forget_sent(receipt)
        number = receipt._number
        if number not in self.written_before:
            return False
        again = self.again
        if not again or again[-1]._number < number:
            again.append(receipt)
        else:
            again.insert(bisect_left(again, number, key=attrgetter("_number")), receipt)
        return True

    def refused_too_long(self, now: float) -> list[Receipt]:
        """Return the messages of `again` whose time for retries is over, see `Refusals.is_over`."""
        return [each for each in self.again if self.refusals.is_over(each, now)]

    def discard_settled(self) -> None:
        if any(each._outcome is not None for each in self.again):
            self.again = deque(each for each in self.again if each._outcome is None)

    def clear(self) -> None:
        self.refusals.probe_at = None
        self.again.clear()
        self.end_channel((), ())

    def end_refusals(self, unsettled: Collection[int]) -> None:
        """Stop probing, and forget the messages whose numbers are not in `unsettled`."""
        self.refusals.probe_at = None
        self.refusals.forget_others(unsettled)
        self.written_before.intersection_update(unsettled)

    # Sending.

    @property
    def needs_timer(self) -> bool:
        """Whether a refused message, or the candidate (see `suspects`), must not be sent before a certain time."""
        return self.refusals.probe_at is not None or self.candidate_at() is not None

    def next_times(self, is_flight_empty: bool, now: float) -> list[float]:
        """Return the times at which the next message can be sent, or at which a refused message has to be settled."""
        if self.refusals.probe is not None:
            return self.refusals.next_over(now)
        times = [at for at in (self.refusals.probe_at, self.candidate_at()) if at is not None]
        if len(times) > 1:
            # The next message waits until both times have passed. At the earlier time a refused message may be settled,
            # so keep that time until it has passed.
            times = [max(times), *(at for at in times if at > now)]
        if not is_flight_empty and self.again and self.again[0]._number in self.suspects.numbers:
            # The next message is a suspect, which waits for the messages on the wire and not for a time in the past.
            times = [at for at in times if at > now]
        return times

    def candidate_at(self) -> float | None:
        """Return the earliest time for sending the next message if it is the candidate; otherwise ``None``."""
        return self.poison.send_at(self.again[0]) if self.again else None

    def count_sendable(self, source: deque[Receipt], is_flight_empty: bool, now: float) -> int:
        """Return how many messages of `source` can be sent now. `source` is `again` or `Admission.unsent`."""
        candidate_at = self.candidate_at()
        if (
            not source
            or self.suspects.is_one_on_wire
            or (candidate_at is not None and now < candidate_at)
            or not self.refusals.may_probe(now)
        ):
            return 0
        if source[0]._number in self.suspects.numbers:
            return int(is_flight_empty)
        if self.refusals.probe_at is not None:
            return 1
        return self.suspects.count_before_first(source)

    def has_suspects_after(self, count: int) -> bool:
        """Whether `again` has suspects after its first `count` messages."""
        numbers = self.suspects.numbers
        return bool(numbers) and any(each._number in numbers for each in islice(self.again, count, None))

    def note_sent(self, first: Receipt, now: float) -> None:
        """Record that a batch of messages is about to be sent. `first` is its first message."""
        if first._number in self.suspects.numbers:
            self.suspects.alone = first
            self.poison.note_sent(now)
        self.refusals.note_sent(first)

    def forget_sent(self, receipt: Receipt) -> None:
        """Record that a message is not on the wire now."""
        self.refusals.forget_sent(receipt)
        self.suspects.forget_sent(receipt)

    def is_probing_over(self, has_unsent: bool) -> bool:
        """Whether probing is over: the broker has room, or there is no probe and no message that could be a probe."""
        refusals = self.refusals
        return refusals.probe_at is None or not (self.again or refusals.probe or has_unsent)

    def heal(self, tag_of: Callable[[Receipt], int]) -> None:
        """Repair the state after an unfinished step. `tag_of` returns 0 for a message that is not on the wire."""
        for receipt in (self.refusals.probe, self.suspects.alone):
            if receipt is not None and not receipt.done and not tag_of(receipt):
                # The interrupt came before the message was sent.
                self.forget_sent(receipt)
