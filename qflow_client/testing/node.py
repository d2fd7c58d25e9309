"""The process of a private broker: how it is started, awaited, stopped, killed and left behind by nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ["HOST", "Node", "free_port", "wait_until"]

logger = logging.getLogger(__name__)

#: The loopback interface, on which every private broker listens, and on no other.
HOST = "127.0.0.1"

_POLL_INTERVAL = 0.05
_LAST_LINES = 30


class Node(ABC):
    """A private broker, as a context manager that starts it on entry and closes it on exit.

    Args:
        title: what messages call it, such as ``"RabbitMQ node on port 5672"``.
        directory: its folder, in which it runs, and has its console's log.
        temporary: the same if `close` is to remove it.
        start_timeout: seconds that `start` waits for it to be ready.
    """

    #: What is raised where it does not do what it was told.
    _error: type[Exception] = RuntimeError

    def __init__(
        self,
        title: str,
        directory: Path,
        temporary: tempfile.TemporaryDirectory[str] | None,
        start_timeout: float,
    ) -> None:
        self._title = title
        self._directory = directory
        self._temporary = temporary
        self._start_timeout = start_timeout
        # Set while it runs, and after it has died by itself until stop() or kill().
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the broker; None while it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether its process is alive; a suspended one is."""
        return self.pid is not None

    def start(self) -> None:
        """Start it and return when it answers. Does nothing if it runs already.

        Raises:
            RabbitMQError, BrokerJError: it ends or does not answer within `start_timeout`; the last lines of its log
                are in the message.
        """
        if self.running:
            return
        self._reap()
        self._prepare()
        try:
            self._start_helpers()
            with (self._directory / "console.log").open("wb") as console:
                # A session of its own, so that Ctrl-C in the terminal ends the tests and not the broker under them.
                self._process = process = subprocess.Popen(
                    self._command(),
                    cwd=self._directory,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **self._account_of_process(),
                )
            ready = wait_until(lambda: process.poll() is not None or self._is_ready(), self._start_timeout)
            words = "\n".join(f"  {line}" for line in self._said().splitlines()[-_LAST_LINES:])
            if process.poll() is not None:
                raise self._error(f"{self._title} ended with exit code {process.returncode} as it started:\n{words}")
            if not ready:
                raise self._error(
                    f"{self._title} did not answer within {self._start_timeout:g} s (start_timeout):\n{words}"
                )
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = 30.0) -> None:
        """Stop it in order. Does nothing if it does not run.

        Args:
            timeout: seconds it may take; after that it is killed, and a warning logged.
        """
        process = self._process
        if process is not None and process.poll() is None:
            self.resume()
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop within %g s: killing it", self._title, timeout)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would (SIGKILL). Does nothing if it does not run."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()

    def pause(self) -> None:
        """Suspend it (SIGSTOP): its connections stay open, and nothing is read or answered until `resume`.

        Raises:
            RabbitMQError, BrokerJError: it does not run.
        """
        pid = self.pid
        if pid is None:
            raise self._error(f"cannot pause the {self._title}: it does not run: start() it first")
        os.killpg(pid, signal.SIGSTOP)
        # The signal works at some time after kill() returns; the caller wants to know it done.
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on after `pause` (SIGCONT). Does nothing if it is not suspended or does not run."""
        pid = self.pid
        if pid is not None:
            os.killpg(pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it for good, and remove its folder if that is temporary."""
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<{type(self).__name__}: {self._title}, {state}, {self._directory}>"

    # What each broker has of its own.

    @abstractmethod
    def _prepare(self) -> None:
        """Write what it reads as it starts."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """How it is started."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Its environment."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether it takes connections."""

    @abstractmethod
    def _said(self) -> str:
        """What it has logged."""

    def _account_of_process(self) -> Any:
        """Whom it runs as, for ``subprocess.Popen``."""
        return {}

    def _start_helpers(self) -> None:  # noqa: B027 - most need none
        """Start other processes that it needs."""

    def _reap(self) -> None:
        """Take leave of processes that have ended."""
        if self._process is not None:
            self._process.wait()
            self._process = None


def free_port(taken: set[int], *, for_proxy: bool = False) -> int:
    """Return a port that has no listener and is not in `taken`.

    Nodes and proxies have ranges of their own. A node listens seconds after its ports were chosen, and proxies come and
    go in other processes meanwhile.
    """
    # Below the range from which systems take the ports of outgoing connections. Out of that range, a client that
    # reconnects while the broker is down can be given the broker's port, and so connect to itself.
    while True:
        port = random.randrange(20_000, 26_000) if for_proxy else random.randrange(26_000, 32_000)
        if port not in taken:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
                return port


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Whether `condition` came true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_INTERVAL)
    return True
