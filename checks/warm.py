"""Compiles the test files in advance, so that several processes of pytest do not all compile them at the same time.

    python -m checks.warm PATH...

pytest compiles each test file with rewritten assertions, and caches the result. In a fresh clone the compilation takes
longer than the collection of the tests, and every process of pytest-xdist compiles all files. This program starts one
process for each core, and divides the files among them. One more process creates hypothesis's table of characters.
If only a few files are new, the program does nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: If there are fewer new files than this, the start of processes takes longer than the compilation.
_FEW: Final = 50
#: A program that creates hypothesis's table of characters in the folder where the tests look for the table.
_CHARACTERS: Final = "from hypothesis import strategies; strategies.text().validate()"


def cold(paths: Iterable[Path]) -> list[Path]:
    """Return the test files under `paths` that pytest has not compiled yet with this interpreter."""
    files = sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))})
    tag = sys.implementation.cache_tag
    return [file for file in files if not any(file.parent.glob(f"__pycache__/{file.stem}.{tag}-pytest-*.pyc"))]


def cores() -> int:
    """Return how many cores this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Iterable[str]) -> int:
    """Compile the new files under the given paths, and return 0. pytest itself reports files with errors."""
    paths = [Path(argument) for argument in arguments if not argument.startswith("-")]
    files = [file for file in cold(paths) if not {"browser", "interop", "spark"} & set(file.parts)]
    if len(files) >= _FEW:
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
        running = [
            subprocess.Popen([*collect, *map(str, files[core :: cores()])], stdout=subprocess.DEVNULL)
            for core in range(cores())
        ]
        running.append(subprocess.Popen([sys.executable, "-c", _CHARACTERS]))
        for process in running:
            process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
