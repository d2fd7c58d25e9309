"""A producer restores a lost connection and loses no message."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from qflow_client import (
    ConnectionFailed,
    FlowControlTimeout,
    FlowEventKind,
    MessageNacked,
    Outcome,
    OutcomeUnknown,
    Producer,
    ProducerClosed,
    UndeliveredMessages,
    connect,
)
from qflow_client.broker import Broker
from qflow_client.message import REPUBLISHED
from qflow_client.sync.pika_io import TapIOServices
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.relay import Way
from tests.effort import rounds

from .tools import (
    PATIENCE,
    Flows,
    Proxy,
    bodies,
    ends_within,
    eventually,
    holds,
    message_ids,
    send_unconfirmed,
    start,
    start_send,
    takes,
    unused_port,
    wait_closed,
    wait_held,
)

FAST = {"reconnect_delay": 0.02}


def marked(broker: Broker) -> list[bool]:
    return [bool((message.properties.headers or {}).get(REPUBLISHED)) for message in broker.messages("q")]


def begin(stack: ExitStack, **options: Any) -> Broker:
    broker = Broker(**({"port": unused_port()} | options))
    # A producer that waits for this broker finds the queue, however early it connects.
    broker.declare_queue("q")
    return stack.enter_context(broker)


@pytest.fixture
def end() -> Iterator[ExitStack]:
    """A stack that ends the broker `first` when it is closed."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def first(end: ExitStack) -> Broker:
    """A broker that ends before the test does. Its port stays unused."""
    return begin(end)


def test_unsettled_messages_are_resent_in_order_marked_as_second_copies_and_before_new_messages(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(reconnect_delay=0.3)
    flows = Flows(producer, kinds=["disconnected"])
    assert producer.send(b"0").result(timeout=PATIENCE) is Outcome.CONFIRMED
    broker.withhold_confirms()
    receipts = [producer.send(b"%d" % number) for number in range(1, 4)]
    broker.wait_until(lambda b: b.queue("q").depth == 4)
    broker.drop_connections()
    broker.release_confirms()
    # By now it may be back.
    flows.wait_for(FlowEventKind.FLOWED)
    receipts.append(producer.send(b"4", timeout=PATIENCE))
    producer.flush(timeout=PATIENCE)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 4
    assert bodies(broker) == [b"0", b"1", b"2", b"3", b"1", b"2", b"3", b"4"]
    assert marked(broker) == [False] * 4 + [True] * 3 + [False]
    ids = message_ids(broker)
    assert ids[1:4] == ids[4:7]
    assert not producer.closed


def test_with_on_disconnect_fail_unsettled_messages_become_unknown_and_the_producer_continues(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(on_disconnect="fail", **FAST)
    (written,) = send_unconfirmed(producer, broker, b"1")
    broker.drop_connections()
    with pytest.raises(OutcomeUnknown, match="the connection is lost"):
        written.result(timeout=PATIENCE)
    broker.release_confirms()
    assert producer.send(b"2", timeout=PATIENCE).result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"1", b"2"]
    assert marked(broker) == [False, False]


def test_the_producer_waits_for_a_broker_that_restarts(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack, stack: ExitStack
) -> None:
    port = first.port
    producer = make_producer(first.url, **FAST)
    events: list[Any] = []
    producer.on_flow(events.append)
    receipts = send_unconfirmed(producer, first, *(b"%d" % number for number in range(100)))
    end.close()
    wait_held(producer, "disconnected")
    with pytest.raises(FlowControlTimeout, match=r"disconnected .*the connection is lost"):
        producer.send(b"no", timeout=0.05)
    waiting = start_send(producer, b"100")
    again = begin(stack, port=port)
    receipts.append(waiting.result())
    producer.flush(timeout=PATIENCE)
    assert bodies(again) == [b"%d" % number for number in range(101)]
    assert marked(again) == [True] * 100 + [False]
    assert producer.wait_unflowed(timeout=PATIENCE)
    assert "disconnected" in [event.hold.kind for event in events if event.hold is not None]


def test_a_reconnecting_producer_tries_several_hosts_one_after_the_other(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack, broker: Broker
) -> None:
    producer = make_producer([first.url, broker.url], **FAST)
    (receipt,) = send_unconfirmed(producer, first, b"1")
    end.close()
    assert receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"1"]


