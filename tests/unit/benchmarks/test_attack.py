"""When `benchmarks.attack` says that a bar is missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack import ATTACKS, LIMIT, MOST_LOG, ROUND_TRIP, Result
from checks.change import BROKERS, stages

GOOD = Result("none", 100, 100 + LIMIT, ROUND_TRIP, 0.001, 0, MOST_LOG, "")


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"peak": 200 + LIMIT * 6 // 5}, ["memory"]),
        ({"worst": ROUND_TRIP * 1.01}, ["round trip"]),
        ({"lost": 1}, ["lost connections"]),
        ({"log": MOST_LOG + 1}, ["log"]),
        ({"told": "/metrics"}, ["told to strangers"]),
        ({"worst": 1.0, "lost": 2}, ["round trip", "lost connections"]),
    ],
)
def test_a_result_beyond_its_limit_misses_the_bar(changes: dict[str, Any], missed: list[str]) -> None:
    assert replace(GOOD, **changes).missed() == missed


def test_other_bars_can_be_set_on_the_command_line() -> None:
    result = replace(GOOD, peak=100 + LIMIT * 3, worst=0.5)
    assert result.missed(factor=3, round_trip=0.5) == []
    assert result.missed(factor=2.9, round_trip=0.4) == ["memory", "round trip"]


def test_the_change_check_runs_only_attacks_that_exist(tmp_path: Path) -> None:
    (stage,) = (stage for stage in stages(tmp_path) if stage.name == "attacks")
    assert stage.lane == BROKERS
    words = stage.script.split()
    names = words[words.index("--only") + 1].split(",")
    assert set(names) < set(ATTACKS)
