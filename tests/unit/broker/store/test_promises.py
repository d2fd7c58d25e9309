"""Answers that wait for the disk, and frames that do not wait for these answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame

from qflow_client.broker.store.journal import Journal

from ..conftest import World
from ..core.test_flow import STOP_2, flows
from .test_journal import durable_world, write
from .test_paging import Evicting, body

DECLARE = commands.Queue.Declare(queue="d", durable=True)


@pytest.fixture(name="world")
def _world():
    return durable_world()


@pytest.mark.parametrize("channel", [1, 2])
def test_J3_channel_flow_is_sent_before_earlier_answers_that_wait_for_the_disk(world, channel):
    client = world.client().channel(1).channel(2).with_queue(arguments=STOP_2)
    client.publish(channel=channel, times=2)
    client.send(1, DECLARE)
    client.publish(channel=channel)
    assert flows(client, channel) == [False]
    world.queue().purge()
    assert flows(client, channel) == [True]
    write(world)
    assert client.names() == ["Queue.DeclareOk"]


def test_D8_connection_blocked_is_sent_before_earlier_answers_that_wait_for_the_disk(world):
    client = world.client().channel()
    client.send(1, DECLARE)
    client.session.block("disk", "no room")
    client.only(commands.Connection.Blocked, 0)
    client.session.block("disk", None)
    client.only(commands.Connection.Unblocked, 0)
    write(world)
    assert client.names() == ["Queue.DeclareOk"]


@pytest.mark.parametrize("who", ["client", "broker"])
def test_a_connection_is_closed_without_waiting_for_answers_that_wait_for_the_disk(world, who):
    client = world.client().channel()
    client.send(1, DECLARE)
    if who == "client":
        client.send(0, commands.Connection.Close(200, "", 0, 0))
        client.only(commands.Connection.CloseOk, 0)
    else:
        client.session.fail(320, "CONNECTION_FORCED - because", world.now)
        client.only(commands.Connection.Close, 0)
    client.session.lost()
    write(world)
    assert client.received() == []


def test_an_answer_that_waits_for_the_disk_does_not_delay_answers_and_confirms_of_other_channels(world):
    client = world.client().channel(1, confirms=True).channel(2, confirms=True).with_queue()
    client.send(1, DECLARE)
    for channel in (1, 2):
        client.publish(channel=channel)
        client.send(channel, commands.Basic.Qos(prefetch_count=1))
    assert [(number, each.name) for number, each in client.received()] == [(2, "Basic.QosOk"), (2, "Basic.Ack")]
    write(world)
    assert client.names() == ["Queue.DeclareOk", "Basic.QosOk", "Basic.Ack"]


def test_channel_flow_is_sent_before_a_get_ok_that_waits_for_the_disk_and_not_between_its_frames():
    it = Evicting(1, "q")
    it.client.declare("narrow", arguments=STOP_2)
    it.client.publish(body(1))
    it.turn()
    it.client.received()
    it.client.send(1, commands.Basic.Get(queue="q"))
    it.client.publish(routing_key="narrow", times=3)
    assert it.client.only(commands.Channel.Flow).active is False
    it.turn()
    method, _, content, *_ = (each for _, each in it.client.received())
    assert isinstance(method, commands.Basic.GetOk)
    assert content.value == body(1)


def test_a_channel_whose_answer_waits_for_the_disk_gets_no_deliveries_and_other_channels_do(world):
    client = world.client().channel(1).channel(2).with_queue()
    client.send(1, DECLARE)
    client.consume(channel=1, no_ack=True)
    world.host.publish("", "q", b"before")
    assert client.received() == []
    assert world.queue().depth == 1
    client.consume(channel=2, tag="other", no_ack=True)
    assert [(number, each.name) for number, each in client.received()][:2] == [
        (2, "Basic.ConsumeOk"),
        (2, "Basic.Deliver"),
    ]
    client.send(2, commands.Basic.Cancel("other"))
    client.received()
    world.host.publish("", "q", b"then")
    write(world)
    received = [each for _, each in client.received()]
    assert [each.name for each in received[:3]] == ["Queue.DeclareOk", "Basic.ConsumeOk", "Basic.Deliver"]
    assert received[-1].value == b"then"


def test_a_client_that_stopped_the_flow_gets_no_delivery_when_answers_that_waited_for_the_disk_are_sent(world):
    client = world.client().channel().with_queue().with_consumer(no_ack=True)
    client.send(1, commands.Channel.Flow(active=False))
    client.received()
    client.send(1, DECLARE)
    world.host.publish("", "q", b"x")
    write(world)
    assert client.names() == ["Queue.DeclareOk"]
    client.send(1, commands.Channel.Flow(active=True))
    assert client.names()[:2] == ["Channel.FlowOk", "Basic.Deliver"]


@given(st.lists(st.tuples(st.sampled_from(("write", "promise", "keep", "take")), st.integers(0, 7)), max_size=60))
def test_the_frames_of_each_channel_are_sent_in_order_even_if_some_wait_for_the_disk(steps):
    client = World(journal=Journal(float)).client()
    for number in (1, 2):
        client.channel(number)
    written: dict[int, list[int]] = {0: [], 1: [], 2: []}
    sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
    promised = []

    def frames(channel, number):
        written[channel].append(number)
        return frame.marshal(commands.Connection.Blocked(str(number)), channel)

    def take():
        for channel, each in client.received():
            sent[channel].append(int(each.reason))

    for number, (step, which) in enumerate(steps):
        match step:
            case "write":
                client.session.output.write(frames(which % 3, number))
            case "promise":
                channel = 1 + which % 2
                promised.append((client.session.output.promise(channel), frames(channel, number)))
            case "keep" if promised:
                promise, data = promised.pop(which % len(promised))
                promise.keep(data)
            case "take":
                take()
                assert sent[0] == written[0], "channel 0 waits for nobody"
    for promise, data in promised:
        promise.keep(data)
    take()
    assert sent == written
    assert client.session.memory == 0
