"""The brokers of a soak test: the actions on each broker, and the reading of its durable queue."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import pika
from pamqp import commands
from pamqp.header import ContentHeader

from benchmarks.soak.messages import Copy, read_copy
from benchmarks.wire import Wire
from qflow_client.message import REPUBLISHED
from qflow_client.testing.cluster import NET_TICK_TIME, RabbitMQCluster
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.rabbitmq import RabbitMQNode

__all__ = ["BROKERS", "QUEUE", "Cluster", "Embedded", "RabbitMQ", "SoakBroker"]

QUEUE = "qflow-soak"

# Maximum seconds for a broker with millions of messages to restart and to answer.
_PATIENCE = 300.0
# Possible durations of a suspension of the broker in seconds.
_SUSPENDED = (0.2, 1.0, 3.0, 8.0)

Wait = Callable[[float], object]
Action = Callable[[Random, Wait], object]


class SoakBroker(Protocol):
    """A broker in a soak test.

    Attributes:
        name: name and version, for people.
        actions: actions on the broker, with their names as keys. Only one action runs at a time, and restores the
            broker at its end.
    """

    name: str
    actions: dict[str, Action]

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the broker's nodes."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The additional settings of producers for this broker."""

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        """Send ``Channel.Flow`` to the channel of one connection."""

    def kill(self) -> None:
        """Kill the broker, or one of its nodes, with SIGKILL, and start it again."""

    def read(self) -> Sequence[Copy]:
        """Return the messages of the queue, in order, and remove them from the queue."""


@contextlib.contextmanager
def _connected(url: str) -> Iterator[Any]:
    """Open a channel. pika closes a connection that the broker blocks for `_PATIENCE` seconds."""
    parameters = pika.URLParameters(f"{url}?heartbeat=0&blocked_connection_timeout={_PATIENCE}")
    connection = pika.BlockingConnection(parameters)
    try:
        yield connection.channel()
    finally:
        connection.close()


def _declare(url: str, **arguments: object) -> None:
    with _connected(url) as channel:
        channel.queue_declare(QUEUE, durable=True, arguments=arguments)


def _read_back(url: str) -> Sequence[Copy]:
    with Wire(url) as wire:
        # After a crash, a queue with many messages is slow.
        wire.socket.settimeout(_PATIENCE)
        return [read_copy(body, _headers(header)) for header, body in wire.drain(QUEUE)]


def _headers(payload: bytes) -> Mapping[str, object] | None:
    """Return the headers of a marked message. Do not decode the headers of other messages, which takes long."""
    if REPUBLISHED.encode() not in payload:
        return None
    header = ContentHeader()
    header.unmarshal(payload)
    assert header.properties is not None
    return header.properties.headers


class _OneNode:
    url: str
    settings: ClassVar[Mapping[str, Any]] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)


class RabbitMQ(_OneNode):
    """A private node of the installed RabbitMQ."""

    def __init__(self) -> None:
        self._node = RabbitMQNode(start_timeout=_PATIENCE)
        self.url = self._node.url
        self.name = "RabbitMQ"
        self.actions: dict[str, Action] = {
            "memory alarm": self._alarm,
            "suspended": self._suspend,
            "stopped in order": self._stop,
        }

    def __enter__(self) -> RabbitMQ:
        self._node.__enter__()
        try:
            _declare(self.url)
            self.name = f"RabbitMQ {self._version()}"
        except BaseException:
            self._node.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._node.close()

    def _version(self) -> str:
        with _connected(self.url) as channel:
            return str(channel.connection._impl.server_properties["version"])

    def kill(self) -> None:
        self._node.kill()
        self._node.start()

    def _alarm(self, chance: Random, wait: Wait) -> None:
        self._node.raise_memory_alarm()
        wait(chance.uniform(0.5, 4.0))
        self._node.clear_memory_alarm()

    def _suspend(self, chance: Random, wait: Wait) -> None:
        self._node.pause()
        try:
            wait(chance.choice(_SUSPENDED))
        finally:
            self._node.resume()

    def _stop(self, _chance: Random, wait: Wait) -> None:
        self._node.stop()
        wait(0.5)
        self._node.start()

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        # RabbitMQ never sends Channel.Flow, so the proxy sends it.
        proxy.inject(commands.Channel.Flow(active), 1, connection=connection, answer=commands.Channel.FlowOk)

    def read(self) -> Sequence[Copy]:
        return _read_back(self.url)


