"""One of two relays is suspended, or cut off from the database or the broker, under load."""

from __future__ import annotations

import pytest

from benchmarks.relay_outages import OUTAGES, run


# Each starts processes anew, however busy the machine is.
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("postgresql")
def test_E14_an_outage_of_one_relay_delays_only_its_own_rows_and_second_copies_are_marked() -> None:
    verdict = run(seconds=15.0, lease=3.0)
    assert verdict.is_good, verdict
    assert verdict.committed, verdict
    # Three seconds on a machine that is not busy. What waited for the end of the outage would have waited for longer.
    assert verdict.latest.keys() == set(OUTAGES)
    assert max(verdict.latest.values()) < 12.0, verdict
