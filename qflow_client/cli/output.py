"""The option ``--json``. With this option, the standard output of every command is JSON, for programs.

The keys of the JSON objects are public. Errors still go to standard error as text, and exit codes do not change.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TextIO

import typer

__all__ = ["AsJson", "print_json"]

#: Type of the parameter ``as_json`` of a command.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]


def print_json(value: Any, *, indent: int | None = None, file: TextIO | None = None) -> None:
    """Print a value as JSON, and flush, because programs may read the output while the command runs.

    The output is ASCII, because a terminal or a pipe may have any encoding, and a name may contain control characters.
    """
    print(json.dumps(value, indent=indent), file=file, flush=True)
