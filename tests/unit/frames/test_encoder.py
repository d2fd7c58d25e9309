"""Two other decoders read the same values that were encoded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pamqp.commands
import pamqp.frame
import pamqp.heartbeat
import pika.frame
import pika.spec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client.amqp import frames
from qflow_client.amqp.frames import (
    BODY_FRAME,
    FRAME_OVERHEAD,
    HEADER_FRAME,
    HEARTBEAT,
    METHOD_FRAME,
    PublishEncoder,
    flow_ok,
)
from qflow_client.message import Message
from tests.unit.messages import PROPERTIES

from .support import (
    ALL_PROPERTIES,
    MESSAGES,
    SHORT,
    as_pamqp_reads,
    as_pika_reads,
    asked,
    encode,
    pieces_of,
    plain,
    read_with_pamqp,
    read_with_pika,
    split,
)


@given(MESSAGES, SHORT, SHORT, st.booleans(), st.integers(1, 65535), st.integers(20, 120))
def test_pika_and_pamqp_decode_our_frames_to_the_encoded_values(
    message: Message, exchange: str, routing_key: str, mandatory: bool, channel: int, frame_max: int
) -> None:
    # Properties need one frame. Only the body is divided into small frames.
    encoder = PublishEncoder(channel, 0, mandatory=mandatory)
    _, before, after, _ = encoder.prepare(message, has_id=False)
    encoder.max_body = max(frame_max - FRAME_OVERHEAD, 14 + len(before) + len(after))
    route = encoder.route(exchange, routing_key)
    data = b"".join(pieces_of(encoder, route, message, None))
    for sent in (read_with_pamqp(data), read_with_pika(data)):
        assert (sent.exchange, sent.routing_key) == (exchange, routing_key)
        assert (sent.mandatory, sent.immediate) == (mandatory, False)
        assert sent.channels == {channel}
        assert sent.body_size == len(message.body)
        assert sent.body == message.body
    expected = asked(message)
    assert read_with_pika(data).properties == as_pika_reads(expected)
    if message.timestamp is not None:
        assert isinstance(message.timestamp, int)
        expected["timestamp"] = datetime.fromtimestamp(message.timestamp, UTC)
    assert read_with_pamqp(data).properties == as_pamqp_reads(expected)


@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_alone_and_all_properties_except_one_are_encoded(name: str) -> None:
    no_value: dict[str, Any] = {name: None}
    alone = replace(Message(b"", delivery_mode=None), **{name: getattr(ALL_PROPERTIES, name)})
    without = replace(ALL_PROPERTIES, **no_value)
    for message in (alone, without, ALL_PROPERTIES):
        assert read_with_pika(encode(message)).properties == asked(message)


def test_the_header_frame_of_a_message_without_properties_has_no_properties() -> None:
    bare = Message(b"", delivery_mode=None)
    assert read_with_pika(encode(bare)).properties == {}
    assert read_with_pika(encode(replace(bare, headers={}))).properties == {"headers": {}}, "an empty table is one"


def test_only_amqp_properties_of_a_message_subclass_are_encoded_and_no_added_attributes() -> None:
    @dataclass(frozen=True)
    class Order(Message):
        customer: str = ""

    sent = read_with_pika(encode(Order(b"body", type="order", app_id="shop", customer="Ann"), 5, id_prefix="p-"))
    assert sent.properties == {"delivery_mode": 2, "message_id": "p-000000000005", "type": "order", "app_id": "shop"}


def test_the_attributes_of_a_message_are_in_the_order_of_the_properties_on_the_wire() -> None:
    assert list(ALL_PROPERTIES.__dict__) == ["body", *PROPERTIES]
    assert list(frames._PROPERTIES) == [field.name for field in fields(Message) if field.name != "body"]
    flags = [flag for flag, _, _ in frames._PROPERTIES.values()]
    assert flags == sorted(flags, reverse=True)


def test_an_error_about_headers_that_cannot_be_encoded_shows_the_keys() -> None:
    for headers, error in (({"a": [{1}]}, TypeError), ({"a": [1 << 63]}, ValueError)):
        with pytest.raises(error, match=r"headers\['a'\]\[0\] "):
            encode(Message(b"", headers=headers))


# Message ids.


def test_a_message_without_an_id_gets_a_message_id_made_of_a_prefix_and_a_number() -> None:
    sent = read_with_pika(encode(Message(b""), 0xABC, id_prefix="producer-"))
    assert sent.properties["message_id"] == "producer-000000000abc"


def test_a_message_with_an_id_from_the_application_keeps_that_id() -> None:
    sent = read_with_pika(encode(Message(b"", message_id="mine"), 5, id_prefix="producer-"))
    assert sent.properties["message_id"] == "mine"


def test_a_message_id_prefix_that_leaves_no_room_for_the_number_raises_an_error() -> None:
    longest = "ü" * 121 + "x"
    message_id = longest + "f" * 12
    encoder = PublishEncoder(1, 0, id_prefix=longest)
    route = encoder.route("", "q")
    for data in (plain(encoder, route, b"", (1 << 48) - 1), *pieces_of(encoder, route, Message(b""), (1 << 48) - 1)):
        assert read_with_pika(data).properties["message_id"] == message_id
    with pytest.raises(ValueError, match="id_prefix has 244 bytes; a message id has room for 243"):
        PublishEncoder(1, 0, id_prefix="ü" * 122)


# The fast path.


@given(
    st.binary(max_size=300), st.integers(0, (1 << 48) - 1), SHORT, SHORT, st.text("abc-", max_size=20), st.booleans()
)
@example(b"", 0, "", "", "", False)
def test_a_plain_body_is_encoded_to_the_same_frames_as_a_message_with_that_body(
    body: bytes, number: int, exchange: str, routing_key: str, prefix: str, mandatory: bool
) -> None:
    encoder = PublishEncoder(7, 4096, id_prefix=prefix, mandatory=mandatory)
    route = encoder.route(exchange, routing_key)
    expected = pieces_of(encoder, route, Message(body), number)
    # The first call fills the cache, the second uses it.
    assert [plain(encoder, route, body, number)] == expected
    assert [plain(encoder, route, body, number)] == expected


@given(st.lists(st.tuples(st.integers(0, 600) | st.integers(0, (1 << 48) - 1), st.booleans()), max_size=8))
@example([(255, True), (256, True), (255, False), (256, False), ((1 << 48) - 1, True), (0, False)])
def test_messages_encoded_with_numbers_in_any_order_have_those_numbers_in_their_ids(
    numbers: list[tuple[int, bool]],
) -> None:
    encoder = PublishEncoder(1, 4096, id_prefix="p-")
    route = encoder.route("x", "k")
    for number, is_plain in numbers:
        (data,) = (
            [plain(encoder, route, b"body", number)]
            if is_plain
            else pieces_of(encoder, route, Message(b"body"), number)
        )
        sent = read_with_pamqp(data)
        assert (sent.exchange, sent.routing_key, sent.body) == ("x", "k", b"body")
        assert sent.properties == {"delivery_mode": 2, "message_id": f"p-{number:012x}"}


def test_the_frames_of_plain_messages_of_equal_length_differ_only_in_route_number_and_body() -> None:
    encoder = PublishEncoder(1, 4096, id_prefix="p-")
    for number, (key, body) in enumerate([("k", b"one"), ("l", b"two"), ("k", b"four"), ("l", b"six"), ("k", b"")]):
        sent = read_with_pamqp(plain(encoder, encoder.route("x", key), body, number))
        assert (sent.exchange, sent.routing_key, sent.body) == ("x", key, body)
        assert sent.properties == {"delivery_mode": 2, "message_id": f"p-{number:012x}"}
    assert sorted(encoder._sizes) == [0, 3, 4]


# Bodies and frames.

FRAME_MAX = 4096
ROOM = FRAME_MAX - FRAME_OVERHEAD


@pytest.mark.parametrize(
    ("size", "frames"),
    [
        (0, []),
        (1, [1]),
        (ROOM - 1, [ROOM - 1]),
        (ROOM, [ROOM]),
        (ROOM + 1, [ROOM, 1]),
        (2 * ROOM - 1, [ROOM, ROOM - 1]),
        (2 * ROOM, [ROOM, ROOM]),
        (2 * ROOM + 1, [ROOM, ROOM, 1]),
    ],
)
def test_a_body_is_split_into_frames_of_at_most_frame_max(size: int, frames: list[int]) -> None:
    body = bytes(at % 251 for at in range(size))
    encoder = PublishEncoder(1, FRAME_MAX, id_prefix="p-")
    assert encoder.max_body == ROOM
    route = encoder.route("x", "k")
    pieces = pieces_of(encoder, route, Message(body), 1)
    for sent in (read_with_pamqp(b"".join(pieces)), read_with_pika(b"".join(pieces))):
        assert sent.body_size == size
        assert sent.body == body
        assert [len(chunk) for chunk in sent.chunks] == frames
    assert len(pieces) == max(1, len(frames)), "the first piece ends with the first body frame"
    found, error = split(pieces, FRAME_MAX)
    assert error is None
    assert [kind for kind, _, _ in found] == [METHOD_FRAME, HEADER_FRAME] + [BODY_FRAME] * len(frames)
    for more in pieces[1:]:
        assert [kind for kind, _, _ in split([more])[0]] == [BODY_FRAME], "each further piece is one body frame"
    if size <= encoder.max_body:
        assert [plain(encoder, route, body, 1)] == pieces


def test_a_body_is_encoded_in_one_frame_if_there_is_no_frame_max() -> None:
    assert [len(chunk) for chunk in read_with_pamqp(encode(Message(b"x" * 1_000_000))).chunks] == [1_000_000]


def test_properties_may_exactly_fill_a_frame_and_larger_properties_raise_an_error_with_advice() -> None:
    def message(size: int) -> Message:
        # 12 bytes of class, weight and body size, 2 of flags, 4 and 8 of the table's head, its key and its value's.
        return Message(b"", delivery_mode=None, headers={"k": "x" * (size - 12 - 2 - 4 - 2 - 5)})

    pieces = [encode(message(ROOM), frame_max=FRAME_MAX)]
    ((_, _, _), (kind, _, header)), _ = split(pieces, FRAME_MAX)
    assert (kind, len(header)) == (HEADER_FRAME, ROOM)
    with pytest.raises(
        ValueError, match="need a frame of 4097 bytes, and the broker accepts at most 4096 bytes; shorten its headers"
    ):
        encode(message(ROOM + 1), frame_max=FRAME_MAX)


# Routes.


def test_the_same_exchange_and_routing_key_are_encoded_only_once() -> None:
    encoder = PublishEncoder(1, 0)
    route = encoder.route("x", "k")
    assert encoder.route("x", "k") is route
    assert encoder.route("k", "x") is not route
    assert (route.exchange, route.routing_key) == ("x", "k")


def test_an_exchange_or_routing_key_longer_than_255_bytes_raises_an_error() -> None:
    encoder = PublishEncoder(1, 0)
    sent = read_with_pika(plain(encoder, encoder.route("x" * 255, "k" * 255), b"", 1))
    assert (sent.exchange, sent.routing_key) == ("x" * 255, "k" * 255)
    for name, exchange, routing_key in (("exchange", "ü" * 128, ""), ("routing_key", "", "k" * 256)):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name} has 256 bytes; AMQP carries at most 255"):
                encoder.route(exchange, routing_key)


@pytest.mark.parametrize("names", [(None, "q"), ("x", b"q"), (5, "q")])
def test_an_exchange_or_routing_key_that_is_not_text_raises_an_error(names: Any) -> None:
    with pytest.raises(TypeError, match="must be a str, not"):
        PublishEncoder(1, 0).route(*names)


def test_memory_does_not_grow_with_the_number_of_different_routing_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublishEncoder, "MAX_ROUTES", 3)
    encoder = PublishEncoder(1, 0)
    first = encoder.route("", "0")
    routes = [encoder.route("", str(number)) for number in range(3)]
    assert routes[0] is first
    assert encoder.route("", "3").routing_key == "3"
    assert encoder.route("", "0") is not first, "all were forgotten"
    assert read_with_pika(plain(encoder, first, b"old", 1)).routing_key == "0", "but one in use goes on"


def test_memory_does_not_grow_with_the_number_of_different_body_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublishEncoder, "MAX_SIZES", 3)
    encoder = PublishEncoder(1, 0)
    route = encoder.route("", "q")
    for size in range(7):
        assert read_with_pamqp(plain(encoder, route, b"x" * size, size)).body_size == size
        assert len(encoder._sizes) <= 3


# Timestamps.


@pytest.mark.usefixtures("new_york")
@pytest.mark.parametrize(
    ("timestamp", "seconds"),
    [
        (0, 0),
        ((1 << 63) - 1, (1 << 63) - 1),
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(2013, 1, 1, 5, 15, tzinfo=UTC), 1_357_017_300),
        (datetime(2013, 1, 1, 7, 15, 0, 999_999, tzinfo=timezone(timedelta(hours=2))), 1_357_017_300),
        (datetime(2013, 1, 1, 0, 15), 1_357_017_300),
        (datetime(2013, 7, 1, 0, 15), 1_372_652_100),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), 253_402_300_799),
    ],
)
def test_a_timestamp_is_encoded_in_seconds_and_a_naive_datetime_counts_as_local_time(
    timestamp: int | datetime, seconds: int
) -> None:
    sent = read_with_pika(encode(Message(b"", timestamp=timestamp)))
    assert sent.properties["timestamp"] == seconds


# Other frames.


@pytest.mark.parametrize("active", [True, False])
def test_J7_flow_ok_has_the_same_active_bit_as_the_flow_that_it_answers(active: bool) -> None:
    data = flow_ok(258, active)
    count, channel, decoded = pamqp.frame.unmarshal(data)
    assert (count, channel) == (len(data), 258)
    assert isinstance(decoded, pamqp.commands.Channel.FlowOk)
    assert decoded.active is active
    count, method = pika.frame.decode_frame(data)
    assert isinstance(method, pika.frame.Method)
    assert (count, method.channel_number) == (len(data), 258)
    assert isinstance(method.method, pika.spec.Channel.FlowOk)
    assert method.method.active is active


def test_pika_and_pamqp_decode_our_heartbeat_frame_as_a_heartbeat() -> None:
    count, channel, decoded = pamqp.frame.unmarshal(HEARTBEAT)
    assert (count, channel) == (len(HEARTBEAT), 0)
    assert isinstance(decoded, pamqp.heartbeat.Heartbeat)
    assert isinstance(pika.frame.decode_frame(HEARTBEAT)[1], pika.frame.Heartbeat)
    assert len(HEARTBEAT) == FRAME_OVERHEAD
