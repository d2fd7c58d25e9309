"""Exchanges, sans-I/O: which bindings a message matches, and the target of a publish.

Two bindings with the same destination, key and arguments are one. A headers exchange needs the headers of each message;
the destinations of every other kind depend on the routing key only, so a `Target` can remember them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache

from qflow_client.broker.core.entries import Address
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.queue import Queue

__all__ = ["Binding", "DirectExchange", "Exchange", "ExchangeType", "Target", "make_exchange"]

Headers = Mapping[str, object]


class Target(Address):
    """What a ``Basic.Publish`` method asks for; one object for all publishes that ask for the same."""

    __slots__ = ("queues", "version", "watched")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool = False, immediate: bool = False) -> None:
        super().__init__(exchange, routing_key, mandatory=mandatory, immediate=immediate)
        # The destination queues, for the topology of `version`; None if they depend on the message's headers.
        self.queues: tuple[Queue, ...] | None = ()
        # The virtual host's version that `queues` is right for.
        self.version = -1
        # Whether any destination has marks or a maximum.
        self.watched = False


class ExchangeType(StrEnum):
    """The kinds of exchange."""

    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"


class Binding:
    """What ties a queue, or another exchange, to an exchange.

    Args:
        destination: where messages go.
        routing_key: the binding key.
        arguments: for headers exchanges.
    """

    __slots__ = ("arguments", "destination", "key", "routing_key")

    def __init__(self, destination: Queue | Exchange, routing_key: str, arguments: Headers) -> None:
        self.destination = destination
        self.routing_key = routing_key
        self.arguments = arguments
        # Two bindings with the same key are the same.
        self.key = (destination, routing_key, repr(sorted(arguments.items())))


class Exchange(ABC):
    """An exchange.

    Args:
        name: of the exchange.
        durable: as declared.
        auto_delete: whether it goes with its last binding.
        internal: whether clients may not publish to it.
        arguments: as declared.
    """

    type: ExchangeType

    def __init__(
        self,
        name: str,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = dict(arguments or {})
        # In the order in which they were made.
        self.bindings: dict[object, Binding] = {}

    @property
    def needs_headers(self) -> bool:
        """Whether its routing depends on more than the routing key."""
        return False

    def bind(self, binding: Binding) -> None:
        """Add a binding; one that is there already changes nothing.

        Raises:
            ChannelException: 406; arguments that this kind of exchange cannot use.
        """
        self.bindings.setdefault(binding.key, binding)

    def unbind(self, binding: Binding) -> bool:
        """Remove the binding that is the same as this one.

        Returns:
            True if there was one.
        """
        return self.bindings.pop(binding.key, None) is not None

    def unbind_all(self, destination: Queue | Exchange) -> bool:
        """Remove all bindings to a destination.

        Returns:
            True if there were any.
        """
        gone = [key for key, binding in self.bindings.items() if binding.destination is destination]
        for key in gone:
            del self.bindings[key]
        return bool(gone)

    @abstractmethod
    def matches(self, binding: Binding, routing_key: str, headers: Headers) -> bool:
        """Whether a message goes where the binding leads."""

    def destinations(self, routing_key: str, headers: Headers) -> Iterator[Queue | Exchange]:
        """Where a message goes; a destination may come more than once."""
        for binding in self.bindings.values():
            if self.matches(binding, routing_key, headers):
                yield binding.destination


class DirectExchange(Exchange):
    """The routing key is the binding key."""

    type = ExchangeType.DIRECT

    def matches(self, binding: Binding, routing_key: str, headers: Headers) -> bool:
        return binding.routing_key == routing_key


class FanoutExchange(Exchange):
    """Every message goes everywhere."""

    type = ExchangeType.FANOUT

    def matches(self, binding: Binding, routing_key: str, headers: Headers) -> bool:
        return True


@lru_cache(maxsize=4096)
def _topic_matches(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    # Which lengths of a beginning of `words` the pattern so far matches.
    reached = {0}
    for part in pattern:
        if part == "#":
            reached = set(range(min(reached), len(words) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(words) and part in ("*", words[at])}
        if not reached:
            return False
    return len(words) in reached


def _words(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()


class TopicExchange(Exchange):
    """Words separated by dots; in a binding key ``*`` is one word, ``#`` any number."""

    type = ExchangeType.TOPIC

    def matches(self, binding: Binding, routing_key: str, headers: Headers) -> bool:
        return _topic_matches(_words(binding.routing_key), _words(routing_key))


class HeadersExchange(Exchange):
    """The message's headers have all, or any, of the binding's; one without a value there only has to exist."""

    type = ExchangeType.HEADERS
    _MATCHES = ("all", "any", "all-with-x", "any-with-x")

    @property
    def needs_headers(self) -> bool:
        return True

    def bind(self, binding: Binding) -> None:
        how = binding.arguments.get("x-match", "all")
        if how not in self._MATCHES:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"x-match={how!r}: it must be one of {', '.join(self._MATCHES)}"
            )
        super().bind(binding)

    def matches(self, binding: Binding, routing_key: str, headers: Headers) -> bool:
        how = str(binding.arguments.get("x-match", "all"))
        wanted = (
            name in headers and (value is None or headers[name] == value)
            for name, value in binding.arguments.items()
            if name != "x-match" and (how.endswith("with-x") or not name.startswith("x-"))
        )
        return any(wanted) if how.startswith("any") else all(wanted)


_KINDS: dict[ExchangeType, type[Exchange]] = {
    kind.type: kind for kind in (DirectExchange, FanoutExchange, TopicExchange, HeadersExchange)
}


def make_exchange(
    name: str,
    kind: str,
    *,
    durable: bool,
    auto_delete: bool,
    internal: bool,
    arguments: Mapping[str, object],
) -> Exchange:
    """An exchange of a kind that a client named.

    Raises:
        ConnectionException: 503; there is no such kind.
    """
    try:
        exchange_type = ExchangeType(kind)
    except ValueError:
        allowed = ", ".join(member.value for member in ExchangeType)
        raise ConnectionException(
            ReplyCode.COMMAND_INVALID, f"exchange '{name}' of unknown type '{kind}'; known are {allowed}"
        ) from None
    return _KINDS[exchange_type](name, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments)
