"""The tap put into pika, through pika's public interface for I/O services.

pika hands the socket that it has connected to `AbstractIOServices.create_streaming_connection`. Ours wraps that socket:
what pika receives has gone through the tap, what pika sends waits for a frame border, and the channels' own bytes are
written when the socket takes them.
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
# How often a TLS socket is read before everybody else has a turn.
_TLS_READS = 64

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError)


class _TapSocket:
    """A connected socket, plain or TLS, as pika uses one."""

    def __init__(self, sock: Any, services: TapIOServices) -> None:
        self._sock = sock
        self._services = services
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # Whether pika has begun a chunk that the socket did not take whole.
        self.library_mid_chunk = False
        # Set by the first failure to write, and when it is cut; pika learns of it when it reads.
        self.broken = False
        # Whether the socket takes no more of ours for now.
        self.full = False
        # A TLS record of ours that was begun.
        self._begun_record = b""
        self.write_chunk = TLS_WRITE_CHUNK if self._is_tls else WRITE_CHUNK
        services.tapped, services.peer = self, peer_of(sock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, _size: int) -> bytes:
        """What pika is to see of what has come."""
        services = self._services
        reads = 0
        while True:
            if services.tap.error is not None:
                # Raises: what came before the error has been passed.
                services.received(b"")
            data = self._sock.recv(_READ_CHUNK)
            if not data:
                return b""
            passed = services.received(data)
            if services.tap.error is not None:
                # pika does not read on by itself if it has been given a lot.
                services.add_callback_threadsafe(self.cut)
            if passed:
                return passed
            if not self._is_tls:
                raise BlockingIOError(errno.EAGAIN, "nothing for the library")
            # A TLS socket may hold bytes back that no poll tells of, so it is read until it says that it has none.
            reads += 1
            if reads >= _TLS_READS and not self._sock.pending():
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "nothing for the library")

    def send(self, data: bytes) -> int:
        """Send for pika, at a frame border."""
        services = self._services
        if not self.library_mid_chunk and (
            self._begun_record or not services.tap.at_border or services.library_sent >= self.write_chunk
        ):
            if self._is_tls:
                raise ssl.SSLWantWriteError(ssl.SSL_ERROR_WANT_WRITE, "it is a producer's turn")
            raise BlockingIOError(errno.EAGAIN, "it is a producer's turn")
        try:
            sent: int = self._sock.send(data)
        except _WOULD_BLOCK:
            # A TLS record that was begun must be offered again before anything else. A plain socket has taken nothing,
            # but may have taken the beginning of the chunk before.
            self.library_mid_chunk = self.library_mid_chunk or self._is_tls
            raise
        self.library_mid_chunk = sent < len(data)
        services.library_sent += sent
        return sent

    def send_ours(self, data: bytes) -> int:
        """Send for a producer.

        Returns:
            How many bytes are sent, or cannot be taken back; `full` tells whether to go on.
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
        """Go on with a TLS record that the socket did not take whole."""
        if self._begun_record:
            data, self._begun_record = self._begun_record, b""
            self.send_ours(data)
        else:
            self.full = False

    def cut(self) -> None:
        """End the connection at once; pika finds it closed when it reads."""
        self.broken = True
        with suppress(OSError):
            # Not a TLS socket's own way, which would have what still comes read as plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close this process's descriptor and nothing else."""
        _close_copy(self._sock)

    def close(self) -> None:
        """Close it, and stop watching it."""
        if self._services.tapped is self:
            self._services.untap()
        self._sock.close()


def _close_copy(sock: socket.socket) -> None:
    with suppress(OSError):
        os.close(sock.detach())


class _TapContext(ssl.SSLContext):
    """The application's TLS context, whose sockets are tapped. The context itself stays as it is."""

    _context: ssl.SSLContext
    _services: TapIOServices

    def __new__(cls, context: ssl.SSLContext, services: TapIOServices) -> _TapContext:
        self = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        self._context = context
        self._services = services
        return self

    def wrap_socket(self, sock: Any, *args: Any, **kwargs: Any) -> Any:
        """A tapped TLS socket."""
        return _TapSocket(self._context.wrap_socket(sock, *args, **kwargs), self._services)


