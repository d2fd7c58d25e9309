"""The numbered messages of a soak test, and reading them back from the queue."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from qflow_client.message import REPUBLISHED

__all__ = ["Copy", "body_of", "is_long", "read_copy", "whose"]

# The first part of a body: sender, number, and a checksum of both and of the rest of the body.
_HEAD = Struct(">IQI")
_WHO = Struct(">IQ")
# Maximum bytes of the rest of a short body, and bytes of the rest of a long body. Long bodies have several frames, so
# that a connection can end between two of them.
_SHORT, _LONG = 600, 300_000
_LONG_EVERY = 1000

_FILLING = Random(0).randbytes(_LONG)


class Copy(NamedTuple):
    """One message of the queue.

    Attributes:
        sender: number of the sender; -1 if it cannot be read.
        marked: whether the message has the header of a possible second copy.
        intact: whether the body is unchanged.
    """

    sender: int
    number: int
    marked: bool
    intact: bool


def is_long(sender: int, number: int) -> bool:
    """Whether a message has several frames."""
    return (sender * 31 + number) % _LONG_EVERY == _LONG_EVERY - 1


def body_of(sender: int, number: int) -> bytes:
    who = _WHO.pack(sender, number)
    filling = _FILLING[: _LONG if is_long(sender, number) else crc32(who) % _SHORT]
    return _HEAD.pack(sender, number, crc32(filling, crc32(who))) + filling


def whose(body: bytes) -> tuple[int, int]:
    """Return sender and number of a body that was not sent through the broker."""
    sender, number = _WHO.unpack_from(body)
    return sender, number


def read_copy(body: bytes, headers: Mapping[str, object] | None) -> Copy:
    """Read a message from the queue."""
    marked = bool((headers or {}).get(REPUBLISHED))
    if len(body) < _HEAD.size:
        return Copy(-1, 0, marked, False)
    sender, number, checksum = _HEAD.unpack_from(body)
    return Copy(sender, number, marked, checksum == crc32(body[_HEAD.size :], crc32(body[: _WHO.size])))
