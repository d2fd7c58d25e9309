"""Prints tables and JSON for commands, and defines the option ``--json``.

With ``--json``, the standard output of every command is JSON. The keys of the JSON objects are a public interface.
Errors still go to standard error as text, and exit codes do not change.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

__all__ = ["AsJson", "print_json", "table_console"]

#: Type of the parameter ``as_json`` of a command.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]


def table_console() -> Console:
    """Return a console that prints tables to standard output."""
    # If standard output is a pipe or file, do not let rich cut off cells at the width of a terminal.
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 1000)


def print_json(value: Any, *, indent: int | None = None, file: TextIO | None = None) -> None:
    """Print a value as JSON, and flush, because programs may read the output while the command runs.

    The output is ASCII, because a terminal or a pipe may have any encoding, and a name may contain control characters.
    """
    print(json.dumps(value, indent=indent), file=file, flush=True)
