"""Acks that come in runs are reported in runs. This changes only the time that they take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from qflow_client import Message, Outcome, Receipt
from qflow_client.amqp.frames import (
    ACK,
    BODY_FRAME,
    CHANNEL_FLOW,
    HEARTBEAT,
    METHOD_FRAME,
    NACK,
    RETURN,
    FrameError,
    frame,
)
from qflow_client.amqp.tap import Tap
from qflow_client.core.protocol import ProducerProtocol
from tests.effort import rounds

from .support import CHANNEL, check_order, holds, logged, make, place, publish_many, returned, send, write


def ack(tag: int, bits: int = 0, channel: int = CHANNEL) -> bytes:
    return frame(METHOD_FRAME, channel, ACK + tag.to_bytes(8, "big") + bytes((bits,)))


def nack(tag: int, bits: int = 0) -> bytes:
    return frame(METHOD_FRAME, CHANNEL, NACK + tag.to_bytes(8, "big") + bytes((bits,)))


def flow(*, active: bool) -> bytes:
    return frame(METHOD_FRAME, CHANNEL, CHANNEL_FLOW + bytes((active,)))


class Told:
    """A channel that records its acks."""

    unfinished = b""

    def __init__(self) -> None:
        self.acks: list[tuple[int, int]] = []

    def on_ack(self, tag: int, multiple: bool, now: float) -> None:
        self.acks.append((tag, 0 if multiple else 1))

    def on_acks(self, acks: list[tuple[int, int]], now: float) -> None:
        self.acks += acks


def tapped(*numbers: int) -> tuple[Tap, list[Told]]:
    tap = Tap()
    channels = [Told() for _ in numbers]
    for number, channel in zip(numbers, channels, strict=True):
        tap.attach(number, channel, 0.0)  # type: ignore[arg-type]  # it is told of nothing else
    return tap, channels


def test_consecutive_single_acks_are_reported_as_one_range_and_multiple_acks_keep_their_place_between_ranges() -> None:
    tap, (channel,) = tapped(1)
    data = b"".join([*map(ack, (1, 2, 3)), *map(ack, (7, 8)), ack(9, 1), *map(ack, (10, 4, 5)), ack(20, 1), ack(11)])
    assert tap.received(data, 0.0) == b""
    assert channel.acks == [(1, 3), (7, 2), (9, 0), (10, 1), (4, 2), (20, 0), (11, 1)]


def test_ranges_of_consecutive_acks_are_found_however_the_stream_is_split() -> None:
    stream = b"".join(map(ack, range(1, 201)))
    for size in (50, 64, 100, 1460):
        tap, (channel,) = tapped(1)
        for at in range(0, len(stream), size):
            assert tap.received(stream[at : at + size], 0.0) == b""
        assert sum(count for _, count in channel.acks) == 200
        # The ack at each cut is reported separately.
        assert len(channel.acks) <= 2 * (len(stream) // size) + 1


def test_each_channel_gets_the_ranges_of_its_own_acks() -> None:
    tap, (one, two) = tapped(1, 0x00CE)
    data = [ack(1), ack(2), ack(1, channel=0xCE), ack(2, channel=0xCE), ack(3), ack(3, 1, channel=0xCE)]
    assert tap.received(b"".join(data), 0.0) == b""
    assert one.acks == [(1, 2), (3, 1)]
    assert two.acks == [(1, 2), (3, 0)]


def test_a_channel_that_was_detached_from_the_connection_gets_no_acks() -> None:
    tap, (channel,) = tapped(1)
    tap.detach(1)
    assert tap.received(ack(1) + ack(2) + ack(3), 0.0) == b""
    assert channel.acks == []


def test_frames_between_acks_go_to_the_same_receivers_as_without_the_acks() -> None:
    tap, (channel,) = tapped(1)
    theirs = ack(1, channel=2)
    data = [ack(1), ack(2), ack(3), HEARTBEAT, ack(4), ack(5), ack(6), theirs, ack(7), ack(8)]
    assert tap.received(b"".join(data), 0.0) == HEARTBEAT + theirs
    assert [tag for tag, _ in channel.acks] == [1, 4, 5, 6, 7, 8]
    assert channel.acks[0] == (1, 3)


@pytest.mark.parametrize("bad", [ack(4)[:-1] + b"\xcd", b"\4" + ack(4)[1:]], ids=["end", "type"])
def test_acks_that_arrive_before_invalid_bytes_are_handled(bad: bytes) -> None:
    tap, (channel,) = tapped(1)
    with pytest.raises(FrameError):
        tap.received(ack(1) + ack(2) + ack(3) + bad + ack(5) + ack(6), 0.0)
    assert channel.acks == [(1, 3)]


def test_undefined_bits_of_a_basic_ack_frame_are_ignored() -> None:
    tap, (channel,) = tapped(1)
    tap.received(ack(1) + ack(2) + ack(3, 2) + ack(4, 3) + ack(5) + ack(6), 0.0)
    assert channel.acks == [(1, 2), (3, 1), (4, 0), (5, 1), (6, 1)]


def test_acks_between_the_method_and_the_content_of_a_basic_return_raise_a_frame_error() -> None:
    tap, (channel,) = tapped(1)
    tap.received(frame(METHOD_FRAME, 1, RETURN + b"\1\x38\0\0\0"), 0.0)
    with pytest.raises(FrameError, match="before the end of a returned message"):
        tap.received(ack(1) + ack(2) + ack(3), 0.0)
    assert channel.acks == []


@pytest.mark.parametrize("cut", range(7, 40))
def test_bytes_in_the_body_of_a_delivery_that_look_like_acks_go_to_the_library(cut: int) -> None:
    tap, (channel,) = tapped(1)
    data = frame(BODY_FRAME, 1, bytes(cut - 7) + ack(1) + ack(2) + ack(3) + ack(4))
    assert tap.received(data[:cut], 0.0) + tap.received(data[cut:] + ack(5), 0.0) == data
    assert channel.acks == [(5, 1)]


def test_a_range_of_acks_settles_only_those_of_its_messages_that_have_no_answer_yet() -> None:
    protocol = make()
    receipts = publish_many(protocol, 8)
    assert protocol.waiters.when_flushed("all")
    protocol.on_ack(6, False, 0.0)
    protocol.on_ack(2, True, 0.0)
    protocol.on_acks([(1, 5)], 0.0)
    assert [receipt.outcome for receipt in receipts] == [*[Outcome.CONFIRMED] * 6, None, None]
    assert protocol.parts.unconfirmed.oldest == 7, "or a multiple ack would walk through all that was ever sent"
    protocol.on_acks([(7, 2)], 0.0)
    assert protocol.reports.wake == ["all"]


def test_acks_that_arrive_in_one_read_settle_messages_in_the_order_of_sending() -> None:
    protocol = make()
    settled: list[Receipt] = []
    protocol.reports.settled = settled
    receipts = publish_many(protocol, 12)
    # All up to 2; 3 and 4; all up to 6; then 9 and 10 before 7 and 8; and all others.
    protocol.on_acks([(2, 0), (3, 2), (6, 0), (9, 2), (8, 0), (0, 0)], 0.0)
    assert [receipts.index(receipt) + 1 for receipt in settled] == [1, 2, 3, 4, 5, 6, 9, 10, 7, 8, 11, 12]


def test_a_range_of_acks_settles_only_messages_that_were_completely_written() -> None:
    protocol = make()
    protocol.reports.logs.clear()
    receipts = [send(protocol) for _ in range(3)]
    write(protocol, protocol.unwritten - 1)
    protocol.on_acks([(0, 5)], 0.0)
    assert [receipt.done for receipt in receipts] == [True, True, False]
    assert [arguments[1] for _, _, arguments, *_ in protocol.reports.logs] == [0, 3, 4]


# The state after both ways.


def warnings(protocol: ProducerProtocol) -> list[str]:
    return [line for line in logged(protocol) if line.startswith("WARNING")]


def busy(sizes: list[int], share: float, settings: dict[str, Any], *, wants_all: bool) -> ProducerProtocol:
    """Return a producer with much state: own ids, returns, flushes, and waiting sends and readers."""
    protocol = make(**settings)
    if wants_all:
        protocol.reports.settled = []
    for number, size in enumerate(sizes):
        body = b"%d" % (number % 10) * size
        payload = Message(body, message_id=f"own {number % 2}") if size == 7 else body
        receipt = protocol.admission.send(payload, "", "q", 0.0)
        if receipt is None:
            place(protocol, payload, 0.0, waiter=f"ticket {number}")
        elif number % 2:
            receipt._waiter = f"receipt {number}"
        if number % 7 == 0:
            protocol.waiters.when_flushed(f"flush {number}")
    write(protocol, int(protocol.unwritten * share))
    for tag in (3, 4):
        receipt = protocol.parts.unconfirmed.flight.get(tag)
        if receipt is not None and tag <= protocol.written:
            returned(protocol, receipt.message_id)
    return protocol


def state(protocol: ProducerProtocol) -> dict[str, Any]:
    return {
        "unsettled": [receipt.message_id for receipt in protocol.unsettled_receipts],
        "tags": {tag: receipt._number for tag, receipt in protocol.parts.unconfirmed.flight.items()},
        "oldest": protocol.parts.unconfirmed.oldest,
        "admitted": protocol.admission.admitted,
        "window": protocol.window.used,
        "bytes": protocol.limits.byte_window and protocol.limits.byte_window.used,
        "ids": {name: [receipt._number for receipt in own] for name, own in protocol.parts.returns.by_id.items()},
        "wake": sorted(protocol.reports.wake),
        "settled": [(receipt._number, receipt.outcome) for receipt in protocol.reports.settled or ()],
        "failures": [(receipt._number, receipt.outcome) for receipt in protocol.reports.failures],
        "holds": holds(protocol),
        "waiting": protocol.controller.waiting,
        "flushes": protocol.waiters.settled,
        "stopped": protocol.is_stopped,
        "unwritten": protocol.unwritten,
        "wire": protocol.data_to_write(1 << 20),
    }


tags = st.one_of(st.integers(0, 20), st.integers(0, 20), st.sampled_from([99, (1 << 64) - 1]))
answers = st.one_of(
    st.builds(lambda first, count: [*map(ack, range(first, first + count))], st.integers(0, 20), st.integers(3, 12)),
    st.builds(lambda tag, bits: [ack(tag, bits)], tags, st.sampled_from([0, 0, 1, 1, 2, 3])),
    st.builds(lambda tag, bits: [nack(tag, bits)], tags, st.sampled_from([0, 1])),
    st.sampled_from([[HEARTBEAT], [ack(1, channel=2)], [flow(active=False)], [flow(active=True)]]),
)


@hypothesis_settings(max_examples=rounds(200))
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 20, 60]), min_size=12, max_size=25),
    share=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    settings=st.sampled_from([{}, {"capacity": 12}, {"capacity": 20, "capacity_bytes": 200}]),
    wants_all=st.booleans(),
    said=st.lists(answers, min_size=2, max_size=8),
    data=st.data(),
)
def test_a_range_of_acks_has_the_same_effect_as_single_acks(
    sizes: list[int],
    share: float,
    settings: dict[str, Any],
    wants_all: bool,
    said: list[list[bytes]],
    data: st.DataObject,
) -> None:
    frames = [each for answer in said for each in answer]
    slow, fast = (busy(sizes, share, settings, wants_all=wants_all) for _ in range(2))
    slow_tap, fast_tap = Tap(), Tap()
    slow_tap.attach(CHANNEL, slow, 0.0)
    fast_tap.attach(CHANNEL, fast, 0.0)
    slow_passed = b"".join(slow_tap.received(each, 1.0) for each in frames)
    stream = b"".join(frames)
    fast_passed = b""
    while stream:
        cut = data.draw(st.sampled_from([1, 20, 21, 64, 100, 1000]))
        fast_passed += fast_tap.received(stream[:cut], 1.0)
        stream = stream[cut:]
    assert fast_passed == slow_passed
    assert warnings(fast) == warnings(slow)
    assert state(fast) == state(slow)
    check_order(fast)
    assert [r.outcome for r in fast.unsettled_receipts] == [None] * fast.unsettled
