"""Exchanges and bindings, sans-I/O: how they are declared, bound, and deleted.

What is durable is noted in the journal. Every change raises `Router.version`, because routing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qflow_client.amqp.fields import MAX_DEPTH
from qflow_client.broker.core.entries import Owner
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import Binding, DirectExchange, Exchange, ExchangeType, make_exchange
from qflow_client.broker.core.ports import TopologyJournal
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.quotas import Quota
from qflow_client.broker.core.routing import ALTERNATE_EXCHANGE, Router
from qflow_client.broker.core.settings import Settings

__all__ = ["Topology", "check_depth", "check_owner"]

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
        settings: the broker's.
        queues: all there are, by name.
        journal: notes what is durable; ``None`` if nothing is to be on disk.
        on_bindings: called when the bindings to a queue or an exchange have changed, or with ``None`` to any.
    """

    def __init__(
        self,
        settings: Settings,
        queues: Mapping[str, Queue],
        journal: TopologyJournal | None,
        on_bindings: Callable[[Queue | Exchange | None], None],
    ) -> None:
        self._journal = journal
        self._on_bindings = on_bindings
        self.exchanges: dict[str, Exchange] = {"": DirectExchange("", durable=True)}
        for name, kind in _PREDECLARED:
            self.exchanges[name] = make_exchange(
                name, kind.value, durable=True, auto_delete=False, internal=False, arguments={}
            )
        self.router = Router(settings, self.exchanges, queues)
        self._binding_quota = Quota("max_bindings", settings.max_bindings, "bindings", self._count_bindings)
        # Whether what is declared is in the message store already.
        self.is_recovering = False

    def _count_bindings(self) -> int:
        return sum(len(exchange.bindings) for exchange in self.exchanges.values())

    def _changed(self, destination: Queue | Exchange | None = None) -> None:
        self.router.version += 1
        self._on_bindings(destination)

    # Exchanges.

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
        """Make an exchange, or find one that was declared alike.

        Raises:
            ChannelException: 403; a reserved name. 406; it exists otherwise, or arguments are refused.
            ConnectionException: 503; an unknown type.
        """
        there = self.exchanges.get(name)
        if there is not None and name:
            for what, asked, is_so in (
                ("type", kind, there.type.value),
                ("durable", durable, there.durable),
                ("auto_delete", auto_delete, there.auto_delete),
                ("internal", internal, there.internal),
                ("arguments", dict(arguments or {}), there.arguments),
            ):
                if asked != is_so:
                    raise ChannelException(
                        ReplyCode.PRECONDITION_FAILED,
                        f"exchange '{name}' exists with {what}={is_so!r}, not {asked!r}; delete it or declare it alike",
                    )
            return there
        if not name or name.startswith("amq."):
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED,
                f"exchange name '{name}' is the default exchange's or begins with 'amq.', which is reserved",
            )
        check_depth(f"exchange '{name}'", arguments or {})
        _check_exchange_arguments(name, arguments or {})
        exchange = make_exchange(
            name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments or {}
        )
        if self._journal is not None and durable and not self.is_recovering:
            self._journal.exchange(
                name, exchange.type.value, exchange.auto_delete, exchange.internal, exchange.arguments
            )
        self.exchanges[name] = exchange
        self.router.version += 1
        return exchange

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange; one that does not exist is no error.

        Raises:
            ChannelException: 403; a predeclared one. 406; it has bindings, and `if_unused`.
        """
        if not name or name.startswith("amq."):
            raise ChannelException(ReplyCode.ACCESS_REFUSED, f"exchange '{name}' is predeclared and stays")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and exchange.bindings:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"exchange '{name}' has {len(exchange.bindings)} bindings"
            )
        del self.exchanges[name]
        if self._journal is not None and exchange.durable:
            self._journal.exchange_gone(name)
        self.unbind_everywhere(exchange)
        self._changed()

    # Bindings.

    def bind(
        self, destination: Queue | Exchange, source: str, routing_key: str, arguments: Mapping[str, object] | None
    ) -> None:
        """Bind a queue or an exchange to an exchange.

        Raises:
            ChannelException: 403; the default exchange. 404; no such exchange. 406; arguments it cannot use, or there
                are as many bindings as there may be.
        """
        exchange = self.bindable_exchange(source)
        check_depth(f"binding of '{destination.name}' to '{source}'", arguments or {})
        binding = Binding(destination, routing_key, dict(arguments or {}))
        if binding.key not in exchange.bindings:
            self._binding_quota.take(is_there=self.is_recovering)
            exchange.bind(binding)
            if self._survives(exchange, binding):
                try:
                    self._note_binding(exchange, binding)
                except ChannelException:
                    exchange.unbind(binding)
                    raise
        self._changed(destination)

    def _survives(self, exchange: Exchange, binding: Binding) -> bool:
        """Whether a binding is to survive the broker: both of its ends do."""
        if self._journal is None or self.is_recovering or not exchange.durable:
            return False
        destination = binding.destination
        return destination.number > 0 if isinstance(destination, Queue) else destination.durable

    def _note_binding(self, exchange: Exchange, binding: Binding, *, gone: bool = False) -> None:
        assert self._journal is not None
        destination = binding.destination
        kind = "queue" if isinstance(destination, Queue) else "exchange"
        self._journal.binding(
            exchange.name, kind, destination.name, binding.routing_key, dict(binding.arguments), gone=gone
        )

    def unbind(
        self,
        destination: Queue | Exchange,
        source: str,
        routing_key: str,
        arguments: Mapping[str, object] | None,
        owner: Owner | None = None,
    ) -> None:
        """Undo `bind`. A binding, or a source exchange, that does not exist is no error, as in RabbitMQ.

        Args:
            destination: the queue or the exchange.
            source: the name of the exchange, which is not the default exchange.
            routing_key: the binding key.
            arguments: as in `bind`.
            owner: the connection that asks; ``None`` for the broker itself.

        Raises:
            ChannelException: 405; the queue is bound so, and belongs to another connection.
        """
        exchange = self.exchanges.get(source)
        binding = Binding(destination, routing_key, dict(arguments or {}))
        if exchange is None or binding.key not in exchange.bindings:
            return
        if isinstance(destination, Queue):
            check_owner(destination, owner)
        exchange.unbind(binding)
        if self._survives(exchange, binding):
            self._note_binding(exchange, binding, gone=True)
        self._after_unbind(exchange)
        self._changed()

    def bindable_exchange(self, name: str) -> Exchange:
        """An exchange that may be bound, or bound to.

        Raises:
            ChannelException: 403; the default exchange. 404; there is none.
        """
        self.check_bindable(name)
        return self.router.exchange(name)

    @staticmethod
    def check_bindable(name: str) -> None:
        """Check that a name is not the default exchange's.

        Raises:
            ChannelException: 403; it is.
        """
        if not name:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, "the default exchange routes by queue name; it has no bindings to change"
            )

    def unbind_everywhere(self, destination: Queue | Exchange) -> None:
        """Remove all bindings to a queue or an exchange that is deleted."""
        for exchange in tuple(self.exchanges.values()):
            if exchange.unbind_all(destination):
                self._after_unbind(exchange)

    def _after_unbind(self, exchange: Exchange) -> None:
        if exchange.auto_delete and not exchange.bindings and exchange.name in self.exchanges:
            self.delete_exchange(exchange.name)


def check_owner(queue: Queue, owner: Owner | None) -> None:
    """Check that a connection may use a queue.

    Args:
        queue: which.
        owner: the connection that asks; ``None`` for the broker itself.

    Raises:
        ChannelException: 405; the queue belongs to another connection.
    """
    if owner is not None and queue.exclusive_owner not in (None, owner):
        raise ChannelException(ReplyCode.RESOURCE_LOCKED, f"queue '{queue.name}' is exclusive to another connection")


def _check_exchange_arguments(exchange: str, arguments: Mapping[str, object]) -> None:
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


def check_depth(what: str, arguments: Mapping[str, object]) -> None:
    """Check that arguments are nested no deeper than a table that comes over AMQP.

    The HTTP API and this process can give any. Functions that encode and show them recurse for each level.

    Raises:
        ChannelException: 406; they are.
    """
    level: list[object] = [arguments]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _nested_in(each)]
        if not level:
            return
    raise ChannelException(
        ReplyCode.PRECONDITION_FAILED, f"{what}: more than {MAX_DEPTH} tables and arrays lie in one another"
    )


def _nested_in(value: Any) -> list[object]:
    """The tables and arrays in a table or an array."""
    items = value.values() if isinstance(value, Mapping) else value
    # Very many items have few types.
    nested = tuple(kind for kind in set(map(type, items)) if issubclass(kind, (Mapping, list, tuple)))
    return [item for item in items if isinstance(item, nested)] if nested else []
