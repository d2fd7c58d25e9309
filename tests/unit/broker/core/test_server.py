"""A connection of the server with a transport that takes what the test says."""

from __future__ import annotations

import asyncio

import pytest
from pamqp import commands, frame

from qflow_client.broker.core.server import Connection, Server
from qflow_client.broker.core.session import PROTOCOL_HEADER, State

HEARTBEAT_SECONDS = 10


class Transport(asyncio.Transport):
    """Keeps what is written until the peer takes it."""

    def __init__(self):
        super().__init__()
        self.buffered = 0
        self.reads = True
        self.is_closed = False

    def write(self, data):
        self.buffered += len(data)

    def get_write_buffer_size(self):
        return self.buffered

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True


class Peer:
    """A client that reads as much as the test says."""

    def __init__(self, world):
        self.world = world
        self.server = Server(world.settings, world.host, world.controls, lambda: None)
        self.server.clock = lambda: world.now
        self.transport = Transport()
        self.connection = Connection(self.server)
        self.connection.connection_made(self.transport)

    @property
    def session(self):
        return self.connection.session

    def say(self, channel, *methods):
        self.connection.data_received(b"".join(frame.marshal(method, channel) for method in methods))
        self.turn()

    def turn(self):
        self.server._end_turn()

    def take(self, count):
        self.transport.buffered -= count

    def pass_time(self, seconds):
        self.world.now += seconds
        self.connection._on_timer()

    def ask_for_too_much(self):
        self.connection.data_received(PROTOCOL_HEADER)
        self.say(
            0,
            commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"),
            commands.Connection.TuneOk(0, 0, HEARTBEAT_SECONDS),
            commands.Connection.Open("/"),
        )
        self.say(1, commands.Channel.Open(), commands.Queue.Declare(queue="q"))
        for _ in range(20):
            self.world.host.publish("", "q", bytes(1_000_000))
        self.say(1, *(commands.Basic.Get(queue="q") for _ in range(20)))
        while not self.connection._has_backlog:
            self.turn()
        return self


@pytest.fixture(name="peer")
def _peer(world):
    async def make():
        return Peer(world)

    # Its timers are set on this loop, which then does not run: the test calls what they would call.
    loop = asyncio.new_event_loop()
    peer = loop.run_until_complete(make()).ask_for_too_much()
    yield peer
    peer.connection.connection_lost(None)
    loop.close()


def test_E6_a_client_that_does_not_read_is_not_read_and_makes_little_wait(peer):
    assert not peer.transport.reads
    assert peer.transport.buffered <= Connection.MAX_BACKLOG + peer.session.MAX_OUTPUT + 1_100_000
    peer.turn()
    assert peer.session.delivered < 12
    while peer.session.is_held or peer.transport.buffered:
        peer.take(peer.transport.buffered)
        peer.connection.resume_writing()
        peer.turn()
    assert (peer.session.delivered, peer.transport.reads) == (20, True)


def test_a_client_that_takes_bytes_slowly_is_not_silent(peer):
    for _ in range(10):
        peer.pass_time(HEARTBEAT_SECONDS * 0.9)
        peer.take(1000)
    assert peer.session.state is State.RUNNING


def test_a_client_that_takes_nothing_for_two_heartbeats_is_given_up(peer):
    peer.pass_time(HEARTBEAT_SECONDS)
    peer.turn()
    peer.pass_time(HEARTBEAT_SECONDS)
    peer.turn()
    assert peer.session.state is State.ENDED
    assert peer.transport.is_closed
