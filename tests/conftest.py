from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from qflow_client.manager import flow_manager

# A test with sockets, processes and signals that fails is tried a second time, and the summary names it: it is to be
# mended. More of them in one run are no accident. What does no I/O has no excuse.
_SECOND_TRIES = 3
# What pytest-timeout has ended is not: it has no timer for a second try.
_HUNG = r"Timeout \(>"
_WITHOUT_IO = Path(__file__).parent / "unit"

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(_WITHOUT_IO):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=_HUNG))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and len(reporter.stats.get("rerun", ())) > _SECOND_TRIES:
        reporter.ensure_newline()
        reporter.write_line(f"more than {_SECOND_TRIES} tests had to be tried a second time", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="module")
def _manager_is_its_own() -> None:
    """What another module's tests have left, such as the connections that Celery keeps, is not in the way."""
    for each in flow_manager.resources:
        flow_manager.unregister(each)
    flow_manager.start_all()


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers end with their first connection, unless a test sets it otherwise."""
    monkeypatch.setenv("QFLOW_RECONNECT_TIMEOUT", "0")


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers settle what the broker refuses, unless a test sets it otherwise."""
    monkeypatch.setenv("QFLOW_ON_REFUSED", "fail")
