"""Decides what happens to every message of one producer on its AMQP channel, without I/O (sans-I/O).

A *skin* is the code with I/O around the protocol: a producer's engine or a drop-in for another library. The *owner* is
the thread or event loop on which the skin does I/O. The owner reports events to `ProducerProtocol`: a channel opened,
the broker acked, the socket accepted bytes, time passed. Then the owner asks for the bytes to write. The skin calls one
step (see `step`) at a time, and passes the time in monotonic seconds.

The protocol has these parts:

* `line` keeps messages that cannot be admitted now. `admission` admits messages when `limits` and the gate allow it.
* `Writing` makes the frames of messages. `unconfirmed` has the messages whose frames are made for the open channel.
* `settling` applies the broker's answers. `returns` finds the message for a ``Basic.Return``.
* `resending` has the messages to be sent again, and decides when they are sent.
* `channel` moves messages between these parts when a channel opens or ends.
* `reports` collects receipts, flow events and log entries for the application. `waiters` has the waiting calls, except
  those of `send`. `unreported` counts the settled receipts that are not reported to the application yet.

From its admission until it is settled, a message is in exactly one of three collections:

* `admission.unsent`: no byte of the message was ever written.
* `unconfirmed.flight`: the message is *on the wire*: its frames, with a delivery tag, are made for the open channel.
* `resending.again`: the message was written before, and will be sent again. It gets the header `REPUBLISHED`, because
  the first copy may have arrived. Even if the broker refused that copy, one of several queues may have accepted it.

A message moves from `unsent` or `again` to `flight` when the socket accepts more bytes (`data_to_write`). An unsettled
message leaves `flight` if the channel ends, or if the broker has no room and refuses the message. If the broker stops
the channel, messages without a written byte also leave `flight` (`Writing.take_back`). In these three cases a message
moves to `again` if any byte of it was ever written, and otherwise to `unsent`. `again` and `unsent` are always in the
order of admission, and `again` is sent first. So first copies are always sent in the order of admission.

Example with `retries` and ``on_disconnect="republish"``: a message is refused, then its connection is lost, then the
broker stops the new channel (``Channel.Flow``).

1. The refusal raises the hold ``refused`` and begins a pause. The message moves into `again` as a second copy.
2. The loss raises the hold ``disconnected``, and stops the clock that measures `retry_for`. The pause continues.
3. The next channel lifts only ``disconnected``. The clock continues, and the message's properties are encoded again.
4. The broker's stop raises the hold ``channel_flow``, and stops the clock. When the stop ends, the clock continues.
5. When the pause is over, the message gets frames, and moves into `flight` as a probe. No other message is sent before
   the broker answers the probe.
6. The confirm of the probe lifts the hold ``refused``. Then the rest of `again` is sent, and finally `unsent`.

If the connection is lost while the probe is in flight, the message moves back into `again`. Then the clock may reach
`retry_for` before the next copy is sent. In this case the message is settled as *unknown* and not as *nacked*, because
the probe may have arrived. With ``on_disconnect="fail"``, each loss of the connection settles all unsettled messages.

The owner calls no other method between `data_to_write` and `advance`, and ends a channel before it opens another.
If an exception, such as ``KeyboardInterrupt``, interrupts a method, the owner does not report the same event again. If
the interrupted method handles an answer of the broker or returns bytes to write, the owner ends the channel.

All public methods that change state are steps, see `step`. `Consequences` has the actions that follow a step. Ids such
as E1, C6 and J7 name lines of the sources in ``docs/sources.md``.
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
    """The state of one producer, and the steps that change it.

    Args:
        id_prefix: the prefix of the assigned message ids; the message number follows in 12 hexadecimal digits.
        wall_offset: the number to add to `now` to get seconds since 1970.
        line: the order in which waiting messages are admitted; by default the order of their arrival.
        retries: the pauses before a refused message is sent again; ``None`` if refused messages are settled instead.
        encoder: the class of the encoders; each channel has its own encoder.

    Raises:
        TypeError: `line` does not have the methods of a `Line`.
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
        # The parts that this class or the skins use.
        self.steps, self.limits, self.window = parts.steps, parts.limits, parts.limits.window
        self.controller, self.gate = parts.controller, parts.gate
        self.reports, self.waiters = parts.reports, parts.waiters
        self.admission, self.line, self.channel = parts.admission, parts.line, parts.channel
        self._unconfirmed, self._settling, self._writing = parts.unconfirmed, parts.settling, parts.writing
        self._unreported, self._expiry = parts.unreported, parts.expiry
        self.consequences = Consequences(parts)
        self.gate.hold(HoldKind.DISCONNECTED, now=now)

    # Properties.

    @property
    def unsettled(self) -> int:
        """How many messages are admitted and not settled."""
        return self.window.used

    @property
    def in_flight(self) -> int:
        """How many unsettled messages are written, at least in part."""
        return self._unconfirmed.in_flight

    @property
    def unwritten(self) -> int:
        """How many bytes of messages and control frames are not written yet."""
        return self.admission.unwritten

    @property
    def has_output(self) -> bool:
        """Whether there are unwritten bytes that do not wait for the outbox's disk. Holds may still delay them."""
        store = self.admission.store
        return self.admission.unwritten > 0 and (store is None or not store.keeps_all_back)

    @property
    def closed(self) -> str | None:
        """Why no message can be admitted any more; ``None`` while messages can be admitted."""
        return self.admission.closed

    @property
    def settled_so_far(self) -> int:
        """How many messages were settled so far. This number never decreases."""
        return self.admission.admitted - self.window.used

    @property
    def unsettled_receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the unsettled messages, in the order of admission."""
        return self.channel.unsettled()

    @property
    def wants_channel(self) -> bool:
        """Whether a channel is needed: messages can still be admitted, are unsettled, or wait in the outbox."""
        if self.closed is None or self.window.used > 0:
            return True
        store = self.admission.store
        return store is not None and store.has_backlog and not self.channel.is_over

    def flow_seen(self, now: float) -> FlowState:
        """Return the flow state after the last step. This method changes nothing, so it is not a step."""
        since = self.gate.closed_since
        return FlowState(
            self.reports.holds,
            None if since is None else self.reports.wall_time(since),
            self.gate.times_closed,
            self.gate.seconds_held(now),
            self.closed,
        )

    # Calls of the application.

    @step
    def flow_state(self, now: float) -> FlowState:
        self.controller.look(now)
        return self.flow_seen(now)

    @step
    def set_capacity(self, capacity: int, now: float) -> None:
        """Set a fixed size of the window, see `Limits.set_capacity`."""
        self.limits.set_capacity(capacity)
        self.line.grant(now)

    @step
    def hold(self, kind: str, now: float, *, source: str = "", detail: str = "") -> None:
        self.gate.hold(kind, now=now, source=source, detail=detail)

    @step
    def lift(self, kind: str, now: float, *, source: str = "") -> None:
        self.consequences.lift(kind, now, source)

    @step
    def take_settled(self, now: float) -> list[Receipt]:
        """Return the settled receipts. The skin reports each receipt to the application, and then calls `reported`."""
        self.consequences.hold_unreported(now)
        # Call `take` last, because an interrupt after `take` would lose the receipts.
        return self._unreported.take()

    @step
    def reported(self, count: int, now: float) -> None:
        """Record that `count` receipts of `take_settled` were reported to the application."""
        self.consequences.lift_unreported(count, now)

    @step
    def withdraw(self, receipt: Receipt, now: float) -> bool:
        """Settle an unsent message as *failed*, but do not report it. Return False if it is not in `unsent`."""
        self._writing.take_back()
        unsent = self.admission.unsent
        if receipt not in unsent:
            # An interrupted call may have withdrawn the message already. If so, return True.
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
        """Keep messages in an outbox from now on. Call this method before the first message is admitted."""
        self.admission.use_store(store)
        self.line.check_room(store)
        self.line.grant(now)

    @step
    def close(self, reason: str, now: float) -> None:
        """Admit no more messages. End waiting calls of `send` and `wait_unflowed`. Admitted messages are still sent."""
        self.consequences.close(reason)

    # Events of the connection.

    @step
    def start_in_background(self, now: float) -> None:
        """Report the hold ``disconnected``, because the application does not wait for the first connection."""
        self.reports.start_in_background(now)

    @step
    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        """Handle a new channel. The first message on it has delivery tag 1.

        If the setting `confirms` is on, the channel must be in confirm mode.

        Args:
            frame_max: the negotiated maximum size of a frame in bytes; 0 for no limit.
            restores: whether the program's declarations are being repeated. If so, calls of `send` wait, and no message
                is written, until `restored` is called.
        """
        self.channel.is_restoring = restores
        self.consequences.expire(now)
        self._writing.has_ended = False
        self.channel.open(channel, frame_max, now)
        self.consequences.apply_stops(now)
        # `review_holds` may lift the hold ``disconnected``. Check the gate before `proceed` raises other holds.
        self.consequences.review_holds(now)
        if not self.channel.was_open and self.gate.is_open:
            # The time before the first connection does not count as flow control.
            self.gate.forget_past()
        self.channel.was_open = True
        self.consequences.proceed(now)

    @step
    def restored(self, now: float) -> None:
        """Handle the end of the repeated declarations: messages may be written again."""
        self.channel.is_restoring = False
        self.consequences.apply_stops(now)
        self.consequences.proceed(now)

    @step
    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        """Handle a channel that the broker has closed, see `Channel.closed_by_broker`.

        Args:
            method: class and method id in the broker's ``Channel.Close``.
        """
        reason = f"the broker closed the channel: {code} {text}"
        self.channel.disconnect(reason, now)
        no_room = self.channel.closed_by_broker(code, text, method, now)
        if no_room is not None:
            # If a probe was in flight, the broker has refused it by closing the channel. So a new pause begins.
            self._settling.hold_refused(no_room, now, new_pause=True)
        self.consequences.update(now)

    @step
    def connection_lost(self, reason: str, now: float, *, reconnects: bool = False, shared: bool = False) -> bool:
        """Handle the loss of a connection, or the end of the attempts to connect.

        Without `reconnects`, all unsettled messages are settled, and nothing is admitted any more. With `reconnects`,
        the setting `on_disconnect` decides whether the unsettled messages are settled, or sent on the next connection
        before new messages.

        Args:
            reconnects: whether the owner will connect again if this method returns True.
            shared: whether other publishers use the connection too. If so, no message of this producer is a suspect.

        Returns:
            Whether another connection is needed, see `wants_channel`.
        """
        if reconnects and self.wants_channel:
            # Raise the hold even if the producer is closing, because unsettled messages wait for the next connection.
            self.channel.disconnect(reason, now)
            self.channel.lost(reason, now, shared=shared)
        else:
            self.consequences.end(reason, now)
        self.consequences.update(now)
        return self.wants_channel

    # Answers of the broker.

    @step
    def on_flow(self, active: bool, now: float) -> None:
        """Handle ``Channel.Flow``. The reply is written after the message that is partly written, if any (J7)."""
        if self.channel.number is None:
            # The channel has ended, so no reply is needed.
            return
        # First take back the frames without a written byte, so that the reply is written before them.
        self._writing.take_back()
        self._writing.put_control(flow_ok(self.channel.number, active))
        if active:
            self.consequences.lift(HoldKind.CHANNEL_FLOW, now)
        else:
            # The gate calls `Consequences._hold_changed`, which stops the writing and the clock of the retries.
            self.gate.hold(HoldKind.CHANNEL_FLOW, now=now)

    def on_blocked(self, reason: str, now: float) -> None:
        self.hold(HoldKind.CONNECTION_BLOCKED, now, detail=reason)

    def on_unblocked(self, now: float) -> None:
        self.lift(HoldKind.CONNECTION_BLOCKED, now)

    @step
    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        """Handle ``Basic.Ack``: the broker has taken responsibility for messages."""
        self._settling.answer(tag, multiple, Outcome.CONFIRMED, now)
        self.consequences.update(now)

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        """Handle the acks of one read. `TapChannel` describes the list, and the effect of an interrupt."""
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished, steps.now = True, now
        self._settling.settle_acked(acks, now)
        self.consequences.update(now)
        steps.is_unfinished = False

    @step
    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        """Handle ``Basic.Nack``: the broker has not taken responsibility for messages."""
        self._settling.answer(tag, multiple, Outcome.NACKED, now)
        self.consequences.update(now)

    @step
    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        """Handle ``Basic.Return``: no queue took the message. With confirms, its ack follows, or its nack came before.

        Args:
            header: the payload of the content header frame.
            body: the body of the returned message.
        """
        self._settling.note_return((code, text), decode_message(header, body), exchange, routing_key)

    @step
    def put_control(self, frame: bytes) -> None:
        """Add a control frame, such as a request that tests a silent broker, after the frames that are already made."""
        self._writing.put_control(frame)

    # Events of the socket.

    def data_to_write(self, limit: int) -> bytes:
        """Return the next bytes to write, approximately up to `limit`; empty if nothing can be written.

        This method uses the time of the last step. So a due probe may wait until `on_timer` is called.
        """
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished = True
        data = self._writing.next_bytes(limit, steps.now)
        steps.is_unfinished = False
        return data

    def advance(self, count: int, now: float) -> bool:
        """Record that the socket accepted `count` bytes. Return True if these bytes end at a frame boundary."""
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished, steps.now = True, now
        self._unconfirmed.outbound.advance(count)
        self._note_written(count, now)
        steps.is_unfinished = False
        return not self._unconfirmed.outbound.mid_frame

    def _note_written(self, count: int, now: float) -> None:
        self.admission.unwritten -= count
        if not self.settings.confirms:
            self._settling.settle_written(now)
            self.consequences.update(now)
        if not self.gate.is_open:
            self.consequences.lift_transport(now)

    def take_output(self, now: float) -> bytes:
        """Return the next bytes to write, and record that they are written. Repeat the call until the result is empty.

        Owners that can write any number of bytes call it: it takes half the time of `data_to_write` and `advance`.
        """
        steps = self.steps
        if steps.is_unfinished:
            steps.resume()
        steps.is_unfinished, steps.now = True, now
        data = self._writing.take(now)
        if data:
            self._note_written(len(data), now)
        steps.is_unfinished = False
        return data

    @property
    def unfinished(self) -> bytes:
        """The unwritten bytes of the frame that is partly written; empty at a frame boundary."""
        return self._unconfirmed.outbound.unfinished

    @property
    def written(self) -> int:
        """How many messages were completely written on this channel."""
        return self._unconfirmed.outbound.finished

    @property
    def is_stopped(self) -> bool:
        """Whether no further message may be written now, for example because of the hold ``channel_flow``."""
        return self._unconfirmed.outbound.stopped

    @property
    def has_answer(self) -> bool:
        """Whether the outbound has unwritten frames, such as ``Flow-Ok``. `is_stopped` does not stop these frames."""
        return not self._unconfirmed.outbound.is_empty

    @step
    def end_writing(self) -> bool:
        """Write no further message on this channel. Return True if no message or control frame is partly written."""
        self._writing.has_ended = True
        self._writing.take_back()
        return self._unconfirmed.outbound.stop()

    # Timers.

    def next_timer(self, now: float) -> float | None:
        """Return the time of the next call of `on_timer`; ``None`` if none is needed."""
        times = [self.controller.ready_at(now), self.consequences.next_review(now)]
        if self.admission.store is not None:
            times.append(self.admission.store.next_timer(now))
        if self._expiry is not None:
            times.append(self._expiry.next_at())
        return min((at for at in times if at is not None), default=None)

    @property
    def needs_timer(self) -> bool:
        """Whether time alone may change the state. If so, the owner has to call `on_timer` at `next_timer`."""
        return self.settings.rate is not None or self._expiry is not None or self.parts.resending.needs_timer

    @step
    def repair(self) -> None:
        """Repair the state if the last step is unfinished. Every step begins with this repair."""

    @step
    def on_timer(self, now: float) -> None:
        """Settle expired messages, review the holds, and admit waiting messages."""
        self.consequences.expire(now)
        self.consequences.proceed(now)
