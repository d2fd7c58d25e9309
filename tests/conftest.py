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
    # Pause the collector until pytest has collected the tests, because all imported objects stay until the end.
    gc.disable()
    # Measure the coverage only in the processes of pytest, because measuring would slow the programs that tests start.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``, return the number of cores plus two, because many tests wait."""
    return cores() + 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that start whole programs, if the effort is `quick` and there is no option ``-m``."""
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
    """Count the tests that the workers left out in pytest's summary. All workers left out the same tests."""
    if node.gateway.id == "gw0":
        count = getattr(node, "workeroutput", {}).get("programs", 0)
        # pytest only counts these items, so any objects will do.
        node.config.hook.pytest_deselected(items=[SimpleNamespace() for _ in range(count)])


#: Number of objects that the garbage collector ignores; 0 before pytest has collected the tests.
_ignored = 0


def pytest_collection_finish() -> None:
    """Make the garbage collector ignore the objects of the test modules. With them, a full collection takes 0.2 s."""
    global _ignored
    gc.collect()
    gc.freeze()
    gc.enable()
    _ignored = gc.get_freeze_count()


@pytest.fixture(autouse=True, scope="module")
def _modules_are_ignored() -> None:
    """Make the garbage collector ignore the modules again if a test called `gc.unfreeze`, as `qflow broker` does."""
    if gc.get_freeze_count() < _ignored // 2:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _manager_is_its_own() -> None:
    """Unregister the resources that tests of other modules have left in the flow manager, such as Celery's."""
    for each in flow_manager.resources:
        flow_manager.unregister(each)
    flow_manager.start_all()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """pytest's fixture `caplog`. The log lines of earlier tests are written before the test starts."""
    assert flush_logs(20)
    return caplog


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, producers do not reconnect."""
    monkeypatch.setenv("QFLOW_RECONNECT_TIMEOUT", "0")


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, producers do not retry messages that the broker refuses."""
    monkeypatch.setenv("QFLOW_ON_REFUSED", "fail")


@pytest.fixture
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all settings from the environment."""
    for name in os.environ:
        if name.startswith("QFLOW_"):
            monkeypatch.delenv(name)
