"""One AMQP publishing channel, sans-I/O: what becomes of every message.

`ProducerProtocol` is told what happened on the connection (a channel opened, the broker acked, the socket took bytes,
time passed) and says what to write. Nothing here knows threads, tasks, sockets or clocks: the owner calls one method at
a time, with the time in monotonic seconds. The protocol has a part for each decision, in the order in which a message
meets them:

* `line` keeps messages that cannot be admitted now, and `admission` admits them, as far as `limits` and the gate allow;
* `Writing` makes frames of them, and `unconfirmed` has what is on the wire of the channel;
* `settling` says what the broker's answers mean, and `returns` finds the message that a return names;
* `resending` has what leaves again and says when;
* `channel` moves messages when a channel opens or ends;
* `reports` collects what there is to tell, and `waiters` and `untold` know who waits for that.

A message is in exactly one of three places until it is settled:

* `admission.unsent`: it is admitted, and not one byte of it was ever written;
* `unconfirmed.flight`: it has a delivery tag, because its frames are made for the channel that is open;
* `resending.again`: it was written before, so it leaves again with the mark of a second copy. It may have arrived, or
  was refused by one queue and not by another.

It moves from `unsent`, or from `again`, into the flight when the socket takes more bytes (`data_to_write`). It moves
back when the broker stops the channel before its first byte was written, when the channel ends, and when the broker
refuses it for want of room. It leaves for good when `settling` settles it. `unsent` and `again` are in the order of
admission at any time, and `again` goes first; so first copies always leave in that order.

Example, with `retry_for`: a message is refused, then its connection is lost, then the broker stops the new channel
(``Channel.Flow``). The refusal moves it into `again`, encoded with the mark of a second copy, and begins a pause. The
loss leaves it there, and stops the clock that `retry_for` counts. When a channel opens, it is encoded for that channel.
While the channel is stopped nothing leaves, and the clock stands still. Once the broker lets the channel go on, and the
pause is over, the oldest message of `again` leaves alone as a probe. The others follow when it is confirmed, and then
the unsent messages.

What follows from a step is in one place, `Consequences`: messages are tried again, waiting senders are admitted, and
waiters are woken. Public methods that change anything are steps, see `step`; the three that come with every few
messages are written as steps by hand. `Parts` makes the parts and connects them.

The *owner* is the I/O thread or the event loop. A *skin* is what surrounds the protocol with I/O: a producer's engine
or a drop-in for another library. Ids such as E1, C6 and J7 are lines of the specification, which tests have in their
names.
"""

from __future__ import annotations

from qflow_client.amqp.frames import PublishEncoder, flow_ok
from qflow_client.core.consequences import Consequences
from qflow_client.core.parts import Parts
from qflow_client.core.refusals import Pauses
from qflow_client.core.step import step
from qflow_client.core.store import Store
from qflow_client.events import FlowState, HoldKind
from qflow_client.flow import Line
from qflow_client.message import decode_message
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings

