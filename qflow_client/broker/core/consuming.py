"""`Consuming` has the consumers and the unsettled deliveries of one channel, sans-I/O.

The consumers share the delivery tags and the prefetch count of the channel. Credit is the number of messages that the
prefetch counts still allow. The `Dispatcher` of a queue asks `ChannelConsumer.can_take` before each delivery. When
consumers can perhaps take messages again, `Consuming.wake` offers messages to them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from struct import Struct
from typing import Protocol

import pamqp.base
from pamqp import commands

from qflow_client.amqp.frames import METHOD_FRAME, frame
from qflow_client.broker.core import wire
from qflow_client.broker.core.dropping import drops_each
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
    """The part of the session that `Consuming` uses."""

    host: VirtualHost
    output: Output
    handshake: Handshake


class Delivery:
    """A delivery of a message that the client has not settled yet."""

    __slots__ = ("consumer", "entry", "tag")

    def __init__(self, tag: int, entry: QueueEntry, consumer: ChannelConsumer | None) -> None:
        self.tag = tag
        self.entry = entry
        # The consumer; None if the message was fetched with Basic.Get.
        self.consumer = consumer


class ChannelConsumer:
    """A consumer on a channel.

    Args:
        no_ack: whether a delivery settles the message.
        prefetch: maximum number of unsettled messages of this consumer; 0 for no limit.
    """

    __slots__ = ("_prefix", "consuming", "is_active", "no_ack", "prefetch", "queue", "tag", "unacked")

    def __init__(self, consuming: Consuming, tag: str, queue: Queue, *, no_ack: bool, prefetch: int) -> None:
        self.consuming = consuming
        self.tag = tag
        self.queue = queue
        self.no_ack = no_ack
        self.prefetch = prefetch
        self.is_active = False
        self.unacked = 0
        # The bytes before the delivery tag in the payload of each Basic.Deliver to this consumer.
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


class Consuming:
    """The consumers of a channel, and its unsettled deliveries."""

    #: Maximum number of deliveries that one call of `take` returns.
    AT_ONCE = 10_000
    #: Maximum number of deliveries of a closed channel that return to their queues in one slice.
    RETURNS = 1000

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
        # Maximum frame size, in bytes, that the client accepts.
        self.frame_max = session.handshake.frame_max
        self.number = number
        self._host = session.host
        self.unacked: dict[int, Delivery] = {}
        # Number of unsettled deliveries to consumers, without those of Basic.Get.
        self.consumer_unacked = 0
        # While an ack, nack or recover of all deliveries is handled in slices, its last delivery tag; otherwise 0.
        self._ack_until = 0
        # The consumer of the latest delivery; None before the first delivery to a consumer.
        self.last_served: ChannelConsumer | None = None
        self.consumers: dict[str, ChannelConsumer] = {}
        self._delivery_tag = 0
        self.delivered = 0
        self.acked = 0
        # Prefetch counts: of the whole channel, and of future consumers.
        self.prefetch = 0
        self.consumer_prefetch = 0
        # Whether the client wants deliveries. The client can stop deliveries with Channel.Flow.
        self._wants_deliveries = True
        self._waits_for_disk = False
        # Whether consumers can take messages: the client wants deliveries, and no answer waits for the disk.
        self.delivers = True

    # Delivering.

    def next_delivery_tag(self) -> int:
        self._delivery_tag += 1
        return self._delivery_tag

    def consume(self, queue: Queue, tag: str, *, no_ack: bool, exclusive: bool, nowait: bool) -> None:
        """Add a consumer to a queue.

        Args:
            tag: consumer tag; if it is empty, the broker chooses a tag.
            exclusive: whether the new consumer has to be the only consumer of the queue.
            nowait: whether to send no answer.

        Raises:
            ChannelException: 403 if the queue has an exclusive consumer, or if the new consumer has to be exclusive and
                the queue already has consumers. 406 if the maximum number of consumers is reached.
            ConnectionException: 530 if the channel already has a consumer with this tag.
        """
        tag = tag or f"ctag-{self.number}.{secrets.token_urlsafe(12)}"
        if tag in self.consumers:
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED, f"consumer tag '{tag}' is in use on channel {self.number}; choose another"
            )
        if queue.dispatcher.exclusive is not None or (exclusive and queue.dispatcher.consumers):
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"queue '{queue.name}' has other consumers, and one consumer is exclusive"
            )
        self._host.consumer_quota.take()
        consumer = ChannelConsumer(self, tag, queue, no_ack=no_ack, prefetch=self.consumer_prefetch)
        self.consumers[tag] = consumer
        if not nowait:
            self.output.write(_consumer_ok(self.number, commands.Basic.ConsumeOk, tag))
        queue.dispatcher.add(consumer, exclusive=exclusive)
        queue.dispatcher.dispatch()

    def cancel(self, tag: str, *, nowait: bool) -> None:
        """Cancel a consumer. If the consumer does not exist, nothing changes. With `nowait` no answer is sent."""
        consumer = self.consumers.pop(tag, None)
        if consumer is not None:
            consumer.queue.remove_consumer(consumer)
            consumer.queue.dispatcher.dispatch()
            self._host.consumer_gone(consumer.queue)
        if not nowait:
            self.output.write(_consumer_ok(self.number, commands.Basic.CancelOk, tag))

    def consumer_lost(self, consumer: ChannelConsumer) -> None:
        """Remove a consumer whose queue was deleted. Send Basic.Cancel to a client that understands it."""
        # If the consumer was cancelled meanwhile, its tag can belong to another consumer.
        if self.consumers.get(consumer.tag) is not consumer:
            return
        del self.consumers[consumer.tag]
        if self.session.handshake.understands("consumer_cancel_notify"):
            self.output.write(_cancel(self.number, consumer.tag))

    def get(self, queue: Queue, *, no_ack: bool) -> None:
        """Answer Basic.Get with the next message of a queue, or with Basic.Get-Empty."""
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
        """Answer Basic.Get with a message whose body is only on disk. The answer is sent when the body has been read.

        The method frame waits too, because the content must directly follow it on the channel.
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
        """Offer messages to inactive consumers, because they can perhaps take messages again."""
        consumers = tuple(self.consumers.values())
        if self.prefetch and self.last_served in consumers:
            # In a fixed order the first consumer could take all credit, so the consumer of the latest delivery is last.
            start = consumers.index(self.last_served) + 1
            consumers = (*consumers[start:], *consumers[:start])
        for consumer in consumers:
            if not consumer.is_active:
                consumer.queue.dispatcher.wake(consumer)
                consumer.queue.dispatcher.dispatch(drops_each(len(consumers)))

    def want(self, on: bool) -> None:
        """Start or stop deliveries, as the client's Channel.Flow requests."""
        self._wants_deliveries = on
        self._check_delivers()

    def wait_for_disk(self, on: bool) -> None:
        self._waits_for_disk = on
        self._check_delivers()

    def _check_delivers(self) -> None:
        self.delivers = self._wants_deliveries and not self._waits_for_disk
        if self.delivers:
            self.wake()

    # Settling.

    def take(self, tag: int, *, multiple: bool) -> tuple[Delivery, ...]:
        """Return the deliveries that an ack, nack or reject settles, and remove them from the unacked deliveries.

        One call returns at most the `AT_ONCE` oldest deliveries. If `has_more` is true afterwards, call `take` again
        with the same arguments, before any other frame of the channel is handled.

        Args:
            multiple: whether all deliveries up to `tag` are settled. Tag 0 then means all current deliveries.

        Raises:
            ChannelException: 406 if no unsettled delivery has this tag.
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
        oldest = islice(unacked.items(), self.AT_ONCE)
        deliveries = [delivery for _, delivery in takewhile(lambda item: item[0] <= last, oldest)]
        for delivery in deliveries:
            del unacked[delivery.tag]
            self._count_unacked(delivery, -1)
        self._ack_until = last if not tag and next(iter(unacked), last + 1) <= last else 0
        return tuple(deliveries)

    def has_more(self, tag: int) -> bool:
        """Return True if the last ``take(tag, multiple=True)`` did not return all deliveries up to `tag`."""
        return bool(self._ack_until) if not tag else tag in self.unacked

    @staticmethod
    def _unknown(tag: int) -> ChannelException:
        return ChannelException(
            ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}: it was not delivered, or is already settled"
        )

    def _count_unacked(self, delivery: Delivery, change: int) -> None:
        if delivery.consumer is not None:
            delivery.consumer.unacked += change
            self.consumer_unacked += change

    def restore_unacked(self, deliveries: Iterable[Delivery]) -> None:
        """Undo `take`: add deliveries to the unacked deliveries again. The messages are not delivered again."""
        for delivery in deliveries:
            self._count_unacked(delivery, 1)
            self.unacked[delivery.tag] = delivery
        self.unacked = dict(sorted(self.unacked.items()))

    def settle(self, deliveries: Iterable[Delivery], *, acked: bool, requeue: bool) -> None:
        """Settle deliveries that `take` returned. With `requeue` the messages go back to their queues."""
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
        """Return deliveries to their queues. No queue delivers before all messages are back at their places."""
        back: dict[QueueView, list[QueueEntry]] = {}
        for delivery in deliveries:
            back.setdefault(delivery.entry.queue, []).append(delivery.entry)
        for queue, entries in back.items():
            queue.dispatcher.requeue(entries)
        for queue in back:
            # As in RabbitMQ, the queue applies its maximum to the returned messages before it delivers any.
            queue.trim(drops_each(len(back)))
        self.wake()
        for queue in back:
            queue.dispatcher.dispatch(drops_each(len(back)))

    def recover(self, *, requeue: bool) -> None:
        """Deliver unsettled messages to their consumers again. Requeue a message that its consumer cannot take now.

        With `requeue`, requeue all messages. If `has_more(0)` is true afterwards, the caller calls `recover` again.
        """
        back: list[Delivery] = []
        for delivery in self.take(0, multiple=True):
            # The credit is checked for each delivery, because earlier repeated deliveries have used credit.
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
        """Return True if the consumer can take the message again, the entry is not gone, and the body is in memory."""
        consumer = delivery.consumer
        return (
            consumer is not None
            and self.consumers.get(consumer.tag) is consumer
            and consumer.can_take
            and not delivery.entry.is_gone
            and delivery.entry.message.body is not None
        )

    def end(self) -> None:
        """Remove the consumers, and return the unacked messages to their queues, in slices."""
        consumers, deliveries = tuple(self.consumers.values()), list(self.unacked.values())
        self.consumers.clear()
        self.last_served = None
        self.unacked.clear()
        # Stop deliveries, so that consumers that are not removed yet take no messages.
        self.want(False)
        if consumers or deliveries:
            queues: dict[QueueView, None] = {consumer.queue: None for consumer in consumers}
            for queue in queues:
                queue.dispatcher.pause(1)
            self._host.slices.run(self._end_in_steps(consumers, deliveries, queues))

    def _end_in_steps(
        self, consumers: tuple[ChannelConsumer, ...], deliveries: list[Delivery], paused: dict[QueueView, None]
    ) -> Iterator[None]:
        """Return deliveries to their queues, and then remove consumers.

        The newest deliveries return first, so each step puts its messages in front of those of earlier steps. To keep
        the order, the queues deliver nothing until all deliveries have returned.

        Args:
            deliveries: the unsettled deliveries, the oldest first.
            paused: the queues that the caller has paused. This method also pauses the queues of the deliveries.
        """
        try:
            while deliveries:
                back: dict[QueueView, list[QueueEntry]] = {}
                for delivery in deliveries[-self.RETURNS :]:
                    back.setdefault(delivery.entry.queue, []).append(delivery.entry)
                del deliveries[-self.RETURNS :]
                for queue, entries in back.items():
                    if queue not in paused:
                        paused[queue] = None
                        queue.dispatcher.pause(1)
                    queue.dispatcher.requeue(entries)
                yield
            for queue in tuple(paused):
                del paused[queue]
                queue.dispatcher.pause(-1)
                queue.trim(drops_each(self._host.slices.AT_ONCE))
                queue.dispatcher.dispatch()
                yield
        finally:
            # If a step fails, the queues must not stay paused.
            for queue in paused:
                queue.dispatcher.pause(-1)
        for consumer in consumers:
            consumer.queue.remove_consumer(consumer)
            consumer.queue.dispatcher.dispatch()
            self._host.consumer_gone(consumer.queue)
            yield


def _get_ok(channel: int, tag: int, redelivered: bool, names: bytes, message_count: int) -> bytes:
    """Return a ``Basic.Get-Ok`` frame. `names` are the exchange and the routing key as short strings."""
    payload = b"\0\x3c\0\x47" + _TAG_BIT.pack(tag, redelivered) + names + message_count.to_bytes(4, "big")
    return frame(METHOD_FRAME, channel, payload)


def _cancel(channel: int, consumer_tag: str) -> bytes:
    return frame(METHOD_FRAME, channel, b"\0\x3c\0\x1e" + wire.short(consumer_tag) + b"\1")


def _consumer_ok(channel: int, kind: type[pamqp.base.Frame], consumer_tag: str) -> bytes:
    """Return a ``Basic.Consume-Ok`` or ``Basic.Cancel-Ok`` frame."""
    return frame(METHOD_FRAME, channel, kind.index.to_bytes(4, "big") + wire.short(consumer_tag))
