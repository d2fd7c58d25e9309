"""The asynchronous adapters: a publish cannot wait, so the program gets an error or an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client import FlowEventKind, HoldKind, ProducerFlowed
from qflow_client.logs import flush_logs
from tests.integration.producer.processes import in_child
from tests.integration.producer.tools import PATIENCE, bodies, eventually, logged

from .tools import refused

ADAPTERS = [
    name for name in ("select", "asyncio", "tornado", "gevent") if name in ("select", "asyncio") or find_spec(name)
]


class Running:
    """An asynchronous connection whose loop runs on a separate thread."""

    def __init__(self, adapter: str, url: str) -> None:
        self._ready: Future[Any] = Future()
        self._adapter = adapter
        self._url = url
        self.channel: Any = None
        self._thread = threading.Thread(target=self._run, name=f"{adapter} loop", daemon=True)
        self._thread.start()
        self._ready.result(PATIENCE)

    def _run(self) -> None:
        module = import_module(f"qflow_client.pika.adapters.{self._adapter}_connection")
        connect = getattr(module, f"{self._adapter.capitalize()}Connection")
        loop: Any = None
        if self._adapter == "asyncio":
            loop = asyncio.new_event_loop()
        elif self._adapter == "tornado":
            loop = import_module("tornado.ioloop").IOLoop(make_current=False)
        self.connection = connect(
            pika.URLParameters(self._url),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._on_channel),
            on_open_error_callback=lambda _connection, error: self._ready.set_exception(error),
            on_close_callback=lambda *_: self._stop(),
            custom_ioloop=loop,
        )
        self.loop = self.connection.ioloop
        if self._adapter == "asyncio":
            self.loop.run_forever()
        else:
            self.loop.start()
        self.loop.close()

    def _stop(self) -> None:
        self.loop.stop()

    def _on_channel(self, channel: Any) -> None:
        self.channel = channel
        self._ready.set_result(None)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the loop's thread, and return its result."""
        result: Future[Any] = Future()

        def call() -> None:
            try:
                result.set_result(function(*arguments))
            except BaseException as error:
                result.set_exception(error)

        self.connection._adapter_add_callback_threadsafe(call)
        return result.result(PATIENCE)

    def publish(self, body: bytes = b"", **more: Any) -> None:
        self.do(lambda: self.channel.basic_publish("", "q", body, **more))

    def holds(self) -> list[str]:
        return [str(hold.kind) for hold in self.do(lambda: self.channel.flow_state).holds]

    def close(self) -> None:
        if self.connection.is_open:
            self.do(self.connection.close)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def running(adapter: str, broker: Any, request: pytest.FixtureRequest) -> Iterator[Running]:
    query = getattr(request.function, "query", "")
    running = Running(adapter, f"{broker.url}?{query}")
    yield running
    running.close()


def settings(query: str) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.query = query
        return function

    return mark


def test_J7_a_stopped_channel_answers_with_flow_ok_raises_on_publish_and_sends_flow_events(broker, running, wire):
    events: list[Any] = []
    running.do(running.channel.on_flow, events.append)
    broker.flow(False, broker.channels()[0].name)
    wire.wait_for("in", "Channel.FlowOk")
    stopped = wire.where("in", "Channel.FlowOk")[0]
    with pytest.raises(ProducerFlowed, match="use a flow callback or flow_state to learn when to continue") as caught:
        running.publish(b"refused")
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CHANNEL_FLOW]
    assert (caught.value.message, caught.value.exchange, caught.value.routing_key) == (b"refused", "", "q")
    # A flow callback that reports the end of a stop may publish.
    running.do(
        running.channel.on_flow,
        lambda event: event.flowed or running.channel.basic_publish("", "q", b"at last"),
    )
    assert wire.came_between(stopped) == []
    broker.flow(True)
    broker.wait_until(lambda broker: bodies(broker) == [b"at last"])
    assert [event.kind for event in events] == [FlowEventKind.FLOWED, FlowEventKind.UNFLOWED]


