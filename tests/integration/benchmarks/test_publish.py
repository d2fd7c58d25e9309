from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from benchmarks import peers, runner
from benchmarks.publish import FLOOR, main
from qflow_client.broker import Broker

SHORT = ("--messages", "20", "--repeat", "1")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.fixture(autouse=True)
def _nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all tests of this process have made is much to go through before every run."""
    monkeypatch.setattr(runner, "gc", SimpleNamespace(collect=lambda: 0))


def test_each_client_in_the_publish_benchmark_publishes_all_messages_of_both_sizes(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "--url", broker.url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {(row["peer"], row["size"]): row for row in told["rows"]}
    assert set(found) == {(name, size) for name in peers.DEFAULT for size in (100, 1024)}
    for (name, _), row in found.items():
        assert row["rate"] > 0, name
        assert row["to_plain"] > 0, name
        assert row["to_pika_select"] > 0, name
    # What is asked of one of them is measured.
    for bar in FLOOR:
        assert found[bar.peer, bar.size][bar.ratio] > 0


@pytest.mark.parametrize("more", ["--url embedded", "--unconfirmed", "--varying", "--latency"])
def test_the_table_of_the_publish_benchmark_has_one_line_for_each_client(
    broker: Broker, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    given = [*SHORT, "--url", broker.url, "--sizes", "100", "--peers", "plain,qflow,qflow_async"]
    assert main([*given, *more.split()]) == 0
    out = capsys.readouterr().out
    for title in ("plain socket", "qflow_client.Producer", "qflow_client.AsyncProducer"):
        assert title in out


def test_the_publish_benchmark_fails_and_reports_a_required_ratio_that_is_not_reached(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without pika's select nothing can be said of the ratio to it.
    assert main([*SHORT, "--url", broker.url, "--sizes", "100", "--peers", "plain,qflow", "--check", "floor"]) == 1
    assert "missed: qflow, 100 bytes: to_pika_select >= 1.5: not measured" in capsys.readouterr().err
