from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest

from checks.warm import cores
from qflow_client.logs import flush_logs
from qflow_client.manager import flow_manager
from tests.effort import COMPLETE, load_profile
from tests.trust import trust_nobody

load_profile()

trust_nobody()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Until all is collected: what is imported stays until the end.
    gc.disable()
    # Coverage is of the tests' own processes, and costs nothing in the programs that they start.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Have ``-n auto`` start two processes more than there are cores, because many tests wait."""
    return cores() + 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that start whole programs, unless they are to run or ``-m`` chooses tests."""
    if COMPLETE or config.option.markexpr:
        return
    programs = [item for item in items if item.get_closest_marker("program")]
    if programs:
        config.hook.pytest_deselected(items=programs)
        items[:] = [item for item in items if not item.get_closest_marker("program")]
    if hasattr(config, "workeroutput"):
        config.workeroutput["programs"] = len(programs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Have the summary count what the workers left out. Each of them left out the same tests."""
    if node.gateway.id == "gw0":
        count = getattr(node, "workeroutput", {}).get("programs", 0)
        # What only has to be countable.
        node.config.hook.pytest_deselected(items=[SimpleNamespace() for _ in range(count)])


#: How many objects the garbage collector ignores: none before the collection of tests has finished.
_ignored = 0


def pytest_collection_finish() -> None:
    """Have the garbage collector ignore what the test modules consist of: a full collection takes 0.2 s with it."""
    global _ignored
    gc.collect()
    gc.freeze()
    gc.enable()
    _ignored = gc.get_freeze_count()


@pytest.fixture(autouse=True, scope="module")
def _modules_are_ignored() -> None:
    """Have the collector ignore them again after a test that called `gc.unfreeze`, as `qflow broker` does."""
    if gc.get_freeze_count() < _ignored // 2:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _manager_is_its_own() -> None:
    """What another module's tests have left, such as the connections that Celery keeps, is not in the way."""
    for each in flow_manager.resources:
        flow_manager.unregister(each)
    flow_manager.start_all()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """pytest's own, once the log lines of earlier tests are written."""
    assert flush_logs(20)
    return caplog


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers end with their first connection, unless a test sets it otherwise."""
    monkeypatch.setenv("QFLOW_RECONNECT_TIMEOUT", "0")


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers settle what the broker refuses, unless a test sets it otherwise."""
    monkeypatch.setenv("QFLOW_ON_REFUSED", "fail")


@pytest.fixture
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings that the environment has."""
    for name in os.environ:
        if name.startswith("QFLOW_"):
            monkeypatch.delenv(name)
