"""Messages, which have a body and the AMQP basic properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from struct import error as struct_error
from typing import Any, NamedTuple, NoReturn

from qflow_client.amqp.fields import MAX_DEPTH, encode_short_string, encode_timestamp
from qflow_client.amqp.frames import FrameError, decode_properties
from qflow_client.position import Position
from qflow_client.redaction import shown

__all__ = [
    "REPUBLISHED",
    "DeliveryMode",
    "Message",
    "RoutedMessage",
    "as_body",
    "copy_position",
    "decode_message",
    "give_back",
    "position_of",
    "republished",
    "with_position",
]

#: Name of the header of a message that is sent again although an earlier copy may have arrived.
REPUBLISHED = "x-qflow-republished"


class DeliveryMode(IntEnum):
    """The delivery modes of AMQP 0-9-1."""

    TRANSIENT = 1
    PERSISTENT = 2


def _refuse_change(*_: object, **__: object) -> NoReturn:
    raise TypeError(
        "a message's headers cannot be changed; change a copy.deepcopy() of them, and make another message with it"
    )


class _Table(dict[str, Any]):
    __slots__ = ()

    __setitem__ = __delitem__ = __ior__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy (`copy.copy`, `copy.deepcopy`, pickle) of this table is a plain dict, which the program may change.
        return dict, (dict(self),)


class _Array(list[Any]):
    __slots__ = ()

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse_change

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


# Types whose values are immutable, and so need not be copied.
_IMMUTABLE = frozenset((str, int, bool, float, bytes, datetime, type(None)))


class _Headers:
    """The attribute `headers` of a message. Each access creates a read-only table.

    The message keeps a plain `dict`, because before Python 3.14 the garbage collector skips dicts without containers.
    """

    def __get__(self, message: Message | None, kind: type[Message]) -> Mapping[str, Any] | None:
        own = None if message is None else message.__dict__.get("headers")
        return None if own is None else _Table(own)

    def __set__(self, message: Message, headers: Mapping[str, Any] | None) -> None:
        # If an application derives a dataclass from `Message`, the generated constructor calls this method.
        if headers is not None:
            message.__dict__["headers"] = _own_headers(headers)


def _own_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of headers with immutable values (E3)."""
    if not isinstance(headers, (dict, Mapping)):
        raise TypeError(f"headers must be a mapping, not {type(headers).__name__}")
    try:
        own = dict(headers)
        for value in own.values():
            if type(value) not in _IMMUTABLE:
                return {key: _own(each, 1) for key, each in own.items()}
    except RuntimeError as error:
        raise ValueError(f"headers cannot be copied: {error}") from error
    return own


