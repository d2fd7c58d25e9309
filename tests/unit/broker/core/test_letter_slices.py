"""Dead letters are sent in slices of limited size, and what causes them waits (E9)."""

from __future__ import annotations

import heapq

import pytest
from pamqp import commands

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.deadletter import DeadLetters
from qflow_client.broker.core.dropping import Dropping
from qflow_client.broker.core.entries import DropReason
from qflow_client.broker.core.session import State
from qflow_client.broker.core.timers import Timers
from qflow_client.broker.policies.policy import Policy, PolicyDefinition

from ..tools import make_queue, message
from .test_deadletter import DLX, bodies
from .test_queue import Taker, fill

FULL = {**DLX, "x-max-length": 1}


@pytest.fixture(name="client")
def _client(world, monkeypatch):
    """A client of a broker that sends two dead letters, each to one queue, in each slice."""
    monkeypatch.setattr(DeadLetters, "AT_ONCE", 4)
    return world.client().channel(confirms=True).with_queue("dead")


def slices(world, value):
    """Return the values of a function after each timer until no timer is due."""
    found, timers = [], world.host.timers
    while timers.next_tick <= world.now:
        heapq.heappop(timers._timers)[2].tick(world.now)
        found.append(value())
    return found


def depth(world):
    return lambda: world.queue("dead").depth


def rejected(client, count, queue="q"):
    client.received()
    client.declare(queue, arguments=DLX)
    client.publish(routing_key=queue, times=count)
    client.consume(queue)
    client.received()
    client.send(1, commands.Basic.Nack(0, multiple=True, requeue=False))


def test_the_letters_of_one_frame_are_sent_in_slices_and_the_client_is_not_read_before_the_last(world, client):
    rejected(client, 7)
    assert (world.queue("q").depth, world.queue("dead").depth) == (0, 2)
    # The client's next message comes with further input.
    client.publish(b"next", routing_key="dead")
    assert client.session.is_held
    assert not client.session.can_resume
    assert slices(world, lambda: (world.queue("dead").depth, client.session.can_resume)) == [
        (4, False),
        (6, False),
        (7, True),
    ]
    client.feed(b"")
    assert bodies(world.queue("dead"))[-1] == b"next"
    assert not client.session.is_held


def test_a_client_whose_frames_leave_no_letters_is_read_meanwhile(world, client):
    rejected(client, 7)
    other = world.client().channel(confirms=True).with_queue("other")
    other.publish(routing_key="other")
    assert other.names() == ["Basic.Ack"]
    # A frame that adds a letter waits for the letters of others, too, so letters are sent in order.
    other.declare("full", arguments=FULL)
    other.publish(b"first", routing_key="full")
    other.publish(b"second", routing_key="full")
    assert (bodies(world.queue("full")), world.queue("dead").depth) == ([b"second"], 2)
    assert other.session.is_held
    slices(world, lambda: None)
    assert bodies(world.queue("dead"))[-1] == b"first"
    assert other.session.can_resume


@pytest.mark.parametrize("how", ["publish", "refusal", "commit", "get"])
def test_each_kind_of_frame_that_leaves_letters_makes_its_client_wait(world, client, how):
    other = world.client().channel(confirms=how in ("publish", "refusal"))
    overflow = {"x-overflow": "reject-publish-dlx"} if how == "refusal" else {}
    expires = {"x-message-ttl": 0} if how == "get" else {}
    other.declare("full", arguments={**FULL, **overflow, **expires})
    world.queue("full").enqueue(message(1))
    rejected(client, 7)
    if how == "commit":
        other.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    if how == "get":
        other.send(1, commands.Basic.Get(queue="full"))
    else:
        other.publish(routing_key="full")
    if how == "commit":
        other.send(1, commands.Tx.Commit())
    assert (other.session.is_held, other.session.can_resume) == (True, False)
    slices(world, lambda: None)
    assert other.session.can_resume
    other.feed(b"")
    assert not other.session.is_held
    assert world.queue("dead").depth == 8


