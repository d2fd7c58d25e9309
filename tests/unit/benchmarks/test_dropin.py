"""The functions of `benchmarks.dropin`, and that its loops run. Measured values are not tested."""

from __future__ import annotations

import pytest

from benchmarks.dropin import LOOPS, RATIOS, measure, ratios
from qflow_client.broker import Broker


@pytest.mark.program
@pytest.mark.parametrize("library", LOOPS)
def test_every_benchmark_loop_leaves_all_published_messages_in_the_queue(library: str) -> None:
    with Broker() as broker:
        (rates,) = measure(broker.url, 20 if library == "pika" else 1000, 10, 1, library)
        assert rates.keys() == LOOPS[library].keys()
        assert all(rate > 0 for rate in rates.values())
        # The messages were deleted with their queues.
        assert broker.queues() == ()


@pytest.mark.parametrize("library", LOOPS)
def test_a_drop_in_ratio_is_the_median_of_the_ratios_of_all_rounds(library: str) -> None:
    rounds = [
        {name: factor * (3.0 if name.startswith("drop-in") else 1.0) for name in LOOPS[library]}
        for factor in (1.0, 7.0, 100.0)
    ]
    assert ratios(rounds, library) == dict.fromkeys(RATIOS[library], pytest.approx(3.0))
