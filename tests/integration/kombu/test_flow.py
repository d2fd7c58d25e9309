"""Publishing through kombu under flow control."""

from __future__ import annotations

import gc
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import amqp
import pytest
from amqp.exceptions import MessageNacked
from kombu import Connection, Consumer, Producer, Queue
from kombu.asynchronous import Hub
from kombu.exceptions import OperationalError

from qflow_client import (
    ConfirmTimeout,
    FlowControlTimeout,
    FlowEventKind,
    HoldKind,
    ProducerFlowed,
    SettingsError,
    flow_manager,
)
from qflow_client.broker import Broker
from qflow_client.kombu.connection import _at_exit
from qflow_client.kombu.transport import kept
from qflow_client.testing.proxy import Direction, FaultProxy
from tests.certificates import certify, server_context
from tests.integration.producer.tools import PATIENCE, Stopwatch, bodies, ends_within, eventually, logged, start, takes

# Options for connections whose socket accepts no bytes for a long time. Without them, Linux would end the connection.
LASTING: dict[str, Any] = {}
if hasattr(socket, "TCP_USER_TIMEOUT"):
    LASTING["socket_settings"] = {socket.TCP_USER_TIMEOUT: int(3000 * PATIENCE)}


def held(channel: Any, *kinds: str) -> None:
    """Wait until a channel has holds of exactly these kinds."""
    eventually(lambda: sorted(str(hold.kind) for hold in channel.flow_state.holds) == sorted(kinds), f"{kinds}")


def stop(channel: Any, broker: Broker) -> None:
    """Let the broker stop a channel, and wait until the channel is held."""
    (name,) = (each.name for each in broker.channels() if each.number == channel.channel_id)
    broker.flow(False, name)
    held(channel, HoldKind.CHANNEL_FLOW)


@contextmanager
def waiting_at_most(channel: Any, seconds: float) -> Iterator[None]:
    """Set the maximum wait of a channel and its connection in the block. Other calls must succeed after a long wait."""
    connection, flow = channel.connection, channel._flow
    before = connection.flow_settings
    connection.flow_settings = flow.settings = before.replace(max_producer_flow_control_wait=seconds)
    try:
        yield
    finally:
        connection.flow_settings = flow.settings = before


def publish(channel: Any, body: bytes = b"body", **keywords: Any) -> None:
    channel.basic_publish(channel.prepare_message(body), exchange="", routing_key="q", **keywords)


def test_J7_a_stop_is_answered_with_flow_ok_and_no_message_is_published_before_the_stop_ends(broker, connect, wire):
    channel = connect(max_producer_flow_control_wait=PATIENCE).default_channel
    stop(channel, broker)
    wire.wait_for("in", "Channel.FlowOk")
    stopped = wire.where("in", "Channel.FlowOk")[0]
    assert channel.active is False
    job = start(publish, channel, b"after")
    eventually(lambda: channel._flow.protocol.controller.waiting == 1)
    assert wire.came_between(stopped) == []
    broker.flow(True)
    job.result()
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)
    assert not channel.flow_state.flowed
    assert channel.active is True


@pytest.mark.parametrize("confirms", [False, True, "pipelined"])
def test_A4_a_publish_on_a_stopped_channel_raises_at_its_deadline_and_never_sends_the_message(
    broker, connect, confirms
):
    producer = Producer(connect(confirm_publish=confirms))
    stop(producer.channel, broker)
    with waiting_at_most(producer.channel, 0.3), takes(0.3), pytest.raises(OperationalError) as caught:
        # kombu does not try again.
        producer.publish("never", routing_key="q", retry=True, retry_policy={"max_retries": 3})
    assert "channel_flow" in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, FlowControlTimeout)
    assert cause.message == b"never"
    assert [hold.kind for hold in cause.holds] == [HoldKind.CHANNEL_FLOW]
    broker.flow(True)
    assert producer.channel.wait_unflowed(PATIENCE)
    producer.publish("later", routing_key="q")
    broker.wait_until(lambda broker: broker.queue("q").depth)
    assert bodies(broker) == [b"later"]


def test_A4_the_argument_timeout_of_a_publish_sets_its_deadline(broker, connect):
    channel = connect(max_producer_flow_control_wait=PATIENCE).default_channel
    stop(channel, broker)
    with takes(0.3), pytest.raises(OperationalError):
        publish(channel, timeout=0.3)


def test_D1_a_publish_on_a_stopped_channel_raises_immediately_if_when_flowed_is_raise(broker, connect):
    channel = connect(when_flowed="raise").default_channel
    stop(channel, broker)
    with pytest.raises(OperationalError) as caught:
        publish(channel)
    assert type(caught.value.__cause__) is ProducerFlowed


