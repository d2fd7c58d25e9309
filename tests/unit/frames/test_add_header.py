"""Adding a header to a content header that is already encoded."""

from __future__ import annotations

import math
from dataclasses import replace
from struct import pack
from typing import Any

from hypothesis import example, given

from qflow_client.amqp.frames import add_header, content_header
from qflow_client.message import Message, decode_message

from .support import HEADER_VALUES, KEYS, MESSAGES


@given(MESSAGES, KEYS, HEADER_VALUES)
@example(Message(b"", "text/plain", "gzip", {"a": 1}, priority=3, cluster_id="c"), "a", True)
@example(Message(b"", "text/plain", headers={"a": 1}), "b", True)
@example(Message(b"", content_encoding="gzip"), "b", True)
def test_adding_a_header_to_encoded_properties_leaves_all_other_bytes_unchanged(
    message: Message, name: str, value: Any
) -> None:
    added = add_header(content_header(message), name, value)
    assert decode_message(added, message.body) == decode_message(
        content_header(replace(message, headers={**(message.headers or {}), name: value})), message.body
    )


def test_adding_a_header_keeps_the_encoding_of_existing_properties() -> None:
    # A short integer ("s"). This library reads the type but does not write it.
    table = b"\0\0\0\5\1as\0\7"
    header = content_header(Message(b"", delivery_mode=None))[:-2] + (1 << 13).to_bytes(2, "big") + table
    assert add_header(header, "b", True)[14:] == b"\0\0\0\x09\1as\0\7\1bt\1"


def test_headers_that_already_have_the_added_header_are_not_encoded_again() -> None:
    # This library reads NaN but does not write it.
    header = content_header(Message(b"", headers={"a": 1.5, "b": True})).replace(pack(">d", 1.5), pack(">d", math.nan))
    assert add_header(header, "b", True) is header
