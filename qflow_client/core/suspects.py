"""Messages that may be the cause of a closed channel or of lost connections.

If a broker closes a channel because of a message, the broker does not identify the message. So all messages that were
in flight become *suspects*. Suspects are sent *alone*: one at a time, with no other message on the wire. If the broker
then closes the channel again, the cause is known, and the message is settled as *rejected*. If the reply text names an
exchange, usually only the messages to this exchange become suspects, see `narrow_down`.

A connection may also be lost because a message crashes the broker, or exceeds the size limit of a proxy. One loss
proves nothing, so `PoisonDetector` counts the losses since a message was last settled. After `_SUSPICIOUS` losses, the
messages in flight become suspects. If the connection is then lost while a single message is in flight, this message
becomes the *candidate*. The candidate is sent only after a new channel has stayed open for a while. So losses while the
broker is down do not count against the candidate. If `_PROOF` connections are lost soon after the candidate was sent,
the candidate is settled as *unknown*.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from qflow_client.receipt import Receipt

__all__ = ["PoisonDetector", "Suspects", "narrow_down"]

_QUOTED = re.compile(r"'([^']*)'")

# RabbitMQ's name of the default exchange.
_DEFAULT_EXCHANGE = "amq.default"

_SUSPICIOUS = 3
_PROOF = 5


def narrow_down(suspects: Sequence[Receipt], text: str) -> Sequence[Receipt]:
    """Return the suspects whose exchange and routing key the reply text contains in single quotes.

    If there are none, return the suspects whose exchange the text contains. If there are none either, return all.
    """
    named = set(_QUOTED.findall(text))
    there = [each for each in suspects if (each.exchange or _DEFAULT_EXCHANGE) in named]
    return [each for each in there if each.routing_key in named] or there or suspects


class Suspects:
    """The messages that may have ended an earlier channel, and that are now sent one at a time."""

    __slots__ = ("alone", "numbers")

    def __init__(self) -> None:
        #: Numbers of messages that may have caused the end of an earlier channel. Some of them may be settled by now.
        self.numbers: set[int] = set()
        #: The last suspect that was sent on this channel and not taken back, or ``None``. It may be settled already.
        self.alone: Receipt | None = None

    @property
    def is_one_on_wire(self) -> bool:
        """Whether a suspect is on the wire. If so, no other message can be sent."""
        return self.alone is not None and not self.alone.done

    def end_channel(self, unsettled: Collection[int], suspects: Iterable[Receipt]) -> None:
        """Record the end of a channel: keep only the suspects with numbers in `unsettled`, and add new suspects."""
        self.numbers = self.numbers.intersection(unsettled).union(each._number for each in suspects)
        self.alone = None

    def count_before_first(self, source: Sequence[Receipt]) -> int:
        """Return how many messages of `source` come before the first suspect."""
        if not self.numbers:
            return len(source)
        return next((at for at, each in enumerate(source) if each._number in self.numbers), len(source))

    def forget_sent(self, receipt: Receipt) -> None:
        if receipt is self.alone:
            self.alone = None


class PoisonDetector:
    """Finds the message that causes lost connections.

    Args:
        hold_time: seconds that a new channel has to stay open before the candidate is sent. A loss of the connection
            within this time after the candidate was sent counts against the candidate.
    """

    __slots__ = ("_candidate_losses", "_hold_time", "_losses", "_send_at", "_sent_at", "_settled", "candidate")

    def __init__(self, hold_time: float) -> None:
        self._hold_time = hold_time
        # How many connections with messages in flight were lost since a message was last settled.
        self._losses = 0
        # How many messages were settled before these losses.
        self._settled = -1
        #: The message number of the candidate; 0 if there is none.
        self.candidate = 0
        # `_send_at`: the earliest time for sending the candidate. `_sent_at`: when a suspect was last sent.
        self._send_at = self._sent_at = 0.0
        # How many connections were lost soon after the candidate was sent.
        self._candidate_losses = 0

    @property
    def is_proven(self) -> bool:
        """Whether the candidate counts as the cause, because `_PROOF` connections were lost soon after it was sent."""
        return self._candidate_losses >= _PROOF

    def note_open(self, now: float) -> None:
        self._send_at = now + self._hold_time

    def note_sent(self, now: float) -> None:
        self._sent_at = now

    def note_loss(self, in_flight: Sequence[Receipt], settled: int, text: str, now: float) -> Sequence[Receipt]:
        """Record a lost connection, and return the messages that become suspects.

        Args:
            in_flight: the messages that may have arrived, and that the broker has not answered.
            settled: the number of messages that were settled so far.

        Returns:
            The new suspects. If `is_proven`, the only one is the candidate.
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
        """Return the earliest time for sending the candidate; ``None`` for other messages, which need not wait."""
        return self._send_at if receipt._number == self.candidate else None
