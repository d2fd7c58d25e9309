"""Frames that are made in one run are the same as frames that are made message by message."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qflow_client import Message, Receipt
from qflow_client.core.unconfirmed import Unconfirmed

from .support import MAX_BODY, make, send, wire

PLAIN = (b"x" * 10, "q")

#: Bodies and routing keys. Messages in a row are often alike.
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                PLAIN,
                (b"y" * 10, "q"),
                (b"y" * 11, "q"),
                (b"x" * 10, "other"),
                (b"z" * (MAX_BODY + 1), "q"),
                (Message(b"x" * 10, priority=3), "q"),
            ]
        ),
        st.integers(1, 5),
    ),
    max_size=12,
).map(lambda runs: [message for message, count in runs for _ in range(count)])


def batches(messages: list[tuple[bytes | Message, str]], withdrawn: set[int], limit: int) -> list[bytes]:
    """Return the bytes of each write. The messages at the places `withdrawn` are withdrawn before the first write."""
    protocol = make(capacity=10_000)
    receipts = [send(protocol, payload, key=key) for payload, key in messages]
    for at in withdrawn:
        assert protocol.withdraw(receipts[at], 0.0)
    found = []
    while data := protocol.data_to_write(limit):
        protocol.advance(len(data), 0.0)
        found.append(data)
    assert [receipt._tag for at, receipt in enumerate(receipts) if at not in withdrawn] == [
        *range(1, len(receipts) - len(withdrawn) + 1)
    ]
    return found


@given(MESSAGES, st.data(), st.integers(1, 3000))
@example([PLAIN] * 700, None, 1 << 20)
@example([PLAIN] * 700, None, 20_000)
@example([*[PLAIN] * 20, (b"x" * 10, "other"), *[PLAIN] * 20], None, 1 << 20)
@example([*[PLAIN] * 20, (b"x" * 11, "q"), *[PLAIN] * 20], None, 1 << 20)
def test_equal_messages_are_framed_like_different_messages(
    messages: list[tuple[bytes | Message, str]], data: st.DataObject | None, limit: int
) -> None:
    places = st.sets(st.sampled_from(range(len(messages)))) if messages else st.just(set[int]())
    withdrawn = set[int]() if data is None else data.draw(places)
    together = batches(messages, withdrawn, limit)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Unconfirmed, "_make_run", lambda *_arguments: False)
        assert together == batches(messages, withdrawn, limit)
    sent = [message for at, message in enumerate(messages) if at not in withdrawn]
    bodies = [payload if isinstance(payload, bytes) else payload.body for payload, _ in sent]
    assert [message.body for message in wire(b"".join(together)).messages] == bodies


def test_equal_messages_are_framed_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Unconfirmed, "_make_each")
    assert len(batches([PLAIN] * 700, set(), 1 << 20)) == 1


class Counted(deque[Receipt]):
    """Counts how often messages are read by their index."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize(
    "other", [(b"y" * 11, "q"), (b"y" * 3000, "q"), (b"x" * 10, "other")], ids=["length", "large", "key"]
)
def test_different_messages_are_read_only_once(other: tuple[bytes, str]) -> None:
    protocol = make(capacity=1000, max_unwritten_bytes=1 << 30)
    for number in range(1000):
        payload, key = other if number % 2 else PLAIN
        send(protocol, payload, key=key)
    unsent = protocol.admission.unsent = Counted(protocol.admission.unsent)
    batches = 0
    while data := protocol.data_to_write(1 << 16):
        protocol.advance(len(data), 0.0)
        batches += 1
    assert not unsent
    assert unsent.reads < 1000 + 10 * batches
