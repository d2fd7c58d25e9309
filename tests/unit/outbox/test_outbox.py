from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client import Message, Outbox, OutboxError, OutboxFull, OutboxInUse, StoredMessage
from qflow_client.database import LockFile
from qflow_client.files import lock
from qflow_client.message import REPUBLISHED
from tests.effort import rounds
from tests.interrupting import press
from tests.unit.messages import PROPERTIES

from .support import change, crash

PATIENCE = 20.0
# Less than the default time in seconds that an outbox waits for another process.
SOON = 6.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def put(outbox: Outbox, *bodies: bytes, **options) -> list[int]:
    return [outbox.put(body, "e", "k", f"id-{body.decode():.9}", **options) for body in bodies]


def bodies(outbox: Outbox) -> list[bytes]:
    return [stored.message.body for stored in outbox.read()]


def test_a_deleted_file_of_an_outbox_accepts_no_message_and_close_reads_what_is_lost(path: Path) -> None:
    outbox = Outbox(path)
    one, two = put(outbox, b"1", b"2")
    outbox.commit()
    path.unlink()
    outbox.settle(one)
    (three,) = put(outbox, b"3")
    with pytest.raises(OutboxError, match="the file was deleted, moved or replaced"):
        outbox.wait_durable(three)
    assert outbox.durable == two
    with pytest.raises(OutboxError, match="deleted, moved or replaced, and 2 messages with it"):
        outbox.close()
    assert [stored.message.body for stored in outbox.unwritten().values()] == [b"2", b"3"]
    assert outbox.is_closed


def test_a_replaced_file_of_an_outbox_accepts_no_message_and_no_position(path: Path, tmp_path: Path) -> None:
    outbox = Outbox(path)
    path.unlink()
    (tmp_path / "backup").touch()
    (tmp_path / "backup").rename(path)
    with pytest.raises(OutboxError, match="deleted, moved or replaced while it is in use"):
        outbox.set_position("source", 1)
    put(outbox, b"1")
    with pytest.raises(OutboxError, match="deleted, moved or replaced while it is in use"):
        outbox.commit()
    with pytest.raises(OutboxError, match="and 1 messages with it"):
        outbox.close()


