"""`OutboxStore` connects a `ProducerProtocol` to its outbox. The class implements `qflow_client.core.store.Store`.

When a message enters the window or is settled, the protocol calls the store. In the same step (see `core.step`), the
store notes the change in the outbox. The store does no I/O. The producer itself waits for the disk before `send`
returns. In the outbox each message has a number, the *sequence*. The protocol has other numbers for the window.

A message with a position (E13) is written to the broker only when it is on disk. Otherwise, after a crash, the broker
could have a message whose position is not on disk. The next process would read its input from the earlier position, and
send the message again without the header of a second copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.step import step
from qflow_client.core.tickets import SendTicket
from qflow_client.events import HoldKind
from qflow_client.flow import Limiter
from qflow_client.message import Message, position_of
from qflow_client.outbox.backlog import Backlog
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox
from qflow_client.outbox.requests import ReadRequest, Requests
from qflow_client.outbox.spilled import Spilled
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import OnOutboxFull, WhenFlowed

__all__ = ["OutboxStore"]


def _size(payload: bytes | Message) -> int:
    return len(payload) if type(payload) is bytes else len(payload.body)  # type: ignore[union-attr]  # a Message


class _Room(Limiter):
    """Makes messages wait while the outbox has no room for them (``outbox_full="block"``)."""

    __slots__ = ("_outbox", "_requests")

    def __init__(self, outbox: Outbox, requests: Requests) -> None:
        self._outbox = outbox
        self._requests = requests

    def refusal(self, size: int, now: float) -> str | None:
        if self._outbox.has_room(size):
            return None
        if self._requests.commit:
            # The requested commit deletes settled messages. Wake the writer, which may wait before the commit.
            self._requests.writer.commit_now()
        return HoldKind.OUTBOX

    def add(self, size: int, now: float) -> bool:
        """Do nothing: the outbox counts its messages."""
        return False

    def remove(self, size: int, count: int = 1) -> None:
        """Do nothing: the outbox counts its messages."""

    @property
    def resumable(self) -> bool:
        return True

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class OutboxStore:
    """Connects a producer to its outbox. The store attaches itself to the protocol before the first message."""

    def __init__(
        self, protocol: ProducerProtocol, outbox: Outbox, spilled_type: type[Spilled], writer: Any, now: float
    ) -> None:
        self.outbox = outbox
        self.requests = Requests(protocol.reports)
        self.requests.writer = writer
        #: Shared with the protocol: the next step of the store or the protocol repairs an interrupted step of either.
        self.steps = protocol.steps
        self._admission, self._line, self._resending = protocol.admission, protocol.line, protocol.parts.resending
        self._controller, self._gate, self._reports = protocol.controller, protocol.gate, protocol.reports
        self._blocks = protocol.settings.outbox_full is OnOutboxFull.BLOCK
        self._spills = protocol.settings.when_flowed is WhenFlowed.SPILL
        #: Limits admission by the room in the outbox; ``None`` if the store rejects messages that do not fit.
        self.limiter = _Room(outbox, self.requests) if self._blocks else None
        # Messages of the backlog (see `backlog`) are already on disk, so the room in the outbox does not limit them.
        self.backlog = Backlog(protocol, outbox, self.requests, protocol.controller.limiter, spilled_type)
        # The sequence of each message in the window; the keys are numbers of the protocol.
        self._sequences: dict[int, int] = {}
        # The same as `_sequences`, but only for messages with a position that are not known to be on disk, in order.
        # Not a plain dict, which is slow if its first entries are removed.
        self._not_on_disk: OrderedDict[int, int] = OrderedDict()
        #: If True, the first unsent message is in `_not_on_disk`, so no message can be written before a commit.
        self.keeps_all_back = False
        # True after the end of the producer (`end`), until `report_unwritten` is called.
        self._is_ended = False
        # Receipts of messages that stay in the outbox, by sequence. Receipts of messages on disk may be missing.
        self._stored: OrderedDict[int, Receipt] = OrderedDict()
        # `_drop_orphans` need not withdraw any message up to this sequence.
        self._last_sequence = outbox.last
        if self.has_backlog:
            self.backlog.hold(f"{len(outbox)} messages were left in {outbox.path}", now)
        protocol.attach_store(self, now)

    def check_room(self, payload: bytes | Message, exchange: str, routing_key: str) -> None:
        size = _size(payload)
        # With ``outbox_full="block"``, reject only a message that never fits: all later messages would wait behind it.
        if not self.outbox.has_room(size, if_empty=self._blocks):
            raise self.outbox.full_error(size, payload, exchange, routing_key)

    def send(
        self, payload: bytes | Message, exchange: str, routing_key: str, now: float, *, spills: bool
    ) -> Receipt | None:
        """Put a message into the window and the outbox. If it cannot enter and `spills` is True, spill it.

        Returns:
            The receipt. The message is on disk when `Outbox.durable` reaches the present `Outbox.last`. ``None`` if
            nothing has changed: the producer is flowed and may not spill, senders wait in line, or there is no room.

        Raises:
            ProducerClosed: the producer admits no more messages.
            OutboxFull: there is no room and `outbox_full` is ``"raise"``, or the message is larger than the outbox.
            TypeError, ValueError: the message cannot be encoded.
        """
        self.check_room(payload, exchange, routing_key)
        receipt = self._admission.send(payload, exchange, routing_key, now)
        if receipt is not None or not spills or self._controller.waiting or not self.outbox.has_room(_size(payload)):
            return receipt
        return self._spill_one(payload, exchange, routing_key, now)

    @step
    def _spill_one(self, payload: bytes | Message, exchange: str, routing_key: str, now: float) -> Spilled:
        return self._spill(payload, exchange, routing_key, now)

    def _spill(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        now: float,
        ticket: SendTicket | None = None,
    ) -> Spilled:
        """Put a message into the backlog. If it waited in line, its `ticket` gets the receipt."""
        outbox, backlog, last_before = self.outbox, self.backlog, self.backlog.last
        # Names that cannot be encoded raise an error here.
        route = self._admission.encoder.route(exchange, routing_key)
        try:
            receipt, message_id = backlog.make_receipt(payload, route, outbox.last + 1)
            position = position_of(payload)
            outbox.put(payload, exchange, routing_key, message_id, permit=False, overdraw=True, position=position)
            backlog.append(receipt, now)
            if ticket is not None:
                ticket.receipt = receipt
            # After this line the message is spilled, even if an exception such as KeyboardInterrupt follows.
            self._last_sequence = receipt._sequence
            if self._admission.observer is not None:
                self._admission.observer.spilled(payload, receipt)
        except BaseException:
            if self._last_sequence < outbox.last:
                backlog.last = last_before
                if ticket is not None:
                    ticket.receipt = None
            self._drop_orphans()
            backlog.lift(now)
            raise
        backlog.request_next()
        return receipt

    def spill_line(self, now: float) -> None:
        controller = self._controller
        while self._spills and controller.waiting and self.outbox.has_room(controller.next_size):
            ticket = controller.dismiss()
            assert isinstance(ticket, SendTicket)
            try:
                if ticket.claim():
                    self._spill(ticket.payload, ticket.exchange, ticket.routing_key, now, ticket)
                else:
                    # The sender has stopped waiting, but could not remove its ticket, because another step was running.
                    ticket.cancelled = True
            except Exception as error:
                if ticket.receipt is not None:
                    # The message is already in the outbox, so the error comes from a signal handler.
                    raise
                # The sender gets the error, and the other tickets in the line continue.
                ticket.error = error
            self._reports.wake.append(ticket.waiter)
            del self._line.tickets[ticket]
        if self._gate.is_held_by(HoldKind.OUTBOX):
            # Lift the hold for missing room if the outbox now has room for the messages in the line.
            controller.look(now)

    @property
    def is_held(self) -> bool:
        """Whether a hold stops new messages. If so, `look_again` is needed after a commit, which may have made room."""
        return not self._gate.is_open

    @property
    def has_waiting(self) -> bool:
        return self._controller.waiting > 0

    @step
    def look_again(self, now: float) -> None:
        """After a commit, let messages with positions be written, and admit messages that waited for room."""
        self.keeps_all_back = False
        self._line.grant(now)

    @step
    def expire(self, now: float) -> None:
        """Settle messages of the backlog that are too old, even if a hold stops the backlog."""
        if self.backlog.ready:
            self._line.grant(now)
        self.backlog.request_expired()

    @step
    def feed(
        self, request: ReadRequest, batch: Sequence[StoredMessage], damaged: Mapping[int, str], now: float
    ) -> None:
        """Handle the messages that the writer has read, see `Backlog.feed`."""
        self.backlog.feed(request, batch, damaged, now)
        self._line.grant(now)

    @step
    def read_again(self, _now: float) -> None:
        """Request the same part of the backlog again, because the writer could not read it."""
        self.backlog.request_again()

    def admitting(self, receipt: Receipt, number: int) -> None:
        sequence, self.backlog.admitting = self.backlog.admitting, 0
        # A message of the backlog (`sequence` is not 0) is in the outbox already.
        if not sequence:
            payload, message_id = receipt._payload, f"{self._admission.id_prefix}{number:012x}"
            exchange, routing_key = receipt.exchange, receipt.routing_key
            position = position_of(payload)
            sequence = self.outbox.put(
                payload, exchange, routing_key, message_id, overdraw=self._blocks, position=position
            )
            if position is not None:
                is_first = not self._not_on_disk
                self._not_on_disk[number] = sequence
                if not self._admission.unsent and not self._resending.again:
                    self.keeps_all_back = True
                # Usually the sender commits the message. Request a commit, in case an interrupt prevents this.
                self.requests.request_commit(ends_wait=is_first)
        self._sequences[number] = sequence

    def heal(self, unsettled: Sequence[Receipt]) -> None:
        self.keeps_all_back = False
        self.backlog.heal()
        numbers = {receipt._number for receipt in unsettled}
        for kept in (self._sequences, self._not_on_disk):
            while kept and next(reversed(kept)) not in numbers:
                kept.popitem()
        self._drop_orphans()
        self.backlog.drop_admitted(next(reversed(self._sequences.values()), 0))

    def _drop_orphans(self) -> None:
        """Withdraw messages that an interrupted step put into the outbox, but did not admit."""
        admitted = max(self._last_sequence, next(reversed(self._sequences.values()), 0))
        if self.outbox.last > admitted:
            self.outbox.withdraw(admitted + 1, self.outbox.last)
            self.requests.request_commit()
        self._last_sequence = self.outbox.last

    @property
    def waits_for_disk(self) -> bool:
        """Whether some messages may have to wait for a commit before they are written to the broker."""
        return bool(self._not_on_disk)

    def count_writable(self, unsent: deque[Receipt]) -> int:
        waiting = self._not_on_disk
        # One read of `durable` is enough, because this value never decreases.
        durable = self.outbox.durable
        count = len(unsent)
        while waiting:
            number = next(iter(waiting))
            if waiting[number] > durable:
                count = bisect_left(unsent, number, key=attrgetter("_number"))
                break
            del waiting[number]
        if count:
            self.keeps_all_back = False
        return count

    def settled(self, receipts: Sequence[Receipt]) -> None:
        sequences, settle = self._sequences, self.outbox.settle
        first = last = 0
        for receipt in receipts:
            sequence = sequences.get(receipt._number, 0)
            # At the end of this method, the message is no longer in `_sequences`. So raise `_last_sequence`, or else
            # `_drop_orphans` would withdraw the message.
            self._last_sequence = max(self._last_sequence, sequence)
            if receipt._outcome is Outcome.STORED:
                # The message stays for the next producer.
                if sequence:
                    self._note_stored(sequence, receipt)
                continue
            if sequence == last + 1 and last:
                last = sequence
                continue
            if last:
                settle(first, last)
            first = last = sequence
        if last:
            settle(first, last)
        # Remove the messages last: if this call is interrupted, the protocol repeats it.
        for receipt in receipts:
            sequences.pop(receipt._number, None)
        if self._not_on_disk:
            self._keep_nothing_back_for(receipts)
        self.requests.request_commit()

    def _note_stored(self, sequence: int, receipt: Receipt) -> None:
        """Keep the receipt of a *stored* message until the message is on disk. `report_unwritten` may need it."""
        stored, durable = self._stored, self.outbox.durable
        # At the end, keep all receipts, because even messages on disk are lost if the file was deleted.
        while not self._reports.is_ending and stored and (first := next(iter(stored))) <= durable:
            del stored[first]
        stored[sequence] = receipt

    def _keep_nothing_back_for(self, settled: Sequence[Receipt]) -> None:
        """Forget that these settled messages wait for a commit, because they will not be written to the broker."""
        for receipt in settled:
            if receipt._outcome is not Outcome.STORED:
                self._not_on_disk.pop(receipt._number, None)
        self.keeps_all_back = False

    @property
    def has_backlog(self) -> bool:
        return self.backlog.has_messages

    def admit_backlog(self, now: float) -> None:
        self.backlog.admit(now)

    def when_flushed(self, waiter: Any) -> None:
        self.backlog.when_flushed(waiter)

    def forget_waiter(self, waiter: Any) -> bool:
        return self.backlog.forget_waiter(waiter)

    def next_timer(self, now: float) -> float | None:
        return self.backlog.next_timer(now)

    def end(self, reason: str) -> None:
        self._stored |= self.backlog.end(reason)
        self._is_ended = True

    def report_unwritten(self) -> int:
        """After the outbox is closed, report messages that should be in it and are not on disk. Return their number.

        Until now, the receipts of these messages have the outcome *stored*, because the producer settles them before it
        closes the outbox. The outcome becomes *failed* if the message was certainly not written to the broker, and can
        be sent again safely: it was spilled, or it has a position and was not on disk. The outcome becomes *unknown*
        for other messages, and if a thread may still be writing the message to the outbox. If the file was deleted, and
        its messages could not be read in time, messages that are only in the file are counted.
        """
        left = self.outbox.left
        if self.outbox.is_lost:
            self._report_unread(left)
            return left
        count = 0
        for sequence, stored in self.outbox.unwritten().items():
            receipt = self._stored.pop(sequence, None)
            is_spilled = self.backlog.read_to < sequence <= self.backlog.last
            is_unsent = is_spilled or (receipt is not None and receipt._number in self._not_on_disk)
            is_unsent = is_unsent and not stored.may_be_second_copy and self.outbox.is_closed
            outcome = Outcome.FAILED if is_unsent else Outcome.UNKNOWN
            reply = self._unwritten_reply()
            # For a spilled message, `on_delivery` was already called with *stored*. `close` by itself reports only
            # messages of the window, so add the spilled message to the failures that `close` reports.
            is_new = is_spilled and self._reports.settled is not None
            if receipt is None:
                if not self._is_ended:
                    continue
                # The message's receipt no longer exists, so make a new receipt.
                route = self._admission.encoder.route(stored.exchange, stored.routing_key)
                receipt, is_new = self._admission.receipt_type(stored.message, route, None), True
                receipt._number = sequence
            receipt._payload, receipt._reply, receipt._outcome = stored.message, reply, outcome
            if is_new:
                self._reports.add_failures((receipt,))
            count += 1
        self._is_ended = False
        return count

    def _report_unread(self, left: int) -> None:
        """Report the `left` messages of a deleted file that is not read yet."""
        stored, self._stored = self._stored, OrderedDict()
        for receipt in stored.values():
            receipt._reply, receipt._outcome = self._unwritten_reply(), Outcome.UNKNOWN
            # The message of a spilled receipt is only in the file, so it is counted and not reported.
            receipt._seen = receipt._payload is None
            left -= not receipt._seen
        self._reports.dropped += max(0, left)
        self._is_ended = False

    def _unwritten_reply(self) -> tuple[int, str]:
        return 0, f"it could not be written to the outbox {self.outbox.path}, or was deleted with it"
