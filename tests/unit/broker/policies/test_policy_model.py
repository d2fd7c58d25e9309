"""The broker against a plain model of its rules: short sequences from hypothesis, and long ones from seeds."""

from __future__ import annotations

import inspect
import random
import textwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qflow_client.broker.core import contents, overflow, queueflow, storage, waiting
from qflow_client.broker.core.confirms import Confirms
from qflow_client.broker.core.expiry import Expiry
from qflow_client.broker.policies import arguments
from qflow_client.broker.policies import overflow as overflow_policies
from qflow_client.broker.store import journal
from qflow_client.broker.store.journal import Journal
from qflow_client.flow import StopResume
from tests.effort import rounds

from ..conftest import Disk, World
from .model import WAIT, Rig

STEPS = 400
SEEDS = range(rounds(10))


def drive(draw, steps, *, limit=None):
    if limit is None:
        rig = Rig(World(max_producer_flow_control_wait=WAIT), draw)
    else:
        kept = Journal(float, limit=limit)
        kept.OVERHEAD, kept.ENTRY, kept.SMALL_HEADER = 0, 0, 1 << 17
        rig = Rig(World(journal=kept, max_producer_flow_control_wait=WAIT), draw, Disk(kept))
    for _ in range(steps):
        rig.step()


def drive_all(seeds, **options):
    for seed in seeds:
        try:
            drive(random.Random(seed).choice, STEPS, **options)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_broker_and_a_plain_model_of_its_rules_agree_over_many_random_actions():
    drive_all(SEEDS)


@pytest.mark.parametrize("limit", [0, 12, 40])
def test_A2_the_broker_and_a_plain_model_agree_also_for_queues_that_flow_to_disk(limit):
    drive_all(SEEDS, limit=limit)


@given(st.data())
@settings(max_examples=rounds(30))
def test_the_broker_and_a_plain_model_of_its_rules_agree_on_all_sequences_drawn_by_hypothesis(data):
    drive(lambda values: data.draw(st.sampled_from(list(values))), 30)


#: Planted errors: what is wrong, the function, the right code, and the wrong code. Each error must be found.
BUGS = [
    ("J6: confirms stay held when the queue turns OFF", queueflow.QueueFlows.left, "not family.limiter.on", "False"),
    (
        "C1: OFF at the resume, not below it",
        StopResume.resumes,
        "count < self.resume_count",
        "count <= self.resume_count",
    ),
    (
        "C1: ON at the stop, not above it",
        StopResume.stops,
        "0 < self.stop_count < count",
        "0 < self.stop_count <= count",
    ),
    (
        "C5: a message that finds the queue ON is acked",
        queueflow.QueueFlows.entered,
        "if completion is not None:",
        "if was_on is False and completion is not None:",
    ),
    ("D4: sources stay blocked when marks are raised", queueflow.QueueFlows.change_marks, "family.resume()", "pass"),
    ("D3: a maximum takes one message too many", overflow.Overflow._full, "beyond_count > 0", "beyond_count > 1"),
    (
        "D9: one of several destinations takes what another refuses",
        waiting.refusal,
        "for queue in queues:",
        "for queue in tuple(queues)[:1]:",
    ),
    (
        "F7: a ring drops the newest",
        overflow_policies.Ring._drop,
        "oldest = contents.oldest()",
        "oldest = max(contents.oldest_first(), key=lambda each: each.sequence)",
    ),
    ("D9: a value that a consumer has is conflated", contents.Contents.conflate, " and not last.is_unacked", ""),
    (
        "D9: an older value comes back",
        contents.Contents.requeue,
        "self.values.restore(entry)",
        "self.values.restore(entry) and False",
    ),
    (
        "A4: who comes later passes who waits",
        waiting.refusal,
        "and has_line and queue.has_line",
        "and False",
    ),
    (
        "A4: what waits is acked with what came after it",
        Confirms.hold,
        "self._held[tag] = self.completion(tag)",
        "pass",
    ),
    (
        "A4: who gives up is not told",
        waiting.WaitingRoom.admit,
        "waiting.publisher.give_up(waiting, reason)",
        "True",
    ),
    ("D10: confirms stay held by a queue that is overdue", queueflow.QueueFlow.let_go, "self.release_held()", "pass"),
    ("D10: a queue stays overdue", queueflow.QueueFlows._turned_off, "self._set_overdue(False)", "pass"),
    (
        "J6: what expires in the middle is not looked at",
        Expiry.take_due,
        "if entry.is_unacked and",
        "if entry is not entry.queue.contents.first() and",
    ),
]


#: The same for queues that flow to disk.
DISK_BUGS = [
    (
        "A2: what has left its queues stays on disk",
        journal.Journal.leave,
        "self._removals.append(record.number)",
        "pass",
    ),
    ("A2: what is evicted is still counted", journal.Journal._drop_body, "self.memory -= message.size", "pass"),
    ("A2: what is read again is not counted", journal.Journal.came, "self._grow(message.size)", "pass"),
    (
        "A2: a message that two queues have leaves the disk with the first",
        journal.Journal.leave,
        "record.is_spooled and record.holders",
        "False",
    ),
    ("A2: Basic.Get does not wait for the disk", storage.Storage.hold_missing, "self._journal.hold(message)", "pass"),
    (
        "D10: a queue that flows to disk is overdue at what it has in memory",
        arguments.resolve_limits,
        "max_count = max_size = 0",
        "pass",
    ),
]


#: Few seeds show these errors. The search begins at one of them, because the seeds before it take seconds.
FIRST_SEEDS = {"D9: an older value comes back": 21}


@pytest.mark.parametrize("bug", [*BUGS, *DISK_BUGS], ids=lambda bug: bug[0])
def test_each_bug_that_is_planted_in_the_broker_is_found_by_the_comparison_with_the_model(bug, monkeypatch):
    _, function, right, wrong = bug
    options = {"limit": 12} if bug in DISK_BUGS else {}
    source = textwrap.dedent(inspect.getsource(function))
    assert right in source
    mutant: dict[str, Any] = {}
    exec(compile(source.replace(right, wrong), "<mutant>", "exec"), function.__globals__, mutant)
    # The code of the function is replaced, because other modules have imported the function.
    monkeypatch.setattr(function, "__code__", mutant[function.__name__].__code__)
    with pytest.raises((AssertionError, AttributeError, KeyError, ValueError)):
        drive_all(range(FIRST_SEEDS.get(bug[0], 0), 200), **options)
