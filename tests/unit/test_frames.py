"""Frames as bytes: cut anywhere they are found again, and what is encoded says what was asked to two other decoders."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pamqp.base
import pamqp.body
import pamqp.commands
import pamqp.frame
import pamqp.header
import pamqp.heartbeat
import pika.frame
import pika.spec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client.frames import (
    BODY_FRAME,
    FRAME_OVERHEAD,
    HEADER_FRAME,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD_FRAME,
    FrameError,
    FrameSplitter,
    PublishEncoder,
    Route,
    decode_message,
    flow_ok,
    frame,
)
from qflow_client.message import Message

# Splitting.

Whole = tuple[int, int, bytes]


def feed(splitter: FrameSplitter, data: bytes) -> list[Whole]:
    """The frames that end in this data, as type, channel and payload."""
    found = []
    for kind, channel, start, stop in splitter.feed(data):
        assert splitter.data[start - 7 : stop + 1] == frame(kind, channel, splitter.data[start:stop])
        found.append((kind, channel, splitter.data[start:stop]))
    return found


def split(chunks: list[bytes], frame_max: int = 0) -> tuple[list[Whole], str | None]:
    """All frames of a stream up to its first error, and that error."""
    splitter = FrameSplitter(frame_max)
    found: list[Whole] = []
    fed = 0
    for chunk in chunks:
        fed += len(chunk)
        try:
            for kind, channel, start, stop in splitter.feed(chunk):
                found.append((kind, channel, splitter.data[start:stop]))
        except FrameError as error:
            return found, str(error)
        taken = sum(len(payload) + FRAME_OVERHEAD for _, _, payload in found)
        assert splitter.pending == fed - taken, "what is kept is what was fed and has not come out"
        assert len(splitter.data) <= fed
    return found, None


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:stop] for start, stop in itertools.pairwise(borders)]


FRAMES = st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(0, 65535), st.binary(max_size=40))
PLACES = st.lists(st.integers(0, 10_000), max_size=20)


@given(st.lists(FRAMES, max_size=8), PLACES)
def test_frames_are_found_however_the_stream_is_cut(frames: list[Whole], places: list[int]) -> None:
    stream = b"".join(frame(*each) for each in frames)
    assert split(cut(stream, places)) == (frames, None)


def test_frames_are_found_at_every_single_cut_and_byte_by_byte() -> None:
    frames = [(1, 1, b"\xce" * 9), (2, 65535, b""), (3, 0, b"\x01\x00\x01\x00\x00\x00\x00\xce"), (8, 0, b"")]
    stream = b"".join(frame(*each) for each in frames)
    for place in range(len(stream) + 1):
        assert split([stream[:place], stream[place:]]) == (frames, None)
    assert split([stream[at : at + 1] for at in range(len(stream))]) == (frames, None)


def test_a_frame_comes_out_with_its_last_byte_and_not_before() -> None:
    splitter, whole = FrameSplitter(), frame(METHOD_FRAME, 7, b"payload")
    assert feed(splitter, whole[:-1]) == []
    assert splitter.pending == len(whole) - 1
    assert feed(splitter, b"") == []
    assert feed(splitter, whole[-1:]) == [(METHOD_FRAME, 7, b"payload")]
    assert splitter.pending == 0


@pytest.mark.parametrize("kind", [0, 4, 5, 6, 7, 9, 65, 255])
def test_an_unknown_type_is_an_error_from_its_first_byte_on(kind: int) -> None:
    good = frame(BODY_FRAME, 1, b"good")
    bad = frame(kind, 1, b"bad")
    for size in range(1, len(bad) + 1):
        for before in (b"", good):
            splitter = FrameSplitter()
            with pytest.raises(FrameError, match=f"frame type {kind} is none of AMQP"):
                feed(splitter, before + bad[:size])


@pytest.mark.parametrize("kind", [METHOD_FRAME, HEADER_FRAME, BODY_FRAME, HEARTBEAT_FRAME])
def test_every_known_type_is_no_error_from_its_first_byte_on(kind: int) -> None:
    whole = frame(kind, 1, b"good")
    for size in range(len(whole)):
        splitter = FrameSplitter()
        assert feed(splitter, whole[:size]) == []
        assert feed(splitter, whole[size:]) == [(kind, 1, b"good")]


def test_an_end_that_is_not_where_the_size_says_is_an_error() -> None:
    good, bad = frame(METHOD_FRAME, 1, b"first"), frame(METHOD_FRAME, 1, b"second")[:-1] + b"\x00"
    found, error = split([good + bad])
    assert error == "a frame of type 1 ends with 0x00 instead of 0xce"
    assert found == [(METHOD_FRAME, 1, b"first")], "what came before the error was found"


def test_a_frame_of_exactly_frame_max_is_taken_and_one_byte_more_is_not() -> None:
    frame_max = 20
    largest = frame(BODY_FRAME, 1, b"x" * (frame_max - FRAME_OVERHEAD))
    assert len(largest) == frame_max
    assert len(feed(FrameSplitter(frame_max), largest)) == 1
    with pytest.raises(FrameError, match="a frame of 21 bytes is larger than frame-max 20"):
        feed(FrameSplitter(frame_max), frame(BODY_FRAME, 1, b"x" * (frame_max - FRAME_OVERHEAD + 1)))


def test_a_frame_that_is_too_large_is_an_error_before_its_payload_has_come() -> None:
    head = frame(BODY_FRAME, 1, b"x" * 1_000_000)[:8]
    with pytest.raises(FrameError, match="frame-max 4096"):
        feed(FrameSplitter(4096), head)
    splitter = FrameSplitter()
    assert feed(splitter, head) == []
    assert splitter.pending == 8, "without a frame-max it is waited for, and no memory is taken in advance"


def test_a_frame_max_can_be_set_when_it_is_negotiated() -> None:
    splitter = FrameSplitter()
    feed(splitter, frame(BODY_FRAME, 1, b"x" * 100))
    splitter.frame_max = 50
    with pytest.raises(FrameError):
        feed(splitter, frame(BODY_FRAME, 1, b"x" * 100))


@given(
    st.one_of(
        st.binary(max_size=200),
        # What begins well and goes wrong.
        st.builds(
            lambda frames, rest: b"".join(frame(*each) for each in frames) + rest,
            st.lists(FRAMES, max_size=4),
            st.binary(max_size=20),
        ),
        # Frames with a byte that is another.
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
def test_arbitrary_bytes_are_frames_or_a_frame_error_however_they_are_cut(
    stream: bytes, places: list[int], frame_max: int
) -> None:
    whole = split([stream], frame_max)
    assert split(cut(stream, places), frame_max) == whole
    assert split([stream[at : at + 1] for at in range(len(stream))], frame_max) == whole


# Two other decoders.


class Sent:
    """A published message as somebody else reads it."""

    def __init__(self) -> None:
        self.channels: set[int] = set()
        self.exchange = self.routing_key = ""
        self.mandatory = self.immediate = False
        self.body_size = -1
        self.properties: dict[str, Any] = {}
        self.chunks: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


PROPERTIES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)


def read_with_pamqp(data: bytes) -> Sent:
    sent, at = Sent(), 0
    while at < len(data):
        count, channel, decoded = pamqp.frame.unmarshal(data[at:])
        at += count
        sent.channels.add(channel)
        if isinstance(decoded, pamqp.commands.Basic.Publish):
            sent.exchange, sent.routing_key = decoded.exchange, decoded.routing_key
            sent.mandatory, sent.immediate = decoded.mandatory, decoded.immediate
        elif isinstance(decoded, pamqp.header.ContentHeader):
            sent.body_size = decoded.body_size
            for name in PROPERTIES:
                value = getattr(decoded.properties, "message_type" if name == "type" else name)
                # Its own default for this one is the empty string.
                if value is not None and not (name == "cluster_id" and value == ""):
                    sent.properties[name] = value
        else:
            assert isinstance(decoded, pamqp.body.ContentBody)
            sent.chunks.append(decoded.value)
    return sent


def read_with_pika(data: bytes) -> Sent:
    sent = Sent()
    while data:
        count, decoded = pika.frame.decode_frame(data)
        data = data[count:]
        assert isinstance(decoded, pika.frame.Frame)
        sent.channels.add(decoded.channel_number)
        if isinstance(decoded, pika.frame.Method):
            publish = decoded.method
            assert isinstance(publish, pika.spec.Basic.Publish)
            sent.exchange, sent.routing_key = publish.exchange, publish.routing_key
            sent.mandatory, sent.immediate = publish.mandatory, publish.immediate
        elif isinstance(decoded, pika.frame.Header):
            sent.body_size = decoded.body_size
            for name in PROPERTIES:
                value = getattr(decoded.properties, name)
                if value is not None and not (name == "cluster_id" and value == ""):
                    sent.properties[name] = value
        else:
            assert isinstance(decoded, pika.frame.Body)
            sent.chunks.append(decoded.fragment)
    return sent


def asked(message: Message) -> dict[str, Any]:
    """The properties that a message has."""
    values = {name: getattr(message, name) for name in PROPERTIES if getattr(message, name) is not None}
    if values.get("cluster_id") == "":
        del values["cluster_id"]
    return values


SHORT = st.text(st.characters(codec="utf-8"), max_size=60)
# Whole seconds; and 32-bit floats, because that is how pamqp encodes a float. pika's decoder makes an int of each, so
# there is nothing that no int can be.
HEADER_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.decimals(-1_000_000, 1_000_000, places=3)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.integers(0, 4_000_000_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=10), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.builds(
    Message,
    st.binary(max_size=100),
    content_type=st.none() | SHORT,
    content_encoding=st.none() | SHORT,
    headers=st.none() | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=30), HEADER_VALUES, max_size=4),
    delivery_mode=st.sampled_from([None, 1, 2]),
    priority=st.none() | st.integers(0, 255),
    correlation_id=st.none() | SHORT,
    reply_to=st.none() | SHORT,
    expiration=st.none() | st.integers(0, 1 << 32).map(str),
    message_id=st.none() | SHORT,
    # pamqp takes anything later for milliseconds.
    timestamp=st.none() | st.integers(0, (1 << 32) - 1),
    type=st.none() | SHORT,
    user_id=st.none() | SHORT,
    app_id=st.none() | SHORT,
    cluster_id=st.none() | SHORT,
)


def has_float(value: object) -> bool:
    """Whether there is a float anywhere in it; pika's decoder makes an int of every float."""
    if isinstance(value, dict):
        return any(map(has_float, value.values()))
    return any(map(has_float, value)) if isinstance(value, list) else isinstance(value, float)


