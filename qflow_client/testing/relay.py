"""The connections (`Relay`) of a `FaultProxy`. Each has two sockets (`End`) and two directions (`Way`) with `Rules`."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

import pamqp.base

from qflow_client.forks import close_in_children

__all__ = ["NO_RULES", "Direction", "ProxiedConnection", "Relay", "Relays", "Rules"]

_log = logging.getLogger(__name__)

# Maximum bytes that the proxy keeps for one direction before it stops reading.
_ON_THE_WAY = 1 << 18
# The maximum for a direction with a delay but no limited rate, because fewer bytes would limit its bandwidth.
_ON_A_LONG_WAY = 64 << 20
# With a limited rate, one write has at most the bytes that the rate allows in this number of seconds. If the event loop
# is late, the proxy catches up for at most the same number of seconds.
_RATE_SLICE = 0.01
# Maximum seconds that connecting to the broker may take.
_CONNECT_TIMEOUT = 30.0

_HEAD = struct.Struct(">BHI")
_METHOD = 1
# A frame header, class id and method id.
_METHOD_HEAD = struct.Struct(">BHII")
_FRAME_END = 0xCE
_FRAME_KINDS = frozenset((1, 2, 3, 8))
_GREETING = b"AMQP"
_RESET = struct.pack("ii", 1, 0)


class Direction(StrEnum):
    """The direction in which bytes are passed on."""

    TO_BROKER = "to_broker"
    TO_CLIENT = "to_client"


@dataclass(frozen=True, slots=True)
class ProxiedConnection:
    """The state of a connection at one moment.

    Attributes:
        number: number of the connection in the order of arrival, from 1.
        client: address and port of the client.
        name_at_broker: address and port of the proxy's socket to the broker; empty before the proxy has connected to
            the broker. `Broker` uses this text as the name of the connection, and RabbitMQ's name begins with it.
        bytes_to_broker: number of bytes passed on to the broker.
        bytes_to_client: number of bytes passed on to the client.
        bytes_swallowed: number of discarded bytes in both directions.
    """

    number: int
    client: str
    name_at_broker: str
    bytes_to_broker: int
    bytes_to_client: int
    bytes_swallowed: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for one direction of a connection."""

    latency: float = 0.0
    jitter: float = 0.0
    # Bytes per second; 0 for no limit.
    rate: float = 0.0
    # Minimum and maximum bytes of a write; zeros if writes are not split.
    split: tuple[int, int] = (0, 0)
    pause: float = 0.0
    # Number of bytes to collect before a write, and maximum seconds to wait for these bytes.
    merge: int = 0
    wait: float = 0.0
    stalls: bool = False
    swallows: bool = False
    # Numbers of frames and bytes after which the connection is closed; 0 for no limit.
    last_frame: int = 0
    last_byte: int = 0


NO_RULES = Rules()


class Borders:
    """Finds the boundaries of AMQP frames in a stream of bytes."""

    __slots__ = ("_head", "_left", "is_amqp")

    def __init__(self) -> None:
        # The received part of the header of the current frame.
        self._head = b""
        # Number of unprocessed bytes after the header of the current frame; 0 during the header.
        self._left = 0
        # False after bytes that are not AMQP frames.
        self.is_amqp = True

    @property
    def at_border(self) -> bool:
        return not self._left and not self._head

    def step(self, data: bytes, at: int) -> int:
        """Process `data` from index `at`. Return the index of the next frame boundary, or the length of the data."""
        if not self.is_amqp:
            return len(data)
        if not self._left:
            known = len(self._head)
            self._head += data[at : at + _HEAD.size - known]
            at += len(self._head) - known
            if len(self._head) < _HEAD.size:
                return at
            kind, _, size = _HEAD.unpack(self._head)
            if self._head.startswith(_GREETING):
                # A protocol header has eight bytes, one more than a frame header.
                self._left = 1
            elif kind in _FRAME_KINDS:
                self._left = size + 1
            else:
                self.is_amqp = False
                return len(data)
        count = min(self._left, len(data) - at)
        at += count
        self._left -= count
        if not self._left:
            if data[at - 1] == _FRAME_END or self._head.startswith(_GREETING):
                self._head = b""
            else:
                self.is_amqp = False
        return at

    def skip(self, data: bytes) -> None:
        """Process all of the data. This method is faster than `step`, and returns no boundaries."""
        at, end = 0, len(data)
        if not self.at_border:
            at = self.step(data, 0)
        unpack = _HEAD.unpack_from
        while end - at >= _HEAD.size:
            kind, _, size = unpack(data, at)
            next_at = at + _HEAD.size + size + 1
            if next_at > end or kind not in _FRAME_KINDS or data[next_at - 1] != _FRAME_END:
                break
            at = next_at
        while at < end:
            at = self.step(data, at)


