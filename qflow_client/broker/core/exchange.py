"""Exchanges, sans-I/O: the bindings that a message matches, and the cached destinations of a published message.

A headers exchange needs the headers of each message. For other types, destinations depend only on the routing key, so a
`Target` can cache them. A direct exchange finds bindings by their routing key. A topic exchange has a tree of the words
of the binding keys. So direct and topic exchanges do not look at all bindings for each message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from enum import StrEnum
from numbers import Number
from operator import itemgetter
from typing import Any

from qflow_client.broker.core.entries import Address
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.queue import Queue

__all__ = ["MANY_QUEUES", "Binding", "DirectExchange", "Exchange", "ExchangeType", "Target", "make_exchange"]

Headers = Mapping[str, object]

#: If a message goes to more queues than this, other connections are served before the publisher's next frame.
MANY_QUEUES = 500


class Target(Address):
    """The fields of a ``Basic.Publish``, and the cached queues. Equal ``Basic.Publish`` methods share one object."""

    __slots__ = ("queues", "version", "watched")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool = False) -> None:
        super().__init__(exchange, routing_key, mandatory=mandatory)
        # The destination queues; None if they depend on the message's headers.
        self.queues: tuple[Queue, ...] | None = ()
        # The value of `Router.version` for which `queues` and `watched` are valid.
        self.version = -1
        # Whether messages need `Channel._publish_watched`, see `Router._resolve`.
        self.watched = False


class ExchangeType(StrEnum):
    """The types of exchanges."""

    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"


class Binding:
    """A binding of a queue or an exchange to an exchange. Only headers exchanges route by the arguments."""

    __slots__ = ("arguments", "destination", "headers_size", "key", "routing_key", "source")

    def __init__(self, source: Exchange, destination: Queue | Exchange, routing_key: str, arguments: Headers) -> None:
        self.source = source
        self.destination = destination
        self.routing_key = routing_key
        self.arguments = arguments
        # Two bindings of an exchange with equal keys are the same binding.
        self.key = (destination, routing_key, repr(sorted(arguments.items())))
        # The share of this binding in `Router.headers_size`.
        self.headers_size = 64 + len(self.key[2]) if source.needs_headers else 0


class Exchange(ABC):
    """An exchange.

    Args:
        auto_delete: whether the exchange is deleted with its last binding.
        internal: whether the broker refuses messages that are published to the exchange.
    """

    type: ExchangeType
    #: Whether routing by this exchange depends on headers.
    needs_headers = False

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
        self.is_deleted = False
        # The bindings from this exchange, in the order in which they were added.
        self.bindings: dict[object, Binding] = {}
        #: The destinations that are exchanges. The keys are the same as in `bindings`.
        self.next_exchanges: dict[object, Exchange] = {}

    def bind(self, binding: Binding) -> None:
        """Add a binding. If the binding exists, nothing changes.

        Raises:
            ChannelException: 406 if this type of exchange cannot use the arguments.
        """
        if binding.key not in self.bindings:
            self.bindings[binding.key] = binding
            if isinstance(binding.destination, Exchange):
                self.next_exchanges[binding.key] = binding.destination
            self._added(binding)

    def unbind(self, binding: Binding) -> None:
        """Remove a binding of this exchange."""
        del self.bindings[binding.key]
        self.next_exchanges.pop(binding.key, None)
        self._removed(binding)

    def _added(self, binding: Binding) -> None:  # noqa: B027  # most types have no index
        """Update the subclass's index of bindings after a binding was added."""

    def _removed(self, binding: Binding) -> None:  # noqa: B027  # most types have no index
        """Update the subclass's index of bindings after a binding was removed."""

    @abstractmethod
    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        """Return the bindings that match a message with this routing key and these headers."""

    def destinations(self, routing_key: str, headers: Headers) -> Iterable[Queue | Exchange]:
        """Return the destinations of a message, each once."""
        return dict.fromkeys([binding.destination for binding in self.matching(routing_key, headers)])


