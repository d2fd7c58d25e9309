"""Listening sockets, with limits that asyncio's server does not have.

At most `max_handshakes` TLS handshakes run at the same time; if there are more, the oldest is cancelled. If the system
has no more file descriptors or memory, the listener accepts nothing for `PAUSE` seconds. It logs this at most once in
`LOG_INTERVAL` seconds; asyncio's server logs it up to `BACKLOG` times per second. The protocol object of a connection
is made, and `unauthenticated_timeout` starts, before the TLS handshake.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
from collections.abc import Callable
from functools import partial

from qflow_client.broker.core.logs import get_logger
from qflow_client.forks import close_in_children

__all__ = ["Listener", "cannot_listen"]

_log = get_logger(__name__)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """Return a copy of an error with the address in its text."""
    return OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}")


class Listener:
    """Accepts connections.

    Args:
        ssl_context: a server-side context; ``None`` for plain TCP.
        handshake_timeout: maximum seconds for a TLS handshake.
    """

    PAUSE = 1.0
    LOG_INTERVAL = 60.0
    #: Maximum number of connections that each listening socket accepts in one iteration of the loop.
    MOST = 100
    BACKLOG = 1024

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        ssl_context: ssl.SSLContext | None,
        handshake_timeout: float,
        max_handshakes: int,
    ) -> None:
        self._make_protocol = make_protocol
        self._ssl_context = ssl_context
        self._handshake_timeout = handshake_timeout if ssl_context is not None else None
        self._max_handshakes = max_handshakes
        self._sockets: list[socket.socket] = []
        # The tasks that create the transports of accepted connections, the oldest first.
        self._opening: dict[asyncio.Task[None], None] = {}
        self._logged_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Start to listen, and return the port, which the system has chosen if `port` is 0.

        Raises:
            OSError: the address is in use or does not belong to this machine.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, protocol, _, address in dict.fromkeys(found):
                self._bind(family, protocol, address)
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, "the address does not exist")
        except OSError as error:
            self._close_sockets()
            raise cannot_listen(host, port, error) from error
        self._accept_on()
        return int(self._sockets[0].getsockname()[1])

    def _bind(self, family: int, protocol: int, address: tuple[object, ...]) -> None:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM, protocol)
        except OSError:
            # This machine does not support the address family.
            return
        self._sockets.append(listener)
        close_in_children(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(self.BACKLOG)
        listener.setblocking(False)

    def _accept_on(self) -> None:
        self._timer = None
        for listener in self._sockets:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept_off(self) -> None:
        for listener in self._sockets:
            asyncio.get_running_loop().remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self.MOST):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._accept_off()
                self._timer = loop.call_later(self.PAUSE, self._accept_on)
                if loop.time() >= self._logged_at + self.LOG_INTERVAL:
                    self._logged_at = loop.time()
                    _log.warning(
                        "no connection can be accepted: %s; raise the limit of open files (ulimit -n) above "
                        "max_connections, or lower that setting",
                        error.strerror,
                    )
                return
            accepted.setblocking(False)
            close_in_children(accepted)
            task = loop.create_task(self._open(accepted))
            self._opening[task] = None
            task.add_done_callback(partial(self._opened, accepted))
            if self._ssl_context is not None and len(self._opening) > self._max_handshakes:
                _log.debug("%d TLS handshakes are in progress; the oldest connection is cut", len(self._opening))
                oldest = next(iter(self._opening))
                del self._opening[oldest]
                oldest.cancel()

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._ssl_context,
                ssl_handshake_timeout=self._handshake_timeout,
            )
        except (OSError, asyncio.CancelledError) as error:
            # The client disconnected or failed the TLS handshake, or the task was cancelled. asyncio closed the socket.
            _log.debug("an accepted connection was closed before it was open: %s", str(error))

    def _opened(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)
        if task.cancelled():
            # `_open` catches cancellations, so this task was cancelled before `_open` began. The socket is still open.
            accepted.close()

    async def stop(self) -> None:
        """Stop accepting. Cancel incomplete TLS handshakes, and wait until all other connections have a transport."""
        self._accept_off()
        if self._timer is not None:
            self._timer.cancel()
        opening = tuple(self._opening)
        if self._ssl_context is not None:
            for task in opening:
                task.cancel()
        if opening:
            await asyncio.wait(opening)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()
