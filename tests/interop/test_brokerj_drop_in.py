"""The same program with pika and with the drop-in, against a real Apache Qpid Broker-J."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pika as original
import pytest

import qflow_client.pika as drop_in
from qflow_client import FlowControlTimeout, HoldKind
from qflow_client.testing.brokerj import BrokerJ
from tests.integration.producer.tools import PATIENCE

pytestmark = pytest.mark.brokerj


@pytest.fixture
def queue(brokerj: BrokerJ) -> Iterator[str]:
    """A queue that stops its producers beyond ten thousand bytes."""
    name = f"qflow-{uuid4().hex}"
    with original.BlockingConnection(original.URLParameters(brokerj.url)) as connection:
        channel = connection.channel()
        channel.queue_declare(name, arguments={"x-qpid-capacity": 10_000, "x-qpid-flow-resume-capacity": 5_000})
        yield name
        channel.queue_delete(name)


def program(module: Any, url: str, queue: str) -> None:
    """Publishes for longer than the broker bears with who does not listen: here, one second."""
    with module.BlockingConnection(module.URLParameters(url)) as connection:
        channel = connection.channel()
        for _ in range(300):
            channel.basic_publish("", queue, bytes(1_000))
            connection.sleep(0.01)


def test_J7_the_broker_closes_pikas_channel_and_not_the_drop_ins(
    brokerj: BrokerJ, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Which of the two depends on where pika reads of it.
    with pytest.raises((original.exceptions.ChannelClosedByBroker, original.exceptions.ChannelWrongStateError)):
        program(original, brokerj.url, queue)
    assert "Channel.Close (311)" in caplog.text
    caplog.clear()
    with original.BlockingConnection(original.URLParameters(brokerj.url)) as connection:
        connection.channel().queue_purge(queue)

    separator = "&" if "?" in brokerj.url else "?"
    with pytest.raises(FlowControlTimeout) as flowed:
        program(drop_in, f"{brokerj.url}{separator}max_producer_flow_control_wait=3", queue)
    assert [hold.kind for hold in flowed.value.holds] == [HoldKind.CHANNEL_FLOW]
    assert "Channel.Close" not in caplog.text


def test_J7_the_drop_in_goes_on_when_the_queue_has_been_emptied(brokerj: BrokerJ, queue: str) -> None:
    with drop_in.BlockingConnection(drop_in.URLParameters(brokerj.url)) as connection:
        channel = connection.channel()
        while not channel.flow_state.flowed:
            channel.basic_publish("", queue, bytes(1_000))
            connection.sleep(0.01)
        with original.BlockingConnection(original.URLParameters(brokerj.url)) as other:
            other.channel().queue_purge(queue)
        assert channel.wait_unflowed(PATIENCE)
        channel.basic_publish("", queue, b"")
