from __future__ import annotations

import pytest
from pamqp import commands

from qflow_client.broker.core.snapshots import channel_snapshot

STOP_1 = {"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1}
STOP_2 = {"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 2}
WITHHOLDS = {"x-qflow-enforcement": "completion"}


def flows(client, channel=1):
    return [each.active for number, each in client.received() if number == channel and each.name == "Channel.Flow"]


def tags(client):
    """Return the acked delivery tags, each with its multiple bit. No other frames may have come."""
    received = [each for _, each in client.received()]
    assert {each.name for each in received} <= {"Basic.Ack"}
    return [(each.delivery_tag, each.multiple) for each in received]


def test_J3_the_publisher_whose_message_brings_the_queue_above_its_stop_threshold_is_flowed_immediately(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    client.publish(times=2)
    assert client.received() == []
    client.publish()
    assert client.only(commands.Channel.Flow).active is False
    assert world.queue().depth == 3


def test_J3_D2_the_message_that_brings_a_queue_above_its_stop_threshold_is_enqueued_and_delivered(world):
    client = world.client().channel(1).channel(2).with_queue(arguments={"x-qpid-capacity": 3})
    client.publish(b"four")
    client.received()
    client.consume(channel=2)
    assert client.names() == ["Basic.ConsumeOk", "Basic.Deliver", "ContentHeader", "ContentBody"]
    assert world.queue().depth == 1


def test_J3_only_the_publisher_that_brings_the_queue_above_its_stop_threshold_is_flowed(world):
    offender, other = world.client().channel().with_queue(arguments=STOP_2), world.client().channel()
    other.publish(times=2)
    offender.publish()
    assert flows(offender) == [False]
    assert other.received() == []


def test_J3_other_channels_of_the_connection_of_a_flowed_channel_continue(world):
    client = world.client().channel(1).channel(2).with_queue(arguments=STOP_2)
    client.publish(times=4)
    assert client.only(commands.Channel.Flow, channel=1).active is False


def test_each_change_between_flowed_and_unflowed_sends_one_flow_frame(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    client.publish(times=10)
    assert flows(client) == [False]
    for _ in range(8):
        world.queue().take(no_ack=True)
    assert client.received() == []
    world.queue().take(no_ack=True)
    assert flows(client) == [True]
    client.send(1, commands.Channel.FlowOk(active=True))
    assert client.received() == []


def test_the_broker_knows_whether_the_client_has_answered_every_channel_flow(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    channel = client.session.channels[1]
    client.send(1, commands.Channel.FlowOk(active=True))
    assert channel_snapshot(channel).flow_ok
    client.publish(times=3)
    world.queue().purge()
    for answers in (False, False, True):
        assert channel_snapshot(channel).flow_ok is answers
        client.send(1, commands.Channel.FlowOk(active=answers))


def test_J4_a_channel_blocked_by_two_queues_stays_flowed_until_both_have_drained(world):
    client = world.client().channel()
    for name in ("a", "b"):
        client.declare(name, arguments=STOP_2)
    for name in ("a", "b"):
        client.publish(routing_key=name, times=3)
    assert flows(client) == [False]
    assert [each.name for each in client.session.channels[1].flow.blocked_by] == ["a", "b"]
    world.queue("a").purge()
    assert client.received() == []
    world.queue("b").purge()
    assert flows(client) == [True]


def test_J4_a_channel_blocked_by_two_thresholds_of_one_queue_shows_that_queue_once_as_the_reason(world):
    client = world.client().channel().with_queue(arguments={**STOP_2, "x-qpid-capacity": 2})
    client.publish(times=3)
    channel = client.session.channels[1]
    assert len(channel.flow.blocked_by) == 2
    assert channel_snapshot(channel).blocked_by == ("q",)


def test_J4_one_message_to_two_full_queues_sends_one_flow_frame(world):
    client = world.client().channel()
    for name in ("a", "b"):
        client.declare(name, arguments=STOP_2)
        client.call(1, commands.Queue.Bind(queue=name, exchange="amq.fanout"), commands.Queue.BindOk)
    client.publish(exchange="amq.fanout", times=3)
    assert flows(client) == [False]
    world.host.delete_queue(world.queue("a"))
    assert client.received() == []
    world.host.delete_queue(world.queue("b"))
    assert flows(client) == [True]


@pytest.mark.parametrize(
    "settle",
    [
        commands.Basic.Ack(1),
        commands.Basic.Ack(0, multiple=True),
        commands.Basic.Nack(1, requeue=False),
        commands.Basic.Nack(0, multiple=True, requeue=False),
        commands.Basic.Reject(1, requeue=False),
    ],
    ids=["ack", "ack multiple", "nack", "nack multiple", "reject"],
)
def test_J6_settling_a_delivery_unflows_the_channel(world, settle):
    publisher, consumer = world.client().channel().with_queue(arguments=STOP_1), world.client().channel()
    publisher.publish(times=2)
    consumer.consume()
    assert world.queue().depth == 2
    assert flows(publisher) == [False]
    consumer.send(1, settle)
    if settle.name != "Basic.Ack" or not settle.multiple:
        consumer.send(1, commands.Basic.Ack(2))
    assert flows(publisher) == [True]


def test_J6_requeueing_a_delivery_does_not_unflow_the_channel(world):
    publisher, consumer = world.client().channel().with_queue(arguments=STOP_1), world.client().channel()
    publisher.publish(times=2)
    consumer.consume()
    consumer.received()
    consumer.send(1, commands.Basic.Nack(0, multiple=True, requeue=True))
    consumer.send(1, commands.Channel.Close(200, "", 0, 0))
    assert flows(publisher) == [False]
    assert world.queue().depth == 2


@pytest.mark.parametrize(
    "shrink",
    [commands.Queue.Purge(queue="q"), commands.Queue.Delete(queue="q"), commands.Basic.Consume(queue="q", no_ack=True)],
    ids=lambda method: method.name,
)
def test_J6_a_purge_a_delete_or_a_no_ack_consumer_unflows_the_channel(world, shrink):
    publisher, other = world.client().channel().with_queue(arguments=STOP_2), world.client().channel()
    publisher.publish(times=3)
    other.send(1, shrink)
    assert flows(publisher) == [False, True]


def test_J6_get_without_ack_unflows_the_channel(world):
    client = world.client().channel(1).channel(2).with_queue(arguments=STOP_2)
    client.publish(times=3)
    client.send(2, commands.Basic.Get(queue="q", no_ack=True))
    assert flows(client) == [False]
    client.send(2, commands.Basic.Get(queue="q", no_ack=True))
    assert flows(client) == [True]


@pytest.mark.parametrize("how", ["channel", "connection", "lost"])
def test_a_queue_forgets_a_flowed_channel_that_ends(world, how):
    client = world.client().channel().with_queue(arguments=STOP_2)
    client.publish(times=3)
    assert len(world.queue().flows.blocked) == 1
    if how == "channel":
        client.send(1, commands.Channel.Close(200, "", 0, 0))
    elif how == "connection":
        client.send(0, commands.Connection.Close(200, "", 0, 0))
    else:
        client.session.end()
    assert world.queue().flows.blocked == ()
    assert flows(client) == [False]


def test_the_flowed_time_of_a_channel_and_the_number_of_its_flows_are_counted(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    channel = client.session.channels[1]
    for start in (10.0, 20.0):
        world.now = start
        client.publish(times=3)
        world.now = start + 2.5
        assert channel.flow.since == start
        world.queue().purge()
    assert (channel.flow.times_flowed, channel.flow.seconds, channel.flow.since) == (2, 5.0, None)


def test_C5_a_message_to_a_queue_that_is_ON_or_turns_ON_is_not_acked_until_the_queue_is_OFF(world):
    client = world.client().channel(confirms=True).with_queue(arguments=STOP_2 | WITHHOLDS)
    client.publish(times=2)
    assert tags(client) == [(2, True)]
    client.publish(times=2)
    assert tags(client) == []
    assert client.session.channels[1].unconfirmed == 2
    world.queue().purge()
    assert tags(client) == [(4, True)]
    assert client.session.channels[1].unconfirmed == 0


def test_C5_a_message_whose_confirm_is_withheld_is_also_acked_when_it_is_dequeued(world):
    client = world.client().channel(confirms=True)
    client.declare(arguments={**STOP_2, "qpid.flow_resume_count": 1, **WITHHOLDS})
    client.publish(times=4)
    assert tags(client) == [(2, True)]
    queue = world.queue()
    queue.take(no_ack=True)
    queue.take(no_ack=True)
    assert tags(client) == []
    queue.take(no_ack=True)
    # One message is left, which is not fewer than the resume threshold.
    assert queue.flows.is_on
    assert tags(client) == [(3, False)]
    queue.take(no_ack=True)
    assert tags(client) == [(4, False)]


def test_C5_a_delivery_counts_as_dequeued_only_when_it_is_settled(world):
    client = world.client().channel(1, confirms=True).channel(2).with_queue(arguments=STOP_1 | WITHHOLDS)
    client.publish(times=2)
    assert tags(client) == [(1, False)]
    client.consume(channel=2)
    assert "Basic.Ack" not in client.names()
    client.send(2, commands.Basic.Ack(2))
    assert tags(client) == [(2, False)]


def test_C5_a_message_is_confirmed_only_when_all_of_its_queues_are_OFF(world):
    client = world.client().channel(confirms=True)
    for name, stop in (("a", 1), ("b", 2), ("c", 100)):
        arguments = {"qpid.flow_stop_count": stop, "qpid.flow_resume_count": 1, "x-qflow-enforcement": "completion"}
        client.declare(name, arguments=arguments)
        client.call(1, commands.Queue.Bind(queue=name, exchange="amq.fanout"), commands.Queue.BindOk)
    client.publish(exchange="amq.fanout", times=3)
    assert tags(client) == [(1, False)]
    world.queue("b").purge()
    assert tags(client) == []
    world.queue("a").purge()
    assert tags(client) == [(3, True)]
    assert world.queue("c").depth == 3


def test_C5_an_ack_of_a_later_message_does_not_include_an_earlier_message_whose_confirm_is_withheld(world):
    client = world.client().channel(confirms=True).with_queue("free")
    client.declare("full", arguments={"qpid.flow_stop_count": 1, "x-qflow-enforcement": "completion"})
    for name in ("full", "full", "free", "free", "full", "free"):
        client.publish(routing_key=name)
    assert tags(client) == [(1, False), (3, False), (4, False), (6, False)]
    world.queue("full").purge()
    assert tags(client) == [(5, True)]


def test_C5_with_the_enforcement_both_the_channel_is_flowed_and_its_confirms_are_withheld(world):
    client = world.client().channel(confirms=True).with_queue(arguments=STOP_2)
    client.publish(times=3)
    assert client.names() == ["Channel.Flow", "Basic.Ack"]
    world.queue().purge()
    assert client.names() == ["Channel.Flow", "Basic.Ack"]


def test_C5_a_full_queue_has_no_confirms_to_withhold_from_a_channel_without_confirm_mode(world):
    client = world.client().channel().with_queue(arguments=STOP_2 | WITHHOLDS)
    client.publish(times=5)
    assert client.received() == []
    assert world.queue().flows.held_confirms == 0


def test_C5_confirms_that_were_withheld_are_not_sent_on_a_channel_that_has_closed(world):
    client = world.client().channel(confirms=True).with_queue(arguments=STOP_2 | WITHHOLDS)
    client.publish(times=4)
    client.received()
    client.send(1, commands.Channel.Close(200, "", 0, 0))
    client.only(commands.Channel.CloseOk)
    world.queue().purge()
    assert client.received() == []


@pytest.mark.parametrize("enforcement", ["completion", "both", "channel_flow"])
@pytest.mark.parametrize("turns", [(50, 15), (1, 1), (7, 15), (50, 1)])
def test_C6_two_producers_never_exceed_the_stop_threshold_by_more_than_the_sum_of_their_capacities(
    world, enforcement, turns
):
    consumer = world.client().channel()
    consumer.declare(arguments={"qpid.flow_stop_count": 100, "x-qflow-enforcement": enforcement})
    producers = [world.client().channel(confirms=True) for _ in range(2)]
    available, flowed = [50, 15], [False, False]
    moved = True
    while moved:
        moved = False
        for which, producer in enumerate(producers):
            for _ in range(turns[which]):
                if not available[which] or flowed[which]:
                    break
                producer.publish()
                available[which] -= 1
                moved = True
            acked = producer.session.channels[1].unconfirmed
            for _, each in producer.received():
                if each.name == "Channel.Flow":
                    flowed[which] = not each.active
            available[which] = (50, 15)[which] - producer.session.channels[1].unconfirmed
            assert acked >= 0
    assert world.queue().contents.peak_depth <= 165
    if enforcement == "completion":
        assert world.queue().contents.peak_depth == 165
        assert available == [0, 0]


def test_D12_with_flow_scope_publishers_a_full_queue_flows_all_channels_that_published_to_it_recently(make_world):
    world = make_world(flow_scope="publishers", recent=10.0)
    clients = [world.client().channel() for _ in range(4)]
    stale, ended, recent, offender = clients
    stale.declare(arguments={"qpid.flow_stop_count": 3, "qpid.flow_resume_count": 3})
    stale.publish()
    world.now = 5.0
    ended.publish()
    ended.session.end()
    recent.publish()
    world.now = 10.1
    offender.publish()
    assert flows(offender) == [False]
    assert flows(recent) == [False]
    assert stale.received() == []
    assert flows(ended) == []
    assert [source.name for source in world.queue().flows.blocked] == ["client-4 (1)", "client-3 (1)"]
    world.queue().purge()
    assert flows(offender) == [True]
    assert flows(recent) == [True]


def test_D5_a_channel_stopped_by_an_operator_and_a_queue_resumes_only_when_both_have_released_it(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    channel = client.session.channels[1]
    client.publish(times=3)
    channel.flow.block(world.controls.operator)
    assert flows(client) == [False]
    world.queue().purge()
    assert client.received() == []
    channel.flow.unblock(world.controls.operator)
    assert flows(client) == [True]


@pytest.mark.parametrize(
    ("method", "reply"),
    [(commands.Confirm.Select(), "Confirm.SelectOk"), (commands.Tx.Select(), "Tx.SelectOk"), (None, None)],
    ids=["confirms", "transactions", "publishes"],
)
def test_D5_while_an_operator_stops_all_publishers_a_channel_that_starts_to_publish_is_stopped(world, method, reply):
    world.controls.producers_stopped = True
    client = world.client().channel().with_queue()
    if method is None:
        client.publish()
        assert flows(client) == [False]
    else:
        client.send(1, method)
        assert client.names() == [reply, "Channel.Flow"]


def test_D5_an_operator_that_stops_all_publishers_does_not_stop_a_channel_that_only_consumes(world):
    world.controls.producers_stopped = True
    client = world.client().channel().with_queue()
    client.consume()
    assert client.names() == ["Basic.ConsumeOk"]
