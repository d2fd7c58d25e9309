"""The backlog: messages that wait on disk and are not in the window yet. This module does no I/O.

An earlier producer left these messages, or this producer spilled them. To spill a message, `send` of a flowed producer
puts it on disk and returns (with ``when_flowed="spill"``, or in a callback). The backlog is sent before new messages.
So a hold stops new messages while there is a backlog. A sequence is the number of a message in the outbox. The
sequences of the backlog, up to `Backlog.last`, are above the sequences of the messages in the window.

A message of the backlog passes through three stages:

1. The message is only on disk. The backlog requests its next part from the `Writer`.
2. The writer reads that part, and notes on disk that the part may be written to a broker from now on. Then the writer
   feeds the part to the backlog. The message is now in `ready`, and all messages up to `read_to` have been read.
3. The message enters the window when there is room (`admit`), or is settled if it has waited for too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from qflow_client.amqp.frames import Route
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.events import HoldKind
from qflow_client.flow import Hold, Limiter
from qflow_client.message import Message
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.outbox import Outbox
from qflow_client.outbox.requests import ReadRequest, Requests
from qflow_client.outbox.spilled import Spilled
from qflow_client.receipt import Outcome, Receipt

__all__ = ["Backlog"]

# The source of the hold that makes new messages wait for the backlog.
_SOURCE = "backlog"

# The next part of the backlog is requested when `ready` has at most this number of messages.
_FEW = 250


class Backlog:
    """The messages of one producer that wait on disk."""

    def __init__(
        self,
        protocol: ProducerProtocol,
        outbox: Outbox,
        requests: Requests,
        limits: Limiter,
        spilled_type: Callable[[Any, Route, str], Spilled],
    ) -> None:
        self._protocol = protocol
        self._admission, self._reports, self._gate = protocol.admission, protocol.reports, protocol.gate
        self._max_age = protocol.settings.outbox_max_age
        self._keeps = protocol.settings.keeps_undelivered
        self._outbox = outbox
        self._requests = requests
        self._limits = limits
        #: The class of receipts for messages that wait on disk.
        self.spilled_type = spilled_type
        # The prefix of the ids of spilled messages. The sequence follows, because a spilled message has no number yet.
        self._spill_prefix = f"{(protocol.admission.id_prefix or '-')[:-1]}+"
        #: The last sequence of the backlog; 0 if there never was a backlog.
        self.last = outbox.last if len(outbox) else 0
        #: The sequence up to which the backlog has been read.
        self.read_to = 0
        #: Messages that were read and are not in the window yet, in order.
        self.ready: deque[StoredMessage] = deque()
        #: The sequence of the message that is moving from the backlog into the window; 0 if there is none.
        self.admitting = 0
        #: The receipts of spilled messages that are not in the window yet, by sequence. The references are weak.
        self.spilled: WeakValueDictionary[int, Spilled] = WeakValueDictionary()
        # The sequence, receipt and outcome of a message to be settled without sending it; ``None`` if there is none.
        self._failing: tuple[int, Receipt, Outcome] | None = None
        # The waiters of `flush`, each with the sequence up to which all messages must be settled.
        self._flushes: list[tuple[int, Any]] = []

    @property
    def has_messages(self) -> bool:
        """Whether messages of the backlog are not in the window yet."""
        return self.read_to < self.last or bool(self.ready)

    def hold(self, detail: str, now: float) -> None:
        """Hold new messages until the backlog is empty."""
        self._gate.hold(HoldKind.OUTBOX, now=now, source=_SOURCE, detail=detail)

    def lift(self, now: float) -> None:
        """Lift the hold of the backlog if the backlog is empty."""
        if not self.has_messages:
            self._gate.lift(HoldKind.OUTBOX, now=now, source=_SOURCE)

    def _is_held(self) -> bool:
        return any(map(self._is_obstacle, self._gate.holds))

    @staticmethod
    def _is_obstacle(hold: Hold) -> bool:
        # Ignore ``outbox``, which stops only new messages, and ``capacity`` and ``rate``, whose limits `admit` checks.
        return hold.kind != HoldKind.OUTBOX and (
            hold.source != "" or hold.kind not in (HoldKind.CAPACITY, HoldKind.RATE)
        )

    def make_receipt(self, payload: bytes | Message, route: Route, sequence: int) -> tuple[Spilled, str]:
        """Return the receipt and the message id of a message that will be spilled with this sequence."""
        receipt = self.spilled_type(None, route, self._spill_prefix)
        receipt._number = sequence
        own_id = payload.message_id if isinstance(payload, Message) else None
        receipt.spill(self._outbox.path, sequence, own_id)
        return receipt, f"{self._spill_prefix}{sequence:012x}"

    def append(self, receipt: Spilled, now: float) -> None:
        """Add a message that was put into the outbox."""
        sequence = receipt._sequence
        self.spilled[sequence] = receipt
        self.hold(f"messages wait in {self._outbox.path}", now)
        if not self.has_messages:
            # All earlier messages have left the backlog, so the next read begins with this message.
            self.read_to = sequence - 1
        self.last = sequence

    def request_next(self) -> None:
        """Request the next part of the backlog if few messages are in `ready` and no hold stops the backlog."""
        if len(self.ready) <= _FEW and not self._is_held():
            self._request(sends=True)

    def request_expired(self) -> None:
        """Request the next part to find messages that are too old, even if a hold stops the backlog."""
        self._request(sends=False)

    def _request(self, *, sends: bool) -> None:
        if self._requests.read is None and self.read_to < self.last and not self._protocol.channel.is_over:
            self._requests.request_read(ReadRequest(self.read_to, self.last, sends))

    def request_again(self) -> None:
        """Request the same part of the backlog again, because the writer could not read it."""
        request, self._requests.read = self._requests.read, None
        if request is not None and not self._protocol.channel.is_over:
            # The request is a new object, because the writer ignores an object that it has tried.
            self._requests.request_read(ReadRequest(*request))

    def feed(
        self, request: ReadRequest, batch: Sequence[StoredMessage], damaged: Mapping[int, str], now: float
    ) -> None:
        """Handle the messages that the writer has read, and the damaged messages that the writer has set aside.

        If `request.sends` is True, the writer has noted on disk that the messages of `batch` may be sent to a broker.
        """
        self._requests.read = None
        if self._protocol.channel.is_over:
            return
        for sequence, why in damaged.items():
            receipt = self.spilled.pop(sequence, None)
            if receipt is not None:
                receipt._kept_as = Outcome.FAILED
                receipt._reply = (0, f"it is damaged in the outbox, and set aside: {why}")
                self._reports.settle_unadmitted(receipt, Outcome.STORED)
        oldest = self._oldest_sent(now)
        for stored in batch:
            if stored.at < oldest:
                self._expire(stored)
            elif request.sends:
                self.ready.append(stored)
            else:
                # This message and all later messages are not too old.
                break
            self.read_to = stored.sequence
        if not batch:
            # No message up to `request.upto` can be read: all have been dropped or set aside.
            self.read_to = max(self.read_to, request.upto)

    def admit(self, now: float) -> None:
        """Move messages of `ready` into the window if the limits allow it. Settle messages that are too old."""
        # After the end of the producer the window has room, but the messages must stay on disk for the next producer.
        if self._protocol.channel.is_over or not (self.has_messages or self._gate.is_held_by(HoldKind.OUTBOX)):
            return
        ready = self.ready
        oldest = self._oldest_sent(now)
        while ready:
            stored = ready[0]
            if stored.at < oldest:
                self._expire(stored)
                continue
            if self._is_held() or self._limits.try_add(len(stored.message.body), now) is not None:
                break
            self._admit(stored, now)
            if ready and ready[0] is stored:
                ready.popleft()
        self._wake_flushed()
        if self.has_messages:
            self.request_next()
        else:
            self.lift(now)

    def _admit(self, stored: StoredMessage, now: float) -> None:
        admission, message = self._admission, stored.to_send()
        spilled = self.spilled.get(stored.sequence)
        try:
            route = admission.route(stored.exchange, stored.routing_key)
            receipt = admission.receipt_type(message, route, admission.id_prefix) if spilled is None else spilled
            if spilled is not None:
                spilled.load(message, route)
            cost = admission.prepare(receipt)
        except Exception as error:
            # For example, this broker accepts smaller frames than the broker of the earlier producer.
            self._limits.remove(len(stored.message.body), 1)
            self._fail(stored, f"it cannot be encoded: {error}")
            return
        self.admitting = stored.sequence
        admission.admit(receipt, cost, now, now)
        self.spilled.pop(stored.sequence, None)

    def next_timer(self, now: float) -> float | None:
        """Return when the limits admit the next message; ``None`` if time alone does not allow it."""
        if not self.ready or self._is_held():
            return None
        return self._limits.ready_at(len(self.ready[0].message.body), now)

    def _oldest_sent(self, now: float) -> float:
        """Return a time in seconds since 1970: messages that were put before this time are too old to be sent."""
        return -1.0 if self._max_age is None else self._outbox.wall_time(now) - self._max_age

    def _expire(self, stored: StoredMessage) -> None:
        self._fail(stored, f"it was in the outbox for more than outbox_max_age={self._max_age:g} s")

    def _fail(self, stored: StoredMessage, why: str) -> None:
        receipt: Receipt | None = self.spilled.get(stored.sequence)
        if receipt is None:
            route = self._admission.encoder.route(stored.exchange, stored.routing_key)
            receipt = self._admission.receipt_type(stored.message, route, None)
        else:
            receipt._payload = stored.message
        receipt._reply = (0, why)
        outcome = Outcome.UNKNOWN if stored.may_be_second_copy else Outcome.FAILED
        if self._keeps:
            receipt._kept_as, outcome = outcome, Outcome.STORED
        self._failing = stored.sequence, receipt, outcome
        self._finish_failing()

    def _finish_failing(self) -> None:
        """Settle the failing message exactly once, even if this call is interrupted and repeated."""
        if self._failing is None:
            return
        sequence, receipt, outcome = self._failing
        if outcome is not Outcome.STORED:
            self._outbox.settle(sequence)
            self._requests.request_commit()
        reports = self._reports
        reported = reports.failures if reports.settled is None else reports.settled
        if not reported or reported[-1] is not receipt:
            reports.settle_unadmitted(receipt, outcome)
            if self._admission.observer is not None:
                self._admission.observer.failed_on_disk(receipt)
        self.spilled.pop(sequence, None)
        if self.ready and self.ready[0].sequence == sequence:
            self.ready.popleft()
        self._failing = None

    def when_flushed(self, waiter: Any) -> None:
        """Wake a waiter when all messages that are now in the backlog or in the window are settled."""
        self._flushes.append((self.last, waiter))

    def forget_waiter(self, waiter: Any) -> bool:
        """Drop a waiter. Return True if the waiter was still waiting for the backlog."""
        before = len(self._flushes)
        self._flushes = [entry for entry in self._flushes if entry[1] is not waiter]
        return len(self._flushes) < before

    def _wake_flushed(self) -> None:
        """Move each waiter whose messages have left the backlog to `Waiters`, or wake it if the window is empty."""
        if not self._flushes:
            return
        done = self.ready[0].sequence - 1 if self.ready else self.read_to
        for last, waiter in self._flushes:
            if last <= done and not self._protocol.waiters.add_settled(waiter):
                self._reports.wake.append(waiter)
        # Remove the waiters last, so that an interrupt loses no waiter. After an interrupt, some may be woken twice.
        self._flushes = [entry for entry in self._flushes if entry[0] > done]

    def end(self, reason: str) -> dict[int, Spilled]:
        """Leave all messages to the next producer. Settle and return the receipts of spilled messages, by sequence."""
        self.ready.clear()
        stored = dict(sorted(self.spilled.items()))
        for receipt in stored.values():
            receipt._reply = (0, reason)
            self._reports.settle_unadmitted(receipt, Outcome.STORED)
        self.spilled.clear()
        self._reports.wake += [waiter for _, waiter in self._flushes]
        self._flushes.clear()
        return stored

    def heal(self) -> None:
        self.admitting = 0
        self._finish_failing()

    def drop_admitted(self, last: int) -> None:
        """After an unfinished step, remove from `ready` the messages up to `last`, which are in the window."""
        while self.ready and self.ready[0].sequence <= last:
            self.ready.popleft()
