"""A proxy that stands between clients and any broker, and does to their connections what networks do.

It passes everything on until it is told otherwise: by a method, for one connection or for all and those that come, or
by a schedule. What it draws by lot comes from a seed. Bytes are passed as they are, TLS too; of a connection in TLS it
knows no frames, so there nothing can be injected or counted by frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from copy import copy
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast
from urllib.parse import urlsplit

import pamqp.base
import pamqp.frame

from qflow_client.testing.node import free_port

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Direction", "FaultProxy", "ProxiedConnection", "Schedule"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_HOST = "127.0.0.1"
_PORTS = {"amqp": 5672, "amqps": 5671}
# So that a sender soon notices that nobody reads: bytes that the system takes for a socket that is not read.
_RECEIVE_BUFFER = 1 << 18
# Bytes on their way in one direction, beyond which nothing more is read. A way with a delay is long, not narrow.
_ON_THE_WAY = 1 << 18
_ON_A_LONG_WAY = 64 << 20
# Seconds of a limited rate that leave as one piece, and that may be made up for if the loop is late.
_SLICE = 0.01
# Seconds that the broker may take to be connected to.
_CONNECT_TIMEOUT = 30.0

_HEAD = struct.Struct(">BHI")
_METHOD = 1
# With the class and method ids.
_METHOD_HEAD = struct.Struct(">BHII")
_FRAME_END = 0xCE
_FRAME_KINDS = frozenset((1, 2, 3, 8))
_GREETING = b"AMQP"
_RESET = struct.pack("ii", 1, 0)


class Direction(StrEnum):
    """Which way bytes go."""

    TO_BROKER = "to_broker"
    TO_CLIENT = "to_client"


@dataclass(frozen=True, slots=True)
class ProxiedConnection:
    """A connection at one moment.

    Attributes:
        number: of the connection, from 1, in the order in which they came.
        client: address and port of the client.
        name_at_broker: address and port from which the broker sees it come, which is how `Broker` and RabbitMQ name
            it; empty if there is no connection to the broker.
        bytes_to_broker: that were passed on to the broker.
        bytes_to_client: that were passed on to the client.
        bytes_swallowed: that came, in either direction, and will never be passed on.
    """

    number: int
    client: str
    name_at_broker: str
    bytes_to_broker: int
    bytes_to_client: int
    bytes_swallowed: int


@dataclass(frozen=True, slots=True)
class _Rules:
    """What holds for one direction of a connection."""

    latency: float = 0.0
    jitter: float = 0.0
    # Bytes a second; 0 for no limit.
    rate: float = 0.0
    # Bytes of a write, at the least and at the most; 0 for as they come.
    split: tuple[int, int] = (0, 0)
    pause: float = 0.0
    # Bytes that are gathered before they leave, and seconds after which they leave all the same.
    merge: int = 0
    wait: float = 0.0
    stalls: bool = False
    swallows: bool = False
    # What may pass before the connection is cut; 0 for no limit.
    last_frame: int = 0
    last_byte: int = 0


_NO_RULES = _Rules()


class _Borders:
    """Follows the borders of AMQP frames in a stream, however it is cut."""

    __slots__ = ("_head", "_left", "is_amqp")

    def __init__(self) -> None:
        # What has come of a frame's head, and after it the bytes that are left of the frame.
        self._head = b""
        self._left = 0
        # False once something came that is none.
        self.is_amqp = True

    @property
    def at_border(self) -> bool:
        """Whether every frame that has begun has ended."""
        return not self._left and not self._head

    def step(self, data: bytes, at: int) -> int:
        """Go on from a position to the next border, or to the end of the data."""
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
                # A protocol header has eight bytes.
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
        """Go on to the end of the data."""
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


class _Way:
    """One direction of a connection: what it was given leaves as the rules say."""

    def __init__(self, connection: _Connection, rules: _Rules) -> None:
        self.connection = connection
        self.proxy = connection.proxy
        self.source: _End | None = None
        self.target: _End | None = None
        self.rules = rules
        # Whether nothing will leave any more, whatever the rules say.
        self.is_dead = False
        # Bytes.
        self.passed = self.swallowed = 0
        self.borders = _Borders()
        # To be put in at the next border.
        self._injected: list[bytes] = []
        # Methods to be taken out, each once, by channel and pamqp's index; and what has come of what may be one.
        self._unwanted: list[tuple[int, int]] = []
        self._undecided = b""
        # What was received, and when it is due; an empty piece is the end.
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._timer: asyncio.Handle | None = None
        # Before this nothing leaves.
        self._not_before = 0.0
        # What may still pass before the connection is cut; None for all.
        self._frames_left = rules.last_frame or None
        self._bytes_left = rules.last_byte or None
        self._is_plain = rules == _NO_RULES

    def set(self, **changes: Any) -> None:
        """Change rules."""
        self.rules = replace(self.rules, **changes)
        self._is_plain = self.rules == _NO_RULES
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
        # What follows makes no sense without it.
        self.is_dead = True
        self.swallowed += count
        self.proxy._has_changed()

    def receive(self, data: bytes) -> None:
        """Take what came; nothing is the end."""
        if self.rules.swallows or self.is_dead:
            self._swallow(len(data))
            return
        if self._is_plain and not self._pieces and data and self.target is not None and not self.target.is_full:
            self._out(data)
            return
        now = self.proxy._running.time()
        due = now + self.rules.latency + (self.rules.jitter and self.rules.jitter * self.connection.random.random())
        if self._pieces:
            # The order stays.
            due = max(due, self._pieces[-1][0])
        self._pieces.append((due, data))
        self._size += len(data)
        if self._timer is None or self.rules.merge:
            self.pump()
        else:
            self.look()

    def pump(self) -> None:
        """Let out what is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rules = self.rules
        while self._pieces and self.target is not None and not self.target.is_full and not rules.stalls:
            now = self.proxy._running.time()
            at = max(self._pieces[0][0], self._not_before)
            if at <= now and not self._pieces[0][1]:
                self._pieces.popleft()
                self.target.end()
                continue
            if at <= now and rules.merge and self._size < rules.merge and self._pieces[-1][1]:
                at = self._pieces[0][0] + rules.wait
            if at > now:
                self._timer = self.proxy._running.call_at(at, self.pump)
                break
            data = self._take(now)
            self._out(data)
            if rules.rate or rules.pause:
                begun = max(self._not_before, now - _SLICE)
                self._not_before = begun + rules.pause + (len(data) / rules.rate if rules.rate else 0.0)
            elif rules.split[1]:
                # Whoever reads gets a chance to see it alone.
                self._timer = self.proxy._running.call_soon(self.pump)
                break
        self.look()

    def _take(self, now: float) -> bytes:
        """The next bytes that leave as one piece."""
        rules, pieces = self.rules, self._pieces
        room = rules.merge or self._size
        if rules.split[1]:
            room = min(room, self.connection.random.randint(*rules.split))
        if rules.rate:
            room = min(room, max(1, int(rules.rate * _SLICE)))
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
        """Take unwanted methods out; what cannot be told yet waits for the rest of its frame."""
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
        """Have the next of these methods not pass."""
        self._unwanted.append((channel, method.index))

    def _write(self, data: bytes) -> None:
        assert self.target is not None
        self.passed += len(data)
        self.target.write(data)
        self.proxy._has_changed()

    def inject(self, data: bytes) -> None:
        """Put bytes in at the next border."""
        if self.borders.at_border and self.target is not None:
            self._write(data)
        else:
            self._injected.append(data)

    def look(self) -> None:
        """Read, or stop reading, by what is on the way."""
        rules = self.rules
        most = _ON_A_LONG_WAY if rules.latency and not rules.rate else _ON_THE_WAY
        if self.source is not None:
            has_room = self._size <= most and self.target is not None and not self.target.is_full and not rules.stalls
            self.source.read(has_room or self.is_dead or rules.swallows)

    def stop(self) -> None:
        """Nothing leaves any more."""
        self.is_dead = True
        self._pieces.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _End(asyncio.Protocol):
    """One end of a connection.

    Args:
        connection: whose.
        incoming: the way of what it receives.
        outgoing: the way of what is written to it.
    """

    def __init__(self, connection: _Connection, incoming: _Way, outgoing: _Way) -> None:
        self._connection = connection
        self._incoming = incoming
        self._outgoing = outgoing
        self._transport: asyncio.Transport | None = None
        self._reads = True
        # Whether the other side of its socket takes no more for now.
        self.is_full = False
        # Whether it was told that nothing follows.
        self.is_ended = False
        self.address = ""
        self.name = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
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
        # Without an error, it was we who closed it.
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
        """Read from its socket, or do not."""
        if reads != self._reads and self._transport is not None and not self._transport.is_closing():
            self._reads = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Write to its socket."""
        if self._transport is not None and not self._transport.is_closing() and data:
            self._transport.write(data)

    def end(self) -> None:
        """Say that nothing follows."""
        self.is_ended = True
        if self._connection.client.is_ended and self._connection.broker.is_ended:
            self._connection.finish()
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def finish(self) -> None:
        """Close it when all that was written has left."""
        if self._transport is not None:
            self._transport.close()

    def cut(self, *, reset: bool = False) -> None:
        """End it at once."""
        if self._transport is not None:
            if reset:
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()


class _Connection:
    """A client's connection, and the one to the broker that belongs to it."""

    def __init__(self, proxy: FaultProxy, number: int) -> None:
        self.proxy = proxy
        self.number = number
        # Its own, so that what other connections do changes nothing for it.
        self.random = random.Random(f"{proxy.seed} {number}")
        self.ways = {direction: _Way(self, proxy._rules[direction]) for direction in Direction}
        to_broker, to_client = self.ways[Direction.TO_BROKER], self.ways[Direction.TO_CLIENT]
        self.client = _End(self, to_broker, to_client)
        self.broker = _End(self, to_client, to_broker)
        self._connecting: asyncio.Task[None] | None = None
        self._open = 0
        self.lost: asyncio.Future[None] = proxy._running.create_future()

    def end_made(self, end: _End) -> None:
        """One of its ends is connected."""
        self._open += 1
        if end is self.client:
            self.proxy._connections[self.number] = self
            # Who is never answered needs no broker.
            if not all(way.rules.swallows for way in self.ways.values()):
                self._connecting = self.proxy._running.create_task(self._connect())
        self.proxy._has_changed()

    async def _connect(self) -> None:
        proxy = self.proxy
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await proxy._running.create_connection(lambda: self.broker, *proxy.target)
        except OSError as error:
            _log.info("connection %d: the broker at %s:%d: %s", self.number, *proxy.target, error)
            self.client.cut(reset=True)

    def end_lost(self, end: _End) -> None:
        """One of its ends is gone."""
        self._open -= 1
        if end is self.client and self._connecting is not None:
            self._connecting.cancel()
        if not self._open and not self.lost.done():
            del self.proxy._connections[self.number]
            self.lost.set_result(None)
        self.proxy._has_changed()

    def finish(self) -> None:
        """Close both ends when what was written has left."""
        for way in self.ways.values():
            way.stop()
        self.client.finish()
        self.broker.finish()

    def cut(self, *, reset: bool = False) -> None:
        """End both ends at once."""
        for way in self.ways.values():
            way.stop()
        self.client.cut(reset=reset)
        self.broker.cut(reset=reset)

    def picture(self) -> ProxiedConnection:
        """What it looks like now."""
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