def _own(value: Any, depth: int) -> Any:
    """Return an immutable copy of a value. `depth` counts the tables and arrays around the value."""
    if type(value) in _IMMUTABLE:
        return value
    if depth > MAX_DEPTH:
        raise ValueError(
            f"headers are nested more than {MAX_DEPTH} tables and lists deep; a value that contains itself cannot be "
            "sent"
        )
    if isinstance(value, Mapping):
        return _Table({key: _own(each, depth + 1) for key, each in value.items()})
    if isinstance(value, list):
        return _Array([_own(each, depth + 1) for each in value])
    if isinstance(value, tuple):
        return tuple(_own(each, depth + 1) for each in value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return value


@dataclass(frozen=True, init=False)
class Message:
    """A body and the basic properties, under their names in AMQP 0-9-1 (section 1.8.1).

    Attributes:
        body: the content. A ``str`` is encoded as UTF-8.
        content_type: MIME type.
        content_encoding: MIME content encoding.
        headers: field table. Keys have at most 255 bytes. Values are ``str``, ``bool``, ``int`` of 64 bits, ``float``,
            ``Decimal`` of 32 bits, bytes, ``datetime`` (naive for local time) or ``None``. Lists, tuples and mappings
            of these are allowed too. The message keeps an immutable copy, so a program may reuse its table.
        delivery_mode: delivery mode. The default is 2, persistent.
        priority: priority. The AMQP standard allows 0 to 9. Brokers accept values up to 255.
        correlation_id: id of the request that this message answers.
        reply_to: queue for answers.
        expiration: milliseconds after which the broker may drop the message, as a string of digits.
        message_id: message id. If a message has no id, the producer assigns one (setting ``message_ids``).
        timestamp: seconds since 1970, or a ``datetime`` (local time if it is naive).
        type: kind of the message, as a name that the application chooses.
        user_id: user name. RabbitMQ accepts only the user of the connection.
        app_id: name of the publishing application.
        cluster_id: cluster id, which is deprecated in the standard, but is still sent.

    Raises:
        TypeError: a property has the wrong type.
        ValueError: AMQP cannot represent a property.
    """

    body: bytes
    content_type: str | None = None
    content_encoding: str | None = None
    headers: Mapping[str, Any] | None = _Headers()  # type: ignore[assignment]  # a descriptor that returns this type
    delivery_mode: int | None = DeliveryMode.PERSISTENT
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | datetime | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None

    def __init__(
        self,
        body: bytes | bytearray | memoryview | str,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: Mapping[str, Any] | None = None,
        delivery_mode: int | None = DeliveryMode.PERSISTENT,
        priority: int | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        expiration: str | None = None,
        message_id: str | None = None,
        timestamp: int | datetime | None = None,
        type: str | None = None,
        user_id: str | None = None,
        app_id: str | None = None,
        cluster_id: str | None = None,
    ) -> None:
        # The generated constructor of a frozen dataclass calls a function for each property, which takes five times as
        # long. This constructor stores only the given properties, in the order in which AMQP encodes them. Other
        # properties are read from the class, which has the defaults.
        given = self.__dict__
        given["body"] = body
        if content_type is not None:
            given["content_type"] = content_type
        if content_encoding is not None:
            given["content_encoding"] = content_encoding
        if headers is not None:
            given["headers"] = _own_headers(headers)
        given["delivery_mode"] = delivery_mode
        if priority is not None:
            given["priority"] = priority
        if correlation_id is not None:
            given["correlation_id"] = correlation_id
        if reply_to is not None:
            given["reply_to"] = reply_to
        if expiration is not None:
            given["expiration"] = expiration
        if message_id is not None:
            given["message_id"] = message_id
        if timestamp is not None:
            given["timestamp"] = timestamp
        if type is not None:
            given["type"] = type
        if user_id is not None:
            given["user_id"] = user_id
        if app_id is not None:
            given["app_id"] = app_id
        if cluster_id is not None:
            given["cluster_id"] = cluster_id
        self.__post_init__()

    def __post_init__(self) -> None:
        given = self.__dict__
        if type(self.body) is not bytes:
            given["body"] = as_body(self.body)
        for name, value in given.items():
            check = _CHECKS.get(name)
            if check is not None and value is not None:
                check(value, name)

    def _second_copy(self) -> Message:
        return replace(self, headers={**(self.headers or {}), REPUBLISHED: True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        headers = state.get("headers")
        if headers is not None:
            # The headers of a copied or unpickled message are mutable, so make an immutable copy.
            self.__dict__["headers"] = _own_headers(headers)


@dataclass(frozen=True, init=False, eq=False)
class RoutedMessage(Message):
    """A message with the exchange and the routing key to which ``producer.send(message)`` sends it.

    `Receipt.message` and `UndeliveredMessages` return routed messages, which can be sent again. The arguments
    ``exchange=`` and ``routing_key=`` of `send` have precedence. A comparison ignores the exchange and the routing key.

    Args:
        body: as for `Message`.
        exchange: the exchange; ``""`` is the default exchange.
        routing_key: the routing key.
        properties: as for `Message`.

    Raises:
        TypeError: a property, the exchange or the routing key has the wrong type.
        ValueError: AMQP cannot represent a property, the exchange or the routing key.
    """

    exchange: str = ""
    routing_key: str = ""

    def __init__(
        self,
        body: bytes | bytearray | memoryview | str,
        *,
        exchange: str = "",
        routing_key: str = "",
        **properties: Any,
    ) -> None:
        super().__init__(body, **properties)
        encode_short_string(exchange, "exchange")
        encode_short_string(routing_key, "routing_key")
        # Store both in `__dict__`, like the properties. The encoder ignores all names that are not properties.
        given = self.__dict__
        given["exchange"] = exchange
        given["routing_key"] = routing_key

    @classmethod
    def copy_of(cls, message: Message, exchange: str, routing_key: str) -> RoutedMessage:
        """Return a copy of a message with an exchange and a routing key."""
        made = object.__new__(cls)
        given = made.__dict__
        given.update((name, value) for name, value in message.__dict__.items() if name in _FIELDS)
        given["exchange"] = exchange
        given["routing_key"] = routing_key
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    __hash__ = Message.__hash__


_FIELDS = tuple(Message.__dataclass_fields__)

# The name of the attribute for a message's position. The encoder ignores names that are not properties.
_STORED_WITH = "_stored_with"


class _StoredWith(NamedTuple):
    """The value of the attribute `_STORED_WITH` of a message with a position (E13)."""

    position: Position
    #: The payload that the application has passed.
    given: bytes | Message


def with_position(payload: bytes | Message, position: Position) -> Message:
    """Return a copy of a message, with a position that the outbox stores in the same commit as the message."""
    if isinstance(payload, Message):
        made = object.__new__(Message)
        made.__dict__.update((name, value) for name, value in payload.__dict__.items() if name in _FIELDS)
    else:
        made = Message(payload)
    made.__dict__[_STORED_WITH] = _StoredWith(position, payload)
    return made


def position_of(payload: bytes | Message) -> Position | None:
    """Return the position that `with_position` has added to a message; ``None`` if there is none."""
    if type(payload) is bytes:
        return None
    stored_with = payload.__dict__.get(_STORED_WITH)
    return stored_with.position if isinstance(stored_with, _StoredWith) else None


def copy_position(source: bytes | Message, target: Message) -> None:
    """Copy the position of `source` to `target`, if `source` has a position."""
    if position_of(source) is not None:
        target.__dict__[_STORED_WITH] = source.__dict__[_STORED_WITH]


def give_back(error: BaseException) -> None:
    """If `with_position` made the `message` of an error, replace it by the message or body of the application."""
    message = getattr(error, "message", None)
    if isinstance(message, Message) and position_of(message) is not None:
        error.message = message.__dict__[_STORED_WITH].given  # type: ignore[attr-defined]  # `getattr` has found the attribute


def _check_int(lowest: int, highest: int) -> Callable[[Any, str], object]:
    def check(value: object, name: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}: {shown(value)}")
        if not lowest <= value <= highest:
            raise ValueError(f"{name} must be from {lowest} to {highest}, not {shown(value)}")

    return check


def _check_expiration(value: str, name: str) -> None:
    encode_short_string(value, name)
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name} must be milliseconds as a string of digits, not {shown(value)}")


def _check_timestamp(value: object, name: str) -> None:
    if isinstance(value, datetime):
        encode_timestamp(value, name)
    else:
        _check_seconds(value, name)


_check_seconds = _check_int(0, (1 << 63) - 1)

# Functions that check whether AMQP can represent a property.
_CHECKS: dict[str, Callable[[Any, str], object]] = {
    "content_type": encode_short_string,
    "content_encoding": encode_short_string,
    "delivery_mode": _check_int(1, 2),
    "priority": _check_int(0, 255),
    "correlation_id": encode_short_string,
    "reply_to": encode_short_string,
    "expiration": _check_expiration,
    "message_id": encode_short_string,
    "timestamp": _check_timestamp,
    "type": encode_short_string,
    "user_id": encode_short_string,
    "app_id": encode_short_string,
    "cluster_id": encode_short_string,
}


def republished(message: Message) -> Message:
    """Return a copy of a message with the additional header ``x-qflow-republished``."""
    return message._second_copy()


def as_body(body: object) -> bytes:
    """Return a body as bytes."""
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    raise TypeError(f"a message body must be bytes or str, not {type(body).__name__}; encode it first (json.dumps(…))")


def decode_message(header: bytes, body: bytes) -> Message:
    """Create a message from the payload of its content header frame and its body.

    Raises:
        FrameError: the payload is not a content header, or its values are not allowed in a `Message`.
    """
    try:
        values = decode_properties(header)
        # Pass ``None`` if the header has no delivery mode, because the default of `Message` is persistent.
        values.setdefault("delivery_mode", None)
        return Message(body, **values)
    except (IndexError, TypeError, ValueError, struct_error) as error:
        raise FrameError(f"the content header cannot be decoded: {error}") from error
