"""Collects garbage for a test."""

from __future__ import annotations

import gc
from typing import Any


def collect() -> None:
    """Collect all garbage that there is now. `gc.collect` has no effect while another thread collects garbage."""
    found = 0
    while not found:
        cycle: list[Any] = []
        cycle.append(cycle)
        del cycle
        found = gc.collect()
