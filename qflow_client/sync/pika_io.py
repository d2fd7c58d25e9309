"""Puts a `Tap` between pika and the socket, through pika's public interface for I/O services.

When pika has connected a socket, it calls `create_streaming_connection`, where `TapIOServices` wraps the socket. The
tap filters received data before pika gets the data. pika's own data waits until no producer's frame is partly written.
`pump` writes the producers' bytes when the socket accepts them.
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
# After this many reads without data for pika, `recv` continues only while the TLS socket has buffered data.
_TLS_READS = 64

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError)


class _TapSocket:
    """A connected socket, plain or TLS. Its received data goes through the `Tap` before pika gets the data."""

    def __init__(self, sock: Any, services: TapIOServices) -> None:
        self._sock = sock
        self._services = services
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # True if pika must write next, because the socket accepted only a part of pika's chunk or of a TLS record.
        self.library_mid_chunk = False
        # Whether a write has failed or the connection was aborted. pika notices this at its next read.
        self.broken = False
        # Whether the socket accepts no more bytes of producers for now.
        self.full = False
        # A partly written TLS record of a producer; empty if there is none.
        self._begun_record = b""
        self.write_chunk = TLS_WRITE_CHUNK if self._is_tls else WRITE_CHUNK
        services.tapped, services.peer = self, peer_of(sock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, _size: int) -> bytes:
        services = self._services
        reads = 0
        while True:
            if services.tap.error is not None:
                # `received` raises the error of the tap. pika already has all frames before the error.
                services.received(b"")
            data = self._sock.recv(_READ_CHUNK)
            if not data:
                return b""
            passed = services.received(data)
            if services.tap.error is not None:
                # pika gets the tap's error at its next read. But after a large read pika waits until the socket is
                # readable. `cut` aborts the connection, which makes it readable.
                services.add_callback_threadsafe(self.cut)
            if passed:
                return passed
            if not self._is_tls:
                raise BlockingIOError(errno.EAGAIN, "there is no data for pika")
            # A TLS socket may buffer bytes that poll does not report, so read at least until this buffer is empty.
            reads += 1
            if reads >= _TLS_READS and not self._sock.pending():
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "there is no data for pika")

    def send(self, data: bytes) -> int:
        """Send pika's data if it is pika's turn to write. Otherwise raise the same error as a full socket."""
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
            # A partly written TLS record must be written again before any other data. A plain socket has accepted no
            # byte of `data`. The flag stays True if an earlier call has written a first part of the chunk.
            self.library_mid_chunk = self.library_mid_chunk or self._is_tls
            raise
        self.library_mid_chunk = sent < len(data)
        services.library_sent += sent
        return sent

    def send_ours(self, data: bytes) -> int:
        """Send the producers' data, and update `full`. Return how many bytes are sent or in a begun TLS record."""
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
        """Continue a partly written TLS record. If there is no such record, set `full` to False."""
        if self._begun_record:
            data, self._begun_record = self._begun_record, b""
            self.send_ours(data)
        else:
            self.full = False

    def cut(self) -> None:
        """Abort the connection. pika notices the abort at its next read."""
        self.broken = True
        with suppress(OSError):
            # Do not call `SSLSocket.shutdown`, after which further data would be read as plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a forked child, close the copy of the socket. The parent's connection stays open."""
        _close_copy(self._sock)

    def close(self) -> None:
        if self._services.tapped is self:
            self._services.untap()
        self._sock.close()


def _is_usable(address: Any) -> bool:
    """Return False if this system does not support the family of an address, such as IPv6. pika would try no other."""
    try:
        socket.socket(*address[:3]).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def _close_copy(sock: socket.socket) -> None:
    with suppress(OSError):
        os.close(sock.detach())


class _TapContext(ssl.SSLContext):
    """A TLS context that wraps the TLS sockets of the application's context in `_TapSocket` objects."""

    _context: ssl.SSLContext
    _services: TapIOServices

    def __new__(cls, context: ssl.SSLContext, services: TapIOServices) -> _TapContext:
        self = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        self._context = context
        self._services = services
        return self

    def wrap_socket(self, sock: Any, *args: Any, **kwargs: Any) -> Any:
        return _TapSocket(self._context.wrap_socket(sock, *args, **kwargs), self._services)


