"""`FlowLog` writes lines to files, on a separate thread."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qflow_client import FlowEvent, FlowEventKind, FlowLog, FlowState, flowlog
from qflow_client.flow import Hold
from qflow_client.flowlog import ProducerLines


def _lines(folder: Path, pattern: str = "*.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]


def _event(kind: FlowEventKind, hold: Hold | None, holds: tuple[Hold, ...], at: float, admitted: int = 0) -> FlowEvent:
    since = at if hold is None else hold.since
    return FlowEvent(kind, "p", hold, holds, at, since, at - since, 0, admitted, 3, 5)


A, B = Hold("capacity", 10.0), Hold("paused", 12.0, "manager", "for lunch")


class Fake:
    """The parts of a producer that the log uses."""

    def __init__(self, *holds: Hold) -> None:
        self.settings = SimpleNamespace(name="p", exchange="", routing_key="orders")
        self.flow_state = FlowState(holds, None, 0, {})
        self.closed = False
        self.listeners: list[Any] = []
        self.wall_offset = time.time() - time.monotonic()

    def _wall_time(self, now: float) -> float:
        return now + self.wall_offset

    def on_flow(self, callback):
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)


def test_each_flow_log_record_of_a_hold_can_be_evaluated_without_any_other_record() -> None:
    lines: list[dict[str, Any]] = []
    producer = ProducerLines("p", "orders", lines.append, 9_000_000)
    producer.event(_event(FlowEventKind.FLOWED, A, (A,), 10.0, 100))
    producer.event(_event(FlowEventKind.HOLD_RAISED, B, (A, B), 12.0, 100))
    producer.tell(13_000_000)
    producer.event(_event(FlowEventKind.HOLD_LIFTED, A, (B,), 14.0, 100))
    producer.event(_event(FlowEventKind.UNFLOWED, B, (), 15.0, 101))
    producer.event(_event(FlowEventKind.FLOWED, Hold("capacity", 17.0), (), 17.0, 151))
    assert [line.pop("kind") for line in lines] == ["raised", "raised", "held", "held", "lifted", "lifted", "raised"]
    who = {"origin": "producer", "producer": "p", "connection": "p", "queue": "orders"}
    raised = {"unsettled": 3, "capacity": 5}
    capacity, paused = {**who, "reason": "capacity"}, {**who, "reason": "paused"}
    manager = {"source": "manager", "detail": "for lunch"}
    flowed = {"flowed_since": 10_000_000, "first": "capacity"}
    free = {"after": "capacity", "free_us": 2_000_000, "free_messages": 50}
    assert lines == [
        {"at": 10_000_000, **capacity, "since": 10_000_000, **raised},
        {"at": 12_000_000, **paused, "since": 12_000_000, **manager, **raised},
        {"at": 13_000_000, **capacity, "since": 10_000_000, "begun": 10_000_000},
        {"at": 13_000_000, **paused, "since": 12_000_000, "begun": 12_000_000},
        {"at": 14_000_000, **capacity, "since": 10_000_000, "begun": 13_000_000},
        {"at": 15_000_000, **paused, "since": 12_000_000, "begun": 13_000_000, **flowed},
        {"at": 17_000_000, **capacity, "since": 17_000_000, **raised, **free},
    ]


def test_a_character_that_utf_8_cannot_encode_does_not_end_the_flow_log(tmp_path: Path) -> None:
    with FlowLog(tmp_path) as log:
        log.write({"detail": "the disk of \udcff is full"})
        log.flush()
        log.write({"detail": "later"})
    assert [line["detail"] for line in _lines(tmp_path)] == ["the disk of ? is full", "later"]


def test_a_flow_log_does_not_count_a_change_of_the_wall_clock_as_time_of_a_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, wall_time, began = Fake(), time.time, time.time()
    log = FlowLog(tmp_path, period=1e-6)
    log.watch(producer)
    monkeypatch.setattr(time, "time", lambda: wall_time() + 3600.0)
    hold = Hold("paused", began)
    producer.listeners[0](_event(FlowEventKind.FLOWED, hold, (hold,), began))
    log.flush()
    log.close()
    raised, *held = _lines(tmp_path)
    assert held
    assert 0 < cast("int", held[-1]["at"]) - cast("int", raised["at"]) < 60_000_000


def test_a_flow_log_covers_the_whole_time_of_a_hold_even_if_a_slow_callback_delays_its_event(tmp_path: Path) -> None:
    producer, began = Fake(), time.time() - 30.0
    with FlowLog(tmp_path, period=1e-6) as log:
        log.watch(producer)
        hold = Hold("paused", began)
        producer.listeners[0](_event(FlowEventKind.FLOWED, hold, (hold,), began))
    raised, *held = _lines(tmp_path)
    assert cast("int", held[-1]["at"]) - cast("int", raised["at"]) > 29_000_000


def test_a_flow_log_watches_no_producer_after_its_end_and_in_a_forked_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Fake()
    with FlowLog(tmp_path) as log, monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(RuntimeError, match="this is process 1: create a flow log in the child"):
            log.watch(producer)
    with pytest.raises(RuntimeError, match="closed"):
        log.watch(producer)
    assert producer.listeners == []


def test_a_flow_log_that_another_thread_closes_during_watch_keeps_no_subscription(tmp_path: Path) -> None:
    producer, log = Fake(), FlowLog(tmp_path)
    subscribe: Callable[..., Callable[[], None]] = producer.on_flow

    def on_flow(callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        log.close()
        return subscribe(callback)

    producer.on_flow = on_flow  # type: ignore[method-assign]  # of the fake
    with pytest.raises(RuntimeError, match="closed"):
        log.watch(producer)
    assert producer.listeners == []


def test_holds_that_began_before_the_flow_log_watched_the_producer_are_recorded_from_then_on(tmp_path: Path) -> None:
    producer = Fake(A)
    with FlowLog(tmp_path, period=0.02) as log:
        log.watch(producer)
        deadline = time.monotonic() + 20
        while not any(line["kind"] == "held" for line in _lines(tmp_path)):
            assert time.monotonic() < deadline
            log.flush()
    first, *others = _lines(tmp_path)
    assert (first["kind"], first["reason"], first["queue"]) == ("raised", "capacity", "orders")
    assert first["since"] == others[0]["begun"] != 10_000_000
    assert all(before["at"] == after["begun"] for before, after in pairwise(others))
    assert producer.listeners == []


def test_flow_log_files_are_rotated_by_size_and_only_a_limited_number_is_kept(tmp_path: Path) -> None:
    with FlowLog(tmp_path, max_bytes=500, keep=3) as log:
        for number in range(40):
            log.write({"at": number, "kind": "test", "text": "x" * 90})
            log.flush()
            assert len(list(tmp_path.glob("_*.jsonl"))) == 1
    assert list(tmp_path.glob("_*")) == []
    assert [line["at"] for line in _lines(tmp_path)] == list(range(25, 40))


def test_a_flow_log_file_is_rotated_by_age_unless_it_is_empty(tmp_path: Path) -> None:
    with FlowLog(tmp_path, max_seconds=0.05) as log:
        log.write({"at": 1, "kind": "test"})
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("flow-*.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        log.rotate()
        log.rotate()
    assert len(list(tmp_path.glob("*"))) == 1


def test_a_flow_log_without_records_leaves_no_file(tmp_path: Path) -> None:
    FlowLog(tmp_path / "deep" / "folder").close()
    assert list((tmp_path / "deep" / "folder").iterdir()) == []


def test_flow_log_records_are_dropped_and_counted_if_the_disk_is_too_slow(tmp_path: Path) -> None:
    with FlowLog(tmp_path, max_lines=10) as log:
        with log._writing:
            for number in range(15):
                log.write({"at": number, "kind": "test"})
        log.flush()
        assert log.lost == 5
    *kept, last = _lines(tmp_path)
    assert (len(kept), last["kind"], last["lost"]) == (10, "lost", 5)


def test_flow_log_records_that_find_a_full_disk_are_written_when_there_is_room_again(tmp_path: Path) -> None:
    room = 20

    def write(data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[:room]
        room -= len(data)
        return file.write(data)

    with FlowLog(tmp_path, max_lines=10) as log:
        assert log._file is not None
        file = log._file
        with log._writing:
            log._file = cast(Any, SimpleNamespace(write=write, flush=file.flush, close=file.close))
        log.write({"at": 0, "kind": "test"})
        with pytest.raises(OSError, match="No space left"):
            log.flush()
        for number in range(1, 16):
            log.write({"at": number, "kind": "test"})
        assert log.lost == 5
        room = 10_000
        log.flush()
    *kept, last = _lines(tmp_path)
    assert ([line["at"] for line in kept], last["kind"], last["lost"]) == (list(range(11)), "lost", 5)


def test_the_close_of_a_flow_log_on_a_full_disk_raises_an_error_and_finishes_the_file(tmp_path: Path) -> None:
    def write(_data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = FlowLog(tmp_path)
    log.write({"at": 1, "kind": "test"})
    log.flush()
    with log._writing:
        assert log._file is not None
        file = log._file
        log._file = cast(Any, SimpleNamespace(write=write, close=file.close))
    log.write({"at": 2, "kind": "test"})
    with pytest.raises(OSError, match="No space left") as failure:
        log.close()
    assert failure.value.filename == str(tmp_path)
    assert file.closed
    assert [line["at"] for line in _lines(tmp_path)] == [1]


def test_a_flow_log_that_could_not_create_its_next_file_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, _flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with FlowLog(tmp_path) as log:
        with monkeypatch.context() as patched:
            patched.setattr(flowlog, "open_private", fail)
            log.write({"at": 1, "kind": "test"})
            with pytest.raises(OSError, match="Too many open files"):
                log.rotate()
        log.write({"at": 2, "kind": "test"})
    assert [line["at"] for line in _lines(tmp_path)] == [1, 2]


def test_a_new_flow_log_finishes_the_files_of_a_killed_process_but_not_files_in_use(tmp_path: Path) -> None:
    program = (
        "import os, sys; from qflow_client import FlowLog; log = FlowLog(sys.argv[1]); "
        "log.write({'at': 1, 'kind': 'test'}); log.flush(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert len(list(tmp_path.glob("_flow-*.jsonl"))) == 1
    with FlowLog(tmp_path):
        assert [line["at"] for line in _lines(tmp_path, "flow-*.jsonl")] == [1]
        with FlowLog(tmp_path):
            assert len(list(tmp_path.glob("_flow-*.jsonl"))) == 2


def test_a_forked_child_does_not_change_the_flow_log_file_of_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys; from qflow_client import FlowLog; log = FlowLog(sys.argv[1]); "
        "log.write({'at': 1, 'kind': 'test'}); child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0; log.write({'at': 2, 'kind': 'test'}); log.close()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=True)
    assert [line["at"] for line in _lines(tmp_path, "flow-*.jsonl")] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_threads")
def test_several_threads_may_write_records_to_one_flow_log_at_the_same_time(tmp_path: Path) -> None:
    with FlowLog(tmp_path, period=1e-6) as log:

        def write() -> None:
            for number in range(500):
                log.write({"at": number, "kind": "test"})

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            log.flush()
    assert len(_lines(tmp_path)) == 2000


def test_the_flow_log_no_longer_records_a_closed_producer(tmp_path: Path) -> None:
    producer = Fake(A)
    with FlowLog(tmp_path, period=0.01) as log:
        log.watch(producer)
        producer.closed = True
        deadline = time.monotonic() + 20
        while log._watches:
            assert time.monotonic() < deadline
            log.flush()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_bytes": 0}, "max_bytes=0: it must be a whole number, at least 1"),
        ({"keep": 0}, "keep=0: it must be a whole number, at least 1"),
        ({"period": 0}, "period=0: it must be more than 0 seconds"),
        ({"max_seconds": -1}, "max_seconds=-1: it must be more than 0 seconds"),
    ],
)
def test_a_flow_log_with_an_invalid_argument_raises_an_error(tmp_path: Path, setting, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FlowLog(tmp_path, **setting)
    assert list(tmp_path.iterdir()) == []
