from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime

import pika
import pytest

from qflow_client import Message, Outcome, Producer, UndeliveredMessages, __version__
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import bodies, message_ids, start

_FRAME_MAX = 131072


@pytest.mark.parametrize(("given", "arrives"), [(b"\0bytes\xff", b"\0bytes\xff"), ("größer", "größer".encode())])
def test_a_body_arrives_as_a_persistent_message_and_is_confirmed(
    producer: Producer, broker: Broker, given: bytes | str, arrives: bytes
) -> None:
    receipt = producer.send(given)
    assert receipt.result(timeout=20) is Outcome.CONFIRMED
    (message,) = broker.messages("q")
    assert message.body == arrives
    assert message.properties.delivery_mode == 2
    assert message.properties.message_id == receipt.message_id
    assert (message.exchange, message.routing_key) == ("", "q")


def test_all_properties_of_a_message_arrive(producer: Producer, broker: Broker) -> None:
    when = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)
    properties = {
        "content_type": "application/json",
        "content_encoding": "gzip",
        "headers": {"text": "ü", "number": -5, "flag": True, "inner": {"list": [1, "two"]}},
        "delivery_mode": 1,
        "priority": 9,
        "correlation_id": "c" * 255,
        "reply_to": "answers",
        "expiration": "3600000",
        "message_id": "my own",
        "timestamp": when,
        "type": "order",
        "user_id": "guest",
        "app_id": "shop",
        "cluster_id": "",
    }
    receipt = producer.send(Message(b"body", **properties))  # type: ignore[arg-type]  # each has a type of its own
    assert receipt.result(timeout=20) is Outcome.CONFIRMED
    assert receipt.message_id == "my own"
    (message,) = broker.messages("q")
    found = dict(message.properties)
    # pamqp's own name for it.
    found["type"] = found.pop("message_type")
    assert found == properties


@pytest.mark.parametrize(
    "size", [0, 1, _FRAME_MAX - 9, _FRAME_MAX - 8, _FRAME_MAX - 7, 2 * (_FRAME_MAX - 8), 1_000_000]
)
def test_bodies_of_any_number_of_frames_arrive(producer: Producer, broker: Broker, size: int) -> None:
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    assert producer.send(body).result(timeout=20) is Outcome.CONFIRMED
    assert producer.send(Message(body, headers={"k": 1})).result(timeout=20) is Outcome.CONFIRMED
    assert bodies(broker) == [body, body]


def test_frames_of_a_producer_respect_a_small_frame_max(
    make_broker: Callable[..., Broker], make_producer: Callable[..., Producer]
) -> None:
    broker = make_broker(frame_max=4096)
    producer = make_producer(broker.url)
    sent = [b"a" * 20_000, b"", b"b" * 4088, b"c" * 4089, b"d"]
    for body in sent:
        producer.send(body)
    producer.flush(timeout=20)
    assert bodies(broker) == sent


def test_messages_of_one_thread_arrive_in_order_with_unique_ids(producer: Producer, broker: Broker) -> None:
    count = rounds(2000, least=500)
    receipts = [producer.send(b"%d" % number) for number in range(count)]
    producer.flush(timeout=20)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert bodies(broker) == [b"%d" % number for number in range(count)]
    ids = [receipt.message_id for receipt in receipts]
    assert message_ids(broker) == ids
    assert len(set(ids)) == count
    assert len({len(str(each)) for each in ids}) == 1


def test_generated_message_ids_of_two_producers_differ(make_producer: Callable[..., Producer], broker: Broker) -> None:
    for producer in (make_producer(), make_producer()):
        for _ in range(100):
            producer.send(b"")
        producer.flush(timeout=20)
    assert len(set(message_ids(broker))) == 200


