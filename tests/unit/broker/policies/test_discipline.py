"""Connections that ignore `Channel.Flow` (D7 D8), and alarms."""

from __future__ import annotations

import pytest
from pamqp import commands

from qflow_client.broker.core.session import State
from qflow_client.broker.core.snapshots import channel_snapshot, connection_snapshot
from qflow_client.broker.settings import BrokerSettings

from ..core.test_flow import STOP_1, flows


def flowed(client, **options):
    """Open a channel and flow it. Two messages are in the queue."""
    client.channel(1, **options)
    client.declare(arguments=STOP_1)
    client.publish(times=2)
    assert flows(client) == [False]
    return client


# The backlog of a connection (D7).


@pytest.mark.parametrize("enforcement", ["channel_flow", "both"])
@pytest.mark.parametrize(("more", "all_are_flowed"), [(8, False), (9, False), (11, True)])
def test_D7_too_many_unsettled_publishes_of_a_connection_flow_all_its_publishing_channels(
    make_world, enforcement, more, all_are_flowed
):
    client = flowed(make_world(backlog_count=10, enforcement=enforcement).client())
    client.channel(2, confirms=True).channel(3)
    client.publish(times=more)
    assert connection_snapshot(client.session).backlog == more
    assert flows(client, 2) == ([False] if all_are_flowed else [])
    # Channel 3 does not publish.
    assert not client.session.channels[3].flow.is_blocked
    if all_are_flowed:
        assert channel_snapshot(client.session.channels[2]).blocked_by == ("backlog",)
        assert channel_snapshot(client.session.channels[1]).blocked_by == ("q", "backlog")


def test_D7_too_many_bytes_in_the_backlog_of_a_connection_flow_its_channels(make_world):
    client = flowed(make_world(backlog_size=10).client())
    client.channel(2, confirms=True)
    client.publish(b"x" * 10)
    assert not client.session.channels[2].flow.is_blocked
    client.publish(b"x")
    assert client.session.channels[2].flow.is_blocked
    assert connection_snapshot(client.session).backlog_bytes == 11


def test_D7_the_backlog_of_a_connection_does_not_flow_other_connections(make_world):
    world = make_world(backlog_count=1)
    client, other = flowed(world.client()), world.client().channel(confirms=True)
    client.publish(times=5)
    assert not other.session.channels[1].flow.is_blocked


def test_D7_a_channel_that_starts_to_publish_while_the_backlog_is_too_large_is_flowed_immediately(make_world):
    client = flowed(make_world(backlog_count=1).client())
    client.publish(times=3)
    client.channel(2)
    client.received()
    client.send(2, commands.Confirm.Select())
    assert sorted(client.names()) == ["Channel.Flow", "Confirm.SelectOk"]


@pytest.mark.parametrize("enforcement", ["channel_flow", "completion", "both"])
@pytest.mark.parametrize("confirms", [True, False])
def test_D7_the_backlog_of_a_connection_is_empty_when_the_queue_has_drained(make_world, enforcement, confirms):
    world = make_world(backlog_count=3, enforcement=enforcement)
    client = world.client().channel(1, confirms=confirms).channel(2, confirms=True).with_queue(arguments=STOP_1)
    client.publish(times=10)
    is_counted = enforcement != "completion" or confirms
    assert client.session.channels[2].flow.is_blocked is is_counted
    client.publish(channel=2, routing_key="nowhere")
    world.queue().purge()
    snapshot = connection_snapshot(client.session)
    assert (snapshot.backlog, snapshot.backlog_bytes) == (0, 0)
    assert not any(channel.flow.is_blocked for channel in client.session.channels.values())
    assert client.session.channels[1].flow._owed == [0, 0]


def test_D7_a_message_that_waits_for_room_in_a_queue_is_in_the_backlog_until_it_is_accepted_or_dropped(make_world):
    world = make_world(backlog_count=2)
    client = world.client().channel(1, confirms=True).channel(2)
    client.declare(arguments={"x-qflow-policy": "wait", "qpid.max_count": 1})
    for channel in (1, 1, 2, 2):
        client.publish(channel=channel)
    assert connection_snapshot(client.session).backlog == 3
    assert all(channel.flow.is_blocked for channel in client.session.channels.values())
    world.queue().take(no_ack=True)
    world.host.timers.tick(0.0)
    assert connection_snapshot(client.session).backlog == 2
    world.tick(60.0)
    assert connection_snapshot(client.session).backlog == 0
    assert not client.session.channels[1].flow.is_blocked


