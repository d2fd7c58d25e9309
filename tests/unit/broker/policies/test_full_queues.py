"""Full queues: live changes of policies, queues that are ON for too long, conflation, and messages that wait."""

from __future__ import annotations

import pytest
from pamqp import commands

from qflow_client.broker.core.entries import DropReason
from qflow_client.broker.core.snapshots import channel_snapshot, queue_snapshot
from qflow_client.broker.policies.policy import Policy, PolicyDefinition

from ..core.test_deadletter import bodies
from ..core.test_flow import STOP_1, STOP_2, flows, tags


def set_policy(world, name="p", **definition):
    world.set_policy(Policy(name, PolicyDefinition.from_mapping(definition)))


def settled(client):
    """Return the tags of acked and of nacked messages."""
    acked, nacked = [], []
    for _, each in client.received():
        if each.name == "Basic.Ack":
            assert not each.multiple
            acked.append(each.delivery_tag)
        elif each.name == "Basic.Nack":
            nacked.append(each.delivery_tag)
    return acked, nacked


# Live changes (D4).


@pytest.mark.parametrize(
    ("stop", "resume", "told"),
    [(2, 2, []), (3, 3, []), (4, 4, [True]), (3, 4, None), (10, 1, []), (10, 3, []), (10, 4, [True]), (0, 0, [True])],
)
def test_D4_J6_raising_the_thresholds_of_a_queue_unflows_its_publishers(world, stop, resume, told):
    client = world.client().channel().with_queue(arguments=STOP_2)
    client.publish(times=3)
    assert flows(client) == [False]
    if told is None:
        with pytest.raises(ValueError, match="stop threshold must not be below"):
            set_policy(world, flow_stop_count=stop, flow_resume_count=resume)
        return
    set_policy(world, flow_stop_count=stop, flow_resume_count=resume)
    assert flows(client) == told
    assert (world.queue().depth, world.queue().flows.times_on) == (3, 1)
    assert world.queue().flows.is_on is (not told)


def test_D4_lowering_the_thresholds_turns_the_queue_ON_and_flows_the_next_publisher(world):
    client = world.client().channel().with_queue()
    client.publish(times=3)
    set_policy(world, flow_stop_count=2)
    assert (world.queue().flows.is_on, world.queue().flows.times_on, client.received()) == (True, 1, [])
    client.publish()
    assert flows(client) == [False]
    world.delete_policy("p")
    assert flows(client) == [True]
    assert (world.queue().flows.is_on, world.queue().flows.times_on, world.queue().depth) == (False, 1, 4)


def test_D4_D12_recent_publishers_are_flowed_when_a_lower_threshold_turns_the_queue_ON(make_world):
    world = make_world(flow_scope="publishers")
    client = world.client().channel().with_queue(arguments={"qpid.flow_stop_count": 10})
    client.publish(times=3)
    set_policy(world, flow_stop_count=2)
    assert flows(client) == [False]


def test_D4_C5_removing_the_thresholds_of_a_queue_releases_all_withheld_confirms(world):
    client = world.client().channel(confirms=True).with_queue()
    set_policy(world, capacity=2)
    client.publish(b"xxx")
    assert client.names() == ["Channel.Flow"]
    set_policy(world, flow_stop_count=5)
    assert sorted(client.names()) == ["Basic.Ack", "Channel.Flow"]
    assert [type(flow.limiter.thresholds).__name__ for flow in world.queue().flows.families] == ["StopResume"]


@pytest.mark.parametrize(
    ("enforcement", "left"), [("completion", ["Channel.Flow"]), ("channel_flow", ["Basic.Ack"]), ("both", [])]
)
def test_D4_the_enforcement_of_a_queue_can_be_changed_while_publishers_are_flowed(world, enforcement, left):
    client = world.client().channel(confirms=True).with_queue(arguments=STOP_1)
    client.publish(times=2)
    client.received()
    set_policy(world, enforcement=enforcement)
    assert client.names() == left
    world.queue().purge()
    assert len(client.names()) + len(left) == 2


@pytest.mark.parametrize(("maximum", "left"), [(1, [b"3"]), (2, [b"2", b"3"]), (3, [b"1", b"2", b"3"])])
def test_D4_lowering_the_maximum_of_a_ring_queue_drops_the_oldest_messages_immediately(world, maximum, left):
    client = world.client().channel().with_queue()
    client.publish_each(b"1", b"2", b"3")
    set_policy(world, policy="ring", max_count=maximum)
    assert bodies(world.queue()) == left
    assert world.queue().contents.dropped == 3 - len(left)


