"""Repeats a suite while other processes keep the cores busy, and counts the failures.

    python -m checks.repeat default --times 50
    python -m checks.repeat interop --times 5
    python -m checks.repeat --totals

Each run is one line of a file, so an interrupted series can continue. A run counts only for the commit that it has
tested. The suites use the interpreter of this process.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from checks.stages import Stage, run_stage

ROOT: Final = Path(__file__).parents[1]
_PYTEST: Final = f"{sys.executable} -m pytest -q -p no:cacheprovider"
_ELSEWHERE: Final = ("browser", "integration/relay", "interop", "spark")
SUITES: Final = {
    "default": f"{_PYTEST} -n auto {' '.join(f'--ignore=tests/{each}' for each in _ELSEWHERE)} tests",
    "interop": f"{_PYTEST} tests/interop",
    "relay": f"{_PYTEST} -n 2 tests/unit/relay tests/integration/relay",
    "spark": f"{_PYTEST} tests/spark",
    "browser": f"{_PYTEST} tests/browser",
}
_COUNT: Final = re.compile(r"(\d+) (passed|failed|error|errors)\b")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One run of a suite.

    Args:
        commit: commit of the work tree; with ``+`` if tracked files were changed
        begun: start time in seconds since 1970
        seconds: duration of the run in seconds
        load: number of processes that kept the cores busy
        outcome: ``passed``, or the failure
        passed: number of passed tests
        failures: ids of failed tests
    """

    suite: str
    commit: str
    begun: float
    seconds: float
    load: int
    outcome: str
    passed: int
    failures: list[str]


def commit_of(root: Path, *, but: str = "") -> str:
    """Return the short id of a work tree's commit, with ``+`` if a tracked file was changed.

    Args:
        but: folder whose changes do not matter
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    others = [f":!{but}"] if but else []
    return git("rev-parse", "--short=10", "HEAD") + (
        "+" if git("status", "--porcelain", "-uno", "--", ".", *others) else ""
    )


@contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that keep cores busy during the block, and yield these processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_once(suite: str, command: str, *, load: int, limit: float, log: Path) -> Run:
    """Run a suite once under load. The output of the suite goes to the file `log`.

    Args:
        command: command for bash
        load: number of processes that keep the cores busy
        limit: maximum seconds of the run
    """
    commit, begun = commit_of(ROOT), time.time()
    with busy(load):
        ended = run_stage(Stage(suite, command, limit=limit), ROOT, log)
    text = log.read_text(encoding="utf-8", errors="replace")
    # The counts are in the last line of pytest's output.
    counts = {what: int(count) for count, what in _COUNT.findall(text.rstrip().rpartition("\n")[2])}
    return Run(
        suite,
        commit,
        round(begun, 1),
        round(ended.seconds, 1),
        load,
        ended.outcome,
        counts.get("passed", 0),
        sorted(set(_FAILED.findall(text))),
    )


def load_runs(record: Path) -> list[Run]:
    """Return the runs in a file."""
    if not record.exists():
        return []
    return [Run(**json.loads(line)) for line in record.read_text(encoding="utf-8").splitlines()]


def totals(runs: Sequence[Run]) -> str:
    """Return a line for each suite and commit: the number of runs, the number of failures, and the failed tests."""
    lines = []
    for suite, commit in dict.fromkeys((run.suite, run.commit) for run in runs):
        those = [run for run in runs if (run.suite, run.commit) == (suite, commit)]
        bad = [run for run in those if run.outcome != "passed"]
        mean = sum(run.seconds for run in those) / len(those)
        tests = sum(run.passed for run in those)
        lines.append(f"{suite} at {commit}: {len(those)} runs, {len(bad)} failed; {tests} tests, {mean:.0f} s a run")
        lines += [f"  {', '.join(run.failures) or run.outcome}" for run in bad]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeat a suite as the command line defines, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m checks.repeat", description=__doc__.partition("\n")[0])
    parser.add_argument("suite", nargs="?", choices=SUITES, help="suite to repeat")
    parser.add_argument("--times", type=int, default=10, help="number of runs of this commit, with recorded runs")
    parser.add_argument("--load", type=int, default=2, help="number of processes that keep the cores busy")
    parser.add_argument("--limit", type=float, default=3600, help="maximum seconds of a run")
    parser.add_argument(
        "--record", type=Path, default=ROOT / "build" / "repeat.jsonl", help="file with the recorded runs"
    )
    parser.add_argument("--totals", action="store_true", help="print the totals of the recorded runs, and run nothing")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record: Path = options.record
    if not options.totals:
        if options.suite is None:
            parser.error("name a suite: " + ", ".join(SUITES))
        record.parent.mkdir(parents=True, exist_ok=True)
        log = record.with_suffix(f".{options.suite}.log")
        while True:
            before = [run for run in load_runs(record) if (run.suite, run.commit) == (options.suite, commit_of(ROOT))]
            if len(before) >= options.times:
                break
            run = run_once(options.suite, SUITES[options.suite], load=options.load, limit=options.limit, log=log)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            print(
                f"{len(before) + 1} of {options.times}: {run.outcome}, {run.seconds:.0f} s", *run.failures, flush=True
            )
            if run.outcome != "passed":
                # Rename the log, because the next run overwrites it.
                log.rename(record.with_suffix(f".{options.suite}.{run.begun:.0f}.log"))
    runs = load_runs(record)
    print(totals(runs) or f"{record} holds no run")
    return 0 if all(run.outcome == "passed" for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