def test_a_publish_without_a_confirm_raises_ConfirmTimeout_and_kombu_does_not_resend_the_message(broker, connect):
    producer = Producer(connect(confirm_publish=True))
    broker.withhold_confirms()
    with waiting_at_most(producer.channel, 0.3), takes(0.3), pytest.raises(OperationalError) as caught:
        producer.publish("once", routing_key="q", retry=True)
    assert "no answer from the broker" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConfirmTimeout)
    with takes(0.6), pytest.raises(OperationalError):
        producer.publish("twice", routing_key="q", confirm_timeout=0.6)
    broker.release_confirms()
    producer.publish("thrice", routing_key="q")
    assert bodies(broker) == [b"once", b"twice", b"thrice"]


def test_a_nack_raises_MessageNacked_as_in_py_amqp(broker, connect):
    channel = connect(confirm_publish=True).default_channel
    broker.nack_publishes()
    with pytest.raises(MessageNacked):
        publish(channel)
    broker.nack_publishes(False)
    publish(channel)


def test_unconfirmed_pipelined_messages_never_exceed_the_window(broker, connect):
    channel = connect(confirm_publish="pipelined", capacity=5).default_channel
    publish(channel)
    channel.wait_for_confirms(PATIENCE)
    broker.withhold_confirms()
    for _ in range(5):
        publish(channel)
    with waiting_at_most(channel, 0.3), pytest.raises(OperationalError, match="capacity") as caught:
        publish(channel)
    assert isinstance(caught.value.__cause__, FlowControlTimeout)
    with pytest.raises(OperationalError, match="5 messages are not confirmed") as caught:
        channel.wait_for_confirms(0.1)
    assert isinstance(caught.value.__cause__, ConfirmTimeout)
    broker.release_confirms()
    channel.wait_for_confirms(PATIENCE)
    publish(channel)


def test_the_publish_after_a_nacked_pipelined_message_raises_MessageNacked_and_sends_no_message(broker, connect):
    producer = Producer(connect(confirm_publish="pipelined"))
    producer.publish("taken", routing_key="q")
    producer.channel.wait_for_confirms()
    broker.nack_publishes()
    producer.publish("refused", routing_key="q")
    eventually(lambda: producer.channel.flow_state and producer.channel._flow.protocol.reports.failures)
    broker.nack_publishes(False)
    with pytest.raises(
        OperationalError, match="the broker did not accept 1 messages: they were published before;"
    ) as caught:
        producer.publish("not sent", routing_key="q", retry=True)
    assert isinstance(caught.value.__cause__, MessageNacked)
    producer.publish("sent", routing_key="q")
    producer.channel.wait_for_confirms()
    assert bodies(broker) == [b"taken", b"sent"]


def test_closing_the_connection_waits_for_the_confirms_of_pipelined_messages(broker, connect):
    connection = connect(confirm_publish="pipelined", max_producer_flow_control_wait=PATIENCE)
    publish(connection.default_channel)
    connection.default_channel.wait_for_confirms()
    broker.withhold_confirms()
    publish(connection.default_channel)
    job = start(connection.release)
    job.join(0.2)
    assert job.is_alive()
    broker.release_confirms()
    job.result()


def test_closing_the_connection_after_a_publish_has_timed_out_does_not_wait_for_confirms_again(broker, connect):
    """After an error the pools of kombu close the connection, and this must not wait again."""
    connection = connect(confirm_publish="pipelined", max_producer_flow_control_wait=3.0, capacity=1)
    publish(connection.default_channel)
    connection.default_channel.wait_for_confirms(PATIENCE)
    broker.withhold_confirms()
    publish(connection.default_channel)
    with ends_within(6.0):
        with pytest.raises(OperationalError, match="capacity"):
            publish(connection.default_channel)
        connection.release()


def test_connection_blocked_holds_all_channels_until_connection_unblocked(broker, connect):
    connection = connect()
    one, two = connection.channel(), connection.channel()
    broker.block("no memory")
    held(one, HoldKind.CONNECTION_BLOCKED)
    for channel in one, two:
        with waiting_at_most(channel, 0.2), pytest.raises(OperationalError, match="no memory"):
            publish(channel)
    # Other methods that the broker would not read also raise at their deadline.
    for method in connection.channel, lambda: one.queue_declare("other"), lambda: one.basic_get("q"):
        with waiting_at_most(one, 0.2), takes(0.2), pytest.raises(OperationalError) as caught:
            method()
        assert "connection_blocked" in str(caught.value)
        assert isinstance(caught.value.__cause__, FlowControlTimeout)
    broker.unblock()
    for channel in one, two:
        assert channel.wait_unflowed(PATIENCE)
    assert one.queue_declare("other").queue == "other"


