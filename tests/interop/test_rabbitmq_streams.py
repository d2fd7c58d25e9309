"""Streams of RabbitMQ. A stream keeps messages after they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pika
import pytest

from qflow_client import Outcome
from qflow_client.testing.rabbitmq import RabbitMQ
from tests.interop.contract.producers import PRODUCERS
from tests.interop.contract.providers import PATIENCE
from tests.interop.contract.test_contract import body, if_it_has

# The first test starts the container.
pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(400)]

COUNT = 500

each_producer = pytest.mark.parametrize("make", PRODUCERS.values(), ids=PRODUCERS)


@pytest.fixture
def stream(each_rabbitmq: RabbitMQ) -> Iterator[str]:
    name = f"qflow-{uuid4().hex}"
    with pika.BlockingConnection(pika.URLParameters(each_rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        yield name
        channel.queue_delete(name)


def read(url: str, stream: str, offset: int | str, count: int) -> list[tuple[int, bytes]]:
    """Return `count` messages from an offset on, each with its offset."""
    found: list[tuple[int, bytes]] = []
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel: Any = connection.channel()
        channel.basic_qos(prefetch_count=100)
        arguments = {"x-stream-offset": offset}
        for method, properties, content in channel.consume(stream, arguments=arguments, inactivity_timeout=PATIENCE):
            assert method is not None, f"{len(found)} of {count} messages came"
            channel.basic_ack(method.delivery_tag)
            # Deliveries begin with the chunk that contains the offset.
            if (at := properties.headers["x-stream-offset"]) >= (offset if isinstance(offset, int) else 0):
                found.append((at, content))
            if len(found) == count:
                break
        channel.cancel()
    return found


@each_producer
def test_confirmed_messages_are_in_the_stream_in_order_and_can_be_read_again_from_any_offset(
    each_rabbitmq: RabbitMQ, stream: str, make: Callable[..., Any]
) -> None:
    with make(each_rabbitmq.url, routing_key=stream) as producer:
        receipts = [producer.send(body(number)) for number in range(COUNT)]
        producer.flush(timeout=PATIENCE)
        assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * COUNT
    whole = [(number, body(number)) for number in range(COUNT)]
    assert read(each_rabbitmq.url, stream, "first", COUNT) == whole
    assert read(each_rabbitmq.url, stream, COUNT - 123, 123) == whole[-123:]


@each_producer
def test_an_unroutable_message_is_returned_and_does_not_affect_the_stream(
    each_rabbitmq: RabbitMQ, stream: str, make: Callable[..., Any]
) -> None:
    with make(each_rabbitmq.url, routing_key=stream, **if_it_has(make, on_refused="fail")) as producer:
        outcomes = []
        for number in range(20):
            receipt = producer.send(body(number), routing_key=f"{stream}-not" if number % 4 == 3 else None)
            assert receipt.wait(PATIENCE)
            outcomes.append(receipt.outcome)
    assert outcomes == ([Outcome.CONFIRMED] * 3 + [Outcome.RETURNED]) * 5
    kept = [body(number) for number in range(20) if number % 4 != 3]
    assert read(each_rabbitmq.url, stream, "first", len(kept)) == list(enumerate(kept))
