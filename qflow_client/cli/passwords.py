"""Passwords on the command line: warnings, and ways to avoid it.

Every user of a machine can read the arguments of every process (``ps``). So an option with a password prints a warning.
The warning names the alternatives: an environment variable, a file or standard input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.redaction import hide_password

__all__ = ["USERS", "broker_users", "hide_arguments", "users_of", "warn_of_option", "warn_of_url"]

#: The environment variable with the users of a broker.
USERS = "QFLOW_BROKER_USERS"

# These passwords are not secret; guest is the default of every broker.
_PUBLIC = (None, "", "guest")


def hide_arguments(text: str, arguments: Sequence[str]) -> str:
    """Remove the passwords of arguments from a text for people."""
    for argument in arguments:
        for given in (argument, argument.partition("=")[2]):
            hidden = hide_password(given)
            if hidden != given:
                # A `Path` shortens two slashes in a row to one, so replace that form too.
                text = text.replace(given, hidden).replace(str(Path(given)), hidden)
    return text


def warn_of_option(option: str, instead: str) -> None:
    """Warn that other users can read the password in an option.

    Args:
        option: option as given.
        instead: alternatives to the option.
    """
    print(
        f"qflow: {option}: other users of this machine can see a password on the command line; use {instead}",
        file=sys.stderr,
    )


def warn_of_url(url: str | None, instead: str) -> None:
    """Warn if a URL on the command line has a password.

    Args:
        url: URL as given; ``None`` if it was not given.
        instead: alternatives to the option.
    """
    try:
        is_public = url is None or urlsplit(url).password in _PUBLIC
    except ValueError:
        # The URL is refused later, where it is used.
        return
    if not is_public:
        warn_of_option("--url", instead)


def users_of(lines: Iterable[str], where: str) -> dict[str, str]:
    """Return users with their passwords.

    Args:
        lines: lines of the form ``NAME:PASSWORD``; empty lines are skipped.
        where: source of the lines, for errors.

    Raises:
        CommandError: a line has another form. The text does not repeat the line, which may be a password.
    """
    users = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, colon, password = line.rstrip("\r\n").partition(":")
        if not colon or not name:
            raise CommandError(f"{where}, number {number}: this is not a user; write NAME:PASSWORD", ExitCode.USAGE)
        users[name] = password
    return users


def broker_users(options: Sequence[str] | None, file: Path | None) -> dict[str, str] | None:
    """Return the users of a broker from ``--user`` or ``--users-file``, or otherwise from the environment.

    Args:
        options: values of the form ``NAME:PASSWORD``.
        file: file with lines of the form ``NAME:PASSWORD``; ``-`` for standard input.

    Returns:
        Passwords by user name; ``None`` if no users are given.

    Raises:
        CommandError: a line is not a user, the file has no user, or both options and a file are given.
        OSError: the file cannot be read.
    """
    if options and file is not None:
        raise CommandError("--user and --users-file cannot be combined; put all users into the file", ExitCode.USAGE)
    if file is not None:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        users = users_of(text.splitlines(), f"--users-file {file}")
        if not users:
            raise CommandError(
                f"--users-file {file}: the file has no users; write one NAME:PASSWORD in each line", ExitCode.USAGE
            )
        return users
    if options:
        return users_of(options, "--user") or None
    return users_of(os.environ.get(USERS, "").splitlines(), USERS) or None
