"""kombu's transport for py-amqp, with flow control."""

from __future__ import annotations

import os
import sys
from typing import Any

from amqp.exceptions import RecoverableConnectionError
from kombu.transport import pyamqp

from qflow_client.errors import SettingsError
from qflow_client.forks import after_fork_in_child
from qflow_client.kombu.connection import Connection
from qflow_client.locks import Lock

__all__ = ["SSLTransport", "Transport"]


class _Kept:
    """Connections that stay open although kombu has closed them, because they are blocked. Keys: `Connection.made_of`.

    kombu's pools close a connection after any error, and connect again for the next message. On a new connection,
    RabbitMQ sends ``Connection.Blocked`` only after the first message. So each new connection would send one message
    with an unknown outcome. The old connection is already blocked, and RabbitMQ sends ``Connection.Unblocked`` on it.
    So when kombu connects again, kombu gets the old connection.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._of: dict[str, list[Connection]] = {}

    def put(self, connection: Connection) -> None:
        with self._lock:
            self._of.setdefault(connection.made_of, []).append(connection)

    def take(self, made_of: str) -> Connection | None:
        while True:
            with self._lock:
                kept = self._of.get(made_of)
                if not kept:
                    self._of.pop(made_of, None)
                    return None
                connection = kept.pop()
            try:
                connection.transport.look()
                connection.hear()
            except Connection.connection_errors:
                pass
            if connection.connected:
                return connection
            connection.collect()

    def cut(self) -> None:
        with self._lock:
            kept, self._of = self._of, {}
        for connections in kept.values():
            for connection in connections:
                connection.collect()


#: The kept connections of the process (internal).
kept = _Kept()
# In a forked child, initialize the object again, because a thread of the parent may have held its lock.
after_fork_in_child(lambda: kept.__init__())  # type: ignore[misc]  # calls `__init__` again on purpose


class Transport(pyamqp.Transport):
    """kombu's transport for py-amqp, with flow control: ``qflow://``."""

    # The name that the broker's certificate must have; ``None`` for the name of the host.
    _server_name: str | None = None

    def establish_connection(self) -> Any:
        """Connect like kombu, which replaces the host localhost by 127.0.0.1.

        With TLS, the broker's certificate still has to have the name localhost. A certificate for 127.0.0.1 is refused.

        Raises:
            SettingsError: eventlet has patched Python.
        """
        eventlet = sys.modules.get("eventlet.patcher")
        if eventlet is not None and eventlet.is_monkey_patched("socket"):
            raise SettingsError(
                "qflow:// does not run under eventlet, which removes select.poll; "
                "use the pool gevent, threads or prefork"
            )
        client: Any = self.client
        self._server_name = "localhost" if client.ssl and client.hostname in (None, "", "localhost") else None
        try:
            return super().establish_connection()  # type: ignore[no-untyped-call]  # kombu's
        finally:
            if self._server_name is not None:
                client.hostname = self._server_name

    def Connection(self, **options: Any) -> Connection:  # type: ignore[override]  # as kombu calls it
        """Return a kept connection with these options, or a new one that is not connected yet.

        In the thread of an event loop it is always a new one, because a worker cannot consume on a blocked connection.
        """
        connection = Connection(**options)
        connection.made_of = f"{os.getpid()} {sorted(options.items())!r}"
        connection.server_name = self._server_name
        earlier = None if connection.must_not_wait else kept.take(connection.made_of)
        return earlier or connection

    def close_connection(self, connection: Any) -> None:
        """Close a connection like kombu, or keep it if `Connection.may_be_kept` is True."""
        if connection.may_be_kept:
            connection.client = None
            kept.put(connection)
        else:
            super().close_connection(connection)  # type: ignore[no-untyped-call]  # kombu's

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Register the connection with the event loop, as kombu does.

        From now on, a publish in this thread waits only within a Celery task. Any other wait would stop the loop.
        """
        connection.loop_runs_here()
        bell = connection.transport.bell()
        loop.add_reader(bell, self._on_left, connection, loop, bell)
        super().register_with_event_loop(connection, loop)  # type: ignore[no-untyped-call]  # kombu's

    def on_readable(self, connection: Any, loop: Any) -> None:
        """Handle one frame, as kombu does. If frames are left, `Wire.bell` makes the loop call this method again.

        kombu uses ``loop.call_soon`` for these frames. But kombu's loop may wait for sockets before that call.
        """
        if not connection.connected:
            raise RecoverableConnectionError("Socket was disconnected")
        try:
            connection.drain_events(timeout=0)
        except (TimeoutError, BlockingIOError, InterruptedError):
            pass
        finally:
            if connection.connected:
                connection.transport.has_left_frames()

    def _on_left(self, connection: Any, loop: Any, bell: int) -> None:
        """Deliver frames that the wire has received, but py-amqp has not read yet."""
        if connection.connected:
            self.on_readable(connection, loop)
        else:
            # The connection is closed, and its file descriptor may now belong to another file.
            loop.remove_reader(bell)


class SSLTransport(Transport, pyamqp.SSLTransport):
    """The same transport with TLS: ``qflows://``."""