def test_a_channel_closed_while_blocked_is_closed_in_the_broker_when_the_connection_is_unblocked(broker, connect):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    one, two = connection.channel(), connection.channel()
    delivered: list[Any] = []
    broker.publish(b"unacked", "q")
    one.basic_consume("q", callback=delivered.append)
    broker.wait_until(lambda broker: broker.queue("q").unacked == 1)
    number = one.channel_id
    broker.block("no memory")
    held(two, HoldKind.CONNECTION_BLOCKED)
    one.close()
    broker.unblock()
    publish(two)
    broker.wait_until(lambda broker: [each.number for each in broker.channels()] == [two.channel_id])
    broker.wait_until(lambda broker: broker.queue("q").ready == 2)
    # The closed channel drops its delivery, and its number can be used again.
    while one.channel_id is not None:
        connection.drain_events(timeout=PATIENCE)
    assert delivered == []
    assert connection.channel().channel_id == number


def test_a_channel_that_both_sides_close_while_the_connection_is_blocked_does_not_end_the_connection(broker, connect):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    one, two = connection.channel(), connection.channel()
    (name,) = (each.name for each in broker.channels() if each.number == one.channel_id)
    broker.block("no memory")
    held(two, HoldKind.CONNECTION_BLOCKED)
    one.close()
    broker.close_channels(406, "too late", channel=name)
    while one.channel_id is not None:
        connection.drain_events(timeout=PATIENCE)
    broker.unblock()
    publish(two)
    assert two.queue_declare("q", passive=True).message_count == 1


def test_a_connection_that_is_released_while_blocked_stays_open_and_is_reused(broker, connect):
    """The pools of kombu close a connection after any error."""
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    channel = connection.default_channel
    publish(channel)
    broker.block("no memory")
    held(channel, HoldKind.CONNECTION_BLOCKED)
    (name,) = (each.name for each in broker.connections())
    with Stopwatch() as watch:
        connection.release()
    assert watch.seconds < PATIENCE, "nobody waits for a broker that does not read"
    again = connect(max_producer_flow_control_wait=PATIENCE)
    settings = again.connection.flow_settings
    again.connection.flow_settings = settings.replace(max_producer_flow_control_wait=0.5)
    assert [each.name for each in broker.connections()] == [name]
    with pytest.raises(OperationalError, match="connection_blocked"):
        publish(again.default_channel)
    again.connection.flow_settings = settings
    broker.unblock()
    eventually(lambda: not again.connection.transport.look() or not again.connection.is_blocked)
    publish(again.default_channel)
    broker.wait_until(lambda broker: broker.queue("q").depth == 2)
    # The channel that the program has released is closed.
    assert len(broker.channels()) == 1
    again.release()
    broker.wait_until(lambda broker: not broker.connections())


def test_a_connection_kept_for_reuse_is_replaced_if_the_broker_has_closed_it(make_broker, connect):
    # No thread reads on a kept connection, so the broker cuts the connection after this timeout.
    broker = make_broker(close_timeout=0.2)
    connection = connect(broker.url)
    broker.block("no memory")
    held(connection.default_channel, HoldKind.CONNECTION_BLOCKED)
    connection.release()
    broker.close_connections()
    broker.wait_until(lambda broker: not broker.connections())
    broker.unblock()
    again = connect(broker.url)
    publish(again.default_channel)
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)


def test_a_connection_with_a_consumer_is_closed_if_it_is_released_while_blocked(broker, connect):
    connection = connect()
    broker.publish(b"one", "q")
    consumer = Consumer(connection, [Queue("q", durable=False)], on_message=lambda message: None)
    consumer.consume()
    broker.block("no memory")
    held(connection.default_channel, HoldKind.CONNECTION_BLOCKED)
    connection.release()
    broker.wait_until(lambda broker: not broker.connections())
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)


def test_while_the_socket_accepts_no_bytes_new_messages_are_held_and_time_out_unsent(broker, connect, proxy):
    channel = connect(proxy.url(broker), **LASTING).default_channel
    publish(channel)
    proxy.stop_reading()
    big = bytes(1 << 24)
    with waiting_at_most(channel, 0.5):
        with takes(0.5), pytest.raises(OperationalError, match="the message may still arrive") as caught:
            publish(channel, big)
        assert isinstance(caught.value.__cause__, ConfirmTimeout)
        with takes(0.5), pytest.raises(OperationalError, match="the socket takes no more bytes") as caught:
            publish(channel, b"never")
        assert isinstance(caught.value.__cause__, FlowControlTimeout)
    proxy.go_on_reading()
    assert channel.wait_unflowed(PATIENCE)
    publish(channel, b"last")
    broker.wait_until(lambda broker: broker.queue("q").depth == 3)
    assert bodies(broker) == [b"body", big, b"last"]