def test_the_messages_of_a_deleted_outbox_are_known_even_if_the_disk_is_full(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(path)
    one, *_ = put(outbox, b"1", b"2")
    outbox.commit()
    outbox.settle(one)
    outbox.settle(*put(outbox, b"3"))
    put(outbox, b"4")
    path.unlink()
    monkeypatch.setattr(outbox._file, "execute_many", lambda *_: (_ for _ in ()).throw(OutboxError("disk full")))
    with pytest.raises(OutboxError, match="and 2 messages with it"):
        outbox.close()
    assert [stored.message.body for stored in outbox.unwritten().values()] == [b"2", b"4"]
    assert (outbox.left, len(outbox)) == (0, 0)


def test_a_moved_file_of_an_outbox_accepts_messages_again_when_it_is_back(path: Path) -> None:
    with Outbox(path) as outbox:
        away = path.rename(path.with_suffix(".away"))
        put(outbox, b"1")
        with pytest.raises(OutboxError, match="the file was deleted, moved or replaced"):
            outbox.commit()
        away.rename(path)
        assert outbox.commit() == 1
    with Outbox(path) as outbox:
        assert bodies(outbox) == [b"1"]


def test_after_a_crash_the_outbox_has_all_durable_messages_in_order_and_no_settled_messages(path: Path) -> None:
    outbox = Outbox(path)
    one, two, three = put(outbox, b"1", b"2", b"3")
    assert outbox.durable < one
    outbox.wait_durable(three)
    assert outbox.durable == three
    outbox.settle(two)
    outbox.commit()
    put(outbox, b"4")
    crash(outbox)
    with Outbox(path) as outbox:
        assert [(stored.sequence, stored.message.body) for stored in outbox.read()] == [(one, b"1"), (three, b"3")]
        assert outbox.last == three
        assert put(outbox, b"5") == [three + 1]


def test_the_outbox_does_not_reuse_sequence_numbers_even_if_it_is_empty(path: Path) -> None:
    with Outbox(path) as outbox:
        (one,) = put(outbox, b"1")
        outbox.settle(one)
    with Outbox(path) as outbox:
        assert outbox.read() == []
        assert put(outbox, b"2") == [one + 1]


def test_a_message_is_read_from_the_outbox_exactly_as_it_was_put(path: Path) -> None:
    headers = {"k": [1, "two", {"three": None}], "float": 1.5, "true": True, "raw": b"raw", "d": Decimal("1.5")}
    message = Message(b"body", **PROPERTIES | {"headers": headers, "timestamp": datetime(2026, 1, 2, tzinfo=UTC)})
    before = time.time()
    with Outbox(path) as outbox:
        outbox.put(message, "exchange", "routing.key", "other")
        outbox.put(Message(b"", message_id=None, delivery_mode=None), "", "", "given")
        outbox.put(b"plain", "", "q", "plain-id")
        full, empty, plain = outbox.read()
    assert full.message == message
    assert (full.exchange, full.routing_key) == ("exchange", "routing.key")
    assert before <= full.at <= time.time()
    assert empty.message == Message(b"", message_id="given", delivery_mode=None)
    assert plain.message == Message(b"plain", message_id="plain-id")


def test_after_a_crash_only_messages_that_may_have_been_sent_are_marked_as_second_copies(path: Path) -> None:
    outbox = Outbox(path)
    put(outbox, b"written")
    waiting = put(outbox, b"taken up", b"spilled", permit=False)
    outbox.permit(waiting[0])
    outbox.commit()
    # No message is a second copy in this process.
    assert not any(stored.may_be_second_copy for stored in outbox.read())
    crash(outbox)
    with Outbox(path) as outbox:
        first, second, third = outbox.read()
        assert [each.may_be_second_copy for each in (first, second, third)] == [True, True, False]
        assert first.to_send().headers == {REPUBLISHED: True}
        assert first.to_send().message_id == "id-written"
        assert third.to_send() is third.message


def test_a_message_is_marked_as_possibly_sent_after_a_crash_only_if_that_mark_was_committed_before_sending(
    path: Path,
) -> None:
    outbox = Outbox(path)
    (one,) = put(outbox, b"1", permit=False)
    outbox.commit()
    outbox.permit(one)
    assert outbox.dirty
    crash(outbox)
    with Outbox(path) as outbox:
        assert not outbox.read()[0].may_be_second_copy
        outbox.permit(one)
        outbox.commit()
        assert not outbox.dirty
    with Outbox(path) as outbox:
        assert outbox.read()[0].may_be_second_copy


def test_marking_a_message_as_a_second_copy_keeps_its_headers(path: Path) -> None:
    with Outbox(path) as outbox:
        outbox.put(Message(b"", headers={"k": "v"}), "", "q", "id")
    with Outbox(path) as outbox:
        assert outbox.read()[0].to_send().headers == {"k": "v", REPUBLISHED: True}


def test_the_outbox_counts_its_messages_and_bytes_and_is_full_at_its_byte_limit(path: Path) -> None:
    with Outbox(path, max_bytes=700) as outbox:
        sequences = put(outbox, *[b"x" * 100] * 3)
        with pytest.raises(OutboxFull, match=r"no room for a message of \d+ bytes: \d+ of at most 700 bytes"):
            put(outbox, b"x" * 100)
        assert len(outbox) == 3
        assert 300 < outbox.size <= 700
        outbox.settle(sequences[0], sequences[-1])
        outbox.commit()
        assert (len(outbox), outbox.size) == (0, 0)
        put(outbox, b"x" * 100)
        size = outbox.size
    with Outbox(path) as outbox:
        assert (len(outbox), outbox.size) == (1, size)
        assert outbox.read()[0].size == size


def test_putting_a_message_that_amqp_cannot_carry_into_the_outbox_raises_an_error_and_uses_no_room(path: Path) -> None:
    with Outbox(path) as outbox:
        with pytest.raises(TypeError, match=r"headers\['k'\]"):
            outbox.put(Message(b"", headers={"k": object()}), "", "q", "id")
        with pytest.raises(ValueError, match="message_id"):
            outbox.put(b"", "", "q", "i" * 256)
        with pytest.raises(ValueError, match="exchange cannot be encoded"):
            outbox.put(b"", "\ud800", "q", "id")
        with pytest.raises(ValueError, match="routing_key has 256 bytes"):
            outbox.put(b"", "", "q" * 256, "id")
        assert (outbox.last, len(outbox), outbox.size) == (0, 0, 0)


def test_the_outbox_returns_its_messages_in_batches(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, *(b"%d" % number for number in range(10)))
        found: list[StoredMessage] = []
        while batch := outbox.read(found[-1].sequence if found else 0, limit=3):
            assert len(batch) <= 3
            found += batch
        assert [stored.message.body for stored in found] == [b"%d" % number for number in range(10)]


def test_the_outbox_removes_and_returns_messages_that_are_too_old(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, b"old", b"older")
        limit = time.time() + 0.001
        while time.time() <= limit:
            pass
        put(outbox, b"young")
        assert [stored.message.body for stored in outbox.expire(limit)] == [b"old", b"older"]
        assert bodies(outbox) == [b"young"]
        assert outbox.expire(limit) == []


def test_one_of_the_threads_that_wait_for_the_disk_commits_for_all_of_them(path: Path) -> None:
    with Outbox(path) as outbox:
        commits = 0
        commit = outbox._commit

        def count(**options: bool) -> None:
            nonlocal commits
            commits += 1
            # The disk is slow, and all the others come meanwhile.
            end = time.monotonic() + PATIENCE
            while outbox.last < 16:
                assert time.monotonic() < end
                time.sleep(0.001)
            commit(**options)

        outbox._commit = count  # type: ignore[method-assign]
        start = threading.Barrier(16)

        def send(number: int) -> None:
            start.wait()
            (sequence,) = put(outbox, b"%d" % number)
            outbox.wait_durable(sequence)
            assert outbox.durable >= sequence

        threads = [threading.Thread(target=send, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(outbox.read()) == 16
        assert commits < 16


def test_a_failed_commit_of_the_outbox_raises_an_error_and_the_next_commit_retries_the_changes(path: Path) -> None:
    with Outbox(path) as outbox:
        one, two = put(outbox, b"1", b"2")
        outbox.settle(one)
        outbox._file.execute("ALTER TABLE state RENAME TO gone")
        with pytest.raises(OutboxError, match="outbox: no such table: state"):
            outbox.commit()
        assert outbox.durable == 0
        outbox._file.execute("ALTER TABLE gone RENAME TO state")
        put(outbox, b"3")
        outbox.wait_durable(two)
        assert bodies(outbox) == [b"2", b"3"]
        assert len(outbox) == 2
        assert outbox.size == sum(stored.size for stored in outbox.read())


def test_a_wait_for_the_disk_that_fails_raises_an_error_and_the_next_wait_retries_the_changes(path: Path) -> None:
    with Outbox(path) as outbox:
        (one,) = put(outbox, b"1")
        outbox._file.execute("ALTER TABLE message RENAME TO gone")
        with pytest.raises(OutboxError, match="outbox: no such table: message"):
            outbox.wait_durable(one)
        assert outbox.durable == 0
        outbox._file.execute("ALTER TABLE gone RENAME TO message")
        outbox.wait_durable(one)
        assert bodies(outbox) == [b"1"]
        assert (len(outbox), outbox.size) == (1, outbox.read()[0].size)


def test_a_lack_of_memory_in_sqlite_is_an_error_of_the_outbox_and_the_next_commit_retries_the_changes(
    path: Path,
) -> None:
    class Full:
        def execute(self, *_: object) -> None:
            raise MemoryError

    with Outbox(path) as outbox:
        (one,) = put(outbox, b"1")
        outbox._file._file, real = Full(), outbox._file._file  # type: ignore[assignment]  # it fails
        with pytest.raises(OutboxError, match="outbox: MemoryError"):
            outbox.wait_durable(one)
        outbox._file._file = real
        assert bodies(outbox) == [b"1"]


def test_a_wait_for_the_disk_removes_settled_messages_if_there_are_many(path: Path) -> None:
    with Outbox(path) as outbox:
        sequences = put(outbox, *(b"%d" % number for number in range(1000)))
        outbox.wait_durable(sequences[-1])
        outbox.settle(sequences[0], sequences[99])
        (more,) = put(outbox, b"more")
        outbox.wait_durable(more)
        assert len(Outbox.look(path, limit=2000)) == 1001
        outbox.settle(sequences[100], sequences[-1])
        (last,) = put(outbox, b"last")
        outbox.wait_durable(last)
        assert [stored.sequence for stored in Outbox.look(path)] == [more, last]
        assert len(outbox) == 2


def test_a_commit_of_the_outbox_that_ctrl_c_interrupts_can_be_repeated(path: Path) -> None:
    with Outbox(path) as outbox:
        one, _ = put(outbox, b"1", b"2")
        outbox.settle(one)
        execute = outbox._file.execute

        def interrupted(statement: str, *values: object, **named: object) -> sqlite3.Cursor:
            done = execute(statement, *values, **named)
            if statement == "COMMIT":
                raise KeyboardInterrupt
            return done

        outbox._file.execute = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            outbox.commit()
        outbox._file.execute = execute  # type: ignore[method-assign]
        outbox.commit()
        assert bodies(outbox) == [b"2"]
        assert len(outbox) == 1
        assert outbox.size == outbox.read()[0].size


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another connection has begun to write to the file, and does not end its transaction."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        yield


def test_E4_every_wait_for_an_outbox_file_locked_by_another_process_ends_after_its_timeout(path: Path) -> None:
    outbox = Outbox(path)
    one = outbox.put(b"1", "", "q", "id-1")
    with locked(path):
        began = time.monotonic()
        for call in (lambda: outbox.wait_durable(one, 0.05), lambda: outbox.commit(0.05)):
            with pytest.raises(OutboxError, match="database is locked"):
                call()
        assert time.monotonic() - began < SOON
    outbox.wait_durable(one)
    assert outbox.durable == one
    outbox.close()


def test_E4_closing_an_outbox_whose_file_stays_locked_reports_the_messages_that_were_not_written(path: Path) -> None:
    outbox = Outbox(path)
    outbox.commit()
    outbox.put(Message(b"1", message_id="own"), "", "q", "id-1")
    with locked(path), pytest.raises(OutboxError, match="database is locked"):
        outbox.close(0.05)
    assert outbox.is_closed
    assert {sequence: stored.message.message_id for sequence, stored in outbox.unwritten().items()} == {1: "own"}
    assert (len(outbox), outbox.left) == (0, 0)
    with Outbox(path) as outbox:
        assert outbox.read() == []


def test_E4_close_waits_for_a_thread_that_writes_to_the_outbox_no_longer_than_the_timeout(path: Path) -> None:
    outbox = Outbox(path)
    one = outbox.put(b"1", "", "q", "id-1")
    with locked(path):
        writing = threading.Thread(target=lambda: outbox.wait_durable(one))
        writing.start()
        wait_until(outbox._access._lock.locked)
        with pytest.raises(OutboxError, match="another thread is still writing to it"):
            outbox.close(0.05)
        assert not outbox.is_closed
    writing.join(PATIENCE)
    outbox.close()
    assert [stored.message.body for stored in Outbox.look(path)] == [b"1"]


def test_E4_a_wait_for_the_locked_outbox_file_can_be_ended_by_another_thread(path: Path) -> None:
    outbox = Outbox(path)
    one = outbox.put(b"1", "", "q", "id-1")
    errors: list[OutboxError] = []

    def write() -> None:
        try:
            outbox.wait_durable(one)
        except OutboxError as error:
            errors.append(error)

    with locked(path):
        writing = threading.Thread(target=write)
        writing.start()
        wait_until(outbox._access._lock.locked)
        began = time.monotonic()
        outbox.stop_waiting(0.0)
        writing.join(PATIENCE)
        assert time.monotonic() - began < SOON
    assert "database is locked" in str(errors)
    outbox.close()


def test_closing_the_outbox_a_second_time_has_no_effect(path: Path) -> None:
    outbox = Outbox(path)
    outbox.close()
    outbox.close()


@pytest.mark.parametrize(
    ("options", "words"), [({"synchronous": "off"}, "must be 'normal' or 'full'"), ({"max_bytes": 0}, "max_bytes")]
)
def test_an_outbox_with_invalid_arguments_raises_an_error(path: Path, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        Outbox(path, **options)
    assert not path.exists()


def test_the_argument_synchronous_full_is_passed_to_sqlite(path: Path) -> None:
    with Outbox(path, synchronous="full") as outbox:
        assert outbox._file.one("PRAGMA synchronous") == 2
        assert outbox._file.one("PRAGMA journal_mode") == "wal"


# One process at a time.


def test_opening_a_second_outbox_on_the_same_file_in_a_process_raises_an_error(path: Path) -> None:
    with (
        Outbox(path),
        pytest.raises(OutboxInUse, match="is used by another producer in this process; give each producer"),
    ):
        Outbox(path)
    Outbox(path).close()


def test_opening_the_file_of_an_open_outbox_under_a_different_name_raises_an_error(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with Outbox(path), pytest.raises(OutboxInUse):
        Outbox(tmp_path / "link")


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


HOLDER = """
import sys
from qflow_client import Outbox
outbox = Outbox(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_process_cannot_open_the_outbox_until_the_first_process_is_dead(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        with pytest.raises(OutboxInUse, match=f"is used by another producer in process {holder.pid}"):
            Outbox(path)
        assert Outbox.look(path) == []
        holder.kill()
        holder.wait(PATIENCE)
        Outbox(path).close()


def test_a_process_of_another_container_with_the_same_process_id_is_not_called_this_process(path: Path) -> None:
    with path.with_name(f"{path.name}-lock").open("w+b") as other:
        other.write(b"%d" % os.getpid())
        other.flush()
        lock(other)
        with pytest.raises(OutboxInUse, match=f"is used by another producer in process {os.getpid()}"):
            Outbox(path)


def test_a_full_disk_that_has_no_room_for_the_process_id_does_not_prevent_a_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", write)
    with Outbox(path), pytest.raises(OutboxInUse):
        Outbox(path)


def test_an_outbox_whose_lock_file_was_deleted_writes_no_message(path: Path) -> None:
    outbox = Outbox(path)
    path.with_name(f"{path.name}-lock").unlink()
    with Outbox(path) as other:
        put(outbox, b"1")
        put(other, b"2")
        with pytest.raises(OutboxError, match="outbox-lock was deleted or replaced; close this producer"):
            outbox.commit()
        with pytest.raises(OutboxError, match="was deleted or replaced"):
            outbox.close()
        assert [stored.message.body for stored in outbox.unwritten().values()] == [b"1"]
        assert bodies(other) == [b"2"]


def test_an_outbox_whose_wal_file_was_deleted_accepts_no_message_and_close_keeps_the_messages_on_disk(
    path: Path,
) -> None:
    outbox = Outbox(path)
    put(outbox, b"1")
    outbox.commit()
    path.with_name(f"{path.name}-wal").unlink()
    (two,) = put(outbox, b"2")
    with pytest.raises(OutboxError, match="outbox-wal was deleted or replaced; close this producer"):
        outbox.wait_durable(two)
    with pytest.raises(OutboxError, match="was deleted or replaced"):
        outbox.close()
    assert list(outbox.unwritten()) == [two]
    with Outbox(path) as outbox:
        assert bodies(outbox) == [b"1"]


def test_a_file_with_hard_links_or_a_file_that_is_a_mount_point_is_not_opened_as_an_outbox(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(path)
    with Outbox(path):
        (tmp_path / "other").hardlink_to(path)
        with pytest.raises(OutboxError, match="other has several hard links, or is a mount point"):
            Outbox(tmp_path / "other")
    (tmp_path / "other").unlink()
    monkeypatch.setattr("os.path.ismount", os.path.realpath(path).__eq__)
    with pytest.raises(OutboxError, match="link has several hard links, or is a mount point"):
        Outbox(tmp_path / "link")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_the_outbox_of_its_parent_and_does_not_keep_the_lock(path: Path) -> None:
    outbox = Outbox(path)
    go_on, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        code = 1
        try:
            outbox.put(b"x", "", "q", "id")
            outbox.commit()
        except OutboxError as error:
            code = 7 if "was opened in process" in str(error) else 2
        # Until the parent has opened it again.
        os.read(go_on, 1)
        os._exit(code)
    outbox.close()
    Outbox(path).close()
    os.close(tell)
    os.close(go_on)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("in_transaction", [False, True], ids=["call", "transaction"])
def test_a_fork_waits_until_no_thread_is_in_a_call_or_a_transaction_of_sqlite(path: Path, in_transaction: bool) -> None:
    begun, forking = threading.Event(), threading.Event()
    events: list[object] = []

    def wait() -> None:
        begun.set()
        events.append(forking.wait(PATIENCE))

    def work() -> None:
        if not in_transaction:
            file.execute("SELECT wait()")
            return
        with file.calling, file.transaction():
            wait()

    class Lock:
        def acquire(self, *arguments: Any) -> bool:
            forking.set()
            return calling.acquire(*arguments)

        def release(self, *_: object) -> None:
            calling.release()

        def __enter__(self) -> None:
            calling.acquire()

        __exit__ = release

    with Outbox(path) as outbox:
        file, calling = outbox._file, outbox._file.calling
        file._file.create_function("wait", 0, wait)
        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(PATIENCE)
        file.calling = Lock()  # type: ignore[assignment]  # it tells of the fork
        child = os.fork()
        if not child:
            os._exit(7 if events and not file._file.in_transaction else 1)
        file.calling = calling
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        thread.join(PATIENCE)
        assert events == [True]
        put(outbox, b"1")
        assert bodies(outbox) == [b"1"]


_OTHER_LOCK = """
import os, sys, threading

lock, forking = threading.Lock(), threading.Event()

def before():
    forking.set()
    lock.acquire()

os.register_at_fork(before=before, after_in_parent=lock.release, after_in_child=lock.release)

# Python calls the functions of modules that are imported later first.
from qflow_client.outbox import Outbox

def work():
    with lock:
        locked.set()
        forking.wait()
        outbox.put(b"1", "e", "k", "id")
        outbox.commit()

with Outbox(sys.argv[1]) as outbox:
    locked = threading.Event()
    threading.Thread(target=work).start()
    locked.wait()
    if not os.fork():
        os._exit(0)
"""


def test_a_fork_ends_even_if_it_waits_for_a_lock_of_a_thread_that_uses_an_outbox(path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _OTHER_LOCK, str(path)]
    subprocess.run(command, env=_environment(), timeout=PATIENCE, check=True)
    assert len(Outbox.look(path)) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_forks_of_a_forked_child_do_not_wait_for_the_threads_of_its_parent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow_client.database._FORK_PATIENCE", 0.05)
    locked, unlock = threading.Event(), threading.Event()

    def hang() -> None:
        with outbox._file.calling:
            locked.set()
            unlock.wait(PATIENCE)

    with Outbox(path) as outbox:
        thread = threading.Thread(target=hang)
        thread.start()
        assert locked.wait(PATIENCE)
        child = os.fork()
        if not child:
            monkeypatch.setattr("qflow_client.database._FORK_PATIENCE", PATIENCE)
            begun = time.monotonic()
            if not os.fork():
                os._exit(0)
            os._exit(7 if time.monotonic() < begun + PATIENCE else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        unlock.set()
        thread.join(PATIENCE)


def test_after_ctrl_c_at_the_begin_of_a_transaction_other_threads_can_commit(path: Path) -> None:
    enter = _GeneratorContextManager.__enter__

    def enter_and_press(manager: _GeneratorContextManager[None]) -> None:
        # Python runs signal handlers after the `yield` of `Database.transaction`, before the ``with`` block.
        patched.undo()
        enter(manager)
        press()

    def commit() -> None:
        # The first commit rolls the interrupted transaction back, and reports that.
        with suppress(OutboxError):
            outbox.commit()
        outbox.commit()

    outbox = Outbox(path)
    put(outbox, b"1")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_GeneratorContextManager, "__enter__", enter_and_press)
        with pytest.raises(KeyboardInterrupt) as pressed:
            outbox.commit()
    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    # While the program keeps the error, its traceback keeps the interrupted transaction.
    assert pressed.value.__traceback__ is not None
    assert outbox.durable == outbox.last == 1
    outbox.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_roll_back_a_transaction_of_its_parent(path: Path) -> None:
    with Outbox(path) as outbox, outbox._file.transaction():
        child = os.fork()
        if not child:
            with suppress(OutboxError), outbox._file.transaction():
                """It raises an error."""
            os._exit(7 if outbox._file._file.in_transaction else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_forked_child_that_releases_the_lock_of_the_outbox_leaves_the_lock_to_its_parent(path: Path) -> None:
    def lock() -> LockFile:
        return LockFile(path, error=OutboxError, in_use=OutboxInUse, told=("a test", "wait"))

    child = lock()
    # The parent's descriptors, and those that a fork does not change.
    parents = os.dup(child._descriptor)
    child._pid += 1
    child.release()
    with pytest.raises(OutboxInUse):
        lock()
    os.close(parents)
    lock().release()


# Files that are not outboxes.


def test_a_file_that_is_not_an_outbox_is_left_unchanged(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"Dear Sir or Madam, " * 1000)
    with pytest.raises(OutboxError, match="outbox: file is not a database"):
        Outbox(path)
    assert path.read_bytes().startswith(b"Dear")
    other = tmp_path / "other"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE mail (text TEXT)")
    file.close()
    with pytest.raises(OutboxError, match="other is a database of another application"):
        Outbox(other)
    with pytest.raises(OutboxError, match="No such file or directory"):
        Outbox(tmp_path / "nowhere" / "outbox")
    with pytest.raises(OutboxError, match="there is no such outbox"):
        Outbox.look(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_outbox_written_by_the_first_version_can_still_be_opened(path: Path) -> None:
    # As written by commit a766ba8: one message that was sent, one that was held, and the state.
    with closing(sqlite3.connect(path)) as file, file:
        file.executescript(
            """
            PRAGMA application_id = 1901032820;
            PRAGMA user_version = 1;
            CREATE TABLE message (
                sequence INTEGER PRIMARY KEY,
                size INTEGER NOT NULL,
                held INTEGER NOT NULL,
                at REAL NOT NULL,
                exchange TEXT NOT NULL,
                routing_key TEXT NOT NULL,
                header BLOB NOT NULL,
                body BLOB NOT NULL
            );
            CREATE TABLE state (last INTEGER NOT NULL, permitted INTEGER NOT NULL);
            INSERT INTO state VALUES (7, 0);
            INSERT INTO message VALUES
                (5, 92, 0, 1.5e9, '', 'q', x'003c00000000000000000003108002046f6e6531', x'6f6e65'),
                (7, 92, 1, 1.5e9, '', 'q', x'003c000000000000000000031080020474773031', x'74776f');
            """
        )
    with Outbox(path) as outbox:
        sent, held = outbox.read()
        assert (sent.sequence, sent.message.body, sent.message.message_id) == (5, b"one", "one1")
        assert (held.sequence, held.message.body, held.message.message_id) == (7, b"two", "tw01")
        assert (sent.may_be_second_copy, held.may_be_second_copy) == (True, False)
        assert put(outbox, b"new") == [8]


def test_opening_an_outbox_file_of_an_unsupported_version_raises_an_error(path: Path) -> None:
    Outbox(path).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 9")
    file.close()
    for use in (Outbox, Outbox.look):
        with pytest.raises(OutboxError, match="tables of version 9, but this qflow_client reads version 1"):
            use(path)


DAMAGES = {
    "a header that ends early": ("header = x'00'", "the content header cannot be decoded"),
    "a header of another class": ("header = zeroblob(15)", "class 0 with property flags"),
    "a body that is shorter": ("body = x''", "the body has 0 bytes, but its content header says 1"),
    "a text for a body": ("body = 'x'", "a column contains a value of another type"),
    "an exchange that is no UTF-8": (
        "exchange = CAST(x'ff' AS TEXT)",
        "the exchange or routing key cannot be decoded: 'utf-8' codec",
    ),
    "an exchange that is too long": (
        "exchange = CAST(zeroblob(256) AS TEXT)",
        "the exchange or routing key has more than 255 bytes",
    ),
    "a size that is none": ("size = 'large'", "a column contains a value of another type"),
    "a time that is none": ("at = 'noon'", "a column contains a value of another type"),
    "a time before all dates": ("at = -1e300", "the time -1e+300 is no date"),
    "a time after all dates": ("at = 9e999", "the time inf is no date"),
    "a flag that is none": ("held = 'yes'", "a column contains a value of another type"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_message_in_the_outbox_is_moved_aside_and_all_others_are_read(path: Path, damage: str) -> None:
    column, words = DAMAGES[damage]
    with Outbox(path) as outbox:
        put(outbox, b"1", b"2", b"3")
    change(path, f"UPDATE message SET {column} WHERE sequence = 2")
    # `look` changes nothing.
    assert [stored.sequence for stored in Outbox.look(path)] == [1, 3]
    assert [stored.sequence for stored in Outbox.look(path, 1, 1)] == [3]
    with pytest.raises(OutboxError, match="message 2 is damaged: "):
        Outbox.find(path, 2)
    ((sequence, why),) = Outbox.look_damaged(path).items()
    assert sequence == 2
    assert words in why
    with Outbox(path) as outbox:
        assert (outbox.damaged, len(outbox)) == ({}, 3)
        size = outbox.size
        assert [stored.sequence for stored in outbox.read(max_bytes=1 << 20)] == [1, 3]
        assert outbox.damaged == {2: why}
        assert (len(outbox), outbox.left, outbox.size) == (2, 2, size)
        assert [stored.sequence for stored in outbox.read(1, 1, max_bytes=1)] == [3]
    with Outbox(path) as outbox:
        assert list(outbox.damaged) == [2]
        assert (len(outbox), outbox.left, outbox.size) == (2, 2, size)
        assert bodies(outbox) == [b"1", b"3"]
        assert outbox.expire(time.time() + 100)[-1].sequence == 3
        outbox.drop(2)
        with pytest.raises(OutboxError, match="outbox: message 4 is no longer in the outbox"):
            outbox.drop(4)
        outbox.commit()
        assert (outbox.damaged, len(outbox), outbox.left) == ({}, 0, 0)
        if "size" not in column:
            assert outbox.size == 0
    assert Outbox.look_damaged(path) == {}
    with pytest.raises(OutboxError, match="message 2 is no longer in the outbox"):
        Outbox.find(path, 2)


def test_damage_that_changes_the_order_of_messages_raises_an_error_and_no_message_is_read_twice(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, b"1", b"2", b"3")
    content = bytearray(path.read_bytes())
    # The last message is the first in the page. 19 bytes before its exchange and routing key is its sequence.
    at = content.index(b"ek") - 19
    assert content[at] == 3
    content[at] = 1
    path.write_bytes(content)
    with Outbox(path) as outbox, pytest.raises(OutboxError, match="is damaged: message 1 comes after message 2"):
        outbox.read()
    with pytest.raises(OutboxError, match="is damaged: message 1 comes after message 2"):
        Outbox.look_damaged(path)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM state",
        f"UPDATE state SET last = {(1 << 63) - 1}",
        "CREATE TABLE new AS SELECT NULL AS last, 0 AS permitted",
    ],
)
def test_opening_an_outbox_with_a_damaged_state_raises_an_error(path: Path, damage: str) -> None:
    Outbox(path).close()
    change(path, damage)
    if damage.startswith("CREATE"):
        change(path, "DROP TABLE state")
        change(path, "ALTER TABLE new RENAME TO state")
    for use in (Outbox, Outbox.look):
        with pytest.raises(OutboxError, match="is damaged: its table 'state' has the rows"):
            use(path)


def test_a_message_moved_aside_as_damaged_stays_aside_even_if_it_becomes_readable_again(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, b"1", b"2", permit=False)
    change(path, "UPDATE message SET held = held | 2 WHERE sequence = 1")
    with Outbox(path) as outbox:
        assert outbox.damaged == {1: "it was set aside before"}
        assert [stored.sequence for stored in outbox.read()] == [2]
        assert [stored.sequence for stored in Outbox.look(path)] == [2]
        assert Outbox.look_damaged(path) == {1: "it was damaged before, but can be read now"}


def test_dropping_a_message_from_the_outbox_a_second_time_raises_an_error(path: Path) -> None:
    with Outbox(path) as outbox:
        put(outbox, b"1", b"2", b"3")
        # Also a message that is only noted.
        outbox.drop(2)
        assert bodies(outbox) == [b"1", b"3"]
        with pytest.raises(OutboxError, match="message 2 is no longer in the outbox"):
            outbox.drop(2)


# Against a model.


def test_an_outbox_is_read_as_empty_if_its_process_was_killed_while_it_created_the_file(tmp_path: Path) -> None:
    beginning = sqlite3.connect(tmp_path / "beginning", isolation_level=None)
    # Pages are written to the file, and their old content to the journal, before the commit.
    beginning.executescript("PRAGMA cache_size = 1; BEGIN IMMEDIATE; CREATE TABLE other (content);")
    beginning.execute("INSERT INTO other VALUES (zeroblob(1000000))")
    for suffix in ("", "-journal"):
        (tmp_path / f"killed{suffix}").write_bytes((tmp_path / f"beginning{suffix}").read_bytes())
    beginning.close()
    assert Outbox.look(tmp_path / "killed") == []
    with Outbox(tmp_path / "killed") as outbox:
        assert len(outbox) == 0


class Model(RuleBasedStateMachine):
    """An outbox has the same content as a dict, after puts, settles, commits, closes and crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "outbox"
        # By sequence, the messages that are noted and those on disk; the held ones; and the permitted sequences,
        # likewise.
        self.noted: dict[int, bytes] = {}
        self.on_disk: dict[int, bytes] = {}
        self.held: set[int] = set()
        self.permitted = self.permitted_on_disk = 0

    @initialize()
    def open(self) -> None:
        self.outbox = Outbox(self.path)
        self.noted, self.permitted = self.on_disk.copy(), self.permitted_on_disk
        self.written = {each for each in self.noted if each not in self.held or each <= self.permitted}
        assert [stored.sequence for stored in self.outbox.read()] == list(self.noted)

    @rule(body=st.binary(max_size=20), permit=st.booleans())
    def put(self, body: bytes, permit: bool) -> None:
        sequence = self.outbox.put(body, "e", "k", "id", permit=permit)
        assert sequence > max(self.noted, default=0)
        self.noted[sequence] = body
        # A sequence that was lost in a crash may be assigned again.
        self.held.discard(sequence)
        if not permit:
            self.held.add(sequence)

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.noted)))
        last = data.draw(st.sampled_from([each for each in sorted(self.noted) if each >= first]))
        self.outbox.settle(first, last)
        self.noted = {each: body for each, body in self.noted.items() if not first <= each <= last}

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def permit(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.noted)))
        self.outbox.permit(sequence)
        self.permitted = max(self.permitted, sequence)

    @precondition(lambda self: self.noted)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        # All messages up to this one are durable then; other noted ones may be.
        sequence = data.draw(st.sampled_from(sorted(self.noted)))
        was_durable = self.outbox.durable >= sequence
        self.outbox.wait_durable(sequence)
        if not was_durable:
            assert self.outbox.durable == self.outbox.last
            self.on_disk = {stored.sequence: stored.message.body for stored in Outbox.look(self.path)}
            assert self.noted.items() <= self.on_disk.items()

    @rule()
    def commit(self) -> None:
        assert self.outbox.commit() == self.outbox.last == self.outbox.durable
        self.on_disk, self.permitted_on_disk = self.noted.copy(), self.permitted

    @rule()
    def close_and_open(self) -> None:
        self.outbox.close()
        self.on_disk, self.permitted_on_disk = self.noted.copy(), self.permitted
        self.open()

    @rule()
    def crash_and_open(self) -> None:
        crash(self.outbox)
        self.open()

    @rule(limit=st.integers(1, 5))
    def read(self, limit: int) -> None:
        found: list[StoredMessage] = []
        while batch := self.outbox.read(found[-1].sequence if found else 0, limit):
            found += batch
        self.on_disk, self.permitted_on_disk = self.noted.copy(), self.permitted
        assert {stored.sequence: stored.message.body for stored in found} == self.noted
        assert [stored.sequence for stored in found] == sorted(self.noted)
        assert all(stored.may_be_second_copy == (stored.sequence in self.written) for stored in found)
        assert len(self.outbox) == len(found)
        assert self.outbox.size == sum(stored.size for stored in found)

    @invariant()
    def anybody_may_look(self) -> None:
        if hasattr(self, "outbox"):
            assert {stored.sequence: stored.message.body for stored in Outbox.look(self.path)} == self.on_disk

    def teardown(self) -> None:
        if hasattr(self, "outbox"):
            self.outbox.close()
        self.folder.cleanup()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=rounds(40), stateful_step_count=30)
