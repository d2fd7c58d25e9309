from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from pamqp import commands

from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.expiry import Expiry
from qflow_client.broker.core.limits import QueueOptions
from qflow_client.broker.core.wire import encode_header
from qflow_client.broker.policies.arguments import read_options

from ..tools import TARGET, Publisher, make_queue, message
from .test_flow import STOP_2, flows
from .test_queue import Taker, fill


def expiring(size, milliseconds):
    if milliseconds is None:
        return message(size)
    properties = commands.Basic.Properties(expiration=str(milliseconds))
    return StoredMessage(TARGET, encode_header(size, properties), b"x" * size)


def ready(queue):
    return [entry.message.size for entry in queue.contents.oldest_first()]


@pytest.mark.parametrize(("now", "left"), [(0.999, 1), (1.0, 0), (1.001, 0)])
def test_a_message_expires_after_its_time_to_live(now, left):
    queue = fill(make_queue({"x-message-ttl": 1000}), [1])
    around = queue._surroundings
    assert around.alarms == [1.0]
    around.now = now
    queue.tick(now)
    assert (queue.depth, queue.contents.dropped) == (left, 1 - left)


def test_the_shorter_time_to_live_of_the_queue_and_the_message_applies():
    queue = make_queue({"x-message-ttl": 1000})
    for size, own in ((1, 500), (2, None), (3, 2000)):
        queue.enqueue(expiring(size, own))
    around = queue._surroundings
    around.now = 0.5
    queue.tick(0.5)
    assert ready(queue) == [2, 3]
    around.now = 1.0
    queue.tick(1.0)
    assert ready(queue) == []
    assert queue.contents.drops == {DropReason.EXPIRED: 3}


def test_messages_in_the_middle_of_a_queue_can_expire_and_the_remaining_messages_keep_their_order():
    queue = make_queue()
    for size in range(1, 9):
        queue.enqueue(expiring(size, 100 if size in (3, 4, 7) else None))
    assert (queue.contents.ready_count, queue.contents.ready_size) == (8, 36)
    queue._surroundings.now = 0.1
    queue.dropping.expire()
    assert (queue.contents.ready_count, queue.contents.ready_size, queue.depth, queue.size) == (5, 22, 5, 22)
    taken = []
    while (entry := queue.take(no_ack=True)) is not None:
        taken.append(entry.message.size)
    assert taken == [1, 2, 5, 6, 8]


def test_the_list_of_ready_messages_is_compacted_when_most_of_its_places_are_empty():
    queue = make_queue()
    queue.enqueue(message(1))
    for at in range(Contents.MAX_GAPS * 2):
        queue.enqueue(expiring(2, 100 + at))
    queue.enqueue(message(3))
    for at in range(Contents.MAX_GAPS * 2):
        queue._surroundings.now = (100 + at) / 1000
        queue.dropping.expire()
        assert len(queue.contents.ready) <= queue.depth + max(Contents.MAX_GAPS, queue.depth)
    assert ready(queue) == [1, 3]
    taker = Taker(no_ack=True)
    queue.dispatcher.add(taker, exclusive=False)
    queue.dispatcher.dispatch()
    assert [entry.message.size for entry in taker.entries] == [1, 3]
    assert (queue.depth, queue.size) == (0, 0)


def test_an_expired_message_is_not_delivered_to_a_consumer():
    queue = make_queue()
    for size, own in ((1, 100), (2, None), (3, 100), (4, None)):
        queue.enqueue(expiring(size, own))
    queue._surroundings.now = 1.0
    taker = Taker()
    queue.dispatcher.add(taker, exclusive=False)
    queue.dispatcher.dispatch()
    assert [entry.message.size for entry in taker.entries] == [2, 4]


def test_an_unacked_message_expires_only_when_it_is_requeued():
    queue = fill(make_queue({"x-message-ttl": 100}), [1, 2])
    first, second = queue.take(no_ack=False), queue.dispatcher.take(no_ack=False)
    queue._surroundings.now = 1.0
    queue.tick(1.0)
    assert (queue.depth, queue.contents.dropped) == (2, 0)
    queue.dispatcher.settle(second, acked=True)
    queue.dispatcher.requeue([first])
    assert queue.take(no_ack=True) is None
    assert (queue.depth, queue.dispatcher.acked, queue.contents.drops) == (0, 1, {DropReason.EXPIRED: 1})


