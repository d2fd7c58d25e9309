"""Exchanges and bindings, sans-I/O: `Topology` declares and deletes exchanges, and adds and removes bindings.

Durable objects are recorded in the journal. Every change increases `Router.version`, so that the queues of a cached
target are found again before its next use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qflow_client.amqp.fields import MAX_DEPTH
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import Binding, DirectExchange, Exchange, ExchangeType, make_exchange
from qflow_client.broker.core.limits import Inheritance
from qflow_client.broker.core.ports import TopologyJournal
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.quotas import Quota
from qflow_client.broker.core.routing import ALTERNATE_EXCHANGE, Router
from qflow_client.broker.core.settings import Settings
from qflow_client.broker.core.timers import Slices

__all__ = ["Topology", "check_depth", "check_owner", "check_same"]

_PREDECLARED = (
    ("amq.direct", ExchangeType.DIRECT),
    ("amq.fanout", ExchangeType.FANOUT),
    ("amq.topic", ExchangeType.TOPIC),
    ("amq.headers", ExchangeType.HEADERS),
    ("amq.match", ExchangeType.HEADERS),
)


class Topology:
    """The exchanges and bindings of the virtual host.

    Args:
        journal: records durable objects; ``None`` if nothing is written to disk.
        slices: runs the removal of the bindings to a deleted queue or exchange, a slice at a time.
        on_bindings: called after a `bind` or `unbind`, with the destination of the binding. Also called with ``None``
            if an exchange is deleted, or declared with an alternate exchange.
    """

    #: Maximum of `Router.headers_size`. At the maximum, the routing of a message takes about 25 ms.
    MAX_HEADERS_SIZE = 4 << 20

    def __init__(
        self,
        settings: Settings,
        queues: Mapping[str, Queue],
        journal: TopologyJournal | None,
        slices: Slices,
        on_bindings: Callable[[Queue | Exchange | None], None],
    ) -> None:
        self._journal = journal
        self._slices = slices
        self._on_bindings = on_bindings
        self.exchanges: dict[str, Exchange] = {"": DirectExchange("", durable=True)}
        for name, kind in _PREDECLARED:
            self.exchanges[name] = make_exchange(name, kind, durable=True)
        self.router = Router(settings, self.exchanges, queues)
        self._binding_quota = Quota("max_bindings", settings.max_bindings, "bindings", self._count_bindings)
        # For each destination, its bindings.
        self._bound: dict[Queue | Exchange, dict[Binding, None]] = {}
        # The exchanges that have an alternate exchange, by the name of the alternate exchange.
        self._with_alternate: dict[object, dict[Exchange, None]] = {}
        # Whether objects are being restored from the message store.
        self.is_recovering = False

    def _count_bindings(self) -> int:
        return sum(len(exchange.bindings) for exchange in self.exchanges.values())

    def _changed(self, destination: Queue | Exchange | None = None) -> None:
        self.router.version += 1
        self._on_bindings(destination)

    def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> Exchange:
        """Declare an exchange. If the exchange exists with the same settings, return it.

        Raises:
            ChannelException: 403 if the name is reserved. 406 if the exchange exists with other settings, or if the
                arguments are refused.
            ConnectionException: 503 if the type does not exist.
        """
        there = self.exchanges.get(name)
        if there is not None and name:
            check_same(
                f"exchange '{name}'",
                type=(kind, there.type.value),
                durable=(durable, there.durable),
                auto_delete=(auto_delete, there.auto_delete),
                internal=(internal, there.internal),
                arguments=(dict(arguments or {}), there.arguments),
            )
            return there
        if not name or name.startswith("amq."):
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED,
                f"exchange name '{name}' is reserved, because it is empty or begins with 'amq.'; choose another",
            )
        check_depth(f"exchange '{name}'", arguments or {})
        _check_exchange_arguments(name, arguments or {})
        exchange = make_exchange(
            name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
        )
        if self._journal is not None and durable and not self.is_recovering:
            self._journal.exchange(
                name, exchange.type.value, exchange.auto_delete, exchange.internal, exchange.arguments
            )
        self.exchanges[name] = exchange
        self.router.version += 1
        if ALTERNATE_EXCHANGE in exchange.arguments:
            self._with_alternate.setdefault(exchange.arguments[ALTERNATE_EXCHANGE], {})[exchange] = None
            self._on_bindings(None)
        return exchange

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange. If the exchange does not exist, nothing changes.

        Raises:
            ChannelException: 403 for a predeclared exchange. 406 if the exchange has bindings and `if_unused` is set.
        """
        if not name or name.startswith("amq."):
            raise ChannelException(ReplyCode.ACCESS_REFUSED, f"exchange '{name}' is predeclared and cannot be deleted")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and exchange.bindings:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"exchange '{name}' has {len(exchange.bindings)} bindings"
            )
        del self.exchanges[name]
        exchange.is_deleted = True
        if self._journal is not None and exchange.durable:
            self._journal.exchange_gone(name)
        for binding in exchange.bindings.values():
            self._forget(binding)
        alternate = exchange.arguments.get(ALTERNATE_EXCHANGE)
        if alternate is not None:
            same = self._with_alternate[alternate]
            del same[exchange]
            if not same:
                del self._with_alternate[alternate]
        self.unbind_everywhere(exchange)
        self._changed()

    def bind(
        self, destination: Queue | Exchange, source: str, routing_key: str, arguments: Mapping[str, object] | None
    ) -> None:
        """Bind a queue or an exchange to an exchange.

        Raises:
            ChannelException: 403 for the default exchange. 404 if the exchange does not exist. 406 if the exchange
                cannot use the arguments, or if the maximum number or size of bindings is reached.
        """
        exchange = self.bindable_exchange(source)
        check_depth(f"binding of '{destination.name}' to '{source}'", arguments or {})
        binding = Binding(exchange, destination, routing_key, dict(arguments or {}))
        if binding.key not in exchange.bindings:
            self._check_headers_size(binding)
            self._binding_quota.take(is_there=self.is_recovering)
            exchange.bind(binding)
            self._bound.setdefault(destination, {})[binding] = None
            self.router.headers_size += binding.headers_size
            if self._survives(binding):
                try:
                    self._note_binding(binding)
                except ChannelException:
                    self._remove(binding)
                    raise
        self._changed(destination)

    def _check_headers_size(self, binding: Binding) -> None:
        """Raise `ChannelException` 406 if the bindings of headers exchanges would take too long to compare."""
        size = binding.headers_size
        if size and self.router.headers_size + size > self.MAX_HEADERS_SIZE and not self.is_recovering:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"the arguments of all bindings to headers exchanges have more than {self.MAX_HEADERS_SIZE} bytes; "
                "remove some, or use a topic exchange",
            )

    def _remove(self, binding: Binding) -> None:
        binding.source.unbind(binding)
        self._forget(binding)

    def _forget(self, binding: Binding) -> None:
        bound = self._bound[binding.destination]
        del bound[binding]
        self.router.headers_size -= binding.headers_size
        if not bound:
            del self._bound[binding.destination]

    def _survives(self, binding: Binding) -> bool:
        """Whether the journal has to record a binding, because its source and destination survive a restart."""
        if self._journal is None or self.is_recovering or not binding.source.durable:
            return False
        destination = binding.destination
        return destination.number > 0 if isinstance(destination, Queue) else destination.durable

    def _note_binding(self, binding: Binding, *, gone: bool = False) -> None:
        assert self._journal is not None
        destination = binding.destination
        kind = "queue" if isinstance(destination, Queue) else "exchange"
        self._journal.binding(
            binding.source.name, kind, destination.name, binding.routing_key, dict(binding.arguments), gone=gone
        )

    def unbind(
        self,
        destination: Queue | Exchange,
        source: str,
        routing_key: str,
        arguments: Mapping[str, object] | None,
        owner: object | None = None,
    ) -> None:
        """Undo `bind`. If the binding or the source exchange does not exist, nothing changes, as in RabbitMQ.

        Args:
            source: name of the source exchange, which must not be the default exchange.
            owner: the requesting connection; ``None`` for the broker itself.

        Raises:
            ChannelException: 405 if the binding exists and its queue belongs to another connection.
        """
        exchange = self.exchanges.get(source)
        if exchange is None:
            return
        binding = exchange.bindings.get(Binding(exchange, destination, routing_key, dict(arguments or {})).key)
        if binding is None:
            return
        if isinstance(destination, Queue):
            check_owner(destination, owner)
        self._remove(binding)
        if self._survives(binding):
            self._note_binding(binding, gone=True)
        self._after_unbind(exchange)
        self._changed(destination)

    def bindable_exchange(self, name: str) -> Exchange:
        """Return an exchange that may be the source or destination of a binding.

        Raises:
            ChannelException: 403 for the default exchange. 404 if the exchange does not exist.
        """
        self.check_bindable(name)
        return self.router.exchange(name)

    @staticmethod
    def check_bindable(name: str) -> None:
        """Raise `ChannelException` 403 if a name is the empty name of the default exchange."""
        if not name:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, "the default exchange routes by queue name; its bindings cannot be changed"
            )

    def unbind_everywhere(self, destination: Queue | Exchange) -> None:
        """Remove all bindings to a deleted queue or exchange, in slices."""
        self._slices.run(self._unbind_in_steps(destination))

    def _unbind_in_steps(self, destination: Queue | Exchange) -> Iterator[None]:
        bindings = list(self._bound.get(destination, ()))
        while bindings:
            # Free one binding in each step, because freeing 200,000 bindings together would take 50 ms.
            binding = bindings.pop()
            # If the source was deleted meanwhile, the binding is already removed.
            if not binding.source.is_deleted:
                self._remove(binding)
                self._after_unbind(binding.source)
            yield

    def inheritance(self, queue: Queue) -> Inheritance:
        """Return the bindings of a queue, and all exchanges from which messages can come to it."""
        found: dict[Exchange, None] = {}
        todo: list[Queue | Exchange] = [queue]
        while todo:
            end = todo.pop()
            sources = {binding.source: None for binding in self._bound.get(end, ())}
            if isinstance(end, Exchange):
                sources.update(self._with_alternate.get(end.name, {}))
            todo += sources.keys() - found.keys()
            found.update(sources)
        bindings = [(binding.source.name, binding.routing_key) for binding in self._bound.get(queue, ())]
        return Inheritance((("", queue.name), *bindings), ("", *(exchange.name for exchange in found)))

    def _after_unbind(self, exchange: Exchange) -> None:
        if exchange.auto_delete and not exchange.bindings and exchange.name in self.exchanges:
            self.delete_exchange(exchange.name)


