"""`qflow send --outbox`, killed with -9 at any moment and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.send_kills import FORMATS, audit, run
from qflow_client.broker import Broker
from tests.effort import rounds

# These tests start a process for every kill, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.program
def test_E13_after_kills_at_random_moments_each_row_arrives_in_order_and_copies_are_marked(
    broker: Broker, tmp_path: Path
) -> None:
    kills = rounds(10, least=5)
    # Rows of CSV may have several lines, so CSV is the hardest format for positions.
    verdict = run(tmp_path, kills=kills, rows=200 * kills, url=broker.url, format="csv")
    while not verdict.resumed:
        kills *= 2
        assert kills < 200, verdict
        verdict = run(tmp_path, kills=kills, rows=200 * kills, url=broker.url, format="csv")
    assert verdict.is_good, verdict


@pytest.mark.program
def test_E13_a_kill_after_the_broker_has_refused_rows_loses_no_row(broker: Broker, tmp_path: Path) -> None:
    kills = rounds(10, least=6)
    verdict = run(tmp_path, kills=kills, rows=200 * kills, url=broker.url, refusals=True)
    while not verdict.refused:
        kills *= 2
        assert kills < 200, verdict
        verdict = run(tmp_path, kills=kills, rows=200 * kills, url=broker.url, refusals=True)
    assert verdict.is_good, verdict


@pytest.mark.program
@pytest.mark.parametrize("format", FORMATS)
def test_E13_without_a_kill_a_file_of_any_format_is_sent_exactly_once(
    broker: Broker, tmp_path: Path, format: str
) -> None:
    verdict = run(tmp_path, kills=0, rows=50, url=broker.url, format=format)
    assert verdict.is_good
    assert (verdict.rows, verdict.in_queue, verdict.copies) == (50, 50, 0)


def test_E13_the_audit_counts_lost_and_misordered_rows_and_unmarked_copies() -> None:
    # The second run's copy of row 3 has arrived before the first run's copy.
    right = [(1, False), (2, False), (3, True), (2, True), (3, False), (4, False)]
    assert audit(4, right) == {"in_queue": 6, "lost": 0, "out_of_order": 0, "copies": 2, "unmarked": 0}
    wrong = [(1, False), (3, False), (2, False), (1, False)]
    assert audit(4, wrong) == {"in_queue": 4, "lost": 1, "out_of_order": 1, "copies": 1, "unmarked": 1}


def test_E13_the_audit_permits_only_refused_rows_to_arrive_out_of_order() -> None:
    # Row 2 was refused and arrived after row 5. Row 6 arrived after row 7.
    queue = [(1, False), (3, False), (4, False), (5, False), (2, True), (7, False), (6, False)]
    assert audit(7, queue, {2})["out_of_order"] == 1
    assert audit(7, queue, {2, 6})["out_of_order"] == audit(7, queue, {2, 7})["out_of_order"] == 0
    assert audit(7, queue)["out_of_order"] == 2