@pytest.fixture
def faulty(broker: Broker, stack: ExitStack) -> FaultProxy:
    return stack.enter_context(FaultProxy(broker.url))


def half_written(channel: Any) -> bool:
    outbound = channel._flow.protocol.parts.unconfirmed.outbound
    return bool(outbound.begun > outbound.finished)


@pytest.mark.parametrize(
    ("confirms", "healed"),
    [
        (False, "after it has waited"),
        (True, "while it waits"),
        (True, "after it has waited"),
        ("pipelined", "while it waits"),
    ],
)
def test_J8_a_half_written_message_is_completed_when_the_socket_accepts_bytes_again(
    broker, connect, faulty, confirms, healed, caplog
):
    """The waiting publish does the I/O of the connection first, and then the call that drains events."""
    in_time = healed == "while it waits"
    connection = connect(faulty.url, max_producer_flow_control_wait=PATIENCE, confirm_publish=confirms, **LASTING)
    channel = connection.default_channel
    sent = [b"first", bytes(1 << 24)]
    heard: list[bytes] = []

    def hear(message: Any) -> None:
        heard.append(bytes(message.body))
        message.ack()

    def consume() -> None:
        with Consumer(connection, [Queue("q", durable=False)], on_message=hear):
            while len(heard) < len(sent):
                connection.drain_events(timeout=PATIENCE)
        connection.release()

    publish(channel, sent[0])
    faulty.stall(Direction.TO_BROKER)
    with waiting_at_most(channel, PATIENCE if in_time else 0.3):
        job = start(publish, channel, sent[1])
        eventually(lambda: half_written(channel))
        if in_time:
            faulty.heal()
            job.result()
        else:
            error = job.wait()
            assert isinstance(error, OperationalError)
            assert isinstance(error.__cause__, ConfirmTimeout)
    faulty.heal()
    start(consume).result()
    assert heard == sent
    assert logged(caplog) == []
    broker.wait_until(lambda broker: broker.queue("q").depth == 0)


def test_confirms_enabled_after_a_half_written_message_count_from_the_next_message(broker, connect, faulty):
    channel = connect(faulty.url, **LASTING).default_channel
    publish(channel)
    faulty.stall(Direction.TO_BROKER)
    with waiting_at_most(channel, 0.3), pytest.raises(OperationalError, match="the message may still arrive"):
        publish(channel, bytes(1 << 24))
    assert half_written(channel)
    # The rest of the message is written first, and the broker reads it.
    faulty.heal()
    channel.basic_publish_confirm(channel.prepare_message(b"last"), "", "q")
    assert [len(body) for body in bodies(broker)] == [4, 1 << 24, 4]
    assert channel._flow.protocol.unsettled == 0


def test_closing_a_connection_whose_socket_accepts_no_bytes_ends_at_the_deadlines(broker, connect, proxy):
    connection = connect(proxy.url(broker), max_producer_flow_control_wait=0.3, **LASTING)
    channel = connection.default_channel
    proxy.stop_reading()
    with pytest.raises(OperationalError):
        publish(channel, bytes(1 << 24))
    with Stopwatch() as watch:
        connection.release()
    assert watch.kept(0.6), "the channel's good-bye and that of the connection"


@pytest.mark.parametrize("has_channel", [True, False])
def test_closing_a_connection_to_a_silent_broker_ends_at_the_deadline(connect, faulty, has_channel):
    connection = connect(faulty.url, max_producer_flow_control_wait=0.3)
    if has_channel:
        publish(connection.default_channel)
    faulty.stall()
    with takes(0.3):
        connection.release()


