"""`publish` of aio-pika's exchanges under flow control."""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aio_pika as original
import pytest
from aio_pika.abc import UnderlayConnection
from aiormq.exceptions import AMQPConnectionError, ChannelInvalidStateError

import qflow_client.aio_pika as aio_pika
from qflow_client import (
    AsyncProducer,
    ConfirmTimeout,
    FlowControlTimeout,
    FlowEventKind,
    HoldKind,
    ProducerFlowed,
    SettingsError,
    flow_manager,
)
from qflow_client.amqp.frames import CONNECTION_UNBLOCKED, METHOD_FRAME, frame
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from tests.certificates import server_context
from tests.integration.aio.tools import Run, soon
from tests.integration.producer.tools import PATIENCE, Proxy, Wire, bodies, logged, takes

WAIT = 0.1


def kinds(channel: Any) -> list[str]:
    return [str(hold.kind) for hold in channel.flow_state.holds]


async def held(channel: Any, *wanted: str) -> None:
    await soon(lambda: sorted(kinds(channel)) == sorted(wanted), f"held by {wanted}")


async def stop(channel: Any, broker: Broker) -> None:
    (name,) = (each.name for each in broker.channels() if each.number == channel.number)
    broker.flow(False, name)
    await held(channel, HoldKind.CHANNEL_FLOW)


async def in_line(channel: Any, count: int) -> None:
    await soon(lambda: channel.flow_control.protocol.controller.waiting == count, f"{count} in line")


@asynccontextmanager
async def opened(connecting: Awaitable[Any], **options: Any) -> AsyncIterator[Any]:
    """Wait for a connection, and yield a channel of it. Close the connection at the end."""
    async with await connecting as connection:
        yield await connection.channel(**options)


def publish(channel: Any, body: bytes, **keywords: Any) -> Any:
    return channel.default_exchange.publish(aio_pika.Message(body), "q", **keywords)


@pytest.fixture
def connect(request: pytest.FixtureRequest, broker: Broker) -> Callable[..., Any]:
    name = getattr(request, "param", "connect_robust")
    return lambda url=broker.url, **settings: getattr(aio_pika, name)(url, **settings)


# Robust connections and their channels have different classes. Tests of creating and closing them use both kinds. All
# other tests use one kind, because both share the code that holds publishes.
with_both = pytest.mark.parametrize("connect", ["connect", "connect_robust"], indirect=True)


@with_both
async def test_J7_a_stop_is_answered_with_flow_ok_and_no_message_is_published_before_the_stop_ends(
    broker: Broker, connect: Any, wire: Wire
) -> None:
    async with await connect(max_producer_flow_control_wait=PATIENCE) as connection:
        channel = await connection.channel()
        await stop(channel, broker)
        await soon(lambda: wire.count("in", "Channel.FlowOk"))
        stopped = wire.where("in", "Channel.FlowOk")[0]
        waiting = [asyncio.ensure_future(publish(channel, b"%d" % number)) for number in range(3)]
        await in_line(channel, 3)
        # Other methods and other channels still work, and so does the stopped channel, except for publishing.
        queue = await channel.declare_queue("q", passive=True)
        assert await queue.get(fail=False) is None
        other = await connection.channel()
        await publish(other, b"other channels go on")
        assert wire.came_between(stopped).count("Basic.Publish") == 1
        broker.flow(True)
        assert [type(each).__name__ for each in await asyncio.gather(*waiting)] == ["Ack"] * 3
        assert bodies(broker) == [b"other channels go on", b"0", b"1", b"2"]
        assert not channel.flow_state.flowed