@given(MESSAGES, SHORT, SHORT, st.booleans(), st.integers(1, 65535), st.integers(20, 120))
def test_two_other_decoders_read_what_was_asked(
    message: Message, exchange: str, routing_key: str, mandatory: bool, channel: int, frame_max: int
) -> None:
    # Properties need one frame; only the body is cut into small ones.
    encoder = PublishEncoder(channel, 0, mandatory=mandatory)
    encoder.max_body = max(frame_max - FRAME_OVERHEAD, len(encoder.message(encoder.route("", ""), message, None)[0]))
    route = encoder.route(exchange, routing_key)
    data = b"".join(encoder.message(route, message, None))
    for sent in (read_with_pamqp(data), read_with_pika(data)):
        assert (sent.exchange, sent.routing_key) == (exchange, routing_key)
        assert (sent.mandatory, sent.immediate) == (mandatory, False)
        assert sent.channels == {channel}
        assert sent.body_size == len(message.body)
        assert sent.body == message.body
    expected = asked(message)
    if has_float(expected.get("headers")):
        # pika is asked about all the rest.
        expected.pop("headers")
        properties = read_with_pika(data).properties
        properties.pop("headers")
        assert properties == expected
        expected["headers"] = message.headers
    else:
        assert read_with_pika(data).properties == expected
    if message.timestamp is not None:
        assert isinstance(message.timestamp, int)
        expected["timestamp"] = datetime.fromtimestamp(message.timestamp, UTC)
    assert read_with_pamqp(data).properties == expected