def test_a_send_can_set_its_own_destination(producer: Producer, broker: Broker) -> None:
    broker.declare_queue("other")
    assert producer.send(b"1", routing_key="other").result(timeout=20) is Outcome.CONFIRMED
    lost = producer.send(b"2", exchange="amq.fanout")
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.exchange_declare("topics", "topic")
        channel.queue_bind("other", "topics", "a.#")
    receipt = producer.send(b"3", exchange="topics", routing_key="a.b")
    assert receipt.result(timeout=20) is Outcome.CONFIRMED
    assert (receipt.exchange, receipt.routing_key) == ("topics", "a.b")
    producer.send(b"4")
    # Nothing is bound to it, and messages are mandatory.
    with pytest.raises(UndeliveredMessages, match="312") as caught:
        producer.flush(timeout=20)
    assert caught.value.receipts == (lost,)
    assert bodies(broker, "other") == [b"1", b"3"]
    assert bodies(broker) == [b"4"]


def test_F4_messages_of_eight_threads_arrive_once_and_in_order_for_each_thread(
    producer: Producer, broker: Broker
) -> None:
    count = rounds(1000, least=200)
    together = threading.Barrier(8)

    def work(thread: int) -> None:
        together.wait()
        for number in range(count):
            producer.send(b"%d %d" % (thread, number))

    for job in [start(work, thread) for thread in range(8)]:
        job.result()
    producer.flush(timeout=20)
    by_thread = defaultdict(list)
    for body in bodies(broker):
        thread, number = map(int, body.split())
        by_thread[thread].append(number)
    assert by_thread == {thread: list(range(count)) for thread in range(8)}
    assert len(set(message_ids(broker))) == 8 * count
    assert producer.unsettled == 0


def test_without_confirms_a_message_settles_as_sent(make_producer: Callable[..., Producer], broker: Broker) -> None:
    producer = make_producer(confirms=False)
    count = rounds(3000)
    receipts = [producer.send(b"%d" % number) for number in range(count)]
    assert receipts[-1].result(timeout=20) is Outcome.SENT
    producer.flush(timeout=20)
    assert producer.unsettled == 0
    broker.wait_until(lambda b: b.queue("q").depth == count)
    assert bodies(broker) == [b"%d" % number for number in range(count)]


def test_without_message_ids_messages_have_no_id(make_producer: Callable[..., Producer], broker: Broker) -> None:
    producer = make_producer(message_ids=False, mandatory=False)
    assert producer.send(b"1").result(timeout=20) is Outcome.CONFIRMED
    assert producer.send(Message(b"2", message_id="mine")).result(timeout=20) is Outcome.CONFIRMED
    assert message_ids(broker) == ["None", "mine"]


@pytest.mark.parametrize("message", [None, 5, {"a": 1}, ["a"]])
def test_sending_an_invalid_body_raises_an_error_and_the_producer_continues(
    producer: Producer, message: object
) -> None:
    with pytest.raises(TypeError, match="bytes or str"):
        producer.send(message)  # type: ignore[arg-type]  # that is the point
    assert producer.unsettled == 0
    assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED


def test_sending_a_message_that_cannot_be_encoded_raises_an_error_and_the_producer_continues(
    make_producer: Callable[..., Producer],
) -> None:
    producer = make_producer(capacity=1)
    for _ in range(3):
        with pytest.raises((TypeError, ValueError)):
            producer.send(Message(b"", headers={"k": object()}))
        with pytest.raises(ValueError):
            producer.send(b"", routing_key="k" * 256)
    assert producer.available == 1
    assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED


def test_the_repr_of_a_producer_shows_its_name(
    make_producer: Callable[..., Producer], broker: Broker, stack: ExitStack
) -> None:
    producer = make_producer(name="orders")
    assert producer.name == "orders"
    told = broker.connections()[0].client_properties
    assert (told["connection_name"], told["product"], told["version"]) == ("orders", "qflow_client", __version__)
    assert "pika" not in told["information"]
    assert "orders" in repr(producer)
    assert "guest:guest" not in repr(producer.settings)
