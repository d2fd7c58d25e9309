"""Exchanges, sans-I/O: which bindings a message matches, and the target of a publish.

Two bindings with the same destination, key and arguments are one. A headers exchange needs the headers of each message;
the destinations of every other kind depend on the routing key only, so a `Target` can remember them.

A direct exchange finds bindings by their key, a topic exchange in a tree of the words of their keys, so what a message
costs does not grow with the bindings that it does not match (E7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from qflow_client.broker.core.entries import Address
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.queue import Queue

__all__ = ["MANY_QUEUES", "Binding", "DirectExchange", "Exchange", "ExchangeType", "Target", "make_exchange"]

Headers = Mapping[str, object]

#: A message that goes to more queues takes long.
MANY_QUEUES = 500


class Target(Address):
    """What a ``Basic.Publish`` method asks for; one object for all publishes that ask for the same."""

    __slots__ = ("queues", "version", "watched")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool = False, immediate: bool = False) -> None:
        super().__init__(exchange, routing_key, mandatory=mandatory, immediate=immediate)
        # The destination queues, for the topology of `version`; None if they depend on the message's headers.
        self.queues: tuple[Queue, ...] | None = ()
        # The virtual host's version that `queues` is right for.
        self.version = -1
        # Whether any destination has marks or a maximum, or there are very many.
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
        #: The exchanges that are bound to it, by binding.
        self.next_exchanges: dict[object, Exchange] = {}

    @property
    def needs_headers(self) -> bool:
        """Whether its routing depends on more than the routing key."""
        return False

    def bind(self, binding: Binding) -> None:
        """Add a binding; one that is there already changes nothing.

        Raises:
            ChannelException: 406; arguments that this kind of exchange cannot use.
        """
        if binding.key not in self.bindings:
            self.bindings[binding.key] = binding
            if isinstance(binding.destination, Exchange):
                self.next_exchanges[binding.key] = binding.destination
            self._added(binding)

    def unbind(self, binding: Binding) -> bool:
        """Remove the binding that is the same as this one.

        Returns:
            True if there was one.
        """
        removed = self.bindings.pop(binding.key, None)
        if removed is None:
            return False
        self.next_exchanges.pop(binding.key, None)
        self._removed(removed)
        return True

    def unbind_all(self, destination: Queue | Exchange) -> bool:
        """Remove all bindings to a destination.

        Returns:
            True if there were any.
        """
        gone = [binding for binding in self.bindings.values() if binding.destination is destination]
        for binding in gone:
            self.unbind(binding)
        return bool(gone)

    def _added(self, binding: Binding) -> None:  # noqa: B027  # most kinds need none
        """Take note of a new binding."""

    def _removed(self, binding: Binding) -> None:  # noqa: B027  # most kinds need none
        """Forget a binding."""

    @abstractmethod
    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        """The bindings by which a message goes on."""

    def destinations(self, routing_key: str, headers: Headers) -> Iterator[Queue | Exchange]:
        """Where a message goes; a destination may come more than once."""
        for binding in self.matching(routing_key, headers):
            yield binding.destination


class DirectExchange(Exchange):
    """The routing key is the binding key."""

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
    """Every message goes everywhere."""

    type = ExchangeType.FANOUT

    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return self.bindings.values()


class _Branch:
    """A branch of the tree of a topic exchange. Branches part where binding keys differ, so there are few of them.

    Args:
        words: of the binding keys, from where the branch parts from the one before.
    """

    __slots__ = ("bindings", "next", "words")

    def __init__(self, words: list[str]) -> None:
        self.words = words
        # The branches that begin at its end, by their first word.
        self.next: dict[str, _Branch] = {}
        # The bindings whose keys end at its end, with their numbers.
        self.bindings: dict[object, tuple[int, Binding]] = {}

    def add(self, words: list[str]) -> _Branch:
        """The branch at whose end these further words end."""
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
        """Part it after so many words, and return the first part."""
        first = _Branch(self.words[:at])
        self.words = self.words[at:]
        first.next[self.words[0]] = self
        return first

    def path(self, words: list[str]) -> list[_Branch]:
        """The branches along these words."""
        path = [self]
        while words:
            path.append(path[-1].next[words[0]])
            words = words[len(path[-1].words) :]
        return path

    def join(self) -> None:
        """Make one of it and the branch at its end, if nothing else is there."""
        if not self.bindings and len(self.next) == 1:
            (last,) = self.next.values()
            self.words += last.words
            self.next, self.bindings = last.next, last.bindings


def _words(key: str) -> list[str]:
    return key.split(".") if key else []


# A place in the tree: a branch, and how many of its words are passed.
_Places = dict[tuple[_Branch, int], None]


class TopicExchange(Exchange):
    """Words separated by dots; in a binding key ``*`` is one word, ``#`` any number."""

    type = ExchangeType.TOPIC

    def __init__(self, name: str, **keywords: Any) -> None:
        super().__init__(name, **keywords)
        self._root = _Branch([])
        # Bindings that were made so far; they match in the order in which they were made.
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
        for word in _words(routing_key):
            before, places = places, {}
            for branch, at in before:
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
        numbered = sorted((number, binding) for bindings in ends for number, binding in bindings.values())
        return [binding for _, binding in numbered]


def _reach(branch: _Branch, at: int, places: _Places) -> None:
    """Add a place, and those behind it to which a ``#`` leads that stands for no word."""
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

    def matching(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return [binding for binding in self.bindings.values() if self._matches(binding, headers)]

    def _matches(self, binding: Binding, headers: Headers) -> bool:
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