ALL_PROPERTIES = Message(
    b"body",
    content_type="application/json",
    content_encoding="gzip",
    headers={"k": 1, "nested": {"list": [1, "two", None, True]}},
    delivery_mode=1,
    priority=9,
    correlation_id="correlation",
    reply_to="reply",
    expiration="60000",
    message_id="id",
    timestamp=1_357_017_300,
    type="flight",
    user_id="guest",
    app_id="app",
    cluster_id="cluster",
)


def encode(message: Message, number: int | None = None, *, id_prefix: str = "", frame_max: int = 0) -> bytes:
    encoder = PublishEncoder(1, frame_max, id_prefix=id_prefix)
    return b"".join(encoder.message(encoder.route("", "q"), message, number))


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_alone_and_every_property_but_one(name: str) -> None:
    no_value: dict[str, Any] = {name: None}
    alone = replace(Message(b"", delivery_mode=None), **{name: getattr(ALL_PROPERTIES, name)})
    without = replace(ALL_PROPERTIES, **no_value)
    for message in (alone, without, ALL_PROPERTIES):
        assert read_with_pika(encode(message)).properties == asked(message)


def test_a_message_without_properties_has_none_on_the_wire() -> None:
    bare = Message(b"", delivery_mode=None)
    assert read_with_pika(encode(bare)).properties == {}
    assert read_with_pika(encode(replace(bare, headers={}))).properties == {"headers": {}}, "an empty table is one"


