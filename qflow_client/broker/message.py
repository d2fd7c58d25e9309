"""A message as the broker keeps it, and where it was published to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pamqp.commands

from qflow_client.broker.wire import HAS_EXPIRATION, decode_properties, is_persistent, short, time_to_live

if TYPE_CHECKING:
    from qflow_client.broker.journal import Record
    from qflow_client.broker.queue import Queue

__all__ = ["StoredMessage", "Target"]


class Target:
    """What a ``Basic.Publish`` method asks for; one object for all publishes that ask for the same."""

    __slots__ = ("exchange", "immediate", "mandatory", "names", "queues", "routing_key", "version", "watched")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool = False, immediate: bool = False) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.mandatory = mandatory
        self.immediate = immediate
        # The exchange and the routing key as short strings.
        self.names = short(exchange) + short(routing_key)
        # The destination queues, for the topology of `version`; None if they depend on the message's headers.
        self.queues: tuple[Queue, ...] | None = ()
        # The virtual host's version that `queues` is right for.
        self.version = -1
        # Whether any destination has marks or a maximum.
        self.watched = False


class StoredMessage:
    """A message: shared by all queues that hold it, never changed.

    Args:
        target: where it was published to.
        header: the payload of its content header frame, as it came.
        body: the content.
    """

    __slots__ = ("body", "header", "left", "record", "size", "target")

    #: The queues that have dead-lettered a copy of it, each with the exchange and the routing key. All copies share the
    #: set. Only there if a queue has.
    left: set[tuple[str, str, str]]

    def __init__(self, target: Target, header: bytes, body: bytes) -> None:
        self.target = target
        self.header = header
        # None while it is on disk only.
        self.body: bytes | None = body
        # Body bytes, which is what thresholds and maxima are about.
        self.size = len(body)
        # What the journal knows of it; None if there is no journal, or no queue has it.
        self.record: Record | None = None

    @property
    def is_persistent(self) -> bool:
        """Whether it is to survive the broker, in queues that do."""
        return is_persistent(self.header)

    @property
    def ttl(self) -> int | None:
        """Milliseconds that it may wait in a queue; ``None`` for ever."""
        return time_to_live(self.header) if self.header[12] & HAS_EXPIRATION else None

    @property
    def properties(self) -> pamqp.commands.Basic.Properties:
        """The basic properties, decoded on every use."""
        return decode_properties(self.header)
