"""Each process is killed at random moments, and no message is lost."""

from __future__ import annotations

import random

import pytest

from benchmarks.relay_kills import run
from tests.effort import EFFORT, rounds


# Each starts processes anew, however busy the machine is.
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("postgresql")
def test_E14_no_message_is_lost_if_application_and_relay_and_postgresql_and_broker_are_killed() -> None:
    seed = random.randrange(1000) if EFFORT == "nightly" else 1
    verdict = run(kills=rounds(7, least=2), seed=seed)
    assert verdict.is_good, verdict
    assert verdict.committed, verdict
