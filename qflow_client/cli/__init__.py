"""The command line: ``qflow``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``qflow`` with `arguments` (by default those of the process), and return the exit code."""
    # Only the extra `cli` installs these packages, because the library does not need them.
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        print(f"qflow: the command line needs {needs}: pip install 'qflow-client[cli]'", file=sys.stderr)
        return 1
    from qflow_client.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)