def test_D4_lowering_the_maximum_of_a_queue_with_policy_reject_drops_no_messages(world):
    client = world.client().channel(confirms=True).with_queue()
    client.publish(times=3)
    client.received()
    set_policy(world, policy="reject", max_count=2, flow_stop_count=0)
    client.publish()
    assert (client.names(), world.queue().depth) == (["Basic.Nack"], 3)
    set_policy(world, policy="reject", max_count=4, flow_stop_count=0)
    client.publish()
    assert (client.names(), world.queue().depth) == (["Basic.Ack"], 4)


def test_D4_a_policy_applies_to_the_next_message_of_a_channel_that_is_already_publishing(world):
    client = world.client().channel(confirms=True).with_queue()
    client.publish()
    assert client.names() == ["Basic.Ack"]
    set_policy(world, policy="reject", max_count=1, flow_stop_count=0)
    client.publish()
    assert client.names() == ["Basic.Nack"]


def test_D4_setting_the_same_policy_again_changes_nothing(world):
    client = world.client().channel().with_queue()
    set_policy(world, flow_stop_count=2, flow_resume_count=2)
    client.publish(times=3)
    flow = world.queue().flows.families[0]
    set_policy(world, flow_stop_count=2, flow_resume_count=2)
    assert (flows(client), world.queue().flows.families[0]) == ([False], flow)


# ON for too long (D10).


@pytest.mark.parametrize(("now", "is_overdue"), [(9.999, False), (10.0, True)])
def test_D10_a_queue_whose_state_is_ON_for_max_flow_wait_unflows_its_publishers(world, now, is_overdue, caplog):
    client = world.client().channel(confirms=True).with_queue(arguments={**STOP_2, "x-qflow-max-flow-wait": 10})
    client.publish(times=3)
    assert sorted(client.names()) == ["Basic.Ack", "Channel.Flow"]
    world.tick(now)
    assert sorted(client.names()) == (["Basic.Ack", "Channel.Flow"] if is_overdue else [])
    queue = world.queue()
    assert (queue.flows.is_overdue, queue.flows.is_on, queue.depth, queue.flows.times_overdue) == (
        is_overdue,
        True,
        3,
        is_overdue,
    )
    found = queue_snapshot(queue)
    assert (found.policy, found.overdue) == ("reject" if is_overdue else "flow", is_overdue)
    assert ("has been ON for 10 s" in caplog.text) is is_overdue


def test_D10_after_max_flow_wait_a_reject_queue_refuses_messages_until_it_has_drained(world):
    client = world.client().channel(confirms=True).with_queue(arguments={**STOP_2, "x-qflow-max-flow-wait": 10})
    client.publish(times=3)
    world.tick(10.0)
    client.received()
    client.publish()
    assert settled(client) == ([], [4])
    world.queue().take(no_ack=True)
    client.publish()
    assert settled(client) == ([], [5])
    world.queue().purge()
    assert not world.queue().flows.is_overdue
    assert queue_snapshot(world.queue()).policy == "flow"
    client.publish(times=3)
    assert sorted(client.names()) == ["Basic.Ack", "Channel.Flow"]


def test_D10_after_max_flow_wait_a_queue_that_becomes_a_ring_drops_the_oldest_messages_and_flows_no_publisher(world):
    client = world.client().channel(confirms=True)
    client.declare(arguments={**STOP_2, "x-qflow-max-flow-wait": 10, "x-qflow-then": "ring"})
    client.publish_each(b"1", b"2", b"3")
    world.tick(10.0)
    client.received()
    client.publish_each(b"4", b"5")
    assert tags(client) == [(5, True)]
    assert (bodies(world.queue()), world.queue().contents.drops) == ([b"4", b"5"], {DropReason.MAXLEN: 3})


def test_D10_max_flow_wait_counts_from_zero_each_time_the_queue_turns_ON(world):
    client = world.client().channel().with_queue(arguments={**STOP_2, "x-qflow-max-flow-wait": 10})
    for now in (0.0, 5.0):
        world.now = now
        client.publish(times=3)
        if not now:
            world.queue().purge()
    assert flows(client) == [False, True, False]
    world.tick(10.0)
    assert flows(client) == []
    world.tick(15.0)
    assert flows(client) == [True]