class Embedded(_OneNode):
    """This repository's broker, with a message store, in its own process."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._store = ""
        self._process: subprocess.Popen[str] | None = None
        # Only one thread at a time may use the process, and no thread while the process is down.
        self._lock = threading.Lock()
        self.url = ""
        self.name = "embedded"
        self.actions: dict[str, Action] = {
            "memory alarm": self._alarm,
            "confirms withheld": self._withhold,
            "producers stopped": self._stop_producers,
            "connections closed": self._close,
            "suspended": self._suspend,
            "stopped in order": self._stop,
        }

    def __enter__(self) -> Embedded:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qflow-soak-"))
            self._store = str(Path(folder) / "store")
            self._start()
            stack.callback(self._kill)
            _declare(self.url)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._end()

    def _start(self) -> None:
        port = str(urlsplit(self.url).port or 0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.embedded", self._store, port],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self._answer()

    def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                f"the process of the broker ended with exit code {self._process.wait()}; see its output above"
            )
        return line

    def _tell(self, *words: object) -> None:
        with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            print(json.dumps(words), file=self._process.stdin, flush=True)
            self._answer()

    def _end(self) -> None:
        assert self._process is not None
        self._process.communicate(timeout=_PATIENCE)

    def kill(self) -> None:
        with self._lock:
            self._kill()
            self._start()

    def _alarm(self, chance: Random, wait: Wait) -> None:
        self._tell("raise_alarm", "memory", "soak")
        wait(chance.uniform(0.5, 4.0))
        self._tell("clear_alarm", "memory")

    def _withhold(self, chance: Random, wait: Wait) -> None:
        self._tell("withhold_confirms")
        wait(chance.uniform(0.5, 3.0))
        self._tell("release_confirms")

    def _stop_producers(self, chance: Random, wait: Wait) -> None:
        self._tell("flow", False)
        wait(chance.uniform(0.5, 3.0))
        self._tell("flow", True)

    def _close(self, chance: Random, wait: Wait) -> None:
        self._tell("close_connections")
        wait(0.5)

    def _suspend(self, chance: Random, wait: Wait) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            wait(chance.choice(_SUSPENDED))
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _stop(self, _chance: Random, wait: Wait) -> None:
        with self._lock:
            # The process ends at the end of its input.
            self._end()
            wait(0.5)
            self._start()

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        # The connection may be closed by now, or have another name since the last kill of the broker.
        for each in proxy.connections:
            if each.number == connection and each.name_at_broker:
                self._tell("flow_one", active, each.name_at_broker)

    def read(self) -> Sequence[Copy]:
        return _read_back(self.url)


class Cluster:
    """Three nodes of the installed RabbitMQ, with a quorum queue."""

    settings: ClassVar[Mapping[str, Any]] = {"liveness": 2.0, "host_order": "shuffled"}

    def __init__(self) -> None:
        self._cluster = RabbitMQCluster()
        self.name = "RabbitMQ"
        self._turns = itertools.cycle(self._cluster.nodes)
        self.actions: dict[str, Action] = {
            # An alarm blocks the connections of all nodes.
            "memory alarm": self._alarm,
            "node suspended": self._suspend,
            "node stopped in order": self._stop,
        }
        if self._cluster.can_partition():
            self.actions["node cut off"] = self._cut_off

    def __enter__(self) -> Cluster:
        self._cluster.__enter__()
        try:
            _declare(self.urls[0], **{"x-queue-type": "quorum"})
            with _connected(self.urls[0]) as channel:
                version = channel.connection._impl.server_properties["version"]
            self.name = f"RabbitMQ {version}, a cluster of {len(self.urls)}"
        except BaseException:
            self._cluster.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()

    @property
    def urls(self) -> tuple[str, ...]:
        return self._cluster.urls

    def kill(self) -> None:
        node = next(self._turns)
        node.kill()
        node.start()

    def _alarm(self, chance: Random, wait: Wait) -> None:
        node = chance.choice(self._cluster.nodes)
        node.raise_memory_alarm()
        wait(chance.uniform(0.5, 4.0))
        node.clear_memory_alarm()

    def _suspend(self, chance: Random, wait: Wait) -> None:
        node = chance.choice(self._cluster.nodes)
        node.pause()
        try:
            wait(chance.choice((*_SUSPENDED, 2.0 * NET_TICK_TIME)))
        finally:
            node.resume()

    def _stop(self, chance: Random, wait: Wait) -> None:
        node = chance.choice(self._cluster.nodes)
        node.stop()
        wait(0.5)
        node.start()

    def _cut_off(self, chance: Random, wait: Wait) -> None:
        # The partition may be shorter or longer than the time that the other nodes need to notice it.
        with self._cluster.partition(chance.randrange(len(self.urls))):
            wait(chance.choice((1.0, 2.0 * NET_TICK_TIME)))

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        proxy.inject(commands.Channel.Flow(active), 1, connection=connection, answer=commands.Channel.FlowOk)

    def read(self) -> Sequence[Copy]:
        return _read_back(self.urls[0])


BROKERS: dict[str, Callable[[], RabbitMQ | Embedded | Cluster]] = {
    "rabbitmq": RabbitMQ,
    "embedded": Embedded,
    "cluster": Cluster,
}
