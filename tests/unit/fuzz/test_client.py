"""The core of the client with a broker that sends any bytes: at most one exception, and every message is settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pamqp import commands, header
from pamqp import frame as pamqp_frame
from pamqp.body import ContentBody
from pamqp.heartbeat import Heartbeat

from qflow_client.amqp.frames import ACK, NACK, frame
from tests.effort import EFFORT, rounds

from .client import CHANNEL, CORPUS, SENT, Client, run
from .strategies import cut, mutated

Basic, Channel, Connection = commands.Basic, commands.Channel, commands.Connection

# Frames that a broker may send.

# Methods that the tap reads.
OURS = [
    method.index
    for method in (
        Basic.Ack,
        Basic.Nack,
        Basic.Return,
        Channel.Flow,
        Channel.Close,
        Connection.Blocked,
        Connection.Start,
    )
]

tags = st.one_of(st.integers(0, SENT + 2), st.sampled_from([2**31, 2**63, 2**64 - 1]))
texts = st.text(max_size=20)
numbers = st.sampled_from([0, CHANNEL, CHANNEL, CHANNEL, 2, 65535])
message_ids = st.one_of(
    st.none(), st.sampled_from(["own", "p-000000000001", "p-00000000000f", "p-", "p-zzzzzzzzzzzz"]), texts
)


@st.composite
def returns(draw: st.DrawFn) -> bytes:
    body = draw(st.binary(max_size=30))
    properties = Basic.Properties(message_id=draw(message_ids), delivery_mode=2)
    number = draw(numbers)
    parts: list[Any] = [
        Basic.Return(312, draw(texts), draw(st.sampled_from(["", "e"])), draw(st.sampled_from(["q", "k"]))),
        header.ContentHeader(body_size=len(body) + draw(st.sampled_from([0, 0, 0, 1, 2**62])), properties=properties),
        ContentBody(body),
    ]
    return b"".join(pamqp_frame.marshal(part, number) for part in parts)


methods = st.one_of(
    st.builds(Channel.Flow, st.booleans()),
    st.builds(Channel.FlowOk, st.booleans()),
    st.builds(Channel.Close, st.sampled_from([200, 404, 406, 65535]), texts, st.sampled_from([0, 60]), st.just(40)),
    st.builds(Channel.CloseOk),
    st.builds(Channel.OpenOk),
    st.builds(Connection.Blocked, texts),
    st.builds(Connection.Unblocked),
    st.builds(Connection.Close, st.just(320), texts, st.just(0), st.just(0)),
    st.builds(Basic.Return, st.just(312), texts, st.just(""), st.just("q")),
    st.builds(Basic.Deliver, st.just("t"), st.integers(0, 9), st.booleans(), st.just(""), st.just("q")),
)
answers = st.builds(
    lambda number, method, tag, bits: frame(1, number, method + tag.to_bytes(8, "big") + bytes([bits])),
    numbers,
    st.sampled_from([ACK, ACK, NACK]),
    tags,
    st.integers(0, 3),
)
frames = st.one_of(
    answers,
    answers,
    st.builds(pamqp_frame.marshal, methods, numbers),
    returns(),
    st.just(pamqp_frame.marshal(Heartbeat(), 0)),
    # The index of a method, followed by any bytes.
    st.builds(
        lambda number, index, rest: frame(1, number, index.to_bytes(4, "big") + rest),
        numbers,
        st.one_of(st.sampled_from(OURS), st.sampled_from(sorted(commands.INDEX_MAPPING))),
        st.binary(max_size=40),
    ),
    st.builds(frame, st.sampled_from([1, 2, 3, 8]), numbers, st.binary(max_size=40)),
    st.binary(max_size=20),
)


said = st.one_of(st.lists(frames, max_size=12).map(b"".join), st.sampled_from(CORPUS).map(Path.read_bytes))


@settings(max_examples=rounds(400))
@given(cut(mutated(said)))
@example([b"\1\0\1\0\0\0\0\xce"])
@example([b"\1\0\1\0\0\0\4\0<\0P\xce"])
def test_a_client_ends_cleanly_whatever_bytes_the_broker_sends(pieces: list[bytes]) -> None:
    run(pieces)


@settings(max_examples=rounds(100))
@given(mutated(said), st.integers(0, 4000))
def test_the_client_gets_the_same_result_however_the_input_from_the_broker_is_split(data: bytes, at: int) -> None:
    # All messages are sent first, so that the state is the same when an answer arrives.
    outcomes = []
    for pieces in ([data], [data[:at], data[at:]], [data[each : each + 1] for each in range(len(data))]):
        client = Client()
        for _ in range(SENT):
            client.send()
        client.write()
        for piece in pieces:
            if not client.is_over:
                client.receive(piece)
        outcomes.append(
            ([receipt.outcome for receipt in client.receipts], client.is_over or client.tap.error is not None)
        )
        client.end()
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("index", OURS)
@pytest.mark.parametrize("number", [0, CHANNEL])
def test_a_truncated_method_from_the_broker_ends_the_client_cleanly(index: int, number: int) -> None:
    for filling in (b"\0", b"\x05", b"\xff"):
        for length in range(0, 40, 3 if EFFORT == "quick" else 1):
            run([frame(1, number, index.to_bytes(4, "big") + filling * length)])
    for length in range(4):
        run([frame(1, number, index.to_bytes(4, "big")[:length])])


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_client_understands_recorded_broker_sessions(path: Path) -> None:
    client = Client(capacity=500)
    for _ in range(300):
        client.send()
    client.write()
    client.receive(path.read_bytes())
    is_broken = client.is_over or client.tap.error is not None
    assert is_broken == path.stem.startswith("broken-")
    answered = sum(receipt.done for receipt in client.receipts)
    # The close of a connection goes to the library. After the close of a channel all messages are sent again.
    assert (answered > 0) == (not is_broken and not path.stem.endswith("-close"))
    client.end()


def test_the_corpus_of_recorded_broker_sessions_exists() -> None:
    assert len(CORPUS) > 3
