"""Programs in other languages: built once, with what the machine has for it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_TIMEOUT = 300.0


class ToolchainNotInstalled(Exception):
    """This machine has not what builds or runs a program."""


class BuildFailed(Exception):
    """What builds a program is there, and did not do it."""


def tool(name: str, package: str) -> str:
    """The path of a program.

    Raises:
        ToolchainNotInstalled: there is none; says which package of Debian's has it.
    """
    found = shutil.which(name)
    if found is None:
        raise ToolchainNotInstalled(f"{name} was not found: install it (Debian and Ubuntu: apt-get install {package})")
    return found


def built(sources: Path, steps: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> Path:
    """A folder of the user's cache with a copy of these sources, in which these commands have run.

    Raises:
        BuildFailed: one of them failed; says with which words.
    """
    environment = {**os.environ, "HOME": str(Path.home()), **(environment or {})}
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
            try:
                done = subprocess.run(
                    step,
                    cwd=copy,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise BuildFailed(f"{' '.join(step)} did not end within {_TIMEOUT:g} s") from None
            if done.returncode != 0:
                words = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-20:])
                raise BuildFailed(f"{' '.join(step)} failed in a copy of {sources}:\n  {words}")
        # Whole or not at all. Somebody else may have been faster.
        with contextlib.suppress(OSError):
            copy.rename(folder)
    return folder
