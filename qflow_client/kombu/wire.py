"""The transports of py-amqp, with a `Tap` between py-amqp and the socket. Only this module waits for the socket."""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Any

from amqp.exceptions import RecoverableConnectionError
from amqp.transport import SSLTransport, TCPTransport

from qflow_client.amqp.frames import METHOD_FRAME, FrameError
from qflow_client.amqp.tap import Tap
from qflow_client.forks import replace_copy
from qflow_client.locks import RLock

__all__ = ["PlainWire", "TLSWire", "Unanswered", "Wire"]

_monotonic = time.monotonic

_HEAD = Struct(">BHI")
_DELIVER = b"\0\x3c\0\x3c"
# Maximum bytes of one read or write of the socket.
_READ = 1 << 16
_WRITE = 1 << 18

_TCP_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)

_MUST_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Unanswered(TimeoutError):
    """The broker has not answered in time, because it blocks the connection or reads nothing."""


def _unpatched_poll() -> Any:
    """Return Python's own poll object, even if gevent has replaced `select.poll`."""
    monkey = sys.modules.get("gevent.monkey")
    return select.poll() if monkey is None else monkey.get_original("select", "poll")()


class _Poll:
    """Waits for one socket, and for `wake` from another thread.

    If gevent has patched Python, other greenlets run during a wait. A check without waiting must not use gevent's poll,
    which would switch to another greenlet.
    """

    def __init__(self, sock: Any) -> None:
        # Another thread writes to this pipe to end a wait. The pipe is created for the first wait.
        self._pipe: tuple[int, int] | None = None
        self._fd = sock.fileno()
        self._for_input = select.poll()
        self._for_input.register(self._fd, select.POLLIN)
        self._for_both = select.poll()
        self._for_both.register(self._fd, select.POLLIN | select.POLLOUT)
        self._for_now = _unpatched_poll()
        self._for_now.register(self._fd, select.POLLIN | select.POLLOUT)

    def now(self) -> int:
        """Return the present state of the socket (the bits of `select.poll`) without waiting."""
        found = self._for_now.poll(0)
        return int(found[0][1]) if found else 0

    def wait(self, seconds: float, *, writable: bool) -> int:
        """Wait for bytes, for `wake`, or (if `writable` is True) for room in the socket.

        Returns:
            The bits of `select.poll` that ended the wait; 0 if the socket did not end it.
        """
        if self._pipe is None:
            self._pipe = _pipe()
            for each in self._for_input, self._for_both:
                each.register(self._pipe[0], select.POLLIN)
        poll = self._for_both if writable else self._for_input
        ready = 0
        for fd, found in poll.poll(None if seconds == math.inf else max(0, math.ceil(seconds * 1000))):
            if fd == self._fd:
                ready = found
            else:
                with suppress(BlockingIOError):
                    os.read(self._pipe[0], 4096)
        return ready

    def wake(self) -> None:
        """End a `wait`. Any thread may call this method."""
        if self._pipe is not None:
            with suppress(OSError):
                os.write(self._pipe[1], b"\0")

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        for fd in pipe or ():
            os.close(fd)

    # A program may drop a connection without closing it.
    __del__ = close


def _pipe() -> tuple[int, int]:
    if hasattr(os, "pipe2"):
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    both = os.pipe()
    for fd in both:
        os.set_blocking(fd, False)
    return both


class _Bell:
    """Wakes an event loop, which watches the descriptor `fd`. After `ring`, `fd` is readable until `stop`."""

    def __init__(self) -> None:
        self.fd, self._from = _pipe()

    def ring(self) -> None:
        # If the pipe is full, it is already readable.
        with suppress(BlockingIOError):
            os.write(self._from, b"\0")

    def stop(self) -> None:
        with suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        # If a child process has a copy of the descriptor, `epoll` watches the pipe even after `close`. So empty the
        # pipe. Otherwise the pipe would wake the loop again and again.
        self.stop()
        os.close(self.fd)
        os.close(self._from)


