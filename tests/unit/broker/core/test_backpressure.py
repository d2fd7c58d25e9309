"""Answers that a client requests and does not read: their number is limited, and in the end all of them are sent."""

from __future__ import annotations

from pamqp import body, commands, frame, header

from qflow_client.amqp.frames import FrameSplitter
from qflow_client.broker.core.session import Session, State

from ..store.test_paging import Evicting

GET = frame.marshal(commands.Basic.Get(queue="q"), 1)
SIZE = 100_000
COUNT = 200
#: One answer is always given, whatever its length.
MOST = Session.MAX_OUTPUT + SIZE + 1000


def gets_and_nacks(count=COUNT):
    return b"".join(GET + frame.marshal(commands.Basic.Nack(tag + 1, requeue=True), 1) for tag in range(count))


def read_all(client):
    """Read all output, write by write. Return the names of the frames, and the most bytes that were waiting."""
    names: list[str] = []
    most = 0
    while True:
        most = max(most, client.session.memory)
        data = client.raw_output()
        if not data:
            return names, most
        names += [
            frame.unmarshal(data[start - 7 : stop + 1])[2].name for _, _, start, stop in FrameSplitter().feed(data)
        ]
        client.feed(b"")


ANSWER = ["Basic.GetOk", "ContentHeader", "ContentBody"]


def test_E6_answers_to_many_requests_do_not_pile_up_in_the_broker_if_the_client_does_not_read(world):
    client = world.client().channel().with_queue()
    client.publish(bytes(SIZE))
    asked = gets_and_nacks()
    client.feed(asked)
    assert client.session.is_held
    assert client.session.memory <= MOST + len(asked)
    names, most = read_all(client)
    assert names == ANSWER * COUNT
    assert most <= MOST + len(asked)
    assert not client.session.is_held
    assert (world.queue().contents.ready_count, client.session.memory) == (1, 0)


def test_E6_later_input_is_handled_after_input_that_the_broker_holds_back_for_every_split(world):
    client = world.client().channel().with_queue()
    client.publish(bytes(SIZE))
    data = gets_and_nacks() + frame.marshal(commands.Channel.Close(200, "", 0, 0), 1)
    for at in range(0, len(data), 1001):
        client.feed(data[at : at + 1001])
    assert client.session.memory <= MOST + len(data)
    assert read_all(client)[0] == [*ANSWER * COUNT, "Channel.CloseOk"]


def test_E6_answers_with_bodies_that_are_still_on_disk_count_for_the_limit_of_unread_answers():
    it = Evicting(1, "q")
    it.client.publish(bytes(SIZE))
    it.turn()
    it.client.received()
    assert it.resident() == [False]
    it.client.feed(gets_and_nacks())
    names = []
    while it.client.session.is_held or it.client.session.memory:
        assert it.client.session.memory <= MOST + len(gets_and_nacks())
        it.turn()
        names += read_all(it.client)[0]
    assert names == ANSWER * COUNT


def test_E6_the_broker_accepts_no_more_messages_until_the_client_has_read_the_returned_messages(world):
    client = world.client().channel()
    publish = commands.Basic.Publish(routing_key="nowhere", mandatory=True)
    parts = (publish, header.ContentHeader(body_size=SIZE), body.ContentBody(bytes(SIZE)))
    client.feed(b"".join(frame.marshal(part, 1) for part in parts) * COUNT)
    assert client.session.channels.published <= MOST // SIZE + 2
    assert read_all(client)[0] == ["Basic.Return", "ContentHeader", "ContentBody"] * COUNT


def test_E6_basic_recover_redelivers_at_once_only_as_many_messages_as_the_output_buffer_has_room_for(world):
    client = world.client().channel().with_queue().with_consumer()
    for _ in range(50):
        client.publish(bytes(SIZE))
        client.received()
    client.send(1, commands.Basic.Recover(requeue=False))
    assert client.session.memory <= MOST
    names = read_all(client)[0]
    assert names.count("Basic.Deliver") == 50


def test_E6_an_error_and_a_close_behind_input_that_was_held_back_are_handled_in_order(world):
    client = world.client().channel().with_queue()
    client.publish(bytes(SIZE))
    client.feed(gets_and_nacks() + b"\1\0\1\0\0\0\4\0\x3c\0\x28\xce")
    assert client.session.state is State.RUNNING
    assert read_all(client)[0][-1] == "Connection.Close"


def test_E6_each_frame_is_traced_once_even_if_the_broker_held_input_back(make_world):
    traced = []
    world = make_world(trace=lambda direction, connection, channel, name: traced.append((direction, name)))
    client = world.client().channel().with_queue()
    client.publish(bytes(SIZE))
    client.feed(gets_and_nacks())
    read_all(client)
    assert [traced.count(("in", f"Basic.{name}")) for name in ("Get", "Nack")] == [COUNT] * 2
    assert traced.count(("out", "Basic.GetOk")) == COUNT


def test_a_client_whose_input_waits_for_the_disk_does_not_exceed_the_heartbeat_timeout():
    it = Evicting(1, "q")
    it.client.publish(bytes(SIZE))
    it.turn()
    client = it.world.client(heartbeat=10).channel()
    client.feed(gets_and_nacks())
    it.world.now = 25.0
    client.session.tick(it.world.now)
    assert client.session.state is State.RUNNING
