"""Collects garbage for a test."""

from __future__ import annotations

import gc
from typing import Any


def collect() -> None:
    """Collect all current garbage. Repeat `gc.collect`, which does nothing while another thread collects garbage."""
    found = 0
    while not found:
        cycle: list[Any] = []
        cycle.append(cycle)
        del cycle
        found = gc.collect()
