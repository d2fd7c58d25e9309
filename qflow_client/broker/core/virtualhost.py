"""The virtual host, sans-I/O: exchanges, queues, bindings, and the way of a message into its queues.

All connections share one. A publish method is decoded once into a `Target`, which remembers its queues for one version
of the topology; `VirtualHost.version` goes up with every change that routing depends on, and outdated targets are
resolved again. Rules decide what is in force for a queue and are asked again by `VirtualHost.apply_rules`. Whatever is
due at a time is in one heap of timers; `VirtualHost.next_tick` is when the first is due.
"""

from __future__ import annotations

import heapq
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import pamqp.commands

from qflow_client.broker.core.deadletter import DeadLetters
from qflow_client.broker.core.entries import DropReason, Owner, StoredMessage
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import (
    MANY_QUEUES,
    Binding,
    DirectExchange,
    Exchange,
    ExchangeType,
    Target,
    make_exchange,
)
from qflow_client.broker.core.limits import Inheritance, PlainRules, Rules
from qflow_client.broker.core.logins import FailedLogins, Logins
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.ports import FlowObserver, Journal, PublishMeter, Timed
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.queueflow import FlowOptions
from qflow_client.broker.core.quotas import Quota
from qflow_client.broker.core.replies import address_reply
from qflow_client.broker.core.routing import check_exchange_arguments, needs_headers, reach
from qflow_client.broker.core.settings import FlowScope, Settings
from qflow_client.broker.core.unsupported import check_copies, check_queue_arguments
from qflow_client.broker.core.waiting import Publisher, WaitingPublish, WaitingRoom, refusal
from qflow_client.broker.core.wire import (
    HAS_HEADERS,
    HAS_REPLY_TO,
    check_depth,
    check_properties,
    decode_headers,
    encode_header,
)
from qflow_client.flow import FlowSource

__all__ = ["VirtualHost"]

