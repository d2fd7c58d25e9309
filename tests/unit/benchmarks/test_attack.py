"""Which results `benchmarks.attack` reports as missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack import ATTACKS, LIMIT, MOST_LOG, ROUND_TRIP, Result, attack
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


def test_the_queues_of_earlier_attacks_on_a_running_broker_are_deleted_before_the_next_attack() -> None:
    with Broker() as broker:
        broker.declare_queue("attack", arguments={"x-max-length": 7})
        found = attack("dead_letters", seconds=0.1, scale=0.01, url=broker.url)
        assert (found.attack, found.lost) == ("dead_letters", 0)
        assert broker.queue("attack").arguments == {"x-dead-letter-exchange": "amq.fanout"}


def test_the_stage_attacks_of_the_change_check_names_only_existing_attacks(tmp_path: Path) -> None:
    (stage,) = (stage for stage in stages(tmp_path) if stage.name == "attacks")
    assert stage.lane == BROKERS
    words = stage.script.split()
    names = words[words.index("--only") + 1].split(",")
    assert set(names) < set(ATTACKS)