class Schedule:
    """Steps that a proxy takes by itself; from `FaultProxy.schedule`."""

    def __init__(self, proxy: FaultProxy, steps: Iterable[tuple[float, Callable[[FaultProxy], object]]]) -> None:
        self._proxy = proxy
        self._steps = iter(steps)
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._done: Future[None] = Future()

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last step is taken, or it is cancelled.

        Args:
            timeout: seconds; ``None`` for ever.

        Raises:
            TimeoutError: steps are left.
            Exception: what a step raised; those after it are not taken.
        """
        self._done.result(timeout)

    def cancel(self) -> None:
        """Take no step any more."""
        self._proxy._call(self._stop)

    def _start(self) -> None:
        self._began = self._proxy._running.time()
        self._next()

    def _next(self) -> None:
        try:
            step = next(self._steps, None)
            if step is None:
                self._done.set_result(None)
                return
            at, action = step
            self._timer = self._proxy._running.call_at(self._began + at, self._take, action)
        except Exception as error:
            self._done.set_exception(error)

    def _take(self, action: Callable[[FaultProxy], object]) -> None:
        try:
            action(self._proxy)
        except Exception as error:
            _log.exception("a step of a schedule failed")
            self._done.set_exception(error)
            return
        if not self._done.done():
            self._next()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._done.done():
            self._done.set_result(None)


class FaultProxy:
    """A TCP proxy before a broker that cuts, stalls, slows, chops and lies when it is told to.

    ``with FaultProxy(broker.url) as proxy:`` runs it on a thread and an event loop of its own, on a free port of the
    loopback interface. Its methods may be called from any thread.

    Faults that last (`stall`, `black_hole`, `delay`, `limit`, `split`, `merge`, `cut_after`) hold until `heal`. With
    `connection` they hold for one; without, for all that there are and those that come. `direction` is
    ``"to_broker"``, ``"to_client"``, or ``None`` for both.

    Args:
        broker: its AMQP URL, or ``host:port``.
        port: to listen on; 0 for a free one.
        seed: of all that is drawn by lot. With the same seed, the same connection in the order of their coming is
            split and delayed alike, whatever others do.

    Raises:
        ValueError: the broker's address is none.
    """

    def __init__(self, broker: str, *, port: int = 0, seed: int = 0) -> None:
        parts = urlsplit(broker if "://" in broker else f"//{broker}")
        if not parts.hostname or (not parts.port and parts.scheme not in _PORTS):
            raise ValueError("the broker must be an AMQP URL or host:port")
        #: The broker's host and port.
        self.target = parts.hostname, parts.port or _PORTS[parts.scheme]
        #: What is drawn by lot comes from it.
        self.seed = seed
        self._parts = parts
        self._port = port
        self._rules = dict.fromkeys(Direction, _NO_RULES)
        self._connections: dict[int, _Connection] = {}
        self._accepted = 0
        # None while connections are refused.
        self._listener: socket.socket | None = None
        self._schedules: list[Schedule] = []
        # Those that were accepted and have no transport yet.
        self._greeting: set[asyncio.Task[None]] = set()
        # Its loop, for what runs on it.
        self._running: asyncio.AbstractEventLoop
        # The same for others; None while it takes no calls. Held: no call comes while it is being taken away.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="qflow-proxy", daemon=True)
        self._started: Future[None] = Future()
        self._stopping: asyncio.Event | None = None
        # Goes up whenever anything has happened, if somebody waits; guarded by the condition.
        self._version = 0
        self._changed = threading.Condition()
        self._waiting = 0

    # Starting and stopping.

    def __enter__(self) -> Self:
        if self._started.done():
            raise RuntimeError("this proxy has run already; make a new FaultProxy")
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            loop.call_soon_threadsafe(stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = self._running = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            self._listen()
        except BaseException as error:
            self._loop = None
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopping.wait()
        with self._loop_lock:
            self._loop = None
        for schedule in self._schedules:
            schedule._stop()
        self._stop_listening()
        if self._greeting:
            await asyncio.wait(self._greeting)
        while self._connections:
            for connection in tuple(self._connections.values()):
                connection.cut()
            await asyncio.wait([connection.lost for connection in self._connections.values()])

    def _listen(self) -> None:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            # Not one that the system gives to outgoing connections: while it refuses, a client that connects again and
            # again could be given that port, and so be connected to itself.
            self._port = self._port or free_port(set())
            listener.bind((_HOST, self._port))
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._running.add_reader(listener.fileno(), self._accept)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._running.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            # It has gone again.
            return
        self._accepted += 1
        connection = _Connection(self, self._accepted)
        task = self._running.create_task(self._greet(connection, client))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: _Connection, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._running.connect_accepted_socket(lambda: connection.client, client)

    @property
    def port(self) -> int:
        """The port that it listens on.

        Raises:
            RuntimeError: it has not been started.
        """
        if not self._started.done():
            raise RuntimeError("the proxy does not run yet; use it in `with FaultProxy(…) as proxy:`")
        return self._port

    @property
    def url(self) -> str:
        """The broker's URL by way of this proxy."""
        login, at, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(
            scheme=self._parts.scheme or "amqp", netloc=f"{login}{at}{_HOST}:{self.port}"
        ).geturl()

    # From other threads.

    def _call(self, function: Callable[[], _Result]) -> _Result:
        """Run something on the proxy's loop; here and now if this is it."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        with self._loop_lock:
            if self._loop is None:
                raise RuntimeError("the proxy does not run; use it in `with FaultProxy(…) as proxy:`")
            here = threading.current_thread() is self._thread
            if not here:
                self._loop.call_soon_threadsafe(run)
        if here:
            run()
        return done.result()

    def _has_changed(self) -> None:
        if self._waiting:
            with self._changed:
                self._version += 1
                self._changed.notify_all()

    def _picked(self, number: int | None) -> list[_Connection]:
        if number is None:
            return list(self._connections.values())
        if number not in self._connections:
            there = ", ".join(map(str, self._connections)) or "none"
            raise LookupError(f"there is no connection {number}; there are: {there}")
        return [self._connections[number]]

    def _change(self, direction: Direction | str | None, number: int | None, **rules: Any) -> None:
        directions = tuple(Direction) if direction is None else (_direction(direction),)

        def change() -> None:
            for connection in self._picked(number):
                for each in directions:
                    connection.ways[each].set(**rules)
            if number is None:
                for each in directions:
                    self._rules[each] = replace(self._rules[each], **rules)

        self._call(change)

    def _cut(self, number: int | None, *, reset: bool) -> None:
        def cut() -> None:
            for connection in self._picked(number):
                connection.cut(reset=reset)

        self._call(cut)

    # Looking.

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        """The connections at this moment, oldest first."""
        return self._call(lambda: tuple(connection.picture() for connection in self._connections.values()))

    @property
    def accepted(self) -> int:
        """How many connections have come so far."""
        return self._accepted

    def wait_until(self, predicate: Callable[[FaultProxy], object], timeout: float = 30.0) -> None:
        """Wait for something to become true; it is looked at again whenever bytes have passed or connections changed.

        Args:
            predicate: takes the proxy; runs on the calling thread.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true; the text says what connections there are.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
        try:
            while True:
                version = self._version
                if predicate(self):
                    return
                if not self._await_change(version, end):
                    raise TimeoutError(f"not reached within {timeout} s; the proxy has {self.connections}")
        finally:
            with self._changed:
                self._waiting -= 1

    def _await_change(self, version: int, end: float) -> bool:
        with self._changed:
            left = end - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._version != version, left)

    # Faults of a moment.

    def cut(self, connection: int | None = None) -> None:
        """End connections on both sides at once, as when their peer's process ends.

        Args:
            connection: the number of one; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """
        self._cut(connection, reset=False)

    def reset(self, connection: int | None = None) -> None:
        """End connections on both sides with a TCP reset, as when their peer's machine has forgotten them.

        Args:
            connection: the number of one; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """
        self._cut(connection, reset=True)

    def inject(
        self,
        frame: bytes | pamqp.base.Frame,
        channel: int = 0,
        *,
        direction: Direction | str = Direction.TO_CLIENT,
        connection: int | None = None,
        answer: type[pamqp.base.Frame] | None = None,
    ) -> None:
        """Say something in the broker's or the client's name, at the next border of a frame.

        It overtakes what is stalled or delayed. It may come between the frames of one message: if that is not wanted,
        nothing with a content should be on its way.

        Args:
            frame: a method, such as ``pamqp.commands.Channel.Flow(False)``, or bytes.
            channel: of the method.
            direction: who hears it.
            connection: the number of one; ``None`` for all.
            answer: the method by which it will be answered, such as ``pamqp.commands.Channel.FlowOk``. The next of them
                on that channel is taken out on its way back, because the other side has not asked: RabbitMQ, which
                knows no ``Channel.FlowOk``, closes a connection on which it hears one. ``None`` to let it pass.

        Raises:
            LookupError: there is no such connection.
            ValueError: a connection does not speak AMQP, or in TLS.
        """
        data = frame if isinstance(frame, bytes) else pamqp.frame.marshal(frame, channel)
        towards = _direction(direction)
        back = Direction.TO_BROKER if towards is Direction.TO_CLIENT else Direction.TO_CLIENT

        def inject() -> None:
            picked = self._picked(connection)
            for each in picked:
                if not each.ways[towards].borders.is_amqp:
                    raise ValueError(f"connection {each.number} shows no AMQP frames {towards}; is it in TLS?")
            for each in picked:
                if answer is not None:
                    each.ways[back].take_out(answer, channel)
                each.ways[towards].inject(data)

        self._call(inject)

    # Faults that last.

    def stall(self, direction: Direction | str | None = None, connection: int | None = None) -> None:
        """Read nothing any more: the sender's socket fills. After `heal` it goes on, and nothing is missing.

        Args:
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
        """
        self._change(direction, connection, stalls=True)

    def black_hole(self, direction: Direction | str | None = None, connection: int | None = None) -> None:
        """Take everything and pass nothing on, also not the end: neither side learns what became of the other.

        A direction in which something was swallowed carries nothing any more, also after `heal`. A client that comes
        while both directions are black holes is accepted, and never answered; no broker is needed for that.

        Args:
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
        """
        self._change(direction, connection, swallows=True)

    def delay(
        self,
        seconds: float,
        jitter: float = 0.0,
        *,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Have everything arrive later, in its order.

        Args:
            seconds: that it is on its way.
            jitter: seconds that may be added to it, drawn by lot.
            direction: which way; ``None`` for both, so that a round trip takes twice the time.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: a negative time.
        """
        _at_least(0, seconds=seconds, jitter=jitter)
        self._change(direction, connection, latency=seconds, jitter=jitter)

    def limit(
        self,
        bytes_per_second: float,
        *,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Limit the bandwidth, of each connection and direction by itself.

        Args:
            bytes_per_second: that pass.
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: it is not more than 0.
        """
        if not bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second must be more than 0, not {bytes_per_second!r}; stall() lets nothing pass"
            )
        self._change(direction, connection, rate=bytes_per_second)

    def split(
        self,
        lowest: int,
        highest: int | None = None,
        *,
        pause: float = 0.0,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Pass everything on in small writes.

        Args:
            lowest: bytes of a write; fewer if there are no more.
            highest: bytes of a write at the most, drawn by lot between the two; ``None`` for `lowest`.
            pause: seconds between two writes.
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: sizes that are none, or a negative time.
        """
        highest = lowest if highest is None else highest
        _at_least(1, lowest=lowest)
        _at_least(lowest, highest=highest)
        _at_least(0, pause=pause)
        self._change(direction, connection, split=(lowest, highest), pause=pause)

    def merge(
        self,
        size: int,
        wait: float = 0.05,
        *,
        direction: Direction | str | None = None,
        connection: int | None = None,
    ) -> None:
        """Gather what comes, and pass it on in writes of one size.

        Args:
            size: bytes of a write.
            wait: seconds after which less is passed on.
            direction: which way; ``None`` for both.
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: a size that is none, or a negative time.
        """
        _at_least(1, size=size)
        _at_least(0, wait=wait)
        self._change(direction, connection, merge=size, wait=wait)

    def cut_after(
        self,
        *,
        frames: int = 0,
        size: int = 0,
        direction: Direction | str = Direction.TO_CLIENT,
        connection: int | None = None,
    ) -> None:
        """Close connections when so much has passed from now on, or since they came, in order and to the byte.

        Args:
            frames: whole frames; a protocol header counts as one. 0 for any number.
            size: bytes. 0 for any number.
            direction: which way they are counted.
            connection: the number of one; ``None`` for all, and each of those that come.

        Raises:
            LookupError: there is no such connection.
            ValueError: a negative number.
        """
        _at_least(0, frames=frames, size=size)
        self._change(_direction(direction), connection, last_frame=frames, last_byte=size)

    def refuse(self) -> None:
        """Refuse connections from now on, as if nobody listened. Those that there are stay."""
        self._call(self._stop_listening)

    def heal(self, connection: int | None = None) -> None:
        """End all faults that last. What is stalled or delayed goes on, and connections are accepted.

        Args:
            connection: the number of one; ``None`` for all, and those that come.

        Raises:
            LookupError: there is no such connection.
            OSError: somebody else has taken the port while connections were refused.
        """
        self._change(None, connection, **asdict(_NO_RULES))
        if connection is None:
            self._call(lambda: self._listen() if self._listener is None else None)

    def schedule(self, steps: Iterable[tuple[float, Callable[[FaultProxy], object]]]) -> Schedule:
        """Have things done at times, such as ``[(0.5, FaultProxy.cut), (2.0, lambda proxy: proxy.delay(0.1))]``.

        Args:
            steps: seconds from now on, rising, and what is called with the proxy then, on its thread: it must not
                block. Each step is asked for when the one before has been taken, so that they may have no end.

        Returns:
            What can be waited for and cancelled. It ends with the proxy.
        """
        schedule = Schedule(self, steps)

        def start() -> None:
            self._schedules.append(schedule)
            schedule._start()

        self._call(start)
        return schedule


def _direction(direction: Direction | str) -> Direction:
    try:
        return Direction(direction)
    except ValueError:
        allowed = ", ".join(repr(each.value) for each in Direction)
        raise ValueError(f"direction must be one of {allowed}, not {direction!r}") from None


def _at_least(lowest: int, /, **values: float) -> None:
    for name, value in values.items():
        if not value >= lowest:
            raise ValueError(f"{name} must be at least {lowest}, not {value!r}")
