"""Consumers and producers on one connection of pika to a real RabbitMQ."""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4

import pytest

from qflow_client import FlowControlTimeout, HoldKind, MessageRejected, Outcome, Producer, connect
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.effort import rounds

from .test_rabbitmq_producer import PATIENCE, wait_held

pytestmark = pytest.mark.rabbitmq

COUNT = 4 * rounds(1000)


def test_messages_published_by_four_threads_are_consumed_on_the_same_connection_in_order(
    rabbitmq: RabbitMQNode,
) -> None:
    queue = f"qflow-{uuid4().hex}"
    with connect(rabbitmq.url) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, exclusive=True)
        channel.basic_qos(prefetch_count=200)
        got: list[bytes] = []

        def work(name: int) -> None:
            with Producer(connection=connection, routing_key=queue) as producer:
                for number in range(COUNT // 4):
                    producer.send(b"%d %d" % (name, number))

        def consume(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            got.append(body)
            channel.basic_ack(method.delivery_tag)
            if len(got) == COUNT:
                channel.stop_consuming()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        channel.basic_consume(queue, consume)
        channel.start_consuming()
        for thread in threads:
            thread.join()
        for name in range(4):
            own = [body for body in got if body.startswith(b"%d " % name)]
            assert own == [b"%d %d" % (name, number) for number in range(COUNT // 4)]
        # pika can still use the connection.
        assert channel.queue_declare(queue, passive=True).method.message_count == 0


def test_an_alarm_holds_all_producers_of_a_connection_and_a_rejected_message_ends_only_one_producer(
    own_rabbitmq: RabbitMQNode,
) -> None:
    queue = f"qflow-{uuid4().hex}"
    with connect(own_rabbitmq.url) as connection:
        connection.channel().queue_declare(queue, exclusive=True)
        one, two = (Producer(connection=connection, routing_key=queue) for _ in range(2))
        own_rabbitmq.raise_memory_alarm()
        # RabbitMQ blocks a connection after the connection publishes.
        receipt = one.send(b"in flight")
        for producer in (one, two):
            wait_held(producer, HoldKind.CONNECTION_BLOCKED)
            with pytest.raises(FlowControlTimeout, match="connection_blocked"):
                producer.send(b"no", timeout=0.1)
        own_rabbitmq.clear_memory_alarm()
        assert receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED
        assert two.wait_unflowed(timeout=PATIENCE)
        with pytest.raises(MessageRejected, match="404"):
            one.send(b"", exchange=f"no exchange {queue}").result(timeout=PATIENCE)
        one.close()
        assert two.send(b"goes on").result(timeout=PATIENCE) is Outcome.CONFIRMED
        two.close()
