"""What changes in a broker, as server-sent events.

All streams share one `Watch`, which looks at the broker when a stream asks and the last look is old enough, in turns
with everything else. Every object has the number of the look that found it changed, and the newest changes stand last.
So a stream costs what has changed since its previous event, and idle objects cost one comparison in each look. Looks
take at most `Watch.SHARE` of the time, however many objects there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from qflow_client.broker.broker import Broker
from qflow_client.broker.core.snapshots import ChannelSnapshot
from qflow_client.broker.http.documents import encoded
from qflow_client.broker.http.turns import Turns

__all__ = ["EventsRequest", "Watch"]

# Seconds without an event after which a comment says that the connection lives.
_KEEP_ALIVE = 15.0
# Bytes of an event that are written at once.
_PIECE = 64 * 1024

# All of a channel that is a change when it is another, which the time that passes is not.
_channel_key: Callable[[ChannelSnapshot], tuple[object, ...]] = attrgetter(
    *(field.name for field in fields(ChannelSnapshot) if field.name != "flowed_seconds")
)


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """What a listener asks for.

    Attributes:
        period: seconds between two looks at the broker.
    """

    period: float


class _Seen:
    """An object, or everything of one kind, as it was when it was last found changed.

    Attributes:
        value: the snapshot, or snapshots; ``None`` if it is gone.
        look: the number of the look that found it so.
    """

    __slots__ = ("_json", "look", "value")

    def __init__(self, value: Any, look: int) -> None:
        self.value = value
        self.look = look
        self._json = b""

    @property
    def json(self) -> bytes:
        """Made once, however many streams there are."""
        if not self._json:
            self._json = encoded(self.value)
        return self._json


class Watch:
    """What a broker has, and which look found it changed.

    Args:
        broker: what is looked at.
        turns: those of the server.
    """

    #: The part of the time that looks may take.
    SHARE = 0.05

    def __init__(self, broker: Broker, turns: Turns) -> None:
        self._broker = broker
        self._turns = turns
        self._lock = asyncio.Lock()
        # The number of the last look, the broker's version then, and when there may be another.
        self._look = 0
        self._version = -1
        self._next_at = 0.0
        # By kind and name, in the order of their changes.
        self._named: dict[str, dict[str, _Seen]] = {"queues": {}, "channels": {}, "connections": {}}
        self._whole: dict[str, _Seen] = {}
        # The kinds and names of what is gone and stays in `_named` until every stream was told.
        self._gone: list[tuple[str, str]] = []
        # The look that each stream knows, by a key of its own.
        self._known: dict[object, int] = {}

    async def events(self, period: float, is_gone: Callable[[], bool] = bool) -> AsyncGenerator[bytes, None]:
        """What is to be sent to one listener, in pieces, until the listener is gone.

        A slow listener misses steps between two states, and no state that lasts.

        Args:
            period: seconds between two looks.
            is_gone: whether the listener has left; asked after each pause.
        """
        key, loop = object(), asyncio.get_running_loop()
        self._known[key] = 0
        try:
            await self._refresh()
            words = self._state()
            kind = b"state"
            while True:
                self._known[key] = self._look
                async for piece in self._pieces(kind, words):
                    yield piece
                said, kind = loop.time(), b"change"
                while not (words := self._changes(self._known[key])):
                    await asyncio.sleep(period)
                    if is_gone():
                        return
                    if loop.time() - said >= _KEEP_ALIVE:
                        yield b": still here\n\n"
                        said = loop.time()
                    await self._refresh()
        finally:
            del self._known[key]
            if not self._known:
                self._forget()

    def _forget(self) -> None:
        """There is no stream left: keep nothing."""
        self._look, self._version = 0, -1
        self._gone.clear()
        self._whole.clear()
        for named in self._named.values():
            named.clear()

    # Looking.

    async def _refresh(self) -> None:
        """Look again, if anything has happened and the last look is long enough ago."""
        async with self._lock:
            began = time.monotonic()
            version = self._broker.version
            if version == self._version or (self._look and began < self._next_at):
                return
            look = self._look + 1
            await self._look_at("queues", self._broker.each_queue(), look)
            await self._look_at("channels", self._broker.each_channel(), look)
            await self._look_at("connections", self._broker.each_connection(), look)
            for kind, things in (
                ("exchanges", self._broker.each_exchange()),
                ("bindings", self._broker.each_binding()),
            ):
                self._look_at_all(kind, [each async for each in self._turns.each(things)], look)
            self._look_at_all("producersStopped", self._broker.producers_stopped, look)
            self._forget_gone()
            self._look, self._version = look, version
            end = time.monotonic()
            self._next_at = end + (end - began) / self.SHARE

    async def _look_at(self, kind: str, things: Iterable[Any], look: int) -> None:
        named, found = self._named[kind], set()
        async for each in self._turns.each(things):
            found.add(each.name)
            old = named.get(each.name)
            if old is None or old.value is None or _differ(each, old.value):
                named.pop(each.name, None)
                named[each.name] = _Seen(each, look)
        if len(found) < len(named):
            for name in [name for name, seen in named.items() if name not in found and seen.value is not None]:
                del named[name]
                named[name] = _Seen(None, look)
                self._gone.append((kind, name))

    def _look_at_all(self, kind: str, value: Any, look: int) -> None:
        old = self._whole.get(kind)
        if old is None or old.value != value:
            self._whole[kind] = _Seen(value, look)

    def _forget_gone(self) -> None:
        """Forget what is gone and what every stream was told of."""
        oldest, kept = min(self._known.values(), default=self._look), []
        for kind, name in self._gone:
            seen = self._named[kind].get(name)
            if seen is not None and seen.value is None:
                if seen.look > oldest:
                    kept.append((kind, name))
                else:
                    del self._named[kind][name]
        self._gone = kept

    # Telling.

    def _state(self) -> list[tuple[str, list[_Seen] | _Seen]]:
        """Everything, by kind."""
        told: list[tuple[str, list[_Seen] | _Seen]] = []
        for kind, named in self._named.items():
            told.append((kind, [seen for seen in named.values() if seen.value is not None]))
        return [*told, *self._whole.items()]

    def _changes(self, known: int) -> list[tuple[str, list[_Seen] | _Seen]]:
        """What has changed since a look, by kind; empty if nothing has."""
        told: list[tuple[str, list[_Seen] | _Seen]] = []
        gone: dict[str, list[str]] = {}
        for kind, named in self._named.items():
            changed = []
            for name, seen in reversed(named.items()):
                if seen.look <= known:
                    break
                if seen.value is None:
                    gone.setdefault(kind, []).append(name)
                else:
                    changed.append(seen)
            if changed:
                told.append((kind, changed[::-1]))
        told += [(kind, seen) for kind, seen in self._whole.items() if seen.look > known]
        return [*told, ("gone", _Seen(gone, known))] if gone else told

    async def _pieces(self, kind: bytes, told: list[tuple[str, list[_Seen] | _Seen]]) -> AsyncIterator[bytes]:
        """An event, in pieces of a size that a socket takes at once."""
        waiting, size = [b"event: %s\ndata: {" % kind], 0
        async for word in self._turns.each(_words(told)):
            waiting.append(word)
            size += len(word)
            if size >= _PIECE:
                yield b"".join(waiting)
                waiting, size = [], 0
        yield b"".join((*waiting, b"}\n\n"))


def _words(told: list[tuple[str, list[_Seen] | _Seen]]) -> Iterator[bytes]:
    """The JSON of kinds and what there is of each, object by object."""
    comma = b""
    for kind, seen in told:
        yield comma + encoded(kind) + b":"
        comma = b","
        if isinstance(seen, _Seen):
            if not isinstance(seen.value, list):
                yield seen.json
                continue
            objects = (encoded(each) for each in seen.value)
        else:
            objects = (each.json for each in seen)
        yield b"["
        for number, json in enumerate(objects):
            yield b"," + json if number else json
        yield b"]"


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, ChannelSnapshot):
        return _channel_key(one) != _channel_key(other)
    return bool(one != other)