class DirectExchange(Exchange):
    """Routes by equality of routing key and binding key."""

    type = ExchangeType.DIRECT

    def __init__(self, name: str, **keywords: Any) -> None:
        super().__init__(name, **keywords)
        self._by_key: dict[str, dict[object, Binding]] = {}

    def _added(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.routing_key, {})[binding.key] = binding

    def _removed(self, binding: Binding) -> None:
        same = self._by_key[binding.routing_key]
        del same[binding.key]
        if not same:
            del self._by_key[binding.routing_key]

    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return self._by_key.get(routing_key, {}).values()


class FanoutExchange(Exchange):
    """Routes every message to all bindings."""

    type = ExchangeType.FANOUT

    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return self.bindings.values()


class _Branch:
    """A branch of the tree of a topic exchange. Binding keys with the same first words share branches.

    The path from the root to the branch of a binding has all words of the binding key.
    """

    __slots__ = ("bindings", "next", "words")

    def __init__(self, words: list[str]) -> None:
        self.words = words
        # The child branches, by their first word.
        self.next: dict[str, _Branch] = {}
        # The bindings whose key is the path from the root to here, each with its number in the order of adding.
        self.bindings: dict[object, tuple[int, Binding]] = {}

    def add(self, words: list[str]) -> _Branch:
        """Return the branch at the end of a path with these words. If there is no such branch, create it."""
        branch = self
        while words:
            found = branch.next.get(words[0])
            if found is None:
                found = branch.next[words[0]] = _Branch(words)
            else:
                same = 1
                while same < min(len(words), len(found.words)) and words[same] == found.words[same]:
                    same += 1
                if same < len(found.words):
                    found = branch.next[words[0]] = found.part(same)
            words, branch = words[len(found.words) :], found
        return branch

    def part(self, at: int) -> _Branch:
        """Split the branch after its first `at` words, and return the first part."""
        first = _Branch(self.words[:at])
        self.words = self.words[at:]
        first.next[self.words[0]] = self
        return first

    def path(self, words: list[str]) -> list[_Branch]:
        """Return the branches on the path with these words, beginning with this branch. The path must exist."""
        path = [self]
        while words:
            path.append(path[-1].next[words[0]])
            words = words[len(path[-1].words) :]
        return path

    def join(self) -> None:
        """If the branch has no bindings and only one child, merge the branch and the child."""
        if not self.bindings and len(self.next) == 1:
            (last,) = self.next.values()
            self.words += last.words
            self.next, self.bindings = last.next, last.bindings


def _words(key: str) -> list[str]:
    return key.split(".") if key else []


# Positions in the tree of branches. A position is a branch, and the number of the branch's words that have matched.
_Places = dict[tuple[_Branch, int], None]


class TopicExchange(Exchange):
    """Routes by words separated by dots. In a binding key ``*`` matches one word, ``#`` any number of words."""

    type = ExchangeType.TOPIC
    #: Maximum number of positions in the tree that one routing key can reach. At the maximum, routing takes 20 ms.
    MAX_PLACES = 10_000

    def __init__(self, name: str, **keywords: Any) -> None:
        super().__init__(name, **keywords)
        self._root = _Branch([])
        # Number of bindings added so far. `matching` sorts the bindings by this number.
        self._made = 0

    def _added(self, binding: Binding) -> None:
        self._made += 1
        self._root.add(_words(binding.routing_key)).bindings[binding.key] = self._made, binding

    def _removed(self, binding: Binding) -> None:
        path = self._root.path(_words(binding.routing_key))
        branch = path.pop()
        del branch.bindings[binding.key]
        if path and not branch.bindings and not branch.next:
            del path[-1].next[branch.words[0]]
            branch = path.pop()
        if branch is not self._root:
            branch.join()

    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        places: _Places = {}
        _reach(self._root, 0, places)
        left = self.MAX_PLACES
        for word in _words(routing_key):
            before, places = places, {}
            for branch, at in before:
                left -= 1
                if len(places) > left:
                    raise ChannelException(
                        ReplyCode.PRECONDITION_FAILED,
                        f"exchange '{self.name}': too many binding keys match the beginning of the routing key "
                        f"'{routing_key}'; use fewer different keys with wildcards",
                    )
                words = branch.words
                if at and words[at - 1] == "#":
                    _reach(branch, at, places)
                if at < len(words):
                    if words[at] in (word, "*"):
                        _reach(branch, at + 1, places)
                    continue
                for each in (word, "*"):
                    if (found := branch.next.get(each)) is not None:
                        _reach(found, 1, places)
        ends = [branch.bindings for branch, at in places if at == len(branch.words) and branch.bindings]
        numbered = [pair for bindings in ends for pair in bindings.values()]
        if len(ends) > 1:
            numbered.sort(key=itemgetter(0))
        return [binding for _, binding in numbered]


