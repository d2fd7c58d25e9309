from __future__ import annotations

import pytest
from pamqp import commands
from pamqp.commands import Basic, Queue

from qflow_client.broker import BrokerSettings
from qflow_client.broker.core.errors import ChannelException
from qflow_client.broker.core.quotas import Quota

CHANNEL_CLOSE = commands.Channel.Close


def refused(client, setting, limit):
    client.check_close(CHANNEL_CLOSE, 406, f"is reached ({setting}={limit})")
    client.send(1, commands.Channel.CloseOk())
    client.channel()


def test_the_number_of_queues_is_limited_and_deleting_a_queue_makes_room(make_world):
    world = make_world(max_queues=2)
    client = world.client().channel()
    for name in ("a", "b", "a"):
        client.declare(name)
    client.send(1, Queue.Declare(queue="c"))
    refused(client, "max_queues", 2)
    assert list(world.host.queues) == ["a", "b"]
    client.call(1, Queue.Delete(queue="a"), Queue.DeleteOk)
    client.declare("c")
    client.send(1, Basic.Consume(queue="amq.rabbitmq.reply-to", no_ack=True))
    refused(client, "max_queues", 2)


def test_the_number_of_bindings_is_limited_and_removing_a_binding_makes_room(make_world):
    world = make_world(max_bindings=2)
    client = world.client().channel().with_queue("q")
    for key in ("a", "b", "a"):
        client.call(1, Queue.Bind(queue="q", exchange="amq.direct", routing_key=key), Queue.BindOk)
    client.send(1, Queue.Bind(queue="q", exchange="amq.topic"))
    refused(client, "max_bindings", 2)
    client.send(1, commands.Exchange.Bind(destination="amq.topic", source="amq.fanout"))
    refused(client, "max_bindings", 2)
    client.declare("other")
    client.call(1, Queue.Delete(queue="q"), Queue.DeleteOk)
    for key in ("a", "b"):
        client.call(1, Queue.Bind(queue="other", exchange="amq.direct", routing_key=key), Queue.BindOk)


def test_the_number_of_consumers_is_limited_and_cancelling_a_consumer_makes_room(make_world):
    world = make_world(max_consumers=2)
    client, other = world.client().channel().with_queue("q"), world.client().channel()
    for tag in ("a", "b"):
        client.consume(tag=tag)
        client.only(Basic.ConsumeOk)
    other.consume()
    refused(other, "max_consumers", 2)
    client.call(1, Basic.Cancel("a"), Basic.CancelOk)
    other.consume()
    other.only(Basic.ConsumeOk)
    client.session.end()
    other.consume(tag="d")
    other.only(Basic.ConsumeOk)


def test_the_number_of_open_connections_is_limited_and_a_closed_connection_makes_room(make_world):
    world = make_world(max_connections=2)
    clients = [world.client() for _ in range(2)]
    client = world.stranger()
    client.start()
    client.only(commands.Connection.Tune, 0)
    client.send(0, commands.Connection.TuneOk(0, 0, 0), commands.Connection.Open("/"))
    client.check_close(commands.Connection.Close, 530, "is reached (max_connections=2)")
    client.session.end()
    clients[0].session.end()
    clients[0].session.lost()
    world.client()
    assert world.host.open_connections == 2


def test_the_number_of_channels_of_a_connection_is_limited(make_world):
    client = make_world(channel_max=2).client().channel().channel(2)
    client.send(3, commands.Channel.Open())
    client.check_close(commands.Connection.Close, 530, "channel_max 2")


def test_queues_restored_from_a_store_count_for_max_queues_and_are_accepted_even_beyond_that_limit():
    there: list[int] = []
    quota = Quota("max_queues", 2, "queues", lambda: len(there))
    for number in range(3):
        quota.take(is_there=True)
        there.append(number)
    with pytest.raises(ChannelException, match="max_queues=2"):
        quota.take()


def test_a_quota_counts_the_existing_objects_only_when_the_limit_may_be_reached():
    counted = []

    def count():
        counted.append(1)
        return 0

    quota = Quota("max_queues", 100, "queues", count)
    for _ in range(1000):
        quota.take()
    assert len(counted) == 9


@pytest.mark.parametrize("name", ["max_unauthenticated", "max_queues", "max_bindings", "max_consumers"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1"], ids=repr)
def test_a_quota_must_be_a_whole_number_above_0(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        BrokerSettings(**{name: value})