class TapIOServices(SelectorIOServicesAdapter):
    """pika's I/O services for one connection after the other, with a tap at the socket.

    Everything but `wake` belongs to the thread that runs the loop.

    Args:
        tap: the tap.
        lock: held around every use of the tap and of the channels behind it.
        after: called, without the lock, after anything that may have changed a channel.
        delay: told the size of answers that were taken, with the lock, it says for how many seconds what comes next may
            gather; unless given, everything is read as it comes.
    """

    def __init__(
        self,
        tap: Tap,
        lock: Guard,
        after: Callable[[], None],
        delay: Callable[[int], float] = lambda _size: 0.0,
    ) -> None:
        super().__init__(IOLoop())  # type: ignore[arg-type]  # pika's own loop is what it takes
        # What other threads ask for, and the two ends by which they wake the loop. Not pika's own way, which has a lock
        # that a signal handler or a finalizer may find taken by the thread that it interrupts.
        self._calls: deque[Callable[[], object]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        super().set_reader(self._woken.fileno(), self._on_woken)
        self.tap = tap
        self.lock = lock
        self._after = after
        self._delay = delay
        # The socket, once it is connected and until it is closed.
        self.tapped: _TapSocket | None = None
        #: What it is connected to, or was last; None before.
        self.peer: tuple[str, int] | None = None
        # pika's transport on it, likewise, but only once TLS is there.
        self._transport: Any = None
        # The last one that was to be connected.
        self._connecting: socket.socket | None = None
        # pika's own interest in the socket taking bytes, and ours.
        self._library_writer: Callable[[], None] | None = None
        self._ours = False
        #: Given the addresses of a name, returns the order in which pika tries them; None for that of the resolver.
        self.order_addresses: Callable[[list[Any]], list[Any]] | None = None
        # Bytes that pika has sent since a producer had its turn.
        self.library_sent = 0
        # True while `pump` runs or is due. `pump` clears it before its last look for output, so a thread that adds
        # output and finds it True does not wake the I/O thread.
        self.awake = False
        # How often `awake` was cleared.
        self._rests = 0
        # Whether `wake` may set `awake`, see there.
        self._may_set_awake = is_undisturbed()

    def wake(self) -> None:
        """Have `pump` run soon. Any thread may call this at any moment, after it has added output."""
        rests = self._rests
        self.add_callback_threadsafe(self.pump)
        # Last, because after an interrupt before this line the next sender must wake the I/O thread. That thread may
        # have cleared `awake` meanwhile: then it stays False. Nothing interrupts the two instructions, see `admission`.
        if self._may_set_awake and rests == self._rests:
            self.awake = True

    def _rest(self) -> None:
        """Clear `awake`: the next thread that adds output wakes the I/O thread."""
        self._rests += 1
        self.awake = False

    def add_callback_threadsafe(self, callback: Callable[[], object]) -> None:
        """As pika's; at any moment, also from a signal handler or a finalizer."""
        self._calls.append(callback)
        # It is full of bytes that wake as well, or closed.
        with suppress(OSError):
            self._waker.send(b"\0")

    def _on_woken(self) -> None:
        # First, so that what is asked for from here on wakes again.
        with suppress(BlockingIOError):
            self._woken.recv(_READ_CHUNK)
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """As pika's."""
        super().close()
        self._waker.close()
        self._woken.close()

    # The socket's bytes.

    def received(self, data: bytes) -> bytes:
        """Give what came to the tap, and do what follows from it."""
        now = time.monotonic()
        with self.lock:
            try:
                passed = self.tap.received(data, now)
            except FrameError as error:
                raise ConnectionAbortedError(errno.ECONNABORTED, f"the broker sent {error}") from error
            self.awake = True
            delay = 0.0 if passed else self._delay(len(data))
        # What waits to be written first: whoever is woken wants the interpreter for itself.
        self.pump()
        self._after()
        if delay:
            # Meanwhile answers gather in the socket and messages in the line, and nobody wakes this thread for them.
            self.awake = True
            time.sleep(delay)
            self.pump()
        return passed

    def pump(self) -> None:
        """Write what the channels have, until there is no more or the socket is full."""
        tapped = self.tapped
        if tapped is None or tapped.broken or tapped.library_mid_chunk:
            # Whatever ends that comes back here.
            with self.lock:
                self._rest()
                self.awake = tapped is not None and tapped.library_mid_chunk
            return
        tap, lock = self.tap, self.lock
        changed = False
        tapped.finish_record()
        while not tapped.full and not tapped.broken:
            # pika has something to write too, and has written nothing since we did: it gets the next frame border, or a
            # socket that is always full would keep its heartbeats and acks back for ever. That the socket is writable
            # brings us back. Nor does pika write more than about a chunk before we do.
            yields = self._library_writer is not None and not self.library_sent
            with lock:
                data = tap.unfinished if yields else tap.data_to_write(tapped.write_chunk)
                if not data:
                    self.library_sent = 0
                    if yields:
                        break
                    self._rest()
                    # What was put before that.
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
        """As pika's, in the order that the link wants."""

        def done(found: Any) -> None:
            if found and isinstance(found, list) and self.order_addresses is not None:
                found = self.order_addresses(found)
            on_done(found)

        return super().getaddrinfo(host, port, done, *args, **keywords)

    def connect_socket(self, sock: socket.socket, resolved_addr: Any, on_done: Any) -> Any:
        """As pika's; a fork finds the socket from here on."""
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
        """As pika's, with the tap at the socket."""
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
            # pika, which has closed it, takes a socket that the peer has reset by now for a mistake, and raises that
            # where nobody catches it.
            self.tapped = None
            error = ConnectionResetError(errno.ECONNRESET, "it was reset as soon as it was connected")
            return self.call_later(0.0, partial(on_done, error))

    def set_writer(self, fd: int, on_writable: Callable[[], None]) -> None:
        """As pika's; the socket that is tapped has two writers."""
        if self.tapped is None or fd != self.tapped.fileno():
            super().set_writer(fd, on_writable)
            return
        self._library_writer = on_writable
        self._watch(fd)

    def remove_writer(self, fd: int) -> bool:
        """As pika's."""
        if self.tapped is None or fd != self.tapped.fileno():
            return bool(super().remove_writer(fd))
        had = self._library_writer is not None
        self._library_writer = None
        self._watch(fd)
        return had

    def forget(self) -> None:
        """After a fork, in the child: close its copy of the socket. The connection itself is the parent's."""
        if self._connecting is not None:
            _close_copy(self._connecting)
        if self.tapped is not None:
            self.tapped.forget()

    def abort(self) -> None:
        """End the connection at once. For pika that is no error, so pika must have been told to close it."""
        if self._transport is not None:
            assert self.tapped is not None
            self.tapped.broken = True
            self._transport.abort()

    def untap(self) -> None:
        """The socket is about to be closed."""
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
        # Who has begun ends first.
        self.pump()
        if self._library_writer is not None:
            self._library_writer()
            self.pump()
