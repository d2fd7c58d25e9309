"""How much the tests try of what has no end: examples of a property, seeds of a simulation, kills of a process.

`QFLOW_EFFORT` chooses one of three:

- `quick`, the default: a few of each, for an editor and a newcomer
- `ci`, the default where `CI` is set: what decides about a change
- `nightly`: many, and other ones every time

A test says how many it wants in CI; `rounds` returns how many there are to be.

Where `CI` is not set, `quick` leaves out tests that start whole programs, which have the mark `program`, and tests on
uvloop that run on asyncio's own loop as well.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

_TIMES: Final = {"quick": 0.1, "ci": 1.0, "nightly": 30.0}

EFFORT: Final = os.environ.get("QFLOW_EFFORT") or ("ci" if os.environ.get("CI") else "quick")
if EFFORT not in _TIMES:
    raise ValueError(f"QFLOW_EFFORT={EFFORT} is unknown; use one of {', '.join(_TIMES)}")

COMPLETE: Final = EFFORT != "quick" or bool(os.environ.get("CI"))
"""Whether every test runs: in CI also with `quick`, which it uses for other releases of Python."""


def rounds(in_ci: int, *, least: int = 1) -> int:
    """Return how many rounds to run of something that runs `in_ci` rounds in CI, and never fewer than `least`."""
    return max(least, round(in_ci * _TIMES[EFFORT]))


def load_profile() -> None:
    """Load the hypothesis profile of this effort.

    A busy machine must not fail a property that holds, so no example has a deadline. Except at night every run tries
    the same examples, so that a failure belongs to the change that it appears with.
    """
    settings.register_profile(
        EFFORT,
        deadline=None,
        derandomize=EFFORT != "nightly",
        max_examples=rounds(50, least=5),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(EFFORT)
