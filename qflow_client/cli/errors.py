"""Exit codes, and the error that is printed as one line."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CommandError", "ExitCode"]


class ExitCode(IntEnum):
    """The exit code of a command. After a signal the code is 128 plus the number of the signal, as in shells."""

    OK = 0
    FAILED = 1
    #: Typer's code for a command line that it cannot parse; also for a setting that is not allowed.
    USAGE = 2
    #: The producer was flowed for longer than the allowed wait. Messages that were not sent can be sent later.
    FLOWED = 3


class CommandError(Exception):
    """A command cannot continue. The text is complete for its user.

    Attributes:
        exit_code: exit code of the command.
    """

    def __init__(self, text: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
