"""What one channel delivers and what of that is unsettled, sans-I/O.

Consumers of a channel share its delivery tags and its prefetch count. A queue asks `ChannelConsumer.can_take` before
each delivery. When credit comes back, `Consuming.wake` offers it to the consumers in turn, beginning behind the one
that was served last, so that none of them takes everything.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from struct import Struct
from typing import Protocol

import pamqp.base
from pamqp import commands

from qflow_client.amqp.frames import METHOD_FRAME, frame
from qflow_client.broker.core import wire
from qflow_client.broker.core.entries import QueueEntry, QueueView, StoredMessage
from qflow_client.broker.core.errors import ChannelException, ConnectionException, ReplyCode
from qflow_client.broker.core.handshake import Handshake
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["ChannelConsumer", "Consuming", "DeliveringSession", "Delivery"]

_HEAD = Struct(">BHI")
_TAG_BIT = Struct(">QB")


class DeliveringSession(Protocol):
    """The connection, as far as deliveries need it."""

    host: VirtualHost
    output: Output
    handshake: Handshake


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
        # The payload of every Basic.Deliver to it, up to the delivery tag.
        self._prefix = b"\0\x3c\0\x3c" + wire.short(tag)

    @property
    def can_take(self) -> bool:
        consuming = self.consuming
        if not consuming.delivers or not consuming.output.takes_deliveries:
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
        consuming.last_served = self
        message = entry.message
        body = message.body
        assert body is not None
        payload = b"%b%b%b" % (self._prefix, _TAG_BIT.pack(tag, entry.redelivered), message.target.names)
        number = consuming.number
        consuming.output.deliver(
            b"%b%b\xce%b"
            % (
                _HEAD.pack(METHOD_FRAME, number, len(payload)),
                payload,
                wire.content_frames(number, message.header, body, consuming.frame_max),
            )
        )

    def cancelled_by_queue(self) -> None:
        self.is_active = False
        self.consuming.consumer_lost(self)


class Returning:
    """Very many deliveries of a channel that has ended, on their way back to their queues in slices.

    The newest come back first: so each slice stands before those that are back. Until all are, the queues deliver
    nothing, for the order's sake.

    Args:
        host: the virtual host.
        deliveries: the oldest first.
        queues: those of the channel's consumers.
    """

    #: Deliveries of a slice.
    AT_ONCE = 10_000

    def __init__(self, host: VirtualHost, deliveries: list[Delivery], queues: Iterable[Queue]) -> None:
        self._host = host
        self._deliveries = deliveries
        self._queues: dict[QueueView, None] = {}
        for queue in queues:
            self._pause(queue)

    def _pause(self, queue: QueueView) -> None:
        if queue not in self._queues:
            self._queues[queue] = None
            queue.dispatcher.pause(1)

    def tick(self, now: float) -> None:
        """Return a slice."""
        back: dict[QueueView, list[QueueEntry]] = {}
        for delivery in self._deliveries[-self.AT_ONCE :]:
            back.setdefault(delivery.entry.queue, []).append(delivery.entry)
        del self._deliveries[-self.AT_ONCE :]
        for queue, entries in back.items():
            self._pause(queue)
            queue.dispatcher.requeue(entries)
        if self._deliveries:
            self._host.timers.wake_at(self, now)
            return
        for queue in self._queues:
            queue.dispatcher.pause(-1)
            queue.trim()
        for queue in self._queues:
            queue.dispatcher.dispatch()


class Consuming:
    """The consumers of a channel, and what it was given.

    Args:
        session: the channel's.
        number: of the channel.
    """

    #: Deliveries that an ack of several takes at once; and for how many of them a delivery counts whose queue
    #: dead-letters, because sending a dead letter takes longer than anything else that becomes of one.
    AT_ONCE = 10_000
    LETTER = 50

    __slots__ = (
        "_ack_until",
        "_delivery_tag",
        "_host",
        "_waits_for_disk",
        "_wants_deliveries",
        "acked",
        "consumer_prefetch",
        "consumer_unacked",
        "consumers",
        "delivered",
        "delivers",
        "frame_max",
        "last_served",
        "number",
        "output",
        "prefetch",
        "session",
        "unacked",
    )

    def __init__(self, session: DeliveringSession, number: int) -> None:
        self.session = session
        self.output = session.output
        # Bytes of the largest frame that the client takes.
        self.frame_max = session.handshake.frame_max
        self.number = number
        self._host = session.host
        # Given out and not settled, by delivery tag; how many of them to consumers.
        self.unacked: dict[int, Delivery] = {}
        self.consumer_unacked = 0
        # While an ack of all (tag 0) goes on in slices: the tag of the last delivery that it is about; else 0.
        self._ack_until = 0
        # The consumer of the last delivery.
        self.last_served: ChannelConsumer | None = None
        self.consumers: dict[str, ChannelConsumer] = {}
        self._delivery_tag = 0
        self.delivered = 0
        self.acked = 0
        # Prefetch counts: of the whole channel, and of consumers that come.
        self.prefetch = 0
        self.consumer_prefetch = 0
        # Whether the client wants deliveries, which its own Channel.Flow says; whether its answers wait for the
        # disk; and so, whether its consumers take anything.
        self._wants_deliveries = True
        self._waits_for_disk = False
        self.delivers = True

    # Delivering.

    def next_delivery_tag(self) -> int:
        """The number of the next delivery."""
        self._delivery_tag += 1
        return self._delivery_tag

    def consume(self, queue: Queue, tag: str, *, no_ack: bool, exclusive: bool, nowait: bool) -> None:
        """Let a consumer take from a queue.

        Args:
            queue: from which.
            tag: of the consumer; empty for one of the broker's choice.
            no_ack: whether a delivery settles the message.
            exclusive: whether it is to be the queue's only consumer.
            nowait: whether no answer is wanted.

        Raises:
            ChannelException: 403; the queue has a consumer that excludes this one. 406; there are as many consumers as
                there may be.
            ConnectionException: 530; the channel has a consumer of that tag.
        """
        tag = tag or f"ctag-{self.number}.{secrets.token_urlsafe(12)}"
        if tag in self.consumers:
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED, f"consumer tag '{tag}' is in use on channel {self.number}; choose another"
            )
        if queue.dispatcher.exclusive is not None or (exclusive and queue.dispatcher.consumers):
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"queue '{queue.name}' has a consumer that excludes this one"
            )
        self._host.consumer_quota.take()
        consumer = ChannelConsumer(self, tag, queue, no_ack=no_ack, prefetch=self.consumer_prefetch)
        self.consumers[tag] = consumer
        if not nowait:
            self.output.write(_consumer_ok(self.number, commands.Basic.ConsumeOk, tag))
        queue.dispatcher.add(consumer, exclusive=exclusive)
        queue.dispatcher.dispatch()

    def cancel(self, tag: str, *, nowait: bool) -> None:
        """Let a consumer go; one that does not exist is no error.

        Args:
            tag: of the consumer.
            nowait: whether no answer is wanted.
        """
        consumer = self.consumers.pop(tag, None)
        if consumer is not None:
            consumer.queue.remove_consumer(consumer)
            consumer.queue.dispatcher.dispatch()
            self._host.consumer_gone(consumer.queue)
        if not nowait:
            self.output.write(_consumer_ok(self.number, commands.Basic.CancelOk, tag))

    def consumer_lost(self, consumer: ChannelConsumer) -> None:
        """The queue of a consumer was deleted."""
        was_there = self.consumers.pop(consumer.tag, None) is not None
        if was_there and self.session.handshake.understands("consumer_cancel_notify"):
            self.output.write(_cancel(self.number, consumer.tag))

    def get(self, queue: Queue, *, no_ack: bool) -> None:
        """Answer with the next message of a queue, or that there is none."""
        entry = queue.take(no_ack=no_ack)
        if entry is None:
            self.output.write(wire.method(self.number, commands.Basic.GetEmpty()))
            return
        tag = self.next_delivery_tag()
        if not no_ack:
            self.unacked[tag] = Delivery(tag, entry, None)
        self.delivered += 1
        message = entry.message
        get_ok = _get_ok(self.number, tag, entry.redelivered, message.target.names, queue.contents.ready_count)
        if message.body is not None:
            self.output.write(get_ok)
            self.output.write(wire.content_frames(self.number, message.header, message.body, self.frame_max))
        else:
            self._promise_message(get_ok, message, tag)

    def _promise_message(self, get_ok: bytes, message: StoredMessage, tag: int) -> None:
        """Answer with a message, which is on disk and held, as soon as it is read.

        The method waits, too: nothing may come between it and the content. If the body is lost, the queue was empty.
        """
        journal = self._host.journal
        assert journal is not None
        promise = self.output.promise(self.number, message.size)

        def keep() -> None:
            if message.body is None:
                self.unacked.pop(tag, None)
                journal.leave(0, message)
                promise.keep(wire.method(self.number, commands.Basic.GetEmpty()))
                return
            content = wire.content_frames(self.number, message.header, message.body, self.frame_max)
            journal.leave(0, message)
            promise.keep(get_ok + content)

        journal.when_read(message, keep)

    def wake(self) -> None:
        """Something changed that consumers may have waited for. The one that was served last comes last."""
        consumers = tuple(self.consumers.values())
        if self.prefetch and self.last_served in consumers:
            # They share the credit: else the first of them would take all that comes free.
            start = consumers.index(self.last_served) + 1
            consumers = (*consumers[start:], *consumers[:start])
        for consumer in consumers:
            if not consumer.is_active:
                consumer.queue.dispatcher.wake(consumer)
                consumer.queue.dispatcher.dispatch()

    def want(self, on: bool) -> None:
        """The client wants deliveries, or none."""
        self._wants_deliveries = on
        self._check_delivers()

    def wait_for_disk(self, on: bool) -> None:
        """Its answers wait for the disk, or no longer: deliveries go elsewhere, or stay in their queues."""
        self._waits_for_disk = on
        self._check_delivers()

    def _check_delivers(self) -> None:
        self.delivers = self._wants_deliveries and not self._waits_for_disk
        if self.delivers:
            self.wake()

    # Settling.

    def take(self, tag: int, *, multiple: bool) -> tuple[Delivery, ...]:
        """What an ack is about, taken out of what is unacked; only the oldest if it is about very many.

        If `has_more` says so afterwards, the same ack is to be handled again, before anything else of the channel.

        Args:
            tag: the delivery tag.
            multiple: whether it is about all up to that one, or if that is 0 about all that there are now.

        Raises:
            ChannelException: 406; there is no such delivery.
        """
        unacked = self.unacked
        if not multiple:
            delivery = unacked.pop(tag, None)
            if delivery is None:
                raise self._unknown(tag)
            self._count_unacked(delivery, -1)
            return (delivery,)
        if tag and tag not in unacked:
            raise self._unknown(tag)
        last = tag or self._ack_until or next(reversed(unacked), 0)
        deliveries: list[Delivery] = []
        left = self.AT_ONCE
        for known, delivery in unacked.items():
            if known > last or left <= 0:
                break
            deliveries.append(delivery)
            left -= self.LETTER if delivery.entry.queue.dropping.has_letters else 1
        for delivery in deliveries:
            del unacked[delivery.tag]
            self._count_unacked(delivery, -1)
        self._ack_until = last if not tag and next(iter(unacked), last + 1) <= last else 0
        return tuple(deliveries)

    def has_more(self, tag: int) -> bool:
        """Return True if `take` gave only a part of what an ack up to this tag is about."""
        return bool(self._ack_until) if not tag else tag in self.unacked

    @staticmethod
    def _unknown(tag: int) -> ChannelException:
        return ChannelException(
            ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}: never given out, or settled already"
        )

    def _count_unacked(self, delivery: Delivery, change: int) -> None:
        if delivery.consumer is not None:
            delivery.consumer.unacked += change
            self.consumer_unacked += change

    def take_back(self, deliveries: Iterable[Delivery]) -> None:
        """What was taken is unsettled again, and not delivered anew."""
        for delivery in deliveries:
            self._count_unacked(delivery, 1)
            self.unacked[delivery.tag] = delivery
        self.unacked = dict(sorted(self.unacked.items()))

    def settle(self, deliveries: Iterable[Delivery], *, acked: bool, requeue: bool) -> None:
        """Settle what was taken.

        Args:
            deliveries: which.
            acked: whether they are acked.
            requeue: whether they go back to their queues.
        """
        if requeue:
            self._requeue(deliveries)
            return
        for delivery in deliveries:
            entry = delivery.entry
            entry.queue.dispatcher.settle(entry, acked=acked)
            if acked:
                self.acked += 1
        self.wake()

    def _requeue(self, deliveries: Iterable[Delivery]) -> None:
        """Put deliveries back in their places; nothing is delivered before all are."""
        back: dict[QueueView, list[QueueEntry]] = {}
        for delivery in deliveries:
            back.setdefault(delivery.entry.queue, []).append(delivery.entry)
        for queue, entries in back.items():
            queue.dispatcher.requeue(entries)
        for queue in back:
            # As in RabbitMQ, before anything is delivered: what came back may be more than the queue's maximum.
            queue.trim()
        self.wake()
        for queue in back:
            queue.dispatcher.dispatch()

    def recover(self, *, requeue: bool) -> None:
        """Deliver again what is unsettled: to the same consumer, or with `requeue` to any.

        If `has_more(0)` says so afterwards, that was a slice, and the next call goes on.
        """
        back: list[Delivery] = []
        for delivery in self.take(0, multiple=True):
            # Asked anew for each, because each delivery leaves less room for the next.
            if requeue or not self._is_served(delivery):
                back.append(delivery)
                continue
            entry = delivery.entry
            entry.redelivered = True
            entry.queue.dispatcher.delivered += 1
            assert delivery.consumer is not None
            delivery.consumer.deliver(entry)
        self._requeue(back)

    def _is_served(self, delivery: Delivery) -> bool:
        """Whether a delivery can be repeated to its consumer: not to one that is gone, or wants none now."""
        consumer = delivery.consumer
        return (
            consumer is not None
            and self.consumers.get(consumer.tag) is consumer
            and consumer.can_take
            and not delivery.entry.is_gone
        )

    def end(self) -> None:
        """Consumers go, and what is unacked returns to its queues."""
        consumers = tuple(self.consumers.values())
        self.consumers.clear()
        self.last_served = None
        for consumer in consumers:
            consumer.queue.remove_consumer(consumer)
        unacked, self.unacked = self.unacked, {}
        if len(unacked) > Returning.AT_ONCE:
            queues = (consumer.queue for consumer in consumers)
            Returning(self._host, list(unacked.values()), queues).tick(self._host.clock())
        else:
            self._requeue(unacked.values())
        for consumer in consumers:
            consumer.queue.dispatcher.dispatch()
            self._host.consumer_gone(consumer.queue)


def _get_ok(channel: int, tag: int, redelivered: bool, names: bytes, message_count: int) -> bytes:
    """The frame of a ``Basic.Get-Ok``; `names` are the exchange and the routing key as short strings."""
    payload = b"\0\x3c\0\x47" + _TAG_BIT.pack(tag, redelivered) + names + message_count.to_bytes(4, "big")
    return frame(METHOD_FRAME, channel, payload)


def _cancel(channel: int, consumer_tag: str) -> bytes:
    """The frame of a ``Basic.Cancel`` that tells a client that its consumer is gone."""
    return frame(METHOD_FRAME, channel, b"\0\x3c\0\x1e" + wire.short(consumer_tag) + b"\1")


def _consumer_ok(channel: int, kind: type[pamqp.base.Frame], consumer_tag: str) -> bytes:
    """The frame of a ``Basic.Consume-Ok`` or ``Basic.Cancel-Ok``."""
    return frame(METHOD_FRAME, channel, kind.index.to_bytes(4, "big") + wire.short(consumer_tag))