class _Loop(IOLoop):
    """pika's loop, which can continue after an error. A second call of `start` might find no free file descriptor."""

    def __init__(self) -> None:
        super().__init__()
        #: Called with each error of a callback. If it returns False, the error ends the loop.
        self.handle: Callable[[Exception], bool] = lambda _error: False

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:
            if not self.handle(error):
                raise

    def add_handler(self, fd: int, handler: Callable[[int, int], None], events: int) -> None:
        super().add_handler(fd, partial(self.call, handler), events)

    def call_later(self, delay: float, callback: Callable[[], object]) -> Any:
        return super().call_later(delay, partial(self.call, callback))

    def add_callback_threadsafe(self, callback: Callable[[], object]) -> None:
        super().add_callback_threadsafe(partial(self.call, callback))

    add_callback = add_callback_threadsafe


class TapIOServices(SelectorIOServicesAdapter):
    """pika's I/O services, with a `Tap` at the socket. One object serves several connections, one after the other.

    Any thread may call `wake` and `add_callback_threadsafe`. Only the thread of the loop may call the other methods.

    Args:
        lock: guards the tap and its channels.
        after: called after every event that may have changed a channel, but not under `lock`.
        delay: called under `lock` with the number of bytes of a read. Returns the seconds to wait before the next read,
            so that the broker's answers accumulate. The default is not to wait.
    """

    def __init__(
        self,
        tap: Tap,
        lock: Guard,
        after: Callable[[], None],
        delay: Callable[[int], float] = lambda _size: 0.0,
    ) -> None:
        self.loop = _Loop()
        super().__init__(self.loop)  # type: ignore[arg-type]  # it accepts pika's own loop
        # The calls that other threads request. pika's own queue of calls uses a lock. A signal handler or a finalizer
        # may interrupt a thread that holds this lock, and would wait for the lock forever.
        self._calls: deque[Callable[[], object]] = deque()
        # The socket pair that wakes the loop.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        super().set_reader(self._woken.fileno(), self._on_woken)
        self.tap = tap
        self.lock = lock
        self._after = after
        self._delay = delay
        # The connected socket; ``None`` while there is no connection.
        self.tapped: _TapSocket | None = None
        #: The broker's address in the newest connection; ``None`` before the first connection.
        self.peer: tuple[str, int] | None = None
        # pika's transport for the socket. With TLS, the attribute is set after the handshake.
        self._transport: Any = None
        # The socket of pika's newest try to connect; ``None`` before the first try.
        self._connecting: socket.socket | None = None
        # pika's callback for a writable socket; ``None`` if pika does not wait for one.
        self._library_writer: Callable[[], None] | None = None
        # Whether producers wait for a writable socket.
        self._ours = False
        #: Puts the addresses of a host name into the order in which pika tries them; ``None`` for the resolver's order.
        self.order_addresses: Callable[[list[Any]], list[Any]] | None = None
        # Number of bytes that pika has sent since a producer last wrote or had nothing to write.
        self.library_sent = 0
        # If True, `pump` runs now or will be called. `pump` clears the flag before its final check for output. So a
        # thread that has added output and finds the flag True need not wake the I/O thread.
        self.awake = False
        # How often `awake` was cleared, see `wake`.
        self._rests = 0
        # Whether `wake` sets `awake`; see `is_undisturbed`.
        self._may_set_awake = is_undisturbed()

    def wake(self) -> None:
        """Schedule `pump`. Any thread may call this method after it has added output."""
        rests = self._rests
        self.add_callback_threadsafe(self.pump)
        # Set `awake` last. If an exception interrupts this method earlier, the next sender wakes the I/O thread. If the
        # I/O thread has cleared `awake` meanwhile, leave it False. No other code runs between check and assignment
        # (`is_undisturbed`).
        if self._may_set_awake and rests == self._rests:
            self.awake = True

    def _rest(self) -> None:
        """Clear `awake`, so that a thread that adds output wakes the I/O thread."""
        self._rests += 1
        self.awake = False

    def add_callback_threadsafe(self, callback: Callable[[], object]) -> None:
        """Same as pika's method, but signal handlers and finalizers may also call it."""
        self._calls.append(callback)
        # If the socket pair is full, the bytes in it already wake the loop.
        with suppress(OSError):
            self._waker.send(b"\0")
        if self._waker.fileno() < 0:
            # The socket is closed, because the loop has ended.
            self._calls.clear()

    def _on_woken(self) -> None:
        # Read first, so that a call that is added from now on wakes the loop again.
        with suppress(BlockingIOError):
            self._woken.recv(_READ_CHUNK)
        for _ in range(len(self._calls)):
            self.loop.call(self._calls.popleft())

    def close(self) -> None:
        super().close()
        self._waker.close()
        self._woken.close()

    # Reading and writing.

    def received(self, data: bytes) -> bytes:
        """Pass received data to the tap, write the producers' output, and call `after`. Return the data for pika."""
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
        # Write output before `after` wakes threads, because these threads compete with this thread for the interpreter.
        self.pump()
        self._after()
        if delay:
            # During the sleep, answers accumulate in the socket, and senders add messages without waking this thread.
            self.awake = True
            time.sleep(delay)
            self.pump()
        return passed

    def pump(self) -> None:
        """Write the channels' bytes until all are written, the socket is full, or it is pika's turn to write."""
        tapped = self.tapped
        if tapped is None or tapped.broken or tapped.library_mid_chunk:
            # When there is a connection, or pika's chunk is written, `pump` is called again.
            with self.lock:
                self._rest()
                self.awake = tapped is not None and tapped.library_mid_chunk
            return
        tap, lock = self.tap, self.lock
        changed = False
        tapped.finish_record()
        while not tapped.full and not tapped.broken:
            # pika and the producers take turns, so that pika's heartbeats and acks are not delayed forever. If pika has
            # data, and has written nothing since a producer last wrote, complete only a partly written frame.
            yields = self._library_writer is not None and not self.library_sent
            with lock:
                data = tap.unfinished if yields else tap.data_to_write(tapped.write_chunk)
                if not data:
                    self.library_sent = 0
                    if yields:
                        break
                    self._rest()
                    # Check again, because a thread may have added output before `awake` was cleared.
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

    # pika calls the public methods below, except `forget`, `abort` and `untap`.

    def getaddrinfo(self, host: Any, port: Any, on_done: Callable[[Any], None], *args: Any, **keywords: Any) -> Any:
        """Same as pika's method, but without unusable addresses, and `order_addresses` sorts the addresses."""

        def done(found: Any) -> None:
            if found and isinstance(found, list):
                # Keep the addresses if none can be used. Then pika's error has the reason.
                found = list(filter(_is_usable, found)) or found
                if self.order_addresses is not None:
                    found = self.order_addresses(found)
            on_done(found)

        return super().getaddrinfo(host, port, done, *args, **keywords)

    def connect_socket(self, sock: socket.socket, resolved_addr: Any, on_done: Any) -> Any:
        """Same as pika's method. The socket is recorded, so that a forked child can close its copy."""
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
        """Same as pika's method, with the `Tap` at the socket."""
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
            # The peer has already reset the connection. pika has closed the socket, but has not called `on_done`.
            self.tapped = None
            error = ConnectionResetError(errno.ECONNRESET, "the connection was reset as soon as it was open")
            return self.call_later(0.0, partial(on_done, error))

    def set_writer(self, fd: int, on_writable: Callable[[], None]) -> None:
        """Same as pika's method, but producers may also wait until the tapped socket is writable, see `_watch`."""
        if self.tapped is None or fd != self.tapped.fileno():
            super().set_writer(fd, on_writable)
            return
        self._library_writer = on_writable
        self._watch(fd)

    def remove_writer(self, fd: int) -> bool:
        if self.tapped is None or fd != self.tapped.fileno():
            return bool(super().remove_writer(fd))
        had = self._library_writer is not None
        self._library_writer = None
        self._watch(fd)
        return had

    def forget(self) -> None:
        """In a forked child, close the copy of the socket. The connection belongs to the parent."""
        if self._connecting is not None:
            _close_copy(self._connecting)
        if self.tapped is not None:
            self.tapped.forget()

    def abort(self) -> None:
        """Abort the connection. Call pika's `close` first; otherwise pika logs an error."""
        if self._transport is not None:
            assert self.tapped is not None
            self.tapped.broken = True
            self._transport.abort()

    def untap(self) -> None:
        """Stop watching the socket, and drop the references to it. Call this method before the socket is closed."""
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
        # Complete a partly written frame before pika writes.
        self.pump()
        if self._library_writer is not None:
            self._library_writer()
            self.pump()
