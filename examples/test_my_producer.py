"""Test your own producer with the pytest plugin: `pytest examples/test_my_producer.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from qflow_client import DeliveryError, FlowControlTimeout, Producer
from qflow_client.broker import Broker


class OrderSender:
    """The program under test. It sends orders, and keeps orders that it could not send."""

    def __init__(self, url: str, patience: float) -> None:
        self.producer = Producer(
            url, routing_key="orders", max_producer_flow_control_wait=patience, on_refused="fail", on_disconnect="fail"
        )
        self.kept: list[bytes] = []

    def send(self, orders: Iterable[bytes]) -> None:
        for order in orders:
            try:
                self.producer.send(order).result(timeout=10)
            except FlowControlTimeout as error:
                self.kept.append(error.message)
            except DeliveryError as error:
                self.kept.append(error.receipt.message.body)


def in_queue(broker: Broker) -> list[bytes]:
    return [message.body for message in broker.messages("orders")]


@pytest.fixture
def sender(qflow_broker: Broker) -> Iterable[OrderSender]:
    qflow_broker.declare_queue("orders")
    sender = OrderSender(qflow_broker.url, patience=0.2)
    yield sender
    sender.producer.close(timeout=1)


def test_orders_arrive(qflow_broker: Broker, sender: OrderSender) -> None:
    sender.send([b"1", b"2"])
    assert in_queue(qflow_broker) == [b"1", b"2"]


def test_what_a_flowed_producer_could_not_send_is_kept(qflow_broker: Broker, sender: OrderSender) -> None:
    sender.send([b"1"])
    events = sender.producer.flow_events()
    qflow_broker.flow(False)
    assert next(events).flowed
    sender.send([b"2"])
    assert sender.kept == [b"2"]
    assert in_queue(qflow_broker) == [b"1"]


def test_what_the_broker_refuses_is_kept(qflow_broker: Broker, sender: OrderSender) -> None:
    qflow_broker.nack_publishes()
    sender.send([b"1"])
    assert sender.kept == [b"1"]


@pytest.mark.qflow_broker(enforcement="completion")
def test_a_full_queue_confirms_late(qflow_broker: Broker) -> None:
    qflow_broker.declare_queue("small", arguments={"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1})
    with Producer(qflow_broker.url, routing_key="small") as producer:
        assert producer.send(b"1").result(timeout=10) == "confirmed"
        late = producer.send(b"2")
        qflow_broker.wait_until(lambda broker: broker.queue("small").held_confirms == 1)
        assert not late.done
        qflow_broker.purge("small")
        assert late.result(timeout=10) == "confirmed"


if __name__ == "__main__":
    # Ignore the pytest configuration of this repository, because it needs further packages.
    options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "--import-mode=importlib"]
    sys.exit(subprocess.call([sys.executable, "-m", "pytest", *options, __file__]))
