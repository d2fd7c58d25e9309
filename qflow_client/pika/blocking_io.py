"""The I/O of a `BlockingConnection`: its socket, its frames, and waits that let all I/O continue."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pika import spec
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

from qflow_client.events import HoldKind
from qflow_client.pika.adapters.select_connection import SelectConnection
from qflow_client.pika.flow import ConnectionFlow

__all__ = ["Connection", "Services", "Turns"]

_monotonic = time.monotonic
_POLLOUT = select.POLLOUT

# The broker's answers to a published message.
_ANSWERS = (spec.Basic.Ack, spec.Basic.Nack)

# With this option of Linux, the kernel collects small writes, and sends the data after at most 200 ms.
_TCP_CORK: int | None = getattr(socket, "TCP_CORK", None)


class Services(SelectorIOServicesAdapter):
    """pika's I/O services, which also report the state of the socket, and can write immediately."""

    #: Whether pika's output is written to the socket immediately. If False, it is written after the next poll.
    eager = False
    # The descriptor of the connected socket; -1 before the connection.
    _fd = -1
    # The connected socket, and a poll object for this socket only; ``None`` before the connection.
    _sock: Any = None
    _poll: Any = None
    # Whether the loop waits until the socket accepts bytes.
    _watches = False
    # Whether pika has called `remove_writer` since `set_writer` last wrote immediately. If so, all output is written.
    _is_done = False
    # pika's function that writes its output when the socket is writable.
    _writes: Callable[[], None] | None = None
    #: Called once when pika has written all its output, or when `wake_when_writable` finds the socket writable.
    on_writable: Callable[[], None] | None = None
    _is_corked = False

    def create_streaming_connection(
        self, protocol_factory: Any, sock: Any, on_done: Any, ssl_context: Any = None, server_hostname: Any = None
    ) -> Any:
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLOUT)
        self._fd = sock.fileno()
        self._sock = sock
        return super().create_streaming_connection(protocol_factory, sock, on_done, ssl_context, server_hostname)

    def set_writer(self, fd: int, on_writable: Callable[[], None]) -> None:
        if fd == self._fd:
            self._writes = on_writable
        if self.eager:
            self._is_done = False
            on_writable()
            if self._is_done:
                return
        self._watch(fd, on_writable)

    def _watch(self, fd: int, on_writable: Callable[[], None]) -> None:
        if fd == self._fd:
            self._watches = True
        super().set_writer(fd, on_writable)

    def go_on_writing(self) -> None:
        """Make the loop wait for a writable socket, if pika requested this and an interrupt has lost the request."""
        if not self._watches and self._writes is not None:
            self._watch(self._fd, self._writes)

    def remove_writer(self, fd: int) -> bool:
        if fd != self._fd:
            return bool(super().remove_writer(fd))
        self._is_done = True
        had = self._watches and bool(super().remove_writer(fd))
        self._watches = False
        told, self.on_writable = self.on_writable, None
        if told is not None:
            told()
        return had

    def ready(self) -> int:
        """Return the state of the socket: a combination of ``POLLIN``, ``POLLOUT`` and the flags for errors."""
        found: list[tuple[int, int]] = self._poll.poll(0)
        return found[0][1] if found else 0

    def cork(self, on: bool) -> None:
        """If `on` is True, let the kernel collect small writes for at most 200 ms. Otherwise, let it send them now."""
        if on is not self._is_corked:
            self._is_corked = on
            # With TLS, `_sock` has no descriptor, because the TLS socket has taken it.
            if _TCP_CORK is not None and self._sock.fileno() >= 0:
                with suppress(OSError):
                    self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_CORK, on)

    def wake_when_writable(self) -> None:
        """End the loop's next poll when the socket is writable. Call this only while pika has no output."""

        def awake() -> None:
            self.remove_writer(self._fd)

        self._watch(self._fd, awake)


class Connection(SelectConnection):
    """The connection of a `BlockingConnection`. It handles the broker's answers to published messages itself."""

    # Attributes of pika's class.
    frames_received: int
    flow_control: ConnectionFlow
    services: Services

    @classmethod
    def create_connection(
        cls, connection_configs: Any, on_done: Any, custom_ioloop: Any = None, workflow: Any = None
    ) -> Any:
        services = Services(custom_ioloop or IOLoop())  # type: ignore[arg-type]  # it accepts pika's own loop
        start: Any = cls._start_connection_workflow  # type: ignore[attr-defined]  # private

        def make(parameters: Any) -> Connection:
            made = cls(parameters=parameters, custom_ioloop=services, internal_connection_workflow=False)
            made.services = services
            return made

        return start(
            connection_configs=connection_configs,
            connection_factory=make,
            nbio=services,
            workflow=workflow,
            on_done=on_done,
        )

    def _process_frame(self, frame_value: Any) -> None:
        if type(getattr(frame_value, "method", None)) in _ANSWERS:
            flow = self.flow_control.channels.get(frame_value.channel_number)
            if flow is not None:
                # Handle the answer here, because pika's search for callbacks would take longer than this method.
                self.frames_received += 1
                flow.on_confirm(frame_value)
                return
        super()._process_frame(frame_value)  # type: ignore[misc]  # private


# pika's errors show the name of the class, so use pika's name.
Connection.__name__ = SelectConnection.__name__


class Turns:
    """Processes the I/O of a `BlockingConnection`. Unlike pika, it does not wait until all output is written.

    This class calls no callbacks of the application. pika keeps the events for `process_data_events`.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._impl = connection._impl
        # The I/O services. If pika's own class has made the connection, the socket is unknown, and this is ``None``.
        self.services: Services | None = getattr(self._impl, "services", None)

    @property
    def unwritten(self) -> int:
        transport = self._impl._transport
        return transport.get_write_buffer_size() if transport is not None else 0

    def go_on_writing(self) -> None:
        if self.services is not None and self.unwritten:
            self.services.go_on_writing()

    def now(self) -> bool:
        """Process the I/O that is possible without waiting. Return True if the socket accepts more bytes."""
        services = self.services
        loop = self._impl.ioloop
        if services is None:
            self.until(0.0)
            return self.unwritten == 0
        # The second iteration writes the answers to the received data.
        for _ in range(2):
            ready = services.ready()
            if ready == _POLLOUT and not self.unwritten:
                loop.process_timeouts()
                return True
            self.go_on_writing()
            # `loop.poll` does not wait here, because the socket is ready.
            if ready & ~_POLLOUT or (ready and self.unwritten):
                loop.poll()
        loop.process_timeouts()
        return self.unwritten == 0 and services.ready() & _POLLOUT != 0

    def when_writable(self) -> None:
        """Let the loop lift the hold ``transport`` of all channels of the connection when the socket is writable."""
        if self.services is not None:
            self.services.on_writable = self._let_go
            if not self.unwritten:
                self.services.wake_when_writable()

    def _let_go(self) -> None:
        for flow in tuple(ConnectionFlow.of(self._impl).channels.values()):
            flow.protocol.lift(HoldKind.TRANSPORT, _monotonic())
            flow.write()

    def until(self, deadline: float) -> None:
        """Process I/O until an event happens on the connection, or until the deadline."""
        loop = self._impl.ioloop
        if self.services is not None:
            self.services.cork(False)
            self.go_on_writing()
        timer = None
        if deadline < math.inf:
            timer = loop.call_later(max(0.0, deadline - _monotonic()), _nothing)
        try:
            loop.poll()
            loop.process_timeouts()
        finally:
            if timer is not None:
                loop.remove_timeout(timer)


def _nothing() -> None:
    pass
