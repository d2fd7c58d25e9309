"""A message's properties have the same bytes as with py-amqp's encoder."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from amqp.basic_message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client.kombu.flow import encode_properties

TEXTS = st.text(max_size=300)
# Values that Celery sends, and others.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from([-(1 << 31), (1 << 31) - 1, -(1 << 31) + 1, float("nan"), Decimal("1.5"), Decimal("-0.07")]),
    st.floats(),
    TEXTS,
    st.binary(max_size=9),
    st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2100, 1, 1)),
    st.just(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    st.builds(object),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
SHORT = st.one_of(st.text(max_size=300), st.just(""), st.none(), st.binary(max_size=5), st.integers(0, 9))
OCTETS = st.one_of(st.integers(-1, 256), st.none(), st.booleans(), st.just(1.0))
KINDS: dict[str, st.SearchStrategy[Any]] = {"s": SHORT, "o": OCTETS, "F": st.dictionaries(TEXTS, VALUES, max_size=4)}
KINDS["L"] = st.one_of(st.integers(-1, 1 << 64), st.none(), st.datetimes())
PROPERTIES = st.fixed_dictionaries({}, optional={name: KINDS[kind] for name, kind in Message.PROPERTIES})


def outcome(encode: Any, properties: dict[str, Any]) -> Any:
    try:
        return encode(Message(b"", **properties))
    except Exception as error:
        return type(error), error.args


@given(PROPERTIES, st.randoms(use_true_random=False))
@example({"priority": -1}, Random(0))
def test_our_encoder_and_py_amqp_give_the_same_bytes_of_properties_or_the_same_error(
    properties: dict[str, Any], random: Any
) -> None:
    # In any order.
    items = list(properties.items())
    random.shuffle(items)
    given = dict(items)
    assert outcome(encode_properties, given) == outcome(Message._serialize_properties, given)


def test_properties_that_celery_sends_are_encoded_without_py_amqp(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"lang": "py", "retries": 0, "eta": None, "timelimit": [None, 1.5], "stamps": {}, "ignore_result": True}
    message = Message(b"", application_headers=headers, content_type="application/json", delivery_mode=2, priority=0)
    expected = message._serialize_properties()
    monkeypatch.setattr(Message, "_serialize_properties", None)
    assert encode_properties(message) == expected
