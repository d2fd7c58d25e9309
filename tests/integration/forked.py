"""Starts Python programs in separate processes without the start-up time of an interpreter.

For each worker of pytest, a process has imported the modules, and forks for each program. A program has its own
arguments, environment, folder, standard streams and signals, as after a normal start. A program also ends like a normal
interpreter.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, AnyStr

__all__ = ["Forked"]

ROOT = Path(__file__).parents[2]
#: Modules that most programs need, and that take long to import.
COMMANDS = ("tests.integration.cli.commands",)
_MOST = 1 << 18


@cache
def _nursery(modules: tuple[str, ...]) -> socket.socket:
    """Start a process that forks programs. Return a socket for requests to this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ours, theirs:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.forked", str(theirs.fileno()), *modules],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()

    def end_it() -> None:
        ours.close()
        process.wait()

    atexit.register(end_it)
    return ours


class Forked(subprocess.Popen[AnyStr]):
    """Like `subprocess.Popen`, for a command ``[sys.executable, "-m", MODULE, ...]``, or a command with ``-c``."""

    #: Modules that the forking process has imported.
    modules: tuple[str, ...] = COMMANDS
    _status: socket.socket

    def _execute_child(self, *values: Any) -> None:
        # The parameters are those of the replaced method, which depend on the release of Python.
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
        told = dict(zip(names, values, strict=True))
        python, *arguments = told["args"]
        assert python == sys.executable
        environment = dict(os.environ if told["env"] is None else told["env"])
        asked = [arguments, environment, str(told["cwd"] or Path.cwd()), told["start_new_session"]]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status = ours
        streams = [told[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds: list[int] = [standard if fd == -1 else fd for standard, fd in enumerate(streams)]
        socket.send_fds(_nursery(self.modules), [json.dumps(asked).encode()], [*fds, theirs.fileno()])
        theirs.close()
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[name] for name in pipes))  # type: ignore[attr-defined]
        self.pid = int(self._status.recv(64))
        self._child_created = True

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._reap()
        return self.returncode

    def _reap(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(int(self._status.recv(64)))
        self._status.close()


def _asked(channel: socket.socket) -> tuple[list[Any], list[int]] | None:
    """Fork for each request. Return the request in the new process, and None in the forking process at its end."""
    keepers: list[int] = []
    while True:
        data, fds, _, _ = socket.recv_fds(channel, _MOST, 4)
        if not data:
            return None
        assert threading.active_count() == 1
        if keeper := os.fork():
            for fd in fds:
                os.close(fd)
            keepers.append(keeper)
            keepers[:] = [each for each in keepers if os.waitpid(each, os.WNOHANG)[0] == 0]
            continue
        # Each program has a parent process, which waits for its end and reports its exit code.
        channel.close()
        if pid := os.fork():
            for fd in fds[:3]:
                os.close(fd)
            os.write(fds[3], b"%d" % pid)
            status = os.waitpid(pid, 0)[1]
            try:
                os.write(fds[3], b"%d" % status)
            except BrokenPipeError:
                # The test no longer waits for the program.
                pass
            os._exit(0)
        os.close(fds.pop())
        return json.loads(data), fds


def _become(asked: list[Any], fds: list[int]) -> None:
    arguments, environment, folder, is_leader = asked
    if is_leader:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    kind, what, *rest = arguments
    if kind == "-m":
        sys.argv = ["", *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c"
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[2:]:
        import_module(module)
    program = _asked(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        _become(*program)


if __name__ == "__main__":
    _main()
