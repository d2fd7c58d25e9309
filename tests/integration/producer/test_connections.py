"""Connections of pika made by `connect`, with consumers and any number of producers on them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pika
import pytest

import qflow_client
from qflow_client import (
    ConnectionFailed,
    FlowControlTimeout,
    MessageRejected,
    Outcome,
    Producer,
    ProducerClosed,
    SettingsError,
    UndeliveredMessages,
)
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from tests.certificates import server_context
from tests.collecting import collect

from .tools import (
    PATIENCE,
    Proxy,
    SteadyClock,
    Wire,
    bodies,
    ends_within,
    eventually,
    hold,
    holds,
    start,
    start_send,
    takes,
    wait_closed,
    wait_held,
)


@pytest.fixture
def connect(stack: ExitStack) -> Callable[..., pika.BlockingConnection]:
    """`qflow_client.connect`, whose connections are closed after the test."""

    def make(*arguments: Any, **keywords: Any) -> pika.BlockingConnection:
        connection = qflow_client.connect(*arguments, **keywords)

        def close() -> None:
            if connection.is_open:
                connection.close()

        stack.callback(close)
        return connection

    return make


@pytest.fixture
def connection(connect: Callable[..., pika.BlockingConnection], broker: Broker) -> pika.BlockingConnection:
    """A connection to `broker`."""
    return connect(broker.url)


def channels(broker: Broker) -> list[int]:
    return sorted(channel.number for channel in broker.channels())


def made(connection: pika.BlockingConnection, count: int = 1, **settings: Any) -> list[Producer]:
    return [Producer(connection=connection, **({"routing_key": "q"} | settings)) for _ in range(count)]


def settle(producer: Producer) -> None:
    """Close a producer whose failures the test has seen."""
    with pytest.raises(UndeliveredMessages):
        producer.close(timeout=0)


def test_a_shared_connection_is_a_complete_pika_connection(
    connect: Callable[..., pika.BlockingConnection], broker: Broker, wire: Wire
) -> None:
    connection = connect(broker.url, client_properties={"connection_name": "shop"})
    assert isinstance(connection, pika.BlockingConnection)
    assert broker.connections()[0].client_properties["connection_name"] == "shop"
    channel = connection.channel()
    channel.queue_declare("theirs")
    channel.confirm_delivery()
    (producer,) = made(connection, routing_key="theirs")
    got: list[bytes] = []

    def consume(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        got.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(got) == 505:
            channel.stop_consuming()

    for number in range(500):
        producer.send(b"ours %d" % number)
        if number % 100 == 0:
            # With confirms of its own, which the tap leaves alone.
            channel.basic_publish("", "theirs", b"theirs")
    producer.flush()
    channel.basic_consume("theirs", consume)
    channel.start_consuming()
    assert [body for body in got if body != b"theirs"] == [b"ours %d" % number for number in range(500)]
    eventually(lambda: broker.queue("theirs").acked == 505)
    producer.close()
    connection.close()
    eventually(lambda: not broker.connections())
    assert wire.count("in", "Connection.Close") == 1


def test_a_connection_accepts_parameter_objects_of_pika(
    connect: Callable[..., pika.BlockingConnection], broker: Broker
) -> None:
    parameters = pika.ConnectionParameters("127.0.0.1", broker.port, heartbeat=7)
    connection = connect(parameters, timeout=5, client_properties={"product": "shop"})
    assert broker.connections()[0].client_properties["product"] == "shop"
    # The application's own are not changed.
    assert (parameters.client_properties, parameters.stack_timeout) == (None, 15)
    (producer,) = made(connection)
    assert producer.send(b"").result(PATIENCE) is Outcome.CONFIRMED
    producer.close()


def test_a_shared_connection_refuses_a_timeout_that_is_not_a_number(broker: Broker) -> None:
    wrong: Any
    for wrong, error in (("1", TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match=r"timeout=.*: it must be None"):
            qflow_client.connect(broker.url, timeout=wrong)
        with pytest.raises(error, match=r"timeout=.*: it must be None"):
            asyncio.run(qflow_client.connect_async(broker.url, timeout=wrong))
    for over in (0, -1):
        with pytest.raises(ConnectionFailed, match=f"no answer within {over} s"):
            qflow_client.connect(broker.url, timeout=over)


def test_a_consumer_callback_on_a_shared_connection_may_send_and_wait(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    """A thread of the application runs the callbacks, and no I/O waits for this thread."""
    broker.declare_queue("r")
    (source,) = made(connection)
    (sink,) = made(connection, routing_key="r", capacity=1)
    channel = connection.channel()
    for number in range(100):
        source.send(b"%d" % number)

    def consume(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        assert sink.send(body).result(PATIENCE) is Outcome.CONFIRMED
        channel.basic_ack(method.delivery_tag)
        if body == b"99":
            channel.stop_consuming()

    channel.basic_consume("q", consume)
    channel.start_consuming()
    assert bodies(broker, "r") == [b"%d" % number for number in range(100)]
    source.close()
    sink.close()


def test_producers_on_one_connection_are_flowed_independently(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    broker.declare_queue("r")
    channel = connection.channel()
    (one,), (two,) = made(connection), made(connection, routing_key="r")
    for producer in (one, two):
        producer.send(b"")
        producer.flush()
    (name,) = [each.name for each in broker.channels() if each.number == one._protocol.channel.number]
    broker.flow(False, name)
    wait_held(one, "channel_flow")
    waiting = start_send(one, b"waits")
    for number in range(1000):
        two.send(b"%d" % number)
    two.flush()
    # What is pika's goes on, too.
    channel.queue_declare("new")
    channel.queue_delete("new")
    assert (holds(one), holds(two)) == (["channel_flow"], [])
    broker.flow(True, name)
    assert waiting.result().result(PATIENCE) is Outcome.CONFIRMED
    hold(broker, one, "connection_blocked")
    wait_held(two, "connection_blocked")
    broker.unblock()
    assert one.wait_unflowed(PATIENCE)
    assert two.wait_unflowed(PATIENCE)
    one.close()
    two.close()
    assert (broker.queue("q").depth, broker.queue("r").depth) == (2, 1001)


def test_any_thread_can_create_use_and_close_producers_while_the_thread_of_the_connection_is_busy(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    def work(name: int) -> None:
        with Producer(connection=connection, routing_key="q", capacity=50) as producer:
            for number in range(200):
                producer.send(b"%d %d" % (name, number))

    for job in [start(work, name) for name in range(8)]:
        job.result()
    found = bodies(broker)
    for name in range(8):
        own = [body for body in found if body.startswith(b"%d " % name)]
        assert own == [b"%d %d" % (name, number) for number in range(200)]
    eventually(lambda: not channels(broker))
    assert connection.is_open


def test_closing_a_producer_closes_its_channel_and_nothing_else(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    channel = connection.channel()
    producers = made(connection, 3)
    assert channels(broker) == [1, 2045, 2046, 2047]
    receipts = [producer.send(b"") for producer in producers]
    producers[1].close()
    assert channels(broker) == [1, 2045, 2047]
    assert [producers[at].send(b"").result(PATIENCE) for at in (0, 2)] == [Outcome.CONFIRMED] * 2
    # Its number is free again.
    producers[1:2] = made(connection)
    assert channels(broker) == [1, 2045, 2046, 2047]
    for producer in producers:
        producer.close()
    assert channels(broker) == [1]
    channel.queue_declare("still there")
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert broker.queue("q").depth == 5


def test_creating_a_producer_on_a_connection_of_another_library_raises_an_error(broker: Broker) -> None:
    url = pika.URLParameters(broker.url)
    with pika.BlockingConnection(url) as connection, pytest.raises(SettingsError, match=r"qflow_client\.connect"):
        Producer(connection=connection)


def test_creating_a_producer_with_both_a_url_and_a_connection_raises_an_error(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    with pytest.raises(SettingsError, match="give only one"):
        Producer(broker.url, connection=connection)


def test_creating_a_producer_on_a_closed_connection_raises_an_error(connection: pika.BlockingConnection) -> None:
    connection.close()
    with pytest.raises(ConnectionFailed, match="the connection is lost: it was closed"):
        Producer(connection=connection)


def test_opening_more_channels_than_the_broker_allows_raises_an_error(
    connect: Callable[..., pika.BlockingConnection], make_broker: Callable[..., Broker]
) -> None:
    connection = connect(make_broker(channel_max=3).url)
    connection.channel()
    producers = made(connection, 2)
    with pytest.raises(ConnectionFailed, match="all 3 channels"):
        Producer(connection=connection)
    producers[0].close()
    producers[0:1] = made(connection)
    for producer in producers:
        assert producer.send(b"").result(PATIENCE) is Outcome.CONFIRMED
        producer.close()


def test_a_channel_closed_by_the_broker_does_not_close_the_other_channels_of_the_connection(
    connection: pika.BlockingConnection, broker: Broker, wire: Wire
) -> None:
    one, two = made(connection, 2)
    with pytest.raises(MessageRejected, match="404"):
        one.send(b"", exchange="no such exchange").result(PATIENCE)
    with pytest.raises(ProducerClosed, match="404"):
        one.send(b"")
    one.close()
    wire.wait_for("in", "Channel.CloseOk")
    assert two.send(b"").result(PATIENCE) is Outcome.CONFIRMED
    (three,) = made(connection)
    assert three.send(b"").result(PATIENCE) is Outcome.CONFIRMED
    assert len(channels(broker)) == 2
    two.close()
    three.close()


def test_closing_the_shared_connection_ends_its_producers(connection: pika.BlockingConnection, broker: Broker) -> None:
    one, two = made(connection, 2)
    broker.withhold_confirms()
    receipt = one.send(b"")
    eventually(lambda: broker.queue("q").depth)
    two.pause()
    waiting = start_send(two, b"")
    connection.close()
    with pytest.raises(ProducerClosed, match="the connection is lost: it was closed"):
        waiting.result()
    wait_closed(one)
    settle(one)
    two.close()
    assert receipt.outcome is Outcome.UNKNOWN


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_unreferenced_shared_connection_ends(broker: Broker) -> None:
    connection = qflow_client.connect(broker.url)
    assert connection.is_open
    del connection
    collect()
    eventually(lambda: not broker.connections())


def test_a_lost_connection_is_reported_to_pika_and_to_all_producers(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    producers = made(connection, 2)
    for producer in producers:
        producer.send(b"").result(PATIENCE)
    broker.drop_connections()
    for producer in producers:
        wait_closed(producer)
        # If unread data made the system reset the connection, the words are those of the system.
        with pytest.raises(ProducerClosed, match=r"connection is lost: (the broker closed the socket|\w+Error: )"):
            producer.send(b"")
        producer.close()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connection.process_data_events(time_limit=None)


def test_pika_and_producers_get_the_reason_if_the_broker_closes_their_connection(
    connect: Callable[..., pika.BlockingConnection], make_broker: Callable[..., Broker]
) -> None:
    # The application answers only when it uses the connection; the broker does not wait for it that long.
    broker = make_broker(close_timeout=0.2)
    connection = connect(broker.url)
    (producer,) = made(connection)
    broker.close_connections(320, "the operator's wish")
    wait_closed(producer)
    with pytest.raises(ProducerClosed, match="320 the operator's wish"):
        producer.send(b"")
    producer.close()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="the operator's wish"):
        connection.process_data_events(time_limit=None)


def test_a_new_producer_gets_the_reason_if_the_broker_closes_its_connection(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    broker.close_connections(320, "the operator's wish")
    # The broker waits for the answer of the application, so it does not close the socket yet.
    with pytest.raises(ConnectionFailed, match="the connection is lost: 320 the operator's wish"):
        Producer(connection=connection, routing_key="q", connect_timeout=0.5)
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="the operator's wish"):
        connection.process_data_events(time_limit=None)


def test_heartbeats_continue_while_the_application_is_busy_and_detect_a_dead_peer(
    connect: Callable[..., pika.BlockingConnection], broker: Broker, wire: Wire, proxy: Proxy
) -> None:
    """With a heartbeat of 1 s the broker disconnects a silent client after 2 s."""
    broker._server.clock = SteadyClock()
    connection = connect(f"{broker.url}?heartbeat=1")
    dead = connect(f"{proxy.url(broker)}?heartbeat=1")
    (producer,) = made(dead)
    producer.send(b"").result(PATIENCE)
    proxy.freeze()
    wait_closed(producer)
    with pytest.raises(ProducerClosed, match="the broker sent nothing, not even heartbeats"):
        producer.send(b"")
    producer.close()
    wire.wait_for("in", "Heartbeat", 6)
    # pika has not been called since.
    channel = connection.channel()
    channel.queue_declare("alive")
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        dead.process_data_events(time_limit=None)


def test_connection_blocked_right_after_the_handshake_holds_the_producer(
    connect: Callable[..., pika.BlockingConnection], make_broker: Callable[..., Broker]
) -> None:
    broker = make_broker()
    broker.block("alarm")
    connection = connect(broker.url, timeout=20)
    (producer,) = made(connection)
    wait_held(producer, "connection_blocked")
    with pytest.raises(FlowControlTimeout, match="alarm"):
        producer.send(b"", timeout=0.05)
    broker.unblock()
    assert producer.send(b"").result(PATIENCE) is Outcome.CONFIRMED
    producer.close()


@pytest.mark.parametrize("is_settled", [True, False])
def test_closing_a_shared_connection_keeps_the_deadline_if_the_peer_is_dead(
    connect: Callable[..., pika.BlockingConnection], broker: Broker, proxy: Proxy, is_settled: bool
) -> None:
    connection = connect(proxy.url(broker))
    (producer,) = made(connection)
    producer.send(b"").result(PATIENCE)
    proxy.freeze()
    if not is_settled:
        producer.send(b"")
    with ends_within(1.2), nullcontext() if is_settled else pytest.raises(UndeliveredMessages):
        producer.close(timeout=0.2)
    proxy.cut()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connection.process_data_events(time_limit=None)


@pytest.mark.parametrize("reads_again", [True, False])
def test_closing_a_producer_in_the_middle_of_a_message_does_not_end_the_shared_connection(
    connect: Callable[..., pika.BlockingConnection],
    broker: Broker,
    proxy: Proxy,
    reads_again: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other frame may come between the frames of a message, and above all no close of its channel."""
    if reads_again:
        # A grace in which a slow machine, too, reads what it has to.
        monkeypatch.setattr("qflow_client.sync.engine.BRIEF", PATIENCE)
    connection = connect(proxy.url(broker))
    other, producer = made(connection, 2)
    proxy.stop_reading()
    # More than the sockets hold.
    large = producer.send(bytes(6_000_000), timeout=None)
    with pytest.raises(FlowControlTimeout):
        producer.send(b"no", timeout=0.1)
    closing = start(producer.close, timeout=0.1)
    link: Any = producer._engine.link
    eventually(lambda: link._leaves)
    if reads_again:
        proxy.go_on_reading()
    error = closing.wait()
    assert isinstance(error, UndeliveredMessages)
    assert error.receipts == (large,)
    assert large.outcome is Outcome.UNKNOWN
    if not reads_again:
        assert flush_logs(20)
        assert "is left open" in caplog.text
        proxy.go_on_reading()
    assert other.send(b"other").result(PATIENCE) is Outcome.CONFIRMED
    assert (len(channels(broker)) == 1) is reads_again
    other.close()
    assert bodies(broker)[-1] == b"other"


