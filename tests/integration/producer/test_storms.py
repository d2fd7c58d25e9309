"""E2: for some seconds, signal handlers, finalizers and log handlers use a producer at any moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qflow_client.broker import Broker
from tests.effort import EFFORT, rounds


# "both" is the first two at once, so a quick run leaves each alone to CI.
@pytest.mark.program
@pytest.mark.parametrize("storm", ["both", "log"] if EFFORT == "quick" else ["signal", "gc", "both", "log"])
@pytest.mark.parametrize("skin", ["threads", "tasks"])
def test_E2_many_nested_calls_from_signal_handlers_hang_no_producer_and_assign_no_message_number_twice(
    broker: Broker, skin: str, storm: str
) -> None:
    seconds = rounds(10, least=5) / 10
    command = [sys.executable, "-m", "tests.integration.producer.storms", skin, broker.url, storm, str(seconds)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    # What was admitted arrived once.
    assert broker.queue("q").depth == int(ended.stdout)