class Wire:
    """A mixin for a transport of py-amqp, between a connection and its socket. `Wire` must be the first base class.

    Reading: py-amqp's transport reads each frame in three pieces. The wire reads all available bytes at once, and keeps
    the frames until py-amqp asks for them. An event loop that watches the socket cannot see these frames, so the loop
    watches a `_Bell` too. All reads from the socket are in `receive`, which rings the bell if frames wait for py-amqp.
    `has_left_frames` stops the bell if no frames wait.

    Writing: the wire writes the channels' messages and py-amqp's methods one after the other, at frame boundaries.
    """

    # Attributes of py-amqp's class.
    sock: Any
    connected: bool
    connect_timeout: float | None
    read_timeout: float | None
    write_timeout: float | None
    _quick_recv: Callable[[int], bytes]

    #: Maximum seconds to wait until the broker reads bytes; ``None`` for no limit.
    limit: float | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tap = Tap()
        #: Functions to call between two frames. Each function passes a method to a channel of py-amqp.
        self.later: deque[Callable[[], object]] = deque()
        self.on_received: Callable[[], object] = _nothing
        #: Number of writes of the channels' output since heartbeats were last checked.
        self.sent = 0
        self.bytes_received = 0
        # Complete frames for py-amqp, and the number of their bytes that py-amqp has read.
        self._frames = b""
        self._at = 0
        # Maximum seconds of py-amqp's next read.
        self._patience: float | None = None
        # Held during each write, because other threads of a worker pool may acknowledge on this connection.
        self._writing = RLock()
        # True during a write, and after an interrupted write, because it is unknown how much of it was written.
        self._is_torn = False
        # Whether a frame of py-amqp is partly written.
        self._is_midway = False
        self._poll: _Poll | None = None
        # Rings while frames wait for py-amqp; ``None`` if no event loop watches the connection.
        self._bell: _Bell | None = None
        # Text of the error if the wire is used while it is not connected.
        self._why = "connection already closed"

    def _setup_transport(self) -> None:
        super()._setup_transport()  # type: ignore[misc]  # py-amqp's
        self.sock.settimeout(0.0)
        self._poll = _Poll(self.sock)
        self._write = self._write_all

    def _get_tcp_socket_defaults(self, sock: Any) -> dict[int, int]:
        found: dict[int, int] = super()._get_tcp_socket_defaults(sock)  # type: ignore[misc]  # py-amqp's
        if _TCP_USER_TIMEOUT is not None:
            # By py-amqp's default, Linux ends a connection if the peer accepts no bytes for a second. But the write of
            # a message may take `limit` seconds, and so may the write of a method after it.
            found[_TCP_USER_TIMEOUT] = 0 if self.limit is None else min(int(2000 * self.limit) + 1000, 1 << 30)
        return found

    def close(self) -> None:
        super().close()  # type: ignore[misc]  # py-amqp's
        if self._poll is not None:
            self._poll.close()
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()

    def leave_to_parent(self, why: str) -> None:
        """Close the copy of the socket in a forked child, without sending anything to the broker."""
        replace_copy(self.sock.fileno())
        self._why = why
        self.connected = False
        self._quick_recv = self.check_connected
        # A thread of the parent may have held the lock during the fork.
        self._writing = RLock()
        self._frames = b""
        self.later.clear()
        # Do not close the pipes, because `_Bell.close` would read bytes that are for the parent.
        self._poll = self._bell = None

    def check_connected(self, *_arguments: Any) -> Any:
        """Raise `RecoverableConnectionError` if the wire is closed, or belongs to another process."""
        if not self.connected:
            raise RecoverableConnectionError(self._why)

    def wake(self) -> None:
        """End a `wait`. Any thread may call this method."""
        if self._poll is not None:
            self._poll.wake()

    @contextmanager
    def having_timeout(self, timeout: float | None) -> Iterator[Any]:
        before, self._patience = self._patience, timeout
        try:
            yield self.sock
        finally:
            self._patience = before

    def read_frame(self, unpack: Any = None) -> tuple[int, int, bytes]:
        """Return py-amqp's next frame, after all functions in `later` were called."""
        while (found := self.next_frame(self._patience)) is None:
            self.later.popleft()()
        return found

    def next_frame(self, timeout: float | None) -> tuple[int, int, bytes] | None:
        """Return type, channel and payload of py-amqp's next frame, or ``None`` if a function in `later` comes first.

        Raises:
            TimeoutError: no frame has come in time.
        """
        end: float | None = None
        while True:
            if self.later:
                return None
            at, frames = self._at, self._frames
            if at < len(frames):
                kind, number, size = _HEAD.unpack_from(frames, at)
                start = at + _HEAD.size
                self._at = start + size + 1
                return kind, number, frames[start : start + size]
            if end is None and self.receive():
                continue
            if end is None:
                if timeout is None:
                    timeout = self.read_timeout
                end = math.inf if timeout is None else _monotonic() + timeout
            left = end - _monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self.wait(left)

    @property
    def has_frames(self) -> bool:
        """Whether there are frames for py-amqp, or functions in `later`."""
        return self._at < len(self._frames) or bool(self.later)

    def bell(self) -> int:
        """Return a file descriptor for an event loop. It is readable if frames, or functions in `later`, wait."""
        if self._bell is None:
            self._bell = _Bell()
        if self.has_frames:
            self._bell.ring()
        return self._bell.fd

    def has_left_frames(self) -> bool:
        """Return True if frames, or functions in `later`, wait. If not, `bell` is no longer readable."""
        if not self.has_frames and self._bell is not None:
            self._bell.stop()
            # Check again, because another thread may have read from the socket and rung the bell.
            if self.has_frames:
                self._bell.ring()
        return self.has_frames

    @property
    def has_news(self) -> bool:
        """Whether a function in `later`, or a frame that is not a ``Basic.Deliver``, comes next for py-amqp."""
        if self.later:
            return True
        at, frames = self._at, self._frames
        return at < len(frames) and (frames[at] != METHOD_FRAME or frames[at + 7 : at + 11] != _DELIVER)

    def receive(self) -> bool:
        """Read the available bytes without waiting. Return True if there were bytes."""
        sock = self.sock
        if sock is None:
            raise RecoverableConnectionError(self._why)
        try:
            data = self._quick_recv(_READ)
        except _MUST_WAIT:
            return False
        except OSError:
            self.connected = False
            raise
        if not data:
            self.connected = False
            raise OSError("Server unexpectedly closed connection")
        self.bytes_received += len(data)
        try:
            passed = self.tap.received(data, _monotonic())
        except FrameError as error:
            self.connected = False
            # An OSError, so that kombu tries again, or tries the next host of a list.
            raise ConnectionAbortedError(f"the data from the broker cannot be read: {error}") from error
        if passed:
            self._frames = self._frames[self._at :] + passed
            self._at = 0
        if self._bell is not None and self.has_frames:
            self._bell.ring()
        self.on_received()
        return True

    def look(self) -> bool:
        """Read all available bytes without waiting. Return True if the socket accepts bytes."""
        poll = self._poll
        if poll is None or not self.connected:
            raise RecoverableConnectionError(self._why)
        ready = poll.now()
        if ready & ~select.POLLOUT or self._has_pending():
            self._receive_all()
        return ready & select.POLLOUT != 0

    def _receive_all(self) -> None:
        received = self.bytes_received
        while self.receive():
            if self.bytes_received - received < _READ and not self._has_pending():
                break
            received = self.bytes_received

    def _has_pending(self) -> bool:
        """Return True if the TLS library has buffered bytes, which the state of the socket does not show."""
        return False

    def wait(self, seconds: float, *, writable: bool = False) -> bool:
        """Wait for bytes, `wake`, or (if `unwritten` or `writable`) room in the socket. Then read and write.

        Return True if the socket has room. If the call did not wait for room, return False.
        """
        if self._poll is None:
            raise RecoverableConnectionError(self._why)
        has_pending = self._has_pending()
        ready = self._poll.wait(0.0 if has_pending else seconds, writable=writable or self.unwritten)
        if ready & ~select.POLLOUT or has_pending:
            self._receive_all()
        is_writable = ready & select.POLLOUT != 0
        if is_writable and self.unwritten:
            self.flush()
        return is_writable

    @property
    def unwritten(self) -> bool:
        """Whether a frame of a channel is partly written."""
        return not self.tap.at_border

    def flush(self) -> None:
        """Write the channels' output until all is written or the socket accepts no more bytes."""
        tap = self.tap
        with self._writing:
            if self._is_midway:
                return
            self._check()
            while data := tap.data_to_write(_WRITE):
                self._is_torn = True
                try:
                    count = self._some(data)
                except OSError:
                    self.connected = False
                    raise
                tap.advance(count, _monotonic())
                self._is_torn = False
                self.sent += 1
                if count < len(data):
                    break

    def _check(self) -> None:
        if self._is_torn:
            self.connected = False
            raise RecoverableConnectionError("a write was interrupted, and it is not known how much of it is written")

    def finish(self) -> float:
        """Complete a partly written frame of a channel. Return the deadline, which also limits py-amqp's next frame."""
        limit = self.limit if self.write_timeout is None else self.write_timeout
        with self._writing:
            end = math.inf if limit is None else _monotonic() + limit
            self._check()
            while not self.tap.at_border:
                rest = self.tap.unfinished
                self._is_torn = True
                count = self._some(rest)
                self.tap.advance(count, _monotonic())
                self._is_torn = False
                if count < len(rest):
                    self._await_room(end)
            return end

    def _write_all(self, data: bytes) -> None:
        """Write a frame of py-amqp."""
        with self._writing:
            end = self.finish()
            view = memoryview(data)
            self._is_torn = self._is_midway = True
            while True:
                view = view[self._some(view) :]
                if not view:
                    break
                self._await_room(end)
            self._is_torn = self._is_midway = False

    def _await_room(self, end: float) -> None:
        left = end - _monotonic()
        if left <= 0:
            # After a partly written frame the connection cannot be used any more.
            self.connected = False
            raise Unanswered("the broker takes no more bytes")
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        poll.poll(None if left == math.inf else math.ceil(left * 1000))

    def _some(self, data: Any) -> int:
        """Write as many bytes as the socket accepts, and return their number."""
        try:
            return int(self.sock.send(data))
        except _MUST_WAIT:
            return 0


