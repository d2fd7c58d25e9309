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
from bisect import bisect_right
from dataclasses import replace
from typing import Any

from qflow_client.errors import FlowControlTimeout, ProducerClosed
from qflow_client.events import FlowEvent, FlowEventKind, FlowState, HoldKind
from qflow_client.flow import (
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
from qflow_client.frames import FRAME_OVERHEAD, FrameError, PublishEncoder, Route, decode_message, flow_ok, properties
from qflow_client.message import Message
from qflow_client.outbound import Outbound
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings, check_argument, check_setting

__all__ = ["REPUBLISHED", "LogEntry", "ProducerProtocol", "SendTicket", "write_log"]

#: The header of a message that is sent once more because nobody knows whether it has arrived.
REPUBLISHED = "x-qflow-republished"

logger = logging.getLogger(__name__)

# A level, a text and its arguments.
LogEntry = tuple[int, str, tuple[object, ...]]

# Holds that come and go with every burst are for debugging, those that people have to know of are not.
_LOG_LEVELS: dict[str, int] = {
    HoldKind.CHANNEL_FLOW: logging.INFO,
    HoldKind.PAUSED: logging.INFO,
    HoldKind.CONNECTION_BLOCKED: logging.WARNING,
}

# The holds under which messages that are already admitted do not leave either.
_STOPS_WRITING = (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED)

# The holds that stand for the limits of admission.
_LIMITS = (HoldKind.CAPACITY, HoldKind.RATE)

# The source of the hold for receipts that are told more slowly than the broker confirms.
_ON_DELIVERY = "on_delivery"

# Class and method id, as Channel.Close names it.
_BASIC_PUBLISH = (60, 40)

# Below this length the list of failures is not worth sweeping.
_SWEEP_FROM = 64


def write_log(entries: list[LogEntry]) -> None:
    """Log what a protocol had to say, under no lock: a handler may block, or send by the same producer."""
    for level, text, arguments in entries:
        logger.log(level, text, *arguments)


class SendTicket(Ticket):
    """A message that waits to be admitted."""

    __slots__ = ("deadline", "error", "exchange", "notice_at", "payload", "receipt", "routing_key", "since", "waiter")

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
        # Set when it is admitted, or when it never will be.
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        # What the skin wakes its owner by.
        self.waiter: Any = None

    @property
    def decided(self) -> bool:
        """Whether it stands in line no longer: it was admitted, or never will be."""
        return self.receipt is not None or self.error is not None or self.cancelled


class ProducerProtocol:
    """The state of one producer.

    Args:
        settings: the producer's settings.
        id_prefix: the beginning of the message ids that it gives; the number in 12 hexadecimal digits follows.
        receipt_type: what it makes for every message.
        now: seconds.
        wall_offset: what to add to `now` for seconds since 1970.
        line: the order in which waiting messages are served; first come, first served unless given.

    Raises:
        TypeError: `line` is no line.
    """

    # CPython (3.11) is quick at no more than 30 attributes that have no slots.
    __slots__ = (
        "_ahead",
        "_by_id",
        "_confirms",
        "_copies",
        "_encoder",
        "_first",
        "_flushes",
        "_id_prefix",
        "_last_exchange",
        "_last_key",
        "_last_route",
        "_mandatory",
        "_max_plain",
        "_max_unwritten",
        "_next_number",
        "_notice_at",
        "_oldest",
        "_receipt_type",
        "_resent",
        "_sweep_at",
        "_unflow_waiters",
        "_unsettled",
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
        "outbound",
        "settings",
        "settled",
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
    ) -> None:
        is_line = line is None or all(callable(getattr(line, name, None)) for name in ("push", "head", "pop"))
        check_argument("line", line, is_line and not isinstance(line, type), "None or have the methods of a Line")
        self.settings = settings
        self.window = WindowLimiter(settings.capacity, kind=HoldKind.CAPACITY)
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
        # What every message asks for.
        self._confirms = settings.confirms
        self._mandatory = settings.is_mandatory
        self._max_unwritten = settings.max_unwritten_bytes
        self._id_prefix = id_prefix if settings.message_ids else None
        self._receipt_type = receipt_type
        self._wall_offset = wall_offset
        # The number of the next message; with the prefix it is its message id. To count it on is what admits a message.
        self._next_number = 1
        # How far the numbers are ahead of the delivery tags, which run in step with them on one channel.
        self._ahead = 0
        # Replaced when a channel opens.
        self._use_channel(0, 0)
        self.outbound = Outbound()
        # By delivery tag, which on one channel is the order of admission.
        self._unsettled: dict[int, Receipt] = {}
        # The oldest unsettled tag, or the next one if there is none.
        self._oldest = 1
        # Mandatory messages with an id of their own, because a return names nothing else.
        self._by_id: dict[str, list[Receipt]] = {}
        # The tags of those messages, by number, that an earlier connection had left unsettled, …
        self._resent: dict[int, int] = {}
        # … and the numbers of the part of them that may have arrived by it.
        self._copies: set[int] = set()
        # Who waits until every tag up to one is settled, and who waits for an open gate.
        self._flushes: list[tuple[int, Any]] = []
        self._unflow_waiters: list[Any] = []
        # Who stands in line, the longest wait first, and before when nobody is to say so again.
        self._waiting: dict[SendTicket, None] = {}
        self._notice_at = -math.inf
        # The send of a callback that waits, in front of all others.
        self._first: SendTicket | None = None
        # Settled receipts that were taken, and of which the application is not told yet.
        self._untold = 0
        # Why nothing can be sent any more; None while it can.
        self.closed: str | None = None
        # The channel number while a channel is open, and whether one ever was.
        self.channel: int | None = None
        self._was_open = False

        # To be taken by the skin: whom to wake, …
        self.wake: list[Any] = []
        # … receipts that are settled, if somebody wants all of them, …
        self.settled: list[Receipt] | None = None
        # … flow events, if somebody listens, …
        self.events: list[FlowEvent] | None = None
        # … what is to be logged, by `write_log` and outside any lock, …
        self.logs: list[LogEntry] = []
        # … and failures of which nobody has been told yet.
        self.failures: list[Receipt] = []
        # How many there may be before they are rid of those that were looked at since.
        self._sweep_at = _SWEEP_FROM

        self.gate.observer = self._gate_changed
        self.gate.hold(HoldKind.DISCONNECTED, now=now)

    def _use_channel(self, number: int, frame_max: int) -> None:
        settings = self.settings
        self._encoder = PublishEncoder(number, frame_max, id_prefix=self._id_prefix or "", mandatory=self._mandatory)
        # The longest body that can go without a closer look; -1 for none, if a body alone gets no message id.
        self._max_plain = -1 if self._id_prefix is None else self._encoder.max_body
        # The route that was taken last: to tell by identity that the next message goes there too is the cheapest way.
        self._last_exchange, self._last_key = settings.exchange, settings.routing_key
        self._last_route = self._encoder.route(settings.exchange, settings.routing_key)

    # What the application does.

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return len(self._unsettled)

    @property
    def _next_tag(self) -> int:
        return self._next_number - self._ahead

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        return len(self._unsettled) - (self._next_tag - 1 - self.outbound.begun)

    def send(self, payload: bytes | Message, exchange: str, routing_key: str, now: float) -> Receipt | None:
        """Admit a message if that is possible now.

        Returns:
            Its receipt; ``None`` if the producer is flowed or others wait, and nothing has happened.

        Raises:
            ProducerClosed: no message will ever be admitted again.
            ValueError: it cannot be encoded.
        """
        size = len(payload) if type(payload) is bytes else len(payload.body)  # type: ignore[union-attr]  # a Message
        try:
            if self.controller.try_acquire(size, now):
                return self._admit(payload, exchange, routing_key, size, now)
        except BaseException:
            self._undo_admission()
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
        self._encoder.route(exchange, routing_key)
        if isinstance(payload, Message):
            properties(payload)
            size = len(payload.body)
        else:
            size = len(payload)
        ticket = SendTicket(payload, exchange, routing_key, size, now, source)
        ticket.waiter = waiter
        ticket.notice_at = now + self.settings.flow_control_wait_notify_period
        if timeout is not None:
            ticket.deadline = now + timeout
        if first:
            self._first = ticket
        else:
            self.controller.stand_in_line(ticket, now)
        self._waiting[ticket] = None
        # Whatever was in the way may be gone since.
        self._grant(now)
        return ticket

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
            self.give_up(ticket, now)
            raise FlowControlTimeout(holds, now - ticket.since, ticket.payload)
        if now >= ticket.notice_at:
            # It is said once for all who wait.
            if now >= self._notice_at:
                self._notice_at = now + self.settings.flow_control_wait_notify_period
                self._notice(now)
            ticket.notice_at = self._notice_at
        return min(ticket.deadline, ticket.notice_at)

    def give_up(self, ticket: SendTicket, now: float) -> bool:
        """Stop waiting.

        Returns:
            True if the message was not admitted, and never will be; False if that was decided before.
        """
        if ticket.decided:
            return False
        if ticket is self._first:
            self._first = None
            ticket.cancelled = True
        else:
            self.controller.leave_line(ticket)
        self._waiting.pop(ticket, None)
        # It may have stood before one that is small enough.
        self._grant(now)
        return True

    def set_capacity(self, capacity: int, now: float) -> None:
        """Change the window. A lower one cancels nothing: nothing is admitted until there is room (C6).

        Raises:
            SettingsError: the setting `capacity` cannot have this value.
        """
        check_setting("capacity", capacity)
        self.window.capacity = capacity
        self._grant(now)

    def hold(self, kind: str, now: float, *, source: str = "", detail: str = "") -> None:
        """Raise a hold."""
        self.gate.hold(kind, now=now, source=source, detail=detail)

    def lift(self, kind: str, now: float, *, source: str = "") -> None:
        """Lift a hold, and admit whom that lets in."""
        if self.gate.lift(kind, now=now, source=source) is not None:
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
        if not self._unsettled:
            return False
        self._flushes.append((self._next_tag - 1, waiter))
        return True

    def when_unflowed(self, waiter: Any, now: float) -> bool:
        """Have a waiter woken once the producer is unflowed.

        Returns:
            False if it is already, or is closed and never will be, and the waiter is not kept.
        """
        self.controller.look(now)
        if self.gate.is_open or self.closed is not None:
            return False
        self._unflow_waiters.append(waiter)
        return True

    def forget_waiter(self, waiter: Any) -> bool:
        """Drop a waiter of `when_flushed` or `when_unflowed`.

        Returns:
            Whether it was still kept; if not, its wait is over.
        """
        before = len(self._flushes) + len(self._unflow_waiters)
        self._flushes = [entry for entry in self._flushes if entry[1] is not waiter]
        self._unflow_waiters = [entry for entry in self._unflow_waiters if entry is not waiter]
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
        if self._untold + more > self.window.capacity and self.closed is None:
            detail = "callbacks are slower than confirms"
            self.gate.hold(HoldKind.CAPACITY, now=now, source=_ON_DELIVERY, detail=detail)

    def told(self, count: int, now: float) -> None:
        """Take note that the application has been told of so many of the receipts of `take_settled`."""
        self._untold -= count
        if self._untold <= self.window.capacity // 2:
            self.lift(HoldKind.CAPACITY, now, source=_ON_DELIVERY)

    def close(self, reason: str, now: float) -> None:
        """Admit nothing from now on. Who waits is told; what is admitted goes on."""
        if self.closed is not None:
            return
        self.closed = reason
        # A gate that stays shut keeps the question whether it is closed off the way of every send. That is no flow
        # control.
        self.gate.hold(HoldKind.DISCONNECTED, now=now, source="close", detail=reason, quiet=True)
        first, self._first = self._first, None
        while (ticket := first or self.controller.dismiss()) is not None:
            first = None
            assert isinstance(ticket, SendTicket)
            ticket.error = ProducerClosed(reason, ticket.payload)
            self.wake.append(ticket.waiter)
        self._waiting.clear()
        self.wake += self._unflow_waiters
        self._unflow_waiters.clear()

    @property
    def unsettled_receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the unsettled messages, in the order of admission."""
        return tuple(self._unsettled.values())

    # What happens to the connection.

    def channel_opened(self, channel: int, frame_max: int, now: float) -> None:
        """A channel is there, in confirm mode if the settings want it; its first publish has delivery tag 1.

        Args:
            channel: its number.
            frame_max: the negotiated frame size in bytes; 0 for no limit.
            now: seconds.
        """
        self.channel = channel
        self._use_channel(channel, frame_max)
        self.outbound = Outbound()
        self._look_at_stops()
        if self._unsettled:
            self._resend(now)
        self.gate.lift(HoldKind.DISCONNECTED, now=now)
        if not self._was_open and self.gate.is_open:
            # That a producer connects before it can send is no flow control.
            self.gate.forget_past()
        self._was_open = True
        self._grant(now)

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        """The broker closed the channel.

        Args:
            code: its reply code.
            text: its reply text.
            method: class and method id that it names.
            now: seconds.
        """
        # Who may be the culprit: what is not returned. Without confirms it can also be what is settled already.
        suspects = []
        if method == _BASIC_PUBLISH and self._confirms:
            begun = self.outbound.begun
            suspects = [each for tag, each in self._unsettled.items() if tag <= begun and each._reply is None]
        # Only a lone one can be told to be it.
        culprit = suspects[0] if len(suspects) == 1 else None
        if culprit is not None:
            culprit._reply = (code, text)
        self._end(f"the broker closed the channel: {code} {text}", now, culprit)

    def connection_lost(self, reason: str, now: float, *, resend: bool = False) -> None:
        """The connection is gone, or given up.

        Args:
            reason: for people.
            now: seconds.
            resend: another one will be made. What is unsettled stays so, and when a channel opens it leaves in order
                before anything new; what may have arrived bears the header `REPUBLISHED` then. Otherwise all of it is
                settled, and nothing is admitted any more.
        """
        if resend and self.closed is None:
            self._keep(reason, now)
        else:
            self._end(reason, now)

    def _disconnect(self, reason: str, now: float) -> None:
        self.channel = None
        self.gate.hold(HoldKind.DISCONNECTED, now=now, detail=reason, quiet=self.closed is not None)
        # What the broker said about the channel and the connection ends with them, and so does what the socket said.
        self.gate.lift(HoldKind.CHANNEL_FLOW, now=now)
        self.gate.lift(HoldKind.CONNECTION_BLOCKED, now=now)
        self.gate.lift(HoldKind.TRANSPORT, now=now)

    def _keep(self, reason: str, now: float) -> None:
        """Have what is unsettled wait for the next channel."""
        self._disconnect(reason, now)
        begun = self.outbound.begun
        self.outbound = Outbound()
        # A returned message has been answered, though its ack did not come.
        returned = [receipt for receipt in self._unsettled.values() if receipt._reply is not None]
        kept = [(tag, receipt) for tag, receipt in self._unsettled.items() if receipt._reply is None]
        written = {receipt._number for tag, receipt in kept if tag <= begun}
        self._copies = written.union(receipt._number for _, receipt in kept if receipt._number in self._copies)
        for receipt in returned:
            self._settle(receipt, Outcome.RETURNED)
        self._retag(kept)
        self._left(returned, now)

    def _retag(self, receipts: list[tuple[int, Receipt]]) -> None:
        """Give these, and no others, the delivery tags from 1 on."""
        tags = [tag for tag, _ in receipts]
        self._flushes = [(bisect_right(tags, last), waiter) for last, waiter in self._flushes]
        self._unsettled = {at: receipt for at, (_, receipt) in enumerate(receipts, 1)}
        self._resent = {receipt._number: at for at, receipt in self._unsettled.items()}
        self._ahead = self._next_number - 1 - len(receipts)
        self._oldest = 1

    def _resend(self, now: float) -> None:
        """Have the unsettled messages leave on a channel that has opened."""
        encoder = self._encoder
        fit: list[tuple[int, Receipt]] = []
        unfit: list[Receipt] = []
        for tag, receipt in self._unsettled.items():
            try:
                route = encoder.route(receipt.exchange, receipt.routing_key)
                message = receipt.message
                if receipt._number in self._copies:
                    message = replace(message, headers={**(message.headers or {}), REPUBLISHED: True})
                self.outbound.put_frames(encoder.message(route, message, None))
            except ValueError:
                # This broker takes smaller frames than the one that it was admitted for.
                unfit.append(receipt)
            else:
                receipt._route = route
                fit.append((tag, receipt))
        for receipt in unfit:
            receipt._reply = (
                0,
                f"its properties fit into no frame of {encoder.max_body + FRAME_OVERHEAD} bytes",
            )
            self._settle(receipt, Outcome.UNKNOWN if receipt._number in self._copies else Outcome.FAILED)
        self._retag(fit)
        self._left(unfit, now)
        if self.outbound.size > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)

    def _end(self, reason: str, now: float, culprit: Receipt | None = None) -> None:
        self._disconnect(reason, now)
        self.close(reason, now)
        unsettled, self._unsettled = self._unsettled, {}
        begun = self.outbound.begun
        self.outbound = Outbound()
        size = 0
        # One for all.
        why = (0, reason)
        for tag, receipt in unsettled.items():
            size += receipt.size
            if receipt is culprit:
                outcome = Outcome.REJECTED
            elif receipt._reply is not None:
                outcome = Outcome.RETURNED
            else:
                receipt._reply = why
                has_begun = tag <= begun or receipt._number in self._copies
                outcome = Outcome.UNKNOWN if has_begun else Outcome.FAILED
            self._settle(receipt, outcome)
        self._by_id.clear()
        self._released(len(unsettled), size, now)
        self._copies.clear()
        self._retag([])

    # What the broker says.

    def on_flow(self, active: bool, now: float) -> None:
        """``Channel.Flow``: it is answered at once, right after the message that has begun, if any (J7)."""
        if self.channel is None:
            # There is nobody left to answer.
            return
        self.outbound.put_control(flow_ok(self.channel, active))
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
        if first and first + count - 1 <= self.outbound.finished:
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
            # Settled when it was written; what came back is all there is to tell of it.
            receipt = self._receipt_type(message, self._route_of_return(exchange, routing_key), None, 0)
            receipt._reply = (code, text)
            self._settle(receipt, Outcome.RETURNED)
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
            return self._encoder.route(exchange, routing_key)
        except ValueError as error:
            # Bytes that are no UTF-8 get longer by being replaced.
            raise FrameError(f"a return of what nobody can have published: {error}") from error

    def _find(self, message_id: str | None, exchange: str, routing_key: str) -> Receipt | None:
        if message_id is None:
            return None
        # What has a higher tag is not all written.
        last = self.outbound.finished
        own = [receipt for receipt in self._by_id.get(message_id, ()) if self._tag(receipt._number) <= last]
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
        tag = self._tag(number)
        found = self._unsettled.get(tag) if tag <= last else None
        return found if found is not None and found.message_id == message_id else None

    def _tag(self, number: int) -> int:
        """The delivery tag of an unsettled message."""
        return self._resent.get(number, number - self._ahead)

    # What the socket says.

    def data_to_write(self, limit: int) -> bytes:
        """The next bytes to write, about `limit` at the most; empty if nothing may be written now."""
        return self.outbound.data(limit)

    def advance(self, count: int, now: float) -> bool:
        """Take note that so many bytes of `data_to_write` were taken by the socket.

        Returns:
            True if that ends at a frame border, so that something else may be written on the connection.
        """
        outbound = self.outbound
        outbound.advance(count)
        if not self._confirms:
            self._written(now)
        if not self.gate.is_open and outbound.size <= self._max_unwritten // 2:
            self.lift(HoldKind.TRANSPORT, now)
        return not outbound.mid_frame

    @property
    def unfinished(self) -> bytes:
        """What is still to be written of frames that have begun; empty at a frame border."""
        return self.outbound.unfinished

    # What the clock says.

    def next_timer(self, now: float) -> float | None:
        """When to call `on_timer`; ``None`` if time alone changes nothing."""
        if self._first is not None:
            return self.controller.limiter.ready_at(self._first.size, now)
        return self.controller.ready_at(now)

    def on_timer(self, now: float) -> None:
        """Time has passed."""
        self._grant(now)

    def _notice(self, now: float) -> None:
        holds = self.gate.holds
        since = next(iter(self._waiting)).since
        count = len(self._waiting)
        who = "a send has been waiting" if count == 1 else f"{count} sends have been waiting, the longest"
        why = ", ".join(map(str, holds)) or "others wait before it"
        self._log(logging.WARNING, f"%s: {who} for %.1f s: %s", self.settings.name, now - since, why)
        if self.events is not None:
            self._event(FlowEventKind.WAITING, holds[0] if holds else None, since, now, count)

    def _log(self, level: int, text: str, *arguments: object) -> None:
        self.logs.append((level, text, arguments))

    # How it is done.

    def _admit(self, payload: bytes | Message, exchange: str, routing_key: str, size: int, now: float) -> Receipt:
        # Whoever calls this has the room for it, and undoes it if anything is raised.
        number = self._next_number
        encoder = self._encoder
        outbound = self.outbound
        if exchange is self._last_exchange and routing_key is self._last_key:
            route = self._last_route
        else:
            route = encoder.route(exchange, routing_key)
            # Together, or an exception in between leaves a route under another's name.
            self._last_exchange, self._last_key, self._last_route = exchange, routing_key, route
        receipt = self._receipt_type(payload, route, self._id_prefix, number)
        self._unsettled[number - self._ahead] = receipt
        if type(payload) is bytes and size <= self._max_plain:
            outbound.put(encoder.plain(route, payload, number))
        else:
            message = payload if isinstance(payload, Message) else Message(payload)
            outbound.put_frames(encoder.message(route, message, None if self._id_prefix is None else number))
            if message.message_id is not None and self._mandatory:
                self._by_id.setdefault(message.message_id, []).append(receipt)
        self._next_number = number + 1
        if outbound.size > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)
        return receipt

    def _undo_admission(self) -> None:
        """Forget the message that was being admitted when something was raised, which Ctrl-C can be at any point."""
        receipt = self._unsettled.pop(self._next_tag, None)
        if receipt is not None:
            self._forget_id(receipt)
        self.outbound.drop_after(self._next_tag - 1)
        self.window.used = len(self._unsettled)
        if self.byte_window is not None:
            self.byte_window.used = sum(receipt.size for receipt in self._unsettled.values())

    def _grant(self, now: float) -> None:
        """Admit from the line whom the gate and the window let in now."""
        controller = self.controller
        if self._first is not None and not self._grant_first(self._first, now):
            return
        while (ticket := controller.grant(now)) is not None:
            assert isinstance(ticket, SendTicket)
            self._let_in(ticket, now)
        if self._unflow_waiters or (not controller.waiting and any(map(self.gate.is_held_by, _LIMITS))):
            # Such a hold ends when there is room, not only when somebody next asks for it.
            controller.look(now)

    def _grant_first(self, ticket: SendTicket, now: float) -> bool:
        """Admit the send of a callback, if the broker's answers and time allow it."""
        # What the limits say of others does not count: it is asked of them anew.
        if any(hold.kind not in _LIMITS or hold.source not in ("", _ON_DELIVERY) for hold in self.gate.holds):
            return False
        if self.controller.limiter.try_add(ticket.size, now) is not None:
            return False
        self._first = None
        self._let_in(ticket, now)
        return True

    def _let_in(self, ticket: SendTicket, now: float) -> None:
        try:
            ticket.receipt = self._admit(ticket.payload, ticket.exchange, ticket.routing_key, ticket.size, now)
        except BaseException as error:
            # Headers that are changed while they wait can raise anything. It is for who sent them to hear.
            self._undo_admission()
            ticket.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._waiting.pop(ticket, None)
            self.wake.append(ticket.waiter)

    def _answered(self, tag: int, multiple: bool, outcome: Outcome, now: float) -> None:
        # A message that is half written cannot have arrived.
        written = self.outbound.finished
        if tag > written or (tag == 0 and not multiple):
            self._log(
                logging.WARNING,
                "%s: the broker answered delivery tag %d, but %d messages were written; ignored",
                self.settings.name,
                tag,
                written,
            )
            return
        if multiple:
            # Tag 0 stands for all (AMQP 0-9-1, Basic.Ack).
            self._settle_run(self._oldest, (tag or written) + 1, outcome, now)
        else:
            self._settle_run(tag, tag + 1, outcome, now)

    def _settle_run(self, first: int, stop: int, outcome: Outcome, now: float) -> None:
        """Settle what is unsettled of the tags from `first` to before `stop`, all of which are written."""
        unsettled = self._unsettled
        wake = self.wake
        confirmed = outcome is Outcome.CONFIRMED
        receipts = []
        for tag in range(first, stop):
            receipt = unsettled.pop(tag, None)
            if receipt is None:
                continue
            receipts.append(receipt)
            if not confirmed:
                self._settle(receipt, outcome, report=False)
            elif receipt._reply is None:
                receipt._outcome = outcome
                if receipt._waiter is not None:
                    wake.append(receipt._waiter)
            else:
                self._settle(receipt, Outcome.RETURNED, report=False)
        if first <= self._oldest < stop:
            # Later ones may have been answered before.
            while stop not in unsettled and stop < self._next_tag:
                stop += 1
            self._oldest = stop
        if self.settled is not None:
            self.settled += receipts
        self._left(receipts, now)

    def _written(self, now: float) -> None:
        """Without confirms a message is settled once it is written."""
        finished = self.outbound.finished
        receipts = []
        while self._oldest <= finished:
            receipt = self._unsettled.pop(self._oldest)
            self._oldest += 1
            self._settle(receipt, Outcome.SENT)
            receipts.append(receipt)
        if receipts:
            self._left(receipts, now)

    def _settle(self, receipt: Receipt, outcome: Outcome, *, report: bool = True) -> None:
        receipt._outcome = outcome
        if receipt._waiter is not None:
            self.wake.append(receipt._waiter)
        if report and self.settled is not None:
            self.settled.append(receipt)
        if self.settled is None and receipt._failed:
            if len(self.failures) >= self._sweep_at:
                # Those that were looked at would pile up in a producer that never flushes.
                self.failures = self._unseen()
                self._sweep_at = max(_SWEEP_FROM, 2 * len(self.failures))
            self.failures.append(receipt)

    def _left(self, receipts: list[Receipt], now: float) -> None:
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
            self.controller.release(size, count)
        if self._untold and self.settled:
            # Before anybody is let in for what has just been settled.
            self._look_at_untold(len(self.settled), now)
        if self.controller.waiting or not self.gate.is_open or self._first is not None:
            self._grant(now)
        if self._flushes:
            self._look_at_flushes()

    def _look_at_flushes(self) -> None:
        done = self._oldest if self._unsettled else self._next_tag
        self.wake += [waiter for tag, waiter in self._flushes if tag < done]
        self._flushes = [entry for entry in self._flushes if entry[0] >= done]

    def _gate_changed(self, hold: Hold, raised: bool, now: float) -> None:
        if hold.kind in _STOPS_WRITING:
            self._look_at_stops()
        if self.gate.is_open and self._unflow_waiters:
            self.wake += self._unflow_waiters
            self._unflow_waiters.clear()
        level = _LOG_LEVELS.get(hold.kind, logging.DEBUG)
        if raised:
            self._log(level, "%s: held: %s", self.settings.name, hold)
        else:
            self._log(level, "%s: no longer held after %.3g s: %s", self.settings.name, now - hold.since, hold)
        if self.events is not None:
            if raised:
                kind = FlowEventKind.FLOWED if len(self.gate.holds) == 1 else FlowEventKind.HOLD_RAISED
            else:
                kind = FlowEventKind.UNFLOWED if self.gate.is_open else FlowEventKind.HOLD_LIFTED
            self._event(kind, hold, hold.since, now)

    def _look_at_stops(self) -> None:
        self.outbound.stopped = any(self.gate.is_held_by(kind) for kind in _STOPS_WRITING)

    def _event(self, kind: FlowEventKind, hold: Hold | None, since: float, now: float, waiting: int = 0) -> None:
        assert self.events is not None
        offset = self._wall_offset
        told = None if hold is None else self._on_the_wall_clock(hold)
        self.events.append(
            FlowEvent(kind, self.settings.name, told, self.holds, now + offset, since + offset, now - since, waiting)
        )
