"""Connects the tap with pika, by pika's public interface for I/O services.

pika passes the socket that it has connected to `AbstractIOServices.create_streaming_connection`. This module wraps that
socket. All data that pika receives has passed the tap. All data that pika sends waits for a frame border. The channels'
own bytes are written when the socket accepts them.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

from qflow_client.amqp.frames import FrameError
from qflow_client.amqp.tap import Tap
from qflow_client.core.admission import is_undisturbed
from qflow_client.guard import Guard
from qflow_client.skin import TLS_WRITE_CHUNK, WRITE_CHUNK
from qflow_client.telemetry import peer_of

__all__ = ["TapIOServices"]

_READ_CHUNK = 1 << 17
# How often a TLS socket is read before other tasks of the loop run.
_TLS_READS = 64

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError)


class _TapSocket:
    """A connected socket, plain or TLS, with the interface that pika needs."""

    def __init__(self, sock: Any, services: TapIOServices) -> None:
        self._sock = sock
        self._services = services
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # Whether the socket accepted only a part of pika's present chunk.
        self.library_mid_chunk = False
        # Set by the first failed write, and when the connection is aborted. pika finds the error when it reads.
        self.broken = False
        # Whether the socket accepts no more bytes of producers for now.
        self.full = False
        # A partly written TLS record of a producer.
        self._begun_record = b""
        self.write_chunk = TLS_WRITE_CHUNK if self._is_tls else WRITE_CHUNK
        services.tapped, services.peer = self, peer_of(sock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, _size: int) -> bytes:
        """Return the received data for pika."""
        services = self._services
        reads = 0
        while True:
            if services.tap.error is not None:
                # This raises the error. Frames before the error have been passed on.
                services.received(b"")
            data = self._sock.recv(_READ_CHUNK)
            if not data:
                return b""
            passed = services.received(data)
            if services.tap.error is not None:
                # pika does not continue to read by itself after a large read.
                services.add_callback_threadsafe(self.cut)
            if passed:
                return passed
            if not self._is_tls:
                raise BlockingIOError(errno.EAGAIN, "there is no data for pika")
            # A TLS socket may keep bytes that no poll reports, so it is read until it has no more.
            reads += 1
            if reads >= _TLS_READS and not self._sock.pending():
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "there is no data for pika")

    def send(self, data: bytes) -> int:
        """Send data of pika, at a frame border."""
        services = self._services
        if not self.library_mid_chunk and (
            self._begun_record or not services.tap.at_border or services.library_sent >= self.write_chunk
        ):
            if self._is_tls:
                raise ssl.SSLWantWriteError(ssl.SSL_ERROR_WANT_WRITE, "a producer writes first")
            raise BlockingIOError(errno.EAGAIN, "a producer writes first")
        try:
            sent: int = self._sock.send(data)
        except _WOULD_BLOCK:
            # A partly written TLS record must be offered again before any other data. A plain socket has taken nothing
            # of this chunk, but may have taken the first part of the chunk before.
            self.library_mid_chunk = self.library_mid_chunk or self._is_tls
            raise
        self.library_mid_chunk = sent < len(data)
        services.library_sent += sent
        return sent

    def send_ours(self, data: bytes) -> int:
        """Send data of a producer.

        Returns:
            How many bytes are sent, including bytes that cannot be taken back; `full` is False if more can be sent.
        """
        try:
            sent: int = self._sock.send(data)
        except _WOULD_BLOCK:
            self.full = True
            if not self._is_tls:
                return 0
            self._begun_record = data
            return len(data)
        except OSError:
            self.cut()
            return 0
        self.full = sent < len(data)
        return sent

    def finish_record(self) -> None:
        """Continue a TLS record that the socket accepted only in part."""
        if self._begun_record:
            data, self._begun_record = self._begun_record, b""
            self.send_ours(data)
        else:
            self.full = False

    def cut(self) -> None:
        """Abort the connection. pika finds it closed when it reads."""
        self.broken = True
        with suppress(OSError):
            # The method of a TLS socket would read further data as plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close this process's descriptor, and do nothing else."""
        _close_copy(self._sock)

    def close(self) -> None:
        """Close the socket, and stop watching it."""
        if self._services.tapped is self:
            self._services.untap()
        self._sock.close()


def _close_copy(sock: socket.socket) -> None:
    with suppress(OSError):
        os.close(sock.detach())


