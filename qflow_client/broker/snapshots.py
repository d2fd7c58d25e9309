"""What can be seen of a broker: frozen pictures of its parts at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pamqp.commands

from qflow_client.broker.channel import Channel
from qflow_client.broker.queue import Queue, QueueEntry
from qflow_client.broker.session import Session

__all__ = [
    "BrokerMessage",
    "ChannelSnapshot",
    "ConnectionSnapshot",
    "QueueSnapshot",
    "channel_snapshot",
    "connection_snapshot",
    "message_copy",
    "queue_snapshot",
]


def _to_json(snapshot: Any, *, flow_stopped: bool, flow_stopped_count: int) -> dict[str, Any]:
    def camel(name: str) -> str:
        first, *rest = name.split("_")
        return first + "".join(word.title() for word in rest)

    return {camel(name): _plain(value) for name, value in asdict(snapshot).items()} | {
        # The two names that Qpid C++ has for the same (C7).
        "flowState": flow_stopped,
        "flowStopped": flow_stopped,
        "flowStoppedCount": flow_stopped_count,
    }


def _plain(value: Any) -> Any:
    """What clients may put into tables, as JSON can tell it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="backslashreplace")
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A queue at one moment.

    Attributes:
        name: of the queue.
        depth: messages, ready and delivered-unacknowledged (D6).
        ready: messages to be delivered.
        unacked: messages that consumers have not settled.
        bytes: body bytes of all of them.
        peak_depth: the most messages there ever were.
        peak_bytes: the most body bytes there ever were.
        flow_stopped: whether its flow state is ON (C7).
        flow_stopped_count: how often it went from OFF to ON (C7).
        held_confirms: messages whose confirms wait for OFF (C5).
        published: messages enqueued so far.
        delivered: deliveries so far, repeated ones included.
        acked: messages acked so far.
        dropped: messages rejected for good or dropped for want of room so far.
        consumers: how many it has.
        blocked: names of the channels that it flows, the oldest first (J4).
        durable: as declared.
        arguments: as declared.
    """

    name: str
    depth: int
    ready: int
    unacked: int
    bytes: int
    peak_depth: int
    peak_bytes: int
    flow_stopped: bool
    flow_stopped_count: int
    held_confirms: int
    published: int
    delivered: int
    acked: int
    dropped: int
    consumers: int
    blocked: tuple[str, ...]
    durable: bool
    arguments: dict[str, object]

    def to_json(self) -> dict[str, Any]:
        """The same, by the names of Qpid's management: ``flowStopped`` or ``flowState``, ``flowStoppedCount`` (C7)."""
        return _to_json(self, flow_stopped=self.flow_stopped, flow_stopped_count=self.flow_stopped_count)


@dataclass(frozen=True, slots=True)
class ChannelSnapshot:
    """A channel at one moment.

    Attributes:
        name: its connection's name and its number, such as ``"127.0.0.1:40412 (1)"``.
        connection: the connection's name.
        number: of the channel.
        is_producer: whether it has published, or is in confirm or transaction mode.
        confirms: whether it is in confirm mode.
        flowed: whether it has been told not to publish.
        blocked_by: names of the queues that flow it, the oldest first; ``"operator"`` for the operator's hold.
        flow_ok: whether the client has answered every ``Channel.Flow``, which some libraries never do.
        times_flowed: how often it went from unflowed to flowed.
        flowed_seconds: seconds flowed so far, the present time included.
        published: messages so far.
        returned: those of them that were mandatory and went nowhere.
        nacked: those of them that were refused.
        unconfirmed: those of them that are neither acked nor nacked yet.
        delivered: deliveries to it so far.
        acked: messages that it acked so far.
        unacked: messages that it has not settled.
        consumers: its consumer tags.
    """

    name: str
    connection: str
    number: int
    is_producer: bool
    confirms: bool
    flowed: bool
    blocked_by: tuple[str, ...]
    flow_ok: bool
    times_flowed: int
    flowed_seconds: float
    published: int
    returned: int
    nacked: int
    unconfirmed: int
    delivered: int
    acked: int
    unacked: int
    consumers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same in camel case; being flowed also by the names that a queue's flow state has (C7)."""
        return _to_json(self, flow_stopped=self.flowed, flow_stopped_count=self.times_flowed)


