"""A source's position is stored in the same commit as its message (E13), in both producers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qflow_client import (
    FlowControlTimeout,
    Message,
    NotDurable,
    Outbox,
    OutboxError,
    OutboxFull,
    Outcome,
    Position,
    Producer,
    ProducerFlowed,
    RoutedMessage,
    SettingsError,
)
from qflow_client.broker import Broker
from qflow_client.errors import ProducerClosed
from qflow_client.sync.pika_io import _TapSocket
from tests.interrupting import EVERY, each_interrupt

from .test_outbox import leave, marked, on_disk, store
from .tools import PATIENCE, Proxy, bodies, eventually, finish, nothing_expires, start, wait_done, wait_in_line

pytestmark = pytest.mark.usefixtures("patient_sends", "patient_ends")

ROWS = "orders.csv"


@pytest.fixture
def producer(make_producer: Callable[..., Producer], path: Path) -> Producer:
    """A producer with the outbox `path`."""
    return make_producer(outbox=path)


def numbered(first: int, last: int) -> Iterator[tuple[bytes, Position]]:
    for number in range(first, last + 1):
        yield b"%d" % number, Position(ROWS, number)


def test_E13_a_program_resumes_after_the_position_of_the_last_stored_message(
    broker: Broker, producer: Producer, make_producer: Callable[..., Producer], path: Path
) -> None:
    assert producer.position(ROWS) is None
    broker.withhold_confirms()
    for body, position in numbered(1, 3):
        producer.send(body, position=position)
    producer.send_nowait(b"4", position=Position(ROWS, 4))
    assert producer.position(ROWS) == 4
    assert producer.position("another") is None
    broker.wait_until(lambda b: b.queue("q").depth == 4)
    leave(producer)
    broker.purge("q")
    broker.release_confirms()
    producer = make_producer(outbox=path)
    assert producer.position(ROWS) == 4
    producer.send_many(list(numbered(5, 200)))
    assert producer.position(ROWS) == 200
    producer.close(timeout=PATIENCE)
    assert bodies(broker) == [b"%d" % number for number in range(1, 201)]
    assert marked(broker) == [b"1", b"2", b"3", b"4"]
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == 200


@pytest.mark.parametrize("way", ["list", "generator", "mixed"])
def test_E13_send_many_accepts_messages_with_their_positions(broker: Broker, producer: Producer, way: str) -> None:
    messages: Any = numbered(1, 3)
    if way != "generator":
        messages = list(messages)
    if way == "mixed":
        messages += [b"plain", (Message("4", priority=1), Position(ROWS, "four")), ("5", Position("another", 5))]
    receipts = producer.send_many(messages)
    wait_done(receipts)
    assert bodies(broker) == [b"1", b"2", b"3", *([b"plain", b"4", b"5"] if way == "mixed" else [])]
    assert producer.position(ROWS) == ("four" if way == "mixed" else 3)
    assert producer.position("another") == (5 if way == "mixed" else None)
    # Sent again, it is a message like any other.
    producer.send(receipts[0].message)
    producer.flush(timeout=PATIENCE)
    assert producer.position(ROWS) == ("four" if way == "mixed" else 3)


def test_E13_send_many_with_positions_continues_after_a_full_window_as_soon_as_messages_settle(
    broker: Broker, make_producer: Callable[..., Producer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test may take.
    monkeypatch.setattr("qflow_client.outbox.writer._GATHER", 2 * PATIENCE)
    producer = make_producer(outbox=path, capacity=10)
    receipts = producer.send_many(numbered(1, 100), timeout=PATIENCE)
    wait_done(receipts)
    assert bodies(broker) == [b"%d" % number for number in range(1, 101)]


def test_E13_a_position_without_an_outbox_raises_an_error_before_sending(
    broker: Broker, make_producer: Callable[..., Producer]
) -> None:
    producer = make_producer()
    calls: list[Callable[[], object]] = [
        lambda: producer.send(b"1", position=Position(ROWS, 1)),
        lambda: producer.send_nowait(b"1", position=Position(ROWS, 1)),
        lambda: producer.send_many([(b"1", Position(ROWS, 1))]),
        lambda: producer.position(ROWS),
    ]
    for call in calls:
        with pytest.raises(SettingsError, match="the producer has no outbox to store a position in; make it with outb"):
            call()
    producer.send(b"2")
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == [b"2"]


def test_E13_an_invalid_position_raises_an_error_before_sending(broker: Broker, producer: Producer) -> None:
    with pytest.raises(TypeError, match="position must be a Position, not int: 7"):
        producer.send(b"1", position=7)  # type: ignore[arg-type]  # on purpose
    for pair in [(b"1", 7), (b"1",), (b"1", Position(ROWS, 1), "x")]:
        with pytest.raises(TypeError, match="messages: a tuple must be a message and its Position"):
            producer.send_many([pair])  # type: ignore[list-item]  # on purpose
    assert bodies(broker) == []
    assert producer.position(ROWS) is None


@pytest.mark.parametrize("given", [b"body", Message(b"body"), RoutedMessage(b"body", routing_key="q")], ids=type)
def test_E13_an_error_about_a_message_with_a_position_contains_the_message_that_was_passed(
    broker: Broker, make_producer: Callable[..., Producer], path: Path, given: bytes | Message
) -> None:
    producer = make_producer(outbox=path, outbox_max_bytes=500, outbox_full="raise")
    position = Position(ROWS, 1)
    producer.pause()
    with pytest.raises(FlowControlTimeout) as flowed:
        producer.send(given, timeout=0, position=position)
    assert flowed.value.message is given
    with pytest.raises(ProducerFlowed) as nowait:
        producer.send_nowait(given, position=position)
    assert nowait.value.message is given
    with pytest.raises(FlowControlTimeout) as many:
        producer.send_many([(given, position)], timeout=0)
    assert many.value.message is given
    producer.resume()
    large = Message(bytes(1000))
    with pytest.raises(OutboxFull) as full:
        producer.send(large, position=position)
    assert full.value.message is large
    assert producer.position(ROWS) is None
    producer.close(timeout=PATIENCE)
    with pytest.raises(ProducerClosed) as closed:
        producer.send(given, position=position)
    assert closed.value.message is given


def test_E13_a_message_with_a_position_that_waited_for_admission_keeps_the_position(
    broker: Broker, producer: Producer
) -> None:
    producer.pause()
    job = start(lambda: producer.send(b"1", position=Position(ROWS, 1)))
    wait_in_line(producer, 1)
    assert producer.position(ROWS) is None
    producer.resume()
    wait_done([job.result()])
    assert producer.position(ROWS) == 1
    assert bodies(broker) == [b"1"]


# If `timeout` and `GRACE`, which is 8 s here, are less than 10 s together, the writer commits.
@pytest.mark.parametrize("timeout", [None, 1.0], ids=["commits itself", "the writer commits"])
def test_E13_a_message_with_a_position_is_sent_immediately_after_it_is_on_disk_and_not_before(
    broker: Broker, producer: Producer, timeout: float | None
) -> None:
    outbox = store(producer)
    written: list[list[bytes]] = []
    commit = outbox._noted.write

    def look_before(*arguments: Any, **options: Any) -> Any:
        if outbox._noted.rows:
            written.append(bodies(broker))
        return commit(*arguments, **options)

    outbox._noted.write = look_before  # type: ignore[method-assign]  # on purpose
    for number in range(1, 4):
        wait_done([producer.send(b"%d" % number, position=Position(ROWS, number), timeout=timeout)])
    assert written == [[], [b"1"], [b"1", b"2"]]


def send_late(producer: Producer) -> None:
    # Whether the disk works again before it has failed for this one, too.
    with suppress(NotDurable):
        producer.send(b"2")


def test_E13_while_the_disk_fails_a_message_with_a_position_is_not_sent_to_the_broker(
    broker: Broker, producer: Producer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = store(producer)._file
    failed = threading.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise OutboxError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(file, "execute_many", fail)
        with pytest.raises(NotDurable, match="disk full"):
            producer.send(b"1", position=Position(ROWS, 1))
        behind = start(lambda: send_late(producer))
        eventually(lambda: producer.unsettled == 2, "the message behind it")
        assert bodies(broker) == on_disk(path) == []
        # It is admitted, so a program that goes on in this process does not send it again.
        assert producer.position(ROWS) == 1
        assert failed.is_set()
    behind.result()
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == [b"1", b"2"]


def test_E13_messages_with_positions_keep_their_positions_and_order_over_a_lost_connection(
    broker: Broker, make_producer: Callable[..., Producer], path: Path, proxy: Proxy
) -> None:
    producer = make_producer(proxy.url(broker), outbox=path, reconnect_delay=0.01)
    broker.withhold_confirms()
    producer.send_many(list(numbered(1, 3)))
    eventually(lambda: len(bodies(broker)) == 3, "three messages")
    proxy.cut()
    broker.release_confirms()
    producer.send_many(list(numbered(4, 5)))
    producer.flush(timeout=PATIENCE)
    assert list(dict.fromkeys(bodies(broker))) == [b"1", b"2", b"3", b"4", b"5"]
    assert producer.position(ROWS) == 5


def test_E13_a_send_that_ctrl_c_interrupts_is_stored_with_the_position_or_not_at_all(
    broker: Broker, path: Path
) -> None:
    sent = []
    with Producer(broker.url, routing_key="q", outbox=path) as producer:
        for interrupt in each_interrupt(least=100, every=EVERY):
            body, position = b"%d" % interrupt.at, Position(ROWS, interrupt.at)
            interrupt(lambda: producer.send(body, position=position))  # noqa: B023  # called at once
            if producer.position(ROWS) == interrupt.at:
                sent.append(body)
            # The I/O is woken for it, wherever the interrupt came.
            producer.flush(timeout=PATIENCE)
    assert bodies(broker) == sent
    assert marked(broker) == []
    with Outbox(path) as outbox:
        assert outbox.position(ROWS) == interrupt.at


@pytest.mark.parametrize("skin", ["threads"], indirect=True)
def test_a_call_of_position_discards_no_bytes_that_the_io_thread_is_writing(
    broker: Broker, make_producer: Callable[..., Producer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make_producer(outbox=path, delivery_timeout=0.05)
    with nothing_expires(producer):
        producer.send(b"first").result(timeout=PATIENCE)
    send_ours, calls = _TapSocket.send_ours, 0

    def call_late() -> None:
        end = time.monotonic() + 0.05
        eventually(lambda: time.monotonic() > end, "the message's delivery timeout")
        finish([start(lambda: producer.position(ROWS))])

    def write(tapped: _TapSocket, data: bytes) -> int:
        nonlocal calls
        # The timeout is measured from a mark that a step sets. So the message has surely expired before the third call.
        while b"second" in data and calls < 3:
            calls += 1
            call_late()
        return send_ours(tapped, data)

    monkeypatch.setattr(_TapSocket, "send_ours", write)
    second = producer.send(b"second")
    wait_done([second])
    # The message is on its way, so its outcome cannot be `FAILED`.
    assert second.outcome in (Outcome.CONFIRMED, Outcome.UNKNOWN)
    with nothing_expires(producer):
        assert producer.send(b"third").result(timeout=PATIENCE) is Outcome.CONFIRMED
    assert bodies(broker) == [b"first", b"second", b"third"]
