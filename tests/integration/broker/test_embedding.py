from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from pamqp import commands

from qflow_client.broker import Broker, ChannelException, Policy, PolicyDefinition
from qflow_client.broker.core import runner
from tests.integration.producer.processes import in_child, waiting_child
from tests.integration.producer.tools import PATIENCE, Stopwatch


def test_a_broker_listens_on_a_free_loopback_port_until_it_is_stopped():
    with Broker() as broker, Broker() as other:
        assert broker.port != other.port
        assert broker.url == f"amqp://guest:guest@127.0.0.1:{broker.port}/%2F"
        socket.create_connection(("127.0.0.1", broker.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", broker.port))
    # The last state can still be read.
    assert broker.queues() == ()


def test_a_broker_whose_port_is_in_use_does_not_start():
    with Broker() as broker, pytest.raises(OSError), Broker(port=broker.port):
        pass


class _Front:
    def __init__(self, error=None):
        self.error = error
        self.calls = []

    async def start(self):
        self.calls.append("start")
        if self.error is not None:
            raise self.error

    async def stop(self):
        self.calls.append("stop")


def test_if_one_part_of_a_broker_cannot_start_the_parts_started_before_are_stopped():
    broker = Broker()
    fronts = [_Front(), _Front(OSError("no")), _Front()]
    broker._fronts += fronts
    with pytest.raises(OSError, match="no"), broker:
        pass
    assert [front.calls for front in fronts] == [["start", "stop"], ["start"], []]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", broker.port))


@pytest.mark.parametrize("name", ["n" * 256, "\udcff", 5])
def test_a_broker_refuses_names_that_no_client_could_use(broker, name):
    broker.declare_queue("q")
    for refused in (
        lambda: broker.declare_queue(name),
        lambda: broker.declare_exchange(name),
        lambda: broker.bind("amq.topic", "q", name),
        lambda: broker.publish(b"", name, exchange="amq.topic"),
        lambda: broker.publish(b"", "q", exchange=name),
    ):
        with pytest.raises((TypeError, ValueError), match=r"bytes; AMQP carries|UTF-8|must be a str"):
            refused()
    assert [queue.name for queue in broker.queues()] == ["q"]


def test_a_second_start_of_the_same_broker_object_raises_an_error():
    broker = Broker()
    with pytest.raises(RuntimeError, match="with Broker"):
        _ = broker.port
    with broker:
        thread = broker._runner._thread
        with pytest.raises(RuntimeError, match="make a new Broker"), broker:
            pass
        assert broker.queues() == ()
    assert thread is not None
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="make a new Broker"), broker:
        pass


def test_the_constructor_of_a_broker_raises_an_error_for_an_invalid_setting():
    with pytest.raises(ValueError, match="enforcement must be one of"):
        Broker(enforcement="none")
    with pytest.raises(TypeError, match="colour"):
        Broker(colour="red")  # type: ignore[call-arg]


def test_the_url_of_a_broker_escapes_the_user_the_password_and_the_virtual_host():
    with Broker(users={"us/er": "p@ss"}, virtual_host="v/h") as broker:
        assert broker.url == f"amqp://us%2Fer:p%40ss@127.0.0.1:{broker.port}/v%2Fh"


def test_methods_of_the_broker_manage_queues_and_messages_without_a_connection(broker):
    snapshot = broker.declare_queue("q", arguments={"qpid.flow_stop_count": 2}, durable=True)
    assert (snapshot.name, snapshot.depth, snapshot.durable) == ("q", 0, True)
    commands_properties = commands.Basic.Properties(message_id="m")
    assert broker.publish(b"one", "q", properties=commands_properties) == 1
    assert broker.publish(b"two", "q") == 1
    assert broker.publish(b"three", "nowhere") == 0
    assert [message.body for message in broker.messages("q")] == [b"one", b"two"]
    message = broker.get("q")
    assert (message.body, message.properties.message_id, message.exchange, message.routing_key) == (
        b"one",
        "m",
        "",
        "q",
    )
    assert message.redelivered is False
    assert broker.purge("q") == 1
    assert broker.get("q") is None
    assert broker.delete_queue("q") == 0
    with pytest.raises(ChannelException, match="no queue 'q'") as caught:
        broker.queue("q")
    assert caught.value.code == 404
    with pytest.raises(TypeError, match="body must be bytes, not str: 'text'"):
        broker.publish("text", "q")
    with pytest.raises(ChannelException, match=r"qpid\.max_count='x'"):
        broker.declare_queue("q", arguments={"qpid.max_count": "x"})


def test_publishing_with_an_expiration_that_is_not_a_number_raises_an_error(broker):
    broker.declare_queue("q")
    with pytest.raises(ChannelException, match="invalid expiration 'soon'"):
        broker.publish(b"x", "q", properties=commands.Basic.Properties(expiration="soon"))
    assert broker.queue("q").depth == 0


def test_messages_and_queues_expire_even_if_no_client_is_connected(broker, stop_clock):
    broker.declare_queue("dead")
    to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    broker.declare_queue("q", arguments={"x-message-ttl": 30, **to_dead})
    resume_clock = stop_clock(broker)
    broker.declare_queue("unused", arguments={"x-expires": 60})
    broker.publish(b"late", "unused", properties=commands.Basic.Properties(expiration="40"))
    resume_clock()
    for _ in range(2):
        broker.publish(b"x", "q")
        broker.wait_until(lambda b: not b.queue("q").depth)
    broker.wait_until(lambda b: len(b.queues()) == 2)
    assert broker.queue("q").to_json()["drops"] == {"expired": 2}
    assert broker.queue("dead").depth == 2


def test_C7_counters_in_snapshots_have_the_names_of_Qpid(broker, connect):
    broker.declare_queue("q", arguments={"qpid.flow_stop_count": 1, "qpid.flow_resume_count": 1})
    client = connect(broker).open().channel()
    client.publish()
    client.publish()
    assert client.expect(commands.Channel.Flow).active is False
    seen = (broker.queue("q"), broker.channels()[0], broker.connections()[0])
    for told in (each.to_json() for each in seen):
        assert (told["flowState"], told["flowStopped"], told["flowStoppedCount"]) == (True, True, 1)
    client.call(1, commands.Queue.Purge(queue="q"), (commands.Channel.Flow, commands.Queue.PurgeOk))
    seen = (broker.queue("q"), broker.channels()[0], broker.connections()[0])
    for told in (each.to_json() for each in seen):
        assert (told["flowState"], told["flowStopped"], told["flowStoppedCount"]) == (False, False, 1)
    assert broker.queue("q").to_json()["peakDepth"] == 2
    # The counters of a closed channel stay in its connection.
    broker.close_channels()
    client.send(1, commands.Channel.CloseOk())
    broker.wait_until(lambda b: not b.connections()[0].channels)
    assert broker.connections()[0].to_json()["flowStoppedCount"] == 1


def test_C7_snapshots_show_client_properties_and_queue_arguments_as_json(broker, connect):
    table = {"raw": bytearray(b"\xff"), "time": datetime(2024, 2, 29, tzinfo=UTC), "list": [Decimal("1.5"), None, True]}
    connect(broker).open(properties=table)
    broker.declare_queue("q", arguments=table)
    expected = {"raw": "\\xff", "time": "2024-02-29 00:00:00+00:00", "list": ["1.5", None, True]}
    for told in (broker.queue("q").to_json()["arguments"], broker.connections()[0].to_json()["clientProperties"]):
        assert json.loads(json.dumps({name: told[name] for name in expected})) == expected


def test_snapshots_show_which_queues_block_a_channel_and_how_often_the_channel_was_flowed(broker, connect):
    for name in ("a", "b"):
        broker.declare_queue(name, arguments={"qpid.flow_stop_count": 1})
    client = connect(broker).open().channel(3, confirms=True)
    for name in ("a", "b"):
        client.publish(b"xy", name, channel=3)
        client.publish(b"xy", name, channel=3)
    broker.wait_until(lambda b: b.queue("b").flow_stopped)
    (channel,) = broker.producers()
    assert channel.name == f"{client.name} (3)"
    assert (channel.flowed, channel.blocked_by, channel.times_flowed) == (True, ("a", "b"), 1)
    assert (channel.published, channel.unconfirmed) == (4, 2)
    assert channel.flowed_seconds > 0
    queue = broker.queue("a")
    assert (queue.blocked, queue.held_confirms) == ((channel.name,), 1)
    assert (queue.depth, queue.peak_depth, queue.bytes, queue.peak_bytes) == (2, 2, 4, 4)
    (connection,) = broker.connections()
    assert (connection.name, connection.user, connection.channels) == (client.name, "guest", (3,))
    assert connection.published == 4


@pytest.mark.parametrize(
    ("named", "shown"), [({"connection_name": "shop"}, "shop"), ({"connection_name": 5}, ""), ({}, "")]
)
def test_snapshots_show_the_connection_name_of_a_client(broker, named, shown):
    parameters = pika.URLParameters(broker.url)
    parameters.client_properties = named
    with pika.BlockingConnection(parameters) as connection:
        connection.channel().confirm_delivery()
        assert [each.client for each in (*broker.connections(), *broker.producers())] == [shown, shown]


def test_wait_until_checks_its_condition_again_after_changes_of_the_broker(broker, connect):
    broker.declare_queue("q")
    client = connect(broker).open().channel()
    looks = []

    def three(b):
        looks.append(b.queue("q").depth)
        return looks[-1] == 3

    waiter = threading.Thread(target=broker.wait_until, args=(three,))
    waiter.start()
    for _ in range(3):
        client.publish()
    waiter.join(20)
    assert not waiter.is_alive()
    assert looks[-1] == 3


def test_the_timeout_error_of_wait_until_shows_the_state_of_the_queues(broker):
    broker.declare_queue("some-queue")
    with Stopwatch() as watch, pytest.raises(TimeoutError, match="some-queue"):
        broker.wait_until(lambda b: b.queue("some-queue").depth, timeout=0.05)
    assert watch.seconds >= 0.05
    assert watch.within(5)


def test_wait_until_keeps_its_timeout_on_a_broker_that_is_never_idle(broker, monkeypatch):
    broker.declare_queue("q")
    looks = []

    def busy(b):
        looks.append(b.publish(b"x", "q"))
        # This call runs in a later turn of the loop than the publish. So after each check, something has changed.
        b.queue("q")
        # End the test even if the timeout does not work.
        return len(looks) > 1_000_000

    # Each check takes 0.1 s of this clock.
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: len(looks) / 10))
    with pytest.raises(TimeoutError, match="the condition was not true within"):
        broker.wait_until(busy, timeout=1.0)
    assert len(looks) == 10


