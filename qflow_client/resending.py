"""What leaves on a new channel before anything new, sans-I/O: in which order, what of it marked, and what of it alone.

A broker that closes a channel over a message does not say which. Its words may name an exchange or a routing key, and
what is narrowed down by them leaves again one at a time, with nothing else in flight; so what fails then fails alone.
Everything keeps its place in the order: delivery tags are given to all of it at once, and what comes after such a
suspect is staged until the suspect has its answer.

What a broker refuses because it has no room leaves again, too, behind what was admitted before it: after a pause one
message as a probe, after a longer one another if that is refused, and the rest once one is not.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    """The messages of a producer that are unsettled and not all put on its channel yet, and what is known of them.

    Args:
        proves: seconds that a connection has to hold before its loss says anything about a message that is sent then,
            and after which it says nothing any more.
        pauses: before messages leave again that the broker has refused for want of room; ``None`` if they do not.
        retry_for: seconds after its first refusal in which such a message leaves again.
    """

    __slots__ = (
        "_alone",
        "_losses",
        "_pauses",
        "_proven_at",
        "_proves",
        "_refused",
        "_retry_for",
        "_sent_at",
        "_settled",
        "_strikes",
        "copies",
        "dreaded",
        "probe",
        "retry_at",
        "staged",
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
        # From when on it is, when it was last, and how many connections were lost by that.
        self._proven_at = self._sent_at = 0.0
        self._strikes = 0
        #: The numbers of messages that may have arrived by an earlier channel.
        self.copies: set[int] = set()
        #: The numbers of messages over one of which an earlier channel may have been closed.
        self.suspects: set[int] = set()
        #: What is not put on the channel yet, in order. It has the last delivery tags.
        self.staged: deque[Receipt] = deque()
        # The delivery tag of the last suspect that was put; 0 before the first.
        self._alone = 0
        # By number, when the broker first refused a message. That counts until it is settled.
        self._refused: dict[int, float] = {}
        #: While the broker refuses: before when no probe leaves. None while it does not.
        self.retry_at: float | None = None
        #: The refused message that has left to see whether there is room; None while none has.
        self.probe: Receipt | None = None

    def keep(self, kept: Iterable[Receipt], begun: Iterable[Receipt], suspects: Iterable[Receipt]) -> None:
        """The channel is gone.

        Args:
            kept: what is to leave again.
            begun: the part of it that may have arrived.
            suspects: the part of it over one of which the channel was closed.
        """
        numbers = {receipt._number for receipt in kept}
        self.copies = (self.copies & numbers) | {receipt._number for receipt in begun}
        self.suspects = (self.suspects & numbers) | {receipt._number for receipt in suspects}
        self._refused = {number: since for number, since in self._refused.items() if number in numbers}
        self.staged.clear()
        self.probe = None

    def begin(self, receipts: Iterable[Receipt], now: float) -> None:
        """There is a new channel, and this is to leave on it, in order."""
        self.staged = deque(receipts)
        self._alone = 0
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

    def waits_until(self) -> float | None:
        """When the dreaded message is to be sent, if it is the next; ``None`` if it is not."""
        return self._proven_at if self.dreaded and self.staged and self.staged[0]._number == self.dreaded else None

    def forget(self) -> None:
        """Nothing is to leave any more."""
        self.keep((), (), ())

    def may_go(self, now: float) -> bool:
        """Whether anything is to be put on the channel now, as far as refusals and lost connections go."""
        waits_until = self.waits_until()
        if waits_until is not None and now < waits_until:
            return False
        if self.retry_at is None:
            return True
        probe = self.probe
        if probe is None:
            return now >= self.retry_at
        if probe.done:
            # There is room again.
            self.probe = self.retry_at = None
        return probe.done

    @property
    def retries(self) -> bool:
        """Whether what the broker refuses leaves again."""
        return self._pauses is not None

    def refused(self, receipt: Receipt, now: float) -> bool:
        """The broker has refused a message for want of room.

        Returns:
            Whether it is to be settled, not to leave again: it has tried for long enough, or was returned.
        """
        self._refused.setdefault(receipt._number, now)
        return self._gives_up(receipt, now)

    def was_refused(self, receipt: Receipt) -> bool:
        """Whether the broker has refused a message that is not settled yet."""
        return receipt._number in self._refused

    def _gives_up(self, receipt: Receipt, now: float) -> bool:
        return receipt._reply is not None or now >= self._refused.get(receipt._number, math.inf) + self._retry_for

    def insert(self, receipt: Receipt) -> bool:
        """Have a refused message leave again, behind those that were admitted before it.

        Returns:
            Whether it was the probe.
        """
        at = len(self.staged)
        while at and self.staged[at - 1]._number > receipt._number:
            at -= 1
        self.staged.insert(at, receipt)
        self.copies.add(receipt._number)
        was_probe = receipt is self.probe
        if was_probe:
            self.probe = None
        return was_probe

    def hold(self, unsettled: Iterable[Receipt], now: float, *, again: bool) -> bool:
        """Have no probe leave for a while.

        Args:
            unsettled: all that is, at least one message.
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
            limit = min(self._refused.get(each._number, now) for each in unsettled) + self._retry_for
            self.retry_at = min(now + (self._pauses.pause(now) or 0.0), max(now, limit))
        return is_first

    def expired(self, now: float) -> Iterator[Receipt]:
        """Yield the staged messages whose retries are over: refused for too long, or returned meanwhile.

        A message is removed from `staged` just before it is yielded. The caller may stop at any time.
        """
        for each in [each for each in self.staged if self._gives_up(each, now)]:
            self.staged.remove(each)
            yield each

    @property
    def is_tried(self) -> bool:
        """Whether the broker has room again, or nothing is left to try."""
        return self.retry_at is None or not (self.staged or self.probe)

    def room_again(self, unsettled: Collection[int]) -> None:
        """What was refused is tried.

        Args:
            unsettled: the numbers of all messages that are.
        """
        self.retry_at = None
        self._refused = {number: since for number, since in self._refused.items() if number in unsettled}
        self.copies.intersection_update(unsettled)

    def next(self, oldest: int, next_tag: int, now: float) -> Receipt | None:
        """The next message to put on the channel; ``None`` if none is to be put now.

        Args:
            oldest: the delivery tag of the oldest unsettled message.
            next_tag: that of the next message to be admitted.
            now: seconds.
        """
        if not self.staged or oldest <= self._alone:
            return None
        if self.staged[0]._number in self.suspects:
            tag = next_tag - len(self.staged)
            if oldest < tag:
                return None
            self._alone = tag
            self._sent_at = now
        receipt = self.staged.popleft()
        if self.retry_at is not None:
            self.probe = receipt
        return receipt

    def skip(self) -> None:
        """What `next` gave cannot be put on the channel, so nothing waits for its answer."""
        self._alone = 0
        self.probe = None
