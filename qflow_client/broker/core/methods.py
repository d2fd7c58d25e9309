"""Handlers of the AMQP methods for topology and consuming.

`Channel.on_method` finds the handler of a method in `METHODS`. The arguments of a handler are the channel and the
decoded method. The handler raises an `AmqpError` to refuse the method. With a store, an answer that reports a change of
the topology (queues, exchanges and bindings) waits until the change is on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pamqp.base
from pamqp import commands

from qflow_client.broker.core import wire
from qflow_client.broker.core.consuming import Consuming
from qflow_client.broker.core.errors import ChannelException, ConnectionException, FrameWaitsError, ReplyCode
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.profiles import Dialect
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.replies import (
    REPLY_PREFIX,
    REPLY_TO,
    check_reply_consumer,
    check_reply_queue,
    is_reply_queue,
)
from qflow_client.broker.core.unsupported import check_consumer_arguments
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["METHODS"]


class MethodSession(Protocol):
    """The part of the connection that the handlers need. Exclusive queues keep this object as their owner."""

    dialect: Dialect
    output: Output


class MethodChannel(Protocol):
    """The part of the channel that the handlers need."""

    number: int
    host: VirtualHost
    consuming: Consuming
    last_queue: str
    #: Name of the latest queue for direct replies, even if it is deleted; empty if there was none.
    reply_queue: str

    @property
    def session(self) -> MethodSession:
        """The channel's connection."""

    def reply(self, method: pamqp.base.Frame) -> None:
        """Send an answer that reports no change of the topology."""

    def check_alarm(self, so: str = "") -> None:
        """Raise an exception if the dialect forbids the method during the present alarm, see `Channel.check_alarm`."""

    def settle(self, tag: int, *, multiple: bool, acked: bool, requeue: bool) -> None:
        """Settle the deliveries of a nack or reject, or in transaction mode add the deliveries to the transaction."""


def _reply(channel: MethodChannel, method: Any, answer: Callable[[], pamqp.base.Frame]) -> None:
    if not method.nowait:
        channel.session.output.write_when_durable(wire.method(channel.number, answer()))


def _exchange_declare(channel: MethodChannel, method: Any) -> None:
    if method.passive:
        channel.host.router.exchange(method.exchange)
    else:
        channel.host.topology.declare_exchange(
            method.exchange,
            method.exchange_type,
            durable=method.durable,
            auto_delete=method.auto_delete,
            internal=method.internal,
            arguments=method.arguments,
        )
    _reply(channel, method, commands.Exchange.DeclareOk)


def _exchange_delete(channel: MethodChannel, method: Any) -> None:
    channel.host.topology.delete_exchange(method.exchange, if_unused=method.if_unused)
    _reply(channel, method, commands.Exchange.DeleteOk)


def _exchange_bind(channel: MethodChannel, method: Any) -> None:
    destination = channel.host.topology.bindable_exchange(method.destination)
    channel.host.topology.bind(destination, method.source, method.routing_key, method.arguments)
    _reply(channel, method, commands.Exchange.BindOk)


def _exchange_unbind(channel: MethodChannel, method: Any) -> None:
    host = channel.host
    host.topology.check_bindable(method.source)
    host.topology.check_bindable(method.destination)
    destination = host.topology.exchanges.get(method.destination)
    if destination is not None:
        host.topology.unbind(destination, method.source, method.routing_key, method.arguments)
    _reply(channel, method, commands.Exchange.UnbindOk)


def _queue_declare(channel: MethodChannel, method: Any) -> None:
    host, session = channel.host, channel.session
    if is_reply_queue(method.queue) and session.dialect.has("direct_reply_to"):
        check_reply_queue(method.queue, host.queues)
        if not method.nowait:
            session.output.write_when_durable(wire.queue_declare_ok(channel.number, method.queue, 0, 1))
        return
    if method.passive:
        queue = named_queue(channel, method.queue)
        queue.touch()
    else:
        if method.queue not in host.queues:
            channel.check_alarm(", can not create queue")
        queue = host.declare_queue(
            method.queue,
            durable=method.durable,
            exclusive=method.exclusive,
            auto_delete=method.auto_delete,
            arguments=method.arguments,
            owner=session,
        )
    channel.last_queue = queue.name
    if not method.nowait:
        session.output.write_when_durable(
            wire.queue_declare_ok(
                channel.number, queue.name, queue.contents.ready_count, len(queue.dispatcher.consumers)
            )
        )


def _queue_name(channel: MethodChannel, name: str) -> str:
    """Return the queue name of a method. An empty name means the queue that the channel declared last (404 if none)."""
    if not name:
        name = channel.last_queue
        if not name:
            raise ChannelException(
                ReplyCode.NOT_FOUND, "the method has no queue name, and this channel has not declared a queue"
            )
    return name


def named_queue(channel: MethodChannel, name: str) -> Queue:
    """Return the queue of a method, see `_queue_name`.

    Raises:
        ChannelException: 404 if the queue does not exist. 405 if the queue belongs to another connection.
    """
    name = _queue_name(channel, name)
    if is_reply_queue(name):
        raise ChannelException(
            ReplyCode.NOT_FOUND, f"no queue '{name}'; replies are consumed from '{REPLY_TO}', without acknowledgements"
        )
    return channel.host.queue(name, channel.session)


def _binding_key(queue: Queue, method: Any) -> str:
    # AMQP 0-9-1: if queue and routing key are both empty, the routing key is the queue's name.
    key: str = method.routing_key
    return key if method.queue or key else queue.name


