"""The brokers that the contract is held against, and what the tests need of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import amqp
import pika
from pika import BasicProperties

from qflow_client import Outcome, __version__
from qflow_client.broker import Broker
from qflow_client.testing.brokerj import BrokerJ
from qflow_client.testing.rabbitmq import RabbitMQ, RabbitMQNode

# Far more than anything takes on a busy machine.
PATIENCE = 60.0

#: The marks of a queue that stops its producers, which Broker-J and the broker here know by the same names.
STOP, RESUME = 20_000, 10_000
#: Messages of a queue that rejects.
ROOM = 5


@dataclass(frozen=True)
class Provider:
    """A running broker."""

    url: str
    version: str
    #: Stop who publishes with `Connection.Blocked`, and let them go. None: nobody can from here.
    block: Callable[[], object] | None = None
    unblock: Callable[[], object] | None = None
    #: Its management, if it is a Broker-J.
    brokerj: BrokerJ | None = None

    @property
    def refused(self) -> set[Outcome]:
        """What may become of a mandatory message that a full queue refuses."""
        # It nacks at once, and returns when it has taken all that came.
        return {Outcome.NACKED, Outcome.RETURNED} if self.brokerj is not None else {Outcome.NACKED}

    @property
    def unroutable(self) -> set[Outcome]:
        """What may become of a mandatory message for which there is no queue."""
        return self.refused if self.brokerj is not None else {Outcome.RETURNED}

    def expiration(self, seconds: int) -> str:
        """The property by which a message expires after so many seconds."""
        # What is a time to live in the standard is a point in time to it.
        return str(((int(time.time()) if self.brokerj is not None else 0) + seconds) * 1_000)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Those who publish are blocked meanwhile."""
        assert self.block is not None
        assert self.unblock is not None
        self.block()
        try:
            yield
        finally:
            self.unblock()

    def rejecting(self, inbox: Inbox) -> str:
        """A queue that nacks what comes when it has `ROOM` messages."""
        if self.brokerj is None:
            return inbox.declare({"x-max-length": ROOM, "x-overflow": "reject-publish"})
        name = inbox.name()
        self.brokerj.make_queue(name, overflowPolicy="REJECT", maximumQueueDepthMessages=ROOM)
        return name

    def stopping(self, inbox: Inbox) -> str:
        """A queue that stops its producers with `Channel.Flow` beyond `STOP` bytes, until `RESUME` are left."""
        return inbox.declare({"x-qpid-capacity": STOP, "x-qpid-flow-resume-capacity": RESUME})


def version_of(url: str) -> str:
    """What a broker says of itself as a client connects."""
    parts = urlsplit(url)
    with amqp.Connection(
        f"{parts.hostname}:{parts.port or 5672}",
        userid=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        virtual_host=unquote(parts.path[1:]),
    ) as connection:
        return str(connection.server_properties.get("version", "of an unknown version"))


class Inbox:
    """A connection of pika's beside the producer's, which declares queues and takes from them.

    It never publishes, so nobody blocks it.
    """

    def __init__(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        # Nobody serves it while a test runs, however long that takes.
        parameters.heartbeat = 0
        self._connection = pika.BlockingConnection(parameters)
        # pika's types have a None for everything that an empty queue has not.
        self._channel: Any = self._connection.channel()
        self._channel.basic_qos(prefetch_count=100)
        self._names: list[str] = []

    def name(self) -> str:
        """A new name for a queue, which is deleted in the end."""
        self._names.append(f"qflow-{uuid4().hex}")
        return self._names[-1]

    def declare(self, arguments: dict[str, object] | None = None, *, durable: bool = False) -> str:
        name = self.name()
        self._channel.queue_declare(name, durable=durable, arguments=arguments or {})
        return name

    def depth(self, queue: str) -> int:
        return int(self._channel.queue_declare(queue, passive=True).method.message_count)

    def wait_depth(self, queue: str, depth: int) -> None:
        """Wait until there are so many messages."""
        end = time.monotonic() + PATIENCE
        while (found := self.depth(queue)) != depth:
            assert time.monotonic() < end, f"{found} messages, not {depth}"
            self._connection.sleep(0.01)

    def take(self, queue: str, count: int) -> list[tuple[BasicProperties, bytes]]:
        """The next so many messages, and a check that no more are ready."""
        taken: list[tuple[BasicProperties, bytes]] = []
        if count:
            for method, properties, content in self._channel.consume(queue, inactivity_timeout=PATIENCE):
                assert method is not None, f"{len(taken)} of {count} messages came"
                self._channel.basic_ack(method.delivery_tag)
                taken.append((properties, content))
                if len(taken) == count:
                    break
            assert self._channel.cancel() == 0, "there were more messages"
        assert self.depth(queue) == 0
        return taken

    def bodies(self, queue: str, count: int) -> list[bytes]:
        """As `take`, of each the body."""
        return [content for _, content in self.take(queue, count)]

    def close(self) -> None:
        for name in self._names:
            self._channel.queue_delete(name)
        self._connection.close()


class Providers:
    """Starts each broker when it is asked for, once.

    Args:
        rabbitmq: makes a RabbitMQ node of the installed package, or skips.
        container: makes one of a major release, in a container if it can, or skips.
        brokerj: makes a Broker-J of a release, or skips.
    """

    def __init__(
        self,
        rabbitmq: Callable[[], RabbitMQNode],
        container: Callable[[str], RabbitMQ],
        brokerj: Callable[[str], BrokerJ],
    ) -> None:
        self._rabbitmq = rabbitmq
        self._container = container
        self._brokerj = brokerj
        self._stack = ExitStack()
        self._made: dict[str, Provider] = {}

    def __getitem__(self, name: str) -> Provider:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def close(self) -> None:
        self._stack.close()

    def _make(self, name: str) -> Provider:
        product, _, release = name.partition(" ")
        if product == "Broker-J":
            brokerj = self._brokerj(release)
            return Provider(brokerj.url, version_of(brokerj.url), brokerj=brokerj)
        variable = "QFLOW_BROKER_URL" if product == "qflow" else f"QFLOW_{name.upper().replace(' ', '_')}_URL"
        if url := os.environ.get(variable):
            return Provider(url, version_of(url))
        if product == "qflow":
            broker = self._stack.enter_context(Broker())
            return Provider(broker.url, __version__, broker.block, broker.unblock)
        node: RabbitMQ = self._container(release) if release else self._rabbitmq()
        return Provider(node.url, version_of(node.url), node.raise_memory_alarm, node.clear_memory_alarm)
