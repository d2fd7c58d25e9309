"""Puts a `Tap` between aiormq and the socket, through aiormq's public interface for transports.

aiormq (the library) gets a reader and a writer from a `TransportFactory`. The factory of this module puts the tap
between them and the socket. The tap takes the frames for producers out of the received data. The library's own data
waits until no producer's frame is partly written. `pump` writes the producers' bytes when the socket accepts them.
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
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from aiormq import AMQPConnectionError, TransportFactory
from yarl import URL

from qflow_client.aio.threads import call_on_thread
from qflow_client.amqp.frames import CHANNEL_CLOSE, CONNECTION_UNBLOCKED, METHOD_FRAME, FrameError, frame
from qflow_client.amqp.tap import Tap
from qflow_client.forks import after_fork_in_child, close_in_children, replace_copy
from qflow_client.guard import LOOPS
from qflow_client.logs import log
from qflow_client.skin import GOOD_BYE, TLS_WRITE_CHUNK, WRITE_CHUNK
from qflow_client.telemetry import peer_of

__all__ = ["OrderAddresses", "TapTransport", "TapTransportFactory"]

# If more of the library's bytes than this are unwritten, the library waits until at most a quarter of this is left.
_LIBRARY_HIGH = 1 << 16

_UNBLOCKED = frame(METHOD_FRAME, 0, CONNECTION_UNBLOCKED)

_monotonic = time.monotonic

# A function that puts the addresses of a host name into order. It also returns the seconds to try each address.
OrderAddresses = Callable[[list[Any]], tuple[list[Any], float]]


class _BeforeTls(asyncio.Protocol):
    """Counts the bytes that a peer sends in plain text before the TLS handshake. Each such byte is an error."""

    def __init__(self) -> None:
        self.received = 0

    def data_received(self, data: bytes) -> None:
        self.received += len(data)


class _TapProtocol(asyncio.StreamReaderProtocol):
    """The `asyncio.Protocol` between asyncio's transport and the library's reader."""

    def __init__(
        self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop, is_open: Callable[[], bool]
    ) -> None:
        super().__init__(reader, loop=loop)
        self._tap = Tap()
        # Returns True if the library has opened the connection.
        self._is_open = is_open
        # asyncio's transport for the connection. After a TLS handshake, this is the TLS transport.
        self._transport: Any = None
        # The transport that the library writes to; set when the connection is established.
        self._tapped: TapTransport | None = None
        # The error with which `fail` has ended the connection; ``None`` if `fail` was not called.
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store asyncio's transport. The library uses another transport, which `tap` makes."""
        self._transport = transport

    def tap(self, raw: Any, transport: Any, loop: asyncio.AbstractEventLoop) -> TapTransport:
        """Make the transport that the library writes to. The arguments are as for `TapTransport`."""
        self._transport = transport
        self._tapped = TapTransport(self._tap, self, raw, transport, loop)
        super().connection_made(self._tapped)
        return self._tapped

    def data_received(self, data: bytes) -> None:
        """Pass received data to the tap, and the library's part of the data to the library's reader."""
        try:
            self._take(data)
        except BaseException as error:
            # After Ctrl-C, for example, `data` is lost. Abort the connection: callers may wait for answers in `data`.
            self.fail(f"{type(error).__name__} interrupted the reading of the broker's answers, and some may be lost")
            raise

    def _take(self, data: bytes) -> None:
        try:
            passed = LOOPS.take(lambda: self._tap.received(data, _monotonic()))
        except FrameError as error:
            self._garbage(error)
            return
        if passed:
            if self._tap.is_blocked and not self._is_open():
                # Without this frame, the library would open no channel while the broker blocks the connection.
                passed += _UNBLOCKED
            super().data_received(passed)
        if self._tapped is not None:
            self._tapped.received(len(data), for_library=bool(passed))
        if self._tap.error is not None:
            # The library already has all frames before the error.
            self._garbage(self._tap.error)

    def _garbage(self, error: FrameError) -> None:
        self.fail(f"the data from the broker cannot be read: {error}")

    def fail(self, why: str) -> None:
        """Abort the connection. The library and the producers get the reason."""
        self._error = ConnectionAbortedError(why)
        self._transport.abort()

    def eof_received(self) -> bool:
        """Return False, so that asyncio closes the connection, because the broker sends no more data."""
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection. The library's next read then gets the error, or the end of the data."""
        if self._tapped is not None:
            self._tapped.lost()
        super().connection_lost(exc or self._error)


