"""Calls functions in a forked child before any other code, on systems that can fork."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["after_fork_in_child"]


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call a function in every child that this process forks from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
