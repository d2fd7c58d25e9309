"""E4: another process keeps the outbox's file locked, and every call still returns by its deadline."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qflow_client import (
    FlowControlTimeout,
    NotDurable,
    Outbox,
    OutboxError,
    OutboxFull,
    Outcome,
    Producer,
    UndeliveredMessages,
)
from qflow_client.broker import Broker
from tests.collecting import collect

from .tools import PATIENCE, bodies, eventually, outbox_is_free, start, wait_for_ends

# Less than SQLite waits by itself, and more than a busy machine needs for what takes milliseconds.
SOON = 6.0
BRIEF = 0.2


@pytest.fixture
def producer(make_producer: Callable[..., Producer], path: Path) -> Producer:
    """A producer with the outbox `path`."""
    return make_producer(outbox=path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another connection has begun to write to the file, and does not end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        yield


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(statement)


@contextmanager
def returns_soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


CALLS: dict[str, Callable[[Producer], Any]] = {
    "send": lambda producer: producer.send(b"x", timeout=BRIEF),
    "send, timeout 0": lambda producer: producer.send(b"x", timeout=0),
    "send_nowait": lambda producer: producer.send_nowait(b"x"),
    "send_many": lambda producer: producer.send_many([b"x"], timeout=BRIEF),
    "send_many, any iterable": lambda producer: producer.send_many(iter([b"x"]), timeout=BRIEF),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_E4_a_send_that_waits_for_the_disk_ends_at_its_deadline_with_an_error_that_has_the_receipt(
    broker: Broker, producer: Producer, path: Path, call: Callable[[Producer], Any]
) -> None:
    with locked(path):
        with returns_soon(), pytest.raises(NotDurable, match="is admitted, but may not be on disk") as caught:
            call(producer)
        error = caught.value
        assert isinstance(error, OutboxError)
        assert not isinstance(error, (FlowControlTimeout, OutboxFull))
        # The disk keeps no message from the broker.
        assert error.receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED  # type: ignore[attr-defined]
        assert error.receipt.message.body == b"x"
    producer.flush(timeout=PATIENCE)
    producer.send(b"after").result(timeout=PATIENCE)
    assert bodies(broker) == [b"x", b"after"]
    eventually(lambda: Outbox.look(path) == [], "an empty outbox")


def test_E4_a_message_is_on_disk_before_send_returns_if_the_file_lock_ends_before_the_deadline(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    with locked(path):
        sending = start(lambda: producer.send(b"x", timeout=PATIENCE))
        eventually(lambda: producer.unsettled == 1, "an admitted message")
    sending.result()
    assert [stored.message.body for stored in Outbox.look(path)] == [b"x"]
    broker.release_confirms()


def test_E4_each_of_many_senders_that_wait_for_the_disk_keeps_its_own_deadline(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    with locked(path):
        patient = [start(lambda: producer.send(b"patient", timeout=PATIENCE)) for _ in range(3)]
        eventually(lambda: producer.unsettled == 3, "the patient senders")
        hasty = [start(lambda: producer.send(b"hasty", timeout=BRIEF)) for _ in range(5)]
        with returns_soon():
            for job in hasty:
                with pytest.raises(NotDurable):
                    job.result()
    for job in patient:
        job.result()
    # A commit that began before the hasty messages came does not take them along.
    eventually(lambda: len(Outbox.look(path)) == 8, "all messages on disk")
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)


def test_E4_a_spilled_message_that_is_not_on_disk_in_time_is_admitted_and_the_error_has_the_receipt(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, when_flowed="spill")
    producer.pause()
    with locked(path), returns_soon(), pytest.raises(NotDurable) as caught:
        producer.send(b"spilled", timeout=BRIEF)
    producer.resume()
    assert caught.value.receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED  # type: ignore[attr-defined]
    assert bodies(broker) == [b"spilled"]


def test_E4_close_ends_at_its_deadline_and_frees_the_outbox_even_if_the_file_stays_locked(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    producer.send(b"on disk")
    with locked(path), returns_soon():
        with pytest.raises(UndeliveredMessages) as caught:
            producer.close(timeout=BRIEF)
        assert caught.value.stored == 1
    eventually(lambda: outbox_is_free(path), "an outbox that is free")
    assert [stored.message.body for stored in Outbox.look(path)] == [b"on disk"]


@pytest.mark.parametrize("has_callback", [False, True], ids=["no callback", "on_delivery"])
def test_E4_a_message_that_was_never_written_to_the_outbox_file_is_not_reported_as_stored(
    broker: Broker,
    make_producer: Callable[..., Producer],
    path: Path,
    has_callback: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The writer stops waiting for the lock at once, and has the time that it takes to end.
    stop_waiting = Outbox.stop_waiting
    monkeypatch.setattr(Outbox, "stop_waiting", lambda outbox, _after: stop_waiting(outbox, 0.0))
    wait_for_ends(monkeypatch)
    on_delivery = (lambda _receipt: None) if has_callback else None
    producer = make_producer(outbox=path, when_flowed="spill", on_delivery=on_delivery)
    broker.withhold_confirms()
    producer.send(b"on disk")
    with locked(path):
        receipts = []
        for body in (b"admitted", b"spilled"):
            with pytest.raises(NotDurable) as not_durable:
                producer.send(body, timeout=0)
            receipts.append(not_durable.value.receipt)
            producer.pause()
        # Nothing refers to the receipt of the third.
        with suppress(NotDurable):
            producer.send(b"forgotten", timeout=0)
        collect()
        with pytest.raises(UndeliveredMessages) as caught:
            producer.close(timeout=BRIEF)
    assert [receipt.outcome for receipt in receipts] == [Outcome.UNKNOWN, Outcome.FAILED]
    assert all("it could not be written to the outbox" in receipt.describe() for receipt in receipts)
    assert caught.value.stored == 1
    assert [message.body for message in caught.value.unknown] == [b"admitted"]
    assert [message.body for message in caught.value.unsent] == [b"spilled", b"forgotten"]
    eventually(lambda: outbox_is_free(path), "an outbox that is free")
    assert [stored.message.body for stored in Outbox.look(path)] == [b"on disk"]


def test_E4_a_short_timeout_is_sufficient_after_a_failed_disk_works_again(
    broker: Broker, make_producer: Callable[..., Producer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The deadlines are short compared with the pause after an error, and long enough for a slow disk.
    monkeypatch.setattr("qflow_client.outbox.writer._PAUSE", 10 * PATIENCE)
    producer = make_producer(outbox=path)
    broker.withhold_confirms()
    for number in range(5):
        change(path, "ALTER TABLE message RENAME TO gone")
        with pytest.raises(NotDurable, match="no such table"):
            producer.send(b"%d" % number, timeout=PATIENCE)
        change(path, "ALTER TABLE gone RENAME TO message")
        # Without a pause in which every send would have to wait.
        producer.send(b"%d, too" % number, timeout=PATIENCE)
    assert len(Outbox.look(path)) == 10
    broker.release_confirms()


def test_E4_a_disk_that_does_not_answer_delays_no_call_beyond_its_deadline(
    broker: Broker, producer: Producer, path: Path
) -> None:
    assert producer._engine.storage is not None
    file, answers = producer._engine.storage.outbox._file, threading.Event()
    execute, execute_many = file.execute, file.execute_many

    def late(call: Callable[..., Any], *arguments: Any) -> Any:
        assert answers.wait(10 * PATIENCE)
        return call(*arguments)

    file.execute = partial(late, execute)  # type: ignore[method-assign]
    file.execute_many = partial(late, execute_many)  # type: ignore[method-assign]
    try:
        for _ in range(2):
            with returns_soon(), pytest.raises(NotDurable) as caught:
                producer.send(b"x", timeout=BRIEF)
            assert caught.value.receipt.result(timeout=PATIENCE) is Outcome.CONFIRMED  # type: ignore[attr-defined]
        # What is confirmed may stay in the file.
        with returns_soon(), suppress(UndeliveredMessages):
            producer.close(timeout=BRIEF)
    finally:
        answers.set()
    eventually(lambda: outbox_is_free(path), "an outbox that is free")
    assert Outbox.look(path) == []


def test_E4_creating_a_producer_whose_outbox_is_locked_fails_within_connect_timeout(
    make_producer: Callable[..., Producer], path: Path
) -> None:
    Outbox(path).close()
    with locked(path), returns_soon(), pytest.raises(OutboxError, match="database is locked"):
        make_producer(outbox=path, connect_timeout=BRIEF)
    make_producer(outbox=path).close(timeout=PATIENCE)


def test_E4_creating_a_producer_fails_soon_after_connect_timeout_if_the_disk_of_its_outbox_does_not_answer(
    make_producer: Callable[..., Producer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, opens = threading.Event(), Outbox.__init__

    def late(*arguments: Any, **keywords: Any) -> None:
        assert answers.wait(10 * PATIENCE)
        opens(*arguments, **keywords)

    try:
        with monkeypatch.context() as now:
            now.setattr(Outbox, "__init__", late)
            with returns_soon(), pytest.raises(OutboxError, match="outbox: the disk has not answered within"):
                make_producer(outbox=path, connect_timeout=BRIEF)
    finally:
        answers.set()
    eventually(lambda: outbox_is_free(path), "an outbox that is free")


def test_E4_the_error_of_a_full_outbox_says_that_the_message_was_not_sent_and_has_no_receipt(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, outbox_max_bytes=100, outbox_full="raise")
    with pytest.raises(OutboxFull) as caught:
        producer.send(bytes(1000))
    assert not isinstance(caught.value, NotDurable)
    assert caught.value.receipt is None
    assert (caught.value.message, caught.value.exchange, caught.value.routing_key) == (bytes(1000), "", "q")
    assert bodies(broker) == []
