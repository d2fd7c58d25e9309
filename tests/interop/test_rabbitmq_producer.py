"""The threaded producer against a real RabbitMQ."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any
from uuid import uuid4

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from qflow_client import (
    AsyncProducer,
    ConfirmTimeout,
    Credentials,
    FlowControlTimeout,
    HoldKind,
    Outcome,
    Producer,
    ProducerClosed,
    UndeliveredMessages,
)
from qflow_client.message import REPUBLISHED
from qflow_client.renewal import Renewer
from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.effort import EFFORT
from tests.integration.producer.tools import ends_within, takes, wait_closed, wait_in_line

pytestmark = pytest.mark.rabbitmq

# Maximum seconds of any wait. Even a busy machine needs far less.
PATIENCE = 200.0
# Seconds of load in the heartbeat tests. This is several times their heartbeat interval of 2 s.
SECONDS_OF_LOAD = 30 if EFFORT == "nightly" else 7
# Minimum number of messages in the heartbeat tests, even on a slow machine.
ENOUGH_FOR_LOAD = SECONDS_OF_LOAD * 50


@pytest.fixture
def channel(rabbitmq: RabbitMQNode) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq.url))
    yield connection.channel()
    connection.close()


@pytest.fixture
def queue(channel: BlockingChannel) -> Iterator[str]:
    name = f"qflow-{uuid4().hex}"
    channel.queue_declare(name, durable=True)
    yield name
    channel.queue_delete(name)


def drain(channel: BlockingChannel, queue: str, count: int) -> list[bytes]:
    """Consume `count` messages, check that the queue is empty, and return the bodies."""
    bodies: list[bytes] = []
    for _method, _properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=PATIENCE):
        assert body is not None, f"{len(bodies)} of {count} messages came"
        bodies.append(body)
        if len(bodies) == count:
            break
    assert channel.cancel() == 0, "there were more messages"
    return bodies


def wait_held(producer: Producer, kind: HoldKind, timeout: float = PATIENCE) -> None:
    """Wait for flow events until the producer has a hold."""
    arrived = threading.Event()
    unsubscribe = producer.on_flow(lambda event: arrived.set() if any(h.kind == kind for h in event.holds) else None)
    if not any(hold.kind == kind for hold in producer.flow_state.holds):
        assert arrived.wait(timeout), f"not held by {kind}: {producer.flow_state}"
    unsubscribe()


def wait_free_of(producer: Producer, kind: HoldKind, timeout: float = PATIENCE) -> None:
    """Wait for flow events until the producer has the hold no longer."""
    gone = threading.Event()
    unsubscribe = producer.on_flow(lambda event: None if any(h.kind == kind for h in event.holds) else gone.set())
    if any(hold.kind == kind for hold in producer.flow_state.holds):
        assert gone.wait(timeout), f"still held by {kind}: {producer.flow_state}"
    unsubscribe()


def test_during_a_memory_alarm_the_producer_waits_and_no_message_is_lost(own_rabbitmq: RabbitMQNode) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(own_rabbitmq.url))
    channel = connection.channel()
    channel.queue_declare("orders")
    with Producer(own_rabbitmq.url, routing_key="orders") as producer:
        producer.send(b"before").result(PATIENCE)
        own_rabbitmq.raise_memory_alarm()
        # RabbitMQ blocks a connection when it publishes. This message is admitted, but not confirmed.
        first = producer.send(b"first under the alarm")
        wait_held(producer, HoldKind.CONNECTION_BLOCKED)
        assert "memory" in producer.flow_state.holds[0].detail

        with takes(0.5), pytest.raises(FlowControlTimeout) as caught:
            producer.send(b"never sent", timeout=0.5)
        assert [hold.kind for hold in caught.value.holds] == [HoldKind.CONNECTION_BLOCKED]
        with pytest.raises(ConfirmTimeout):
            first.result(timeout=0.1)
        with pytest.raises(ConfirmTimeout):
            producer.flush(timeout=0.1)

        later: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: later.extend(
                producer.send(b"later %d" % n, timeout=PATIENCE).result(PATIENCE) for n in range(100)
            )
        )
        thread.start()
        wait_in_line(producer, 1)
        own_rabbitmq.clear_memory_alarm()
        assert producer.wait_unflowed(timeout=PATIENCE)
        thread.join(PATIENCE)
        assert later == [Outcome.CONFIRMED] * 100
        assert first.result(PATIENCE) is Outcome.CONFIRMED
        assert producer.flow_state.seconds_flowed[HoldKind.CONNECTION_BLOCKED] >= 0.5
    bodies = drain(channel, "orders", 102)
    assert bodies == [b"before", b"first under the alarm", *(b"later %d" % n for n in range(100))]
    connection.close()


def test_closing_during_a_memory_alarm_ends_in_time_and_the_error_contains_the_messages(
    own_rabbitmq: RabbitMQNode,
) -> None:
    producer = Producer(own_rabbitmq.url, routing_key="orders", mandatory=False)
    producer.send(b"before").result(PATIENCE)
    own_rabbitmq.raise_memory_alarm()
    producer.send(b"in flight")
    wait_held(producer, HoldKind.CONNECTION_BLOCKED)
    # The alarm continues during the close.
    with ends_within(3), pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.5)
    assert [message.body for message in caught.value.unknown] == [b"in flight"]
    assert caught.value.unsent == ()


@pytest.mark.slow
def test_a_connection_with_a_heartbeat_of_2_seconds_stays_open_under_load(
    rabbitmq: RabbitMQNode, channel: BlockingChannel, queue: str
) -> None:
    # RabbitMQ sends no heartbeats while it sends confirms, and the producer does not pass these confirms to pika.
    with Producer(f"{rabbitmq.url}?heartbeat=2", routing_key=queue, rate=1000, mandatory=False) as producer:
        before = producer.flow_state.seconds_flowed.get(HoldKind.DISCONNECTED)
        until = time.monotonic() + SECONDS_OF_LOAD
        sent = 0
        while time.monotonic() < until or sent < ENOUGH_FOR_LOAD:
            producer.send(b"x" * 100, timeout=PATIENCE)
            sent += 1
        producer.flush(timeout=PATIENCE)
        # The producer did not reconnect.
        assert producer.flow_state.seconds_flowed.get(HoldKind.DISCONNECTED) == before
    assert channel.queue_declare(queue, passive=True).method.message_count == sent


@pytest.mark.usefixtures("one_connection")
def test_after_the_broker_is_killed_every_message_has_an_outcome(own_rabbitmq: RabbitMQNode) -> None:
    producer = Producer(own_rabbitmq.url, routing_key="q", mandatory=False)
    producer.send(b"before").result(PATIENCE)
    own_rabbitmq.pause()
    receipts = [producer.send(b"%d" % number) for number in range(100)]
    own_rabbitmq.kill()
    for receipt in receipts:
        assert receipt.wait(PATIENCE)
    with pytest.raises(ProducerClosed):
        producer.send(b"after")
    with pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=5)
    assert len(caught.value.unknown) + len(caught.value.unsent) == 100
    assert {receipt.outcome for receipt in receipts} <= {Outcome.UNKNOWN, Outcome.FAILED}


def check_nothing_is_lost(url: str, queue: str, count: int) -> None:
    """Check that the queue has every number from 0, with the first copies in order and all other copies marked."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    # The numbers in the order of arrival.
    seen: dict[int, None] = {}
    # All messages were confirmed, so the queue has all of them.
    count_there = channel.queue_declare(queue, passive=True).method.message_count
    for _method, properties, body in islice(
        channel.consume(queue, auto_ack=True, inactivity_timeout=PATIENCE), count_there
    ):
        assert body is not None
        assert properties is not None
        number = int(body)
        if number in seen:
            assert properties.headers == {REPUBLISHED: True}, f"an unmarked copy of {number}"
        seen[number] = None
    connection.close()
    assert list(seen) == list(range(count))