class Way:
    """One direction of a connection, which passes received bytes on according to the rules."""

    def __init__(self, connection: Relay, rules: Rules) -> None:
        self.connection = connection
        self.relays = connection.relays
        self.source: End | None = None
        self.target: End | None = None
        self.rules = rules
        # True if this direction passes on no more bytes, whatever the rules are.
        self.is_dead = False
        self.passed = self.swallowed = 0
        self.borders = Borders()
        # Bytes to insert at the next frame boundary.
        self._injected: list[bytes] = []
        # Methods to remove once, each as a channel number and pamqp's index of the method.
        self._unwanted: list[tuple[int, int]] = []
        # The received part of a method frame that may have to be removed.
        self._undecided = b""
        # Received bytes with the times at which to pass them on. Empty bytes stand for the end of the stream.
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._timer: asyncio.Handle | None = None
        # Time before which nothing is passed on.
        self._not_before = 0.0
        # Numbers of further frames and bytes after which the connection is closed; None for no limit.
        self._frames_left = rules.last_frame or None
        self._bytes_left = rules.last_byte or None
        self._is_plain = rules == NO_RULES

    def set(self, **changes: Any) -> None:
        self.rules = replace(self.rules, **changes)
        self._is_plain = self.rules == NO_RULES
        if "last_frame" in changes:
            self._frames_left = self.rules.last_frame or None
        if "last_byte" in changes:
            self._bytes_left = self.rules.last_byte or None
        if self.rules.swallows and self._pieces:
            self._swallow(self._size)
            self._pieces.clear()
            self._size = 0
        self._not_before = 0.0
        self.pump()

    def _swallow(self, count: int) -> None:
        # Bytes were discarded, so the receiver could not understand later bytes of the stream.
        self.is_dead = True
        self.swallowed += count
        self.relays.changed()

    def receive(self, data: bytes) -> None:
        """Handle received bytes. Empty bytes mean the end of the stream."""
        if self.rules.swallows or self.is_dead:
            self._swallow(len(data))
            return
        if self._is_plain and not self._pieces and data and self.target is not None and not self.target.is_full:
            self._out(data)
            return
        now = self.relays.loop.time()
        due = now + self.rules.latency + (self.rules.jitter and self.rules.jitter * self.connection.random.random())
        if self._pieces:
            # These bytes must not overtake the waiting bytes.
            due = max(due, self._pieces[-1][0])
        self._pieces.append((due, data))
        self._size += len(data)
        if self._timer is None or self.rules.merge:
            self.pump()
        else:
            self.look()

    def pump(self) -> None:
        """Pass on the waiting bytes that the rules allow to be passed on now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rules = self.rules
        while self._pieces and self.target is not None and not self.target.is_full and not rules.stalls:
            now = self.relays.loop.time()
            at = max(self._pieces[0][0], self._not_before)
            if at <= now and not self._pieces[0][1]:
                self._pieces.popleft()
                self.target.end()
                continue
            if at <= now and rules.merge and self._size < rules.merge and self._pieces[-1][1]:
                at = self._pieces[0][0] + rules.wait
            if at > now:
                self._timer = self.relays.loop.call_at(at, self.pump)
                break
            data = self._take(now)
            self._out(data)
            if rules.rate or rules.pause:
                begun = max(self._not_before, now - _RATE_SLICE)
                self._not_before = begun + rules.pause + (len(data) / rules.rate if rules.rate else 0.0)
            elif rules.split[1]:
                # Continue in the next iteration of the loop, so that the reader may receive this write separately.
                self._timer = self.relays.loop.call_soon(self.pump)
                break
        self.look()

    def _take(self, now: float) -> bytes:
        """Remove and return the bytes of the next write."""
        rules, pieces = self.rules, self._pieces
        room = rules.merge or self._size
        if rules.split[1]:
            room = min(room, self.connection.random.randint(*rules.split))
        if rules.rate:
            room = min(room, max(1, int(rules.rate * _RATE_SLICE)))
        taken = []
        while room and pieces and pieces[0][0] <= now and pieces[0][1]:
            due, data = pieces.popleft()
            if len(data) > room:
                pieces.appendleft((due, data[room:]))
                data = data[:room]
            taken.append(data)
            room -= len(data)
        data = b"".join(taken)
        self._size -= len(data)
        return data

    def _out(self, data: bytes) -> None:
        if self._unwanted:
            data = self._sift(data)
        borders = self.borders
        if not self._injected and self._frames_left is None and self._bytes_left is None:
            borders.skip(data)
            self._write(data)
            return
        if self._bytes_left is not None:
            data = data[: self._bytes_left]
            self._bytes_left -= len(data)
        at = 0
        while at < len(data) and self._frames_left != 0:
            begin = at
            at = borders.step(data, at)
            self._write(data[begin:at])
            if borders.at_border:
                if self._frames_left is not None:
                    self._frames_left -= 1
                for frame in self._injected:
                    self._write(frame)
                self._injected.clear()
        if self._bytes_left == 0 or self._frames_left == 0:
            self.connection.finish()

    def _sift(self, data: bytes) -> bytes:
        """Return the data without the methods in `_unwanted`. Keep the start of a method until the rest arrives."""
        data, self._undecided = self._undecided + data, b""
        borders = copy(self.borders)
        kept = []
        at = 0
        while at < len(data):
            begin = at
            if self._unwanted and borders.at_border and data[at] == _METHOD:
                if len(data) - at < _METHOD_HEAD.size:
                    self._undecided = data[at:]
                    break
                _, channel, size, index = _METHOD_HEAD.unpack_from(data, at)
                if (channel, index) in self._unwanted:
                    at += _HEAD.size + size + 1
                    if at > len(data):
                        self._undecided = data[begin:]
                        break
                    self._unwanted.remove((channel, index))
                    continue
            at = borders.step(data, at)
            kept.append(data[begin:at])
        return b"".join(kept)

    def take_out(self, method: type[pamqp.base.Frame], channel: int) -> None:
        """Remove the next method of the given type on the given channel from the stream."""
        self._unwanted.append((channel, method.index))

    def _write(self, data: bytes) -> None:
        assert self.target is not None
        self.passed += len(data)
        self.target.write(data)
        self.relays.changed()

    def inject(self, data: bytes) -> None:
        """Insert bytes at the next frame boundary."""
        if self.borders.at_border and self.target is not None:
            self._write(data)
        else:
            self._injected.append(data)

    def look(self) -> None:
        """Start or stop reading from `source`, depending on the rules and the number of waiting bytes."""
        rules = self.rules
        most = _ON_A_LONG_WAY if rules.latency and not rules.rate else _ON_THE_WAY
        if self.source is not None:
            has_room = self._size <= most and self.target is not None and not self.target.is_full and not rules.stalls
            self.source.read(has_room or self.is_dead or rules.swallows)

    def stop(self) -> None:
        self.is_dead = True
        self._pieces.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class End(asyncio.Protocol):
    """The socket to the client, or the socket to the broker, of a connection."""

    def __init__(self, connection: Relay, incoming: Way, outgoing: Way) -> None:
        self._connection = connection
        self._incoming = incoming
        self._outgoing = outgoing
        self._transport: asyncio.Transport | None = None
        self._reads = True
        # Whether the socket accepts no more bytes now.
        self.is_full = False
        # Whether the end of the stream was written.
        self.is_ended = False
        self.address = ""
        self.name = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        close_in_children(self)
        self.address = _name(transport.get_extra_info("peername"))
        self.name = _name(transport.get_extra_info("sockname"))
        self._incoming.source = self
        self._outgoing.target = self
        self._connection.end_made(self)
        self._incoming.look()
        self._outgoing.pump()

    def data_received(self, data: bytes) -> None:
        self._incoming.receive(data)

    def eof_received(self) -> bool:
        self._incoming.receive(b"")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # If `exc` is None, the proxy has closed this socket. A direction that discards bytes passes no reset on.
        if exc is not None and not (self._incoming.rules.swallows or self._incoming.is_dead):
            self._connection.cut(reset=True)
        self._connection.end_lost(self)

    def pause_writing(self) -> None:
        self.is_full = True
        self._outgoing.look()

    def resume_writing(self) -> None:
        self.is_full = False
        self._outgoing.pump()

    def read(self, reads: bool) -> None:
        if reads != self._reads and self._transport is not None and not self._transport.is_closing():
            self._reads = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing() and data:
            self._transport.write(data)

    def end(self) -> None:
        """Send the end of the stream (FIN) to the peer. If both streams have ended, close the connection."""
        self.is_ended = True
        if self._connection.client.is_ended and self._connection.broker.is_ended:
            self._connection.finish()
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def finish(self) -> None:
        """Close the socket when all written bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    def cut(self, *, reset: bool = False) -> None:
        if self._transport is not None:
            if reset:
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def fileno(self) -> int:
        """Return the descriptor of the socket, or -1 if the socket is closed (for `close_in_children`)."""
        return -1 if self._transport is None else int(self._transport.get_extra_info("socket").fileno())


