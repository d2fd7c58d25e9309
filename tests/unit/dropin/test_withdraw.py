"""Messages that are withdrawn before a byte of them is written."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qflow_client.dropin import EncodedMessage, EncodedProtocol
from qflow_client.events import HoldKind
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings
from tests.unit.core.support import place


def opened(**settings: Any) -> EncodedProtocol:
    given: dict[str, Any] = {"message_ids": False, "capacity": 5, "capacity_bytes": 100} | settings
    protocol = EncodedProtocol(ProducerSettings(**given), now=0.0)
    protocol.channel_opened(1, 0, 0.0)
    return protocol


def send(protocol: EncodedProtocol, frames: bytes) -> Receipt:
    receipt = protocol.send(EncodedMessage(frames, frames), "", "q", 0.0)
    assert receipt is not None
    return receipt


# The next action: a message, a number of written bytes, an ack of a written message by its index, or a withdrawal.
_STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 4)),
    st.tuples(st.just("write"), st.integers(1, 10)),
    st.tuples(st.just("ack"), st.integers(1, 5)),
    st.tuples(st.just("withdraw"), st.integers(0, 4)),
)


@given(st.lists(_STEPS, max_size=40))
def test_A4_a_message_withdrawn_before_it_is_written_is_never_sent_and_all_others_are_confirmed(
    steps: list[tuple[str, int]],
) -> None:
    protocol = opened()
    receipts: list[Receipt] = []
    kept: list[Receipt] = []
    wire = b""
    tag = 0
    for what, number in steps:
        if what == "send" and protocol.unsettled < 5:
            receipt = send(protocol, bytes((len(receipts) + 1,)) * number)
            receipts.append(receipt)
            kept.append(receipt)
        elif what == "write":
            data = protocol.data_to_write(1 << 20)[:number]
            wire += data
            protocol.advance(len(data), 0.0)
        elif what == "ack":
            last = min(tag + number, protocol.written)
            if last > tag:
                tag = last
                protocol.on_ack(tag, True, 0.0)
        elif what == "withdraw" and receipts:
            receipt = receipts[-1 - number % len(receipts)]
            begun = receipt in kept[: protocol.parts.unconfirmed.outbound.begun]
            was_settled = receipt.done
            was_withdrawn = receipt._outcome is Outcome.FAILED
            assert protocol.withdraw(receipt, 0.0) is (was_withdrawn or not (begun or was_settled))
            if not (begun or was_settled):
                kept.remove(receipt)
                assert receipt._outcome is Outcome.FAILED
        assert [each for each in kept if not each.done] == list(protocol.unsettled_receipts)
        assert protocol.window.used == protocol.unsettled
        assert protocol.in_flight == protocol.parts.unconfirmed.outbound.begun - tag
    while data := protocol.data_to_write(1 << 20):
        wire += data
        protocol.advance(len(data), 0.0)
    protocol.on_ack(0, True, 0.0)
    assert wire == b"".join(each._payload.frames for each in kept)  # type: ignore[union-attr]
    assert all(each._outcome is Outcome.CONFIRMED for each in kept)
    assert protocol.unsettled == 0
    assert protocol.limits.byte_window is not None
    assert protocol.limits.byte_window.used == 0


def test_withdrawing_an_unwritten_message_makes_room_in_the_window() -> None:
    protocol = opened(capacity=2, max_unwritten_bytes=4)
    first = send(protocol, b"12345")
    assert protocol.gate.is_held_by(HoldKind.TRANSPORT)
    waiting = place(protocol, EncodedMessage(b"6", b"6"), 0.0)
    assert protocol.withdraw(first, 0.0)
    assert waiting.receipt is not None
    assert protocol.data_to_write(100) == b"6"
    assert not protocol.gate.is_held_by(HoldKind.TRANSPORT)
    assert protocol.withdraw(first, 0.0), "a second time changes nothing"
    assert protocol.unsettled == 1