@pytest.mark.parametrize(
    ("connect", "confirms", "by"),
    [
        ("connect", True, "setting"),
        ("connect", False, "timeout"),
        ("connect_robust", False, "setting"),
        ("connect_robust", True, "timeout"),
    ],
    indirect=["connect"],
)
async def test_A4_a_publish_on_a_stopped_channel_raises_at_its_deadline_and_never_sends_the_message(
    broker: Broker, connect: Any, confirms: bool, by: str
) -> None:
    wait = WAIT if by == "setting" else 60
    async with opened(connect(max_producer_flow_control_wait=wait), publisher_confirms=confirms) as channel:
        await stop(channel, broker)
        with takes(WAIT), pytest.raises(FlowControlTimeout, match="channel_flow") as caught:
            await publish(channel, b"never", timeout=None if by == "setting" else WAIT)
        assert isinstance(caught.value, asyncio.TimeoutError)
        assert caught.value.message == b"never"
        assert [hold.kind for hold in caught.value.holds] == [HoldKind.CHANNEL_FLOW]
        broker.flow(True)
        assert await channel.wait_unflowed(PATIENCE)
        await publish(channel, b"later", timeout=PATIENCE)
        await broker.wait_until_async(lambda broker: broker.queue("q").depth)
        assert bodies(broker) == [b"later"]


async def test_D1_a_publish_on_a_stopped_channel_raises_immediately_if_when_flowed_is_raise(
    broker: Broker, connect: Any
) -> None:
    async with opened(connect(when_flowed="raise")) as channel:
        await publish(channel, b"")
        await stop(channel, broker)
        with pytest.raises(ProducerFlowed) as caught:
            await publish(channel, b"")
        assert not isinstance(caught.value, FlowControlTimeout)


@with_both
async def test_connection_blocked_holds_all_channels_until_connection_unblocked(broker: Broker, connect: Any) -> None:
    async with await connect() as connection:
        channels = [await connection.channel() for _ in range(2)]
        broker.block("no memory")
        for channel in channels:
            await held(channel, HoldKind.CONNECTION_BLOCKED)
            with pytest.raises(FlowControlTimeout, match="no memory"):
                await publish(channel, b"", timeout=WAIT)
        broker.unblock()
        for channel in channels:
            assert await channel.wait_unflowed(PATIENCE)
            await publish(channel, b"")
        assert broker.queue("q").depth == 2


async def test_a_missing_confirm_raises_ConfirmTimeout_and_not_FlowControlTimeout(broker: Broker, connect: Any) -> None:
    async with opened(connect(max_producer_flow_control_wait=WAIT)) as channel:
        broker.withhold_confirms()
        with takes(WAIT), pytest.raises(ConfirmTimeout, match="no answer from the broker"):
            await publish(channel, b"unknown")
        with takes(2 * WAIT), pytest.raises(ConfirmTimeout):
            await publish(channel, b"unknown too", timeout=2 * WAIT)
        broker.release_confirms()
        # The late confirms must not be assigned to this message.
        assert (await publish(channel, b"known", timeout=PATIENCE)).delivery_tag == 3
        assert bodies(broker) == [b"unknown", b"unknown too", b"known"]


async def test_without_a_hold_the_error_of_a_publish_with_timeout_0_names_only_the_timeout(
    broker: Broker, connect: Any
) -> None:
    async with opened(connect()) as channel:
        with pytest.raises(FlowControlTimeout, match=r"^the message was not sent, because timeout=0 "):
            await publish(channel, b"never", timeout=0)
        assert bodies(broker) == []


async def test_each_returned_message_is_reported_to_its_own_publish_even_if_several_have_the_same_id(
    broker: Broker, connect: Any
) -> None:
    async with opened(connect(), on_return_raises=True) as channel:
        message = aio_pika.Message(b"", message_id="an id of the application")
        keys = ["nowhere", "q", "nowhere", "elsewhere", "q"]
        publishing = (channel.default_exchange.publish(message, key) for key in keys)
        results = await asyncio.gather(*publishing, return_exceptions=True)
        refused = [isinstance(each, aio_pika.exceptions.PublishError) for each in results]
        assert refused == [key != "q" for key in keys]
        assert not channel.flow_control._returns._expected
    assert bodies(broker) == [b"", b""]


