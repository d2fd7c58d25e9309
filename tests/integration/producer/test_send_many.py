"""`send_many`: one call sends many messages, and each is treated like a single message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qflow_client import (
    FlowControlTimeout,
    Message,
    NotDurable,
    OutboxError,
    Outcome,
    Position,
    Producer,
    ProducerClosed,
    ProducerFlowed,
)
from qflow_client.broker import Broker
from tests.effort import rounds

from .tools import PATIENCE, bodies, message_ids, start, takes, wait_done, wait_held, wait_in_line

Make = Callable[..., Producer]

# What is in hand is sent in another way than what is still to come.
KINDS = pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


@KINDS
@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
def test_all_messages_of_send_many_arrive_in_order_and_each_has_a_receipt(
    make_producer: Make, broker: Broker, kind: Callable[[Any], Any], capacity: int
) -> None:
    # More than twice what one part of it is.
    count = rounds(500, least=200)
    producer = make_producer(capacity=capacity)
    receipts = producer.send_many(kind(numbered(count)))
    assert [receipt.message.body for receipt in receipts] == numbered(count)
    wait_done(receipts)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert bodies(broker) == numbered(count)
    assert message_ids(broker) == [receipt.message_id for receipt in receipts]


@KINDS
def test_send_many_accepts_messages_of_all_types(
    producer: Producer, broker: Broker, kind: Callable[[Any], Any]
) -> None:
    broker.declare_queue("r")
    receipts = producer.send_many(kind([b"bytes", "text", Message(b"own", message_id="its own")]), routing_key="r")
    wait_done(receipts)
    assert bodies(broker, "r") == [b"bytes", b"text", b"own"]
    assert receipts[2].message_id == "its own"
    assert producer.send_many([]) == []


def test_send_many_sends_each_message_before_it_takes_the_next_from_the_iterable(
    producer: Producer, broker: Broker
) -> None:
    def as_they_come() -> Iterator[bytes]:
        for number in range(5):
            yield b"%d" % number
            # The one before is there while this is still to come.
            broker.wait_until(lambda b: b.queue("q").depth == number + 1)  # noqa: B023  # waited for at once

    assert len(producer.send_many(as_they_come())) == 5


@KINDS
def test_messages_that_send_many_admitted_before_its_timeout_are_not_lost(
    make_producer: Make, broker: Broker, kind: Callable[[Any], Any]
) -> None:
    producer = make_producer(capacity=100)
    broker.withhold_confirms()
    messages = kind(numbered(150))
    with takes(0.1), pytest.raises(FlowControlTimeout) as caught:
        producer.send_many(messages, timeout=0.1)
    error = caught.value
    assert [receipt.message.body for receipt in error.receipts] == numbered(100)
    assert error.message == b"100"
    assert error.__notes__ == ["qflow_client: 100 messages were admitted; .receipts has their receipts"]
    # An iterator has lost what the error has, and no more.
    assert list(messages) == (numbered(49, 101) if kind is iter else numbered(150))
    broker.release_confirms()
    wait_done(error.receipts)
    assert bodies(broker) == numbered(100)


@KINDS
@pytest.mark.parametrize("timeout", [0, -1])
def test_send_many_with_a_timeout_of_0_or_less_does_not_wait(
    make_producer: Make, broker: Broker, kind: Callable[[Any], Any], timeout: float
) -> None:
    producer = make_producer(capacity=3, when_flowed="block")
    broker.withhold_confirms()
    with pytest.raises(FlowControlTimeout) as caught:
        producer.send_many(kind(numbered(5)), timeout=timeout)
    assert len(caught.value.receipts) == 3
    broker.release_confirms()
    wait_done(caught.value.receipts)


def test_with_when_flowed_raise_send_many_raises_while_the_producer_is_flowed(
    make_producer: Make, broker: Broker
) -> None:
    producer = make_producer(capacity=3, when_flowed="raise")
    broker.withhold_confirms()
    with pytest.raises(ProducerFlowed) as caught:
        producer.send_many(numbered(5))
    assert not isinstance(caught.value, FlowControlTimeout)
    assert len(caught.value.receipts) == 3
    broker.release_confirms()
    wait_done(caught.value.receipts)


@KINDS
def test_messages_that_send_many_admitted_before_an_invalid_message_are_not_lost(
    producer: Producer, broker: Broker, kind: Callable[[Any], Any]
) -> None:
    mistakes: list[tuple[Any, type[Exception]]] = [
        (5, TypeError),
        (Message(b"", headers={"k": 1 << 70}), ValueError),
    ]
    for at, (mistake, error) in enumerate(mistakes):
        with pytest.raises(error) as caught:
            producer.send_many(kind([b"good %d" % at, mistake, b"not sent"]))
        receipts: Any = caught.value.receipts  # type: ignore[attr-defined]  # send_many's
        wait_done(receipts)
        assert [receipt.message.body for receipt in receipts] == [b"good %d" % at]
    assert bodies(broker) == [b"good 0", b"good 1"]


def test_messages_that_send_many_admitted_before_the_iterable_raised_are_not_lost(
    producer: Producer, broker: Broker
) -> None:
    def fail() -> Iterator[bytes]:
        yield b"1"
        raise LookupError("no more")

    with pytest.raises(LookupError) as caught:
        producer.send_many(fail())
    (receipt,) = caught.value.receipts  # type: ignore[attr-defined]  # send_many's
    wait_done([receipt])
    assert bodies(broker) == [b"1"]


@KINDS
def test_a_close_during_send_many_reports_the_admitted_messages(
    make_producer: Make, broker: Broker, kind: Callable[[Any], Any]
) -> None:
    producer = make_producer(capacity=10)
    broker.withhold_confirms()
    sending = start(producer.send_many, kind(numbered(20)), timeout=None)
    wait_in_line(producer, 1)
    closing = start(producer.close, timeout=PATIENCE)
    error = sending.wait()
    assert isinstance(error, ProducerClosed)
    assert [receipt.message.body for receipt in error.receipts] == numbered(10)
    assert error.message == b"10"
    broker.release_confirms()
    closing.result()


def test_send_many_takes_turns_with_waiting_senders_after_each_message(make_producer: Make, broker: Broker) -> None:
    """It waits in line for each message like any other sender (F4)."""
    producer = make_producer(capacity=10)
    done = threading.Event()

    def flood() -> int:
        count = 0
        while not done.is_set():
            count += len(producer.send_many(numbered(200)))
        return count

    flooding = [start(flood) for _ in range(3)]
    for _ in range(50):
        producer.send(b"alone", timeout=PATIENCE).result(timeout=PATIENCE)
    done.set()
    total = sum(job.result() for job in flooding)
    producer.flush()
    assert broker.queue("q").depth == total + 50


def test_a_pause_of_the_producer_stops_send_many_between_two_messages(make_producer: Make, broker: Broker) -> None:
    producer = make_producer()
    producer.pause("a break")
    sending = start(producer.send_many, numbered(100), timeout=None)
    wait_in_line(producer, 1)
    wait_held(producer, "paused")
    producer.resume()
    wait_done(sending.result())
    assert bodies(broker) == numbered(100)


@pytest.mark.parametrize("one", [b"body", "text", bytearray(b"body")])
def test_send_many_with_a_single_message_instead_of_an_iterable_raises_an_error(producer: Producer, one: Any) -> None:
    with pytest.raises(TypeError, match=r"send\(\)"):
        producer.send_many(one)


def test_send_many_with_an_invalid_timeout_raises_an_error_before_sending(producer: Producer, broker: Broker) -> None:
    with pytest.raises(TypeError):
        producer.send_many([b""], timeout="soon")  # type: ignore[arg-type]  # the mistake
    producer.flush()
    assert bodies(broker) == []


# With an outbox.


def fail_for_now(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk fail until the patch is undone."""

    def fail(*_: Any) -> None:
        raise OutboxError("disk full")

    assert producer._engine.storage is not None
    monkeypatch.setattr(producer._engine.storage.outbox._file, "execute_many", fail)