def test_calls_in_a_forked_child_raise_an_error_and_the_parent_can_continue(broker, running):
    channel, connection = running.channel, running.connection

    def child() -> None:
        assert not connection.is_open
        assert not channel.is_open
        refused(
            lambda: channel.basic_publish("", "q", b"child"),
            lambda: channel.queue_declare("child"),
            lambda: channel.basic_get("q", print),
            lambda: channel.close(),
            lambda: connection.channel(),
            lambda: connection.close(),
        )

    in_child(child)
    running.publish(b"parent")
    broker.wait_until(lambda broker: bodies(broker) == [b"parent"])


def test_a_blocked_connection_holds_the_channel_even_if_a_flow_callback_fails(broker, running, caplog):
    told = threading.Event()
    stop = running.do(running.channel.on_flow, lambda _event: 1 / 0)
    running.do(running.channel.on_flow, lambda _event: told.set())
    broker.block("no memory")
    assert told.wait(PATIENCE)
    assert flush_logs(PATIENCE)
    assert "a flow callback failed" in caplog.text
    running.do(stop)
    running.do(stop)
    with pytest.raises(ProducerFlowed, match="no memory"):
        running.publish()
    broker.unblock()
    eventually(lambda: running.holds() == [])
    running.publish()
    broker.wait_until(lambda broker: broker.queue("q").depth == 1)


@settings("capacity=3")
def test_C6_the_window_is_full_until_confirms_arrive_and_confirm_callbacks_may_publish(broker, running):
    answers: list[Any] = []
    ready = threading.Event()

    def answered(frame: Any) -> None:
        answers.append(type(frame.method).__name__)
        if len(bodies_sent) < 6:
            bodies_sent.append(b"again")
            running.channel.basic_publish("", "q", b"again")

    bodies_sent = [b"first"] * 3
    running.publish(b"before")
    running.do(lambda: running.channel.confirm_delivery(answered, lambda _ok: ready.set()))
    assert ready.wait(PATIENCE)
    broker.withhold_confirms()
    for _ in range(3):
        running.publish(b"first")
    with pytest.raises(ProducerFlowed) as caught:
        running.publish()
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.CAPACITY]
    broker.release_confirms()
    broker.wait_until(lambda broker: bodies(broker) == [b"before"] + [b"first"] * 3 + [b"again"] * 3)
    eventually(lambda: running.holds() == [])
    assert set(answers) == {"Ack"}


def test_the_setting_max_unwritten_bytes_limits_the_write_buffer_of_pika(adapter, broker, proxy):
    running = Running(adapter, f"{proxy.url(broker)}?max_unwritten_bytes=100000")
    events: list[Any] = []
    running.do(running.channel.on_flow, events.append)
    proxy.stop_reading()
    sent = 0

    def fill() -> None:
        nonlocal sent
        while True:
            running.publish(bytes(60_000))
            sent += 1

    with pytest.raises(ProducerFlowed) as caught:
        fill()
    assert [hold.kind for hold in caught.value.holds] == [HoldKind.TRANSPORT]
    proxy.go_on_reading()
    eventually(lambda: events and events[-1].kind is FlowEventKind.UNFLOWED)
    assert {str(event.hold.kind) for event in events} == {HoldKind.TRANSPORT}
    broker.wait_until(lambda broker: broker.queue("q").depth == sent)
    running.close()


@settings("rate=3&rate_burst=1")
def test_a_rate_limit_holds_the_channel_and_an_unflowed_event_reports_the_end_of_the_hold(running):
    unflowed = threading.Event()
    running.do(running.channel.on_flow, lambda event: None if event.flowed else unflowed.set())

    def burst() -> None:
        for _ in range(100):
            unflowed.clear()
            running.channel.basic_publish("", "q", b"")

    # On a slow machine the rate may already permit the second message.
    with pytest.raises(ProducerFlowed):
        running.do(burst)
    assert unflowed.wait(PATIENCE)
    running.publish()


