"""`on_disconnect="republish"` resends messages that a lost connection left unconfirmed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import aio_pika as original
import pytest

import qflow_client.aio_pika as aio_pika
from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.broker import Broker
from qflow_client.message import REPUBLISHED
from tests.effort import rounds
from tests.integration.aio.tools import Run, soon
from tests.integration.producer.tools import PATIENCE, Proxy, bodies, message_ids, takes

from .test_flow import WAIT, held, in_line, kinds, opened, publish, stop

FAST = {"on_disconnect": "republish", "reconnect_interval": 0.05, "max_producer_flow_control_wait": PATIENCE}


def marked(broker: Broker, queue: str = "q") -> list[bool]:
    return [bool((message.properties.headers or {}).get(REPUBLISHED)) for message in broker.messages(queue)]


def publishing(channel: Any, *numbers: int, **keywords: Any) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(publish(channel, b"%d" % number, **keywords)) for number in numbers]


def answers(results: list[Any]) -> list[str]:
    return [type(each).__name__ for each in results]


async def test_unconfirmed_messages_are_resent_in_order_and_marked_before_new_messages_are_sent(
    broker: Broker, proxy: Proxy
) -> None:
    async with opened(aio_pika.connect_robust(proxy.url(broker), capacity=3, **FAST)) as channel:
        await publish(channel, b"0")
        broker.withhold_confirms()
        tasks = publishing(channel, 1, 2, 3, 4)
        await in_line(channel, 1)
        await soon(lambda: broker.queue("q").depth == 4)
        proxy.cut()
        await soon(lambda: HoldKind.DISCONNECTED in kinds(channel))
        # This publish begins while there is no connection.
        tasks += publishing(channel, 5)
        broker.release_confirms()
        assert answers(await asyncio.gather(*tasks)) == ["Ack"] * 5
        assert bodies(broker) == [b"0", b"1", b"2", b"3", b"1", b"2", b"3", b"4", b"5"]
        assert marked(broker) == [False] * 4 + [True] * 3 + [False] * 2
        ids = message_ids(broker)
        assert ids[1:4] == ids[4:7]
        assert kinds(channel) == []


@pytest.mark.parametrize("wrapped", [False, True], ids=["drop-in", "wrapped"])
def test_many_tasks_that_publish_lose_no_message_over_many_lost_connections(
    run: Run, broker: Broker, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_ON_DISCONNECT", "republish")
    monkeypatch.setenv("QFLOW_CAPACITY", "50")
    count, senders, losses = rounds(300, least=90), 4, rounds(20, least=6)

    async def main() -> None:
        url = f"{broker.url}?reconnect_interval=0.01"
        async with await (original if wrapped else aio_pika).connect_robust(url) as connection:
            if wrapped:
                aio_pika.wrap(connection)
            channel = await connection.channel()
            # With a second, idle channel, a restored channel may have another number.
            await connection.channel()

            async def work(sender: int) -> list[Any]:
                return [await publish(channel, b"%d %d" % (sender, number)) for number in range(count)]

            jobs = [asyncio.ensure_future(work(sender)) for sender in range(senders)]
            for part in range(losses):
                await soon(lambda: broker.queue("q").depth >= part * count * senders / losses)  # noqa: B023  # at once
                broker.drop_connections()
            acks = [ack for job in jobs for ack in await job]
            assert answers(acks) == ["Ack"] * (count * senders)

    run(main())
    firsts = list(dict.fromkeys(bodies(broker)))
    for sender in range(senders):
        mine = [body for body in firsts if body.startswith(b"%d " % sender)]
        assert mine == [b"%d %d" % (sender, number) for number in range(count)]
    seen: set[bytes] = set()
    for message in broker.messages("q"):
        assert message.body not in seen or (message.properties.headers or {}).get(REPUBLISHED), "an unmarked copy"
        seen.add(message.body)


async def test_messages_are_resent_after_the_topology_is_redeclared(broker: Broker, proxy: Proxy) -> None:
    async with opened(aio_pika.connect_robust(proxy.url(broker), **FAST)) as channel:
        exchange = await channel.declare_exchange("x", "fanout", auto_delete=True)
        queue = await channel.declare_queue("temporary", exclusive=True)
        await queue.bind(exchange)
        for number in range(3):
            broker.withhold_confirms()
            task = asyncio.ensure_future(exchange.publish(aio_pika.Message(b"%d" % number), ""))
            await soon(lambda: broker.queue("temporary").depth)
            proxy.cut()
            await held(channel, HoldKind.DISCONNECTED)
            broker.release_confirms()
            assert answers([await task]) == ["Ack"]
            message = await queue.get(no_ack=True)
            assert (message.body, message.headers) == (b"%d" % number, {REPUBLISHED: True})


async def test_unconfirmed_messages_are_resent_even_if_the_lost_connection_was_blocked(
    broker: Broker, proxy: Proxy
) -> None:
    async with opened(aio_pika.connect_robust(proxy.url(broker), **FAST)) as channel:
        broker.withhold_confirms()
        tasks = publishing(channel, 0, 1)
        await soon(lambda: broker.queue("q").depth == 2)
        broker.block("no memory")
        proxy.cut()
        await soon(lambda: HoldKind.DISCONNECTED in kinds(channel))
        broker.release_confirms()
        broker.unblock()
        assert answers(await asyncio.gather(*tasks)) == ["Ack"] * 2
        await stop(channel, broker)
        assert bodies(broker) == [b"0", b"1", b"0", b"1"]


async def test_unconfirmed_messages_are_resent_only_when_the_new_connection_is_not_blocked(
    broker: Broker, proxy: Proxy
) -> None:
    async with await aio_pika.connect_robust(proxy.url(broker), **FAST) as connection:
        channel = await connection.channel()
        broker.withhold_confirms()
        tasks = publishing(channel, 0, 1)
        await soon(lambda: broker.queue("q").depth == 2)
        broker.block("no memory")
        proxy.cut()
        await soon(lambda: HoldKind.DISCONNECTED in kinds(channel))
        await held(channel, HoldKind.CONNECTION_BLOCKED)
        # The answer comes after the messages that were written before the question.
        queue = await channel.declare_queue("q", passive=True)
        assert queue.declaration_result.message_count == 2
        broker.release_confirms()
        broker.unblock()
        assert answers(await asyncio.gather(*tasks)) == ["Ack"] * 2
        assert bodies(broker) == [b"0", b"1", b"0", b"1"]


async def test_a_message_whose_publish_times_out_or_is_cancelled_while_disconnected_is_not_resent(
    broker: Broker, proxy: Proxy
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with opened(aio_pika.connect_robust(proxy.url(broker), **FAST)) as channel:
            broker.withhold_confirms()
            with takes(WAIT), pytest.raises(ConfirmTimeout, match="no answer from the broker"):
                await publish(channel, b"told before", timeout=WAIT)
            cancelled, kept, late = publishing(channel, 0, 1, 2)
            await soon(lambda: broker.queue("q").depth == 4)
            # New connections get no answer.
            proxy.direct_to(silent.getsockname()[1])
            proxy.cut()
            await held(channel, HoldKind.DISCONNECTED)
            broker.release_confirms()
            cancelled.cancel()
            with takes(WAIT), pytest.raises(FlowControlTimeout, match="disconnected"):
                await publish(channel, b"never sent", timeout=WAIT)
            # This is what the timer of the publish does at its deadline.
            unsettled = channel.flow_control.protocol.unsettled_receipts
            (receipt,) = (each for each in unsettled if each.message.body == b"2")
            receipt._waiter.set_result(None)
            with pytest.raises(ConfirmTimeout, match=r"lost before the broker answered.*disconnected"):
                await late
            proxy.direct_to(broker.port)
            proxy.cut()
            assert answers([await kept]) == ["Ack"]
            assert bodies(broker) == [b"told before", b"0", b"1", b"2", b"1"]
            assert channel.flow_control.protocol.unsettled == 0


async def test_a_returned_mandatory_message_is_not_resent(broker: Broker, proxy: Proxy) -> None:
    async with opened(aio_pika.connect_robust(proxy.url(broker), **FAST)) as channel:
        broker.withhold_confirms()
        missing = aio_pika.Message(b"")
        assert answers([await channel.default_exchange.publish(missing, "nowhere")]) == ["DeliveredMessage"]
        tasks = publishing(channel, 0)
        await soon(lambda: broker.queue("q").depth == 1)
        proxy.cut()
        await held(channel, HoldKind.DISCONNECTED)
        broker.delete_queue("q")
        broker.release_confirms()
        # The broker returns the resent copy.
        assert answers(await asyncio.gather(*tasks)) == ["DeliveredMessage"]
        assert channel.flow_control.protocol.unsettled == 0


async def test_publishes_on_a_channel_closed_by_the_broker_raise_the_error_of_aio_pika(broker: Broker) -> None:
    async with opened(aio_pika.connect_robust(broker.url, **FAST)) as channel:
        broker.withhold_confirms()
        tasks = publishing(channel, 0)
        await soon(lambda: broker.queue("q").depth == 1)
        exchange = await channel.get_exchange("nothing", ensure=False)
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await exchange.publish(aio_pika.Message(b""), "")
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await tasks[0]
        broker.release_confirms()
        await publish(channel, b"1")
        assert bodies(broker) == [b"0", b"1"]


@pytest.mark.parametrize("what", ["channel", "connection"])
async def test_publish_calls_that_wait_for_a_reconnect_raise_when_the_program_closes_the_channel(
    broker: Broker, proxy: Proxy, what: str
) -> None:
    connection = await aio_pika.connect_robust(proxy.url(broker), **(FAST | {"reconnect_interval": 60}))
    channel = await connection.channel()
    broker.withhold_confirms()
    tasks = publishing(channel, 0)
    await soon(lambda: broker.queue("q").depth == 1)
    proxy.cut()
    await held(channel, HoldKind.DISCONNECTED)
    tasks += publishing(channel, 1)
    await in_line(channel, 1)
    await (channel if what == "channel" else connection).close()
    with pytest.raises(aio_pika.exceptions.AMQPConnectionError):
        await tasks[0]
    with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
        await tasks[1]
    with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
        await publish(channel, b"2")
    broker.release_confirms()
    await connection.close()


async def test_without_confirms_unwritten_messages_are_sent_on_the_next_connection(
    broker: Broker, proxy: Proxy
) -> None:
    async with opened(aio_pika.connect_robust(proxy.url(broker), **FAST), publisher_confirms=False) as channel:
        proxy.cut()
        await held(channel, HoldKind.DISCONNECTED)
        await asyncio.gather(*publishing(channel, 0, 1, 2))
        await soon(lambda: broker.queue("q").depth == 3)
        assert (bodies(broker), marked(broker)) == ([b"0", b"1", b"2"], [False] * 3)


async def test_messages_are_resent_even_if_the_restored_channel_has_another_number_and_smaller_frames(
    broker: Broker, make_broker: Callable[..., Broker], proxy: Proxy
) -> None:
    small = make_broker(frame_max=8192)
    async with await aio_pika.connect_robust(proxy.url(broker), **FAST) as connection:
        first = await connection.channel()
        channel = await connection.channel()
        await first.close()
        assert channel.number == 2
        broker.withhold_confirms()
        body = bytes(range(256)) * 200
        tasks = [asyncio.ensure_future(publish(channel, body + b"%d" % number)) for number in range(3)]
        await soon(lambda: broker.queue("q").depth == 3)
        proxy.direct_to(small.port)
        proxy.cut()
        await asyncio.gather(*tasks)
        assert channel.number == 1
        assert bodies(small) == [body + b"0", body + b"1", body + b"2"]
        broker.release_confirms()


@pytest.mark.parametrize("republishes", [False, True])
async def test_a_waiting_message_is_sent_even_if_the_restored_channel_has_a_different_number(
    broker: Broker, proxy: Proxy, republishes: bool
) -> None:
    settings = FAST if republishes else FAST | {"on_disconnect": "fail"}
    async with await aio_pika.connect_robust(proxy.url(broker), **settings) as connection:
        first = await connection.channel()
        channel = await connection.channel()
        await first.close()
        await stop(channel, broker)
        tasks = publishing(channel, 0)
        await in_line(channel, 1)
        proxy.cut()
        await asyncio.gather(*tasks)
        assert channel.number == 1
        assert bodies(broker) == [b"0"]


async def test_only_robust_connections_accept_the_setting_on_disconnect_republish(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await aio_pika.connect_robust(f"{broker.url}?on_disconnect=republish") as connection:
        assert connection.flow_settings.on_disconnect == "republish"
    async with await aio_pika.connect_robust(broker.url) as connection:
        assert connection.flow_settings.on_disconnect == "fail"
    with pytest.raises(TypeError, match="only connect_robust"):
        await aio_pika.connect(broker.url, on_disconnect="republish")
    with pytest.raises(TypeError, match="only connect_robust"):
        await aio_pika.connect(f"{broker.url}?on_disconnect=republish")
    # The environment variable applies to all connections that accept the setting.
    monkeypatch.setenv("QFLOW_ON_DISCONNECT", "republish")
    async with await aio_pika.connect_robust(broker.url) as connection:
        assert connection.flow_settings.on_disconnect == "republish"
    async with await aio_pika.connect(broker.url) as connection:
        assert connection.flow_settings.on_disconnect == "fail"