class TapTransport(asyncio.Transport):
    """The transport to which the library writes: a connected plain or TLS socket with a `Tap`.

    asyncio's transports buffer any amount of data, and buffered data cannot be withdrawn. So without TLS,
    asyncio's transport only reads and closes, and this class writes to a duplicate of the socket. With TLS, this class
    passes one record at a time to asyncio's transport.

    Args:
        transport: asyncio's TLS transport; without TLS, asyncio's plain transport `raw`.
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
        # A duplicate, because asyncio forbids other code to watch the descriptor of a socket that has a transport.
        self._socket = socket.socket(sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno()))
        self._socket.setblocking(False)
        self.peer = peer_of(self._socket)
        # The functions that `add_after` has added.
        self._afters: list[Callable[[], bool]] = []
        # The library's chunks that are not completely written.
        self._library: deque[bytes] = deque()
        # Number of written bytes of the first chunk in `_library`.
        self._begun = 0
        # Number of unwritten bytes of all chunks in `_library`.
        self._library_size = 0
        self._library_paused = False
        # Whether the library writes a chunk at the next frame boundary.
        self._librarys_turn = True
        # Whether the socket is full. If so, the loop calls `pump` when the socket accepts more bytes.
        self._watching = False
        # Whether a write has failed or the connection has ended. The library notices this at its next read.
        self._broken = False
        self._closing = False
        # If True, `pump` runs now or will be called. `pump` clears the flag before its final check for output. So a
        # task that has added output and finds the flag True need not call `wake`.
        self.awake = False
        self._thread = get_ident()
        # Called with the number of bytes of a read. Returns the seconds to wait before the next read, so that the
        # broker's answers accumulate. ``None`` if reads do not wait, for example on a shared connection.
        self.delay: Callable[[int], float] | None = None
        # The timer that ends the wait before the next read; ``None`` while there is no such wait.
        self._gathers: asyncio.TimerHandle | None = None
        # `_library_reads`: whether the library wants to read. `_reads`: whether the socket is read.
        self._library_reads = self._reads = True
        # Keeps the library's writer alive until the end of the connection, because aiormq may drop an open writer.
        self.writer: asyncio.StreamWriter | None = None
        _transports.add(self)

    # Producers, and the channels of the drop-in for aio-pika, call the methods below.

    def add_after(self, after: Callable[[], bool]) -> None:
        """Register a function to call after each read and write. If it returns True after a read, write at once."""
        self._afters.append(after)

    def remove_after(self, after: Callable[[], bool]) -> None:
        if after in self._afters:
            self._afters.remove(after)

    @property
    def full(self) -> bool:
        """Whether the socket accepts no more bytes for now."""
        return self._watching

    def wake(self) -> None:
        """Schedule `pump` in the next iteration of the loop. Any thread may call `wake` after it has added output."""
        try:
            if get_ident() == self._thread:
                self._loop.call_soon(self.pump)
                # Set `awake` last. If an exception interrupts this method earlier, the next sender wakes the loop.
                self.awake = True
            else:
                # `pump` may already have run when this call returns, so `awake` is not set.
                self._loop.call_soon_threadsafe(self.pump)
        except RuntimeError:
            # If the loop is closed, nothing can be written.
            if not self._loop.is_closed():
                raise

    def received(self, size: int, *, for_library: bool) -> None:
        """After a read, call the functions of `add_after`, write output, and delay the next read as `delay` requires.

        Args:
            size: size of the read data in bytes.
            for_library: whether a part of the data was for the library. If so, the next read is not delayed.
        """
        urgent = False
        for after in tuple(self._afters):
            urgent |= after()
        if urgent:
            self.pump()
        elif not self.awake:
            # Write after the woken tasks have run, so that the same write contains their messages.
            self.wake()
        if self.delay is not None and self._gathers is None and not for_library:
            delay = self.delay(size)
            if delay:
                self._gathers = self._loop.call_later(delay, self._read_on)
                self._watch_reads()

    def _read_on(self) -> None:
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
        """Write output until all of it is written or the socket is full."""
        try:
            self._pump()
        except Exception as error:
            # After any error, all waiting callers must get an error, and the connection must end.
            log(logging.ERROR, "writing failed, and the connection is closed", error=error)
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
            # If the library waits for the next frame boundary, write only up to this boundary. Otherwise
            # producers could fill the socket every time, and delay the library's heartbeats and acks forever.
            waited_for = self._closing or (self._library and not tap.at_border)
            data = tap.unfinished if waited_for else LOOPS.take(self._data_to_write)
            if not data:
                if self._library:
                    continue
                self.awake = False
                # Check again, because output may have been added before `awake` was cleared.
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
        """Write a part of the library's first chunk. Return True if the socket is full."""
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
        """Send data. Return the number of bytes that are sent or can no longer be withdrawn."""
        if self._is_tls:
            # A failed transport accepts all data and writes nothing.
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
        """In a forked child, close the copies of the socket without using the event loop of the parent."""
        self._broken = True
        self._socket.close()
        # Do not close this descriptor here, because asyncio's transport closes it when the transport is deleted.
        replace_copy(self._raw.get_extra_info("socket").fileno())

    # The library calls the methods below, which are asyncio's interface for transports.

    def write(self, data: Any) -> None:
        """Write data at the next frame boundary."""
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
        """Return how many bytes of the library are not written."""
        return self._library_size

    def can_write_eof(self) -> bool:
        """Return False, because both directions of a connection are closed together."""
        return False

    def close(self) -> None:
        """Write the library's data and the remainder of a partly written frame, and close the connection."""
        if not self._closing:
            self._closing = True
            self.pump()
            if not self._transport.is_closing():
                # A broker that does not read must not delay the end of the connection.
                self._loop.call_later(GOOD_BYE, self.abort)

    def abort(self) -> None:
        self._broken = True
        # On Python 3.11.2, `abort` of a TLS transport raises this error if the connection has ended.
        with suppress(AttributeError):
            self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._library_reads = False
        self._watch_reads()

    def resume_reading(self) -> None:
        self._library_reads = True
        self._watch_reads()

    def is_reading(self) -> bool:
        return self._library_reads and not self.is_closing()