def _nothing() -> None:
    pass


class PlainWire(Wire, TCPTransport):  # type: ignore[misc]  # py-amqp has no types
    """The transport for TCP."""


class TLSWire(Wire, SSLTransport):  # type: ignore[misc]  # py-amqp has no types
    """The transport for TLS."""

    # Attributes of py-amqp's class.
    host: str

    #: The name that the broker's certificate must have; ``None`` for the name of the host.
    server_name: str | None = None

    def _wrap_socket(self, sock: Any, context: Any = None, **options: Any) -> Any:
        """If certificates are verified, also verify the name in the certificate, unless ``check_hostname`` is False.

        py-amqp verifies the name only if ``server_hostname`` is given. Without ``server_hostname``, py-amqp accepts a
        certificate of the authority for any other host.
        """
        if context:
            context = {"check_hostname": True, **context}
            names_host = context["check_hostname"]
        else:
            names_host = options.get("cert_reqs") != ssl.CERT_NONE
        if names_host and options.get("server_hostname") is None:
            options["server_hostname"] = self.server_name or self.host
        return super()._wrap_socket(sock, context, **options)

    def _has_pending(self) -> bool:
        return bool(self.sock.pending())

    def _shutdown_transport(self) -> None:
        # Limit the time of the closing TLS handshake.
        self.sock.settimeout(self.connect_timeout or 1.0)
        super()._shutdown_transport()
