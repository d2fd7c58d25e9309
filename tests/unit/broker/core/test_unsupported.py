from __future__ import annotations

import pytest
from pamqp import commands
from pamqp.commands import Basic, Queue

from qflow_client.broker.core.errors import ChannelException

CHANNEL_CLOSE = commands.Channel.Close


@pytest.fixture(name="client")
def _client(world):
    return world.client().channel()


@pytest.mark.parametrize("value", [1, 10, 255, False, True, "x", None])
def test_declaring_a_queue_with_x_max_priority_is_refused_with_406(world, client, value):
    client.send(1, Queue.Declare(queue="q", arguments={"x-max-priority": value}))
    client.check_close(CHANNEL_CLOSE, 406, "queue 'q': x-max-priority")
    assert world.host.queues == {}


def test_declaring_a_stream_is_refused_with_406_but_other_types_of_queues_are_accepted(world, client):
    client.declare("q", arguments={"x-queue-type": "quorum"})
    client.send(1, Queue.Declare(queue="s", arguments={"x-queue-type": "stream"}))
    client.check_close(CHANNEL_CLOSE, 406, "queue 's': x-queue-type")
    assert list(world.host.queues) == ["q"]


@pytest.mark.parametrize("value", [1, -1, True, "x", None])
def test_a_consumer_priority_is_refused_with_406(world, client, value):
    client.declare()
    client.consume(arguments={"x-priority": value})
    client.check_close(CHANNEL_CLOSE, 406, "consumer of queue 'q': x-priority")
    assert not world.queue().dispatcher.consumers


def test_a_consumer_priority_of_0_is_accepted(world, client):
    client.declare(arguments={"x-max-priority": 0})
    client.consume(arguments={"x-priority": 0})
    client.only(Basic.ConsumeOk)


@pytest.mark.parametrize("name", ["CC", "BCC"])
@pytest.mark.parametrize("value", [["other"], [], "other", None], ids=repr)
@pytest.mark.parametrize("confirms", [False, True])
def test_a_message_with_a_CC_or_BCC_header_is_refused_with_406_and_not_enqueued(world, name, value, confirms):
    client = world.client().channel(confirms=confirms).with_queue()
    client.publish(properties=Basic.Properties(headers={name: value}))
    close = client.close_of(CHANNEL_CLOSE)
    assert close.reply_code == 406
    assert f"header '{name}'" in close.reply_text
    assert world.queue().depth == 0
    assert client.channel(2)


def test_a_header_whose_name_only_contains_cc_or_bcc_is_accepted(world, client):
    client.declare()
    client.publish(properties=Basic.Properties(headers={"a": "\x02CC \x03BCC", "XCC": 1, "cc": 2}))
    assert world.queue().depth == 1


def test_the_publish_method_of_the_virtual_host_refuses_a_message_with_a_CC_header(world):
    with pytest.raises(ChannelException, match="header 'CC'"):
        world.host.publish("", "q", b"", Basic.Properties(headers={"CC": ["other"]}))
