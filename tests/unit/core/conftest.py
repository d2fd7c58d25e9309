from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _all_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A protocol has to say what somebody wants to read."""
    caplog.set_level(logging.DEBUG, "qflow_client")
