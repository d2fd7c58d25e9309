"""Finding frames in a stream of bytes that is cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client.amqp.frames import (
    BODY_FRAME,
    FRAME_OVERHEAD,
    METHOD_FRAME,
    FrameError,
    FrameSplitter,
    frame,
)

from .support import Whole, split


def feed(splitter: FrameSplitter, data: bytes) -> list[Whole]:
    """Return the frames that end in this data, as type, channel and payload."""
    found = []
    for kind, channel, start, stop in splitter.feed(data):
        assert splitter.data[start - 7 : stop + 1] == frame(kind, channel, splitter.data[start:stop])
        found.append((kind, channel, splitter.data[start:stop]))
    return found


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:stop] for start, stop in itertools.pairwise(borders)]


FRAMES = st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(0, 65535), st.binary(max_size=40))
PLACES = st.lists(st.integers(0, 10_000), max_size=20)


@given(st.lists(FRAMES, max_size=8), PLACES)
def test_the_splitter_finds_all_frames_however_the_stream_is_split(frames: list[Whole], places: list[int]) -> None:
    stream = b"".join(frame(*each) for each in frames)
    assert split(cut(stream, places)) == (frames, None)


def test_the_splitter_returns_a_frame_when_its_last_byte_arrives_and_not_earlier() -> None:
    splitter, whole = FrameSplitter(), frame(METHOD_FRAME, 7, b"payload")
    assert feed(splitter, whole[:-1]) == []
    assert splitter.pending == len(whole) - 1
    assert feed(splitter, b"") == []
    assert feed(splitter, whole[-1:]) == [(METHOD_FRAME, 7, b"payload")]
    assert splitter.pending == 0


@pytest.mark.parametrize("kind", [0, 4, 5, 6, 7, 9, 65, 255])
def test_an_unknown_frame_type_raises_an_error_as_soon_as_the_type_byte_arrives(kind: int) -> None:
    good = frame(BODY_FRAME, 1, b"good")
    bad = frame(kind, 1, b"bad")
    for size in range(1, len(bad) + 1):
        for before in (b"", good):
            splitter = FrameSplitter()
            with pytest.raises(FrameError, match=f"frame type {kind} does not exist in AMQP"):
                feed(splitter, before + bad[:size])


def test_a_frame_without_a_frame_end_byte_in_the_right_place_raises_an_error() -> None:
    good, bad = frame(METHOD_FRAME, 1, b"first"), frame(METHOD_FRAME, 1, b"second")[:-1] + b"\x00"
    found, error = split([good + bad])
    assert error == "a frame of type 1 ends with 0x00 instead of 0xce"
    assert found == [(METHOD_FRAME, 1, b"first")], "what came before the error was found"


def test_a_frame_of_exactly_frame_max_is_accepted_and_a_frame_of_one_byte_more_raises_an_error() -> None:
    frame_max = 20
    largest = frame(BODY_FRAME, 1, b"x" * (frame_max - FRAME_OVERHEAD))
    assert len(largest) == frame_max
    assert len(feed(FrameSplitter(frame_max), largest)) == 1
    with pytest.raises(FrameError, match="a frame of 21 bytes is larger than frame-max 20"):
        feed(FrameSplitter(frame_max), frame(BODY_FRAME, 1, b"x" * (frame_max - FRAME_OVERHEAD + 1)))


def test_a_frame_larger_than_frame_max_raises_an_error_before_its_payload_has_arrived() -> None:
    head = frame(BODY_FRAME, 1, b"x" * 1_000_000)[:8]
    with pytest.raises(FrameError, match="frame-max 4096"):
        feed(FrameSplitter(4096), head)
    splitter = FrameSplitter()
    assert feed(splitter, head) == []
    assert splitter.pending == 8, "without a frame-max it is waited for, and no memory is taken in advance"


@pytest.mark.timeout(30)
def test_the_time_for_a_huge_frame_in_many_small_reads_is_proportional_to_its_size() -> None:
    # If it were joined again at each read, two terabytes would be copied.
    huge = frame(BODY_FRAME, 1, bytes(16_000_000))
    *reads, last = (huge[at : at + 64] for at in range(0, len(huge), 64))
    splitter = FrameSplitter()
    for data in reads:
        assert feed(splitter, data) == []
    assert splitter.pending == len(huge) - len(last)
    assert len(feed(splitter, last)) == 1
    assert splitter.pending == 0


@given(
    st.one_of(
        st.binary(max_size=200),
        # Data with a valid beginning and an invalid rest.
        st.builds(
            lambda frames, rest: b"".join(frame(*each) for each in frames) + rest,
            st.lists(FRAMES, max_size=4),
            st.binary(max_size=20),
        ),
        # Frames with one changed byte.
        st.builds(
            lambda frames, at, byte: (
                (stream := b"".join(frame(*each) for each in frames))[: at % len(stream)]
                + bytes([byte])
                + stream[at % len(stream) + 1 :]
            ),
            st.lists(FRAMES, min_size=1, max_size=4),
            st.integers(0, 1000),
            st.integers(0, 255),
        ),
    ),
    PLACES,
    st.sampled_from([0, 16, 64]),
)
@example(b"AMQP\x00\x00\x09\x01", [4], 0)
def test_arbitrary_bytes_are_split_into_frames_or_raise_frame_error_for_every_split(
    stream: bytes, places: list[int], frame_max: int
) -> None:
    whole = split([stream], frame_max)
    assert split(cut(stream, places), frame_max) == whole
    assert split([stream[at : at + 1] for at in range(len(stream))], frame_max) == whole
