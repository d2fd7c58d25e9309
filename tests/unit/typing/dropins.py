"""Typed programs that mypy accepts with pika and aio-pika. mypy and pyright must accept them with the drop-ins, too."""

from __future__ import annotations

from typing import assert_type

import aio_pika.abc
import aio_pika.patterns
import pika.adapters.blocking_connection
import pika.channel
import pika.exceptions
from pika.spec import Basic, BasicProperties

import qflow_client.aio_pika
import qflow_client.pika
from qflow_client.aio_pika.abc import AbstractIncomingMessage
from qflow_client.aio_pika.patterns.rpc import RPC
from qflow_client.pika.exceptions import AMQPError


def on_message(
    channel: qflow_client.pika.BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes
) -> None:
    channel.basic_publish("", "answers", body)


def on_return(
    channel: pika.adapters.blocking_connection.BlockingChannel,
    method: Basic.Return,
    properties: BasicProperties,
    body: bytes,
) -> None: ...


def blocking(url: str) -> None:
    with qflow_client.pika.BlockingConnection(qflow_client.pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.add_on_return_callback(on_return)
        channel.basic_consume("orders", on_message)
        channel.start_consuming()


class Consumer:
    """A consumer with callbacks, which annotates them with the classes of the drop-in or of pika."""

    def __init__(self) -> None:
        self.connection = qflow_client.pika.SelectConnection(on_open_callback=self.on_connection)

    def on_connection(self, connection: qflow_client.pika.SelectConnection) -> None:
        connection.channel(on_open_callback=self.on_channel)

    def on_channel(self, channel: qflow_client.pika.Channel) -> None:
        channel.add_on_close_callback(self.on_close)
        channel.add_on_return_callback(self.on_message)
        channel.basic_consume("orders", self.on_message)
        channel.basic_get("orders", self.on_message)

    def on_close(self, channel: qflow_client.pika.Channel, reason: Exception) -> None: ...

    def on_message(
        self,
        channel: pika.channel.Channel,
        method: Basic.Deliver | Basic.GetOk | Basic.Return,
        properties: BasicProperties,
        body: bytes,
    ) -> None: ...


def same_classes(message: AbstractIncomingMessage, rpc: RPC, error: AMQPError) -> None:
    assert_type(message, aio_pika.abc.AbstractIncomingMessage)
    assert_type(rpc, aio_pika.patterns.RPC)
    assert_type(error, pika.exceptions.AMQPError)


class OwnConnection(qflow_client.aio_pika.RobustConnection): ...


async def connect(url: str) -> aio_pika.abc.AbstractRobustConnection:
    return await qflow_client.aio_pika.connect_robust(url, timeout=5, capacity=500)


async def publish(url: str) -> None:
    own = await qflow_client.aio_pika.connect_robust(url, connection_class=OwnConnection)
    assert_type(own, OwnConnection)
    assert_type(await qflow_client.aio_pika.connect(url), qflow_client.aio_pika.Connection)
    async with await qflow_client.aio_pika.connect_robust(url) as connection, connection.channel() as channel:
        assert_type(channel, qflow_client.aio_pika.RobustChannel)
        channel.on_flow(print)
        queue = await channel.declare_queue("orders")
        assert_type(queue, aio_pika.abc.AbstractRobustQueue)
        # aio-pika's exchange has no method `publsh`.
        await channel.default_exchange.publsh()  # type: ignore[attr-defined]