@pytest.mark.slow
def test_after_two_kills_and_restarts_of_the_node_the_queue_has_all_messages(own_rabbitmq: RabbitMQNode) -> None:
    sent, begun, enough = 0, threading.Event(), threading.Event()

    def send() -> None:
        nonlocal sent
        while not enough.is_set():
            producer.send(b"%d" % sent, timeout=None)
            sent += 1
            if sent == 1000:
                begun.set()

    connection = pika.BlockingConnection(pika.URLParameters(own_rabbitmq.url))
    connection.channel().queue_declare("q", durable=True)
    connection.close()
    own_rabbitmq.sync()
    with Producer(own_rabbitmq.url, routing_key="q", capacity=500) as producer:
        sending = threading.Thread(target=send)
        sending.start()
        try:
            assert begun.wait(PATIENCE)
            for _ in range(2):
                own_rabbitmq.kill()
                wait_held(producer, HoldKind.DISCONNECTED)
                own_rabbitmq.start()
                wait_free_of(producer, HoldKind.DISCONNECTED)
        finally:
            enough.set()
        sending.join(PATIENCE)
        assert not sending.is_alive()
        producer.flush(timeout=PATIENCE)
    check_nothing_is_lost(own_rabbitmq.url, "q", sent)


def test_a_wrong_password_after_a_lost_connection_ends_the_producer_immediately(own_rabbitmq: RabbitMQNode) -> None:
    own_rabbitmq.evaluate(
        """
        rabbit_auth_backend_internal:add_user(<<"clerk">>, <<"first">>, <<"test">>),
        rabbit_auth_backend_internal:set_permissions(<<"clerk">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>).
        """
    )
    url = own_rabbitmq.url.replace("guest:guest", "clerk:first")
    producer = Producer(url, routing_key="q", mandatory=False)
    producer.send(b"").result(PATIENCE)
    own_rabbitmq.evaluate(
        """
        rabbit_auth_backend_internal:change_password(<<"clerk">>, <<"second">>, <<"test">>),
        [rabbit_networking:close_connection(Each, "moving on") || Each <- rabbit_networking:connections()].
        """
    )
    # Do not wait for the hold `disconnected`, because it may be very short.
    wait_closed(producer)
    with pytest.raises(ProducerClosed, match=r"320 .*connecting is not possible: .*ACCESS_REFUSED"):
        producer.send(b"", timeout=PATIENCE)
    with suppress(UndeliveredMessages):
        producer.close()


