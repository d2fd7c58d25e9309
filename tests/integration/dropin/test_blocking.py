"""`basic_publish` of a `BlockingChannel` under flow control."""

from __future__ import annotations

import gc
import signal
import ssl
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import ConfirmTimeout, FlowControlTimeout, FlowEventKind, HoldKind, ProducerFlowed, flow_manager
from qflow_client.logs import flush_logs
from qflow_client.pika.adapters import blocking_connection
from tests.certificates import server_context
from tests.collecting import collect
from tests.effort import rounds
from tests.integration.producer.tools import PATIENCE, Stopwatch, bodies, eventually, logged, start, takes
from tests.interrupting import EVERY, each_interrupt

from .tools import held, pump, start_waiting, stop, waiting_at_most

# The code that runs after a message is admitted and before it is in pika's buffer.
_WRITING = ("pika/flow.py", "core/protocol.py", "core/writing.py", "core/unconfirmed.py", "amqp/outbound.py")


def test_J7_a_stop_is_answered_with_flow_ok_and_no_message_is_published_before_the_stop_ends(broker, connect, wire):
    channel = connect(max_producer_flow_control_wait=PATIENCE).channel()
    stop(channel, broker)
    wire.wait_for("in", "Channel.FlowOk")
    stopped = wire.where("in", "Channel.FlowOk")[0]
    job = start_waiting(channel, b"after")
    assert wire.came_between(stopped) == []
    broker.flow(True)
    job.result()
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)
    assert not channel.flow_state.flowed


@pytest.mark.parametrize("what", ["channel", "connection"])
def test_J7_a_stop_that_arrives_after_the_channel_or_connection_was_closed_is_not_answered(broker, connect, what):
    connection = connect()
    channel = connection.channel()
    channel.queue_declare("few", arguments={"qpid.flow_stop_count": 10})
    # The last message makes the broker send the stop. The client reads nothing before it sends the close.
    for _ in range(11):
        channel.basic_publish("", "few", b"")
    (channel if what == "channel" else connection).close()
    if what == "channel":
        # If the client had sent a wrong frame, the broker would close the connection, and these calls would fail.
        connection.channel().close()
        connection.close()
    assert broker.queue("few").depth == 11


def test_A4_a_publish_on_a_stopped_channel_raises_at_its_deadline_and_never_sends_the_message(broker, connect):
    channel = connect().channel()
    stop(channel, broker)
    with waiting_at_most(channel, 0.3), takes(0.3), pytest.raises(FlowControlTimeout, match="channel_flow") as caught:
        channel.basic_publish("", "q", b"never")
    assert (caught.value.message, caught.value.exchange, caught.value.routing_key) == (b"never", "", "q")
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CHANNEL_FLOW]
    broker.flow(True)
    assert channel.wait_unflowed(PATIENCE)
    channel.basic_publish("", "q", b"later")
    broker.wait_until(lambda broker: broker.queue("q").depth)
    assert bodies(broker) == [b"later"]


def test_D1_a_publish_on_a_stopped_channel_raises_immediately_if_when_flowed_is_raise(broker, connect):
    channel = connect(when_flowed="raise").channel()
    stop(channel, broker)
    with pytest.raises(ProducerFlowed) as caught:
        channel.basic_publish("", "q", b"")
    assert not isinstance(caught.value, FlowControlTimeout)
    assert (caught.value.exchange, caught.value.routing_key) == ("", "q")


def test_a_stop_of_one_channel_does_not_hold_other_channels_of_the_connection(broker, connect):
    connection = connect()
    channel = connection.channel()
    stop(channel, broker)
    other = connection.channel()
    other.basic_publish("", "q", b"other channels go on")
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)


def test_connection_blocked_holds_all_channels_until_connection_unblocked(broker, connect):
    connection = connect()
    one, two = connection.channel(), connection.channel()
    broker.block("no memory")
    held(one, HoldKind.CONNECTION_BLOCKED)
    # A channel that is opened now is also held. It can be opened, because our broker still reads.
    three = connection.channel()
    for channel in one, two, three:
        with waiting_at_most(channel, 0.2), pytest.raises(FlowControlTimeout, match="no memory"):
            channel.basic_publish("", "q", b"")
    broker.unblock()
    for channel in one, two, three:
        assert channel.wait_unflowed(PATIENCE)
        channel.basic_publish("", "q", b"")
    broker.wait_until(lambda broker: broker.queue("q").depth == 3)


