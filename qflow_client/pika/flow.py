"""The flow of a channel of pika: a `ProducerProtocol` that receives pika's events and writes through pika.

This module does not wait: `BlockingChannel` waits, `Channel` raises an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from pika import exceptions, spec
from pika.adapters.blocking_connection import ReturnedMessage

from qflow_client.dropin import ADDRESSING, RECONNECTING, RETRYING, DropIn, DropInFlow, RepeatableMessage
from qflow_client.events import FlowState, HoldKind
from qflow_client.forks import after_fork_in_child, not_shared, replace_copy
from qflow_client.manager import flow_manager
from qflow_client.receipt import Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings

__all__ = ["PIKA", "ChannelFlow", "ConnectionFlow", "Publish"]

#: The settings that a connection of pika accepts. When a channel is made, it is not known whether it will be in confirm
#: mode. Until then written messages count as confirmed.
PIKA = DropIn(
    "pika",
    frozenset({"retry_delay"}),
    dict.fromkeys(ADDRESSING, "pass it to basic_publish()")
    | {
        "confirms": "call confirm_delivery() instead",
        "message_ids": "messages are sent as they are; set message_id in their properties",
        "connect_timeout": "use pika's socket_timeout and stack_timeout",
        **dict.fromkeys(
            RECONNECTING,
            "the program itself must reconnect, as with pika",
        ),
        "on_disconnect": "call confirm_delivery(pipelined=True, republish=…) after the program has reconnected",
        **dict.fromkeys(RETRYING, "the program itself must publish again, as with pika"),
        "tracing": "instrument pika itself: opentelemetry-instrumentation-pika",
        "url": "use URLParameters",
    },
)
_UNLIMITED = 1 << 62

# The holds from outside: by the broker, and by the manager of all producers.
_FROM_OUTSIDE = HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED, HoldKind.TRANSPORT, HoldKind.PAUSED

# The reasons for the end of a channel that the program closes.
_BY_PROGRAM = exceptions.ChannelClosedByClient, exceptions.ConnectionClosedByClient

# Seconds until the next check of a full transport that does not report when it takes bytes.
_LOOK_AGAIN = 0.01

_monotonic = time.monotonic


class Publish(RepeatableMessage):
    """One `basic_publish`, as pika has encoded it.

    Args:
        frames: all its frames.
        arguments: exchange, routing key and ``mandatory``.
        basic_properties: the properties, as they were passed.
        body: the content.
    """

    arguments: tuple[str, str, bool]
    basic_properties: spec.BasicProperties | None

    def __init__(
        self,
        frames: bytes,
        arguments: tuple[str, str, bool],
        basic_properties: spec.BasicProperties | None,
        body: bytes,
    ) -> None:
        # Without the base class's constructor, because one object is made for every message.
        given = self.__dict__
        given["body"] = body
        given["frames"] = frames
        given["arguments"] = arguments
        given["basic_properties"] = basic_properties

    @property
    def method(self) -> spec.Basic.Publish:
        """The method object, as pika shows it."""
        exchange, routing_key, mandatory = self.arguments
        return spec.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory)


# The connections of this process.
_connections: WeakSet[Any] = WeakSet()


def _after_fork_in_child() -> None:
    for connection in tuple(_connections):
        ConnectionFlow.of(connection).leave_to_parent(connection)


after_fork_in_child(_after_fork_in_child)


class ConnectionFlow:
    """The common state of the channels of one connection."""

    def __init__(self, connection: Any) -> None:
        self.settings: ProducerSettings = getattr(connection.params, "flow_settings", None) or PIKA.settings()
        #: Why this process cannot use the connection; ``None`` if it can.
        self.not_shared: str | None = None
        self._pid = os.getpid()
        #: Called in a forked child with the error for each use; set by an object that has the connection (internal).
        self.on_forked: Callable[[BaseException], object] = bool
        # Why the broker blocks the connection; ``None`` while it does not.
        self.blocked: str | None = None
        # The open channels, by number; after the loss of the connection, those that were open before.
        self.channels: dict[int, ChannelFlow] = {}
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        _connections.add(connection)

    @staticmethod
    def of(connection: Any) -> ConnectionFlow:
        """Return the object for a connection, made on first use."""
        found: ConnectionFlow | None = getattr(connection, "flow_control", None)
        if found is None:
            found = connection.flow_control = ConnectionFlow(connection)
        return found

    def check_process(self) -> None:
        """Raise an error if the connection belongs to another process.

        Raises:
            ConnectionWrongStateError: this process is a fork of the process that made the connection.
        """
        if self.not_shared is not None:
            raise exceptions.ConnectionWrongStateError(self.not_shared)

    def leave_to_parent(self, connection: Any) -> None:
        """In a forked child, close the copy of the socket and all channels, without a word to the broker."""
        transport = connection._transport
        if transport is None:
            return
        self.not_shared = not_shared("connection", self._pid)
        # Twisted's transports have no `_sock`.
        sock = transport._sock if hasattr(transport, "_sock") else transport.getHandle()
        replace_copy(sock.fileno())
        # The parent has the same epoll object, and this process must not change what it watches.
        getattr(getattr(connection, "ioloop", None), "deactivate_poller", bool)()
        connection._set_connection_state(connection.CONNECTION_CLOSED)
        reason = exceptions.ConnectionWrongStateError(self.not_shared)
        for flow in self.channels.values():
            flow.leave_to_parent(reason)
        self.on_forked(reason)

    def _on_blocked(self, _connection: Any, blocked: Any) -> None:
        self.blocked = blocked.method.reason or ""
        for flow in tuple(self.channels.values()):
            flow.protocol.on_blocked(self.blocked, _monotonic())
            flow.after()

    def _on_unblocked(self, _connection: Any, _unblocked: Any) -> None:
        self.blocked = None
        for flow in tuple(self.channels.values()):
            flow.protocol.on_unblocked(_monotonic())
            flow.write()


class ChannelFlow(DropInFlow):
    """The flow of one channel.

    Args:
        channel: pika's channel implementation.
    """

    def __init__(self, channel: Any) -> None:
        number = channel.channel_number
        shared = ConnectionFlow.of(channel.connection)
        # The size of pika's transport is checked here, because admitted messages are passed to it immediately.
        super().__init__(
            shared.settings,
            f"pika channel {number}",
            max_unwritten_bytes=_UNLIMITED,
            on_disconnect=OnDisconnect.REPUBLISH,
        )
        now = _monotonic()
        self._channel = channel
        #: Whether messages that are unconfirmed at the end of the connection stay unconfirmed, for `take_over` by
        #: another channel.
        self.keeps_unconfirmed = False
        #: The channel that the application uses, if that is another object (internal).
        self.owner: Any = None
        #: Messages that were returned and not raised yet.
        self.returned: list[ReturnedMessage] = []
        #: An error that a call found and did not raise, because its message was accepted before. The next call raises
        #: it.
        self.unraised: BaseException | None = None
        #: Why the channel ended; ``None`` before.
        self.closing_reason: BaseException | None = None
        self.protocol.channel_opened(number, 0, now)
        # How many messages were written before confirm mode; ``None`` while the broker does not confirm.
        self._before_confirms: int | None = None
        # Whether another check of the time or the transport is scheduled.
        self._is_armed = False
        shared.channels[number] = self
        if shared.blocked is not None:
            self.protocol.on_blocked(shared.blocked, now)
        # This callback is the first, so that all other callbacks see the gate's new state.
        channel.add_on_flow_callback(self._on_flow)
        channel.add_on_close_callback(self._on_close)
        flow_manager.register(self)

    # Events of pika.

    def _on_flow(self, flow: Any) -> None:
        if not self._channel.is_open:
            # The frame has crossed the Channel.Close of this side, and there is no channel for a reply.
            return
        self.protocol.on_flow(flow.method.active, _monotonic())
        self.write()

    def _on_close(self, channel: Any, reason: BaseException) -> None:
        channels = ConnectionFlow.of(channel.connection).channels
        if isinstance(reason, exceptions.AMQPChannelError):
            channels.pop(channel.channel_number, None)
        flow_manager.unregister(self)
        self.closing_reason = reason
        is_refusal = isinstance(reason, exceptions.ChannelClosedByBroker)
        if isinstance(reason, _BY_PROGRAM) or (is_refusal and self.protocol.is_idle):
            # The refused method raises the error, and no message is concerned.
            self.protocol.forget_past()
        keeps = self.keeps_unconfirmed and not is_refusal
        # Messages of other channels may have caused the loss of the connection.
        shared = any(each.protocol.admission.admitted for each in channels.values() if each is not self)
        self.protocol.connection_lost(f"the channel is closed: {reason}", _monotonic(), reconnects=keeps, shared=shared)
        self.give_up_all()

    def take_over(self, ended: ChannelFlow) -> None:
        """Continue with the unconfirmed messages of an ended channel, like a producer on its next channel.

        The broker confirms on this channel, and nothing is unsettled. From now on this channel has the `capacity` of
        the ended channel, which has no messages any more.

        Args:
            ended: its flow.
        """
        protocol, unused, now = ended.protocol, self.protocol, _monotonic()
        # The listeners have seen the holds of `unused`. Differences are reported below.
        protocol.reports.events = None
        protocol.reports.name = unused.reports.name
        protocol.settings = protocol.settings.replace(name=unused.reports.name)
        for hold in protocol.gate.holds:
            if hold.kind in _FROM_OUTSIDE:
                protocol.lift(hold.kind, now, source=hold.source)
        for hold in unused.gate.holds:
            if hold.kind in _FROM_OUTSIDE:
                # With the same time as it was raised, so that it does not differ.
                protocol.hold(hold.kind, hold.since, source=hold.source, detail=hold.detail)
        frame_max = self._channel.connection._body_max_length + spec.FRAME_HEADER_SIZE + spec.FRAME_END_SIZE
        protocol.channel_opened(self._channel.channel_number, frame_max, now)
        protocol.reports.go_on_from(unused.reports, now)
        unused.forget_past()
        unused.connection_lost("another channel publishes its messages", now)
        self._before_confirms = 0
        # After an interrupt before this line the ended channel has the messages; after this line, this channel has
        # them.
        self.protocol, ended.protocol = protocol, unused
        self.returned, ended.returned = ended.returned, []
        self.write()
        self.watch()

    def leave_to_parent(self, reason: BaseException) -> None:
        """Same as `ConnectionFlow.leave_to_parent`, for one channel."""
        flow_manager.unregister(self)
        self.closing_reason = reason
        self.returned = []
        self._channel._set_state(self._channel.CLOSED)
        self.disown(str(reason))

    def give_up_all(self) -> None:
        """End the channel: waiting calls get an error."""
        self.protocol.line.give_up_all("the channel is closed", _monotonic())
        self.after()

    def confirms_begin(self) -> None:
        """Start confirm mode, because ``Confirm.Select`` was sent.

        If it was the first ``Confirm.Select``, the next message has delivery tag 1.
        """
        if self._before_confirms is None:
            self._before_confirms = self.protocol.written

    def delivery_tag(self, number: int) -> int | None:
        """Return the delivery tag of a message by its number; ``None`` if the broker does not confirm it."""
        before = self._before_confirms
        return None if before is None else number - before

    def on_confirm(self, answer: Any) -> None:
        """Handle ``Basic.Ack`` or ``Basic.Nack``."""
        method = answer.method
        # Tag 0 means all messages.
        tag = method.delivery_tag and method.delivery_tag + (self._before_confirms or 0)
        settle = self.protocol.on_nack if isinstance(method, spec.Basic.Nack) else self.protocol.on_ack
        settle(tag, method.multiple, _monotonic())
        self.write()

    def _call(self, function: Callable[[], None]) -> None:
        def call() -> None:
            function()
            self.write()

        self._channel.connection._adapter_add_callback_threadsafe(call)

    # After an event.

    def write(self) -> None:
        """Pass the messages that may be sent to pika, and report events."""
        protocol = self.protocol
        # Written bytes may release more.
        while protocol.unwritten and (data := protocol.data_to_write(_UNLIMITED)):
            # This comes first, because pika may write immediately and call this method again.
            now = _monotonic()
            protocol.advance(len(data), now)
            self._channel.connection._output_marshaled_frames([data])
            if self._before_confirms is None:
                # There will be no answer.
                protocol.on_ack(0, True, now)
        if not protocol.reports.is_empty:
            self.after()

    # Publishing without waiting.

    def send_nowait(self, publish: Publish) -> Receipt:
        """Admit and write a message now.

        Raises:
            ProducerFlowed: the channel is flowed; the message was not sent and never will be.
        """
        now = _monotonic()
        self.look_at_transport(now)
        receipt = self.protocol.send(publish, *publish.arguments[:2], now)
        if receipt is None:
            error = self.flowed(publish, *publish.arguments[:2])
            self.watch()
            raise error
        self.write()
        self.look_at_transport(now)
        return receipt

    def look(self) -> FlowState:
        """Return the present flow state."""
        now = _monotonic()
        if not self._channel.is_closed:
            self.look_at_transport(now)
        state = self.protocol.flow_state(now)
        # First write the released messages, then admit waiting ones.
        self.write()
        return state

    def look_at_transport(self, now: float) -> None:
        """Hold the channel if pika's transport is full, or lift that hold."""
        transport = getattr(self._channel.connection, "_transport", None)
        # Twisted's transport does not report its size.
        size = getattr(transport, "get_write_buffer_size", int)()
        if size > self.settings.max_unwritten_bytes:
            self.protocol.hold(HoldKind.TRANSPORT, now, detail=f"{size} bytes are not written yet")
            self.watch()
        elif size <= self.settings.max_unwritten_bytes // 2 and not self.protocol.gate.is_open:
            self.protocol.lift(HoldKind.TRANSPORT, now)

    def watch(self) -> None:
        """Check again when time or the transport may have made room."""
        protocol = self.protocol
        now = _monotonic()
        at = protocol.next_timer(now)
        if protocol.gate.is_held_by(HoldKind.TRANSPORT):
            at = min(now + _LOOK_AGAIN, math.inf if at is None else at)
        if at is not None and not self._is_armed:
            self._is_armed = True
            self._channel.connection._adapter_call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._is_armed = False
        if not self._channel.is_closed:
            self.look()
            self.protocol.on_timer(_monotonic())
            self.write()
            self.watch()
