"""Routing, sans-I/O: the queues that a message reaches from the exchange that it was published to.

A publish method is decoded once into a `Target`, which remembers its queues for one version of the topology.
`Router.version` goes up with every change that routing depends on, and outdated targets are resolved again.

A message goes from exchange to exchange over bindings, and visits each exchange once. An exchange that finds no
destination for the message hands it to its alternate exchange, if it has one. As in RabbitMQ that holds for each
exchange on the way, an alternate exchange that does not exist is passed over, and an internal exchange may be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qflow_client.broker.core.entries import StoredMessage
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import MANY_QUEUES, Exchange, Target
from qflow_client.broker.core.properties import decode_headers
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.settings import Settings

__all__ = ["ALTERNATE_EXCHANGE", "Router", "needs_headers", "reach"]

#: The argument of an exchange that names the exchange for what it cannot route.
ALTERNATE_EXCHANGE = "alternate-exchange"


class Router:
    """Finds the queues of messages.

    Args:
        settings: the broker's.
        exchanges: all there are, by name.
        queues: all there are, by name.
    """

    #: Distinct publish methods that are remembered; beyond that all are forgotten.
    MAX_TARGETS = 4096

    def __init__(self, settings: Settings, exchanges: Mapping[str, Exchange], queues: Mapping[str, Queue]) -> None:
        self._settings = settings
        self.exchanges = exchanges
        self.queues = queues
        # Goes up with every change that routing depends on.
        self.version = 0
        # Publish methods by the payload of their frame.
        self.targets: dict[bytes, Target] = {}

    def check_size(self, size: int) -> None:
        """Whether a message may have so many body bytes.

        Raises:
            ChannelException: 406; it may not.
        """
        if size > self._settings.max_message_size:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"a message of {size} bytes is larger than the broker takes ({self._settings.max_message_size})",
            )

    def exchange(self, name: str) -> Exchange:
        """An exchange by name.

        Raises:
            ChannelException: 404; there is none.
        """
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise ChannelException(
                ReplyCode.NOT_FOUND, f"no exchange '{name}' in vhost '{self._settings.virtual_host}'"
            )
        return exchange

    def resolve(self, target: Target) -> None:
        """Bring a target's destinations up to date with the topology.

        Raises:
            ChannelException: 404; no such exchange. 403; an internal one.
        """
        exchange = self.exchange(target.exchange)
        if exchange.internal:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"exchange '{exchange.name}' is internal; publish to one that is bound to it"
            )
        self._resolve(target, exchange)

    def _resolve(self, target: Target, exchange: Exchange) -> None:
        if needs_headers(exchange, self.exchanges):
            target.queues = None
        else:
            target.queues = reach(exchange, target.routing_key, {}, self.exchanges, self.queues)
        # With headers in play it is not known before each message.
        target.watched = (
            target.queues is None
            or len(target.queues) > MANY_QUEUES
            or any(queue.is_watched for queue in target.queues)
        )
        target.version = self.version

    def destinations(self, message: StoredMessage, target: Target) -> tuple[Queue, ...]:
        """The queues that a message goes to, whose target is up to date."""
        if target.queues is not None:
            return target.queues
        headers = decode_headers(message.header)
        return reach(self.exchanges[target.exchange], target.routing_key, headers, self.exchanges, self.queues)

    def target(self, exchange: str, routing_key: str) -> Target | None:
        """A target that is up to date; ``None`` if there is no such exchange."""
        found = self.exchanges.get(exchange)
        if found is None:
            return None
        target = Target(exchange, routing_key)
        self._resolve(target, found)
        return target


def _alternate(exchange: Exchange, exchanges: Mapping[str, Exchange]) -> Exchange | None:
    """The alternate exchange; ``None`` if the exchange has none, or it does not exist."""
    name = exchange.arguments.get(ALTERNATE_EXCHANGE)
    return exchanges.get(name) if isinstance(name, str) else None


def needs_headers(start: Exchange, exchanges: Mapping[str, Exchange]) -> bool:
    """Whether the way of a message from an exchange may depend on more than its routing key.

    Args:
        start: where the message is published.
        exchanges: all there are, by name.
    """
    seen: dict[Exchange, None] = {start: None}
    todo = [start]
    while todo:
        exchange = todo.pop()
        if exchange.needs_headers:
            return True
        for found in (*exchange.next_exchanges.values(), _alternate(exchange, exchanges)):
            if found is not None and found not in seen:
                seen[found] = None
                todo.append(found)
    return False


def reach(
    start: Exchange,
    routing_key: str,
    headers: Mapping[str, object],
    exchanges: Mapping[str, Exchange],
    queues: Mapping[str, Queue],
) -> tuple[Queue, ...]:
    """The queues that a message reaches from an exchange, each once.

    Args:
        start: where the message is published.
        routing_key: of the message.
        headers: of the message; empty if no exchange on the way needs them.
        exchanges: all there are, by name.
        queues: all there are, by name.
    """
    found: dict[Queue, None] = {}
    seen: dict[Exchange, None] = {start: None}
    todo = [start]
    while todo:
        exchange = todo.pop()
        is_routed = False
        for destination in _destinations(exchange, routing_key, headers, queues):
            is_routed = True
            if isinstance(destination, Queue):
                found[destination] = None
            elif destination not in seen:
                seen[destination] = None
                todo.append(destination)
        if not is_routed:
            alternate = _alternate(exchange, exchanges)
            if alternate is not None and alternate not in seen:
                seen[alternate] = None
                todo.append(alternate)
    return tuple(found)


def _destinations(
    exchange: Exchange, routing_key: str, headers: Mapping[str, object], queues: Mapping[str, Queue]
) -> Iterator[Queue | Exchange]:
    """Where one exchange sends a message; the default exchange is bound to every queue by the queue's name."""
    if exchange.name:
        yield from exchange.destinations(routing_key, headers)
    elif routing_key in queues:
        yield queues[routing_key]
