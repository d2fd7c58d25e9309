"""Batches of messages: begun and finished messages, messages that are taken back, and the place of an answer."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.amqp.outbound import Outbound

# Messages of one frame or several.
MESSAGES = st.lists(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=8)


def put(outbound: Outbound, messages: list[list[bytes]], limit: int = 1 << 20) -> None:
    """Put a batch. If its last message is larger than the limit, put only a part of it."""
    *whole, last = messages
    first, *rest = last
    parts = [*(frame for frames in whole for frame in frames), first]
    while rest and sum(map(len, parts)) < limit:
        parts.append(rest.pop(0))
    sizes = [len(b"".join(frames)) for frames in (whole if rest else messages)]
    outbound.put(parts, [*accumulate(sizes)], [*accumulate(map(len, parts))], rest)


def batch(*messages: list[bytes]) -> Outbound:
    outbound = Outbound()
    put(outbound, list(messages))
    return outbound


def test_an_output_buffer_without_messages_has_no_bytes_to_write() -> None:
    outbound = Outbound()
    assert outbound.data(100) == outbound.unfinished == b""
    assert outbound.is_empty
    assert not outbound.mid_frame
    assert outbound.stop()


def test_all_bytes_of_the_output_buffer_can_be_taken_by_one_write() -> None:
    outbound = batch([b"one"], [b"two"])
    assert outbound.data(1) == b"onetwo", "a batch is not cut"
    outbound.advance(6)
    assert (outbound.begun, outbound.finished, outbound.size) == (2, 2, 0)
    assert outbound.is_empty


def test_partial_writes_of_a_large_message_do_not_copy_its_rest() -> None:
    outbound = batch([b"a large message"])
    whole = outbound.data(1)
    outbound.advance(2)
    for rest in (outbound.data(1), outbound.unfinished):
        assert rest == b"large message"
        assert memoryview(rest).obj is whole


def test_a_message_counts_as_begun_with_its_first_written_byte_and_as_finished_with_its_last() -> None:
    outbound = batch([b"ab", b"cd"], [b"ef"])
    seen = []
    for _ in range(6):
        outbound.advance(1)
        seen.append((outbound.begun, outbound.finished, outbound.mid_frame, outbound.unfinished))
    assert seen == [
        (1, 0, True, b"b"),
        (1, 0, False, b""),
        (1, 0, True, b"d"),
        (1, 1, False, b""),
        (2, 1, True, b"f"),
        (2, 2, False, b""),
    ]


def test_a_write_of_0_bytes_does_not_change_the_output_buffer() -> None:
    outbound = batch([b"ab"])
    outbound.advance(0)
    assert (outbound.begun, outbound.size, outbound.mid_frame) == (0, 2, False)


def test_flow_ok_frames_are_written_in_order_after_the_batch_of_messages_that_was_begun() -> None:
    outbound = batch([b"one"])
    outbound.put_control(b"A")
    outbound.put_control(b"B")
    assert outbound.data(100) == b"one"
    outbound.advance(3)
    assert outbound.data(100) == b"AB"
    outbound.advance(1)
    assert outbound.mid_frame
    assert outbound.unfinished == b"B"
    outbound.advance(1)
    assert (outbound.begun, outbound.finished, outbound.size) == (1, 1, 0)


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_a_flow_ok_frame_is_written_after_half_written_messages_and_before_all_other_messages(limit: int) -> None:
    outbound = Outbound()
    put(outbound, [[b"ab", b"cd", b"ef"]], limit)
    outbound.advance(2)
    outbound.put_control(b"A")
    outbound.discard_unbegun()
    written = b""
    while data := outbound.data(limit):
        written += data
        outbound.advance(len(data))
    assert written == b"cdefA"
    assert (outbound.begun, outbound.finished) == (1, 1)
    outbound = batch([b"ab"], [b"cd"])
    outbound.put_control(b"A")
    outbound.discard_unbegun()
    assert outbound.data(limit) == b"A"
    outbound.advance(1)
    assert (outbound.begun, outbound.finished) == (0, 0)


@given(batches=st.lists(MESSAGES, max_size=3), limit=st.integers(1, 12), data=st.data())
def test_every_byte_of_output_is_written_once_and_in_order_for_every_split_of_the_writes(
    batches: list[list[list[bytes]]], limit: int, data: st.DataObject
) -> None:
    outbound = Outbound()
    written, ends, done = b"", [0], 0
    for messages in batches:
        put(outbound, messages, limit)
        ends += [ends[-1] + end for end in accumulate(len(b"".join(frames)) for frames in messages)]
        left = outbound.size
        while left:
            offered = outbound.data(limit)
            assert offered
            count = data.draw(st.integers(0, len(offered)), label="count") or len(offered)
            outbound.advance(count)
            written += offered[:count]
            left -= count
            assert outbound.size == left
            assert outbound.finished == sum(end <= len(written) for end in ends[1:])
            assert outbound.begun == sum(end < len(written) for end in ends[:-1])
            assert outbound.unfinished == (outbound.data(limit)[: len(outbound.unfinished)] if left else b"")
        done += len(messages)
        assert outbound.finished == outbound.begun == done
    assert written == b"".join(frame for messages in batches for frames in messages for frame in frames)


@given(messages=MESSAGES, limit=st.integers(1, 12), written=st.integers(0, 60))
def test_stopping_the_output_buffer_discards_unwritten_messages_and_completes_the_half_written_message(
    messages: list[list[bytes]], limit: int, written: int
) -> None:
    outbound = Outbound()
    put(outbound, messages, limit)
    sent = b""
    while len(sent) < written and (data := outbound.data(limit)):
        data = data[: written - len(sent)]
        outbound.advance(len(data))
        sent += data
    begun = outbound.begun
    assert outbound.given == len(messages)
    outbound.discard_unbegun()
    assert outbound.given == begun
    while data := outbound.data(limit):
        outbound.advance(len(data))
        sent += data
    assert sent == b"".join(map(b"".join, messages[:begun]))
    assert outbound.finished == outbound.begun == begun
    assert outbound.is_empty


def test_stopping_the_output_buffer_returns_whether_a_message_is_half_written() -> None:
    outbound = batch([b"ab", b"cd"], [b"ef"])
    assert outbound.stop()
    seen = []
    for _ in range(4):
        outbound.advance(1)
        outbound.discard_unbegun()
        seen.append(outbound.stop())
    assert seen == [False, False, False, True]
    assert outbound.data(100) == b""
