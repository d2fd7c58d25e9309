"""The pure parts of `benchmarks.dropin`, and that its loops run; what is measured is no test's business."""

from __future__ import annotations

import pytest

from benchmarks.dropin import LOOPS, measure, ratios
from qflow_client.broker import Broker


def test_every_loop_leaves_its_messages_in_the_queue() -> None:
    with Broker() as broker:
        (rates,) = measure(broker.url, 20, 10, 1)
        assert rates.keys() == LOOPS.keys()
        assert all(rate > 0 for rate in rates.values())
        # They are gone with their queues.
        assert broker.queues() == ()


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    rounds = [
        {name: factor * (3.0 if name.startswith("drop-in") else 1.0) for name in LOOPS} for factor in (1.0, 7.0, 100.0)
    ]
    assert ratios(rounds) == dict.fromkeys(ratios(rounds), pytest.approx(3.0))
