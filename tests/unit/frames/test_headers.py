"""Headers, as a field table."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest

from qflow_client.message import Message

from .support import encode, read_with_pamqp


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
