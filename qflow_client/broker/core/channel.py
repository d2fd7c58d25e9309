"""One channel, sans-I/O: publishing with confirms or in transactions, and being flowed (blocked).

A publish is a method, a header and bodies. When it is complete, `Channel._finish` resolves its target, if the topology
has changed since, and takes one of three ways: into the open transaction; into its queues at once if none of them has
marks or a maximum; or through `Channel._publish_watched`, which asks all queues before any of them takes the message.
Every publish in confirm mode gets a tag when it is complete, and exactly one ack or nack, unless the channel is closed
before.

How it is flowed is in `channelflow.py`, its transactions are in `transaction.py`, and what it delivers is in
`consuming.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, Protocol

import pamqp.base
from pamqp import commands

from qflow_client.amqp.frames import ACK, PUBLISH
from qflow_client.broker.core import wire
from qflow_client.broker.core.channelflow import ChannelFlow, FlowingSession
from qflow_client.broker.core.confirms import Confirms
from qflow_client.broker.core.consuming import Consuming, DeliveringSession, Delivery
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.errors import ChannelException, ConnectionException, FrameWaitsError, ReplyCode
from qflow_client.broker.core.exchange import MANY_QUEUES, Target
from qflow_client.broker.core.methods import CONSUMING_METHODS, TOPOLOGY_METHODS
from qflow_client.broker.core.profiles import Dialect, OnAlarm
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.replies import address_reply
from qflow_client.broker.core.transaction import (
    TRANSACTION_METHODS,
    Settlement,
    Transaction,
    count_transaction,
    roll_back,
)
from qflow_client.broker.core.unsupported import check_copies
from qflow_client.broker.core.waiting import WaitingPublish, refusal
from qflow_client.broker.core.wire import HAS_HEADERS, HAS_REPLY_TO

__all__ = ["Channel", "ChannelSession"]

_TAG_BIT = Struct(">QB")
_CONTENT_HEADER = Struct(">HHQ")
_BASIC = 60
_HAS_ADDRESSES = HAS_HEADERS | HAS_REPLY_TO


class ChannelSession(DeliveringSession, FlowingSession, Protocol):
    """The connection, as far as a channel needs it."""

    dialect: Dialect
    controls: Controls
    #: Set by a frame that took long: others have their turn before the next.
    has_done_much: bool
    #: Set if its first publish waits, because memory is full or too much waits for the disk.
    waits_to_publish: bool

    @property
    def blocks(self) -> Mapping[str, str]:
        """Why the client is blocked, by what blocks it."""

    def channel_closed(self, channel: Channel) -> None:
        """Forget a channel whose closing is complete."""


class Channel:
    """One channel of a session. Queues that are ON flow it (J3 J4).

    Args:
        session: the connection's.
        number: of the channel.
    """

    #: How many of the exchanges and routing keys that it published to are remembered.
    MAX_TARGETS = 8

    __slots__ = (
        "_header",
        "_last_target",
        "_missing",
        "_missing_methods",
        "_parts",
        "_target",
        "confirms",
        "consuming",
        "controls",
        "flow",
        "host",
        "incoming",
        "is_closing",
        "last_queue",
        "nacked",
        "name",
        "number",
        "output",
        "reply_queue",
        "returned",
        "router",
        "session",
        "targets",
        "transaction",
        "waiting",
    )

    def __init__(self, session: ChannelSession, number: int) -> None:
        self.name = f"{session.name} ({number})"
        self.session = session
        self.output = session.output
        self.number = number
        self.host = session.host
        self.router = session.host.router
        self.controls = session.controls
        self._missing_methods = session.dialect.missing
        # Set when either side has sent Channel.Close; what comes after it is ignored.
        self.is_closing = False
        # The queue that it declared last, which an empty queue name stands for.
        self.last_queue = ""
        # Name of the queue of its reply consumer, which is deleted when that consumer goes; empty if it never had one.
        self.reply_queue = ""
        # The message that is coming in: where to, its header once that is here, its body so far and what lacks of it.
        self._target: Target | None = None
        self._header: bytes | None = None
        self._parts: list[bytes] = []
        self._missing = 0
        #: Bytes that have come of it, if it has more than one body frame.
        self.incoming = 0
        # Where it published to, exchanges with routing keys, as keys; and where last.
        self.targets: dict[tuple[str, str], None] = {}
        self._last_target: Target | None = None
        self.returned = 0
        self.nacked = 0
        # Only set in confirm mode.
        self.confirms: Confirms | None = None
        # Its publishes that wait for room.
        self.waiting: dict[WaitingPublish, None] = {}
        # Only set in transaction mode.
        self.transaction: Transaction | None = None
        self.consuming = Consuming(session, number)
        self.flow = ChannelFlow(session, number)

    # Frames.

    def on_method(self, payload: bytes) -> None:
        """A method frame's payload came."""
        if self._target is not None:
            raise ConnectionException(
                ReplyCode.UNEXPECTED_FRAME, f"{wire.method_name(payload)} came in the middle of a message's content"
            )
        target = self.router.targets.get(payload)
        if target is not None:
            self._target = target
            return
        if payload.startswith(ACK) and len(payload) == 13:
            tag, multiple = _TAG_BIT.unpack_from(payload, 4)
            self.settle(self.consuming.take(tag, multiple=bool(multiple & 1)), acked=True, requeue=False)
            if multiple and self.consuming.has_more(tag):
                raise FrameWaitsError
            return
        method = wire.decode_method(payload)
        if isinstance(method, commands.Basic.Publish):
            self._on_publish(payload, method)
            return
        handler = _METHODS.get(type(method))
        if type(method) in self._missing_methods:
            raise ConnectionException(
                ReplyCode.NOT_IMPLEMENTED, f"{method.name} is an extension, which this broker does not have"
            )
        if handler is None:
            raise ConnectionException(
                ReplyCode.COMMAND_INVALID, f"{method.name} is not for channel {self.number} or not for a client to send"
            )
        handler(self, method)

    def on_header(self, payload: bytes) -> None:
        """A content header frame's payload came."""
        if self._target is None or self._header is not None:
            raise ConnectionException(ReplyCode.UNEXPECTED_FRAME, "a content header came without a Basic.Publish")
        if not self.flow.published and self.host.takes_no_publisher:
            self.session.waits_to_publish = True
            raise FrameWaitsError
        if len(payload) < 14:
            raise ConnectionException(
                ReplyCode.SYNTAX_ERROR, f"content header: {len(payload)} bytes, at least 14 needed"
            )
        class_id, weight, size = _CONTENT_HEADER.unpack_from(payload)
        if class_id != _BASIC or weight:
            raise ConnectionException(
                ReplyCode.FRAME_ERROR, f"a content header of class {class_id} and weight {weight}; it must be 60 and 0"
            )
        user_id = wire.check_properties(payload)
        if user_id is not None and user_id != self.session.handshake.user:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"user_id property is '{user_id}', but the connection's user is '{self.session.handshake.user}'",
            )
        # One look for messages that have neither.
        if payload[12] & _HAS_ADDRESSES:
            if payload[12] & HAS_HEADERS:
                check_copies(payload)
            if payload[12] & HAS_REPLY_TO and self.session.dialect.has("direct_reply_to"):
                payload = address_reply(payload, self.reply_queue if self.reply_queue in self.host.queues else "")
        self.router.check_size(size)
        if size:
            self._header = payload
            self._missing = size
        else:
            self._finish(self._target, payload, b"")

    def on_body(self, payload: bytes) -> None:
        """A content body frame's payload came."""
        target, header = self._target, self._header
        if target is None or header is None:
            raise ConnectionException(ReplyCode.UNEXPECTED_FRAME, "a content body came without a content header")
        self._missing -= len(payload)
        if self._missing > 0:
            if payload:
                if not self._parts:
                    self._count_incoming(len(header))
                self._parts.append(payload)
                self._count_incoming(len(payload))
            return
        if self._missing < 0:
            raise ConnectionException(
                ReplyCode.FRAME_ERROR, f"a content body is {-self._missing} bytes longer than its header says"
            )
        if self._parts:
            self._parts.append(payload)
            payload = b"".join(self._parts)
            self._parts = []
            self._count_incoming(-self.incoming)
        self._finish(target, header, payload)

    def reply(self, method: pamqp.base.Frame) -> None:
        """Answer a method."""
        self.output.write(wire.method(self.number, method))

    def _count_incoming(self, change: int) -> None:
        self.incoming += change
        if self.host.journal is not None:
            self.host.journal.unfinished += change

    @property
    def unfinished(self) -> int:
        """Bytes of the message that is coming in, and of the open transaction."""
        return self.incoming + (self.transaction.size if self.transaction is not None else 0)

    # Publishing.

    def _on_publish(self, payload: bytes, method: commands.Basic.Publish) -> None:
        if method.immediate:
            raise ConnectionException(
                ReplyCode.NOT_IMPLEMENTED, "Basic.Publish with immediate=True; use mandatory, or expire the message"
            )
        target = Target(method.exchange or "", method.routing_key or "", mandatory=bool(method.mandatory))
        targets = self.router.targets
        if len(targets) >= self.router.MAX_TARGETS:
            targets.clear()
        targets[payload] = self._target = target

    def _finish(self, target: Target, header: bytes, body: bytes) -> None:
        self._target = self._header = None
        if target.version != self.router.version:
            self.router.resolve(target)
        message = StoredMessage(target, header, body)
        self.flow.published += 1
        if target is not self._last_target:
            self._publishes_to(target)
        if self.transaction is not None:
            self.flow.check()
            if self.session.blocks:
                self.check_alarm()
            self.transaction.publishes.append((message, target))
            count_transaction(self, message.footprint)
            return
        confirms = self.confirms
        tag = confirms.next_tag() if confirms is not None else 0
        if target.watched or self.controls.watches_publishes:
            self._publish_watched(message, target, tag)
            return
        queues = target.queues
        if queues:
            for queue in queues:
                queue.enqueue(message)
                dispatcher = queue.dispatcher
                if dispatcher.active:
                    dispatcher.deliver()
        elif target.mandatory:
            self.return_message(message)
        if confirms is not None:
            confirms.confirm(tag)

    def _publish_watched(self, message: StoredMessage, target: Target, tag: int) -> None:
        """Publish to queues that have marks or a maximum, or that have to be found first."""
        confirms, flow = self.confirms, self.flow
        was_flowed = False
        if flow.blocked_by:
            was_flowed = flow.is_flowed_by_others
            flow.check()
        if self.session.blocks:
            self.check_alarm()
        queues = self.router.destinations(message, target)
        if self.controls.nack_publishes:
            self._refuse(tag, "the broker refuses every publish now")
            return
        if not queues and target.mandatory:
            self.return_message(message)
        if len(queues) == 1 and not queues[0].dropping.has_letters:
            # No dead letter can take its room meanwhile. To hold dead letters takes a twentieth of a publish.
            refused = refusal(queues, message.size)
            is_held = refused is None and self._enqueue(message, queues, tag)
        else:
            with self.host.dead_letters:
                refused = refusal(queues, message.size)
                is_held = refused is None and self._enqueue(message, queues, tag)
        if refused is not None:
            if refused.waits:
                if confirms is not None:
                    confirms.hold(tag)
                self._owe(message.size, tag)
                self.count_rates(message, queues)
                if not all(queue.is_watched for queue in queues):
                    # What comes after it here must not pass it.
                    self.router.version += 1
                self.waiting[self.host.waiting.wait(message, queues, self, tag)] = None
            elif not refused.queue.turn_away(message, is_told=confirms is not None):
                self._refuse(tag, refused.reason)
            return
        if self.host.journal is not None:
            self.host.journal.divide()
        self.count_rates(message, queues)
        if was_flowed and not is_held and flow.is_flowed_by_others:
            flow.owe(message.size, is_past_flow=True)

    def _enqueue(self, message: StoredMessage, queues: tuple[Queue, ...], tag: int) -> bool:
        """Put a message into its queues.

        Returns:
            Whether its confirm is held.
        """
        is_open = not self.is_closing
        # A publish that waited may be older than confirm mode: then its tag is 0.
        confirms = self.confirms if is_open and tag else None
        source = self.flow if is_open else None
        completion = confirms.completion(tag) if confirms is not None else None
        for queue in queues:
            queue.enqueue(message, source, completion)
        is_held = confirms is not None and completion is not None and confirms.arm(completion)
        if is_held and confirms is not None and tag not in confirms.owed:
            self._owe(message.size, tag)
        for queue in queues:
            queue.after_publish()
        if len(queues) > MANY_QUEUES:
            self.session.has_done_much = True
        return is_held

    def admit(self, waiting: WaitingPublish) -> None:
        """One of its publishes that waited is taken."""
        self.waiting.pop(waiting, None)
        # With confirms it is owed until that is sent.
        if not waiting.tag:
            self.flow.repay(waiting.message.size)
        self._enqueue(waiting.message, waiting.queues, waiting.tag)

    def give_up(self, waiting: WaitingPublish, reason: str) -> bool:
        """One of its publishes that waited is not taken."""
        self.waiting.pop(waiting, None)
        if self.is_closing:
            return False
        if self.confirms is None or not waiting.tag:
            self.flow.repay(waiting.message.size)
            self.fail(ReplyCode.RESOURCE_ERROR, f"{ReplyCode.RESOURCE_ERROR.title} - {reason}", PUBLISH)
        else:
            self.confirms.drop(waiting.tag)
            self._refuse(waiting.tag, reason)
        return True

    def check_alarm(self, so: str = "") -> None:
        """Nothing more is taken while there is an alarm, if that is how clients learn of one.

        Args:
            so: what cannot be done.

        Raises:
            ChannelException: 406.
        """
        dialect = self.session.dialect
        if self.session.blocks and dialect.on_alarm is OnAlarm.CHANNEL_CLOSE:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, f"{dialect.alarm_text}{so}")

    def _refuse(self, tag: int, reason: str) -> None:
        if self.confirms is None:
            raise ChannelException(ReplyCode.RESOURCE_ERROR, reason)
        self.nacked += 1
        self.output.write(wire.nack(self.number, tag))

    def count_rates(self, message: StoredMessage, queues: tuple[Queue, ...]) -> None:
        """Count a publish against the rates that are limited."""
        meter = self.host.meter
        if meter:
            names = (queue.name for queue in queues)
            user = self.session.handshake.user
            meter.take(self.flow, message.size, message.target.exchange, names, user, self.host.clock())

    def return_message(self, message: StoredMessage) -> None:
        """Send a mandatory message back that goes nowhere."""
        assert message.body is not None
        self.returned += 1
        names = message.target.names
        self.output.write(wire.return_(self.number, ReplyCode.NO_ROUTE, ReplyCode.NO_ROUTE.title, names))
        self.output.write(wire.content_frames(self.number, message.header, message.body, self.consuming.frame_max))

    def _publishes_to(self, target: Target) -> None:
        self._last_target = target
        names = (target.exchange, target.routing_key)
        if names not in self.targets:
            if len(self.targets) >= self.MAX_TARGETS:
                del self.targets[next(iter(self.targets))]
            self.targets[names] = None
        if not self.flow.is_producer:
            self.become_producer()

    def become_producer(self) -> None:
        """It publishes, or said that it will."""
        self.flow.is_producer = True
        if self.controls.producers_stopped:
            self.flow.block(self.controls.operator)
        if self.session.blocks and self.session.dialect.on_alarm is OnAlarm.CHANNEL_FLOW:
            self.flow.block(self.controls.alarm)
        self.flow.look_at_backlog()

    # Confirms.

    def _owe(self, size: int, tag: int) -> None:
        """A message is owed to the backlog until it is confirmed, or taken."""
        if self.flow.owe(size) and self.confirms is not None:
            self.confirms.owed[tag] = size

    def _has_confirms(self) -> None:
        if not self.is_closing:
            self.output.has_confirms(self)

    @property
    def unconfirmed(self) -> int:
        """Publishes that are neither acked nor nacked yet."""
        return len(self.confirms) if self.confirms is not None else 0

    def _confirm_select(self, method: commands.Confirm.Select) -> None:
        if self.transaction is not None:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, "a channel in transaction mode cannot confirm")
        if self.confirms is None:
            self.confirms = Confirms(self.number, self._has_confirms)
            self.confirms.on_released = self.flow.repay
        if not method.nowait:
            self.reply(commands.Confirm.SelectOk())
        if not self.flow.is_producer:
            self.become_producer()

    def settle(self, deliveries: tuple[Delivery, ...], *, acked: bool, requeue: bool) -> None:
        """Settle deliveries, or have the transaction do it.

        Args:
            deliveries: which; `consuming` has them no more.
            acked: whether they are acked.
            requeue: whether they go back to their queues.
        """
        if self.transaction is not None:
            self.transaction.settlements.append(Settlement(deliveries, acked, requeue))
        else:
            self.consuming.settle(deliveries, acked=acked, requeue=requeue)

    # The end.

    def _close(self, method: commands.Channel.Close) -> None:
        self.end()
        self.reply(commands.Channel.CloseOk())
        self.session.channel_closed(self)

    def fail(self, code: int, text: str, cause: bytes = b"\0\0\0\0") -> None:
        """Close the channel.

        Args:
            code: the reply code.
            text: the reply text.
            cause: class and method id of the method at fault.
        """
        if self.is_closing:
            return
        # First of all: a code that no close can carry is to change nothing.
        close = wire.close(self.number, code, text, cause)
        self.end()
        self.output.write(close)

    def end(self) -> None:
        """End: consumers go, unacked messages return to their queues, and nothing flows the channel any more."""
        if self.is_closing:
            return
        if self.confirms is not None and self.confirms.is_due and not self.controls.withhold_confirms:
            # What is in its queues is confirmed before the close is sent.
            self.output.write(self.confirms.flush())
        self.is_closing = True
        self.flow.end()
        self._target = self._header = None
        self._parts = []
        self._count_incoming(-self.incoming)
        if self.confirms is not None:
            # Its client will never learn what becomes of them, so nothing does.
            for waiting in self.waiting:
                waiting.queues[0].contents.count_drop(DropReason.REFUSED)
                self.host.waiting.stop(waiting)
            self.waiting.clear()
        if self.transaction is not None:
            roll_back(self)
        self.consuming.end()


def _flow_ok(channel: Channel, method: commands.Channel.FlowOk) -> None:
    """The client has read a Channel.Flow; nothing here waits for it, but tests do."""
    channel.flow.oks_due = max(0, channel.flow.oks_due - 1)


_METHODS: dict[type[pamqp.base.Frame], Callable[[Channel, Any], None]] = {
    **TOPOLOGY_METHODS,
    **CONSUMING_METHODS,
    **TRANSACTION_METHODS,
    commands.Channel.FlowOk: _flow_ok,
    commands.Channel.Close: Channel._close,
    commands.Confirm.Select: Channel._confirm_select,
}
