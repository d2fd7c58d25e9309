"""The numbered messages of a soak, and what a message that comes back from the queue says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from struct import Struct
from typing import NamedTuple
from zlib import crc32

__all__ = ["Copy", "body_of", "is_long", "read_copy", "whose"]

# Sender, number, and the checksum of those two and of all that follows.
_HEAD = Struct(">IQI")
_WHO = Struct(">IQ")
# Bytes that follow: short ones, and now and then one of several frames, in the middle of which a connection may end.
_SHORT, _LONG = 600, 300_000
_LONG_EVERY = 1000

_MARK = "x-qflow-republished"

_FILLING = Random(0).randbytes(_LONG)


class Copy(NamedTuple):
    """One message of the queue.

    Attributes:
        sender: who sent it; -1 if it cannot be read.
        number: the sender's number for it.
        marked: it says that it may be a second copy.
        intact: it is as it was sent.
    """

    sender: int
    number: int
    marked: bool
    intact: bool


def is_long(sender: int, number: int) -> bool:
    """Whether a message takes several frames."""
    return (sender * 31 + number) % _LONG_EVERY == _LONG_EVERY - 1


def body_of(sender: int, number: int) -> bytes:
    """The body of a message."""
    who = _WHO.pack(sender, number)
    filling = _FILLING[: _LONG if is_long(sender, number) else crc32(who) % _SHORT]
    return _HEAD.pack(sender, number, crc32(filling, crc32(who))) + filling


def whose(body: bytes) -> tuple[int, int]:
    """Sender and number of a body that has not travelled."""
    sender, number = _WHO.unpack_from(body)
    return sender, number


def read_copy(body: bytes, headers: Mapping[str, object] | None) -> Copy:
    """What a message from the queue says."""
    marked = bool((headers or {}).get(_MARK))
    if len(body) < _HEAD.size:
        return Copy(-1, 0, marked, False)
    sender, number, checksum = _HEAD.unpack_from(body)
    return Copy(sender, number, marked, checksum == crc32(body[_HEAD.size :], crc32(body[: _WHO.size])))
