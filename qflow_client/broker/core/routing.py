"""Routing, sans-I/O: the queues that a message reaches from the exchange that it was published to.

A message goes from exchange to exchange over bindings, and visits each exchange once. An exchange that finds no
destination for the message hands it to its alternate exchange, if it has one. As in RabbitMQ that holds for each
exchange on the way, an alternate exchange that does not exist is passed over, and an internal exchange may be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import Exchange
from qflow_client.broker.core.queue import Queue

__all__ = ["ALTERNATE_EXCHANGE", "check_exchange_arguments", "needs_headers", "reach"]

#: The argument of an exchange that names the exchange for what it cannot route.
ALTERNATE_EXCHANGE = "alternate-exchange"


def check_exchange_arguments(exchange: str, arguments: Mapping[str, object]) -> None:
    """Check the arguments that a new exchange is declared with.

    Raises:
        ChannelException: 406; the alternate exchange is not a name.
    """
    name = arguments.get(ALTERNATE_EXCHANGE)
    if name is not None and not isinstance(name, str):
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED,
            f"exchange '{exchange}': {ALTERNATE_EXCHANGE}={name!r}: it must be a string, not {type(name).__name__}",
        )


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