def test_a_host_that_never_answers_delays_the_producer_for_at_most_connect_timeout(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack, broker: Broker, stack: ExitStack
) -> None:
    port = first.port
    producer = make_producer([first.url, broker.url], **FAST)
    (receipt,) = send_unconfirmed(producer, first, b"1")
    # Only from now on, because on a slow machine the first connection may take longer.
    object.__setattr__(producer.settings, "connect_timeout", 0.5)
    # Whoever connects to its port now is not answered.
    first.drop_connections()
    end.close()
    silent = stack.enter_context(socket.create_server(("127.0.0.1", port)))
    assert receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"1"]
    silent.close()


@pytest.mark.parametrize("others", [False, True])
def test_a_wrong_password_ends_the_producer_immediately_unless_a_different_host_may_accept_it(
    make_producer: Callable[..., Producer],
    first: Broker,
    end: ExitStack,
    make_broker: Callable[..., Broker],
    others: bool,
) -> None:
    spare = begin(end)
    port = first.port
    producer = make_producer([first.url, spare.url] if others else first.url, **FAST)
    (receipt,) = send_unconfirmed(producer, first, b"1")
    spare_port = spare.port
    end.close()
    make_broker(port=port, users={"guest": "changed"})
    if others:
        again = make_broker(port=spare_port)
        assert receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED
        assert bodies(again) == [b"1"]
        return
    wait_closed(producer)
    with pytest.raises(OutcomeUnknown, match=r"connecting is not possible: .*(403|ACCESS_REFUSED)"):
        receipt.result(timeout=PATIENCE)
    with pytest.raises(ProducerClosed, match=r"connecting is not possible: .*(403|ACCESS_REFUSED)") as caught:
        producer.send(b"2")
    assert "guest:guest" not in str(caught.value)


def test_a_producer_ends_when_its_reconnect_timeout_has_passed(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack
) -> None:
    producer = make_producer(first.url, reconnect_timeout=0.3, **FAST)
    waiting = start(producer.wait_unflowed)
    waiting.wait()
    end.close()
    with ends_within(1.3):
        wait_closed(producer)
    with pytest.raises(ProducerClosed, match=r"connecting did not succeed within 0\.3 s: "):
        producer.send(b"")


def test_closing_a_disconnected_producer_ends_immediately_if_all_messages_are_settled(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack
) -> None:
    producer = make_producer(first.url, reconnect_delay=60)
    end.close()
    wait_held(producer, "disconnected")
    with takes(0.0):
        producer.close()


@pytest.mark.parametrize("delay", [0.02, 60])
def test_closing_a_disconnected_producer_reconnects_until_the_deadline_and_reports_unsettled_messages(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack, delay: float
) -> None:
    producer = make_producer(first.url, reconnect_delay=delay)
    send_unconfirmed(producer, first, b"1")
    end.close()
    wait_held(producer, "disconnected")
    with takes(0.3), pytest.raises(UndeliveredMessages) as caught:
        producer.close(timeout=0.3)
    assert [message.body for message in caught.value.unknown] == [b"1"]


def test_closing_a_disconnected_producer_delivers_its_messages_if_the_broker_comes_back(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack, make_broker: Callable[..., Broker]
) -> None:
    port = first.port
    producer = make_producer(first.url, **FAST)
    (receipt,) = send_unconfirmed(producer, first, b"1")
    end.close()
    wait_held(producer, "disconnected")
    closing = start(producer.close, timeout=PATIENCE)
    eventually(lambda: producer.closed)
    again = make_broker(port=port)
    closing.result()
    assert receipt.outcome is Outcome.CONFIRMED
    assert bodies(again) == [b"1"]


def test_leaving_the_with_block_by_an_exception_does_not_wait_for_a_connection(
    make_producer: Callable[..., Producer], first: Broker, end: ExitStack
) -> None:
    producer = make_producer(first.url, **FAST)
    send_unconfirmed(producer, first, b"1")
    end.close()
    wait_held(producer, "disconnected")
    with takes(0.0), pytest.raises(KeyError) as caught, producer:
        raise KeyError
    undelivered = caught.value.undelivered  # type: ignore[attr-defined]  # put there by the producer
    assert len(undelivered.unknown) == 1


