"""Pipelined confirms: a publish does not wait for its confirm."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import ConfirmTimeout, FlowControlTimeout, HoldKind
from qflow_client.logs import flush_logs
from qflow_client.pika.adapters.blocking_connection import _at_exit
from tests.collecting import collect
from tests.integration.producer.tools import PATIENCE, bodies, ends_within, logged, start, takes

from .tools import pump, start_waiting

_PROGRAM = """if True:
    import sys
    import qflow_client.pika as pika
    channel = pika.BlockingConnection(pika.URLParameters(sys.argv[1])).channel()
    channel.confirm_delivery(pipelined=True)
    for _ in range(int(sys.argv[2])):
        channel.basic_publish("", "q", b"x" * 300)
    input()
"""


@pytest.fixture
def wait() -> float:
    """Maximum seconds of a wait of the fixture `channel`."""
    return PATIENCE


@pytest.fixture
def channel(connect: Any, wait: float) -> pika.BlockingChannel:
    channel: pika.BlockingChannel = connect(capacity=10, max_producer_flow_control_wait=wait).channel()
    channel.confirm_delivery(pipelined=True)
    return channel


def test_a_loop_of_publishes_sends_all_messages_in_order(broker, channel):
    for number in range(1000):
        channel.basic_publish("", "q", b"%d" % number)
    channel.wait_for_confirms(PATIENCE)
    assert channel.unconfirmed == ()
    assert bodies(broker) == [b"%d" % number for number in range(1000)]


@pytest.mark.parametrize("wait", [0.4])
def test_C6_unconfirmed_messages_never_exceed_the_window(broker, channel):
    broker.withhold_confirms()
    for number in range(10):
        channel.basic_publish("", "q", b"%d" % number)
    with takes(0.4), pytest.raises(FlowControlTimeout) as caught:
        channel.basic_publish("", "q", b"one too many")
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CAPACITY]
    broker.wait_until(lambda broker: broker.queue("q").depth == 10)
    assert [each.body for each in channel.unconfirmed] == bodies(broker)
    with pytest.raises(ConfirmTimeout) as late:
        channel.wait_for_confirms()
    assert late.value.unsettled == 10
    broker.release_confirms()
    channel.wait_for_confirms(PATIENCE)


def test_C6_a_publish_that_waits_for_the_window_continues_when_there_is_room(broker, channel):
    broker.withhold_confirms()
    for number in range(10):
        channel.basic_publish("", "q", b"%d" % number)
    job = start_waiting(channel, b"in time")
    broker.release_confirms()
    job.result()
    channel.wait_for_confirms(PATIENCE)
    assert bodies(broker)[10:] == [b"in time"]


def test_each_of_a_few_messages_is_sent_immediately(broker, channel):
    broker.withhold_confirms()
    for number in range(3):
        channel.basic_publish("", "q", b"")
        broker.wait_until(lambda broker, number=number: broker.queue("q").depth == number + 1)
    broker.release_confirms()


def test_many_messages_are_all_sent_even_if_the_program_makes_no_further_call(broker, connect):
    channel = connect().channel()
    channel.confirm_delivery(pipelined=True)
    broker.withhold_confirms()
    for _ in range(100):
        channel.basic_publish("", "q", b"")
    broker.wait_until(lambda broker: broker.queue("q").depth == 100)
    broker.release_confirms()


def test_the_publish_after_a_nack_raises_NackError_and_sends_no_message(broker, channel):
    broker.nack_publishes()
    properties = pika.BasicProperties(message_id="1")
    channel.basic_publish("", "q", b"refused", properties)
    pump(channel.connection, lambda: not channel._flow.protocol.unsettled)
    broker.nack_publishes(False)
    with pytest.raises(pika.exceptions.NackError) as caught:
        channel.basic_publish("", "q", b"not sent")
    (message,) = caught.value.messages
    assert (message.method.routing_key, message.properties, message.body) == ("q", properties, b"refused")
    assert caught.value.__notes__ == ["this error is about earlier messages; the message of this call was not sent"]
    channel.basic_publish("", "q", b"sent")
    channel.wait_for_confirms()
    assert bodies(broker) == [b"sent"]


def test_the_error_for_a_returned_message_is_raised_by_the_next_publish_or_by_wait_for_confirms(broker, channel):
    told: list[bytes] = []
    raised: list[tuple[int | None, bytes]] = []
    channel.add_on_return_callback(lambda _channel, _method, _properties, body: told.append(body))

    def until_it_passes(call: Any, *arguments: Any) -> None:
        while True:
            try:
                call(*arguments)
            except pika.exceptions.UnroutableError as error:
                raised.extend((each.method.reply_code, each.body) for each in error.messages)
            else:
                return

    for number in range(5):
        until_it_passes(channel.basic_publish, "", "q" if number % 2 else "nowhere", b"%d" % number, None, True)
    until_it_passes(channel.wait_for_confirms)
    assert raised == [(312, b"0"), (312, b"2"), (312, b"4")]
    # pika's own callback is also called, at the same time as in pika.
    assert told == []
    channel.connection.process_data_events()
    assert told == [b"0", b"2", b"4"]
    assert bodies(broker) == [b"1", b"3"]


@pytest.mark.parametrize("close", ["channel", "connection"])
def test_close_waits_for_confirms_and_raises_NackError_for_a_nacked_message(broker, channel, close):
    connection = channel.connection
    other = connection.channel()
    broker.nack_publishes()
    channel.basic_publish("", "q", b"")
    with pytest.raises(pika.exceptions.NackError):
        (channel if close == "channel" else connection).close()
    assert channel.is_closed
    assert other.is_open is connection.is_open is (close == "channel")


@pytest.mark.parametrize("wait", [0.4])
@pytest.mark.parametrize("close", ["channel", "connection"])
def test_close_raises_ConfirmTimeout_at_its_deadline_if_confirms_are_missing(broker, channel, close):
    connection = channel.connection
    other = connection.channel()
    other.confirm_delivery(pipelined=True)
    broker.withhold_confirms()
    for each in channel, other:
        each.basic_publish("", "q", b"unknown")
    with takes(0.4), pytest.raises(ConfirmTimeout):
        (channel if close == "channel" else connection).close()
    assert [each.body for each in channel.unconfirmed] == [b"unknown"]
    assert channel.is_closed
    assert other.is_open is connection.is_open is (close == "channel")
    broker.release_confirms()
    if close == "channel":
        # At the end of the test the connection is closed, and its wait for confirms is short.
        other.wait_for_confirms(PATIENCE)


def test_leaving_a_with_block_by_an_exception_does_not_wait_for_confirms(broker, caplog):
    parameters = pika.URLParameters(broker.url)
    broker.withhold_confirms()

    def program() -> None:
        with pika.BlockingConnection(parameters) as connection, connection.channel() as channel:
            other = connection.channel()
            for each in channel, other:
                each.confirm_delivery(pipelined=True)
                each.basic_publish("", "q", b"")
            raise LookupError("the program's own")

    with ends_within(PATIENCE), pytest.raises(LookupError):
        program()
    assert flush_logs(PATIENCE)
    assert caplog.text.count("1 messages are not confirmed, and the channel does not wait") == 2
    broker.release_confirms()


def test_the_attribute_unconfirmed_contains_the_messages_of_a_lost_connection(broker, channel):
    broker.withhold_confirms()
    for number in range(3):
        channel.basic_publish("", "q", b"%d" % number)
    broker.drop_connections()
    with pytest.raises(pika.exceptions.StreamLostError):
        channel.wait_for_confirms(PATIENCE)
    assert [each.body for each in channel.unconfirmed] == [b"0", b"1", b"2"]
    with pytest.raises(pika.exceptions.ChannelWrongStateError):
        channel.basic_publish("", "q", b"")


def test_a_queue_declare_after_a_loop_of_publishes_counts_all_messages(broker, channel):
    for _ in range(100):
        channel.basic_publish("", "q", b"")
    assert channel.queue_declare("q", passive=True).method.message_count == 100


def test_without_pipelined_confirms_wait_for_confirms_returns_immediately(connect):
    channel = connect().channel()
    channel.basic_publish("", "q", b"")
    channel.wait_for_confirms()
    channel.confirm_delivery()
    channel.basic_publish("", "q", b"")
    channel.wait_for_confirms()


def test_the_error_for_a_returned_message_is_raised_only_once(channel):
    channel.basic_publish("", "nowhere", b"", mandatory=True)
    pump(channel.connection, lambda: channel._flow.returned)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("", "q", b"")
    channel.basic_publish("", "q", b"")
    channel.wait_for_confirms()


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("withhold_confirms", "1 messages are not confirmed"),
        ("nack_publishes", "1 message(s) NACKed"),
        ("close_connections", "closed by the operator"),
    ],
)
def test_at_the_end_of_the_process_lost_messages_are_logged(broker, trouble, text):
    if trouble == "nack_publishes":
        broker.nack_publishes()
    else:
        broker.withhold_confirms()
    command = [sys.executable, "-c", _PROGRAM, broker.url, "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    broker.wait_until(lambda broker: any(channel.published for channel in broker.channels()))
    if trouble == "close_connections":
        broker.close_connections()
    _, errors = process.communicate("\n", timeout=PATIENCE)
    assert "messages may be lost at the end of the process" in errors
    assert text in errors


def test_at_the_end_of_the_process_the_confirms_are_awaited(broker):
    # Without the wait, the answers that the process has not read would end the connection with a reset.
    command = [sys.executable, "-c", _PROGRAM, broker.url, "3000"]
    ended = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert ended.stderr == ""
    assert broker.queue("q").depth == 3000


def test_at_the_end_of_the_process_a_channel_that_another_thread_uses_is_not_touched(broker, connect, caplog):
    connection = connect(max_producer_flow_control_wait=PATIENCE, capacity=1)
    channel = connection.channel()
    broker.withhold_confirms()

    def publish() -> None:
        channel.confirm_delivery(pipelined=True)
        channel.basic_publish("", "q", b"1")
        channel.basic_publish("", "q", b"2")

    job = start(publish)
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)
    _at_exit()
    text = "messages may be lost at the end of the process: another thread uses the channel, and 1 messages are not"
    assert any(text in line for line in logged(caplog))
    broker.release_confirms()
    job.result()


def test_a_dropped_channel_logs_its_unconfirmed_messages(broker, caplog):
    channel = pika.BlockingConnection(pika.URLParameters(broker.url)).channel()
    channel.confirm_delivery(pipelined=True)
    broker.withhold_confirms()
    channel.basic_publish("", "q", b"x")
    # Collect it on this thread, and not on a thread that runs the collector by chance.
    gc.disable()
    try:
        del channel
        with pytest.warns(ResourceWarning):
            collect()
    finally:
        gc.enable()
    assert [line for line in logged(caplog) if "1 messages may be lost, because the channel was not closed" in line]