_log = get_logger(__name__)

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
        wall_clock: seconds since 1970.
        journal: counts messages, and writes what is to survive the broker; ``None`` for neither.
        rules: decide what is in force for each queue; ``None`` for the same marks for all.
    """

    #: Distinct publish methods that are remembered; beyond that all are forgotten.
    MAX_TARGETS = 4096
    #: Seconds after which `tick` returns though more is due.
    MAX_TICK = 0.005

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        journal: Journal | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.clock = clock
        self.queues: dict[str, Queue] = {}
        self.exchanges: dict[str, Exchange] = {"": DirectExchange("", durable=True)}
        for name, kind in _PREDECLARED:
            self.exchanges[name] = make_exchange(
                name, kind.value, durable=True, auto_delete=False, internal=False, arguments={}
            )
        # What is looked at when something is made; and the connections that are open.
        self._queue_quota = Quota("max_queues", settings.max_queues, "queues", lambda: len(self.queues))
        self._binding_quota = Quota("max_bindings", settings.max_bindings, "bindings", self._count_bindings)
        self.consumer_quota = Quota("max_consumers", settings.max_consumers, "consumers", self._count_consumers)
        self.open_connections = 0
        self.failed_logins = FailedLogins(settings.max_failed_logins)
        self.logins = Logins(settings.users, self.failed_logins, settings.authenticate)
        self._flow_options = FlowOptions(settings.flow_scope, settings.recent, settings.resume_interval)
        # Goes up with every change that routing depends on.
        self.version = 0
        # Publish methods by the payload of their frame.
        self.targets: dict[bytes, Target] = {}
        self.rules: Rules = rules if rules is not None else PlainRules(settings)
        # Publishes that wait for room.
        self.waiting = WaitingRoom(clock, settings.max_producer_flow_control_wait, journal)
        # Counts every publish while it is truthy.
        self.meter: PublishMeter | None = None
        # Sees everything that a flow log has; None if there is none.
        self.observer: FlowObserver | None = None
        # What is to be looked at when: time, a number for those of the same time, what.
        self._timers: list[tuple[float, int, Timed]] = []
        self._timer_numbers = count()
        when_read = journal.when_read if journal is not None else _run
        self._dead_letters = DeadLetters(self._resolve_dead_letter, self.destinations, when_read, wall_clock)
        # Whether what is declared is in the message store already.
        self.is_recovering = False
        # Whether the first publish of a connection has to wait, because those that publish are not read.
        self.takes_no_publisher = False

    def observe(self, observer: FlowObserver) -> None:
        """Let an observer see the queues that are declared from now on, and all channels."""
        self.observer = observer
        self.wake_at(_Sampling(self, observer), self.clock() + observer.period)

    def end_observing(self) -> None:
        """End the observer's last period."""
        if self.observer is not None:
            self.observer.tick(self.clock())

    @property
    def has_store(self) -> bool:
        """Whether anything can be on disk."""
        return self._durable_journal is not None

    @property
    def _durable_journal(self) -> Journal | None:
        journal = self.journal
        return journal if journal is not None and journal.has_store else None

    def _count_bindings(self) -> int:
        return sum(len(exchange.bindings) for exchange in self.exchanges.values())

    def _count_consumers(self) -> int:
        return sum(len(queue.dispatcher.consumers) for queue in self.queues.values())

    # Time.

    def wake_at(self, what: Timed, at: float) -> None:
        """Look at something at a time."""
        heapq.heappush(self._timers, (at, next(self._timer_numbers), what))

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in seconds of the clock; infinite if never."""
        return self._timers[0][0] if self._timers else math.inf

    def tick(self, now: float) -> None:
        """Look at what is to be looked at by now; if that takes long, at the rest in the next call.

        Args:
            now: seconds of the clock.
        """
        end = self.clock() + self.MAX_TICK
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].tick(now)
            if self.journal is not None:
                self.journal.divide()
            if self.clock() >= end:
                break

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
        number: int = 0,
        prefix: str = "amq.gen-",
    ) -> Queue:
        """Make a queue, or find one that was declared alike.

        Args:
            name: empty for a name of the broker's choice.
            durable: remembered.
            exclusive: whether only `owner` may use it; it is deleted with it.
            auto_delete: whether it is deleted with its last consumer.
            arguments: what the rules read.
            owner: the connection that asks.
            number: that it has in the message store already; 0 for a new one.
            prefix: how a name of the broker's choice begins.

        Raises:
            ChannelException: 403; a name that is reserved. 405; it belongs to another connection. 406; it exists
                otherwise, arguments are refused, or there are as many queues as there may be.
        """
        arguments = dict(arguments or {})
        check_depth(f"queue '{name}'", arguments)
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
            queue.touch()
            return queue
        if name.startswith("amq.") and not number:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"queue name '{name}' begins with 'amq.', which is reserved; choose another"
            )
        name = name or f"{prefix}{secrets.token_urlsafe(16)}"
        if not number:
            check_queue_arguments(name, arguments)
        self._queue_quota.take(is_there=number > 0)
        rule = self.rules.rule_for(name, arguments)
        limits = rule.limits(lambda: Inheritance((("", name),), ("",)))
        journal = self._durable_journal
        if journal is not None and durable and not exclusive and not number:
            number = journal.number_of(name, auto_delete, arguments)
        queue = self.queues[name] = Queue(
            name,
            limits,
            self,
            options=rule.options,
            rule=rule,
            durable=durable,
            exclusive_owner=owner if exclusive else None,
            auto_delete=auto_delete,
            arguments=arguments,
            flow_options=self._flow_options,
            observer=self.observer,
            journal=self.journal,
            number=number,
        )
        self.version += 1
        return queue

    def delete_queue(self, queue: Queue, on_deleted: Callable[[int], None] | None = None) -> int:
        """Delete a queue with its messages and bindings.

        Args:
            queue: what to delete.
            on_deleted: called with the number of messages that were ready, before the consumers are cancelled. As in
                RabbitMQ, ``Queue.Delete-Ok`` comes before ``Basic.Cancel``; clients wait for them in this order.

        Returns:
            The number of messages that were ready.
        """
        if queue.is_deleted:
            return 0
        del self.queues[queue.name]
        self.version += 1
        if queue.number and self.journal is not None:
            self.journal.queue_gone(queue.name)
        self._unbind_everywhere(queue)
        count = queue.delete()
        if on_deleted is not None:
            on_deleted(count)
        queue.dispatcher.cancel_all()
        return count

    def unused(self, queue: Queue) -> None:
        """A queue was not used for as long as it may be (``x-expires``)."""
        _log.info("queue '%s' is deleted: unused for %s s", queue.name, queue.options.expires)
        self.delete_queue(queue)

    # Consumers, connections and channels that end.

    def consumer_gone(self, queue: Queue) -> None:
        """Take note that a consumer has left a queue."""
        if queue.auto_delete and queue.dispatcher.was_used and not queue.dispatcher.consumers:
            self.delete_queue(queue)

    def owner_gone(self, owner: Owner) -> None:
        """Delete the exclusive queues of a connection that has ended."""
        for queue in [queue for queue in self.queues.values() if queue.exclusive_owner is owner]:
            self.delete_queue(queue)

    def source_gone(self, source: FlowSource) -> None:
        """Take note that a publishing channel has ended."""
        if self.observer is not None:
            self.observer.gone(source)
        if self.settings.flow_scope is FlowScope.PUBLISHERS:
            for queue in self.queues.values():
                queue.flows.forget(source)

    # Rules.

    def apply_rules(self, changed: Queue | Exchange | None = None) -> None:
        """Bring queues up to date with the rules (D4): all, or one if only its own bindings or marks have changed."""
        for _ in self.apply_rules_in_steps(changed):
            pass

    def apply_rules_in_steps(self, changed: Queue | Exchange | None = None) -> Iterator[None]:
        """`apply_rules`, one queue in each step; between two of them anything may happen."""
        bindings: dict[Queue, list[tuple[str, str]]] = {}
        leads_to: dict[Queue | Exchange, list[Exchange]] = {}
        for exchange in tuple(self.exchanges.values()) if self.rules.are_inherited else ():
            for binding in exchange.bindings.values():
                destination = binding.destination
                leads_to.setdefault(destination, []).append(exchange)
                if isinstance(destination, Queue):
                    bindings.setdefault(destination, []).append((exchange.name, binding.routing_key))
            yield

        def inheritance(queue: Queue) -> Inheritance:
            found: dict[Exchange, None] = {}
            todo: list[Queue | Exchange] = [queue]
            while todo:
                for exchange in leads_to.get(todo.pop(), ()):
                    if exchange not in found:
                        found[exchange] = None
                        todo.append(exchange)
            ways = ("", queue.name), *bindings.get(queue, ())
            return Inheritance(ways, ("", *(exchange.name for exchange in found)))

        for queue in (changed,) if isinstance(changed, Queue) else tuple(self.queues.values()):
            if queue.is_deleted:
                continue
            assert queue.rule is not None
            queue.change(queue.rule.limits(lambda: inheritance(queue)))  # noqa: B023
            self.version += 1
            yield
        self.version += 1

    def _bindings_changed(self, destination: Queue | Exchange | None = None) -> None:
        self.version += 1
        if self.rules.are_inherited:
            self.apply_rules(destination)

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
            ChannelException: 403; a reserved name. 406; it exists otherwise, or arguments are refused.
            ConnectionException: 503; an unknown type.
        """
        there = self.exchanges.get(name)
        if there is not None and name:
            for what, asked, is_so in (
                ("type", kind, there.type.value),
                ("durable", durable, there.durable),
                ("auto_delete", auto_delete, there.auto_delete),
                ("internal", internal, there.internal),
                ("arguments", dict(arguments or {}), there.arguments),
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
        check_depth(f"exchange '{name}'", arguments or {})
        check_exchange_arguments(name, arguments or {})
        exchange = make_exchange(
            name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments or {}
        )
        journal = self._durable_journal
        if journal is not None and durable and not self.is_recovering:
            journal.exchange(name, exchange.type.value, exchange.auto_delete, exchange.internal, exchange.arguments)
        self.exchanges[name] = exchange
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
        journal = self._durable_journal
        if journal is not None and exchange.durable:
            journal.exchange_gone(name)
        self._unbind_everywhere(exchange)
        self._bindings_changed()

    def bind(
        self, destination: Queue | Exchange, source: str, routing_key: str, arguments: Mapping[str, object] | None
    ) -> None:
        """Bind a queue or an exchange to an exchange.

        Raises:
            ChannelException: 403; the default exchange. 404; no such exchange. 406; arguments it cannot use, or there
                are as many bindings as there may be.
        """
        exchange = self.bindable_exchange(source)
        check_depth(f"binding of '{destination.name}' to '{source}'", arguments or {})
        binding = Binding(destination, routing_key, dict(arguments or {}))
        if binding.key not in exchange.bindings:
            self._binding_quota.take(is_there=self.is_recovering)
            exchange.bind(binding)
            if self._survives(exchange, binding):
                try:
                    self._note_binding(exchange, binding)
                except ChannelException:
                    exchange.unbind(binding)
                    raise
        self._bindings_changed(destination)

    def _survives(self, exchange: Exchange, binding: Binding) -> bool:
        """Whether a binding is to survive the broker: both of its ends do."""
        if not self.has_store or self.is_recovering or not exchange.durable:
            return False
        destination = binding.destination
        return destination.number > 0 if isinstance(destination, Queue) else destination.durable

    def _note_binding(self, exchange: Exchange, binding: Binding, *, gone: bool = False) -> None:
        assert self.journal is not None
        destination = binding.destination
        kind = "queue" if isinstance(destination, Queue) else "exchange"
        self.journal.binding(
            exchange.name, kind, destination.name, binding.routing_key, dict(binding.arguments), gone=gone
        )

    def unbind(
        self,
        destination: Queue | Exchange,
        source: str,
        routing_key: str,
        arguments: Mapping[str, object] | None,
        owner: Owner | None = None,
    ) -> None:
        """Undo `bind`. A binding, or a source exchange, that does not exist is no error, as in RabbitMQ.

        Args:
            destination: the queue or the exchange.
            source: the name of the exchange, which is not the default exchange.
            routing_key: the binding key.
            arguments: as in `bind`.
            owner: the connection that asks; ``None`` for the broker itself.

        Raises:
            ChannelException: 405; the queue is bound so, and belongs to another connection.
        """
        exchange = self.exchanges.get(source)
        binding = Binding(destination, routing_key, dict(arguments or {}))
        if exchange is None or binding.key not in exchange.bindings:
            return
        if isinstance(destination, Queue):
            self.queue(destination.name, owner)
        exchange.unbind(binding)
        if self._survives(exchange, binding):
            self._note_binding(exchange, binding, gone=True)
        self._after_unbind(exchange)
        self._bindings_changed()

    def bindable_exchange(self, name: str) -> Exchange:
        """An exchange that may be bound, or bound to.

        Raises:
            ChannelException: 403; the default exchange. 404; there is none.
        """
        self.check_bindable(name)
        return self.exchange(name)

    @staticmethod
    def check_bindable(name: str) -> None:
        """Check that a name is not the default exchange's.

        Raises:
            ChannelException: 403; it is.
        """
        if not name:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, "the default exchange routes by queue name; it has no bindings to change"
            )

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
        self._resolve(target, exchange)

    def _resolve(self, target: Target, exchange: Exchange) -> None:
        if needs_headers(exchange, self.exchanges):
            target.queues = None
        else:
            target.queues = reach(exchange, target.routing_key, {}, self.exchanges, self.queues)
        # With headers in play it is not known before each message.
        target.watched = (
            target.queues is None
            or len(target.queues) > MANY_QUEUES
            or any(queue.is_watched for queue in target.queues)
        )
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
            ChannelException: 404; no such exchange. 406; an impossible ``expiration``, or it is too large. 506; a queue
                refused it.
        """
        self.check_size(len(body))
        target = Target(exchange, routing_key)
        self.resolve(target)
        header = encode_header(len(body), properties)
        check_properties(header)
        if header[12] & HAS_HEADERS:
            check_copies(header)
        if header[12] & HAS_REPLY_TO:
            address_reply(header, "")
        message = StoredMessage(target, header, body)
        queues = self.destinations(message, target)
        refused = refusal(queues, message.size, has_line=False)
        if refused is not None:
            raise ChannelException(ReplyCode.RESOURCE_ERROR, refused.reason)
        for queue in queues:
            queue.enqueue(message)
        for queue in queues:
            queue.after_publish()
        if self.journal is not None:
            self.journal.divide()
        return len(queues)

    def check_size(self, size: int) -> None:
        """Whether a message may have so many body bytes.

        Raises:
            ChannelException: 406; it may not.
        """
        if size > self.settings.max_message_size:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED,
                f"a message of {size} bytes is larger than the broker takes ({self.settings.max_message_size})",
            )

    def destinations(self, message: StoredMessage, target: Target) -> tuple[Queue, ...]:
        """The queues that a message goes to, whose target is up to date."""
        if target.queues is not None:
            return target.queues
        headers = decode_headers(message.header)
        return reach(self.exchanges[target.exchange], target.routing_key, headers, self.exchanges, self.queues)

    def wait(self, message: StoredMessage, queues: tuple[Queue, ...], publisher: Publisher, tag: int) -> WaitingPublish:
        """Let a publish wait for room, see `WaitingRoom.wait`."""
        if not all(queue.is_watched for queue in queues):
            # What comes after it here must not pass it.
            self.version += 1
        return self.waiting.wait(message, queues, publisher, tag)

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """There may be room for publishes that wait for a queue, or the time of some is over."""
        self.waiting.admit(queue, now)

    # Memory.

    @property
    def window(self) -> int:
        """Bytes of bodies that each queue may read ahead (A3)."""
        return self.journal.window(self.queues.values()) if self.journal is not None else 0

    def relieve(self) -> None:
        """Keep the messages in memory within the limit."""
        if self.journal is not None:
            self.journal.relieve(self.queues.values())

    def lost(self, message: StoredMessage) -> None:
        """The body of a message was on disk only, and is damaged there: the message leaves all queues."""
        for queue in self.queues.values():
            queue.dropping.drop_lost(message)

    # Dead letters.

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        """A message was dropped by a queue with a dead-letter exchange."""
        self._dead_letters.died(queue, message, reason)

    def _resolve_dead_letter(self, exchange: str, routing_key: str) -> Target | None:
        found = self.exchanges.get(exchange)
        if found is None:
            return None
        target = Target(exchange, routing_key)
        self._resolve(target, found)
        return target


def _run(message: StoredMessage, callback: Callable[[], None]) -> None:
    """Without a journal every body is in memory."""
    callback()


class _Sampling:
    """Calls an observer at the end of each of its periods."""

    def __init__(self, host: VirtualHost, observer: FlowObserver) -> None:
        self._host = host
        self._observer = observer

    def tick(self, now: float) -> None:
        """A period is over."""
        self._observer.tick(now)
        self._host.wake_at(self, now + self._observer.period)
