"""The interface between a relay, which sends the rows of an outbox table, and its database."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from qflow_client.errors import QflowError

__all__ = ["FULL_PERIOD", "LOOK", "PAGE_BYTES", "Aside", "RelayError", "Row", "Session", "silence_of", "wait_readable"]

#: Each relay checks after this number of seconds which partitions of the outbox table belong to it.
LOOK = 1.0
#: Seconds from the start of a full sweep until another full sweep is due. A sweep in progress is completed first.
FULL_PERIOD = 60.0
#: `Session.read` stops adding rows to its result when their bodies reach this total size in bytes.
PAGE_BYTES = 1 << 24


class RelayError(QflowError):
    """A relay cannot continue, because its database or its broker has failed. After a pause, the relay starts again."""


class Row(NamedTuple):
    """One row of the outbox table: a message."""

    id: int
    partition: int
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


class Aside(NamedTuple):
    """A row to move to the table of failed rows.

    Args:
        properties: the encoded properties, with the header of a second copy if a copy of the message may have arrived.
        reply: the reason.
    """

    id: int
    properties: bytes
    reply: str


class Session(Protocol):
    """A session with a database. The methods are documented in `PostgresqlSession`."""

    is_notified: bool
    is_full: bool
    has_more: bool

    def join(self) -> None: ...
    def due(self) -> set[int]: ...
    def take(self, partitions: Iterable[int]) -> dict[int, int]: ...
    def give_up(self, doubts: Mapping[int, int]) -> None: ...
    def start_over(self) -> None: ...
    def is_full_due(self) -> bool: ...
    def read(self, limit: int, gone: Sequence[int] = ()) -> list[Row]: ...
    def delete(self, gone: Sequence[int]) -> None: ...
    def set_aside(self, rows: Sequence[Aside]) -> None: ...
    def ping(self) -> None: ...
    def say(self, holds: str) -> None: ...
    def wait(self, wake: socket.socket, timeout: float) -> bool: ...
    def close(self) -> None: ...


def silence_of(lease: float) -> float:
    """Return the seconds of inactivity after which PostgreSQL ends the session of a relay.

    In the rest of the lease, another relay takes over the partitions of this relay.
    """
    return max(lease / 2, lease - 2 * LOOK)


def wait_readable(descriptors: Iterable[int], timeout: float) -> set[int]:
    """Wait at most `timeout` seconds until a file descriptor is readable, and return the readable descriptors.

    The descriptors may be above 1023, which `select.select` would not accept.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(timeout * 1000))}
