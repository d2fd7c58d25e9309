"""Exports and loads definitions of queues, exchanges and bindings (with RabbitMQ's field names), and of policies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from qflow_client.broker.core.errors import AmqpError
from qflow_client.broker.core.exchange import Exchange
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.policies.policy import Policy
from qflow_client.broker.policies.rules import PolicyRules

__all__ = [
    "BindingDefinition",
    "DefinitionError",
    "Definitions",
    "ExchangeDefinition",
    "Exported",
    "Loading",
    "QueueDefinition",
    "each_definition",
    "export_definitions",
]


class DefinitionError(ValueError):
    """The broker refuses a definition. Then no definition of the same `Definitions` has an effect.

    Attributes:
        field: place of the refused definition, such as ``"queues[3]"``.
    """

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.field = where
        #: Reason why the definition is refused.
        self.text = text


@dataclass(frozen=True, slots=True)
class QueueDefinition:
    """A queue to declare; see ``Queue.Declare``.

    Attributes:
        name: name of the queue, 1 to 255 bytes.
        vhost: name of the virtual host; ``None`` for the broker's virtual host.
        durable: whether the queue is durable.
        auto_delete: whether the queue is deleted with its last consumer.
        arguments: arguments of the declaration, such as ``{"qpid.flow_stop_count": 100}``.
    """

    name: str
    vhost: str | None = None
    durable: bool = False
    auto_delete: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeDefinition:
    """An exchange to declare; see ``Exchange.Declare``.

    Attributes:
        name: name of the exchange, 1 to 255 bytes.
        type: type of the exchange.
        vhost: name of the virtual host; ``None`` for the broker's virtual host.
        durable: whether the exchange is durable.
        auto_delete: whether the exchange is deleted with its last binding.
        internal: whether the broker refuses messages that clients publish to the exchange.
        arguments: arguments of the declaration.
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
    """A binding to add; see ``Queue.Bind``.

    Attributes:
        source: name of the exchange from which the messages come.
        destination: name of the queue or exchange to which the messages go.
        destination_type: whether the destination is a queue or an exchange.
        vhost: name of the virtual host; ``None`` for the broker's virtual host.
        routing_key: binding key.
        arguments: arguments of the binding. Only exchanges of the type ``headers`` use the arguments.
    """

    source: str
    destination: str
    destination_type: Literal["queue", "exchange"] = "queue"
    vhost: str | None = None
    routing_key: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Definitions:
    """Objects to declare in a broker, in addition to its existing objects.

    Attributes:
        exchanges: exchanges to declare.
        queues: queues to declare.
        bindings: bindings to add. A binding can name objects of the same `Definitions`, and existing objects.
        policies: policies to set. A policy replaces an existing policy with the same name.
    """

    exchanges: tuple[ExchangeDefinition, ...] = ()
    queues: tuple[QueueDefinition, ...] = ()
    bindings: tuple[BindingDefinition, ...] = ()
    policies: tuple[Policy, ...] = ()


#: The definition of an exported object that is not a policy.
Exported = ExchangeDefinition | QueueDefinition | BindingDefinition


def export_definitions(host: VirtualHost, rules: PolicyRules) -> Definitions:
    """Return all queues, exchanges, bindings and policies, without exclusive queues and predeclared exchanges."""
    found = tuple(each_definition(host))
    return Definitions(
        tuple(each for each in found if isinstance(each, ExchangeDefinition)),
        tuple(each for each in found if isinstance(each, QueueDefinition)),
        tuple(each for each in found if isinstance(each, BindingDefinition)),
        tuple(rules.policies),
    )


def each_definition(host: VirtualHost) -> Iterator[Exported]:
    """Yield exchanges, queues and bindings. The virtual host can change while the caller iterates.

    Bindings come last, and only if their destinations were yielded or are predeclared, so a new broker can load them.
    """
    vhost = host.settings.virtual_host
    exchanges = dict.fromkeys(host.topology.exchanges.values())
    queues = {queue: None for queue in host.queues.values() if queue.exclusive_owner is None}
    for each in exchanges:
        if each.name and not each.name.startswith("amq."):
            yield ExchangeDefinition(
                each.name, each.type.value, vhost, each.durable, each.auto_delete, each.internal, dict(each.arguments)
            )
    for queue in queues:
        yield QueueDefinition(queue.name, vhost, queue.durable, queue.auto_delete, dict(queue.arguments))
    for source in exchanges:
        for binding in tuple(source.bindings.values()):
            destination = binding.destination
            is_queue = isinstance(destination, Queue)
            if destination in (queues if is_queue else exchanges):
                yield BindingDefinition(
                    source.name,
                    destination.name,
                    "queue" if is_queue else "exchange",
                    vhost,
                    binding.routing_key,
                    dict(binding.arguments),
                )