def test_a_message_that_was_partly_written_when_the_connection_was_lost_arrives_whole(
    make_producer: Callable[..., Producer], broker: Broker, proxy: Proxy
) -> None:
    producer = make_producer(proxy.url(broker), **FAST)
    body = bytes(range(256)) * 40_000
    proxy.stop_reading()
    receipts = [producer.send(body, timeout=None)]
    eventually(lambda: producer.in_flight == 1)
    proxy.cut()
    proxy.go_on_reading()
    receipts.append(producer.send(b"next", timeout=PATIENCE))
    producer.flush(timeout=PATIENCE)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 2
    assert bodies(broker) == [body, b"next"]
    assert marked(broker) == [True, False]


def test_many_senders_lose_no_message_over_many_lost_connections(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=50, **FAST)
    count, senders = rounds(300, least=100), 4

    def work(sender: int) -> list[Any]:
        return [producer.send(b"%d %d" % (sender, number), timeout=None) for number in range(count)]

    jobs = [start(work, sender) for sender in range(senders)]
    for part in range(1, 6):
        broker.wait_until(lambda b: b.queue("q").depth >= part * count / 2)  # noqa: B023  # called at once
        broker.drop_connections()
    receipts = [receipt for job in jobs for receipt in job.result()]
    producer.flush(timeout=PATIENCE)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    # The last loss may have come after the last confirm.
    eventually(lambda: holds(producer) == [])
    firsts = list(dict.fromkeys(bodies(broker)))
    assert len(firsts) == count * senders
    for sender in range(senders):
        mine = [body for body in firsts if body.startswith(b"%d " % sender)]
        assert mine == [b"%d %d" % (sender, number) for number in range(count)]
    seen: set[bytes] = set()
    for message in broker.messages("q"):
        assert message.body not in seen or (message.properties.headers or {}).get(REPUBLISHED), "an unmarked copy"
        seen.add(message.body)


