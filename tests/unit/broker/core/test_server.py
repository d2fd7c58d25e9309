"""Connections of the server, with a transport that accepts as many bytes as the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import commands, frame, header

from qflow_client.broker.core.exchange import MANY_QUEUES
from qflow_client.broker.core.server import Connection, Server
from qflow_client.broker.core.session import PROTOCOL_HEADER, State
from qflow_client.broker.policies.discipline import Discipline
from qflow_client.broker.store.journal import Journal

HEARTBEAT_SECONDS = 10


class Transport(asyncio.Transport):
    """A transport that keeps written bytes until the peer takes them."""

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

    abort = close


class Peer:
    """A client that reads as much as the test says."""

    def __init__(self, world, server=None):
        self.world = world
        discipline = Discipline if world.settings.has_discipline else None
        self.server = server or Server(world.host, world.controls, lambda: None, discipline)
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

    def open(self):
        self.connection.data_received(PROTOCOL_HEADER)
        self.say(
            0,
            commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"),
            commands.Connection.TuneOk(0, 0, HEARTBEAT_SECONDS),
            commands.Connection.Open("/"),
        )
        self.say(1, commands.Channel.Open(), commands.Queue.Declare(queue="q"))
        return self

    def ask_for_too_much(self):
        self.open()
        for _ in range(20):
            self.world.host.publish("", "q", bytes(1_000_000))
        self.say(1, *(commands.Basic.Get(queue="q") for _ in range(20)))
        while not self.connection._has_backlog:
            self.turn()
        return self


@pytest.fixture(name="make_peer")
def _make_peer():
    # The timers are set on this loop, which does not run. The test calls the callbacks of the timers.
    loop = asyncio.new_event_loop()
    peers: list[Peer] = []

    async def make(world):
        peers.append(Peer(world, peers[0].server if peers else None))
        return peers[-1]

    yield lambda world: loop.run_until_complete(make(world))
    for peer in peers:
        if not peer.connection.lost.done():
            peer.connection.connection_lost(None)
    loop.close()


@pytest.fixture(name="peer")
def _peer(world, make_peer):
    return make_peer(world).ask_for_too_much()


def test_E6_the_broker_reads_nothing_from_a_client_that_does_not_read_and_buffers_little_output(peer):
    assert not peer.transport.reads
    assert peer.transport.buffered <= Connection.MAX_BACKLOG + peer.session.MAX_OUTPUT + 1_100_000
    peer.turn()
    assert peer.session.channels.delivered < 12
    while peer.session.is_held or peer.transport.buffered:
        peer.take(peer.transport.buffered)
        peer.connection.resume_writing()
        peer.turn()
    assert (peer.session.channels.delivered, peer.transport.reads) == (20, True)


def test_a_client_that_reads_slowly_is_not_disconnected_for_missing_heartbeats(peer):
    for _ in range(10):
        peer.pass_time(HEARTBEAT_SECONDS * 0.9)
        peer.take(1000)
    assert peer.session.state is State.RUNNING


def test_a_client_that_reads_nothing_for_two_heartbeats_is_disconnected(peer):
    peer.pass_time(HEARTBEAT_SECONDS)
    peer.turn()
    peer.pass_time(HEARTBEAT_SECONDS)
    peer.turn()
    assert peer.session.state is State.ENDED
    assert peer.transport.is_closed


LIMIT = 1 << 20

# Handling a frame takes one millisecond.
STEP = 0.001
PUBLISH = (commands.Basic.Publish(routing_key="q"), header.ContentHeader(body_size=0))
FRAMES_OF_A_SLICE = round(Server.SLICE / STEP)
FRAMES_OF_A_TURN = round((Server.TURN + Server.SLICE) / STEP)


@pytest.fixture(name="slow_world")
def _slow_world(make_world):
    def trace(way, connection, channel, name):
        if way == "in":
            world.now += STEP

    world = make_world(trace=trace, journal=Journal(float, has_store=False, limit=LIMIT))
    return world


def test_E9_input_that_takes_long_to_handle_is_handled_in_time_slices_in_which_connections_take_turns(
    slow_world, make_peer
):
    busy = [make_peer(slow_world).open() for _ in range(3)]
    for peer in busy:
        peer.connection.data_received(b"".join(frame.marshal(each, 1) for each in PUBLISH * 50))
        assert not peer.transport.reads
    # The first two got whole time slices. Then the time of this turn was used up.
    assert [peer.session.channels.published for peer in busy] == [FRAMES_OF_A_SLICE // 2] * 2 + [0]
    while any(peer.session.is_held for peer in busy):
        before = slow_world.now
        busy[0].turn()
        assert slow_world.now - before <= FRAMES_OF_A_TURN * STEP
        counts = [peer.session.channels.published for peer in busy if peer.session.is_held]
        assert not counts or max(counts) - min(counts) <= FRAMES_OF_A_SLICE
    assert [peer.session.channels.published for peer in busy] == [50] * 3
    assert all(peer.transport.reads for peer in busy)


def test_E9_a_small_request_waits_for_at_most_one_time_slice_of_busy_connections(slow_world, make_peer):
    busy = [make_peer(slow_world).open() for _ in range(20)]
    asks = make_peer(slow_world).open()
    for peer in busy:
        peer.connection.data_received(b"".join(frame.marshal(each, 1) for each in PUBLISH * 50))
    asks.transport.buffered = 0
    asks.connection.data_received(frame.marshal(commands.Queue.Declare(queue="q", passive=True), 1))
    before = slow_world.now
    asks.turn()
    assert asks.transport.buffered
    assert slow_world.now - before <= FRAMES_OF_A_TURN * STEP
    assert any(peer.session.is_held for peer in busy)


@pytest.mark.parametrize("size", [7, 50, 1001])
def test_E9_input_that_is_handled_in_time_slices_may_be_split_at_any_byte(slow_world, make_peer, size):
    peer = make_peer(slow_world).open()
    data = b"".join(frame.marshal(each, 1) for each in PUBLISH * 50)
    for at in range(0, len(data), size):
        peer.connection.data_received(data[at : at + size])
    while peer.session.is_held:
        peer.turn()
    assert (peer.session.state, peer.session.channels.published) == (State.RUNNING, 50)


def test_E9_a_connection_whose_input_waits_for_its_time_slice_is_not_closed_for_missing_heartbeats(
    slow_world, make_peer
):
    busy = make_peer(slow_world).open()
    busy.connection.data_received(b"".join(frame.marshal(each, 1) for each in PUBLISH * 50))
    for _ in range(3):
        # Its input is being handled, so the peer does not count as silent, although nothing is read from it.
        busy.pass_time(HEARTBEAT_SECONDS * 1.5)
        busy.turn()
    assert busy.session.state is State.RUNNING
    published = busy.session.channels.published
    assert 0 < published < 50
    busy.connection.connection_lost(None)
    busy.turn()
    assert slow_world.queue().depth == published


def test_E9_input_that_waits_for_its_time_slice_does_not_cause_a_memory_alarm(slow_world, make_peer):
    publish = b"".join(frame.marshal(each, 1) for each in PUBLISH)
    peers = [make_peer(slow_world).open() for _ in range(4)]
    count = LIMIT // 2 // len(publish)
    for peer in peers:
        peer.connection.data_received(publish)
    slow_world.queue().purge()
    for peer in peers:
        peer.connection.data_received(publish * count)
    # Together they have sent twice the memory limit. No peer is disconnected or paused.
    assert sum(peer.session.held_size for peer in peers) > LIMIT
    peers[0].turn()
    assert not any(peer.session.is_paused or peer.transport.is_closed for peer in peers)


def test_E9_input_that_waits_for_a_time_slice_is_not_handled_while_memory_is_full(slow_world, make_peer):
    busy = make_peer(slow_world).open()
    busy.connection.data_received(b"".join(frame.marshal(each, 1) for each in PUBLISH * 50))
    busy.connection.pause(True)
    published = busy.session.channels.published
    for _ in range(3):
        busy.turn()
    assert busy.session.channels.published == published
    busy.connection.pause(False)
    while busy.session.is_held:
        busy.turn()
    assert busy.session.channels.published == 50


def test_E9_after_a_message_to_very_many_queues_other_connections_are_served_before_the_next_message(world, make_peer):
    peer = make_peer(world).open()
    for number in range(MANY_QUEUES + 1):
        world.host.topology.bind(world.host.declare_queue(f"q{number}"), "amq.fanout", "", None)
    publish = (commands.Basic.Publish(exchange="amq.fanout"), header.ContentHeader(body_size=0))
    peer.connection.data_received(b"".join(frame.marshal(each, 1) for each in publish * 3))
    depths = [world.queue("q0").depth]
    while peer.session.is_held:
        peer.turn()
        depths.append(world.queue("q0").depth)
    assert depths == [1, 2, 3]


@pytest.fixture(name="small_world")
def _small_world(make_world):
    return make_world(journal=Journal(float, has_store=False, limit=LIMIT))


def ask_and_read_nothing(peer, count):
    peer.take(peer.transport.buffered)
    peer.connection.pause_writing()
    peer.say(1, *(commands.Queue.Declare(queue="q", passive=True) for _ in range(count)))
    peer.turn()


def test_E9_answers_that_a_client_has_not_read_count_for_the_memory_of_the_broker(small_world, make_peer):
    peer = make_peer(small_world).open()
    journal = small_world.host.journal
    ask_and_read_nothing(peer, 1000)
    assert journal.buffered == journal.held == peer.transport.buffered > 20_000
    peer.take(peer.transport.buffered)
    peer.connection.resume_writing()
    assert journal.held == 0


def test_E9_the_slowest_readers_are_disconnected_when_unread_replies_fill_half_of_memory(
    small_world, make_peer, caplog
):
    little, much = (make_peer(small_world).open() for _ in range(2))
    ask_and_read_nothing(little, 1000)
    ask_and_read_nothing(much, 25_000)
    assert (little.transport.is_closed, much.transport.is_closed) == (False, True)
    assert "output that clients do not read takes more than half of memory_limit" in caplog.text
    assert "memory is full" not in caplog.text
    assert small_world.host.journal.buffered == little.transport.buffered
    assert much.connection.unread == 0
    much.connection.connection_lost(None)
    assert small_world.host.journal.buffered == little.transport.buffered


def test_E9_at_the_memory_limit_the_broker_does_not_read_from_clients_with_unread_replies(small_world, make_peer):
    slow, reads = (make_peer(small_world).open() for _ in range(2))
    small_world.host.publish("", "q", bytes(LIMIT))
    reads.turn()
    ask_and_read_nothing(slow, 1)
    reads.say(1, commands.Queue.Declare(queue="q", passive=True))
    assert (slow.transport.reads, reads.transport.reads) == (False, True)
    slow.take(slow.transport.buffered)
    slow.connection.resume_writing()
    assert slow.transport.reads


def test_E9_while_memory_is_full_the_first_message_of_a_connection_is_not_read(small_world, make_peer):
    peer = make_peer(small_world).open()
    small_world.host.publish("", "q", bytes(LIMIT))
    peer.turn()
    peer.take(peer.transport.buffered)
    publish = b"".join(frame.marshal(each, 1) for each in PUBLISH)
    declare = frame.marshal(commands.Queue.Declare(queue="q", passive=True), 1)
    peer.connection.data_received(declare + publish * 3 + publish[:-1])
    peer.turn()
    assert peer.transport.buffered, "what comes before is answered"
    assert (peer.session.channels.published, peer.transport.reads) == (0, False)
    assert peer.server.first_publishes == peer.session.held_size > 3 * len(publish) - 30
    small_world.queue().purge()
    peer.turn()
    peer.turn()
    assert (peer.session.channels.published, peer.transport.reads, peer.server.first_publishes) == (3, True, 0)
    peer.connection.data_received(publish[-1:])
    assert peer.session.channels.published == 4


def test_E9_while_memory_is_full_new_connections_that_wait_to_publish_are_closed_if_there_are_too_many(
    small_world, make_peer, caplog
):
    old = make_peer(small_world).open()
    publish = b"".join(frame.marshal(each, 1) for each in PUBLISH)
    old.connection.data_received(publish)
    small_world.host.publish("", "q", bytes(LIMIT))
    old.turn()
    much = publish * (LIMIT // 40 // len(publish))
    old.session.hold(much, small_world.now)
    new = [make_peer(small_world).open() for _ in range(4)]
    for peer in new:
        peer.connection.data_received(much)
        peer.turn()
    # Two peers use more than 1/32 of the memory.
    assert [peer.transport.is_closed for peer in (old, *new)] == [False, True, True, True, True]
    assert old.server.first_publishes == 0
    reason = "memory is full, and first publishes that wait take more than 1/32 of memory_limit"
    assert caplog.text.count(f"others are cut: {reason} ({LIMIT} bytes)") == 1
    small_world.queue().purge()
    old.turn()
    old.turn()
    assert old.session.channels.published == 1 + len(much) // len(publish)


def test_E9_when_the_time_of_a_turn_is_used_up_large_and_small_input_waits_and_is_handled_later(slow_world, make_peer):
    peers = [make_peer(slow_world).open() for _ in range(4)]
    sizes = (400, 400, 400, 1)
    for peer, size in zip(peers, sizes, strict=True):
        peer.connection.data_received(b"".join(frame.marshal(each, 1) for each in PUBLISH * size))
    assert [peer.session.channels.published > 0 for peer in peers] == [True, True, False, False]
    assert peers[2].session.held_size > Server.SMALL_INPUT > peers[3].session.held_size > 0
    while any(peer.session.is_held for peer in peers):
        peers[0].turn()
    assert tuple(peer.session.channels.published for peer in peers) == sizes


TARPIT = {"tarpit_after": 2, "tarpit_time": 60, "flow_grace": 0}
STOP_1: dict[str, Any] = {"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1}


def test_D8_a_tarpit_also_delays_input_that_arrived_together_with_the_message_that_triggered_the_tarpit(
    make_world, make_peer
):
    peer = make_peer(make_world(**TARPIT)).open()
    peer.say(1, commands.Queue.Declare(queue="stop", arguments=STOP_1))
    publish = (commands.Basic.Publish(routing_key="stop"), header.ContentHeader(body_size=0))
    peer.say(1, *publish * 10)
    # Two make the queue ON, and two more the tarpit.
    for published in (4, 6, 8, 10):
        assert (peer.session.channels.published, peer.transport.reads) == (published, False)
        peer.turn()
        assert peer.session.channels.published == published
        peer.pass_time(60.0)
        peer.turn()
    assert peer.transport.reads


def test_D8_a_tarpit_delays_later_input_on_every_channel_of_the_connection(make_world, make_peer):
    world = make_world(**TARPIT)
    peer = make_peer(world).open()
    peer.say(1, commands.Queue.Declare(queue="stop", arguments=STOP_1))
    publish = (commands.Basic.Publish(routing_key="stop"), header.ContentHeader(body_size=0))
    peer.say(2, commands.Channel.Open())
    # Two make the queue ON, and two more the tarpit.
    peer.say(1, *publish * 2)
    method, content = (frame.marshal(each, 1) for each in publish)
    declare = frame.marshal(commands.Queue.Declare(queue="later"), 2)
    peer.connection.data_received((method + content) * 2 + declare)
    assert (peer.session.channels.published, peer.session.is_held) == (4, True)
    assert "later" not in world.host.queues
    peer.pass_time(60.0)
    peer.turn()
    assert "later" in world.host.queues


@pytest.mark.parametrize("why", ["tarpit", "memory", "memory, with input that is held"])
def test_the_broker_reads_close_ok_even_from_a_connection_that_it_has_stopped_reading(make_world, make_peer, why):
    world = make_world(**TARPIT, journal=Journal(float, has_store=False, limit=LIMIT))
    peer = make_peer(world).open()
    peer.say(1, commands.Queue.Declare(queue="stop", arguments=STOP_1))
    publish = (commands.Basic.Publish(routing_key="stop"), header.ContentHeader(body_size=0))
    if why == "tarpit":
        peer.say(1, *publish * 4)
    else:
        if "held" not in why:
            peer.say(1, *publish)
        world.host.publish("", "q", bytes(LIMIT))
        peer.turn()
        peer.say(1, *publish)
    assert not peer.transport.reads
    peer.session.fail(320, "CONNECTION_FORCED", world.now)
    peer.turn()
    peer.turn()
    assert peer.transport.reads
    peer.say(1, *publish)
    assert peer.transport.reads
    peer.say(0, commands.Connection.CloseOk())
    assert peer.session.state is State.ENDED
    assert not peer.session.is_unresponsive


def test_after_connection_close_the_broker_ends_the_tcp_stream_when_the_client_sends_nothing_more(
    world, make_peer, monkeypatch
):
    peer = make_peer(world).open()
    ended, later = [], []
    monkeypatch.setattr(peer.transport, "can_write_eof", lambda: True)
    monkeypatch.setattr(peer.transport, "write_eof", lambda: ended.append(True))
    monkeypatch.setattr(peer.connection._loop, "call_later", lambda delay, call, *args: later.append((call, args)))

    def pass_time():
        (call, arguments), *_ = [each for each in later if each[0] == peer.connection._when_quiet]
        later.clear()
        call(*arguments)

    close = commands.Connection.Close(200, "", 0, 0)
    peer.say(0, close)
    assert (peer.session.state, ended) == (State.ENDED, [])
    # Another thread of the client closes the connection, too.
    peer.say(0, close)
    pass_time()
    assert ended == []
    pass_time()
    assert (ended, later) == ([True], [])
