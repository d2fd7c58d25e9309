"""Builds programs in other languages once, with the tools of this machine."""

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

# Maximum seconds of one build step.
_TIMEOUT = 150.0


class ToolchainNotInstalled(Exception):
    """A tool that builds or runs a program is not installed."""


class BuildFailed(Exception):
    """A tool could not build a program. The text contains the output of the tool."""


def tool(name: str, package: str) -> str:
    """Return the path of a program.

    Raises:
        ToolchainNotInstalled: the program is missing. The text names the Debian package that contains it.
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
        # Kill the whole process group, because its processes would write into a folder that is deleted.
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
        # A process that has left the session still has the output open.
        return expired.output or b""


def _lines(said: bytes) -> str:
    return "\n  ".join(said.decode(errors="replace").strip().splitlines()[-40:]) or "(it said nothing)"


def built(sources: Path, steps: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> Path:
    """Return a folder of the user's cache with a copy of the sources, in which all steps have run.

    Raises:
        BuildFailed: a step failed, or took too long.
    """
    # The tools download parts of a program, so they need the trusted authorities of the system.
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
        # The rename is atomic. It fails if another process has created the folder first.
        with contextlib.suppress(OSError):
            copy.rename(folder)
    return folder
