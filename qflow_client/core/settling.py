"""Settles messages, each of them exactly once.

A batch of receipts is first stored in `_batch`. Then each receipt gets its outcome, the batch is reported, and the room
of the messages is freed. After an interrupt (see `step`), `heal` continues with the stored batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from qflow_client.amqp.frames import FrameError
from qflow_client.core.admission import Admission
from qflow_client.core.limits import Limits
from qflow_client.core.reporting import Reports
from qflow_client.core.resending import Resending
from qflow_client.core.returns import Returns
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.events import HoldKind
from qflow_client.message import Message
from qflow_client.receipt import UNDELIVERED, Outcome, Receipt

__all__ = ["Settling"]

#: A reply code (or 0) and a reply text.
Reply = tuple[int, str]


class Settling:
    """Matches the broker's answers with messages, and settles the messages.

    Args:
        keeps_undelivered: whether messages that are not delivered stay in the outbox (E13).
    """

    __slots__ = (
        "_admission",
        "_batch",
        "_confirms",
        "_keeps_undelivered",
        "_limits",
        "_reports",
        "_resending",
        "_returns",
        "_stage",
        "_unconfirmed",
    )

    def __init__(
        self,
        admission: Admission,
        limits: Limits,
        reports: Reports,
        returns: Returns,
        unconfirmed: Unconfirmed,
        resending: Resending,
        confirms: bool,
        *,
        keeps_undelivered: bool = False,
    ) -> None:
        self._admission = admission
        self._confirms = confirms
        self._limits = limits
        self._reports = reports
        self._returns = returns
        self._unconfirmed = unconfirmed
        self._resending = resending
        self._keeps_undelivered = keeps_undelivered
        # The batch that is being settled; ``None`` if there is none. If it has only one outcome, all receipts get this
        # outcome. Receipts without a reply get the reply of the batch. The last element is the time.
        self._batch: tuple[list[Receipt], Outcome | Sequence[Outcome], Reply | None, float] | None = None
        # The next stage of `_finish`: 0 sets outcomes, 1 reports, 2 calls the observer, 3 updates returns and store.
        self._stage = 0

    # Settling.

    def settle(
        self,
        receipts: Sequence[Receipt],
        outcome: Outcome | Sequence[Outcome],
        now: float,
        reply: Reply | None = None,
    ) -> None:
        """Settle admitted messages. The caller then removes the messages from their collection.

        Args:
            outcome: one outcome for all messages, or one for each message. For a returned message, ``CONFIRMED``
                becomes ``RETURNED``.
            reply: the reply to store in receipts that have no reply yet.
        """
        self._batch, self._stage = (list(receipts), outcome, reply, now), 0
        self._finish()
        self._limits.release(receipts, now)

    def settle_silently(self, receipt: Receipt, outcome: Outcome, now: float) -> None:
        """Same as `settle`, but report nothing to the application. The caller reports the outcome itself."""
        receipt._outcome = outcome
        self._batch, self._stage = ([receipt], outcome, None, now), 2
        self._finish()
        self._limits.release((receipt,), now)

    def settle_run(self, first: int, stop: int, outcome: Outcome, now: float) -> None:
        """Settle the unsettled messages with the tags in ``range(first, stop)``, which are all written."""
        receipts: list[Receipt] = []
        self._batch, self._stage = (receipts, outcome, None, now), 0
        self._unconfirmed.take_into(receipts, first, stop)
        self._finish()
        self._limits.release(receipts, now)

    def heal(self) -> None:
        """Finish the batch of an unfinished step."""
        if self._batch is not None:
            receipts = self._batch[0]
            receipts[:] = [receipt for receipt in receipts if receipt is not None]
            self._finish()

    def _finish(self) -> None:
        """Settle the batch. After an interrupt, the next call continues at `_stage`."""
        assert self._batch is not None
        receipts, outcome, reply, now = self._batch
        reports = self._reports
        all_confirmed = False
        if self._stage == 0:
            if outcome is Outcome.CONFIRMED:
                all_confirmed = self._confirm(receipts)
            else:
                self._end(receipts, outcome, reply)
            self._stage = 1
        if self._stage == 1:
            if not all_confirmed or reports.settled is not None:
                reports.add_settled(receipts)
            # After its last change, `add_settled` calls no function. So no interrupt comes before the next line.
            self._stage = 2
        if self._stage == 2:
            self._stage = 3
            if self._admission.observer is not None and receipts:
                self._admission.observer.settled(receipts, now)
        if self._returns.by_id:
            self._returns.forget(receipts)
        if self._admission.store is not None:
            self._admission.store.settled(receipts)
        self._batch = None

    def _confirm(self, receipts: Sequence[Receipt]) -> bool:
        """Set the outcomes of confirmed messages. Return True if the broker has returned none of them."""
        wake = self._reports.wake
        confirmed, all_confirmed = Outcome.CONFIRMED, True
        for receipt in receipts:
            if receipt._reply is None:
                receipt._outcome = confirmed
            else:
                receipt._outcome, all_confirmed = self._kept(receipt, Outcome.RETURNED), False
            if receipt._waiter is not None:
                wake.append(receipt._waiter)
        return all_confirmed

    def _end(self, receipts: Sequence[Receipt], outcome: Outcome | Sequence[Outcome], reply: Reply | None) -> None:
        wake = self._reports.wake
        for at, receipt in enumerate(receipts):
            how = outcome if isinstance(outcome, Outcome) else outcome[at]
            instead = self._kept(receipt, how)
            if receipt._reply is None:
                # If there is no reply and *stored* replaces an outcome, the reply text names the replaced outcome.
                receipt._reply = (0, str(how)) if reply is None and instead is not how else reply
            receipt._outcome = instead
            if receipt._waiter is not None:
                wake.append(receipt._waiter)

    def _kept(self, receipt: Receipt, outcome: Outcome) -> Outcome:
        if not self._keeps_undelivered or outcome not in UNDELIVERED:
            return outcome
        receipt._kept_as = outcome
        return Outcome.STORED

    # Answers of the broker.

    def answer(self, tag: int, multiple: bool, outcome: Outcome, now: float) -> None:
        """Handle an answer of the broker: ``CONFIRMED`` or ``NACKED``. `multiple` is as in ``Basic.Ack``."""
        # The broker cannot answer a message that is only partly written.
        written = self._unconfirmed.outbound.finished
        if tag > written or (tag == 0 and not multiple):
            reports = self._reports
            words = "%s: the broker answered delivery tag %d, but %d messages were written; ignored"
            reports.log(logging.WARNING, words, reports.name, tag, written)
            return
        # With `multiple`, tag 0 means all messages (AMQP 0-9-1, Basic.Ack).
        first, stop = (self._unconfirmed.oldest, (tag or written) + 1) if multiple else (tag, tag + 1)
        if outcome is Outcome.NACKED and self._resending.refusals.retries:
            self._refuse(first, stop, now)
        else:
            self.settle_run(first, stop, outcome, now)

    def settle_acked(self, acks: Iterable[tuple[int, int]], now: float) -> None:
        """Settle the messages that the acks of one read confirm. `TapChannel.on_acks` describes `acks`.

        The result is the same as if `answer` were called for each ack. But messages with consecutive tags are settled
        together, which takes less time.
        """
        written = self._unconfirmed.outbound.finished
        # The highest tag up to which all messages are confirmed but not settled by this loop yet; 0 if there is none.
        confirmed = 0
        for tag, count in acks:
            last = tag + count - 1
            if count == 0 and tag <= written:
                confirmed = max(confirmed, tag or written)
            elif count > 0 and tag == confirmed + 1 and last <= written:
                confirmed = last
            else:
                self._settle_up_to(confirmed, now)
                confirmed = 0
                if tag > 0 and count and last <= written:
                    self.settle_run(tag, last + 1, Outcome.CONFIRMED, now)
                else:
                    for each in range(tag, tag + (count or 1)):
                        self.answer(each, count == 0, Outcome.CONFIRMED, now)
        self._settle_up_to(confirmed, now)

    def _settle_up_to(self, tag: int, now: float) -> None:
        if tag:
            self.settle_run(self._unconfirmed.oldest, tag + 1, Outcome.CONFIRMED, now)

    def note_return(self, reply: Reply, message: Message, exchange: str, routing_key: str) -> None:
        """Record a return in the receipt. An ack, a nack, or (after an earlier nack) `give_up_refused` settles it."""
        reports = self._reports
        receipt = self._returns.take(message.message_id, exchange, routing_key)
        if receipt is not None:
            receipt._reply = reply
        elif not self._confirms:
            # Without confirms, the message is settled already. So make a new receipt, which `flush` or `close` reports.
            try:
                route = self._unconfirmed.encoder.route(exchange, routing_key)
            except ValueError as error:
                # Invalid bytes were replaced when the name was decoded, so the name may be too long now.
                raise FrameError(f"the broker returned a message that cannot have been published: {error}") from error
            receipt = self._admission.receipt_type(message, route, None)
            receipt._reply = reply
            receipt._outcome = Outcome.RETURNED
            reports.log(logging.WARNING, "%s: %s", reports.name, receipt.describe())
            reports.add_failures((receipt,))
        else:
            words = "%s: the broker returned message %s to %r/%r (%d %s), which is not in flight; ignored"
            values = message.message_id, exchange, routing_key, *reply
            reports.log(logging.WARNING, words, reports.name, *values)

    def settle_written(self, now: float) -> None:
        """Settle the written messages of a producer without confirms."""
        self.settle_run(self._unconfirmed.oldest, self._unconfirmed.outbound.finished + 1, Outcome.SENT, now)

    # Refusals of the broker.

    def _refuse(self, first: int, stop: int, now: float) -> None:
        """Send messages with tags in ``range(first, stop)`` again later. Settle those that cannot be sent again."""
        resending, unconfirmed = self._resending, self._unconfirmed
        for tag in range(max(first, unconfirmed.oldest), stop):
            receipt = unconfirmed.flight.get(tag)
            if receipt is None:
                continue
            was_probe = receipt is resending.refusals.probe
            is_over = resending.refusals.note_refusal(receipt, now)
            reply = None
            if not is_over:
                try:
                    self._encode_again(receipt)
                except Exception as error:
                    # With the header that marks a second copy, the properties are too large for a frame.
                    is_over, reply = True, (0, f"it cannot be sent again: {error}")
                    resending.refusals.forget(receipt)
            # A refused probe shows that the broker has no room, even if the probe is not sent again. But if the broker
            # has returned the probe too, the cause may be a missing queue.
            has_no_room = not is_over or (was_probe and receipt._reply is None)
            if is_over:
                resending.forget_sent(receipt)
                self.settle((receipt,), Outcome.NACKED, now, reply)
            else:
                resending.put_refused(receipt)
            del unconfirmed.flight[tag]
            if has_no_room:
                self.hold_refused("Basic.Nack", now, new_pause=was_probe)

    def _encode_again(self, receipt: Receipt) -> None:
        admission = self._admission
        admission.prepare_again(receipt)
        cost = admission.cost(receipt)
        # The cost is computed before the addition, see rule 2 in `step`.
        admission.unwritten += cost

    def hold_refused(self, detail: str, now: float, *, new_pause: bool) -> None:
        """Raise the hold ``refused``, and delay the next probe, see `Refusals.delay_probe`."""
        if self._resending.refusals.delay_probe(self._resending.again, now, new_pause=new_pause):
            self._limits.controller.gate.hold(HoldKind.REFUSED, now=now, detail=detail)

    def give_up_refused(self, now: float) -> None:
        """Settle the messages of `Resending.again` whose time for retries is over, see `Refusals.is_over`."""
        expired = self._resending.refused_too_long(now)
        for receipt in expired:
            cost = self._admission.cost(receipt)
            self._admission.unwritten -= cost
        outcomes = [self._resending.refusals.outcome(receipt) for receipt in expired]
        self.settle(expired, outcomes, now)
        self._resending.discard_settled()
