"""The audit of a soak test finds each planted fault, and no fault in a correct run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.audit import ACCEPTED, REFUSED, Journal, Overruns, Soak, audit, percentile, to_json
from benchmarks.soak.history import History, main, merge, read
from benchmarks.soak.lag import LagWatch, Stretches
from benchmarks.soak.messages import Copy, body_of, is_long, read_copy, whose
from benchmarks.soak.senders import Found, Job
from qflow_client import Outcome
from qflow_client.core.settling import Settling
from qflow_client.recovery import Backoff
from tests.unit.core.support import drain, make, send

MESSAGES = 20


def good() -> Soak:
    """Return a correct run: three senders in turn, with refusals, second copies and late calls."""
    journals = [Journal(sender) for sender in range(3)]
    queue = []
    for number in range(1, MESSAGES + 1):
        for journal in journals:
            assert journal.begin() == number
            if number % 7 == 0:
                journal.called(number, REFUSED)
                continue
            journal.called(number, ACCEPTED)
            journal.told(number, Outcome.CONFIRMED)
            queue.append(Copy(journal.sender, number, False, True))
    # A connection was lost, and all messages in flight were sent again. The first copies of the last two never came.
    again = [copy._replace(marked=True) for copy in queue[30:40]]
    queue[40:40] = again
    del queue[38:40]
    overruns = Overruns()
    for at in range(2000):
        overruns.note(float(at), at + 0.001 * (at % 4))
    return Soak(journals, queue, [(overruns, lambda begin, end: 0.0)], [], 12, 10, 3, 2)


def wrong(soak: Soak) -> list[str]:
    return [line.statement.partition(":")[0] for line in audit(soak) if not line.passed]


def of(soak: Soak, sender: int, number: int) -> int:
    return next(at for at, copy in enumerate(soak.queue) if (copy.sender, copy.number) == (sender, number))


def lost(soak: Soak) -> Soak:
    at = of(soak, 1, 3)
    return replace(soak, queue=[*soak.queue[:at], *soak.queue[at + 1 :]])


def lost_last(soak: Soak) -> Soak:
    return replace(soak, queue=soak.queue[:-1])


def copied_without_a_mark(soak: Soak) -> Soak:
    return replace(soak, queue=[*soak.queue, soak.queue[5]])


def copied_with_the_mark_on_the_wrong_one(soak: Soak) -> Soak:
    """Return a run in which only one of three copies is marked as a second copy."""
    return replace(soak, queue=[*soak.queue, soak.queue[5]._replace(marked=True), soak.queue[5]])


def swapped(soak: Soak) -> Soak:
    one, other = of(soak, 2, 4), of(soak, 2, 5)
    queue = list(soak.queue)
    queue[one], queue[other] = queue[other], queue[one]
    return replace(soak, queue=queue)


def no_outcome(soak: Soak) -> Soak:
    soak.journals[0].outcomes[9] = 0
    return soak


def told_twice(soak: Soak) -> Soak:
    soak.journals[0].told(9, Outcome.CONFIRMED)
    return soak


def late(soak: Soak) -> Soak:
    soak.overruns[0][0].note(50.0, 51.1)
    return soak


def refused_and_sent(soak: Soak) -> Soak:
    return replace(soak, queue=[*soak.queue, Copy(0, 7, False, True)])


def invented(soak: Soak) -> Soak:
    return replace(soak, queue=[*soak.queue, Copy(0, MESSAGES + 1, False, True)])


def from_nobody(soak: Soak) -> Soak:
    return replace(soak, queue=[*soak.queue, Copy(3, 1, False, True)])


def changed(soak: Soak) -> Soak:
    """Return a run with a changed copy besides the original. Without the original a message would be missing, too."""
    return replace(soak, queue=[*soak.queue, Copy(-1, 0, False, False)])


def crashed(soak: Soak) -> Soak:
    return replace(soak, troubles=["sender 1: ProducerClosed: …"])


def too_peaceful(soak: Soak) -> Soak:
    return replace(soak, connection_faults=9)


def never_killed(soak: Soak) -> Soak:
    return replace(soak, broker_kills=1)


def idle(_soak: Soak) -> Soak:
    return Soak([], [])


PLANTED: dict[Callable[[Soak], Soak], str] = {
    lost: "confirmed and missing",
    lost_last: "confirmed and missing",
    copied_without_a_mark: "second copies without a mark",
    copied_with_the_mark_on_the_wrong_one: "second copies without a mark",
    swapped: "first copies out of the order of their sender",
    no_outcome: "accepted without an outcome",
    told_twice: "told of more than once",
    late: "back more than 1 s after the deadline",
    refused_and_sent: "never accepted, and in the queue",
    invented: "never accepted, and in the queue",
    from_nobody: "never accepted, and in the queue",
    changed: "not as it was sent",
    crashed: "what must not happen",
    too_peaceful: "connection faults",
    never_killed: "broker kills",
    idle: "messages confirmed",
}


def test_the_audit_of_a_run_without_faults_reports_nothing() -> None:
    assert wrong(good()) == []


@pytest.mark.parametrize(("plant", "statement"), PLANTED.items())
def test_the_audit_of_a_soak_test_finds_each_planted_fault(plant: Callable[[Soak], Soak], statement: str) -> None:
    soak = plant(good())
    assert wrong(soak) == [statement]
    lines = audit(soak)
    document = json.loads(json.dumps(to_json(soak, lines)))
    assert document["passed"] is False
    assert [line["statement"] for line in document["audit"] if not line["passed"]] == [
        line.statement for line in lines if not line.passed
    ]


def test_the_audit_of_a_soak_test_names_some_of_the_missing_messages() -> None:
    soak = good()
    line = next(line for line in audit(replace(soak, queue=[])) if not line.passed)
    assert line.difference == "54: 1 of sender 0, 2 of sender 0, 3 of sender 0, 4 of sender 0, 5 of sender 0, …"


def test_the_audit_does_not_report_an_unconfirmed_message_that_is_absent_from_the_queue() -> None:
    soak = lost(good())
    soak.journals[1].outcomes[3] = 0
    soak.journals[1].told(3, Outcome.UNKNOWN)
    assert wrong(soak) == []


def test_the_audit_accepts_a_first_copy_that_arrives_after_the_copy_marked_as_second() -> None:
    soak = good()
    held_up = soak.queue[5]
    queue = [*soak.queue[:5], held_up._replace(marked=True), *soak.queue[6:], held_up]
    assert wrong(replace(soak, queue=queue)) == []


def test_the_audit_accepts_a_nacked_message_that_arrives_after_later_messages_in_flight() -> None:
    soak = swapped(good())
    soak.journals[2].overtaken.add(4)
    assert wrong(soak) == []
    assert "1 nacked while a later one was in flight" in next(
        line.measured for line in audit(soak) if line.statement.startswith("first copies")
    )


def test_a_sender_records_which_nacked_messages_later_messages_may_overtake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `note_nacks` replaces the method for the rest of the process.
    monkeypatch.setattr(Settling, "answer", Settling.answer)
    found, history = Found.of(Job((), "q", 1, 2, 1, 1.0, 0, 1.0, {})), History(str(tmp_path / "history"))
    found.note_nacks(history)
    protocol = make(retries=Backoff(1.0, 8.0, 0.0))
    for sender, number in (1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 4):
        send(protocol, body_of(sender, number))
    drain(protocol)
    protocol.on_nack(2, False, 1.0)
    # The second copy of message 2 is now behind message 4.
    protocol.on_timer(60.0)
    assert drain(protocol, 60.0)
    protocol.on_nack(4, False, 60.0)
    protocol.on_ack(3, True, 60.0)
    protocol.on_nack(5, False, 60.0)
    protocol.on_nack(0, True, 60.0)
    history.close()
    assert [journal.overtaken for journal in found.journals] == [{2, 3}, set()]
    nacked = map(json.loads, (tmp_path / "history").read_text(encoding="utf-8").splitlines())
    assert [(line["what"], line["sender"], line["number"]) for line in nacked] == [("nacked", 1, 2), ("nacked", 1, 3)]


def test_the_audit_accepts_a_missed_deadline_if_the_process_got_no_cpu_time() -> None:
    soak = late(good())
    overruns = soak.overruns[0][0]
    assert wrong(replace(soak, overruns=[(overruns, Stretches([(50.2, 50.5)]).within)])) == []
    assert wrong(replace(soak, overruns=[(overruns, Stretches([(49.0, 50.05)]).within)])) != []
    document = to_json(soak, [])
    assert document["deadlines"]["calls"] == 2001
    assert document["deadlines"]["overrun"] == 1501
    assert document["deadlines"]["seconds"] == {"p50": 0.002, "p99": 0.003, "p99.9": 0.003, "max": 1.1}


def test_each_percentile_is_one_of_the_measured_values() -> None:
    values = [float(value) for value in range(1, 1001)]
    Random(0).shuffle(values)
    assert (percentile(values, 0.5), percentile(values, 0.999), percentile(values, 1.0)) == (500.0, 999.0, 1000.0)
    assert percentile([], 0.999) == 0.0
    assert percentile([7.0], 0.001) == 7.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10))), st.integers(0, 60), st.integers(0, 60))
def test_the_total_time_of_overlapping_intervals_counts_the_overlap_once(
    found: list[tuple[int, int]], begin: int, end: int
) -> None:
    stretches = Stretches((float(at), float(at + length)) for at, length in found)
    covered = {second for at, length in found for second in range(at, at + length)}
    assert stretches.total == len(covered)
    assert stretches.within(begin, end) == len(covered.intersection(range(begin, end)))
    assert stretches.longest <= stretches.total


def test_the_body_of_a_message_shows_the_sender_and_whether_the_body_is_complete() -> None:
    lengths = set()
    for number in range(1, 1200):
        body = body_of(7, number)
        lengths.add(len(body) > 1000)
        assert is_long(7, number) == (len(body) > 1000)
        assert whose(body) == (7, number)
        assert read_copy(body, None) == Copy(7, number, False, True)
        assert read_copy(body, {"x-qflow-republished": True}) == Copy(7, number, True, True)
        assert not read_copy(body[:-1] + bytes([body[-1] ^ 1]), {}).intact
        assert not read_copy(body[:-1], {}).intact
    assert lengths == {False, True}
    assert not read_copy(b"short", {}).intact


def test_the_lag_monitor_measures_each_given_process_even_if_the_process_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    began = time.monotonic()
    with LagWatch([os.getpid(), gone.pid]) as watch:
        pass
    took = time.monotonic() - began
    assert all(0.0 <= watch.of(pid).total <= took for pid in (os.getpid(), gone.pid))
    assert watch.within(os.getpid())(began, began) == 0.0


def test_the_history_file_of_a_soak_test_contains_all_records_of_its_senders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = good()
    parts = [str(tmp_path / str(part)) for part in range(2)]
    histories = [History(part) for part in parts]
    for journal in soak.journals:
        history = histories[journal.sender % 2]
        for number in range(1, len(journal.calls)):
            admitted = int(journal.calls[number] == ACCEPTED)
            with (
                suppress(TimeoutError),
                history.calling("send", sender=journal.sender, first=number, count=1) as call,
            ):
                call.about["admitted"] = admitted
                if not admitted:
                    raise TimeoutError
            if admitted:
                history.write("settled", sender=journal.sender, number=number, outcome=journal.outcome(number), end=1.0)
    with histories[0].calling("fault", name="cut"):
        pass
    histories[0].write("nacked", sender=2, number=4, end=1.0)
    for history in histories:
        history.close()
    path = tmp_path / "history"
    merge(parts, soak.queue, str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["history"]
    lines = path.read_text(encoding="utf-8").splitlines()
    again = read(lines)
    assert [(each.sender, each.calls, each.outcomes) for each in again.journals] == [
        (each.sender, each.calls, each.outcomes) for each in soak.journals
    ]
    assert again.queue == soak.queue
    assert again.journals[2].overtaken == {4}
    assert main([str(path)]) == 0
    # A message that was confirmed is not in the queue.
    path.write_text("\n".join(lines[:-1]), encoding="utf-8")
    assert main([str(path)]) == 1
    assert "WRONG  confirmed and missing: 0" in capsys.readouterr().out
    with pytest.raises(ValueError, match="line 1: unknown kind of line 'sent'"):
        read(['{"what": "sent"}'])
    with pytest.raises(ValueError, match="sender 0: message 2 is not the next message"):
        read(['{"what": "send", "sender": 0, "first": 2, "count": 1, "admitted": 1}'])
    with pytest.raises(ValueError, match="message 1 of sender 0 is settled but was never sent"):
        read(['{"what": "settled", "sender": 0, "number": 1, "outcome": "confirmed"}'])
