"""Shows the processor time of each package in a benchmark's loop: microseconds per message, and percent.

py-spy samples the process that runs the loop (``pip install py-spy``). A sample counts for the package of its innermost
frame. A frame of the standard library, except asyncio, counts for its caller. py-spy only samples threads that hold the
GIL, so no sample is in a system call. The operating system reports the time of the kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shutil import which
from sysconfig import get_path
from typing import Final

from benchmarks.report import aligned

__all__ = ["KERNEL", "Shares", "count_samples", "measure_shares", "print_shares"]

KERNEL: Final = "kernel"

# Samples per second. This number is a prime, so that no timer of a loop has the same period.
_RATE: Final = 251
_PACKAGE: Final = re.compile(r"\((?:.*/site-packages/)?(\w+)(?:/|\.py:)")
_ONLY_FOR_CALLERS: Final = sys.stdlib_module_names - {"asyncio"}


@dataclass(frozen=True)
class Shares:
    """The processor time of a loop.

    Attributes:
        messages: number of published messages.
        seconds: for each package, its processor time in seconds.
        samples: number of samples from which the shares are computed.
    """

    name: str
    messages: int
    seconds: Mapping[str, float]
    samples: int

    def rows(self) -> list[tuple[str, float, float]]:
        """For each package, return its name, microseconds per message and percent, the largest first."""
        total = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        return [(package, spent / self.messages * 1e6, spent / total * 100) for package, spent in parts]


def count_samples(raw: Iterable[str]) -> Counter[str]:
    """Return the number of samples of each package.

    Args:
        raw: lines of py-spy's format ``raw``: frames from the outermost to the innermost, and a number. Samples of
            imports are left out.
    """
    found: Counter[str] = Counter()
    for line in raw:
        stack, _, number = line.rpartition(" ")
        if "<frozen importlib" in stack:
            continue
        packages = [match[1] for frame in stack.split(";") if (match := _PACKAGE.search(frame))]
        named = [package for package in packages if package not in _ONLY_FOR_CALLERS]
        if named:
            found[named[-1]] += int(number)
    return found


def measure_shares(module: str, name: str, url: str, messages: int) -> Shares:
    """Run a loop in a process of its own, and divide its processor time among packages.

    Args:
        module: a module of `benchmarks`. Its `run_loop` takes the name of a loop, the URL and the number of messages.
        messages: number of messages that the loop publishes.

    Raises:
        RuntimeError: py-spy is not installed.
    """
    profiler = which("py-spy", path=os.pathsep.join((get_path("scripts"), os.environ.get("PATH", ""))))
    if profiler is None:
        raise RuntimeError("py-spy was not found: pip install py-spy")
    with tempfile.TemporaryDirectory() as folder:
        raw, times = Path(folder) / "raw", Path(folder) / "times"
        child = [sys.executable, "-m", "benchmarks.shares", module, name, url, str(messages), str(times)]
        record = [profiler, "record", "--gil", "--rate", str(_RATE), "--format", "raw", "--output", str(raw), "--"]
        subprocess.run([*record, *child], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        counts, (user, system) = count_samples(raw.read_text().splitlines()), json.loads(times.read_text())
    samples = sum(counts.values())
    seconds = {package: user * count / samples for package, count in counts.items()}
    return Shares(name, messages, {**seconds, KERNEL: system}, samples)


def print_shares(module: str, names: Sequence[str], url: str, messages: int) -> None:
    """Measure loops one after the other, and print a table for each. Packages with less than one percent share a line.

    Raises:
        RuntimeError: py-spy is not installed.
    """
    for name in names:
        shares = measure_shares(module, name, url, messages)
        rows = [row for row in shares.rows() if row[2] >= 1]
        rest = [row for row in shares.rows() if row[2] < 1]
        if rest:
            rows.append(("others", sum(row[1] for row in rest), sum(row[2] for row in rest)))
        rows.append(("all", sum(row[1] for row in rows), 100.0))
        lines = [(package, f"{spent:.1f}", f"{part:.0f}") for package, spent, part in rows]
        print(aligned(f"{name}: {messages:,} messages, {shares.samples:,} samples", [("", "µs", "%"), *lines]))
        print(flush=True)


def _run(module: str, name: str, url: str, messages: str, file: str) -> None:
    run_loop = import_module(f"benchmarks.{module}").run_loop
    # The first run imports modules and compiles code, and is not measured.
    run_loop(name, url, 1000)
    before = os.times()
    run_loop(name, url, int(messages))
    after = os.times()
    Path(file).write_text(json.dumps([after.user - before.user, after.system - before.system]))


if __name__ == "__main__":
    _run(*sys.argv[1:])
