"""The frames of a broker that imitates another broker."""

from __future__ import annotations

import pytest
from pamqp import commands

from qflow_client.broker import Broker, BrokerSettings, Profile
from qflow_client.broker.core.profiles import DIALECTS, PROTOCOL_HEADER

AMQP_0_9 = b"AMQP\1\1\0\x09"
AMQP_1_0 = b"AMQP\0\1\0\0"
WITHOUT_EXTENSIONS = (Profile.WSO2, Profile.AMQP_0_9_1)


def connect(world, header=PROTOCOL_HEADER):
    """Return `Connection.Start` and `Connection.Tune` of the broker."""
    client = world.stranger()
    client.feed(header)
    start = client.only(commands.Connection.Start, 0)
    client.send(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"))
    return start, client.only(commands.Connection.Tune, 0)


@pytest.mark.parametrize("value", ["rabbitmq", "", None, 1, ["wso2"]], ids=str)
def test_an_unknown_broker_profile_is_rejected_and_the_error_lists_the_known_profiles(value):
    words = "profile must be one of 'qflow', 'lavinmq', 'wso2', 'amqp-0-9-1', 'amqp-0-9', not "
    with pytest.raises(ValueError, match=words):
        Broker(profile=value)


def test_each_broker_profile_has_a_dialect_and_uses_only_allowed_settings():
    assert list(DIALECTS) == list(Profile)
    for profile in Profile:
        settings = BrokerSettings.of({"profile": profile})
        assert {name: getattr(settings, name) for name in settings.dialect.settings} == settings.dialect.settings


def test_the_limits_proposed_by_a_broker_profile_apply_unless_the_settings_replace_them(make_world):
    for profile in (Profile.LAVINMQ, Profile.WSO2, Profile.AMQP_0_9_1):
        expected = DIALECTS[profile].settings
        _, tune = connect(make_world(profile=profile))
        told = {name: getattr(tune, name) for name in ("channel_max", "frame_max", "heartbeat")}
        assert told == expected
        _, tune = connect(make_world(profile=profile, heartbeat=7))
        assert tune.heartbeat == 7


@pytest.mark.parametrize(
    ("profile", "product", "extensions"),
    [
        (Profile.QFLOW, "qflow broker", 8),
        (Profile.LAVINMQ, "LavinMQ", 8),
        (Profile.WSO2, None, None),
        (Profile.AMQP_0_9_1, "AMQP 0-9-1 without extensions", 0),
    ],
)
def test_a_broker_profile_announces_the_product_and_capabilities_of_the_imitated_broker(
    make_world, profile, product, extensions
):
    start, _ = connect(make_world(profile=profile))
    assert start.server_properties.get("product") == product
    capabilities = start.server_properties.get("capabilities")
    assert capabilities is None if extensions is None else len(capabilities) == extensions


@pytest.mark.parametrize(
    ("profile", "accepted", "answer"),
    [
        (Profile.QFLOW, {PROTOCOL_HEADER}, PROTOCOL_HEADER),
        (Profile.LAVINMQ, {PROTOCOL_HEADER, AMQP_0_9}, PROTOCOL_HEADER),
        (Profile.WSO2, {PROTOCOL_HEADER, AMQP_0_9}, b"AMQP\1\1\0\x0a"),
        (Profile.AMQP_0_9_1, {PROTOCOL_HEADER}, PROTOCOL_HEADER),
        (Profile.AMQP_0_9, {AMQP_0_9}, AMQP_0_9),
    ],
)
def test_a_broker_profile_accepts_and_answers_protocol_headers_like_the_imitated_broker(
    make_world, profile, accepted, answer
):
    world = make_world(profile=profile)
    for header in (PROTOCOL_HEADER, AMQP_0_9, AMQP_1_0):
        client = world.stranger()
        for byte in header:
            client.feed(bytes([byte]))
        if header in accepted:
            client.only(commands.Connection.Start, 0)
        else:
            assert client.raw_output() == answer


@pytest.mark.parametrize("profile", WITHOUT_EXTENSIONS)
def test_E11_a_broker_profile_without_extensions_refuses_update_secret(make_world, profile):
    client = make_world(profile=profile).client()
    client.send(0, commands.Connection.UpdateSecret("guest", "it has expired"))
    assert client.close_of(commands.Connection.Close).reply_code == 503


@pytest.mark.parametrize("profile", WITHOUT_EXTENSIONS)
@pytest.mark.parametrize(
    "method",
    [commands.Confirm.Select(), commands.Basic.Nack(1), commands.Exchange.Bind(0, "amq.fanout", "amq.direct")],
    ids=lambda method: method.name,
)
def test_a_method_of_an_extension_that_the_broker_profile_lacks_closes_the_connection_with_540(
    make_world, profile, method
):
    client = make_world(profile=profile).client().channel()
    client.send(1, method)
    close = client.close_of(commands.Connection.Close)
    assert close.reply_code == 540
    assert close.reply_text == f"NOT_IMPLEMENTED - {method.name} is an extension that this broker does not support"


def test_a_broker_profile_without_extensions_sends_no_basic_cancel_to_the_consumers_of_a_deleted_queue(make_world):
    client = make_world(profile=Profile.AMQP_0_9_1).client().channel()
    client.declare()
    client.call(1, commands.Basic.Consume(queue="q", consumer_tag="c"), commands.Basic.ConsumeOk)
    client.call(1, commands.Queue.Delete(queue="q"), commands.Queue.DeleteOk)


def alarm(world, client, reason="full"):
    world.controls.alarms["disk"] = reason
    client.session.block("disk", reason)


def test_in_the_lavinmq_profile_an_alarm_closes_channels_that_publish_or_declare_a_queue(make_world):
    world = make_world(profile=Profile.LAVINMQ)
    client = world.client()
    for number in (1, 2, 3, 4):
        client.channel(number)
    client.declare()
    client.call(2, commands.Confirm.Select(), commands.Confirm.SelectOk)
    client.call(3, commands.Tx.Select(), commands.Tx.SelectOk)
    alarm(world, client)
    assert client.names() == [], "nobody is told before"
    # Consumers and passive declares of existing queues are served.
    client.declare(channel=4)
    for number in (1, 2, 3):
        client.publish(channel=number)
        close = client.close_of(commands.Channel.Close)
        assert (close.reply_code, close.reply_text) == (406, "PRECONDITION_FAILED - Server low on disk space")
        assert (close.class_id, close.method_id) == (60, 40)
    client.send(4, commands.Queue.Declare(queue="new"))
    close = client.close_of(commands.Channel.Close)
    assert close.reply_text == "PRECONDITION_FAILED - Server low on disk space, can not create queue"
    assert world.queue().depth == 0
    # A client that connects later is also stopped, but not after the end of the alarm.
    later = world.client().channel(confirms=True)
    later.publish()
    assert later.close_of(commands.Channel.Close).reply_code == 406
    for each in (client, later):
        each.session.block("disk", None)
    later.send(1, commands.Channel.CloseOk())
    later.channel(confirms=True)
    later.publish()
    assert later.names() == ["Basic.Ack"]


@pytest.mark.parametrize("profile", WITHOUT_EXTENSIONS)
def test_an_alarm_signalled_by_channel_flow_stops_all_publishers_until_the_last_alarm_ends(make_world, profile):
    world = make_world(profile=profile, channel_max=10)
    client = world.client().channel(1).channel(2).channel(3).with_queue()
    client.publish(channel=1)
    client.call(2, commands.Tx.Select(), commands.Tx.SelectOk)
    alarm(world, client)
    client.session.block("memory", "and more")
    received = client.received()
    assert [(number, each.name, each.active) for number, each in received] == [
        (1, "Channel.Flow", False),
        (2, "Channel.Flow", False),
    ]
    # A channel is stopped when it begins to publish.
    client.publish(channel=3)
    assert [(number, each.active) for number, each in client.received()] == [(3, False)]
    later = world.client().channel()
    later.publish()
    assert later.only(commands.Channel.Flow).active is False
    client.session.block("disk", None)
    assert client.names() == []
    client.session.block("memory", None)
    assert [(number, each.active) for number, each in client.received()] == [(1, True), (2, True), (3, True)]


def test_an_alarm_sends_no_channel_flow_on_a_channel_that_is_closing(make_world):
    world = make_world(profile=Profile.AMQP_0_9_1)
    client = world.client().channel()
    client.publish(routing_key="q")
    client.send(1, commands.Queue.Declare(queue="none", passive=True))
    assert client.close_of(commands.Channel.Close).reply_code == 404
    alarm(world, client)
    assert client.names() == []


def test_in_the_wso2_profile_a_channel_error_ends_the_connection(make_world):
    client = make_world(profile=Profile.WSO2).client().channel()
    client.send(1, commands.Queue.Declare(queue="none", passive=True))
    close = client.close_of(commands.Connection.Close)
    assert close.reply_code == 403
    assert "no queue 'none'" in close.reply_text
