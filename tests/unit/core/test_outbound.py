"""The queue of frames: what has begun, what is finished, and where an answer goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qflow_client.amqp.outbound import Outbound


def test_an_empty_queue_has_nothing_to_write() -> None:
    outbound = Outbound()
    assert outbound.data(100) == b""
    assert not outbound.mid_frame
    assert outbound.unfinished == b""
    outbound.stopped = True
    assert outbound.data(100) == b""


def test_all_at_once() -> None:
    outbound = Outbound()
    outbound.put(b"one")
    outbound.put(b"two")
    assert outbound.data(100) == b"onetwo"
    outbound.advance(6)
    assert (outbound.begun, outbound.finished, outbound.size) == (2, 2, 0)


def test_a_piece_is_not_cut_by_the_limit() -> None:
    outbound = Outbound()
    for piece in (b"one", b"two", b"three"):
        outbound.put(piece)
    assert outbound.data(1) == b"one"
    assert outbound.data(3) == b"one"
    assert outbound.data(4) == b"onetwo"
    outbound.advance(1)
    assert outbound.data(3) == b"ne"
    assert outbound.data(100) == b"netwothree"


def test_messages_begin_with_their_first_byte_and_finish_with_their_last() -> None:
    outbound = Outbound()
    outbound.put_frames([b"ab", b"cd"])
    outbound.put(b"ef")
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


def test_taking_no_bytes_changes_nothing() -> None:
    outbound = Outbound()
    outbound.put(b"ab")
    outbound.advance(0)
    assert (outbound.begun, outbound.size, outbound.mid_frame) == (0, 2, False)


def test_an_answer_goes_before_what_has_not_begun_and_after_earlier_answers() -> None:
    outbound = Outbound()
    outbound.put(b"one")
    outbound.put_control(b"A")
    outbound.put_control(b"B")
    assert outbound.data(100) == b"ABone"
    outbound.advance(2)
    assert (outbound.begun, outbound.finished) == (0, 0)


def test_an_answer_goes_behind_all_frames_of_what_has_begun() -> None:
    outbound = Outbound()
    outbound.put_frames([b"ab", b"cd", b"ef"])
    outbound.put(b"gh")
    outbound.advance(2)
    outbound.put_control(b"A")
    outbound.stopped = True
    assert outbound.data(1) == b"cdefA", "the limit does not matter to the little that may leave"
    outbound.advance(5)
    assert outbound.data(100) == b""
    assert (outbound.begun, outbound.finished, outbound.size) == (1, 1, 2)
    outbound.stopped = False
    assert outbound.data(100) == b"gh"


def state(outbound: Outbound) -> tuple[object, ...]:
    pieces = [(type(piece).__name__, piece) for piece in outbound._pieces]
    return pieces, outbound._offset, outbound._special, outbound.size, outbound.begun, outbound.finished


@given(
    st.lists(st.lists(st.binary(min_size=2, max_size=5), min_size=1, max_size=3), max_size=5),
    st.lists(st.binary(min_size=2, max_size=5), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_what_was_put_last_can_be_dropped_however_far_that_got(
    messages: list[list[bytes]], last: list[bytes], control: bool, data: st.DataObject
) -> None:
    outbounds = Outbound(), Outbound()
    written = data.draw(st.integers(0, sum(len(frame) for frames in messages for frame in frames)))
    for outbound in outbounds:
        for frames in messages:
            outbound.put_frames(frames)
        outbound.advance(written)
        if control:
            outbound.put_control(b"control")
    kept, dropped = outbounds
    dropped.put_frames(last)
    # Interrupted: not all is put, or not all is counted.
    for _ in range(data.draw(st.integers(0, len(last) - 1))):
        dropped._pieces.pop()
    dropped.size -= data.draw(st.integers(0, 1))
    dropped._special -= data.draw(st.integers(0, 1))
    dropped.drop_after(len(messages))
    assert state(dropped) == state(kept)


@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=4), max_size=8),
    st.data(),
)
def test_however_it_is_written_every_byte_leaves_once_and_in_order(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    outbound = Outbound()
    for frames in messages:
        outbound.put_frames(frames)
    whole = [b"".join(frames) for frames in messages]
    written = b""
    while outbound.size:
        offered = outbound.data(data.draw(st.integers(1, 30)))
        assert offered
        count = data.draw(st.integers(0, len(offered)), label="count") or len(offered)
        outbound.advance(count)
        written += offered[:count]
        ends = [sum(map(len, whole[: number + 1])) for number in range(len(whole))]
        assert outbound.finished == sum(end <= len(written) for end in ends)
        assert outbound.begun == sum(end - len(each) < len(written) for end, each in zip(ends, whole, strict=True))
        assert outbound.size == len(b"".join(whole)) - len(written)
    assert written == b"".join(whole)


def test_a_stop_tells_whether_a_message_has_begun_and_not_ended() -> None:
    outbound = Outbound()
    assert outbound.stop()
    outbound.put_frames([b"ab", b"cd"])
    outbound.put(b"ef")
    assert outbound.stop()
    outbound.stopped = False
    outbound.advance(1)
    seen = []
    for _ in range(4):
        seen.append(outbound.stop())
        outbound.advance(len(outbound.data(1)) and 1)
    assert seen == [False, False, False, True]
    assert outbound.data(100) == b""


@pytest.mark.parametrize("taken", range(13))
def test_a_part_of_what_was_asked_for_may_be_taken_and_more_may_be_put_meanwhile(taken: int) -> None:
    outbound = Outbound()
    for piece in (b"abc", b"def", b"ghi", b"jkl"):
        outbound.put(piece)
    assert outbound.data(5) == b"abcdef"
    outbound.put(b"mno")
    assert outbound.data(8) == b"abcdefghi"
    outbound.advance(taken)
    whole = taken // 3
    assert (outbound.finished, outbound.begun) == (whole, whole + bool(taken % 3))
    assert outbound.size == 15 - taken
    assert outbound.data(100) == b"abcdefghijklmno"[taken:]
    # What was offered before is of no account any more.
    if outbound.size >= 9:
        outbound.advance(9)
        assert outbound.data(100) == b"abcdefghijklmno"[taken + 9 :]
        assert outbound.finished == (taken + 9) // 3


def test_messages_of_several_frames_are_counted_once_however_they_are_offered() -> None:
    outbound = Outbound()
    for _ in range(3):
        outbound.put_frames([b"ab", b"cd"])
    assert outbound.data(6) == b"abcdab"
    outbound.advance(6)
    assert (outbound.begun, outbound.finished) == (2, 1)


@given(
    messages=st.lists(st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=3), max_size=6),
    written=st.integers(min_value=0, max_value=40),
    number=st.integers(min_value=0, max_value=7),
)
def test_a_message_is_taken_out_whole_unless_it_has_begun(
    messages: list[list[bytes]], written: int, number: int
) -> None:
    outbound = Outbound()
    for frames in messages:
        outbound.put_frames(frames)
    written = min(written, outbound.size)
    whole = b"".join(map(b"".join, messages))
    outbound.advance(written)
    begun = outbound.begun
    if outbound.withdraw(number):
        assert begun < number <= len(messages)
        del messages[number - 1]
    else:
        assert number <= begun or number > len(messages)
    left = b"".join(map(b"".join, messages))[written:]
    assert whole.startswith(b"".join(map(b"".join, messages))[:written])
    assert (outbound.data(1 << 20), outbound.size, outbound.begun) == (left, len(left), begun)
    outbound.advance(len(left))
    assert outbound.finished == outbound.begun == len(messages)