def test_on_a_shared_connection_basic_publish_of_pika_blocks_while_the_broker_does_not_read(
    connect: Callable[..., pika.BlockingConnection], broker: Broker, proxy: Proxy
) -> None:
    """`basic_publish` of pika blocks while the broker does not read, as on any other connection."""
    connection = connect(proxy.url(broker))
    channel = connection.channel()
    (producer,) = made(connection)
    proxy.stop_reading()
    published = 0

    def publish() -> None:
        nonlocal published
        for _ in range(400):
            channel.basic_publish("", "q", bytes(100_000))
            published += 1

    publishing = start(publish)
    wait_held(producer, *(() if producer.available else ("transport",)))
    carrier = connection.carrier  # type: ignore[attr-defined]  # how else to tell that it waits
    eventually(lambda: carrier._paused)
    assert published < 400
    # Frames for pika, which arrive meanwhile, do not let a further part of pika's bytes into the buffer each time.
    for _ in range(20):
        broker.block()
        wait_held(producer, "connection_blocked")
        broker.unblock()
        eventually(lambda: "connection_blocked" not in holds(producer))
    assert carrier._transport.get_write_buffer_size() < 1 << 18
    proxy.go_on_reading()
    publishing.result()
    assert producer.send(b"last").result(PATIENCE) is Outcome.CONFIRMED
    eventually(lambda: broker.queue("q").depth == 401)
    producer.close()


