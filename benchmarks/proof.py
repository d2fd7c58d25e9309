"""What a run without failures adds to the totals of `docs/nightly.md`.

`checks.nightly` reads the line from the log of a step.
"""

from __future__ import annotations

import sys

__all__ = ["print_proof"]


def print_proof(number: int, what: str) -> None:
    """Print a line such as ``proved: 3,000 kills of producers``. Standard output may be JSON."""
    print(f"proved: {number:,} {what}", file=sys.stderr, flush=True)
