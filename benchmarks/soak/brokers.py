"""The brokers of a soak: what can be done to each, and how its durable queue is read back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Protocol

import pika
from pamqp import commands

from benchmarks.soak.messages import Copy, read_copy
from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.rabbitmq import RabbitMQNode

__all__ = ["BROKERS", "QUEUE", "Embedded", "RabbitMQ", "SoakBroker"]

QUEUE = "qflow-soak"

# Seconds within which a broker of millions of messages has to come back, and say something.
_PATIENCE = 300.0

Wait = Callable[[float], object]
Action = Callable[[Random, Wait], object]


class SoakBroker(Protocol):
    """A broker under soak.

    Attributes:
        url: for clients.
        name: and version, for people.
        kills: whether it comes back with its queues after SIGKILL.
        actions: what is done to it, one at a time, by name; each ends with the broker as it was before.
    """

    url: str
    name: str
    kills: bool
    actions: dict[str, Action]

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        """Say ``Channel.Flow`` to one connection's channel."""

    def kill(self) -> None:
        """End it with SIGKILL and start it again."""

    def read(self) -> Sequence[Copy]:
        """What is in the queue, in its order; it is emptied."""


class RabbitMQ:
    """A private node of the RabbitMQ that is installed."""

    kills = True

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
            with self._connected() as channel:
                channel.queue_declare(QUEUE, durable=True)
            self.name = f"RabbitMQ {self._version()}"
        except BaseException:
            self._node.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._node.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        parameters = pika.URLParameters(f"{self.url}?heartbeat=0&blocked_connection_timeout={_PATIENCE}")
        connection = pika.BlockingConnection(parameters)
        try:
            yield connection.channel()
        finally:
            connection.close()

    def _version(self) -> str:
        with self._connected() as channel:
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
            wait(chance.choice((0.2, 1.0, 3.0, 8.0)))
        finally:
            self._node.resume()

    def _stop(self, _chance: Random, wait: Wait) -> None:
        self._node.stop()
        wait(0.5)
        self._node.start()

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        # RabbitMQ never says it.
        proxy.inject(commands.Channel.Flow(active), 1, connection=connection, answer=commands.Channel.FlowOk)

    def read(self) -> Sequence[Copy]:
        copies: list[Copy] = []
        with self._connected() as channel:
            # A queue of many messages takes its time after a crash.
            channel.basic_qos(prefetch_count=1000)
            while True:
                left = channel.queue_declare(QUEUE, passive=True).method.message_count
                if not left:
                    return copies
                for method, properties, body in channel.consume(QUEUE, inactivity_timeout=_PATIENCE):
                    if method is None:
                        raise TimeoutError(f"{left} messages are left in the queue, and none came for {_PATIENCE:g} s")
                    copies.append(read_copy(body, properties.headers))
                    left -= 1
                    if not left or len(copies) % 500 == 0:
                        channel.basic_ack(method.delivery_tag, multiple=True)
                    if not left:
                        break
                channel.cancel()


class Embedded:
    """The broker of this repository. It keeps queues in memory, so it is not killed."""

    kills = False

    def __init__(self) -> None:
        self._broker = Broker()
        self.url = ""
        self.name = "embedded"
        self.actions: dict[str, Action] = {
            "memory alarm": self._alarm,
            "confirms withheld": self._withhold,
            "producers stopped": self._stop_producers,
            "connections closed": self._close,
        }

    def __enter__(self) -> Embedded:
        self._broker.__enter__()
        self.url = self._broker.url
        self._broker.declare_queue(QUEUE, durable=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.__exit__(None, None, None)

    def kill(self) -> None:
        raise NotImplementedError("its queues would be gone")

    def _alarm(self, chance: Random, wait: Wait) -> None:
        self._broker.raise_alarm("memory", "soak")
        wait(chance.uniform(0.5, 4.0))
        self._broker.clear_alarm("memory")

    def _withhold(self, chance: Random, wait: Wait) -> None:
        self._broker.withhold_confirms()
        wait(chance.uniform(0.5, 3.0))
        self._broker.release_confirms()

    def _stop_producers(self, chance: Random, wait: Wait) -> None:
        self._broker.flow(False)
        wait(chance.uniform(0.5, 3.0))
        self._broker.flow(True)

    def _close(self, chance: Random, wait: Wait) -> None:
        self._broker.close_connections()
        wait(0.5)

    def flow(self, proxy: FaultProxy, active: bool, connection: int) -> None:
        name = next(each.name_at_broker for each in proxy.connections if each.number == connection)
        for channel in self._broker.channels():
            if channel.connection == name:
                self._broker.flow(active, channel.name)

    def read(self) -> Sequence[Copy]:
        found = [read_copy(each.body, each.properties.headers) for each in self._broker.messages(QUEUE)]
        self._broker.purge(QUEUE)
        return found


BROKERS: dict[str, Callable[[], RabbitMQ | Embedded]] = {"rabbitmq": RabbitMQ, "embedded": Embedded}
