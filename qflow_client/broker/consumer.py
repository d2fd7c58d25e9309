"""A channel's consumers and what they have been given."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from qflow_client.amqp.frames import METHOD_FRAME
from qflow_client.broker import wire
from qflow_client.broker.entries import QueueEntry
from qflow_client.broker.queue import Queue

if TYPE_CHECKING:
    from qflow_client.broker.consuming import Consuming

__all__ = ["ChannelConsumer", "Delivery"]

_HEAD = Struct(">BHI")
_TAG_BIT = Struct(">QB")


class Delivery:
    """A message that was given out and not settled yet."""

    __slots__ = ("consumer", "entry", "tag")

    def __init__(self, tag: int, entry: QueueEntry, consumer: ChannelConsumer | None) -> None:
        self.tag = tag
        self.entry = entry
        # None if it was got, not consumed.
        self.consumer = consumer


class ChannelConsumer:
    """A consumer on a channel.

    Args:
        consuming: of its channel.
        tag: its consumer tag.
        queue: what it consumes.
        no_ack: whether a delivery settles the message.
        prefetch: unsettled messages that it may have; 0 for any number.
    """

    __slots__ = ("_prefix", "consuming", "is_active", "no_ack", "prefetch", "queue", "tag", "unacked")

    def __init__(self, consuming: Consuming, tag: str, queue: Queue, *, no_ack: bool, prefetch: int) -> None:
        self.consuming = consuming
        self.tag = tag
        self.queue = queue
        self.no_ack = no_ack
        self.prefetch = prefetch
        self.is_active = False
        # Messages that it has not settled.
        self.unacked = 0
        self._prefix = wire.deliver_prefix(tag)

    @property
    def can_take(self) -> bool:
        consuming = self.consuming
        if not consuming.delivers or not consuming.session.takes_deliveries:
            return False
        if self.no_ack:
            return True
        return not (0 < self.prefetch <= self.unacked or 0 < consuming.prefetch <= consuming.consumer_unacked)

    def deliver(self, entry: QueueEntry) -> None:
        consuming = self.consuming
        tag = consuming.next_delivery_tag()
        if not self.no_ack:
            self.unacked += 1
            consuming.consumer_unacked += 1
            consuming.unacked[tag] = Delivery(tag, entry, self)
        consuming.delivered += 1
        message = entry.message
        body = message.body
        assert body is not None
        payload = b"%b%b%b" % (self._prefix, _TAG_BIT.pack(tag, entry.redelivered), message.target.names)
        number, session = consuming.number, consuming.session
        session.deliver(
            b"%b%b\xce%b"
            % (
                _HEAD.pack(METHOD_FRAME, number, len(payload)),
                payload,
                wire.content_frames(number, message.header, body, session.frame_max),
            )
        )

    def cancelled_by_queue(self) -> None:
        self.is_active = False
        self.consuming.consumer_lost(self)
