"""A publishing channel whose messages are in an outbox until they are settled, sans-I/O.

`StoringProtocol` notes in the outbox what it admits and settles, in the same step; to have that on disk before `send`
returns is for the skin. Besides, messages can wait on disk, the *backlog*: what an earlier producer has left, and what
was put there while the producer was flowed (``when_flowed="spill"``). The backlog leaves before anything else, so it is
a hold of its own. It is taken up part by part: the protocol says in `plan` what is to be read next and rings `keeper`,
which reads, says in the file that this may be written from now on, and hands it to `feed`.

Sequences, which are the outbox's, and numbers, which are the protocol's, both rise in the order of the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from qflow_client.amqp.frames import Route
from qflow_client.core.admission import SendTicket
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.step import step
from qflow_client.events import HoldKind
from qflow_client.flow import CompositeLimiter, Hold, Limiter
from qflow_client.message import Message
from qflow_client.outbox.errors import OutboxFull
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import OnOutboxFull, ProducerSettings, WhenFlowed

__all__ = ["Plan", "Spilled", "StoringProtocol"]

# The source of the hold for what has to leave before.
BACKLOG = "backlog"

# The next part of the backlog is read when no more than this is left of the last.
_FEW = 250


class Plan(NamedTuple):
    """What is to be read of the backlog."""

    #: The sequence behind which to read.
    after: int
    #: The last sequence of the backlog.
    upto: int
    #: Whether that is to be sent; otherwise only what is too old is wanted.
    sends: bool


class Spilled(Receipt):
    """The fate of a message that waits in the outbox, of which nothing is in memory until it is taken up.

    The skins' classes of such receipts are made of this and their own.
    """

    __slots__ = ()

    # For which the skins' classes have the slots.
    _id: str | None
    _path: Any
    _sequence: int

    def spill(self, path: Any, sequence: int, own_id: str | None) -> None:
        """Its message is put into the outbox."""
        self._path = path
        self._sequence = sequence  # type: ignore[misc]  # as said above
        self._id = own_id  # type: ignore[misc]  # likewise

    def take_up(self, payload: bytes | Message, route: Route) -> None:
        """Its message is on its way."""
        self._payload, self._route = payload, route

    @property
    def message_id(self) -> str | None:
        """The message id it bears on the wire."""
        return self._id or super().message_id

    @property
    def message(self) -> Message:
        """The message, with the message id that it bears on the wire; read from the outbox until it is taken up.

        Raises:
            OutboxError: it cannot be read, or another producer has taken it out.
        """
        if self._payload is not None:
            return super().message
        return Outbox.find(self._path, self._sequence).message

    @property
    def size(self) -> int:
        """The length of the body in bytes."""
        return super().size if self._payload is not None else len(self.message.body)


class _Room(Limiter):
    """Lets nothing in for which the outbox has no room (``outbox_full="block"``)."""

    __slots__ = ("_outbox",)

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def refusal(self, size: int, now: float) -> str | None:
        return None if self._outbox.has_room(size) else HoldKind.OUTBOX

    def add(self, size: int, now: float) -> bool:
        """Nothing: the outbox counts by itself."""
        return False

    def remove(self, size: int, count: int = 1) -> None:
        """Nothing, likewise."""

    @property
    def resumable(self) -> bool:
        return True

    def ready_at(self, size: int, now: float) -> float | None:
        return now if self.refusal(size, now) is None else None


class StoringProtocol(ProducerProtocol):
    """The state of one producer with an outbox.

    Args:
        settings: the producer's settings.
        outbox: where its messages are kept.
        spilled_type: what it makes for a message that waits on disk.
        id_prefix: as for `ProducerProtocol`.
        options: likewise.
    """

    def __init__(
        self, settings: ProducerSettings, *, outbox: Outbox, spilled_type: type[Spilled], id_prefix: str, **options: Any
    ) -> None:
        super().__init__(settings, id_prefix=id_prefix, **options)
        self.outbox = outbox
        # Whom to ring when there is something to commit or to read; the skin sets it. And whether he was rung for a
        # commit that he has not begun.
        self.keeper: Any = None
        self.called = False
        # What he is to read; None if nothing.
        self.plan: Plan | None = None
        # The sequences of the messages in the window, by number.
        self._sequences: dict[int, int] = {}
        self._id_prefix = id_prefix if settings.message_ids else None
        # The sequence of the message of the backlog that is being admitted; 0 if none is.
        self._admitting = 0
        # The last sequence that a message of ours has got.
        self._last_sequence = outbox.last
        # The backlog: its last sequence, how far it is read, and what is read and not in the window yet, in order.
        self._backlog_last = outbox.last if len(outbox) else 0
        self._read_to = 0
        self._ready: deque[StoredMessage] = deque()
        # A message of it that is not sent, while that is being noted: its sequence, its receipt, and how it ends.
        self._failing: tuple[int, Receipt, Outcome] | None = None
        # The receipts of messages that were spilled and are not taken up, as long as anybody has them.
        self._spilled: WeakValueDictionary[int, Spilled] = WeakValueDictionary()
        self._spilled_type = spilled_type
        # Ids of messages that have no number yet.
        self._spill_prefix = f"{id_prefix[:-1]}+"
        # Who waits until the backlog up to a sequence is settled.
        self._backlog_flushes: list[tuple[int, Any]] = []
        self.admission.use_store(self)
        # What limits the window, and what lets new messages in.
        self._inner = self.controller.limiter
        self._blocks = settings.outbox_full is OnOutboxFull.BLOCK
        self._spills = settings.when_flowed is WhenFlowed.SPILL
        if self._blocks:
            self.controller.limiter = CompositeLimiter((self._inner, _Room(outbox)))
        if self._backlog_last:
            detail = f"{len(outbox)} messages were left in {outbox.path}"
            self.gate.hold(HoldKind.OUTBOX, now=options["now"], source=BACKLOG, detail=detail)

    # What the application does.

    def _refusal(self, ticket: SendTicket) -> BaseException | None:
        # A message for which there will never be room would keep all behind it waiting.
        try:
            self.outbox.check_room(ticket.size, waits=self._blocks)
        except OutboxFull as error:
            return error
        return None

    def store(
        self, payload: bytes | Message, exchange: str, routing_key: str, now: float, *, spills: bool
    ) -> Receipt | None:
        """Admit a message and note it in the outbox, or only note it there to be sent later, if that is possible now.

        Args:
            payload: the message.
            exchange: where to publish.
            routing_key: with which key.
            now: seconds.
            spills: whether it may be put into the outbox while the producer is flowed.

        Returns:
            Its receipt, once the outbox has made its last sequence durable; ``None`` if the producer is flowed and it
            may not be spilled, or there is no room for it, and nothing has happened.

        Raises:
            ProducerClosed: no message will ever be admitted again.
            OutboxFull: there is no room, and `outbox_full` is ``"raise"``; or there never will be.
            TypeError, ValueError: it cannot be encoded.
        """
        size = len(payload) if type(payload) is bytes else len(payload.body)  # type: ignore[union-attr]  # a Message
        outbox = self.outbox
        outbox.check_room(size, waits=self._blocks)
        receipt = self.admission.send(payload, exchange, routing_key, now)
        if receipt is not None or not spills or self.controller.waiting or not outbox.has_room(size):
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
        """Put a message into the outbox, and its receipt into the ticket with which it stood in line."""
        outbox, backlog_last = self.outbox, self._backlog_last
        # Names that cannot be encoded are refused.
        route = self.unconfirmed.encoder.route(exchange, routing_key)
        try:
            sequence = outbox.last + 1
            receipt = self._spilled_type(None, route, self._spill_prefix)  # type: ignore[arg-type]  # not yet
            receipt._number = sequence
            receipt.spill(outbox.path, sequence, payload.message_id if isinstance(payload, Message) else None)
            message_id = f"{self._spill_prefix}{sequence:012x}"
            outbox.put(payload, exchange, routing_key, message_id, permit=False, overdraw=True)
            self._spilled[sequence] = receipt
            self.gate.hold(HoldKind.OUTBOX, now=now, source=BACKLOG, detail=f"messages wait in {outbox.path}")
            if not self.has_backlog:
                # What is before it is in the window.
                self._read_to = sequence - 1
            self._backlog_last = sequence
            if ticket is not None:
                ticket.receipt = receipt
            # That it is there counts from here on, also if Ctrl-C comes.
            self._last_sequence = sequence
            if self.admission.observer is not None:
                self.admission.observer.spilled(payload, receipt)
        except BaseException:
            if self._last_sequence < outbox.last:
                self._backlog_last = backlog_last
                if ticket is not None:
                    ticket.receipt = None
            self._forget_orphans()
            if not self.has_backlog:
                self.gate.lift(HoldKind.OUTBOX, now=now, source=BACKLOG)
            raise
        self._look_for_more()
        return receipt

    def spill_line(self, now: float) -> None:
        """Put messages that wait in line into the outbox, as far as there is room."""
        controller = self.controller
        while self._spills and controller.waiting and self.outbox.has_room(controller.next_size):
            ticket = controller.dismiss()
            assert isinstance(ticket, SendTicket)
            try:
                self._spill(ticket.payload, ticket.exchange, ticket.routing_key, now, ticket)
            except Exception as error:
                # The sender gets the error, and the rest of the line goes on.
                ticket.error = error
            self.reports.wake.append(ticket.waiter)
            del self.admission.waiting[ticket]
        if self.gate.is_held_by(HoldKind.OUTBOX):
            # There may be room.
            controller.look(now)

    def when_flushed(self, waiter: Any) -> bool:
        if not self.has_backlog:
            return super().when_flushed(waiter)
        self._backlog_flushes.append((self._backlog_last, waiter))
        return True

    def forget_waiter(self, waiter: Any) -> bool:
        kept = super().forget_waiter(waiter)
        before = len(self._backlog_flushes)
        self._backlog_flushes = [entry for entry in self._backlog_flushes if entry[1] is not waiter]
        return kept or len(self._backlog_flushes) < before

    @property
    def wants_channel(self) -> bool:
        return super().wants_channel or (self.has_backlog and not self.channel.is_over)

    # The backlog.

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait on disk."""
        return self._read_to < self._backlog_last or bool(self._ready)

    def _look_for_more(self) -> None:
        """Have the next part of the backlog read, if it could leave."""
        if (
            self.plan is None
            and self._read_to < self._backlog_last
            and len(self._ready) <= _FEW
            and not self.channel.is_over
            and not any(map(self._keeps_back, self.gate.holds))
        ):
            self._ring(Plan(self._read_to, self._backlog_last, sends=True))

    @step
    def look_for_old(self, now: float) -> None:
        """Have the backlog looked through for messages that are too old, whether or not it could leave."""
        if self._ready:
            self.admission.grant(now)
        if self.plan is None and self._read_to < self._backlog_last and not self.channel.is_over:
            self._ring(Plan(self._read_to, self._backlog_last, sends=False))

    def _ring(self, plan: Plan) -> None:
        self.plan = plan
        self.reports.wake.append(self.keeper)

    @step
    def feed(
        self, plan: Plan, batch: Sequence[StoredMessage], now: float, damaged: Mapping[int, str] | None = None
    ) -> None:
        """Take what was read by a plan; if it is to be sent, the outbox has it on disk that this is permitted.

        Args:
            plan: the plan.
            batch: what was read.
            now: seconds.
            damaged: by sequence, why others were set aside.
        """
        self.plan = None
        if self.channel.is_over:
            return
        for sequence, why in (damaged or {}).items():
            receipt = self._spilled.pop(sequence, None)
            if receipt is not None:
                receipt._reply = (0, f"it is damaged there, and set aside: {why}")
                self.reports.settle_unadmitted(receipt, Outcome.STORED)
        oldest = self._oldest_sent(now)
        for stored in batch:
            if stored.at < oldest:
                self._fail_as_old(stored)
            elif plan.sends:
                self._ready.append(stored)
            else:
                # Those behind it are younger.
                break
            self._read_to = stored.sequence
        if not batch:
            # What was there has left the file by another way.
            self._read_to = max(self._read_to, plan.upto)
        self._go_on(now)

    @step
    def refuse_plan(self) -> None:
        """The backlog could not be read; it is tried again."""
        plan, self.plan = self.plan, None
        if plan is not None and not self.channel.is_over:
            # Another one, because this one was tried.
            self._ring(Plan(*plan))

    def admit_backlog(self, now: float) -> None:
        """Admit messages of the backlog before any that waits in line."""
        # At the end the window gets empty, and the messages on disk stay there.
        if not self.channel.is_over and (self.has_backlog or self.gate.is_held_by(HoldKind.OUTBOX)):
            self._take_up(now)

    def _take_up(self, now: float) -> None:
        """Have what is read of the backlog leave, as far as it may; what has got too old in memory never does."""
        ready = self._ready
        oldest = self._oldest_sent(now)
        while ready:
            stored = ready[0]
            if stored.at < oldest:
                self._fail_as_old(stored)
                continue
            if any(map(self._keeps_back, self.gate.holds)):
                break
            if self._inner.try_add(len(stored.message.body), now) is not None:
                break
            self._admit_stored(stored, now)
            if ready and ready[0] is stored:
                ready.popleft()
        self._look_at_backlog_flushes()
        if self.has_backlog:
            self._look_for_more()
        else:
            self.gate.lift(HoldKind.OUTBOX, now=now, source=BACKLOG)

    def _keeps_back(self, hold: Hold) -> bool:
        """Whether a hold is in the way of the backlog, too."""
        # The limiter is asked itself.
        return hold.kind != HoldKind.OUTBOX and (
            hold.source != "" or hold.kind not in (HoldKind.CAPACITY, HoldKind.RATE)
        )

    def _admit_stored(self, stored: StoredMessage, now: float) -> None:
        message = stored.to_send()
        spilled = self._spilled.get(stored.sequence)
        try:
            route = self.admission.route(stored.exchange, stored.routing_key)
            receipt = self.admission.receipt_type(message, route, self._id_prefix) if spilled is None else spilled
            if spilled is not None:
                spilled.take_up(message, route)
            cost = self.admission.prepare(receipt)
        except Exception as error:
            # This broker takes smaller frames than the one that it was put for.
            self._inner.remove(len(stored.message.body), 1)
            self._fail(stored, f"it cannot be encoded: {error}")
            return
        self._admitting = stored.sequence
        self.admission.admit(receipt, cost, now)
        self._spilled.pop(stored.sequence, None)

    def _oldest_sent(self, now: float) -> float:
        """Before when a message must not have been put to be sent, in seconds since 1970."""
        age = self.settings.outbox_max_age
        return -1.0 if age is None else self.reports.wall_time(now) - age

    def _fail_as_old(self, stored: StoredMessage) -> None:
        self._fail(stored, f"it was in the outbox for more than outbox_max_age={self.settings.outbox_max_age:g} s")

    def _fail(self, stored: StoredMessage, why: str) -> None:
        """Settle a message of the backlog that is not sent."""
        route = self.unconfirmed.encoder.route(stored.exchange, stored.routing_key)
        receipt: Receipt | None = self._spilled.get(stored.sequence)
        if receipt is None:
            receipt = self.admission.receipt_type(stored.message, route, None)
        else:
            receipt._payload = stored.message
        receipt._reply = (0, why)
        outcome = Outcome.UNKNOWN if stored.may_be_second_copy else Outcome.FAILED
        self._failing = stored.sequence, receipt, outcome
        self._end_failing()

    def _end_failing(self) -> None:
        """Bring to its end what Ctrl-C may have interrupted."""
        if self._failing is None:
            return
        sequence, receipt, outcome = self._failing
        self.outbox.settle(sequence)
        self._call()
        reports = self.reports
        told = reports.failures if reports.settled is None else reports.settled
        if not told or told[-1] is not receipt:
            reports.settle_unadmitted(receipt, outcome)
        self._spilled.pop(sequence, None)
        if self._ready and self._ready[0].sequence == sequence:
            self._ready.popleft()
        self._failing = None

    def _look_at_backlog_flushes(self) -> None:
        if not self._backlog_flushes:
            return
        done = self._ready[0].sequence - 1 if self._ready else self._read_to
        waiting, self._backlog_flushes = self._backlog_flushes, []
        for last, waiter in waiting:
            if last > done:
                self._backlog_flushes.append((last, waiter))
            elif not self.when_settled(waiter):
                self.reports.wake.append(waiter)

    def next_timer(self, now: float) -> float | None:
        at = super().next_timer(now)
        if self._ready and not any(map(self._keeps_back, self.gate.holds)):
            ready_at = self._inner.ready_at(len(self._ready[0].message.body), now)
            if ready_at is not None:
                return ready_at if at is None else min(at, ready_at)
        return at

    # Into the outbox, when a message is admitted.

    def admitting(self, receipt: Receipt, number: int) -> None:
        """Note a message that is about to be admitted under a number, unless it is in the outbox already.

        Raises:
            OutboxFull: there is no room.
        """
        sequence, self._admitting = self._admitting, 0
        if not sequence:
            payload, message_id = receipt._payload, f"{self._id_prefix}{number:012x}"
            exchange, routing_key = receipt.exchange, receipt.routing_key
            sequence = self.outbox.put(payload, exchange, routing_key, message_id, overdraw=self._blocks)
        self._sequences[number] = sequence

    def heal(self, unsettled: Sequence[Receipt]) -> None:
        """Repair what an unfinished step has left."""
        self._admitting = 0
        self._end_failing()
        numbers = {receipt._number for receipt in unsettled}
        while self._sequences and next(reversed(self._sequences)) not in numbers:
            self._sequences.popitem()
        self._forget_orphans()
        # They are admitted, and the interrupt came before they left the list.
        taken = next(reversed(self._sequences.values()), 0)
        while self._ready and self._ready[0].sequence <= taken:
            self._ready.popleft()

    def _forget_orphans(self) -> None:
        """Have what was put for a message that was not admitted leave the outbox."""
        admitted = max(self._last_sequence, next(reversed(self._sequences.values()), 0))
        if self.outbox.last > admitted:
            self.outbox.settle(admitted + 1, self.outbox.last)
            self._call()
        self._last_sequence = self.outbox.last

    # Out of it, when it is settled.

    def settled(self, receipts: Iterable[Receipt]) -> None:
        """Have settled messages leave the outbox, except those that stay in it for the next producer."""
        sequences, settle = self._sequences, self.outbox.settle
        first = last = 0
        for receipt in receipts:
            if receipt._outcome is Outcome.STORED:
                continue
            sequence = sequences.pop(receipt._number, 0)
            self._last_sequence = max(self._last_sequence, sequence)
            if sequence == last + 1 and last:
                last = sequence
                continue
            if last:
                settle(first, last)
            first = last = sequence
        if last:
            settle(first, last)
        self._call()

    def _call(self) -> None:
        if not self.called:
            self.called = True
            self.reports.wake.append(self.keeper)

    # The end.

    def _end(self, reason: str, now: float) -> None:
        super()._end(reason, now)
        self._ready.clear()
        for receipt in sorted(self._spilled.values(), key=lambda receipt: receipt._sequence):
            receipt._reply = (0, reason)
            self.reports.settle_unadmitted(receipt, Outcome.STORED)
        self._spilled.clear()
        self.reports.wake += [waiter for _, waiter in self._backlog_flushes]
        self._backlog_flushes.clear()