def test_a_message_that_dies_between_two_steps_waits_for_the_next_tick(world, client):
    client.declare("q", arguments=DLX)
    client.publish(times=3)
    for _ in range(3):
        world.queue("q").dropping.drop(world.queue("q").contents.first(), DropReason.MAXLEN)
    assert world.queue("dead").depth == 0
    assert slices(world, depth(world)) == [2, 3]


def test_a_slice_ends_when_its_time_is_over(world, client, monkeypatch):
    monkeypatch.setattr(DeadLetters, "AT_ONCE", 100)
    monkeypatch.setattr(Timers, "MAX_TICK", 2.5)
    times = iter(range(1000))
    monkeypatch.setattr(world.host.dead_letters, "_clock", lambda: next(times))
    monkeypatch.setattr(world.host.timers, "wake_at", lambda what, at: None)
    rejected(client, 7)
    found = [world.queue("dead").depth]
    while world.host.dead_letters._dead:
        world.host.dead_letters.tick(0.0)
        found.append(world.queue("dead").depth)
    assert found == [2, 5, 7]


def test_a_letter_to_very_many_queues_is_a_slice_of_its_own(world, client):
    for number in range(9):
        world.host.topology.bind(world.host.declare_queue(f"d{number}"), "amq.fanout", "", {})
    client.declare("q", arguments={"x-dead-letter-exchange": "amq.fanout"})
    client.publish(times=2)
    client.consume("q")
    client.send(1, commands.Basic.Nack(0, multiple=True, requeue=False))
    assert world.queue("d0").depth == 0
    assert slices(world, lambda: world.queue("d8").depth) == [1, 2]
    assert DropReason.COPY not in world.queue("q").contents.drops


