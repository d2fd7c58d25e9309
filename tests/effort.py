"""The effort of the tests: how many examples of a property, seeds of a simulation and kills of a process they try.

`QFLOW_EFFORT` chooses one of three efforts:

- `quick`, the default: few rounds, for use in an editor
- `ci`, the default if `CI` is set: the rounds that a change must pass
- `nightly`: many rounds, with other random values in each run

A test gives the number of its rounds in CI. `rounds` returns the number for the chosen effort.

If `CI` is not set, `quick` leaves out the tests that start whole programs, which have the mark `program`. It also
leaves out the tests on uvloop that also run on asyncio's own loop.
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
    """Return the number of rounds of a test that has `in_ci` rounds in CI. The number is at least `least`."""
    return max(least, round(in_ci * _TIMES[EFFORT]))


def load_profile() -> None:
    """Load the hypothesis profile of this effort.

    Examples have no deadline, because a busy machine must not fail a property. Except with `nightly`, every run tries
    the same examples, so that a new failure has its cause in the tested change.
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
