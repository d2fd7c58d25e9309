"""Programs that a test runs in processes of their own, and what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .tools import PATIENCE, eventually

_ROOT = Path(__file__).parents[3]

#: Starts one of the programs of a module: its name and its arguments.
Start = Callable[..., subprocess.Popen[str]]


@contextmanager
def starting(module: str) -> Iterator[Start]:
    """What starts the programs of a module; those that still run at the end are killed.

    Args:
        module: that takes the name of a program, and its arguments, on its command line.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", module, *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


def says(process: subprocess.Popen[str]) -> str:
    """The next line that a program says; if it has failed, all of how."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    return line + process.stdout.read() if line.startswith("Traceback") else line


def ends_well(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a program, which has nothing more to say than that all is fine."""
    assert process.stdout is not None
    # To the end of what it says; a program that hangs is ended by the timeout of the test.
    rest = process.stdout.read()
    assert (rest, process.wait(PATIENCE)) == ("fine\n", 0)


def in_child(check: Callable[[], object]) -> None:
    """Fork, have a check hold in the child, where nothing of pytest's may run, and wait for its end."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover  # what is counted there is lost with the child
        code = 1
        try:
            check()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    codes: list[int] = []

    def ended() -> bool:
        which, status = os.waitpid(pid, os.WNOHANG)
        if which:
            codes.append(os.waitstatus_to_exitcode(status))
        return bool(which)

    try:
        eventually(ended, "the end of the child")
    finally:
        if not codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert codes == [0]