def test_a_message_that_was_requeued_is_removed_only_once_when_it_expires():
    queue = fill(make_queue({"x-message-ttl": 100, "qpid.flow_stop_count": 1}), [1])
    queue.dispatcher.requeue([queue.take(no_ack=False)])
    queue._surroundings.now = 0.1
    queue.dropping.expire()
    assert (queue.depth, queue.contents.dropped) == (0, 1)


def test_a_full_queue_removes_expired_messages_before_it_refuses_a_new_message():
    queue = make_queue({"qpid.max_count": 2})
    queue.enqueue(message(1))
    queue.enqueue(expiring(2, 100))
    assert queue.refusal(1) is not None
    queue._surroundings.now = 0.1
    assert queue.refusal(1) is None
    queue.enqueue(message(3))
    assert ready(queue) == [1, 3]


def test_a_full_ring_queue_removes_expired_messages_before_it_drops_the_oldest_message():
    queue = make_queue({"qpid.max_count": 2, "qpid.policy_type": "ring"})
    queue.enqueue(message(1))
    queue.enqueue(expiring(2, 100))
    queue._surroundings.now = 0.1
    assert queue.refusal(3) is None
    queue.enqueue(message(3))
    assert ready(queue) == [1, 3]


def test_J6_the_expiry_of_messages_unflows_channels_and_releases_withheld_confirms(world):
    client = world.client().channel(confirms=True).with_queue(arguments={**STOP_2, "x-message-ttl": 1000})
    client.publish(times=3)
    names = client.names()
    assert sorted(set(names)) == ["Basic.Ack", "Channel.Flow"]
    assert world.queue().flows.held_confirms == 1
    world.tick(world.host.timers.next_tick)
    assert world.now == 1.0
    assert sorted(client.names()) == ["Basic.Ack", "Channel.Flow"]
    assert (world.queue().flows.held_confirms, world.queue().flows.is_on, world.queue().depth) == (0, False, 0)


def test_J6_publishers_are_unflowed_as_soon_as_expired_messages_have_made_enough_room(world):
    client = world.client().channel().with_queue(arguments=STOP_2)
    for milliseconds in ("300", "100", "200"):
        client.publish(properties=commands.Basic.Properties(expiration=milliseconds))
    assert flows(client) == [False]
    for now, told in ((0.1, []), (0.2, [True]), (0.3, [])):
        assert world.host.timers.next_tick == now
        world.tick(now)
        assert flows(client) == told
    assert world.host.timers.next_tick == float("inf")


def test_a_timer_that_fires_before_any_message_expires_removes_nothing():
    queue = fill(make_queue({"x-message-ttl": 1000}), [1])
    queue.tick(0.9)
    queue.tick(0.9)
    assert (queue.depth, queue._surroundings.alarms) == (1, [1.0])


def test_timer_entries_of_removed_messages_do_not_pile_up():
    queue = make_queue({"x-message-ttl": 86_400_000})
    for _ in range(10 * Expiry.MIN_SWEEP):
        queue.enqueue(message())
        queue.take(no_ack=True)
    assert len(queue.dropping.expiry._heap) <= Expiry.MIN_SWEEP + 1


def test_E9_timer_entries_of_removed_messages_are_swept_a_few_at_a_time():
    queue = fill(make_queue({"x-message-ttl": 86_400_000}), [1] * 1000)
    expiry = queue.dropping.expiry
    queue.purge()
    queue.enqueue(message())
    sizes = [len(expiry._heap) + len(expiry._old)]
    for _ in range(1000):
        queue.enqueue(message())
        sizes.append(len(expiry._heap) + len(expiry._old))
    assert sizes[-1] <= 2 * queue.depth
    assert max(abs(after - before) for before, after in pairwise(sizes)) < Expiry.STEP
    queue._surroundings.now = 86_400.0
    queue.dropping.expire()
    queue.dropping.expire()
    assert (queue.depth, expiry.next_at) == (0, math.inf)


def test_timer_entries_of_a_message_that_is_requeued_repeatedly_do_not_pile_up():
    queue = fill(make_queue({"x-message-ttl": 86_400_000}), [1])
    for _ in range(10 * Expiry.MIN_SWEEP):
        queue.dispatcher.requeue([queue.take(no_ack=False)])
    assert len(queue.dropping.expiry._heap) <= Expiry.MIN_SWEEP + 1
    assert queue.dropping.expiry.next_at == 86_400.0


