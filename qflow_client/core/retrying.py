"""What follows for messages that leave again, after each step and as time passes.

While suspects have to leave one at a time, new messages are held, so they do not pile up behind them. Refused messages
whose `retry_for` is over are settled. When the probe is confirmed, or nothing is left to try, the refusal ends.
"""

from __future__ import annotations

from qflow_client.core.admission import Admission
from qflow_client.core.channel import Channel
from qflow_client.core.resending import Resending
from qflow_client.core.settling import Settling
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.events import HoldKind

__all__ = ["Retrying"]

# Seconds after which a message whose time has come is looked at again, while earlier bytes are not written.
_LOOK_AGAIN = 0.05


class Retrying:
    """Decides when the messages of one producer are tried again.

    Args:
        admission: has the messages that were never written, and the gate.
        unconfirmed: what is on the wire.
        resending: what leaves again.
        settling: settles what is not tried again.
        channel: the producer's.
    """

    __slots__ = ("_admission", "_channel", "_gate", "_resending", "_settling", "_unconfirmed")

    def __init__(
        self,
        admission: Admission,
        unconfirmed: Unconfirmed,
        resending: Resending,
        settling: Settling,
        channel: Channel,
    ) -> None:
        self._admission = admission
        self._gate = admission.gate
        self._unconfirmed = unconfirmed
        self._resending = resending
        self._settling = settling
        self._channel = channel

    @property
    def needs_timer(self) -> bool:
        """Whether a message leaves again at a certain time."""
        return self._resending.refusals.retry_at is not None or self._resending.candidate_at() is not None

    def next_timer(self, now: float) -> float | None:
        """Return when a message leaves again; ``None`` if time alone lets none leave."""
        resending, outbound = self._resending, self._unconfirmed.outbound
        refusals = resending.refusals
        if refusals.probe is not None or self._channel.number is None or outbound.stopped:
            return None
        times = [at for at in (refusals.retry_at, resending.candidate_at()) if at is not None]
        if len(times) > 1:
            # The message waits for both. What is over time is settled at the first, so that counts until it has passed.
            times = [max(times), *(at for at in times if at > now)]
        if resending.waits_for_answers(not self._unconfirmed.flight):
            # What leaves next leaves alone, so a time that has passed changes nothing until the others are answered.
            times = [at for at in times if at > now]
        if not outbound.is_empty:
            # A full socket keeps a message back whose time has come. Do not look at it all the time.
            times = [max(at, now + _LOOK_AGAIN) for at in times]
        return min(times, default=None)

    def go_on(self, now: float) -> None:
        """Settle refused messages whose time is over, and hold new messages while suspects have to leave before."""
        resending, gate = self._resending, self._gate
        if self._channel.number is None or self._channel.is_restoring:
            return
        if resending.is_idle and not gate.is_held_by(HoldKind.DISCONNECTED):
            return
        if resending.refusals.retry_at is not None:
            self._settling.expire(now)
            if self._admission.is_nearly_written:
                gate.lift(HoldKind.TRANSPORT, now=now)
            resending.refusals.check_probe()
            if resending.has_tried_all(bool(self._admission.unsent)):
                self.end_refusals(now)
        sendable = resending.count_sendable(resending.again, not self._unconfirmed.flight, now)
        if resending.refusals.retry_at is None and resending.has_suspects_after(sendable):
            gate.hold(HoldKind.DISCONNECTED, now=now, detail="what an earlier channel has left leaves first")
        else:
            gate.lift(HoldKind.DISCONNECTED, now=now)

    def end_refusals(self, now: float) -> None:
        """End the refusal: the broker has room again, or nothing is left to try."""
        self._resending.end_refusals({receipt._number for receipt in self._channel.unsettled()})
        self._gate.lift(HoldKind.REFUSED, now=now)

    def heal(self, now: float) -> None:
        """Repair what an unfinished step has left."""
        if self._resending.refusals.retry_at is None:
            self._gate.lift(HoldKind.REFUSED, now=now)