def test_waits_for_answers_of_a_silent_broker_end_with_an_error(connect, faulty, monkeypatch):
    monkeypatch.setattr("qflow_client.kombu.connection._MAX_SILENCE", 0.3)
    options = {"max_producer_flow_control_wait": 0.1, "confirm_publish": True}
    opened = [connect(faulty.url, **options) for _ in range(4)]
    channels = [connection.default_channel for connection in opened[:3]]
    faulty.stall()

    def declare_in_loop() -> Any:
        hub = Hub()
        opened[2].register_with_event_loop(hub)
        with pytest.raises(opened[2].recoverable_connection_errors) as caught:
            channels[2].queue_declare("q", passive=True)
        hub.close()
        return caught.value

    for method in (
        lambda: channels[0].queue_declare("q", passive=True),
        lambda: publish(channels[1]),
        lambda: opened[3].default_channel,
    ):
        with takes(0.3), pytest.raises(OperationalError, match=r"not answered within 0\.\d+ s"):
            method()
    # A Celery worker connects again after a recoverable error.
    assert isinstance(start(declare_in_loop).result(), TimeoutError)


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_the_wait_for_a_silent_broker_ends_in_time_and_does_not_use_the_processor(connect, faulty, monkeypatch, limit):
    monkeypatch.setattr("qflow_client.kombu.connection._MAX_SILENCE", 1.6)
    connection = connect(faulty.url, confirm_publish=True, max_producer_flow_control_wait=limit)
    channel = connection.default_channel
    faulty.stall()
    began = time.thread_time()
    # A second wait of 1.5 s would end after 3 s.
    with takes(1.6), pytest.raises(OperationalError):
        channel.queue_declare("q", passive=True)
    assert time.thread_time() - began < 0.1


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("withhold_confirms", "1 messages are not confirmed"),
        ("nack_publishes", "the broker did not accept 1 messages"),
        ("close_connections", "closed by the operator"),
    ],
)
def test_at_the_end_of_the_process_lost_messages_with_pipelined_confirms_are_logged(broker, trouble, text):
    program = """if True:
        import sys, qflow_client.kombu, kombu
        options = {"confirm_publish": "pipelined", "max_producer_flow_control_wait": 20}
        producer = kombu.Producer(kombu.Connection(sys.argv[1], transport_options=options))
        producer.publish("body", routing_key="q")
        input()
    """
    if trouble == "nack_publishes":
        broker.nack_publishes()
    else:
        broker.withhold_confirms()
    command = [sys.executable, "-c", program, broker.url.replace("amqp", "qflow")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    broker.wait_until(lambda broker: any(channel.published for channel in broker.channels()))
    if trouble == "close_connections":
        broker.close_connections()
    _, errors = process.communicate("\n", timeout=PATIENCE)
    assert "messages may be lost at the end of the process" in errors
    assert text in errors


def test_at_the_end_of_the_process_a_connection_that_another_thread_uses_is_not_touched(broker, connect, caplog):
    """Two waits for one socket would raise an error. A daemon thread may still publish when the process ends."""
    channel = connect(max_producer_flow_control_wait=PATIENCE, confirm_publish="pipelined", capacity=1).default_channel
    broker.withhold_confirms()
    publish(channel)
    waiting = start(publish, channel)
    eventually(lambda: channel._flow.protocol.controller.waiting == 1)
    _at_exit()
    text = "messages may be lost at the end of the process: another thread uses the connection, and 1 messages are not"
    assert any(text in line for line in logged(caplog))
    broker.release_confirms()
    waiting.result()


def test_the_flow_manager_stops_and_starts_a_channel_of_kombu(broker, connect):
    channel = connect(max_producer_flow_control_wait=PATIENCE).default_channel
    events: list[Any] = []
    channel.on_flow(events.append)
    flow_manager.stop_all("maintenance")
    try:
        job = start(publish, channel)
        eventually(lambda: FlowEventKind.FLOWED in [event.kind for event in events])
    finally:
        flow_manager.start_all()
    job.result()
    assert [event.kind for event in events] == [FlowEventKind.FLOWED, FlowEventKind.UNFLOWED]
    assert events[0].hold.detail == "maintenance"


def test_heartbeats_continue_while_a_publish_waits(broker, connect, wire):
    connection = connect(heartbeat=3, max_producer_flow_control_wait=PATIENCE)
    channel = connection.default_channel
    stop(channel, broker)
    job = start(publish, channel)
    wire.wait_for("in", "Heartbeat", 2)
    assert job.is_alive()
    broker.flow(True)
    job.result()


def test_a_lost_connection_ends_a_waiting_publish_with_a_recoverable_error_of_kombu(broker, connect):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    channel = connection.default_channel
    stop(channel, broker)
    job = start(publish, channel)
    eventually(lambda: channel._flow.protocol.controller.waiting == 1)
    broker.close_connections()
    assert isinstance(job.wait(), connection.recoverable_connection_errors)


def test_after_a_lost_connection_a_retry_of_kombu_reconnects_and_publishes(make_broker, connect):
    # No thread reads on that connection, so the broker cuts the connection after this timeout.
    broker = make_broker(close_timeout=0.2)
    producer = Producer(connect(broker.url, confirm_publish=True))
    producer.publish("one", routing_key="q")
    broker.close_connections()
    broker.wait_until(lambda broker: not broker.connections())
    producer.publish("two", routing_key="q", retry=True, retry_policy={"interval_start": 0.01})
    assert bodies(broker) == [b"one", b"two"]


def test_kombu_tries_the_next_host_of_a_list_after_a_server_with_another_protocol(broker, stack):
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            # With unread bytes, the close would be a reset, which can overtake the answer.
            client.recv(8)
            client.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")

    job = start(serve)
    hosts = [f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}//", broker.url]
    connection = Connection([host.replace("amqp", "qflow") for host in hosts], connect_timeout=PATIENCE)
    stack.callback(connection.release)
    connection.ensure_connection(max_retries=2, interval_start=0.01)
    assert connection.connected
    assert job.wait() is None


def test_a_channel_that_is_reopened_after_the_broker_closed_it_obeys_the_brokers_flow(broker, connect):
    channel = connect(confirm_publish=True).default_channel
    publish(channel)
    with pytest.raises(amqp.NotFound):
        channel.basic_publish(channel.prepare_message(b"lost"), exchange="nowhere", routing_key="q")
    publish(channel)
    stop(channel, broker)
    broker.flow(True)
    assert channel.wait_unflowed(PATIENCE)
    assert len(bodies(broker)) == 2


def test_deliveries_that_arrive_while_a_publish_waits_are_kept_for_later(broker, connect):
    """kombu calls callbacks only when the program drains events, and not during a publish."""
    connection = connect(confirm_publish=True)
    channel = connection.default_channel
    heard: list[Any] = []
    consumer = Consumer(channel, [Queue("q", durable=False)], on_message=lambda message: heard.append(message.body))
    consumer.consume()
    publish(channel, b"one")
    stop(channel, broker)
    with pytest.raises(OperationalError):
        publish(channel, b"two", timeout=0.3)
    assert heard == []
    connection.drain_events(timeout=PATIENCE)
    assert heard == [b"one"]
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)


