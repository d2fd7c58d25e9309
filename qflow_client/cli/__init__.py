"""The command line: ``qflow``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``qflow``, and return the exit code.

    Args:
        arguments: the command line without the program's name. The default is the command line of the process.
    """
    # The library does not need these packages, so they are installed only by the extra `cli`.
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        print(f"qflow: the command line needs {needs}: pip install 'qflow-client[cli]'", file=sys.stderr)
        return 1
    from qflow_client.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)
