"""Channels that pika created and `wrap` puts under flow control."""

from __future__ import annotations

from typing import Any

import pika as original
import pytest

import qflow_client.pika as drop_in
from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from tests.integration.producer.tools import PATIENCE, bodies, takes

from .tools import held, stop, waiting_at_most


@pytest.fixture
def connection(broker: Any, stack: Any) -> original.BlockingConnection:
    connection = original.BlockingConnection(original.URLParameters(broker.url))
    stack.callback(lambda: connection.close() if connection.is_open else None)
    return connection


def test_wrap_returns_the_same_channel_object_with_flow_control(broker, connection, wire):
    plain = connection.channel()
    channel = drop_in.wrap(plain)
    assert channel is plain
    assert isinstance(channel, drop_in.BlockingChannel)
    assert drop_in.wrap(channel) is channel
    stop(channel, broker)
    wire.wait_for("in", "Channel.FlowOk")
    with waiting_at_most(channel, 0.3), takes(0.3), pytest.raises(FlowControlTimeout):
        channel.basic_publish("", "q", b"never")
    broker.flow(True)
    assert channel.wait_unflowed(PATIENCE)
    channel.basic_publish("", "q", b"sent")
    broker.wait_until(lambda broker: bodies(broker) == [b"sent"])


def test_connection_blocked_holds_a_wrapped_channel_until_connection_unblocked(broker, connection):
    channel = drop_in.wrap(connection.channel())
    broker.block()
    held(channel, HoldKind.CONNECTION_BLOCKED)
    broker.unblock()
    held(channel)


def test_a_wrapped_channel_handles_single_and_multiple_confirms(broker, connection):
    one, two = drop_in.wrap(connection.channel()), drop_in.wrap(connection.channel())
    one.confirm_delivery()
    two.confirm_delivery(pipelined=True)
    for number in range(20):
        one.basic_publish("", "q", b"%d" % number)
        two.basic_publish("", "q", b"%d" % number)
    two.wait_for_confirms()
    assert broker.queue("q").depth == 40


def fill(channel: drop_in.BlockingChannel) -> None:
    for _ in range(1000):
        channel.basic_publish("", "q", bytes(1_000_000))


def test_while_the_socket_accepts_no_bytes_a_publish_on_a_wrapped_channel_times_out(broker, proxy, stack):
    connection = original.BlockingConnection(original.URLParameters(proxy.url(broker)))
    stack.callback(connection.close)
    channel = drop_in.wrap(connection.channel())
    proxy.stop_reading()
    with waiting_at_most(channel, 0.3), pytest.raises(ConfirmTimeout, match="bytes of the message are written"):
        fill(channel)
    with waiting_at_most(channel, 0.3), takes(0.3), pytest.raises(FlowControlTimeout):
        channel.basic_publish("", "q", b"")
    proxy.go_on_reading()
    channel.wait_unflowed(PATIENCE)


def test_wrap_rejects_objects_that_cannot_be_wrapped_safely(connection):
    channel = connection.channel()
    channel.confirm_delivery()
    with pytest.raises(ValueError, match="before confirm_delivery"):
        drop_in.wrap(channel)
    closed = connection.channel()
    closed.close()
    with pytest.raises(ValueError, match="is not open"):
        drop_in.wrap(closed)
    with pytest.raises(TypeError, match=r"not pika\.adapters\.blocking_connection\.BlockingConnection; to publish"):
        drop_in.wrap(connection)

    class Other(original.adapters.blocking_connection.BlockingChannel):
        pass

    other = connection.channel()
    other.__class__ = Other
    with pytest.raises(TypeError, match=r"BlockingChannel or pika\.channel\.Channel"):
        drop_in.wrap(other)