def check_same(what: str, **settings: tuple[object, object]) -> None:
    """Compare a declaration with the existing object. Each pair has the declared and the existing value of a setting.

    Raises:
        ChannelException: 406 if two values differ.
    """
    for name, (asked, there) in settings.items():
        if asked != there:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"{what} exists with {name}={there!r}, not {asked!r}; delete it, or declare it the same way",
            )


def check_owner(queue: Queue, owner: object | None) -> None:
    """Check that the connection `owner` may use a queue. `owner` is ``None`` for the broker itself.

    Raises:
        ChannelException: 405 if the queue belongs to another connection.
    """
    if owner is not None and queue.exclusive_owner not in (None, owner):
        raise ChannelException(ReplyCode.RESOURCE_LOCKED, f"queue '{queue.name}' is exclusive to another connection")


def _check_exchange_arguments(exchange: str, arguments: Mapping[str, object]) -> None:
    """Raise `ChannelException` 406 if the argument ``alternate-exchange`` is not a string."""
    name = arguments.get(ALTERNATE_EXCHANGE)
    if name is not None and not isinstance(name, str):
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED,
            f"exchange '{exchange}': {ALTERNATE_EXCHANGE}={name!r}: it must be a string, not {type(name).__name__}",
        )


def check_depth(what: str, arguments: Mapping[str, object]) -> None:
    """Check that arguments are not nested too deeply for AMQP tables.

    The HTTP API and the application can pass arguments of any depth. The functions that encode and show the arguments
    recurse for each level, so deep arguments could exceed Python's recursion limit.

    Raises:
        ChannelException: 406 if the arguments are nested too deeply.
    """
    level: list[object] = [arguments]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _nested_in(each)]
        if not level:
            return
    raise ChannelException(
        ReplyCode.PRECONDITION_FAILED, f"{what}: tables and arrays are nested more than {MAX_DEPTH} deep"
    )


def _nested_in(value: Any) -> list[object]:
    items = value.values() if isinstance(value, Mapping) else value
    # Check each type only once, because even a large number of items has only a few types.
    nested = tuple(kind for kind in set(map(type, items)) if issubclass(kind, (Mapping, list, tuple)))
    return [item for item in items if isinstance(item, nested)] if nested else []