def test_deliveries_read_by_a_publish_are_handled_by_the_event_loop(broker, connect):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    heard: list[Any] = []
    consumer = Consumer(connection, [Queue("q", durable=False)], on_message=lambda message: heard.append(message.body))
    consumer.consume()
    hub = Hub()
    job = start(_loop, connection, hub, broker, heard)
    job.result()
    assert heard == [b"one"]


def _loop(connection: Connection, hub: Hub, broker: Broker, heard: list[Any]) -> None:
    connection.register_with_event_loop(hub)
    channel = connection.default_channel
    broker.publish(b"one", "q")
    wire = channel.connection.transport
    # The event loop's poll does not see bytes that have already been read.
    eventually(lambda: wire.look() and wire.has_frames)
    publish(channel, b"two")
    end = time.monotonic() + PATIENCE
    while not heard:
        assert time.monotonic() < end
        hub.run_once()
    hub.close()
    del heard[1:]


def test_a_publish_in_the_event_loop_of_kombu_raises_and_does_not_wait(broker, connect):
    """It waits neither for holds nor for an answer of a broker that blocks the connection. Tasks do wait."""
    connection = connect(max_producer_flow_control_wait=PATIENCE, confirm_publish=True)

    def run() -> list[Any]:
        hub = Hub()
        connection.register_with_event_loop(hub)
        channel = connection.default_channel
        publish(channel)
        broker.block("no memory")
        held(channel, HoldKind.CONNECTION_BLOCKED)
        causes: list[Any] = []
        for method in (lambda: publish(channel)), (lambda: channel.queue_declare("other")):
            with pytest.raises(OperationalError) as caught:
                method()
            causes.append(type(caught.value.__cause__))
        hub.close()
        return causes

    assert start(run).result() == [ProducerFlowed, FlowControlTimeout]


@pytest.mark.parametrize("is_blocked_before", [False, True])
def test_remote_control_in_the_event_loop_of_a_blocked_connection_is_logged_and_raises_nothing(
    broker, connect, caplog, is_blocked_before
):
    """A Celery worker asks its neighbors when it starts. If that raised an error, no worker could start in an alarm."""
    broker.declare_exchange("celery.pidbox", "fanout")
    connection = connect(max_producer_flow_control_wait=PATIENCE, confirm_publish=True)

    def run() -> None:
        hub = Hub()
        connection.register_with_event_loop(hub)
        channel = connection.default_channel
        if is_blocked_before:
            broker.block("no memory")
            held(channel, HoldKind.CONNECTION_BLOCKED)
            channel.basic_publish(channel.prepare_message(b"hello"), exchange="celery.pidbox", routing_key="")
        else:
            channel.confirm_select()
            broker.withhold_confirms()
            alarm = start(lambda: broker.wait_until(lambda it: it.queue("q").depth) or broker.block("no memory"))
            channel.basic_publish(channel.prepare_message(b"hello"), exchange="celery.pidbox", routing_key="")
            alarm.result()
        hub.close()

    broker.bind("celery.pidbox", "q", "")
    start(run).result()
    assert any("a message of remote control to 'celery.pidbox' may be lost" in line for line in logged(caplog))