def test_frames_for_pika_that_arrive_while_the_program_does_not_call_pika_are_kept(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    channel = connection.channel()
    got: list[int] = []
    channel.basic_consume("q", lambda _channel, _method, _properties, body: got.append(len(body)), auto_ack=True)
    (producer,) = made(connection)
    for _ in range(100):
        producer.send(bytes(100_000))
    # All is delivered, and confirms come, though the application takes nothing.
    producer.flush()
    eventually(lambda: broker.queue("q").acked == 100 or broker.queue("q").depth == 0)
    while len(got) < 100:
        connection.process_data_events(time_limit=None)
    assert got == [100_000] * 100
    producer.close()


def test_a_producer_without_confirms_works_on_a_shared_connection(
    connection: pika.BlockingConnection, broker: Broker
) -> None:
    (producer,) = made(connection, confirms=False)
    assert producer.send(b"").result(PATIENCE) is Outcome.SENT
    producer.close()
    eventually(lambda: broker.queue("q").depth == 1)


def test_a_connection_shared_by_producers_works_over_tls(
    connect: Callable[..., pika.BlockingConnection],
    make_broker: Callable[..., Broker],
    certificate: tuple[Path, Path],
) -> None:
    broker = make_broker(ssl_context=server_context(*certificate))
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    parameters = pika.ConnectionParameters(
        "127.0.0.1", broker.port, ssl_options=pika.SSLOptions(trusting, server_hostname="127.0.0.1")
    )
    connection = connect(parameters)
    channel = connection.channel()
    (producer,) = made(connection)
    sizes = [0, 1, 1000, 20_000, 1_000_000] * 10
    for size in sizes:
        producer.send(bytes(size))
        channel.queue_declare("q", passive=True)
    producer.flush()
    assert [len(body) for body in bodies(broker)] == sizes
    producer.close()
    with pytest.raises(ConnectionFailed, match=r"amqps://.*certificate verify failed"):
        qflow_client.connect(f"amqps://guest:secret@127.0.0.1:{broker.port}/%2F")


@pytest.mark.parametrize("url", ["http://localhost", "amqp://localhost:port/", 5, None])
def test_creating_a_connection_with_an_argument_that_is_not_a_url_raises_an_error(url: Any) -> None:
    with pytest.raises(SettingsError, match="url="):
        qflow_client.connect(url)


def test_creating_a_connection_to_an_unreachable_broker_raises_an_error(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(users={"ann": "right"})
    with pytest.raises(ConnectionFailed, match="Connection refused") as caught:
        qflow_client.connect("amqp://guest:secret@127.0.0.1:1/%2F")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConnectionFailed, match="ACCESS_REFUSED"):
        qflow_client.connect(f"amqp://ann:wrong@127.0.0.1:{broker.port}/%2F")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/%2F"
        with takes(0.3), pytest.raises(ConnectionFailed, match=r"(?i)timeout"):
            qflow_client.connect(url, timeout=0.3)
    eventually(lambda: not broker.connections())


def test_creating_a_producer_raises_an_error_if_the_broker_does_not_answer_channel_open(
    connect: Callable[..., pika.BlockingConnection], broker: Broker, proxy: Proxy
) -> None:
    connection = connect(proxy.url(broker))
    proxy.freeze()
    with ends_within(1.5), pytest.raises(ConnectionFailed, match=r"no answer within 0\.3 s"):
        Producer(connection=connection, connect_timeout=0.3)
    proxy.cut()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connection.process_data_events(time_limit=None)
