"""One AMQP publishing channel, sans-I/O: admission, confirms, flow, and what becomes of every message.

`ProducerProtocol` is told what happened (a message is to be sent, the broker acked, the socket took bytes, time passed)
and says what to do (bytes to write, waiters to wake, receipts that are settled). It knows no threads, tasks, sockets or
clocks: whoever owns it calls one method at a time and says what time it is, in monotonic seconds.

Two rules:

1. What decides whether a message may go, whose turn it is, and what an answer of the broker settles, is here.
2. A message that is admitted has a receipt, and every receipt is settled exactly once.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from qflow_client.amqp.frames import FRAME_OVERHEAD, FrameError, PublishEncoder, Route, flow_ok, properties
from qflow_client.core.resending import Pauses, Resending, is_want_of_room, narrowed
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.errors import FlowControlTimeout, ProducerClosed, SettingsError
from qflow_client.events import FlowEvent, FlowEventKind, FlowState, HoldKind
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
from qflow_client.interrupts import to_the_end
from qflow_client.message import Message, decode_message, republished
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings, check_argument, check_setting

__all__ = ["LogEntry", "MessageObserver", "ProducerProtocol", "SendTicket", "check_capacity"]

logger = logging.getLogger("qflow_client")

# A level, a text and its arguments.
LogEntry = tuple[int, str, tuple[object, ...]]

# Holds that come and go with every burst are for debugging, those that people have to know of are not.
_LOG_LEVELS: dict[str, int] = {
    HoldKind.CHANNEL_FLOW: logging.INFO,
    HoldKind.PAUSED: logging.INFO,
    HoldKind.CONNECTION_BLOCKED: logging.WARNING,
    HoldKind.DISCONNECTED: logging.WARNING,
    HoldKind.REFUSED: logging.WARNING,
}

# The holds under which messages that are already admitted do not leave either.
_STOPS_WRITING = (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED)

# The holds that stand for the limits of admission.
_LIMITS = (HoldKind.CAPACITY, HoldKind.RATE)

# The source of the hold for receipts that are told more slowly than the broker confirms.
_ON_DELIVERY = "on_delivery"

# Class and method id, as Channel.Close names them, and where it names none.
_BASIC_PUBLISH = (60, 40)
_NO_METHOD = (0, 0)

# Below this length the list of failures is not worth sweeping.
_SWEEP_FROM = 64

# Without confirms but with `on_delivery`, this many of the last returned messages come up in `flush` and `close`.
_MOST_RETURNS = 1000


def _is_undisturbed() -> bool:
    """Whether no thread, signal or finalizer comes between instructions that call nothing: CPython with its GIL."""
    return sys.implementation.name == "cpython" and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def check_capacity(capacity: object) -> None:
    """Refuse what the window of a producer that is made cannot be set to.

    Raises:
        SettingsError: the setting `capacity` cannot have this value.
    """
    check_setting("capacity", capacity)
    if isinstance(capacity, str):
        raise SettingsError(f"capacity={capacity!r}: a producer that is already made can only be given a number")


class SendTicket(Ticket):
    """A message that waits to be admitted."""

    __slots__ = (
        "deadline",
        "error",
        "exchange",
        "notice_at",
        "number",
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
        # When it began to wait, when it will have waited long enough, and when that is next to be said.
        self.since = since
        self.deadline = math.inf
        self.notice_at = math.inf
        # The number under which it is to be admitted; 0 before.
        self.number = 0
        # Set when it is admitted, or when it never will be.
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        # What the skin wakes its owner by.
        self.waiter: Any = None

    @property
    def decided(self) -> bool:
        """Whether it stands in line no longer: it was admitted, or never will be."""
        return self.receipt is not None or self.error is not None or self.cancelled


class MessageObserver(Protocol):
    """Is told of every message, to measure or trace it."""

    #: When the message of each number began: when it was admitted, or began to wait for that; in seconds.
    began: dict[int, float]

    def settled(self, receipts: Sequence[Receipt], now: float) -> None:
        """Called with receipts that are settled, in the order of admission; at least one.

        Args:
            receipts: the receipts.
            now: seconds.
        """

    def spilled(self, payload: bytes | Message, receipt: Receipt) -> None:
        """Called with a message that was put into the outbox, to be sent later.

        Args:
            payload: what the application sent; later another is read from the outbox.
            receipt: its receipt, which is not settled.
        """

    def tell(self, *, now: float) -> None:
        """For the skin to call after anything that may have settled receipts, without a lock.

        Args:
            now: seconds.
        """


class ProducerProtocol:
    """The state of one producer.

    Args:
        settings: the producer's settings.
        id_prefix: the beginning of the message ids that it gives; the number in 12 hexadecimal digits follows.
        receipt_type: what it makes for every message.
        now: seconds.
        wall_offset: what to add to `now` for seconds since 1970.
        line: the order in which waiting messages are served; first come, first served unless given.
        retries: the pauses before messages leave again that the broker has refused for want of room; ``None`` to settle
            them.

    Raises:
        TypeError: `line` is no line.
    """

    # CPython (3.11) is quick at no more than 30 attributes that have no slots.
    __slots__ = (
        "_adaptive",
        "_by_id",
        "_confirms",
        "_flushes",
        "_grants",
        "_id_prefix",
        "_is_over",
        "_is_simple",
        "_last",
        "_line",
        "_mandatory",
        "_mark",
        "_max_plain",
        "_max_unwritten",
        "_most",
        "_next_number",
        "_notice_at",
        "_now",
        "_receipt_type",
        "_resending",
        "_sweep_at",
        "_unconfirmed",
        "_unflow_waiters",
        "_untold",
        "_waiting",
        "_wall_offset",
        "_was_open",
        "byte_window",
        "channel",
        "closed",
        "controller",
        "events",
        "failures",
        "gate",
        "logs",
        "observer",
        "refusals",
        "settings",
        "settled",
        "unwritten",
        "wake",
        "window",
    )

    def __init__(
        self,
        settings: ProducerSettings,
        *,
        id_prefix: str,
        receipt_type: type[Receipt] = Receipt,
        now: float,
        wall_offset: float = 0.0,
        line: Line | None = None,
        retries: Pauses | None = None,
    ) -> None:
        is_line = line is None or all(callable(getattr(line, name, None)) for name in ("push", "head", "pop", "clear"))
        check_argument("line", line, is_line and not isinstance(line, type), "None or have the methods of a Line")
        self.settings = settings
        # The window as long as it finds its own size, None if that is fixed; and the most that it may come to.
        self._adaptive: AdaptiveWindow | None = None
        if settings.capacity == "auto":
            self._most = settings.capacity_max
            self.window: WindowLimiter = AdaptiveWindow(self._most, kind=HoldKind.CAPACITY)
            self._adaptive = self.window
        else:
            self._most = settings.capacity
            self.window = WindowLimiter(self._most, kind=HoldKind.CAPACITY)
        parts: list[Limiter] = [self.window]
        # The part of the window that counts bytes; None if it is not limited.
        self.byte_window: SizeLimiter | None = None
        if settings.capacity_bytes is not None:
            self.byte_window = SizeLimiter(settings.capacity_bytes, kind=HoldKind.CAPACITY)
            parts.append(self.byte_window)
        if settings.rate is not None:
            parts.append(RateLimiter(settings.rate, burst=settings.burst, kind=HoldKind.RATE))
        self.controller = FlowController(
            parts[0] if len(parts) == 1 else CompositeLimiter(parts), line=line, name=settings.name
        )
        self.gate = self.controller.gate
        # Whether `send_at_once` may admit: only a window of messages limits it, and no other thread can interrupt it.
        self._is_simple = len(parts) == 1 and _is_undisturbed()
        # Whether messages that have waited are being admitted.
        self._grants = False
        # What every message asks for.
        self._confirms = settings.confirms
        self._mandatory = settings.is_mandatory
        self._max_unwritten = settings.max_unwritten_bytes
        self._id_prefix = id_prefix if settings.message_ids else None
        self._receipt_type = receipt_type
        self._wall_offset = wall_offset
        # The number of the next message; with the prefix it is its message id. To count it on is what admits a message.
        self._next_number = 1
        # What is admitted and was never written, in order.
        self._line: deque[Receipt] = deque()
        #: Bytes of messages, and of answers on the channel, that are not written.
        self.unwritten = 0
        # What is on the wire of the channel; replaced when one opens.
        self._use_channel(0, 0)
        # Mandatory messages with an id of their own, because a return names nothing else.
        self._by_id: dict[str, list[Receipt]] = {}
        # What was written before and is to leave again, before anything else.
        self._resending = Resending(settings.reconnect_delay_max, retries, settings.retry_for)
        self._resending.rest(now)
        # The time of the last call that told it.
        self._now = now
        # Who waits until every number up to one is settled; and who waits for an open gate, with the source of the
        # holds that it does not wait for.
        self._flushes: list[tuple[int, Any]] = []
        self._unflow_waiters: list[tuple[str, Any]] = []
        # Who stands in line, the longest wait first.
        self._waiting: dict[SendTicket, None] = {}
        # No notice that they wait comes before this.
        self._notice_at = -math.inf
        # Settled receipts that were taken, and of which the application is not told yet.
        self._untold = 0
        # Why nothing can be sent any more; None while it can.
        self.closed: str | None = None
        # Whether there will be no further channel.
        self._is_over = False
        # The channel number while a channel is open, and whether one ever was.
        self.channel: int | None = None
        self._was_open = False

        # To be taken by the skin: whom to wake, …
        self.wake: list[Any] = []
        # … receipts that are settled, if somebody wants all of them, …
        self.settled: list[Receipt] | None = None
        # … flow events, if somebody listens, …
        self.events: list[FlowEvent] | None = None
        # … what is to be logged, which is for `qflow_client.logs`, …
        self.logs: list[LogEntry] = []
        # … and failures of which nobody has been told yet.
        self.failures: list[Receipt] = []
        # How many there may be before they are rid of those that were looked at since.
        self._sweep_at = _SWEEP_FROM
        # What watches every message; None unless somebody measures or traces them.
        self.observer: MessageObserver | None = None
        # How many sends were refused, by the kind of the oldest hold.
        self.refusals: dict[str, int] = {}

        self.gate.observer = self._gate_changed
        self.gate.hold(HoldKind.DISCONNECTED, now=now)

    def _use_channel(self, number: int, frame_max: int) -> None:
        settings = self.settings
        encoder = self._make_encoder(number, frame_max)
        self._unconfirmed = Unconfirmed(encoder)
        self._mark = encoder.mark
        # The longest body that can go without a closer look; -1 for none, if a body alone gets no message id.
        self._max_plain = -1 if self._id_prefix is None else encoder.max_body
        # The route that was taken last: to tell by identity that the next message goes there too is the cheapest way.
        exchange, routing_key = settings.exchange, settings.routing_key
        self._last = exchange, routing_key, encoder.route(exchange, routing_key)

    def _make_encoder(self, number: int, frame_max: int) -> PublishEncoder:
        return PublishEncoder(number, frame_max, id_prefix=self._id_prefix or "", mandatory=self._mandatory)

    # What the application does.

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return self.window.used

    @property
    def admitted(self) -> int:
        """Messages that were admitted so far."""
        return self._next_number - 1

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        return self._unconfirmed.in_flight

    def send_at_once(self, payload: bytes | Message, exchange: str, routing_key: str) -> Receipt | None:
        """Admit a message if nothing but a window with room limits that.

        It is the one method that needs no step: any thread may call it, also inside a step (E2). Between two lines that
        call nothing CPython runs no other thread, signal handler or finalizer.

        Returns:
            Its receipt; ``None`` if only `send` can tell, and nothing has happened.

        Raises:
            TypeError, ValueError: it cannot be encoded.
        """
        last = self._last
        if exchange is last[0] and routing_key is last[1]:
            route = last[2]
        else:
            route = self._route(exchange, routing_key)
        receipt = self._receipt_type(payload, route, self._id_prefix)
        if type(payload) is bytes and (size := len(payload)) <= self._max_plain:
            cost = route.cost + size if size else route.cost - FRAME_OVERHEAD
        else:
            cost = self._prepare(receipt)
            if self._is_asked_for_by_id(payload):
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
            number = receipt._number = self._next_number
            window.used, self._next_number, self.unwritten = window.used + 1, number + 1, self.unwritten + cost
            self._line.append(receipt)
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
        receipt, cost = self._receipt_for(payload, exchange, routing_key)
        try:
            if self.controller.try_acquire(receipt.size, now):
                self._admit(receipt, cost, now)
                return receipt
        except BaseException:
            to_the_end(self._recount)
            raise
        if self.closed is not None:
            raise ProducerClosed(self.closed, payload)
        return None

    def stand_in_line(
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
        """Have a message wait for its admission.

        Args:
            payload: what `send` did not admit.
            exchange: where to publish.
            routing_key: with which key.
            now: seconds.
            timeout: seconds that it may wait; ``None`` for ever.
            waiter: is in `wake` once the ticket is decided.
            source: whose message it is, for a `WeightedLine`.
            first: a callback sends it, for whose end others may wait; so it waits neither for them nor for that end.

        Raises:
            ProducerClosed: no message will ever be admitted again.
            TypeError, ValueError: it cannot be encoded.
        """
        if self.closed is not None:
            raise ProducerClosed(self.closed, payload)
        # Names and properties that cannot be encoded are refused before the wait, not after it.
        self._unconfirmed.encoder.route(exchange, routing_key)
        if isinstance(payload, Message):
            properties(payload.__dict__)
            size = len(payload.body)
        else:
            size = len(payload)
        ticket = SendTicket(payload, exchange, routing_key, size, now, source)
        ticket.waiter = waiter
        ticket.notice_at = now + self.settings.flow_control_wait_notify_period
        if timeout is not None:
            ticket.deadline = now + timeout
        try:
            self._waiting[ticket] = None
            if first:
                self.controller.stand_in_front(ticket, now, ignoring=_ON_DELIVERY)
            else:
                self.controller.stand_in_line(ticket, now)
            # Whatever was in the way may be gone since.
            self._grant(now)
            return ticket
        except BaseException:
            # Nobody has the ticket.
            if not ticket.decided:
                ticket.cancelled = True
            to_the_end(self._mend)
            raise

    def look_at(self, ticket: SendTicket, now: float) -> float | None:
        """Decide about a waiting message by the time.

        Returns:
            When to look again; ``None`` once it is decided, and then the ticket has its receipt or its error, unless it
            was given up.

        Raises:
            FlowControlTimeout: it has waited long enough, and will not be sent.
        """
        if now >= ticket.deadline and not ticket.decided:
            # Time may have made room, and nobody has said so yet.
            self._grant(now)
        if ticket.decided:
            return None
        if now >= ticket.deadline:
            holds = self.holds
            self.count_refusal()
            self.give_up(ticket, now)
            raise FlowControlTimeout(holds, now - ticket.since, ticket.payload)
        if now >= ticket.notice_at:
            self._notice_for(ticket, now)
        return min(ticket.deadline, ticket.notice_at)

    def notice(self, now: float) -> float | None:
        """Have it told that sends wait, if that is due; for who does not look at each of them as often as it asks.

        Returns:
            When to call again; ``None`` if none waits.
        """
        # Who has waited longest speaks for all.
        ticket = next(iter(self._waiting), None)
        if ticket is None:
            return None
        if now >= ticket.notice_at:
            self._notice_for(ticket, now)
        return ticket.notice_at

    def count_refusal(self) -> None:
        """Take note that a send gets an error because the producer is flowed."""
        holds = self.gate.holds
        # With no hold, others wait before it.
        kind = holds[0].kind if holds else "line"
        self.refusals[kind] = self.refusals.get(kind, 0) + 1

    def give_up(self, ticket: SendTicket, now: float) -> bool:
        """Stop waiting.

        Returns:
            True if the message was not admitted, and never will be; False if that was decided before.
        """
        if ticket.decided:
            return False
        try:
            self.controller.leave_line(ticket)
            self._waiting.pop(ticket, None)
            # It may have stood before one that is small enough.
            self._grant(now)
        except BaseException:
            ticket.cancelled = True
            to_the_end(self._mend)
            raise
        return True

    def give_up_of(self, waiter: Any, tickets: list[SendTicket], now: float) -> None:
        """Stop waiting with what a waiter waits for.

        Args:
            waiter: whose wait is over.
            tickets: its ticket; empty if Ctrl-C has come before anybody had it.
            now: seconds.
        """
        for ticket in tickets or [each for each in self._waiting if each.waiter is waiter]:
            self.give_up(ticket, now)

    def give_up_all(self, now: float) -> None:
        """Have all stop waiting at once: nobody is admitted because another leaves. Their waiters are in `wake`.

        Args:
            now: seconds.
        """
        try:
            for ticket in tuple(self._waiting):
                self.wake.append(ticket.waiter)
                ticket.cancelled = True
                del self._waiting[ticket]
            self.controller.relist(())
            # Holds that only those kept there end.
            self._grant(now)
        except BaseException:
            to_the_end(self._mend)
            raise

    def take_over(self, other: ProducerProtocol, now: float) -> None:
        """Go on in place of another, which never had a channel: what was asked of that is asked of this one.

        Args:
            other: is used no more.
            now: seconds.
        """
        self.settled, self.events = other.settled, other.events
        for hold in other.gate.holds:
            self.hold(hold.kind, hold.since, source=hold.source, detail=hold.detail)
        if other.window.capacity != self.window.capacity:
            self.set_capacity(other.window.capacity, now)
        self._waiting, other._waiting = other._waiting, {}
        # In this order: a line that the application has made is both's.
        other.controller.relist(())
        self.controller.relist(self._waiting)
        self._unflow_waiters, other._unflow_waiters = other._unflow_waiters, []

    def set_capacity(self, capacity: int, now: float) -> None:
        """Fix the window. A lower one cancels nothing: nothing is admitted until there is room (C6).

        Raises:
            SettingsError: the setting `capacity` cannot have this value.
        """
        check_capacity(capacity)
        self._adaptive = None
        self.window.capacity = self._most = capacity
        self._grant(now)

    def hold(self, kind: str, now: float, *, source: str = "", detail: str = "") -> None:
        """Raise a hold."""
        self.gate.hold(kind, now=now, source=source, detail=detail)

    def lift(self, kind: str, now: float, *, source: str = "") -> None:
        """Lift a hold, and admit whom that lets in."""
        if self.gate.lift(kind, now=now, source=source) is not None or self.controller.waiting:
            self._grant(now)

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The present holds as people see them: the oldest first, their times in seconds since 1970."""
        return tuple(map(self._on_the_wall_clock, self.gate.holds))

    def _on_the_wall_clock(self, hold: Hold) -> Hold:
        return replace(hold, since=hold.since + self._wall_offset)

    def flow_state(self, now: float) -> FlowState:
        """The flow at this moment."""
        self.controller.look(now)
        return self.flow_seen(now)

    def flow_seen(self, now: float) -> FlowState:
        """The flow as it was last looked at; it changes nothing, so it needs no step."""
        since = self.gate.closed_since
        return FlowState(
            self.holds,
            None if since is None else since + self._wall_offset,
            self.gate.times_closed,
            self.gate.seconds_held(now),
            self.closed,
        )

    def when_flushed(self, waiter: Any) -> bool:
        """Have a waiter woken once all that is admitted now is settled.

        Returns:
            False if it is already, and the waiter is not kept.
        """
        return self.when_settled(waiter)

    def when_settled(self, waiter: Any) -> bool:
        """Have a waiter woken once all that is in the window now is settled; what waits on disk does not count.

        Returns:
            False if it is already, and the waiter is not kept.
        """
        if not self.window.used:
            return False
        self._flushes.append((self._next_number - 1, waiter))
        return True

    def when_unflowed(self, waiter: Any, now: float, *, in_callback: bool = False) -> bool:
        """Have a waiter woken once the producer is unflowed.

        Args:
            waiter: is in `wake` then.
            now: seconds.
            in_callback: a callback waits, for whose end others may be held; so it does not wait for that.

        Returns:
            False if it is already, or is closed and never will be, and the waiter is not kept.
        """
        self.controller.look(now)
        ignored = _ON_DELIVERY if in_callback else ""
        if self._is_unflowed(ignored) or self.closed is not None:
            return False
        self._unflow_waiters.append((ignored, waiter))
        return True

    def _is_unflowed(self, ignored: str) -> bool:
        gate = self.gate
        return gate.is_open or (ignored != "" and all(hold.source == ignored for hold in gate.holds))

    def forget_waiter(self, waiter: Any) -> bool:
        """Drop a waiter of `when_flushed` or `when_unflowed`.

        Returns:
            Whether it was still kept; if not, its wait is over.
        """
        before = len(self._flushes) + len(self._unflow_waiters)
        self._flushes = [entry for entry in self._flushes if entry[1] is not waiter]
        self._unflow_waiters = [entry for entry in self._unflow_waiters if entry[1] is not waiter]
        return len(self._flushes) + len(self._unflow_waiters) < before

    def take_failures(self) -> list[Receipt]:
        """The failures of which nobody has been told, in the order of admission, and forget them."""
        failures = sorted(self._unseen(), key=lambda receipt: receipt._number)
        self.failures.clear()
        return failures

    def _unseen(self) -> list[Receipt]:
        return [receipt for receipt in self.failures if not receipt._seen]

    def take_settled(self, now: float) -> list[Receipt]:
        """The settled receipts, to be told to the application one by one; `told` says how far that has come.

        If it is told more slowly than the broker confirms, the producer is held, so that no more than about twice its
        capacity is settled and not told.
        """
        assert self.settled is not None
        settled, self.settled = self.settled, []
        self._untold += len(settled)
        self._look_at_untold(0, now)
        return settled

    def _look_at_untold(self, more: int, now: float) -> None:
        if self._untold + more > self._most and self.closed is None:
            detail = "callbacks are slower than confirms"
            self.gate.hold(HoldKind.CAPACITY, now=now, source=_ON_DELIVERY, detail=detail)

    def told(self, count: int, now: float) -> None:
        """Take note that the application has been told of so many of the receipts of `take_settled`."""
        self._untold -= count
        if self._untold <= self._most // 2:
            self.lift(HoldKind.CAPACITY, now, source=_ON_DELIVERY)

    def close(self, reason: str, now: float) -> None:
        """Admit nothing from now on. Who waits is told; what is admitted goes on."""
        # That keeps the question whether it is closed off the way of every send.
        self.gate.shut()
        if self.closed is None:
            self.closed = reason
        # Also if it is closed already: that may have been interrupted.
        for ticket in tuple(self._waiting):
            if not ticket.decided:
                ticket.error = ProducerClosed(self.closed, ticket.payload)
            self.wake.append(ticket.waiter)
            del self._waiting[ticket]
        self.controller.relist(())
        self.wake += [waiter for _, waiter in self._unflow_waiters]
        self._unflow_waiters.clear()

    @property
    def unsettled_receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the unsettled messages, in the order of admission."""
        written = sorted(
            (*self._resending.again, *self._unconfirmed.flight.values()), key=lambda receipt: receipt._number
        )
        return (*written, *self._line)

    # What happens to the connection.

    def channel_opened(self, channel: int, frame_max: int, now: float) -> None:
        """A channel is there, in confirm mode if the settings want it; its first publish has delivery tag 1.

        Args:
            channel: its number.
            frame_max: the negotiated frame size in bytes; 0 for no limit.
            now: seconds.
        """
        self.channel = channel
        self._now = now
        self._use_channel(channel, frame_max)
        self._resending.begin(now)
        self._look_at_stops(now)
        self._fit(now)
        self._look_at_resending(now)
        if not self._was_open and self.gate.is_open:
            # That a producer connects before it can send is no flow control.
            self.gate.forget_past()
        self._was_open = True
        self._grant(now)

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        """The broker closed the channel, over a message of nobody knows whom. The next one carries on without it.

        Args:
            code: its reply code.
            text: its reply text.
            method: class and method id that it names.
            now: seconds.
        """
        begun = self._unconfirmed.begun()
        # Who may be the culprit: what is not returned. Without confirms it can also be what is settled already.
        suspects: list[Receipt] = []
        if method in (_BASIC_PUBLISH, _NO_METHOD) and (self._confirms or self._unconfirmed.outbound.begun == 1):
            suspects = [each for each in begun if each._reply is None]
        # Only a lone one can be told to be it. If no method is named an operator may have closed the channel, who would
        # hardly do so twice.
        culprit = None
        wants_room = self._resending.retries and is_want_of_room(code, text)
        told = method == _BASIC_PUBLISH or any(each._number in self._resending.suspects for each in suspects)
        if len(suspects) == 1 and told and not wants_room:
            culprit = suspects.pop()
            culprit._reply = (code, text)
        reason = f"the broker closed the channel: {code} {text}"
        self._disconnect(reason, now)
        if culprit is None and not self._confirms:
            words = "%s: %s; without confirms nobody can tell what is lost"
            self._log(logging.WARNING, words, self.settings.name, reason)
        if self.settings.on_disconnect is OnDisconnect.FAIL:
            self._give_back(reason, now, culprit)
            return
        if wants_room and suspects:
            tried = [each for each in suspects if self._resending.refused(each, now)]
            for each in tried:
                each._reply = (code, text)
            self._keep(now, (), tried)
            if self.window.used:
                self._hold_refused(f"{code} {text}", now, again=True)
            return
        if suspects and not self._resending.copies.intersection(each._number for each in suspects):
            # Of what has been in such company before, no words tell the culprit.
            suspects = list(narrowed(suspects, text))
        self._keep(now, suspects, () if culprit is None else (culprit,))

    @property
    def settled_so_far(self) -> int:
        """How many messages are settled; it only grows."""
        return self.admitted - self.window.used

    @property
    def wants_channel(self) -> bool:
        """Whether a channel is of use: messages may be admitted, or wait to leave."""
        return self.closed is None or self.window.used > 0

    def connection_lost(self, reason: str, now: float, *, reconnects: bool = False, shared: bool = False) -> bool:
        """The connection is gone, or given up.

        Args:
            reason: for people.
            now: seconds.
            reconnects: another one will be made, if one is wanted. By the setting `on_disconnect`, what is unsettled
                stays so until then, when it leaves in order before anything new, and what may have arrived bears the
                header `REPUBLISHED`; or it is settled. Otherwise it is settled, and nothing is admitted any more.
            shared: others publish on it, too, over whose messages it may have been lost.

        Returns:
            Whether another one is wanted.
        """
        if reconnects and self.wants_channel:
            suspects: Sequence[Receipt] = ()
            if not shared:
                in_flight = [each for each in self._unconfirmed.begun() if each._reply is None]
                suspects = self._resending.lost(in_flight, self.settled_so_far, reason, now)
            # Who flushes while it closes is held, too.
            self._disconnect(reason, now)
            if self.settings.on_disconnect is OnDisconnect.FAIL:
                self._give_back(reason, now)
            elif self._resending.convicted:
                for each in suspects:
                    each._reply = (0, f"connections hold without it, and are lost as soon as it is sent; {reason}")
                self._keep(now, (), suspects, Outcome.UNKNOWN)
            else:
                self._keep(now, suspects)
        else:
            self._end(reason, now)
        return self.wants_channel

    def _disconnect(self, reason: str, now: float, *, held: bool = True) -> None:
        self.channel = None
        self._resending.rest(now)
        if held:
            self.gate.hold(HoldKind.DISCONNECTED, now=now, detail=reason)
        # What the broker said about the channel and the connection ends with them, and so does what the socket said.
        self.gate.lift(HoldKind.CHANNEL_FLOW, now=now)
        self.gate.lift(HoldKind.CONNECTION_BLOCKED, now=now)
        self.gate.lift(HoldKind.TRANSPORT, now=now)

    def _keep(
        self,
        now: float,
        suspects: Sequence[Receipt] = (),
        culprits: Sequence[Receipt] = (),
        outcome: Outcome = Outcome.REJECTED,
    ) -> None:
        """Keep what is unsettled for the next channel, in the order of admission (E1).

        What was refused has a later delivery tag than younger messages, and goes before them again.

        Args:
            now: seconds.
            suspects: what is sent one at a time.
            culprits: what is settled instead.
            outcome: how the culprits are settled.
        """
        begun, unbegun = self._part()
        # A returned message has been answered, though its ack did not come.
        answered = [each for each in (*begun, *unbegun) if each._reply is not None]
        self._line.extendleft(each for each in reversed(unbegun) if each._reply is None)
        self._resending.keep([each for each in begun if each._reply is None], suspects)
        for receipt in answered:
            self._settle(receipt, outcome if receipt in culprits else Outcome.RETURNED)
        self._left(answered, now)

    def _part(self) -> tuple[list[Receipt], list[Receipt]]:
        """Have nothing on the wire any more.

        Returns:
            What is unsettled of that, and may have arrived; and what was never written.
        """
        begun = self._unconfirmed.begun()
        written = {receipt._number for receipt in begun} | self._resending.copies
        both = list(self._unconfirmed.flight.values())
        self._use_channel(0, 0)
        self.unwritten = 0
        return (
            [each for each in both if each._number in written],
            [each for each in both if each._number not in written],
        )

    def _fit(self, now: float) -> None:
        """Encode for a channel that has opened what is admitted, and settle what does not fit into its frames."""
        again, line = self._resending.again, self._line
        unfit = []
        for receipt in (*again, *line):
            try:
                self._encode(receipt)
            except Exception as error:
                # This broker takes smaller frames than the one that it was admitted for.
                receipt._reply = (0, f"it cannot be encoded again: {error}")
                unfit.append(receipt)
        if unfit:
            was_written = self._resending.copies
            self._resending.again = deque(each for each in again if each._reply is None)
            self._line = deque(each for each in line if each._reply is None)
            for receipt in unfit:
                self._settle(receipt, Outcome.UNKNOWN if receipt._number in was_written else Outcome.FAILED)
            self._left(unfit, now)
        if self.unwritten > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)

    def _encode(self, receipt: Receipt) -> None:
        """Encode the properties of a message that is admitted, as a second copy if it may have arrived."""
        encoder = self._unconfirmed.encoder
        receipt._route = encoder.route(receipt.exchange, receipt.routing_key)
        if receipt._number in self._resending.copies:
            receipt._prepared = encoder.prepare(republished(receipt.message), has_id=False)
            cost = encoder.cost(receipt._route, receipt.size, receipt._prepared)
        else:
            cost = self._prepare(receipt)
        self.unwritten += cost

    def _look_at_resending(self, now: float) -> None:
        """Admit new messages, or none, by what is to leave before them."""
        resending = self._resending
        if self.channel is None:
            return
        if resending.retry_at is not None:
            self._expire(now)
            resending.look()
            if resending.is_tried(bool(self._line)):
                self._room_again(now)
        leave = resending.may_leave(resending.again, not self._unconfirmed.flight, now)
        if resending.retry_at is None and resending.leaves_slowly(leave):
            detail = "what an earlier channel has left leaves first"
            self.gate.hold(HoldKind.DISCONNECTED, now=now, detail=detail)
        else:
            self.gate.lift(HoldKind.DISCONNECTED, now=now)

    def _expire(self, now: float) -> None:
        """Settle what has been refused for long enough and waits to leave again."""
        expired = self._resending.expired(now)
        for receipt in expired:
            cost = self._cost(receipt)
            self.unwritten -= cost
            self._settle(receipt, Outcome.NACKED if receipt._reply is None else Outcome.RETURNED)
        if expired:
            self._left(expired, now)

    def _room_again(self, now: float) -> None:
        """The broker has room again, or nothing is left to try."""
        self._resending.room_again({receipt._number for receipt in self.unsettled_receipts})
        self.gate.lift(HoldKind.REFUSED, now=now)

    def _end(self, reason: str, now: float) -> None:
        self._is_over = True
        # To be closed by hand is no flow control.
        self._disconnect(reason, now, held=self.closed is None)
        self.close(reason, now)
        self._give_back(reason, now)

    def _give_back(self, reason: str, now: float, culprit: Receipt | None = None) -> None:
        """Settle everything as it is."""
        resending = self._resending
        begun = {receipt._number for receipt in self._unconfirmed.begun()}
        unsettled = self.unsettled_receipts
        self._use_channel(0, 0)
        self.unwritten = 0
        self._line.clear()
        size = 0
        # One for all.
        why = (0, reason)
        for receipt in unsettled:
            size += receipt.size
            if receipt is culprit:
                outcome = Outcome.REJECTED
            elif receipt._reply is not None:
                outcome = Outcome.RETURNED
            else:
                receipt._reply = why
                number = receipt._number
                if number not in begun and resending.was_refused(receipt):
                    outcome = Outcome.NACKED
                else:
                    outcome = Outcome.UNKNOWN if number in begun or number in resending.copies else Outcome.FAILED
            self._settle(receipt, outcome)
        resending.forget()
        if self.observer is not None and unsettled:
            self.observer.settled(unsettled, now)
        self._by_id.clear()
        self._released(len(unsettled), size, now)
        self._room_again(now)

    # What the broker says.

    def on_flow(self, active: bool, now: float) -> None:
        """``Channel.Flow``: it is answered at once, right after the message that has begun, if any (J7)."""
        if self.channel is None:
            # There is nobody left to answer.
            return
        self._take_back()
        answer = flow_ok(self.channel, active)
        # Nothing is called while the sum is made, or what is admitted meanwhile would not be counted. So everywhere.
        size = len(answer)
        try:
            self._unconfirmed.outbound.put_control(answer)
            self.unwritten += size
        except BaseException:
            to_the_end(self._count_unwritten)
            raise
        if active:
            self.lift(HoldKind.CHANNEL_FLOW, now)
        else:
            self.hold(HoldKind.CHANNEL_FLOW, now)

    def on_blocked(self, reason: str, now: float) -> None:
        """``Connection.Blocked``."""
        self.hold(HoldKind.CONNECTION_BLOCKED, now, detail=reason)

    def on_unblocked(self, now: float) -> None:
        """``Connection.Unblocked``."""
        self.lift(HoldKind.CONNECTION_BLOCKED, now)

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Ack``: the broker takes responsibility."""
        self._answered(tag, multiple, Outcome.CONFIRMED, now)

    def on_ack_run(self, first: int, count: int, now: float) -> None:
        """As `on_ack` for so many single tags, one after the other, in one pass."""
        if first and first + count - 1 <= self._unconfirmed.outbound.finished:
            self._settle_run(first, first + count, Outcome.CONFIRMED, now)
        else:
            for tag in range(first, first + count):
                self._answered(tag, False, Outcome.CONFIRMED, now)

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Nack``: the broker does not."""
        self._answered(tag, multiple, Outcome.NACKED, now)

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        """``Basic.Return``: no queue took a mandatory message. Its ack follows.

        Args:
            code: the reply code.
            text: the reply text.
            exchange: where it was published.
            routing_key: with which key.
            header: the payload of the content header frame.
            body: the content.
        """
        message = decode_message(header, body)
        receipt = self._find(message.message_id, exchange, routing_key)
        if receipt is not None:
            receipt._reply = (code, text)
        elif not self._confirms:
            # Its receipt was settled when it was written, and that was told. So `flush` and `close` bring this up.
            receipt = self._receipt_type(message, self._route_of_return(exchange, routing_key), None)
            receipt._reply = (code, text)
            receipt._outcome = Outcome.RETURNED
            self._log(logging.WARNING, "%s: %s", self.settings.name, receipt.describe())
            if self.settled is not None and len(self.failures) >= _MOST_RETURNS:
                # Programs that are told of receipts may never flush.
                del self.failures[0]
            self._keep_failure(receipt)
        else:
            self._log(
                logging.WARNING,
                "%s: the broker returned message %s to %r/%r (%d %s), which is not in flight; ignored",
                self.settings.name,
                message.message_id,
                exchange,
                routing_key,
                code,
                text,
            )

    def _route_of_return(self, exchange: str, routing_key: str) -> Route:
        try:
            return self._unconfirmed.encoder.route(exchange, routing_key)
        except ValueError as error:
            # Bytes that are no UTF-8 get longer by being replaced.
            raise FrameError(f"a return of what nobody can have published: {error}") from error

    def _find(self, message_id: str | None, exchange: str, routing_key: str) -> Receipt | None:
        if message_id is None:
            return None
        own = [receipt for receipt in self._by_id.get(message_id, ()) if self._is_written(receipt)]
        if own:
            # One id may have gone to several places, of which only some have a queue.
            there = [each for each in own if (each.exchange, each.routing_key) == (exchange, routing_key)]
            receipt = (there or own)[0]
            self._by_id[message_id].remove(receipt)
            return receipt
        prefix = self._id_prefix
        if prefix is None or not message_id.startswith(prefix):
            return None
        try:
            number = int(message_id[len(prefix) :], 16)
        except ValueError:
            return None
        found = self._unconfirmed.with_number(number)
        if found is None:
            # Broker-J nacks what no queue takes, and returns it afterwards.
            found = next((each for each in self._resending.again if each._number == number), None)
        elif not self._is_written(found):
            return None
        return found if found is not None and found.message_id == message_id else None

    def _is_written(self, receipt: Receipt) -> bool:
        """Whether an unsettled message is all written, on this channel, or was refused there."""
        if receipt._number in self._resending.copies and self._unconfirmed.tag_of(receipt) == 0:
            return True
        return 0 < self._unconfirmed.tag_of(receipt) <= self._unconfirmed.outbound.finished

    def delivery_tag(self, receipt: Receipt) -> int:
        """The delivery tag that a message has, or had, on the last channel that it was written on; 0 before."""
        return receipt._tag

    # What the socket says.

    def data_to_write(self, limit: int) -> bytes:
        """The next bytes to write, about `limit` at the most; empty if nothing may be written now."""
        unconfirmed, resending = self._unconfirmed, self._resending
        outbound = unconfirmed.outbound
        data = outbound.data(limit)
        if data or outbound.stopped or self.channel is None:
            return data
        source = resending.again or self._line
        if not source:
            return b""
        most = len(source)
        if not resending.is_idle:
            most = resending.may_leave(source, not unconfirmed.flight, self._now)
            if not most:
                return b""
            resending.leaves(source[0], self._now)
        try:
            unconfirmed.make(source, limit, most)
        except BaseException:
            to_the_end(lambda: unconfirmed.mend_make(source))
            raise
        return outbound.data(limit)

    def _take_back(self) -> None:
        """Have nothing on the wire that has not begun."""
        try:
            self._move_back()
        except BaseException:
            to_the_end(self._move_back)
            raise

    def _move_back(self) -> None:
        unconfirmed, line = self._unconfirmed, self._line
        unconfirmed.outbound.take_back()
        # The last first. To begin anew changes nothing.
        while (receipt := unconfirmed.beyond()) is not None:
            if not self._resending.take_back(receipt) and (not line or line[0] is not receipt):
                line.appendleft(receipt)
            unconfirmed.flight.popitem()

    def advance(self, count: int, now: float) -> bool:
        """Take note that so many bytes of `data_to_write` were taken by the socket.

        Returns:
            True if that ends at a frame border, so that something else may be written on the connection.
        """
        outbound = self._unconfirmed.outbound
        try:
            outbound.advance(count)
            self.unwritten -= count
        except BaseException:
            to_the_end(self._count_unwritten)
            raise
        self._now = now
        if not self._confirms:
            self._written(now)
        if not self.gate.is_open and self.unwritten <= self._max_unwritten // 2:
            self.lift(HoldKind.TRANSPORT, now)
        return not outbound.mid_frame

    @property
    def written(self) -> int:
        """How many messages are all written on this channel."""
        return self._unconfirmed.outbound.finished

    @property
    def is_stopped(self) -> bool:
        """Whether no message may begin."""
        return self._unconfirmed.outbound.stopped

    @property
    def has_answer(self) -> bool:
        """Whether something is to be written that a stop does not keep back."""
        return not self._unconfirmed.outbound.is_empty

    def end_writing(self) -> bool:
        """Have no message begin any more; whether none has begun and not ended."""
        self._take_back()
        return self._unconfirmed.outbound.stop()

    @property
    def unfinished(self) -> bytes:
        """What is still to be written of frames that have begun; empty at a frame border."""
        return self._unconfirmed.outbound.unfinished

    # What the clock says.

    def next_timer(self, now: float) -> float | None:
        """When to call `on_timer`; ``None`` if time alone changes nothing."""
        resending = self._resending
        times = [self.controller.ready_at(now)]
        if resending.probe is None and self.channel is not None:
            times.append(resending.retry_at)
            times.append(resending.waits_until())
        return min((at for at in times if at is not None), default=None)

    @property
    def holds_back(self) -> bool:
        """Whether messages wait for a time: the broker has no room, or connections are lost over one."""
        return self._resending.retry_at is not None or self._resending.waits_until() is not None

    def on_timer(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        self._go_on(now)
        self._grant(now)

    def look_anew(self, now: float) -> None:
        """Do what should have followed from a step that was interrupted at any point, by Ctrl-C."""
        self.gate.mend()
        self._recount()
        self._look_at_stops(now)
        self._look_at_unflow_waiters()
        self._grant(now)

    # Admission.

    def _receipt_for(self, payload: bytes | Message, exchange: str, routing_key: str) -> tuple[Receipt, int]:
        """Make what is to be admitted, and say how many bytes its frames have; nothing has happened by that."""
        receipt = self._receipt_type(payload, self._route(exchange, routing_key), self._id_prefix)
        return receipt, self._prepare(receipt)

    def _route(self, exchange: str, routing_key: str) -> Route:
        last = self._last
        if exchange is last[0] and routing_key is last[1] and last[2].made_by is self._mark:
            return last[2]
        route = self._unconfirmed.encoder.route(exchange, routing_key)
        self._last = exchange, routing_key, route
        return route

    def _prepare(self, receipt: Receipt) -> int:
        """Encode the properties of a message that was never written, and say how many bytes its frames have."""
        payload, route = receipt._payload, receipt._route
        if type(payload) is bytes and (size := len(payload)) <= self._max_plain:
            receipt._prepared = None
            return route.cost + size if size else route.cost - FRAME_OVERHEAD
        message = payload if isinstance(payload, Message) else Message(payload)
        encoder = self._unconfirmed.encoder
        receipt._prepared = encoder.prepare(message, has_id=self._id_prefix is not None)
        return encoder.cost(route, receipt.size, receipt._prepared)

    def _is_asked_for_by_id(self, payload: bytes | Message) -> bool:
        """Whether a return names a message by an id of its own."""
        return self._mandatory and isinstance(payload, Message) and payload.message_id is not None

    def _admit(self, receipt: Receipt, cost: int, now: float) -> None:
        """Admit a message. The caller has its permits, and calls `_recount` if anything is raised."""
        payload = receipt._payload
        if self._is_asked_for_by_id(payload):
            self._by_id.setdefault(payload.message_id, []).append(receipt)  # type: ignore[union-attr, arg-type]  # it is
        if self.observer is not None:
            self.observer.began[self._next_number] = now
        # From here on nothing is called, as in `send_at_once`.
        number = receipt._number = self._next_number
        self._next_number, self.unwritten = number + 1, self.unwritten + cost
        self._line.append(receipt)
        if self.unwritten > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)

    def _recount(self) -> None:
        """Count anew what is admitted, after an admission in which something was raised, as Ctrl-C is at any point."""
        if self.observer is not None:
            self.observer.began.pop(self._next_number, None)
        for message_id, own in tuple(self._by_id.items()):
            own[:] = [receipt for receipt in own if receipt._number]
            if not own:
                del self._by_id[message_id]
        while True:
            used = self.window.used
            unsettled = self.unsettled_receipts
            count = len(unsettled)
            # What others have admitted meanwhile has made it more. Nobody comes between the look and the store.
            if used == self.window.used:
                self.window.used = count
                break
        if self.byte_window is not None:
            self.byte_window.used = sum(receipt.size for receipt in unsettled)
        self._count_unwritten()

    def _count_unwritten(self) -> None:
        while True:
            before = self.unwritten
            size = self._unconfirmed.outbound.size + sum(map(self._cost, (*self._resending.again, *self._line)))
            # As above.
            if before == self.unwritten:
                self.unwritten = size
                return

    def _cost(self, receipt: Receipt) -> int:
        """How many bytes the frames of a message have."""
        size, prepared = receipt.size, receipt._prepared
        if prepared is not None:
            return self._unconfirmed.encoder.cost(receipt._route, size, prepared)
        return receipt._route.cost + size if size else receipt._route.cost - FRAME_OVERHEAD

    def _grant(self, now: float) -> None:
        """Admit from the line whom the gate and the window let in now."""
        controller = self.controller
        # Who comes now does not go before them.
        self._grants = True
        try:
            while (ticket := controller.grant(now)) is not None:
                assert isinstance(ticket, SendTicket)
                self._let_in(ticket, now)
            if self._unflow_waiters or (not controller.waiting and any(map(self.gate.is_held_by, _LIMITS))):
                # Such a hold ends when there is room, not only when somebody next asks for it.
                controller.look(now)
            self._grants = False
        except BaseException:
            to_the_end(self._mend)
            raise

    def _let_in(self, ticket: SendTicket, now: float) -> None:
        ticket.number = self._next_number
        try:
            receipt, cost = self._receipt_for(ticket.payload, ticket.exchange, ticket.routing_key)
        except Exception as error:
            # The channel that opened meanwhile may take smaller frames. The sender gets the error.
            self._recount()
            ticket.error = error
        else:
            self._admit(receipt, cost, ticket.since)
            ticket.receipt = receipt
        self.wake.append(ticket.waiter)
        del self._waiting[ticket]

    def _mend(self) -> None:
        """Put right what an interrupted step has left half done: Ctrl-C can come at any point of a main thread's."""
        self._recount()
        waiting: dict[SendTicket, None] = {}
        for ticket in self._waiting:
            if 0 < ticket.number < self._next_number and ticket.receipt is None and ticket.error is None:
                # It was admitted, and only that was not noted any more.
                ticket.receipt = next((each for each in reversed(self._line) if each._number == ticket.number), None)
            if not ticket.decided:
                # Another may be admitted under that number.
                ticket.number = 0
                waiting[ticket] = None
            elif not ticket.cancelled and ticket.waiter not in self.wake:
                self.wake.append(ticket.waiter)
        self._waiting = waiting
        self.controller.relist(waiting)
        self._grants = False

    # Answers, and what they settle.

    def _answered(self, tag: int, multiple: bool, outcome: Outcome, now: float) -> None:
        # A message that is half written cannot have arrived.
        written = self._unconfirmed.outbound.finished
        if tag > written or (tag == 0 and not multiple):
            self._log(
                logging.WARNING,
                "%s: the broker answered delivery tag %d, but %d messages were written; ignored",
                self.settings.name,
                tag,
                written,
            )
            return
        # Tag 0 stands for all (AMQP 0-9-1, Basic.Ack).
        first, stop = (self._unconfirmed.oldest, (tag or written) + 1) if multiple else (tag, tag + 1)
        if outcome is Outcome.NACKED and self._resending.retries:
            self._refuse(first, stop, now)
        else:
            self._settle_run(first, stop, outcome, now)

    def _refuse(self, first: int, stop: int, now: float) -> None:
        """Have what is unsettled of these tags leave again, unless it has tried for long enough."""
        resending, unconfirmed = self._resending, self._unconfirmed
        for tag in range(max(first, unconfirmed.oldest), stop):
            receipt = unconfirmed.find(tag)
            if receipt is None:
                continue
            if resending.refused(receipt, now):
                self._settle_run(tag, tag + 1, Outcome.NACKED, now)
                continue
            unconfirmed.refuse(tag)
            was_probe = resending.put(receipt)
            try:
                self._encode(receipt)
            except Exception as error:
                # With the mark of a second copy its properties are larger than a frame.
                receipt._reply = (0, f"it cannot be sent again: {error}")
                resending.again.remove(receipt)
                self._settle(receipt, Outcome.NACKED)
                self._left([receipt], now)
                continue
            self._hold_refused("Basic.Nack", now, again=was_probe)

    def _hold_refused(self, detail: str, now: float, *, again: bool) -> None:
        """No probe leaves for a while; `again` if one has been refused."""
        if self._resending.hold(now, again=again):
            self.gate.hold(HoldKind.REFUSED, now=now, detail=detail)

    def _settle_run(self, first: int, stop: int, outcome: Outcome, now: float) -> None:
        """Settle what is unsettled of the tags from `first` to before `stop`, all of which are written."""
        wake = self.wake
        confirmed = outcome is Outcome.CONFIRMED
        receipts = self._unconfirmed.take(first, stop)
        for receipt in receipts:
            if not confirmed:
                self._settle(receipt, outcome, report=False)
            elif receipt._reply is None:
                receipt._outcome = outcome
                if receipt._waiter is not None:
                    wake.append(receipt._waiter)
            else:
                self._settle(receipt, Outcome.RETURNED, report=False)
        if self.settled is not None:
            self.settled += receipts
        self._left(receipts, now)

    def _written(self, now: float) -> None:
        """Without confirms a message is settled once it is written."""
        unconfirmed = self._unconfirmed
        receipts = unconfirmed.take(unconfirmed.oldest, unconfirmed.outbound.finished + 1)
        for receipt in receipts:
            self._settle(receipt, Outcome.SENT)
        if receipts:
            self._left(receipts, now)

    def _settle(self, receipt: Receipt, outcome: Outcome, *, report: bool = True) -> None:
        receipt._outcome = outcome
        if receipt._waiter is not None:
            self.wake.append(receipt._waiter)
        if report and self.settled is not None:
            self.settled.append(receipt)
        if self.settled is None and receipt._failed:
            self._keep_failure(receipt)

    def _keep_failure(self, receipt: Receipt) -> None:
        """Keep a failure for the next `flush` or `close`."""
        if len(self.failures) >= self._sweep_at:
            # Those that were looked at would pile up in a producer that never flushes.
            self.failures = self._unseen()
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self.failures))
        self.failures.append(receipt)

    def _left(self, receipts: list[Receipt], now: float) -> None:
        if self.observer is not None and receipts:
            self.observer.settled(receipts, now)
        if self._by_id:
            for receipt in receipts:
                self._forget_id(receipt)
        size = 0 if self.byte_window is None else sum(receipt.size for receipt in receipts)
        self._released(len(receipts), size, now)

    def _forget_id(self, receipt: Receipt) -> None:
        payload = receipt._payload
        if isinstance(payload, Message) and payload.message_id is not None:
            own = self._by_id.get(payload.message_id)
            if own is not None:
                if receipt in own:
                    own.remove(receipt)
                if not own:
                    del self._by_id[payload.message_id]

    def _released(self, count: int, size: int, now: float) -> None:
        if count:
            if self._adaptive is not None:
                self._adaptive.observe(count, now)
            self.controller.release(size, count)
        if self._untold and self.settled:
            # Before anybody is let in for what has just been settled.
            self._look_at_untold(len(self.settled), now)
        if self.controller.waiting or not self.gate.is_open:
            self._go_on(now)
            self._grant(now)
        if self._flushes:
            self._look_at_flushes()

    def _go_on(self, now: float) -> None:
        """Put on the channel what may leave on it by now."""
        if (self.channel is not None and not self._resending.is_idle) or self.gate.is_held_by(HoldKind.DISCONNECTED):
            self._look_at_resending(now)

    def _look_at_flushes(self) -> None:
        parts = (
            self._unconfirmed.oldest_number(),
            *(each[0]._number for each in (self._resending.again, self._line) if each),
        )
        oldest = min(filter(None, parts), default=self._next_number)
        self.wake += [waiter for number, waiter in self._flushes if number < oldest]
        self._flushes = [entry for entry in self._flushes if entry[0] >= oldest]

    # What follows from a hold that is raised or lifted.

    def _gate_changed(self, hold: Hold, raised: bool, now: float) -> None:
        if hold.kind in _STOPS_WRITING:
            self._look_at_stops(now)
        if self._unflow_waiters and not raised:
            self._look_at_unflow_waiters()
        level = _LOG_LEVELS.get(hold.kind, logging.DEBUG)
        if hold.kind == HoldKind.DISCONNECTED and not self._was_open:
            # That a producer connects before it can send is nothing to know of.
            level = logging.DEBUG
        # The holds that the end of a closed producer takes away are not lifted by anybody.
        ends = self._is_over and self.closed is not None
        if raised:
            self._log(level, "%s: held: %s", self.settings.name, hold)
        elif ends:
            self._log(level, "%s: closed while held for %.3g s: %s", self.settings.name, now - hold.since, hold)
        else:
            self._log(level, "%s: no longer held after %.3g s: %s", self.settings.name, now - hold.since, hold)
        if self.events is not None:
            if raised:
                kind = FlowEventKind.FLOWED if len(self.gate.holds) == 1 else FlowEventKind.HOLD_RAISED
            elif ends:
                kind = FlowEventKind.CLOSED
            else:
                kind = FlowEventKind.HOLD_LIFTED if self.gate.holds else FlowEventKind.UNFLOWED
            self._event(kind, hold, hold.since, now)

    def _look_at_unflow_waiters(self) -> None:
        self.wake += [waiter for ignored, waiter in self._unflow_waiters if self._is_unflowed(ignored)]
        self._unflow_waiters = [entry for entry in self._unflow_waiters if not self._is_unflowed(entry[0])]

    def _look_at_stops(self, now: float) -> None:
        stopped = any(map(self.gate.is_held_by, _STOPS_WRITING))
        self._unconfirmed.outbound.stopped = stopped
        if stopped:
            self._take_back()
            self._resending.rest(now)
        elif self.channel is not None:
            self._resending.go_on(now)

    # Notices, events and the log.

    def _notice_for(self, ticket: SendTicket, now: float) -> None:
        # It is said once for all who wait.
        if now >= self._notice_at:
            self._notice_at = now + self.settings.flow_control_wait_notify_period
            self._notice(now)
        ticket.notice_at = self._notice_at

    def _notice(self, now: float) -> None:
        holds = self.gate.holds
        since = next(iter(self._waiting)).since
        count = len(self._waiting)
        who = "a send has been waiting" if count == 1 else f"{count} sends have been waiting, the longest"
        why = ", ".join(map(str, holds)) or "others wait before it"
        self._log(logging.WARNING, f"%s: {who} for %.1f s: %s", self.settings.name, now - since, why)
        if self.events is not None:
            self._event(FlowEventKind.WAITING, holds[0] if holds else None, since, now, count)

    def _event(self, kind: FlowEventKind, hold: Hold | None, since: float, now: float, waiting: int = 0) -> None:
        assert self.events is not None
        offset = self._wall_offset
        told = None if hold is None else self._on_the_wall_clock(hold)
        self.events.append(
            FlowEvent(
                kind,
                self.settings.name,
                told,
                self.holds,
                now + offset,
                since + offset,
                now - since,
                waiting,
                self.admitted,
                self.unsettled,
                self.window.capacity,
            )
        )

    def _log(self, level: int, text: str, *arguments: object) -> None:
        if logger.isEnabledFor(level):
            self.logs.append((level, text, arguments))
