"""What a relay asks of a database, whichever it is."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from qflow_client.errors import QflowError

__all__ = ["LOOK", "PAGE_BYTES", "Aside", "RelayError", "Row", "Session", "silence_of", "wait_readable"]

#: Seconds between two looks of a relay at which partitions are due to it.
LOOK = 1.0
#: A page of rows ends with the one whose body reaches so many bytes.
PAGE_BYTES = 1 << 24


class RelayError(QflowError):
    """A relay cannot work with what it was given."""


class Row(NamedTuple):
    """A message in the outbox."""

    id: int
    partition: int
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


#: A row that the broker will not take, and why.
Aside = tuple[int, str]


class Session(Protocol):
    """A session with a database. `postgresql` says what each method promises."""

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
    """Return the seconds without a word of a relay after which the server ends its session.

    The rest of the lease is for another relay to see that, and to publish.
    """
    return max(lease / 2, lease - 2 * LOOK)


def wait_readable(descriptors: Iterable[int], timeout: float) -> set[int]:
    """Wait until one of some descriptors can be read, and return those that can.

    Args:
        descriptors: of any number, where `select.select` takes those below 1024 only.
        timeout: seconds.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(timeout * 1000))}