async def test_a_return_that_is_read_before_the_waiting_publish_resumes_is_the_result_of_this_publish(
    broker: Broker, connect: Any
) -> None:
    async with opened(connect()) as channel:
        flow = channel.flow_control
        flow.hold("paused", source="", detail="")
        publishing = asyncio.ensure_future(channel.default_exchange.publish(aio_pika.Message(b"lost"), "nowhere"))
        await in_line(channel, 1)
        # uvloop can do all of this before it resumes the task.
        flow.lift("paused", source="")
        tapped = flow._tapped
        tapped.pump()
        assert flow.protocol.unsettled == 1
        while flow.protocol.unsettled:
            assert select.select([tapped._socket], [], [], PATIENCE)[0]
            tapped._protocol.data_received(tapped._socket.recv(1 << 16))
        assert (await publishing).body == b"lost"
        assert not flow._returns._expected


async def test_return_callbacks_are_called_after_a_reconnection_too(broker: Broker) -> None:
    async with opened(aio_pika.connect_robust(broker.url, reconnect_interval=0.01)) as channel:
        returned: list[bytes] = []
        channel.return_callbacks.add(lambda _channel, message: returned.append(message.body))
        for body in b"first", b"second":
            await channel.default_exchange.publish(aio_pika.Message(body), "nowhere")
            await soon(lambda: returned[-1:] == [body])  # noqa: B023  # at once
            lost = channel.flow_control.channel
            broker.drop_connections()
            await soon(lambda: channel.flow_control.channel is not lost)  # noqa: B023  # at once
            await channel.ready()
        assert returned == [b"first", b"second"]


async def test_C6_unconfirmed_messages_never_exceed_the_capacity(broker: Broker, connect: Any) -> None:
    async with opened(connect(capacity=5, max_producer_flow_control_wait=PATIENCE)) as channel:
        broker.withhold_confirms()
        publishing = [asyncio.ensure_future(publish(channel, b"%d" % number)) for number in range(12)]
        await in_line(channel, 7)
        await soon(lambda: broker.queue("q").depth == 5)
        assert kinds(channel) == [HoldKind.CAPACITY]
        with pytest.raises(FlowControlTimeout, match="capacity"):
            await publish(channel, b"", timeout=WAIT)
        broker.release_confirms()
        await asyncio.gather(*publishing)
        assert bodies(broker) == [b"%d" % number for number in range(12)]


async def test_F2_a_rate_limit_delays_publishing(connect: Any) -> None:
    async with opened(connect(rate=50, rate_burst=1)) as channel:
        began = asyncio.get_running_loop().time()
        for _ in range(11):
            await publish(channel, b"")
        assert asyncio.get_running_loop().time() - began >= 0.2


@with_both
async def test_settings_of_flow_control_can_be_in_the_url(broker: Broker, connect: Any) -> None:
    url = f"{broker.url}?name=shop&capacity=7&heartbeat=30&max_producer_flow_control_wait=0.5"
    async with await connect(url) as connection:
        assert connection.flow_settings.capacity == 7
        assert connection.flow_settings.max_producer_flow_control_wait == 0.5
        # Parameters of aio-pika stay in the URL. Both libraries use the parameter "name".
        assert dict(connection.url.query) == {"name": "shop", "heartbeat": "30"}
        assert broker.connections()[0].client_properties["connection_name"] == "shop"
        assert (await connection.channel()).flow_control.name == "shop"
    for wrong, error, words in [
        ("capacity=0", SettingsError, "capacity='0'|capacity"),
        ("mandatory=1", TypeError, "mandatory is not a setting of a connection of aio-pika: pass it to publish"),
        ("connect_timeout=1", TypeError, "use aio-pika's connect"),
    ]:
        with pytest.raises(error, match=words):
            await connect(f"{broker.url}?{wrong}")
    with pytest.raises(TypeError, match="confirms is not a setting"):
        await connect(confirms=False)