class TapTransportFactory(TransportFactory):
    """Makes the reader and the writer for a connection of aiormq, with a `Tap` between them and the socket.

    Args:
        made: called with each new transport.
        is_open: returns True if the library has opened the connection.
        order_addresses: returns the addresses of a host name in the order to try them, and the maximum seconds to try
            each address. ``None`` for the resolver's order and no limit.
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
        """Connect, and return the reader and the writer. The arguments are those of aiormq's own factories."""
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
                    # The TLS certificate does not prove the source of these bytes.
                    raw.abort()
                    raise ConnectionAbortedError(f"{plain.received} bytes came in plain text before the TLS handshake")
                # From here on, TLS reads the data, and rejects plain text.
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
    """Try the addresses of a host one by one. Record each socket, so that a forked child can close its copy."""
    failures: list[OSError] = []
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found, limit = await call_on_thread(resolve, "qflow-getaddrinfo"), math.inf
    # Start the loop's executor, as the loop's own `getaddrinfo` does. While `asyncio.run` shuts the executor down, the
    # last tasks of aiormq run. Without this, their objects stay in memory, and asyncio logs errors.
    with suppress(RuntimeError):
        loop.run_in_executor(None, int)
    if order_addresses is not None and len(found) > 1:
        found, limit = order_addresses(found)
    for family, kind, protocol, _, address in found:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            # For example, the system does not support IPv6.
            failures.append(error)
            continue
        close_in_children(sock)
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
    raise OSError(
        f"no address of {host} accepts a connection: {'; '.join(map(str, failures)) or 'the name has no address'}"
    )


# All transports, even of connections that are still being established. A forked child closes its copies.
_transports: weakref.WeakSet[TapTransport] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for transport in tuple(_transports):
        transport.forget()


after_fork_in_child(_after_fork_in_child)
