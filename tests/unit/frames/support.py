"""Reads frames and messages with two other decoders, pamqp and pika, and generates messages for property tests."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pamqp.body
import pamqp.commands
import pamqp.decode
import pamqp.frame
import pamqp.header
import pika
import pika.frame
import pika.spec
from hypothesis import strategies as st

from qflow_client.amqp.frames import (
    FRAME_OVERHEAD,
    HEADER_FRAME,
    LAST_DIGITS,
    FrameError,
    FrameSplitter,
    PublishEncoder,
    Route,
)
from qflow_client.message import Message
from tests.unit.messages import PROPERTIES

Whole = tuple[int, int, bytes]


def split(chunks: list[bytes], frame_max: int = 0) -> tuple[list[Whole], str | None]:
    """Return the frames of a stream before its first error, and the error. Return None if there is no error."""
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


class Sent:
    """A published message as another library reads it."""

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

    def take_publish(self, publish: pamqp.commands.Basic.Publish | pika.spec.Basic.Publish) -> None:
        self.exchange, self.routing_key = publish.exchange, publish.routing_key
        self.mandatory, self.immediate = publish.mandatory, publish.immediate

    def take_property(self, name: str, value: Any) -> None:
        # pamqp's default for `cluster_id` is the empty string.
        if value is not None and not (name == "cluster_id" and value == ""):
            self.properties[name] = value


def read_with_pamqp(data: bytes) -> Sent:
    sent, at = Sent(), 0
    while at < len(data):
        count, channel, decoded = pamqp.frame.unmarshal(data[at:])
        at += count
        sent.channels.add(channel)
        if isinstance(decoded, pamqp.commands.Basic.Publish):
            sent.take_publish(decoded)
        elif isinstance(decoded, pamqp.header.ContentHeader):
            sent.body_size = decoded.body_size
            for name in PROPERTIES:
                sent.take_property(name, getattr(decoded.properties, "message_type" if name == "type" else name))
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
            assert isinstance(decoded.method, pika.spec.Basic.Publish)
            sent.take_publish(decoded.method)
        elif isinstance(decoded, pika.frame.Header):
            sent.body_size = decoded.body_size
            for name in PROPERTIES:
                sent.take_property(name, getattr(decoded.properties, name))
        else:
            assert isinstance(decoded, pika.frame.Body)
            sent.chunks.append(decoded.fragment)
    return sent


def asked(message: Message) -> dict[str, Any]:
    """Return the properties that a message has."""
    values = {name: getattr(message, name) for name in PROPERTIES if getattr(message, name) is not None}
    if values.get("cluster_id") == "":
        del values["cluster_id"]
    return values


SHORT = st.text(st.characters(codec="utf-8"), max_size=60)
KEYS = st.text(st.characters(codec="utf-8"), max_size=30)
HEADER_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.decimals(-1_000_000, 1_000_000, places=3)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.binary(max_size=20)
    # pamqp interprets a larger number as milliseconds.
    | st.integers(0, (1 << 32) - 1).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
HEADERS = st.dictionaries(KEYS, HEADER_VALUES, max_size=4)


# Faults of the oldest supported releases.
OLD_PIKA = pika.__version__.startswith("1.3.")
OLD_PAMQP = pamqp.decode.decimal(b"\0\xff\xff\xff\xff")[1] != -1


def as_pika_reads(value: Any) -> Any:
    """Return a value as pika reads it. pika reads every float as an int."""
    if isinstance(value, dict):
        return {key: as_pika_reads(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(as_pika_reads, value))
    if OLD_PIKA and isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if OLD_PIKA and isinstance(value, int) and value < -(1 << 31):
        return value + (1 << 64)
    return int(value) if isinstance(value, float) else value


def as_pamqp_reads(value: Any) -> Any:
    """Return a value as pamqp reads it."""
    if isinstance(value, dict):
        return {key: as_pamqp_reads(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(as_pamqp_reads, value))
    if OLD_PAMQP and isinstance(value, Decimal) and value < 0:
        return value + Decimal(1 << 32).scaleb(int(value.as_tuple().exponent))
    return value


MESSAGES = st.builds(
    Message,
    st.binary(max_size=100),
    content_type=st.none() | SHORT,
    content_encoding=st.none() | SHORT,
    headers=st.none() | HEADERS,
    delivery_mode=st.sampled_from([None, 1, 2]),
    priority=st.none() | st.integers(0, 255),
    correlation_id=st.none() | SHORT,
    reply_to=st.none() | SHORT,
    expiration=st.none() | st.integers(0, 1 << 32).map(str),
    message_id=st.none() | SHORT,
    timestamp=st.none() | st.integers(0, (1 << 32) - 1),
    type=st.none() | SHORT,
    user_id=st.none() | SHORT,
    app_id=st.none() | SHORT,
    cluster_id=st.none() | SHORT,
)


ALL_PROPERTIES = Message(b"body", **PROPERTIES)


def pieces_of(encoder: PublishEncoder, route: Route, message: Message, number: int | None) -> list[bytes]:
    """Return the frames of a message. Without a number the message gets no id."""
    prepared = encoder.prepare(message, has_id=number is not None)
    pieces = encoder.frames(route, message.body, prepared, number or 0)
    assert sum(map(len, pieces)) == encoder.cost(route, len(message.body), prepared)
    return pieces


def plain(encoder: PublishEncoder, route: Route, body: bytes, number: int) -> bytes:
    """Return the frames of a persistent message with an id and no other property."""
    head, middle, tail = encoder.plain(len(body), number)
    data = b"".join((route.method, head, middle, LAST_DIGITS[number & 255], tail, body, b"\xce"))
    assert len(data) == (route.cost + len(body) if body else route.cost - FRAME_OVERHEAD)
    return data


def encode(message: Message, number: int | None = None, *, id_prefix: str = "", frame_max: int = 0) -> bytes:
    encoder = PublishEncoder(1, frame_max, id_prefix=id_prefix)
    return b"".join(pieces_of(encoder, encoder.route("", "q"), message, number))


def content_header(data: bytes) -> bytes:
    (header,) = (payload for kind, _, payload in split([data])[0] if kind == HEADER_FRAME)
    return header
