"""Decoding a content header to a message."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client.amqp import frames
from qflow_client.amqp.frames import FrameError, plain_content_header
from qflow_client.message import Message, decode_message

from .support import ALL_PROPERTIES, MESSAGES, content_header, encode


@given(MESSAGES)
def test_a_message_decoded_from_its_encoding_equals_the_original(message: Message) -> None:
    back = decode_message(content_header(encode(message)), message.body)
    if message.timestamp is not None:
        assert isinstance(message.timestamp, int)
        message = replace(message, timestamp=datetime.fromtimestamp(message.timestamp, UTC))
    assert back == message


@given(MESSAGES)
def test_the_content_header_encoded_for_storage_equals_the_content_header_on_the_wire(message: Message) -> None:
    assert frames.content_header(message) == content_header(encode(message))


def test_the_stored_content_header_of_a_plain_body_has_the_message_id_and_is_persistent() -> None:
    stored = plain_content_header(4, b"\3p-1")
    assert stored == frames.content_header(Message(b"body"), b"\3p-1")
    assert decode_message(stored, b"body") == Message(b"body", message_id="p-1", delivery_mode=2)


@pytest.mark.parametrize(
    ("seconds", "timestamp"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        ((1 << 32) - 1, datetime(2106, 2, 7, 6, 28, 15, tzinfo=UTC)),
        # pamqp would read this value as milliseconds.
        (1 << 32, datetime(2106, 2, 7, 6, 28, 16, tzinfo=UTC)),
        (253_402_300_799, datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        # Later than any datetime.
        (253_402_300_800, 253_402_300_800),
        ((1 << 63) - 1, (1 << 63) - 1),
    ],
)
def test_a_timestamp_decoded_from_its_encoding_equals_the_original(seconds: int, timestamp: datetime | int) -> None:
    header = content_header(encode(Message(b"", timestamp=seconds)))
    assert decode_message(header, b"").timestamp == timestamp
    if isinstance(timestamp, datetime):
        message = Message(b"", headers={"when": timestamp}, timestamp=timestamp)
        assert decode_message(content_header(encode(message)), b"") == message


GOOD = content_header(encode(ALL_PROPERTIES))


def test_decoding_a_truncated_content_header_raises_frame_error() -> None:
    assert decode_message(GOOD, b"body") == replace(
        ALL_PROPERTIES, timestamp=datetime.fromtimestamp(1_357_017_300, UTC)
    )
    for size in range(len(GOOD)):
        with pytest.raises(FrameError, match="the content header cannot be decoded"):
            decode_message(GOOD[:size], b"")


def test_a_content_header_with_extra_bytes_after_the_last_property_raises_frame_error() -> None:
    with pytest.raises(FrameError, match="2 bytes follow the last property"):
        decode_message(GOOD + b"\0\0", b"")


@pytest.mark.parametrize(
    ("at", "byte", "error"),
    [
        (1, 61, "class 61"),
        (13, 0x01, "0x..01 is not a content header of class basic"),
        (13, 0x02, "0x..02 is not a content"),
    ],
)
def test_a_content_header_of_another_class_or_with_undefined_properties_raises_frame_error(
    at: int, byte: int, error: str
) -> None:
    header = bytearray(GOOD)
    header[at] = byte
    with pytest.raises(FrameError, match=error):
        decode_message(bytes(header), b"")


def test_a_content_header_with_values_that_no_message_can_have_raises_frame_error() -> None:
    header = bytearray(content_header(encode(Message(b"", delivery_mode=2))))
    header[-1] = 3
    with pytest.raises(FrameError, match="delivery_mode must be from 1 to 2, not 3"):
        decode_message(bytes(header), b"")


def nested_header(depth: int) -> bytes:
    """Return a content header whose headers are nested tables."""
    table = bytes(4)
    for _ in range(depth):
        table = (3 + len(table)).to_bytes(4, "big") + b"\x01kF" + table
    return (60).to_bytes(2, "big") + bytes(10) + (1 << 13).to_bytes(2, "big") + table


def test_a_content_header_whose_headers_are_nested_too_deep_raises_frame_error() -> None:
    assert decode_message(nested_header(2), b"").headers == {"k": {"k": {}}}
    with pytest.raises(FrameError, match="tables and arrays are nested more than 100 deep"):
        decode_message(nested_header(2000), b"")


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: GOOD[:14] + rest))
@example(GOOD)
def test_arbitrary_bytes_as_content_header_decode_to_a_message_or_raise_frame_error(header: bytes) -> None:
    try:
        assert decode_message(header, b"body").body == b"body"
    except FrameError:
        pass


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_content_header_with_two_changed_bytes_decodes_to_a_message_or_raises_frame_error(
    first: int, one: int, second: int, other: int
) -> None:
    header = bytearray(GOOD)
    header[first], header[second] = one, other
    try:
        decode_message(bytes(header), b"")
    except FrameError:
        pass
