"""Hooks for a `conftest.py` whose tests may be coroutine functions. They run with the fixture `run`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: object) -> None:
    """Let a coroutine function use the fixture `run`."""
    if inspect.iscoroutinefunction(obj):
        pytest.mark.usefixtures("run")(obj)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures: dict[str, Any] = pyfuncitem.funcargs
    fixtures["run"](pyfuncitem.obj(**{name: fixtures[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return True
