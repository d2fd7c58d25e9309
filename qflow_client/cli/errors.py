"""Exit codes of commands, and the error whose text `qflow` prints without a traceback."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CommandError", "ExitCode"]


class ExitCode(IntEnum):
    """The exit code of a command. After a signal the code is 128 plus the number of the signal, as in shells."""

    OK = 0
    FAILED = 1
    #: The command line cannot be parsed (typer uses the same code), or a setting is not allowed.
    USAGE = 2
    #: The producer was blocked (flowed) for longer than `max_producer_flow_control_wait`. A later try may succeed.
    FLOWED = 3


class CommandError(Exception):
    """A command cannot continue. The text explains the reason to the user."""

    def __init__(self, text: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
