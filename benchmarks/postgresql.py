"""A private PostgreSQL server: found on the machine, started in a temporary folder, killed as needed."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["NotInstalled", "PostgresqlServer", "server"]

# Maximum seconds to start, to stop or to recover.
_PATIENCE = 60.0
# Debian does not put the server programs into the path.
_FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin", "/opt/homebrew/opt/postgresql*/bin")
# The server refuses to run as root.
_ACCOUNTS = ("postgres", "nobody")


class NotInstalled(RuntimeError):
    """There is no PostgreSQL on this machine."""


def _folder() -> Path:
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    for pattern in _FOLDERS:
        for folder in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if (folder / "initdb").exists():
                return folder
    raise NotInstalled("PostgreSQL is not installed (Debian: apt-get install postgresql)")


def _account() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise NotInstalled(f"root cannot run PostgreSQL, and there is no user {' or '.join(_ACCOUNTS)}")


class PostgresqlServer:
    """A server on 127.0.0.1.

    Args:
        folder: folder for the data; the user of the server must have access.
        options: settings as on the command line of the server.

    Raises:
        NotInstalled: this machine has no PostgreSQL.
    """

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        self._programs = _folder()
        self._account = _account()
        self._data = folder / "data"
        self._log = folder / "log"
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        arguments = ["-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run(
            [self._programs / "initdb", *arguments], **self._as_account(), capture_output=True, check=False, text=True
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")

    def _as_account(self) -> dict[str, Any]:
        given: dict[str, Any] = {"cwd": self._data.parent, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C"}}
        if self._account is not None:
            given |= {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": ()}
        return given

    @property
    def url(self) -> str:
        """The URL for SQLAlchemy with the driver psycopg."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._programs / "postgres",
                    *("-D", str(self._data), "-h", "127.0.0.1", "-p", str(self.port), "-k", ""),
                    *(f"-c{option}" for option in self._options),
                ],
                stdout=log,
                stderr=log,
                **self._as_account(),
            )
        until = time.monotonic() + _PATIENCE
        probe: list[str | Path] = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(probe, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def stop_immediately(self) -> None:
        """Stop the server without a checkpoint, like a crash."""
        self._stop("immediate")

    def stop(self) -> None:
        """Stop the server cleanly, and close all sessions."""
        self._stop("fast")

    def _stop(self, mode: str) -> None:
        if self._process is None:
            return
        subprocess.run(
            [self._programs / "pg_ctl", "-D", str(self._data), "-m", mode, "-W", "stop"],
            **self._as_account(),
            capture_output=True,
            check=False,
        )
        self._process.wait(_PATIENCE)
        self._process = None


@contextlib.contextmanager
def server(*options: str) -> Iterator[PostgresqlServer]:
    """Run a server in a temporary folder during the ``with`` block.

    Args:
        options: settings as on the command line of the server.

    Raises:
        NotInstalled: this machine has no PostgreSQL.
    """
    with tempfile.TemporaryDirectory(prefix="qflow-postgresql-") as name:
        made = PostgresqlServer(Path(name), options)
        made.start()
        try:
            yield made
        finally:
            made.stop_immediately()
