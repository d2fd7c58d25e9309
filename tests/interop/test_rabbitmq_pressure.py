"""RabbitMQ under too many messages: alarms, credit flow, a restart and full queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from uuid import uuid4

import pika
import pytest

from qflow_client import (
    ConfirmTimeout,
    FlowControlTimeout,
    HoldKind,
    Message,
    MessageRejected,
    Outcome,
    Producer,
    ProducerSettings,
)
from qflow_client.message import REPUBLISHED
from qflow_client.testing.rabbitmq import RabbitMQ
from tests.integration.producer.tools import eventually, wait_held
from tests.interop.contract.producers import PRODUCERS
from tests.interop.contract.providers import PATIENCE, Inbox, version_of
from tests.interop.contract.test_contract import WAIT, body, send_until_held
from tests.interop.test_rabbitmq_producer import wait_free_of

# The first test starts the container.
pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(400)]

# The capacities of the producers in the example of C6, and the maximum length of the queue.
MAXIMUM = 100
CAPACITIES = (50, 15)


@pytest.fixture
def inbox(each_rabbitmq: RabbitMQ) -> Iterator[Inbox]:
    made = Inbox(each_rabbitmq.url)
    yield made
    made.close()


@contextmanager
def standing_still(node: RabbitMQ, queue: str) -> Iterator[None]:
    """Suspend a queue during the block. It then accepts nothing, like a queue that is far slower than its producers."""

    def tell(verb: str) -> None:
        found = f'{{ok, Queue}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>))'
        assert node.evaluate(f"{found}, sys:{verb}(amqqueue:get_pid(Queue)).") == "ok"

    tell("suspend")
    try:
        yield
    finally:
        tell("resume")


def holds_of(producer: Any) -> set[HoldKind]:
    """Return the kinds of all holds that a producer has had."""
    return {kind for kind, seconds in producer.flow_state.seconds_flowed.items() if seconds}


def test_A4_during_a_disk_alarm_the_first_send_returns_and_every_call_keeps_its_deadline(
    each_rabbitmq: RabbitMQ, inbox: Inbox
) -> None:
    producers: dict[str, Any] = {}
    queues = {name: inbox.declare() for name in PRODUCERS}
    first: dict[str, Any] = {}
    admitted: dict[str, list[bytes]] = {}
    with ExitStack() as stack:
        for name, make in PRODUCERS.items():
            producer = make(each_rabbitmq.url, routing_key=queues[name], max_producer_flow_control_wait=WAIT)
            producers[name] = stack.enter_context(producer)
            assert producer.send(b"before").result(PATIENCE) is Outcome.CONFIRMED
        each_rabbitmq.raise_disk_alarm()
        try:
            eventually(lambda: "disk" in each_rabbitmq.evaluate("rabbit_alarm:get_alarms()."), timeout=PATIENCE)
            for name, producer in producers.items():
                first[name] = producer.send(b"first")
                assert not first[name].wait(WAIT)
                admitted[name] = send_until_held(producer, HoldKind.CONNECTION_BLOCKED, {})
                # A channel of aio-pika has no method like `flush`.
                if name != "aio-pika drop-in":
                    with pytest.raises(ConfirmTimeout):
                        producer.flush(timeout=WAIT)
        finally:
            each_rabbitmq.clear_disk_alarm()
        for name, producer in producers.items():
            assert producer.wait_unflowed(PATIENCE)
            assert producer.send(b"later", timeout=PATIENCE).result(PATIENCE) is Outcome.CONFIRMED
            assert first[name].result(PATIENCE) is Outcome.CONFIRMED
            bodies = [b"before", b"first", *admitted[name], b"later"]
            assert inbox.bodies(queues[name], len(bodies)) == bodies


@pytest.mark.parametrize(("queue_type", "producer"), [("classic", "Producer"), ("quorum", "AsyncProducer")])
def test_J8_during_credit_flow_of_RabbitMQ_a_capacity_or_transport_hold_begins_and_no_message_is_lost(
    each_rabbitmq: RabbitMQ, inbox: Inbox, queue_type: str, producer: str
) -> None:
    make = PRODUCERS[producer]
    queue, marker = inbox.declare({"x-queue-type": queue_type}, durable=True), b"small"
    with (
        make(each_rabbitmq.url, routing_key=queue, capacity=50) as small,
        make(each_rabbitmq.url, routing_key=queue, capacity=1_000_000) as large,
    ):
        with standing_still(each_rabbitmq, queue):
            for number in range(50):
                small.send(marker + b"%d" % number, timeout=PATIENCE)
            with pytest.raises(FlowControlTimeout) as caught:
                small.send(b"never sent", timeout=WAIT)
            assert [hold.kind for hold in caught.value.holds] == [HoldKind.CAPACITY]
            assert small.unsettled == 50
            # RabbitMQ does not announce credit flow. It reads some hundred messages, and then leaves the socket full.
            admitted = send_until_held(large, HoldKind.TRANSPORT, {}, lambda number: body(number) * 20)
            end = time.monotonic() + PATIENCE
            # The socket of a slow node may be full without credit flow, so send until credit flow is reported.
            while "{state, flow}" not in each_rabbitmq.evaluate("rabbit_networking:connection_info_all([state])."):
                assert time.monotonic() < end, "there is no credit flow"
                admitted += send_until_held(large, HoldKind.TRANSPORT, {}, lambda number: body(number) * 20)
            assert large.unsettled == len(admitted)
        for each in small, large:
            each.flush(timeout=PATIENCE)
        assert holds_of(small) == {HoldKind.CAPACITY}
        assert holds_of(large) == {HoldKind.TRANSPORT}
    arrived = inbox.bodies(queue, 50 + len(admitted))
    assert [each for each in arrived if each.startswith(marker)] == [marker + b"%d" % number for number in range(50)]
    assert [each for each in arrived if not each.startswith(marker)] == admitted


def test_J8_the_window_holds_a_producer_that_sends_faster_than_a_quorum_queue_writes(
    each_rabbitmq: RabbitMQ, inbox: Inbox
) -> None:
    count, capacity = 5_000, 200
    queue = inbox.declare({"x-queue-type": "quorum"}, durable=True)
    with Producer(each_rabbitmq.url, routing_key=queue, capacity=capacity) as producer:
        for number in range(count):
            producer.send(Message(body(number), delivery_mode=2), timeout=PATIENCE)
            assert producer.unsettled <= capacity
        producer.flush(timeout=PATIENCE)
        assert holds_of(producer) <= {HoldKind.CAPACITY, HoldKind.TRANSPORT}
    assert inbox.bodies(queue, count) == [body(number) for number in range(count)]


def test_after_a_stop_and_a_start_of_RabbitMQ_in_a_container_the_queue_has_all_messages(
    session_container: Callable[[str], RabbitMQ],
) -> None:
    node = session_container("4")
    queue = f"qflow-{uuid4().hex}"
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    sent, enough = 0, threading.Event()

    def send(producer: Producer) -> None:
        nonlocal sent
        while not enough.is_set():
            producer.send(b"%d" % sent, timeout=None)
            sent += 1

    with Producer(node.url, routing_key=queue, capacity=500, rate=1000) as producer:
        sending = threading.Thread(target=send, args=(producer,))
        sending.start()
        try:
            node.ctl("stop_app")
            try:
                wait_held(producer, HoldKind.DISCONNECTED)
            finally:
                node.ctl("start_app")
            wait_free_of(producer, HoldKind.DISCONNECTED)
        finally:
            enough.set()
        sending.join(PATIENCE)
        producer.flush(timeout=PATIENCE)
    with closing(Inbox(node.url)) as inbox:
        taken = inbox.take(queue, inbox.depth(queue))
    # Second copies are marked.
    unmarked = [int(content) for properties, content in taken if REPUBLISHED not in (properties.headers or {})]
    assert len(set(unmarked)) == len(unmarked)
    assert list(dict.fromkeys(int(content) for _, content in taken)) == list(range(sent))
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        connection.channel().queue_delete(queue)


def fill(producers: list[Producer], queue: str) -> int:
    """Let all producers send more messages than the queue accepts, and return the number of confirmed messages."""
    began = threading.Barrier(len(producers))
    outcomes: list[Outcome | None] = []

    def send(producer: Producer) -> None:
        began.wait(PATIENCE)
        receipts = [producer.send(b"", routing_key=queue, timeout=PATIENCE) for _ in range(2 * MAXIMUM)]
        for receipt in receipts:
            assert receipt.wait(PATIENCE)
        outcomes.extend(receipt.outcome for receipt in receipts)

    threads = [threading.Thread(target=send, args=(producer,)) for producer in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert len(outcomes) == len(producers) * 2 * MAXIMUM
    assert set(outcomes) == {Outcome.CONFIRMED, Outcome.NACKED}
    return outcomes.count(Outcome.CONFIRMED)


@pytest.mark.parametrize(("queue_type", "beyond"), [("classic", 0), ("quorum", sum(CAPACITIES))])
def test_C6_a_classic_queue_never_exceeds_x_max_length_and_a_quorum_queue_at_most_by_the_capacities(
    each_rabbitmq: RabbitMQ, inbox: Inbox, queue_type: str, beyond: int
) -> None:
    arguments = {"x-queue-type": queue_type, "x-max-length": MAXIMUM, "x-overflow": "reject-publish"}
    with ExitStack() as stack:
        producers = [
            stack.enter_context(Producer(each_rabbitmq.url, capacity=capacity, on_refused="fail"))
            for capacity in CAPACITIES
        ]
        for _ in range(20):
            queue = inbox.declare(arguments, durable=True)
            # No consumer removes messages, so the final depth is the peak depth.
            peak = fill(producers, queue)
            assert MAXIMUM <= peak <= MAXIMUM + beyond
            inbox.wait_depth(queue, peak)


def test_messages_that_a_full_quorum_queue_nacks_are_retried_until_the_queue_has_all_of_them(
    each_rabbitmq: RabbitMQ, inbox: Inbox
) -> None:
    arguments = {"x-queue-type": "quorum", "x-max-length": 10, "x-overflow": "reject-publish"}
    queue = inbox.declare(arguments, durable=True)
    count = 300
    settings = ProducerSettings(routing_key=queue, capacity=50, retry_for=600, retry_delay=0.05, retry_delay_max=0.2)
    with Producer(each_rabbitmq.url, settings=settings) as producer:
        sending = threading.Thread(
            target=lambda: [producer.send(b"%d" % number, timeout=None) for number in range(count)]
        )
        sending.start()
        wait_held(producer, HoldKind.REFUSED)
        # Nacked messages are not in the queue. The producer retries them, and each arrives exactly once.
        assert sorted(map(int, inbox.bodies(queue, count))) == list(range(count))
        sending.join(PATIENCE)
        producer.flush(timeout=PATIENCE)


def test_RabbitMQ_3_10_accepts_a_message_above_16_MiB_and_RabbitMQ_4_0_rejects_only_this_message(
    each_rabbitmq: RabbitMQ, inbox: Inbox
) -> None:
    queue = inbox.declare()
    large = bytes((1 << 24) + 1)
    with Producer(each_rabbitmq.url, routing_key=queue) as producer:
        receipts = [producer.send(each, timeout=PATIENCE) for each in (b"before", large, b"after")]
        if version_of(each_rabbitmq.url).startswith("3."):
            assert receipts[1].result(PATIENCE) is Outcome.CONFIRMED
        else:
            with pytest.raises(MessageRejected, match=r"406.*max size") as caught:
                receipts[1].result(PATIENCE)
            assert caught.value.reply_code == 406
        assert receipts[0].result(PATIENCE) is receipts[2].result(PATIENCE) is Outcome.CONFIRMED
    bodies = inbox.bodies(queue, inbox.depth(queue))
    assert [each for each in dict.fromkeys(bodies) if each != large] == [b"before", b"after"]
