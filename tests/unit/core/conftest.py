from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _all_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Enable all log levels, so that the protocol creates all log entries."""
    caplog.set_level(logging.DEBUG, "qflow_client")
