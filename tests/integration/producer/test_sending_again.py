"""A message that was not delivered or not sent keeps its destination, and goes there when it is sent again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qflow_client import (
    Message,
    Producer,
    ProducerClosed,
    ProducerFlowed,
    RoutedMessage,
    UndeliveredMessages,
)
from qflow_client.broker import Broker

from .tools import bodies, start_send


def _undelivered(producer: Producer) -> UndeliveredMessages:
    producer.send(b"plain", routing_key="later")
    producer.send(Message(b"with properties", priority=3), routing_key="later")
    with pytest.raises(UndeliveredMessages) as caught:
        producer.flush(timeout=20)
    return caught.value


@pytest.mark.parametrize("way", ["send", "send_nowait", "send_many"])
def test_a_message_that_is_sent_again_goes_to_its_original_destination(
    producer: Producer, broker: Broker, way: str
) -> None:
    error = _undelivered(producer)
    broker.declare_queue("later")
    if way == "send_many":
        producer.send_many(error.unsent)
    else:
        for message in error.unsent:
            getattr(producer, way)(message)
    producer.flush(timeout=20)
    assert bodies(broker, "later") == [b"plain", b"with properties"]
    assert bodies(broker) == []


def test_the_message_of_a_receipt_goes_to_its_original_destination(producer: Producer, broker: Broker) -> None:
    sent = Message(b"with properties", priority=3, message_id="own")
    receipt = producer.send(sent, routing_key="later")
    assert receipt.message == sent
    assert sent == receipt.message
    with pytest.raises(UndeliveredMessages):
        producer.flush(timeout=20)
    broker.declare_queue("later")
    producer.send(receipt.message).result(timeout=20)
    assert bodies(broker, "later") == [b"with properties"]


def test_arguments_of_send_override_the_destination_of_a_routed_message(producer: Producer, broker: Broker) -> None:
    (plain, other) = _undelivered(producer).unsent
    producer.send(plain, routing_key="q").result(timeout=20)
    assert bodies(broker) == [b"plain"]
    receipt = producer.send(other, exchange="amq.direct")
    assert (receipt.exchange, receipt.routing_key) == ("amq.direct", "later")
    with pytest.raises(UndeliveredMessages):
        producer.flush(timeout=20)


def test_an_outbox_keeps_the_destinations_of_routed_messages(
    make_producer: Callable[..., Producer], broker: Broker, tmp_path: object
) -> None:
    producer = make_producer(outbox=f"{tmp_path}/outbox")
    broker.declare_queue("later")
    producer.send_many([RoutedMessage(b"1", exchange="", routing_key="later"), b"2"])
    producer.send(RoutedMessage(b"3", exchange="", routing_key="later"))
    producer.flush(timeout=20)
    assert (bodies(broker, "later"), bodies(broker)) == ([b"1", b"3"], [b"2"])


def test_the_error_of_a_flowed_or_closed_producer_shows_the_destination_of_the_message(
    make_producer: Callable[..., Producer],
) -> None:
    producer = make_producer(capacity=1)
    producer.pause()
    for call in (
        lambda: producer.send(b"x", exchange="ex", routing_key="key", timeout=0.01),
        lambda: producer.send(b"x", exchange="ex", routing_key="key", timeout=0),
        lambda: producer.send_nowait(b"x", exchange="ex", routing_key="key"),
        lambda: producer.send_many([b"x"], exchange="ex", routing_key="key", timeout=0),
    ):
        with pytest.raises(ProducerFlowed) as flowed:
            call()
        assert (flowed.value.message, flowed.value.exchange, flowed.value.routing_key) == (b"x", "ex", "key")
    waiting = start_send(producer, b"x", exchange="ex", routing_key="key")
    producer.close()
    with pytest.raises(ProducerClosed) as closed:
        waiting.result()
    assert (closed.value.exchange, closed.value.routing_key) == ("ex", "key")
    with pytest.raises(ProducerClosed) as closed:
        producer.send(b"x", exchange="ex", routing_key="key")
    assert (closed.value.exchange, closed.value.routing_key) == ("ex", "key")
    with pytest.raises(ProducerClosed) as closed:
        producer.wait_unflowed()
    assert (closed.value.message, closed.value.exchange, closed.value.routing_key) == (None, None, None)
