"""Runs a program on a pseudo-terminal, and reads the program's output."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.forked import Forked

__all__ = ["Terminal", "on_a_terminal"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _plain(raw: str) -> str:
    return _ESCAPE.sub("", raw)


class Terminal:
    """The user's end of a pseudo-terminal.

    Args:
        process: process that runs on the terminal.
        end: file descriptor of the user's end.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self._decoder = getincrementaldecoder("utf-8")("replace")
        #: All output so far, with control sequences.
        self.raw = ""

    @property
    def drawn(self) -> str:
        """All output so far, without colours and cursor movements."""
        return _plain(self.raw)

    def read_until(self, text: str | None, timeout: float = 60.0) -> None:
        """Read until new output contains `text`. If `text` is ``None``, read until the program ends."""
        begun = len(self.raw)
        deadline = time.monotonic() + timeout
        while text is None or text not in _plain(self.raw[begun:]):
            assert time.monotonic() < deadline, f"no {text!r} in {self.raw[begun:]!r}"
            if not select.select([self._end], [], [], 0.1)[0]:
                continue
            try:
                more = os.read(self._end, 65536)
            except OSError:
                # Linux reports this error if no process has the terminal open any more.
                more = b""
            if not more:
                assert text is None, f"ended without {text!r} in {self.raw[begun:]!r}"
                return
            self.raw += self._decoder.decode(more)

    def output(self) -> str:
        """Return the standard output of the program. Call this method after the end of the program."""
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[Terminal]:
    """Run `qflow` with its standard error on a terminal. Its standard output and standard input are pipes."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    # Remove the variables with which rich would use no terminal or another terminal.
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        env.pop(name, None)
    process = Forked[bytes](
        [sys.executable, "-m", "qflow_client.cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=env,
    )
    os.close(theirs)
    try:
        with process:
            try:
                yield Terminal(process, ours)
            finally:
                process.kill()
    finally:
        os.close(ours)
