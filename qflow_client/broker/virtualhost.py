"""The virtual host, sans-I/O: exchanges, queues, bindings, and the way of a message into its queues."""

from __future__ import annotations

import heapq
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

import pamqp.commands

from qflow_client.broker.arguments import QueueArguments, QueueLimits, QueueOptions
from qflow_client.broker.deadletter import DeadLetters
from qflow_client.broker.entries import DropReason, Owner
from qflow_client.broker.errors import ChannelException, ReplyCode
from qflow_client.broker.exchange import Binding, DirectExchange, Exchange, ExchangeType, make_exchange
from qflow_client.broker.journal import Found, FoundMessage, Journal
from qflow_client.broker.message import StoredMessage, Target
from qflow_client.broker.paging import level
from qflow_client.broker.policies import Inheritance, Policies, Policy, PolicyDefinition, QueuePolicy
from qflow_client.broker.queue import Queue
from qflow_client.broker.rates import Rates, Timed
from qflow_client.broker.recording import FlowRecorder
from qflow_client.broker.settings import BrokerSettings, FlowScope
from qflow_client.broker.waiting import Publisher, WaitingPublish
from qflow_client.broker.wire import check_properties, decode_headers, encode_header
from qflow_client.flow import FlowSource

__all__ = ["VirtualHost"]

_log = logging.getLogger(__name__)

NO_STORE = "policy=flow_to_disk: this broker has no message store; give it one, or use another policy"

_PREDECLARED = (
    ("amq.direct", ExchangeType.DIRECT),
    ("amq.fanout", ExchangeType.FANOUT),
    ("amq.topic", ExchangeType.TOPIC),
    ("amq.headers", ExchangeType.HEADERS),
    ("amq.match", ExchangeType.HEADERS),
)


class Refusal(NamedTuple):
    """Why a message is not taken now.

    Attributes:
        queue: which refuses it.
        reason: for people.
        waits: whether it waits for room instead.
    """

    queue: Queue
    reason: str
    waits: bool


