"""A message's header frame has the same bytes as with pamqp's encoder."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pamqp.frame
import pytest
from aio_pika import DeliveryMode, Message
from aiormq import spec
from hypothesis import given
from hypothesis import strategies as st
from pamqp.header import ContentHeader

from qflow_client.aio_pika.encoding import header_frame, make_message_id

TEXTS = st.text(max_size=300)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.just(Decimal("1.5")),
    st.floats(),
    TEXTS,
    st.binary(max_size=9),
    st.builds(bytearray, st.binary(max_size=9)),
    st.just(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    st.builds(object),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "shortstr": st.one_of(TEXTS, st.none(), st.integers(0, 9)),
    "octet": st.one_of(st.integers(-1, 256), st.sampled_from([None, *DeliveryMode])),
    "table": st.one_of(st.none(), st.dictionaries(TEXTS, VALUES, max_size=4)),
    "timestamp": st.one_of(st.none(), st.integers(), st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1))),
}
NAMES = spec.Basic.Properties.__slots__
PROPERTIES = st.fixed_dictionaries({}, optional={name: KINDS[spec.Basic.Properties.amqp_type(name)] for name in NAMES})


def pamqp_frame(properties: Any, body_size: int, channel: int) -> bytes:
    return pamqp.frame.marshal(ContentHeader(properties=properties, body_size=body_size), channel)


def outcome(encode: Any, values: dict[str, Any]) -> Any:
    properties = spec.Basic.Properties()
    # pamqp checks values only in its constructor.
    for name, value in values.items():
        setattr(properties, name, value)
    try:
        return encode(properties, 100, 7)
    except Exception as error:
        return type(error), error.args


@given(PROPERTIES)
def test_our_encoder_and_pamqp_give_the_same_header_frame_or_the_same_error(values: dict[str, Any]) -> None:
    assert outcome(header_frame, values) == outcome(pamqp_frame, values)


def test_the_properties_of_a_message_of_aio_pika_are_encoded_without_pamqp(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = Message(b"abc", headers={"a": 1}, correlation_id="b", delivery_mode=2, expiration=3).properties
    expected = pamqp_frame(properties, 3, 1)
    monkeypatch.setattr(spec.Basic.Properties, "encode_property", None)
    assert header_frame(properties, 3, 1) == expected


def test_properties_of_a_custom_class_of_the_application_are_encoded_by_pamqp() -> None:
    class Properties(spec.Basic.Properties):
        def marshal(self) -> bytes:
            return b"own"

    assert b"own" in header_frame(Properties(), 3, 1)


def test_a_generated_message_id_is_a_random_uuid() -> None:
    ids = {make_message_id() for _ in range(100)}
    assert len(ids) == 100
    for each in ids:
        found = UUID(hex=each)
        assert (found.hex, found.version, found.variant) == (each, 4, UUID(int=0, version=4).variant)