def test_D10_a_full_queue_without_consumers_stops_publishers_of_its_exchange_only_for_max_flow_wait(world):
    client = world.client().channel(confirms=True).with_queue("dead")
    client.declare("alive")
    client.bind_to_fanout("dead", "alive")
    world.set_policy(
        Policy("p", PolicyDefinition.from_mapping({"flow_stop_count": 2, "max_flow_wait": 10, "then": "ring"}), "^dead")
    )
    client.publish(exchange="amq.fanout", times=3)
    assert "Channel.Flow" in client.names()
    world.tick(10.0)
    assert "Channel.Flow" in client.names()
    for number in range(100):
        client.publish(b"%d" % number, exchange="amq.fanout")
        assert "Basic.Nack" not in client.names()
        world.queue("alive").take(no_ack=True)
    assert world.queue("dead").depth == 2
    assert not client.session.channels[1].flow.is_blocked


def test_D10_a_max_flow_wait_set_on_a_full_queue_counts_from_the_time_when_the_queue_turned_ON(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    client.publish(times=3)
    world.now = 7.0
    set_policy(world, max_flow_wait=10)
    world.tick(9.999)
    assert flows(client) == [False]
    world.tick(10.0)
    assert flows(client) == [True]
    set_policy(world, max_size=1000)
    client.publish()
    assert (world.queue().flows.is_overdue, flows(client)) == (False, [False])


# Conflation (D9).


def keyed(client, key, body, **options):
    client.publish(body, properties=commands.Basic.Properties(headers={"k": key} if key is not None else {}), **options)


def test_D9_a_queue_with_policy_conflate_keeps_only_the_last_message_of_each_key(world):
    client = world.client().channel(confirms=True)
    client.declare(arguments={"x-qflow-policy": "conflate", "x-qflow-conflate-key": "k"})
    for key, body in (("a", b"1"), ("b", b"2"), ("a", b"3"), (None, b"4"), (None, b"5"), ("a", b"6"), (7, b"7")):
        keyed(client, key, body)
    assert bodies(world.queue()) == [b"2", b"4", b"5", b"6", b"7"]
    assert world.queue().contents.drops == {DropReason.CONFLATED: 2}
    assert tags(client) == [(7, True)]


def test_D9_without_a_conflate_key_a_message_replaces_the_last_message_with_the_same_routing_key(world):
    client = world.client().channel().with_queue(arguments={"x-qflow-policy": "conflate"})
    bind = commands.Queue.Bind(queue="q", exchange="amq.topic", routing_key="#")
    client.call(1, bind, commands.Queue.BindOk)
    for key, body in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        client.publish(body, key, exchange="amq.topic")
    assert bodies(world.queue()) == [b"2", b"3"]


def test_D9_an_unacked_message_is_dropped_only_when_it_is_requeued_after_a_newer_message_with_its_key(world):
    client = world.client().channel().with_queue(arguments={"x-qflow-policy": "conflate"})
    client.publish(b"1")
    client.send(1, commands.Basic.Get(queue="q"))
    client.publish(b"2")
    assert bodies(world.queue()) == [b"1", b"2"]
    client.send(1, commands.Basic.Reject(1, requeue=True))
    assert (bodies(world.queue()), world.queue().contents.drops) == ([b"2"], {DropReason.CONFLATED: 1})
    client.send(1, commands.Basic.Get(queue="q"), commands.Basic.Reject(2, requeue=True))
    assert bodies(world.queue()) == [b"2"]


def test_D9_an_unacked_message_is_requeued_if_the_newer_message_with_its_key_was_already_consumed(world):
    client = world.client().channel().with_queue(arguments={"x-qflow-policy": "conflate"})
    client.publish(b"1")
    client.send(1, commands.Basic.Get(queue="q"))
    client.publish(b"2")
    client.send(1, commands.Basic.Get(queue="q", no_ack=True))
    client.send(1, commands.Basic.Reject(1, requeue=True))
    assert bodies(world.queue()) == [b"1"]


def test_D9_a_full_conflate_queue_replaces_a_message_with_the_same_key_before_it_drops_the_oldest(world):
    client = world.client().channel()
    client.declare(arguments={"x-qflow-policy": "conflate", "x-qflow-conflate-key": "k", "qpid.max_count": 2})
    for key, body in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4")):
        keyed(client, key, body)
    assert bodies(world.queue()) == [b"3", b"4"]
    assert world.queue().contents.drops == {DropReason.CONFLATED: 1, DropReason.MAXLEN: 1}


def test_D9_J6_replacing_older_messages_with_the_same_key_releases_confirms_and_turns_the_queue_OFF(world):
    client = world.client().channel(confirms=True)
    marks = {"qpid.flow_stop_size": 5, "qpid.flow_resume_size": 5}
    client.declare(arguments={"x-qflow-policy": "conflate", **marks})
    client.publish(b"666666")
    assert client.names() == ["Channel.Flow"]
    client.publish(b"1")
    assert sorted(client.names()) == ["Basic.Ack", "Channel.Flow"]
    assert world.queue().flows.is_on is False


def test_D9_D4_a_queue_whose_policy_changes_to_conflate_keeps_only_the_last_message_of_each_key(world):
    client = world.client().channel().with_queue()
    for key, body in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        keyed(client, key, body)
    set_policy(world, policy="conflate", conflate_key="k")
    assert bodies(world.queue()) == [b"2", b"3"]
    keyed(client, "b", b"4")
    world.delete_policy("p")
    keyed(client, "b", b"5")
    assert bodies(world.queue()) == [b"3", b"4", b"5"]


# Waiting (A4).

WAIT_1: dict[str, object] = {"x-qflow-policy": "wait", "qpid.max_count": 1}


def test_A4_a_message_to_a_full_queue_with_policy_wait_is_acked_once_there_is_room(world):
    client = world.client().channel(confirms=True).with_queue(arguments=WAIT_1)
    client.publish_each(b"1", b"2", b"3")
    assert tags(client) == [(1, False)]
    assert (bodies(world.queue()), world.queue().contents.published) == ([b"1"], 1)
    assert queue_snapshot(world.queue()).waiting == 2
    channel = channel_snapshot(client.session.channels[1])
    assert (channel.waiting, channel.unconfirmed) == (2, 2)
    world.queue().take(no_ack=True)
    world.tick(world.now)
    assert (bodies(world.queue()), tags(client)) == ([b"2"], [(2, False)])
    world.queue().take(no_ack=True)
    world.tick(world.now)
    assert (bodies(world.queue()), tags(client)) == ([b"3"], [(3, False)])
    assert channel_snapshot(client.session.channels[1]).unconfirmed == 0


@pytest.mark.parametrize(("now", "nacked"), [(59.999, []), (60.0, [2])])
def test_A4_a_message_that_has_waited_too_long_for_room_in_its_queue_is_nacked(world, now, nacked):
    client = world.client().channel(confirms=True).with_queue(arguments=WAIT_1)
    client.publish(times=2)
    assert settled(client) == ([1], [])
    world.tick(now)
    assert settled(client) == ([], nacked)
    assert queue_snapshot(world.queue()).waiting == 1 - len(nacked)
    assert (world.queue().depth, channel_snapshot(client.session.channels[1]).nacked) == (1, len(nacked))
    world.queue().purge()
    world.tick(now)
    assert world.queue().depth == 1 - len(nacked)


def test_A4_the_maximum_wait_for_room_in_a_queue_can_be_set(make_world):
    world = make_world(max_producer_flow_control_wait=2)
    client = world.client().channel(confirms=True).with_queue(arguments=WAIT_1)
    client.publish()
    world.now = 1.0
    client.publish(times=2)
    world.tick(2.999)
    assert settled(client) == ([1], [])
    world.tick(3.0)
    assert settled(client) == ([], [2, 3])


def test_A4_without_confirms_a_channel_whose_message_waits_too_long_for_room_is_closed(world):
    client = world.client().channel().with_queue(arguments=WAIT_1)
    client.publish(times=2)
    world.tick(60.0)
    close = client.close_of(commands.Channel.Close)
    assert (close.reply_code, close.class_id, close.method_id) == (506, 60, 40)
    assert "queue 'q' is full" in close.reply_text
    assert "waited 60.0 s" in close.reply_text


@pytest.mark.parametrize("is_taken", [True, False])
def test_A4_a_message_that_was_published_before_confirm_select_and_waits_for_room_gets_no_confirm(world, is_taken):
    client = world.client().channel().with_queue(arguments=WAIT_1)
    client.publish()
    client.publish(b"waits")
    client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
    if is_taken:
        world.queue().take(no_ack=True)
        world.tick(0.0)
        assert bodies(world.queue()) == [b"waits"]
        assert client.received() == []
        world.queue().take(no_ack=True)
        client.publish()
        assert settled(client) == ([1], [])
    else:
        other = world.client().channel(confirms=True)
        other.publish()
        world.tick(60.0)
        # The channel is closed as without confirms. The message that waits behind it is nacked.
        assert client.close_of(commands.Channel.Close).reply_code == 506
        assert settled(other) == ([], [1])


def test_A4_a_message_larger_than_the_maximum_of_the_queue_is_refused_without_waiting(world):
    client = world.client().channel(confirms=True).with_queue(arguments={"x-qflow-policy": "wait", "qpid.max_size": 3})
    client.publish_each(b"xxx", b"xxxx", b"x")
    assert settled(client) == ([1], [2])
    assert queue_snapshot(world.queue()).waiting == 1


def test_A4_F4_messages_that_wait_for_room_in_a_queue_are_accepted_in_order_of_arrival(world):
    first, second = world.client().channel(confirms=True), world.client().channel(confirms=True)
    first.declare(arguments={"x-qflow-policy": "wait", "qpid.max_size": 4})
    first.publish_each(b"4444", b"333")
    second.publish(b"1")
    world.queue().take(no_ack=True)
    # There is room for this message, but an older message waits.
    second.publish(b"2")
    assert bodies(world.queue()) == []
    world.tick(0.0)
    assert bodies(world.queue()) == [b"333", b"1"]
    world.queue().take(no_ack=True)
    world.tick(0.0)
    assert bodies(world.queue()) == [b"1", b"2"]


def test_A4_a_message_that_waits_for_room_in_several_queues_is_accepted_by_all_or_by_none(world):
    client = world.client().channel(confirms=True).with_queue("narrow", arguments=WAIT_1)
    client.declare("wide")
    client.bind_to_fanout("narrow", "wide")
    client.publish(b"1", exchange="amq.fanout")
    client.publish(b"2", exchange="amq.fanout")
    client.publish(b"3", routing_key="wide")
    assert (bodies(world.queue("narrow")), bodies(world.queue("wide"))) == ([b"1"], [b"1"])
    world.queue("narrow").take(no_ack=True)
    world.tick(0.0)
    assert (bodies(world.queue("narrow")), bodies(world.queue("wide"))) == ([b"2"], [b"1", b"2", b"3"])
    client.publish(b"4", routing_key="wide")
    assert bodies(world.queue("wide"))[-1] == b"4"
    assert client.session.channels[1].unconfirmed == 1 + 1 + 1 + 1


def test_A4_a_message_does_not_wait_for_room_in_a_queue_if_another_queue_refuses_it(world):
    client = world.client().channel(confirms=True).with_queue("waits", arguments=WAIT_1)
    client.declare("rejects", arguments={"qpid.max_count": 1, "qpid.flow_stop_count": 0})
    client.bind_to_fanout("waits", "rejects")
    client.publish(exchange="amq.fanout", times=2)
    assert settled(client) == ([1], [2])
    world.queue("rejects").purge()
    client.publish(exchange="amq.fanout")
    assert settled(client) == ([], [])
    # This queue fills up while the message waits. Then the message waits for it, too.
    world.host.publish("", "rejects", b"")
    world.queue("waits").purge()
    world.tick(0.0)
    assert (settled(client), world.queue("waits").depth) == (([], []), 0)
    world.queue("rejects").purge()
    world.tick(0.0)
    assert (settled(client), world.queue("waits").depth) == (([3], []), 1)


def test_A4_a_message_stops_waiting_for_room_in_a_queue_that_is_deleted(world):
    client = world.client().channel(confirms=True).with_queue("narrow", arguments=WAIT_1)
    client.declare("wide")
    client.bind_to_fanout("narrow", "wide")
    client.publish(exchange="amq.fanout", times=3)
    client.received()
    world.host.delete_queue(world.queue("narrow"))
    assert world.queue("wide").depth == 3
    assert tags(client) == [(3, True)]


@pytest.mark.parametrize("confirms", [True, False])
def test_A4_messages_that_wait_for_room_are_dropped_with_their_channel_only_if_the_channel_has_confirms(
    world, confirms
):
    client, other = world.client().channel(confirms=confirms).with_queue(arguments=WAIT_1), world.client().channel()
    client.publish_each(b"1", b"2")
    client.send(1, commands.Channel.Close(200, "", 0, 0))
    other.publish(b"3")
    world.queue().purge()
    world.tick(0.0)
    assert bodies(world.queue()) == ([b"3"] if confirms else [b"2"])
    assert world.queue().contents.drops == ({DropReason.REFUSED: 1} if confirms else {})


def test_A4_messages_of_a_closed_channel_that_wait_too_long_for_room_are_dropped_and_counted(world):
    client = world.client().channel().with_queue(arguments=WAIT_1)
    client.publish_each(b"1", b"2")
    client.send(1, commands.Channel.Close(200, "", 0, 0))
    world.tick(60.0)
    assert world.queue().contents.drops == {DropReason.REFUSED: 1}
    assert queue_snapshot(world.queue()).waiting == 0


@pytest.mark.parametrize(
    ("definition", "in_queue", "outcome"),
    [
        ({"policy": "flow", "flow_stop_count": 0}, [b"1", b"2", b"3"], ([2, 3], [])),
        ({"policy": "reject", "flow_stop_count": 0}, [b"1"], ([], [2, 3])),
        ({"policy": "ring"}, [b"3"], ([2, 3], [])),
        ({"max_count": 2}, [b"1", b"2"], ([2], [])),
    ],
    ids=repr,
)
def test_A4_D4_a_message_that_waits_for_room_is_handled_by_the_new_policy_when_the_policy_changes(
    world, definition, in_queue, outcome
):
    client = world.client().channel(confirms=True).with_queue(arguments=WAIT_1)
    client.publish_each(b"1", b"2", b"3")
    client.received()
    set_policy(world, **definition)
    world.tick(0.0)
    assert bodies(world.queue()) == in_queue
    acked, nacked = outcome
    found = client.received()
    assert [each.delivery_tag for _, each in found if each.name == "Basic.Nack"] == nacked
    assert max((each.delivery_tag for _, each in found if each.name == "Basic.Ack"), default=None) == max(
        acked, default=None
    )


def test_A4_D9_a_commit_for_which_a_queue_has_no_room_is_refused_with_406_and_does_not_wait(world):
    client = world.client().channel().with_queue(arguments=WAIT_1)
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(times=2)
    client.send(1, commands.Tx.Commit())
    close = client.close_of(commands.Channel.Close)
    assert (close.reply_code, world.queue().depth) == (406, 0)
    assert "queue full" in close.reply_text


def test_A4_a_commit_does_not_overtake_a_message_that_waits_for_room(world):
    first, second = world.client().channel(confirms=True), world.client().channel()
    first.declare(arguments={"x-qflow-policy": "wait", "qpid.max_size": 4})
    first.publish_each(b"4444", b"333")
    world.queue().take(no_ack=True)
    second.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    second.publish(b"1")
    second.send(1, commands.Tx.Commit())
    assert "publishes wait for room in queue 'q'" in second.close_of(commands.Channel.Close).reply_text
    world.tick(0.0)
    assert bodies(world.queue()) == [b"333"]


@pytest.mark.parametrize("policy", ["reject", "wait", "ring_strict"])
def test_D9_a_commit_for_which_one_queue_has_no_room_is_rolled_back_in_all_queues(world, policy):
    client = world.client().channel().with_queue("wide")
    client.declare(arguments={"x-qflow-policy": policy, "qpid.max_count": 2, "qpid.flow_stop_count": 0})
    client.publish(b"0")
    client.send(1, commands.Basic.Get(queue="q"))
    client.send(2, commands.Channel.Open(), commands.Tx.Select())
    client.received()
    client.publish(b"1", routing_key="wide", channel=2)
    client.publish(b"2", channel=2)
    client.publish(b"3", channel=2)
    client.send(2, commands.Tx.Commit())
    ((number, close),) = client.received()
    assert (number, close.reply_code) == (2, 406)
    assert (world.queue("wide").depth, bodies(world.queue())) == (0, [b"0"])
