"""Flow control for a channel of pika. A `ProducerProtocol` gets its events from pika, and writes with pika.

No function of this module waits: the blocking and the thread-safe adapters wait themselves, others raise errors.
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
from qflow_client.forks import after_fork_in_child, not_shared, replace_copy, separately
from qflow_client.manager import flow_manager
from qflow_client.receipt import Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings

__all__ = ["PIKA", "ChannelFlow", "ConnectionFlow", "Publish"]

#: The settings that a connection of pika accepts.
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

# The kinds of holds that depend on the channel, not on its messages. In `take_over`, a channel keeps its own holds of
# these kinds. Holds of all other kinds move with the messages.
_FROM_OUTSIDE = HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED, HoldKind.TRANSPORT, HoldKind.PAUSED

# pika's reasons for the end of a channel if the program has closed the channel or the connection.
_BY_PROGRAM = exceptions.ChannelClosedByClient, exceptions.ConnectionClosedByClient

# Seconds until the next check of a full transport, because pika does not report when a transport has room.
_LOOK_AGAIN = 0.01

_monotonic = time.monotonic


class Publish(RepeatableMessage):
    """A message that pika's `basic_publish` has encoded. `arguments` are exchange, routing key and ``mandatory``."""

    arguments: tuple[str, str, bool]
    basic_properties: spec.BasicProperties | None

    def __init__(
        self,
        frames: bytes,
        arguments: tuple[str, str, bool],
        basic_properties: spec.BasicProperties | None,
        body: bytes,
    ) -> None:
        # Do not call the constructor of the base class, because this call would slow down each message.
        given = self.__dict__
        given["body"] = body
        given["frames"] = frames
        given["arguments"] = arguments
        given["basic_properties"] = basic_properties

    @property
    def method(self) -> spec.Basic.Publish:
        """The message's ``Basic.Publish`` as an object of pika."""
        exchange, routing_key, mandatory = self.arguments
        return spec.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory)


# All connections with flow control in this process.
_connections: WeakSet[Any] = WeakSet()


def _after_fork_in_child() -> None:
    separately(lambda connection: ConnectionFlow.of(connection).leave_to_parent(connection), _connections)


after_fork_in_child(_after_fork_in_child)


