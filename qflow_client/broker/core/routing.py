"""Routing, sans-I/O: the queues that a message reaches from its exchange.

Equal ``Basic.Publish`` methods share a `Target`, which caches the queues for one `Router.version`. Each change that
affects routing increases `Router.version`. A target of an older version is resolved again before it is used.

A message goes from exchange to exchange through bindings, and visits each exchange at most once. An exchange that finds
no destination passes the message to its alternate exchange, if there is one. As in RabbitMQ, this applies to every
exchange on the way, not only to the first. An alternate exchange that does not exist is ignored. An internal exchange
may be an alternate exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qflow_client.broker.core.entries import StoredMessage
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import MANY_QUEUES, Exchange, Target
from qflow_client.broker.core.properties import decode_headers
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.settings import Settings

__all__ = ["ALTERNATE_EXCHANGE", "Router", "needs_headers", "reach"]

#: The exchange argument with the name of the alternate exchange.
ALTERNATE_EXCHANGE = "alternate-exchange"


class Router:
    """Finds the queues to which messages go."""

    #: Maximum number of cached targets. If there are more, the whole cache is cleared.
    MAX_TARGETS = 4096
    #: Maximum number of queues of a message. A publish to 4,000 queues takes 5 to 45 ms, depending on queue arguments.
    MAX_QUEUES = 4_000

    def __init__(self, settings: Settings, exchanges: Mapping[str, Exchange], queues: Mapping[str, Queue]) -> None:
        self._settings = settings
        self.exchanges = exchanges
        self.queues = queues
        self.version = 0
        # Cached targets. The keys are the payloads of Basic.Publish frames.
        self.targets: dict[bytes, Target] = {}
        # Approximate bytes of the bindings of all headers exchanges. A message may be compared with all these bindings.
        self.headers_size = 0

    def check_size(self, size: int) -> None:
        """Raise `ChannelException` 406 if a message with this number of body bytes is too large."""
        if size > self._settings.max_message_size:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"a message of {size} bytes is larger than max_message_size={self._settings.max_message_size}",
            )

    def exchange(self, name: str) -> Exchange:
        """Return an exchange by name. Raise `ChannelException` 404 if it does not exist."""
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise ChannelException(
                ReplyCode.NOT_FOUND, f"no exchange '{name}' in vhost '{self._settings.virtual_host}'"
            )
        return exchange

    def resolve(self, target: Target) -> None:
        """Find the queues of a target for the current version.

        Raises:
            ChannelException: 404 if the exchange does not exist. 403 if the exchange is internal. 406 if a topic
                exchange has too many binding keys for this routing key, see `TopicExchange.MAX_PLACES`, or if the
                target has more than `MAX_QUEUES` queues.
        """
        exchange = self.exchange(target.exchange)
        if exchange.internal:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED,
                f"exchange '{exchange.name}' is internal; publish to an exchange that is bound to it",
            )
        self._resolve(target, exchange)

    def _resolve(self, target: Target, exchange: Exchange) -> None:
        if needs_headers(exchange, self.exchanges):
            target.queues = None
        else:
            target.queues = reach(exchange, target.routing_key, {}, self.exchanges, self.queues)
        # If the queues depend on headers, they differ between messages, and some of them may be watched (`is_watched`).
        target.watched = (
            target.queues is None
            or len(target.queues) > MANY_QUEUES
            or any(queue.is_watched for queue in target.queues)
        )
        target.version = self.version

    def destinations(self, message: StoredMessage, target: Target) -> tuple[Queue, ...]:
        """Return the queues of a message. `target` must have the current version.

        Raises:
            ChannelException: 406 if the message has more than `MAX_QUEUES` queues, or if a topic exchange on its way
                has too many binding keys for its routing key.
        """
        if target.queues is not None:
            return target.queues
        headers = decode_headers(message.header)
        return reach(self.exchanges[target.exchange], target.routing_key, headers, self.exchanges, self.queues)

    def target(self, exchange: str, routing_key: str) -> Target | None:
        """Return a new target of the current version; ``None`` if the exchange does not exist."""
        found = self.exchanges.get(exchange)
        if found is None:
            return None
        target = Target(exchange, routing_key)
        self._resolve(target, found)
        return target


def _alternate(exchange: Exchange, exchanges: Mapping[str, Exchange]) -> Exchange | None:
    """Return the alternate exchange; ``None`` if the exchange has none, or if the alternate exchange does not exist."""
    name = exchange.arguments.get(ALTERNATE_EXCHANGE)
    return exchanges.get(name) if isinstance(name, str) else None


def needs_headers(start: Exchange, exchanges: Mapping[str, Exchange]) -> bool:
    """Whether the queues of a message to the exchange `start` can depend on the message's headers."""
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
    """Return the queues that a message reaches from the exchange `start`, each once.

    `headers` may be empty if no exchange on the way needs them.

    Raises:
        ChannelException: 406 as in `Router.destinations`.
    """
    found: dict[Queue, None] = {}
    seen: dict[Exchange, None] = {start: None}
    todo = [start]
    while todo:
        exchange = todo.pop()
        is_routed = False
        for destination in _destinations(exchange, routing_key, headers, queues):
            if destination.is_deleted:
                # Bindings to a deleted queue or exchange are removed in slices, so this binding is still there.
                continue
            is_routed = True
            if isinstance(destination, Queue):
                found[destination] = None
            elif destination not in seen:
                seen[destination] = None
                todo.append(destination)
        if len(found) > Router.MAX_QUEUES:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"exchange '{start.name}': a message with the routing key '{routing_key}' would go to {len(found)} "
                f"queues; at most {Router.MAX_QUEUES} are allowed; use fewer bindings",
            )
        if not is_routed:
            alternate = _alternate(exchange, exchanges)
            if alternate is not None and alternate not in seen:
                seen[alternate] = None
                todo.append(alternate)
    return tuple(found)


def _destinations(
    exchange: Exchange, routing_key: str, headers: Mapping[str, object], queues: Mapping[str, Queue]
) -> Iterable[Queue | Exchange]:
    """Return the destinations of one exchange. The default exchange is bound to every queue by the queue's name."""
    if exchange.name:
        return exchange.destinations(routing_key, headers)
    return (queues[routing_key],) if routing_key in queues else ()
