"""A private cluster of RabbitMQ nodes. Tests can cut the links between the nodes.

All nodes run on this machine. Each node has its own loopback address. A cluster chooses a random network for its
addresses (127.42.0.2, 127.42.0.3 and so on), so that a cut does not affect other clusters on this machine. To cut a
link, iptables drops the packets between the addresses of two nodes, which needs root. As in a broken network, a node
detects the cut only after about `NET_TICK_TIME` seconds. A cut drops no packets of clients, which connect from
127.0.0.1.

A node that is in the minority pauses, and disconnects its clients (``cluster_partition_handling = pause_minority``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from qflow_client.testing.node import free_port, wait_until
from qflow_client.testing.rabbitmq import RabbitMQError, RabbitMQNode

__all__ = ["NET_TICK_TIME", "RabbitMQCluster"]

#: If a node receives no data from another node for this number of seconds, the other node counts as lost.
NET_TICK_TIME: Final = 8

_START_TIMEOUT = 300.0


class _ClusterNode(RabbitMQNode):
    """A node of a cluster. The cluster's port mapper listens on `epmd_port`. `peers` are the names of all nodes."""

    _ctl_options = ("--longnames",)

    def __init__(self, host: str, epmd_port: int, cookie: str, peers: Sequence[str], directory: Path) -> None:
        self._host = host
        self._name = _name(host)
        self._cookie = cookie
        self._peers = peers
        super().__init__(directory, start_timeout=_START_TIMEOUT)
        self._epmd_port = epmd_port

    @property
    def name(self) -> str:
        return self._name

    def _environment(self) -> dict[str, str]:
        address = self._host.replace(".", ",")
        return super()._environment() | {
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-kernel inet_dist_use_interface {{{address}}} net_ticktime {NET_TICK_TIME} "
                f"inet_dist_connect_options [{{ip,{{{address}}}}}]"
            ),
        }

    def _configuration(self) -> str:
        peers = "".join(
            f"cluster_formation.classic_config.nodes.{number} = {peer}\n" for number, peer in enumerate(self._peers, 1)
        )
        return (
            f"{super()._configuration()}"
            "cluster_formation.peer_discovery_backend = classic_config\n"
            f"{peers}"
            "cluster_partition_handling = pause_minority\n"
        )

    def _prepare(self) -> None:
        super()._prepare()
        cookie = self.directory / ".erlang.cookie"
        cookie.unlink(missing_ok=True)
        cookie.touch(mode=0o600)
        cookie.write_text(self._cookie, encoding="ascii")
        if self._account is not None:
            os.chown(cookie, self._account.uid, self._account.gid)

    def _start_helpers(self) -> None:
        """Do nothing, because the cluster starts one port mapper for all nodes."""


def _name(host: str) -> str:
    # The port mapper identifies a node by the part before the @, so each node needs a different part.
    return f"rabbit{host.rpartition('.')[2]}@{host}"


class RabbitMQCluster:
    """A cluster of `size` RabbitMQ nodes.

    The context manager starts the cluster on entry and closes it on exit::

        with RabbitMQCluster() as cluster:
            producer = Producer(cluster.urls, routing_key="orders", liveness=2.0)
            with cluster.partition(0):
                ...

    Raises:
        RabbitMQNotInstalled: this machine has no RabbitMQ.
    """

    def __init__(self, size: int = 3) -> None:
        # If root starts the nodes, they run as the user rabbitmq, which must have access to the folder.
        parent = "/var/tmp" if os.geteuid() == 0 else None
        self._folder = tempfile.TemporaryDirectory(prefix="qflow-cluster-", dir=parent, ignore_cleanup_errors=True)
        Path(self._folder.name).chmod(0o755)
        self._epmd_port = free_port(set())
        self._epmd: subprocess.Popen[bytes] | None = None
        network = 1 + secrets.randbelow(254)
        self._hosts = [f"127.{network}.0.{number}" for number in range(2, 2 + size)]
        cookie = secrets.token_hex(16)
        names = [_name(host) for host in self._hosts]
        #: The nodes, in the order of their addresses.
        self.nodes: tuple[_ClusterNode, ...] = tuple(
            _ClusterNode(host, self._epmd_port, cookie, names, Path(self._folder.name) / host) for host in self._hosts
        )
        # The current iptables rules, two for each cut link.
        self._rules: list[tuple[str, ...]] = []

    @property
    def urls(self) -> tuple[str, ...]:
        """The AMQP URLs of the nodes."""
        return tuple(node.url for node in self.nodes)

    @staticmethod
    def can_partition() -> bool:
        """Whether this process can cut links, which needs root and iptables."""
        return os.geteuid() == 0 and shutil.which("iptables") is not None

    def start(self) -> None:
        """Start all nodes that do not run.

        Raises:
            RabbitMQError: a node does not start, or does not join the cluster.
        """
        if self._epmd is None:
            node = self.nodes[0]
            self._epmd = subprocess.Popen(
                [node._tools.epmd, "-port", str(self._epmd_port), "-address", ",".join(self._hosts)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                **node._account_of_process(),
            )
        self._each([node.start for node in self.nodes])
        size = len(self.nodes)
        if not wait_until(lambda: self.running == size, _START_TIMEOUT):
            raise RabbitMQError(f"{self.running} of {size} nodes run in the cluster after {_START_TIMEOUT:g} s")

    @property
    def running(self) -> int:
        """The number of running nodes in the cluster, according to the first node."""
        return int(self.nodes[0].evaluate("length(rabbit_mnesia:cluster_nodes(running))."))

    @staticmethod
    def _each(actions: Sequence[Callable[[], object]]) -> None:
        errors: list[BaseException] = []

        def act(action: Callable[[], object]) -> None:
            try:
                action()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=act, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def cut(self, one: int, other: int) -> None:
        """Cut the link between two nodes, given as indexes in `nodes`, until `heal` restores it.

        Raises:
            RabbitMQError: this machine has no iptables, or the process is not root.
        """
        if not self.can_partition():
            raise RabbitMQError("only root can cut links between nodes, with iptables")
        ends = self._hosts[one], self._hosts[other]
        for source, target in (ends, ends[::-1]):
            rule = ("INPUT", "-s", source, "-d", target, "-j", "DROP")
            _iptables("-I", *rule)
            self._rules.append(rule)

    def heal(self) -> None:
        """Restore all links."""
        while self._rules:
            _iptables("-D", *self._rules[-1])
            self._rules.pop()

    @contextlib.contextmanager
    def partition(self, alone: int) -> Iterator[None]:
        """Cut all links of the node `alone` (an index in `nodes`) during the block, and restore them after the block.

        Raises:
            RabbitMQError: this machine has no iptables, or the process is not root.
        """
        try:
            for other in range(len(self.nodes)):
                if other != alone:
                    self.cut(alone, other)
            yield
        finally:
            self.heal()

    def close(self) -> None:
        """Restore all links, kill all nodes, and remove their data."""
        self.heal()
        self._each([node.kill for node in self.nodes])
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
            self._epmd = None
        self._folder.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _iptables(*words: str) -> None:
    done = subprocess.run(["iptables", "-w", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RabbitMQError(f"iptables {' '.join(words)} failed: {done.stderr.strip()}")
