"""One AMQP publishing channel, sans-I/O: what becomes of every message.

`ProducerProtocol` is told what happened on the connection (a channel opened, the broker acked, the socket took bytes,
time passed) and says what to write. Senders come in by `admission`, and `reports` has what there is to tell. Nothing
here knows threads, tasks, sockets or clocks: the owner calls one method at a time, with the time in monotonic seconds.

A message is in exactly one of three places until it is settled:

* `admission.unsent`: it is admitted, and not one byte of it was ever written;
* `unconfirmed.flight`: it has a delivery tag, because its frames are made for the channel that is open;
* `resending.again`: it was written before, so it leaves again with the mark of a second copy. It may have arrived, or
  was refused by one queue and not by another.

It moves from `unsent`, or from `again`, into the flight when the socket takes more bytes (`data_to_write`). It moves
back when the broker stops the channel before its first byte was written, when the channel ends, and when the broker
refuses it for want of room. It leaves for good when `settling` settles it. `unsent` and `again` are in the order of
admission at any time, and `again` goes first; so first copies always leave in that order.

Example: a message is refused, then its connection is lost, then the new channel is stopped. The refusal moves it into
`again`, where the loss leaves it. When a channel opens its properties are encoded anew with the mark of a second copy.
Once the broker lets the channel go on, and the pause after the refusal is over, the oldest message of `again` leaves
alone as a probe. The others follow when it is confirmed, and then what was never written.

After each step the consequences follow in one place, `_update`: messages are tried again, waiting senders are admitted,
and waiters are woken. Public methods that change anything are steps, see `step`; the three that come with every few
messages are written as steps by hand.

The *owner* is the I/O thread or the event loop. A *skin* is what surrounds the protocol with I/O: a producer's engine
or a drop-in for another library. Ids such as E1, C6 and J7 are lines of the specification, which tests have in their
names.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from qflow_client.amqp.frames import FrameError, PublishEncoder, flow_ok
from qflow_client.core.admission import ON_DELIVERY, Admission
from qflow_client.core.channel import Channel
from qflow_client.core.expiry import Expiry
from qflow_client.core.refusals import Pauses
from qflow_client.core.reporting import Reports
from qflow_client.core.resending import Resending
from qflow_client.core.returns import Returns
from qflow_client.core.settling import Settling
from qflow_client.core.step import Steps, step
from qflow_client.core.store import Store
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.core.waiters import Waiters
from qflow_client.events import FlowState, HoldKind
from qflow_client.flow import Hold, Line
from qflow_client.message import decode_message
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings

__all__ = ["ProducerProtocol"]

# The holds under which admitted messages do not leave either.
_STOPS_WRITING = (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED)

# Seconds after which a message whose time has come is looked at again, while earlier bytes are not written.
_LOOK_AGAIN = 0.05


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
        encoder: makes the encoder of each channel.

    Raises:
        TypeError: `line` is no line.
    """

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
        encoder: type[PublishEncoder] = PublishEncoder,
    ) -> None:
        self.settings = settings
        prefix = id_prefix if settings.message_ids else None
        #: The way in, and who waits there.
        self.admission = Admission(settings, id_prefix=prefix, receipt_type=receipt_type, line=line)
        self.window, self.byte_window = self.admission.window, self.admission.byte_window
        self.controller, self.gate = self.admission.controller, self.admission.gate
        #: What there is to tell.
        self.reports = Reports(
            settings.name,
            self.gate,
            wall_offset,
            self._counts,
            max_failed_bytes=settings.max_failed_bytes,
            max_events=settings.max_flow_events,
        )
        #: Who waits for settled messages, or for an open gate.
        self.waiters = Waiters(self.reports, self.gate)
        #: What is on the wire.
        self.unconfirmed = Unconfirmed()
        #: What is to leave again, before any new message.
        self.resending = Resending(settings.reconnect_delay_max, retries, settings.retry_for)
        self.resending.refusals.stop_clock(now)
        #: The messages that a return may name.
        self.returns = Returns(settings.is_mandatory, prefix, self.unconfirmed, self.resending)
        self.admission.reports, self.admission.returns = self.reports, self.returns
        self.admission.waiters = self.waiters
        self.settling = Settling(self.admission, self.unconfirmed, self.resending)
        self.channel = Channel(
            settings, prefix, encoder, self.admission, self.unconfirmed, self.resending, self.settling
        )
        timeout = settings.delivery_timeout
        #: Which messages are unsettled for too long; ``None`` without `delivery_timeout`.
        self.expiry = None if timeout is None else Expiry(timeout, now)
        #: Whether the last step came to its end.
        self.steps = self.admission.steps = Steps(self._heal, self._follow_up)
        # The time of the last `channel_opened`, `advance` or `on_timer`.
        self._now = now
        # Settled receipts that the skin has taken, and that the application is not told of yet.
        self._untold = 0
        self.gate.observer = self._hold_changed
        self.gate.hold(HoldKind.DISCONNECTED, now=now)

    # What it is.

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return self.window.used

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        return self.unconfirmed.in_flight

    @property
    def unwritten(self) -> int:
        """Bytes of messages, and of answers on the channel, that are not written."""
        return self.admission.unwritten

    @property
    def closed(self) -> str | None:
        """Why nothing can be sent any more; ``None`` while it can."""
        return self.admission.closed

    @property
    def settled_so_far(self) -> int:
        """How many messages are settled; it only grows."""
        return self.admission.admitted - self.window.used

    @property
    def unsettled_receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the unsettled messages, in the order of admission."""
        return self.channel.unsettled()

    @property
    def wants_channel(self) -> bool:
        """Whether a channel is of use: messages may be admitted, or wait to leave."""
        if self.closed is None or self.window.used > 0:
            return True
        store = self.admission.store
        return store is not None and store.has_backlog and not self.channel.is_over

    def flow_seen(self, now: float) -> FlowState:
        """The flow as it was last looked at. It changes nothing, so it is no step."""
        since = self.gate.closed_since
        return FlowState(
            self.reports.holds,
            None if since is None else self.reports.wall_time(since),
            self.gate.times_closed,
            self.gate.seconds_held(now),
            self.closed,
        )

    def _counts(self) -> tuple[int, int, int]:
        return self.admission.admitted, self.window.used, self.window.capacity

    # What the application does.

    @step
    def flow_state(self, now: float) -> FlowState:
        """The flow at this moment."""
        self.controller.look(now)
        return self.flow_seen(now)

    @step
    def set_capacity(self, capacity: int, now: float) -> None:
        """Fix the window, see `Admission.set_capacity`."""
        self.admission.set_capacity(capacity)
        self.admission.grant(now)

    @step
    def hold(self, kind: str, now: float, *, source: str = "", detail: str = "") -> None:
        """Raise a hold."""
        self.gate.hold(kind, now=now, source=source, detail=detail)

    @step
    def lift(self, kind: str, now: float, *, source: str = "") -> None:
        """Lift a hold, and admit the messages that waited for that."""
        self._lift(kind, now, source)

    def _lift(self, kind: str, now: float, source: str = "") -> None:
        if self.gate.lift(kind, now=now, source=source) is not None or self.controller.waiting:
            self.admission.grant(now)

    @step
    def when_flushed(self, waiter: Any) -> bool:
        """Have a waiter woken once all that is admitted now is settled.

        Returns:
            False if it is already, and the waiter is not kept.
        """
        store = self.admission.store
        if store is not None and store.has_backlog:
            store.when_flushed(waiter)
            return True
        return self.add_settled_waiter(waiter)

    @step
    def when_settled(self, waiter: Any) -> bool:
        """Have a waiter woken once all that is in the window now is settled; messages on disk do not count.

        Returns:
            False if it is already, and the waiter is not kept.
        """
        return self.add_settled_waiter(waiter)

    def add_settled_waiter(self, waiter: Any) -> bool:
        """As `when_settled`, inside a step."""
        if not self.window.used:
            return False
        self.waiters.settled.append((self.admission.admitted, waiter))
        return True

    @step
    def when_unflowed(self, waiter: Any, now: float, *, in_callback: bool = False) -> bool:
        """Have a waiter woken once the producer is unflowed.

        Args:
            waiter: is in `Reports.wake` then.
            now: seconds.
            in_callback: used by callbacks. Others may be held until it returns, so it does not wait for that hold.

        Returns:
            False if it is already, or is closed and never will be, and the waiter is not kept.
        """
        self.controller.look(now)
        ignored = ON_DELIVERY if in_callback else ""
        if self.waiters.is_unflowed(ignored) or self.closed is not None:
            return False
        self.waiters.unflowed.append((ignored, waiter))
        return True

    def forget_waiter(self, waiter: Any) -> bool:
        """Drop a waiter; whether it was still kept. If not, its wait is over."""
        kept = self.waiters.forget(waiter)
        store = self.admission.store
        return kept if store is None else store.forget_waiter(waiter) or kept

    @step
    def take_settled(self, now: float) -> list[Receipt]:
        """The settled receipts, to be told to the application one by one; `told` says how far that has come.

        If callbacks are slower than the broker's confirms, the producer is held, so that no more than about twice its
        capacity is settled and not told.
        """
        settled, rest = self.reports.settled, list[Receipt]()
        assert settled is not None
        untold = self._untold + len(settled)
        # Nothing is called between these stores, so an interrupt leaves both or none of them.
        self._untold, self.reports.settled = untold, rest
        self._hold_untold(0, now)
        return settled

    def _hold_untold(self, more: int, now: float) -> None:
        if self._untold + more > self.admission.max_capacity and self.closed is None:
            detail = "callbacks are slower than confirms"
            self.gate.hold(HoldKind.CAPACITY, now=now, source=ON_DELIVERY, detail=detail)

    @step
    def told(self, count: int, now: float) -> None:
        """Take note that the application has been told of so many of the receipts of `take_settled`."""
        self._untold -= count
        if self._untold <= self.admission.max_capacity // 2:
            self._lift(HoldKind.CAPACITY, now, ON_DELIVERY)

    @step
    def withdraw(self, receipt: Receipt, now: float) -> bool:
        """Take back an admitted message, unless a byte of it is written: then it is not sent and never will be.

        Returns:
            Whether it is taken back.
        """
        self._take_back()
        unsent = self.admission.unsent
        if receipt not in unsent:
            return False
        cost = self.admission.cost(receipt)
        self.settling.settle_silently(receipt, Outcome.FAILED, now)
        unsent.remove(receipt)
        self.admission.unwritten -= cost
        self._update(now)
        self._lift_transport(now)
        return True

    @step
    def attach_store(self, store: Store, now: float) -> None:
        """Keep messages in a store from now on. Nothing may have been admitted before; senders may wait already.

        Args:
            store: an outbox.
            now: seconds.
        """
        self.admission.use_store(store)
        self.admission.grant(now)

    @step
    def close(self, reason: str, now: float) -> None:
        """Admit nothing from now on. Waiters are woken; admitted messages go on."""
        self._close(reason)

    def _close(self, reason: str) -> None:
        self.admission.close(reason)
        self.waiters.end_unflowed()

    # What happens to the connection.

    @step
    def channel_opened(self, channel: int, frame_max: int, now: float) -> None:
        """A channel is there, in confirm mode if the settings want it; its first publish has delivery tag 1.

        Args:
            channel: its number.
            frame_max: the negotiated frame size in bytes; 0 for no limit.
            now: seconds.
        """
        self._now = now
        self._expire(now)
        self.channel.open(channel, frame_max, now)
        self._apply_stops(now)
        self._try_again(now)
        if not self.channel.was_open and self.gate.is_open:
            # That a producer connects before it can send is no flow control.
            self.gate.forget_past()
        self.channel.was_open = True
        self._go_on(now)

    @step
    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        """The broker closed the channel. It does not say over which message. The next channel carries on without it.

        Args:
            code: its reply code.
            text: its reply text.
            method: class and method id that it names.
            now: seconds.
        """
        reason = f"the broker closed the channel: {code} {text}"
        self._disconnect(reason, now)
        refused = self.channel.closed_by_broker(code, text, method, now)
        if refused:
            self.settling.hold_refused(refused, now, was_probe=True)
        self._end_refusals_if_settled(now)
        self._update(now)

    @step
    def connection_lost(self, reason: str, now: float, *, reconnects: bool = False, shared: bool = False) -> bool:
        """The connection is gone, or given up.

        Args:
            reason: for people.
            now: seconds.
            reconnects: another one will be made, if one is wanted. By the setting `on_disconnect`, unsettled messages
                stay so until then, when they leave in order before anything new, and those that may have arrived have
                the header `REPUBLISHED`; or they are settled. Otherwise they are settled, and nothing is admitted.
            shared: others publish on it, too, over whose messages it may have been lost.

        Returns:
            Whether another one is wanted.
        """
        if reconnects and self.wants_channel:
            # A flush while it closes is held, too.
            self._disconnect(reason, now)
            self.channel.lost(reason, now, shared=shared)
            self._end_refusals_if_settled(now)
        else:
            self._end(reason, now)
        self._update(now)
        return self.wants_channel

    def _end_refusals_if_settled(self, now: float) -> None:
        """With ``on_disconnect="fail"`` no refused message is left after the end of a channel, so the hold ends."""
        if self.settings.on_disconnect is OnDisconnect.FAIL:
            self._end_refusals(now)

    def _disconnect(self, reason: str, now: float, *, held: bool = True) -> None:
        self.channel.number = None
        self.resending.refusals.stop_clock(now)
        if held:
            self.gate.hold(HoldKind.DISCONNECTED, now=now, detail=reason)
        # What the broker said about the channel and the connection ends with them, and so does what the socket said.
        for kind in (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED, HoldKind.TRANSPORT):
            self.gate.lift(kind, now=now)

    def _end(self, reason: str, now: float) -> None:
        self.channel.is_over = True
        # To be closed by hand is no flow control.
        self._disconnect(reason, now, held=self.closed is None)
        self._close(reason)
        self.channel.settle_all(reason, now)
        self._end_refusals(now)
        if self.admission.store is not None:
            self.admission.store.end(reason)

    # What the broker says.

    @step
    def on_flow(self, active: bool, now: float) -> None:
        """``Channel.Flow``: it is answered at once, right after the message that has begun, if any (J7)."""
        if self.channel.number is None:
            # There is nobody left to answer.
            return
        self._take_back()
        answer = flow_ok(self.channel.number, active)
        size = len(answer)
        self.unconfirmed.outbound.put_control(answer)
        self.admission.unwritten += size
        if active:
            self._lift(HoldKind.CHANNEL_FLOW, now)
        else:
            self.gate.hold(HoldKind.CHANNEL_FLOW, now=now)

    def on_blocked(self, reason: str, now: float) -> None:
        """``Connection.Blocked``."""
        self.hold(HoldKind.CONNECTION_BLOCKED, now, detail=reason)

    def on_unblocked(self, now: float) -> None:
        """``Connection.Unblocked``."""
        self.lift(HoldKind.CONNECTION_BLOCKED, now)

    @step
    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Ack``: the broker takes responsibility."""
        self.settling.answer(tag, multiple, Outcome.CONFIRMED, now)
        self._update(now)

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        """The acks of one read, as the tap has them: `Tap` says what is in the list."""
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished = True
        self.settling.settle_acked(acks, now)
        self._update(now)
        steps.is_unfinished = False

    @step
    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Nack``: the broker does not."""
        self.settling.answer(tag, multiple, Outcome.NACKED, now)
        self._update(now)

    @step
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
        reports, message = self.reports, decode_message(header, body)
        receipt = self.returns.take(message.message_id, exchange, routing_key)
        if receipt is not None:
            receipt._reply = (code, text)
        elif not self.settings.confirms:
            # Its receipt was settled when it was written, and that was told. So `flush` and `close` bring this up.
            try:
                route = self.unconfirmed.encoder.route(exchange, routing_key)
            except ValueError as error:
                # Invalid bytes were replaced when the name was decoded, so it may be too long to encode.
                raise FrameError(f"the broker returned a message that cannot have been published: {error}") from error
            receipt = self.admission.receipt_type(message, route, None)
            receipt._reply = (code, text)
            receipt._outcome = Outcome.RETURNED
            reports.log(logging.WARNING, "%s: %s", reports.name, receipt.describe())
            reports.add_failures((receipt,))
        else:
            words = "%s: the broker returned message %s to %r/%r (%d %s), which is not in flight; ignored"
            values = message.message_id, exchange, routing_key, code, text
            reports.log(logging.WARNING, words, reports.name, *values)

    @step
    def put_control(self, frame: bytes) -> None:
        """Have a frame of the channel written after the messages whose frames are made."""
        self.unconfirmed.outbound.put_control(frame)
        self.admission.unwritten += len(frame)

    # What the socket says.

    def data_to_write(self, limit: int) -> bytes:
        """The next bytes to write, about `limit` at the most; empty if nothing may be written now."""
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished = True
        outbound = self.unconfirmed.outbound
        data = outbound.data(limit)
        if not data and not outbound.stopped and self.channel.number is not None:
            source = self.resending.again or self.admission.unsent
            if source and (most := self._may_leave(source)):
                self.unconfirmed.make(source, limit, most)
                data = outbound.data(limit)
        steps.is_unfinished = False
        return data

    def _may_leave(self, source: deque[Receipt]) -> int:
        """Return how many of the next messages may leave now."""
        resending = self.resending
        if resending.is_idle:
            return len(source)
        most = resending.count_sendable(source, not self.unconfirmed.flight, self._now)
        if most:
            resending.note_sent(source[0], self._now)
        return most

    def advance(self, count: int, now: float) -> bool:
        """Take note that so many bytes of `data_to_write` were taken by the socket.

        Returns:
            True if that ends at a frame border, so that something else may be written on the connection.
        """
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished = True
        outbound = self.unconfirmed.outbound
        outbound.advance(count)
        self.admission.unwritten -= count
        self._now = now
        if not self.settings.confirms:
            self.settling.settle_written(now)
            self._update(now)
        if not self.gate.is_open:
            self._lift_transport(now)
        steps.is_unfinished = False
        return not outbound.mid_frame

    def _lift_transport(self, now: float) -> None:
        if self.admission.is_nearly_written:
            self._lift(HoldKind.TRANSPORT, now)

    def _take_back(self) -> None:
        """Have nothing on the wire that has not begun."""
        self.unconfirmed.outbound.take_back()
        self._move_back()

    def _move_back(self) -> None:
        """Put messages whose frames were taken back where they leave from again."""
        unconfirmed, unsent = self.unconfirmed, self.admission.unsent
        # The last first.
        while (receipt := unconfirmed.beyond()) is not None:
            if not self.resending.take_back(receipt):
                unsent.appendleft(receipt)
            unconfirmed.flight.popitem()

    @property
    def unfinished(self) -> bytes:
        """What is still to be written of frames that have begun; empty at a frame border."""
        return self.unconfirmed.outbound.unfinished

    @property
    def written(self) -> int:
        """How many messages are all written on this channel."""
        return self.unconfirmed.outbound.finished

    @property
    def is_stopped(self) -> bool:
        """Whether no message may begin."""
        return self.unconfirmed.outbound.stopped

    @property
    def has_answer(self) -> bool:
        """Whether something is to be written that a stop does not keep back."""
        return not self.unconfirmed.outbound.is_empty

    @step
    def end_writing(self) -> bool:
        """Have no message begin any more; whether none has begun and not ended."""
        self._take_back()
        return self.unconfirmed.outbound.stop()

    # What the clock says.

    def next_timer(self, now: float) -> float | None:
        """When to call `on_timer`; ``None`` if time alone changes nothing."""
        resending = self.resending
        times = [self.controller.ready_at(now)]
        outbound = self.unconfirmed.outbound
        # While the channel is stopped, time alone lets no message leave.
        if resending.refusals.probe is None and self.channel.number is not None and not outbound.stopped:
            at = [each for each in (resending.refusals.retry_at, resending.candidate_at()) if each is not None]
            # A full socket keeps a message back whose time has come. Do not look at it all the time.
            times += at if outbound.is_empty else [max(each, now + _LOOK_AGAIN) for each in at]
        if self.admission.store is not None:
            times.append(self.admission.store.next_timer(now))
        if self.expiry is not None:
            times.append(self.expiry.next_at())
        return min((at for at in times if at is not None), default=None)

    @property
    def needs_timer(self) -> bool:
        """Whether time alone may change something, so that the owner has to call `on_timer` at `next_timer`."""
        return (
            self.settings.rate is not None
            or self.expiry is not None
            or self.resending.refusals.retry_at is not None
            or self.resending.candidate_at() is not None
        )

    @step
    def on_timer(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        self._expire(now)
        self._go_on(now)

    def _expire(self, now: float) -> None:
        """Settle the messages whose `delivery_timeout` has passed (E16)."""
        if self.expiry is None:
            return
        before = self.expiry.expired_before(self.admission.next_number, now)
        if before:
            if self._oldest_unsettled() < before:
                self._take_back()
                self.channel.expire(before, f"delivery_timeout={self.expiry.timeout:g} s has passed", now)
                self._update(now)
                self._lift_transport(now)
            self.expiry.forget(before)

    def _oldest_unsettled(self) -> int:
        """Return the lowest number of an unsettled message; the next number if there is none."""
        parts = (
            self.unconfirmed.oldest_number(),
            *(each[0]._number for each in (self.resending.again, self.admission.unsent) if each),
        )
        return min(filter(None, parts), default=self.admission.next_number)

    # What follows from a step.

    def _update(self, now: float) -> None:
        """Do what follows when messages were settled, or have left the wire."""
        if self._untold and self.reports.settled:
            # Before any sender is admitted for what has just been settled.
            self._hold_untold(len(self.reports.settled), now)
        if self.controller.waiting or not self.gate.is_open:
            self._go_on(now)
        else:
            self._wake_settled()

    def _go_on(self, now: float) -> None:
        """Do what the time, the gate and the window allow."""
        self._try_again(now)
        self.admission.grant(now)
        self._wake_settled()

    def _wake_settled(self) -> None:
        if self.waiters.settled:
            self.waiters.wake_settled(self._oldest_unsettled())

    def _try_again(self, now: float) -> None:
        """Go on with messages that are to leave again, if any are."""
        if (self.channel.number is not None and not self.resending.is_idle) or self.gate.is_held_by(
            HoldKind.DISCONNECTED
        ):
            self._resend(now)

    def _resend(self, now: float) -> None:
        """Settle refused messages whose time has passed, and hold new ones while others have to leave before."""
        resending = self.resending
        if self.channel.number is None:
            return
        if resending.refusals.retry_at is not None:
            self.settling.expire(now)
            resending.refusals.check_probe()
            if resending.has_tried_all(bool(self.admission.unsent)):
                self._end_refusals(now)
        sendable = resending.count_sendable(resending.again, not self.unconfirmed.flight, now)
        if resending.refusals.retry_at is None and resending.has_suspects_after(sendable):
            detail = "what an earlier channel has left leaves first"
            self.gate.hold(HoldKind.DISCONNECTED, now=now, detail=detail)
        else:
            self.gate.lift(HoldKind.DISCONNECTED, now=now)

    def _end_refusals(self, now: float) -> None:
        """The broker has room again, or nothing is left to try."""
        self.resending.end_refusals({receipt._number for receipt in self.unsettled_receipts})
        self.gate.lift(HoldKind.REFUSED, now=now)

    def _hold_changed(self, hold: Hold, raised: bool, now: float) -> None:
        if hold.kind in _STOPS_WRITING:
            self._apply_stops(now)
        if self.waiters.unflowed and not raised:
            self.waiters.wake_unflowed()
        ending = self.channel.is_over and self.closed is not None
        self.reports.report_hold(hold, raised, now, connecting=not self.channel.was_open, ending=ending)

    def _apply_stops(self, now: float) -> None:
        stopped = any(map(self.gate.is_held_by, _STOPS_WRITING))
        self.unconfirmed.outbound.stopped = stopped
        if stopped:
            self._take_back()
            self.resending.refusals.stop_clock(now)
        elif self.channel.number is not None:
            self.resending.refusals.start_clock(now)

    def _heal(self) -> None:
        """Repair what an unfinished step has left, see `step`."""
        now = self._now
        self.settling.heal()
        self.channel.heal(now)
        # Not `_take_back`: the I/O thread may be giving the bytes to the socket.
        self._move_back()
        self._apply_stops(now)
        self.admission.heal(lambda: self.unsettled_receipts)
        self.channel.count_unwritten(now)
        if self.resending.refusals.retry_at is None:
            self.gate.lift(HoldKind.REFUSED, now=now)
        if self.closed is not None:
            self._close(self.closed)

    def _follow_up(self) -> None:
        """Do what was to follow from an unfinished step."""
        self.waiters.wake_unflowed()
        self._go_on(self._now)
