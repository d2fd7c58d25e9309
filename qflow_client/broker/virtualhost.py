"""The virtual host, sans-I/O: exchanges, queues, bindings, and the way of a message into its queues."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping

import pamqp.commands

from qflow_client.broker.arguments import QueueLimits
from qflow_client.broker.errors import ChannelException, ReplyCode
from qflow_client.broker.exchange import Binding, DirectExchange, Exchange, ExchangeType, make_exchange
from qflow_client.broker.message import StoredMessage, Target
from qflow_client.broker.queue import Owner, Queue
from qflow_client.broker.settings import BrokerSettings, FlowScope
from qflow_client.broker.wire import decode_headers, encode_header
from qflow_client.flow import FlowSource

__all__ = ["VirtualHost"]

_PREDECLARED = (
    ("amq.direct", ExchangeType.DIRECT),
    ("amq.fanout", ExchangeType.FANOUT),
    ("amq.topic", ExchangeType.TOPIC),
    ("amq.headers", ExchangeType.HEADERS),
    ("amq.match", ExchangeType.HEADERS),
)


class VirtualHost:
    """What all connections share.

    Args:
        settings: the broker's.
        clock: monotonic seconds.
    """

    #: Distinct publish methods that are remembered; beyond that all are forgotten.
    MAX_TARGETS = 4096

    def __init__(self, settings: BrokerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.queues: dict[str, Queue] = {}
        self.exchanges: dict[str, Exchange] = {"": DirectExchange("", durable=True)}
        for name, kind in _PREDECLARED:
            self.exchanges[name] = make_exchange(
                name, kind.value, durable=True, auto_delete=False, internal=False, arguments={}
            )
        # Goes up with every change that routing depends on.
        self.version = 0
        # Publish methods by the payload of their frame.
        self.targets: dict[bytes, Target] = {}

    # Queues.

    def queue(self, name: str, owner: Owner | None = None) -> Queue:
        """A queue by name.

        Args:
            name: of the queue.
            owner: the connection that asks; ``None`` for the broker itself.

        Raises:
            ChannelException: 404; there is none. 405; it belongs to another connection.
        """
        queue = self.queues.get(name)
        if queue is None:
            raise ChannelException(ReplyCode.NOT_FOUND, f"no queue '{name}' in vhost '{self.settings.virtual_host}'")
        if owner is not None and queue.exclusive_owner not in (None, owner):
            raise ChannelException(
                ReplyCode.RESOURCE_LOCKED,
                f"queue '{name}' is exclusive to another connection",
            )
        return queue

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, object] | None = None,
        owner: Owner | None = None,
    ) -> Queue:
        """Make a queue, or find one that was declared alike.

        Args:
            name: empty for a name of the broker's choice.
            durable: remembered.
            exclusive: whether only `owner` may use it; it is deleted with it.
            auto_delete: whether it is deleted with its last consumer.
            arguments: see `QueueLimits.from_arguments`.
            owner: the connection that asks.

        Raises:
            ChannelException: 403; a name that is reserved. 405; it belongs to another connection. 406; it exists
                otherwise, or arguments are refused.
        """
        arguments = dict(arguments or {})
        if name in self.queues:
            queue = self.queue(name, owner)
            for what, asked, there in (
                ("durable", durable, queue.durable),
                ("exclusive", exclusive, queue.exclusive_owner is not None),
                ("auto_delete", auto_delete, queue.auto_delete),
                ("arguments", arguments, queue.arguments),
            ):
                if asked != there:
                    raise ChannelException(
                        ReplyCode.PRECONDITION_FAILED,
                        f"queue '{name}' exists with {what}={there!r}, not {asked!r}; delete it or declare it alike",
                    )
            return queue
        if name.startswith("amq."):
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"queue name '{name}' begins with 'amq.', which is reserved; choose another"
            )
        name = name or f"amq.gen-{secrets.token_urlsafe(16)}"
        queue = self.queues[name] = Queue(
            name,
            QueueLimits.from_arguments(name, arguments, self.settings),
            durable=durable,
            exclusive_owner=owner if exclusive else None,
            auto_delete=auto_delete,
            arguments=arguments,
            flow_scope=self.settings.flow_scope,
            recent=self.settings.recent,
            clock=self.clock,
        )
        self.version += 1
        return queue

    def delete_queue(self, queue: Queue) -> int:
        """Delete a queue with what is in it and bound to it.

        Returns:
            How many messages were ready in it.
        """
        if queue.is_deleted:
            return 0
        del self.queues[queue.name]
        self.version += 1
        self._unbind_everywhere(queue)
        return queue.delete()

    def consumer_gone(self, queue: Queue) -> None:
        """Take note that a consumer has left a queue."""
        if queue.auto_delete and queue.was_consumed and not queue.consumers:
            self.delete_queue(queue)

    def owner_gone(self, owner: Owner) -> None:
        """Delete the exclusive queues of a connection that has ended."""
        for queue in [queue for queue in self.queues.values() if queue.exclusive_owner is owner]:
            self.delete_queue(queue)

    def source_gone(self, source: FlowSource) -> None:
        """Take note that a publishing channel has ended."""
        if self.settings.flow_scope is FlowScope.PUBLISHERS:
            for queue in self.queues.values():
                queue.forget_source(source)

    # Exchanges and bindings.

    def exchange(self, name: str) -> Exchange:
        """An exchange by name.

        Raises:
            ChannelException: 404; there is none.
        """
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise ChannelException(ReplyCode.NOT_FOUND, f"no exchange '{name}' in vhost '{self.settings.virtual_host}'")
        return exchange

    def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> Exchange:
        """Make an exchange, or find one that was declared alike.

        Raises:
            ChannelException: 403; a reserved name. 406; it exists otherwise.
            ConnectionException: 503; an unknown type.
        """
        there = self.exchanges.get(name)
        if there is not None and name:
            for what, asked, is_so in (
                ("type", kind, there.type.value),
                ("durable", durable, there.durable),
                ("auto_delete", auto_delete, there.auto_delete),
                ("internal", internal, there.internal),
            ):
                if asked != is_so:
                    raise ChannelException(
                        ReplyCode.PRECONDITION_FAILED,
                        f"exchange '{name}' exists with {what}={is_so!r}, not {asked!r}; delete it or declare it alike",
                    )
            return there
        if not name or name.startswith("amq."):
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED,
                f"exchange name '{name}' is the default exchange's or begins with 'amq.', which is reserved",
            )
        exchange = self.exchanges[name] = make_exchange(
            name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments or {}
        )
        self.version += 1
        return exchange

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange; one that does not exist is no error.

        Raises:
            ChannelException: 403; a predeclared one. 406; it has bindings, and `if_unused`.
        """
        if not name or name.startswith("amq."):
            raise ChannelException(ReplyCode.ACCESS_REFUSED, f"exchange '{name}' is predeclared and stays")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and exchange.bindings:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"exchange '{name}' has {len(exchange.bindings)} bindings"
            )
        del self.exchanges[name]
        self.version += 1
        self._unbind_everywhere(exchange)

    def bind(
        self, destination: Queue | Exchange, source: str, routing_key: str, arguments: Mapping[str, object] | None
    ) -> None:
        """Bind a queue or an exchange to an exchange.

        Raises:
            ChannelException: 403; the default exchange. 404; no such exchange. 406; arguments it cannot use.
        """
        self.bindable_exchange(source).bind(Binding(destination, routing_key, dict(arguments or {})))
        self.version += 1

    def unbind(
        self, destination: Queue | Exchange, source: str, routing_key: str, arguments: Mapping[str, object] | None
    ) -> None:
        """Undo `bind`; a binding that does not exist is no error.

        Raises:
            ChannelException: 403; the default exchange. 404; no such exchange.
        """
        exchange = self.bindable_exchange(source)
        if exchange.unbind(Binding(destination, routing_key, dict(arguments or {}))):
            self._after_unbind(exchange)
        self.version += 1

    def bindable_exchange(self, name: str) -> Exchange:
        """An exchange that may be bound, or bound to.

        Raises:
            ChannelException: 403; the default exchange. 404; there is none.
        """
        if not name:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, "the default exchange routes by queue name; it has no bindings to change"
            )
        return self.exchange(name)

    def _unbind_everywhere(self, destination: Queue | Exchange) -> None:
        for exchange in tuple(self.exchanges.values()):
            if exchange.unbind_all(destination):
                self._after_unbind(exchange)

    def _after_unbind(self, exchange: Exchange) -> None:
        if exchange.auto_delete and not exchange.bindings and exchange.name in self.exchanges:
            self.delete_exchange(exchange.name)

    # Publishing.

    def resolve(self, target: Target) -> None:
        """Bring a target's destinations up to date with the topology.

        Raises:
            ChannelException: 404; no such exchange. 403; an internal one.
        """
        exchange = self.exchange(target.exchange)
        if exchange.internal:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"exchange '{exchange.name}' is internal; publish to one that is bound to it"
            )
        if not exchange.name:
            queue = self.queues.get(target.routing_key)
            target.queues = (queue,) if queue is not None else ()
        elif self._needs_headers(exchange, set()):
            target.queues = None
        else:
            target.queues = self._reach(exchange, target.routing_key, {})
        # With headers in play it is not known before each message.
        target.watched = target.queues is None or any(queue.is_watched for queue in target.queues)
        target.version = self.version

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        properties: pamqp.commands.Basic.Properties | None = None,
    ) -> int:
        """Publish a message that no channel stands for, so that no flow state holds anybody for it.

        Returns:
            In how many queues it is now.

        Raises:
            ChannelException: 404; no such exchange. 506; a queue refused it.
        """
        target = Target(exchange, routing_key)
        self.resolve(target)
        message = StoredMessage(target, encode_header(len(body), properties), body)
        queues = self.destinations(message)
        reason = self.refusal(queues, message.size)
        if reason is not None:
            raise ChannelException(ReplyCode.RESOURCE_ERROR, reason)
        for queue in queues:
            queue.enqueue(message)
        for queue in queues:
            queue.dispatch()
        return len(queues)

    def destinations(self, message: StoredMessage) -> tuple[Queue, ...]:
        """The queues that a message goes to; its target is up to date."""
        target = message.target
        if target.queues is not None:
            return target.queues
        return self._reach(self.exchanges[target.exchange], target.routing_key, decode_headers(message.header))

    def _needs_headers(self, exchange: Exchange, seen: set[Exchange]) -> bool:
        if exchange in seen:
            return False
        seen.add(exchange)
        return exchange.needs_headers or any(
            isinstance(binding.destination, Exchange) and self._needs_headers(binding.destination, seen)
            for binding in exchange.bindings.values()
        )

    @staticmethod
    def _reach(start: Exchange, routing_key: str, headers: Mapping[str, object]) -> tuple[Queue, ...]:
        queues: dict[Queue, None] = {}
        seen: dict[Exchange, None] = {start: None}
        todo = [start]
        while todo:
            for destination in todo.pop().destinations(routing_key, headers):
                if isinstance(destination, Queue):
                    queues[destination] = None
                elif destination not in seen:
                    seen[destination] = None
                    todo.append(destination)
        return tuple(queues)

    @staticmethod
    def refusal(queues: Iterable[Queue], size: int) -> str | None:
        """Why a message of `size` body bytes is refused: if one of its destinations refuses it, none gets it."""
        for queue in queues:
            reason = queue.refusal(size)
            if reason is not None:
                return reason
        return None
