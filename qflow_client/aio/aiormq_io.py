"""The tap put into aiormq, through aiormq's public interface for transports.

aiormq asks a `TransportFactory` for a reader and a writer. Ours gives it asyncio's own, with the tap at both: what the
reader is fed has gone through the tap, what the writer is given waits for a frame border, and the channels' own bytes
are written when the socket takes them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from aiormq import AMQPConnectionError, TransportFactory
from yarl import URL

from qflow_client.amqp.frames import CHANNEL_CLOSE, CONNECTION_UNBLOCKED, METHOD_FRAME, FrameError, frame
from qflow_client.amqp.tap import Tap
from qflow_client.forks import after_fork_in_child
from qflow_client.guard import LOOPS
from qflow_client.logs import log
from qflow_client.skin import GOOD_BYE, TLS_WRITE_CHUNK, WRITE_CHUNK
from qflow_client.telemetry import peer_of

__all__ = ["OrderAddresses", "TapTransport", "TapTransportFactory"]

# The library is asked to wait while more of its bytes than this are not written.
_LIBRARY_HIGH = 1 << 16

_UNBLOCKED = frame(METHOD_FRAME, 0, CONNECTION_UNBLOCKED)

_monotonic = time.monotonic

# Given the addresses of a name, returns the order in which they are tried, and the seconds that each may take.
OrderAddresses = Callable[[list[Any]], tuple[list[Any], float]]


class _BeforeTls(asyncio.Protocol):
    """Counts the bytes that a peer sends in plain text before the TLS handshake. There must be none."""

    def __init__(self) -> None:
        self.received = 0

    def data_received(self, data: bytes) -> None:
        self.received += len(data)


class _TapProtocol(asyncio.StreamReaderProtocol):
    """Between asyncio's transport and the library's reader."""

    def __init__(
        self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop, is_open: Callable[[], bool]
    ) -> None:
        super().__init__(reader, loop=loop)
        self._tap = Tap()
        # Whether the library has opened the connection.
        self._is_open = is_open
        # asyncio's transport for the connection, with TLS if it is to be.
        self._transport: Any = None
        # What the library writes to; set once the connection is there.
        self._tapped: TapTransport | None = None
        # What ended the connection, if we did.
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Too early for the library, which writes to what `tap` makes."""
        self._transport = transport

    def tap(self, raw: Any, transport: Any, loop: asyncio.AbstractEventLoop) -> TapTransport:
        """What the library is to write to.

        Args:
            raw: asyncio's transport for the socket.
            transport: asyncio's transport for the connection; another one than `raw` with TLS.
            loop: the loop.
        """
        self._transport = transport
        self._tapped = TapTransport(self._tap, self, raw, transport, loop)
        super().connection_made(self._tapped)
        return self._tapped

    def data_received(self, data: bytes) -> None:
        """Give what came to the tap, and do what follows from it."""
        try:
            self._take(data)
        except BaseException as error:
            # Ctrl-C, for example. What is lost of it may be an answer for which somebody waits.
            self.fail(f"{type(error).__name__} came while the broker's answers were taken, and some may be lost")
            raise

    def _take(self, data: bytes) -> None:
        try:
            passed = LOOPS.take(lambda: self._tap.received(data, _monotonic()))
        except FrameError as error:
            self._garbage(error)
            return
        if passed:
            if self._tap.is_blocked and not self._is_open():
                # The library would wait for the end of the alarm before it so much as opens a channel.
                passed += _UNBLOCKED
            super().data_received(passed)
        if self._tapped is not None:
            self._tapped.received(len(data), for_library=bool(passed))
        if self._tap.error is not None:
            # What came before it has been passed.
            self._garbage(self._tap.error)

    def _garbage(self, error: FrameError) -> None:
        self.fail(f"the broker sent {error}")

    def fail(self, why: str) -> None:
        """End the connection at once, and have everybody told why."""
        self._error = ConnectionAbortedError(why)
        self._transport.abort()

    def eof_received(self) -> bool:
        """A broker that writes no more reads no more either."""
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The library learns of it when it reads."""
        if self._tapped is not None:
            self._tapped.lost()
        super().connection_lost(exc or self._error)


class TapTransport(asyncio.Transport):
    """A connected socket, plain or TLS, with a tap at it: what the library writes to.

    asyncio's transports take whatever they are given and keep it, and what they keep nobody can take back. So they only
    read and close here. On a plain socket this writes itself, by a descriptor of its own; under TLS it hands over one
    record at a time.

    Args:
        tap: the tap.
        protocol: is asked to pause the library, and told of failures.
        raw: asyncio's transport for the socket.
        transport: asyncio's transport for the connection; another one than `raw` with TLS.
        loop: the loop.
    """

    def __init__(
        self,
        tap: Tap,
        protocol: _TapProtocol,
        raw: asyncio.Transport,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__()
        self.tap = tap
        self._protocol = protocol
        self._loop = loop
        self._raw = raw
        self._transport = transport
        self._is_tls = transport is not raw
        self._write_chunk = TLS_WRITE_CHUNK if self._is_tls else WRITE_CHUNK
        sock = raw.get_extra_info("socket")
        # The loop lets nobody else watch a descriptor that one of its transports reads from.
        self._socket = socket.socket(sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno()))
        self._socket.setblocking(False)
        #: What it is connected to.
        self.peer = peer_of(self._socket)
        # Called after anything that may have changed a channel.
        self._afters: list[Callable[[], bool]] = []
        # What the library has written and the socket has not taken, how much of the first chunk it has, and all of it.
        self._library: deque[bytes] = deque()
        self._begun = 0
        self._library_size = 0
        self._library_paused = False
        # Whether the library's chunk goes before ours at the next frame border.
        self._librarys_turn = True
        # Whether the loop tells us when the socket takes more.
        self._watching = False
        # Set by the first failure to write, or the end of the connection; the library meets that when it reads.
        self._broken = False
        self._closing = False
        # True while `pump` runs or is due. `pump` clears it before its last look for output, so a task that adds output
        # and finds it True does not call `wake`.
        self.awake = False
        self._thread = get_ident()
        # Told the size of answers that were taken, it says for how many seconds what comes next may gather; None to
        # read everything as it comes, which is right for a connection that others use, too.
        self.delay: Callable[[int], float] | None = None
        # What ends that time; None if it is read. And whether the library wants to read, and the socket is read.
        self._gathers: asyncio.TimerHandle | None = None
        self._library_reads = self._reads = True
        # The library's writer until the connection has ended, because aiormq may drop it without closing it.
        self.writer: asyncio.StreamWriter | None = None
        _transports.add(self)

    # For the producers.

    def add_after(self, after: Callable[[], bool]) -> None:
        """Have a function called after anything that may have changed a channel; it says whether writing is urgent."""
        self._afters.append(after)

    def remove_after(self, after: Callable[[], bool]) -> None:
        """Have it called no more."""
        if after in self._afters:
            self._afters.remove(after)

    @property
    def full(self) -> bool:
        """Whether the socket takes no more for now."""
        return self._watching

    def wake(self) -> None:
        """Have `pump` run in the loop's next turn. Any thread may call this after it has added output."""
        if get_ident() == self._thread:
            self._loop.call_soon(self.pump)
            # Last, because after an interrupt before this line the next sender must wake the loop.
            self.awake = True
        else:
            # `pump` may have run before this returns, so `awake` is left as it is.
            self._loop.call_soon_threadsafe(self.pump)

    def received(self, size: int, *, for_library: bool) -> None:
        """The tap has been given something: do what follows from it.

        Args:
            size: in bytes.
            for_library: some of it was for the library.
        """
        urgent = False
        for after in tuple(self._afters):
            urgent |= after()
        if urgent:
            self.pump()
        elif not self.awake:
            # Behind the tasks that have been woken by now: what they send goes out in the same write.
            self.wake()
        if self.delay is not None and self._gathers is None and not for_library:
            delay = self.delay(size)
            if delay:
                self._gathers = self._loop.call_later(delay, self._read_on)
                self._watch_reads()

    def _read_on(self) -> None:
        """Enough has gathered."""
        self._gathers = None
        self._watch_reads()

    def _watch_reads(self) -> None:
        reads = self._library_reads and self._gathers is None
        if reads is not self._reads:
            self._reads = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def pump(self) -> None:
        """Write what there is, until there is no more or the socket is full."""
        try:
            self._pump()
        except Exception as error:
            # Whoever waits must learn of it, whatever it is, and so must the broker.
            log(logging.ERROR, "writing failed", error=error)
            self._broken = True
            self._protocol.fail(f"writing failed: {error!r}")

    def _pump(self) -> None:
        tap = self.tap
        changed = False
        full = self._is_tls and self._raw.get_write_buffer_size() > 0
        while not full and not self._broken:
            if self._library and (self._begun or (self._librarys_turn and tap.at_border)):
                full = self._pump_library()
                continue
            self._librarys_turn = True
            # To the next border and no further if the library waits for it, or a socket that is always full would keep
            # its heartbeats and acks back for ever.
            waited_for = self._closing or (self._library and not tap.at_border)
            data = tap.unfinished if waited_for else LOOPS.take(self._data_to_write)
            if not data:
                if self._library:
                    continue
                self.awake = False
                # What was put before that.
                data = b"" if waited_for else LOOPS.take(self._data_to_write)
                if not data:
                    break
                self.awake = True
            if len(data) > self._write_chunk:
                data = data[: self._write_chunk]
            sent = self._send(data)
            LOOPS.take(partial(tap.advance, sent, _monotonic()))
            changed = True
            full = sent < len(data) or (self._is_tls and self._raw.get_write_buffer_size() > 0)
        full = full and not self._broken
        if full != self._watching:
            self._watch(full)
        if full or self._broken:
            self.awake = full
        if changed:
            for after in tuple(self._afters):
                after()
        if self._library_paused and self._library_size <= _LIBRARY_HIGH // 4:
            self._library_paused = False
            self._protocol.resume_writing()
        if self._closing and not full:
            self._transport.close()

    def _data_to_write(self) -> bytes:
        return self.tap.data_to_write(self._write_chunk)

    def _pump_library(self) -> bool:
        """Write of the library's chunk; whether the socket is full."""
        chunk = self._library[0]
        data = chunk[self._begun : self._begun + self._write_chunk]
        sent = self._send(data)
        self._begun += sent
        self._library_size -= sent
        if self._begun == len(chunk):
            self._library.popleft()
            self._begun = 0
            self._librarys_turn = False
        return sent < len(data) or (self._is_tls and self._raw.get_write_buffer_size() > 0)

    def _send(self, data: bytes) -> int:
        """How many bytes are sent, or cannot be taken back."""
        if self._is_tls:
            # One that has failed takes everything and writes nothing.
            if self._raw.is_closing() or self._transport.is_closing():
                self._broken = True
                return 0
            self._transport.write(data)
            return len(data)
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._broken = True
            return 0

    def _watch(self, full: bool) -> None:
        self._watching = full
        if full:
            self._loop.add_writer(self._socket.fileno(), self.pump)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def lost(self) -> None:
        """The connection has ended."""
        self._broken = self._closing = True
        _transports.discard(self)
        if self._gathers is not None:
            self._gathers.cancel()
        if self._watching:
            self._watch(False)
        self._socket.close()
        self._library.clear()
        self._library_size = self._begun = 0
        self.writer = None

    def forget(self) -> None:
        """In a child process after a fork: close its copies of the socket; the loop's records are the parent's."""
        self._broken = True
        self._socket.close()
        # The loop's transport closes it when it is dropped, so it must stay a descriptor of something.
        _replace(self._raw.get_extra_info("socket").fileno())

    # For the library: asyncio's interface.

    def write(self, data: Any) -> None:
        """Write, at the next frame border."""
        if self._closing or self._broken or not data:
            return
        if data[7:11] == CHANNEL_CLOSE:
            self.tap.closes(int.from_bytes(data[1:3], "big"))
        self._library.append(bytes(data))
        self._library_size += len(data)
        if self._library_size > _LIBRARY_HIGH and not self._library_paused:
            self._library_paused = True
            self._protocol.pause_writing()
        if not self._watching:
            self.pump()

    def get_write_buffer_size(self) -> int:
        """What the library has written and the socket has not taken."""
        return self._library_size

    def can_write_eof(self) -> bool:
        """A connection ends as a whole."""
        return False

    def close(self) -> None:
        """Write what the library has written, and what completes a frame of ours, and end the connection."""
        if not self._closing:
            self._closing = True
            self.pump()
            if not self._transport.is_closing():
                # A peer that does not read must not keep us.
                self._loop.call_later(GOOD_BYE, self.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._broken = True
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._closing or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As asyncio's."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """As asyncio's."""
        self._library_reads = False
        self._watch_reads()

    def resume_reading(self) -> None:
        """As asyncio's."""
        self._library_reads = True
        self._watch_reads()

    def is_reading(self) -> bool:
        """As asyncio's."""
        return self._library_reads and not self.is_closing()


class TapTransportFactory(TransportFactory):
    """Makes the reader and writer of a connection of aiormq's, with a tap at them.

    Args:
        made: called with what was made.
        is_open: whether the library has opened the connection.
        order_addresses: given the addresses of a name, returns the order in which they are tried, and the seconds that
            each of them may take; ``None`` for that of the resolver, and no limit.
    """

    def __init__(
        self,
        made: Callable[[TapTransport], None],
        is_open: Callable[[], bool],
        order_addresses: OrderAddresses | None = None,
    ) -> None:
        self._made = made
        self._is_open = is_open
        self._order_addresses = order_addresses

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As aiormq's own factories, plain or TLS by the URL."""
        provider = kwargs.pop("ssl_context_provider", None)
        context = await provider.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = _TapProtocol(reader, loop, self._is_open)
        plain = _BeforeTls()
        first: asyncio.Protocol = protocol if context is None else plain
        try:
            raw: Any
            if kwargs:
                raw, _ = await loop.create_connection(lambda: first, url.host or "", url.port or 0, **kwargs)
            else:
                sock = await _connected(loop, url.host or "", url.port or 0, self._order_addresses)
                raw, _ = await loop.create_connection(lambda: first, sock=sock)
            transport = raw
            if context is not None:
                if plain.received:
                    # They did not come from the peer that the certificate names.
                    raw.abort()
                    raise ConnectionAbortedError(f"{plain.received} bytes came in plain text before the TLS handshake")
                # From here on TLS reads what comes, and refuses plain text itself.
                transport = await loop.start_tls(raw, protocol, context, server_hostname=url.host)
            tapped = protocol.tap(raw, transport, loop)
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        tapped.writer = writer = asyncio.StreamWriter(tapped, protocol, reader, loop)
        self._made(tapped)
        return reader, writer


async def _connected(
    loop: asyncio.AbstractEventLoop, host: str, port: int, order_addresses: OrderAddresses | None
) -> socket.socket:
    """A socket, connected as the loop does it itself: address by address. A fork at any time finds it."""
    failures: list[OSError] = []
    found, limit = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), math.inf
    if order_addresses is not None and len(found) > 1:
        found, limit = order_addresses(found)
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        _sockets.add(sock)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(limit if limit < math.inf else None):
                await loop.sock_connect(sock, address)
        except TimeoutError:
            sock.close()
            failures.append(TimeoutError(f"{address[0]} has not answered within {limit:.3g} s"))
        except OSError as error:
            sock.close()
            failures.append(error)
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    if len(failures) == 1:
        raise failures[0]
    raise OSError(f"no address of {host} takes a connection: {'; '.join(map(str, failures)) or 'it has none'}")


def _replace(descriptor: int) -> None:
    """Close this process's copy of a socket, and leave a descriptor of nothing to whoever is going to close it."""
    if descriptor >= 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


# Also those of connections that are still being made, which no producer knows yet; and their sockets, before that too.
_transports: weakref.WeakSet[TapTransport] = weakref.WeakSet()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sock in tuple(_sockets):
        _replace(sock.fileno())
    for transport in tuple(_transports):
        transport.forget()


after_fork_in_child(_after_fork_in_child)
