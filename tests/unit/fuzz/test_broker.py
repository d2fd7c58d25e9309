"""A connection of the broker with a client that sends any bytes: no exception, and no memory beyond the limits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qflow_client.broker.core.session import State
from tests.effort import rounds

from .server import CORPUS, SETTINGS, STEP, Server, run
from .strategies import cut, mutated

said = st.sampled_from(CORPUS).map(Path.read_bytes)


@settings(max_examples=rounds(300))
@given(cut(mutated(said)))
def test_the_broker_ends_a_connection_cleanly_whatever_bytes_the_client_sends(pieces: list[bytes]) -> None:
    run(pieces)


@settings(max_examples=rounds(100))
@given(cut(st.binary(max_size=200).map(lambda data: b"AMQP\0\0\x09\x01" + data)))
def test_the_broker_ends_a_connection_cleanly_if_random_bytes_follow_the_protocol_header(pieces: list[bytes]) -> None:
    run(pieces)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_broker_understands_recorded_client_sessions_for_every_split(path: Path) -> None:
    data = path.read_bytes()
    whole = run([data])
    published = whole.session.channels.published
    assert published > 0
    for size in (1, 7, 100):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        server = Server()
        # No time passes, because the splitting must not make the client slow.
        for piece in pieces:
            server.session.receive_data(piece, 0.0)
            server.check(server.session.take_output(0.0))
            server.session.output.taken()
        assert server.session.channels.published == published
        server.end()


def test_a_client_that_does_not_complete_the_handshake_is_disconnected_in_time() -> None:
    data = CORPUS[0].read_bytes()
    server = Server()
    for at in itertools.count():
        server.feed(data[at : at + 1])
        if server.session.state is State.ENDED:
            break
    assert server.now == pytest.approx(SETTINGS.unauthenticated_timeout, abs=2 * STEP)
    server.end()