def test_a_nacked_message_is_retried_until_the_broker_has_room(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(retry_delay=0.02)
    assert producer.send(b"0").result(timeout=PATIENCE) is Outcome.CONFIRMED
    broker.nack_publishes()
    receipts = [producer.send(b"%d" % number, timeout=None) for number in range(1, 2)]
    wait_held(producer, "refused")
    with pytest.raises(FlowControlTimeout, match="refused"):
        producer.send(b"no", timeout=0.05)
    waiting = start_send(producer, b"2")
    broker.nack_publishes(False)
    receipts.append(waiting.result())
    producer.flush(timeout=PATIENCE)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 2
    assert bodies(broker) == [b"0", b"1", b"2"]
    assert marked(broker) == [False, True, False]


def test_a_queue_that_nacks_messages_while_it_is_full_gets_all_messages_when_it_is_emptied(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(retry_delay=0.02, retry_delay_max=0.1)
    broker.nack_publishes()
    sending = start(lambda: [producer.send(b"%d" % number, timeout=None) for number in range(200)])
    wait_held(producer, "refused")
    for _ in range(3):
        broker.nack_publishes(False)
        eventually(lambda: "refused" not in holds(producer))
        broker.nack_publishes()
        # By now all may have gone.
        eventually(lambda: "refused" in holds(producer) or not sending.is_alive())
    broker.nack_publishes(False)
    receipts = sending.result()
    producer.flush(timeout=PATIENCE)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert {int(body) for body in bodies(broker)} == set(range(200))


def test_a_message_that_is_nacked_until_retry_for_is_over_settles_as_nacked(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(retry_for=0.3, retry_delay=0.02)
    broker.nack_publishes()
    receipt = producer.send(b"1")
    with pytest.raises(MessageNacked):
        receipt.result(timeout=PATIENCE)
    broker.nack_publishes(False)
    assert producer.send(b"2", timeout=PATIENCE).result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"2"]


def test_closing_a_producer_with_nacked_messages_keeps_the_deadline_and_reports_those_messages(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer()
    broker.nack_publishes()
    receipt = producer.send(b"1")
    wait_held(producer, "refused")
    with takes(0.3), pytest.raises(UndeliveredMessages):
        producer.close(timeout=0.3)
    assert receipt.outcome in (Outcome.NACKED, Outcome.UNKNOWN)


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
def test_a_connection_that_is_reset_right_after_it_opens_counts_as_a_failed_attempt(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """In this case pika raises an error in its loop. asyncio has no such case."""
    with FaultProxy(broker.url) as proxy:
        link_up = TapIOServices.create_streaming_connection

        def link_up_what_was_reset(services: Any, *arguments: Any, **keywords: Any) -> Any:
            sock = keywords.get("sock") or arguments[1]
            proxy.wait_until(lambda _: proxy.connections, PATIENCE)
            proxy.reset()
            eventually(lambda: not is_connected(sock))
            monkeypatch.setattr(TapIOServices, "create_streaming_connection", link_up)
            return link_up(services, *arguments, **keywords)

        def is_connected(sock: socket.socket) -> bool:
            try:
                return bool(sock.getpeername())
            except OSError:
                return False

        monkeypatch.setattr(TapIOServices, "create_streaming_connection", link_up_what_was_reset)
        with pytest.raises(ConnectionFailed, match="reset as soon as it was open"):
            Producer(proxy.url.replace("amqp", scheme, 1), routing_key="q")
        if scheme == "amqps":
            return
        monkeypatch.setattr(TapIOServices, "create_streaming_connection", link_up_what_was_reset)
        with pytest.raises(ConnectionFailed, match="reset as soon as it was open"):
            connect(proxy.url)
        with Producer(proxy.url, routing_key="q", **FAST) as producer:  # type: ignore[arg-type]  # of one table
            monkeypatch.setattr(TapIOServices, "create_streaming_connection", link_up_what_was_reset)
            flows = Flows(producer, kinds=["disconnected"])
            proxy.cut()
            flows.wait_for(FlowEventKind.FLOWED)
            assert producer.send(b"1", timeout=PATIENCE).result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"1"]


def open_nothing(*_arguments: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


class _Full:
    """The module `socket` of a process without a free file descriptor."""

    socket = staticmethod(open_nothing)


def start_no_thread(_timer: threading.Timer) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "what", "why"),
    [
        ("pika.adapters.utils.connection_workflow.socket", _Full(), "Too many open files"),
        ("threading.Timer.start", start_no_thread, "can't start new thread"),
    ],
    ids=["descriptors", "threads"],
)
def test_a_producer_reconnects_after_the_process_had_no_free_descriptors_or_threads(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, where: str, what: Any, why: str
) -> None:
    with Producer(broker.url, routing_key="q", **FAST) as producer:  # type: ignore[arg-type]  # of one table
        with monkeypatch.context() as now:
            now.setattr(where, what)
            with pytest.raises(ConnectionFailed, match=why):
                Producer(broker.url, routing_key="q")
            # The loop that runs must not end: another thread may use each free descriptor before the loop runs again.
            now.setattr("select.epoll", open_nothing)
            broker.drop_connections()
            eventually(lambda: why in str(producer.health()))
        assert producer.send(b"1", timeout=PATIENCE).result(timeout=PATIENCE) is Outcome.CONFIRMED


def test_a_message_at_which_the_broker_drops_the_connection_is_settled_and_all_others_arrive_in_order(
    make_producer: Callable[..., Producer], broker: Broker, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops: list[bytes] = []
    receive = Way.receive

    def receive_or_drop(way: Way, data: bytes) -> None:
        if b"poison" in data:
            drops.append(data)
            way.connection.finish()
        else:
            receive(way, data)

    # The proxy drops a connection instead of passing on this message, as if the broker crashed over the message.
    monkeypatch.setattr(Way, "receive", receive_or_drop)
    proxy = stack.enter_context(FaultProxy(broker.url))
    producer = make_producer(proxy.url, reconnect_delay=0.02, reconnect_delay_max=0.1)
    sent = [b"%d" % number for number in range(10)]
    sent.insert(5, b"poison")
    receipts = [producer.send(body) for body in sent]
    with pytest.raises(OutcomeUnknown, match="are lost when it is sent"):
        receipts[5].result(timeout=60)
    receipts.append(producer.send(b"10", timeout=60))
    del receipts[5]
    for receipt in receipts:
        assert receipt.result(timeout=60) is Outcome.CONFIRMED
    assert list(dict.fromkeys(bodies(broker))) == [b"%d" % number for number in range(11)]
    # On a slow machine, losses that come late do not count against the message.
    assert 0 < len(drops) <= 30
    assert not producer.closed
