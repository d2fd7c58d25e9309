"""The same programs with pika, aio-pika and the drop-ins, against a real Apache Qpid Broker-J."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import aio_pika
import aio_pika.exceptions
import pika as original
import pytest

import qflow_client.aio_pika
import qflow_client.pika as drop_in
from qflow_client import FlowControlTimeout, HoldKind
from qflow_client.amqp.frames import CHANNEL_CLOSE, CHANNEL_FLOW, CHANNEL_FLOW_OK
from qflow_client.testing.brokerj import BrokerJ
from tests.integration.producer.tools import PATIENCE
from tests.interop.relay import Relay

pytestmark = pytest.mark.brokerj


@pytest.fixture
def queue(brokerj: BrokerJ) -> Iterator[str]:
    """A queue that stops its producers above ten thousand bytes."""
    name = f"qflow-{uuid4().hex}"
    with original.BlockingConnection(original.URLParameters(brokerj.url)) as connection:
        channel = connection.channel()
        channel.queue_declare(name, arguments={"x-qpid-capacity": 10_000, "x-qpid-flow-resume-capacity": 5_000})
        yield name
        channel.queue_delete(name)


def program(module: Any, url: str, queue: str) -> None:
    """Publish until an error. The broker closes a channel that publishes for more than one second after a stop."""
    with module.BlockingConnection(module.URLParameters(url)) as connection:
        channel = connection.channel()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            channel.basic_publish("", queue, bytes(1_000))
            connection.sleep(0.01)


def test_J7_after_a_stop_Broker_J_closes_the_channel_of_pika_and_not_the_channel_of_the_drop_in(
    brokerj: BrokerJ, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The error depends on the call in which pika reads the close.
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


def test_J7_aio_pika_fails_without_server_capabilities_and_loses_its_channel_if_a_relay_adds_them(
    brokerj: BrokerJ, queue: str
) -> None:
    async def publish(url: str) -> None:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel(publisher_confirms=False)
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                await channel.default_exchange.publish(aio_pika.Message(bytes(1_000)), queue)
                await asyncio.sleep(0.01)

    with pytest.raises(KeyError, match="capabilities"):
        asyncio.run(publish(brokerj.url))
    with Relay(brokerj.url, brokerj.port, mends=True) as relay:
        with pytest.raises((aio_pika.exceptions.ChannelClosed, aio_pika.exceptions.ChannelInvalidStateError)):
            asyncio.run(publish(relay.url))
        (close,) = relay.methods("in", CHANNEL_CLOSE)
        assert int.from_bytes(close[4:6], "big") == 311
        # aio-pika got one stop, did not answer, and continued to publish.
        assert [each[4] for each in relay.methods("in", CHANNEL_FLOW)] == [0]
        assert not relay.methods("out", CHANNEL_FLOW_OK)


def test_J7_the_drop_in_for_aio_pika_keeps_its_channel_and_continues_when_the_queue_is_empty(
    brokerj: BrokerJ, queue: str
) -> None:
    async def program() -> int:
        async with await qflow_client.aio_pika.connect(brokerj.url) as connection:
            channel = await connection.channel(publisher_confirms=False)
            message = qflow_client.aio_pika.Message(bytes(1_000))
            count = 0
            # The timeout of 3 s is longer than the second after which the broker closes a channel that still publishes.
            while not channel.flow_state.flowed:
                await channel.default_exchange.publish(message, queue, timeout=PATIENCE)
                count += 1
            with pytest.raises(FlowControlTimeout):
                await channel.default_exchange.publish(message, queue, timeout=3)
            with original.BlockingConnection(original.URLParameters(brokerj.url)) as other:
                other.channel().queue_purge(queue)
            assert await channel.wait_unflowed(PATIENCE)
            await channel.default_exchange.publish(message, queue, timeout=PATIENCE)
            return count

    assert asyncio.run(program()) * 1_000 > 5_000
