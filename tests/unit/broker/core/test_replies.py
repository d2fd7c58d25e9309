from __future__ import annotations

import pytest
from pamqp import commands
from pamqp.commands import Basic, Queue

from qflow_client.broker.core.errors import ChannelException

CHANNEL_CLOSE = commands.Channel.Close
REPLY_TO = "amq.rabbitmq.reply-to"


@pytest.fixture(name="client")
def _client(world):
    client = world.client().channel().with_queue("requests")
    return client


def listen(client, tag="replies", channel=1):
    client.send(channel, Basic.Consume(queue=REPLY_TO, consumer_tag=tag, no_ack=True))
    assert client.only(Basic.ConsumeOk, channel).consumer_tag == tag


def request(client, channel=1):
    properties = Basic.Properties(reply_to=REPLY_TO, correlation_id="1", headers={"a": 1}, app_id="app")
    client.publish(b"question", "requests", channel=channel, properties=properties)


def asked(client):
    """Return the properties of the next request in the queue."""
    client.send(1, Basic.Get(queue="requests", no_ack=True))
    (_, _), (_, header), (_, _) = client.received()
    return header.properties


def test_with_direct_reply_to_a_reply_goes_to_the_channel_of_the_request_without_a_declared_queue(world, client):
    server = world.client().channel()
    listen(client)
    request(client)
    properties = asked(server)
    assert properties.reply_to.startswith(f"{REPLY_TO}.")
    assert (properties.correlation_id, properties.headers, properties.app_id) == ("1", {"a": 1}, "app")
    server.publish(b"answer", properties.reply_to, mandatory=True)
    (_, method), (_, _), (_, body) = client.received()
    assert (method.consumer_tag, method.delivery_tag, method.redelivered) == ("replies", 1, False)
    assert (method.exchange, method.routing_key) == ("", properties.reply_to)
    assert body.value == b"answer"
    assert server.received() == []


def test_with_direct_reply_to_each_channel_gets_only_replies_to_its_own_requests(world, client):
    server = world.client().channel()
    client.channel(2)
    listen(client)
    listen(client, channel=2)
    for channel in (1, 2):
        request(client, channel)
    names = [asked(server).reply_to for _ in range(2)]
    assert len(set(names)) == 2
    for name in reversed(names):
        server.publish(b"x", name)
    assert [number for number, frame in client.received() if frame.name == "Basic.Deliver"] == [2, 1]


def test_a_direct_reply_to_consumer_without_no_ack_is_refused_with_406_as_on_rabbitmq(world, client):
    client.send(1, Basic.Consume(queue=REPLY_TO))
    client.check_close(CHANNEL_CLOSE, 406, "reply consumer cannot acknowledge")
    assert list(world.host.queues) == ["requests"]


def test_a_second_direct_reply_to_consumer_on_a_channel_is_refused_with_406_as_on_rabbitmq(client):
    listen(client)
    client.send(1, Basic.Consume(queue=REPLY_TO, consumer_tag="b", no_ack=True))
    client.check_close(CHANNEL_CLOSE, 406, "reply consumer already set")


def test_a_request_with_direct_reply_to_is_refused_with_406_if_no_consumer_waits_for_the_reply(world, client):
    request(client)
    client.check_close(CHANNEL_CLOSE, 406, "fast reply consumer does not exist")
    assert world.queue("requests").depth == 0
    with pytest.raises(ChannelException, match="fast reply consumer does not exist"):
        world.host.publish("", "requests", b"", Basic.Properties(reply_to=REPLY_TO))


@pytest.mark.parametrize("how", ["cancel", "channel", "connection"])
def test_direct_replies_to_a_disconnected_client_are_dropped_or_returned_if_mandatory(world, client, how):
    server = world.client().channel()
    listen(client)
    request(client)
    name = asked(server).reply_to
    if how == "cancel":
        client.call(1, Basic.Cancel("replies"), Basic.CancelOk)
        request(client)
        assert client.only(CHANNEL_CLOSE).reply_code == 406
    elif how == "channel":
        client.call(1, CHANNEL_CLOSE(200, "", 0, 0), commands.Channel.CloseOk)
    else:
        client.session.end()
    assert list(world.host.queues) == ["requests"]
    server.publish(b"answer", name, mandatory=True)
    assert server.names() == ["Basic.Return", "ContentHeader", "ContentBody"]


def test_a_channel_can_have_a_new_direct_reply_to_consumer_after_the_first_is_cancelled(client):
    listen(client)
    client.call(1, Basic.Cancel("replies"), Basic.CancelOk)
    listen(client)


def test_declaring_the_direct_reply_queue_passively_shows_whether_the_requester_still_exists(world, client):
    server = world.client().channel()
    listen(client)
    request(client)
    name = asked(server).reply_to
    for passive in (False, True):
        for queue in (name, REPLY_TO):
            ok = server.call(1, Queue.Declare(queue=queue, passive=passive), Queue.DeclareOk)
            assert (ok.queue, ok.message_count, ok.consumer_count) == (queue, 0, 1)
    client.session.end()
    server.send(1, Queue.Declare(queue=name, passive=True))
    assert server.only(CHANNEL_CLOSE).reply_code == 404


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", [Basic.Get, Basic.Consume, Queue.Purge, Queue.Bind], ids=lambda kind: kind.name)
def test_get_consume_purge_and_bind_with_the_generated_name_of_a_reply_queue_are_refused_with_404(
    world, client, own, kind
):
    server = world.client().channel()
    listen(client)
    request(client)
    name = asked(server).reply_to
    one = client if own else server
    one.send(1, kind(queue=name, exchange="amq.fanout") if kind is Queue.Bind else kind(queue=name))
    assert one.only(CHANNEL_CLOSE).reply_code == 404


def test_a_reply_to_that_names_an_ordinary_queue_is_left_unchanged(client):
    client.publish(b"x", "requests", properties=Basic.Properties(reply_to=f"{REPLY_TO}x"))
    assert asked(client).reply_to == f"{REPLY_TO}x"


def test_a_broker_profile_without_extensions_does_not_support_direct_reply_to(make_world):
    client = make_world(profile="amqp-0-9-1").client().channel()
    client.declare("requests")
    request(client)
    assert asked(client).reply_to == REPLY_TO
    client.send(1, Basic.Consume(queue=REPLY_TO, no_ack=True))
    assert client.only(CHANNEL_CLOSE).reply_code == 404
