"""The socket of the asynchronous producer. Tests of both producers are in tests/integration/producer."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import pytest

from qflow_client import (
    AsyncProducer,
    ConnectionFailed,
    FlowControlTimeout,
    Outcome,
    ProducerClosed,
    UndeliveredMessages,
    connect_async,
)
from qflow_client.aio import aiormq_io
from qflow_client.amqp.frames import HEARTBEAT
from qflow_client.broker import Broker
from tests.certificates import server_context
from tests.effort import COMPLETE
from tests.integration.producer.tools import PATIENCE, Proxy, Stopwatch, Wire, bodies

from .tools import soon


@pytest.mark.parametrize("slow", [0.0, 0.002])
async def test_messages_of_aio_pika_and_of_a_producer_are_interleaved_at_frame_boundaries(
    broker: Broker, proxy: Proxy, wire: Wire, slow: float
) -> None:
    """Each message is larger than the socket buffer, so each writer waits for the other within a message."""
    broker.declare_queue("theirs")
    proxy.slow_down(slow)
    async with await connect_async(proxy.url(broker), heartbeat=3) as connection:
        channel = await connection.channel()
        got: list[bytes] = []

        async def consume(message: Any) -> None:
            got.append(message.body)

        await (await channel.get_queue("theirs")).consume(consume, no_ack=True)
        theirs = [bytes([number]) * 700_000 for number in range(8)]
        async with AsyncProducer(connection=connection, routing_key="q", capacity=10_000) as producer:

            async def ours() -> None:
                for number in range(1500):
                    await producer.send(b"%08d" % number + bytes(number % 7 * 1000))
                    if number % 50 == 0:
                        await asyncio.sleep(0)

            async def publish(body: bytes) -> None:
                await channel.default_exchange.publish(aio_pika.Message(body), "theirs", timeout=60)

            await asyncio.gather(ours(), *map(publish, theirs))
            await producer.flush(timeout=60)
        await soon(lambda: len(got) == len(theirs))
        assert sorted(got) == theirs
    assert [int(body[:8]) for body in bodies(broker)] == list(range(1500))
    assert wire.count("out", "Connection.Close") == 0
    assert wire.count("out", "Channel.Close") == 0


async def test_a_shared_connection_to_a_peer_that_does_not_read_can_be_closed(broker: Broker, proxy: Proxy) -> None:
    connection = await connect_async(proxy.url(broker))
    producer = await AsyncProducer(connection=connection, routing_key="q").connect()
    proxy.stop_reading()

    async def fill() -> None:
        while True:
            await producer.send(bytes(100_000), timeout=0.2)

    with pytest.raises(FlowControlTimeout, match="transport"):
        await fill()
    with Stopwatch() as watch:
        await connection.close()
    # aiormq and this package each wait some seconds for the end of the connection.
    assert watch.within(10)
    with pytest.raises(ProducerClosed):
        await producer.send(b"")
    with pytest.raises(UndeliveredMessages) as caught:
        await producer.close()
    assert caught.value.unknown
    assert caught.value.unsent


@pytest.mark.parametrize("announced", [False, None, KeyError("capabilities")])
async def test_messages_that_the_broker_does_not_confirm_settle_as_unknown(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, announced: Any
) -> None:
    def publisher_confirms(_connection: object) -> Any:
        if isinstance(announced, Exception):
            raise announced
        return announced

    monkeypatch.setattr(aiormq.Connection, "publisher_confirms", property(publisher_confirms))
    with pytest.raises(ConnectionFailed, match="set confirms=False to publish without them"):
        await AsyncProducer(broker.url).connect()
    if not isinstance(announced, Exception):
        # aiormq opens no channel at all where the broker announces nothing.
        async with AsyncProducer(broker.url, routing_key="q", confirms=False) as producer:
            assert await (await producer.send(b"")) is Outcome.SENT
    await soon(lambda: not broker.connections())


async def test_the_file_descriptor_of_the_socket_is_closed_with_the_connection(broker: Broker) -> None:
    for end in ("close", "drop"):
        producer = await AsyncProducer(broker.url, routing_key="q").connect()
        assert producer._engine.link is not None
        tapped = producer._engine.link.writer
        assert tapped is not None
        assert tapped._socket.fileno() >= 0
        if end == "drop":
            broker.drop_connections()
            await soon(lambda tapped=tapped: tapped._socket.fileno() == -1)  # type: ignore[misc]  # mypy infers no type
        await producer.close()
        assert tapped._socket.fileno() == -1


@pytest.mark.parametrize(
    ("run", "size"), [("asyncio", 150_000), *([("uvloop", 5000)] if COMPLETE else [])], indirect=["run"]
)
async def test_an_async_producer_sends_heartbeats_even_while_the_socket_always_has_input(
    broker: Broker, proxy: Proxy, wire: Wire, size: int
) -> None:
    """Each write of the producer ends in the middle of a frame, and aiormq may write only at the end of a frame."""
    proxy.slow_down(0.02)
    url = f"{proxy.url(broker)}?heartbeat=3"
    # The kernel takes a megabyte or more at a time.
    plenty = 16_000_000
    async with AsyncProducer(url, routing_key="q", capacity=100_000, max_unwritten_bytes=plenty) as producer:
        protocol = producer._protocol
        sent = 0
        async with asyncio.timeout(3 * PATIENCE):
            while protocol.unwritten < plenty // 2:
                await producer.send(bytes(size))
                sent += 1
            beats = wire.count("in", "Heartbeat")
            while wire.count("in", "Heartbeat") == beats:
                while protocol.unwritten < plenty // 2:
                    await producer.send(bytes(size))
                    sent += 1
                # To count takes its time, and so much is not written in between.
                await asyncio.sleep(0.01)
                assert protocol.unwritten > 0
        proxy.slow_down(0)
        await producer.flush(timeout=3 * PATIENCE)
        assert broker.queue("q").depth == sent


async def test_connecting_raises_an_error_if_a_server_sends_plain_bytes_before_tls(
    make_broker: Callable[..., Broker], certificate: tuple[Path, Path], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker(ssl_context=server_context(*certificate))
    proxy = Proxy(broker.port)
    proxy.greeting = HEARTBEAT

    async def connected_late(*arguments: Any) -> socket.socket:
        sock = await connected(*arguments)
        # The greeting is there before the handshake begins.
        assert select.select([sock], [], [], PATIENCE)[0]
        return sock

    connected = aiormq_io._connected
    monkeypatch.setattr(aiormq_io, "_connected", connected_late)
    for _ in range(10):
        with pytest.raises(ConnectionFailed):
            await connect_async(f"{proxy.url(broker)}?cafile={certificate[0]}", timeout=PATIENCE)
    proxy.close()
    # TLS was never negotiated, or the broker would have answered the protocol header.
    assert wire.frames == []
