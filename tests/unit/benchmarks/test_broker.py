"""The loops of `benchmarks.broker`. Their measured values are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import broker as benchmark
from benchmarks import fairness
from benchmarks.wire import Wire, fresh_queue
from qflow_client.broker import Broker


def test_the_broker_benchmark_consumes_and_confirms_every_message_and_deletes_all_queues() -> None:
    with Broker() as broker:
        assert benchmark.published(broker.url, 50) > 0
        # More messages than fit in a window.
        assert benchmark.consumed(broker.url, 2 * benchmark.WINDOW + 1) > 0
        assert all(milliseconds >= 0 for milliseconds in benchmark.latency(broker.url, 1000, 0.05))
        assert set(benchmark.policies(broker.url, 20, 1)) == set(benchmark.POLICIES) - {"none"}
        assert not broker.queues()


def test_a_queue_expires_if_the_benchmark_cannot_delete_it_because_its_process_was_killed() -> None:
    with Broker() as broker, Wire(broker.url) as wire, fresh_queue(wire, {"x-max-length": 3}) as queue:
        assert broker.queue(queue).arguments == {"x-expires": 3_600_000, "x-max-length": 3}


def test_persistent_messages_of_the_broker_benchmark_are_on_disk_when_they_are_confirmed(tmp_path: Path) -> None:
    with Broker(store=tmp_path / "store") as broker:
        assert benchmark.published(broker.url, 50, persistent=True) > 0
        assert broker.memory.written == 50


@pytest.mark.program
def test_the_connection_benchmark_keeps_its_connections_open_and_reports_missing_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert benchmark.main(["--quick", "--json", "--check", "--parts", "connections"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["connections held"] == 50
    assert "missed: connections held >= 2000, not 50" in printed.err
    assert "missed: published, of RabbitMQ's >= 3.5, not measured" in printed.err


@pytest.mark.program
def test_the_broker_benchmark_counts_the_messages_of_two_producer_processes() -> None:
    row = fairness.flap(0.0, 2, 300)
    assert row["least"] + row["most"] == 300
    assert row["peak"] <= fairness.STOP + 2 * fairness.CAPACITY
