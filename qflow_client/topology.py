"""The queues, exchanges and bindings that a producer declares before it publishes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from qflow_client.amqp.fields import encode_table
from qflow_client.errors import SettingsError
from qflow_client.redaction import shown

__all__ = ["Binding", "Declaration", "Exchange", "Queue", "Topology"]

# ``PRECONDITION_FAILED``: the object exists with other properties.
_EXISTS_OTHERWISE = 406
# The broker's reply codes for a declaration that it will never accept: 403 access refused, 404 not found, 406 other
# properties, 503 command invalid (such as an unknown type of exchange), 530 not allowed.
_FINAL = (403, 404, 406, 503, 530)


class Declaration(NamedTuple):
    """One AMQP method that declares an object.

    Attributes:
        what: type and name of the declared object, for error texts.
        method: name of the method in pika and aiormq.
        arguments: arguments of the method.
        if_missing: whether an existing object is accepted, whatever its properties are.
    """

    what: str
    method: str
    arguments: dict[str, Any]
    if_missing: bool = False

    def refusal(self, words: str) -> str:
        return f"{self.what} cannot be declared: {words}; change the declaration, or delete what exists"

    def accepts(self, code: int) -> bool:
        """Return True if the reply code means that the object exists, and `if_missing` accepts existing objects."""
        return self.if_missing and code == _EXISTS_OTHERWISE

    @staticmethod
    def is_final(code: int) -> bool:
        """Return True if a broker that refuses a declaration with this reply code would refuse each further try."""
        return code in _FINAL


def _check_name(kind: str, name: object, *, is_empty_allowed: bool = False) -> None:
    if not isinstance(name, str) or not (name or is_empty_allowed) or len(name.encode("utf-8", "replace")) > 255:
        least = "" if is_empty_allowed else ", not empty"
        raise SettingsError(f"{kind}={shown(name)}: it must be a str of at most 255 bytes{least}")


def _frozen(what: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise SettingsError(f"{what}: arguments={shown(arguments)}: they must be a mapping of str")
    name = f"{what}: arguments"
    try:
        encode_table(arguments, name)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from None
    return MappingProxyType(_plain(name, arguments))


def _plain(name: str, value: Any) -> Any:
    """Copy an argument, because the application may change it later. Reject types that pika or aiormq cannot send."""
    if isinstance(value, Mapping):
        return {key: _plain(f"{name}[{key!r}]", each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{index}]", each) for index, each in enumerate(value)]
    if isinstance(value, (float, bytes, bytearray, memoryview)):
        raise SettingsError(f"{name} is {shown(value)}, of {type(value)}; in a declaration, send an int or a str")
    return value


class _Declared:
    """Defines how to pickle declared objects, because a `mappingproxy` cannot be pickled."""

    __slots__ = ()

    arguments: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        given = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # a dataclass
        return type(self), tuple((given | {"arguments": dict(self.arguments)}).values())


@dataclass(frozen=True, slots=True)
class Queue(_Declared):
    """A queue (AMQP 0-9-1, ``Queue.Declare``).

    Attributes:
        name: name of the queue.
        durable: whether the queue survives a restart of the broker.
        exclusive: whether only the producer's connection may use the queue, which is deleted with the connection.
        auto_delete: whether the broker deletes the queue when its last consumer is cancelled or disconnects.
        arguments: further arguments of the declaration, such as ``{"x-queue-type": "quorum"}``.
        if_missing: whether an existing queue with this name is accepted, whatever its properties are.

    Raises:
        SettingsError: a value is not allowed.
    """

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    if_missing: bool = False

    def __post_init__(self) -> None:
        _check_name("Queue.name", self.name)
        object.__setattr__(self, "arguments", _frozen(f"Queue({self.name!r})", self.arguments))

    def _declaration(self) -> Declaration:
        return Declaration(
            f"queue {self.name!r}",
            "queue_declare",
            {
                "queue": self.name,
                "durable": self.durable,
                "exclusive": self.exclusive,
                "auto_delete": self.auto_delete,
                "arguments": dict(self.arguments),
            },
            self.if_missing,
        )


@dataclass(frozen=True, slots=True)
class Exchange(_Declared):
    """An exchange (AMQP 0-9-1, ``Exchange.Declare``).

    Attributes:
        name: name of the exchange.
        type: ``"direct"``, ``"fanout"``, ``"topic"``, ``"headers"``, or a type of a plugin.
        durable: whether the exchange survives a restart of the broker.
        auto_delete: whether the broker deletes the exchange when its last binding is removed.
        internal: whether only other exchanges may publish to the exchange.
        arguments: further arguments of the declaration, such as ``{"alternate-exchange": "unrouted"}``.

    Raises:
        SettingsError: a value is not allowed.
    """

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name("Exchange.name", self.name)
        _check_name("Exchange.type", self.type)
        object.__setattr__(self, "arguments", _frozen(f"Exchange({self.name!r})", self.arguments))

    def _declaration(self) -> Declaration:
        return Declaration(
            f"exchange {self.name!r}",
            "exchange_declare",
            {
                "exchange": self.name,
                "exchange_type": self.type,
                "durable": self.durable,
                "auto_delete": self.auto_delete,
                "internal": self.internal,
                "arguments": dict(self.arguments),
            },
        )


@dataclass(frozen=True, slots=True)
class Binding(_Declared):
    """A binding of a queue or an exchange to an exchange (AMQP 0-9-1, ``Queue.Bind``).

    Attributes:
        exchange: exchange from which the messages come.
        queue: queue that receives the messages.
        routing_key: the routing key of the binding.
        arguments: further arguments of the binding, such as those for a headers exchange.
        to_exchange: exchange that receives the messages, instead of `queue` (``Exchange.Bind`` of RabbitMQ).

    Raises:
        SettingsError: a value is not allowed.
    """

    exchange: str
    queue: str = ""
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    to_exchange: str = ""

    def __post_init__(self) -> None:
        _check_name("Binding.exchange", self.exchange)
        _check_name("Binding.routing_key", self.routing_key, is_empty_allowed=True)
        if bool(self.queue) == bool(self.to_exchange):
            raise SettingsError(f"{self!r}: give queue, or to_exchange")
        to = self.queue or self.to_exchange
        _check_name("Binding.queue", to)
        object.__setattr__(self, "arguments", _frozen(f"Binding({self.exchange!r}, {to!r})", self.arguments))

    def _declaration(self) -> Declaration:
        more = {"routing_key": self.routing_key, "arguments": dict(self.arguments)}
        if self.queue:
            what = f"binding of queue {self.queue!r} to exchange {self.exchange!r}"
            return Declaration(what, "queue_bind", {"queue": self.queue, "exchange": self.exchange, **more})
        what = f"binding of exchange {self.to_exchange!r} to exchange {self.exchange!r}"
        return Declaration(what, "exchange_bind", {"destination": self.to_exchange, "source": self.exchange, **more})


@dataclass(frozen=True, slots=True)
class Topology:
    """Queues, exchanges and bindings that a producer declares each time before it opens its publishing channel.

    Example::

        Topology(
            queues=[Queue("orders", arguments={"x-queue-type": "quorum"})],
            exchanges=[Exchange("events", "topic")],
            bindings=[Binding("events", "orders", "order.*")],
        )

    Attributes:
        queues: the queues. A string is the name of a durable queue, which is declared if it does not exist.
        exchanges: the exchanges.
        bindings: the bindings, which are declared last.

    Raises:
        SettingsError: an element has the wrong type.
    """

    queues: Iterable[Queue | str] = ()
    exchanges: Iterable[Exchange] = ()
    bindings: Iterable[Binding] = ()

    def __post_init__(self) -> None:
        queues = tuple(
            Queue(each, if_missing=True) if isinstance(each, str) else each for each in _elements(self.queues)
        )
        for name, found, kind in (
            ("queues", queues, Queue),
            ("exchanges", tuple(_elements(self.exchanges)), Exchange),
            ("bindings", tuple(_elements(self.bindings)), Binding),
        ):
            for each in found:
                if not isinstance(each, kind):
                    raise SettingsError(f"{name}: {shown(each)} is not a {kind.__name__}")
            object.__setattr__(self, name, found)

    @classmethod
    def of(cls, declare: Topology | Queue | str | None) -> Topology | None:
        """Return the topology for the argument ``declare`` of a producer. A string is the name of a queue.

        Raises:
            SettingsError: the argument has the wrong type.
        """
        if declare is None or isinstance(declare, Topology):
            return declare
        if isinstance(declare, (str, Queue)):
            return cls(queues=[declare])
        raise SettingsError(f"declare={shown(declare)}: it must be a Topology, a Queue, or the name of a queue")

    def declarations(self) -> Iterator[Declaration]:
        """Return the declarations in the order in which a producer sends them."""
        for each in (*self.exchanges, *self.queues, *self.bindings):
            yield each._declaration()  # type: ignore[union-attr]  # `__post_init__` has replaced names


def _elements(given: Iterable[Any]) -> Iterable[Any]:
    # A string would be an iterable of its letters.
    return (given,) if isinstance(given, str) else given