def test_remote_control_in_an_event_loop_does_not_hide_that_earlier_messages_are_lost(broker, connect):
    broker.declare_exchange("celery.pidbox", "fanout")
    connection = connect(max_producer_flow_control_wait=PATIENCE, confirm_publish="pipelined")

    def run() -> None:
        hub = Hub()
        connection.register_with_event_loop(hub)
        channel = connection.default_channel
        broker.nack_publishes()
        publish(channel, b"a task")
        eventually(lambda: channel.flow_state and channel._flow.protocol.reports.failures)
        with pytest.raises(OperationalError, match="did not accept 1 messages"):
            channel.basic_publish(channel.prepare_message(b"hello"), exchange="celery.pidbox", routing_key="")
        hub.close()

    start(run).result()


def test_an_event_loop_gets_a_new_connection_and_no_kept_blocked_one(broker, connect):
    """A Celery worker that connects again during an alarm could not consume on a blocked connection."""
    options = {"max_producer_flow_control_wait": PATIENCE}
    blocked, worker = connect(**options), connect(**options)
    for connection in blocked, worker:
        publish(connection.default_channel)
    broker.block("no memory")
    for connection in blocked, worker:
        held(connection.default_channel, HoldKind.CONNECTION_BLOCKED)
    before = [blocked.connection, worker.connection]
    blocked.release()

    def run() -> Any:
        hub = Hub()
        worker.register_with_event_loop(hub)
        hub.close()
        worker.release()
        return connect(**options).connection

    assert start(run).result() not in before
    # The event loop has closed its own connection, and other threads get the kept one.
    broker.wait_until(lambda broker: len(broker.connections()) == 2)
    assert connect(**options).connection is before[0]


@pytest.mark.parametrize("confirms", [False, True])
def test_clients_can_connect_with_tls(make_broker, certificate, confirms):
    broker = make_broker(ssl_context=server_context(*certificate))
    options = {"confirm_publish": confirms, "max_producer_flow_control_wait": PATIENCE}
    tls = {"ca_certs": str(certificate[0]), "server_hostname": "127.0.0.1", "cert_reqs": ssl.CERT_REQUIRED}
    with Connection(broker.url.replace("amqps", "qflows"), ssl=tls, transport_options=options) as connection:
        channel = connection.default_channel
        for number in range(100):
            publish(channel, b"%d" % number)
        publish(channel, bytes(1 << 20))
        heard: list[bytes] = []

        def hear(message: Any) -> None:
            heard.append(bytes(message.body))
            message.ack()

        with Consumer(channel, [Queue("q", durable=False)], on_message=hear):
            while len(heard) < 101:
                connection.drain_events(timeout=PATIENCE)
        assert heard[:-1] == [b"%d" % number for number in range(100)]
        stop(channel, broker)
        with pytest.raises(OperationalError, match="channel_flow"):
            publish(channel, timeout=0.3)


@pytest.fixture(scope="module")
def localhost(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ssl.SSLContext]:
    """A certificate for the name localhost, but not for 127.0.0.1, and a broker's TLS context with it."""
    certificate, key = certify(tmp_path_factory.mktemp("localhost"), subject="DNS:localhost")
    return str(certificate), server_context(certificate, key)


def tls_connection(broker: Broker, host: str, options: Any) -> Connection:
    return Connection(f"qflows://guest:guest@{host}:{broker.port}//", ssl=options)


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("localhost", lambda ca: {"ca_certs": ca}),
        ("localhost", lambda ca: {"context": {"cafile": ca}}),
        ("localhost", lambda ca: {"cert_reqs": ssl.CERT_NONE}),
        ("127.0.0.1", lambda ca: {"ca_certs": ca, "server_hostname": "localhost"}),
        ("127.0.0.1", lambda ca: {"context": {"cafile": ca}, "server_hostname": "localhost"}),
        ("127.0.0.1", lambda ca: {"context": {"cafile": ca, "check_hostname": False}}),
        ("127.0.0.1", lambda ca: {"cert_reqs": ssl.CERT_NONE}),
    ],
    ids=["name", "name-context", "name-unverified", "given", "given-context", "unchecked", "unverified"],
)
def test_E11_tls_connects_if_the_certificate_names_the_host_or_verification_is_off(stack, localhost, host, options):
    broker = stack.enter_context(Broker(ssl_context=localhost[1]))
    with tls_connection(broker, host, options(localhost[0])) as connection:
        # After its first connect, kombu no longer has the name localhost.
        for _ in range(2):
            connection.connect()
            assert connection.connected
            connection.close()


