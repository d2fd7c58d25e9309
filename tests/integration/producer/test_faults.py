"""Network faults: each call returns within its deadline, and no message is lost without a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pika
import pika.exceptions
import pytest
from pamqp.commands import Channel

from qflow_client import ConnectionFailed, FlowControlTimeout, Producer, ProducerClosed, QflowError, Receipt
from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy

from .tools import DEADLINE, bodies, holds, in_time, wait_held

# More than the sockets hold between here and the broker.
BODY = bytes(500_000)

Fault = Callable[[FaultProxy], object]


def _end_for_good(proxy: FaultProxy) -> None:
    proxy.refuse()
    proxy.cut()


LASTING: dict[str, Fault] = {
    "accepts and never answers": lambda proxy: proxy.black_hole(),
    "hears and says nothing": lambda proxy: proxy.black_hole("to_client"),
    "says and hears nothing": lambda proxy: proxy.black_hole("to_broker"),
    "reads nothing": lambda proxy: proxy.stall("to_broker"),
    "writes nothing": lambda proxy: proxy.stall("to_client"),
    "a byte a second": lambda proxy: proxy.split(1, pause=1.0),
    "an answer of a byte a second": lambda proxy: proxy.split(1, pause=1.0, direction="to_client"),
    "10 bytes a second": lambda proxy: proxy.limit(10),
    "far away": lambda proxy: proxy.delay(2.0),
}
ENDING: dict[str, Fault] = {
    "closes after every frame": lambda proxy: proxy.cut_after(frames=1),
    "closes after every second frame": lambda proxy: proxy.cut_after(frames=2),
    "closes in mid-frame": lambda proxy: proxy.cut_after(size=5),
    "closes after the client's second frame": lambda proxy: proxy.cut_after(frames=2, direction="to_broker"),
}
ONCE: dict[str, Fault] = {
    "cut": FaultProxy.cut,
    "reset": FaultProxy.reset,
    "cut, and refused from then on": _end_for_good,
    "garbage": lambda proxy: proxy.inject(b"garbage!"),
    "half a frame": lambda proxy: proxy.inject(b"\1\0\1\0\0\0\4"),
}


@pytest.fixture
def faulty(broker: Broker, stack: ExitStack) -> FaultProxy:
    return stack.enter_context(FaultProxy(broker.url))


@pytest.mark.parametrize("fault", [*LASTING, *ENDING])
def test_connecting_through_a_faulty_network_fails_within_connect_timeout(
    faulty: FaultProxy, broker: Broker, skin: Any, fault: str
) -> None:
    (LASTING | ENDING)[fault](faulty)
    error = in_time(lambda: skin(faulty.url, connect_timeout=DEADLINE))
    assert isinstance(error, ConnectionFailed)
    assert str(faulty.port) in str(error)
    faulty.cut()
    broker.wait_until(lambda broker: not broker.connections())


def test_connecting_to_a_host_that_refuses_fails_immediately(faulty: FaultProxy, skin: Any) -> None:
    faulty.refuse()
    error = in_time(lambda: skin(faulty.url, connect_timeout=10), 0.0)
    assert isinstance(error, ConnectionFailed)


def send_all(producer: Producer, receipts: list[Receipt]) -> Iterator[Any]:
    """Send until a call fails, and a little further."""
    failures = 0
    for _ in range(60):
        result = in_time(lambda: producer.send(BODY, timeout=DEADLINE))
        if isinstance(result, QflowError):
            yield result
            failures += 1
            if failures == 2:
                return
        else:
            receipts.append(result)


@pytest.mark.parametrize("fault", [*LASTING, *ENDING, *ONCE])
def test_every_call_returns_within_its_deadline_and_every_message_settles(
    faulty: FaultProxy, broker: Broker, make_producer: Callable[..., Producer], fault: str
) -> None:
    producer = make_producer(faulty.url, capacity=40)
    producer.send(b"before").result(timeout=20)
    receipts: list[Receipt] = [producer.send(BODY) for _ in range(5)]
    (LASTING | ENDING | ONCE)[fault](faulty)
    for error in send_all(producer, receipts):
        assert isinstance(error, (FlowControlTimeout, ProducerClosed))
    in_time(lambda: producer.flush(DEADLINE))
    in_time(lambda: producer.wait_unflowed(DEADLINE))
    in_time(lambda: producer.close(DEADLINE))
    assert all(receipt.done for receipt in receipts)
    # What is confirmed is there: how many, as the bodies are alike.
    confirmed = sum(1 for receipt in receipts if receipt.error() is None)
    assert bodies(broker).count(BODY) >= confirmed


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_network_may_split_frames_at_any_byte(
    faulty: FaultProxy, broker: Broker, make_producer: Callable[..., Producer], size: int
) -> None:
    faulty.split(size)
    faulty.merge(3 * size + 1, wait=0.001, direction="to_client")
    producer = make_producer(faulty.url)
    sent = [b"%d" % number for number in range(50)]
    for body in sent:
        producer.send(body)
    producer.flush(timeout=20)
    assert bodies(broker) == sent


def test_a_channel_flow_injected_by_the_proxy_is_obeyed(
    faulty: FaultProxy, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(faulty.url)
    faulty.inject(Channel.Flow(False), 1)
    wait_held(producer, "channel_flow")
    faulty.inject(Channel.Flow(True), 1)
    assert producer.wait_unflowed(timeout=20)
    assert holds(producer) == []


def test_bytes_that_the_network_stalled_arrive_when_the_stall_ends(
    faulty: FaultProxy, broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer(faulty.url)
    faulty.stall()
    receipts = [producer.send(b"%d" % number) for number in range(100)]
    assert not any(receipt.done for receipt in receipts)
    faulty.heal()
    producer.flush(timeout=20)
    assert bodies(broker) == [b"%d" % number for number in range(100)]


def test_pika_works_through_the_proxy_and_notices_a_cut(faulty: FaultProxy, broker: Broker) -> None:
    faulty.split(1, 100)
    connection = pika.BlockingConnection(pika.URLParameters(faulty.url))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("", "q", b"by pika")
    (seen,) = faulty.connections
    assert [each.name for each in broker.connections()] == [seen.name_at_broker]
    assert bodies(broker) == [b"by pika"]
    faulty.cut()
    with pytest.raises(pika.exceptions.StreamLostError):
        channel.basic_publish("", "q", b"lost")