def test_wait_until_raises_the_exception_of_its_predicate(broker):
    with pytest.raises(ChannelException):
        broker.wait_until(lambda b: b.queue("nowhere"))


def test_methods_can_be_called_directly_on_the_loop_of_the_broker_but_wait_until_raises_an_error():
    async def main():
        async with Broker() as broker:
            broker.declare_queue("q")
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
            writer.write(b"AMQP\0\0\x09\x01")
            await reader.readexactly(7)
            assert len(broker.connections()) == 1
            broker.publish(b"x", "q")
            await broker.wait_until_async(lambda b: b.queue("q").depth == 1)
            with pytest.raises(RuntimeError, match="wait_until_async"):
                broker.wait_until(lambda b: True)
            with Broker() as another, pytest.raises(RuntimeError, match="would block the running event loop"):
                another.wait_until(lambda b: True)
            with pytest.raises(TimeoutError, match="depth=1"):
                await broker.wait_until_async(lambda b: b.queue("q").depth == 2, timeout=0.01)
            waiting = asyncio.create_task(broker.wait_until_async(lambda b: not b.connections()))
            writer.close()
            await writer.wait_closed()
            await waiting

    asyncio.run(main())


def test_exchanges_and_bindings_that_are_deleted_in_the_meantime_are_not_yielded():
    async def main():
        async with Broker() as broker:
            broker.declare_queue("q")
            for name in ("first", "second", "third"):
                broker.declare_exchange(name)
                broker.bind(name, "q", "one")
                broker.bind(name, "q", "two")
            exchanges, bindings = broker.each_exchange(), broker.each_binding()
            assert next(exchanges).name == ""
            assert (next(bindings).source, next(bindings).source) == ("first", "first")
            broker.delete_exchange("first")
            assert [each.name for each in exchanges if not each.name.startswith("amq.")] == ["second", "third"]
            assert next(bindings).source == "second"
            broker.unbind("second", "q", "two")
            assert next(bindings).source == "third"
            broker.delete_exchange("third")
            assert list(bindings) == []

    asyncio.run(main())


