"""Queues, exchanges, bindings and policies as a document, with the names that RabbitMQ's definitions have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from qflow_client.broker.core.errors import AmqpError
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.policies.policy import Policy
from qflow_client.broker.policies.rules import PolicyRules

__all__ = [
    "BindingDefinition",
    "DefinitionError",
    "Definitions",
    "ExchangeDefinition",
    "QueueDefinition",
    "export_definitions",
    "load_definitions",
]


class DefinitionError(ValueError):
    """A definition that the broker does not take; nothing of the document was done.

    Attributes:
        field: where it is, such as ``"queues[3]"``.
    """

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.field = where
        #: What is wrong with it.
        self.text = text


@dataclass(frozen=True, slots=True)
class QueueDefinition:
    """A queue to be; see ``Queue.Declare``.

    Attributes:
        name: 1 to 255 bytes.
        vhost: the virtual host; ``None`` for that of the broker.
        durable: as in ``Queue.Declare``.
        auto_delete: whether it goes with its last consumer.
        arguments: thresholds and the like.
    """

    name: str
    vhost: str | None = None
    durable: bool = False
    auto_delete: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeDefinition:
    """An exchange to be; see ``Exchange.Declare``.

    Attributes:
        name: 1 to 255 bytes.
        type: of the exchange.
        vhost: the virtual host; ``None`` for that of the broker.
        durable: as in ``Exchange.Declare``.
        auto_delete: whether it goes with its last binding.
        internal: whether clients may not publish to it.
        arguments: as in ``Exchange.Declare``.
    """

    name: str
    type: Literal["direct", "fanout", "topic", "headers"]
    vhost: str | None = None
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BindingDefinition:
    """A binding to be; see ``Queue.Bind``.

    Attributes:
        source: the exchange.
        destination: the queue, or the exchange.
        destination_type: which of them.
        vhost: the virtual host; ``None`` for that of the broker.
        routing_key: the binding key.
        arguments: for headers exchanges.
    """

    source: str
    destination: str
    destination_type: Literal["queue", "exchange"] = "queue"
    vhost: str | None = None
    routing_key: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Definitions:
    """What a broker is to have, beside what it has.

    Attributes:
        exchanges: exchanges.
        queues: queues.
        bindings: bindings between them, and to and from those that are there.
        policies: policies, which replace those of the same names.
    """

    exchanges: tuple[ExchangeDefinition, ...] = ()
    queues: tuple[QueueDefinition, ...] = ()
    bindings: tuple[BindingDefinition, ...] = ()
    policies: tuple[Policy, ...] = ()


def export_definitions(host: VirtualHost, rules: PolicyRules) -> Definitions:
    """What was declared, but for exclusive queues and what every broker has."""
    vhost = host.settings.virtual_host
    queues = [queue for queue in host.queues.values() if queue.exclusive_owner is None]
    exchanges = [each for each in host.exchanges.values() if each.name and not each.name.startswith("amq.")]
    return Definitions(
        tuple(
            ExchangeDefinition(
                each.name,
                each.type.value,
                vhost,
                each.durable,
                each.auto_delete,
                each.internal,
                dict(each.arguments),
            )
            for each in exchanges
        ),
        tuple(
            QueueDefinition(each.name, vhost, each.durable, each.auto_delete, dict(each.arguments)) for each in queues
        ),
        tuple(
            BindingDefinition(
                source.name,
                binding.destination.name,
                "queue" if isinstance(binding.destination, Queue) else "exchange",
                vhost,
                binding.routing_key,
                dict(binding.arguments),
            )
            for source in host.exchanges.values()
            for binding in source.bindings.values()
            if not isinstance(binding.destination, Queue) or binding.destination.exclusive_owner is None
        ),
        tuple(rules.policies),
    )


class Undo(Protocol):
    """A journal that can forget what was noted in this turn of the loop."""

    @property
    def mark(self) -> int:
        """What `take_back` goes back to."""

    def take_back(self, mark: int) -> None:
        """Forget the changes of the topology since a mark of this turn."""


def load_definitions(host: VirtualHost, rules: PolicyRules, definitions: Definitions, journal: Undo | None) -> None:
    """Declare everything, or nothing; what is there alike stays.

    Args:
        host: where.
        rules: of that virtual host.
        definitions: what.
        journal: of that virtual host; ``None`` if it has none.

    Raises:
        DefinitionError: one is refused; the text says which and why.
    """
    queues, exchanges = set(host.queues), set(host.exchanges)
    bindings = {name: dict(exchange.bindings) for name, exchange in host.exchanges.items()}
    policies = tuple(rules.policies)
    mark = journal.mark if journal is not None else 0
    try:
        for where, what in _each(definitions):
            try:
                if not isinstance(what, Policy) and what.vhost not in (None, host.settings.virtual_host):
                    raise ValueError(f"the one virtual host here is {host.settings.virtual_host!r}, not {what.vhost!r}")
                _load(host, rules, what)
            except (AmqpError, ValueError) as error:
                raise DefinitionError(where, str(error)) from error
    except DefinitionError:
        # All of this is one turn of the loop: no client has seen what is taken back.
        if journal is not None:
            journal.take_back(mark)
        for name, before in bindings.items():
            host.exchanges[name].bindings = before
        for name in set(host.queues) - queues:
            host.delete_queue(host.queues[name])
        for name in set(host.exchanges) - exchanges:
            host.delete_exchange(name)
        rules.replace_policies(policies, host)
        raise


_Definition = ExchangeDefinition | QueueDefinition | BindingDefinition | Policy


def _each(definitions: Definitions) -> Iterator[tuple[str, _Definition]]:
    yield from ((f"exchanges[{number}]", each) for number, each in enumerate(definitions.exchanges))
    yield from ((f"queues[{number}]", each) for number, each in enumerate(definitions.queues))
    yield from ((f"bindings[{number}]", each) for number, each in enumerate(definitions.bindings))
    yield from ((f"queue_policies[{number}]", each) for number, each in enumerate(definitions.policies))


def _load(host: VirtualHost, rules: PolicyRules, what: _Definition) -> None:
    match what:
        case QueueDefinition():
            host.declare_queue(
                check_name(what.name),
                durable=what.durable,
                auto_delete=what.auto_delete,
                arguments=what.arguments,
            )
        case ExchangeDefinition():
            host.declare_exchange(
                check_name(what.name),
                what.type,
                durable=what.durable,
                auto_delete=what.auto_delete,
                internal=what.internal,
                arguments=what.arguments,
            )
        case Policy():
            rules.set_policy(what, host)
        case BindingDefinition():
            named = host.queue if what.destination_type == "queue" else host.bindable_exchange
            destination = named(what.destination)
            host.bind(destination, what.source, check_name(what.routing_key, empty=True), what.arguments)


def check_name(name: str, *, empty: bool = False) -> str:
    """A name that AMQP can carry.

    Raises:
        ValueError: it is longer than 255 bytes, or empty and may not be.
    """
    if not name and not empty:
        raise ValueError("a name must not be empty")
    if len(name.encode()) > 255:
        raise ValueError(f"a name has at most 255 bytes in UTF-8, not {len(name.encode())}")
    return name
