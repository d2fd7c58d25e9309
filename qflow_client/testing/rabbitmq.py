"""Private RabbitMQ nodes. Tests can raise alarms in a node, and suspend, kill and restart the node.

A node uses the installed RabbitMQ. To leave other nodes of the machine alone, it has its own ports, data folder,
configuration, Erlang cookie and port mapper (epmd). It listens only on the loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from qflow_client.testing.node import HOST, Node, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from subprocess import CompletedProcess

__all__ = ["RabbitMQ", "RabbitMQError", "RabbitMQNode", "RabbitMQNotInstalled"]

# Each node registers this name in its own epmd. With another name, a node could not use the data in a kept folder.
_NODE_NAME = "qflow@localhost"

# Folders that may have RabbitMQ's scripts, but are not in the PATH of an ordinary user.
_EXTRA_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
# In these folders Linux distributions install wrapper scripts, which refuse all users except root and rabbitmq.
_WRAPPER_FOLDERS = frozenset(map(Path, ("/usr/sbin", "/usr/bin", "/sbin", "/bin")))
_WRAPPED_FOLDER = Path("/usr/lib/rabbitmq/bin")

_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
_METHOD_FRAME = b"\x01"

# A command that raises or clears an alarm returns before RabbitMQ has informed the connections. The Erlang process that
# informs the connections answers `get_alarms` only afterwards.
_ALARMS_ARE_NOTICED = "rabbit_alarm:get_alarms()"

_EPMD_TIMEOUT = 60.0


class RabbitMQError(RuntimeError):
    """A node could not carry out an action."""


class RabbitMQNotInstalled(RabbitMQError):
    """This machine has no RabbitMQ."""


@dataclass(frozen=True)
class _Tools:
    server: Path
    ctl: Path
    epmd: Path
    # None if Erlang is installed without ``erl_call``.
    erl_call: str | None

    @classmethod
    def find(cls) -> _Tools:
        server, ctl, epmd = map(_find_tool, ("rabbitmq-server", "rabbitmqctl", "epmd"))
        return cls(server, ctl, epmd, shutil.which("erl_call"))


@dataclass(frozen=True)
class _Account:
    """The unprivileged user under which a node runs if root starts it."""

    name: str
    uid: int
    gid: int

    @classmethod
    def find(cls) -> _Account | None:
        """Return the user rabbitmq, or None if nodes run as the user of this process."""
        if os.geteuid() != 0:
            return None
        try:
            entry = pwd.getpwnam("rabbitmq")
        except KeyError:
            return None
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)


class _Credentials(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class RabbitMQ(ABC):
    """A RabbitMQ node on any machine. Methods raise `RabbitMQError` if the node cannot carry out a command."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The AMQP URL of the node's default virtual host, for its default user."""

    @abstractmethod
    def ctl(self, *args: str) -> str:
        """Run ``rabbitmqctl`` for this node, and return its output."""

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression in the node, and return the result as text.

        Args:
            expression: Erlang expression with its full stop. After an error, a subclass may evaluate it a second time.

        Raises:
            RabbitMQError: the node does not answer, or the expression fails.
        """
        return self.ctl("eval", expression)

    def raise_memory_alarm(self) -> None:
        """Raise a memory alarm. The node sends ``Connection.Blocked`` to each connection that publishes."""
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark(0), {_ALARMS_ARE_NOTICED}.")

    def clear_memory_alarm(self) -> None:
        """Clear the memory alarm. If no alarm is left, the node sends ``Connection.Unblocked`` to blocked clients."""
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark(0.4), {_ALARMS_ARE_NOTICED}.")

    def raise_disk_alarm(self) -> None:
        """Raise a disk alarm. The node sends ``Connection.Blocked``, as for a memory alarm."""
        self.evaluate(f"rabbit_disk_monitor:set_disk_free_limit(1000000000000000), {_ALARMS_ARE_NOTICED}.")

    def clear_disk_alarm(self) -> None:
        """Clear the disk alarm. If no alarm is left, the node sends ``Connection.Unblocked`` to blocked clients."""
        self.evaluate(f"rabbit_disk_monitor:set_disk_free_limit(50000000), {_ALARMS_ARE_NOTICED}.")

    def sync(self) -> None:
        """Write all declarations to disk. RabbitMQ 3 may answer a declaration before the declaration is on disk."""
        self.evaluate("mnesia:sync_log().")


class RabbitMQNode(Node, RabbitMQ):
    """A private RabbitMQ node.

    The context manager starts the node on entry and closes it on exit::

        with RabbitMQNode() as node:
            connection = pika.BlockingConnection(pika.URLParameters(node.url))

    The data survives `stop` and `kill`. `start` then starts the same node on the same port. A node that root starts
    runs as the user rabbitmq, if this user exists.

    Args:
        directory: folder for data, logs and configuration. It is created if missing, and `close` keeps it. If the node
            runs as the user rabbitmq, this user becomes the owner of the folder, and needs access to its path. ``None``
            for a temporary folder, which `close` removes.
        port: AMQP port; ``None`` for a free port.
        start_timeout: maximum seconds that `start` waits for an answer of the node.

    Raises:
        RabbitMQNotInstalled: the machine has no RabbitMQ.
    """

    _error = RabbitMQError

    # The Erlang name and the address of the node.
    _name = _NODE_NAME
    _host = HOST
    _ctl_options: tuple[str, ...] = ()

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        start_timeout: float = 180.0,
    ) -> None:
        self._tools = _Tools.find()
        self._account = _Account.find()
        temporary: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            # TMPDIR may be a folder that root can access, but the user rabbitmq cannot.
            parent = "/var/tmp" if self._account is not None and Path("/var/tmp").is_dir() else None
            temporary = tempfile.TemporaryDirectory(prefix="qflow-rabbitmq-", dir=parent, ignore_cleanup_errors=True)
            directory = temporary.name
        taken: set[int] = set()
        self._port = free_port(taken) if port is None else port
        taken.add(self._port)
        self._distribution_port = free_port(taken)
        self._epmd_port = free_port(taken)
        self._epmd: subprocess.Popen[bytes] | None = None
        super().__init__(f"RabbitMQ node on port {self._port}", Path(directory).absolute(), temporary, start_timeout)

    @property
    def directory(self) -> Path:
        """The folder of the node's data, logs and configuration."""
        return self._directory

    @property
    def port(self) -> int:
        """The AMQP port of the node."""
        return self._port

    @property
    def url(self) -> str:
        """The AMQP URL of the node's default virtual host, for its default user."""
        return f"amqp://guest:guest@{self._host}:{self._port}/%2F"

    def ctl(self, *args: str, timeout: float = 180.0) -> str:
        """Run ``rabbitmqctl`` for this node, and return its output without headers and surrounding white space.

        Args:
            args: command and its arguments, such as ``"list_queues", "name", "messages"``.
            timeout: maximum seconds to wait for the end of the command.

        Raises:
            RabbitMQError: the command fails or takes too long. The text has the error output of a failed command.
        """
        words = " ".join(args)
        try:
            done = self._run([self._tools.ctl, "--quiet", *self._ctl_options, "--node", self._name, *args], "", timeout)
        except subprocess.TimeoutExpired:
            raise RabbitMQError(f"rabbitmqctl {words} did not end within {timeout:.3g} s") from None
        if done.returncode != 0:
            complaint = (done.stderr.strip() or done.stdout.strip()).replace("\n", "\n  ")
            raise RabbitMQError(f"rabbitmqctl {words} failed with exit code {done.returncode}:\n  {complaint}")
        return done.stdout.strip()

    def evaluate(self, expression: str, timeout: float = 180.0) -> str:
        """Evaluate an Erlang expression in the node, and return the result as text.

        The call takes milliseconds if Erlang's program ``erl_call`` is installed, and otherwise about a second.

        Args:
            expression: Erlang expression with its full stop. After an error it may be evaluated a second time.
            timeout: maximum seconds for both evaluations together.

        Raises:
            RabbitMQError: the node does not answer within `timeout`, or the expression fails.
        """
        deadline = time.monotonic() + timeout
        if self._tools.erl_call is not None:
            try:
                done = self._run([self._tools.erl_call, "-n", self._name, "-e"], f"{expression}\n", timeout)
            except subprocess.TimeoutExpired:
                raise RabbitMQError(f"{self._title} did not evaluate {expression} within {timeout:g} s") from None
            if (result := result_of_erl_call(done.stdout)) is not None:
                return result
        # If erl_call is missing or returned no result, use rabbitmqctl, whose error messages are better.
        return self.ctl("eval", expression, timeout=max(0.0, deadline - time.monotonic()))

    def _run(self, command: Sequence[str | Path], standard_input: str, timeout: float) -> CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._directory,
            env=self._environment(),
            input=standard_input,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **self._account_of_process(),
        )

    def _account_of_process(self) -> _Credentials:
        if self._account is None:
            return {}
        return {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}

    def _environment(self) -> dict[str, str]:
        # Remove variables for the machine's own node, because they would change this node.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        folder = str(self._directory)
        return environment | {
            # Erlang reads the node's cookie from the home folder.
            "HOME": folder,
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_ADDRESS": self._host,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": self._name,
            "RABBITMQ_NODE_IP_ADDRESS": self._host,
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{folder}/generated",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_CONFIG_FILES": f"{folder}/conf.d",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            # With this variable Erlang takes the place of the start script, so that Erlang gets the signals of `stop`,
            # `pause` and `kill`.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _prepare(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "conf.d").mkdir(exist_ok=True)
        (self._directory / "enabled_plugins").write_text("[].\n", encoding="ascii")
        (self._directory / "rabbitmq.conf").write_text(self._configuration(), encoding="ascii")
        (self._directory / "advanced.config").write_text("[].\n", encoding="ascii")
        if self._account is None:
            return
        for path in (self._directory, *self._directory.iterdir()):
            os.chown(path, self._account.uid, self._account.gid)
        reached = subprocess.run(
            ["/bin/sh", "-c", 'cd "$1" && test -w .', "sh", self._directory],
            cwd="/",
            stderr=subprocess.DEVNULL,
            check=False,
            **self._account_of_process(),
        )
        if reached.returncode != 0:
            raise RabbitMQError(
                f"{self._directory} cannot be entered by user {self._account.name}, under which a node of root runs: "
                f"choose a directory that this user can enter, with all its parents"
            )

    def _configuration(self) -> str:
        return "loopback_users.guest = true\n"

    def _start_helpers(self) -> None:
        self._epmd = epmd = subprocess.Popen(
            [self._tools.epmd, "-port", str(self._epmd_port), "-address", HOST],
            cwd=self._directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **self._account_of_process(),
        )
        # Wait until epmd listens. Otherwise the node would start its own epmd, which would not end with the node.
        if not wait_until(lambda: epmd.poll() is not None or _accepts(self._epmd_port), _EPMD_TIMEOUT):
            raise RabbitMQError(f"epmd did not listen on port {self._epmd_port} within {_EPMD_TIMEOUT:g} s")
        if epmd.poll() is not None:
            raise RabbitMQError(f"epmd ended with exit code {epmd.returncode}; is port {self._epmd_port} taken?")

    def _command(self) -> list[Path]:
        return [self._tools.server]

    def _is_ready(self) -> bool:
        # A node starts its listeners last, so a node that answers is ready.
        return speaks_amqp(self._host, self._port)

    def _said(self) -> str:
        return "".join(
            log.read_text(encoding="utf-8", errors="replace")
            for log in (self._directory / "log" / f"{self._name}.log", self._directory / "console.log")
            if log.exists()
        )

    def _reap(self) -> None:
        super()._reap()
        if self._epmd is not None:
            # Kill epmd, because it does not end normally while a node is registered. epmd has no data to lose.
            self._epmd.kill()
            self._epmd.wait()
            self._epmd = None


def _find_tool(name: str) -> Path:
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_EXTRA_FOLDERS)))
    if found is None:
        raise RabbitMQNotInstalled(
            f"{name} was not found: install RabbitMQ "
            f"(Debian and Ubuntu: apt-get install rabbitmq-server; macOS: brew install rabbitmq) or put it on the PATH"
        )
    wrapped = _WRAPPED_FOLDER / name
    return wrapped if Path(found).parent in _WRAPPER_FOLDERS and wrapped.exists() else Path(found)


def result_of_erl_call(output: str) -> str | None:
    """Return the result in the output of ``erl_call -e``, or None if there is no result."""
    found = re.fullmatch(r"\{ok, (.*)\}", output.strip(), re.DOTALL)
    return found and found[1]


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
        return True
    return False


def speaks_amqp(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0) as connection:
        connection.sendall(_PROTOCOL_HEADER)
        return connection.recv(1) == _METHOD_FRAME
    return False