async def test_flow_callbacks_get_events_in_order_on_the_event_loop(broker: Broker, connect: Any) -> None:
    async with opened(connect(flow_control_wait_notify_period=0.05)) as channel:
        told: list[Any] = []
        unsubscribe = channel.on_flow(told.append)
        channel.on_flow(lambda event: 1 / 0)
        with pytest.raises(TypeError, match="on_flow"):
            channel.on_flow(channel.close)
        await stop(channel, broker)
        waiting = asyncio.ensure_future(publish(channel, b""))
        await soon(lambda: any(each.kind is FlowEventKind.WAITING for each in told))
        broker.flow(True)
        await waiting
        await soon(lambda: told[-1].kind is FlowEventKind.UNFLOWED)
        assert told[0].kind is FlowEventKind.FLOWED
        assert told[0].producer == f"aio-pika channel {channel.number}"
        assert {each.kind for each in told[1:-1]} == {FlowEventKind.WAITING}
        unsubscribe()
        count = len(told)
        await stop(channel, broker)
        await asyncio.sleep(0)
        assert len(told) == count
        assert channel.flow_state.times_flowed == 2
        assert not await channel.wait_unflowed(0.05)


async def test_F6_the_flow_manager_stops_and_starts_a_channel_from_any_thread(connect: Any) -> None:
    async with opened(connect()) as channel:
        for call in flow_manager.stop_all, flow_manager.start_all:
            thread = threading.Thread(target=call)
            thread.start()
            await asyncio.get_running_loop().run_in_executor(None, thread.join)
            if call is flow_manager.stop_all:
                await held(channel, HoldKind.PAUSED)
                with pytest.raises(FlowControlTimeout, match="paused"):
                    await publish(channel, b"", timeout=0.05)
        assert await channel.wait_unflowed(PATIENCE)
        await publish(channel, b"")