class Loading:
    """Loads all objects of a `Definitions`, or none. An object that exists with the same settings is not changed.

    Loading can take several iterations of the event loop. If a definition is refused, the objects that were declared
    earlier are deleted again. Until then, clients can use these objects.
    """

    def __init__(self, host: VirtualHost, rules: PolicyRules, definitions: Definitions) -> None:
        self._host = host
        self._rules = rules
        self._definitions = definitions
        # Functions that delete the objects declared so far, in the order of declaration.
        self._undo: list[Callable[[], object]] = []

    def steps(self) -> Generator[None, None, None]:
        """Declare all objects. Yield after each object, and after each step of `PolicyRules.set_policy_in_steps`.

        Raises:
            DefinitionError: a definition is refused. The error contains the place of the definition and the reason.
        """
        host, policies = self._host, tuple(self._rules.policies)
        try:
            for where, what in _each(self._definitions):
                try:
                    if not isinstance(what, Policy) and what.vhost not in (None, host.settings.virtual_host):
                        raise ValueError(f"the only virtual host is {host.settings.virtual_host!r}, not {what.vhost!r}")
                    yield from self._load(what)
                except (AmqpError, ValueError) as error:
                    raise DefinitionError(where, str(error)) from error
                yield
        except DefinitionError:
            yield from self._take_back(policies)
            raise
        except BaseException:
            for _ in self._take_back(policies):
                pass
            raise

    def _take_back(self, policies: tuple[Policy, ...]) -> Iterator[None]:
        """Delete the objects declared so far, and then restore the earlier policies, in steps."""
        while self._undo:
            self._undo.pop()()
            yield
        if tuple(self._rules.policies) != policies:
            yield from self._rules.replace_policies_in_steps(policies, self._host)

    def _load(self, what: _Definition) -> Iterator[None]:
        host = self._host
        match what:
            case QueueDefinition():
                is_there = what.name in host.queues
                queue = host.declare_queue(
                    check_name(what.name),
                    durable=what.durable,
                    auto_delete=what.auto_delete,
                    arguments=what.arguments,
                )
                if not is_there:
                    self._undo.append(lambda: self._delete_queue(queue))
            case ExchangeDefinition():
                is_there = what.name in host.topology.exchanges
                exchange = host.topology.declare_exchange(
                    check_name(what.name),
                    what.type,
                    durable=what.durable,
                    auto_delete=what.auto_delete,
                    internal=what.internal,
                    arguments=what.arguments,
                )
                if not is_there:
                    self._undo.append(lambda: self._delete_exchange(exchange))
            case Policy():
                yield from self._rules.set_policy_in_steps(what, host)
            case BindingDefinition():
                named = host.queue if what.destination_type == "queue" else host.topology.bindable_exchange
                destination = named(what.destination)
                source = host.topology.bindable_exchange(what.source)
                count = len(source.bindings)
                host.topology.bind(destination, what.source, check_name(what.routing_key, empty=True), what.arguments)
                if len(source.bindings) > count:
                    self._undo.append(lambda: self._unbind(source, destination, what))

    def _delete_queue(self, queue: Queue) -> None:
        if not queue.is_deleted:
            self._host.delete_queue(queue)

    def _delete_exchange(self, exchange: Exchange) -> None:
        if self._host.topology.exchanges.get(exchange.name) is exchange:
            self._host.topology.delete_exchange(exchange.name)

    def _unbind(self, source: Exchange, destination: Queue | Exchange, binding: BindingDefinition) -> None:
        """Remove a binding. Keep the source exchange, even if it is auto-delete and has no other binding."""
        auto_delete, source.auto_delete = source.auto_delete, False
        self._host.topology.unbind(destination, source.name, binding.routing_key, binding.arguments)
        source.auto_delete = auto_delete


_Definition = Exported | Policy


def _each(definitions: Definitions) -> Iterator[tuple[str, _Definition]]:
    yield from ((f"exchanges[{number}]", each) for number, each in enumerate(definitions.exchanges))
    yield from ((f"queues[{number}]", each) for number, each in enumerate(definitions.queues))
    yield from ((f"bindings[{number}]", each) for number, each in enumerate(definitions.bindings))
    yield from ((f"queue_policies[{number}]", each) for number, each in enumerate(definitions.policies))


def check_name(name: str, *, empty: bool = False) -> str:
    """Return the name if AMQP can encode it.

    Raises:
        ValueError: the name is longer than 255 bytes, or is empty and `empty` is False.
    """
    if not name and not empty:
        raise ValueError("a name must not be empty")
    if len(name.encode()) > 255:
        raise ValueError(f"a name has at most 255 bytes in UTF-8, not {len(name.encode())}")
    return name