# Message ids.


def test_a_message_without_an_id_gets_the_prefix_and_the_number() -> None:
    sent = read_with_pika(encode(Message(b""), 0xABC, id_prefix="producer-"))
    assert sent.properties["message_id"] == "producer-000000000abc"


def test_a_message_with_an_id_of_its_own_keeps_it() -> None:
    sent = read_with_pika(encode(Message(b"", message_id="mine"), 5, id_prefix="producer-"))
    assert sent.properties["message_id"] == "mine"


def test_without_a_number_a_message_goes_out_without_an_id() -> None:
    assert "message_id" not in read_with_pika(encode(Message(b""), None, id_prefix="producer-")).properties


def test_a_prefix_may_have_as_many_bytes_as_leave_room_for_the_number() -> None:
    longest = "ü" * 121 + "x"
    message_id = longest + "f" * 12
    encoder = PublishEncoder(1, 0, id_prefix=longest)
    route = encoder.route("", "q")
    for data in (encoder.plain(route, b"", (1 << 48) - 1), *encoder.message(route, Message(b""), (1 << 48) - 1)):
        assert read_with_pika(data).properties["message_id"] == message_id
    with pytest.raises(ValueError, match="id_prefix has 244 bytes; a message id has room for 243"):
        PublishEncoder(1, 0, id_prefix="ü" * 122)


# The fast path.


@given(
    st.binary(max_size=300), st.integers(0, (1 << 48) - 1), SHORT, SHORT, st.text("abc-", max_size=20), st.booleans()
)
@example(b"", 0, "", "", "", False)
def test_plain_is_what_message_gives_for_the_same_content(
    body: bytes, number: int, exchange: str, routing_key: str, prefix: str, mandatory: bool
) -> None:
    encoder = PublishEncoder(7, 4096, id_prefix=prefix, mandatory=mandatory)
    route = encoder.route(exchange, routing_key)
    expected = encoder.message(route, Message(body), number)
    # The first call fills the cache, the second uses it.
    assert [encoder.plain(route, body, number)] == expected
    assert [encoder.plain(route, body, number)] == expected


def test_plain_messages_of_one_length_share_everything_but_number_and_body() -> None:
    encoder = PublishEncoder(1, 4096, id_prefix="p-")
    route = encoder.route("x", "k")
    for number, body in enumerate([b"one", b"two", b"four", b"six", b""]):
        sent = read_with_pamqp(encoder.plain(route, body, number))
        assert (sent.exchange, sent.routing_key, sent.body) == ("x", "k", body)
        assert sent.properties == {"delivery_mode": 2, "message_id": f"p-{number:012x}"}
    assert sorted(route.parts) == [0, 3, 4]


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
def test_a_body_is_cut_into_frames_of_at_most_frame_max(size: int, frames: list[int]) -> None:
    body = bytes(at % 251 for at in range(size))
    encoder = PublishEncoder(1, FRAME_MAX, id_prefix="p-")
    assert encoder.max_body == ROOM
    route = encoder.route("x", "k")
    pieces = encoder.message(route, Message(body), 1)
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
        assert [encoder.plain(route, body, 1)] == pieces