@pytest.mark.slow
def test_heartbeats_continue_while_a_publish_waits(broker, connect, wire):
    # A broker that receives nothing for two intervals ends the connection.
    connection = connect(heartbeat=2, max_producer_flow_control_wait=PATIENCE)
    channel = connection.channel()
    stop(channel, broker)
    job = start_waiting(channel)
    wire.wait_for("in", "Heartbeat", wire.count("in", "Heartbeat") + 2)
    assert job.is_alive()
    broker.flow(True)
    job.result()
    assert connection.is_open
    channel.queue_declare("still-there")


def test_a_missing_confirm_raises_ConfirmTimeout_and_not_FlowControlTimeout(broker, connect):
    channel = connect().channel()
    channel.confirm_delivery()
    broker.withhold_confirms()
    with waiting_at_most(channel, 0.3), takes(0.3), pytest.raises(ConfirmTimeout, match="no answer from the broker"):
        channel.basic_publish("", "q", b"unknown")
    assert [each.body for each in channel.unconfirmed] == [b"unknown"]
    broker.release_confirms()
    # The late confirm must not be assigned to this message.
    channel.basic_publish("", "q", b"known")
    assert channel.unconfirmed == ()
    assert bodies(broker) == [b"unknown", b"known"]


def test_wait_for_confirms_also_waits_for_messages_whose_publish_has_timed_out(broker, connect):
    channel = connect().channel()
    channel.confirm_delivery()
    broker.withhold_confirms()
    with waiting_at_most(channel, 0.2), pytest.raises(ConfirmTimeout):
        channel.basic_publish("", "q", b"one")
    with pytest.raises(ConfirmTimeout, match="1 messages are not confirmed"):
        channel.wait_for_confirms(0.1)
    broker.release_confirms()
    channel.wait_for_confirms(PATIENCE)


def test_a_late_return_is_not_attributed_to_the_next_message(broker, connect, proxy):
    connection = connect(proxy.url(broker))
    channel = connection.channel()
    channel.confirm_delivery()
    proxy.stop_reading()
    with waiting_at_most(channel, 0.3), pytest.raises(ConfirmTimeout):
        channel.basic_publish("", "nowhere", b"returned late", mandatory=True)
    proxy.go_on_reading()
    pump(connection, lambda: channel.unconfirmed == ())
    channel.basic_publish("", "q", b"arrives", mandatory=True)
    assert bodies(broker) == [b"arrives"]


def test_a_message_is_sent_once_when_the_socket_has_just_become_writable(broker, connect):
    channel = connect(broker.url).channel()
    # The first message is written immediately. This ends the wait for the socket, whose callback writes the rest.
    channel._turns.when_writable()
    channel.basic_publish("", "q", b"once")
    channel.basic_publish("", "q", b"last")
    broker.wait_until(lambda broker: bodies(broker)[-1:] == [b"last"])
    assert bodies(broker) == [b"once", b"last"]


def test_J8_while_the_socket_accepts_no_bytes_messages_are_not_buffered_and_time_out_unsent(broker, connect, proxy):
    channel = connect(proxy.url(broker)).channel()
    proxy.stop_reading()
    sent, begun = 0, 0
    error: Exception | None = None
    watch = Stopwatch()
    while not isinstance(error, FlowControlTimeout):
        watch = Stopwatch()
        with waiting_at_most(channel, 0.5), watch:
            error = _publish(channel, b"%06d" % (sent + begun) + bytes(100_000))
        sent += error is None
        # A part of this message was written.
        begun += isinstance(error, ConfirmTimeout)
    assert watch.kept(0.5)
    assert [hold.kind for hold in error.holds] == [HoldKind.TRANSPORT]
    proxy.go_on_reading()
    assert channel.wait_unflowed(PATIENCE)
    channel.basic_publish("", "q", b"last")
    broker.wait_until(lambda broker: bodies(broker)[-1:] == [b"last"])
    # Only the sent messages and the half-written message have arrived, in order.
    assert begun <= 1
    assert [each[:6] for each in bodies(broker)] == [b"%06d" % at for at in range(sent + begun)] + [b"last"]


