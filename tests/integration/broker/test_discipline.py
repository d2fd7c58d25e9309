"""Clients that ignore flow control, and alarms, over real sockets."""

from __future__ import annotations

import socket
import time

import pika
import pytest
from pamqp import commands
from pika.exceptions import AMQPChannelError

from qflow_client.broker import Broker

STOP_1 = {"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1}


def publish_many(client, count):
    for _ in range(count):
        client.publish(b"x" * 100_000)


def publish_on(connection, channel):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        channel.basic_publish("", "q", b"x")
        connection.process_data_events()


def test_D8_pika_ignores_channel_flow_and_the_broker_closes_its_channel():
    with Broker(close_channel_after=10, flow_grace=0) as broker:
        broker.declare_queue("q", arguments=dict(STOP_1))
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        with pytest.raises(AMQPChannelError):
            publish_on(connection, channel)
        assert broker.sanctions == {"tarpits": 0, "channels_closed": 1, "connections_closed": 0}
        assert broker.queue("q").depth == 12
        (found,) = broker.connections()
        assert (found.past_flow, found.channels_closed) == (11, 1)
        connection.close()


def test_D8_the_broker_stops_reading_from_a_tarpitted_connection_and_still_reads_from_others(connect, stop_clock):
    with Broker(tarpit_after=1, tarpit_time=1.0, flow_grace=0) as broker:
        broker.declare_queue("q", arguments=dict(STOP_1))
        client, other = connect(broker).open().channel(), connect(broker).open().channel()
        for _ in range(2):
            client.publish()
        client.expect(commands.Channel.Flow)
        began = time.monotonic()
        resume_clock = stop_clock(broker)
        client.publish()
        broker.wait_until(lambda b: b.sanctions["tarpits"] == 1)
        client.socket.settimeout(0.05)
        client.send(1, commands.Queue.Declare(queue="later"))
        with pytest.raises(socket.timeout):
            client.expect(commands.Queue.DeclareOk)
        other.call(1, commands.Queue.Declare(queue="other"), commands.Queue.DeclareOk)
        client.socket.settimeout(20)
        resume_clock()
        client.expect(commands.Queue.DeclareOk)
        assert time.monotonic() - began >= 0.9
        assert broker.connections()[0].tarpits == 1


def test_D8_a_tarpit_slows_a_flood_by_tcp_backpressure(connect):
    with Broker(tarpit_after=1, tarpit_time=30, flow_grace=0) as broker:
        broker.declare_queue("q", arguments=dict(STOP_1))
        client = connect(broker).open().channel()
        for _ in range(3):
            client.publish()
        broker.wait_until(lambda b: b.sanctions["tarpits"])
        client.socket.settimeout(0.2)
        with pytest.raises(socket.timeout):
            publish_many(client, 10_000)
        # The broker accepts at most the bytes that it read together with the offending message.
        assert broker.queue("q").bytes < 1_000_000


def test_D7_a_full_backlog_of_a_connection_blocks_the_publishing_channels_of_the_connection(connect):
    with Broker(backlog_count=2) as broker:
        broker.declare_queue("q", arguments=dict(STOP_1))
        client = connect(broker).open().channel(1).channel(2, confirms=True)
        for _ in range(5):
            client.publish()
        broker.wait_until(lambda b: b.channels()[1].flowed)
        assert broker.connections()[0].to_json()["backlog"] == 3
        assert broker.channels()[1].blocked_by == ("backlog",)
        broker.purge("q")
        broker.wait_until(lambda b: not b.channels()[1].flowed)


def test_old_and_new_connections_stay_blocked_until_the_last_alarm_is_cleared(connect):
    with Broker() as broker:
        client = connect(broker).open()
        broker.raise_alarm("memory", "low on memory")
        assert client.expect(commands.Connection.Blocked).reason == "low on memory"
        broker.raise_alarm("disk", "low on disk")
        broker.block("by hand")
        late = connect(broker).open()
        assert late.expect(commands.Connection.Blocked).reason == "low on memory"
        assert broker.alarms == {"memory": "low on memory", "disk": "low on disk", "operator": "by hand"}
        assert broker.connections()[0].blocked_by == ("memory", "disk", "operator")
        broker.clear_alarm("memory")
        broker.clear_alarm("memory")
        broker.unblock()
        assert broker.connections()[0].blocked
        broker.clear_alarm("disk")
        for each in (client, late):
            each.expect(commands.Connection.Unblocked)
        assert broker.alarms == {}


@pytest.mark.parametrize("name", ["", "operator"])
def test_the_name_of_an_alarm_must_not_be_empty_or_operator(broker, name):
    with pytest.raises(ValueError, match="alarm must have a name"):
        broker.raise_alarm(name, "why")
    broker.block("by hand")
    broker.clear_alarm("operator")
    assert broker.alarms == {"operator": "by hand"}