class Relays:
    """The shared state of a proxy's connections. `changed` is called after each change of a connection."""

    def __init__(self, target: tuple[str, int], seed: int, changed: Callable[[], None]) -> None:
        self.target = target
        self.seed = seed
        self.changed = changed
        #: Rules for future connections.
        self.rules = dict.fromkeys(Direction, NO_RULES)
        #: The current connections by their numbers.
        self.connections: dict[int, Relay] = {}
        #: The proxy's event loop. The proxy sets this attribute when it starts.
        self.loop: asyncio.AbstractEventLoop


class Relay:
    """A connection of a client to the proxy, and the proxy's connection to the broker for this client."""

    def __init__(self, relays: Relays, number: int) -> None:
        self.relays = relays
        self.number = number
        # Each connection has its own random generator, so that other connections do not change its random values.
        self.random = random.Random(f"{relays.seed} {number}")
        self.ways = {direction: Way(self, relays.rules[direction]) for direction in Direction}
        to_broker, to_client = self.ways[Direction.TO_BROKER], self.ways[Direction.TO_CLIENT]
        self.client = End(self, to_broker, to_client)
        self.broker = End(self, to_client, to_broker)
        self._connecting: asyncio.Task[None] | None = None
        self._open = 0
        self.lost: asyncio.Future[None] = relays.loop.create_future()

    def end_made(self, end: End) -> None:
        self._open += 1
        if end is self.client:
            self.relays.connections[self.number] = self
            # If both directions discard all bytes, no connection to the broker is needed.
            if not all(way.rules.swallows for way in self.ways.values()):
                self._connecting = self.relays.loop.create_task(self._connect())
        self.relays.changed()

    async def _connect(self) -> None:
        relays = self.relays
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await relays.loop.create_connection(lambda: self.broker, *relays.target)
        except OSError as error:
            _log.info("connection %d: the broker at %s:%d: %s", self.number, *relays.target, error)
            self.client.cut(reset=True)

    def end_lost(self, end: End) -> None:
        self._open -= 1
        if end is self.client and self._connecting is not None:
            self._connecting.cancel()
        if not self._open and not self.lost.done():
            del self.relays.connections[self.number]
            self.lost.set_result(None)
        self.relays.changed()

    def finish(self) -> None:
        """Close both ends when all written bytes are sent."""
        for way in self.ways.values():
            way.stop()
        self.client.finish()
        self.broker.finish()

    def cut(self, *, reset: bool = False) -> None:
        for way in self.ways.values():
            way.stop()
        self.client.cut(reset=reset)
        self.broker.cut(reset=reset)

    def picture(self) -> ProxiedConnection:
        return ProxiedConnection(
            self.number,
            self.client.address,
            self.broker.name,
            self.ways[Direction.TO_BROKER].passed,
            self.ways[Direction.TO_CLIENT].passed,
            sum(way.swallowed for way in self.ways.values()),
        )


def _name(address: tuple[Any, ...] | None) -> str:
    return f"{address[0]}:{address[1]}" if address else ""
