"""Warns about passwords on the command line, and reads passwords from other places.

On most systems, every user can read the arguments of every process (``ps``). So a command prints a warning if the
value of an option contains a password. The warning names an alternative, such as an environment variable or a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.redaction import hide_password

__all__ = [
    "USERS",
    "broker_users",
    "decoding_checked",
    "hide_arguments",
    "standard_input",
    "users_of",
    "warn_of_option",
    "warn_of_url",
]

#: Name of the environment variable with the users of a broker.
USERS = "QFLOW_BROKER_USERS"

# A URL without a password, or with the usual default password guest, reveals no secret.
_PUBLIC = (None, "", "guest")


def hide_arguments(text: str, arguments: Sequence[str]) -> str:
    """Return the text without the passwords of URLs that the command line contains."""
    for argument in arguments:
        for given in (argument, argument.partition("=")[2]):
            hidden = hide_password(given)
            if hidden != given:
                # A `Path` shortens ``//`` to ``/``. The text may contain the shortened URL, so replace it too.
                text = text.replace(given, hidden).replace(str(Path(given)), hidden)
    return text


def warn_of_option(option: str, instead: str) -> None:
    """Print a warning that other users of the machine can read the option's value. `instead` names alternatives."""
    print(
        f"qflow: {option}: other users of this machine can see a password on the command line; use {instead}",
        file=sys.stderr,
    )


def warn_of_url(url: str | None) -> None:
    """Print a warning if a URL on the command line contains a secret password."""
    try:
        is_public = url is None or urlsplit(url).password in _PUBLIC
    except ValueError:
        # The URL is invalid. The code that later uses the URL raises an error for it.
        return
    if not is_public:
        warn_of_option("--url", "QFLOW_URL")


def users_of(lines: Iterable[str], where: str) -> dict[str, str]:
    """Parse lines of the form ``NAME:PASSWORD``. Errors do not contain the line, which may be a password."""
    users = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with decoding_checked(f"{where}, number {number}"):
            line.encode()
        name, colon, password = line.rstrip("\r\n").partition(":")
        if not colon or not name:
            raise CommandError(f"{where}, number {number}: this is not a user; write NAME:PASSWORD", ExitCode.USAGE)
        users[name] = password
    return users


def standard_input() -> TextIO:
    """Return standard input. Raise `CommandError` if it is closed."""
    if sys.stdin is None:
        raise CommandError("standard input is closed")
    return sys.stdin


@contextmanager
def decoding_checked(where: str) -> Iterator[None]:
    """Replace a `UnicodeError`, which may contain a part of a password, with a `CommandError`.

    In some locales Python decodes bytes that are not UTF-8 to surrogates, which only fail when they are encoded.
    """
    try:
        yield
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise CommandError(f"{where}: the text is not valid {error.encoding}", ExitCode.USAGE) from None


def broker_users(options: Sequence[str] | None, file: Path | None) -> dict[str, str] | None:
    """Return the names and passwords of a broker's users; ``None`` if none are given.

    The users come from ``--user`` (`options`), ``--users-file`` (`file`) or the environment variable `USERS`.

    Raises:
        CommandError: a line is not a user, the file has no user or is not UTF-8, or both options are given.
        OSError: the file cannot be read.
    """
    if options and file is not None:
        raise CommandError("--user and --users-file cannot be combined; put all users into the file", ExitCode.USAGE)
    if file is not None:
        with decoding_checked(f"--users-file {file}"):
            text = standard_input().read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
        users = users_of(text.splitlines(), f"--users-file {file}")
        if not users:
            raise CommandError(
                f"--users-file {file}: the file has no users; write one NAME:PASSWORD in each line", ExitCode.USAGE
            )
        return users
    if options:
        if not all(map(str.strip, options)):
            raise CommandError("--user '': this is not a user; write NAME:PASSWORD", ExitCode.USAGE)
        return users_of(options, "--user")
    return users_of(os.environ.get(USERS, "").splitlines(), USERS) or None
