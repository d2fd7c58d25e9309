from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a local time zone that is not UTC and has daylight saving time."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
