"""What changes in a broker, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from pydantic_core import to_json

from qflow_client.broker.broker import Broker
from qflow_client.broker.core.snapshots import ChannelSnapshot

__all__ = ["EventStream", "encode"]

# How many of a list are put into words in one turn of the loop, on which the broker runs too.
_AT_ONCE = 100
# Seconds without an event after which a comment says that the connection lives.
_KEEP_ALIVE = 15.0

# All of a channel that is a change when it is another, which the time that passes is not.
_channel_key: Callable[[ChannelSnapshot], tuple[object, ...]] = attrgetter(
    *(field.name for field in fields(ChannelSnapshot) if field.name != "flowed_seconds")
)


async def encode(value: Any) -> bytes:
    """A value as JSON; snapshots by what they tell of themselves."""
    if isinstance(value, dict):
        parts = [to_json(name) + b":" + await encode(item) for name, item in value.items()]
        return b"{" + b",".join(parts) + b"}"
    if not isinstance(value, (list, tuple)):
        return _encoded(value)
    encoded = []
    for number, item in enumerate(value):
        if number % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        encoded.append(_encoded(item))
    return b"[" + b",".join(encoded) + b"]"


def _encoded(value: Any) -> bytes:
    told = value.to_json() if hasattr(value, "to_json") else value
    # JSON has no infinity and no "not a number"; clients may have put them into tables.
    return to_json(told, by_alias=True, inf_nan_mode="null")


class _Picture:
    """A broker at one moment."""

    def __init__(self, broker: Broker) -> None:
        self.named: dict[str, dict[str, Any]] = {
            "queues": _by_name(broker.queues()),
            "channels": _by_name(broker.channels()),
            "connections": _by_name(broker.connections()),
        }
        self.whole: dict[str, Any] = {
            "exchanges": broker.exchanges(),
            "bindings": broker.bindings(),
            "producersStopped": broker.producers_stopped,
        }

    def state(self) -> dict[str, Any]:
        """Everything."""
        return {kind: tuple(named.values()) for kind, named in self.named.items()} | self.whole

    def changes(self, before: _Picture) -> dict[str, Any]:
        """What is not as it was; empty if there is nothing."""
        told: dict[str, Any] = {}
        gone: dict[str, Any] = {}
        for kind, named in self.named.items():
            old = before.named[kind]
            changed = [each for name, each in named.items() if name not in old or _differ(each, old[name])]
            if changed:
                told[kind] = changed
            missing = [name for name in old if name not in named]
            if missing:
                gone[kind] = missing
        told |= {kind: value for kind, value in self.whole.items() if value != before.whole[kind]}
        return told | {"gone": gone} if gone else told


def _by_name(snapshots: Iterable[Any]) -> dict[str, Any]:
    return {each.name: each for each in snapshots}


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, ChannelSnapshot):
        return _channel_key(one) != _channel_key(other)
    return bool(one != other)


class EventStream:
    """The events for one listener.

    Args:
        broker: what is looked at.
        period: seconds between two looks.
    """

    def __init__(self, broker: Broker, period: float) -> None:
        self._broker = broker
        self._period = period

    async def events(self) -> AsyncIterator[bytes]:
        """Without end, what is to be sent. A slow listener misses steps between two states, and no state that lasts."""
        loop = asyncio.get_running_loop()
        version, picture = self._broker.version, _Picture(self._broker)
        yield _event("state", await encode(picture.state()))
        said = loop.time()
        while True:
            await asyncio.sleep(self._period)
            if self._broker.version != version:
                version, before, picture = self._broker.version, picture, _Picture(self._broker)
                changes = picture.changes(before)
                if changes:
                    yield _event("change", await encode(changes))
                    said = loop.time()
            if loop.time() - said >= _KEEP_ALIVE:
                yield b": still here\n\n"
                said = loop.time()


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
