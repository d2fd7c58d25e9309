"""The brokers with which the contract is tested, and the operations that the tests need."""

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

# Maximum seconds of any wait. Even a busy machine needs far less.
PATIENCE = 60.0

#: Stop and resume thresholds in bytes. Broker-J and the broker of this repository have the same names for them.
STOP, RESUME = 20_000, 10_000
#: Maximum number of messages in a queue that rejects further messages.
ROOM = 5


@dataclass(frozen=True)
class Provider:
    """A running broker."""

    url: str
    version: str
    #: Functions that block publishers with `Connection.Blocked`, and unblock them. None if the test cannot do this.
    block: Callable[[], object] | None = None
    unblock: Callable[[], object] | None = None
    #: The management of a Broker-J; None for other brokers.
    brokerj: BrokerJ | None = None

    @property
    def refused(self) -> set[Outcome]:
        """The possible outcomes of a mandatory message that a full queue refuses."""
        # Broker-J nacks the message immediately, and returns messages after it has read all received messages.
        return {Outcome.NACKED, Outcome.RETURNED} if self.brokerj is not None else {Outcome.NACKED}

    @property
    def unroutable(self) -> set[Outcome]:
        """The possible outcomes of a mandatory message that no queue receives."""
        return self.refused if self.brokerj is not None else {Outcome.RETURNED}

    def expiration(self, seconds: int) -> str:
        """Return the property `expiration` of a message that expires after a number of seconds."""
        # In AMQP 0-9-1 the property is a time to live. Broker-J interprets the property as a point in time.
        return str(((int(time.time()) if self.brokerj is not None else 0) + seconds) * 1_000)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Block publishers during the block."""
        assert self.block is not None
        assert self.unblock is not None
        self.block()
        try:
            yield
        finally:
            self.unblock()

    def rejecting(self, inbox: Inbox) -> str:
        """Create a queue that nacks further messages when it has `ROOM` messages."""
        if self.brokerj is None:
            return inbox.declare({"x-max-length": ROOM, "x-overflow": "reject-publish"})
        name = inbox.name()
        self.brokerj.make_queue(name, overflowPolicy="REJECT", maximumQueueDepthMessages=ROOM)
        return name

    def stopping(self, inbox: Inbox) -> str:
        """Create a queue that sends `Channel.Flow` above `STOP` bytes, and starts its producers at `RESUME` bytes."""
        return inbox.declare({"x-qpid-capacity": STOP, "x-qpid-flow-resume-capacity": RESUME})


def version_of(url: str) -> str:
    """Return the version that a broker announces when a client connects."""
    parts = urlsplit(url)
    with amqp.Connection(
        f"{parts.hostname}:{parts.port or 5672}",
        userid=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        virtual_host=unquote(parts.path[1:]),
    ) as connection:
        return str(connection.server_properties.get("version", "of an unknown version"))


class Inbox:
    """A connection of pika that declares queues and consumes messages. The producer has another connection.

    This connection never publishes, so no broker blocks it.
    """

    def __init__(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        # Disable heartbeats, because the connection does no I/O between the calls of a test.
        parameters.heartbeat = 0
        self._connection = pika.BlockingConnection(parameters)
        # In pika's types, each result may be None because the queue may be empty.
        self._channel: Any = self._connection.channel()
        self._channel.basic_qos(prefetch_count=100)
        self._names: list[str] = []

    def name(self) -> str:
        """Return a new name for a queue. The queue is deleted at the end of the test."""
        self._names.append(f"qflow-{uuid4().hex}")
        return self._names[-1]

    def declare(self, arguments: dict[str, object] | None = None, *, durable: bool = False) -> str:
        name = self.name()
        self._channel.queue_declare(name, durable=durable, arguments=arguments or {})
        return name

    def depth(self, queue: str) -> int:
        return int(self._channel.queue_declare(queue, passive=True).method.message_count)

    def wait_depth(self, queue: str, depth: int) -> None:
        """Wait until the queue has exactly `depth` messages."""
        end = time.monotonic() + PATIENCE
        while (found := self.depth(queue)) != depth:
            assert time.monotonic() < end, f"{found} messages, not {depth}"
            self._connection.sleep(0.01)

    def take(self, queue: str, count: int) -> list[tuple[BasicProperties, bytes]]:
        """Return the next `count` messages, and check that no more messages are ready."""
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
        """Return the bodies of the next `count` messages, as `take` does."""
        return [content for _, content in self.take(queue, count)]

    def close(self) -> None:
        for name in self._names:
            self._channel.queue_delete(name)
        self._connection.close()


class Providers:
    """Starts each broker when a test first needs it.

    Args:
        rabbitmq: function that returns a RabbitMQ node of the installed package, or skips the test.
        container: function that returns RabbitMQ of a major release, in a container if possible, or skips the test.
        brokerj: function that returns a Broker-J of a release, or skips the test.
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
