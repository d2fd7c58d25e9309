"""Snapshots: immutable copies of the state of the broker's parts, for `inspection.py` and the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pamqp.commands

from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.entries import QueueEntry
from qflow_client.broker.core.exchange import Binding, Exchange
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.session import Session, State
from qflow_client.flow import Capacity, StopResume

__all__ = [
    "BindingSnapshot",
    "BrokerMessage",
    "ChannelSnapshot",
    "ConnectionSnapshot",
    "ExchangeSnapshot",
    "MemorySnapshot",
    "QueueSnapshot",
    "TargetSnapshot",
    "ThresholdsSnapshot",
    "binding_snapshot",
    "channel_snapshot",
    "connection_snapshot",
    "exchange_snapshot",
    "json_names",
    "message_copy",
    "queue_snapshot",
]


@cache
def json_names(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return the names of the attributes of a snapshot class, each with its JSON name, which is in camel case."""

    def camel(name: str) -> str:
        first, *rest = name.split("_")
        return first + "".join(word.title() for word in rest)

    return tuple((field.name, camel(field.name)) for field in fields(kind))


def _camelled(snapshot: Any) -> dict[str, Any]:
    return {name: _plain(getattr(snapshot, attribute)) for attribute, name in json_names(snapshot.__class__)}


def _to_json(snapshot: Any, *, flow_stopped: bool, flow_stopped_count: int) -> dict[str, Any]:
    return _camelled(snapshot) | {
        # Qpid C++ has two names for the same value (C7).
        "flowState": flow_stopped,
        "flowStopped": flow_stopped,
        "flowStoppedCount": flow_stopped_count,
    }


def _plain(value: Any) -> Any:
    """Convert an attribute of a snapshot to JSON types. Tables of clients can have values without a JSON type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="backslashreplace")
    return _camelled(value) if isinstance(value, (ThresholdsSnapshot, TargetSnapshot)) else str(value)


@dataclass(frozen=True, slots=True)
class TargetSnapshot:
    """An exchange and a routing key that a channel published to.

    Attributes:
        exchange: name of the exchange; empty for the default exchange.
        routing_key: routing key of the published messages.
    """

    exchange: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class ThresholdsSnapshot:
    """The current thresholds of a queue, which can differ from the thresholds of its declaration (D4).

    Attributes:
        flow_stop_count: number of messages above which the queue turns ON; 0 for no threshold (C1).
        flow_resume_count: number of messages below which the queue turns OFF (C2).
        flow_stop_size: body bytes above which the queue turns ON; 0 for no threshold (C1).
        flow_resume_size: body bytes below which the queue turns OFF (C2).
        capacity: body bytes above which the queue turns ON; 0 for no capacity (J1).
        flow_resume_capacity: body bytes at or below which the queue turns OFF (J2).
    """

    flow_stop_count: int = 0
    flow_resume_count: int = 0
    flow_stop_size: int = 0
    flow_resume_size: int = 0
    capacity: int = 0
    flow_resume_capacity: int = 0


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A queue at one moment.

    Attributes:
        name: name of the queue.
        depth: number of messages, ready and unacked (D6).
        ready: number of messages that are ready to be delivered.
        unacked: number of delivered messages that clients have not settled.
        bytes: body bytes of all messages.
        memory: body bytes in memory; all other bodies are only on disk (A2).
        peak_depth: maximum number of messages so far.
        peak_bytes: maximum body bytes so far.
        flow_stopped: whether any flow state of the queue is ON (C7).
        flow_stopped_count: how often a flow state of the queue turned from OFF to ON (C7).
        held_confirms: number of messages whose confirms the queue holds (delays) while it is ON (C5).
        published: number of messages enqueued since the start of the broker.
        delivered: number of deliveries so far, including redeliveries.
        acked: number of messages acked so far.
        dropped: number of messages that were dropped so far, or were refused without informing their publishers. Purged
            messages are not counted.
        drops: number of dropped messages by reason: ``rejected``, ``expired``, ``maxlen``, ``conflated``, ``memory``,
            ``damaged``, ``cycle`` or ``refused``. A dropped message is also counted as ``copy`` if it was not
            dead-lettered because another copy of it had gone to the same target.
        consumers: number of consumers.
        blocked: names of the channels that the queue blocks (flows), in the order of blocking (J4).
        thresholds: current thresholds.
        enforcement: how the queue holds back producers while it is ON: ``"channel_flow"``, ``"completion"`` or
            ``"both"``.
        waiting: number of published messages that wait for room in the queue (A4).
        policy: name of the overflow policy that applies now.
        policies: names of the operator's policies that apply to the queue.
        overdue: whether the queue has been ON for longer than its `max_flow_wait`. If so, it does not hold back
            producers (D10).
        times_overdue: how often the queue became overdue.
        limits: thresholds, maximum and other limits. The keys are the names of the limits in an operator's policy.
        durable: whether the queue is durable.
        exclusive: whether the queue belongs to one connection.
        auto_delete: whether the queue is deleted with its last consumer.
        arguments: arguments of its declaration.
    """

    name: str
    depth: int
    ready: int
    unacked: int
    bytes: int
    memory: int
    peak_depth: int
    peak_bytes: int
    flow_stopped: bool
    flow_stopped_count: int
    held_confirms: int
    published: int
    delivered: int
    acked: int
    dropped: int
    drops: dict[str, int]
    consumers: int
    blocked: tuple[str, ...]
    thresholds: ThresholdsSnapshot
    enforcement: str
    waiting: int
    policy: str
    policies: tuple[str, ...]
    overdue: bool
    times_overdue: int
    limits: dict[str, object]
    durable: bool
    exclusive: bool
    auto_delete: bool
    arguments: dict[str, object]

    def to_json(self) -> dict[str, Any]:
        """Return the same data as JSON, with `flow_stopped` also under the name ``flowState`` (C7)."""
        return _to_json(self, flow_stopped=self.flow_stopped, flow_stopped_count=self.flow_stopped_count)


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory and the store of a broker at one moment. Without a memory limit and a store all values are 0.

    Attributes:
        limit: maximum bytes of messages in memory; 0 for no limit.
        bytes: bytes of messages in memory.
        peak: maximum of `bytes` so far.
        evicted: number of bodies that were removed from memory so far, because they are on disk (A2).
        loaded: number of bodies that were read back from disk so far.
        backlog: number of messages that wait to be written to disk.
        backlog_bytes: body bytes that wait to be written to disk.
        written: number of messages written to disk so far.
        commits: number of commits of the store so far.
        damaged: number of damaged rows in the file of the store. The broker ignores these rows.
    """

    limit: int = 0
    bytes: int = 0
    peak: int = 0
    evicted: int = 0
    loaded: int = 0
    backlog: int = 0
    backlog_bytes: int = 0
    written: int = 0
    commits: int = 0
    damaged: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the same data as JSON, in camel case."""
        return _camelled(self)