def _reach(branch: _Branch, at: int, places: _Places) -> None:
    """Add a position. If ``#`` comes next, also add the position after it, and so on: ``#`` may match no word."""
    while (branch, at) not in places:
        places[branch, at] = None
        if at < len(branch.words):
            if branch.words[at] != "#":
                break
            at += 1
        else:
            found = branch.next.get("#")
            if found is None:
                break
            branch, at = found, 1


class HeadersExchange(Exchange):
    """Routes by headers: a message must have all, or any, of the binding's headers.

    If a header of the binding has no value, the message's header only has to exist.
    """

    type = ExchangeType.HEADERS
    needs_headers = True
    _MATCHES = ("all", "any", "all-with-x", "any-with-x")

    def __init__(self, name: str, **keywords: Any) -> None:
        super().__init__(name, **keywords)
        # For each binding: whether one matching header is enough, and the headers.
        self._wanted: dict[Binding, tuple[bool, tuple[tuple[str, object], ...]]] = {}

    def bind(self, binding: Binding) -> None:
        how = binding.arguments.get("x-match", "all")
        if how not in self._MATCHES:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"x-match={how!r}: it must be one of {', '.join(self._MATCHES)}"
            )
        super().bind(binding)

    def _added(self, binding: Binding) -> None:
        how = str(binding.arguments.get("x-match", "all"))
        wanted = tuple(
            (name, value)
            for name, value in binding.arguments.items()
            if name != "x-match" and (how.endswith("with-x") or not name.startswith("x-"))
        )
        self._wanted[binding] = how.startswith("any"), wanted

    def _removed(self, binding: Binding) -> None:
        del self._wanted[binding]

    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return [binding for binding, wanted in self._wanted.items() if _matches(headers, *wanted)]


def _matches(headers: Headers, is_any: bool, wanted: Iterable[tuple[str, object]]) -> bool:
    for name, value in wanted:
        if (name in headers and (value is None or _is_equal(headers[name], value))) is is_any:
            return is_any
    return not is_any


def _is_equal(value: Any, wanted: Any) -> bool:
    # As in RabbitMQ 4, 1, 1.0 and true differ, also inside of tables and arrays. In Python, they are equal.
    if value != wanted:
        return False
    if isinstance(value, dict):
        return all(_is_equal(value[key], wanted[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_equal, value, wanted))
    return not isinstance(wanted, Number) or type(value) is type(wanted)


_KINDS: dict[ExchangeType, type[Exchange]] = {
    kind.type: kind for kind in (DirectExchange, FanoutExchange, TopicExchange, HeadersExchange)
}


def make_exchange(name: str, kind: str, **settings: Any) -> Exchange:
    """Create an exchange of a type that a client requested. `settings` are arguments of `Exchange`.

    Raises:
        ConnectionException: 503 if the type does not exist.
    """
    try:
        exchange_type = ExchangeType(kind)
    except ValueError:
        allowed = ", ".join(member.value for member in ExchangeType)
        raise ConnectionException(
            ReplyCode.COMMAND_INVALID, f"exchange '{name}' of unknown type '{kind}'; known are {allowed}"
        ) from None
    return _KINDS[exchange_type](name, **settings)