def test_wait_until_async_works_with_a_broker_on_another_thread():
    async def main(broker):
        waiting = asyncio.create_task(broker.wait_until_async(lambda b: b.queue("q").depth == 1))
        await asyncio.to_thread(broker.publish, b"x", "q")
        await waiting

    with Broker() as broker:
        broker.declare_queue("q")
        asyncio.run(main(broker))


def test_a_cancelled_wait_until_async_ends_its_thread_so_that_the_event_loop_can_close(broker):
    checked = threading.Event()

    def never(_: Broker) -> bool:
        checked.set()
        return False

    async def main() -> None:
        waiting = asyncio.create_task(broker.wait_until_async(never, timeout=60))
        await asyncio.to_thread(checked.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with Stopwatch() as watch:
        asyncio.run(main())
    assert watch.seconds < 30


def test_a_coroutine_function_as_the_predicate_of_a_wait_raises_an_error(broker):
    async def never(_: Broker) -> bool:
        return False

    with pytest.raises(TypeError, match="coroutine function"):
        asyncio.run(broker.wait_until_async(never))
    with pytest.raises(TypeError, match="coroutine function"):
        broker.wait_until(lambda b: never(b))


def test_many_threads_may_call_the_broker_concurrently(broker):
    broker.declare_queue("q")

    def work():
        for _ in range(100):
            broker.publish(b"x", "q")
            assert broker.queue("q").depth

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broker.queue("q").depth == 800


def test_a_method_call_from_another_thread_returns_even_if_the_broker_stops_meanwhile():
    called, stopped, answered = threading.Event(), threading.Event(), threading.Event()

    class Late:
        """A loop that gets a call as late as possible. A loop that has stopped does not execute the call."""

        def call_soon_threadsafe(self, function):
            called.set()
            if not stopped.wait(0.3):
                loop.call_soon_threadsafe(function)

    def look():
        broker.queues()
        answered.set()

    with Broker() as broker:
        loop: Any = broker._runner._loop
        broker._runner._loop = Late()  # type: ignore[assignment]  # as much of a loop as is used
        threading.Thread(target=look, daemon=True).start()
        assert called.wait(20)
        broker._runner._loop = loop
    stopped.set()
    assert answered.wait(20)


def test_D5_a_stop_of_all_producers_also_stops_producers_that_connect_later(broker, connect):
    early = connect(broker).open().channel(confirms=True)
    consumer = connect(broker).open().channel()
    broker.flow(False)
    assert early.expect(commands.Channel.Flow).active is False
    late = connect(broker).open().channel()
    late.send(1, commands.Confirm.Select())
    late.expect(commands.Confirm.SelectOk)
    assert late.expect(commands.Channel.Flow).active is False
    assert [channel.blocked_by for channel in broker.producers()] == [("operator",), ("operator",)]
    broker.flow(True)
    assert early.expect(commands.Channel.Flow).active is True
    assert late.expect(commands.Channel.Flow).active is True
    consumer.call(1, commands.Queue.Declare(queue="q"), commands.Queue.DeclareOk)


def test_D5_one_channel_can_be_stopped_by_name(broker, connect):
    client = connect(broker).open().channel(1, confirms=True).channel(2, confirms=True)
    broker.flow(False, f"{client.name} (2)")
    channel, flow = client.read()
    assert (channel, flow.active) == (2, False)
    with pytest.raises(LookupError, match=r"no channel 'other'.*\(1\)"):
        broker.flow(False, "other")
    broker.flow(True, f"{client.name} (2)")
    channel, flow = client.read()
    assert (channel, flow.active) == (2, True)


def test_nack_publishes_for_one_queue_does_not_nack_messages_to_other_queues(broker, connect):
    for name in ("q", "other"):
        broker.declare_queue(name)
    client = connect(broker).open().channel(confirms=True)
    client.publish()
    assert client.expect(commands.Basic.Ack).delivery_tag == 1
    broker.nack_publishes(queue="q")
    client.publish()
    assert client.expect(commands.Basic.Nack).delivery_tag == 2
    client.publish(routing_key="other")
    assert client.expect(commands.Basic.Ack).delivery_tag == 3
    broker.nack_publishes(False, queue="q")
    client.publish()
    assert client.expect(commands.Basic.Ack).delivery_tag == 4
    broker.nack_publishes(queue="q")
    # Nacking all messages for some time must not change which queues nack messages afterwards.
    broker.nack_publishes(queue="other")
    broker.nack_publishes()
    assert broker._host.queue("other").is_refusing
    broker.nack_publishes(False)
    client.publish()
    assert client.expect(commands.Basic.Ack).delivery_tag == 5
    with pytest.raises(ChannelException, match="no queue 'nowhere'"):
        broker.nack_publishes(queue="nowhere")


@pytest.mark.parametrize("end", ["release_confirms", "release_all", "delete_queue"])
def test_withhold_confirms_for_one_queue_does_not_withhold_confirms_for_other_queues(broker, connect, end):
    for name in ("q", "other"):
        broker.declare_queue(name)
    client = connect(broker).open().channel(confirms=True)
    broker.withhold_confirms("q")
    client.publish()
    client.publish()
    client.publish(routing_key="other")
    ack = client.expect(commands.Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (3, False)
    # The messages can be consumed even if their confirms are withheld.
    assert [broker.get("q").body, broker.queue("q").depth] == [b"x", 1]
    assert broker.producers()[0].unconfirmed == 2
    if end == "release_all":
        broker.release_confirms()
    else:
        getattr(broker, end)("q")
    ack = client.expect(commands.Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (2, True)
    broker.declare_queue("q")
    client.publish()
    assert client.expect(commands.Basic.Ack).delivery_tag == 4


def test_one_connection_can_be_blocked_closed_or_dropped_by_name(broker, connect):
    bad, good = connect(broker).open(), connect(broker).open().channel()
    broker.block("you", connection=bad.name)
    assert bad.expect(commands.Connection.Blocked).reason == "you"
    broker.unblock(connection=bad.name)
    bad.expect(commands.Connection.Unblocked)
    broker.close_connections(connection=bad.name)
    assert bad.expect(commands.Connection.Close).reply_code == 320
    bad = connect(broker).open().channel(1).channel(2)
    broker.close_channels(404, "gone", channel=f"{bad.name} (2)")
    channel, close = bad.read()
    assert (channel, close.reply_code) == (2, 404)
    broker.drop_connections(connection=bad.name)
    assert bad.is_over()
    good.call(1, commands.Queue.Declare(queue="q"), commands.Queue.DeclareOk)
    for steer in (broker.block, broker.unblock, broker.close_connections, broker.drop_connections):
        with pytest.raises(LookupError, match=f"no connection 'other'; the broker has: .*{good.name}"):
            steer(connection="other")
    with pytest.raises(LookupError, match=r"no channel 'other'; the broker has: .*\(1\)"):
        broker.close_channels(channel="other")


def test_closing_with_an_invalid_reply_code_raises_an_error_and_closes_nothing(broker, connect):
    client = connect(broker).open().channel()
    for close in (broker.close_channels, broker.close_connections):
        with pytest.raises(OverflowError):
            close(70_000)
    client.call(1, commands.Queue.Declare(queue="q"), commands.Queue.DeclareOk)


def test_a_broker_that_stops_sends_connection_close_to_its_clients(connect):
    with Broker() as broker:
        client = connect(broker).open()
    assert client.expect(commands.Connection.Close).reply_code == 320
    assert client.is_over()


def test_a_broker_stops_within_seconds_even_if_a_client_reads_nothing(connect):
    with ExitStack() as stack:
        broker = stack.enter_context(Broker())
        broker.declare_queue("q")
        client = connect(broker).open().channel()
        for _ in range(40):
            broker.publish(b"x" * 1_000_000, "q")
        client.send(1, commands.Basic.Consume(queue="q", no_ack=True))
        broker.wait_until(lambda b: b.queue("q").delivered)
        assert broker.queue("q").depth > 20
        with Stopwatch() as watch:
            stack.close()
    assert watch.within(5)


def test_the_trace_function_is_called_for_frames_in_both_directions(connect):
    lines = []
    with Broker(trace=lambda *line: lines.append(line)) as broker:
        client = connect(broker).open().channel()
        assert ("in", client.name, 1, "Channel.Open") in lines
        assert ("out", client.name, 1, "Channel.OpenOk") in lines


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "users": {"a": "b"}}, False),
    ],
)
def test_a_publicly_reachable_broker_with_the_default_password_logs_a_warning(options, warns, caplog):
    with caplog.at_level(logging.WARNING), Broker(**options):
        pass
    assert [record.name for record in caplog.records] == ["qflow_client.broker.core.server"] * warns
    assert all("set users" in message for message in caplog.messages)


