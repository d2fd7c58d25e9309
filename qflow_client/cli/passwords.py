"""Passwords and the command line: what others can read, and the ways around it.

Every user of a machine can read the arguments of every process (``ps``). So an option that takes a password warns, and
names the environment variable, the file or the standard input that takes it instead.
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

# What every broker starts with is not secret.
_PUBLIC = (None, "", "guest")


def hide_arguments(text: str, arguments: Sequence[str]) -> str:
    """A text for people, in which arguments that may have a password in them appear without it."""
    for argument in arguments:
        for given in (argument, argument.partition("=")[2]):
            hidden = hide_password(given)
            if hidden != given:
                # A path has no two slashes in a row.
                text = text.replace(given, hidden).replace(str(Path(given)), hidden)
    return text


def warn_of_option(option: str, instead: str) -> None:
    """Warn that an option has a password that others can read.

    Args:
        option: as it was given.
        instead: the ways without it.
    """
    print(f"qflow: {option}: others can read a password on the command line; use {instead}", file=sys.stderr)


def warn_of_url(url: str | None, instead: str) -> None:
    """Warn if a URL on the command line has a password.

    Args:
        url: as it was given; ``None`` if it was not.
        instead: the ways without it.
    """
    try:
        is_public = url is None or urlsplit(url).password in _PUBLIC
    except ValueError:
        # It is refused where it is used.
        return
    if not is_public:
        warn_of_option("--url", instead)


def users_of(lines: Iterable[str], where: str) -> dict[str, str]:
    """Users and their passwords.

    Args:
        lines: ``NAME:PASSWORD`` each; empty ones are left out.
        where: where they come from, for the error.

    Raises:
        CommandError: a line is something else. The text does not repeat the line, which may be a password.
    """
    users = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, colon, password = line.rstrip("\r\n").partition(":")
        if not colon or not name:
            raise CommandError(f"{where}, number {number}: a user is given as NAME:PASSWORD", ExitCode.USAGE)
        users[name] = password
    return users


def broker_users(options: Sequence[str] | None, file: Path | None) -> dict[str, str] | None:
    """The users of a broker, from ``--user``, or ``--users-file``, or else from the environment.

    Args:
        options: ``NAME:PASSWORD`` each.
        file: ``NAME:PASSWORD`` in each line; ``-`` for standard input.

    Returns:
        Passwords by name; ``None`` if nothing names any.

    Raises:
        CommandError: a line is not a user, there is none in the file, or there are both options and a file.
        OSError: the file cannot be read.
    """
    if options and file is not None:
        raise CommandError("--user and --users-file: give one; all users can be in the file", ExitCode.USAGE)
    if file is not None:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        users = users_of(text.splitlines(), f"--users-file {file}")
        if not users:
            raise CommandError(f"--users-file {file}: there is no user in it", ExitCode.USAGE)
        return users
    if options:
        return users_of(options, "--user") or None
    return users_of(os.environ.get(USERS, "").splitlines(), USERS) or None
