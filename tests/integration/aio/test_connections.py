"""Connections of aio-pika made by `connect_async`, with consumers and any number of producers on them."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import aio_pika
import pytest

from qflow_client import (
    AsyncProducer,
    ConnectionFailed,
    FlowControlTimeout,
    MessageRejected,
    Outcome,
    ProducerClosed,
    SettingsError,
    UndeliveredMessages,
    connect_async,
)
from qflow_client.aio.connection import TappedConnection
from qflow_client.aio.opening import open_channel
from qflow_client.amqp.frames import CONNECTION_UNBLOCKED, METHOD_FRAME, frame
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from qflow_client.testing.proxy import FaultProxy
from tests.effort import rounds
from tests.integration.producer.tools import PATIENCE, Proxy, Wire, bodies, ends_within, takes

from .tools import Run, held, in_line, kinds, soon


def channels(broker: Broker) -> list[int]:
    return sorted(channel.number for channel in broker.channels())


@pytest.mark.parametrize("robust", [False, True])
async def test_a_connect_whose_shared_connection_is_closed_meanwhile_says_so_and_raises_no_cancelled_error(
    broker: Broker, robust: bool
) -> None:
    connection = await connect_async(broker.url, robust=robust)
    opening = asyncio.create_task(AsyncProducer(connection=connection, routing_key="q").connect())
    await asyncio.sleep(0)
    await connection.close()
    with pytest.raises(ConnectionFailed, match="the connection is lost: it was closed"):
        await opening


def test_E4_the_end_of_the_event_loop_does_not_wait_for_a_name_server_that_does_not_answer(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    ended: list[bool] = []

    def resolve(*_: object, **_keywords: object) -> Any:
        ended.append(answers.wait(PATIENCE))
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", resolve)

    async def main() -> None:
        with pytest.raises(ConnectionFailed, match=r"no answer within 0\.05 s"):
            await AsyncProducer("amqp://shop.test", routing_key="q", connect_timeout=0.05).connect()

    try:
        run(main())
        assert ended == []
    finally:
        answers.set()


@pytest.mark.parametrize("robust", [False, True])
async def test_a_shared_connection_is_a_complete_aio_pika_connection(broker: Broker, robust: bool) -> None:
    connection = await connect_async(broker.url, robust=robust, client_properties={"connection_name": "shop"})
    assert isinstance(connection, aio_pika.RobustConnection if robust else aio_pika.Connection)
    assert broker.connections()[0].client_properties["connection_name"] == "shop"
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("theirs")
        got: list[bytes] = []

        async def consume(message: Any) -> None:
            async with message.process():
                got.append(message.body)

        await queue.consume(consume)
        async with AsyncProducer(connection=connection, routing_key="theirs") as producer:
            for number in range(500):
                await producer.send(b"ours %d" % number)
                if number % 100 == 0:
                    # With confirms of its own, which the tap leaves alone.
                    await channel.default_exchange.publish(aio_pika.Message(b"theirs"), "theirs")
            await producer.flush()
        await soon(lambda: len(got) == 505)
        assert [body for body in got if body != b"theirs"] == [b"ours %d" % number for number in range(500)]
        await soon(lambda: broker.queue("theirs").acked == 505)
    await soon(lambda: not broker.connections())


async def test_producers_on_one_connection_are_flowed_independently(broker: Broker) -> None:
    broker.declare_queue("r")
    async with await connect_async(broker.url) as connection:
        channel = await connection.channel()
        one = await AsyncProducer(connection=connection, routing_key="q", name="one").connect()
        two = await AsyncProducer(connection=connection, routing_key="r", name="two").connect()
        await asyncio.gather(one.send(b""), two.send(b""))
        await asyncio.gather(one.flush(), two.flush())
        numbers = {producer: producer._protocol.channel.number for producer in (one, two)}
        (name,) = [c.name for c in broker.channels() if c.number == numbers[one]]
        broker.flow(False, name)
        await held(one, "channel_flow")
        waiting = asyncio.create_task(one.send(b"waits", timeout=None))
        await in_line(one, 1)
        for number in range(1000):
            await two.send(b"%d" % number)
        await two.flush()
        # What is aio-pika's goes on, too: calls, consumers, acks.
        await (await channel.declare_queue("new")).delete()
        assert (kinds(one), kinds(two)) == (["channel_flow"], [])
        assert not waiting.done()
        broker.flow(True, name)
        assert await (await waiting) is Outcome.CONFIRMED
        broker.block("alarm")
        await held(one, "connection_blocked")
        await held(two, "connection_blocked")
        broker.unblock()
        await one.wait_unflowed()
        await two.wait_unflowed()
        await one.close()
        await two.close()
    assert broker.queue("q").depth == 2
    assert broker.queue("r").depth == 1001


async def test_closing_a_producer_closes_its_channel_and_nothing_else(broker: Broker, wire: Wire) -> None:
    async with await connect_async(broker.url) as connection:
        channel = await connection.channel()
        producers = [await AsyncProducer(connection=connection, routing_key="q").connect() for _ in range(3)]
        assert channels(broker) == [1, 2, 3, 4]
        receipts = [await producer.send(b"") for producer in producers]
        await producers[1].close()
        assert channels(broker) == [1, 2, 4]
        assert not producers[0].closed
        assert [await (await producers[at].send(b"")) for at in (0, 2)] == [Outcome.CONFIRMED] * 2
        # Its number is free again, sooner or later.
        again = await AsyncProducer(connection=connection, routing_key="q").connect()
        assert len(channels(broker)) == 4
        for producer in (producers[0], producers[2], again):
            await producer.close()
        assert channels(broker) == [1]
        await channel.declare_queue("still there")
        assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert wire.count("in", "Connection.Close") == 1
    assert broker.queue("q").depth == 5


async def test_a_hundred_producers_on_one_connection_can_all_send_their_messages(broker: Broker) -> None:
    count = rounds(50, least=20)
    async with await connect_async(broker.url) as connection:
        producers = [
            await AsyncProducer(connection=connection, routing_key="q", capacity=10).connect() for _ in range(100)
        ]

        async def work(producer: AsyncProducer) -> None:
            for number in range(count):
                await producer.send(bytes(number * 100))
            await producer.close()

        await asyncio.gather(*map(work, producers))
    assert broker.queue("q").depth == 100 * count


@pytest.mark.parametrize("robust", [False, True])
async def test_creating_a_producer_on_a_connection_of_another_library_raises_an_error(
    broker: Broker, robust: bool
) -> None:
    connect = aio_pika.connect_robust if robust else aio_pika.connect
    async with await connect(broker.url) as connection:
        with pytest.raises(SettingsError, match="connect_async") as caught:
            AsyncProducer(connection=connection)
        assert "guest:guest" not in str(caught.value)


async def test_creating_a_producer_with_both_a_url_and_a_connection_raises_an_error(broker: Broker) -> None:
    async with await connect_async(broker.url) as connection:
        with pytest.raises(SettingsError, match="one"):
            AsyncProducer(broker.url, connection=connection)


async def test_creating_a_producer_on_a_closed_connection_raises_an_error(broker: Broker) -> None:
    connection = await connect_async(broker.url)
    await connection.close()
    with pytest.raises(ConnectionFailed, match="not open"):
        await AsyncProducer(connection=connection).connect()


async def test_opening_more_channels_than_the_broker_allows_raises_an_error(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(channel_max=3)
    async with await connect_async(broker.url) as connection:
        producers = [await AsyncProducer(connection=connection, routing_key="q").connect() for _ in range(3)]
        with pytest.raises(ConnectionFailed, match="all 3 channels"):
            await AsyncProducer(connection=connection).connect()
        await producers[0].close()
        producers[0] = await AsyncProducer(connection=connection, routing_key="q").connect()
        for producer in producers:
            assert await (await producer.send(b"")) is Outcome.CONFIRMED
            await producer.close()


async def test_a_channel_closed_by_the_broker_does_not_close_the_other_channels_of_the_connection(
    broker: Broker,
) -> None:
    async with await connect_async(broker.url) as connection:
        one = await AsyncProducer(connection=connection, routing_key="q").connect()
        two = await AsyncProducer(connection=connection, routing_key="q").connect()
        with pytest.raises(MessageRejected, match="404"):
            await (await one.send(b"", exchange="no such exchange"))
        assert await (await one.send(b"", timeout=20)) is Outcome.CONFIRMED
        await one.close()
        assert await (await two.send(b"")) is Outcome.CONFIRMED
        # Nothing of it is kept.
        assert two._engine.link is not None
        assert two._engine.link.writer is not None
        assert len(two._engine.link.writer._afters) == 1
        async with AsyncProducer(connection=connection, routing_key="q") as three:
            assert await (await three.send(b"")) is Outcome.CONFIRMED
        await two.close()


async def test_a_producer_opens_another_channel_if_the_broker_closes_a_channel_that_has_just_been_opened(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_closed(*arguments: Any) -> Any:
        monkeypatch.undo()
        opened = await open_channel(*arguments)
        broker.close_channels(404, "the operator's wish")
        await soon(lambda: opened[0].is_closed)
        return opened

    monkeypatch.setattr("qflow_client.aio.link.open_channel", open_closed)
    async with AsyncProducer(broker.url, routing_key="q") as producer:
        assert await (await producer.send(b"")) is Outcome.CONFIRMED
        await producer.flush()
    assert bodies(broker) == [b""]


async def test_closing_the_shared_connection_ends_its_producers(broker: Broker) -> None:
    connection = await connect_async(broker.url)
    producer = await AsyncProducer(connection=connection, routing_key="q").connect()
    broker.withhold_confirms()
    receipt = await producer.send(b"")
    await soon(lambda: broker.queue("q").depth)
    producer.pause()
    waiting = asyncio.create_task(producer.send(b"", timeout=None))
    await in_line(producer, 1)
    await connection.close()
    with pytest.raises(ProducerClosed, match="the connection is lost"):
        await waiting
    with pytest.raises(UndeliveredMessages):
        await producer.close()
    assert receipt.outcome is Outcome.UNKNOWN


async def test_a_robust_connection_reconnects_together_with_its_producers(broker: Broker) -> None:
    connection = await connect_async(broker.url, robust=True, reconnect_interval=0.1)
    channel = await connection.channel()
    got: list[bytes] = []

    async def consume(message: Any) -> None:
        got.append(message.body)

    await (await channel.get_queue("q")).consume(consume, no_ack=True)
    broker.declare_queue("r")
    producer = await AsyncProducer(connection=connection, routing_key="r").connect()
    broker.withhold_confirms()
    written = await producer.send(b"1")
    await soon(lambda: broker.queue("r").depth == 1)
    broker.drop_connections()
    await soon(lambda: kinds(producer) == ["disconnected"])
    broker.release_confirms()
    after = await producer.send(b"2", timeout=20)
    assert [await written, await after] == [Outcome.CONFIRMED] * 2
    assert [message.body for message in broker.messages("r")] == [b"1", b"1", b"2"]
    await soon(lambda: broker.queue("q").consumers == 1)
    await producer.close()
    async with AsyncProducer(connection=connection, routing_key="q") as another:
        for _ in range(100):
            await another.send(b"again")
        await another.flush()
    await soon(lambda: got == [b"again"] * 100)
    await connection.close()


async def test_a_robust_connection_that_was_lost_while_blocked_restores_a_channel_that_the_broker_had_closed(
    broker: Broker,
) -> None:
    connection = await connect_async(broker.url, robust=True, reconnect_interval=0.01)
    channel: Any = await connection.channel()

    async def consume(_message: Any) -> None:
        """There is no message."""

    await (await channel.get_queue("q")).consume(consume)
    broker.block("memory")
    broker.close_channels()
    # The channel waits for the end of the block, with the lock that its restoration on the next connection needs.
    await soon(channel._RobustChannel__restore_lock.locked)
    broker.drop_connections()
    broker.unblock()
    await soon(lambda: broker.queue("q").consumers == 1)
    await connection.close()


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_end_of_a_blocked_connection_ends_the_wait_of_a_channel_that_is_being_opened(
    broker: Broker, robust: bool, is_lost: bool
) -> None:
    connection = await connect_async(broker.url, robust=robust)
    await connection.channel()
    broker.block("memory")
    assert connection.transport is not None
    unblocked = connection.transport.connection._Connection__connection_unblocked  # type: ignore[attr-defined]  # private
    await soon(lambda: not unblocked.is_set())
    opening = asyncio.ensure_future(connection.channel().initialize())
    await asyncio.sleep(0)
    assert not opening.done()
    if is_lost:
        broker.drop_connections()
    else:
        await connection.close()
    await asyncio.wait((opening,), timeout=PATIENCE)
    assert opening.done()
    assert opening.exception() is not None
    await connection.close()


async def test_a_cancelled_task_of_a_robust_connection_that_reconnects_ends(broker: Broker) -> None:
    with FaultProxy(broker.url) as proxy:
        connection = await connect_async(proxy.url, robust=True, reconnect_interval=0.01)
        accepted = proxy.accepted
        # The broker accepts the next connection, and does not answer.
        proxy.stall()
        proxy.cut()
        await soon(lambda: proxy.accepted > accepted)
        task = connection._RobustConnection__reconnection_task  # type: ignore[attr-defined]  # aio-pika's
        task.cancel()
        await asyncio.wait((task,), timeout=PATIENCE)
        is_cancelled = task.cancelled()
        await connection.close()
    assert is_cancelled


async def test_a_robust_connection_restores_its_producers_even_if_aiormq_reports_no_error(broker: Broker) -> None:
    connection = await connect_async(broker.url, robust=True, reconnect_interval=0.1)
    assert isinstance(connection, TappedConnection)
    async with connection, AsyncProducer(connection=connection, routing_key="q") as producer:
        assert connection.tapped is not None
        events = producer.flow_events()
        # aiormq's reader ends without an error if it finds the end of the data immediately after a frame. This often
        # happens while consumers receive messages.
        protocol = connection.tapped._protocol
        protocol.data_received(frame(METHOD_FRAME, 0, CONNECTION_UNBLOCKED))
        protocol.eof_received()
        connection.tapped.abort()
        event = await anext(events)
        assert event.hold is not None
        assert event.hold.detail == "the connection is lost: the broker closed the socket"
        assert await (await producer.send(b"after", timeout=PATIENCE)) is Outcome.CONFIRMED
    assert bodies(broker) == [b"after"]


async def test_a_shared_connection_keeps_no_reference_to_a_closed_producer(broker: Broker) -> None:
    async with await connect_async(broker.url) as connection:
        producer = await AsyncProducer(connection=connection, routing_key="q").connect()
        await (await producer.send(b""))
        link = weakref.ref(producer._engine.link)
        await producer.close()
        del producer
        # aiormq keeps its newest channel, and with it the first link, until it has read a frame of another channel.
        async with AsyncProducer(connection=connection, routing_key="q") as another:
            await (await another.send(b""))
        await soon(lambda: [gc.collect(), link()][1] is None)


async def test_a_connection_opens_even_if_the_broker_blocks_it_immediately(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker()
    broker.block("alarm")
    async with await connect_async(broker.url, timeout=20) as connection:
        producer = await AsyncProducer(connection=connection, routing_key="q").connect()
        assert kinds(producer) == ["connection_blocked"]
        with pytest.raises(FlowControlTimeout, match="alarm"):
            await producer.send(b"", timeout=0.05)
        broker.unblock()
        assert await (await producer.send(b"")) is Outcome.CONFIRMED
        await producer.close()


@pytest.mark.parametrize("is_settled", [True, False])
async def test_closing_a_shared_connection_keeps_the_deadline_if_the_peer_is_dead(
    broker: Broker, proxy: Proxy, is_settled: bool
) -> None:
    connection = await connect_async(proxy.url(broker))
    producer = await AsyncProducer(connection=connection, routing_key="q").connect()
    await (await producer.send(b""))
    proxy.freeze()
    if not is_settled:
        await producer.send(b"")
    with ends_within(1.2), nullcontext() if is_settled else pytest.raises(UndeliveredMessages):
        await producer.close(timeout=0.2)
    proxy.cut()
    await connection.close()


@pytest.mark.parametrize("reads_again", [True, False])
async def test_closing_a_producer_in_the_middle_of_a_message_does_not_end_the_shared_connection(
    broker: Broker, proxy: Proxy, reads_again: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other frame may come between the frames of a message, and above all no close of its channel."""
    if reads_again:
        # A grace in which a slow machine, too, reads what it has to.
        monkeypatch.setattr("qflow_client.aio.engine.BRIEF", PATIENCE)
        monkeypatch.setattr("qflow_client.aio.engine.good_bye_until", lambda _deadline: PATIENCE)
    async with await connect_async(proxy.url(broker)) as connection:
        other = await AsyncProducer(connection=connection, routing_key="q").connect()
        producer = await AsyncProducer(connection=connection, routing_key="q").connect()
        proxy.stop_reading()
        # More than the sockets hold.
        large = [await producer.send(bytes(6_000_000), timeout=None)]
        with pytest.raises(FlowControlTimeout):
            await producer.send(b"no", timeout=0.1)
        assert not producer._protocol.parts.unconfirmed.outbound.mid_frame or producer.in_flight == 1
        closing = asyncio.create_task(producer.close(timeout=0.1))
        await soon(lambda: producer._engine.link is not None and producer._engine.link._ended is not None)
        if reads_again:
            proxy.go_on_reading()
        with pytest.raises(UndeliveredMessages) as caught:
            await closing
        assert caught.value.receipts == tuple(large)
        assert large[0].outcome is Outcome.UNKNOWN
        if not reads_again:
            assert flush_logs(20)
            assert "is left open" in caplog.text
            proxy.go_on_reading()
        assert await (await other.send(b"other")) is Outcome.CONFIRMED
        assert (len(channels(broker)) == 1) is reads_again
        await other.close()
    assert bodies(broker)[-1] == b"other"
    assert broker.queue("q").depth == (2 if reads_again else 1)