def test_F5_the_snapshot_of_a_channel_shows_its_last_publish_targets_and_its_consumed_queues(broker, connect):
    broker.declare_queue("q")
    client = connect(broker).open().channel()
    for number in range(9):
        client.publish(routing_key=f"key {number}")
        client.publish(routing_key="q")
    client.call(1, commands.Basic.Consume(queue="q"), commands.Basic.ConsumeOk)
    broker.wait_until(lambda b: b.channels()[0].published == 18)
    (channel,) = broker.channels()
    # The snapshot contains only the last targets.
    assert [target.routing_key for target in channel.targets] == [*(f"key {number}" for number in range(2, 9)), "q"]
    assert {target.exchange for target in channel.targets} == {""}
    assert channel.consumes_from == ("q",)
    assert channel.to_json()["targets"][-1] == {"exchange": "", "routingKey": "q"}


def test_E9_a_policy_for_many_queues_is_applied_in_slices_between_other_tasks_of_the_event_loop(broker):
    for number in range(50):
        broker.declare_queue(f"q{number}")
    broker._runner.SLICE = 0.0
    marked = []

    def look():
        queues = broker._host.queues.values()
        marked.append(sum(bool(queue.flows.families) for queue in queues))
        if marked[-1] < len(queues):
            loop.call_soon(look)

    loop = broker._runner._loop
    loop.call_soon_threadsafe(look)
    broker.set_policy(Policy("p", PolicyDefinition(flow_stop_count=3), pattern="^q"))
    assert broker.queue("q49").thresholds.flow_stop_count == 3
    broker.wait_until(lambda _: marked[-1] == 50)
    assert len(marked) >= 50
    with pytest.raises(LookupError, match="no policy 'x'"):
        broker.delete_policy("x")


