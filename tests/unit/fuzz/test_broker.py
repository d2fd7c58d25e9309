"""A connection of the broker with a client that sends any bytes: no exception, and no memory beyond the limits.

`corpus/from_clients` has recorded output of client libraries, from the protocol header on.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qflow_client.amqp.frames import FRAME_MIN_SIZE, FRAME_OVERHEAD, FrameSplitter
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.session import Session, State
from qflow_client.broker.core.snapshots import message_copy, queue_snapshot
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.policies.rules import PolicyRules
from qflow_client.broker.settings import BrokerSettings
from tests.effort import rounds

from .strategies import cut, mutated

CORPUS = sorted((Path(__file__).parent / "corpus" / "from_clients").glob("*.bin"))
SETTINGS = BrokerSettings(max_message_size=100_000)
# Sending one piece takes this time in seconds.
STEP = 0.1


class Server:
    """A connection that is driven as by the server."""

    def __init__(self) -> None:
        self.now = 0.0
        self.host = VirtualHost(SETTINGS, clock=lambda: self.now, rules=PolicyRules(SETTINGS))
        self.session = Session("fuzzed", self.host, Controls(), self.now, lambda: None)

    def feed(self, data: bytes) -> None:
        session = self.session
        self.now += STEP
        session.receive_data(data, self.now)
        session.tick(self.now)
        output = session.take_output(self.now)
        session.output.taken()
        self.check(output)

    def check(self, output: bytes) -> None:
        session = self.session
        assert session._splitter.pending <= session.handshake.frame_max + FRAME_OVERHEAD
        assert session.handshake.frame_max <= SETTINGS.frame_max
        if session.state in (State.HEADER, State.START_OK, State.TUNE_OK):
            assert session.handshake.frame_max == FRAME_MIN_SIZE
            assert not session.channels
        assert len(session.channels) <= SETTINGS.channel_max
        # All answers are valid AMQP frames.
        splitter = FrameSplitter()
        if not output.startswith(b"AMQP"):
            for _ in splitter.feed(output):
                pass
        assert not splitter.pending

    def end(self) -> None:
        self.session.end()
        assert self.session.state is State.ENDED
        # The counts of the queues are correct, and nothing refers to the ended connection.
        for queue in self.host.queues.values():
            messages = [message_copy(entry, entry.message.body or b"") for entry in queue.contents.oldest_first()]
            seen = queue_snapshot(queue)
            assert (seen.depth, seen.bytes) == (len(messages), sum(len(message.body) for message in messages))
            assert (seen.unacked, seen.consumers, seen.blocked) == (0, 0, ())


def run(pieces: list[bytes]) -> Server:
    server = Server()
    for piece in pieces:
        server.feed(piece)
        if server.session.state is State.ENDED:
            break
    server.end()
    return server


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