async def test_a_cancelled_publish_that_was_not_written_is_never_sent(broker: Broker, connect: Any) -> None:
    async with opened(connect()) as channel:
        await stop(channel, broker)
        waiting = [asyncio.ensure_future(publish(channel, b"%d" % number)) for number in range(3)]
        await in_line(channel, 3)
        waiting[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        await in_line(channel, 2)
        broker.flow(True)
        await asyncio.gather(waiting[0], waiting[2])
        assert (await publish(channel, b"3")).delivery_tag == 3
        assert bodies(broker) == [b"0", b"2", b"3"]


async def test_a_waiting_publish_raises_the_error_with_which_the_broker_closed_the_channel(broker: Broker) -> None:
    async with opened(aio_pika.connect(broker.url)) as channel:
        await stop(channel, broker)
        waiting = asyncio.ensure_future(publish(channel, b""))
        watching = asyncio.ensure_future(channel.wait_unflowed())
        await in_line(channel, 1)
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await channel.declare_queue("nothing", passive=True)
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await waiting
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await watching
        with pytest.raises(ChannelInvalidStateError):
            await channel.wait_unflowed()
        assert kinds(channel) == [HoldKind.DISCONNECTED]
        # After it is reopened, the channel has no holds.
        await channel.reopen()
        assert kinds(channel) == []
        await publish(channel, b"again")
    assert bodies(broker) == [b"again"]


@with_both
@pytest.mark.parametrize("what", ["channel", "connection"])
async def test_a_waiting_publish_raises_when_the_program_closes_the_channel_or_the_connection(
    broker: Broker, connect: Any, what: str
) -> None:
    connection = await connect()
    channel = await connection.channel()
    await stop(channel, broker)
    waiting = asyncio.ensure_future(publish(channel, b""))
    await in_line(channel, 1)
    await (channel if what == "channel" else connection).close()
    with pytest.raises(ChannelInvalidStateError):
        await waiting
    await connection.close()
    assert bodies(broker) == []


async def test_after_a_reconnection_only_the_holds_of_the_new_channel_apply_to_a_robust_channel(
    broker: Broker, proxy: Proxy, wire: Wire
) -> None:
    url = f"{proxy.url(broker)}?reconnect_interval=0.05&max_producer_flow_control_wait={PATIENCE}"
    async with opened(aio_pika.connect_robust(url)) as channel:
        exchange = await channel.declare_exchange("x", "fanout", auto_delete=True)
        queue = await channel.declare_queue("temporary", exclusive=True)
        await queue.bind(exchange)
        told: list[Any] = []
        channel.on_flow(told.append)
        for number in range(3):
            await stop(channel, broker)
            waiting = asyncio.ensure_future(exchange.publish(aio_pika.Message(b"%d" % number), ""))
            await in_line(channel, 1)
            proxy.cut()
            # The stop of the lost channel does not apply to the new channel. The message goes to the exchange and
            # the queue that aio-pika has declared and bound again.
            assert type(await waiting).__name__ == "Ack"
            assert (await queue.get(no_ack=True)).body == b"%d" % number
            assert kinds(channel) == []
            assert channel.flow_control.protocol.unsettled == 0
        assert {str(each.hold.kind) for each in told if each.hold} == {"channel_flow", "disconnected"}
        # A stop of the new channel applies.
        await stop(channel, broker)
        with pytest.raises(FlowControlTimeout, match="channel_flow"):
            await publish(channel, b"", timeout=WAIT)


async def test_publishes_written_before_the_connection_is_lost_raise_the_error_of_aio_pika(
    broker: Broker, proxy: Proxy
) -> None:
    async with opened(aio_pika.connect_robust(f"{proxy.url(broker)}?reconnect_interval=0.05&capacity=2")) as channel:
        broker.withhold_confirms()
        written = [asyncio.ensure_future(publish(channel, b"%d" % number)) for number in range(3)]
        await in_line(channel, 1)
        await soon(lambda: broker.queue("q").depth == 2)
        proxy.cut()
        for each in written[:2]:
            with pytest.raises(aio_pika.exceptions.AMQPConnectionError):
                await each
        broker.release_confirms()
        # This message had not been written, so its publish still waits.
        await written[2]
        assert channel.flow_control.protocol.unsettled == 0
        await publish(channel, b"3")
        assert bodies(broker) == [b"0", b"1", b"2", b"3"]


async def test_a_socket_that_accepts_no_bytes_holds_a_channel_without_confirms(broker: Broker, proxy: Proxy) -> None:
    async with opened(aio_pika.connect(proxy.url(broker)), publisher_confirms=False) as channel:
        proxy.stop_reading()
        sent: list[int] = []

        async def fill() -> None:
            while True:
                with suppress(ConfirmTimeout):
                    # A message that is partly written cannot be withdrawn.
                    await publish(channel, b"%06d" % len(sent) + bytes(100_000), timeout=WAIT)
                sent.append(len(sent))

        with pytest.raises(FlowControlTimeout, match="transport"):
            await fill()
        with takes(WAIT), pytest.raises(FlowControlTimeout, match="transport"):
            await publish(channel, b"never", timeout=WAIT)
        cancelled = [asyncio.ensure_future(publish(channel, b"never")) for _ in range(3)]
        await soon(lambda: channel.flow_control.protocol.unsettled >= 3)
        last = asyncio.ensure_future(publish(channel, b"last"))
        for each in cancelled:
            each.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        proxy.go_on_reading()
        await last
        await soon(lambda: broker.queue("q").depth == len(sent) + 1)
        found = bodies(broker)
        assert found[-1] == b"last"
        assert [int(each[:6]) for each in found[:-1]] == sent


async def test_a_channel_that_is_closed_inside_a_message_of_several_frames_completes_the_message(
    broker: Broker, proxy: Proxy
) -> None:
    async with await aio_pika.connect(proxy.url(broker), max_producer_flow_control_wait=PATIENCE) as connection:
        channel, other = await connection.channel(), await connection.channel()
        proxy.stop_reading()
        # More than the sockets hold.
        large = asyncio.ensure_future(publish(channel, bytes(12_000_000)))
        await soon(lambda: channel.flow_control.is_stuck)
        assert 0 < channel.flow_control.protocol.admission.unwritten < 12_000_000
        closing = asyncio.ensure_future(channel.close())
        await soon(lambda: channel.flow_control._tapped.get_write_buffer_size())
        proxy.go_on_reading()
        await closing
        await large
        await publish(other, b"the connection is well")
        assert broker.queue("q").depth == 2


async def test_heartbeats_continue_while_a_publish_waits(broker: Broker, wire: Wire) -> None:
    async with opened(aio_pika.connect(f"{broker.url}?heartbeat=3")) as channel:
        await stop(channel, broker)
        waiting = asyncio.ensure_future(publish(channel, b""))
        # With this interval, aiormq sends a heartbeat every second.
        await soon(lambda: wire.count("in", "Heartbeat") >= 2)
        assert not waiting.done()
        broker.flow(True)
        await waiting


@with_both
async def test_a_publish_fails_if_aiormq_finds_the_connection_dead(broker: Broker, connect: Any) -> None:
    async with opened(connect()) as channel:
        broker.withhold_confirms()
        publishing = asyncio.ensure_future(publish(channel, b""))
        await soon(lambda: broker.queue("q").depth == 1)
        # aiormq does this if no heartbeat has come for too long, and asyncio.run() at its end. The error of the
        # connection is then a CancelledError.
        channel.flow_control.channel.connection._reader_task.cancel()
        with pytest.raises(AMQPConnectionError, match=r"as at the end of asyncio.run\(\), .* not even heartbeats"):
            await publishing


@with_both
async def test_a_publish_fails_with_a_connection_error_even_if_aiormq_reports_no_error(
    broker: Broker, connect: Any
) -> None:
    async with await connect() as connection:
        channel = await connection.channel()
        broker.withhold_confirms()
        publishing = asyncio.ensure_future(publish(channel, b""))
        await soon(lambda: broker.queue("q").depth == 1)
        # aiormq's reader ends without an error if it finds the end of the data immediately after a frame.
        protocol = connection.tapped._protocol
        protocol.data_received(frame(METHOD_FRAME, 0, CONNECTION_UNBLOCKED))
        protocol.eof_received()
        connection.tapped.abort()
        with pytest.raises(AMQPConnectionError, match="the broker closed the socket"):
            await publishing


@with_both
async def test_a_producer_and_a_channel_of_the_drop_in_can_share_a_connection(broker: Broker, connect: Any) -> None:
    async with await connect() as connection:
        channel = await connection.channel()
        async with AsyncProducer(connection=connection, routing_key="q") as producer:
            await asyncio.gather(
                *(producer.send(b"ours") for _ in range(50)), *(publish(channel, b"") for _ in range(50))
            )
            await producer.flush()
        assert broker.queue("q").depth == 100


async def test_flow_control_works_over_tls(make_broker: Callable[..., Broker], certificate: Any) -> None:
    broker = make_broker(ssl_context=server_context(*certificate))
    context = ssl.create_default_context(cafile=certificate[0])
    async with opened(aio_pika.connect(broker.url, ssl_context=context)) as channel:
        await stop(channel, broker)
        waiting = asyncio.ensure_future(publish(channel, bytes(500_000)))
        await in_line(channel, 1)
        broker.flow(True)
        await waiting
        assert broker.queue("q").depth == 1


async def test_a_channel_without_references_is_garbage_collected(broker: Broker) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await publish(channel, b"")
        await channel.close()
        known = weakref.ref(channel.flow_control)
        del channel
        # aiormq's reader keeps a reference to the channel of the last frame, so use another channel.
        last = await connection.channel()
        await publish(last, b"")
        await soon(lambda: gc.collect() is not None and known() is None)
        assert list(connection.flows) == [last.flow_control]


@with_both
@pytest.mark.parametrize("closed", ["channel", "connection"])
def test_a_close_by_the_program_logs_no_warning(run: Run, connect: Any, caplog: Any, closed: str) -> None:
    async def main() -> None:
        async with opened(connect()) as channel:
            await publish(channel, b"")
            if closed == "channel":
                await channel.close()

    run(main())
    assert logged(caplog) == []


@with_both
@pytest.mark.parametrize("state", ["never published", "confirmed", "unconfirmed", "in line", "without confirms"])
def test_E11_a_channel_closed_by_the_broker_logs_a_warning_only_if_messages_may_be_lost(
    run: Run, broker: Broker, connect: Any, caplog: Any, state: str
) -> None:
    async def main() -> None:
        async with opened(connect(), publisher_confirms=state != "without confirms") as channel:
            waiting = None
            if state in ("confirmed", "without confirms"):
                await publish(channel, b"")
            elif state == "unconfirmed":
                broker.withhold_confirms()
                waiting = asyncio.ensure_future(publish(channel, b""))
                await soon(lambda: bodies(broker))
            elif state == "in line":
                await stop(channel, broker)
                waiting = asyncio.ensure_future(publish(channel, b""))
                await in_line(channel, 1)
            with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
                await channel.declare_queue("missing", passive=True)
            if waiting is not None:
                await asyncio.wait((waiting,))
                waiting.exception()

    run(main())
    broker.release_confirms()
    assert flush_logs(PATIENCE)
    told = [each for each in caplog.records if each.name == "qflow_client" and "disconnected" in each.message]
    # Without confirms, the broker may have received the message after the method that it refused.
    assert bool(told) is (state in ("unconfirmed", "in line", "without confirms"))


def test_a_publish_without_confirms_to_a_missing_exchange_logs_a_warning(
    run: Run, broker: Broker, connect: Any, caplog: Any
) -> None:
    async def main() -> None:
        async with opened(connect(), publisher_confirms=False) as channel:
            exchange = await channel.get_exchange("missing", ensure=False)
            await exchange.publish(aio_pika.Message(b""), "q")
            await soon(lambda: flush_logs(PATIENCE) and "404" in caplog.text)

    run(main())
    told = [each.message for each in caplog.records if each.name == "qflow_client" and each.levelname == "WARNING"]
    assert "aio-pika channel 1: blocked (flowed): disconnected" in told[0]


async def test_a_channel_of_the_drop_in_cannot_be_created_on_a_connection_of_aio_pika(broker: Broker) -> None:
    async with await original.connect(broker.url) as connection:
        with pytest.raises(TypeError, match=r"qflow_client\.aio_pika"):
            aio_pika.Channel(connection)


@with_both
async def test_a_cancelled_connect_leaves_no_task_and_no_socket(connect: Any) -> None:
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        connecting = asyncio.ensure_future(connect(f"amqp://127.0.0.1:{silent.getsockname()[1]}/"))
        peer, _ = await loop.sock_accept(silent)
        with peer:
            assert await loop.sock_recv(peer, 100) == b"AMQP\x00\x00\x09\x01"
            connecting.cancel()
            with takes(0), pytest.raises(asyncio.CancelledError):
                await connecting
            assert await asyncio.wait_for(loop.sock_recv(peer, 100), PATIENCE) == b""
    await soon(lambda: asyncio.all_tasks() == before)


@with_both
async def test_a_connect_that_is_cancelled_when_its_connection_is_open_closes_this_connection(
    broker: Broker, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = UnderlayConnection.make_connection
    counts: list[int] = []

    async def make_and_cancel(*values: Any, **keywords: Any) -> Any:
        made = await make(*values, **keywords)
        counts.append(broker.connection_count)
        connecting.cancel()
        await asyncio.sleep(0)
        return made

    monkeypatch.setattr(UnderlayConnection, "make_connection", make_and_cancel)
    connecting = asyncio.ensure_future(connect(broker.url))
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert counts == [1]
    await soon(lambda: broker.connection_count == 0)


async def test_connecting_to_a_port_without_a_listener_raises_the_error_of_aio_pika() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(aio_pika.exceptions.AMQPConnectionError):
            await aio_pika.connect(f"amqp://127.0.0.1:{port}/")
