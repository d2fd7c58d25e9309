"""Messages that may be the cause of a closed channel or of lost connections.

A broker that closes a channel over a message does not say which one it was. All messages that were in flight are
*suspects* then. Suspects leave one at a time, with nothing else in flight, so the one that fails next fails alone and
is settled as *rejected*. The broker's words may name an exchange or a routing key, which leaves fewer suspects.

A broker may also lose the connection over a message (a crash, a proxy with a size limit). One loss proves nothing, so
`PoisonDetector` counts losses in a row without a settled message in between. After `_SUSPICIOUS` losses the messages in
flight become suspects. A suspect that was alone in flight when a connection was lost becomes the *candidate*. The
candidate is sent when the connection has held for a while without it, so a broker that is down altogether does not
count. After `_PROOF` connections that were lost just after it was sent, the message is settled as *unknown*.

Nothing here sends or settles anything: `resending` asks what may leave, `channel` settles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from qflow_client.receipt import Receipt

__all__ = ["PoisonDetector", "Suspects", "narrow_down"]

_QUOTED = re.compile(r"'([^']*)'")

# What RabbitMQ calls the default exchange.
_DEFAULT_EXCHANGE = "amq.default"

# So many losses in a row make suspects of the messages in flight.
_SUSPICIOUS = 3
# So many losses just after the candidate was sent prove that it is poison.
_PROOF = 5


def narrow_down(suspects: Sequence[Receipt], text: str) -> Sequence[Receipt]:
    """Return the suspects that the broker's words name; all of them if the words name none.

    Args:
        suspects: messages over one of which a channel was closed.
        text: the broker's words, names in single quotes.
    """
    named = set(_QUOTED.findall(text))
    there = [each for each in suspects if (each.exchange or _DEFAULT_EXCHANGE) in named]
    return [each for each in there if each.routing_key in named] or there or suspects


class Suspects:
    """The messages that are sent one at a time."""

    __slots__ = ("alone", "numbers")

    def __init__(self) -> None:
        #: Numbers of unsettled messages over one of which an earlier channel may have been closed.
        self.numbers: set[int] = set()
        #: The last suspect that was sent; nothing else is sent until it is settled. ``None`` if none was.
        self.alone: Receipt | None = None

    @property
    def is_one_in_flight(self) -> bool:
        """Whether a suspect is in flight, so that nothing else may leave."""
        return self.alone is not None and not self.alone.done

    def end_channel(self, unsettled: Collection[int], suspects: Iterable[Receipt]) -> None:
        """Take note that a channel has ended, and add suspects.

        Args:
            unsettled: numbers of the messages that may still be suspects.
            suspects: the new ones.
        """
        self.numbers = self.numbers.intersection(unsettled).union(each._number for each in suspects)
        self.alone = None

    def count_before_first(self, source: Sequence[Receipt]) -> int:
        """Return how many messages come before the first suspect."""
        if not self.numbers:
            return len(source)
        return next((at for at, each in enumerate(source) if each._number in self.numbers), len(source))

    def forget_sent(self, receipt: Receipt) -> None:
        """Take note that a message is not in flight any more, or never was."""
        if receipt is self.alone:
            self.alone = None


class PoisonDetector:
    """Finds the message over which connections are lost.

    Args:
        hold_time: seconds that a connection has to hold before the candidate is sent. A loss within as many seconds
            after that counts against the candidate.
    """

    __slots__ = ("_candidate_losses", "_hold_time", "_losses", "_send_at", "_sent_at", "_settled", "candidate")

    def __init__(self, hold_time: float) -> None:
        self._hold_time = hold_time
        # Losses in a row with messages in flight, and how many messages were settled before them.
        self._losses = 0
        self._settled = -1
        #: The number of the message that was alone in flight when a connection was lost; 0 if there is none.
        self.candidate = 0
        # When the connection has held long enough, when a suspect was sent last, and the losses just after that.
        self._send_at = self._sent_at = 0.0
        self._candidate_losses = 0

    @property
    def is_proven(self) -> bool:
        """Whether the candidate has cost enough connections."""
        return self._candidate_losses >= _PROOF

    def note_open(self, now: float) -> None:
        """Take note that there is a new channel."""
        self._send_at = now + self._hold_time

    def note_sent(self, now: float) -> None:
        """Take note that a suspect is sent."""
        self._sent_at = now

    def note_loss(self, in_flight: Sequence[Receipt], settled: int, text: str, now: float) -> Sequence[Receipt]:
        """Take note that the connection is lost.

        Args:
            in_flight: the messages that may have arrived, and have no answer.
            settled: how many messages are settled so far.
            text: why it was lost.
            now: seconds.

        Returns:
            The suspects; if `is_proven`, the one that is poison.
        """
        if settled > self._settled:
            self._settled = settled
            self._losses = self._candidate_losses = self.candidate = 0
        if not in_flight:
            return ()
        self._losses += 1
        if self._losses < _SUSPICIOUS:
            return ()
        if len(in_flight) > 1:
            return narrow_down(in_flight, text) if self._losses == _SUSPICIOUS else in_flight
        number = in_flight[0]._number
        if number != self.candidate:
            self.candidate, self._candidate_losses = number, 0
        elif now - self._sent_at <= self._hold_time:
            self._candidate_losses += 1
        return in_flight

    def send_at(self, receipt: Receipt) -> float | None:
        """Return when this message may be sent; ``None`` if it may at any time, because it is not the candidate."""
        return self._send_at if receipt._number == self.candidate else None