class VirtualHost:
    """What all connections share.

    Args:
        settings: the broker's.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
        journal: told of what is to survive the broker; ``None`` if nothing is.
    """

    #: Distinct publish methods that are remembered; beyond that all are forgotten.
    MAX_TARGETS = 4096
    #: Bytes of bodies that a queue reads ahead at most.
    MAX_WINDOW = 1 << 20

    def __init__(
        self,
        settings: BrokerSettings,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        journal: Journal | None = None,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.clock = clock
        self._wall_clock = wall_clock
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
        self.policies = Policies(settings.virtual_host, settings.policies)
        self.rates = Rates(self.wake_at)
        # Told of everything that a flow log has; None if there is none.
        self.recorder: FlowRecorder | None = None
        # What is to be looked at when: time, a number for those of the same time, what.
        self._timers: list[tuple[float, int, Timed]] = []
        self._timer_numbers = count()
        self._dead_letters = DeadLetters(self._resolve_dead_letter, self.destinations, self.when_read, wall_clock)
        # Whether what is declared is in the message store already.
        self.is_recovering = False
        # Durable queues by their numbers there, until all messages are back.
        self._recovering: dict[int, Queue] = {}

    def record(self, recorder: FlowRecorder) -> None:
        """Have the queues that are declared from now on told of."""
        self.recorder = recorder
        self.wake_at(_Sampling(self, recorder), self.clock() + recorder.period)

    def end_recording(self) -> None:
        """Have the last be told."""
        if self.recorder is not None:
            self.recorder.tick(self.clock())

    @property
    def has_store(self) -> bool:
        """Whether anything can be on disk."""
        return self._durable_journal is not None

    @property
    def _durable_journal(self) -> Journal | None:
        journal = self.journal
        return journal if journal is not None and journal.has_store else None

    # Time.

    def wake_at(self, what: Timed, at: float) -> None:
        """Look at something at a time."""
        heapq.heappush(self._timers, (at, next(self._timer_numbers), what))

    @property
    def next_tick(self) -> float:
        """When `tick` is due, in seconds of the clock; infinite if never."""
        return self._timers[0][0] if self._timers else math.inf

    def tick(self, now: float) -> None:
        """Look at what is to be looked at by now.

        Args:
            now: seconds of the clock.
        """
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].tick(now)
            if self.journal is not None:
                self.journal.divide()

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
    ) -> Queue:
        """Make a queue, or find one that was declared alike.

        Args:
            name: empty for a name of the broker's choice.
            durable: remembered.
            exclusive: whether only `owner` may use it; it is deleted with it.
            auto_delete: whether it is deleted with its last consumer.
            arguments: see `QueueLimits.from_arguments`.
            owner: the connection that asks.
            number: that it has in the message store already; 0 for a new one.

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
            queue.touch()
            return queue
        if name.startswith("amq.") and not number:
            raise ChannelException(
                ReplyCode.ACCESS_REFUSED, f"queue name '{name}' begins with 'amq.', which is reserved; choose another"
            )
        name = name or f"amq.gen-{secrets.token_urlsafe(16)}"
        own = QueueArguments.read(name, arguments)
        options = QueueOptions.from_arguments(name, arguments)
        limits = self._limits(name, own, lambda: Inheritance((("", name),), ("",)))
        journal = self._durable_journal
        if journal is not None and durable and not exclusive and not number:
            number = journal.number_of(name, auto_delete, arguments)
        queue = self.queues[name] = Queue(
            name,
            limits,
            self,
            own=own,
            options=options,
            durable=durable,
            exclusive_owner=owner if exclusive else None,
            auto_delete=auto_delete,
            arguments=arguments,
            flow_scope=self.settings.flow_scope,
            recent=self.settings.recent,
            resume_interval=self.settings.resume_interval,
            recorder=self.recorder,
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
        if queue.number and queue.journal is not None:
            queue.journal.queue_gone(queue)
        self._unbind_everywhere(queue)
        count = queue.delete()
        if on_deleted is not None:
            on_deleted(count)
        queue.cancel_consumers()
        return count

    def unused(self, queue: Queue) -> None:
        """A queue was not used for as long as it may be (``x-expires``)."""
        _log.info("queue '%s' is deleted: unused for %s s", queue.name, queue.options.expires)
        self.delete_queue(queue)

    # Who leaves.

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
        if self.recorder is not None:
            self.recorder.gone(source)
        if self.settings.flow_scope is FlowScope.PUBLISHERS:
            for queue in self.queues.values():
                queue.forget_source(source)

    # Policies.

    def _limits(
        self,
        name: str,
        own: QueueArguments,
        inheritance: Callable[[], Inheritance],
        steered: PolicyDefinition | None = None,
    ) -> QueueLimits:
        definition, policies = self.policies.definition_for(name, own.definition, inheritance, is_set=own.is_set)
        if steered is not None:
            definition = steered.over(definition)
        if definition.policy is QueuePolicy.FLOW_TO_DISK and not self.has_store:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, f"queue '{name}': {NO_STORE}")
        return QueueLimits.resolve(name, definition, self.settings, overflow=own.overflow, policies=policies)

    def set_policy(self, policy: Policy) -> None:
        """Add a policy, or replace the one of its name, for the queues that there are, too (D4).

        Raises:
            ValueError: it needs a message store, and there is none.
        """
        if policy.definition.policy is QueuePolicy.FLOW_TO_DISK and not self.has_store:
            raise ValueError(NO_STORE)
        self.policies.set(policy)
        self._apply_policies()

    def delete_policy(self, name: str) -> None:
        """Remove a policy; queues go back to what else applies to them.

        Raises:
            LookupError: there is none of that name.
        """
        self.policies.delete(name)
        self._apply_policies()

    def replace_policies(self, policies: Iterable[Policy]) -> None:
        """Have these policies and no others."""
        self.policies = Policies(self.settings.virtual_host, policies)
        self._apply_policies()

    def steer(self, queue: Queue, definition: PolicyDefinition) -> None:
        """Put what an operator sets of one queue before all policies and arguments (D4)."""
        queue.steered = definition
        self._apply_policies(queue)

    def _apply_policies(self, changed: Queue | Exchange | None = None) -> None:
        """Bring queues up to date with the policies: all, or one if only its own bindings have changed."""
        bindings: dict[Queue, list[tuple[str, str]]] = {}
        leads_to: dict[Queue | Exchange, list[Exchange]] = {}
        for exchange in self.exchanges.values():
            for binding in exchange.bindings.values():
                destination = binding.destination
                leads_to.setdefault(destination, []).append(exchange)
                if isinstance(destination, Queue):
                    bindings.setdefault(destination, []).append((exchange.name, binding.routing_key))

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
            limits = self._limits(queue.name, queue.own, lambda: inheritance(queue), queue.steered)  # noqa: B023
            queue.change(limits)
        self.version += 1

    def _bindings_changed(self, destination: Queue | Exchange | None = None) -> None:
        self.version += 1
        if self.policies.are_inherited:
            self._apply_policies(destination)

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
        exchange = make_exchange(
            name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments or {}
        )
        journal = self._durable_journal
        if journal is not None and durable and not self.is_recovering:
            journal.exchange(exchange)
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
            journal.exchange_gone(exchange)
        self._unbind_everywhere(exchange)
        self._bindings_changed()

    def bind(
        self, destination: Queue | Exchange, source: str, routing_key: str, arguments: Mapping[str, object] | None
    ) -> None:
        """Bind a queue or an exchange to an exchange.

        Raises:
            ChannelException: 403; the default exchange. 404; no such exchange. 406; arguments it cannot use.
        """
        exchange = self.bindable_exchange(source)
        binding = Binding(destination, routing_key, dict(arguments or {}))
        if binding.key not in exchange.bindings:
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
            ChannelException: 404; no such exchange. 406; an impossible ``expiration``, or it is too large. 506; a queue
                refused it.
        """
        self.check_size(len(body))
        target = Target(exchange, routing_key)
        self.resolve(target)
        header = encode_header(len(body), properties)
        check_properties(header)
        message = StoredMessage(target, header, body)
        queues = self.destinations(message)
        refused = self.refusal(queues, message.size, has_line=False)
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
    def refusal(queues: Iterable[Queue], size: int, *, has_line: bool = True) -> Refusal | None:
        """Why a message of `size` body bytes is not taken now: if one of its destinations refuses it, none gets it.

        It waits if all that refuse it would have it wait, or if others wait before it.

        Args:
            queues: its destinations.
            size: body bytes.
            has_line: whether those count that wait already.
        """
        found = None
        for queue in queues:
            reason = queue.refusal(size) if queue.may_refuse else None
            if reason is None and has_line and queue.has_line:
                reason = f"publishes wait for room in queue '{queue.name}'"
            elif reason is not None and not queue.lets_wait(size):
                return Refusal(queue, reason, False)
            if found is None and reason is not None:
                found = Refusal(queue, reason, True)
        return found

    # Publishes that wait (A4).

    def wait(self, message: StoredMessage, queues: tuple[Queue, ...], publisher: Publisher, tag: int) -> WaitingPublish:
        """Let a publish wait until all of its destinations take it.

        Args:
            message: what was published.
            queues: where it goes.
            publisher: whose it is.
            tag: its publish sequence number; 0 without confirms.
        """
        deadline = self.clock() + self.settings.max_producer_flow_control_wait
        waiting = WaitingPublish(message, queues, publisher, tag, deadline)
        for queue in queues:
            was_watched = queue.is_watched
            queue.waiting.push(waiting)
            queue.wait(deadline)
            if not was_watched:
                # What comes after it here must not pass it.
                self.version += 1
        return waiting

    def stop_waiting(self, waiting: WaitingPublish) -> None:
        """A publish waits no more; those behind it are looked at soon."""
        waiting.is_over = True
        now = self.clock()
        for queue in waiting.queues:
            queue.waiting.leave()
            queue.wait(now)

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """Let those in that come first and find room, and give up those whose time is over."""
        while (waiting := queue.waiting.head()) is not None:
            queues = tuple(each for each in waiting.queues if not each.is_deleted)
            refused: Refusal | None
            if any(each.waiting.head() is not waiting for each in queues):
                refused = Refusal(queue, f"publishes wait before it in queue '{queue.name}'", True)
            else:
                refused = self.refusal(queues, waiting.message.size, has_line=False)
                if refused is not None and any(each.makes_wait(waiting.message.size) for each in queues):
                    # Whoever else refuses it now may have room later.
                    refused = refused._replace(waits=True)
            if refused is None:
                self.stop_waiting(waiting)
                waiting.queues = queues
                waiting.publisher.admit(waiting)
                continue
            if refused.waits and now < waiting.deadline:
                queue.wait(waiting.deadline)
                break
            self.stop_waiting(waiting)
            reason = refused.reason
            if refused.waits:
                reason = f"{reason}; waited {self.settings.max_producer_flow_control_wait} s"
            if not waiting.publisher.give_up(waiting, reason):
                refused.queue.count_drop(DropReason.REFUSED)

    # What was there when the broker ended.

    def recover_topology(self, found: Found) -> None:
        """Make the exchanges, queues and bindings that a message store has."""
        self.is_recovering = True
        try:
            for name, kind, auto_delete, internal, arguments in found.exchanges:
                self.declare_exchange(
                    name, kind, durable=True, auto_delete=auto_delete, internal=internal, arguments=arguments
                )
            for number, name, auto_delete, arguments in found.queues:
                queue = self.declare_queue(
                    name, durable=True, auto_delete=auto_delete, arguments=arguments, number=number
                )
                self._recovering[number] = queue
            for source, kind, name, routing_key, arguments in found.bindings:
                destination = self.queue(name) if kind == "queue" else self.exchange(name)
                self.bind(destination, source, routing_key, arguments)
        finally:
            self.is_recovering = False

    def recover_messages(self, messages: Iterable[FoundMessage]) -> None:
        """Put messages that a message store has where they were; they come in the order of their numbers."""
        assert self.journal is not None
        now = self._wall_clock()
        for each in messages:
            target = Target(each.exchange, each.routing_key)
            message = StoredMessage(target, each.header, each.body)
            self.journal.recovered(message, each.number, each.queues)
            for number in each.queues:
                self._recovering[number].recover(message, max(0.0, now - each.at))

    def recovered(self) -> None:
        """All messages are back: what has expired meanwhile, or is too much now, goes."""
        queues = tuple(self._recovering.values())
        self._recovering.clear()
        for queue in queues:
            queue.after_publish()

    # Memory.

    @property
    def window(self) -> int:
        """Bytes of bodies that each queue may read ahead: an eighth of the limit, in equal parts (A3)."""
        limit = self.journal.limit if self.journal is not None else 0
        if not limit:
            return self.MAX_WINDOW
        readers = sum(queue.pager is not None and bool(queue.consumers) for queue in self.queues.values())
        return min(self.MAX_WINDOW, limit // 8 // max(1, readers))

    def relieve(self) -> None:
        """Keep the messages in memory within the limit: bodies go to disk (A2 A3); beyond it some are dropped (A1)."""
        journal = self.journal
        if journal is None or not journal.limit:
            return
        if journal.held > journal.evict_above:
            self._evict(journal)
        if journal.held > journal.limit:
            self._drop_transient(journal)

    def _evict(self, journal: Journal) -> None:
        """Let bodies go to disk, in equal parts."""
        pagers = [queue.pager for queue in self.queues.values() if queue.pager is not None]
        while (excess := journal.held - journal.evict_above) > 0:
            sizes = [pager.size for pager in pagers]
            total = sum(sizes)
            if not total:
                break
            # What several queues have is in memory once, and counts at each of them.
            less = min(excess, journal.MAX_BATCH) * max(total, journal.held) // journal.held
            share = level(sizes, max(0, total - less))
            for pager in pagers:
                pager.evict(share)
            journal.divide()

    def _drop_transient(self, journal: Journal) -> None:
        """Drop what is not persistent and no consumer has, where the policy says so, until the limit is kept (A1).

        The queue with most to be delivered gives first, the oldest first. What is in other queues too goes only if all
        of them give it: else nothing would be gained. Nor is it from what is on disk, or on its way there.
        """
        givers = [
            (-queue.ready_size, number, queue, queue.droppable.oldest_first())
            for number, queue in enumerate(self.queues.values())
            if queue.droppable
        ]
        heapq.heapify(givers)
        while givers and journal.held > journal.limit:
            _, number, queue, entries = givers[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(givers)
                continue
            assert queue.droppable is not None
            for each in queue.droppable.offer(entry):
                each.queue.drop_for_memory(each)
            heapq.heapreplace(givers, (-queue.ready_size, number, queue, entries))

    def when_read(self, message: StoredMessage, callback: Callable[[], None]) -> None:
        """Have something called when the body of a message, which the journal knows, is in memory."""
        journal = self.journal
        assert journal is not None

        def look() -> bool:
            if message.body is None:
                journal.want((message,), look)
            else:
                callback()
            return True

        look()

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


class _Sampling:
    """Has a recorder look at the queues, time and again."""

    def __init__(self, host: VirtualHost, recorder: FlowRecorder) -> None:
        self._host = host
        self._recorder = recorder

    def tick(self, now: float) -> None:
        """Look, and come back later."""
        self._recorder.tick(now)
        self._host.wake_at(self, now + self._recorder.period)
