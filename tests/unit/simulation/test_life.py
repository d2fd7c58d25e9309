"""Hours of a producer's life, and proof that they would show what can go wrong."""

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
def test_the_contract_holds_for_hours_of_flow_blocks_acks_nacks_and_returns(seed: int) -> None:
    life = Life(seed)
    # Each life has settings of its own; in CI they are half a day together.
    life.live(LIFE)
    assert set(life.counts) == {do.__name__ for do, _ in Life.STEPS}


def test_the_contract_holds_for_a_long_run_that_repeatedly_becomes_idle() -> None:
    life = Life(12)
    begun = life.now
    periods, period = rounds(12, least=3), HOUR / (10 if EFFORT == "quick" else 5)
    for _ in range(periods):
        # It has to have come to rest, and goes on from there.
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
    """A nack does not give its place in the window back."""

    class kind(Limits):  # an attribute
        __slots__ = ()

        def release(self, receipts: Sequence[Receipt], now: float) -> None:
            if not any(receipt._outcome is Outcome.NACKED for receipt in receipts):
                super().release(receipts, now)


class OffByOneTag(ProducerProtocol):
    """An ack of several leaves the last one out."""

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        super().on_ack(tag - 1 if multiple and tag > 1 else tag, multiple, now)


class ShortRun(ProducerProtocol):
    """Of a run of acks the last one is left out."""

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
    """Connection.Blocked is not heard."""

    def on_blocked(self, reason: str, now: float) -> None:
        pass


class UnansweredFlow(ProducerProtocol):
    """Channel.Flow is obeyed and not answered."""

    def on_flow(self, active: bool, now: float) -> None:
        (self.lift if active else self.hold)("channel_flow", now)


class LateFlowOk(ProducerProtocol):
    """Flow-Ok waits for its turn behind the messages that are admitted."""

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
    """What is admitted goes out although the channel is stopped."""

    def data_to_write(self, limit: int) -> bytes:
        self.parts.unconfirmed.outbound.stopped = False
        return super().data_to_write(limit)


class WrongHoldLifted(ProducerProtocol):
    """Connection.Unblocked opens the channel, too."""

    def on_unblocked(self, now: float) -> None:
        super().on_unblocked(now)
        self.lift("channel_flow", now)


class Barging(OtherPart):
    """Who comes later passes those who wait."""

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
    """A message that was given up keeps its place in the line."""

    class kind(SendLine):  # an attribute
        __slots__ = ()

        def give_up(self, ticket: SendTicket, now: float) -> bool:
            self._controller.waiting -= 1
            return True


class ForgottenReturn(ProducerProtocol):
    """A returned message is taken for delivered."""

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        pass


class NackTakenForAck(ProducerProtocol):
    """A nack settles as an ack does."""

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        self.parts.settling.answer(tag, multiple, Outcome.CONFIRMED, now)


class BytesLost(ProducerProtocol):
    """Of a message that the socket took in part, the rest is counted wrongly."""

    def advance(self, count: int, now: float) -> bool:
        border = super().advance(count, now)
        if self.parts.unconfirmed.outbound._at > 1:
            self.parts.unconfirmed.outbound._at += 1
        return border


class StopForgetsTheBegun(ProducerProtocol):
    """A stop cuts the message that has begun between two of its frames."""

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
    """A lowered capacity is not in force."""

    def set_capacity(self, capacity: int, now: float) -> None:
        super().set_capacity(max(capacity, self.window.capacity), now)


class LateDeadline(OtherPart):
    """A deadline is decided one look too late."""

    class kind(SendLine):  # an attribute
        __slots__ = ()

        def look_at(self, ticket: SendTicket, now: float) -> float | None:
            return super().look_at(ticket, now - 1.0)


# What each has to be caught at, which is what is wrong with it and not something else.
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
def test_a_planted_bug_is_caught_within_hours(bug: type[ProducerProtocol], words: str) -> None:
    def lives() -> None:
        # Seed 3 is the first that shows it soon.
        for seed in range(3 if bug is Barging else 0, 12):
            Life(seed, bug).live(HOUR / 2)

    with pytest.raises(BrokenContract, match=words):
        lives()
