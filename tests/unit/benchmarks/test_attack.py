"""Which results `benchmarks.attack` reports as missed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack import ATTACKS, LIMIT, MOST_LOG, ROUND_TRIP, Result, Target, clear
from checks.change import BROKERS, stages
from qflow_client.broker import Broker

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
def test_an_attack_result_that_exceeds_a_limit_is_reported_as_missed(
    changes: dict[str, Any], missed: list[str]
) -> None:
    assert replace(GOOD, **changes).missed() == missed


def test_the_limits_for_memory_and_round_trip_can_be_replaced() -> None:
    result = replace(GOOD, peak=100 + LIMIT * 3, worst=0.5)
    assert result.missed(factor=3, round_trip=0.5) == []
    assert result.missed(factor=2.9, round_trip=0.4) == ["memory", "round trip"]


def test_the_queues_of_earlier_attacks_on_a_running_broker_are_deleted() -> None:
    with Broker() as broker:
        for name in ("attack", "expires", "attack 0", "attack 1499", "other"):
            broker.declare_queue(name)
        asyncio.run(clear(Target(broker.url, "", 1.0)))
        assert [queue.name for queue in broker.queues()] == ["other"]


def test_the_stage_attacks_of_the_change_check_names_only_existing_attacks(tmp_path: Path) -> None:
    (stage,) = (stage for stage in stages(tmp_path) if stage.name == "attacks")
    assert stage.lane == BROKERS
    words = stage.script.split()
    names = words[words.index("--only") + 1].split(",")
    assert set(names) < set(ATTACKS)