@pytest.mark.parametrize("enforcement", ["channel_flow", "completion", "both"])
def test_D7_a_message_that_is_delivered_immediately_does_not_stay_in_the_backlog_for_ever(make_world, enforcement):
    world = make_world(backlog_count=5, enforcement=enforcement)
    client, consumer = world.client().channel(confirms=True), world.client().channel(1).channel(2)
    client.declare(arguments=STOP_1)
    consumer.consume()
    client.publish(times=2)
    # The first consumer keeps these two messages, so the queue stays ON.
    before = connection_snapshot(client.session).backlog
    consumer.send(1, commands.Channel.Flow(active=False))
    consumer.consume(channel=2, no_ack=True)
    client.publish()
    assert world.queue().depth == 2
    assert connection_snapshot(client.session).backlog == before + (enforcement == "channel_flow")
    consumer.send(1, commands.Basic.Ack(0, multiple=True))
    assert connection_snapshot(client.session).backlog == 0


def test_D7_a_queue_named_backlog_is_not_confused_with_the_backlog_of_a_connection(make_world):
    client = make_world(backlog_count=10, enforcement="channel_flow").client().channel()
    client.declare("backlog", arguments=STOP_1)
    client.publish(routing_key="backlog", times=5)
    assert connection_snapshot(client.session).backlog == 3


def test_D7_messages_of_a_channel_that_ends_leave_the_backlog_of_the_connection(make_world):
    client = flowed(make_world(backlog_count=3).client(), confirms=False)
    client.channel(2, confirms=True)
    client.publish(times=5)
    client.received()
    client.send(1, commands.Channel.Close(200, "", 0, 0))
    assert connection_snapshot(client.session).backlog == 0
    assert not client.session.channels[2].flow.is_blocked
    client.session.host.queues["q"].purge()
    assert connection_snapshot(client.session).backlog == 0


def test_D7_without_a_backlog_limit_the_broker_counts_no_backlog(world):
    client = flowed(world.client())
    client.publish()
    assert client.session.discipline is None
    assert connection_snapshot(client.session).backlog == 0


# Sanctions for clients that publish while they are flowed (D8).


def test_D8_messages_that_a_flowed_client_publishes_within_the_grace_period_do_not_count_against_it(make_world):
    world = make_world(close_channel_after=1, flow_grace=5)
    client = flowed(world.client())
    for now in (0.0, 4.999):
        world.now = now
        client.publish(times=2)
    assert client.received() == []
    world.now = 5.0
    client.publish()
    assert client.received() == []
    client.publish()
    assert client.close_of(commands.Channel.Close).reply_code == 311


@pytest.mark.parametrize(("more", "is_closed"), [(3, False), (4, True)])
@pytest.mark.parametrize("way", ["plain", "confirms", "tx"])
def test_D8_a_flowed_channel_that_keeps_publishing_is_closed_with_311(make_world, more, is_closed, way):
    world = make_world(close_channel_after=3, flow_grace=0)
    client = flowed(world.client(), confirms=way == "confirms")
    if way == "tx":
        client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(times=more)
    assert (1 in client.session.channels and client.session.channels[1].is_closing) is is_closed
    if is_closed:
        close = client.close_of(commands.Channel.Close)
        assert (close.reply_code, close.class_id, close.method_id) == (311, 60, 40)
        assert "by q" in close.reply_text
    assert world.queue().depth == 2 + (3 if way != "tx" else 0)
    assert connection_snapshot(client.session).channels_closed == is_closed
    assert world.controls.sanctions["channels_closed"] == is_closed


def test_D8_the_count_of_messages_published_while_flowed_restarts_when_the_channel_is_flowed_again(make_world):
    world = make_world(close_channel_after=3, flow_grace=0)
    client = flowed(world.client())
    for _ in range(5):
        client.publish(times=3)
        world.queue().purge()
        client.publish(times=2)
    assert client.session.channels[1].flow.is_blocked
    assert not client.session.channels[1].is_closing
    assert connection_snapshot(client.session).past_flow == 15


