"""Publishing from threads with the thread-safe `Connection` of pika 1.5. A publish waits under flow control."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import FlowControlTimeout, HoldKind, ProducerFlowed, flow_manager
from qflow_client.logs import flush_logs
from tests.integration.producer.processes import in_child
from tests.integration.producer.tools import PATIENCE, bodies, eventually, logged, start, takes

from .tools import end_thread_safe, refused

original = pytest.importorskip("pika.adapters.thread_safe_connection", reason="pika has it from 1.5 on")


@pytest.fixture
def connect(broker: Any, stack: Any) -> Callable[..., Any]:
    def connect(url: str | None = None, more: dict[str, Any] | None = None, **settings: Any) -> Any:
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        connection = pika.Connection(pika.URLParameters(f"{url or broker.url}?{query}"), **(more or {}))
        stack.callback(end_thread_safe, connection)
        return connection

    return connect


def stop(broker: Any, channel: Any) -> None:
    (name,) = (each.name for each in broker.channels() if each.number == channel.channel_number)
    broker.flow(False, name)
    eventually(lambda: [hold.kind for hold in channel.flow_state.holds] == [HoldKind.CHANNEL_FLOW])


def publish_when_unflowed(channel: Any, body: bytes) -> None:
    """Publish without a deadline that a slow machine could miss."""
    eventually(lambda: not channel.flow_state.flowed)
    channel.connection.run(lambda: channel.basic_publish("", "q", body))


def test_calls_in_a_forked_child_raise_an_error_and_the_parent_can_continue(broker: Any, connect: Any) -> None:
    connection = connect()
    channel = connection.channel()

    def child() -> None:
        assert not connection.is_open
        assert channel.flow_state.flowed
        refused(
            lambda: channel.basic_publish("", "q", b"child"),
            lambda: channel.queue_declare("child"),
            lambda: connection.channel(),
        )
        connection.close()

    in_child(child)
    channel.basic_publish("", "q", b"parent")
    broker.wait_until(lambda broker: bodies(broker) == [b"parent"])


def test_J7_threads_that_publish_wait_during_a_stop_and_then_continue_in_order(broker, connect, wire):
    channel = connect().channel()
    stop(broker, channel)
    wire.wait_for("in", "Channel.FlowOk")
    stopped = wire.where("in", "Channel.FlowOk")[0]

    def publish(thread: int) -> None:
        for number in range(20):
            channel.basic_publish("", "q", b"%d %d" % (thread, number))

    jobs = [start(publish, thread) for thread in range(4)]
    eventually(lambda: len(channel.flow_control.protocol.line.tickets) == 4)
    assert wire.came_between(stopped) == []
    assert bodies(broker) == []
    broker.flow(True)
    for job in jobs:
        job.result()
    broker.wait_until(lambda broker: broker.queue("q").depth == 80)
    for thread in range(4):
        mine = [body for body in bodies(broker) if body.startswith(b"%d " % thread)]
        assert mine == [b"%d %d" % (thread, number) for number in range(20)]


@pytest.mark.parametrize("how", ["flow", "blocked"])
def test_E4_a_publish_that_times_out_raises_an_error_with_the_message_and_never_sends_it(broker, connect, how):
    channel = connect(max_producer_flow_control_wait=0.3).channel()
    if how == "flow":
        stop(broker, channel)
    else:
        broker.block("no memory")
        eventually(lambda: channel.flow_state.flowed)
    with takes(0.3), pytest.raises(FlowControlTimeout) as caught:
        channel.basic_publish("", "q", b"never")
    assert caught.value.message == b"never"
    assert [hold.kind for hold in caught.value.holds] == [
        HoldKind.CHANNEL_FLOW if how == "flow" else HoldKind.CONNECTION_BLOCKED
    ]
    (broker.flow if how == "flow" else lambda _: broker.unblock())(True)
    publish_when_unflowed(channel, b"later")
    broker.wait_until(lambda broker: bodies(broker) == [b"later"])


def test_C6_the_window_is_full_until_confirms_arrive_and_on_publish_reports_each_tag_before_its_ack(broker, connect):
    channel = connect(capacity=3, max_producer_flow_control_wait=PATIENCE).channel()
    channel.basic_publish("", "q", b"before")
    known: set[int] = set()
    early: list[int] = []
    acked = threading.Semaphore(0)

    def on_answer(answer: Any) -> None:
        if answer.method.delivery_tag not in known:
            early.append(answer.method.delivery_tag)
        acked.release()

    channel.confirm_delivery(on_answer)
    assert channel.next_publish_seq_no == 1
    broker.withhold_confirms()
    for _ in range(3):
        channel.basic_publish("", "q", b"x", on_publish=known.add)
    eventually(lambda: channel.next_publish_seq_no == 4)
    job = start(lambda: [channel.basic_publish("", "q", b"x", on_publish=known.add) for _ in range(50)])
    eventually(lambda: [hold.kind for hold in channel.flow_state.holds] == [HoldKind.CAPACITY])
    assert len(known) == 3
    broker.release_confirms()
    job.result()
    eventually(lambda: known == set(range(1, 54)))
    eventually(lambda: channel.flow_control.protocol.unsettled == 0)
    assert acked.acquire(timeout=PATIENCE)
    assert early == []


def test_E2_on_the_ioloop_thread_a_publish_succeeds_immediately_or_raises_ProducerFlowed(broker, connect):
    connection = connect()
    channel = connection.channel()
    results: list[Any] = []
    done = threading.Semaphore(0)

    def publish() -> None:
        try:
            results.append(channel.basic_publish("", "q", b"from the loop"))
        except ProducerFlowed as error:
            results.append(error)
        done.release()

    connection.add_callback_threadsafe(publish)
    assert done.acquire(timeout=PATIENCE)
    stop(broker, channel)
    connection.add_callback_threadsafe(publish)
    assert done.acquire(timeout=PATIENCE)
    assert results[0] is None
    assert isinstance(results[1], ProducerFlowed)
    assert not isinstance(results[1], FlowControlTimeout)
    broker.flow(True)
    broker.wait_until(lambda broker: bodies(broker) == [b"from the loop"])


def test_E2_flow_callbacks_and_on_publish_callbacks_may_publish(broker, connect):
    channel = connect(capacity=50).channel()
    channel.confirm_delivery(lambda _answer: None)
    tags: list[int] = []
    again: list[int] = []
    channel.on_flow(lambda event: event.flowed or channel.basic_publish("", "q", b"unflowed"))
    stop(broker, channel)

    def on_publish(tag: int) -> None:
        tags.append(tag)
        channel.basic_publish("", "q", b"nested", on_publish=again.append)

    jobs = [start(channel.basic_publish, "", "q", b"waits", None, False, on_publish) for _ in range(3)]
    eventually(lambda: len(channel.flow_control.protocol.line.tickets) == 3)
    broker.flow(True)
    for job in jobs:
        job.result()
    broker.wait_until(lambda broker: broker.queue("q").depth == 7)
    found = bodies(broker)
    assert {found[tag - 1] for tag in tags} == {b"waits"}
    assert {found[tag - 1] for tag in again} == {b"nested"}
    assert len(set(tags) | set(again)) == 6


def test_E2_a_publish_in_a_consumer_callback_raises_before_pika_closes_the_connection(broker, connect):
    connection = connect(more={"work_queue_maxsize": 2, "work_queue_put_timeout": 6.0})
    consuming, publishing = connection.channel(), connection.channel()
    consuming.queue_declare("in")
    stop(broker, publishing)
    errors: list[BaseException] = []

    def on_message(_channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
        try:
            publishing.basic_publish("", "q", body)
        except FlowControlTimeout as error:
            errors.append(error)

    consuming.basic_consume("in", on_message, auto_ack=True)
    other = connect().channel()
    for number in range(4):
        other.basic_publish("", "in", b"%d" % number)
    eventually(lambda: errors)
    broker.flow(True)
    eventually(lambda: len(errors) + broker.queue("q").depth == 4)
    assert connection.is_open


def test_E4_publishes_raise_at_their_deadline_even_if_the_ioloop_hangs(broker, connect):
    connection = connect(max_producer_flow_control_wait=5)
    channel = connection.channel()
    go_on = threading.Semaphore(0)
    stop(broker, channel)
    job = start(channel.basic_publish, "", "q", b"in line")
    eventually(lambda: channel.flow_control.protocol.line.tickets)
    connection.add_callback_threadsafe(lambda: go_on.acquire(timeout=PATIENCE) and None)
    with takes(5), pytest.raises(FlowControlTimeout):
        channel.basic_publish("", "q", b"not in line yet")
    with pytest.raises(FlowControlTimeout):
        job.result()
    broker.flow(True)
    go_on.release()
    publish_when_unflowed(channel, b"last")
    broker.wait_until(lambda broker: bodies(broker) == [b"last"])


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_accepted_messages_are_sent_after_a_stop_or_logged_if_the_channel_closes_first(broker, connect, caplog, ends):
    connection = connect()
    channel = connection.channel()
    go_on = threading.Semaphore(0)
    connection.add_callback_threadsafe(lambda: go_on.acquire(timeout=PATIENCE) and None)
    flow_manager.stop_all()
    try:
        # The IOLoop's thread has not noticed the stop yet.
        headers = {"a": 1}
        channel.basic_publish("", "q", b"accepted", pika.BasicProperties(headers=headers))
        headers["a"] = 2
        assert len(channel.accepted) == 1
        go_on.release()
        eventually(lambda: channel.flow_control.protocol.line.tickets)
        assert bodies(broker) == []
        if ends:
            channel.close()
    finally:
        flow_manager.start_all()
    if ends:
        assert flush_logs(PATIENCE)
        assert "a message was not sent" in caplog.text
    else:
        broker.wait_until(lambda broker: bodies(broker) == [b"accepted"])
        assert broker.messages("q")[0].properties.headers == {"a": 1}


@pytest.mark.parametrize("how", ["channel", "connection", "broker", "cut", "crash"])
def test_E2_a_waiting_publish_raises_when_its_channel_or_connection_ends(broker, connect, proxy, how):
    connection = connect(proxy.url(broker), max_producer_flow_control_wait=PATIENCE * 5)
    channel = connection.channel()
    stop(broker, channel)
    job = start(channel.basic_publish, "", "q", b"never")
    eventually(lambda: channel.flow_control.protocol.line.tickets)
    began = time.monotonic()
    if how == "channel":
        channel.close()
    elif how == "connection":
        connection.close()
    elif how == "broker":
        connection.add_callback_threadsafe(lambda: channel._channel.queue_declare("missing", passive=True))
    elif how == "cut":
        proxy.cut()
    else:
        connection.add_callback_threadsafe(lambda: 1 / 0)
    kinds = {
        "broker": pika.exceptions.ChannelClosedByBroker,
        "cut": pika.exceptions.AMQPConnectionError,
        "crash": ZeroDivisionError,
    }
    with pytest.raises(kinds.get(how, pika.exceptions.AMQPError)):
        job.result()
    assert time.monotonic() - began < PATIENCE * 4
    with pytest.raises(kinds.get(how, pika.exceptions.AMQPError) if how != "broker" else pika.exceptions.AMQPError):
        channel.basic_publish("", "q", b"never")
    broker.flow(True)
    assert bodies(broker) == []


@pytest.mark.parametrize("confirms", [False, True])
def test_E11_a_channel_closed_by_the_broker_without_unconfirmed_messages_logs_no_warning(
    broker, connect, caplog, confirms
):
    channel = connect().channel()
    if confirms:
        channel.confirm_delivery(print)
    channel.basic_publish("", "q", b"")
    eventually(lambda: channel.connection.run(lambda: channel.flow_control.protocol.is_idle) and bodies(broker))
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_declare("missing", passive=True)
    assert logged(caplog) == []


def test_the_error_of_wrap_for_a_thread_safe_channel_names_its_class(broker, stack):
    connection = original.Connection(pika.URLParameters(broker.url))
    stack.callback(end_thread_safe, connection)
    with pytest.raises(TypeError, match=r"not pika\.adapters\.thread_safe_connection\.Channel; to publish"):
        pika.wrap(connection.channel())


def test_the_setting_max_unwritten_bytes_limits_the_write_buffer_of_pika(broker, connect, proxy):
    connection = connect(proxy.url(broker), max_unwritten_bytes=100_000, max_producer_flow_control_wait=0.3)
    channel = connection.channel()
    proxy.stop_reading()
    sent = 0
    holds: tuple[Any, ...] = ()
    while not holds:
        try:
            channel.basic_publish("", "q", bytes(60_000))
            sent += 1
        except FlowControlTimeout as error:
            # Without holds, the IOLoop's thread was late. The message was not sent.
            holds = tuple(error.holds)
    assert [hold.kind for hold in holds] == [HoldKind.TRANSPORT]
    proxy.go_on_reading()
    publish_when_unflowed(channel, b"last")
    broker.wait_until(lambda broker: broker.queue("q").depth == sent + 1)


def test_a_publish_raises_during_a_stop_but_waits_for_a_rate_limit_if_when_flowed_is_raise(broker, connect):
    channel = connect(when_flowed="raise").channel()
    stop(broker, channel)
    with pytest.raises(ProducerFlowed) as caught:
        channel.basic_publish("", "q", b"never")
    assert not isinstance(caught.value, FlowControlTimeout)
    broker.flow(True)
    limited = connect(rate=50, rate_burst=1).channel()
    for number in range(10):
        limited.basic_publish("", "q", b"%d" % number)
    broker.wait_until(lambda broker: bodies(broker) == [b"%d" % number for number in range(10)])


@pytest.mark.parametrize(("withheld", "number"), [(False, 3000), (True, 1)])
def test_at_the_end_of_the_process_messages_are_confirmed_or_logged(broker: Any, withheld: bool, number: int) -> None:
    program = """if True:
        import sys
        import qflow_client.pika as pika
        channel = pika.Connection(pika.URLParameters(sys.argv[1])).channel()
        channel.confirm_delivery(lambda answer: None)
        for _ in range(int(sys.argv[2])):
            channel.basic_publish("", "q", b"x" * 300)
    """
    if withheld:
        broker.withhold_confirms()
    command = [sys.executable, "-c", program, broker.url, str(number)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert ("messages may be lost at the end of the process: at least 1 are" in ended.stderr) is withheld
    assert broker.queue("q").depth == number