@pytest.mark.parametrize("url", ["http://localhost", "no url", "amqp://localhost:port/", 5])
async def test_creating_a_connection_with_an_argument_that_is_not_a_url_raises_an_error(url: Any) -> None:
    with pytest.raises(SettingsError, match="url="):
        await connect_async(url)


@pytest.mark.parametrize("robust", [False, True])
async def test_creating_a_connection_to_an_unreachable_broker_raises_an_error(
    make_broker: Callable[..., Broker], robust: bool
) -> None:
    broker = make_broker(users={"ann": "right"})
    with pytest.raises(ConnectionFailed, match=r"Connect call failed|Connection refused") as caught:
        await connect_async("amqp://guest:secret@127.0.0.1:1/%2F", robust=robust)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConnectionFailed, match="ACCESS_REFUSED"):
        await connect_async(f"amqp://ann:wrong@127.0.0.1:{broker.port}/%2F", robust=robust)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/%2F"
        with takes(0.3), pytest.raises(ConnectionFailed, match=r"no answer within 0\.3 s"):
            await connect_async(url, timeout=0.3, robust=robust)
    await soon(lambda: not broker.connections())


async def test_connection_parameters_are_passed_to_aio_pika(broker: Broker, wire: Wire) -> None:
    context = ssl.create_default_context()
    async with await connect_async(broker.url, heartbeat=3, ssl_context=context) as connection:
        assert connection.transport is not None
        assert connection.transport.connection.heartbeat_timeout == 3  # type: ignore[attr-defined]  # aiormq's
        await soon(lambda: wire.count("in", "Heartbeat"))