@dataclass(frozen=True, slots=True)
class ChannelSnapshot:
    """A channel at one moment.

    Attributes:
        name: name of the connection and number of the channel, such as ``"127.0.0.1:40412 (1)"``.
        client: the client property ``connection_name``; empty if it is unknown.
        connection: name of the connection.
        number: number of the channel.
        is_producer: whether the channel has published, or is in confirm or transaction mode.
        confirms: whether the channel is in confirm mode.
        flowed: whether the channel is blocked (flowed).
        blocked_by: names of the queues that block the channel, in the order of blocking. Other names are
            ``"operator"``, ``"alarm"``, ``"backlog"`` for a backlog that is too large (D7), and names of rate limits.
        flow_ok: whether the client has answered every ``Channel.Flow``; some libraries never answer.
        times_flowed: how often the channel was blocked (flowed) so far.
        flowed_seconds: seconds for which the channel was blocked (flowed) so far, including the current flowed period.
        targets: pairs of exchange and routing key to which the channel published, at most the 8 newest pairs.
        published: number of messages published so far.
        returned: number of mandatory messages that reached no queue so far.
        nacked: number of published messages that were refused with ``Basic.Nack`` so far.
        unconfirmed: number of messages published in confirm mode that are neither acked nor nacked yet.
        waiting: number of published messages that wait for room in a queue (A4).
        delivered: number of deliveries on the channel so far.
        acked: number of deliveries acked on the channel so far.
        unacked: number of deliveries that are not settled.
        consumers: tags of the consumers.
        consumes_from: names of the queues that the channel consumes from.
    """

    name: str
    client: str
    connection: str
    number: int
    is_producer: bool
    confirms: bool
    flowed: bool
    blocked_by: tuple[str, ...]
    flow_ok: bool
    times_flowed: int
    flowed_seconds: float
    targets: tuple[TargetSnapshot, ...]
    published: int
    returned: int
    nacked: int
    unconfirmed: int
    waiting: int
    delivered: int
    acked: int
    unacked: int
    consumers: tuple[str, ...]
    consumes_from: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the same data as JSON, with `flowed` and `times_flowed` also under the names in Qpid (C7)."""
        return _to_json(self, flow_stopped=self.flowed, flow_stopped_count=self.times_flowed)


@dataclass(frozen=True, slots=True)
class ConnectionSnapshot:
    """A connection at one moment.

    Attributes:
        name: address and port of the peer.
        client: the client property ``connection_name``; empty if it is unknown.
        user: name of the user; empty before the login.
        is_open: whether the connection is open and not closing.
        blocked: whether an alarm blocks the connection. In the profile ``qflow`` it has got ``Connection.Blocked``.
        blocked_by: names of the alarms that block the connection; ``"operator"`` if an operator blocks it.
        backlog: number of messages that wait for room, have held confirms, or came on channels blocked by more than
            the backlog (D7). 0 if no backlog limit and no sanction is set.
        backlog_bytes: body bytes of the messages in `backlog`.
        past_flow: number of messages so far that came on blocked (flowed) channels after the grace time (D8). 0 if no
            backlog limit and no sanction is set.
        tarpits: how often the broker stopped reading from the connection for a while (D8).
        channels_closed: number of channels that were closed because their client ignored ``Channel.Flow`` (D8).
        flowed: whether any channel is blocked (flowed).
        times_flowed: how often channels were blocked (flowed) so far.
        channels: numbers of the open channels.
        client_properties: client properties from ``Connection.Start-Ok``.
        published: number of messages published so far.
        delivered: number of messages delivered so far.
        memory: bytes of incomplete messages, held input and unsent output in memory.
        bytes_received: bytes received so far.
        bytes_sent: bytes sent so far.
    """

    name: str
    client: str
    user: str
    is_open: bool
    blocked: bool
    blocked_by: tuple[str, ...]
    backlog: int
    backlog_bytes: int
    past_flow: int
    tarpits: int
    channels_closed: int
    flowed: bool
    times_flowed: int
    channels: tuple[int, ...]
    client_properties: dict[str, Any]
    published: int
    delivered: int
    memory: int
    bytes_received: int
    bytes_sent: int

    def to_json(self) -> dict[str, Any]:
        """Return the same data as JSON, with `flowed` and `times_flowed` also under the names in Qpid (C7)."""
        return _to_json(self, flow_stopped=self.flowed, flow_stopped_count=self.times_flowed)


@dataclass(frozen=True, slots=True)
class ExchangeSnapshot:
    """An exchange at one moment.

    Attributes:
        name: name of the exchange; empty for the default exchange.
        type: kind of exchange: ``"direct"``, ``"fanout"``, ``"topic"`` or ``"headers"``.
        durable: whether the exchange is durable.
        auto_delete: whether the exchange is deleted with its last binding.
        internal: whether the broker refuses messages that are published to the exchange.
        bindings: number of bindings from the exchange.
        arguments: arguments of its declaration.
    """

    name: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    bindings: int
    arguments: dict[str, object]

    def to_json(self) -> dict[str, Any]:
        """Return the same data as JSON, in camel case."""
        return _camelled(self)


@dataclass(frozen=True, slots=True)
class BindingSnapshot:
    """A binding at one moment. The default exchange's implicit bindings to all queues have no snapshots.

    Attributes:
        source: name of the exchange that the messages come from.
        destination: name of the queue or exchange that the messages go to.
        destination_type: type of the destination: ``"queue"`` or ``"exchange"``.
        routing_key: binding key.
        arguments: arguments of the binding, which only headers exchanges use.
    """

    source: str
    destination: str
    destination_type: str
    routing_key: str
    arguments: dict[str, object]

    def to_json(self) -> dict[str, Any]:
        """Return the same data as JSON, in camel case."""
        return _camelled(self)


@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """A message that is in a queue, or was taken from a queue.

    Attributes:
        body: body of the message.
        properties: the basic properties.
        exchange: exchange to which the message was published.
        routing_key: routing key with which the message was published.
        redelivered: whether the message was delivered before.
    """

    body: bytes
    properties: pamqp.commands.Basic.Properties
    exchange: str
    routing_key: str
    redelivered: bool


def queue_snapshot(queue: Queue) -> QueueSnapshot:
    """Return a snapshot of a queue."""
    return QueueSnapshot(
        name=queue.name,
        depth=queue.depth - len(queue.contents.leaving),
        ready=queue.contents.ready_count,
        unacked=len(queue.contents.unacked),
        bytes=queue.size - queue.contents.leaving_size,
        memory=queue.size if queue.pager is None else queue.pager.size,
        peak_depth=queue.contents.peak_depth,
        peak_bytes=queue.contents.peak_size,
        flow_stopped=queue.flows.is_on,
        flow_stopped_count=queue.flows.times_on,
        held_confirms=queue.flows.held_confirms,
        published=queue.contents.published - queue.contents.restored,
        delivered=queue.dispatcher.delivered,
        acked=queue.dispatcher.acked,
        dropped=queue.contents.dropped,
        drops={reason.value: count for reason, count in queue.contents.drops.items()},
        consumers=len(queue.dispatcher.consumers),
        blocked=tuple(source.name for source in queue.flows.blocked),
        thresholds=_thresholds_snapshot(queue),
        enforcement=queue.limits.enforcement.value,
        waiting=queue.waiting,
        policy=str(queue.limits.policy if queue.overflow is None else queue.overflow.name),
        policies=queue.limits.policies,
        overdue=queue.flows.is_overdue,
        times_overdue=queue.flows.times_overdue,
        limits=queue.limits.to_json(),
        durable=queue.durable,
        exclusive=queue.exclusive_owner is not None,
        auto_delete=queue.auto_delete,
        arguments=dict(queue.arguments),
    )


def _thresholds_snapshot(queue: Queue) -> ThresholdsSnapshot:
    marks: dict[str, int] = {}
    for family in queue.flows.families:
        thresholds = family.limiter.thresholds
        if isinstance(thresholds, StopResume):
            marks["flow_stop_count"], marks["flow_resume_count"] = thresholds.stop_count, thresholds.resume_count or 0
            marks["flow_stop_size"], marks["flow_resume_size"] = thresholds.stop_size, thresholds.resume_size or 0
        elif isinstance(thresholds, Capacity):
            marks["capacity"], marks["flow_resume_capacity"] = thresholds.capacity, thresholds.resume or 0
    return ThresholdsSnapshot(**marks)


def channel_snapshot(channel: Channel) -> ChannelSnapshot:
    """Return a snapshot of a channel."""
    return ChannelSnapshot(
        name=channel.name,
        client=channel.session.handshake.client_name,
        connection=channel.session.name,
        number=channel.number,
        is_producer=channel.flow.is_producer,
        confirms=channel.confirms is not None,
        flowed=channel.flow.is_blocked,
        # Remove duplicates, because each flow state of a queue blocks separately.
        blocked_by=tuple(dict.fromkeys(controller.name for controller in channel.flow.blocked_by)),
        flow_ok=not channel.flow.oks_due,
        times_flowed=channel.flow.times_flowed,
        flowed_seconds=channel.flow.seconds,
        targets=tuple(TargetSnapshot(*names) for names in channel.targets),
        published=channel.flow.published,
        returned=channel.returned,
        nacked=channel.nacked,
        unconfirmed=channel.unconfirmed,
        waiting=len(channel.waiting),
        delivered=channel.consuming.delivered,
        acked=channel.consuming.acked,
        unacked=len(channel.consuming.unacked),
        consumers=tuple(channel.consuming.consumers),
        consumes_from=tuple(dict.fromkeys(consumer.queue.name for consumer in channel.consuming.consumers.values())),
    )


def connection_snapshot(session: Session) -> ConnectionSnapshot:
    """Return a snapshot of a connection."""
    discipline = session.discipline
    return ConnectionSnapshot(
        name=session.name,
        client=session.handshake.client_name,
        user=session.handshake.user,
        is_open=session.state is State.RUNNING,
        blocked=bool(session.blocks),
        blocked_by=tuple(session.blocks),
        backlog=discipline.limiter.count if discipline is not None else 0,
        backlog_bytes=discipline.limiter.size if discipline is not None else 0,
        past_flow=discipline.past_flow if discipline is not None else 0,
        tarpits=discipline.tarpits if discipline is not None else 0,
        channels_closed=discipline.channels_closed if discipline is not None else 0,
        flowed=any(channel.flow.is_blocked for channel in session.channels.values()),
        times_flowed=session.channels.times_flowed,
        channels=tuple(number for number, channel in session.channels.items() if not channel.is_closing),
        client_properties=dict(session.handshake.client_properties),
        published=session.channels.published,
        delivered=session.channels.delivered,
        memory=session.memory,
        bytes_received=session.bytes_received,
        bytes_sent=session.output.sent,
    )


def exchange_snapshot(exchange: Exchange) -> ExchangeSnapshot:
    """Return a snapshot of an exchange."""
    return ExchangeSnapshot(
        name=exchange.name,
        type=exchange.type.value,
        durable=exchange.durable,
        auto_delete=exchange.auto_delete,
        internal=exchange.internal,
        bindings=len(exchange.bindings),
        arguments=dict(exchange.arguments),
    )


def binding_snapshot(exchange: Exchange, binding: Binding) -> BindingSnapshot:
    """Return a snapshot of a binding, whose source is `exchange`."""
    return BindingSnapshot(
        source=exchange.name,
        destination=binding.destination.name,
        destination_type="queue" if isinstance(binding.destination, Queue) else "exchange",
        routing_key=binding.routing_key,
        arguments=dict(binding.arguments),
    )


def message_copy(entry: QueueEntry, body: bytes) -> BrokerMessage:
    """Return a copy of a message in a queue. The caller passes the body, which can be on disk and not in memory."""
    message = entry.message
    return BrokerMessage(
        body, message.properties, message.target.exchange, message.target.routing_key, entry.redelivered
    )
