"""Producers with an outbox, without threads and sockets: messages that wait on disk, and their outcomes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qflow_client.logs import flush_logs
from qflow_client.outbox import Outbox, OutboxError
from qflow_client.outbox import file as outboxfile
from qflow_client.receipt import Outcome, Receipt
from tests.unit.core.support import place, returned, wire

from .support import MARK, Kept, change, leave

DAY = 86_400.0
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def _every_outbox_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Outbox] = []
    begin = Kept.__init__

    def begin_and_tell(self: Kept, *arguments: Any, **settings: Any) -> None:
        begin(self, *arguments, **settings)
        made.append(self.outbox)

    monkeypatch.setattr(Kept, "__init__", begin_and_tell)
    yield
    for outbox in made:
        outbox.close()


def bodies(written: bytes) -> list[bytes]:
    return [message.body for message in wire(written).messages]


def test_an_outbox_in_which_all_messages_are_too_old_does_not_hold_the_producer(path: Path) -> None:
    leave(path, b"1", b"2", b"3")
    kept = Kept(path, opened=False, outbox_max_age=60.0)
    # The messages are now a day old.
    kept.now += DAY
    kept.protocol.channel_opened(1, 1 << 17, kept.now)
    assert [hold.kind for hold in kept.protocol.gate.holds] == ["outbox"]
    kept.turn()
    assert kept.protocol.gate.is_open
    assert not kept.store.has_backlog
    assert {receipt.outcome for receipt in kept.protocol.reports.take_failures()} == {Outcome.FAILED}


def test_the_age_of_a_message_stored_by_a_clock_that_was_ahead_counts_from_the_start_of_this_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_time = time.time
    with monkeypatch.context() as context:
        context.setattr(time, "time", lambda: wall_time() + DAY)
        leave(path, b"1")
    kept = Kept(path, outbox_max_age=60.0)
    kept.protocol.hold("paused", kept.now)
    kept.turn()
    assert len(kept.backlog.ready) == 1
    kept.now += 61.0
    kept.store.expire(kept.now)
    assert [receipt.message.body for receipt in kept.protocol.reports.take_failures()] == [b"1"]


def read_and_held(path: Path) -> Kept:
    """Return a producer that has read the remaining messages and was paused before they could be sent."""
    kept = Kept(path, outbox_max_age=60.0)
    kept.protocol.hold("paused", kept.now)
    kept.turn()
    assert len(kept.backlog.ready) == 3
    assert kept.write() == b""
    return kept


def test_messages_read_from_the_outbox_can_become_too_old_while_the_producer_is_flowed(path: Path) -> None:
    leave(path, b"1", b"2", b"3")
    kept = read_and_held(path)
    assert kept.protocol.waiters.when_flushed("flush")
    kept.now += 59.0
    kept.store.expire(kept.now)
    assert len(kept.backlog.ready) == 3
    kept.now += DAY
    kept.store.expire(kept.now)
    kept.turn()
    failures = kept.protocol.reports.take_failures()
    assert [receipt.message.body for receipt in failures] == [b"1", b"2", b"3"]
    assert all("for more than outbox_max_age=60 s" in receipt.describe() for receipt in failures)
    assert kept.woken == ["flush"]
    assert [hold.kind for hold in kept.protocol.gate.holds] == ["paused"]
    assert Outbox.look(path) == []


def test_messages_of_the_outbox_that_became_too_old_in_memory_are_not_sent_when_the_producer_is_unflowed(
    path: Path,
) -> None:
    leave(path, b"1", b"2", b"3")
    kept = read_and_held(path)
    kept.now += DAY
    kept.protocol.lift("paused", kept.now)
    kept.turn()
    assert kept.write() == b""
    assert {receipt.outcome for receipt in kept.protocol.reports.take_failures()} == {Outcome.FAILED}
    assert kept.protocol.gate.is_open
    assert kept.send(b"new") is not None
    assert bodies(kept.write()) == [b"new"]


def test_the_receipt_of_a_message_that_was_spilled_to_disk_shows_that_it_became_too_old(path: Path) -> None:
    kept = Kept(path, when_flowed="spill", outbox_max_age=60.0, capacity=1)
    kept.send(b"in the window")
    receipt = kept.send(b"waits", spills=True)
    assert receipt is not None
    kept.turn()
    assert len(kept.backlog.ready) == 1
    kept.now += DAY
    # The outbox gets room a day too late.
    kept.write()
    kept.protocol.on_ack(1, False, kept.now)
    kept.turn()
    assert receipt.outcome is Outcome.FAILED
    assert receipt.message.body == b"waits"
    assert kept.write() == b""


@pytest.mark.parametrize("too_old", [False, True], ids=["young", "old"])
def test_messages_spilled_to_disk_that_are_unsent_at_the_end_stay_on_disk_and_their_receipts_show_it(
    path: Path, too_old: bool
) -> None:
    kept = Kept(path, when_flowed="spill", capacity=2, outbox_max_age=60.0)
    kept.protocol.on_flow(False, kept.now)
    receipts = [kept.send(b"%d" % number, spills=True) for number in range(8)]
    kept.protocol.on_flow(True, kept.now)
    kept.turn()
    assert (kept.protocol.unsettled, len(kept.backlog.ready)) == (2, 6)
    kept.protocol.on_flow(False, kept.now)
    if too_old:
        kept.now += DAY
    kept.protocol.close("closed by hand", kept.now)
    kept.protocol.connection_lost("closed by hand", kept.now)
    assert [receipt and receipt.outcome for receipt in receipts] == [Outcome.STORED] * 8
    # Later steps do not send it either.
    kept.protocol.on_timer(kept.now)
    kept.turn()
    assert kept.protocol.unsettled == 0
    kept.outbox.close()
    assert [stored.message.body for stored in Outbox.look(path)] == [b"%d" % number for number in range(8)]


# Undelivered messages that stay (E13).


def is_nacked(kept: Kept, _: Receipt) -> None:
    kept.protocol.on_nack(1, False, kept.now)


def is_returned(kept: Kept, receipt: Receipt) -> None:
    returned(kept.protocol, receipt.message_id)
    kept.protocol.on_ack(1, False, kept.now)


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (is_nacked, "stored (nacked)"),
        (is_returned, "stored (312 NO_ROUTE); there is no queue 'q': declare it"),
    ],
)
def test_E13_an_undelivered_message_stays_in_the_outbox_and_the_next_producer_sends_it_as_a_second_copy(
    path: Path, refuse: Callable[[Kept, Receipt], None], words: str
) -> None:
    kept = Kept(path, outbox_keep_undelivered=True, on_refused="fail")
    receipt = kept.send(b"one")
    assert receipt is not None
    kept.write()
    refuse(kept, receipt)
    kept.turn()
    assert (receipt.outcome, receipt.is_stored) == (Outcome.STORED, True)
    assert words in str(receipt.error())
    assert kept.protocol.unsettled == 0
    # Later messages are not held because of it, and it is not read again.
    assert kept.send(b"two") is not None
    assert bodies(kept.write()) == [b"two"]
    kept.protocol.on_ack(2, False, kept.now)
    kept.outbox.commit()
    kept.crash()
    after = Kept(path, "r-", outbox_keep_undelivered=True)
    after.turn()
    (message,) = wire(after.write()).messages
    assert (message.body, message.properties.headers) == (b"one", {MARK: True})
    after.protocol.on_ack(1, False, after.now)
    after.outbox.close()
    assert Outbox.look(path) == []


def test_E13_a_message_that_became_too_old_on_disk_stays_in_the_outbox_and_is_settled_once(path: Path) -> None:
    leave(path, b"1", b"2")
    kept = Kept(path, opened=False, outbox_max_age=60.0, outbox_keep_undelivered=True)
    kept.now += DAY
    kept.protocol.channel_opened(1, 1 << 17, kept.now)
    kept.turn()
    assert kept.protocol.gate.is_open
    assert [receipt.outcome for receipt in kept.protocol.reports.take_failures()] == [Outcome.STORED] * 2
    kept.store.expire(kept.now)
    kept.turn()
    assert kept.protocol.reports.take_failures() == []
    kept.outbox.close()
    assert [stored.message.body for stored in Outbox.look(path)] == [b"1", b"2"]


def test_E13_undelivered_messages_that_stay_in_the_outbox_are_not_kept_in_memory(path: Path) -> None:
    kept = Kept(path, outbox_keep_undelivered=True, on_refused="fail")
    for tag in range(1, 100):
        assert kept.send(b"one") is not None
        kept.write()
        kept.protocol.on_nack(tag, False, kept.now)
        assert len(kept.store._stored) <= 1


# Damaged messages.


@pytest.mark.parametrize("which", [[1], [2], [4], [1, 2], [3, 4], [1, 2, 3, 4]], ids=str)
def test_a_damaged_message_in_the_outbox_is_moved_aside_and_all_others_are_sent_in_order(
    path: Path, which: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    leave(path, b"1", b"2", b"3", b"4")
    change(path, f"UPDATE message SET header = x'00' WHERE sequence IN ({','.join(map(str, which))})")
    kept = Kept(path)
    flushes = kept.protocol.waiters.when_flushed("flush")
    kept.turn()
    assert bodies(kept.write()) == [b"%d" % number for number in range(1, 5) if number not in which]
    kept.protocol.on_ack(0, True, kept.now)
    kept.turn()
    assert kept.protocol.gate.is_open
    assert kept.woken == (["flush"] if flushes else [])
    assert list(kept.outbox.damaged) == which
    assert (len(kept.outbox), kept.outbox.left) == (0, 0)
    # They keep their room.
    assert kept.outbox.size > 0
    assert flush_logs(PATIENCE)
    told = [record for record in caplog.records if "is set aside" in record.message or "set aside:" in record.message]
    assert [record.levelno for record in told] == [logging.ERROR] * len(which)
    assert [f"message {number} is damaged" in record.message for number, record in zip(which, told, strict=True)]
    kept.outbox.close()

    # The next producer has the error already, and does not log it again.
    caplog.clear()
    kept = Kept(path)
    kept.turn()
    assert kept.protocol.gate.is_open
    assert list(kept.outbox.damaged) == which
    assert flush_logs(PATIENCE)
    assert not caplog.records
    kept.outbox.close()


def test_E2_a_send_that_is_withdrawn_while_a_confirm_makes_room_is_not_spilled_to_disk(path: Path) -> None:
    kept = Kept(path, when_flowed="spill", outbox_max_bytes=800)
    kept.send(bytes(500))
    kept.write()
    kept.protocol.hold("paused", kept.now)
    first, second = (place(kept.protocol, body * 400, kept.now, waiter=body) for body in (b"1", b"2"))
    assert first.claim(for_sender=True)
    kept.protocol.on_ack(1, False, kept.now)
    kept.outbox.commit()
    kept.turn()
    assert (first.decided, first.receipt) == (True, None)
    assert second.receipt is not None
    assert kept.outbox.last == 2
    assert not kept.protocol.line.tickets
    kept.outbox.close()


def test_E2_if_a_signal_handler_raises_while_a_message_is_spilled_to_disk_its_sender_gets_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(path, when_flowed="spill", outbox_max_bytes=800)
    kept.send(bytes(500))
    kept.write()
    kept.protocol.hold("paused", kept.now)
    ticket = place(kept.protocol, bytes(400), kept.now, waiter="me")
    kept.protocol.on_ack(1, False, kept.now)
    kept.outbox.commit()

    def interrupted() -> None:
        raise ValueError("the handler's")

    with monkeypatch.context() as patched:
        patched.setattr(kept.store.backlog, "request_next", interrupted)
        with pytest.raises(ValueError, match="the handler's"):
            kept.turn()
    kept.turn()
    assert ticket.receipt is not None
    assert ticket.error is None
    assert kept.outbox.last == 2
    kept.outbox.close()


def test_the_receipt_of_a_message_that_was_spilled_to_disk_shows_that_it_is_damaged_there(path: Path) -> None:
    kept = Kept(path, when_flowed="spill", capacity=1)
    kept.protocol.hold("paused", kept.now)
    receipts = [kept.send(b"%d" % number, spills=True) for number in range(3)]
    change(path, "UPDATE message SET body = zeroblob(2) WHERE sequence = 2")
    kept.protocol.lift("paused", kept.now)
    for _ in receipts:
        kept.turn()
        kept.write()
        kept.protocol.on_ack(0, True, kept.now)
    kept.turn()
    assert [receipt and receipt.outcome for receipt in receipts] == ["confirmed", "stored", "confirmed"]
    assert receipts[1] is not None
    assert (
        "is damaged in the outbox, and set aside: the body has 2 bytes, but its content header says 1"
        in receipts[1].describe()
    )
    with pytest.raises(OutboxError, match="message 2 is damaged: the body has 2 bytes"):
        receipts[1].message  # noqa: B018  # it is what raises
    assert [stored.sequence for stored in Outbox.look(path)] == []
    assert list(Outbox.look_damaged(path)) == [2]


def test_a_failed_read_of_the_outbox_is_retried_and_no_wait_for_a_commit_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(path, b"1", b"2")
    kept = Kept(path)
    read = kept.outbox.read

    def fails(*_: object) -> list[object]:
        raise OutboxError("outbox: disk I/O error")

    monkeypatch.setattr(kept.outbox, "read", fails)
    kept.turn()
    assert kept.committed == [(2, None)]
    assert kept.store.has_backlog
    # Commits continue meanwhile, and do not repeat the same request.
    assert kept.outbox.put(b"3", "", "q", "id") == 3
    assert kept.writer.work()
    assert kept.committed == [(2, None), (3, None)]
    assert kept.writer._retry_at is not None
    assert kept.writer._retry_at > time.monotonic() - PATIENCE

    monkeypatch.setattr(kept.outbox, "read", read)
    kept.store.read_again(kept.now)
    kept.turn()
    assert bodies(kept.write())[:2] == [b"1", b"2"]


def test_every_sender_that_waits_for_a_commit_gets_an_error_if_the_commit_fails(path: Path) -> None:
    kept = Kept(path)
    kept.outbox.put(b"1", "", "q", "id")
    change(path, "ALTER TABLE message RENAME TO gone")
    assert not kept.writer.work()
    ((durable, error),) = kept.committed
    assert durable == 0
    assert isinstance(error, OutboxError)
    change(path, "ALTER TABLE gone RENAME TO message")
    assert kept.writer.work()
    assert kept.committed[1:] == [(1, None)]


def test_a_writer_that_is_stopped_before_it_notices_an_earlier_wake_up_does_not_gather(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(path)
    waits = []

    class Wake:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            kept.writer._end.set()
            return True

    monkeypatch.setattr(kept.writer, "_wake", Wake())
    kept.writer._serve()
    # The thread waited for a task, and not for more settled messages.
    assert waits == [-1.0]


def test_the_messages_of_a_deleted_file_that_are_not_read_in_time_are_counted_and_known_receipts_are_unknown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(path, b"1", b"2", b"3")
    kept = Kept(path, opened=False, when_flowed="spill")
    receipt = kept.send(b"4", spills=True)
    assert receipt is not None
    kept.protocol.connection_lost("the end", kept.now)
    path.unlink()
    read = outboxfile.read

    def read_slowly(*arguments: Any) -> Any:
        # The timeout of `close` has expired.
        assert kept.store.report_unwritten() == 4
        assert (receipt.outcome, kept.protocol.reports.dropped) == (Outcome.UNKNOWN, 4)
        assert not kept.protocol.reports.take_failures()
        return read(*arguments)

    monkeypatch.setattr(outboxfile, "read", read_slowly)
    with pytest.raises(OutboxError, match="and 4 messages with it"):
        kept.outbox.close()
    assert kept.outbox.left == 0
    assert kept.store.report_unwritten() == 0
