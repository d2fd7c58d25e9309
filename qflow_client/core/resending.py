"""What is to leave again, sans-I/O: in which order, when, and what of it alone.

Two things come here: what an ended channel left without an answer, and what a broker refused because it has no room.
All of it was written before, so all of it leaves as a second copy, in the order of admission, and before anything that
was never written.

A broker that closes a channel over a message does not say which. Its words may name an exchange or a routing key, and
what is narrowed down by them leaves one at a time, with nothing else in flight; so what fails then fails alone.

What was refused leaves after a pause, one message first, as a probe. If the probe is refused, another one leaves after
a longer pause. If it is confirmed, the rest leaves. `retry_for` counts the time in which the broker takes messages at
all.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

from qflow_client.receipt import Receipt

__all__ = ["Pauses", "Resending", "is_want_of_room", "narrowed"]

_QUOTED = re.compile(r"'([^']*)'")

# What RabbitMQ calls the default exchange.
_DEFAULT_EXCHANGE = "amq.default"


def narrowed(suspects: Sequence[Receipt], text: str) -> Sequence[Receipt]:
    """Those of the suspects that the broker's words name; all of them if that tells nothing.

    Args:
        suspects: messages over one of which a channel was closed.
        text: the broker's words, names in single quotes.
    """
    named = set(_QUOTED.findall(text))
    there = [each for each in suspects if (each.exchange or _DEFAULT_EXCHANGE) in named]
    return [each for each in there if each.routing_key in named] or there or suspects


# What a broker that is out of room says besides 311 and 506, which mean that by themselves.
_NO_ROOM = re.compile(r"\b(disk|memory|space|full|resources?)\b", re.IGNORECASE)


def is_want_of_room(code: int, text: str) -> bool:
    """Whether a channel was closed because the broker has no room now, rather than over a message.

    Args:
        code: the reply code.
        text: the reply text.
    """
    return code in (311, 506) or (code == 406 and _NO_ROOM.search(text) is not None)


# So many connections in a row that are lost with messages in flight, and nothing settled in between, raise the
# suspicion that a message is the cause; so many that hold without one and are lost as soon as it is sent convict it.
_SUSPICIOUS = 3
_CONVICTING = 5


class Pauses(Protocol):
    """How long to wait before the next try."""

    def begin(self, now: float) -> None:
        """Begin with the shortest pause."""

    def pause(self, now: float) -> float | None:
        """The next pause in seconds."""


class Resending:
    """What of a producer is to leave again, and what is known of it.

    Args:
        proves: seconds that a connection has to hold before its loss says anything about a message that is sent then,
            and after which it says nothing any more.
        pauses: before messages leave again that the broker has refused for want of room; ``None`` if they do not.
        retry_for: seconds after its first refusal in which such a message leaves again.
    """

    __slots__ = (
        "_alone",
        "_idle_for",
        "_idle_since",
        "_losses",
        "_pauses",
        "_proven_at",
        "_proves",
        "_refused",
        "_retry_for",
        "_sent_at",
        "_settled",
        "_strikes",
        "again",
        "copies",
        "dreaded",
        "probe",
        "retry_at",
        "suspects",
    )

    def __init__(self, proves: float, pauses: Pauses | None = None, retry_for: float = 0.0) -> None:
        self._proves = proves
        self._pauses = pauses
        self._retry_for = retry_for
        # How many connections in a row were lost with messages in flight, and how many messages were settled before.
        self._losses = 0
        self._settled = -1
        #: The number of the message with which alone a connection was lost again; 0 if there is none. It is sent when
        #: the connection has held for a while without it.
        self.dreaded = 0
        # From when on it may be sent, when it was sent last, and how many connections were lost by that.
        self._proven_at = self._sent_at = 0.0
        self._strikes = 0
        #: What is to leave again, in the order of admission.
        self.again: deque[Receipt] = deque()
        #: The numbers of unsettled messages that were written before, and may have arrived.
        self.copies: set[int] = set()
        #: The numbers of messages over one of which an earlier channel may have been closed.
        self.suspects: set[int] = set()
        # The last suspect that left alone.
        self._alone: Receipt | None = None
        # By number, when the broker first refused a message, by the clock of `_working`; kept until it is settled.
        self._refused: dict[int, float] = {}
        #: While the broker refuses: before when no probe leaves. None while it does not.
        self.retry_at: float | None = None
        #: The refused message that has left to see whether there is room; None while none has.
        self.probe: Receipt | None = None
        # Since when the broker takes nothing at all, None while it does, and for how long it took nothing before.
        self._idle_since: float | None = None
        self._idle_for = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to leave before what was never written."""
        return not self.again and self.retry_at is None and (self._alone is None or self._alone.done)

    # What becomes of channels and connections.

    def keep(self, begun: Iterable[Receipt], suspects: Iterable[Receipt]) -> None:
        """The channel is gone.

        Args:
            begun: what may have arrived, and is to leave again.
            suspects: the part of `begun` that may be the cause, if the broker closed the channel.
        """
        # By number, because an interrupted call may be made again.
        by_number = {receipt._number: receipt for receipt in (*self.again, *begun)}
        self.again = deque(by_number[number] for number in sorted(by_number))
        self.copies = set(map(_number, self.again))
        self.suspects = (self.suspects & self.copies) | set(map(_number, suspects))
        self._refused = {number: since for number, since in self._refused.items() if number in self.copies}
        self.probe = self._alone = None

    def begin(self, now: float) -> None:
        """There is a new channel."""
        self._proven_at = now + self._proves

    def lost(self, in_flight: Sequence[Receipt], settled: int, text: str, now: float) -> Sequence[Receipt]:
        """The connection is lost. Messages may be the cause if that happens again and again.

        Args:
            in_flight: what may have arrived, and has no answer.
            settled: how many messages are settled so far.
            text: why it was lost.
            now: seconds.

        Returns:
            The suspects, which are to be sent one at a time; a single one may be `convicted`.
        """
        if settled > self._settled:
            self._settled = settled
            self._losses = self._strikes = self.dreaded = 0
        if not in_flight:
            return ()
        self._losses += 1
        if self._losses < _SUSPICIOUS:
            return ()
        if len(in_flight) > 1:
            return narrowed(in_flight, text) if self._losses == _SUSPICIOUS else in_flight
        number = in_flight[0]._number
        if number != self.dreaded:
            self.dreaded, self._strikes = number, 0
        elif now - self._sent_at <= self._proves:
            self._strikes += 1
        return in_flight

    @property
    def convicted(self) -> bool:
        """Whether the dreaded message has cost connections enough."""
        return self._strikes >= _CONVICTING

    # What may leave.

    def waits_until(self) -> float | None:
        """When the dreaded message is to be sent, if it is the next; ``None`` if it is not."""
        return self._proven_at if self.dreaded and self.again and self.again[0]._number == self.dreaded else None

    def may_leave(self, source: deque[Receipt], is_alone: bool, now: float) -> int:
        """How many messages may leave now.

        Args:
            source: what is to leave next, in order: what is to leave again, or else what was never written.
            is_alone: whether nothing is in flight.
            now: seconds.
        """
        if not source or (self._alone is not None and not self._alone.done) or not self._is_time(now):
            return 0
        if source[0]._number in self.suspects:
            return int(is_alone)
        if self.retry_at is not None:
            return 1
        if not self.suspects:
            return len(source)
        return next((at for at, each in enumerate(source) if each._number in self.suspects), len(source))

    def _is_time(self, now: float) -> bool:
        waits_until = self.waits_until()
        if waits_until is not None and now < waits_until:
            return False
        if self.retry_at is None:
            return True
        return self.probe is None and now >= self.retry_at

    def look(self) -> None:
        """Take note of it if the broker has taken the probe."""
        if self.probe is not None and self.probe.done:
            # There is room again.
            self.probe = self.retry_at = None

    def leaves_slowly(self, now_leave: int) -> bool:
        """Whether suspects are still to leave, one at a time, besides the first so many messages."""
        return bool(self.suspects) and any(
            each._number in self.suspects for each in islice(self.again, now_leave, None)
        )

    def leaves(self, first: Receipt, now: float) -> None:
        """This message, and perhaps others behind it, is about to leave."""
        if first._number in self.suspects:
            self._alone = first
            self._sent_at = now
        if self.retry_at is not None:
            self.probe = first

    def take_back(self, receipt: Receipt) -> bool:
        """A message was about to leave, and does not.

        Returns:
            Whether it leaves as a second copy later; otherwise it was never written, and stands in `unsent` again.
        """
        self.leave_out(receipt)
        number = receipt._number
        if number not in self.copies:
            return False
        again = self.again
        if not again or again[-1]._number < number:
            again.append(receipt)
        else:
            again.insert(bisect_left(again, number, key=_number), receipt)
        return True

    def leave_out(self, receipt: Receipt) -> None:
        """A message that had left alone tells nothing any more."""
        if receipt is self.probe:
            self.probe = None
        if receipt is self._alone:
            self._alone = None

    def heal(self, on_wire: Callable[[Receipt], int]) -> None:
        """Repair what an unfinished step has left.

        Args:
            on_wire: returns the tag of a message on the wire; 0 if it is not there.
        """
        for receipt in (self.probe, self._alone):
            if receipt is not None and not receipt.done and not on_wire(receipt):
                # It was about to leave, and did not.
                self.leave_out(receipt)

    # What the broker refuses.

    @property
    def retries(self) -> bool:
        """Whether what the broker refuses leaves again."""
        return self._pauses is not None

    def rest(self, now: float) -> None:
        """The broker takes nothing at all for a while: there is no connection, or it has stopped what there is."""
        if self._idle_since is None:
            self._idle_since = now

    def go_on(self, now: float) -> None:
        """It takes messages again."""
        if self._idle_since is not None:
            self._idle_for += now - self._idle_since
            self._idle_since = None

    def _working(self, now: float) -> float:
        """The time on a clock that stands still while the broker takes nothing."""
        return (now if self._idle_since is None else self._idle_since) - self._idle_for

    def refused(self, receipt: Receipt, now: float) -> bool:
        """The broker has refused a message for want of room.

        Returns:
            Whether it is to be settled, not to leave again: it has tried for long enough, or was returned.
        """
        self._refused.setdefault(receipt._number, self._working(now))
        gives_up = self._gives_up(receipt, now)
        if gives_up:
            del self._refused[receipt._number]
        return gives_up

    def was_refused(self, receipt: Receipt) -> bool:
        """Whether the broker has refused a message that is not settled yet."""
        return receipt._number in self._refused

    def _gives_up(self, receipt: Receipt, now: float) -> bool:
        since = self._refused.get(receipt._number, math.inf)
        return receipt._reply is not None or self._working(now) >= since + self._retry_for

    def put(self, receipt: Receipt) -> bool:
        """Have a refused message leave again.

        Returns:
            Whether it was the probe.
        """
        was_probe = receipt is self.probe
        self.copies.add(receipt._number)
        self.take_back(receipt)
        return was_probe

    def hold(self, now: float, *, again: bool) -> bool:
        """Have no probe leave for a while.

        Args:
            now: seconds.
            again: whether a probe was refused; else a pause that goes on stays as it is.

        Returns:
            True if the broker has not refused anything before.
        """
        assert self._pauses is not None
        is_first = self.retry_at is None
        if is_first:
            self._pauses.begin(now)
        if is_first or again:
            # Nothing is tried for longer than it may.
            oldest = min(
                (self._refused[each._number] for each in self.again if self.was_refused(each)),
                default=self._working(now),
            )
            left = max(0.0, oldest + self._retry_for - self._working(now))
            self.retry_at = now + min(self._pauses.pause(now) or 0.0, left)
        return is_first

    def expired(self, now: float) -> list[Receipt]:
        """Return the messages that have been refused for too long, or were returned meanwhile."""
        return [each for each in self.again if self._gives_up(each, now)]

    def drop_settled(self) -> None:
        """Forget the messages that are settled."""
        if any(each._outcome is not None for each in self.again):
            self.again = deque(each for each in self.again if each._outcome is None)

    def forget(self) -> None:
        """Nothing is to leave any more."""
        self.again.clear()
        self.keep((), ())

    def is_tried(self, waiting: bool) -> bool:
        """Whether the broker has room again, or nothing is left to try.

        Args:
            waiting: whether messages that were never written wait to be.
        """
        return self.retry_at is None or not (self.again or self.probe or waiting)

    def room_again(self, unsettled: Collection[int]) -> None:
        """What was refused is tried.

        Args:
            unsettled: the numbers of all unsettled messages.
        """
        self.retry_at = None
        self._refused = {number: since for number, since in self._refused.items() if number in unsettled}
        self.copies.intersection_update(unsettled)


def _number(receipt: Receipt) -> int:
    return receipt._number