class ConnectionFlow:
    """The common state of the channels of one connection."""

    def __init__(self, connection: Any) -> None:
        self.settings: ProducerSettings = getattr(connection.params, "flow_settings", None) or PIKA.settings()
        #: Why this process cannot use the connection; ``None`` if it can.
        self.not_shared: str | None = None
        self._pid = os.getpid()
        #: Internal: called in a forked child with the error that every later use of the connection raises.
        self.on_forked: Callable[[BaseException], object] = bool
        # The broker's reason for blocking the connection; ``None`` while the connection is not blocked.
        self.blocked: str | None = None
        # The channels, by number. A channel that ends is removed, unless it ends together with the connection.
        self.channels: dict[int, ChannelFlow] = {}
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        _connections.add(connection)

    @staticmethod
    def of(connection: Any) -> ConnectionFlow:
        found: ConnectionFlow | None = getattr(connection, "flow_control", None)
        if found is None:
            found = connection.flow_control = ConnectionFlow(connection)
        return found

    def check_process(self) -> None:
        """Raise ConnectionWrongStateError if this process is a fork of the process that made the connection."""
        if self.not_shared is not None:
            raise exceptions.ConnectionWrongStateError(self.not_shared)

    def leave_to_parent(self, connection: Any) -> None:
        """In a forked child, close the copy of the socket and all channels. Nothing is sent to the broker."""
        transport = connection._transport
        if transport is None:
            return
        self.not_shared = not_shared("connection", self._pid)
        connection._set_connection_state(connection.CONNECTION_CLOSED)
        reason = exceptions.ConnectionWrongStateError(self.not_shared)
        for flow in self.channels.values():
            flow.leave_to_parent(reason)
        self.on_forked(reason)
        # Twisted's transports have no `_sock`. Their `fileno` returns the descriptor of the socket, even with TLS.
        replace_copy((transport._sock if hasattr(transport, "_sock") else transport).fileno())
        # The child shares the IOLoop's epoll object with the parent, so the child must not change this object.
        getattr(getattr(connection, "ioloop", None), "deactivate_poller", bool)()

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
    """Flow control for one `Channel` of pika, for example for the `Channel` in a `BlockingChannel`."""

    def __init__(self, channel: Any) -> None:
        number = channel.channel_number
        shared = ConnectionFlow.of(channel.connection)
        # The protocol passes all messages to pika immediately. `look_at_transport` limits the bytes in pika's buffer.
        super().__init__(
            shared.settings,
            f"pika channel {number}",
            max_unwritten_bytes=_UNLIMITED,
            on_disconnect=OnDisconnect.REPUBLISH,
        )
        now = _monotonic()
        self._channel = channel
        #: Whether unconfirmed messages stay when the connection is lost. A new channel can then `take_over` them.
        self.keeps_unconfirmed = False
        #: The `BlockingChannel` that contains this channel; ``None`` if there is none (internal).
        self.owner: Any = None
        #: Returned messages that no error has reported yet.
        self.returned: list[ReturnedMessage] = []
        #: An error that the next method of the channel raises; ``None`` if there is none. The call that detected the
        #: error did not raise it, because the message of that call was admitted.
        self.unraised: BaseException | None = None
        #: The reason for the end of the channel; ``None`` while the channel is open.
        self.closing_reason: BaseException | None = None
        self.protocol.channel_opened(number, 0, now)
        # Number of messages that were written before confirm mode; ``None`` if the channel is not in confirm mode.
        self._before_confirms: int | None = None
        # Whether a call of `_on_timer` is scheduled.
        self._is_armed = False
        shared.channels[number] = self
        if shared.blocked is not None:
            self.protocol.on_blocked(shared.blocked, now)
        # Add this callback first, so that all other callbacks see the new flow state.
        channel.add_on_flow_callback(self._on_flow)
        channel.add_on_close_callback(self._on_close)
        flow_manager.register(self)

    def _on_flow(self, flow: Any) -> None:
        if not self._channel.is_open:
            # The channel has already sent Channel.Close, so no reply is possible.
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
            # The program knows the reason: it has closed the channel, or its call of a refused method raises the error.
            self.protocol.forget_past()
        keeps = self.keeps_unconfirmed and not is_refusal
        # If other channels have published, their messages may have caused the loss of the connection.
        shared = any(each.protocol.admission.admitted for each in channels.values() if each is not self)
        self.protocol.connection_lost(f"the channel is closed: {reason}", _monotonic(), reconnects=keeps, shared=shared)
        self.give_up_all()

    def take_over(self, ended: ChannelFlow) -> None:
        """Publish the unconfirmed messages of an ended channel, as a producer does after it has reconnected.

        This channel must be in confirm mode and have no unsettled messages. It gets the `capacity` of the ended channel
        too. Afterwards the ended channel has no messages.
        """
        protocol, unused, now = ended.protocol, self.protocol, _monotonic()
        # The listeners of this channel know the holds of `unused`. So report only how the holds of `protocol` differ.
        protocol.reports.events = None
        protocol.reports.name = unused.reports.name
        protocol.settings = protocol.settings.replace(name=unused.reports.name)
        for hold in protocol.gate.holds:
            if hold.kind in _FROM_OUTSIDE:
                protocol.lift(hold.kind, now, source=hold.source)
        for hold in unused.gate.holds:
            if hold.kind in _FROM_OUTSIDE:
                # Keep the start time. Otherwise `go_on_from` would report the hold as lifted and raised again.
                protocol.hold(hold.kind, hold.since, source=hold.source, detail=hold.detail)
        protocol.channel_opened(self._channel.channel_number, self._channel.connection.params.frame_max, now)
        protocol.reports.go_on_from(unused.reports, now)
        unused.forget_past()
        unused.connection_lost("another channel publishes its messages", now)
        self._before_confirms = 0
        # An interrupt before this line leaves the messages in `ended`. A later interrupt leaves them in `self`.
        self.protocol, ended.protocol = protocol, unused
        self.returned, ended.returned = ended.returned, []
        self.write()
        self.watch()

    def leave_to_parent(self, reason: BaseException) -> None:
        """In a forked child, close this channel. Nothing is sent to the broker."""
        flow_manager.unregister(self)
        self.closing_reason = reason
        self.returned = []
        self._channel._set_state(self._channel.CLOSED)
        self.disown(str(reason))

    def give_up_all(self) -> None:
        """End all waiting calls with an error."""
        self.protocol.line.give_up_all("the channel is closed", _monotonic())
        self.after()

    def begin_confirms(self, send_select: Callable[[], object]) -> None:
        """Send ``Confirm.Select``. After the first call, the next message gets delivery tag 1."""
        if self._before_confirms is None:
            self._before_confirms = self.protocol.written
        try:
            send_select()
        except BaseException:
            self._end_interrupted()
            raise

    @property
    def confirms(self) -> bool:
        return self._before_confirms is not None

    def delivery_tag(self, number: int) -> int | None:
        """Return the delivery tag of a message; ``None`` if the broker does not confirm the message."""
        before = self._before_confirms
        return None if before is None else number - before

    def on_confirm(self, answer: Any) -> None:
        """Handle ``Basic.Ack`` or ``Basic.Nack``."""
        method = answer.method
        # A delivery tag of 0 means all messages.
        tag = method.delivery_tag and method.delivery_tag + (self._before_confirms or 0)
        settle = self.protocol.on_nack if isinstance(method, spec.Basic.Nack) else self.protocol.on_ack
        settle(tag, method.multiple, _monotonic())
        self.write()

    def _call(self, function: Callable[[], None]) -> None:
        def call() -> None:
            function()
            self.write()

        self._channel.connection._adapter_add_callback_threadsafe(call)

    def write(self) -> None:
        """Pass to pika all messages that can be sent now, and report events."""
        protocol = self.protocol
        # Loop, because a write may release more messages. `take_output` counts the bytes as written before pika takes
        # them, because pika may call this method again meanwhile.
        try:
            while protocol.admission.unwritten and (data := protocol.take_output(now := _monotonic())):
                self._channel.connection._output_marshaled_frames([data])
                if self._before_confirms is None:
                    # The broker sends no confirms, so settle the messages now.
                    protocol.on_ack(0, True, now)
        except BaseException:
            self._end_interrupted()
            raise
        if not protocol.reports.is_empty:
            self.after()

    def _end_interrupted(self) -> None:
        """End the connection after an interrupted write: the delivery tags of later messages would be uncertain."""
        connection = self._channel.connection
        if not connection.is_closed:
            error = exceptions.StreamLostError("a write was interrupted, and it is not known how much is written")
            connection._terminate_stream(error)

    def send_nowait(self, publish: Publish) -> Receipt:
        """Admit and write a message now. If the channel is flowed, raise `ProducerFlowed`, and send nothing."""
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
        now = _monotonic()
        if not self._channel.is_closed:
            self.look_at_transport(now)
        state = self.protocol.flow_state(now)
        # Write the messages that a lifted hold has released.
        self.write()
        return state

    def look_at_transport(self, now: float) -> None:
        """Raise the hold ``transport`` if pika's transport is full. Lift it if the transport is at most half full."""
        transport = getattr(self._channel.connection, "_transport", None)
        # Twisted's transport has no `get_write_buffer_size`, so treat its buffer as empty.
        size = getattr(transport, "get_write_buffer_size", int)()
        if size > self.settings.max_unwritten_bytes:
            self.protocol.hold(HoldKind.TRANSPORT, now, detail=f"{size} bytes are not written yet")
            self.watch()
        elif size <= self.settings.max_unwritten_bytes // 2 and not self.protocol.gate.is_open:
            self.protocol.lift(HoldKind.TRANSPORT, now)

    def watch(self) -> None:
        """Schedule `_on_timer` for the next time at which a hold may end."""
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
