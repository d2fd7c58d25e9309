"""kombu's connection for py-amqp, with flow control."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from kombu.exceptions import OperationalError
from kombu.transport import pyamqp

from qflow_client.errors import FlowControlTimeout, SettingsError
from qflow_client.events import HoldKind
from qflow_client.flow import Hold
from qflow_client.forks import after_fork_in_child, not_shared, separately
from qflow_client.kombu.channel import PIPELINED, Channel, refuse
from qflow_client.kombu.flow import KOMBU
from qflow_client.kombu.wire import PlainWire, TLSWire, Unanswered, Wire
from qflow_client.logs import log
from qflow_client.redaction import shown

__all__ = ["Connection"]

_monotonic = time.monotonic

# Maximum seconds between two checks of the heartbeats.
_HEARTBEAT_LOOK = 1.0
# A broker that sends nothing for this number of seconds, while it owes an answer to a method, is treated as lost.
_MAX_SILENCE = 60.0
# Minimum seconds between two checks whether such a broker has blocked the connection.
_MIN_PATIENCE = 0.1
# Maximum seconds that the process waits at its end for pipelined confirms.
_AT_EXIT = 1.0

# A thread that runs an event loop of kombu stores its process id in ``pid``. A forked child has another id.
_loops = threading.local()

# All connections of the process. The keys are their ids.
_connections: WeakValueDictionary[int, Connection] = WeakValueDictionary()


def _after_fork_in_child() -> None:
    separately(Connection.leave_to_parent, _connections.values())


after_fork_in_child(_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    """Wait for pipelined confirms when the process ends, and log the messages that may be lost."""
    end = _monotonic() + _AT_EXIT
    # Daemon threads still run, and may make connections meanwhile.
    for reference in _connections.valuerefs():
        connection = reference()
        if connection is not None and connection.confirm_publish == PIPELINED and connection.connected:
            _settle_at_exit(connection, end)


def _settle_at_exit(connection: Connection, end: float) -> None:
    """Wait until `end` for the confirms of this thread. Log the messages of any thread that may be lost."""
    for channel in tuple((connection.channels or {}).values()):
        flow = getattr(channel, "_flow", None)
        if flow is None or not (flow.protocol.unsettled or flow.protocol.reports.failures):
            continue
        why: object = f"another thread uses the connection, and {flow.protocol.unsettled} messages are not confirmed"
        try:
            # Two threads cannot wait for one socket.
            if connection.publisher == threading.get_ident():
                channel.wait_for_confirms(max(0.0, end - _monotonic()))
                continue
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
            why = error
        log(logging.WARNING, "%s: messages may be lost at the end of the process: %s", flow.name, why)


class Connection(pyamqp.Connection):
    """kombu's `Connection` for py-amqp, whose channels have flow control.

    Args:
        keywords: keywords of py-amqp, and settings of `ProducerSettings`. Settings for work that kombu does itself,
            such as reconnects, are not accepted. ``confirm_publish`` can be True, False or ``"pipelined"``.

    Raises:
        SettingsError: the value of a setting is not allowed.
        TypeError: a setting is not allowed for connections of kombu.
    """

    Channel = Channel

    # Attributes of py-amqp's class.
    connected: Any
    channels: Any
    heartbeat: Any
    _transport: Wire | None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        ours, theirs = KOMBU.split(keywords.items())
        keywords = dict(theirs)
        self.flow_settings = KOMBU.settings(**ours)
        confirms = keywords.get("confirm_publish", False)
        if isinstance(confirms, str) and confirms != PIPELINED:
            raise SettingsError(f"confirm_publish={shown(confirms)}: it must be True, False or {PIPELINED!r}")
        # Number of calls that wait for the answer to a method.
        self._awaits = 0
        # Time when heartbeats were last checked.
        self._looked_at = 0.0
        #: Process id and keywords as a text; `Transport.Connection` reuses a kept connection with the same text.
        self.made_of = ""
        #: The name that the broker's certificate must have; ``None`` for the name of the host.
        self.server_name: str | None = None
        #: Channels that were closed while the broker blocked the connection. Their ``Channel.Close``
        #: is sent when the broker no longer blocks the connection.
        self.left: list[Any] = []
        #: The last thread that has published with confirms (internal).
        self.publisher = 0
        self._pid = os.getpid()
        super().__init__(*arguments, **keywords)
        _connections[id(self)] = self

    def leave_to_parent(self) -> None:
        """In a forked child, close the copy of the socket. Later uses of the connection raise an error."""
        wire = self._transport
        if wire is None or wire.sock is None:
            return
        why = not_shared("connection", self._pid)
        wire.leave_to_parent(why)
        # Replace py-amqp's writer, because a thread of the parent may have held the writer's lock during the fork.
        self._frame_writer = wire.check_connected
        for channel in (self.channels or {}).values():
            flow = getattr(channel, "_flow", None)
            if flow is not None:
                flow.disown(why)

    def Transport(
        self,
        host: str,
        connect_timeout: float | None,
        ssl: Any = False,
        read_timeout: float | None = None,
        write_timeout: float | None = None,
        socket_settings: Any = None,
        **kwargs: Any,
    ) -> Wire:
        """Return the transport of a new connection, like py-amqp."""
        wire = (TLSWire if ssl else PlainWire)(
            host,
            connect_timeout=connect_timeout,
            ssl=ssl,
            read_timeout=read_timeout,
            write_timeout=write_timeout,
            socket_settings=socket_settings,
            **kwargs,
        )
        if isinstance(wire, TLSWire):
            wire.server_name = self.server_name
        wire.limit = self.flow_settings.max_producer_flow_control_wait
        wire.on_received = self._received
        return wire

    def _on_tune(self, *arguments: Any, **keywords: Any) -> None:
        super()._on_tune(*arguments, **keywords)
        assert self._transport is not None
        self._transport.tap.frame_max = self.frame_max

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has reported that it blocks the connection."""
        wire = self._transport
        return wire is not None and wire.tap.is_blocked

    def channel(self, channel_id: Any = None, callback: Any = None) -> Any:
        if self.left and self.connected:
            try:
                self.await_unblocked()
            except FlowControlTimeout as error:
                refuse(error)
        return super().channel(channel_id, callback)

    def close(
        self, reply_code: int = 0, reply_text: str = "", method_sig: tuple[int, int] = (0, 0), argsig: str = "BsBB"
    ) -> Any:
        """Close the connection, as py-amqp does. If the broker blocks the connection, close only the socket."""
        if self.is_blocked:
            self.collect()
            return None
        for channel in tuple((self.channels or {}).values()):
            if channel is not self:
                # Ignore the returned error, because `settle` has logged it.
                channel.settle()
        return super().close(reply_code, reply_text, method_sig, argsig)

    @property
    def may_be_kept(self) -> bool:
        """Whether to keep the connection when kombu closes it, to detect when the broker accepts messages again.

        A connection with consumers is not kept, because the broker would still deliver messages to it. An event loop
        gets no kept connection (`Transport.Connection`), so it does not leave one either.
        """
        return (
            self.is_blocked
            and self.connected
            and not self.must_not_wait
            and not any(getattr(each, "callbacks", ()) for each in self.channels.values())
        )

    def _received(self) -> None:
        self.bytes_recv += 1
        wire = self._transport
        assert wire is not None
        while self.left and not wire.tap.is_blocked:
            self.left.pop().close_left()
        for channel in tuple((self.channels or {}).values()):
            flow = getattr(channel, "_flow", None)
            if flow is not None:
                if flow.protocol.unwritten:
                    # Write the answers to the broker's flow frames, and the messages that a hold has delayed.
                    wire.flush()
                flow.look()

    def blocking_read(self, timeout: float | None = None) -> Any:
        """Read, as py-amqp does.

        While the broker reads nothing, and during a close, a wait for the answer to a method has a limit. If the broker
        only sends nothing, the limit is at least `_MAX_SILENCE`, because an answer may take long.
        """
        wire: Wire = self.transport
        if timeout is not None or not self._awaits:
            frame = wire.next_frame(timeout)
        else:
            frame = self._next_answer(wire)
        if frame is None:
            wire.later.popleft()()
            return True
        return self.on_inbound_frame(frame)

    def _next_answer(self, wire: Wire) -> tuple[int, int, bytes] | None:
        limit = self.flow_settings.max_producer_flow_control_wait
        began = _monotonic()
        patience = limit
        while True:
            try:
                return wire.next_frame(patience if wire.read_timeout is None else None)
            except TimeoutError:
                if wire.read_timeout is not None:
                    raise
                # A program that closes a channel or the connection needs no answer, so it does not wait for ever.
                closes = any(each.is_closing for each in (self.channels or {}).values() if each not in self.left)
                waited = _monotonic() - began
                if wire.tap.is_blocked or wire.unwritten or closes or waited >= _MAX_SILENCE:
                    raise Unanswered(
                        "the broker is silent, blocks the connection, or takes no bytes, and has not answered within "
                        f"{waited:.3g} s"
                    ) from None
                # Check again after the same time, but not more often than necessary if this time is short or 0.
                patience = min(max(limit or 0.0, _MIN_PATIENCE), _MAX_SILENCE - waited)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Treat each read in the ``with`` block as a wait for the answer to a method."""
        self._awaits += 1
        try:
            yield
        finally:
            self._awaits -= 1

    def wait(self, method: Any, callback: Any = None, timeout: Any = None, returns_tuple: bool = False) -> Any:
        with self.awaiting():
            return super().wait(method, callback, timeout, returns_tuple)

    def hear(self) -> None:
        """Let py-amqp handle the received frames that come before the first delivery."""
        while self.connected and self._transport is not None and self._transport.has_news:
            with suppress(TimeoutError):
                self.drain_events(timeout=0)

    def turn(self, deadline: float, wants_room: bool) -> bool:
        """Process I/O once. Wait at most until the deadline. With `wants_room`, return True if the socket has room."""
        wire: Wire = self.transport
        now = _monotonic()
        look = math.inf
        if self.heartbeat:
            # py-amqp expects several checks in each heartbeat interval.
            look = min(_HEARTBEAT_LOOK, self.heartbeat / 4)
            deadline = min(deadline, now + look)
        is_writable = wire.wait(max(0.0, deadline - now), writable=wants_room)
        if is_writable and wire.unwritten:
            wire.flush()
        if self.heartbeat and now >= self._looked_at + look and wire.look():
            self._looked_at = now
            self.heartbeat_tick()
        if wire.has_news:
            self.hear()
        return is_writable

    def heartbeat_tick(self, rate: int = 2) -> None:
        """Check heartbeats, as py-amqp does. The writes of channels, which py-amqp does not see, count too."""
        wire = self._transport
        if wire is not None:
            self.bytes_sent += wire.sent
            wire.sent = 0
        super().heartbeat_tick(rate)

    @property
    def must_not_wait(self) -> bool:
        """Whether flow control must not wait in this thread, because the wait would stop an event loop of kombu.

        While a Celery worker runs a task in this thread, the task stops the loop anyway, so waits are allowed.
        """
        if getattr(_loops, "pid", None) != os.getpid():
            return False
        celery = sys.modules.get("celery")
        return celery is None or not celery.current_task

    @staticmethod
    def loop_runs_here() -> None:
        """Record that this thread runs an event loop of kombu."""
        _loops.pid = os.getpid()

    def await_unblocked(self) -> None:
        """Wait while the broker blocks the connection, because the broker reads nothing from a blocked connection.

        Raises:
            FlowControlTimeout: `max_producer_flow_control_wait` seconds have passed, or `must_not_wait` is True.
        """
        wire: Wire = self.transport
        if not wire.tap.is_blocked:
            return
        wire.look()
        limit = 0.0 if self.must_not_wait else self.flow_settings.max_producer_flow_control_wait
        began = _monotonic()
        end = math.inf if limit is None else began + limit
        while wire.tap.is_blocked:
            now = _monotonic()
            if now >= end:
                hold = Hold(HoldKind.CONNECTION_BLOCKED, since=time.time() - (now - began))
                raise FlowControlTimeout(
                    [hold], now - began, None, "set a longer max_producer_flow_control_wait to wait"
                )
            self.turn(end, wants_room=False)