def test_while_the_node_is_paused_a_send_keeps_its_deadline(own_rabbitmq: RabbitMQNode) -> None:
    producer = Producer(own_rabbitmq.url, routing_key="q", mandatory=False, capacity=50)
    producer.send(b"before").result(PATIENCE)
    own_rabbitmq.pause()
    for number in range(50):
        producer.send(b"%d" % number, timeout=PATIENCE)
    with takes(0.5), pytest.raises(FlowControlTimeout) as caught:
        producer.send(b"never sent", timeout=0.5)
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CAPACITY]
    with pytest.raises(ConfirmTimeout):
        producer.flush(timeout=0.2)
    own_rabbitmq.resume()
    producer.flush(timeout=PATIENCE)
    producer.close()


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
def test_credentials_are_renewed_on_an_open_connection(
    rabbitmq: RabbitMQNode, channel: BlockingChannel, queue: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.credentials._PART", 0.01)
    answered = []
    updated = Renewer._updated

    def count(renewer: Renewer) -> None:
        answered.append(renewer)
        updated(renewer)

    monkeypatch.setattr(Renewer, "_updated", count)
    options: dict[str, Any] = {"routing_key": queue, "reconnect_timeout": 0}
    options["credentials"] = lambda: Credentials("guest", "guest", expires_in=10.0)
    sent: list[Any] = []

    async def send_many() -> None:
        async with AsyncProducer(rabbitmq.url, **options) as producer:
            while len(answered) < 5 or not sent:
                sent.append(await producer.send(b"%d" % len(sent)))

    if kind is AsyncProducer:
        asyncio.run(send_many())
    else:
        with Producer(rabbitmq.url, **options) as producer:
            while len(answered) < 5 or not sent:
                sent.append(producer.send(b"%d" % len(sent)))
    assert drain(channel, queue, len(sent)) == [b"%d" % number for number in range(len(sent))]
