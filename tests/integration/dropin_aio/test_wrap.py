"""Connections and channels that aio-pika created and `wrap` puts under flow control."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika as original
import pytest
from aiormq import spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

import qflow_client.aio_pika as aio_pika
from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.broker import Broker
from tests.integration.aio.tools import soon
from tests.integration.producer.tools import PATIENCE, Proxy, Wire, bodies, takes

from .test_flow import WAIT, held, in_line, kinds, opened, publish, stop

with_both = pytest.mark.parametrize("connect", ["connect", "connect_robust"])


@with_both
async def test_wrap_returns_the_same_channel_object_with_flow_control(
    broker: Broker, wire: Wire, connect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT", str(WAIT))
    async with opened(getattr(original, connect)(broker.url)) as plain:
        first = await publish(plain, b"before")
        channel = aio_pika.wrap(plain)
        assert channel is plain
        assert isinstance(channel, aio_pika.RobustChannel if "robust" in connect else aio_pika.Channel)
        assert aio_pika.wrap(channel) is channel
        await stop(channel, broker)
        await soon(lambda: wire.count("in", "Channel.FlowOk"))
        with takes(WAIT), pytest.raises(FlowControlTimeout, match="channel_flow"):
            await publish(channel, b"never")
        broker.flow(True)
        assert await channel.wait_unflowed(PATIENCE)
        # The broker's delivery tags count all messages of the channel, also those before `wrap`.
        assert first.delivery_tag == 1
        assert (await publish(channel, b"sent", timeout=PATIENCE)).delivery_tag == 2
        assert bodies(broker) == [b"before", b"sent"]
        # All other methods of the channel are unchanged.
        queue = await channel.declare_queue("q", passive=True)
        assert (await queue.get(no_ack=True)).body == b"before"
        await channel.close()


@with_both
async def test_the_channels_of_a_wrapped_connection_are_under_flow_control(broker: Broker, connect: str) -> None:
    plain = await getattr(original, connect)(broker.url)
    connection = aio_pika.wrap(plain)
    assert connection is plain
    assert aio_pika.wrap(connection) is connection
    async with connection, await connection.channel() as one, connection.channel() as two:
        await stop(one, broker)
        waiting = asyncio.ensure_future(publish(one, b"waits"))
        await in_line(one, 1)
        await asyncio.gather(*(publish(two, b"goes on") for _ in range(20)))
        broker.flow(True)
        await waiting
        assert bodies(broker) == [b"goes on"] * 20 + [b"waits"]


async def test_wrap_applies_a_stop_that_the_channel_had_received_before(broker: Broker, wire: Wire) -> None:
    async with await original.connect(broker.url) as connection:
        channel: Any = await connection.channel()
        await publish(channel, b"0")
        broker.flow(False)
        await soon(lambda: channel._channel.channel.rpc_frames.qsize())
        aio_pika.wrap(channel)
        assert kinds(channel) == [HoldKind.CHANNEL_FLOW]
        await soon(lambda: wire.count("in", "Channel.FlowOk"))
        broker.flow(True)
        await held(channel)
        await publish(channel, b"1")


@with_both
async def test_connection_blocked_before_or_after_wrap_holds_the_wrapped_channel(broker: Broker, connect: str) -> None:
    async with await getattr(original, connect)(broker.url) as connection:
        channel, other = aio_pika.wrap(await connection.channel()), await connection.channel()
        broker.block("no memory")
        await held(channel, HoldKind.CONNECTION_BLOCKED)
        with pytest.raises(FlowControlTimeout, match="no memory"):
            await publish(channel, b"never", timeout=WAIT)
        assert kinds(aio_pika.wrap(other)) == [HoldKind.CONNECTION_BLOCKED]
        broker.unblock()
        for each in channel, other:
            await held(each)
            await publish(each, b"sent")
        assert bodies(broker) == [b"sent", b"sent"]


async def test_acks_nacks_and_returns_reach_the_publish_call_of_their_message(broker: Broker) -> None:
    async with await original.connect(broker.url) as connection:
        channel = aio_pika.wrap(await connection.channel())
        raises = aio_pika.wrap(await connection.channel(on_return_raises=True))
        unconfirmed = aio_pika.wrap(await connection.channel(publisher_confirms=False))
        told: list[bytes] = []
        channel.return_callbacks.add(lambda _channel, message: told.append(message.body))
        message = aio_pika.Message(bytes(300_000), headers={"number": 7})
        returned: Any = await channel.default_exchange.publish(message, "nowhere")
        assert (returned.delivery.reply_code, returned.body) == (312, message.body)
        assert returned.header.properties.headers == {"number": 7}
        await soon(lambda: told == [message.body])
        with pytest.raises(aio_pika.exceptions.PublishError):
            await raises.default_exchange.publish(aio_pika.Message(b""), "nowhere")
        broker.nack_publishes()
        with pytest.raises(aio_pika.exceptions.DeliveryError):
            await publish(channel, b"")
        broker.nack_publishes(False)
        await asyncio.gather(*(publish(channel, b"%d" % number) for number in range(200)))
        assert bodies(broker) == [b"%d" % number for number in range(200)]
        await publish(unconfirmed, b"unconfirmed")
        await soon(lambda: broker.queue("q").depth == 201)


async def test_the_frames_of_a_large_returned_message_are_collected_without_copies(broker: Broker) -> None:
    async with opened(original.connect(broker.url)) as plain:
        channel: Any = aio_pika.wrap(plain)
        carrier = channel.flow_control._tapped
        assert carrier._take_frame(spec.Basic.Return(312, "NO_ROUTE", "", "nowhere"))
        assert carrier._take_frame(ContentHeader(body_size=3))
        collected = carrier._body
        for part in (b"1", b"2"):
            assert carrier._take_frame(ContentBody(part))
            assert carrier._body is collected
        assert collected == b"12"


async def test_a_wrapped_robust_channel_stays_under_flow_control_after_a_reconnection(
    broker: Broker, proxy: Proxy
) -> None:
    async with await original.connect_robust(f"{proxy.url(broker)}?reconnect_interval=0.05") as connection:
        channel = aio_pika.wrap(await connection.channel())
        for number in range(3):
            await stop(channel, broker)
            waiting = asyncio.ensure_future(publish(channel, b"%d" % number))
            await in_line(channel, 1)
            proxy.cut()
            await waiting
            assert kinds(channel) == []
        assert bodies(broker) == [b"0", b"1", b"2"]
        await stop(channel, broker)
        with pytest.raises(FlowControlTimeout, match="channel_flow"):
            await publish(channel, b"never", timeout=WAIT)


@with_both
@pytest.mark.parametrize("what", ["channel", "connection"])
async def test_a_waiting_publish_raises_when_the_program_closes_the_channel_or_the_connection(
    broker: Broker, connect: str, what: str
) -> None:
    connection = await getattr(original, connect)(broker.url)
    channel = aio_pika.wrap(await connection.channel())
    await stop(channel, broker)
    waiting = asyncio.ensure_future(publish(channel, b"never"))
    await in_line(channel, 1)
    await (channel if what == "channel" else connection).close()
    with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
        await waiting
    await connection.close()
    assert bodies(broker) == []


async def test_a_publish_that_waits_for_a_reconnect_raises_when_the_program_closes_the_connection(
    broker: Broker, proxy: Proxy
) -> None:
    connection = await original.connect_robust(f"{proxy.url(broker)}?reconnect_interval=60")
    channel = aio_pika.wrap(await connection.channel())
    await stop(channel, broker)
    waiting = asyncio.ensure_future(publish(channel, b"never"))
    await in_line(channel, 1)
    proxy.cut()
    await held(channel, HoldKind.DISCONNECTED)
    await connection.close()
    with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
        await waiting


async def test_no_message_is_written_after_channel_close(broker: Broker, wire: Wire) -> None:
    async with await original.connect(broker.url) as connection:
        channel, other = aio_pika.wrap(await connection.channel()), await connection.channel()
        publishing = [asyncio.ensure_future(publish(channel, bytes(50_000))) for _ in range(100)]
        await soon(lambda: wire.count("in", "Basic.Publish"))
        await channel.close()
        await asyncio.gather(*publishing, return_exceptions=True)
        await publish(other, b"the connection is well")


async def test_while_the_socket_accepts_no_bytes_a_publish_on_a_wrapped_channel_times_out(
    broker: Broker, proxy: Proxy
) -> None:
    connection = await original.connect(proxy.url(broker))
    channel = aio_pika.wrap(await connection.channel())
    proxy.stop_reading()
    with pytest.raises(ConfirmTimeout):
        await publish(channel, b"in a buffer", timeout=WAIT)
    publishing = [publish(channel, bytes(100_000), timeout=WAIT) for _ in range(200)]
    results = await asyncio.gather(*publishing, return_exceptions=True)
    assert {type(each) for each in results} == {ConfirmTimeout, FlowControlTimeout}
    with takes(WAIT), pytest.raises(FlowControlTimeout):
        await publish(channel, b"never", timeout=WAIT)
    proxy.go_on_reading()
    assert await channel.wait_unflowed(PATIENCE)
    await publish(channel, b"sent")
    await connection.close()
    assert bodies(broker)[-1] == b"sent"
    assert len(bodies(broker)) == 2 + sum(type(each) is ConfirmTimeout for each in results)


async def test_wrap_rejects_objects_that_cannot_be_wrapped_safely(broker: Broker) -> None:
    class Other(original.Channel):
        pass

    class Others(original.Connection):
        CHANNEL_CLASS = Other

    async with await original.connect(broker.url) as connection:
        channel = await connection.channel()
        broker.withhold_confirms()
        publishing = asyncio.ensure_future(publish(channel, b""))
        await soon(lambda: broker.queue("q").depth)
        with pytest.raises(ValueError, match="1 unconfirmed messages"):
            aio_pika.wrap(channel)
        broker.release_confirms()
        await publishing
        await channel.close()
        with pytest.raises(ValueError, match="is not open"):
            aio_pika.wrap(channel)
        with pytest.raises(TypeError, match="a connection or a channel of aio-pika's"):
            aio_pika.wrap(Other(connection))
        with pytest.raises(TypeError, match="a connection or a channel of aio-pika's"):
            aio_pika.wrap(broker)  # type: ignore[call-overload]  # a wrong type on purpose
        with pytest.raises(RuntimeError, match="no running event loop"):
            await asyncio.to_thread(aio_pika.wrap, connection)
    with pytest.raises(ValueError, match="is not open"):
        aio_pika.wrap(connection)
    async with await original.connect(broker.url, connection_class=Others) as others:
        with pytest.raises(TypeError, match="Other"):
            aio_pika.wrap(others)
