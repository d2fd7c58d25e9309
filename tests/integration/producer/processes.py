"""Runs programs in separate processes, and reads their output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .tools import PATIENCE, eventually

_ROOT = Path(__file__).parents[3]

#: A function that starts a program of a module. The arguments are the name and the arguments of the program.
Start = Callable[..., subprocess.Popen[str]]


@contextmanager
def starting(module: str) -> Iterator[Start]:
    """Provide a function that starts programs of a module. Programs that still run at the end of the block are killed.

    Args:
        module: module whose command line has the name of a program and the program's arguments.
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
    """Return the next line of a program's output, or the whole traceback if the program has failed."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    return line + process.stdout.read() if line.startswith("Traceback") else line


def rest_of_output(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a program, which must have the exit code 0. Return the rest of its output."""
    assert process.stdout is not None
    # Read to the end of the output. If the program hangs, the timeout of the test ends it.
    rest = process.stdout.read()
    assert process.wait(PATIENCE) == 0, rest
    return rest


def ends_well(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a program. The rest of its output must be ``fine``."""
    assert rest_of_output(process) == "fine\n"


def in_child(check: Callable[[], object]) -> None:
    """Fork, call `check` in the child, and wait for the end of the child. No code of pytest may run in the child."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover  # the counts are lost with the child
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


@contextmanager
def waiting_child() -> Iterator[None]:
    """Fork a child, which does nothing until the end of the block. The block begins after the hooks of the fork."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:  # pragma: no cover  # the counts are lost with the child
        ours.close()
        theirs.send(b"1")
        theirs.recv(1)
        os._exit(0)
    try:
        with ours, theirs:
            ours.recv(1)
            yield
    finally:
        os.waitpid(pid, 0)
