from __future__ import annotations

import gc

import pytest
from pamqp import commands
from pamqp.commands import Basic, Exchange, Queue

from qflow_client.broker.core.queue import Queue as BrokerQueue

CHANNEL_CLOSE = commands.Channel.Close


@pytest.fixture(name="client")
def _client(world):
    return world.client().channel()


def exchange(client, name, kind="direct", to=None, **options):
    if to is not None:
        options["arguments"] = {"alternate-exchange": to}
    client.call(1, Exchange.Declare(exchange=name, exchange_type=kind, **options), Exchange.DeclareOk)


def bound(client, queue, source, key="", arguments=None):
    client.declare(queue)
    client.call(1, Queue.Bind(queue=queue, exchange=source, routing_key=key, arguments=arguments), Queue.BindOk)


def depths(world):
    return {queue.name: queue.depth for queue in world.host.queues.values()}


def test_only_unroutable_messages_go_to_the_alternate_exchange(world, client):
    exchange(client, "main", to="other")
    exchange(client, "other", "fanout")
    bound(client, "q", "main", "known")
    bound(client, "rest", "other")
    client.publish(exchange="main", routing_key="known")
    client.publish(exchange="main", routing_key="unknown", mandatory=True)
    assert depths(world) == {"q": 1, "rest": 1}
    assert client.received() == []


def test_a_message_follows_a_chain_of_alternate_exchanges_and_a_cycle_of_alternate_exchanges_ends(world, client):
    for name, to in (("one", "two"), ("two", "three"), ("three", "one")):
        exchange(client, name, to=to)
    bound(client, "q", "three", "k")
    client.publish(exchange="one", routing_key="k")
    client.publish(exchange="one", routing_key="nowhere", mandatory=True)
    assert depths(world) == {"q": 1}
    assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody"]


def test_each_exchange_in_a_chain_of_bindings_uses_its_own_alternate_exchange_as_on_rabbitmq(world, client):
    exchange(client, "first", "fanout", to="unused")
    exchange(client, "unused", "fanout")
    exchange(client, "second", to="rest")
    exchange(client, "rest", "fanout", internal=True)
    client.call(1, Exchange.Bind(destination="second", source="first"), Exchange.BindOk)
    bound(client, "q", "rest")
    bound(client, "not", "unused")
    client.publish(exchange="first", routing_key="k")
    assert depths(world) == {"q": 1, "not": 0}


def test_an_alternate_exchange_is_skipped_until_it_exists(world, client):
    exchange(client, "main", to="later")
    client.publish(exchange="main", routing_key="k", mandatory=True)
    assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody"]
    exchange(client, "later", "fanout")
    bound(client, "q", "later")
    client.publish(exchange="main", routing_key="k", mandatory=True)
    assert depths(world) == {"q": 1}
    client.call(1, Exchange.Delete(exchange="later"), Exchange.DeleteOk)
    client.publish(exchange="main", routing_key="k", mandatory=True)
    assert client.names() == ["Basic.Return", "ContentHeader", "ContentBody"]


def test_an_alternate_exchange_may_route_by_headers(world, client):
    exchange(client, "main", to="amq.headers")
    bound(client, "q", "amq.headers", arguments={"a": 1})
    for value in (1, 2):
        client.publish(exchange="main", routing_key="k", properties=Basic.Properties(headers={"a": value}))
    assert depths(world) == {"q": 1}


def test_a_headers_exchange_may_have_an_alternate_exchange(world, client):
    exchange(client, "main", "headers", to="amq.fanout")
    bound(client, "q", "main", arguments={"a": 1})
    bound(client, "rest", "amq.fanout")
    for value in (1, 2):
        client.publish(exchange="main", properties=Basic.Properties(headers={"a": value}))
    assert depths(world) == {"q": 1, "rest": 1}


def test_unroutable_dead_letters_go_to_the_alternate_exchange(world, client):
    exchange(client, "dlx", to="amq.fanout")
    bound(client, "dead", "amq.fanout")
    client.declare(arguments={"x-dead-letter-exchange": "dlx"})
    client.publish()
    client.send(1, Basic.Get(queue="q"))
    client.send(1, Basic.Reject(1, requeue=False))
    assert depths(world) == {"dead": 1, "q": 0}


@pytest.mark.parametrize("value", [1, True, bytearray(b"\xff"), ["x"]])
def test_an_alternate_exchange_argument_that_is_not_a_name_is_refused(client, value):
    client.send(1, Exchange.Declare(exchange="e", arguments={"alternate-exchange": value}))
    client.check_close(CHANNEL_CLOSE, 406, "alternate-exchange")


@pytest.mark.parametrize(
    "again", [None, {"alternate-exchange": "amq.direct"}, {"alternate-exchange": "amq.fanout", "x": 1}]
)
def test_an_exchange_can_be_redeclared_only_with_the_same_arguments(client, again):
    exchange(client, "e", to="amq.fanout")
    exchange(client, "e", to="amq.fanout")
    client.send(1, Exchange.Declare(exchange="e", arguments=again))
    client.check_close(CHANNEL_CLOSE, 406, "arguments")


@pytest.mark.parametrize(
    "method",
    [
        Queue.Declare(queue="q"),
        Queue.Declare(queue="q", passive=True),
        Queue.Bind(queue="q", exchange="amq.fanout"),
        Queue.Unbind(queue="q", exchange="amq.direct", routing_key="k"),
        Queue.Purge(queue="q"),
        Queue.Delete(queue="q"),
        Basic.Consume(queue="q"),
        Basic.Get(queue="q"),
    ],
    ids=lambda method: method.name + str(getattr(method, "passive", "")),
)
def test_an_exclusive_queue_of_another_connection_is_refused_with_405_as_on_rabbitmq(world, client, method):
    client.declare(exclusive=True)
    client.call(1, Queue.Bind(queue="q", exchange="amq.direct", routing_key="k"), Queue.BindOk)
    other = world.client().channel()
    other.send(1, method)
    close = other.only(CHANNEL_CLOSE)
    assert (close.reply_code, close.reply_text.split()[0]) == (405, "RESOURCE_LOCKED")
    assert "'q'" in close.reply_text


def test_a_deleted_queue_does_not_stay_in_memory_as_a_cached_destination(world, client):
    for name in ("short-lived", "q"):
        client.declare(name)
        client.publish(routing_key=name)
    client.call(1, Queue.Delete(queue="short-lived"), Queue.DeleteOk)
    gc.collect()
    assert "short-lived" not in [each.name for each in gc.get_objects() if isinstance(each, BrokerQueue)]
