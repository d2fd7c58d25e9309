"""Producers with an outbox: an admitted message is on disk until it is settled."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qflow_client import (
    ConnectionFailed,
    FlowControlTimeout,
    Message,
    MessageFailed,
    MessageStored,
    NotDurable,
    Outbox,
    OutboxError,
    OutboxFull,
    OutboxInUse,
    Outcome,
    OutcomeUnknown,
    Producer,
    ProducerFlowed,
    ProducerSettings,
    Receipt,
    UndeliveredMessages,
    WhenFlowed,
)
from qflow_client.broker import Broker
from tests.collecting import collect
from tests.effort import rounds

from .processes import in_child
from .tools import PATIENCE, Proxy, bodies, eventually, finish, holds, start, wait_done, wait_held, wait_in_line

pytestmark = pytest.mark.usefixtures("patient_sends", "patient_ends")

MARK = "x-qflow-republished"


@pytest.fixture
def producer(make_producer: Callable[..., Producer], path: Path) -> Producer:
    """A producer with the outbox `path`."""
    return make_producer(outbox=path)


@pytest.fixture
def spilling(make_producer: Callable[..., Producer], path: Path) -> Producer:
    """A paused producer, which spills its messages to the outbox `path`."""
    producer = make_producer(outbox=path, when_flowed="spill")
    producer.pause()
    return producer


def store(producer: Producer) -> Outbox:
    assert producer._engine.storage is not None
    return producer._engine.storage.outbox


def on_disk(path: Path) -> list[bytes]:
    return [stored.message.body for stored in Outbox.look(path)]


def marked(broker: Broker) -> list[bytes]:
    return [each.body for each in broker.messages("q") if (each.properties.headers or {}).get(MARK)]


def second_copies(broker: Broker) -> list[tuple[bytes, bool]]:
    """What came before, and whether it is marked."""
    seen: set[bytes] = set()
    found = []
    for each in broker.messages("q"):
        if each.body in seen:
            found.append((each.body, bool((each.properties.headers or {}).get(MARK))))
        seen.add(each.body)
    return found


def leave(producer: Producer) -> UndeliveredMessages:
    with pytest.raises(UndeliveredMessages) as told:
        producer.close(timeout=0)
    return told.value


def rename(path: Path, table: str, to: str) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"ALTER TABLE {table} RENAME TO {to}")


def leave_behind(make_producer: Callable[..., Producer], path: Path, count: int, **settings: Any) -> None:
    """Have a producer leave messages in its outbox that were not written."""
    producer = make_producer(outbox=path, when_flowed="spill", **settings)
    producer.pause()
    for number in range(count):
        producer.send(b"left %d" % number)
    assert leave(producer).stored == count


def test_a_message_is_in_the_outbox_on_disk_when_send_returns_and_is_removed_when_it_is_confirmed(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    message = Message(b"two", headers={"k": 1}, message_id="own")
    receipts = [producer.send(b"one"), producer.send(message), *producer.send_many([b"three", b"four"])]
    stored = Outbox.look(path)
    assert [each.message.body for each in stored] == [b"one", b"two", b"three", b"four"]
    assert [each.message.message_id for each in stored] == [receipt.message_id for receipt in receipts]
    assert stored[1].message == message
    assert (producer.stored, producer.unsettled) == (4, 4)
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)
    eventually(lambda: producer.stored == 0 and on_disk(path) == [], "an empty outbox")
    assert bodies(broker) == [b"one", b"two", b"three", b"four"]
    assert marked(broker) == []


def test_send_nowait_also_writes_the_message_to_the_outbox_on_disk(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    receipt = producer.send_nowait(b"one")
    assert on_disk(path) == [b"one"]
    broker.release_confirms()
    wait_done([receipt])


def test_many_senders_share_the_disk_commits_of_an_outbox(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, outbox_synchronous="full")
    # What leaves the outbox is committed too.
    broker.withhold_confirms()
    outbox = store(producer)
    file = outbox._file
    lock = threading.Lock()
    commits = 0
    execute = file.execute

    def count(statement: str, *values: Any, **named: Any) -> Any:
        nonlocal commits
        if statement.startswith(("COMMIT", "INSERT")):
            with lock:
                commits += 1
                first = commits == 1
            if first:
                # The disk takes its time, in which all the others come.
                eventually(lambda: len(outbox._noted.inserting) + len(outbox._noted.rows) == 16, "the others' messages")
        return execute(statement, *values, **named)

    file.execute = count  # type: ignore[method-assign]
    jobs = [start(lambda: [producer.send(b"x") for _ in range(25)]) for _ in range(16)]
    finish(jobs)
    assert 0 < commits < 400
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)


def test_the_error_of_a_second_producer_on_an_outbox_names_the_producer_that_uses_the_outbox(
    producer: Producer, make_producer: Callable[..., Producer], path: Path
) -> None:
    with pytest.raises(OutboxInUse, match="is used by another producer in this process; give each producer"):
        make_producer(outbox=path)
    producer.close(timeout=PATIENCE)
    make_producer(outbox=path).close(timeout=PATIENCE)


def test_a_producer_that_cannot_connect_releases_its_outbox(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    with pytest.raises(ConnectionFailed):
        make_producer("amqp://guest:wrong@" + broker.url.partition("@")[2], outbox=path)
    Outbox(path).close()


def test_unconfirmed_messages_stay_in_the_outbox_after_close_and_are_reported(
    broker: Broker, producer: Producer, make_producer: Callable[..., Producer], path: Path
) -> None:
    broker.withhold_confirms()
    receipts = producer.send_many([b"one", b"two"])
    told = leave(producer)
    assert told.stored == 2
    # Nobody is to send them again but the next producer on the outbox.
    assert (told.unsent, told.unknown) == ((), ())
    assert told.receipts == tuple(receipts)
    assert "2 that stay in the outbox, for the next producer on it (.stored)" in str(told)
    assert {receipt.outcome for receipt in receipts} == {Outcome.STORED}
    assert isinstance(receipts[0].error(), MessageStored)
    assert on_disk(path) == [b"one", b"two"]
    broker.release_confirms()
    # They were written, so these are second copies.
    make_producer(outbox=path).close(timeout=PATIENCE)
    assert bodies(broker) == [b"one", b"two"] * 2
    assert marked(broker) == [b"one", b"two"]
    assert on_disk(path) == []


def test_outbox_messages_of_an_earlier_run_are_sent_first_and_in_order(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    count = rounds(1200, least=400)
    leave_behind(make_producer, path, count)
    assert len(Outbox.look(path, limit=2000)) == count
    # Less than what was left, so that it is taken up part by part.
    producer = make_producer(outbox=path, capacity=7)
    producer.send(b"new")
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == [b"left %d" % number for number in range(count)] + [b"new"]
    # Nobody had written them.
    assert marked(broker) == []
    assert holds(producer) == []


def test_new_messages_wait_until_outbox_messages_of_an_earlier_run_are_sent(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    leave_behind(make_producer, path, 3)
    broker.withhold_confirms()
    producer = make_producer(outbox=path, capacity=2)
    wait_held(producer, "outbox")
    with pytest.raises(FlowControlTimeout, match=r"outbox \(backlog: 3 messages were left in"):
        producer.send(b"new", timeout=0)
    with pytest.raises(ProducerFlowed):
        producer.send_nowait(b"new")
    broker.release_confirms()
    assert producer.wait_unflowed(PATIENCE)
    producer.send(b"new", timeout=0).result(timeout=PATIENCE)
    assert bodies(broker) == [b"left 0", b"left 1", b"left 2", b"new"]


def test_a_flowed_producer_spills_messages_to_its_outbox_and_sends_them_in_order_when_it_is_unflowed(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    count = rounds(1000, least=300)
    producer = make_producer(outbox=path, when_flowed="spill", capacity=10)
    first = producer.send(b"0")
    first.result(timeout=PATIENCE)
    producer.pause("lunch")
    spilled = [producer.send(Message(b"%d" % number, type="t")) for number in range(1, count + 1)]
    # No place in the window, and not to be lost.
    assert (producer.unsettled, producer.available) == (0, 10)
    assert len(Outbox.look(path, limit=2000)) >= count
    assert not spilled[0].done
    assert spilled[4].message == Message(b"5", type="t", message_id=spilled[4].message_id)
    with pytest.raises(ProducerFlowed):
        producer.send_nowait(b"never")
    producer.resume()
    last = producer.send(b"%d" % (count + 1))
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == [b"%d" % number for number in range(count + 2)]
    assert {receipt.outcome for receipt in (*spilled, last)} == {Outcome.CONFIRMED}
    assert len({receipt.message_id for receipt in (first, *spilled, last)}) == count + 2
    assert marked(broker) == []
    assert holds(producer) == []


def test_a_message_that_was_spilled_to_the_outbox_uses_no_memory(broker: Broker, spilling: Producer) -> None:
    receipt: Any = spilling.send(Message(b"kept", message_id="own"))
    for _ in range(100):
        spilling.send(bytes(10_000))
    collect()
    assert spilling._engine.storage is not None
    assert list(spilling._engine.storage.store.backlog.spilled.values()) == [receipt]
    assert receipt._payload is None
    assert (receipt.message_id, receipt.size) == ("own", 4)
    assert store(spilling)._noted.rows == []
    spilling.resume()
    spilling.flush(timeout=PATIENCE)
    assert receipt.result(timeout=0) is Outcome.CONFIRMED
    assert len(bodies(broker)) == 101


def test_messages_spilled_to_the_outbox_settle_as_stored_when_the_producer_closes(
    broker: Broker, spilling: Producer, make_producer: Callable[..., Producer], path: Path
) -> None:
    receipt = spilling.send(b"one")
    spilling.send(b"two")
    told = leave(spilling)
    assert (told.stored, told.receipts) == (2, (receipt,))
    with pytest.raises(MessageStored, match="stored"):
        receipt.result(timeout=0)
    assert receipt.message.body == b"one"
    make_producer(outbox=path).close(timeout=PATIENCE)
    assert bodies(broker) == [b"one", b"two"]
    with pytest.raises(OutboxError, match="message 1 is no longer in the outbox"):
        receipt.message  # noqa: B018  # it is what raises


def test_leaving_the_with_block_by_an_exception_reports_messages_that_stay_in_the_outbox(
    broker: Broker, spilling: Producer, path: Path
) -> None:
    spilling.send(b"one")
    with pytest.raises(KeyError) as left, spilling:
        raise KeyError
    assert left.value.undelivered.stored == 1  # type: ignore[attr-defined]  # it is given one
    assert on_disk(path) == [b"one"]


def test_after_a_lost_connection_messages_in_memory_are_republished_and_later_messages_are_spilled(
    broker: Broker, make_producer: Callable[..., Producer], proxy: Proxy, path: Path
) -> None:
    producer = make_producer(proxy.url(broker), outbox=path, when_flowed="spill", reconnect_delay=0.01)
    broker.withhold_confirms()
    receipts = producer.send_many([b"0", b"1", b"2"])
    eventually(lambda: len(bodies(broker)) == 3, "all in the queue")
    broker.release_confirms()
    # An answer that is on its way when the connection is cut is lost with it.
    wait_done(receipts)
    broker.withhold_confirms()
    receipts += [producer.send(b"3")]
    eventually(lambda: len(bodies(broker)) == 4, "the fourth in the queue")
    proxy.cut()
    receipts += [producer.send(b"%d" % number) for number in range(4, 50)]
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)
    assert list(dict.fromkeys(bodies(broker))) == [b"%d" % number for number in range(50)]
    assert second_copies(broker) == [(b"3", True)]
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    eventually(lambda: on_disk(path) == [], "an empty outbox")


def test_returned_and_rejected_messages_are_removed_from_the_outbox(
    broker: Broker, producer: Producer, path: Path
) -> None:
    returned = producer.send(b"one", routing_key="nowhere")
    rejected = producer.send(b"two", exchange="missing")
    fine = producer.send(b"three")
    wait_done([returned, rejected, fine])
    assert [each.outcome for each in (returned, rejected, fine)] == ["returned", "rejected", "confirmed"]
    eventually(lambda: on_disk(path) == [], "an empty outbox")


def test_flush_waits_for_outbox_messages_of_an_earlier_run_and_raises_an_error_if_they_are_undelivered(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    leave_behind(make_producer, path, 30, routing_key="nowhere")
    producer = make_producer(outbox=path, capacity=5)
    with pytest.raises(UndeliveredMessages) as told:
        producer.flush(timeout=PATIENCE)
    assert [message.body for message in told.value.unsent] == [b"left %d" % number for number in range(30)]
    assert told.value.stored == 0


def test_with_when_flowed_raise_a_send_to_a_full_outbox_raises_an_error(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, outbox_max_bytes=2000, outbox_full="raise")
    broker.withhold_confirms()
    with pytest.raises(OutboxFull, match="no room for a message of 500 bytes: ") as full:
        producer.send_many([bytes(500)] * 10)
    assert len(full.value.receipts) == 3
    assert producer.unsettled == producer.stored == len(Outbox.look(path)) == 3
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)
    # The file is empty a little before there is room.
    eventually(lambda: store(producer).size == 0, "room in the outbox")
    producer.send(bytes(500)).result(timeout=PATIENCE)


def test_a_full_outbox_holds_the_producer_until_there_is_room(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, outbox_max_bytes=2000)
    broker.withhold_confirms()
    sent = [producer.send(bytes(500), timeout=0) for _ in range(3)]
    with pytest.raises(FlowControlTimeout, match="outbox"):
        producer.send(bytes(500), timeout=0)
    with pytest.raises(OutboxFull):
        # It never would fit.
        producer.send(bytes(5000))
    job = start(lambda: producer.send(bytes(500), timeout=PATIENCE))
    wait_in_line(producer, 1)
    assert holds(producer) == ["outbox"]
    broker.release_confirms()
    sent.append(job.result())
    producer.flush(timeout=PATIENCE)
    assert {receipt.outcome for receipt in sent} == {Outcome.CONFIRMED}
    assert producer.wait_unflowed(PATIENCE)


def test_a_sender_that_waits_for_room_in_a_full_outbox_gets_the_room_of_settled_messages_immediately(
    make_producer: Callable[..., Producer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test may take.
    monkeypatch.setattr("qflow_client.outbox.writer._GATHER", 2 * PATIENCE)
    producer = make_producer(outbox=path, outbox_max_bytes=2000)
    for _ in range(10):
        assert producer.send(bytes(500), timeout=PATIENCE).result(timeout=PATIENCE) is Outcome.CONFIRMED


def test_F4_senders_that_wait_until_a_full_outbox_has_room_are_served_in_order(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, outbox_max_bytes=2000, when_flowed="spill")
    broker.withhold_confirms()
    for number in range(3):
        producer.send(b"%d" % number * 500)
    producer.pause()
    jobs = []
    for number in range(3, 6):
        jobs.append(start(lambda number=number: producer.send(b"%d" % number * 500, timeout=PATIENCE)))
        wait_in_line(producer, len(jobs))
    with pytest.raises(FlowControlTimeout):
        producer.send(bytes(500), timeout=0)
    # What is confirmed makes room, though the producer stays flowed.
    broker.release_confirms()
    finish(jobs)
    assert (producer.unsettled, producer.stored) == (0, 3)
    producer.resume()
    producer.flush(timeout=PATIENCE)
    assert [body[:1] for body in bodies(broker)] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_messages_that_wait_in_the_outbox_for_too_long_are_settled_and_not_sent(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, when_flowed="spill", outbox_max_age=0.2)
    producer.pause()
    receipt = producer.send(b"old")
    producer.send(b"old, too")
    wait_done([receipt])
    with pytest.raises(MessageFailed, match=r"it was in the outbox for more than outbox_max_age=0\.2 s"):
        receipt.result(timeout=0)
    eventually(lambda: on_disk(path) == [], "an empty outbox")
    with pytest.raises(UndeliveredMessages) as told:
        producer.flush(timeout=PATIENCE)
    assert [message.body for message in told.value.unsent] == [b"old, too"]
    producer.resume()
    producer.send(b"young").result(timeout=PATIENCE)
    assert bodies(broker) == [b"young"]


def test_a_disk_failure_of_the_outbox_fails_the_send_and_the_write_is_retried(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    producer.send(b"one")
    rename(path, "message", "gone")
    with pytest.raises(OutboxError, match="no such table: message") as told:
        producer.send(b"two")
    # It is admitted, and may arrive.
    assert told.value.receipt is not None
    assert told.value.receipt.message.body == b"two"
    rename(path, "gone", "message")
    producer.send(b"three")
    assert on_disk(path) == [b"one", b"two", b"three"]
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)
    assert bodies(broker) == [b"one", b"two", b"three"]


def test_a_failed_read_of_the_outbox_is_retried_and_affects_no_commit(
    broker: Broker, make_producer: Callable[..., Producer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fails = Outbox.read, threading.Event()
    fails.set()
    tried = threading.Event()

    def reads(self: Outbox, *arguments: Any, **options: Any) -> Any:
        if fails.is_set():
            tried.set()
            raise OutboxError("disk I/O error")
        return read(self, *arguments, **options)

    monkeypatch.setattr(Outbox, "read", reads)
    producer = make_producer(outbox=path, when_flowed="spill")
    producer.pause()
    receipts = [producer.send(b"0")]
    producer.resume()
    assert tried.wait(PATIENCE)
    # They are on disk, whatever becomes of the other.
    receipts += [producer.send(b"%d" % number, timeout=PATIENCE) for number in range(1, 20)]
    assert len(on_disk(path)) == 20
    fails.clear()
    producer.flush(timeout=PATIENCE)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    assert bodies(broker) == [b"%d" % number for number in range(20)]


def test_on_delivery_gets_receipts_of_spilled_messages_and_of_messages_of_an_earlier_run(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    leave_behind(make_producer, path, 3)
    told: list[tuple[bytes, str]] = []
    producer = make_producer(
        outbox=path,
        when_flowed="spill",
        on_delivery=lambda receipt: told.append((receipt.message.body, str(receipt.outcome))),
    )
    producer.send(b"new")
    producer.flush(timeout=PATIENCE)
    producer.close(timeout=PATIENCE)
    assert told == [(body, "confirmed") for body in (b"left 0", b"left 1", b"left 2", b"new")]


def test_outbox_messages_of_an_earlier_run_are_not_sent_faster_than_the_rate_limit(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    leave_behind(make_producer, path, 20)
    producer = make_producer(outbox=path, rate=100.0, rate_burst=1)
    producer.send(b"new", timeout=PATIENCE)
    producer.flush(timeout=PATIENCE)
    assert len(bodies(broker)) == 21
    assert producer.flow_state.seconds_flowed["outbox"] >= 0.15


def test_a_forked_child_leaves_the_outbox_to_its_parent(broker: Broker, producer: Producer, path: Path) -> None:
    producer.send(b"one").result(timeout=PATIENCE)
    in_child(lambda: None)
    producer.send(b"two").result(timeout=PATIENCE)
    with pytest.raises(OutboxInUse):
        Outbox(path)
    assert bodies(broker) == [b"one", b"two"]


def test_a_forked_child_releases_the_outbox_even_if_a_thread_of_the_parent_held_its_lock(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    producer = make_producer(outbox=path, when_flowed="spill")
    broker.withhold_confirms()
    receipts = [producer.send(b"sent")]
    producer.pause()
    receipts.append(producer.send(b"spilled"))

    def look() -> None:
        assert [type(receipt.error()) for receipt in receipts] == [OutcomeUnknown] * 2

    # Another thread may have it in the instant of the fork.
    with store(producer)._noted.lock:
        in_child(look)
    producer.resume()
    broker.release_confirms()
    producer.flush(timeout=PATIENCE)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 2
    assert bodies(broker) == [b"sent", b"spilled"]


def test_the_messages_of_a_deleted_outbox_are_reported_as_failed(spilling: Producer, path: Path) -> None:
    receipts: list[Receipt] = [spilling.send(b"before")]
    path.unlink()
    with pytest.raises(NotDurable, match="the file was deleted, moved or replaced") as caught:
        spilling.send(b"after", timeout=PATIENCE)
    receipts.append(caught.value.receipt)
    undelivered = leave(spilling)
    assert [receipt.message.body for receipt in undelivered.receipts] == [b"before", b"after"]
    assert [receipt.outcome for receipt in receipts] == [Outcome.FAILED] * 2
    assert "(.stored)" not in str(undelivered)


def test_unconfirmed_messages_of_a_deleted_outbox_may_have_arrived_and_are_all_reported(
    broker: Broker, producer: Producer, path: Path
) -> None:
    broker.withhold_confirms()
    receipts = [producer.send(b"%d" % number) for number in range(5)]
    path.unlink()
    undelivered = leave(producer)
    assert [receipt.outcome for receipt in receipts] == [Outcome.UNKNOWN] * 5
    assert (len(undelivered.unknown), undelivered.stored, undelivered.dropped) == (5, 0, 0)


def test_messages_that_an_earlier_producer_left_in_a_deleted_outbox_are_all_reported(
    broker: Broker, make_producer: Callable[..., Producer], path: Path
) -> None:
    with Outbox(path) as outbox:
        for number in range(4):
            outbox.put(b"%d" % number, "", "q", f"id-{number}", permit=number < 2)
    producer = make_producer(broker.url.replace(str(broker.port), "1"), outbox=path, connect_in_background=True)
    path.unlink()
    undelivered = leave(producer)
    # An earlier process may have written the first two.
    assert [message.body for message in undelivered.unknown][:2] == [b"0", b"1"]
    assert len(undelivered.unknown) + len(undelivered.unsent) == 4
    assert undelivered.stored == 0


def test_a_relative_outbox_path_means_the_same_file_after_a_change_of_the_working_directory(
    broker: Broker, make_producer: Callable[..., Producer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = ProducerSettings(outbox="orders.outbox", when_flowed=WhenFlowed.SPILL)
    monkeypatch.chdir(tmp_path / "other")
    producer = make_producer(settings=settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.chdir("other")
    assert (tmp_path / "orders.outbox").exists()
    producer.pause()
    receipt = producer.send(b"spilled")
    assert receipt.message.body == b"spilled"
    producer.resume()
    producer.flush(timeout=PATIENCE)
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("shift", [-3600.0, 3600.0], ids=["set back", "set forward"])
def test_a_change_of_the_wall_clock_does_not_make_an_outbox_message_too_old(
    broker: Broker,
    make_producer: Callable[..., Producer],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shift: float,
) -> None:
    producer = make_producer(outbox=path, when_flowed="spill", outbox_max_age=60.0)
    producer.pause()
    receipts = [producer.send(b"before")]
    wall_time = time.time
    monkeypatch.setattr(time, "time", lambda: wall_time() + shift)
    receipts.append(producer.send(b"after"))
    producer.resume()
    producer.flush(timeout=PATIENCE)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] * 2