def test_with_no_frame_max_a_body_is_one_frame() -> None:
    assert [len(chunk) for chunk in read_with_pamqp(encode(Message(b"x" * 1_000_000))).chunks] == [1_000_000]


def test_properties_fill_a_frame_exactly_or_are_refused_with_the_way_out() -> None:
    def message(size: int) -> Message:
        # 12 bytes of class, weight and body size, 2 of flags, 4 and 8 of the table's head, its key and its value's.
        return Message(b"", delivery_mode=None, headers={"k": "x" * (size - 12 - 2 - 4 - 2 - 5)})

    pieces = [encode(message(ROOM), frame_max=FRAME_MAX)]
    ((_, _, _), (kind, _, header)), _ = split(pieces, FRAME_MAX)
    assert (kind, len(header)) == (HEADER_FRAME, ROOM)
    with pytest.raises(ValueError, match="need a frame of 4097 bytes, and the broker takes 4096; shorten its headers"):
        encode(message(ROOM + 1), frame_max=FRAME_MAX)


# Routes.


def test_a_route_is_made_once() -> None:
    encoder = PublishEncoder(1, 0)
    route = encoder.route("x", "k")
    assert encoder.route("x", "k") is route
    assert encoder.route("k", "x") is not route
    assert (route.exchange, route.routing_key) == ("x", "k")


def test_the_names_of_a_route_have_at_most_255_bytes() -> None:
    encoder = PublishEncoder(1, 0)
    sent = read_with_pika(encoder.plain(encoder.route("x" * 255, "k" * 255), b"", 1))
    assert (sent.exchange, sent.routing_key) == ("x" * 255, "k" * 255)
    for name, exchange, routing_key in (("exchange", "ü" * 128, ""), ("routing_key", "", "k" * 256)):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name} has 256 bytes; AMQP carries at most 255"):
                encoder.route(exchange, routing_key)


@pytest.mark.parametrize("names", [(None, "q"), ("x", b"q"), (5, "q")])
def test_the_names_of_a_route_are_text(names: Any) -> None:
    with pytest.raises(TypeError, match="must be a str, not"):
        PublishEncoder(1, 0).route(*names)


def test_ever_new_routing_keys_do_not_eat_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublishEncoder, "MAX_ROUTES", 3)
    encoder = PublishEncoder(1, 0)
    first = encoder.route("", "0")
    routes = [encoder.route("", str(number)) for number in range(3)]
    assert routes[0] is first
    assert encoder.route("", "3").routing_key == "3"
    assert encoder.route("", "0") is not first, "all were forgotten"
    assert read_with_pika(encoder.plain(first, b"old", 1)).routing_key == "0", "but one in use goes on"


def test_ever_new_body_lengths_do_not_eat_memory() -> None:
    encoder = PublishEncoder(1, 0)
    route = encoder.route("", "q")
    for size in range(2 * Route.MAX_PARTS + 1):
        assert read_with_pamqp(encoder.plain(route, b"x" * size, size)).body_size == size
        assert len(route.parts) <= Route.MAX_PARTS


# Timestamps.


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose local time is not UTC and has a summer."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


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
def test_a_timestamp_is_seconds_and_a_naive_datetime_is_local_time(timestamp: int | datetime, seconds: int) -> None:
    sent = read_with_pika(encode(Message(b"", timestamp=timestamp)))
    assert sent.properties["timestamp"] == seconds


# Headers.


def test_headers_can_be_any_mapping() -> None:
    sent = read_with_pamqp(encode(Message(b"", headers=MappingProxyType({"b": 2, "a": 1}))))
    assert sent.properties["headers"] == {"a": 1, "b": 2}


CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    "headers",
    [
        {"a": object()},
        {"a": b"bytes"},
        {"a": (1, 2)},
        {"a": 1 << 63},
        {"a": 1e300},
        {"a": Decimal("NaN")},
        {"a": Decimal("1e-300")},
        {"a": datetime(1960, 1, 1, tzinfo=UTC)},
        {"a": "\ud800"},
        {"\ud800": 1},
        {1: 2},
        {1: 2, "a": 3},
        {None: 1},
        {"a": [{"b": {"c": {1}}}]},
        CYCLE,
    ],
    ids=lambda headers: str(headers).encode("ascii", "backslashreplace").decode(),
)
def test_headers_that_cannot_be_encoded_are_a_value_error_whatever_is_wrong_with_them(headers: Any) -> None:
    with pytest.raises(ValueError, match="headers cannot be encoded as an AMQP field table"):
        encode(Message(b"", headers=headers))


# Decoding.


def content_header(data: bytes) -> bytes:
    (header,) = (payload for kind, _, payload in split([data])[0] if kind == HEADER_FRAME)
    return header


@given(MESSAGES)
def test_a_message_that_comes_back_is_the_one_that_went_out(message: Message) -> None:
    back = decode_message(content_header(encode(message)), message.body)
    if message.timestamp is not None:
        assert isinstance(message.timestamp, int)
        message = replace(message, timestamp=datetime.fromtimestamp(message.timestamp, UTC))
    assert back == replace(message, cluster_id=message.cluster_id or None)


GOOD = content_header(encode(ALL_PROPERTIES))


def test_a_header_that_ends_too_soon_is_a_frame_error() -> None:
    assert decode_message(GOOD, b"body") == replace(
        ALL_PROPERTIES, timestamp=datetime.fromtimestamp(1_357_017_300, UTC)
    )
    for size in range(14):
        with pytest.raises(FrameError, match="a content header that cannot be decoded"):
            decode_message(GOOD[:size], b"")


def test_a_header_with_what_no_message_can_have_is_a_frame_error() -> None:
    header = bytearray(content_header(encode(Message(b"", delivery_mode=2))))
    header[-1] = 3
    with pytest.raises(FrameError, match="delivery_mode must be from 1 to 2, not 3"):
        decode_message(bytes(header), b"")


def nested_header(depth: int) -> bytes:
    """A content header whose headers are tables in tables."""
    table = bytes(4)
    for _ in range(depth):
        table = (3 + len(table)).to_bytes(4, "big") + b"\x01kF" + table
    return (60).to_bytes(2, "big") + bytes(10) + (1 << 13).to_bytes(2, "big") + table


def test_a_header_nested_too_deep_is_a_frame_error() -> None:
    assert decode_message(nested_header(2), b"").headers == {"k": {"k": {}}}
    with pytest.raises(FrameError, match="recursion"):
        decode_message(nested_header(2000), b"")


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: GOOD[:14] + rest))
@example(GOOD)
def test_arbitrary_bytes_are_a_message_or_a_frame_error(header: bytes) -> None:
    try:
        assert decode_message(header, b"body").body == b"body"
    except FrameError:
        pass


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_header_with_two_bytes_that_are_others_is_a_message_or_a_frame_error(
    first: int, one: int, second: int, other: int
) -> None:
    header = bytearray(GOOD)
    header[first], header[second] = one, other
    try:
        decode_message(bytes(header), b"")
    except FrameError:
        pass


# The rest.


@pytest.mark.parametrize("active", [True, False])
def test_J7_flow_ok_says_what_flow_said(active: bool) -> None:
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


def test_a_heartbeat_is_one_to_everybody() -> None:
    count, channel, decoded = pamqp.frame.unmarshal(HEARTBEAT)
    assert (count, channel) == (len(HEARTBEAT), 0)
    assert isinstance(decoded, pamqp.heartbeat.Heartbeat)
    assert isinstance(pika.frame.decode_frame(HEARTBEAT)[1], pika.frame.Heartbeat)
    assert len(HEARTBEAT) == FRAME_OVERHEAD
