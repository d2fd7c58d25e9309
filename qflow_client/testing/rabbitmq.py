"""Private RabbitMQ nodes, which tests may put under alarm, suspend, crash and start again.

A node is run from the RabbitMQ that is installed on the machine. It has ports, a data folder, a configuration, an
Erlang cookie and a port mapper (epmd) of its own, and listens on the loopback interface only, so that it neither sees
nor disturbs any other node. RabbitMQ is never installed or configured by this module.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from qflow_client.testing.node import HOST, Node, free_port, wait_until

__all__ = ["RabbitMQ", "RabbitMQError", "RabbitMQNode", "RabbitMQNotInstalled"]

# The same name for every node: each is alone with its own epmd, and a data folder is tied to the name.
_NODE_NAME = "qflow@localhost"

# Where packages put the scripts outside the PATH that an ordinary user has.
_EXTRA_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
# The distributions' wrappers refuse everybody but root and the user rabbitmq. The scripts that they wrap do not.
_WRAPPER_FOLDERS = frozenset(map(Path, ("/usr/sbin", "/usr/bin", "/sbin", "/bin")))
_WRAPPED_FOLDER = Path("/usr/lib/rabbitmq/bin")

_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
_METHOD_FRAME = b"\x01"

_EPMD_TIMEOUT = 60.0
_POLL_INTERVAL = 0.05


class RabbitMQError(RuntimeError):
    """A node did not do what it was told."""


class RabbitMQNotInstalled(RabbitMQError):
    """This machine has no RabbitMQ to run a node from."""


@dataclass(frozen=True)
class _Tools:
    server: Path
    ctl: Path
    epmd: Path

    @classmethod
    def find(cls) -> _Tools:
        return cls(_find_tool("rabbitmq-server"), _find_tool("rabbitmqctl"), _find_tool("epmd"))


@dataclass(frozen=True)
class _Account:
    """The unprivileged account that nodes run as when root starts them."""

    name: str
    uid: int
    gid: int

    @classmethod
    def find(cls) -> _Account | None:
        """Return the account, or None if nodes run as whoever starts them."""
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
    """A RabbitMQ node, wherever it runs, that tests may put under alarm with ``rabbitmqctl``."""

    @property
    @abstractmethod
    def url(self) -> str:
        """AMQP URL of the node's default virtual host, for its default user."""

    @abstractmethod
    def ctl(self, *args: str) -> str:
        """Run ``rabbitmqctl`` against this node, and return what it printed."""

    def raise_memory_alarm(self) -> None:
        """Make the node think it is out of memory. It sends ``Connection.Blocked`` to whoever publishes from now on.

        Raises:
            RabbitMQError: If the node does not take the command.
        """
        self.ctl("set_vm_memory_high_watermark", "0")

    def clear_memory_alarm(self) -> None:
        """Take `raise_memory_alarm` back. It sends ``Connection.Unblocked`` to whom it had blocked.

        Raises:
            RabbitMQError: If the node does not take the command.
        """
        self.ctl("set_vm_memory_high_watermark", "0.4")

    def raise_disk_alarm(self) -> None:
        """Make the node think that its disk is full. It sends ``Connection.Blocked`` as under a memory alarm.

        Raises:
            RabbitMQError: If the node does not take the command.
        """
        self.ctl("set_disk_free_limit", "1000000GB")

    def clear_disk_alarm(self) -> None:
        """Take `raise_disk_alarm` back. It sends ``Connection.Unblocked`` to whom it had blocked.

        Raises:
            RabbitMQError: If the node does not take the command.
        """
        self.ctl("set_disk_free_limit", "50MB")

    def sync(self) -> None:
        """Flush declarations to disk. RabbitMQ 3 writes them some time after it answers, so a crash can lose them.

        Raises:
            RabbitMQError: If the node does not take the command.
        """
        self.ctl("eval", "mnesia:sync_log().")