def _publish(channel: pika.BlockingChannel, body: bytes) -> Exception | None:
    try:
        channel.basic_publish("", "q", body)
    except (ConfirmTimeout, FlowControlTimeout) as error:
        return error
    return None


def test_acks_are_sent_and_callbacks_do_not_nest_while_a_publish_waits(broker, connect):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    channel = connection.channel()
    broker.declare_queue("in")
    for number in range(3):
        broker.publish(b"%d" % number, routing_key="in")
    depth = 0
    calls: list[bytes] = []

    def let_go() -> None:
        broker.wait_until(lambda broker: broker.queue("in").acked)
        eventually(lambda: channel._flow.protocol.controller.waiting == 1)
        broker.flow(True)

    def consume(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        nonlocal depth
        depth += 1
        assert depth == 1, "callbacks nest"
        channel.basic_ack(method.delivery_tag)
        if body == b"0":
            broker.flow(False, broker.channels()[0].name)
            eventually(lambda: broker.channels()[0].flowed)
            # More deliveries arrive meanwhile, and are kept.
            threading.Thread(target=let_go).start()
        channel.basic_publish("", "q", body)
        calls.append(body)
        depth -= 1

    channel.basic_consume("in", consume)
    pump(connection, lambda: len(calls) == 3)
    assert calls == [b"0", b"1", b"2"]
    broker.wait_until(lambda broker: broker.queue("in").depth == 0)
    broker.wait_until(lambda broker: bodies(broker) == calls)


def test_flow_callbacks_are_called_in_order_and_only_in_process_data_events(broker, connect):
    connection = connect()
    channel = connection.channel()
    events: list[Any] = []
    channel.add_on_flow_callback(events.append)
    broker.flow(False, broker.channels()[0].name)
    with waiting_at_most(channel, 0.2), pytest.raises(FlowControlTimeout):
        eventually(lambda: channel.basic_publish("", "q", b""))
    assert events == []
    broker.flow(True)
    assert channel.wait_unflowed(PATIENCE)
    assert events == []
    connection.process_data_events()
    assert [event.kind for event in events] == [FlowEventKind.FLOWED, FlowEventKind.UNFLOWED]
    assert {event.producer for event in events} == {"pika channel 1"}


def test_process_data_events_reports_the_end_of_a_transport_hold(broker, connect, proxy):
    connection = connect(proxy.url(broker))
    channel = connection.channel()
    events: list[Any] = []
    channel.add_on_flow_callback(events.append)
    proxy.stop_reading()
    with waiting_at_most(channel, 0.2):
        while not isinstance(_publish(channel, bytes(1_000_000)), FlowControlTimeout):
            pass
    connection.process_data_events()
    assert events[-1].kind is FlowEventKind.FLOWED
    proxy.go_on_reading()
    # The test calls nothing else that could report the end.
    pump(connection, lambda: events[-1].kind is FlowEventKind.UNFLOWED)
    channel.basic_publish("", "q", b"")


def test_ctrl_c_ends_a_waiting_publish_and_the_message_is_not_sent(broker, connect):
    channel = connect().channel()
    stop(channel, broker)

    def interrupt() -> None:
        eventually(lambda: channel._flow.protocol.controller.waiting == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job = start(interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.basic_publish("", "q", b"interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    job.result()
    broker.flow(True)
    assert channel.wait_unflowed(PATIENCE)
    channel.basic_publish("", "q", b"after")
    broker.wait_until(lambda broker: bodies(broker) == [b"after"])


def test_an_open_connection_without_references_is_garbage_collected(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    connection.channel().basic_publish("", "q", b"")
    impl = weakref.ref(connection._impl)
    # Collect it on this thread, and not on a thread that runs the collector by chance.
    gc.disable()
    try:
        del connection
        with pytest.warns(ResourceWarning):
            collect()
    finally:
        gc.enable()
    assert impl() is None


def test_flow_control_and_pipelined_confirms_work_over_tls(certificate, make_broker):
    broker = make_broker(ssl_context=server_context(*certificate))
    client = ssl.create_default_context(cafile=str(certificate[0]))
    parameters = pika.ConnectionParameters(
        "127.0.0.1",
        broker.port,
        ssl_options=pika.SSLOptions(client, "localhost"),
        max_producer_flow_control_wait=PATIENCE,
    )
    count = rounds(3000, least=1000)
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        for number in range(300):
            channel.basic_publish("", "q", b"%d" % number + bytes(number * 100))
        stop(channel, broker)
        with waiting_at_most(channel, 0.3), pytest.raises(FlowControlTimeout):
            channel.basic_publish("", "q", b"")
        broker.flow(True)
        assert channel.wait_unflowed(PATIENCE)
        channel.confirm_delivery(pipelined=True)
        for number in range(300, count):
            channel.basic_publish("", "q", b"%d" % number + bytes(number))
        channel.wait_for_confirms()
    assert [int(body.split(b"\0")[0]) for body in bodies(broker)] == list(range(count))


def test_D5_the_flow_manager_stops_and_starts_a_channel_from_another_thread(broker, connect):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    channel = connection.channel()
    start(flow_manager.stop_all, "maintenance").result()
    try:
        job = start_waiting(channel)
        assert [str(hold) for hold in channel._flow.protocol.reports.holds] == ["paused (manager: maintenance)"]
    finally:
        flow_manager.start_all()
    job.result()
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)
    channel.close()
    assert channel._flow not in flow_manager.resources


def test_wait_unflowed_returns_False_at_its_timeout(broker, connect):
    channel = connect().channel()
    assert channel.wait_unflowed(0)
    stop(channel, broker)
    with takes(0.2):
        assert not channel.wait_unflowed(0.2)


def test_a_rate_limit_delays_publishing(broker, connect):
    channel = connect(rate=50, rate_burst=1).channel()
    with Stopwatch() as watch:
        for _ in range(11):
            channel.basic_publish("", "q", b"")
    assert watch.seconds >= 0.2
    broker.wait_until(lambda broker: broker.queue("q").depth == 11)


def test_a_waiting_publish_raises_when_the_broker_closes_the_channel(broker, connect):
    channel = connect(max_producer_flow_control_wait=PATIENCE).channel()
    stop(channel, broker)
    job = start_waiting(channel)
    broker.close_channels(311, "too much")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="too much"):
        job.result()


def test_a_waiting_publish_raises_when_the_connection_is_lost(broker, connect):
    channel = connect(max_producer_flow_control_wait=PATIENCE).channel()
    stop(channel, broker)
    job = start_waiting(channel)
    broker.drop_connections()
    with pytest.raises(pika.exceptions.StreamLostError):
        job.result()


def test_a_publish_that_waits_for_its_confirm_raises_when_the_connection_is_lost(broker, connect):
    channel = connect(max_producer_flow_control_wait=PATIENCE).channel()
    channel.confirm_delivery()
    broker.withhold_confirms()
    job = start(channel.basic_publish, "", "q", b"")
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)
    broker.drop_connections()
    with pytest.raises(pika.exceptions.StreamLostError):
        job.result()


def test_closing_a_blocked_connection_raises_at_the_deadline(broker, connect, proxy):
    connection = connect(proxy.url(broker), max_producer_flow_control_wait=0.4)
    channel = connection.channel()
    broker.block("no memory")
    held(channel, HoldKind.CONNECTION_BLOCKED)
    # RabbitMQ, too, does not read from a connection that it has blocked.
    proxy.stop_reading()
    with takes(0.4), pytest.raises(pika.exceptions.ConnectionBlockedTimeout):
        connection.close()
    assert connection.is_closed


def test_closing_a_blocked_connection_ends_at_the_earlier_deadline_of_channel_and_connection(
    broker, connect, proxy, monkeypatch
):
    connection = connect(proxy.url(broker), max_producer_flow_control_wait=0.4)
    channel = connection.channel()
    broker.block("no memory")
    held(channel, HoldKind.CONNECTION_BLOCKED)
    proxy.stop_reading()
    loop = connection._impl.ioloop
    call_later, later = loop.call_later, []

    def call_one_later(seconds: float, deadline: Any) -> Any:
        later.append(deadline)
        return call_later(seconds, deadline) if len(later) == 1 else None

    # The connection's deadline ends the close. Immediately afterwards, the channel's deadline expires, too.
    monkeypatch.setattr(loop, "call_later", call_one_later)
    connection._impl.add_on_close_callback(lambda *_: call_later(0, later[1]))
    with pytest.raises(pika.exceptions.ConnectionBlockedTimeout):
        connection.close()
    assert connection.is_closed
    assert len(later) == 2


def test_closing_a_connection_whose_socket_accepts_no_bytes_raises_at_the_deadline(broker, connect, proxy):
    connection = connect(proxy.url(broker), max_producer_flow_control_wait=0.4)
    channel = connection.channel()
    proxy.stop_reading()
    while _publish(channel, bytes(1_000_000)) is None:
        pass
    with takes(0.4), pytest.raises(pika.exceptions.ConnectionBlockedTimeout, match="takes no bytes"):
        connection.close()


@pytest.mark.parametrize("closes", ["connection", "channel"])
def test_closing_ends_even_if_the_broker_is_silent_and_there_are_no_heartbeats(qflow_proxy, monkeypatch, closes):
    monkeypatch.setattr(blocking_connection, "_MAX_SILENCE", 0.6)
    connection = pika.BlockingConnection(
        pika.URLParameters(f"{qflow_proxy.url}?heartbeat=0&max_producer_flow_control_wait=0.1")
    )
    channel = connection.channel()
    qflow_proxy.black_hole()
    with takes(0.6), pytest.raises(pika.exceptions.ConnectionBlockedTimeout, match="silent"):
        (connection if closes == "connection" else channel).close()
    assert connection.is_closed


def test_an_exception_leaves_a_with_block_in_time_even_if_the_broker_reads_nothing(broker, connect, proxy):
    parameters = pika.URLParameters(f"{proxy.url(broker)}?max_producer_flow_control_wait=0.3")
    connection: Any = None
    watch = Stopwatch()

    def program() -> None:
        nonlocal connection
        with pika.BlockingConnection(parameters) as connection, connection.channel() as channel:
            broker.block("no memory")
            held(channel, HoldKind.CONNECTION_BLOCKED)
            proxy.stop_reading()
            watch.__enter__()
            channel.basic_publish("", "q", b"")

    with pytest.raises(FlowControlTimeout):
        program()
    watch.__exit__(None, None, None)
    assert watch.kept(0.3)
    assert connection.is_closed


@pytest.mark.parametrize("confirms", ["none", "each", "pipelined"])
def test_J7_no_message_follows_a_flow_ok_even_if_the_broker_stops_the_channel_often(broker, connect, wire, confirms):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    channel = connection.channel()
    if confirms != "none":
        channel.confirm_delivery(pipelined=confirms == "pipelined")
    rounds = 15
    enough = threading.Event()

    def toggle() -> None:
        (name,) = (each.name for each in broker.channels())
        for number in range(1, rounds + 1):
            broker.wait_until(lambda broker, number=number: broker.queue("q").published >= 20 * number)
            broker.flow(False, name)
            wire.wait_for("in", "Channel.FlowOk", 2 * number - 1)
            broker.flow(True, name)
            wire.wait_for("in", "Channel.FlowOk", 2 * number)
        enough.set()

    job = start(toggle)
    sent = 0
    while not enough.is_set():
        channel.basic_publish("", "q", b"%d" % sent)
        sent += 1
    job.result()
    channel.wait_for_confirms(PATIENCE)
    answers, says = wire.where("in", "Channel.FlowOk"), wire.where("out", "Channel.Flow")
    assert len(answers) == len(says) == 2 * rounds
    for number in range(rounds):
        assert wire.came_between(answers[2 * number], says[2 * number + 1]) == []
    broker.wait_until(lambda broker: broker.queue("q").published == sent)
    assert bodies(broker) == [b"%d" % number for number in range(sent)]


@pytest.mark.parametrize("closed", ["channel", "connection", "both"])
def test_a_close_by_the_program_logs_no_warning(broker, connect, caplog, closed):
    connection = connect()
    channel = connection.channel()
    channel.basic_publish("", "q", b"")
    if closed != "connection":
        channel.close()
    if closed != "channel":
        connection.close()
    assert logged(caplog) == []


@pytest.mark.parametrize("confirms", ["none", "each", "pipelined"])
def test_E11_a_channel_closed_by_the_broker_without_unconfirmed_messages_logs_no_warning(
    broker, connect, caplog, confirms
):
    channel = connect().channel()
    if confirms != "none":
        channel.confirm_delivery(pipelined=confirms == "pipelined")
    channel.basic_publish("", "q", b"")
    if confirms == "pipelined":
        channel.wait_for_confirms()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_declare("missing", passive=True)
    assert logged(caplog) == []


def test_the_traceback_of_a_closed_channel_does_not_grow_with_each_error(connect):
    channel = connect().channel()
    channel.confirm_delivery(pipelined=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_declare("missing", passive=True)

    def frames_of_an_error() -> int:
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            channel.basic_publish("", "q", b"")
        return len(caught.traceback)

    assert frames_of_an_error() == frames_of_an_error()


def test_a_lost_connection_logs_a_warning(broker, connect, caplog):
    connection = connect()
    connection.channel()
    broker.drop_connections()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        pump(connection, lambda: connection.is_closed)
    assert flush_logs(PATIENCE)
    (record,) = (record for record in caplog.records if record.name == "qflow_client")
    assert record.levelname == "WARNING"
    assert "pika channel 1: blocked (flowed): disconnected" in record.message


def test_E2_after_an_interrupted_write_no_confirm_is_assigned_to_another_message(connect):
    for interrupt in each_interrupt(least=10, every=EVERY):
        connection = connect(max_producer_flow_control_wait=PATIENCE)
        channel = connection.channel()
        channel.confirm_delivery(pipelined=True)
        interrupt(partial(channel.basic_publish, "", "q", b"interrupted"), only=_WRITING)
        with suppress(pika.exceptions.AMQPConnectionError):
            # If the bytes may not be in pika's buffer, the drop-in has ended the connection.
            channel.basic_publish("", "q", b"the next one")
            channel.wait_for_confirms()
            connection.close()


def test_E2_no_message_waits_for_a_confirm_after_an_interrupt_of_confirm_delivery(connect, monkeypatch):
    connection = connect(max_producer_flow_control_wait=PATIENCE)
    channel = connection.channel()

    def interrupt(_frames: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection._impl, "_output_marshaled_frames", interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.confirm_delivery()
    # It is not known whether the broker has received Confirm.Select.
    with pytest.raises(pika.exceptions.StreamLostError):
        channel.basic_publish("", "q", b"body")


@pytest.mark.parametrize("pipelined", [False, True])
def test_E2_after_an_interrupt_all_messages_given_to_pika_are_sent(connect, pipelined):
    connection, continued = connect(max_producer_flow_control_wait=PATIENCE), 0
    for interrupt in each_interrupt(least=5, every=EVERY):
        channel = connection.channel()
        channel.confirm_delivery(pipelined=pipelined)
        interrupt(
            partial(channel.basic_publish, "", "q", bytes(100)), only=("blocking_connection.py", "blocking_io.py")
        )
        try:
            if pipelined:
                channel.wait_for_confirms()
            channel.basic_publish("", "q", b"the next one")
        except pika.exceptions.StreamLostError:
            connection = connect(max_producer_flow_control_wait=PATIENCE)
        else:
            assert not channel.flow_state.flowed
            channel.close()
            continued += 1
    # Only an interrupt during the write ends the connection.
    assert continued > interrupt.at / EVERY / 2