@pytest.mark.parametrize(
    "options",
    [
        lambda ca: {"ca_certs": ca},
        lambda ca: {"ca_certs": ca, "cert_reqs": ssl.CERT_REQUIRED},
        lambda ca: {"ca_certs": ca, "server_hostname": None},
        lambda ca: {"context": {"cafile": ca}},
        lambda ca: {"context": {"cafile": ca, "check_hostname": True}},
    ],
    ids=["default", "required", "none", "context", "context-checked"],
)
def test_E11_tls_refuses_a_certificate_that_does_not_name_the_host(stack, localhost, options):
    broker = stack.enter_context(Broker(ssl_context=localhost[1]))
    connection = tls_connection(broker, "127.0.0.1", options(localhost[0]))
    stack.callback(connection.release)
    # Do not use kombu's `connect`, because it tries again after seconds.
    with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.1"):
        connection.transport.establish_connection()


def test_a_connection_that_is_dropped_without_a_close_leaves_no_open_pipe(broker):
    connection = Connection(broker.url.replace("amqp", "qflow"), transport_options={"confirm_publish": True})
    publish(connection.default_channel)
    pipe = connection.connection.transport._poll._pipe
    inodes = [os.fstat(fd).st_ino for fd in pipe]
    objects = [connection]
    del connection

    def drop() -> None:
        objects.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed"):
        drop()
    for fd, inode in zip(pipe, inodes, strict=True):
        # Another file may have the number by now.
        with suppress(OSError):
            assert os.fstat(fd).st_ino != inode


def test_settings_of_flow_control_can_be_transport_options(broker, connect, monkeypatch):
    monkeypatch.setenv("QFLOW_CAPACITY", "7")
    connection = connect(name="mine", rate=1000.0)
    settings = connection.connection.flow_settings
    assert (settings.name, settings.rate, settings.capacity) == ("mine", 1000.0, 7)
    with pytest.raises(TypeError, match="confirms is not a setting of a connection of kombu: set confirm_publish"):
        connect(confirms=True)
    with pytest.raises(SettingsError, match="capacity=0"):
        connect(capacity=0)
    with pytest.raises(SettingsError, match="confirm_publish='each'"):
        connect(confirm_publish="each")


def test_F2_publishing_is_not_faster_than_the_configured_rate(broker, connect):
    channel = connect(rate=50.0, rate_burst=1, max_producer_flow_control_wait=PATIENCE).default_channel
    began = time.monotonic()
    for _ in range(11):
        publish(channel)
    assert time.monotonic() - began >= 0.2


def test_a_publish_without_a_hold_logs_nothing(broker, connect, caplog):
    with caplog.at_level(logging.INFO, "qflow_client"):
        connection = connect(confirm_publish=True)
        publish(connection.default_channel)
        connection.release()
    assert logged(caplog) == []


def test_connections_kept_for_reuse_are_stored_by_process_id_so_that_no_child_uses_them(broker, connect):
    connection = connect()
    broker.block("no memory")
    held(connection.default_channel, HoldKind.CONNECTION_BLOCKED)
    connection.release()
    made_of = next(iter(kept._of))
    assert made_of.startswith(f"{os.getpid()} ")


def test_a_publish_after_an_interrupted_write_raises_a_recoverable_error_of_kombu(broker, connect, monkeypatch):
    """This happens in a task that reaches its soft time limit. It is unknown how much of the message was written."""
    connection = connect()
    channel = connection.default_channel
    publish(channel)
    wire = channel.connection.transport
    send = wire._some

    def interrupted(data: bytes) -> int:
        send(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(wire, "_some", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(channel)
    monkeypatch.setattr(wire, "_some", send)
    with pytest.raises(connection.recoverable_connection_errors):
        publish(channel)
    assert not wire.connected
    wire.close()
    flow = channel._flow
    assert flow in flow_manager.resources
    connection.release()
    assert flow not in flow_manager.resources


def test_two_threads_can_acknowledge_messages_while_a_third_thread_reads(broker, connect):
    connection = connect()
    count = 300
    messages: list[Any] = []
    for number in range(count):
        broker.publish(b"%d" % number, "q")
    consumer = Consumer(connection, [Queue("q", durable=False)], on_message=messages.append)
    consumer.qos(prefetch_count=0)
    consumer.consume()
    acked = threading.Event()

    def acknowledge() -> None:
        done = 0
        while done < count // 2:
            try:
                messages.pop().ack()
            except IndexError:
                time.sleep(0.001)
                continue
            done += 1
        acked.set()

    jobs = [start(acknowledge) for _ in range(2)]
    while any(job.is_alive() for job in jobs):
        try:
            connection.drain_events(timeout=0.05)
        except TimeoutError:
            pass
    for job in jobs:
        job.result()
    assert sys.exc_info() == (None, None, None)
    broker.wait_until(lambda broker: broker.queue("q").unacked == 0 and broker.queue("q").depth == 0)