@dataclass(frozen=True, slots=True)
class ConnectionSnapshot:
    """A connection at one moment.

    Attributes:
        name: the peer's address and port.
        user: who logged in; empty before that.
        is_open: whether it is open and not closing.
        blocked: whether it was sent ``Connection.Blocked``.
        flowed: whether any of its channels has been told not to publish.
        times_flowed: how often its channels went from unflowed to flowed.
        channels: the numbers of its channels.
        client_properties: what the client said of itself.
        published: messages from it so far.
        delivered: messages to it so far.
        bytes_received: bytes from it so far.
        bytes_sent: bytes to it so far.
    """

    name: str
    user: str
    is_open: bool
    blocked: bool
    flowed: bool
    times_flowed: int
    channels: tuple[int, ...]
    client_properties: dict[str, Any]
    published: int
    delivered: int
    bytes_received: int
    bytes_sent: int

    def to_json(self) -> dict[str, Any]:
        """The same in camel case; being flowed also by the names that a queue's flow state has (C7)."""
        return _to_json(self, flow_stopped=self.flowed, flow_stopped_count=self.times_flowed)


@dataclass(frozen=True, slots=True)
class BrokerMessage:
    """A message in a queue, or taken from one.

    Attributes:
        body: the content.
        properties: the basic properties.
        exchange: where it was published.
        routing_key: as published.
        redelivered: whether it was delivered before.
    """

    body: bytes
    properties: pamqp.commands.Basic.Properties
    exchange: str
    routing_key: str
    redelivered: bool


def queue_snapshot(queue: Queue) -> QueueSnapshot:
    """A picture of a queue."""
    return QueueSnapshot(
        name=queue.name,
        depth=queue.depth,
        ready=len(queue.ready),
        unacked=len(queue.unacked),
        bytes=queue.size,
        peak_depth=queue.peak_depth,
        peak_bytes=queue.peak_size,
        flow_stopped=queue.flow_stopped,
        flow_stopped_count=queue.flow_stopped_count,
        held_confirms=queue.held_confirms,
        published=queue.published,
        delivered=queue.delivered,
        acked=queue.acked,
        dropped=queue.dropped,
        consumers=len(queue.consumers),
        blocked=tuple(source.name for source in queue.blocked),
        durable=queue.durable,
        arguments=dict(queue.arguments),
    )


def channel_snapshot(channel: Channel) -> ChannelSnapshot:
    """A picture of a channel."""
    return ChannelSnapshot(
        name=channel.name,
        connection=channel.session.name,
        number=channel.number,
        is_producer=channel.is_producer,
        confirms=channel.confirms is not None,
        flowed=channel.is_blocked,
        # Each family of a queue's marks blocks for itself.
        blocked_by=tuple(dict.fromkeys(controller.name for controller in channel.blocking)),
        flow_ok=not channel.flow_oks_due,
        times_flowed=channel.times_flowed,
        flowed_seconds=channel.flowed_seconds,
        published=channel.published,
        returned=channel.returned,
        nacked=channel.nacked,
        unconfirmed=channel.unconfirmed,
        delivered=channel.delivered,
        acked=channel.acked,
        unacked=len(channel.unacked),
        consumers=tuple(channel.consumers),
    )


def connection_snapshot(session: Session) -> ConnectionSnapshot:
    """A picture of a connection."""
    return ConnectionSnapshot(
        name=session.name,
        user=session.user,
        is_open=session.is_running,
        blocked=session.is_blocked,
        flowed=any(channel.is_blocked for channel in session.channels.values()),
        times_flowed=session.times_flowed,
        channels=tuple(number for number, channel in session.channels.items() if not channel.is_closing),
        client_properties=dict(session.client_properties),
        published=session.published,
        delivered=session.delivered,
        bytes_received=session.bytes_received,
        bytes_sent=session.bytes_sent,
    )


def message_copy(entry: QueueEntry) -> BrokerMessage:
    """A copy of a message in a queue."""
    message = entry.message
    return BrokerMessage(
        message.body, message.properties, message.target.exchange, message.target.routing_key, entry.redelivered
    )
