"""Work on very many messages or queues is done in slices of limited size (E9). Other work runs between them."""

from __future__ import annotations

from itertools import count, pairwise, product

import pytest
from pamqp import commands

from qflow_client.broker.core import transaction
from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.consuming import Consuming
from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.dispatcher import Dispatcher
from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.exchange import TopicExchange
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.routing import Router
from qflow_client.broker.core.snapshots import queue_snapshot
from qflow_client.broker.core.timers import Slices, Timers
from qflow_client.broker.core.topology import Topology
from qflow_client.broker.core.waiting import WaitingRoom
from qflow_client.broker.policies.definitions import DefinitionError, Definitions, Loading, QueueDefinition
from qflow_client.broker.policies.policy import Policy, PolicyDefinition
from qflow_client.broker.store.journal import Journal

from ..tools import make_queue, message
from .test_queue import Taker, fill

MANY = 5 * Contents.AT_ONCE // 2


def slices(queue):
    """Yield the number of entries that leave in each tick, until the queue sets no more timers."""
    found = []
    alarms = queue._surroundings.alarms
    while alarms and alarms.pop() <= queue._clock():
        before = queue.depth
        queue.tick(queue._clock())
        found.append(before - queue.depth)
    return found


@pytest.mark.parametrize("arguments", [{}, {"qpid.flow_stop_count": 10}, {"x-message-ttl": 60_000}], ids=str)
def test_E9_a_purge_removes_messages_in_time_slices_and_no_purged_message_is_delivered_meanwhile(arguments):
    queue = fill(make_queue(arguments), [1] * MANY)
    queue._surroundings.alarms.clear()
    assert queue.purge() == MANY
    assert (queue.contents.ready_count, queue.contents.ready_size) == (0, 0)
    assert queue.depth == queue.size == MANY - Contents.AT_ONCE
    snapshot = queue_snapshot(queue)
    assert (snapshot.depth, snapshot.bytes, snapshot.ready) == (0, 0, 0)
    # Messages that are published meanwhile stay in the queue and are delivered.
    queue.enqueue(message(7))
    queue.dispatcher.add(taker := Taker(), exclusive=False)
    queue.dispatcher.dispatch()
    assert [entry.message.size for entry in taker.entries] == [7]
    assert slices(queue) == [Contents.AT_ONCE, Contents.AT_ONCE // 2]
    assert (queue.depth, queue.size, len(queue.contents.leaving), queue.flows.is_on) == (1, 7, 0, False)


def test_E9_a_purge_that_is_requested_during_another_purge_also_removes_the_newer_messages():
    queue = fill(make_queue(), [1] * MANY)
    queue.purge()
    fill(queue, [2] * MANY)
    assert queue.purge() == MANY
    assert (queue.contents.ready_count, queue.contents.ready_size) == (0, 0)
    assert sum(slices(queue)) == queue.contents.published - 2 * Contents.AT_ONCE
    assert (queue.depth, queue.size, queue.contents.leaving_size) == (0, 0, 0)


def test_E9_the_messages_of_a_deleted_queue_are_removed_in_time_slices():
    queue = fill(make_queue(), [1] * MANY)
    queue.dispatcher.add(taker := Taker(), exclusive=False)
    queue.dispatcher.dispatch()
    taker.can_take = False
    fill(queue, [1] * MANY)
    assert queue.delete() == MANY
    assert queue.depth == 2 * MANY - Contents.AT_ONCE
    # A late ack changes nothing.
    queue.dispatcher.settle(taker.entries[-1], acked=True)
    assert (queue.dispatcher.acked, sum(slices(queue))) == (0, 2 * MANY - Contents.AT_ONCE)
    assert (queue.depth, queue.size, queue.contents.unacked) == (0, 0, {})


@pytest.mark.parametrize("policy", ["ring", "reject"])
def test_E9_a_full_queue_accepts_messages_immediately_after_a_purge_that_is_still_removing_messages(policy):
    queue = fill(make_queue({"x-qflow-policy": policy, "qpid.max_count": MANY}), [1] * MANY)
    queue.purge()
    for _ in range(MANY):
        assert queue.refusal(2) is None
        queue.enqueue(message(2))
        queue.after_publish()
    assert (queue.contents.ready_count, queue.contents.dropped) == (MANY, 0)


def test_E9_a_ring_queue_that_overflows_during_a_purge_keeps_messages_published_after_the_purge_began():
    queue = fill(make_queue({"x-qflow-policy": "ring", "qpid.max_count": MANY}), [1] * MANY)
    queue.purge()
    fill(queue, [2] * MANY)
    assert (queue.contents.ready_count, queue.contents.ready_size, queue.contents.dropped) == (MANY, 2 * MANY, 0)


def test_E9_a_message_that_waits_for_its_removal_by_a_purge_is_not_dropped_for_lack_of_memory(make_world):
    world = make_world(journal=Journal(float, has_store=False, limit=1 << 30))
    arguments = {"x-qflow-policy": "conflate", "qpid.max_count": 10_000, "x-qflow-drop-transient": True}
    queue = world.host.declare_queue("q", arguments=arguments)
    for number in range(MANY):
        queue.enqueue(message(1 + number))
        queue.contents.values._last.clear()
    assert queue.depth == MANY
    before = world.host.journal.memory
    entries = list(queue.contents.ready)
    queue.purge()
    queue.dropping.drop_for_memory(entries[-1])
    assert queue.depth == MANY - Contents.AT_ONCE
    assert before > world.host.journal.memory > 0
    world.host.timers.tick(world.now)
    assert (queue.depth, world.host.journal.memory, queue.contents.dropped) == (0, 0, 0)


def test_E9_messages_expire_in_time_slices_and_nothing_is_delivered_before_the_last_slice():
    queue = make_queue({"x-message-ttl": 1000})
    fill(queue, [1] * MANY)
    around = queue._surroundings
    around.now = 0.5
    queue.enqueue(message(7))
    around.now = 1.0
    queue.dispatcher.add(taker := Taker(), exclusive=False)
    queue.dispatcher.dispatch()
    assert queue.take(no_ack=True) is None
    assert (queue.contents.dropped, taker.entries) == (2 * Contents.AT_ONCE, [])
    assert slices(queue) == [Contents.AT_ONCE // 2]
    assert [entry.message.size for entry in taker.entries] == [7]


def test_E9_timers_that_do_not_fit_into_one_tick_of_the_broker_run_in_the_next_tick(make_world):
    world = make_world()
    times = count()
    world.host.timers.clock = lambda: next(times) * Timers.MAX_TICK
    looked = []

    class Due:
        def tick(self, now):
            looked.append(self)

    for _ in range(3):
        world.host.timers.wake_at(Due(), 0.0)
    found = []
    while world.host.timers.next_tick <= 0.0:
        world.host.timers.tick(0.0)
        found.append(len(looked))
    assert found == [1, 2, 3]


POLICY = Policy("p", PolicyDefinition(flow_stop_count=3), pattern="^q")


def marked(world):
    return [queue.name for queue in world.host.queues.values() if queue.flows.families]


def test_E9_a_new_policy_is_applied_to_one_queue_at_a_time_so_that_other_work_can_run_between(world):
    for number in range(4):
        world.host.declare_queue(f"q{number}")
    client = world.client().channel()
    client.publish(routing_key="q0")
    steps = world.rules.set_policy_in_steps(POLICY, world.host)
    next(steps)
    assert marked(world) == ["q0"]
    # The new thresholds of a queue apply before other queues get theirs.
    client.publish(routing_key="q0", times=3)
    assert client.only(commands.Channel.Flow).active is False
    # Queues that are declared meanwhile get the policy. Deleted queues are skipped.
    world.host.delete_queue(world.queue("q2"))
    world.host.declare_queue("q4")
    next(steps)
    assert marked(world) == ["q0", "q1", "q4"]
    assert len(list(steps)) == 1
    assert marked(world) == ["q0", "q1", "q3", "q4"]
    assert len(list(world.rules.delete_policy_in_steps("p", world.host))) == 4
    assert marked(world) == []


def test_E9_definitions_that_cannot_be_loaded_are_rolled_back_one_queue_at_a_time(world):
    world.host.declare_queue("q there")
    definitions = Definitions(
        queues=(QueueDefinition("q0"), QueueDefinition("q1"), QueueDefinition("q there", durable=True)),
        policies=(POLICY,),
    )
    steps = Loading(world.host, world.rules, definitions).steps()
    counts = (len(world.host.queues) for _ in steps)
    assert [next(counts) for _ in range(4)] == [2, 3, 2, 1]
    with pytest.raises(DefinitionError, match="q there"):
        next(counts)


@pytest.mark.parametrize("method", [commands.Basic.Ack, commands.Basic.Nack], ids=["ack", "nack"])
def test_E9_an_ack_of_very_many_deliveries_settles_them_in_slices_before_later_frames_are_handled(
    world, monkeypatch, method
):
    monkeypatch.setattr(Consuming, "AT_ONCE", 10)
    client = world.client().channel().with_queue()
    client.publish(times=30)
    client.consume()
    assert len(client.deliveries_after_ok()) == 30
    client.send(1, method(25, multiple=True), commands.Queue.Declare(queue="q", passive=True))
    unacked = [len(client.session.channels[1].consuming.unacked)]
    while client.session.is_held:
        assert client.raw_output() == b"" or method is commands.Basic.Nack
        client.feed(b"")
        unacked.append(len(client.session.channels[1].consuming.unacked))
    if method is commands.Basic.Ack:
        assert unacked == [20, 10, 5]
        assert client.only(commands.Queue.DeclareOk).consumer_count == 1
        assert world.queue().depth == 5
    else:
        # The messages are requeued and delivered again.
        assert unacked == [30, 30, 30]
        assert world.queue().dispatcher.delivered == 55


@pytest.mark.parametrize("method", [commands.Basic.Ack, commands.Basic.Nack], ids=["ack", "nack"])
def test_E9_an_ack_of_all_deliveries_settles_in_slices_only_the_deliveries_made_before_the_ack(
    world, monkeypatch, method
):
    monkeypatch.setattr(Consuming, "AT_ONCE", 10)
    client = world.client().channel().with_queue()
    client.publish(times=40)
    client.send(1, commands.Basic.Qos(prefetch_count=35))
    client.consume()
    client.received()
    options = {} if method is commands.Basic.Ack else {"requeue": False}
    client.send(1, method(0, multiple=True, **options), commands.Queue.Declare(queue="q", passive=True))
    consuming = client.session.channels[1].consuming
    unacked = [len(consuming.unacked)]
    while client.session.is_held:
        # Messages that are delivered meanwhile are not settled.
        world.host.publish("", "q", b"")
        client.feed(b"")
        unacked.append(len(consuming.unacked))
    assert unacked == [30, 21, 12, 8]
    assert [each.name for _, each in client.received() if each.name == "Queue.DeclareOk"] == ["Queue.DeclareOk"]
    assert min(consuming.unacked) == 36
    # The next such ack settles them.
    client.send(1, method(0, multiple=True, **options))
    assert (len(consuming.unacked), world.queue().depth, client.session.is_held) == (0, 0, False)


@pytest.mark.parametrize("requeue", [True, False])
def test_E9_recover_redelivers_very_many_messages_in_slices_and_each_message_only_once(world, monkeypatch, requeue):
    monkeypatch.setattr(Consuming, "AT_ONCE", 10)
    client = world.client().channel().with_queue()
    for number in range(35):
        client.publish(b"%d" % number)
    client.consume()
    client.received()
    client.send(1, commands.Basic.Recover(requeue=requeue))
    slices = 1
    while client.session.is_held:
        client.feed(b"")
        slices += 1
    assert slices == 4
    deliveries = client.deliveries_after_ok()
    assert [content for _, content, _ in deliveries] == [b"%d" % number for number in range(35)]
    assert sorted(client.session.channels[1].consuming.unacked) == [tag for tag, _, _ in deliveries]


@pytest.mark.usefixtures("two_steps")
def test_E9_unacked_messages_of_a_lost_connection_are_requeued_in_slices_and_in_order(world, monkeypatch):
    monkeypatch.setattr(Consuming, "RETURNS", 5)
    client, other = (world.client().channel() for _ in range(2))
    client.declare("q")
    client.declare("got")
    for number in range(35):
        client.publish(b"%d" % number)
    client.publish(routing_key="got")
    client.send(1, commands.Basic.Get(queue="got"))
    client.consume()
    client.received()
    client.session.lost()
    other.consume()
    other.publish(b"35")
    other.publish(routing_key="got")
    queues = world.queue(), world.queue("got")
    assert other.deliveries_after_ok() == []
    assert ticks(world, lambda: queues[0].contents.ready_count)[:5] == [11, 21, 31, 36, 0]
    assert [content for _, content, _ in other.deliveries()] == [b"%d" % number for number in range(36)]
    assert [entry.redelivered for entry in queues[1].contents.oldest_first()] == [True, False]


@pytest.mark.usefixtures("two_steps")
def test_E9_a_queue_can_be_deleted_while_the_unacked_messages_of_a_lost_connection_are_requeued(world, monkeypatch):
    monkeypatch.setattr(Consuming, "RETURNS", 5)
    client = world.client().channel().with_queue()
    client.publish(times=35)
    client.consume()
    client.received()
    queue = world.queue()
    client.session.lost()
    world.host.delete_queue(queue)
    assert ticks(world, lambda: queue.contents.ready_count)[-1] == 0
    assert (queue.depth, queue.contents.ready_count, queue.contents.unacked) == (0, 0, {})
    assert world.host.timers.next_tick == float("inf")


@pytest.fixture(name="two_steps")
def _two_steps(monkeypatch):
    """End each slice after two steps, because its time is over."""
    monkeypatch.setattr(Slices, "AT_ONCE", 2)
    monkeypatch.setattr(Timers, "MAX_TICK", 0.0)


def ticks(world, measure):
    """Return the results of `measure`: now, and after each tick until no timer is due."""
    found = [measure()]
    while world.host.timers.next_tick <= world.now:
        world.host.timers.tick(world.now)
        found.append(measure())
    return found


def steps(done, *numbers):
    for number in numbers:
        done.append(number)
        yield


def test_E9_work_that_takes_less_than_the_time_of_a_slice_is_done_immediately(world):
    done: list[int] = []
    world.host.slices.run(steps(done, *range(1000)))
    assert (len(done), world.host.timers.next_tick) == (1000, float("inf"))


@pytest.mark.usefixtures("two_steps")
def test_E9_each_work_has_its_first_slice_immediately_even_if_other_work_remains_or_has_failed(world):
    done: list[int] = []
    slices = world.host.slices

    def first():
        done.append(1)
        slices.run(steps(done, 2, 3))
        yield
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        slices.run(first())
    slices.run(steps(done, 4, 5, 6))
    assert ticks(world, done.copy)[:3] == [[1, 4, 5], [1, 4, 5, 2, 3], [1, 4, 5, 2, 3, 6]]
    slices.run(steps(done, 7))
    assert done == [1, 4, 5, 2, 3, 6, 7]


@pytest.mark.usefixtures("two_steps")
def test_E9_a_new_consumer_with_the_tag_of_one_that_is_still_to_be_cancelled_stays(world):
    client = world.client().channel().with_queue("q").with_queue("r")
    for number in range(5):
        client.consume("q", tag=f"c{number}")
    client.send(1, commands.Queue.Delete(queue="q"), commands.Basic.Cancel("c4", nowait=True))
    client.consume("r", tag="c4")
    ticks(world, lambda: None)
    client.received()
    client.publish(routing_key="r")
    delivered = [frame for _, frame in client.received() if isinstance(frame, commands.Basic.Deliver)]
    assert [frame.consumer_tag for frame in delivered] == ["c4"]
    assert list(client.session.channels[1].consuming.consumers) == ["c4"]


def test_a_deleted_exchange_leaves_nothing_of_its_alternate_exchange(world):
    client = world.client().channel()
    declare = commands.Exchange.Declare(exchange="e", arguments={"alternate-exchange": "other"})
    client.send(1, declare, commands.Exchange.Delete(exchange="e"))
    assert world.host.topology._with_alternate == {}


@pytest.mark.usefixtures("two_steps")
def test_E9_the_exclusive_queues_of_a_lost_connection_are_deleted_in_slices_but_their_names_are_free_immediately(world):
    client, other = (world.client().channel() for _ in range(2))
    for number in range(5):
        client.declare(f"q{number}", exclusive=True)
        client.call(1, commands.Queue.Bind(queue=f"q{number}", exchange="amq.fanout"), commands.Queue.BindOk)
    queues = [world.queue(f"q{number}") for number in range(5)]
    client.session.lost()
    assert list(world.host.queues) == []
    other.declare("q4")
    other.publish(routing_key="q4")
    other.publish(exchange="amq.fanout")
    deleted = ticks(world, lambda: sum(queue.is_deleted for queue in queues))
    assert deleted[0] < 5
    assert deleted[-1] == 5
    assert max(after - before for before, after in pairwise(deleted)) <= 2
    assert not world.host.topology.exchanges["amq.fanout"].bindings
    assert (list(world.host.queues), world.queue("q4").depth) == (["q4"], 1)
    assert [queue.depth for queue in queues] == [0] * 5


@pytest.mark.usefixtures("two_steps")
@pytest.mark.parametrize("kind", ["direct", "headers"])
def test_E9_the_bindings_of_a_deleted_queue_are_removed_in_slices_and_route_no_more_messages(world, kind):
    client = world.client().channel().with_queue()
    client.declare("alternate")
    topology, queue = world.host.topology, world.queue()
    topology.declare_exchange("e", kind, auto_delete=True, arguments={"alternate-exchange": "amq.fanout"})
    topology.bind(world.queue("alternate"), "amq.fanout", "", {})
    for number in range(5):
        topology.bind(queue, "e", "", {"x-number": number})
    source = topology.exchanges["e"]
    client.publish(exchange="e", routing_key="")
    client.call(1, commands.Queue.Delete(queue="q"), commands.Queue.DeleteOk)
    assert len(source.bindings) == 3
    client.publish(exchange="e", routing_key="")
    assert (queue.depth, world.queue("alternate").depth) == (0, 1)
    # A new queue with the same name has other bindings.
    client.declare("q")
    topology.bind(world.queue(), "e", "", {"x-number": 4})
    client.publish(exchange="e", routing_key="")
    assert world.queue().depth == 1
    assert ticks(world, lambda: len(source.bindings))[:3] == [4, 2, 1]
    client.call(1, commands.Queue.Delete(queue="q"), commands.Queue.DeleteOk)
    assert "e" not in topology.exchanges


@pytest.mark.usefixtures("two_steps")
def test_E9_an_exchange_can_be_deleted_while_its_bindings_to_a_deleted_queue_are_removed(world):
    client = world.client().channel().with_queue()
    topology = world.host.topology
    topology.declare_exchange("e", "topic")
    for number in range(5):
        topology.bind(world.queue(), "e" if number % 2 else "amq.topic", f"{number}", {})
    world.host.delete_queue(world.queue())
    topology.delete_exchange("e")
    assert ticks(world, lambda: len(topology.exchanges["amq.topic"].bindings))[-1] == 0
    assert topology._bound == {}
    assert client.received() == []


def test_E9_a_long_chain_of_auto_delete_exchanges_is_deleted_without_recursion(world):
    topology = world.host.topology
    for number in range(2000):
        topology.declare_exchange(f"e{number}", "fanout", auto_delete=True)
        topology.bind(topology.exchanges[f"e{number - 1}" if number else "amq.fanout"], f"e{number}", "", {})
    topology.delete_exchange("e0")
    assert [name for name in topology.exchanges if name.startswith("e")] == []


@pytest.mark.usefixtures("two_steps")
def test_E9_the_consumers_of_a_deleted_queue_are_cancelled_in_slices(world):
    client = world.client().channel().with_queue()
    for number in range(5):
        client.with_consumer(tag=f"c{number}")
    client.send(1, commands.Queue.Delete(queue="q"))
    cancelled = [client.names()]
    # The client cancels a consumer that the broker has not cancelled yet.
    client.call(1, commands.Basic.Cancel("c4"), commands.Basic.CancelOk)
    cancelled += ticks(world, client.names)[1:]
    assert [names.count("Basic.Cancel") for names in cancelled if names] == [2, 2]
    assert client.session.channels[1].consuming.consumers == {}


@pytest.mark.usefixtures("two_steps")
def test_E9_the_consumers_of_a_closed_channel_are_removed_in_slices_and_get_no_messages_meanwhile(world):
    client, other = (world.client().channel() for _ in range(2))
    for number in range(5):
        client.declare(f"q{number}", auto_delete=True)
        client.with_consumer(f"q{number}", tag=f"c{number}")
    client.call(1, commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
    other.publish(routing_key="q4")
    assert (client.received(), world.queue("q4").contents.ready_count) == ([], 1)
    assert len(world.host.queues) == 5
    assert ticks(world, lambda: len(world.host.queues))[-1] == 0


@pytest.mark.usefixtures("two_steps")
def test_E9_the_channels_of_a_lost_connection_return_their_messages_in_slices(world):
    client = world.client()
    for number in range(1, 6):
        client.channel(number)
    client.declare("q")
    client.publish(times=5)
    for number in range(1, 6):
        client.send(number, commands.Basic.Get(queue="q"))
    client.session.lost()
    ready = ticks(world, lambda: world.queue().contents.ready_count)
    assert max(after - before for before, after in pairwise(ready)) <= 2
    assert [entry.sequence for entry in world.queue().contents.ready] == [1, 2, 3, 4, 5]


def bind_by_headers(client, size, text):
    arguments = {"a": "x" * size, "text": text}
    client.send(1, commands.Queue.Bind(queue="q", exchange="amq.headers", arguments=arguments))


def test_E9_the_total_size_of_the_arguments_of_all_bindings_to_headers_exchanges_is_limited(world, monkeypatch):
    monkeypatch.setattr(Topology, "MAX_HEADERS_SIZE", 1000)
    client = world.client().channel().with_queue()
    bind_by_headers(client, 700, "first")
    client.only(commands.Queue.BindOk)
    bind_by_headers(client, 700, "second")
    client.check_close(commands.Channel.Close, 406, "more than 1000 bytes")
    client.send(1, commands.Channel.CloseOk())
    client.channel()
    # The same binding and the bindings of other exchanges are accepted.
    bind_by_headers(client, 700, "first")
    client.only(commands.Queue.BindOk)
    world.host.topology.bind(world.queue(), "amq.topic", "a", {"a": "x" * 700})
    # The end of a binding makes room.
    world.host.delete_queue(world.queue())
    assert world.host.router.headers_size == 0
    client.declare("q")
    bind_by_headers(client, 700, "second")
    client.only(commands.Queue.BindOk)


def test_E9_after_a_message_to_a_headers_exchange_with_large_bindings_other_connections_are_served(world, monkeypatch):
    client = world.client().channel().with_queue()
    monkeypatch.setattr(Channel, "LONG_HEADERS", 100)
    client.publish(exchange="amq.headers")
    assert not client.session.has_done_much
    bind_by_headers(client, 100, "")
    client.publish(exchange="amq.headers")
    assert client.session.has_done_much


@pytest.mark.parametrize("frame", ["method", "publish"])
def test_E9_a_method_or_a_first_publish_that_takes_long_is_the_last_of_its_slice(world, frame):
    client = world.client().channel().with_queue()
    client.publish()

    def take_long(function):
        def slow(*arguments, **keywords):
            world.now += 2 * Channel.LONG
            return function(*arguments, **keywords)

        return slow

    if frame == "method":
        world.host.declare_queue = take_long(world.host.declare_queue)
        client.declare("other")
    else:
        world.host.router.resolve = take_long(world.host.router.resolve)
        client.publish(routing_key="q")
        assert not client.session.has_done_much
        client.declare("other")
        client.publish(routing_key="q")
    assert client.session.has_done_much


@pytest.mark.parametrize("what", ["publish", "ack", "fanout"])
def test_E9_the_size_of_a_transaction_is_limited_because_a_commit_is_one_step(world, monkeypatch, what):
    monkeypatch.setattr(transaction, "MAX_OPERATIONS", 4)
    client = world.client().channel().with_queue()
    world.host.declare_queue("other")
    for queue in ("q", "other"):
        world.host.topology.bind(world.queue(queue), "amq.fanout", "", {})
    client.publish(times=5)
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(exchange="amq.fanout", times=2)
    client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
    assert (world.queue().depth, world.queue("other").depth) == (7, 2)
    if what == "publish":
        client.publish(times=5)
    elif what == "ack":
        client.consume()
        client.received()
        client.send(1, commands.Basic.Ack(5, multiple=True))
    else:
        client.publish(exchange="amq.fanout", times=3)
        client.send(1, commands.Tx.Commit())
    client.check_close(commands.Channel.Close, 406, "more than 4 messages and acks")
    assert (world.queue().contents.ready_count, world.queue("other").depth) == (7, 2)


def test_E9_a_queue_delivers_very_many_messages_to_several_consumers_in_slices_and_in_order(monkeypatch):
    monkeypatch.setattr(Dispatcher, "AT_ONCE", 10)
    queue = fill(make_queue(), [1] * 25)
    takers = [Taker(no_ack=True) for _ in range(2)]
    for taker in takers:
        queue.dispatcher.add(taker, exclusive=False)
    queue.dispatcher.dispatch()
    assert queue.depth == 15
    # A message that is published meanwhile stays behind.
    queue.enqueue(message())
    assert slices(queue) == [10, 6]
    assert [[entry.sequence for entry in taker.entries] for taker in takers] == [list(range(k, 27, 2)) for k in (1, 2)]


def test_E9_a_routing_key_that_too_many_binding_keys_of_a_topic_exchange_could_match_is_refused(
    world, monkeypatch, caplog
):
    monkeypatch.setattr(TopicExchange, "MAX_PLACES", 20)
    client = world.client().channel(2).channel(confirms=True)
    client.declare("dying")
    for words in product("a*#", repeat=3):
        world.host.topology.bind(world.queue("dying"), "amq.topic", ".".join(words), {})
    client.publish(exchange="amq.topic", routing_key="b")
    client.only(commands.Basic.Ack)
    client.publish(exchange="amq.topic", routing_key="a.a.a", channel=2)
    client.only(commands.Channel.Close, 2)
    # A dead letter is lost, because it has no publisher that could be informed.
    world.host.declare_queue(
        "dies", arguments={"x-dead-letter-exchange": "amq.topic", "x-dead-letter-routing-key": "a.a.a"}
    )
    client.publish(routing_key="dies", properties=commands.Basic.Properties(expiration="0"))
    world.tick(0.0)
    assert (world.queue("dies").depth, world.queue("dying").depth) == (0, 1)
    assert "too many binding keys match" in caplog.text


@pytest.mark.usefixtures("two_steps")
def test_E9_a_get_waits_until_all_messages_of_a_lost_connection_have_returned(world, monkeypatch):
    monkeypatch.setattr(Consuming, "RETURNS", 5)
    client, other = (world.client().channel() for _ in range(2))
    client.declare()
    client.publish_each(*(b"%d" % number for number in range(35)))
    client.consume()
    client.received()
    client.session.lost()
    other.send(1, commands.Basic.Get(queue="q"), commands.Queue.Declare(queue="q", passive=True))

    def go_on():
        other.feed(b"")
        return other.session.is_held

    assert ticks(world, go_on)[:3] == [True, True, True]
    get_ok, _, content, declare_ok = [frame for _, frame in other.received()]
    assert (get_ok.name, content.value, declare_ok.message_count) == ("Basic.GetOk", b"0", 34)


def test_E9_a_get_waits_until_very_many_expired_messages_are_dropped(world, monkeypatch):
    monkeypatch.setattr(Contents, "AT_ONCE", 10)
    client = world.client().channel().with_queue()
    client.publish(times=25, properties=commands.Basic.Properties(expiration="1000"))
    client.publish(b"live")
    world.now = 1.0
    client.send(1, commands.Basic.Get(queue="q", no_ack=True))
    held = [client.session.is_held]
    while client.session.is_held:
        client.feed(b"")
        held.append(client.session.is_held)
    assert held == [True, True, False]
    assert [frame.value for _, frame in client.received() if frame.name == "ContentBody"] == [b"live"]


@pytest.mark.usefixtures("two_steps")
def test_E9_a_queue_over_its_maximum_delivers_none_of_the_messages_that_it_drops(world):
    client, other = (world.client().channel() for _ in range(2))
    for number in range(4):
        world.host.declare_queue(f"q{number}", arguments={"x-max-length": 1})
        client.publish(b"old", routing_key=f"q{number}")
        client.send(1, commands.Basic.Get(queue=f"q{number}"))
        client.publish(b"new", routing_key=f"q{number}")
    client.received()
    client.session.lost()
    queue = world.queue("q3")
    assert (queue.contents.ready_count, queue.dispatcher.catch_up()) == (2, False)
    other.send(1, commands.Basic.Get(queue="q3"))
    assert ticks(world, lambda: other.feed(b"") or queue.contents.ready_count)[-1] == 0
    assert [frame.value for _, frame in other.received() if frame.name == "ContentBody"] == [b"new"]


@pytest.fixture(name="wide")
def _wide(world, monkeypatch):
    """Return a client of a broker with four queues that are bound to `amq.fanout` and `amq.headers`."""
    monkeypatch.setattr(Router, "MAX_QUEUES", 3)
    for name in "abcd":
        for exchange in ("amq.fanout", "amq.headers"):
            world.host.topology.bind(world.host.declare_queue(name), exchange, "", {})
    return world.client().channel(2).channel()


@pytest.mark.parametrize("exchange", ["amq.fanout", "amq.headers"])
@pytest.mark.parametrize("mode", [commands.Confirm.Select, commands.Tx.Select])
def test_E9_a_message_to_more_than_the_maximum_of_queues_is_refused(world, wide, exchange, mode):
    wide.send(1, mode())
    wide.received()
    wide.publish(exchange=exchange)
    wide.check_close(commands.Channel.Close, 406, f"exchange '{exchange}': a message", "would go to 4 queues")
    assert world.queue("a").depth == 0
    world.host.topology.unbind(world.queue("d"), exchange, "", {})
    wide.publish(exchange=exchange, channel=2)
    assert world.queue("a").depth == 1
    with pytest.raises(ChannelException, match="would go to 4 queues; at most 3 are allowed"):
        world.host.publish("amq.fanout" if exchange == "amq.headers" else "amq.headers", "", b"")


@pytest.mark.usefixtures("wide")
def test_E9_a_dead_letter_to_more_than_the_maximum_of_queues_is_lost_with_a_warning(world, caplog):
    world.host.declare_queue("q", arguments={"x-dead-letter-exchange": "amq.fanout", "x-max-length": 1})
    world.host.publish("", "q", b"1")
    world.host.publish("", "q", b"2")
    assert (world.queue().depth, world.queue("a").depth) == (1, 0)
    assert "queue 'q': a message is lost (maxlen): exchange 'amq.fanout': a message with" in caplog.text


def test_E9_a_message_of_a_transaction_is_routed_when_it_is_published_so_that_the_commit_is_short(world, monkeypatch):
    client = world.client().channel()
    for name in ("q", "gone", "again"):
        world.host.topology.bind(world.host.declare_queue(name), "amq.headers", "", {})
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(exchange="amq.headers", times=2)
    world.host.topology.bind(world.host.declare_queue("late"), "amq.headers", "", {})
    world.host.delete_queue(world.queue("gone"))
    world.host.delete_queue(world.queue("again"))
    world.host.declare_queue("again")
    monkeypatch.setattr(world.host.router, "destinations", None)
    monkeypatch.setattr(world.host.router, "resolve", None)
    client.call(1, commands.Tx.Commit(), commands.Tx.CommitOk)
    assert [world.queue(name).depth for name in ("q", "again", "late")] == [2, 2, 0]


WAIT = {"x-qflow-policy": "wait", "qpid.max_count": 10}


@pytest.mark.usefixtures("two_steps")
def test_E9_very_many_messages_that_wait_for_room_are_admitted_in_slices_and_in_order(world, monkeypatch):
    monkeypatch.setattr(WaitingRoom, "AT_ONCE", 3)
    client = world.client().channel(confirms=True)
    client.declare(arguments=WAIT)
    client.publish_each(*(b"%d" % number for number in range(17)))
    world.queue().purge()
    assert ticks(world, lambda: world.queue().waiting)[:4] == [7, 4, 1, 0]
    assert [entry.message.body for entry in world.queue().contents.ready] == [
        b"%d" % number for number in range(10, 17)
    ]


@pytest.mark.usefixtures("two_steps")
def test_E9_very_many_messages_that_wait_for_room_are_refused_in_slices(world, monkeypatch):
    monkeypatch.setattr(WaitingRoom, "AT_ONCE", 3)
    client = world.client().channel(confirms=True)
    client.declare(arguments=WAIT)
    client.publish_each(*(b"%d" % number for number in range(17)))
    client.received()
    world.now = world.host.settings.max_producer_flow_control_wait
    assert ticks(world, lambda: world.queue().waiting)[:4] == [7, 4, 1, 0]
    assert [frame.delivery_tag for _, frame in client.received()] == list(range(11, 18))


def test_E9_the_admission_of_waiting_messages_drops_a_limited_number_of_expired_messages(world):
    client = world.client().channel(confirms=True)
    client.declare(arguments=WAIT | {"qpid.max_count": MANY, "x-message-ttl": 1000})
    client.publish_each(*(b"%d" % number for number in range(2 * MANY)))
    world.now = 1.0
    found = ticks(world, lambda: world.queue().contents.drops.get("expired", 0))
    assert (found[0], found[-1], world.queue().waiting) == (0, MANY, 0)
    # The messages that expire before the admission, and those that `admit` drops for its first two messages.
    assert max(after - before for before, after in pairwise(found)) <= 3 * Contents.AT_ONCE


@pytest.mark.usefixtures("two_steps")
def test_E9_waiting_messages_of_a_closed_channel_are_discarded_in_slices_without_a_gap(world):
    client = world.client().channel(confirms=True)
    client.declare(arguments=WAIT)
    client.publish_each(*(b"%d" % number for number in range(17)))
    client.session.lost()
    # One message enters meanwhile. It must be the oldest.
    world.host.queue("q").take(no_ack=True)
    assert ticks(world, lambda: world.queue().waiting)[-1] == 0
    assert [entry.message.body for entry in world.queue().contents.ready] == [b"%d" % number for number in range(1, 11)]
    assert world.queue().contents.drops == {"refused": 6}


def fail_once(method):
    """Return a method that raises an exception when it is called first."""
    calls = count()

    def run(self):
        if next(calls) == 0:
            raise ZeroDivisionError
        method(self)

    return run


HOLDS = {"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1, "x-qflow-enforcement": "completion"}


@pytest.mark.usefixtures("two_steps")
def test_E9_C5_very_many_held_confirms_are_released_in_slices_each_once_and_in_order(world):
    client, other = (world.client().channel(confirms=True) for _ in range(2))
    world.host.declare_queue("q", arguments=HOLDS)
    client.publish(times=7)
    acked = [frame.delivery_tag for _, frame in client.received()]
    world.queue().flows.let_go()
    # These messages are held and released while earlier confirms still have to be released.
    other.publish(times=3)
    client.publish()
    world.queue().flows.let_go()

    def go_on():
        acked.extend(frame.delivery_tag for _, frame in client.received())
        other.received()
        return [len(each.session.channels[1].confirms) for each in (client, other)]

    assert ticks(world, go_on)[:5] == [[5, 3], [3, 3], [1, 3], [1, 1], [0, 0]]
    assert acked == [1, 3, 5, 7, 8]
    assert world.queue().flows.held_confirms == 0


@pytest.mark.usefixtures("two_steps")
@pytest.mark.parametrize("end", ["connection", "queue"])
def test_E9_C5_a_connection_or_queue_can_end_while_held_confirms_are_released(world, end):
    client, other = (world.client().channel(confirms=True) for _ in range(2))
    world.host.declare_queue("q", arguments=HOLDS)
    client.publish(times=6)
    other.publish(times=6)
    world.queue().flows.let_go()
    if end == "connection":
        client.session.lost()
    else:
        world.host.delete_queue(world.queue())
    ticks(world, lambda: None)
    assert other.received()[-1][1].delivery_tag == 6
    assert len(other.session.channels[1].confirms) == 0


@pytest.mark.usefixtures("two_steps")
def test_E9_C5_held_confirms_are_released_after_one_that_fails(world, monkeypatch):
    client = world.client().channel(confirms=True)
    world.host.declare_queue("q", arguments=HOLDS)
    client.publish(times=6)
    client.received()
    completion = next(iter(world.queue().flows.families[0].held.values()))
    monkeypatch.setattr(type(completion), "release", fail_once(type(completion).release))
    with pytest.raises(ZeroDivisionError):
        world.queue().flows.let_go()
    ticks(world, client.received)
    assert len(client.session.channels[1].confirms) == 1


@pytest.mark.usefixtures("two_steps")
def test_a_queue_delivers_again_if_the_return_of_messages_fails(world, monkeypatch):
    client, other = (world.client().channel() for _ in range(2))
    client.declare()
    client.publish()
    client.consume()
    client.received()
    monkeypatch.setattr(world.queue().dispatcher._contents, "values", object())
    with pytest.raises(AttributeError):
        client.session.lost()
    other.publish(b"next")
    other.consume()
    assert [content for _, content, _ in other.deliveries_after_ok()] == [b"next"]


@pytest.mark.usefixtures("two_steps")
def test_limits_are_inherited_again_after_the_computation_of_one_limit_has_failed(world, monkeypatch):
    monkeypatch.setattr(type(world.rules), "are_inherited", True)
    for number in range(3):
        world.host.declare_queue(f"q{number}")
    with monkeypatch.context() as patch:
        patch.setattr(world.host, "apply_rules", None)
        with pytest.raises(TypeError):
            world.host._bindings_changed(None)
    changed: list[Queue] = []
    monkeypatch.setattr(world.host, "apply_rules", changed.append)
    world.host._bindings_changed(None)
    ticks(world, lambda: None)
    assert changed == list(world.host.queues.values())
