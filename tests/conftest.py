from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Nothing here is timed by hypothesis: a busy machine must not fail a property that holds. In CI the same examples are
# tried each time, so that a failure belongs to the change it appears with.
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dev", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Coverage is of the tests' own processes, and costs nothing in the programs that they start.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers end with their first connection, unless a test sets it otherwise."""
    monkeypatch.setenv("QFLOW_RECONNECT_TIMEOUT", "0")


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers settle what the broker refuses, unless a test sets it otherwise."""
    monkeypatch.setenv("QFLOW_ON_REFUSED", "fail")
