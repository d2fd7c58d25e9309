"""What a producer sends: a body and the AMQP basic properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Any

__all__ = ["DeliveryMode", "Message"]


class DeliveryMode(IntEnum):
    """AMQP 0-9-1's delivery modes."""

    TRANSIENT = 1
    PERSISTENT = 2


#: Properties that AMQP carries as a short string: UTF-8, at most 255 bytes.
_SHORT_STRINGS = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Message:
    """A body and its basic properties, by their AMQP names (AMQP 0-9-1, section 1.8.1).

    Attributes:
        body: the content; a ``str`` is encoded as UTF-8.
        content_type: MIME type.
        content_encoding: MIME content encoding.
        headers: a field table; what pamqp can encode.
        delivery_mode: 2, persistent, unless told otherwise.
        priority: 0 to 9 by the standard; brokers take up to 255.
        correlation_id: of the request that this answers.
        reply_to: the queue for answers.
        expiration: milliseconds after which the broker may drop it, as a string of digits.
        message_id: if ``None``, the producer gives one.
        timestamp: seconds since 1970, or a ``datetime`` (a naive one is local time).
        type: the application's name for the kind of message.
        user_id: the broker refuses any but the connection's own user.
        app_id: the application that publishes.
        cluster_id: deprecated by the standard, carried all the same.

    Raises:
        TypeError: a property of the wrong type.
        ValueError: a property that AMQP cannot carry.
    """

    body: bytes
    content_type: str | None = None
    content_encoding: str | None = None
    headers: Mapping[str, Any] | None = None
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

    if TYPE_CHECKING:
        # The generated one, but for the body.
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
        ) -> None: ...

    def __post_init__(self) -> None:
        body = self.body
        if type(body) is not bytes:
            object.__setattr__(self, "body", as_body(body))
        for name in _SHORT_STRINGS:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}: {value!r}")
            # A short string of ASCII, which is nearly every one, needs no closer look.
            if len(value) > 255 or not value.isascii():
                _check_short_string(name, value)
        if self.expiration is not None and not (self.expiration.isascii() and self.expiration.isdigit()):
            raise ValueError(f"expiration must be milliseconds as a string of digits, not {self.expiration!r}")
        _check_int("delivery_mode", self.delivery_mode, 1, 2)
        _check_int("priority", self.priority, 0, 255)
        if isinstance(self.timestamp, datetime):
            _check_datetime("timestamp", self.timestamp)
        else:
            _check_int("timestamp", self.timestamp, 0, (1 << 63) - 1)
        if self.headers is not None and not isinstance(self.headers, Mapping):
            raise TypeError(f"headers must be a mapping, not {type(self.headers).__name__}")


def _check_int(name: str, value: object, lowest: int, highest: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be from {lowest} to {highest}, not {value!r}")


def _check_short_string(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} cannot be encoded as UTF-8: {error}") from error
    if size > 255:
        raise ValueError(f"{name} has {size} bytes; AMQP carries at most 255: {value[:40]!r}…")


def _check_datetime(name: str, value: datetime) -> None:
    try:
        fits = value.astimezone(UTC) >= _EPOCH
    except (OverflowError, ValueError):
        # At either end of the calendar no other time zone has it.
        fits = False
    if not fits:
        raise ValueError(f"{name} must be from 1970 to 9999, not {value!r}")


def as_body(body: object) -> bytes:
    """The bytes of anything that can be a body.

    Raises:
        TypeError: it is none of ``bytes``, ``bytearray``, ``memoryview`` and ``str``.
    """
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    raise TypeError(f"a message body must be bytes or str, not {type(body).__name__}; encode it first (json.dumps(…))")
