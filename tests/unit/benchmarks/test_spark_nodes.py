"""The audit of `benchmarks.spark_nodes` finds each planted fault, and no fault in a correct run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak.messages import Copy, body_of, read_copy
from benchmarks.spark_nodes import Kill, Read, Run, audit

KILLS = (Kill("b", True, 2, 0), Kill("a", True, 1, 1), Kill("c", False, 1, 0))


def good() -> Run:
    """Return a correct run: 20 rows, and second copies of five rows after a kill."""
    rows = [Read(Copy(0, number, False, True), f"job-0-0-{number}", False) for number in range(20)]
    again = [row._replace(copy=row.copy._replace(marked=True)) for row in rows[5:10]]
    # The broker has delivered two messages again. The source had read one of them before.
    redelivered = [row._replace(redelivered=True) for row in rows[14:16]]
    return Run(20, [*rows[:15], *again, *redelivered, *rows[16:]], KILLS, 1)


def changed(run: Run, at: int, **fields: Any) -> Run:
    read = list(run.read)
    read[at] = read[at]._replace(**fields)
    return replace(run, read=read)


FAULTS: Sequence[tuple[str, Callable[[Run], Run]]] = [
    ("confirmed and missing", lambda run: replace(run, read=[*run.read[:3], *run.read[4:]])),
    ("confirmed and missing", lambda run: replace(run, rows=21)),
    ("second copies neither marked nor redelivered", lambda run: replace(run, read=[*run.read, run.read[3]])),
    ("never sent, and read", lambda run: replace(run, read=[*run.read, Read(Copy(0, 20, False, True), "x", False)])),
    ("without exactly one message id", lambda run: changed(run, 15, message_id="another")),
    ("without exactly one message id", lambda run: changed(run, 0, message_id=None)),
    ("different nodes killed", lambda run: replace(run, kills=[*KILLS[:2], KILLS[0]])),
    ("kills that cut a connection of the sink", lambda run: replace(run, kills=[*KILLS[:2], Kill("c", False, 0, 1)])),
    ("kills of the queue's leader", lambda run: replace(run, kills=[kill._replace(is_leader=False) for kill in KILLS])),
    ("kills that ended the query of the source", lambda run: replace(run, source_ends=0)),
]


def wrong(run: Run) -> list[str]:
    return [line.statement.partition(":")[0] for line in audit(run) if not line.passed]


def test_a_correct_run_passes_the_audit() -> None:
    assert wrong(good()) == []
    assert audit(good())[1].measured == "6 second copies, 1 of them redelivered; 5 of all rows read are marked"


@pytest.mark.parametrize(("statement", "plant"), FAULTS)
def test_the_audit_names_a_planted_fault(statement: str, plant: Callable[[Run], Run]) -> None:
    assert wrong(plant(good())) == [statement]


def test_a_broken_body_is_not_counted_as_its_row() -> None:
    body = bytearray(body_of(0, 3))
    body[-1] ^= 1
    assert wrong(changed(good(), 3, copy=read_copy(bytes(body), {}))) == ["confirmed and missing", "not as it was sent"]
