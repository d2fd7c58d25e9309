"""Runs commands in lanes, and reports the duration and the result of each command.

A stage is a command. The stages of a lane run one after the other; lanes run at the same time. A stage starts when all
stages that it needs have passed. If a needed stage has not passed, the stage is left out. Stages without a lane come
last: when a lane has finished its own stages, it takes the next stage without a lane. The output of a stage goes to a
file, and is printed at the end of the stage. So the output of two lanes is never mixed.

A stage runs in its own process group. If the stage takes too long, or if this process is interrupted, the whole group
is killed. So no stage outlives the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

__all__ = ["LEFT_OUT", "PASSED", "Ended", "Stage", "check", "run", "run_stage", "summary"]

PASSED: Final = "passed"
LEFT_OUT: Final = "left out"


@dataclass(frozen=True)
class Stage:
    """A command, and its conditions.

    Args:
        name: name in the output and in `needs` of other stages
        script: script for bash, with `set -euo pipefail`
        lane: name of a lane; empty for a stage without a lane. Stages of one lane never run at the same time
        needs: names of stages that must have passed before this stage starts
        limit: maximum seconds that the stage may run. A stage that takes longer is killed, and has failed
        environment: variables to add to the environment of this process
    """

    name: str
    script: str
    lane: str = ""
    needs: tuple[str, ...] = ()
    limit: float = 1800.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The result of a stage.

    Args:
        outcome: `PASSED`, `LEFT_OUT`, or the failure
        seconds: duration of the stage in seconds
    """

    stage: Stage
    outcome: str
    seconds: float


class _Groups:
    """The running process groups, so that all of them can be killed together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._is_over = False

    def start(self, script: str, cwd: Path, environment: Mapping[str, str], log: TextIO) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_over:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=cwd,
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process.pid)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process group of `process`, even if `process` has ended."""
        with self._lock:
            self._running.discard(process.pid)
        _kill(process.pid)
        process.wait()

    def kill_all(self) -> None:
        with self._lock:
            self._is_over = True
            running, self._running = self._running, set()
        for group in running:
            _kill(group)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_stage(stage: Stage, cwd: Path, log: Path, groups: _Groups | None = None) -> Ended:
    """Run one stage. The output of the stage goes to the file `log`."""
    groups = groups or _Groups()
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = groups.start(stage.script, cwd, stage.environment, output)
        try:
            code = process.wait(stage.limit)
            outcome = PASSED if code == 0 else f"exit code {code}" if code > 0 else f"signal {-code}"
        except subprocess.TimeoutExpired:
            outcome = f"not over after {stage.limit:.0f} s"
        finally:
            groups.kill(process)
    return Ended(stage, outcome, time.monotonic() - begun)


def run(stages: Sequence[Stage], cwd: Path, logs: Path, out: TextIO | None = None) -> list[Ended]:
    """Run stages in their lanes, and return the results in the order of the stages.

    Args:
        stages: the stages; each must come after the stages that it needs
        out: file to print to; None for standard output

    Raises:
        ValueError: as for `check`
    """
    check(stages)
    out = out or sys.stdout
    lanes: dict[str, deque[Stage]] = {}
    for stage in stages:
        lanes.setdefault(stage.lane, deque()).append(stage)
    without_lane = lanes.pop("", deque())
    ended: dict[str, Ended] = {}
    changed = threading.Condition()
    groups = _Groups()

    def drive(lane: deque[Stage]) -> None:
        while True:
            with changed:
                stages_left = lane or without_lane
                if not stages_left:
                    return
                stage = stages_left.popleft()
                while not ended.keys() >= set(stage.needs):
                    changed.wait()
                missing = [name for name in stage.needs if ended[name].outcome != PASSED]
            log = logs / f"{stage.name}.log"
            if missing:
                result = Ended(stage, LEFT_OUT, 0.0)
                log.write_text(f"It needs {', '.join(missing)}.\n", encoding="utf-8")
            else:
                try:
                    result = run_stage(stage, cwd, log, groups)
                except KeyboardInterrupt:
                    result = Ended(stage, LEFT_OUT, 0.0)
                except OSError as error:
                    result = Ended(stage, f"not started: {error}", 0.0)
            with changed:
                ended[stage.name] = result
                print(f"\n=== {stage.name}: {result.outcome} ({result.seconds:.0f} s)", file=out)
                if log.exists():
                    print(log.read_text(encoding="utf-8", errors="replace"), end="", file=out)
                out.flush()
                changed.notify_all()

    threads = [threading.Thread(target=drive, args=(lane,)) for lane in lanes.values() or [without_lane]]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            # A signal that arrives just before a wait is handled only after the wait, so each wait is short.
            while thread.is_alive():
                thread.join(1.0)
    except BaseException:
        # After this call, a lane that still runs starts no more stages.
        groups.kill_all()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    return [ended[stage.name] for stage in stages]


def check(stages: Sequence[Stage]) -> None:
    """Raise ValueError if a name is used twice, or if a stage needs another stage that is listed or runs later."""
    before: dict[str, Stage] = {}
    for stage in stages:
        if stage.name in before:
            raise ValueError(f"two stages are called {stage.name!r}; give one of them another name")
        for name in stage.needs:
            if name not in before:
                raise ValueError(f"stage {stage.name!r} needs {name!r}, which does not come before it")
            if stage.lane and not before[name].lane:
                raise ValueError(f"stage {stage.name!r} needs {name!r}, which has no lane and so runs later")
        before[stage.name] = stage


def summary(ended: Iterable[Ended], seconds: float) -> str:
    """Return a table of the stages, and one line with the failures.

    Args:
        seconds: duration of the whole run
    """
    ended = list(ended)
    width = max(len(each.stage.name) for each in ended)
    lines = [f"{each.stage.name:{width}}  {each.stage.lane:8}  {each.seconds:6.0f} s  {each.outcome}" for each in ended]
    failed = [each.stage.name for each in ended if each.outcome != PASSED]
    count = f"{len(ended)} stages, {seconds:.0f} s"
    lines.append(f"FAILED: {', '.join(failed)} ({count})" if failed else f"All passed ({count})")
    return "\n".join(lines)
