"""One channel, sans-I/O: publishing with confirms or in transactions, and being flowed (blocked).

A publish is a method, a header and bodies. When it is complete, `Channel._finish` resolves its target, if the topology
has changed since, and takes one of three ways: into the open transaction; into its queues at once if none of them has
marks or a maximum; or through `Channel._publish_watched`, which asks all queues before any of them takes the message.
Every publish in confirm mode gets a tag when it is complete, and exactly one ack or nack, unless the channel is closed
before.

A channel is a `FlowSource`: queues, rates, an operator and the discipline block and unblock it. The client gets one
``Channel.Flow`` for the first of these holds and one when the last is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

import pamqp.base
from pamqp import commands

from qflow_client.amqp.frames import ACK, PUBLISH
from qflow_client.broker.core import wire
from qflow_client.broker.core.confirms import Confirms
from qflow_client.broker.core.consuming import Consuming, DeliveringSession, Delivery
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.errors import ChannelException, ConnectionException, FrameWaitsError, ReplyCode
from qflow_client.broker.core.exchange import MANY_QUEUES, Target
from qflow_client.broker.core.methods import CONSUMING_METHODS, TOPOLOGY_METHODS
from qflow_client.broker.core.profiles import Dialect, OnAlarm
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.queueflow import CountedSource, QueueFlow
from qflow_client.broker.core.replies import address_reply
from qflow_client.broker.core.transaction import Settlement, Transaction
from qflow_client.broker.core.unsupported import check_copies
from qflow_client.broker.core.waiting import WaitingPublish, refusal
from qflow_client.broker.core.wire import HAS_HEADERS, HAS_REPLY_TO
from qflow_client.flow import FlowController, ThresholdLimiter

__all__ = ["Channel", "ChannelSession", "Discipline"]

_TAG_BIT = Struct(">QB")
_CONTENT_HEADER = Struct(">HHQ")
_BASIC = 60
_HAS_ADDRESSES = HAS_HEADERS | HAS_REPLY_TO


class Discipline(Protocol):
    """Decides what is done about a connection that does not heed ``Channel.Flow`` (D7 D8)."""

    #: The messages of its backlog, and what flows channels because of it.
    depth: ThresholdLimiter
    backlog: FlowController
    #: So far: messages that came on flowed channels after the time of grace, and what was done about them.
    past_flow: int
    tarpits: int
    channels_closed: int

    def owe(self, size: int, now: float) -> None:
        """A message of so many body bytes is in the backlog."""

    def settle(self, size: int, count: int = 1) -> None:
        """Messages of together so many body bytes are in the backlog no more."""

    def look_at(self, channel: Channel) -> None:
        """Flow a channel if it publishes and the backlog is too large."""

    def check(self, channel: Channel, now: float) -> None:
        """A publish came on a channel that is flowed.

        Raises:
            ChannelException: the channel has published too much since.
            ConnectionException: the connection has.
        """


class ChannelSession(DeliveringSession, Protocol):
    """The connection, as far as a channel needs it."""

    name: str
    dialect: Dialect
    controls: Controls
    discipline: Discipline | None
    #: Why the client is blocked, by what blocks it.
    blocks: dict[str, str]
    #: Set by a frame that took long: others have their turn before the next.
    has_done_much: bool
    #: Set if its first publish waits, because memory is full or too much waits for the disk.
    waits_to_publish: bool

    def channel_closed(self, channel: Channel) -> None:
        """Forget a channel whose closing is complete."""


class Channel(CountedSource):
    """One channel of a session. Queues that are ON flow it (J3 J4).

    Args:
        session: the connection's.
        number: of the channel.
    """

    #: How many of the exchanges and routing keys that it published to are remembered.
    MAX_TARGETS = 8

    __slots__ = (
        "_controls",
        "_discipline",
        "_flowed_seconds",
        "_header",
        "_last_target",
        "_missing",
        "_missing_methods",
        "_output",
        "_owed",
        "_owed_past_flow",
        "_parts",
        "_router",
        "_target",
        "confirms",
        "consuming",
        "flow_oks_due",
        "flowed_since",
        "host",
        "incoming",
        "is_closing",
        "is_producer",
        "last_queue",
        "nacked",
        "number",
        "past_flow",
        "reply_queue",
        "returned",
        "session",
        "targets",
        "times_flowed",
        "transaction",
        "waiting",
    )

    def __init__(self, session: ChannelSession, number: int) -> None:
        super().__init__(f"{session.name} ({number})")
        self.session = session
        self._output = session.output
        self.number = number
        self.host = session.host
        self._router = session.host.router
        self._controls = session.controls
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
        # Whether it has published, or said that it will.
        self.is_producer = False
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
        # Being flowed: since when, how often, seconds that are over.
        self.flowed_since: float | None = None
        self.times_flowed = 0
        self._flowed_seconds = 0.0
        # How many Channel.Flow the client has not answered.
        self.flow_oks_due = 0
        # Messages that came since it was flowed and the time of grace was over (D8).
        self.past_flow = 0
        # What it owes to the connection's backlog (D7), in messages and body bytes; and of that, what came while it was
        # flowed and nothing else holds.
        self._discipline = session.discipline
        self._owed = [0, 0]
        self._owed_past_flow = [0, 0]

    # Frames.

    def on_method(self, payload: bytes) -> None:
        """A method frame's payload came."""
        if self._target is not None:
            raise ConnectionException(
                ReplyCode.UNEXPECTED_FRAME, f"{wire.method_name(payload)} came in the middle of a message's content"
            )
        target = self._router.targets.get(payload)
        if target is not None:
            self._target = target
            return
        if payload.startswith(ACK) and len(payload) == 13:
            tag, multiple = _TAG_BIT.unpack_from(payload, 4)
            self.settle(self.consuming.take(tag, multiple=bool(multiple & 1)), acked=True, requeue=False)
            if multiple and tag in self.consuming.unacked:
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
        if not self.published and self.host.takes_no_publisher:
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
        self._router.check_size(size)
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
        self._output.write(wire.method(self.number, method))

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
        targets = self._router.targets
        if len(targets) >= self._router.MAX_TARGETS:
            targets.clear()
        targets[payload] = self._target = target

    def _finish(self, target: Target, header: bytes, body: bytes) -> None:
        self._target = self._header = None
        if target.version != self._router.version:
            self._router.resolve(target)
        message = StoredMessage(target, header, body)
        self.published += 1
        if target is not self._last_target:
            self._publishes_to(target)
        if self.transaction is not None:
            if self._discipline is not None and self.blocked_by:
                self._discipline.check(self, self.host.clock())
            if self.session.blocks:
                self.check_alarm()
            self.transaction.publishes.append((message, target))
            self._count_transaction(self.transaction, message.footprint)
            return
        confirms = self.confirms
        tag = confirms.next_tag() if confirms is not None else 0
        if target.watched or self._controls.watches_publishes:
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
            self._return(message)
        if confirms is not None:
            confirms.confirm(tag)

    def _publish_watched(self, message: StoredMessage, target: Target, tag: int) -> None:
        """Publish to queues that have marks or a maximum, or that have to be found first."""
        confirms = self.confirms
        discipline = self._discipline
        was_flowed = discipline is not None and self._is_flowed_by_others
        if discipline is not None and self.blocked_by:
            discipline.check(self, self.host.clock())
        if self.session.blocks:
            self.check_alarm()
        queues = self._router.destinations(message, target)
        if self._controls.nack_publishes:
            self._refuse(tag, "the broker refuses every publish now")
            return
        refused = refusal(queues, message.size)
        if refused is not None:
            if refused.waits:
                if confirms is not None:
                    confirms.hold(tag)
                self._owe(message.size, tag)
                self._count_rates(message, queues)
                if not all(queue.is_watched for queue in queues):
                    # What comes after it here must not pass it.
                    self._router.version += 1
                self.waiting[self.host.waiting.wait(message, queues, self, tag)] = None
            elif not refused.queue.turn_away(message, is_told=confirms is not None):
                self._refuse(tag, refused.reason)
            return
        if not queues and target.mandatory:
            self._return(message)
        is_held = self._enqueue(message, queues, tag)
        self._count_rates(message, queues)
        if was_flowed and not is_held and self._is_flowed_by_others:
            self._owe(message.size, 0, is_past_flow=True)

    def _enqueue(self, message: StoredMessage, queues: tuple[Queue, ...], tag: int) -> bool:
        """Put a message into its queues.

        Returns:
            Whether its confirm is held.
        """
        is_open = not self.is_closing
        confirms = self.confirms if is_open else None
        completion = confirms.completion(tag) if confirms is not None else None
        for queue in queues:
            queue.enqueue(message, self if is_open else None, completion)
        is_held = confirms is not None and completion is not None and confirms.arm(completion)
        if is_held and confirms is not None and tag not in confirms.owed:
            self._owe(message.size, tag)
        for queue in queues:
            queue.after_publish()
        if len(queues) > MANY_QUEUES:
            self.session.has_done_much = True
        if self.host.journal is not None:
            self.host.journal.divide()
        return is_held

    def admit(self, waiting: WaitingPublish) -> None:
        """One of its publishes that waited is taken."""
        self.waiting.pop(waiting, None)
        # With confirms it is owed until that is sent.
        if self.confirms is None:
            self._released(waiting.message.size)
        self._enqueue(waiting.message, waiting.queues, waiting.tag)

    def give_up(self, waiting: WaitingPublish, reason: str) -> bool:
        """One of its publishes that waited is not taken."""
        self.waiting.pop(waiting, None)
        if self.is_closing:
            return False
        if self.confirms is None:
            self._released(waiting.message.size)
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
        self._output.write(wire.nack(self.number, tag))

    def _count_rates(self, message: StoredMessage, queues: tuple[Queue, ...]) -> None:
        meter = self.host.meter
        if meter:
            names = (queue.name for queue in queues)
            user = self.session.handshake.user
            meter.take(self, message.size, message.target.exchange, names, user, self.host.clock())

    def _return(self, message: StoredMessage) -> None:
        assert message.body is not None
        self.returned += 1
        names = message.target.names
        self._output.write(wire.return_(self.number, ReplyCode.NO_ROUTE, ReplyCode.NO_ROUTE.title, names))
        self._output.write(wire.content_frames(self.number, message.header, message.body, self.consuming.frame_max))

    def _publishes_to(self, target: Target) -> None:
        self._last_target = target
        names = (target.exchange, target.routing_key)
        if names not in self.targets:
            if len(self.targets) >= self.MAX_TARGETS:
                del self.targets[next(iter(self.targets))]
            self.targets[names] = None
        if not self.is_producer:
            self._become_producer()

    def _become_producer(self) -> None:
        self.is_producer = True
        if self._controls.producers_stopped:
            self.block(self._controls.operator)
        if self.session.blocks and self.session.dialect.on_alarm is OnAlarm.CHANNEL_FLOW:
            self.block(self._controls.alarm)
        if self._discipline is not None:
            self._discipline.look_at(self)

    # What the connection owes (D7).

    @property
    def _is_flowed_by_others(self) -> bool:
        """Whether more than the backlog flows it: what only that flows must not keep it up."""
        discipline = self._discipline
        return any(discipline is None or each is not discipline.backlog for each in self.blocked_by)

    def _owe(self, size: int, tag: int, *, is_past_flow: bool = False) -> None:
        if self._discipline is None or self.is_closing:
            return
        if self.confirms is not None and tag:
            self.confirms.owed[tag] = size
        if is_past_flow:
            self._owed_past_flow[0] += 1
            self._owed_past_flow[1] += size
        self._owed[0] += 1
        self._owed[1] += size
        self._discipline.owe(size, self.host.clock())

    def _released(self, size: int, count: int = 1) -> None:
        if self._discipline is not None and not self.is_closing:
            self._owed[0] -= count
            self._owed[1] -= size
            self._discipline.settle(size, count)

    # Confirms.

    def _has_confirms(self) -> None:
        if not self.is_closing:
            self._output.has_confirms(self)

    @property
    def unconfirmed(self) -> int:
        """Publishes that are neither acked nor nacked yet."""
        return len(self.confirms) if self.confirms is not None else 0

    def _confirm_select(self, method: commands.Confirm.Select) -> None:
        if self.transaction is not None:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, "a channel in transaction mode cannot confirm")
        if self.confirms is None:
            self.confirms = Confirms(self.number, self._has_confirms)
            self.confirms.on_released = self._released
        if not method.nowait:
            self.reply(commands.Confirm.SelectOk())
        if not self.is_producer:
            self._become_producer()

    # Being flowed (J3 J4).

    def block(self, controller: FlowController) -> None:
        observer = self.host.observer
        if observer is not None and controller not in self.blocked_by:
            observer.blocked(self, *_queue_and_reason(controller))
        super().block(controller)

    def unblock(self, controller: FlowController) -> None:
        observer = self.host.observer
        if observer is not None and controller in self.blocked_by:
            observer.unblocked(self, *_queue_and_reason(controller))
        super().unblock(controller)
        discipline = self._discipline
        if discipline is not None and not self._is_flowed_by_others:
            count, size = self._owed_past_flow
            self._owed_past_flow = [0, 0]
            if count:
                self._released(size, count)

    def on_blocked(self) -> None:
        """The first hold: one Channel.Flow."""
        if not self.is_closing:
            self.times_flowed += 1
            self.flowed_since = self.host.clock()
            self._send_flow(active=False)

    def on_unblocked(self) -> None:
        """The last hold is gone: one Channel.Flow."""
        if not self.is_closing:
            self._flowed_seconds = self.flowed_seconds
            self.flowed_since = None
            self.past_flow = 0
            self._send_flow(active=True)

    def _send_flow(self, *, active: bool) -> None:
        self.flow_oks_due += 1
        self._output.write_in_turn(wire.method(self.number, commands.Channel.Flow(active=active)))

    @property
    def flowed_seconds(self) -> float:
        """Seconds for which it was flowed so far, the present time included."""
        if self.flowed_since is None:
            return self._flowed_seconds
        return self._flowed_seconds + self.host.clock() - self.flowed_since

    @property
    def blocking(self) -> tuple[FlowController, ...]:
        """What flows it, the oldest first."""
        return tuple(self.blocked_by)

    def _flow_ok(self, method: commands.Channel.FlowOk) -> None:
        """The client has read a Channel.Flow; nothing here waits for it, but tests do."""
        self.flow_oks_due = max(0, self.flow_oks_due - 1)

    # Transactions.

    def _tx_select(self, method: commands.Tx.Select) -> None:
        if self.confirms is not None:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, "a channel in confirm mode cannot have transactions")
        if self.transaction is None:
            self.transaction = Transaction()
        self.reply(commands.Tx.SelectOk())
        if not self.is_producer:
            self._become_producer()

    def _count_transaction(self, transaction: Transaction, change: int) -> None:
        transaction.size += change
        if self.host.journal is not None:
            self.host.journal.unfinished += change

    def _open_transaction(self) -> Transaction:
        if self.transaction is None:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, "the channel is not in transaction mode; Tx.Select first"
            )
        return self.transaction

    def _tx_commit(self, method: commands.Tx.Commit) -> None:
        transaction = self._open_transaction()
        for _, target in transaction.publishes:
            if target.version != self._router.version:
                self._router.resolve(target)
        destinations = [self._router.destinations(*publish) for publish in transaction.publishes]
        reason = transaction.refusal(destinations)
        if self._controls.nack_publishes and transaction.publishes:
            reason = "the broker refuses every publish now"
        if reason is not None:
            self._roll_back(transaction)
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, f"queue full, all is rolled back: {reason}")
        self._count_transaction(transaction, -transaction.size)
        self.transaction = Transaction()
        touched: dict[Queue, None] = {}
        for settlement in transaction.settlements:
            self.consuming.settle(settlement.deliveries, acked=settlement.acked, requeue=settlement.requeue)
        for (message, target), queues in zip(transaction.publishes, destinations, strict=True):
            if not queues and target.mandatory:
                self._return(message)
            for queue in queues:
                queue.enqueue(message, self)
                touched[queue] = None
            self._count_rates(message, queues)
        commit_ok = wire.method(self.number, commands.Tx.CommitOk())
        self._output.write_when_durable(commit_ok, topology_only=False)
        for queue in touched:
            queue.after_publish()
        if self.host.journal is not None:
            # All of it is one batch, however much that is.
            self.host.journal.divide()

    def _tx_rollback(self, method: commands.Tx.Rollback) -> None:
        self._roll_back(self._open_transaction())
        self.reply(commands.Tx.RollbackOk())

    def _roll_back(self, transaction: Transaction) -> None:
        """Forget the publishes; what was settled is unsettled again, and not delivered anew."""
        self._count_transaction(transaction, -transaction.size)
        self.transaction = Transaction()
        self.consuming.take_back(
            delivery for settlement in transaction.settlements for delivery in settlement.deliveries
        )

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
        self._output.write(close)

    def end(self) -> None:
        """End: consumers go, unacked messages return to their queues, and nothing flows the channel any more."""
        if self.is_closing:
            return
        if self.confirms is not None and self.confirms.is_due and not self._controls.withhold_confirms:
            # What is in its queues is confirmed before the close is sent.
            self._output.write(self.confirms.flush())
        self._flowed_seconds = self.flowed_seconds
        self.flowed_since = None
        count, size = self._owed
        self._owed_past_flow = [0, 0]
        if count:
            self._released(size, count)
        self.is_closing = True
        self._target = self._header = None
        self._parts = []
        self._count_incoming(-self.incoming)
        for controller in tuple(self.blocked_by):
            controller.forget(self)
            self.unblock(controller)
        self.host.source_gone(self)
        if self.confirms is not None:
            # Its client will never learn what becomes of them, so nothing does.
            for waiting in self.waiting:
                waiting.queues[0].contents.count_drop(DropReason.REFUSED)
                self.host.waiting.stop(waiting)
            self.waiting.clear()
        if self.transaction is not None:
            self._roll_back(self.transaction)
        self.consuming.end()


def _queue_and_reason(controller: FlowController) -> tuple[str, str]:
    """For the flow log."""
    return (controller.name, "channel_flow") if isinstance(controller, QueueFlow) else ("", controller.name)


_METHODS: dict[type[pamqp.base.Frame], Callable[[Channel, Any], None]] = {
    **TOPOLOGY_METHODS,
    **CONSUMING_METHODS,
    commands.Channel.FlowOk: Channel._flow_ok,
    commands.Channel.Close: Channel._close,
    commands.Confirm.Select: Channel._confirm_select,
    commands.Tx.Select: Channel._tx_select,
    commands.Tx.Commit: Channel._tx_commit,
    commands.Tx.Rollback: Channel._tx_rollback,
}
