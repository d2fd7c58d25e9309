"""Programs in other languages: built once, with what the machine has for it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.trust import TRUSTED

# Seconds for a step. A test that has to build, and is tried again, has 400.
_TIMEOUT = 150.0


class ToolchainNotInstalled(Exception):
    """This machine has not what builds or runs a program."""


class BuildFailed(Exception):
    """What builds a program is there, and did not do it; says with which words."""


def tool(name: str, package: str) -> str:
    """The path of a program.

    Raises:
        ToolchainNotInstalled: there is none; says which package of Debian's has it.
    """
    found = shutil.which(name)
    if found is None:
        raise ToolchainNotInstalled(f"{name} was not found: install it (Debian and Ubuntu: apt-get install {package})")
    return found


def _run(step: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    process = subprocess.Popen(
        step,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        # With what it has started, which would write into a folder that is deleted.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said = _last_words(process)
        raise BuildFailed(f"{' '.join(step)} did not end within {_TIMEOUT:g} s:\n  {_lines(said)}") from None
    if process.returncode != 0:
        raise BuildFailed(f"{' '.join(step)} failed ({process.returncode}):\n  {_lines(said)}")


def _last_words(process: subprocess.Popen[bytes]) -> bytes:
    try:
        return process.communicate(timeout=5.0)[0]
    except subprocess.TimeoutExpired as expired:
        # Somebody who has left the session has its output still.
        return expired.output or b""


def _lines(said: bytes) -> str:
    return "\n  ".join(said.decode(errors="replace").strip().splitlines()[-40:]) or "(it said nothing)"


def built(sources: Path, steps: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> Path:
    """A folder of the user's cache with a copy of these sources, in which these commands have run.

    Raises:
        BuildFailed: one of them failed, or took too long.
    """
    # What builds a program downloads parts of it.
    everything = {**os.environ, **TRUSTED, "HOME": str(Path.home()), **(environment or {})}
    environment = {name: value for name, value in everything.items() if value is not None}
    files = [path for path in sorted(sources.rglob("*")) if path.is_file()]
    told = hashlib.sha256(repr((steps, [(path.name, path.read_bytes()) for path in files])).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qflow-client" / "clients"
    folder = cache / f"{sources.name}-{told[:16]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as temporary:
        copy = Path(temporary, "copy")
        shutil.copytree(sources, copy)
        for step in steps:
            _run(step, copy, environment)
        # Whole or not at all. Somebody else may have been faster.
        with contextlib.suppress(OSError):
            copy.rename(folder)
    return folder