class _TapContext(ssl.SSLContext):
    """The application's TLS context, but with tapped sockets. The original context is not changed."""

    _context: ssl.SSLContext
    _services: TapIOServices

    def __new__(cls, context: ssl.SSLContext, services: TapIOServices) -> _TapContext:
        self = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        self._context = context
        self._services = services
        return self

    def wrap_socket(self, sock: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a tapped TLS socket."""
        return _TapSocket(self._context.wrap_socket(sock, *args, **kwargs), self._services)


class TapIOServices(SelectorIOServicesAdapter):
    """pika's I/O services for consecutive connections, with a tap at the socket.

    Only the thread of the loop may use them, except `wake`.

    Args:
        tap: the tap.
        lock: held around every use of the tap and of its channels.
        after: called, without the lock, after any possible change of a channel.
        delay: called with the lock and the size of answers that were read; returns for how many seconds the next
            answers may gather. By default, all data is read immediately.
    """

    def __init__(
        self,
        tap: Tap,
        lock: Guard,
        after: Callable[[], None],
        delay: Callable[[int], float] = lambda _size: 0.0,
    ) -> None:
        super().__init__(IOLoop())  # type: ignore[arg-type]  # pika's own loop is what it takes
        # Calls that other threads request, and the two sockets by which they wake the loop. pika's own method has a
        # lock. A signal handler or a finalizer could find this lock taken by the thread that it interrupts.
        self._calls: deque[Callable[[], object]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        super().set_reader(self._woken.fileno(), self._on_woken)
        self.tap = tap
        self.lock = lock
        self._after = after
        self._delay = delay
        # The socket while it is connected.
        self.tapped: _TapSocket | None = None
        #: The address of the present or last connection; ``None`` before the first.
        self.peer: tuple[str, int] | None = None
        # pika's transport on it, but with TLS only after the handshake.
        self._transport: Any = None
        # The last socket that pika tried to connect.
        self._connecting: socket.socket | None = None
        # The callbacks of pika and of the producers for a socket that takes bytes.
        self._library_writer: Callable[[], None] | None = None
        self._ours = False
        #: Returns the order in which pika tries the addresses of a name; ``None`` for the resolver's order.
        self.order_addresses: Callable[[list[Any]], list[Any]] | None = None
        # Bytes that pika has sent since the last write of a producer.
        self.library_sent = 0
        # True while `pump` runs or is scheduled. `pump` clears it before its last check for output. So a thread that
        # adds output and finds it True does not need to wake the I/O thread.
        self.awake = False
        # How often `awake` was cleared.
        self._rests = 0
        # Whether `wake` may set `awake`, see `wake`.
        self._may_set_awake = is_undisturbed()

    def wake(self) -> None:
        """Schedule `pump`. Any thread may call this at any time, after it has added output."""
        rests = self._rests
        self.add_callback_threadsafe(self.pump)
        # This comes last: after an interrupt before this line, the next sender must wake the I/O thread. The I/O thread
        # may have cleared `awake` meanwhile; then it stays False. Nothing interrupts the two instructions, see
        # `admission`.
        if self._may_set_awake and rests == self._rests:
            self.awake = True

    def _rest(self) -> None:
        """Clear `awake`: the next thread that adds output wakes the I/O thread."""
        self._rests += 1
        self.awake = False

    def add_callback_threadsafe(self, callback: Callable[[], object]) -> None:
        """Same as pika's method. It may be called at any time, also in a signal handler or a finalizer."""
        self._calls.append(callback)
        # The socket may be full of bytes that will wake the loop anyway.
        with suppress(OSError):
            self._waker.send(b"\0")
        if self._waker.fileno() < 0:
            # It is closed, because the loop has ended.
            self._calls.clear()

    def _on_woken(self) -> None:
        # This comes first, so that calls that are requested later wake the loop again.
        with suppress(BlockingIOError):
            self._woken.recv(_READ_CHUNK)
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Same as pika's method."""
        super().close()
        self._waker.close()
        self._woken.close()

    # Reading and writing.

    def received(self, data: bytes) -> bytes:
        """Pass received data to the tap, and do what follows."""
        now = time.monotonic()
        with self.lock:
            try:
                passed = self.tap.received(data, now)
            except FrameError as error:
                raise ConnectionAbortedError(
                    errno.ECONNABORTED, f"the data from the broker cannot be read: {error}"
                ) from error
            self.awake = True
            delay = 0.0 if passed else self._delay(len(data))
        # Write waiting output first, because woken threads compete for the interpreter.
        self.pump()
        self._after()
        if delay:
            # Meanwhile answers gather in the socket and messages in the line. No thread needs to wake this one for
            # them.
            self.awake = True
            time.sleep(delay)
            self.pump()
        return passed

    def pump(self) -> None:
        """Write the channels' bytes until there are no more or the socket is full."""
        tapped = self.tapped
        if tapped is None or tapped.broken or tapped.library_mid_chunk:
            # After every exception, execution continues here.
            with self.lock:
                self._rest()
                self.awake = tapped is not None and tapped.library_mid_chunk
            return
        tap, lock = self.tap, self.lock
        changed = False
        tapped.finish_record()
        while not tapped.full and not tapped.broken:
            # pika has data to write, too, and has written nothing since the last write of a producer. It gets the next
            # frame border. Otherwise a socket that is always full would delay its heartbeats and acks without end. This
            # method is called again when the socket is writable. In return, pika writes at most about one chunk before
            # a producer writes.
            yields = self._library_writer is not None and not self.library_sent
            with lock:
                data = tap.unfinished if yields else tap.data_to_write(tapped.write_chunk)
                if not data:
                    self.library_sent = 0
                    if yields:
                        break
                    self._rest()
                    # `data_to_write` returns bytes that were put before this call.
                    data = tap.data_to_write(tapped.write_chunk)
                    if not data:
                        break
                    self.awake = True
            if len(data) > tapped.write_chunk:
                data = data[: tapped.write_chunk]
            sent = tapped.send_ours(data)
            with lock:
                tap.advance(sent, time.monotonic())
            if sent:
                self.library_sent = 0
            changed = True
        if tapped.full != self._ours:
            self._ours = tapped.full
            self._watch(tapped.fileno())
        if changed:
            self._after()

    # pika's interface.

    def getaddrinfo(self, host: Any, port: Any, on_done: Callable[[Any], None], *args: Any, **keywords: Any) -> Any:
        """Same as pika's method, in the link's order of addresses."""

        def done(found: Any) -> None:
            if found and isinstance(found, list) and self.order_addresses is not None:
                found = self.order_addresses(found)
            on_done(found)

        return super().getaddrinfo(host, port, done, *args, **keywords)

    def connect_socket(self, sock: socket.socket, resolved_addr: Any, on_done: Any) -> Any:
        """Same as pika's method. From now on a forked child can close its copy of the socket."""
        self._connecting = sock
        return super().connect_socket(sock, resolved_addr, on_done)

    def create_streaming_connection(
        self,
        protocol_factory: Any,
        sock: Any,
        on_done: Any,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> Any:
        """Same as pika's method, with the tap at the socket."""
        tapped = sock
        if ssl_context is not None:
            ssl_context = _TapContext(ssl_context, self)
        else:
            tapped = _TapSocket(sock, self)

        def done(result: Any) -> None:
            if not isinstance(result, BaseException):
                self._transport = result[0]
            on_done(result)

        try:
            return super().create_streaming_connection(protocol_factory, tapped, done, ssl_context, server_hostname)
        except ValueError:
            # pika has closed the socket. If the peer has reset it by now, pika treats that as a mistake, and raises an
            # error that no code catches.
            self.tapped = None
            error = ConnectionResetError(errno.ECONNRESET, "the connection was reset as soon as it was open")
            return self.call_later(0.0, partial(on_done, error))

    def set_writer(self, fd: int, on_writable: Callable[[], None]) -> None:
        """Same as pika's method; the tapped socket has two writers."""
        if self.tapped is None or fd != self.tapped.fileno():
            super().set_writer(fd, on_writable)
            return
        self._library_writer = on_writable
        self._watch(fd)

    def remove_writer(self, fd: int) -> bool:
        """Same as pika's method."""
        if self.tapped is None or fd != self.tapped.fileno():
            return bool(super().remove_writer(fd))
        had = self._library_writer is not None
        self._library_writer = None
        self._watch(fd)
        return had

    def forget(self) -> None:
        """Close the copy of the socket in a child process after a fork. The connection belongs to the parent."""
        if self._connecting is not None:
            _close_copy(self._connecting)
        if self.tapped is not None:
            self.tapped.forget()

    def abort(self) -> None:
        """Abort the connection. The caller has to call pika's `close` before, or pika reports an error."""
        if self._transport is not None:
            assert self.tapped is not None
            self.tapped.broken = True
            self._transport.abort()

    def untap(self) -> None:
        """Forget the socket, which is about to be closed."""
        self._transport = None
        assert self.tapped is not None
        fd = self.tapped.fileno()
        super().remove_reader(fd)
        self._library_writer, self._ours = None, False
        self._watch(fd)
        self.tapped = None

    def _watch(self, fd: int) -> None:
        if self._library_writer is not None or self._ours:
            super().set_writer(fd, self._on_writable)
        else:
            super().remove_writer(fd)

    def _on_writable(self) -> None:
        # A partly written frame is completed first.
        self.pump()
        if self._library_writer is not None:
            self._library_writer()
            self.pump()
