"""Simulated hours of a producer, and proof that the simulation finds errors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from qflow_client.amqp.frames import flow_ok
from qflow_client.amqp.outbound import Outbound
from qflow_client.core.admission import Admission
from qflow_client.core.limits import Limits
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.returns import Returns
from qflow_client.core.sendline import SendLine
from qflow_client.core.tickets import SendTicket
from qflow_client.flow import FifoLine
from qflow_client.message import Message
from qflow_client.receipt import Outcome, Receipt
from tests.effort import EFFORT, rounds

from .life import BrokenContract, Life

HOUR = 3600.0
LIFE = HOUR * {"quick": 0.1, "ci": 1.0, "nightly": 2.0}[EFFORT]


@pytest.mark.parametrize("seed", range(rounds(12, least=12)))
def test_a_simulated_producer_agrees_with_a_model_of_its_contract_during_hours_of_random_events(seed: int) -> None:
    life = Life(seed)
    # Each simulation has its own settings. In CI all of them together take half a day.
    life.live(LIFE)
    assert set(life.counts) == {do.__name__ for do, _ in Life.STEPS}


def test_a_simulated_producer_that_repeatedly_becomes_idle_agrees_with_a_model_of_its_contract() -> None:
    life = Life(12)
    begun = life.now
    periods, period = rounds(12, least=3), HOUR / (10 if EFFORT == "quick" else 5)
    for _ in range(periods):
        # The producer has settled all messages, and continues from this state.
        life.live(period)
    assert life.now - begun >= periods * period


class OtherPart(ProducerProtocol):
    """A producer with a fault in one of its parts."""

    kind: type[Any]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for part in (self.admission, self.limits, self.line):
            if issubclass(self.kind, type(part)):
                part.__class__ = self.kind


class LostRelease(OtherPart):
    """A nack does not free the message's place in the window."""

    class kind(Limits):  # an attribute
        __slots__ = ()

        def release(self, receipts: Sequence[Receipt], now: float) -> None:
            if not any(receipt._outcome is Outcome.NACKED for receipt in receipts):
                super().release(receipts, now)


class OffByOneTag(ProducerProtocol):
    """A multiple ack omits the last message."""

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        super().on_ack(tag - 1 if multiple and tag > 1 else tag, multiple, now)


class ShortRun(ProducerProtocol):
    """A run of acks omits the last message."""

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        super().on_acks([(first, count - 1) for first, count in acks if count != 1], now)


