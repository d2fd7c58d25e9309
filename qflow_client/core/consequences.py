"""The actions that follow a step: review holds, admit waiting messages, wake waiters, and settle expired messages.

This module also repairs the state after an interrupted step, see `step`.
"""

from __future__ import annotations

from collections.abc import Sequence

from qflow_client.core.channel import INTERRUPTED
from qflow_client.core.parts import Parts
from qflow_client.core.unreported import ON_DELIVERY
from qflow_client.events import HoldKind
from qflow_client.flow import Hold
from qflow_client.receipt import Receipt

__all__ = ["Consequences"]

# Seconds until the next check, if a message is due but cannot be sent because earlier bytes wait for the socket.
_LOOK_AGAIN = 0.05

# The holds that also stop the writing of admitted messages.
_STOPS_WRITING = (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED)


class Consequences:
    """The actions that follow the steps of one producer's protocol."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        # Every answer of the broker uses these parts. The copies save a look-up in `parts`.
        self._gate, self._controller = parts.gate, parts.controller
        self._reports, self._unreported, self._waiters = parts.reports, parts.unreported, parts.waiters
        parts.gate.observer = self._hold_changed
        parts.steps.heal, parts.steps.follow_up = self._heal, self._follow_up

    def update(self, now: float) -> None:
        """Update the holds, admit messages and wake waiters after messages were settled or left `flight`."""
        if self._unreported.count and self._reports.settled:
            # Raise the hold for unreported receipts before `proceed` admits waiting messages.
            self.hold_unreported(now)
        if self._controller.waiting or not self._gate.is_open:
            self.proceed(now)
        else:
            self._wake_settled()

    def proceed(self, now: float) -> None:
        """Review the holds, admit waiting messages, and wake the waiters for settled messages."""
        self.review_holds(now)
        self._parts.line.grant(now)
        self._wake_settled()

    def _wake_settled(self) -> None:
        if self._waiters.settled:
            self._waiters.wake_settled(self._parts.channel.oldest_unsettled())

    # Messages to be sent again. `Writing.next_bytes` sends them.

    def review_holds(self, now: float) -> None:
        """Settle refused messages whose time for retries is over, and lift holds that are not needed any more.

        No other method of the core lifts the hold ``disconnected``. Suspects (see `suspects`) are sent one at a time,
        before new messages. So the hold ``disconnected`` stays while a suspect in `Resending.again` must wait.
        """
        parts, gate, resending = self._parts, self._gate, self._parts.resending
        if parts.channel.number is None or parts.channel.is_restoring:
            return
        if resending.is_idle and not gate.is_held_by(HoldKind.DISCONNECTED):
            return
        if resending.refusals.probe_at is not None:
            parts.settling.give_up_refused(now)
            if parts.admission.is_nearly_written:
                gate.lift(HoldKind.TRANSPORT, now=now)
            resending.refusals.check_probe()
            if resending.is_probing_over(bool(parts.admission.unsent)):
                resending.end_refusals({receipt._number for receipt in parts.channel.unsettled()})
                gate.lift(HoldKind.REFUSED, now=now)
        sendable = resending.count_sendable(resending.again, not parts.unconfirmed.flight, now)
        if not resending.has_suspects_after(sendable):
            gate.lift(HoldKind.DISCONNECTED, now=now)

    def next_review(self, now: float) -> float | None:
        """Return the earliest time to send a message again or to settle it; ``None`` if there is none."""
        parts = self._parts
        if parts.channel.number is None or parts.unconfirmed.outbound.stopped:
            return None
        times = parts.resending.next_times(not parts.unconfirmed.flight, now)
        store, unsent = parts.admission.store, parts.admission.unsent
        if times and store is not None and not parts.resending.again and not store.count_writable(unsent):
            # The next message waits for the disk. So ignore times in the past, to avoid a busy loop.
            times = [at for at in times if at > now]
        if not parts.unconfirmed.outbound.is_empty:
            # Earlier bytes wait for the socket, so a due message cannot be sent now. Wait, to avoid a busy loop.
            times = [max(at, now + _LOOK_AGAIN) for at in times]
        return min(times, default=None)

    # Holds.

    def lift(self, kind: str, now: float, source: str = "") -> None:
        """Lift a hold, and admit waiting messages if no other hold stops them."""
        if self._gate.lift(kind, now=now, source=source) is not None or self._controller.waiting:
            self._parts.line.grant(now)

    def lift_transport(self, now: float) -> None:
        """Lift the hold ``transport`` if the unwritten bytes are at most half of their limit."""
        if self._parts.admission.is_nearly_written:
            self.lift(HoldKind.TRANSPORT, now)

    def hold_unreported(self, now: float) -> None:
        """Raise the hold ``capacity`` if too many receipts are not reported to the application yet."""
        if self._parts.admission.closed is None:
            self._unreported.hold_if_many(now)

    def lift_unreported(self, count: int, now: float) -> None:
        """Record that `count` receipts were reported to the application. Lift the hold if few are unreported."""
        if self._unreported.note_reported(count):
            self.lift(HoldKind.CAPACITY, now, ON_DELIVERY)

    def _hold_changed(self, hold: Hold, raised: bool, now: float) -> None:
        """Report a hold that was raised or lifted. The gate calls this method."""
        if hold.kind in _STOPS_WRITING:
            self.apply_stops(now)
        if self._waiters.unflowed and not raised:
            self._waiters.wake_unflowed()
        self._reports.report_hold(
            hold, raised, now, connecting=not self._parts.channel.was_open, ending=self._is_ending
        )

    @property
    def _is_ending(self) -> bool:
        """Whether the producer is closed and opens no more channels. If so, lifted holds are reported as ``closed``."""
        return self._parts.channel.is_over and self._parts.admission.closed is not None

    def apply_stops(self, now: float) -> None:
        """Allow or stop the writing of messages, depending on the holds and the state of the channel."""
        parts = self._parts
        stopped = (
            parts.writing.has_ended or parts.channel.is_restoring or any(map(self._gate.is_held_by, _STOPS_WRITING))
        )
        parts.unconfirmed.outbound.stopped = stopped
        if stopped:
            parts.writing.take_back()
            parts.resending.refusals.stop_clock(now)
        elif parts.channel.number is not None:
            parts.resending.refusals.start_clock(now)

    # Time.

    def expire(self, now: float) -> None:
        """Settle the messages whose `delivery_timeout` has passed (E16)."""
        parts = self._parts
        if parts.expiry is None:
            return
        before = parts.expiry.expired_before(parts.admission.next_number, now)
        if before:
            if parts.channel.oldest_unsettled() < before:
                expired = [receipt for receipt in parts.channel.unsettled() if receipt._number < before]
                self.abandon(expired, f"delivery_timeout={parts.expiry.timeout:g} s has passed", now)
            parts.expiry.forget(before)

    def abandon(self, receipts: Sequence[Receipt], reason: str, now: float) -> None:
        """Settle unsettled messages and stop sending them, see `Channel.abandon`."""
        self._parts.writing.take_back()
        self._parts.channel.abandon(receipts, reason, now)
        self.update(now)
        self.lift_transport(now)

    # Ends.

    def close(self, reason: str) -> None:
        """Admit no message from now on, and wake the callers that wait for admission or for an open gate."""
        self._parts.admission.close(reason)
        self._reports.is_ending = True
        self._parts.line.end(reason)
        self._waiters.end_unflowed()

    def end(self, reason: str, now: float) -> None:
        """Settle every message, because no other channel will be opened."""
        parts = self._parts
        closed_by_application = parts.admission.closed is not None and not parts.channel.is_over
        parts.channel.is_over = True
        # If the application has closed the producer, the end is not flow control, so no hold is raised.
        parts.channel.disconnect(reason, now, held=parts.admission.closed is None)
        self.close(reason)
        parts.channel.settle_all(reason, now)
        if parts.admission.store is not None:
            parts.admission.store.end(reason)
        if closed_by_application:
            # Report these holds as ``closed``, because nothing lifts them any more.
            for hold in self._gate.holds:
                self._gate.lift(hold.kind, now=now, source=hold.source)

    # An unfinished step.

    def _heal(self) -> None:
        """Repair the state after an unfinished step, see `step`."""
        parts, now = self._parts, self._parts.steps.now
        parts.settling.heal()
        parts.channel.heal(now)
        # Do not call `take_back`, because the I/O thread may be writing the bytes that `take_back` would remove.
        parts.writing.move_back()
        self.apply_stops(now)
        parts.admission.heal(parts.channel.unsettled)
        parts.line.heal()
        parts.reports.heal(now, connecting=not parts.channel.was_open, ending=self._is_ending)
        parts.channel.count_unwritten(now)
        if parts.resending.refusals.probe_at is None:
            self._gate.lift(HoldKind.REFUSED, now=now)
        else:
            self._gate.hold(HoldKind.REFUSED, now=now)
        if parts.channel.is_over:
            self.end(parts.admission.closed or INTERRUPTED, now)
        elif parts.admission.closed is not None:
            self.close(parts.admission.closed)

    def _follow_up(self) -> None:
        """Do what the unfinished step may have left undone: review holds, admit messages, and wake waiters."""
        now = self._parts.steps.now
        self.lift_unreported(0, now)
        self._waiters.wake_unflowed()
        self.proceed(now)
        if self._parts.channel.number is not None:
            self._parts.channel.was_open = True