def _queue_bind(channel: MethodChannel, method: Any) -> None:
    queue = named_queue(channel, method.queue)
    channel.host.topology.bind(queue, method.exchange, _binding_key(queue, method), method.arguments)
    _reply(channel, method, commands.Queue.BindOk)


def _queue_unbind(channel: MethodChannel, method: Any) -> None:
    host = channel.host
    host.topology.check_bindable(method.exchange)
    queue = host.queues.get(_queue_name(channel, method.queue))
    if queue is not None:
        key = _binding_key(queue, method)
        host.topology.unbind(queue, method.exchange, key, method.arguments, channel.session)
    channel.session.output.write_when_durable(wire.method(channel.number, commands.Queue.UnbindOk()))


def _queue_purge(channel: MethodChannel, method: Any) -> None:
    count = named_queue(channel, method.queue).purge()
    _reply(channel, method, lambda: commands.Queue.PurgeOk(count))


def _queue_delete(channel: MethodChannel, method: Any) -> None:
    host = channel.host

    def answer(count: int) -> None:
        _reply(channel, method, lambda: commands.Queue.DeleteOk(count))

    if not method.queue or method.queue in host.queues:
        queue = named_queue(channel, method.queue)
        if method.if_unused and queue.dispatcher.consumers:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"queue '{queue.name}' has {len(queue.dispatcher.consumers)} consumers"
            )
        # As in RabbitMQ, unacked messages are not counted.
        if method.if_empty and queue.contents.ready_count:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"queue '{queue.name}' has {queue.contents.ready_count} ready messages"
            )
        host.delete_queue(queue, answer)
    else:
        answer(0)


def _qos(channel: MethodChannel, method: Any) -> None:
    if method.prefetch_size:
        raise ConnectionException(
            ReplyCode.NOT_IMPLEMENTED,
            f"prefetch_size={method.prefetch_size} is not supported; use prefetch_count with prefetch_size=0",
        )
    if method.global_:
        channel.consuming.prefetch = method.prefetch_count
    else:
        channel.consuming.consumer_prefetch = method.prefetch_count
    channel.reply(commands.Basic.QosOk())
    channel.consuming.wake()


def _consume_replies(channel: MethodChannel, method: Any) -> None:
    host = channel.host
    check_reply_consumer(no_ack=method.no_ack, has_one=channel.reply_queue in host.queues)
    queue = host.declare_queue("", exclusive=True, auto_delete=True, owner=channel.session, prefix=REPLY_PREFIX)
    channel.reply_queue = queue.name
    channel.consuming.consume(queue, method.consumer_tag, no_ack=True, exclusive=False, nowait=method.nowait)


def _consume(channel: MethodChannel, method: Any) -> None:
    if method.queue == REPLY_TO and channel.session.dialect.has("direct_reply_to"):
        _consume_replies(channel, method)
        return
    queue = named_queue(channel, method.queue)
    check_consumer_arguments(queue.name, method.arguments or {})
    channel.consuming.consume(
        queue, method.consumer_tag, no_ack=method.no_ack, exclusive=method.exclusive, nowait=method.nowait
    )


def _cancel(channel: MethodChannel, method: Any) -> None:
    channel.consuming.cancel(method.consumer_tag, nowait=method.nowait)


def _cancel_ok(channel: MethodChannel, method: Any) -> None:
    """Do nothing: Basic.Cancel-Ok only says that the client has read the broker's Basic.Cancel."""


def _get(channel: MethodChannel, method: Any) -> None:
    queue = named_queue(channel, method.queue)
    if not queue.dispatcher.catch_up():
        raise FrameWaitsError
    channel.consuming.get(queue, no_ack=method.no_ack)


def _flow(channel: MethodChannel, method: Any) -> None:
    channel.reply(commands.Channel.FlowOk(active=method.active))
    channel.consuming.want(method.active)


def _nack(channel: MethodChannel, method: Any) -> None:
    channel.settle(method.delivery_tag, multiple=method.multiple, acked=False, requeue=method.requeue)


def _reject(channel: MethodChannel, method: Any) -> None:
    channel.settle(method.delivery_tag, multiple=False, acked=False, requeue=method.requeue)


def _recover(channel: MethodChannel, method: Any) -> None:
    _recover_async(channel, method)
    channel.reply(commands.Basic.RecoverOk())


def _recover_async(channel: MethodChannel, method: Any) -> None:
    channel.consuming.recover(requeue=method.requeue)
    if channel.consuming.has_more(0):
        raise FrameWaitsError


METHODS: dict[type[pamqp.base.Frame], Callable[[Any, Any], None]] = {
    commands.Exchange.Declare: _exchange_declare,
    commands.Exchange.Delete: _exchange_delete,
    commands.Exchange.Bind: _exchange_bind,
    commands.Exchange.Unbind: _exchange_unbind,
    commands.Queue.Declare: _queue_declare,
    commands.Queue.Bind: _queue_bind,
    commands.Queue.Unbind: _queue_unbind,
    commands.Queue.Purge: _queue_purge,
    commands.Queue.Delete: _queue_delete,
    commands.Channel.Flow: _flow,
    commands.Basic.Qos: _qos,
    commands.Basic.Consume: _consume,
    commands.Basic.Cancel: _cancel,
    commands.Basic.CancelOk: _cancel_ok,
    commands.Basic.Get: _get,
    commands.Basic.Nack: _nack,
    commands.Basic.Reject: _reject,
    commands.Basic.Recover: _recover,
    commands.Basic.RecoverAsync: _recover_async,
}
