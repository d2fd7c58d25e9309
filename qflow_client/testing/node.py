"""Starts, stops and kills the process of a private broker, and leaves no processes behind."""

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
    from typing import Self

__all__ = ["HOST", "Node", "free_port", "wait_until"]

logger = logging.getLogger(__name__)

#: Address on which private brokers listen. The nodes of a `RabbitMQCluster` use other loopback addresses.
HOST = "127.0.0.1"

_POLL_INTERVAL = 0.05
_LAST_LINES = 30


class Node(ABC):
    """A private broker. The context manager starts the broker on entry and closes it on exit.

    Args:
        title: name of the broker in error messages, such as ``"RabbitMQ node on port 5672"``.
        directory: working folder of the broker, which also contains the console log.
        temporary: object with which `close` removes the working folder; ``None`` if `close` must keep the folder.
        start_timeout: maximum seconds that `start` waits until the broker is ready.
    """

    #: The class of the exceptions that failed actions raise.
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
        # None before `start`, and after `stop` or `kill`. A broker that ends by itself does not change this attribute.
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the broker; None while the broker does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether the process of the broker exists. A suspended process also exists."""
        return self.pid is not None

    def start(self) -> None:
        """Start the broker, and return when it answers. Do nothing if the broker already runs.

        Raises:
            RabbitMQError, BrokerJError: the broker ends or does not answer within `start_timeout`. The text contains
                the last lines of the broker's log.
        """
        if self.running:
            return
        self._reap()
        self._prepare()
        try:
            self._start_helpers()
            with (self._directory / "console.log").open("wb") as console:
                # Start a separate session, so that Ctrl-C in the terminal stops the tests and not the broker.
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
        """Stop the broker cleanly, if it runs. After `timeout` seconds, kill it and log a warning."""
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
        """Kill the broker (SIGKILL), to simulate a crash. Do nothing if the broker does not run."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()

    def pause(self) -> None:
        """Suspend the broker (SIGSTOP). Connections stay open, but the broker reads nothing before `resume`.

        Raises:
            RabbitMQError, BrokerJError: the broker does not run.
        """
        pid = self.pid
        if pid is None:
            raise self._error(f"cannot pause the {self._title}: it is not running; call start() first")
        os.killpg(pid, signal.SIGSTOP)
        # `os.killpg` may return before the signal takes effect, so wait.
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the broker after `pause` (SIGCONT). The call has no effect on a broker that is not suspended."""
        pid = self.pid
        if pid is not None:
            os.killpg(pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop the broker permanently, and remove its folder if the folder is temporary."""
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

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<{type(self).__name__}: {self._title}, {state}, {self._directory}>"

    @abstractmethod
    def _prepare(self) -> None:
        """Write the files that the broker reads at its start."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """Return the command line of the broker."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Return the environment of the broker."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether the broker accepts connections."""

    @abstractmethod
    def _said(self) -> str:
        """Return the log of the broker."""

    def _account_of_process(self) -> Any:
        """Return the user under which the process runs, as arguments of ``subprocess.Popen``."""
        return {}

    def _start_helpers(self) -> None:  # noqa: B027 - most brokers need no other processes
        """Start other processes that the broker needs."""

    def _reap(self) -> None:
        """Wait for the processes that have ended or were killed, so that no zombies remain."""
        if self._process is not None:
            self._process.wait()
            self._process = None


def free_port(taken: set[int], *, for_proxy: bool = False) -> int:
    """Return a port that has no listener and is not in `taken`.

    Nodes and proxies use different ranges of ports, because a node listens on its port only seconds after this call.
    With one range, a proxy of another process could get the same port during these seconds.
    """
    # Both ranges are below the range that systems use for outgoing connections. If a client got the port of a stopped
    # broker for its own outgoing connection, the client could connect to itself.
    while True:
        port = random.randrange(20_000, 26_000) if for_proxy else random.randrange(26_000, 32_000)
        if port not in taken:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
                return port


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait for at most `timeout` seconds until a condition is true. Return False if the condition is still false."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_INTERVAL)
    return True
