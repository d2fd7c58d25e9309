"""Connection parameters that accept the settings of flow control."""

from __future__ import annotations

import pika as original
import pytest

import qflow_client.pika as pika
from qflow_client import ProducerSettings, SettingsError, WhenFlowed


def settings(channel: pika.BlockingChannel) -> ProducerSettings:
    return channel._flow.settings


def test_settings_of_flow_control_can_be_keywords_of_connection_parameters(broker):
    parameters = pika.ConnectionParameters("127.0.0.1", broker.port, heartbeat=5, capacity=7, when_flowed="raise")
    assert (parameters.heartbeat, parameters.port) == (5, broker.port)
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        assert (settings(channel).capacity, settings(channel).when_flowed) == (7, WhenFlowed.RAISE)


def test_settings_of_flow_control_can_be_in_the_query_of_a_url(broker):
    parameters = pika.URLParameters(f"{broker.url}?heartbeat=5&max_producer_flow_control_wait=3&capacity=9")
    assert parameters.heartbeat == 5
    with pika.BlockingConnection([parameters]) as connection:
        channel = connection.channel()
        assert (settings(channel).capacity, settings(channel).max_producer_flow_control_wait) == (9, 3)


def test_without_settings_of_flow_control_the_parameters_equal_those_of_pika():
    url = "amqp://user:p%40ss@host:1234/v%2Fhost?heartbeat=5&socket_timeout=3"
    ours, theirs = pika.URLParameters(url), original.URLParameters(url)
    assert ours == theirs
    assert repr(ours) == repr(theirs)
    assert pika.ConnectionParameters("host", port=5) == original.ConnectionParameters("host", port=5)


def test_settings_from_the_environment_apply_to_parameter_objects_of_pika(broker, monkeypatch):
    monkeypatch.setenv("QFLOW_CAPACITY", "11")
    monkeypatch.setenv("QFLOW_CONFIRMS", "false")
    monkeypatch.setenv("QFLOW_MANDATORY", "true")
    with pika.BlockingConnection(original.URLParameters(broker.url)) as connection:
        assert settings(connection.channel()).capacity == 11
    assert pika.URLParameters(broker.url).flow_settings.capacity == 11


def test_an_invalid_setting_raises_an_error_when_the_parameters_are_created():
    with pytest.raises(SettingsError, match="capacity"):
        pika.ConnectionParameters(capacity=0)
    with pytest.raises(SettingsError, match="max_producer_flow_control_wait"):
        pika.URLParameters("amqp://localhost?max_producer_flow_control_wait=soon")


@pytest.mark.parametrize("name", ["exchange", "routing_key", "confirms", "mandatory", "message_ids", "connect_timeout"])
def test_connection_parameters_reject_a_setting_that_belongs_to_a_method(name):
    with pytest.raises(TypeError, match=f"{name} is not a setting of a connection"):
        pika.ConnectionParameters(**{name: "x"})
    with pytest.raises(TypeError, match=f"{name} is not a setting of a connection"):
        pika.URLParameters(f"amqp://localhost?{name}=x")


def test_an_unknown_parameter_raises_the_same_error_as_in_pika():
    for module in original, pika:
        with pytest.raises(TypeError, match="nonsense"):
            module.ConnectionParameters(nonsense=1)
        with pytest.raises(ValueError, match="scheme"):
            module.URLParameters("ftp://host")


def test_several_hosts_are_tried_in_turn(broker):
    parameters = [
        pika.ConnectionParameters("127.0.0.1", 1, capacity=1),
        pika.ConnectionParameters("127.0.0.1", broker.port, capacity=2),
    ]
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        assert settings(channel).capacity == 2
        channel.basic_publish("", "q", b"")
