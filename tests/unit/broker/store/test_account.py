"""The memory account (E9): a message counts from its first byte on, even before it is in a queue."""

from __future__ import annotations

import pytest
from pamqp import body, commands, header

from qflow_client.broker.store.journal import Journal

from ..conftest import World

LIMIT = 1 << 20


@pytest.fixture(name="world")
def _world():
    return World(journal=Journal(float, has_store=False, limit=LIMIT))


def held(world):
    return world.host.journal.held


def test_the_headers_of_a_message_count_for_the_memory_of_the_broker(world):
    world.host.declare_queue("q")
    client = world.client(frame_max=131072).channel()
    large = commands.Basic.Properties(headers={"x": "y" * 100_000})
    client.publish(b"", properties=large, times=5)
    assert held(world) > 500_000
    world.queue().purge()
    assert held(world) == 0


def test_E9_for_each_queue_that_contains_a_message_a_little_memory_is_counted(world):
    queues = [world.host.declare_queue(f"q{number}") for number in range(100)]
    for queue in queues:
        world.host.topology.bind(queue, "amq.fanout", "", None)
    world.host.publish("amq.fanout", "", b"")
    assert held(world) == Journal.OVERHEAD + 99 * Journal.ENTRY
    for queue in queues[:50]:
        queue.purge()
    assert held(world) == Journal.OVERHEAD + 49 * Journal.ENTRY
    for queue in queues[50:]:
        queue.delete()
    assert held(world) == 0


def begin(client, size, sent, channel=1):
    """The first part of a message."""
    client.send(channel, commands.Basic.Publish(routing_key="q"), header.ContentHeader(body_size=size))
    client.send(channel, body.ContentBody(bytes(sent)))


@pytest.mark.parametrize("end", ["message", "channel", "connection"])
def test_a_partly_received_body_counts_for_the_memory_of_the_broker(world, end):
    world.host.declare_queue("q")
    client = world.client(frame_max=131072).channel()
    begin(client, 200_000, 100_000)
    assert 100_000 < held(world) < 100_100
    if end == "message":
        client.send(1, body.ContentBody(bytes(100_000)))
        assert 200_000 < held(world) < 201_000
        world.queue().purge()
    elif end == "channel":
        client.send(1, commands.Channel.Close(200, "", 0, 0))
    else:
        client.session.lost()
    assert held(world) == 0


@pytest.mark.parametrize("end", ["Commit", "Rollback", "Close"])
def test_the_messages_of_an_open_transaction_count_for_the_memory_of_the_broker(world, end):
    world.host.declare_queue("q")
    client = world.client(frame_max=131072).channel()
    client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
    client.publish(bytes(100_000), times=3)
    assert 300_000 < held(world) < 303_000
    client.send(1, commands.Channel.Close(200, "", 0, 0) if end == "Close" else getattr(commands.Tx, end)())
    if end == "Commit":
        assert 300_000 < held(world) < 303_000
        world.queue().purge()
    assert held(world) == 0


def test_messages_that_wait_for_room_in_a_queue_count_for_the_memory_of_the_broker(world):
    world.host.declare_queue("q", arguments={"qpid.max_count": 1, "x-qflow-policy": "wait"})
    client = world.client(frame_max=131072).channel(confirms=True)
    client.publish(bytes(100_000), times=3)
    assert 300_000 < held(world) < 303_000
    world.host.delete_queue(world.queue())
    assert held(world) == 0