class RabbitMQNode(Node, RabbitMQ):
    """A private RabbitMQ node.

    As a context manager it starts on entry and is closed on exit::

        with RabbitMQNode() as node:
            connection = pika.BlockingConnection(pika.URLParameters(node.url))

    Data survive `stop` and `kill`: `start` brings the same node back, on the same port. Started by root, the node runs
    as the user rabbitmq where there is one.

    Args:
        directory: Folder for data, logs and configuration, made if need be. It is kept, and a later node finds its data
            there. Started by root, it is handed over to the user rabbitmq, who must be able to reach it. None: a
            temporary folder that `close` removes.
        port: Port for AMQP. None: one that is free now.
        start_timeout: Seconds that `start` waits for the node to answer.

    Raises:
        RabbitMQNotInstalled: If the machine has no RabbitMQ.
    """

    _error = RabbitMQError

    # The node's name in Erlang, and the address on which it listens.
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
        # Only set while the data folder is ours to remove.
        temporary: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            # A TMPDIR of root's own, as test runners like to set, is closed to the user rabbitmq.
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
        """Folder that holds the node's data, logs and configuration."""
        return self._directory

    @property
    def port(self) -> int:
        """Port on which the node speaks AMQP."""
        return self._port

    @property
    def url(self) -> str:
        """AMQP URL of the node's default virtual host, for its default user."""
        return f"amqp://guest:guest@{self._host}:{self._port}/%2F"

    def ctl(self, *args: str, timeout: float = 180.0) -> str:
        """Run ``rabbitmqctl`` against this node.

        Args:
            args: The command and its arguments, such as ``"list_queues", "name", "messages"``.
            timeout: Seconds it may take.

        Returns:
            What it printed, less its introductions and surrounding white space.

        Raises:
            RabbitMQError: If the command fails or takes too long; what it complained of is in the message.
        """
        words = " ".join(args)
        try:
            done = subprocess.run(
                [self._tools.ctl, "--quiet", *self._ctl_options, "--node", self._name, *args],
                cwd=self._directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                **self._account_of_process(),
            )
        except subprocess.TimeoutExpired:
            raise RabbitMQError(f"rabbitmqctl {words} did not end within {timeout:g} s") from None
        if done.returncode != 0:
            complaint = (done.stderr.strip() or done.stdout.strip()).replace("\n", "\n  ")
            raise RabbitMQError(f"rabbitmqctl {words} failed with exit code {done.returncode}:\n  {complaint}")
        return done.stdout.strip()

    def _account_of_process(self) -> _Credentials:
        if self._account is None:
            return {}
        return {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}

    def _environment(self) -> dict[str, str]:
        # Settings meant for the machine's own node must not reach this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        folder = str(self._directory)
        return environment | {
            # The Erlang cookie lies in the home folder.
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
            # The start script then becomes the Erlang machine instead of staying as its parent: signals reach it, and
            # its end is seen here.
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
                f"{self._directory} is closed to the user {self._account.name}, whom a node that root starts runs as: "
                f"choose a directory all of whose parents that user may enter"
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
        # The node starts one of its own, which would outlive it, unless this one listens already.
        if not wait_until(lambda: epmd.poll() is not None or _accepts(self._epmd_port), _EPMD_TIMEOUT):
            raise RabbitMQError(f"epmd did not listen on port {self._epmd_port} within {_EPMD_TIMEOUT:g} s")
        if epmd.poll() is not None:
            raise RabbitMQError(f"epmd ended with exit code {epmd.returncode}; is port {self._epmd_port} taken?")

    def _command(self) -> list[Path]:
        return [self._tools.server]

    def _is_ready(self) -> bool:
        # Listeners are the last thing that a node starts: one that answers is ready.
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
            # It keeps nothing, and refuses to end in order while it remembers a name.
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


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
        return True
    return False


def speaks_amqp(host: str, port: int) -> bool:
    """Whether somebody there answers what a client says first."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0) as connection:
        connection.sendall(_PROTOCOL_HEADER)
        return connection.recv(1) == _METHOD_FRAME
    return False