def test_wait_until_can_be_called_in_a_callback_of_an_event_loop_without_the_broker() -> None:
    """Playwright's synchronous API runs the program in a callback of its event loop."""
    loop = asyncio.new_event_loop()
    waited: list[bool] = []

    def call() -> None:
        broker.wait_until(lambda _: True)
        waited.append(True)
        loop.stop()

    with Broker() as broker:
        loop.call_soon(call)
        loop.run_forever()
    loop.close()
    assert waited == [True]


class Interrupted(Broker):
    """A broker whose start interrupts the waiting thread, at the beginning or at the end of the start."""

    at_end = False

    async def _start(self) -> None:
        if self.at_end:
            await super()._start()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not self.at_end:
            await super()._start()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("at_end", [False, True])
def test_an_interrupt_while_a_broker_starts_also_ends_the_thread_of_the_broker(
    monkeypatch: pytest.MonkeyPatch, *, at_end: bool
) -> None:
    monkeypatch.setattr(Interrupted, "at_end", at_end)
    broker, before = Interrupted(), set(threading.enumerate())
    # A shell starts background jobs with SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            broker.__enter__()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", broker.port))


def test_a_forked_child_does_not_keep_the_sockets_of_a_broker_open():
    with ExitStack() as stack:
        broker = stack.enter_context(Broker())
        address = ("127.0.0.1", broker.port)
        with socket.create_connection(address, timeout=PATIENCE) as client:
            broker.wait_until(lambda b: b.connection_count)
            with waiting_child():
                broker.drop_connections()
                assert client.recv(1) == b""
                stack.close()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(address, timeout=PATIENCE)


def test_the_methods_of_a_broker_raise_an_error_in_a_forked_child():
    def check() -> None:
        calls = (
            lambda: broker.queues(),
            lambda: broker.wait_until(lambda b: b.channels()),
            lambda: broker.load_definitions(definitions),
            lambda: broker.__exit__(None, None, None),
        )
        for call in calls:
            with pytest.raises(RuntimeError, match=r"the broker runs in process .* connect to its url"):
                call()

    with Broker() as broker:
        definitions = broker.definitions()
        in_child(check)


def test_a_wait_in_a_forked_child_raises_an_error_even_if_a_thread_of_the_parent_had_its_lock() -> None:
    def check() -> None:
        with pytest.raises(RuntimeError, match="the broker runs in process"):
            broker.wait_until(lambda _: True)

    is_held, release = threading.Event(), threading.Event()

    def hold() -> None:
        # The broker does this for a moment after each change.
        with broker._runner._changed:
            is_held.set()
            release.wait()

    with Broker() as broker:
        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        try:
            in_child(check)
        finally:
            release.set()
            holder.join()
