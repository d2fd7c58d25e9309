"""The functions of `benchmarks.celery`, and that its loops run. Measured values are not tested."""

from __future__ import annotations

from benchmarks.celery import LOOPS, measure, ratios
from qflow_client.broker import Broker


def test_every_loop_of_the_celery_benchmark_runs_without_an_error() -> None:
    with Broker() as broker:
        (rates,) = measure(broker.url, 5, 1)
    assert rates.keys() == LOOPS.keys()
    assert all(rate > 0 for rate in rates.values())


def test_each_throughput_ratio_of_the_celery_benchmark_is_the_median_over_the_rounds() -> None:
    rounds = [dict.fromkeys(LOOPS, 1.0) | {"qflow, unconfirmed": rate} for rate in (1.0, 3.0, 2.0)]
    assert ratios(rounds) == {"unconfirmed": 2.0, "confirm each": 1.0, "pipelined": 1.0}