def test_timer_entries_of_messages_that_expired_while_unacked_do_not_pile_up():
    queue = make_queue({"x-message-ttl": 1000})
    for number in range(10 * Expiry.MIN_SWEEP):
        queue.enqueue(message())
        entry = queue.take(no_ack=False)
        queue._surroundings.now = number + 1.0
        queue.dropping.expire()
        queue.dispatcher.settle(entry, acked=True)
    assert len(queue.dropping.expiry._unacked) == 0
    assert (queue.contents.dropped, queue.depth) == (0, 0)


def test_new_messages_are_delivered_after_a_purge_of_expired_messages_that_one_call_had_not_dropped():
    queue = make_queue()
    for _ in range(2 * Contents.AT_ONCE):
        queue.enqueue(expiring(1, 100))
    queue._surroundings.now = 1.0
    queue.dropping.expire()
    assert queue.purge() == Contents.AT_ONCE
    # Enough messages that their expiry times replace those of the purged messages.
    for _ in range(4 * Contents.AT_ONCE):
        queue.enqueue(expiring(2, 86_400_000))
    taker = Taker()
    queue.dispatcher.add(taker, exclusive=False)
    queue.dispatcher.dispatch()
    assert taker.entries


@pytest.mark.parametrize(("used", "now", "is_unused"), [(0.0, 0.99, False), (0.0, 1.0, True), (0.5, 1.49, False)])
def test_a_queue_that_is_unused_for_x_expires_is_deleted(used, now, is_unused):
    queue = make_queue({"x-expires": 1000})
    around = queue._surroundings
    around.now = used
    queue.take(no_ack=True)
    around.now = 1.0
    queue.tick(min(now, 1.0))
    around.now = now
    queue.tick(now)
    assert around.is_unused is is_unused


@pytest.mark.parametrize("use", ["get", "declare", "declare passively", "consume"])
def test_get_declare_and_consumers_count_as_use_of_a_queue_with_x_expires(world, use):
    client = world.client().channel().with_queue(arguments={"x-expires": 1000})
    if use == "consume":
        client.consume()
    world.now = 0.8
    if use == "get":
        client.send(1, commands.Basic.Get(queue="q"))
    elif use == "consume":
        client.send(1, commands.Basic.Cancel("c"))
    else:
        arguments: Any = {} if "passively" in use else {"x-expires": 1000}
        client.send(1, commands.Queue.Declare(queue="q", passive="passively" in use, arguments=arguments))
    client.received()
    for now, there in ((1.0, True), (1.7, True), (1.8, False)):
        world.tick(now)
        assert ("q" in world.host.queues) is there


def test_a_queue_with_x_expires_is_not_deleted_while_it_has_a_consumer(world):
    client = world.client().channel().with_queue(arguments={"x-expires": 1000})
    client.consume()
    world.tick(1000.0)
    assert world.queue().dispatcher.consumers
    assert world.host.timers.next_tick == float("inf")


def test_a_deleted_queue_and_its_messages_no_longer_expire(world):
    client = world.client().channel().with_queue(arguments={"x-expires": 1000, "x-message-ttl": 100})
    client.publish()
    client.call(1, commands.Queue.Delete(queue="q"), commands.Queue.DeleteOk)
    world.tick(2.0)
    assert client.received() == []


def test_x_message_ttl_is_in_milliseconds_and_with_0_messages_expire_immediately():
    assert read_options("q", {"x-message-ttl": 1500, "x-expires": 1}) == QueueOptions(1.5, 0.001)
    queue = make_queue({"x-message-ttl": 0})
    queue.enqueue(message())
    queue.after_publish()
    assert queue.contents.drops == {DropReason.EXPIRED: 1}


def test_a_message_with_expiration_0_is_delivered_if_a_consumer_is_ready():
    queue = make_queue({"x-message-ttl": 0})
    taker = Taker()
    queue.dispatcher.add(taker, exclusive=False)
    queue.enqueue(message(), Publisher())
    queue.after_publish()
    assert (len(taker.entries), queue.contents.dropped) == (1, 0)


@pytest.mark.parametrize("expiration", ["x", "-1", "1.0", " 1", "١"])
def test_an_expiration_that_is_not_a_number_closes_the_channel_with_406(world, expiration):
    client = world.client().channel().with_queue()
    client.publish(properties=commands.Basic.Properties(expiration=expiration))
    close = client.close_of(commands.Channel.Close)
    assert close.reply_code == 406
    assert "expiration" in close.reply_text
    assert repr(expiration) in close.reply_text
    assert world.queue().depth == 0
