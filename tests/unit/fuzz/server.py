"""A connection of the broker with a client that sends any bytes, and what must hold after each piece and at the end."""

from __future__ import annotations

from pathlib import Path

from qflow_client.amqp.frames import FRAME_MIN_SIZE, FRAME_OVERHEAD, FrameSplitter
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.session import Session, State
from qflow_client.broker.core.snapshots import message_copy, queue_snapshot
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.policies.rules import PolicyRules
from qflow_client.broker.settings import BrokerSettings

#: Recorded output of client libraries, from the protocol header on.
CORPUS = sorted((Path(__file__).parent / "corpus" / "from_clients").glob("*.bin"))
SETTINGS = BrokerSettings(max_message_size=100_000)
# Sending one piece takes this time in seconds.
STEP = 0.1


class Server:
    """A connection that is driven as by the server."""

    def __init__(self) -> None:
        self.now = 0.0
        # The number of bytes that were fed, without the piece that has ended the session.
        self.fed = 0
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
        if session.state is not State.ENDED:
            self.fed += len(data)

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