@KINDS
def test_messages_that_send_many_admits_while_the_disk_fails_have_receipts(
    make_producer: Make,
    broker: Broker,
    tmp_path: Path,
    kind: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The third message has to wait for the rate.
    producer = make_producer(outbox=tmp_path / "outbox", rate=20, rate_burst=2)
    messages = [(body, Position("orders", number)) for number, body in enumerate(numbered(5))]
    sent = 0
    with monkeypatch.context() as patched:
        fail_for_now(producer, patched)
        while sent < len(messages):
            with pytest.raises(NotDurable) as caught:
                producer.send_many(kind(messages[sent:]))
            assert caught.value.receipts[-1] is caught.value.receipt
            sent += len(caught.value.receipts)
            assert producer.unsettled == sent
            assert producer.position("orders") == sent - 1
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == numbered(5)


@pytest.mark.parametrize("kind", [list, tuple], ids=["list", "tuple"])
def test_a_disk_failure_during_send_many_does_not_replace_another_error(
    make_producer: Make, broker: Broker, tmp_path: Path, kind: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make_producer(outbox=tmp_path / "outbox")
    with monkeypatch.context() as patched:
        fail_for_now(producer, patched)
        # Two messages are kept from the broker, because they have positions.
        with pytest.raises(TypeError) as caught:
            producer.send_many(kind([(b"0", Position("orders", 0)), (b"1", Position("orders", 1)), (7, None)]))
        assert len(caught.value.receipts) == 2  # type: ignore[attr-defined]  # send_many's
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == numbered(2)


def test_ctrl_c_during_send_many_does_not_wait_for_a_failing_disk(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Producer(broker.url, routing_key="q", outbox=tmp_path / "outbox") as producer,
        monkeypatch.context() as patched,
    ):
        fail_for_now(producer, patched)
        admit, left = producer._engine.admit, [1, 1]

        def interrupted(*arguments: Any) -> Any:
            if not left:
                raise KeyboardInterrupt
            left.pop()
            return admit(*arguments)

        patched.setattr(producer._engine, "admit", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            producer.send_many([(body, Position("orders", at)) for at, body in enumerate(numbered(3))])
        assert len(caught.value.receipts) == 2  # type: ignore[attr-defined]  # send_many's
        patched.undo()
        producer.flush(timeout=PATIENCE)
    assert bodies(broker) == numbered(2)