__all__ = ["ProducerProtocol"]


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
        parts = Parts(
            settings,
            id_prefix=id_prefix,
            receipt_type=receipt_type,
            now=now,
            wall_offset=wall_offset,
            line=line,
            retries=retries,
            encoder=encoder,
        )
        self.parts = parts
        self.settings = settings
        # Those that skins use; `Parts` says what each is.
        self.steps, self.limits, self.window = parts.steps, parts.limits, parts.limits.window
        self.controller, self.gate = parts.controller, parts.gate
        self.reports, self.waiters = parts.reports, parts.waiters
        self.admission, self.line, self.channel = parts.admission, parts.line, parts.channel
        self._unconfirmed, self._settling, self._writing = parts.unconfirmed, parts.settling, parts.writing
        self._untold, self._expiry = parts.untold, parts.expiry
        #: What follows from a step.
        self.consequences = Consequences(parts)
        self.gate.hold(HoldKind.DISCONNECTED, now=now)

    # What it is.

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return self.window.used

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        return self._unconfirmed.in_flight

    @property
    def unwritten(self) -> int:
        """Bytes of messages, and of answers on the channel, that are not written."""
        return self.admission.unwritten

    @property
    def has_output(self) -> bool:
        """Whether the owner is to ask for bytes to write: there are some, and not all of them wait for a disk."""
        store = self.admission.store
        return self.admission.unwritten > 0 and (store is None or not store.keeps_all_back)

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

    # What the application does.

    @step
    def flow_state(self, now: float) -> FlowState:
        """The flow at this moment."""
        self.controller.look(now)
        return self.flow_seen(now)

    @step
    def set_capacity(self, capacity: int, now: float) -> None:
        """Fix the window, see `Limits.set_capacity`."""
        self.limits.set_capacity(capacity)
        self.line.grant(now)

    @step
    def hold(self, kind: str, now: float, *, source: str = "", detail: str = "") -> None:
        """Raise a hold."""
        self.gate.hold(kind, now=now, source=source, detail=detail)

    @step
    def lift(self, kind: str, now: float, *, source: str = "") -> None:
        """Lift a hold, and admit the messages that waited for that."""
        self.consequences.lift(kind, now, source)

    @step
    def take_settled(self, now: float) -> list[Receipt]:
        """The settled receipts, to be told to the application one by one; `told` says how far that has come."""
        self.consequences.hold_untold(now)
        # Last, so no interrupt comes between this and the caller.
        return self._untold.take()

    @step
    def told(self, count: int, now: float) -> None:
        """Take note that the application has been told of so many of the receipts of `take_settled`."""
        self.consequences.lift_untold(count, now)

    @step
    def withdraw(self, receipt: Receipt, now: float) -> bool:
        """Settle an admitted message as *failed*, unless a byte of it is written. It is reported nowhere.

        Returns:
            Whether it was not sent and never will be.
        """
        self._writing.take_back()
        unsent = self.admission.unsent
        if receipt not in unsent:
            # An interrupted call may have settled it.
            return receipt._outcome is Outcome.FAILED
        cost = self.admission.cost(receipt)
        self._settling.settle_silently(receipt, Outcome.FAILED, now)
        unsent.remove(receipt)
        if self.channel.number is not None:
            self.admission.unwritten -= cost
        self.consequences.update(now)
        self.consequences.lift_transport(now)
        return True

    @step
    def attach_store(self, store: Store, now: float) -> None:
        """Keep messages in a store from now on. Nothing may have been admitted before; senders may wait already.

        Args:
            store: an outbox.
            now: seconds.
        """
        self.admission.use_store(store)
        self.line.check_room(store)
        self.line.grant(now)

    @step
    def close(self, reason: str, now: float) -> None:
        """Admit nothing from now on. Waiters are woken; admitted messages go on."""
        self.consequences.close(reason)

    # What happens to the connection.

    @step
    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        """A channel is there, in confirm mode if the settings want it; its first publish has delivery tag 1.

        Args:
            channel: its number.
            frame_max: the negotiated frame size in bytes; 0 for no limit.
            now: seconds.
            restores: what was declared is declared again. Until `restored`, sends stay held and no message leaves.
        """
        self.channel.is_restoring = restores
        self.consequences.expire(now)
        self._writing.has_ended = False
        self.channel.open(channel, frame_max, now)
        self.consequences.apply_stops(now)
        self.consequences.retry(now)
        if not self.channel.was_open and self.gate.is_open:
            # That a producer connects before it can send is no flow control.
            self.gate.forget_past()
        self.channel.was_open = True
        self.consequences.go_on(now)

    @step
    def restored(self, now: float) -> None:
        """What was declared is there again: messages may leave."""
        self.channel.is_restoring = False
        self.consequences.apply_stops(now)
        self.consequences.go_on(now)

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
        self.channel.disconnect(reason, now)
        refused = self.channel.closed_by_broker(code, text, method, now)
        if refused:
            self._settling.hold_refused(refused, now, was_probe=True)
        self.consequences.update(now)

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
            self.channel.disconnect(reason, now)
            self.channel.lost(reason, now, shared=shared)
        else:
            self.consequences.end(reason, now)
        self.consequences.update(now)
        return self.wants_channel

    # What the broker says.

    @step
    def on_flow(self, active: bool, now: float) -> None:
        """``Channel.Flow``: it is answered at once, right after the message that has begun, if any (J7)."""
        if self.channel.number is None:
            # There is nobody left to answer.
            return
        self._writing.take_back()
        self._writing.put_control(flow_ok(self.channel.number, active))
        if active:
            self.consequences.lift(HoldKind.CHANNEL_FLOW, now)
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
        self._settling.answer(tag, multiple, Outcome.CONFIRMED, now)
        self.consequences.update(now)

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        """The acks of one read: `TapChannel` says what is in the list, and what an interrupt costs."""
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished, steps.now = True, now
        self._settling.settle_acked(acks, now)
        self.consequences.update(now)
        steps.is_unfinished = False

    @step
    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        """``Basic.Nack``: the broker does not."""
        self._settling.answer(tag, multiple, Outcome.NACKED, now)
        self.consequences.update(now)

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
        self._settling.note_return((code, text), decode_message(header, body), exchange, routing_key)

    @step
    def put_control(self, frame: bytes) -> None:
        """Have a frame of the channel written after the messages whose frames are made."""
        self._writing.put_control(frame)

    # What the socket says.

    def data_to_write(self, limit: int) -> bytes:
        """The next bytes to write, about `limit` at the most; empty if nothing may be written now."""
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished = True
        data = self._writing.next_bytes(limit, steps.now)
        steps.is_unfinished = False
        return data

    def advance(self, count: int, now: float) -> bool:
        """Take note that so many bytes of `data_to_write` were taken by the socket.

        Returns:
            True if that ends at a frame border, so that something else may be written on the connection.
        """
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished, steps.now = True, now
        outbound = self._unconfirmed.outbound
        outbound.advance(count)
        self.admission.unwritten -= count
        if not self.settings.confirms:
            self._settling.settle_written(now)
            self.consequences.update(now)
        if not self.gate.is_open:
            self.consequences.lift_transport(now)
        steps.is_unfinished = False
        return not outbound.mid_frame

    @property
    def unfinished(self) -> bytes:
        """What is still to be written of frames that have begun; empty at a frame border."""
        return self._unconfirmed.outbound.unfinished

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

    @step
    def end_writing(self) -> bool:
        """Have no message begin any more; whether none has begun and not ended."""
        self._writing.has_ended = True
        self._writing.take_back()
        return self._unconfirmed.outbound.stop()

    # What the clock says.

    def next_timer(self, now: float) -> float | None:
        """When to call `on_timer`; ``None`` if time alone changes nothing."""
        times = [self.controller.ready_at(now), self.consequences.next_retry(now)]
        if self.admission.store is not None:
            times.append(self.admission.store.next_timer(now))
        if self._expiry is not None:
            times.append(self._expiry.next_at())
        return min((at for at in times if at is not None), default=None)

    @property
    def needs_timer(self) -> bool:
        """Whether time alone may change something, so that the owner has to call `on_timer` at `next_timer`."""
        return self.settings.rate is not None or self._expiry is not None or self.parts.resending.needs_timer

    @step
    def on_timer(self, now: float) -> None:
        """Time has passed."""
        self.consequences.expire(now)
        self.consequences.go_on(now)