def test_messages_and_methods_are_written_in_the_order_of_the_calls(broker, running):
    def program() -> None:
        running.channel.queue_declare("new")
        running.channel.basic_publish("", "new", b"after the queue is there")

    running.do(program)
    broker.wait_until(lambda broker: [queue for queue in broker.queues() if queue.name == "new" and queue.depth == 1])


def test_the_callback_of_add_on_flow_callback_gets_channel_flow_as_in_pika(broker, running):
    frames: list[Any] = []
    running.do(running.channel.add_on_flow_callback, frames.append)
    broker.flow(False, broker.channels()[0].name)
    eventually(lambda: frames)
    assert frames[0].method.active is False


def test_confirm_delivery_without_a_callback_raises_the_error_of_pika_and_changes_nothing(running):
    # The type of the error depends on pika's version.
    with pytest.raises((TypeError, ValueError), match="requires a callback"):
        running.do(lambda: running.channel.confirm_delivery(None))
    running.publish()
    running.do(lambda: running.channel.confirm_delivery(print))
    running.publish()
    eventually(lambda: running.do(lambda: running.channel.flow_control.protocol.unsettled) == 0)


def test_a_second_confirm_delivery_does_not_restart_the_count_of_confirms(running):
    running.publish(b"unconfirmed")
    for number in range(2):
        running.do(lambda: running.channel.confirm_delivery(print))
        running.publish(b"%d" % number)
        running.publish(b"%d" % number)
    eventually(lambda: running.do(lambda: running.channel.flow_control.protocol.unsettled) == 0)


def test_a_close_by_the_program_logs_no_warning(running, caplog):
    running.publish()
    running.close()
    assert logged(caplog) == []


def test_a_channel_closed_by_the_broker_logs_a_warning_only_if_messages_are_unconfirmed(broker, running, caplog):
    closed = threading.Event()
    for body in None, b"unconfirmed":
        made: Future[Any] = Future()
        running.do(lambda made=made: running.connection.channel(on_open_callback=made.set_result))
        channel = made.result(PATIENCE)
        closed.clear()
        channel.add_on_close_callback(lambda *_: closed.set())
        if body is not None:
            ready = threading.Event()
            running.do(lambda c=channel, r=ready: c.confirm_delivery(print, lambda _ok: r.set()))
            assert ready.wait(PATIENCE)
            broker.withhold_confirms()
            running.do(lambda c=channel, b=body: c.basic_publish("", "q", b))
        running.do(lambda c=channel: c.queue_declare("missing", passive=True))
        assert closed.wait(PATIENCE)
        assert bool(logged(caplog)) is (body is not None)
    broker.release_confirms()


def test_a_channel_created_by_pika_can_be_wrapped(broker):
    import pika as original

    made: Future[Any] = Future()
    connection = original.SelectConnection(
        original.URLParameters(broker.url),
        on_open_callback=lambda connection: connection.channel(on_open_callback=made.set_result),
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )
    loop = threading.Thread(target=connection.ioloop.start)
    loop.start()
    channel = made.result(PATIENCE)
    done: Future[Any] = Future()
    connection.ioloop.add_callback_threadsafe(lambda: done.set_result(pika.wrap(channel)))
    assert done.result(PATIENCE) is channel
    assert isinstance(channel, pika.Channel)
    broker.flow(False, broker.channels()[0].name)
    eventually(lambda: broker.channels()[0].flow_ok and channel.flow_control.protocol.reports.holds)
    refused: Future[Any] = Future()

    def publish() -> None:
        try:
            channel.basic_publish("", "q", b"")
        except ProducerFlowed as error:
            refused.set_result(error)

    connection.ioloop.add_callback_threadsafe(publish)
    assert refused.result(PATIENCE).holds
    connection.ioloop.add_callback_threadsafe(connection.close)
    loop.join(PATIENCE)
    connection.ioloop.close()
    assert broker.queue("q").depth == 0