def test_messages_that_die_because_of_a_letter_are_dead_lettered_before_older_dead_messages(world, client):
    client.declare("full", arguments=FULL)
    client.publish(b"old", routing_key="full")
    client.received()
    client.declare("q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "full"})
    for body in (b"1", b"2", b"3"):
        client.publish(body, routing_key="q")
    client.consume("q")
    # Without slices "1", "2" and "3" would first all enter the full queue. The number of waiting messages would grow.
    client.send(1, commands.Basic.Nack(0, multiple=True, requeue=False))
    assert bodies(world.queue("dead")) == [b"old"]
    assert slices(world, lambda: len(world.host.dead_letters._dead)) == [1, 0]
    assert (bodies(world.queue("dead")), bodies(world.queue("full"))) == ([b"old", b"1", b"2"], [b"3"])


@pytest.mark.parametrize("arguments", [{}, DLX], ids=["no letters", "letters"])
def test_messages_beyond_a_lowered_maximum_are_dropped_in_slices_and_none_is_delivered(
    world, client, monkeypatch, arguments
):
    monkeypatch.setattr(Contents, "AT_ONCE", 3)
    client.declare("q", arguments=arguments)
    client.publish_each(*(b"%d" % number for number in range(8)))
    client.received()
    policy = PolicyDefinition.from_mapping({"policy": "ring", "max_count": 1})
    world.set_policy(Policy("one", policy, "^q$"))
    assert world.queue("q").depth == 7
    client.send(1, commands.Basic.Consume(queue="q"), commands.Basic.Get(queue="q"))
    assert client.session.is_held
    found = slices(world, lambda: world.queue("q").depth)
    assert found[-1] == 1
    assert max(before - after for before, after in zip([7, *found], found, strict=False)) <= 3
    client.feed(b"")
    assert [frame.value for _, frame in client.received() if frame.name == "ContentBody"] == [b"7"]
    assert bodies(world.queue("dead")) == ([b"%d" % number for number in range(7)] if arguments else [])


def test_a_large_message_to_many_queues_drops_few_messages_in_each_queue_at_once(world, client, monkeypatch):
    monkeypatch.setattr(Contents, "AT_ONCE", 4)
    queues = [world.host.declare_queue(f"q{number}", arguments={"x-max-length-bytes": 10}) for number in range(4)]
    for queue in queues:
        world.host.topology.bind(queue, "amq.fanout", "", {})
    client.publish(b"x", exchange="amq.fanout", times=10)
    client.publish(bytes(10), exchange="amq.fanout")
    # The large message has replaced one message.
    assert [queue.depth for queue in queues] == [10] * 4
    queues[0].dispatcher.add(taker := Taker(), exclusive=False)
    queues[0].dispatcher.dispatch()
    slices(world, lambda: None)
    assert [queue.depth for queue in queues] == [1] * 4
    assert [entry.message.size for entry in taker.entries] == [10]


def test_letters_after_one_that_fails_are_still_sent(world, client, monkeypatch):
    send = DeadLetters._publish
    fails = iter((True, False, True))

    def publish(self, *arguments):
        if next(fails, False):
            raise ZeroDivisionError
        return send(self, *arguments)

    monkeypatch.setattr(DeadLetters, "_publish", publish)
    with pytest.raises(ZeroDivisionError):
        rejected(client, 7)
    with pytest.raises(ZeroDivisionError):
        slices(world, lambda: None)
    slices(world, lambda: None)
    assert world.queue("dead").depth == 5
    assert not world.host.dead_letters._dead


def test_the_other_waiting_functions_are_called_after_one_that_fails(world, client):
    letters, called = world.host.dead_letters, []

    def fail():
        raise ZeroDivisionError

    rejected(client, 7)
    letters.when_done(fail)
    letters.when_done(lambda: called.append(1))
    with pytest.raises(ZeroDivisionError):
        slices(world, lambda: None)
    slices(world, lambda: None)
    assert called == [1]


def test_a_client_waits_only_for_letters_of_messages_that_died_before(world, client):
    rejected(client, 3)
    other = world.client().channel()
    rejected(other, 5, "p")
    found = slices(world, lambda: (world.queue("dead").depth, client.session.can_resume, other.session.can_resume))
    assert found == [(4, True, False), (6, True, False), (8, True, True)]


def test_expired_messages_are_dropped_and_others_delivered_while_letters_wait(world, client):
    client.declare("ttl", arguments={**DLX, "x-message-ttl": 1000})
    client.publish(b"old", routing_key="ttl", times=3)
    rejected(client, 7)
    world.now = 1.0
    other = world.client().channel(confirms=True)
    other.publish(b"new", routing_key="ttl")
    assert bodies(world.queue("ttl")) == [b"new"]
    assert other.session.is_held
    slices(world, lambda: None)
    assert bodies(world.queue("dead"))[7:] == [b"old"] * 3


@pytest.mark.parametrize("policy", [{"x-max-length-bytes": 10}, {"qpid.policy_type": "ring", "qpid.max_size": 10}])
def test_a_client_waits_until_the_messages_that_its_large_message_replaces_are_dropped(
    world, client, monkeypatch, policy
):
    monkeypatch.setattr(Contents, "AT_ONCE", 2)
    for name in ("a", "b"):
        world.host.topology.bind(world.host.declare_queue(name, arguments=policy), "amq.fanout", "", {})
    client.publish(b"x", exchange="amq.fanout", times=10)
    client.publish(bytes(10), exchange="amq.fanout")
    client.publish(b"next", exchange="amq.fanout")
    assert [world.queue(name).depth for name in "ab"] == [10, 10]
    assert (client.session.is_held, client.session.can_resume) == (True, False)
    # No letter is sent either: it could need room, too.
    other = world.client().channel()
    rejected(other, 1)
    assert world.queue("dead").depth == 0
    world.queue("a").dispatcher.pause(1)
    slices(world, lambda: None)
    assert [world.queue(name).depth for name in "ab"] == [10, 1]
    assert not client.session.can_resume
    world.queue("a").dispatcher.pause(-1)
    slices(world, lambda: None)
    assert client.session.can_resume
    client.feed(b"")
    assert [bodies(world.queue(name)) for name in "ab"] == [[b"next"]] * 2
    assert world.queue("dead").depth == 1


@pytest.mark.parametrize("end", ["delete", "policy", "fail"])
def test_a_queue_beyond_its_maximum_that_ends_holds_nobody(world, client, monkeypatch, end):
    monkeypatch.setattr(Contents, "AT_ONCE", 2)
    for name in ("a", "b"):
        queue = world.host.declare_queue(name, arguments={"x-max-length-bytes": 10})
        world.host.topology.bind(queue, "amq.fanout", "", {})
    client.publish(b"x", exchange="amq.fanout", times=10)
    client.publish(bytes(10), exchange="amq.fanout")
    queues = [world.queue(name) for name in "ab"]
    match end:
        case "delete":
            for queue in queues:
                world.host.delete_queue(queue)
        case "policy":
            for queue in queues:
                queue.change(make_queue().limits)
        case "fail":
            monkeypatch.setattr(Dropping, "drop", lambda *_: 1 / 0)
            for _ in queues:
                with pytest.raises(ZeroDivisionError):
                    slices(world, lambda: None)
    slices(world, lambda: None)
    assert client.session.can_resume


def test_letters_of_earlier_causes_are_sent_while_queues_exceed_their_maximum_for_a_later_cause(
    world, client, monkeypatch
):
    monkeypatch.setattr(Contents, "AT_ONCE", 1)
    rejected(client, 7)
    other = world.client().channel()
    world.host.declare_queue("bytes", arguments={"x-max-length-bytes": 10})
    for _ in range(10):
        world.queue("bytes").enqueue(message(1))
    world.queue("bytes").dispatcher.pause(1)
    other.publish(bytes(10), routing_key="bytes")
    assert slices(world, lambda: client.session.can_resume)[-1]
    assert world.queue("dead").depth == 7
    assert not other.session.can_resume


def test_few_bodies_of_dead_messages_are_read_from_disk_at_once_and_letters_keep_their_order(
    world, client, monkeypatch
):
    monkeypatch.setattr(DeadLetters, "READS", 2)
    client.declare("q", arguments=DLX)
    client.publish_each(*(b"%d" % number for number in range(5)))
    reads = []
    monkeypatch.setattr(world.host.dead_letters, "_when_read", lambda *read: reads.append(read))
    entries = list(world.queue("q").contents.oldest_first())
    for entry in entries:
        entry.message.body = None
        world.queue("q").dropping.drop(entry, DropReason.MAXLEN)
    slices(world, lambda: None)
    for number, count in ((0, 2), (2, 2), (4, 1)):
        world.host.dead_letters.send_all()
        assert [read[0] for read in reads] == [entry.message for entry in entries[number : number + count]]
        for read, then in [reads.pop() for _ in range(count)]:
            read.body = b"%d" % [entry.message for entry in entries].index(read)
            then()
        slices(world, lambda: None)
    assert bodies(world.queue("dead")) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_client_whose_failed_channel_returns_messages_to_a_full_queue_waits_for_their_letters(world, client):
    client.declare("q", arguments={**DLX, "x-max-length": 6})
    client.publish(times=6)
    client.send(1, *[commands.Basic.Get(queue="q")] * 6)
    client.publish(times=6)
    client.send(1, commands.Basic.Ack(100))
    assert (client.session.is_held, client.session.can_resume) == (True, False)
    slices(world, lambda: None)
    assert (client.session.can_resume, world.queue("dead").depth) == (True, 6)


def test_a_letter_that_fails_while_the_broker_stops_prevents_no_other(world, client, monkeypatch):
    send, fails = DeadLetters._publish, iter((True,))

    def publish(self, *arguments):
        if next(fails, False):
            raise ZeroDivisionError
        return send(self, *arguments)

    rejected(client, 5)
    monkeypatch.setattr(DeadLetters, "_publish", publish)
    world.host.dead_letters.send_all()
    assert world.queue("dead").depth == 4


def test_all_letters_are_sent_when_the_broker_stops(world, client):
    rejected(client, 7)
    world.host.dead_letters.send_all()
    assert world.queue("dead").depth == 7


def test_a_client_that_the_broker_closes_while_it_waits_can_answer(world, client):
    rejected(client, 7)
    client.session.fail(320, "the broker shuts down", 0.0)
    assert client.session.can_resume
    client.send(0, commands.Connection.CloseOk())
    assert client.session.state is State.ENDED


def test_the_messages_that_many_queues_must_drop_after_a_requeue_are_dropped_in_slices(world, client, monkeypatch):
    monkeypatch.setattr(Contents, "AT_ONCE", 4)
    queues = [world.host.declare_queue(name, arguments={"x-max-length": 3}) for name in "ab"]
    for queue in queues:
        world.host.topology.bind(queue, "amq.fanout", "", {})
    client.publish(b"old", exchange="amq.fanout", times=3)
    for name in "ab":
        client.send(1, *[commands.Basic.Get(queue=name)] * 3)
    client.publish(b"new", exchange="amq.fanout", times=3)
    client.received()
    client.send(1, commands.Basic.Nack(0, multiple=True, requeue=True))
    assert [queue.depth for queue in queues] == [4, 4]
    slices(world, lambda: None)
    assert [bodies(queue) for queue in queues] == [[b"new"] * 3] * 2


def test_a_client_that_waits_for_letters_may_leave(world, client):
    rejected(client, 7)
    client.session.lost()
    slices(world, lambda: None)
    assert world.queue("dead").depth == 7


def test_a_message_that_waits_for_two_queues_is_confirmed_after_both_are_deleted(world, client):
    world.set_policy(Policy("wait", PolicyDefinition.from_mapping({"policy": "wait", "max_count": 1}), "^[abc]$"))
    for exchange, names in (("one", "bc"), ("two", "ab")):
        world.host.topology.declare_exchange(exchange, "fanout")
        for name in names:
            world.host.topology.bind(world.host.declare_queue(name), exchange, "", {})
    for name in "abc":
        client.publish(routing_key=name)
    client.publish(exchange="one")
    client.publish(exchange="two")
    assert len(client.session.channels[1].waiting) == 2
    client.received()
    for name in "ab":
        world.host.delete_queue(world.queue(name))
    world.queue("c").take(no_ack=True)
    slices(world, lambda: None)
    assert not client.session.channels[1].waiting


def test_a_strict_ring_keeps_unacked_messages_beyond_a_lowered_maximum():
    queue = fill(make_queue({"qpid.policy_type": "ring_strict", "qpid.max_count": 3}), [1, 2, 3])
    entry = queue.take(no_ack=False)
    assert queue.contents.reaches_unacked(1, 0)
    assert "has not acknowledged yet" in queue.refusal(1)
    queue.dispatcher.requeue([entry])
    assert not queue.contents.reaches_unacked(3, 6)
    assert queue.refusal(1) is None


def test_the_oldest_unacked_message_is_found_after_many_deliveries_and_acks():
    queue = fill(make_queue(), range(1, 1001))
    contents = queue.contents
    assert contents.oldest_unacked() is None
    lent = [queue.take(no_ack=False) for _ in range(3)]
    assert contents.oldest_unacked() is lent[0]
    for _ in range(300):
        # The oldest entry stays unacked, and returns in every tenth round.
        lent.append(queue.take(no_ack=False))
        queue.dispatcher.settle(lent.pop(1), acked=True)
        assert contents.oldest_unacked() is lent[0]
        assert contents._by_age is None or len(contents._by_age) <= contents.MAX_GAPS + 10
    queue.dispatcher.requeue([lent.pop(0)])
    assert contents.oldest_unacked() is lent[0]
    assert contents.oldest() is contents.ready[0]
