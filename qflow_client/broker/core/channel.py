"""`Channel` is one AMQP channel, sans-I/O. The session passes the frames of an open channel to its `Channel`.

A published message consists of a method, a header and bodies. When the message is complete, `Channel._finish`
resolves its `Target` (see `exchange.py`) if the target is new or the topology has changed. There are three cases:

- In transaction mode the message goes into the open transaction.
- If `Target.watched` or `Controls.watches_publishes` is true, `Channel._publish_watched` asks all queues whether they
  accept the message, before any of them gets it.
- In all other cases the message goes into its queues immediately.

In confirm mode every complete message gets a tag, and later exactly one ack or nack unless the channel closes first.
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
from qflow_client.broker.core.consuming import Consuming, DeliveringSession
from qflow_client.broker.core.contents import Contents
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.dropping import drops_each
from qflow_client.broker.core.entries import StoredMessage
from qflow_client.broker.core.errors import ChannelException, ConnectionException, FrameWaitsError, ReplyCode
from qflow_client.broker.core.exchange import MANY_QUEUES, Target
from qflow_client.broker.core.methods import METHODS
from qflow_client.broker.core.profiles import Dialect, OnAlarm
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.replies import address_reply
from qflow_client.broker.core.transaction import (
    TRANSACTION_METHODS,
    Settlement,
    Transaction,
    add_message,
    add_to_transaction,
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
    """The methods and attributes of a `Session` that a channel uses."""

    dialect: Dialect
    controls: Controls
    #: If True, the session serves other connections before it handles the rest of its input.
    has_done_much: bool
    #: Set when the first message of a channel waits because memory is full or too many bytes wait for the disk.
    waits_to_publish: bool

    @property
    def blocks(self) -> Mapping[str, str]:
        """The alarms that block the client: the name and the reason of each."""

    def wait_for_letters(self, causes: int) -> None:
        """If `DeadLetters.causes` is greater than `causes`, handle no more input until `DeadLetters.is_done`."""

    def channel_closed(self, channel: Channel) -> None:
        """Forget a channel that has finished closing."""


class Channel:
    """One channel of a session. A queue whose flow state is ON can block the channel (J3 J4)."""

    MAX_TARGETS = 8
    #: Time in seconds. After a method that took longer, the session serves other connections.
    LONG = 0.001
    #: If `Router.headers_size` is larger, the session serves other connections after a message to a headers exchange.
    LONG_HEADERS = 100_000

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
        # Whether either side has sent Channel.Close, or the connection has ended. Then `Session` handles all frames.
        self.is_closing = False
        # Name of the queue that the channel declared last. In a method, an empty queue name means this queue.
        self.last_queue = ""
        # Name of the latest queue for direct replies (`replies.py`), even if it is deleted; empty if there was none.
        self.reply_queue = ""
        # The incoming message: its target, its header, its body so far, and the number of missing body bytes.
        self._target: Target | None = None
        self._header: bytes | None = None
        self._parts: list[bytes] = []
        self._missing = 0
        #: Received bytes of the incoming message (header and body) if its body has several frames; otherwise 0.
        self.incoming = 0
        # For snapshots: the newest pairs of exchange and routing key that the channel has published to.
        self.targets: dict[tuple[str, str], None] = {}
        self._last_target: Target | None = None
        self.returned = 0
        self.nacked = 0
        self.confirms: Confirms | None = None
        self.waiting: dict[WaitingPublish, None] = {}
        self.transaction: Transaction | None = None
        self.consuming = Consuming(session, number)
        self.flow = ChannelFlow(session, number)

    # Frames.

    def on_method(self, payload: bytes) -> None:
        if self._target is not None:
            raise ConnectionException(
                ReplyCode.UNEXPECTED_FRAME, f"{wire.method_name(payload)} came in the middle of a message's content"
            )
        # Most Basic.Publish payloads equal an earlier payload of some channel, and need not be decoded again.
        target = self.router.targets.get(payload)
        if target is not None:
            self._target = target
            return
        if payload.startswith(ACK) and len(payload) == 13:
            tag, multiple = _TAG_BIT.unpack_from(payload, 4)
            self.settle(tag, multiple=bool(multiple & 1), acked=True, requeue=False)
            return
        method = wire.decode_method(payload)
        if isinstance(method, commands.Basic.Publish):
            self._on_publish(payload, method)
            return
        handler = _METHODS.get(type(method))
        if type(method) in self._missing_methods:
            raise ConnectionException(
                ReplyCode.NOT_IMPLEMENTED, f"{method.name} is an extension that this broker does not support"
            )
        if handler is None:
            raise ConnectionException(
                ReplyCode.COMMAND_INVALID, f"a client must not send {method.name} on channel {self.number}"
            )
        began, letters = self.host.clock(), self.host.dead_letters
        causes = letters.causes
        try:
            with letters:
                handler(self, method)
        finally:
            self.session.wait_for_letters(causes)
            self._check_time(began)

    def _check_time(self, began: float) -> None:
        """Let the session serve other connections before the next frame, if this frame took longer than `LONG`."""
        if self.host.clock() - began > self.LONG:
            self.session.has_done_much = True

    def on_header(self, payload: bytes) -> None:
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
                ReplyCode.FRAME_ERROR,
                f"a content header has class {class_id} and weight {weight}; they must be 60 and 0",
            )
        user_id = wire.check_properties(payload)
        if user_id is not None and user_id != self.session.handshake.user:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"user_id property is '{user_id}', but the connection's user is '{self.session.handshake.user}'",
            )
        # Most messages have neither headers nor a reply-to, so one test is enough for them.
        if payload[12] & _HAS_ADDRESSES:
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
        self.output.write(wire.method(self.number, method))

    def _count_incoming(self, change: int) -> None:
        self.incoming += change
        if self.host.journal is not None:
            self.host.journal.unfinished += change

    @property
    def unfinished(self) -> int:
        """Bytes of the incoming message and of the open transaction."""
        return self.incoming + (self.transaction.size if self.transaction is not None else 0)

    # Publishing.

    @property
    def is_publishing(self) -> bool:
        """Whether a message is coming in, or the open transaction has messages."""
        return self._target is not None or self.unfinished > 0

    def _on_publish(self, payload: bytes, method: commands.Basic.Publish) -> None:
        if method.immediate:
            raise ConnectionException(
                ReplyCode.NOT_IMPLEMENTED, "immediate=True is not supported; use mandatory, or an expiration"
            )
        target = Target(method.exchange or "", method.routing_key or "", mandatory=bool(method.mandatory))
        targets = self.router.targets
        if len(targets) >= self.router.MAX_TARGETS:
            targets.clear()
        targets[payload] = self._target = target

    def _finish(self, target: Target, header: bytes, body: bytes) -> None:
        self._target = self._header = None
        if target.version != self.router.version:
            began = self.host.clock()
            self.router.resolve(target)
            self._check_time(began)
        message = StoredMessage(target, header, body)
        self.flow.published += 1
        if target is not self._last_target:
            self._publishes_to(target)
        if self.transaction is not None:
            self.flow.check()
            if self.session.blocks:
                self.check_alarm()
            add_message(self, message, target)
            if target.queues is None and self.router.headers_size > self.LONG_HEADERS:
                self.session.has_done_much = True
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
        """Publish a message that needs more than an append to each of its queues."""
        confirms, flow = self.confirms, self.flow
        was_flowed = is_counted = False
        if flow.blocked_by:
            was_flowed = flow.is_flowed_by_others
            flow.check()
        if self.session.blocks:
            self.check_alarm()
        queues = self.router.destinations(message, target)
        if len(queues) > MANY_QUEUES or (target.queues is None and self.router.headers_size > self.LONG_HEADERS):
            self.session.has_done_much = True
        if self.controls.nack_publishes:
            self._refuse(tag, "the broker refuses every publish now")
            return
        if not queues and target.mandatory:
            self.return_message(message)
        letters, causes = self.host.dead_letters, self.host.dead_letters.causes
        if len(queues) == 1 and not queues[0].dropping.has_letters:
            # If the queue sends no dead letters, `with letters` is not needed. Publishing is 5 % faster without it.
            refused = refusal(queues, message.size)
            is_held = refused is None and self._enqueue(message, queues, tag)
            if refused is not None and not refused.waits:
                is_counted = refused.queue.turn_away(message, can_nack=confirms is not None)
        else:
            with letters:
                refused = refusal(queues, message.size)
                is_held = refused is None and self._enqueue(message, queues, tag)
                if refused is not None and not refused.waits:
                    is_counted = refused.queue.turn_away(message, can_nack=confirms is not None)
        if letters.causes != causes:
            self.session.wait_for_letters(causes)
        if refused is not None:
            if refused.waits:
                if confirms is not None:
                    confirms.hold(tag)
                self._owe(message.size, tag)
                self.count_rates(message, queues)
                if not all(queue.is_watched for queue in queues):
                    # Channels now resolve each `Target` again. So later messages come here too, and do not overtake.
                    self.router.version += 1
                self.waiting[self.host.waiting.wait(message, queues, self, tag)] = None
            elif not is_counted:
                self._refuse(tag, refused.reason)
            return
        if self.host.journal is not None:
            self.host.journal.divide()
        self.count_rates(message, queues)
        if was_flowed and not is_held and flow.is_flowed_by_others:
            # If the confirm is held, `_enqueue` has already added the message to the backlog.
            flow.owe(message.size, until_unblocked=True)

    def _enqueue(self, message: StoredMessage, queues: tuple[Queue, ...], tag: int) -> bool:
        """Enqueue a message. Return True if its confirm is now held, for example by a queue or by the disk."""
        is_open = not self.is_closing
        # A message that waited for room perhaps came before confirm mode was selected. Then its tag is 0.
        confirms = self.confirms if is_open and tag else None
        source = self.flow if is_open else None
        completion = confirms.completion(tag) if confirms is not None else None
        drops = Contents.AT_ONCE if len(queues) == 1 else drops_each(len(queues))
        for queue in queues:
            queue.enqueue(message, source, completion, drops)
        is_held = confirms is not None and completion is not None and confirms.arm(completion)
        if is_held and confirms is not None and tag not in confirms.owed:
            self._owe(message.size, tag)
        for queue in queues:
            queue.after_publish(drops)
        return is_held

    def admit(self, waiting: WaitingPublish) -> None:
        self.waiting.pop(waiting, None)
        # A message with a tag stays in the connection's backlog until its confirm is released (D7).
        if not waiting.tag:
            self.flow.repay(waiting.message.size)
        before = self.host.dead_letters.causes
        self._enqueue(waiting.message, waiting.queues, waiting.tag)
        self.session.wait_for_letters(before)

    def give_up(self, waiting: WaitingPublish, reason: str) -> bool:
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
        """Raise `ChannelException` 406 if an alarm blocks the client, and the dialect closes channels during alarms.

        `so` is the end of the error text, which says what the channel cannot do.
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
        meter = self.host.meter
        if meter:
            names, user = (queue.name for queue in queues), self.session.handshake.user
            meter.take(self.flow, message.size, message.target.exchange, names, user, self.host.clock())

    def return_message(self, message: StoredMessage) -> None:
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
        self.become_producer()

    def become_producer(self) -> None:
        """Make the channel a producer. Block it if the operator, an alarm or the backlog blocks producers."""
        if self.flow.is_producer:
            return
        self.flow.is_producer = True
        if self.controls.producers_stopped:
            self.flow.block(self.controls.operator)
        if self.session.blocks and self.session.dialect.on_alarm is OnAlarm.CHANNEL_FLOW:
            self.flow.block(self.controls.alarm)
        self.flow.look_at_backlog()

    # Confirms.

    def _owe(self, size: int, tag: int) -> None:
        """Add a message to the backlog until its confirm is released; without confirms, until it is enqueued (D7)."""
        if self.flow.owe(size) and self.confirms is not None:
            self.confirms.owed[tag] = size

    def _has_confirms(self) -> None:
        if not self.is_closing:
            self.output.has_confirms(self)

    @property
    def unconfirmed(self) -> int:
        return len(self.confirms) if self.confirms is not None else 0

    def _confirm_select(self, method: commands.Confirm.Select) -> None:
        if self.transaction is not None:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, "a channel in transaction mode cannot confirm")
        if self.confirms is None:
            self.confirms = Confirms(self.number, self._has_confirms, self.flow.repay)
        if not method.nowait:
            self.reply(commands.Confirm.SelectOk())
        self.become_producer()

    def settle(self, tag: int, *, multiple: bool, acked: bool, requeue: bool) -> None:
        """Settle the deliveries of an ack, nack or reject, or add the deliveries to the open transaction.

        Raises:
            ChannelException: 406 if there is no unsettled delivery with this tag.
            FrameWaitsError: this call has handled only the oldest deliveries, because there are too many for one call.
        """
        deliveries = self.consuming.take(tag, multiple=multiple)
        if self.transaction is not None:
            self.transaction.settlements.append(Settlement(deliveries, acked, requeue))
            add_to_transaction(self, len(deliveries))
        else:
            self.consuming.settle(deliveries, acked=acked, requeue=requeue)
        if multiple and self.consuming.has_more(tag):
            raise FrameWaitsError

    # Closing.

    def _close(self, method: commands.Channel.Close) -> None:
        self.end()
        self.reply(commands.Channel.CloseOk())
        self.session.channel_closed(self)

    def fail(self, code: int, text: str, cause: bytes = b"\0\0\0\0") -> None:
        """Close the channel with an error. `cause` has the class id and method id of the method at fault."""
        if self.is_closing:
            return
        # Encode the frame first: if the code cannot be encoded, the channel must not end.
        close = wire.close(self.number, code, text, cause)
        self.end()
        self.output.write(close)

    def end(self) -> None:
        """End the channel. Remove its consumers, return unacked messages to their queues, and unblock it."""
        if self.is_closing:
            return
        if self.confirms is not None and self.confirms.is_due and not self.controls.withhold_confirms:
            # Confirm the messages that are already in their queues, before the close is sent.
            self.output.write(self.confirms.flush())
        self.is_closing = True
        self.flow.end()
        self._target = self._header = None
        self._parts = []
        self._count_incoming(-self.incoming)
        if self.confirms is not None:
            # With confirms, waiting messages are discarded, because the client cannot learn their outcome any more.
            # Without confirms, clients expect no outcome: the messages continue to wait, and enter when there is room.
            self.host.run(self.host.waiting.discard_in_steps(tuple(self.waiting)))
            self.waiting.clear()
        if self.transaction is not None:
            roll_back(self)
        self.consuming.end()


def _flow_ok(channel: Channel, method: commands.Channel.FlowOk) -> None:
    channel.flow.oks_due = max(0, channel.flow.oks_due - 1)


_METHODS: dict[type[pamqp.base.Frame], Callable[[Channel, Any], None]] = {
    **METHODS,
    **TRANSACTION_METHODS,
    commands.Channel.FlowOk: _flow_ok,
    commands.Channel.Close: Channel._close,
    commands.Confirm.Select: Channel._confirm_select,
}
