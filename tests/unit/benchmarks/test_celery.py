"""The pure parts of `benchmarks.celery`, and that its loops run; what is measured is no test's business."""

from __future__ import annotations

from benchmarks.celery import LOOPS, measure, ratios
from qflow_client.broker import Broker


def test_every_benchmark_loop_runs() -> None:
    with Broker() as broker:
        (rates,) = measure(broker.url, 5, 1)
    assert rates.keys() == LOOPS.keys()
    assert all(rate > 0 for rate in rates.values())


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    rounds = [dict.fromkeys(LOOPS, 1.0) | {"qflow, unconfirmed": rate} for rate in (1.0, 3.0, 2.0)]
    assert ratios(rounds) == {"unconfirmed": 2.0, "confirm each": 1.0, "pipelined": 1.0}
