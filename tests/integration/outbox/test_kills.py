"""A process is killed with SIGKILL at a random moment. The tests check the contents of its outbox."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.kills import audit, run
from qflow_client import Outbox
from tests.effort import rounds

PATIENCE = 20.0
ROOT = Path(__file__).parents[3]
# Each starts a process tens of times, however busy the machine is.
pytestmark = pytest.mark.timeout(600)

# Tells what it has done after it, and what it is about to settle before it.
SENDER = """
import os, random, sys
from qflow_client import Outbox
from tests.effort import rounds

chance = random.Random(int(sys.argv[2]))
outbox = Outbox(sys.argv[1])

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

unsettled = [stored.sequence for stored in outbox.read(limit=10**9)]
tell("open")
while True:
    batch = [
        outbox.put(bytes(chance.choice([0, 10, 100, 5000])), "", "q", f"id-{outbox.last}")
        for _ in range(chance.randrange(1, 20))
    ]
    outbox.wait_durable(batch[-1])
    tell("durable", batch[0], batch[-1])
    unsettled += batch
    if len(unsettled) > 100 or chance.random() < 0.3:
        count = chance.randrange(1, len(unsettled) + 1)
        tell("settling", *unsettled[:count])
        for sequence in unsettled[:count]:
            outbox.settle(sequence)
        if chance.random() < 0.5:
            outbox.commit()
            tell("settled", *unsettled[:count])
        del unsettled[:count]
"""


def killed_after(path: Path, seed: int, seconds: float) -> list[list[str]]:
    """What a sender told before it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(path), str(seed)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    ) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"open\n"
        # The moment is drawn by lot; nothing waits for it.
        timer = threading.Timer(seconds, sender.kill)
        timer.start()
        told = sender.stdout.read().decode()
        timer.join()
        assert sender.wait(PATIENCE) == -signal.SIGKILL
    # The last line may not be whole.
    return [line.split() for line in told.split("\n")[:-1]]


@pytest.mark.program
def test_after_a_kill_at_any_moment_an_outbox_has_all_durable_messages_in_order(tmp_path: Path) -> None:
    path = tmp_path / "outbox"
    moments = random.Random(1)
    durable: set[int] = set()
    settling: set[int] = set()
    settled: set[int] = set()
    number, longest, kills = 0, 0.15, rounds(12)
    # On a slow machine, until there was something to lose.
    while number < kills or len(durable) <= 100 or not settled:
        if number >= kills:
            longest *= 2
        assert longest < 30, (len(durable), len(settled))
        number += 1
        for kind, *sequences in killed_after(path, number, moments.uniform(0, longest)):
            numbers = [int(each) for each in sequences]
            if kind == "durable":
                durable.update(range(numbers[0], numbers[1] + 1))
            elif kind == "settling":
                settling.update(numbers)
            elif kind == "settled":
                settled.update(numbers)
        with Outbox(path) as outbox:
            assert outbox._file.one("PRAGMA integrity_check") == "ok"
            found = [stored.sequence for stored in outbox.read(limit=10**9)]
            assert found == sorted(set(found))
            assert durable - settling <= set(found)
            assert not settled & set(found)
            assert all(stored.may_be_second_copy for stored in outbox.read(limit=10**9))


@pytest.mark.program
def test_after_a_kill_at_any_moment_a_producer_with_an_outbox_loses_no_message_and_marks_second_copies(
    tmp_path: Path,
) -> None:
    verdict, longest = None, 0.3
    # A slow machine takes longer until there is something to lose.
    while verdict is None or verdict.told <= 100 or verdict.left_behind == 0:
        assert longest < 30, verdict
        verdict = run(tmp_path, kills=rounds(12), longest=longest)
        assert verdict.is_good, verdict
        longest *= 3


def test_the_audit_of_an_outbox_after_kills_finds_planted_faults() -> None:
    told = {(0, 0): 2, (0, 1): 1, (1, 0): 2}
    right = [(b"0 0 0", False), (b"0 1 0", False), (b"0 0 1", False), (b"1 0 0", False), (b"0 0 1", True)]
    assert audit(told, [*right, (b"1 0 1", False), (b"1 0 2", False)]) == {
        "told": 5,
        "first_copies": 6,
        "second_copies": 1,
        "lost": 0,
        "out_of_order": 0,
        "unmarked": 0,
    }
    wrong = audit(told, [right[2], right[0], right[3], (b"0 1 0", True), (b"1 0 0", False)])
    assert (wrong["lost"], wrong["out_of_order"], wrong["unmarked"]) == (1, 2, 1)


def test_the_audit_of_an_outbox_after_kills_permits_the_last_messages_of_a_killed_producer_to_be_late() -> None:
    told = {(0, 0): 2, (1, 0): 1}
    late = audit(told, [(b"0 0 0", True), (b"0 0 1", True), (b"1 0 0", False), (b"0 0 1", False), (b"0 1 0", False)])
    assert (late["second_copies"], late["lost"], late["out_of_order"], late["unmarked"]) == (1, 0, 0, 0)