class IdsKept(ProducerProtocol):
    """The id of a settled message is never forgotten."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parts.returns.__class__ = self._Returns

    class _Returns(Returns):
        __slots__ = ()

        def forget(self, receipts: Iterable[Receipt]) -> None:
            pass


class ForgottenHold(ProducerProtocol):
    """Connection.Blocked is ignored."""

    def on_blocked(self, reason: str, now: float) -> None:
        pass


class UnansweredFlow(ProducerProtocol):
    """Channel.Flow is obeyed but not answered."""

    def on_flow(self, active: bool, now: float) -> None:
        (self.lift if active else self.hold)("channel_flow", now)


class LateFlowOk(ProducerProtocol):
    """Flow-Ok is written only after all admitted messages."""

    answers = b""

    def on_flow(self, active: bool, now: float) -> None:
        answer = flow_ok(1, active)
        self.answers += answer
        self.admission.unwritten += len(answer)
        (self.lift if active else self.hold)("channel_flow", now)

    def data_to_write(self, limit: int) -> bytes:
        if self.answers and not self.admission.unsent:
            self.parts.unconfirmed.outbound.put_control(self.answers)
            self.answers = b""
        return super().data_to_write(limit)


class PublishesAfterStop(ProducerProtocol):
    """Admitted messages are written although the channel is stopped."""

    def data_to_write(self, limit: int) -> bytes:
        self.parts.unconfirmed.outbound.stopped = False
        return super().data_to_write(limit)


class WrongHoldLifted(ProducerProtocol):
    """Connection.Unblocked also ends the hold of Channel.Flow."""

    def on_unblocked(self, now: float) -> None:
        super().on_unblocked(now)
        self.lift("channel_flow", now)


class Barging(OtherPart):
    """Later sends overtake waiting sends."""

    class kind(Admission):  # an attribute
        __slots__ = ()

        def send(self, payload: bytes | Message, exchange: str, routing_key: str, now: float) -> Receipt | None:
            controller = self._controller
            before = controller.waiting, controller._line
            controller.waiting, controller._line = 0, FifoLine()
            try:
                return super().send(payload, exchange, routing_key, now)
            finally:
                controller.waiting, controller._line = before


class SentAfterTimeout(OtherPart):
    """A message that was given up stays in the waiting line."""

    class kind(SendLine):  # an attribute
        __slots__ = ()

        def give_up(self, ticket: SendTicket, now: float) -> bool:
            self._controller.waiting -= 1
            return True


class ForgottenReturn(ProducerProtocol):
    """A returned message counts as delivered."""

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        pass


class NackTakenForAck(ProducerProtocol):
    """A nack settles messages as confirmed."""

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        self.parts.settling.answer(tag, multiple, Outcome.CONFIRMED, now)


class BytesLost(ProducerProtocol):
    """The rest of a partly written message is counted wrongly."""

    def advance(self, count: int, now: float) -> bool:
        border = super().advance(count, now)
        if self.parts.unconfirmed.outbound._at > 1:
            self.parts.unconfirmed.outbound._at += 1
        return border


class StopForgetsTheBegun(ProducerProtocol):
    """A stop cuts a half-written message between two of its frames."""

    class _Outbound(Outbound):
        __slots__ = ()

        def discard_unbegun(self) -> None:
            super().discard_unbegun()
            if self._data:
                end = self._borders[bisect_left(self._borders, self._at)]
                self._data, self._borders, self._ends = self._data[:end], [end], []
                self._rest = ()
                self._taken = 0

    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        super().channel_opened(channel, frame_max, now, restores=restores)
        self.parts.unconfirmed.outbound = self._Outbound()


class CapacityIgnored(ProducerProtocol):
    """A lowered capacity is ignored."""

    def set_capacity(self, capacity: int, now: float) -> None:
        super().set_capacity(max(capacity, self.window.capacity), now)


class LateDeadline(OtherPart):
    """A deadline is noticed one call too late."""

    class kind(SendLine):  # an attribute
        __slots__ = ()

        def look_at(self, ticket: SendTicket, now: float) -> float | None:
            return super().look_at(ticket, now - 1.0)


# Each bug, and the words of the failed check. It must be the check for this bug, and no other.
BUGS: list[tuple[Callable[..., ProducerProtocol], str]] = [
    (LostRelease, "unsettled is wrong"),
    (OffByOneTag, "None is not confirmed"),
    (ShortRun, "None is not confirmed"),
    (IdsKept, "what is settled still is"),
    (ForgottenHold, "instead of .*connection_blocked"),
    (UnansweredFlow, "unwritten bytes are wrong"),
    (LateFlowOk, "in_flight is 1 instead of 0"),
    (PublishesAfterStop, "a publish on a channel that is stopped"),
    (WrongHoldLifted, "a message was admitted that may not go"),
    (Barging, "send admitted=True, the contract says False"),
    (SentAfterTimeout, "unsettled is wrong"),
    (ForgottenReturn, "confirmed is not returned"),
    (NackTakenForAck, "confirmed is not nacked"),
    (BytesLost, "Could not unmarshal"),
    (StopForgetsTheBegun, "in_flight is 0 instead of 1"),
    (CapacityIgnored, "a message was admitted that may not go"),
    (LateDeadline, "a deadline was missed"),
]


@pytest.mark.parametrize(("bug", "words"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_each_bug_planted_in_the_producer_is_found_within_simulated_hours(
    bug: type[ProducerProtocol], words: str
) -> None:
    def lives() -> None:
        # Seed 3 is the first seed that shows this bug early.
        for seed in range(3 if bug is Barging else 0, 12):
            Life(seed, bug).live(HOUR / 2)

    with pytest.raises(BrokenContract, match=words):
        lives()
