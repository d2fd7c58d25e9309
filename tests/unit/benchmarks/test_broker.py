"""`benchmarks.broker` does what it says; what it measures is no test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import broker as benchmark
from benchmarks import fairness
from qflow_client.broker import Broker


def test_every_message_is_published_consumed_and_confirmed_and_all_queues_are_deleted() -> None:
    with Broker() as broker:
        assert benchmark.published(broker.url, 50) > 0
        # More than a window.
        assert benchmark.consumed(broker.url, 2 * benchmark.WINDOW + 1) > 0
        assert all(milliseconds >= 0 for milliseconds in benchmark.latency(broker.url, 1000, 0.05))
        assert set(benchmark.policies(broker.url, 20, 1)) == set(benchmark.POLICIES) - {"none"}
        assert not broker.queues()


def test_persistent_messages_are_on_disk_when_they_are_confirmed(tmp_path: Path) -> None:
    with Broker(store=tmp_path / "store") as broker:
        assert benchmark.published(broker.url, 50, persistent=True) > 0
        assert broker.memory.written == 50


@pytest.mark.program
def test_connections_stay_open_and_a_bar_without_a_measurement_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--quick", "--json", "--check", "--parts", "connections"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["connections held"] == 50
    assert "missed: connections held >= 2000, not 50" in printed.err
    assert "missed: published, of RabbitMQ's >= 3.5, not measured" in printed.err


@pytest.mark.program
def test_messages_of_two_producer_processes_are_counted() -> None:
    row = fairness.flap(0.0, 2, 300)
    assert row["least"] + row["most"] == 300
    assert row["peak"] <= fairness.STOP + 2 * fairness.CAPACITY
