"""At the memory limit the broker stops reading from publishers. Incomplete messages do not fill the memory (E9)."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pika
import pika.exceptions
import pytest
from pamqp import body, commands, frame, header

from qflow_client.broker import Broker

LIMIT = 4 << 20


def raw_publisher(broker: Broker) -> socket.socket:
    """Open a connection and its channel 1."""
    publisher = socket.create_connection(("127.0.0.1", broker.port), timeout=30)
    frames = (
        (0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")),
        (0, commands.Connection.TuneOk(0, 0, 0)),
        (0, commands.Connection.Open("/")),
        (1, commands.Channel.Open()),
    )
    publisher.sendall(b"AMQP\0\0\x09\x01" + b"".join(frame.marshal(method, number) for number, method in frames))
    return publisher


def content(size: int, sent: int) -> bytes:
    parts: list[Any] = [commands.Basic.Publish(routing_key="q"), header.ContentHeader(body_size=size)]
    parts += [body.ContentBody(bytes(100_000)) for _ in range(sent // 100_000)]
    return b"".join(frame.marshal(part, 1) for part in parts)


def test_E9_at_the_memory_limit_the_broker_stops_reading_from_a_publisher_that_ignores_flow():
    count = 300
    with Broker(memory_limit=LIMIT) as broker, raw_publisher(broker) as publisher:
        broker.declare_queue("q")
        sending = threading.Thread(target=publisher.sendall, args=(content(100_000, 100_000) * count,))
        sending.start()
        broker.wait_until(lambda broker: "memory" in broker.alarms)
        # Another client can still consume. It removes messages, so the broker reads from the publisher again.
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            for number, (method, _, _) in enumerate(channel.consume("q"), 1):
                assert method is not None
                assert method.delivery_tag is not None
                channel.basic_ack(method.delivery_tag)
                if number == count:
                    break
        sending.join()
        assert broker.memory.peak < LIMIT * 1.2


@pytest.mark.parametrize("size", [100_000, 4_000_000], ids=["complete", "incomplete"])
def test_E9_bodies_that_many_connections_send_at_once_do_not_exceed_the_memory_limit(size):
    limit, reads = 1 << 20, threading.Event()
    with Broker(memory_limit=limit) as broker, contextlib.ExitStack() as opened:
        broker.declare_queue("q")
        attackers = [opened.enter_context(raw_publisher(broker)) for _ in range(20)]
        broker.wait_until(lambda broker: len(broker.channels()) == 20)
        # All bytes are there before the event loop reads the first of them.
        broker._runner._post(reads.wait)  # type: ignore[arg-type]  # the result is ignored
        for attacker in attackers:
            attacker.setblocking(False)
            assert attacker.send(content(size, 100_000)) > 100_000
        reads.set()
        broker.wait_until(lambda broker: sum(each.bytes_received > 100_000 for each in broker.connections()) > 5)
        assert broker.memory.peak < limit * 1.2


def test_E9_incomplete_message_bodies_do_not_exceed_the_memory_limit():
    with Broker(memory_limit=LIMIT) as broker, contextlib.ExitStack() as opened:
        broker.declare_queue("q")
        for _ in range(20):
            attacker = opened.enter_context(raw_publisher(broker))
            attacker.sendall(content(4_000_000, 1_000_000))
        # The broker stops reading from some connections, and closes some channels.
        broker.wait_until(lambda broker: sum(each.bytes_received > 300_000 for each in broker.connections()) == 20)
        assert sum(each.memory for each in broker.connections()) <= LIMIT
        broker.wait_until(lambda broker: broker.memory.bytes <= LIMIT // 2)
        assert broker.memory.peak < LIMIT * 1.2
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", "q", b"x")
        assert broker.queue("q").depth == 1


def test_E9_a_transaction_above_half_of_the_memory_limit_closes_its_channel():
    with (
        Broker(memory_limit=LIMIT) as broker,
        pika.BlockingConnection(pika.URLParameters(broker.url)) as connection,
    ):
        broker.declare_queue("q")
        channel = connection.channel()
        channel.tx_select()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="transactions") as caught:  # noqa: PT012
            for _ in range(200):
                channel.basic_publish("", "q", bytes(100_000))
            channel.tx_commit()
        assert caught.value.reply_code == 506
        assert (broker.queue("q").depth, broker.memory.bytes) == (0, 0)