def test_D8_messages_that_a_flowed_channel_publishes_to_other_queues_also_count_against_it(make_world):
    client = flowed(make_world(close_channel_after=1, flow_grace=0).client())
    client.declare("free")
    client.publish(routing_key="free", times=2)
    assert client.close_of(commands.Channel.Close).reply_code == 311


@pytest.mark.parametrize(("more", "is_closed"), [(5, False), (6, True)])
def test_D8_a_connection_whose_flowed_channels_keep_publishing_is_closed(make_world, more, is_closed):
    world = make_world(close_channel_after=2, close_connection_after=5, flow_grace=0)
    client = world.client().channel(9).with_queue(channel=9, arguments=STOP_1)
    world.host.publish("", "q", b"")
    # Two channels are closed at their third message. A third channel follows.
    for number, count in ((1, 3), (2, more - 3)):
        client.channel(number)
        client.publish(channel=number, times=1 + count)
        if client.session.state is State.RUNNING:
            client.received()
    assert (client.session.state is State.CLOSE_OK) is is_closed
    if is_closed:
        assert client.close_of(commands.Connection.Close).reply_code == 506
    assert world.controls.sanctions == {"tarpits": 0, "channels_closed": 1, "connections_closed": is_closed}


def test_D8_a_tarpit_stops_reading_from_the_connection_for_a_limited_time(make_world):
    world = make_world(tarpit_after=3, tarpit_time=2, flow_grace=0)
    client = flowed(world.client(heartbeat=1))
    for number in range(1, 8):
        client.publish()
        assert (client.session.deadlines.tarpit_until is not None) is (number >= 3)
    assert connection_snapshot(client.session).tarpits == 2
    assert world.controls.sanctions["tarpits"] == 2
    for now, is_read in ((1.0, False), (1.999, False), (2.0, True)):
        client.tick(now)
        assert (client.session.deadlines.tarpit_until is None) is is_read
    # The broker did not read, so the client did not count as silent. From now on it does.
    assert connection_snapshot(client.session).is_open
    for now in (3.0, 4.0):
        client.tick(now)
    assert client.session.state is State.ENDED


def test_D8_a_client_that_publishes_while_flowed_gets_the_tarpit_before_its_channel_is_closed(make_world):
    world = make_world(tarpit_after=2, close_channel_after=4, close_connection_after=6, flow_grace=0)
    client = flowed(world.client())
    seen = []
    for _ in range(5):
        client.publish()
        seen.append((world.controls.sanctions["tarpits"], world.controls.sanctions["channels_closed"]))
    assert seen == [(0, 0), (1, 0), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backlog_count": -1}, ValueError),
        ({"backlog_size": "1"}, TypeError),
        ({"flow_grace": -1}, ValueError),
        ({"tarpit_time": 0}, ValueError),
        ({"tarpit_after": -1}, ValueError),
        ({"close_channel_after": 1.5}, TypeError),
        ({"close_connection_after": True}, TypeError),
    ],
)
def test_D8_invalid_settings_for_clients_that_ignore_channel_flow_raise_an_error(options, error):
    (name,) = options
    with pytest.raises(error, match=name):
        BrokerSettings(**options)


# Alarms.


def test_a_client_gets_connection_unblocked_when_the_last_alarm_ends(world):
    client = world.client()
    client.session.block("memory", "no memory")
    assert client.only(commands.Connection.Blocked, 0).reason == "no memory"
    client.session.block("disk", "no disk")
    client.session.block("memory", None)
    client.session.block("memory", None)
    assert client.received() == []
    assert connection_snapshot(client.session).blocked_by == ("disk",)
    client.session.block("disk", None)
    client.only(commands.Connection.Unblocked, 0)


def test_D11_acks_on_a_connection_whose_publishing_channels_are_flowed_are_handled(make_world):
    world = make_world(backlog_count=1, close_channel_after=100)
    client = flowed(world.client(), confirms=True)
    client.publish(times=3)
    client.channel(2)
    client.consume(channel=2)
    client.received()
    client.send(2, commands.Basic.Ack(0, multiple=True))
    assert world.queue().depth == 0
    assert not client.session.channels[1].flow.is_blocked
    assert "Basic.Ack" in client.names()
