"""What ends a command: exit codes, and the error that becomes one line."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CommandError", "ExitCode"]


class ExitCode(IntEnum):
    """How a command ended; killed by a signal it is 128 and the signal's number, as shells have it."""

    OK = 0
    FAILED = 1
    #: Typer's own for a command line that cannot be understood, and for a setting that is not allowed.
    USAGE = 2
    #: Flowed for longer than it was to wait; what was not sent can be sent later.
    FLOWED = 3


class CommandError(Exception):
    """A command cannot go on; the text is all that its user needs to know.

    Attributes:
        exit_code: with which the command ends.
    """

    def __init__(self, text: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
