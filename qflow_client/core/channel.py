"""Moves and settles messages when a channel opens or ends.

If at least one byte of a message was written before its channel ended, this module assumes that the message may have
arrived. With the setting ``on_disconnect="republish"``, these messages are sent again on the next channel, as second
copies. With the setting ``"fail"``, and at the end of the producer, every message is settled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from qflow_client.amqp.frames import PublishEncoder
from qflow_client.core.admission import Admission
from qflow_client.core.refusals import means_no_room
from qflow_client.core.reporting import Reports
from qflow_client.core.resending import Resending
from qflow_client.core.settling import Reply, Settling
from qflow_client.core.suspects import narrow_down
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.events import HoldKind
from qflow_client.receipt import COSTS_CONNECTION, Outcome, Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings

__all__ = ["INTERRUPTED", "Channel"]

# Class and method ids in ``Channel.Close``: those of ``Basic.Publish``, and those for "no method".
_BASIC_PUBLISH = (60, 40)
_NO_METHOD = (0, 0)

#: The reported reason for the end of a channel or a producer, if an interrupt has lost the real reason.
INTERRUPTED = "the connection is lost"

# If a producer with an outbox ends, messages with these outcomes become *stored* instead. The next producer sends them.
_SENT_BY_NEXT_PRODUCER = (Outcome.UNKNOWN, Outcome.FAILED, Outcome.NACKED)


class Channel:
    """The current channel of a producer. A producer has at most one channel at a time."""

    __slots__ = (
        "_admission",
        "_encoder",
        "_id_prefix",
        "_opening",
        "_reports",
        "_resending",
        "_settings",
        "_settling",
        "_unconfirmed",
        "is_over",
        "is_restoring",
        "number",
        "opened_at",
        "was_open",
    )

    def __init__(
        self,
        settings: ProducerSettings,
        id_prefix: str | None,
        encoder: type[PublishEncoder],
        admission: Admission,
        reports: Reports,
        unconfirmed: Unconfirmed,
        resending: Resending,
        settling: Settling,
    ) -> None:
        self._settings = settings
        self._id_prefix = id_prefix
        self._encoder = encoder
        self._admission = admission
        self._reports = reports
        self._unconfirmed = unconfirmed
        self._resending = resending
        self._settling = settling
        #: The number of the open channel; ``None`` if no channel is open.
        self.number: int | None = None
        #: When the newest channel was opened; minus infinity before the first one.
        self.opened_at = -math.inf
        # The number and the maximum frame size of a channel whose `open` is not complete; otherwise ``None``.
        self._opening: tuple[int, int] | None = None
        #: Whether a channel was ever open. `EncodedProtocol.forget_past` (of the drop-ins) sets it to False again.
        self.was_open = False
        #: True while declarations of the program are being repeated. No message is written meanwhile.
        self.is_restoring = False
        #: True if no further channel will be opened.
        self.is_over = False
        self._reset(0, 0)

    def _reset(self, number: int, frame_max: int) -> None:
        """Forget the messages on the wire, and make a new encoder. `number` is 0 if there is no channel."""
        settings = self._settings
        mandatory = settings.is_mandatory
        encoder = self._encoder(number, frame_max, id_prefix=self._id_prefix or "", mandatory=mandatory)
        self._admission.use_encoder(encoder, settings.exchange, settings.routing_key)
        self._unconfirmed.begin(encoder)

    # Opening.

    def open(self, number: int, frame_max: int, now: float) -> None:
        """Continue with a new channel on which no message was published yet, see `ProducerProtocol.channel_opened`."""
        self._opening = number, frame_max
        self._open(now)

    def _open(self, now: float) -> None:
        assert self._opening is not None
        number, frame_max = self._opening
        self._reset(number, frame_max)
        self.opened_at = now
        self._resending.poison.note_open(now)
        self._encode_all(now)
        self.number = number
        self.count_unwritten(now)
        self._opening = None

    def _encode_all(self, now: float) -> None:
        """Encode the names and properties of admitted messages. Settle messages whose properties are too large."""
        # An interrupted call may have left settled messages in the collections.
        self._discard_settled()
        unfit: list[tuple[Receipt, str]] = []
        for receipt in (*self._resending.again, *self._admission.unsent):
            try:
                self._encode(receipt)
            except Exception as error:
                # The properties were encoded at admission, but do not fit into a frame of this channel.
                unfit.append((receipt, f"it cannot be encoded again: {error}"))
        for receipt, reason in unfit:
            self._settling.settle([receipt], self._outcome_at_end(receipt, ()), now, (0, reason))
        self._discard_settled()

    def _encode(self, receipt: Receipt) -> None:
        receipt._route = self._unconfirmed.encoder.route(receipt.exchange, receipt.routing_key)
        if receipt._number in self._resending.written_before:
            self._admission.prepare_again(receipt)
        else:
            self._admission.prepare(receipt)

    def count_unwritten(self, now: float) -> None:
        """Recount the unwritten bytes. Without a channel, the count is 0."""
        if self.number is None:
            self._admission.unwritten = 0
        else:
            self._admission.count_unwritten(lambda: self._resending.again, lambda: self._unconfirmed.outbound.size, now)

    # Ending.

    def disconnect(self, reason: str, now: float, *, held: bool = True) -> None:
        """Continue without a channel, and lift the holds that the old channel or its connection has caused.

        Args:
            held: whether to raise the hold ``disconnected``. `Consequences.review_holds` lifts it on the next channel.
        """
        self.number = None
        self._resending.refusals.stop_clock(now)
        gate = self._admission.gate
        if held:
            gate.hold(HoldKind.DISCONNECTED, now=now, detail=reason)
        for kind in (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED, HoldKind.TRANSPORT):
            gate.lift(kind, now=now)

    def closed_by_broker(self, code: int, text: str, method: tuple[int, int], now: float) -> str | None:
        """Handle a channel that the broker has closed, usually because of a message that the broker does not identify.

        Returns:
            The reason for the hold ``refused`` if the broker has no room and messages are sent again. Else ``None``.
        """
        confirms, resending = self._settings.confirms, self._resending
        begun = self._unconfirmed.begun()
        # Any begun message that was not returned may be the cause; without confirms, a settled message too.
        suspects: list[Receipt] = []
        if method in (_BASIC_PUBLISH, _NO_METHOD) and (confirms or self._unconfirmed.outbound.begun == 1):
            suspects = [each for each in begun if each._reply is None]
        no_room = resending.refusals.retries and means_no_room(code, text)
        # A message certainly caused the close only if it was alone in flight. Messages that were settled without an
        # answer (`has_abandoned`) may also have caused it. If ``Channel.Close`` names no method, an operator may have
        # closed the channel. In this case the message must also be a suspect of an earlier channel.
        told = method == _BASIC_PUBLISH or any(each._number in resending.suspects.numbers for each in suspects)
        is_only_suspect = len(suspects) == 1 and not self._unconfirmed.has_abandoned
        culprits = suspects if is_only_suspect and told and not no_room else []
        if not culprits and not confirms:
            words = (
                "%s: the broker closed the channel: %d %s; messages may be lost, and without confirms it is not "
                "known which"
            )
            self._reports.log(logging.WARNING, words, self._settings.name, code, text)
        if self._settings.on_disconnect is OnDisconnect.FAIL:
            self.settle_all(f"the broker closed the channel: {code} {text}", now, culprits, (code, text))
        elif no_room and suspects:
            expired = [each for each in suspects if resending.refusals.note_refusal(each, now)]
            outcome = Outcome.REJECTED if is_only_suspect else Outcome.UNKNOWN
            self.keep_unsettled(now, culprits=expired, reply=(code, text), outcome=outcome)
            if is_only_suspect:
                resending.refusals.note_answered(suspects[0])
            if self._admission.window.used:
                return f"{code} {text}"
        else:
            if culprits:
                suspects = []
            elif suspects and not resending.written_before.intersection(each._number for each in suspects):
                # If the text names an exchange, keep only suspects with this exchange. But if any of them was also
                # written on an earlier channel, keep all, because that channel's text may have named a wrong exchange.
                suspects = list(narrow_down(suspects, text))
            self.keep_unsettled(now, suspects, culprits, (code, text))
        return None

    def lost(self, reason: str, now: float, *, shared: bool) -> None:
        """Handle a lost connection if the producer will connect again, see `ProducerProtocol.connection_lost`."""
        suspects: Sequence[Receipt] = ()
        if not shared:
            in_flight = [each for each in self._unconfirmed.begun() if each._reply is None]
            settled = self._admission.admitted - self._admission.window.used
            suspects = self._resending.poison.note_loss(in_flight, settled, reason, now)
        if self._settings.on_disconnect is OnDisconnect.FAIL:
            self.settle_all(reason, now)
        elif self._resending.poison.is_proven:
            why = f"connections stay open without this message, and are lost when it is sent; {reason}"
            self.keep_unsettled(now, culprits=suspects, reply=(COSTS_CONNECTION, why), outcome=Outcome.UNKNOWN)
        else:
            self.keep_unsettled(now, suspects)

    def keep_unsettled(
        self,
        now: float,
        suspects: Sequence[Receipt] = (),
        culprits: Collection[Receipt] = (),
        reply: Reply | None = None,
        outcome: Outcome = Outcome.REJECTED,
    ) -> None:
        """Keep the unsettled messages for the next channel, in the order of admission (E1).

        Args:
            suspects: messages to be sent one at a time on the next channel.
            culprits: messages that are settled with `outcome` and not kept.
        """
        unsent, resending = self._admission.unsent, self._resending
        culprits = frozenset(culprits)
        # A returned message is answered, even if its ack did not come.
        answered = [each for each in self._unconfirmed.flight.values() if each in culprits or each._reply is not None]
        outcomes = [outcome if each in culprits else Outcome.RETURNED for each in answered]
        self._settling.settle(answered, outcomes, now, reply)
        begun = {each._number for each in self._unconfirmed.begun()}
        written = begun | resending.written_before
        left = [each for each in self._unconfirmed.flight.values() if each._outcome is None]
        resending.end_channel(
            [each for each in left if each._number in written],
            suspects,
            unanswered=[each for each in left if each._number in begun],
        )
        # If an interrupted call is repeated, skip the messages that are already in `unsent`.
        first = unsent[0]._number if unsent else self._admission.next_number
        unsent.extendleft([each for each in reversed(left) if each._number not in written and each._number < first])
        self._reset(0, 0)
        self._admission.unwritten = 0

    def settle_all(
        self, reason: str, now: float, culprits: Collection[Receipt] = (), reply: Reply | None = None
    ) -> None:
        """Settle `culprits` as *rejected*, and every other unsettled message as `_outcome_at_end` says."""
        self._settling.settle(tuple(culprits), Outcome.REJECTED, now, reply)
        begun = {receipt._number for receipt in self._unconfirmed.begun()}
        receipts = [receipt for receipt in self.unsettled() if receipt._outcome is None]
        self._settling.settle(receipts, [self._outcome_at_end(each, begun) for each in receipts], now, (0, reason))
        self._admission.unsent.clear()
        self._resending.clear()
        self._admission.gate.lift(HoldKind.REFUSED, now=now)
        self._reset(0, 0)
        self._admission.unwritten = 0

    def abandon(self, receipts: Sequence[Receipt], reason: str, now: float) -> None:
        """Stop sending unsettled messages, and settle them as `_outcome_at_end` says.

        Before this call, the caller must take back the frames of all messages without a written byte.
        """
        admission, resending, unconfirmed = self._admission, self._resending, self._unconfirmed
        begun = {receipt._number for receipt in unconfirmed.begun()}
        for receipt in receipts:
            resending.forget_sent(receipt)
            if receipt._number in begun:
                unconfirmed.has_abandoned = True
            elif self.number is not None:
                cost = admission.cost(receipt)
                admission.unwritten -= cost
        outcomes = [self._outcome_at_end(each, begun) for each in receipts]
        self._settling.settle(receipts, outcomes, now, (0, reason))
        for receipt in receipts:
            if tag := unconfirmed.tag_of(receipt):
                del unconfirmed.flight[tag]
        self._discard_settled()

    def _outcome_at_end(self, receipt: Receipt, begun: Collection[int]) -> Outcome:
        resending, number = self._resending, receipt._number
        if receipt._reply is not None:
            return Outcome.RETURNED
        if number not in begun and resending.refusals.is_refused(receipt):
            outcome = resending.refusals.outcome(receipt)
        else:
            outcome = Outcome.UNKNOWN if number in begun or number in resending.written_before else Outcome.FAILED
        if self.is_over and self._admission.store is not None and outcome in _SENT_BY_NEXT_PRODUCER:
            return Outcome.STORED
        return outcome

    def unsettled(self) -> tuple[Receipt, ...]:
        """Return the receipts of the unsettled messages, in the order of admission."""
        written = sorted(
            (*self._resending.again, *self._unconfirmed.flight.values()), key=lambda receipt: receipt._number
        )
        return (*written, *self._admission.unsent)

    def oldest_unsettled(self) -> int:
        """Return the lowest number of an unsettled message; the next number if all messages are settled."""
        parts = (
            self._unconfirmed.oldest_number(),
            *(each[0]._number for each in (self._resending.again, self._admission.unsent) if each),
        )
        return min(filter(None, parts), default=self._admission.next_number)

    # An unfinished step.

    def heal(self, now: float) -> None:
        """Repair the state after an unfinished step.

        Afterwards each unsettled message is in exactly one collection, and settled messages are in none.
        """
        self._discard_settled()
        self._unconfirmed.heal(self._resending.again, self._admission.unsent)
        self._resending.heal(self._unconfirmed.tag_of)
        if self._opening is not None:
            self._open(now)
        elif self.number is None and self._settings.on_disconnect is OnDisconnect.FAIL:
            # The interrupt may have come while the channel ended. So end the channel again, here and below.
            self._end_again(now)
            self.settle_all(INTERRUPTED, now)
        elif self.number is None:
            self._end_again(now)
            self.keep_unsettled(now)

    def _end_again(self, now: float) -> None:
        self.disconnect(INTERRUPTED, now, held=self._admission.closed is None)

    def _discard_settled(self) -> None:
        self._resending.discard_settled()
        unsent = self._admission.unsent
        # Iterate over a copy and remove the messages one by one, because other threads may admit messages meanwhile.
        for receipt in [each for each in tuple(unsent) if each._outcome is not None]:
            unsent.remove(receipt)
