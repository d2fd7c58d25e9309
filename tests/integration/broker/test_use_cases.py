"""The three use cases of QPID-942 (D6), with the producer of this project and pika's consumers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pika
import pytest

from qflow_client import MessageNacked, Producer
from qflow_client.broker import ApplyTo, Broker, Policy, PolicyDefinition
from tests.effort import rounds

COUNT = rounds(1000, least=300)
CAPACITY = 20


class Consumer(threading.Thread):
    """Consumes until it is stopped or has got `most` messages. `handle` acks, rejects or keeps each message."""

    def __init__(self, broker: Broker, queue: str, handle, *, prefetch: int = 10, most: int | None = None) -> None:
        super().__init__(daemon=True)
        self.most = most
        self.queue = queue
        self.handle = handle
        self.prefetch = prefetch
        self.url = broker.url
        self.bodies: list[bytes] = []
        self.stop = threading.Event()

    def run(self) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(self.url))
        channel = connection.channel()
        channel.basic_qos(prefetch_count=self.prefetch)
        for method, _, body in channel.consume(self.queue, inactivity_timeout=0.01):
            if method is not None and body is not None:
                self.bodies.append(body)
                self.handle(channel, method)
            if self.stop.is_set() or len(self.bodies) == self.most:
                break
        connection.close()


def ack(channel, method):
    channel.basic_ack(method.delivery_tag)


def keep(channel, method):
    """Neither ack nor reject the message."""


def put_back(channel, method):
    channel.basic_reject(method.delivery_tag, requeue=True)


@contextmanager
def consuming(broker, queue, handle, **options) -> Iterator[Consumer]:
    consumer = Consumer(broker, queue, handle, **options)
    consumer.start()
    yield consumer
    consumer.stop.set()
    consumer.join(20)
    assert not consumer.is_alive()


def send_all(producer, bodies):
    for body in bodies:
        producer.send(body)


@contextmanager
def sending(broker, bodies, **options) -> Iterator[Producer]:
    """Send messages on a new thread. At the end of the block, wait until all messages are sent."""
    producer = Producer(broker.url, capacity=CAPACITY, max_producer_flow_control_wait=60, **options)
    thread = threading.Thread(target=send_all, args=(producer, bodies), daemon=True)
    thread.start()
    yield producer
    thread.join(60)
    assert not thread.is_alive()
    producer.close(60)


BODIES = [b"%d" % number for number in range(COUNT)]


@pytest.mark.parametrize("is_controlled", [True, False])
def test_D6_the_depth_of_a_queue_is_bounded_while_its_consumer_is_slow_and_after_the_consumer_has_left(is_controlled):
    with Broker() as broker:
        marks: dict[str, object] = {"qpid.flow_stop_count": 50, "qpid.flow_resume_count": 30}
        broker.declare_queue("orders", arguments=marks if is_controlled else {})
        with sending(broker, BODIES, routing_key="orders"):
            first = None
            if is_controlled:
                broker.wait_until(lambda b: b.producers() and b.producers()[0].flowed)
                with consuming(broker, "orders", ack, most=100) as first:
                    broker.wait_until(lambda b: b.queue("orders").acked == 100)
                # The consumer has left.
                broker.wait_until(lambda b: b.producers()[0].flowed)
                assert len(first.bodies) < COUNT
            else:
                broker.wait_until(lambda b: b.queue("orders").depth == COUNT)
            with consuming(broker, "orders", ack) as second:
                broker.wait_until(lambda b: b.queue("orders").acked == COUNT, timeout=60)
        peak = broker.queue("orders").peak_depth
        assert peak == COUNT if not is_controlled else peak <= 50 + CAPACITY
        if first is not None:
            # Messages that the first consumer had not acked are delivered again.
            assert set(first.bodies + second.bodies) == set(BODIES)
            assert second.bodies == sorted(second.bodies, key=int)
        else:
            assert second.bodies == BODIES


@pytest.mark.parametrize("is_controlled", [True, False])
def test_D6_D10_the_queue_of_a_subscriber_that_never_acks_is_bounded_and_delays_others_only_briefly(is_controlled):
    policy = Policy(
        "topics",
        PolicyDefinition.from_mapping(
            {"flow_stop_count": 50, "flow_resume_count": 30, "max_flow_wait": 0.2, "then": "ring"}
        ),
        pattern="^amq.fanout$",
        apply_to=ApplyTo.EXCHANGES,
    )
    with Broker(policies=[policy] if is_controlled else []) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        for name in ("good", "bad"):
            channel.queue_declare(name)
            channel.queue_bind(name, "amq.fanout")
        connection.close()
        assert broker.queue("bad").policies == (("topics",) if is_controlled else ())
        with (
            consuming(broker, "good", ack, prefetch=0) as good,
            consuming(broker, "bad", keep, prefetch=0),
            sending(broker, BODIES, exchange="amq.fanout"),
        ):
            broker.wait_until(lambda b: len(good.bodies) == COUNT, timeout=60)
        assert good.bodies == BODIES
        bad = broker.queue("bad")
        if is_controlled:
            assert bad.peak_depth <= 50 + CAPACITY
            assert (bad.flow_stopped_count >= 1, bad.drops["maxlen"] > 0) == (True, True)
            assert bad.published == COUNT
        else:
            assert (bad.peak_depth, bad.dropped) == (COUNT, 0)


@pytest.mark.parametrize("is_controlled", [True, False])
def test_D6_the_capacity_in_bytes_bounds_a_queue_of_large_messages_that_no_consumer_can_process(is_controlled):
    large = [bytes(100_000) for _ in range(50)]
    arguments: dict[str, object] = {"x-qpid-capacity": 1_000_000, "x-qpid-flow-resume-capacity": 500_000}
    with Broker() as broker:
        broker.declare_queue("images", arguments=arguments if is_controlled else {})
        with sending(broker, large, routing_key="images", capacity_bytes=300_000):
            with consuming(broker, "images", put_back, prefetch=1) as helpless:
                if is_controlled:
                    broker.wait_until(lambda b: b.producers() and b.producers()[0].flowed)
                else:
                    broker.wait_until(lambda b: b.queue("images").bytes == 5_000_000)
                broker.wait_until(lambda b: len(helpless.bodies) > 10)
                assert broker.queue("images").acked == 0
            # The operator purges the messages, because no consumer can process them.
            while broker.queue("images").published < len(large) or broker.queue("images").depth:
                broker.purge("images")
        peak = broker.queue("images").peak_bytes
        assert peak <= 1_300_000 if is_controlled else peak == 5_000_000


def test_D6_messages_that_no_consumer_can_process_expire_and_unflow_the_producer(tmp_path):
    arguments: dict[str, object] = {"x-qpid-capacity": 100_000, "x-message-ttl": 200}
    with Broker() as broker:
        broker.declare_queue("images", arguments=arguments)
        with sending(broker, [bytes(60_000)] * 20, routing_key="images") as producer:
            pass
        assert producer.flow_state.times_flowed >= 1
        broker.wait_until(lambda b: not b.queue("images").depth)
        assert broker.queue("images").drops == {"expired": 20}


@pytest.mark.usefixtures("no_retries")
def test_A4_a_message_that_waits_too_long_for_room_in_a_queue_is_nacked():
    with Broker(max_producer_flow_control_wait=0.1) as broker:
        waits: dict[str, object] = {"x-qflow-policy": "wait", "qpid.max_count": 1}
        broker.declare_queue("orders", arguments=waits)
        broker.declare_queue("patient", arguments=waits | {"x-qflow-max-flow-wait": 30})
        with Producer(broker.url, routing_key="orders") as producer:
            producer.send(b"1").result(20)
            receipt = producer.send(b"2")
            with pytest.raises(MessageNacked):
                receipt.result(20)
            producer.send(b"3", routing_key="patient").result(20)
            receipt = producer.send(b"4", routing_key="patient")
            broker.wait_until(lambda b: b.queue("patient").waiting)
            assert broker.get("patient") is not None
            receipt.result(20)


def test_D4_policies_can_be_set_and_deleted_on_a_running_broker():
    with Broker() as broker:
        broker.declare_queue("orders")
        policy = Policy("small", PolicyDefinition(max_count=5), "^orders$")
        broker.set_policy(policy)
        assert broker.policies == (policy,)
        assert broker.queue("orders").limits == {
            "flow_stop_count": 4,
            "flow_resume_count": 3,
            "max_count": 5,
            "policy": "reject",
            "enforcement": "both",
        }
        assert (broker.queue("orders").policy, broker.queue("orders").policies) == ("reject", ("small",))
        broker.delete_policy("small")
        assert broker.queue("orders").policy == "flow"
        assert not broker.policies
        with pytest.raises(LookupError, match="'small'"):
            broker.delete_policy("small")
        with pytest.raises(TypeError, match="must be a Policy"):
            broker.set_policy(cast(Policy, {"name": "small"}))
