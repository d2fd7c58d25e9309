"""Messages to be sent again: their order, and how many may be in flight together.

`again` contains two kinds of messages: messages that an ended channel left without an answer, and messages that the
broker refused. All of them were written before. So all of them are sent as second copies, in the order of admission,
before all messages that were never written (E1). A message whose frames were made and not begun comes back by
`put_back`. If it was never written before, it returns to the unsent messages instead.

`count_sendable` decides how many messages may be sent now, by three rules:

1. While a suspect is in flight, nothing else is sent. A suspect is sent only if nothing else is in flight (`suspects`).
2. The candidate for a poisonous message waits until the connection has been open for a while (`PoisonDetector`).
3. While the broker has no room, one message is sent as a probe after each pause (`refusals`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from qflow_client.core.refusals import Pauses, Refusals
from qflow_client.core.suspects import PoisonDetector, Suspects
from qflow_client.receipt import Receipt

__all__ = ["Resending"]


class Resending:
    """The messages to be sent again, in the order of admission.

    Args:
        hold_time: as for `PoisonDetector`.
        pauses: as for `Refusals`.
        retry_for: as for `Refusals`.
    """

    __slots__ = ("again", "copies", "poison", "refusals", "suspects")

    def __init__(self, hold_time: float, pauses: Pauses | None, retry_for: float) -> None:
        #: The messages to be sent again, in the order of admission.
        self.again: deque[Receipt] = deque()
        #: Numbers of the unsettled messages that were written before: on an earlier channel, or refused on this one. If
        #: they have frames now, these are a second copy.
        self.copies: set[int] = set()
        #: The messages that are sent one at a time.
        self.suspects = Suspects()
        #: Finds the message that causes lost connections.
        self.poison = PoisonDetector(hold_time)
        #: The messages that the broker has refused, and the time of the next try.
        self.refusals = Refusals(pauses, retry_for)

    @property
    def is_idle(self) -> bool:
        """Whether there is no limit for messages that were never written."""
        return not self.again and self.refusals.retry_at is None and not self.suspects.is_one_in_flight

    # Changes of `again`.

    def end_channel(
        self, written: Iterable[Receipt], suspects: Iterable[Receipt], unanswered: Iterable[Receipt] = ()
    ) -> None:
        """Record that a channel has ended, and add the messages that it leaves.

        Args:
            written: messages that were written before, on this channel or an earlier one.
            suspects: messages that may be the cause.
            unanswered: messages that have begun on this channel, and may have arrived.
        """
        # By number, because an interrupted call may be repeated.
        by_number = {receipt._number: receipt for receipt in (*self.again, *written)}
        numbers = set(by_number)
        # This comes first, because a repeated call does not find the messages of `again` on the wire.
        self.refusals.end_channel(numbers, unanswered)
        self.suspects.end_channel(numbers, suspects)
        self.again = deque(by_number[number] for number in sorted(by_number))
        self.copies = numbers

    def put_refused(self, receipt: Receipt) -> None:
        """Add a message that the broker has refused."""
        self.copies.add(receipt._number)
        self.put_back(receipt)

    def put_back(self, receipt: Receipt) -> bool:
        """Put back a message that is not on the wire any more, or never was.

        Returns:
            True if it will be sent again as a second copy; False if it was never written.
        """
        self.forget_sent(receipt)
        number = receipt._number
        if number not in self.copies:
            return False
        again = self.again
        if not again or again[-1]._number < number:
            again.append(receipt)
        else:
            again.insert(bisect_left(again, number, key=_number_of), receipt)
        return True

    def refused_too_long(self, now: float) -> list[Receipt]:
        """Return the messages that have been refused for too long, or were returned meanwhile."""
        return [each for each in self.again if self.refusals.is_over(each, now)]

    def discard_settled(self) -> None:
        """Forget the messages that are settled."""
        if any(each._outcome is not None for each in self.again):
            self.again = deque(each for each in self.again if each._outcome is None)

    def clear(self) -> None:
        """Forget all messages and the refusals."""
        self.refusals.retry_at = None
        self.again.clear()
        self.end_channel((), ())

    def end_refusals(self, unsettled: Collection[int]) -> None:
        """Record that the broker has room again, or that no message is left to try.

        Args:
            unsettled: the numbers of all unsettled messages.
        """
        self.refusals.retry_at = None
        self.refusals.forget_others(unsettled)
        self.copies.intersection_update(unsettled)

    # Sending.

    @property
    def needs_timer(self) -> bool:
        """Whether a message will be sent again."""
        return self.refusals.retry_at is not None or self.candidate_at() is not None

    def next_times(self, is_alone: bool, now: float) -> list[float]:
        """Return the times at which the next message may be sent, or refused messages are settled.

        Args:
            is_alone: whether nothing is in flight.
            now: seconds.
        """
        if self.refusals.probe is not None:
            return self.refusals.next_over(now)
        times = [at for at in (self.refusals.retry_at, self.candidate_at()) if at is not None]
        if len(times) > 1:
            # The message waits for both times. An expired message is settled at the first, so keep the first until it
            # has passed.
            times = [max(times), *(at for at in times if at > now)]
        if not is_alone and self.again and self.again[0]._number in self.suspects.numbers:
            # The next message is sent alone, so a time that has passed changes nothing until the messages in flight are
            # answered.
            times = [at for at in times if at > now]
        return times

    def candidate_at(self) -> float | None:
        """Return when the next message may be sent if it is the candidate for poison; ``None`` if it is not."""
        return self.poison.send_at(self.again[0]) if self.again else None

    def count_sendable(self, source: deque[Receipt], is_alone: bool, now: float) -> int:
        """Return how many messages may be sent now.

        Args:
            source: the messages that are next: `again`, or else the unsent messages.
            is_alone: whether nothing is in flight.
            now: seconds.
        """
        candidate_at = self.candidate_at()
        if (
            not source
            or self.suspects.is_one_in_flight
            or (candidate_at is not None and now < candidate_at)
            or not self.refusals.may_probe(now)
        ):
            return 0
        if source[0]._number in self.suspects.numbers:
            return int(is_alone)
        if self.refusals.retry_at is not None:
            return 1
        return self.suspects.count_before_first(source)

    def has_suspects_after(self, count: int) -> bool:
        """Whether `again` has suspects after its first `count` messages."""
        numbers = self.suspects.numbers
        return bool(numbers) and any(each._number in numbers for each in islice(self.again, count, None))

    def note_sent(self, first: Receipt, now: float) -> None:
        """Record that this message, and possibly others after it, is about to be sent."""
        if first._number in self.suspects.numbers:
            self.suspects.alone = first
            self.poison.note_sent(now)
        self.refusals.note_sent(first)

    def forget_sent(self, receipt: Receipt) -> None:
        """Record that a message is not in flight any more, or never was."""
        self.refusals.forget_sent(receipt)
        self.suspects.forget_sent(receipt)

    def has_tried_all(self, has_unsent: bool) -> bool:
        """Whether the broker has room again, or no message is left to try.

        Args:
            has_unsent: whether there are messages that were never written.
        """
        refusals = self.refusals
        return refusals.retry_at is None or not (self.again or refusals.probe or has_unsent)

    def heal(self, tag_of: Callable[[Receipt], int]) -> None:
        """Repair the state after an unfinished step.

        Args:
            tag_of: returns the tag of a message on the wire; 0 if it is not there.
        """
        for receipt in (self.refusals.probe, self.suspects.alone):
            if receipt is not None and not receipt.done and not tag_of(receipt):
                # It was about to be sent, and was not.
                self.forget_sent(receipt)


def _number_of(receipt: Receipt) -> int:
    return receipt._number
