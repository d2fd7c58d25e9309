"""The class `Broker`: the methods with which an application changes a broker in the same process.

The base classes of `Broker` are in `inspection.py`, which shows the state, and in `embedding.py`, which starts and
stops the broker. The class `qflow_client.broker.Broker` adds policies, the store and HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import pamqp.commands

from qflow_client.amqp.fields import encode_short_string
from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.embedding import on_loop
from qflow_client.broker.core.errors import ReplyCode
from qflow_client.broker.core.exchange import Exchange
from qflow_client.broker.core.inspection import InspectableBroker
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.server import Connection
from qflow_client.broker.core.session import Session
from qflow_client.broker.core.snapshots import (
    BrokerMessage,
    ExchangeSnapshot,
    QueueSnapshot,
    exchange_snapshot,
    queue_snapshot,
)

__all__ = ["Broker"]


_Named = TypeVar("_Named", Channel, Session, Connection)


def _named(what: str, found: Iterable[_Named], name: str | None) -> list[_Named]:
    """Return the objects with this name; all objects for ``None``. Raise `LookupError` if no object has the name."""
    found = list(found)
    picked = [each for each in found if name is None or each.name == name]
    if name is not None and not picked:
        names = ", ".join(each.name for each in found) or "none"
        raise LookupError(f"there is no {what} {name!r}; the broker has: {names}")
    return picked


def _check_names(**texts: str) -> None:
    """Raise `TypeError` or `ValueError` if AMQP cannot encode one of these texts as a short string."""
    for what, text in texts.items():
        encode_short_string(text, what)


class Broker(InspectableBroker):
    """An AMQP 0-9-1 broker in this process.

    ``with broker:`` runs the broker on its own thread and event loop. ``async with broker:`` runs the broker on the
    running loop. Any thread, and the broker's own loop, may call a method, unless its docstring says otherwise. A
    broker can be started only once.

    Args: see `EmbeddedBroker`.
    """

    # Queues, exchanges and messages.

    @on_loop(lasts=True)
    def declare_queue(
        self,
        name: str,
        *,
        arguments: Mapping[str, object] | None = None,
        durable: bool = False,
        auto_delete: bool = False,
    ) -> QueueSnapshot:
        """Declare a queue, unless it exists with the same settings, and return a snapshot of it.

        Args:
            name: name of the queue; empty to let the broker choose a name.
            arguments: arguments of the declaration, such as thresholds.
            durable: as in ``Queue.Declare``.
            auto_delete: as in ``Queue.Declare``.

        Raises:
            ChannelException: 403 if the name is reserved. 406 if the queue exists with other settings, if the broker
                refuses the arguments, or if the maximum number of queues is reached.
            TypeError, ValueError: the name is not an AMQP short string.
        """
        _check_names(name=name)
        queue = self._host.declare_queue(name, durable=durable, auto_delete=auto_delete, arguments=arguments)
        return queue_snapshot(queue)

    @on_loop(lasts=True)
    def delete_queue(self, name: str) -> int:
        """Delete a queue, and return the number of messages that were ready in it.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._host.delete_queue(self._host.queue(name))

    @on_loop(lasts=True)
    def declare_exchange(
        self,
        name: str,
        type: Literal["direct", "fanout", "topic", "headers"] = "direct",
        *,
        arguments: Mapping[str, object] | None = None,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
    ) -> ExchangeSnapshot:
        """Declare an exchange, unless it exists with the same settings, and return a snapshot of it.

        Args:
            name: name of the exchange.
            type: type of the exchange.
            arguments: arguments of the declaration, such as ``alternate-exchange``.
            durable: as in ``Exchange.Declare``.
            auto_delete: as in ``Exchange.Declare``.
            internal: as in ``Exchange.Declare``.

        Raises:
            ChannelException: 403 if the name is reserved. 406 if the exchange exists with other settings, or if the
                broker refuses the arguments.
            ConnectionException: 503 if the type does not exist.
            TypeError, ValueError: the name is not an AMQP short string.
        """
        _check_names(name=name)
        exchange = self._host.topology.declare_exchange(
            name, type, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
        )
        return exchange_snapshot(exchange)

    @on_loop(lasts=True)
    def delete_exchange(self, name: str) -> None:
        """Delete an exchange and its bindings.

        Raises:
            ChannelException: 403 for a predeclared exchange. 404 if the exchange does not exist.
        """
        self._host.topology.delete_exchange(self._host.router.exchange(name).name)

    @on_loop(lasts=True)
    def bind(
        self,
        source: str,
        destination: str,
        routing_key: str = "",
        *,
        destination_type: Literal["queue", "exchange"] = "queue",
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Bind a queue or an exchange to an exchange. If the binding exists, nothing changes.

        Args:
            source: name of the exchange from which the messages come.
            destination: name of the queue or exchange to which the messages go.
            routing_key: the binding key.
            destination_type: whether the destination is a queue or an exchange.
            arguments: arguments of the binding, for headers exchanges.

        Raises:
            ChannelException: 403 for the default exchange. 404 if the queue or an exchange does not exist. 406 if the
                exchange cannot use the arguments, or if the maximum number or size of bindings is reached.
            TypeError, ValueError: the routing key is not an AMQP short string.
        """
        _check_names(routing_key=routing_key)
        self._host.topology.bind(self._end(destination, destination_type), source, routing_key, arguments)

    @on_loop(lasts=True)
    def unbind(
        self,
        source: str,
        destination: str,
        routing_key: str = "",
        *,
        destination_type: Literal["queue", "exchange"] = "queue",
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Remove a binding. If the binding does not exist, nothing changes.

        Args:
            source: name of the exchange from which the messages come.
            destination: name of the queue or exchange to which the messages go.
            routing_key: the binding key.
            destination_type: whether the destination is a queue or an exchange.
            arguments: the arguments with which the binding was created.

        Raises:
            ChannelException: 403 for the default exchange. 404 if the queue or an exchange does not exist.
        """
        exchange = self._host.topology.bindable_exchange(source)
        self._host.topology.unbind(self._end(destination, destination_type), exchange.name, routing_key, arguments)

    def _end(self, name: str, kind: Literal["queue", "exchange"]) -> Queue | Exchange:
        return self._host.queue(name) if kind == "queue" else self._host.topology.bindable_exchange(name)

    @on_loop(changes=True)
    def purge(self, queue: str) -> int:
        """Remove the ready messages of a queue, and return their number.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._host.queue(queue).purge()

    @on_loop(changes=True)
    def get(self, queue: str) -> BrokerMessage | None:
        """Remove the first ready message of a queue, and return it.

        The result is ``None`` if no message is ready, or if the body of the removed message is damaged on disk. It is
        also ``None`` while very many messages leave the queue because they have expired or exceed its maximum.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        entry = self._host.queue(queue).take(no_ack=True)
        if entry is None:
            return None
        copies = self._copies((entry,))
        if entry.message.body is None and self._host.journal is not None:
            self._host.journal.leave(0, entry.message)
        return copies[0] if copies else None

    @on_loop(changes=True)
    def publish(
        self,
        body: bytes,
        routing_key: str,
        *,
        exchange: str = "",
        properties: pamqp.commands.Basic.Properties | None = None,
    ) -> int:
        """Publish a message from inside the broker, and return the number of its destination queues.

        Flow control does not delay the message. When the method returns, all destination queues have the message, and
        have dropped all messages beyond their maximum. The broker does nothing else meanwhile: one large message that
        displaces 200,000 small ones takes more than a second. The dead letters of dropped messages can arrive later.
        With a store, `wait_until_durable_async` waits until a persistent message is on disk.

        Args:
            routing_key: the routing key; for the default exchange, the name of the queue.
            exchange: name of the exchange.
            properties: the basic properties; ``None`` for a message without properties.

        Raises:
            ChannelException: 403 if the exchange is internal. 404 if there is no such exchange. 406 if the message is
                too large, has an invalid ``expiration``, asks for copies (``CC``, ``BCC``) or direct replies, or has a
                route that takes too long. 506 if a queue refuses the message.
            TypeError, ValueError: the body is not bytes, or a name or key is not an AMQP short string.
        """
        if not isinstance(body, bytes):
            raise TypeError(f"body must be bytes, not {type(body).__name__}: {body!r:.40}")
        _check_names(exchange=exchange, routing_key=routing_key)
        return self._host.publish(exchange, routing_key, body, properties)

    # Control of producers and clients by an operator.

    @on_loop(changes=True)
    def flow(self, active: bool, channel: str | None = None) -> None:
        """Stop or start producers, as an operator (D5). A start unblocks no producer that a queue blocks.

        The method does not wait until the clients have read the ``Channel.Flow``.

        Args:
            active: ``False`` stops the producers, ``True`` lets them publish.
            channel: name of one channel, which need not be a producer. ``None`` for all producers, including future
                producers.

        Raises:
            LookupError: the channel does not exist.
        """
        if channel is None:
            self._controls.producers_stopped = not active
        for each in _named("channel", self._channels(), channel):
            if active:
                each.flow.unblock(self._controls.operator)
            elif channel is not None or each.flow.is_producer:
                each.flow.block(self._controls.operator)

    @on_loop(changes=True)
    def block(self, reason: str = "blocked by the operator", connection: str | None = None) -> None:
        """Raise the operator's alarm, and inform clients of it. The profile defines how clients are informed.

        In the profile ``qflow``, each client that announced the capability gets ``Connection.Blocked``. This is only a
        notice: the broker still accepts published messages. The other profiles send ``Channel.Flow`` to producers, or
        close each channel that publishes or declares a new queue during the alarm.

        Args:
            reason: the text for the client.
            connection: name of one connection; ``None`` for all connections, including future connections.

        Raises:
            LookupError: the connection does not exist.
        """
        self._block(connection, reason)

    @on_loop(changes=True)
    def unblock(self, connection: str | None = None) -> None:
        """Undo `block`.

        Args:
            connection: name of one connection; ``None`` for all connections.

        Raises:
            LookupError: the connection does not exist.
        """
        self._block(connection, None)

    def _block(self, connection: str | None, reason: str | None) -> None:
        if connection is None:
            self._server.set_alarm(Controls.OPERATOR, reason)
        else:
            for session in _named("connection", self._server.sessions, connection):
                session.block(Controls.OPERATOR, reason)

    @on_loop(changes=True)
    def raise_alarm(self, name: str, reason: str) -> None:
        """Raise an alarm, and inform clients as `block` does. RabbitMQ raises alarms when memory or disk runs low.

        A blocked client is not informed of further alarms. In the profile ``qflow``, the client gets
        ``Connection.Unblocked`` when the last alarm is cleared.

        Args:
            name: name of the alarm, such as ``"memory"``. If the alarm is already raised, it gets the new reason.
            reason: the text for clients.

        Raises:
            ValueError: the name is empty, or reserved for `block`.
        """
        if not name or name == Controls.OPERATOR:
            raise ValueError(
                f"an alarm must have a name other than {Controls.OPERATOR!r}, which is reserved for block(): {name!r}"
            )
        self._server.set_alarm(name, reason)

    @on_loop(changes=True)
    def clear_alarm(self, name: str) -> None:
        """Undo `raise_alarm`. If the alarm is not raised, nothing changes."""
        if name != Controls.OPERATOR:
            self._server.set_alarm(name, None)

    @on_loop(changes=True)
    def withhold_confirms(self, queue: str | None = None) -> None:
        """Withhold the acks to publishers. The messages are still enqueued.

        Args:
            queue: name of one queue, whose later messages get no acks; ``None`` to send no acks at all.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        if queue is None:
            self._controls.withhold_confirms = True
        else:
            self._host.queue(queue).withhold()
            self._host.router.version += 1

    @on_loop(changes=True)
    def release_confirms(self, queue: str | None = None) -> None:
        """Undo `withhold_confirms`, and send the withheld acks.

        Args:
            queue: name of one queue; ``None`` to send all withheld acks.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        for each in self._host.queues.values() if queue is None else (self._host.queue(queue),):
            each.release_withheld()
        self._host.router.version += 1
        if queue is None:
            self._controls.withhold_confirms = False
            for session in self._server.sessions:
                session.output.announce()

    @on_loop(changes=True)
    def nack_publishes(self, on: bool = True, queue: str | None = None) -> None:
        """Refuse published messages: in confirm mode with ``Basic.Nack``, otherwise by closing the channel with 506.

        Args:
            on: whether to refuse published messages, and commits with messages (406); ``False`` accepts them again.
            queue: name of the queue whose messages are refused; ``None`` for all messages. With ``on=False``, ``None``
                also ends refusals by single queues. Without confirms, a queue with ``reject-publish`` drops messages
                instead of closing channels.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        if queue is not None:
            self._host.queue(queue).refuse(on)
        else:
            self._controls.refuse_publishes(on)
            for each in self._host.queues.values() if not on else ():
                each.refuse(False)
        self._host.router.version += 1

    @on_loop(changes=True)
    def close_channels(
        self,
        code: int = ReplyCode.PRECONDITION_FAILED,
        text: str = "closed by the operator",
        channel: str | None = None,
    ) -> None:
        """Close channels with ``Channel.Close``.

        Args:
            channel: name of one channel; ``None`` for all channels.

        Raises:
            LookupError: the channel does not exist.
        """
        for each in _named("channel", self._channels(), channel):
            each.fail(code, text)

    @on_loop(changes=True)
    def close_connections(
        self,
        code: int = ReplyCode.CONNECTION_FORCED,
        text: str = "CONNECTION_FORCED - closed by the operator",
        connection: str | None = None,
    ) -> None:
        """Close connections with ``Connection.Close``.

        Args:
            connection: name of one connection; ``None`` for all connections.

        Raises:
            LookupError: the connection does not exist.
        """
        for session in _named("connection", self._server.sessions, connection):
            session.fail(code, text, self._server.clock())

    @on_loop(changes=True)
    def drop_connections(self, connection: str | None = None) -> None:
        """Drop connections without ``Connection.Close``, like a crash.

        Args:
            connection: name of one connection; ``None`` for all connections.

        Raises:
            LookupError: the connection does not exist.
        """
        for each in _named("connection", self._server.connections, connection):
            each.abort()
