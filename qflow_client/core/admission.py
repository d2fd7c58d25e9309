"""Decides which message is admitted, and when.

A message is admitted in one go: `next_number` is counted up, and the message is appended to `unsent`, the messages that
were never written. Before that nothing is shared; after that the message has a number and a receipt that will be
settled. What limits admission is the window, the rate, the holds on the gate and the bytes that are not written. A
caller that cannot be served now waits with a `SendTicket` in the line of the flow controller; `grant` admits the
tickets in their order, as soon as the limits allow.

`send_at_once` is the path of nearly every message. It takes no lock and is no step: from the look at the limits, which
are plain attributes, to the last assignment it calls nothing, and CPython runs no other thread, signal handler or
finalizer between two instructions that call nothing. Where that does not hold (PyPy, builds without the GIL), it admits
nothing.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from qflow_client.amqp.frames import FRAME_OVERHEAD, PublishEncoder, Route, properties
from qflow_client.core.reporting import MessageObserver, Reports
from qflow_client.core.returns import Returns
from qflow_client.core.step import Steps, step
from qflow_client.core.store import Store
from qflow_client.core.waiters import Waiters
from qflow_client.errors import FlowControlTimeout, ProducerClosed, ProducerFlowed, SettingsError
from qflow_client.events import HoldKind
from qflow_client.flow import (
    AdaptiveWindow,
    CompositeLimiter,
    FlowController,
    Hold,
    Limiter,
    Line,
    RateLimiter,
    SizeLimiter,
    Ticket,
    WindowLimiter,
)
from qflow_client.message import Message
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings, check_argument, check_setting

__all__ = ["ON_DELIVERY", "Admission", "SendTicket", "check_capacity"]

# The holds that stand for the limits of admission.
_LIMITS = (HoldKind.CAPACITY, HoldKind.RATE)

#: The source of the hold for `on_delivery` callbacks that are slower than the broker's confirms.
ON_DELIVERY = "on_delivery"


def _is_undisturbed() -> bool:
    """Whether no thread, signal or finalizer comes between instructions that call nothing: CPython with its GIL."""
    return sys.implementation.name == "cpython" and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def check_capacity(capacity: object) -> None:
    """Reject a capacity that an existing producer cannot be given.

    Raises:
        SettingsError: the setting `capacity` cannot have this value.
    """
    check_setting("capacity", capacity)
    if isinstance(capacity, str):
        raise SettingsError(f"capacity={capacity!r}: a producer that is already made can only be given a number")


_FlowedError = TypeVar("_FlowedError", bound=ProducerFlowed)


class SendTicket(Ticket):
    """The place in line of a message that waits to be admitted."""

    __slots__ = (
        "deadline",
        "error",
        "exchange",
        "first",
        "notice_at",
        "payload",
        "receipt",
        "routing_key",
        "since",
        "waiter",
    )

    def __init__(
        self, payload: bytes | Message, exchange: str, routing_key: str, size: int, since: float, source: str = ""
    ) -> None:
        super().__init__(size, source)
        self.payload = payload
        self.exchange = exchange
        self.routing_key = routing_key
        #: When it began to wait.
        self.since = since
        #: Whether it stands in front of the line, because a callback sends it.
        self.first = False
        #: When it stops waiting.
        self.deadline = math.inf
        #: When a notice that it waits is due.
        self.notice_at = math.inf
        #: The receipt, which has a number from the admission on.
        self.receipt: Receipt | None = None
        #: Why it was not admitted and never will be.
        self.error: BaseException | None = None
        #: What the skin wakes the sender by.
        self.waiter: Any = None

    @property
    def decided(self) -> bool:
        """Whether the message was admitted, or never will be."""
        receipt = self.receipt
        return (receipt is not None and receipt._number > 0) or self.error is not None or self.cancelled

    def flowed_error(
        self, kind: type[_FlowedError], holds: Sequence[Hold], waited: float, advice: str = ""
    ) -> _FlowedError:
        """Return the error for a message that is not sent, because the producer is flowed."""
        return kind(holds, waited, self.payload, advice, exchange=self.exchange, routing_key=self.routing_key)

    def closed_error(self, reason: str) -> ProducerClosed:
        """Return the error for a message that is not sent, because the producer is closed."""
        return ProducerClosed(reason, self.payload, exchange=self.exchange, routing_key=self.routing_key)


def _make_limits(settings: ProducerSettings) -> tuple[WindowLimiter, SizeLimiter | None, Limiter]:
    """Return the window, the part of it that counts bytes, and all limits together."""
    window: WindowLimiter
    if settings.capacity == "auto":
        window = AdaptiveWindow(settings.capacity_max, kind=HoldKind.CAPACITY)
    else:
        window = WindowLimiter(settings.capacity, kind=HoldKind.CAPACITY)
    parts: list[Limiter] = [window]
    byte_window: SizeLimiter | None = None
    if settings.capacity_bytes is not None:
        byte_window = SizeLimiter(settings.capacity_bytes, kind=HoldKind.CAPACITY)
        parts.append(byte_window)
    if settings.rate is not None:
        parts.append(RateLimiter(settings.rate, burst=settings.burst, kind=HoldKind.RATE))
    return window, byte_window, parts[0] if len(parts) == 1 else CompositeLimiter(parts)


class Admission:
    """The way in: from what the application sends to what waits for the socket.

    Args:
        settings: the producer's settings.
        id_prefix: how the message ids begin that the producer gives; ``None`` if it gives none.
        receipt_type: what it makes for every message.
        line: the order in which waiting messages are served; first come, first served unless given.

    Raises:
        TypeError: `line` is no line.
    """

    # CPython (3.11) is quick at no more than 30 attributes that have no slots.
    __slots__ = (
        "_grants",
        "_id_prefix",
        "_is_simple",
        "_last",
        "_mandatory",
        "_mark",
        "_max_plain",
        "_max_unwritten",
        "_notice_at",
        "_notice_period",
        "adaptive",
        "byte_window",
        "closed",
        "controller",
        "encoder",
        "gate",
        "max_capacity",
        "next_number",
        "observer",
        "receipt_type",
        "refusals",
        "reports",
        "returns",
        "steps",
        "store",
        "unsent",
        "unwritten",
        "waiters",
        "waiting",
        "window",
    )

    # Set by the owner.
    reports: Reports
    returns: Returns
    waiters: Waiters
    steps: Steps
    encoder: PublishEncoder

    def __init__(
        self,
        settings: ProducerSettings,
        *,
        id_prefix: str | None,
        receipt_type: type[Receipt],
        line: Line | None,
    ) -> None:
        is_line = line is None or all(callable(getattr(line, name, None)) for name in ("push", "head", "pop", "clear"))
        check_argument("line", line, is_line and not isinstance(line, type), "None or have the methods of a Line")
        #: At most so many unsettled messages, and so many bytes of them; the latter ``None`` without limit.
        self.window, self.byte_window, limits = _make_limits(settings)
        #: The window as long as it finds its own size; ``None`` if that is fixed.
        self.adaptive = self.window if isinstance(self.window, AdaptiveWindow) else None
        #: The highest capacity that the window may come to.
        self.max_capacity = settings.capacity_max if self.adaptive is not None else self.window.capacity
        self.controller = FlowController(limits, line=line, name=settings.name)
        self.gate = self.controller.gate
        # Whether `send_at_once` may admit: only a window of messages limits it, and nothing can come between.
        self._is_simple = limits is self.window and _is_undisturbed()
        # Whether `grant` is at work. A new message must not go before those that wait.
        self._grants = False
        self._mandatory = settings.is_mandatory
        self._max_unwritten = settings.max_unwritten_bytes
        self._id_prefix = id_prefix
        #: What it makes for every message.
        self.receipt_type = receipt_type
        #: The number of the next message; with the prefix it is its message id. Counting it up admits a message.
        self.next_number = 1
        #: Messages that are admitted and were never written, in the order of admission.
        self.unsent: deque[Receipt] = deque()
        #: Bytes of messages, and of answers on the channel, that are not written.
        self.unwritten = 0
        #: The tickets of waiting messages, the longest wait first.
        self.waiting: dict[SendTicket, None] = {}
        # No notice that messages wait comes before this.
        self._notice_at = -math.inf
        self._notice_period = settings.flow_control_wait_notify_period
        #: Why nothing can be admitted any more; ``None`` while it can.
        self.closed: str | None = None
        #: How many sends were refused, by the kind of the oldest hold.
        self.refusals: dict[str, int] = {}
        #: Where admitted messages are kept; ``None`` without an outbox.
        self.store: Store | None = None
        #: Watches every message; ``None`` unless somebody measures or traces them.
        self.observer: MessageObserver | None = None

    def use_encoder(self, encoder: PublishEncoder, exchange: str, routing_key: str) -> None:
        """Encode for another channel from now on.

        Args:
            encoder: of the channel.
            exchange: where messages go as a rule.
            routing_key: likewise.
        """
        self.encoder = encoder
        self._mark = encoder.mark
        # The longest body that needs no closer look; -1 for none, if a body alone gets no message id.
        self._max_plain = -1 if self._id_prefix is None else encoder.max_body
        # The last route. Comparing by identity is the cheapest way to see that the next message has the same.
        self._last = exchange, routing_key, encoder.route(exchange, routing_key)

    def use_store(self, store: Store) -> None:
        """Keep messages in a store, which makes every admission a step. Nothing may have been admitted before.

        Senders that wait already get an error if the store never has room for their messages.
        """
        self.store = store
        self._is_simple = False
        if store.limiter is not None:
            self.controller.limiter = CompositeLimiter((self.controller.limiter, store.limiter))
        for ticket in self.waiting:
            try:
                store.check_room(ticket.size)
            except Exception as error:
                ticket.error = error
        self._leave()

    @property
    def id_prefix(self) -> str | None:
        """How the message ids begin that the producer gives; ``None`` if it gives none."""
        return self._id_prefix

    @property
    def admitted(self) -> int:
        """Messages that were admitted so far."""
        return self.next_number - 1

    # Sending.

    def send_at_once(self, payload: bytes | Message, exchange: str, routing_key: str) -> Receipt | None:
        """Admit a message if nothing but a window with room limits that.

        It is the one method that needs no step: any thread may call it, also inside a step (E2).

        Returns:
            Its receipt; ``None`` if only `send` can tell, and nothing has happened.

        Raises:
            TypeError, ValueError: it cannot be encoded.
        """
        last = self._last
        if exchange is last[0] and routing_key is last[1]:
            route = last[2]
        else:
            route = self.route(exchange, routing_key)
        receipt = self.receipt_type(payload, route, self._id_prefix)
        if type(payload) is bytes and (size := len(payload)) <= self._max_plain:
            cost = route.cost + size if size else route.cost - FRAME_OVERHEAD
        else:
            cost = self.prepare(receipt)
            if self.returns.has_own_id(payload):
                return None
        window = self.window
        # From here on nothing is called.
        if (
            window.used < window._capacity
            and self._is_simple
            and self.gate.is_open
            and not self.controller.waiting
            and not self._grants
            and self.observer is None
            and self.unwritten + cost <= self._max_unwritten
            # It was made for the channel that is open.
            and route.made_by is self._mark
        ):
            number = receipt._number = self.next_number
            window.used, self.next_number, self.unwritten = window.used + 1, number + 1, self.unwritten + cost
            self.unsent.append(receipt)
            return receipt
        return None

    def send(self, payload: bytes | Message, exchange: str, routing_key: str, now: float) -> Receipt | None:
        """Admit a message if that is possible now.

        Returns:
            Its receipt; ``None`` if the producer is flowed or others wait, and nothing has happened.

        Raises:
            ProducerClosed: no message will ever be admitted again.
            TypeError, ValueError: it cannot be encoded.
        """
        receipt, cost = self._make_receipt(payload, exchange, routing_key)
        if self._send(receipt, cost, now):
            return receipt
        if self.closed is not None:
            raise ProducerClosed(self.closed, payload, exchange=exchange, routing_key=routing_key)
        return None

    @step
    def _send(self, receipt: Receipt, cost: int, now: float) -> bool:
        if not self.controller.try_acquire(receipt.size, now):
            return False
        self.admit(receipt, cost, now)
        return True

    def make_ticket(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        now: float,
        *,
        timeout: float | None = None,
        waiter: Any = None,
        source: str = "",
        first: bool = False,
    ) -> SendTicket:
        """Make the ticket of a message that `send` did not admit. It is not in line yet.

        Args:
            payload: the message.
            exchange: where to publish.
            routing_key: with which key.
            now: seconds.
            timeout: seconds that it may wait; ``None`` for ever.
            waiter: is in `Reports.wake` once the ticket is decided.
            source: whose message it is, for a `WeightedLine`.
            first: used by callbacks. Other senders may wait for the callback to return, so it waits for none of them.

        Raises:
            ProducerClosed: no message will ever be admitted again.
            TypeError, ValueError: it cannot be encoded.
        """
        if self.closed is not None:
            raise ProducerClosed(self.closed, payload, exchange=exchange, routing_key=routing_key)
        # Names and properties that cannot be encoded are refused before the wait, not after it.
        self.encoder.route(exchange, routing_key)
        if isinstance(payload, Message):
            properties(payload.__dict__)
            size = len(payload.body)
        else:
            size = len(payload)
        ticket = SendTicket(payload, exchange, routing_key, size, now, source)
        ticket.first = first
        ticket.waiter = waiter
        ticket.notice_at = now + self._notice_period
        if timeout is not None:
            ticket.deadline = now + timeout
        return ticket

    @step
    def stand_in_line(self, ticket: SendTicket, now: float) -> None:
        """Have a message wait for its admission, until its ticket is decided or given up."""
        if self.closed is not None:
            # Closed since the ticket was made.
            ticket.error = ticket.closed_error(self.closed)
            return
        self.waiting[ticket] = None
        if ticket.first:
            self.controller.stand_in_front(ticket, now, ignoring=ON_DELIVERY)
        else:
            self.controller.stand_in_line(ticket, now)
        # What was in the way may be gone since.
        self.grant(now)

    def look_at(self, ticket: SendTicket, now: float) -> float | None:
        """Decide about a waiting message by the time.

        Returns:
            When to look again; ``None`` once it is decided: the ticket has its receipt or its error, or was given up.

        Raises:
            FlowControlTimeout: its deadline has passed, and it will not be sent.
        """
        decision = self._look_at(ticket, now)
        if isinstance(decision, FlowControlTimeout):
            raise decision
        return decision

    @step
    def _look_at(self, ticket: SendTicket, now: float) -> float | FlowControlTimeout | None:
        if now >= ticket.deadline and not ticket.decided:
            # Time may have made room since the last grant.
            self.grant(now)
        if ticket.decided:
            return None
        if now >= ticket.deadline:
            error = ticket.flowed_error(FlowControlTimeout, self.reports.holds, now - ticket.since)
            self.count_refusal()
            self._withdraw(ticket, now)
            return error
        if now >= ticket.notice_at:
            self._notice(ticket, now)
        return min(ticket.deadline, ticket.notice_at)

    @step
    def notice(self, now: float) -> float | None:
        """Log a notice for waiting sends if one is due. Callers that do not look at every ticket use this.

        Returns:
            When to call again; ``None`` if no send waits.
        """
        # The longest wait speaks for all.
        ticket = next(iter(self.waiting), None)
        if ticket is None:
            return None
        if now >= ticket.notice_at:
            self._notice(ticket, now)
        return ticket.notice_at

    def _notice(self, ticket: SendTicket, now: float) -> None:
        # One notice is for all that wait.
        if now >= self._notice_at:
            self._notice_at = now + self._notice_period
            self.reports.report_waiting(len(self.waiting), next(iter(self.waiting)).since, now)
        ticket.notice_at = self._notice_at

    def count_refusal(self) -> None:
        """Count a send that gets an error because the producer is flowed."""
        holds = self.gate.holds
        # With no hold, it waits only behind others.
        kind = holds[0].kind if holds else "line"
        self.refusals[kind] = self.refusals.get(kind, 0) + 1

    # Leaving the line.

    @step
    def give_up(self, ticket: SendTicket, now: float) -> bool:
        """Stop waiting.

        Returns:
            True if the message was not admitted, and never will be; False if that was decided before.
        """
        return self._withdraw(ticket, now)

    def _withdraw(self, ticket: SendTicket, now: float) -> bool:
        if ticket.decided:
            return False
        # Also if it was interrupted before it stood in line.
        ticket.cancelled = True
        self.controller.leave_line(ticket)
        self.waiting.pop(ticket, None)
        # The message may have stood before a smaller one.
        self.grant(now)
        return True

    @step
    def give_up_all(self, reason: str, now: float) -> None:
        """Have all senders stop waiting at once, so that none is admitted because another leaves.

        Args:
            reason: for their error, a `ProducerClosed`.
            now: seconds.
        """
        for ticket in self.waiting:
            ticket.error = ticket.closed_error(reason)
        self._leave()
        # The limiter's hold stays only while somebody waits.
        self.grant(now)

    def close(self, reason: str) -> None:
        """Admit nothing from now on. Senders that wait get an error."""
        # A closed gate saves every send the test for `closed`.
        self.gate.shut()
        if self.closed is None:
            self.closed = reason
        self.reports.is_ending = True
        for ticket in self.waiting:
            ticket.error = ticket.closed_error(self.closed)
        self._leave()

    def _leave(self) -> None:
        """Wake the senders of all tickets that are decided, and keep the others in line."""
        self.reports.wake += [ticket.waiter for ticket in self.waiting if ticket.decided]
        self.waiting = {ticket: None for ticket in self.waiting if not ticket.decided}
        self.controller.set_line(self.waiting)

    # Admitting.

    def grant(self, now: float) -> None:
        """Admit the waiting messages that the gate and the limits allow now."""
        controller, store = self.controller, self.store
        # A new message does not go before them.
        self._grants = True
        if store is not None:
            store.admit_backlog(now)
        while (ticket := controller.grant(now)) is not None:
            assert isinstance(ticket, SendTicket)
            self._admit_ticket(ticket)
        if self.waiters.unflowed or (not controller.waiting and any(map(self.gate.is_held_by, _LIMITS))):
            # Such a hold has to end as soon as there is room, not only at the next send.
            controller.look(now)
        if store is not None:
            store.spill_line(now)
        self._grants = False

    def _admit_ticket(self, ticket: SendTicket) -> None:
        try:
            ticket.receipt, cost = self._make_receipt(ticket.payload, ticket.exchange, ticket.routing_key)
            self.admit(ticket.receipt, cost, ticket.since)
        except Exception as error:
            # The channel that opened meanwhile may take smaller frames. The sender gets the error.
            self.window.used -= 1
            if self.byte_window is not None:
                self.byte_window.used -= ticket.size
            ticket.receipt, ticket.error = None, error
        self.reports.wake.append(ticket.waiter)
        del self.waiting[ticket]

    def admit(self, receipt: Receipt, cost: int, now: float) -> None:
        """Admit a message that the limits have let in.

        Args:
            receipt: of the message.
            cost: bytes of its frames.
            now: when it began to wait, in seconds.
        """
        if self.store is not None:
            self.store.admitting(receipt, self.next_number)
        self.returns.expect(receipt)
        if self.observer is not None:
            self.observer.began[self.next_number] = now
        # From here on nothing is called, as in `send_at_once`.
        number = receipt._number = self.next_number
        self.next_number, self.unwritten = number + 1, self.unwritten + cost
        self.unsent.append(receipt)
        if self.unwritten > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)

    def _make_receipt(self, payload: bytes | Message, exchange: str, routing_key: str) -> tuple[Receipt, int]:
        """Return the receipt of a message that may be admitted, and how many bytes its frames have."""
        receipt = self.receipt_type(payload, self.route(exchange, routing_key), self._id_prefix)
        return receipt, self.prepare(receipt)

    def route(self, exchange: str, routing_key: str) -> Route:
        """Return a route of the channel.

        Raises:
            TypeError, ValueError: it cannot be encoded.
        """
        last = self._last
        if exchange is last[0] and routing_key is last[1] and last[2].made_by is self._mark:
            return last[2]
        route = self.encoder.route(exchange, routing_key)
        self._last = exchange, routing_key, route
        return route

    def prepare(self, receipt: Receipt) -> int:
        """Encode the properties of a message that was never written, and return how many bytes its frames have.

        Raises:
            TypeError, ValueError: they cannot be encoded.
        """
        payload, route = receipt._payload, receipt._route
        if type(payload) is bytes and (size := len(payload)) <= self._max_plain:
            receipt._prepared = None
            return route.cost + size if size else route.cost - FRAME_OVERHEAD
        message = payload if isinstance(payload, Message) else Message(payload)
        receipt._prepared = self.encoder.prepare(message, has_id=self._id_prefix is not None)
        return self.encoder.cost(route, receipt.size, receipt._prepared)

    def cost(self, receipt: Receipt) -> int:
        """How many bytes the frames of an admitted message have."""
        size, prepared = receipt.size, receipt._prepared
        if prepared is not None:
            return self.encoder.cost(receipt._route, size, prepared)
        return receipt._route.cost + size if size else receipt._route.cost - FRAME_OVERHEAD

    # The limits.

    def set_capacity(self, capacity: int) -> None:
        """Fix the window. A lower one cancels nothing: nothing is admitted until there is room (C6).

        Raises:
            SettingsError: the setting `capacity` cannot have this value.
        """
        check_capacity(capacity)
        self.adaptive = None
        self.window.capacity = self.max_capacity = capacity

    def release(self, receipts: Sequence[Receipt], now: float) -> None:
        """Make room: these messages are settled."""
        if not receipts:
            return
        if self.adaptive is not None:
            self.adaptive.observe(len(receipts), now)
        size = 0 if self.byte_window is None else sum(receipt.size for receipt in receipts)
        self.controller.release(size, len(receipts))

    @property
    def is_nearly_written(self) -> bool:
        """Whether no more than half of the unwritten bytes that are allowed is left."""
        return self.unwritten <= self._max_unwritten // 2

    def count_unwritten(
        self, others: Callable[[], Iterable[Receipt]], written_to: Callable[[], int], now: float
    ) -> None:
        """Count the unwritten bytes anew.

        Args:
            others: returns the messages besides `unsent` that are to be written.
            written_to: returns the bytes that are made for the socket and not written.
            now: seconds.
        """
        while True:
            before = self.unwritten
            size = written_to() + sum(map(self.cost, (*others(), *self.unsent)))
            # Others may have admitted messages meanwhile. Nothing comes between the look and the store.
            if before == self.unwritten:
                self.unwritten = size
                break
        if size > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)

    def heal(self, unsettled: Callable[[], Sequence[Receipt]]) -> None:
        """Repair what an unfinished step has left. `unsettled` returns what is admitted and not settled."""
        if self.observer is not None:
            self.observer.began.pop(self.next_number, None)
        self.returns.heal()
        while True:
            used = self.window.used
            receipts = unsettled()
            count = len(receipts)
            # As in `count_unwritten`.
            if used == self.window.used:
                self.window.used = count
                break
        if self.byte_window is not None:
            self.byte_window.used = sum(receipt.size for receipt in receipts)
        if self.store is not None:
            self.store.heal(receipts)
        self.gate.heal()
        self._leave()
        self._grants = False
