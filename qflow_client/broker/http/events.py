"""Streams the changes of a broker as server-sent events.

All streams share one `Watch`, which checks the broker. A check compares each object with the object's last snapshot,
and runs in slices between other work (see `Turns`). Checks are numbered. A stream that looks for changes starts a new
check, if the broker has changed and the last check is old enough. `Watch` sorts queues, channels and connections by the
number of the check that found their last change. So a stream reads only objects that have changed since the stream's
previous event. The checks use at most `Watch.SHARE` of the time.
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

# If a stream has no event for this number of seconds, it sends a comment. So the client sees that the stream is alive.
_KEEP_ALIVE = 15.0
# A large event is written in pieces of about this number of bytes.
_PIECE = 64 * 1024

# Returns the values of a channel that a check compares: all except `flowed_seconds`, which can grow between checks.
_channel_key: Callable[[ChannelSnapshot], tuple[object, ...]] = attrgetter(
    *(field.name for field in fields(ChannelSnapshot) if field.name != "flowed_seconds")
)


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """A client's request for events. `Watch.events` describes `period`."""

    period: float


class _Seen:
    """The state of one object after its last change, or of all objects of one kind, such as all bindings.

    Attributes:
        value: a snapshot, a list of snapshots, or the value of ``producersStopped``; ``None`` for a deleted object.
        look: number of the check that found the last change.
    """

    __slots__ = ("_json", "look", "value")

    def __init__(self, value: Any, look: int) -> None:
        self.value = value
        self.look = look
        self._json = b""

    @property
    def json(self) -> bytes:
        """The value as JSON, encoded once for all streams."""
        if not self._json:
            self._json = encoded(self.value)
        return self._json


class Watch:
    """Checks the objects of a broker, and stores for each object the number of the check that found its last change."""

    #: Maximum fraction of the time that checks use.
    SHARE = 0.05

    def __init__(self, broker: Broker, turns: Turns) -> None:
        self._broker = broker
        self._turns = turns
        self._lock = asyncio.Lock()
        # Number of the last complete check; 0 if there was none.
        self._look = 0
        # `Broker.version` when the last check started. If the version is still the same, the broker has not changed.
        self._version = -1
        # Earliest time of the next check.
        self._next_at = 0.0
        # The objects that a check compares one by one, by kind and name, in the order of `_Seen.look`.
        self._named: dict[str, dict[str, _Seen]] = {"queues": {}, "channels": {}, "connections": {}}
        # The values that a check compares as a whole, such as the list of all bindings, by kind.
        self._whole: dict[str, _Seen] = {}
        # Kinds and names of deleted objects, which stay in `_named` until every stream has reported the deletion.
        self._gone: list[tuple[str, str]] = []
        # For each open stream, the number of the last check whose changes the stream has reported.
        self._known: dict[object, int] = {}

    async def events(self, period: float, is_gone: Callable[[], bool] = bool) -> AsyncGenerator[bytes, None]:
        """Yield the bytes for one client, in pieces, until the client disconnects.

        If an object changes several times between two events, the client gets only the last state.

        Args:
            period: seconds that the stream waits before it looks for changes again.
            is_gone: function that returns True if the client has disconnected. It is called after each sleep.
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
                    refresh_at = loop.time() + period
                    while (left := refresh_at - loop.time()) > 0:
                        await asyncio.sleep(min(left, said + _KEEP_ALIVE - loop.time()))
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
        self._look, self._version = 0, -1
        self._gone.clear()
        self._whole.clear()
        for named in self._named.values():
            named.clear()

    # Checking.

    async def _refresh(self) -> None:
        """Do a new check, if the broker has changed since the last check and the last check is old enough."""
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
        """Forget deleted objects that every stream has reported."""
        oldest, kept = min(self._known.values(), default=self._look), []
        for kind, name in self._gone:
            seen = self._named[kind].get(name)
            if seen is not None and seen.value is None:
                if seen.look > oldest:
                    kept.append((kind, name))
                else:
                    del self._named[kind][name]
        self._gone = kept

    # Reporting.

    def _state(self) -> list[tuple[str, list[_Seen] | _Seen]]:
        told: list[tuple[str, list[_Seen] | _Seen]] = []
        for kind, named in self._named.items():
            told.append((kind, [seen for seen in named.values() if seen.value is not None]))
        return [*told, *self._whole.items()]

    def _changes(self, known: int) -> list[tuple[str, list[_Seen] | _Seen]]:
        """Return, for each kind, the objects for which a check after number `known` has found a change."""
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
        """Yield an event in pieces that are small enough for one write to a socket."""
        waiting, size = [b"event: %s\ndata: {" % kind], 0
        async for word in self._turns.each(_words(told)):
            waiting.append(word)
            size += len(word)
            if size >= _PIECE:
                yield b"".join(waiting)
                waiting, size = [], 0
        yield b"".join((*waiting, b"}\n\n"))


def _words(told: list[tuple[str, list[_Seen] | _Seen]]) -> Iterator[bytes]:
    """Yield the JSON members of an event: the name of each kind, and then its objects one by one."""
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
