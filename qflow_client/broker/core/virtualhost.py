"""The virtual host, sans-I/O: it declares and deletes queues, and has the state that all connections share.

Exchanges and bindings are in `topology.py`, routing in `routing.py`, and timers in `timers.py`.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

import pamqp.commands

from qflow_client.broker.core.deadletter import DeadLetters
from qflow_client.broker.core.entries import DropReason, StoredMessage
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import Exchange, Target
from qflow_client.broker.core.limits import Inheritance, PlainRules, Rules
from qflow_client.broker.core.logins import FailedLogins, Logins
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.ports import FlowObserver, Journal, PublishMeter
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.queueflow import FlowOptions
from qflow_client.broker.core.quotas import Quota
from qflow_client.broker.core.replies import address_reply
from qflow_client.broker.core.settings import FlowScope, Settings
from qflow_client.broker.core.timers import Slices, Timers
from qflow_client.broker.core.topology import Topology, check_depth, check_owner, check_same
from qflow_client.broker.core.unsupported import check_copies, check_queue_arguments
from qflow_client.broker.core.waiting import WaitingRoom, refusal
from qflow_client.broker.core.wire import check_properties, encode_header
from qflow_client.flow import FlowSource

__all__ = ["VirtualHost"]

_log = get_logger(__name__)


class VirtualHost:
    """The state that all connections share: exchanges, queues, bindings and timers.

    Args:
        clock: returns monotonic seconds.
        wall_clock: returns seconds since 1970.
        journal: counts the bytes of messages, and with a store collects the changes for the disk; ``None`` for neither.
        rules: compute the limits of each queue; ``None`` for `PlainRules`.
    """

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
        # Records the durable topology for the disk; None if nothing is written to disk.
        self._store = journal.topology if journal is not None and journal.has_store else None
        self.clock = clock
        self.queues: dict[str, Queue] = {}
        self.timers = Timers(clock, journal.divide if journal is not None else lambda: None)
        self.wake_at = self.timers.wake_at
        self.slices = Slices(clock, self.timers)
        self.run = self.slices.run
        self.topology = Topology(settings, self.queues, self._store, self.slices, self._bindings_changed)
        self.router = self.topology.router
        self._queue_quota = Quota("max_queues", settings.max_queues, "queues", lambda: len(self.queues))
        self.consumer_quota = Quota("max_consumers", settings.max_consumers, "consumers", self._count_consumers)
        self.open_connections = 0
        self.failed_logins = FailedLogins(settings.max_failed_logins)
        self.logins = Logins(settings.users, self.failed_logins, settings.authenticate)
        self._flow_options = FlowOptions(settings.flow_scope, settings.recent, settings.resume_interval)
        self.rules: Rules = rules if rules is not None else PlainRules(settings)
        # Queues whose limits must be computed again, because a binding to an exchange or an alternate exchange changed.
        self._inheriting: OrderedDict[Queue, None] = OrderedDict()
        self.waiting = WaitingRoom(clock, settings.max_producer_flow_control_wait, journal)
        # Counts published messages, for example for rate limits; None if nothing counts them.
        self.meter: PublishMeter | None = None
        # Observes the flow control for the flow log; None without a flow log.
        self.observer: FlowObserver | None = None
        when_read = journal.when_read if journal is not None else _run
        resolve, destinations = self.router.target, self.router.destinations
        self.dead_letters = DeadLetters(self.timers, resolve, destinations, when_read, wall_clock)
        # Whether the first message of a channel has to wait, because the server reads nothing from publishers.
        self.takes_no_publisher = False

    def observe(self, observer: FlowObserver) -> None:
        """Report all channels, and the queues that are declared from now on, to an observer.

        Raises:
            RuntimeError: there is already an observer.
        """
        if self.observer is not None:
            raise RuntimeError(
                f"this broker already has an observer, a {type(self.observer).__name__}; combine both into one observer"
            )
        self.observer = observer
        self.timers.wake_at(_Sampling(self.timers, observer), self.clock() + observer.period)

    def end_observing(self) -> None:
        """Let the observer report its last period, because the broker stops."""
        if self.observer is not None:
            self.observer.tick(self.clock())

    def _count_consumers(self) -> int:
        return sum(len(queue.dispatcher.consumers) for queue in self.queues.values())

    # Queues.

    def queue(self, name: str, owner: object | None = None) -> Queue:
        """Return a queue by name.

        Args:
            owner: the requesting connection; ``None`` for the broker itself, which may use each queue.

        Raises:
            ChannelException: 404 if the queue does not exist. 405 if the queue belongs to another connection.
        """
        queue = self.queues.get(name)
        if queue is None:
            raise ChannelException(ReplyCode.NOT_FOUND, f"no queue '{name}' in vhost '{self.settings.virtual_host}'")
        check_owner(queue, owner)
        return queue

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, object] | None = None,
        owner: object | None = None,
        number: int = 0,
        prefix: str = "amq.gen-",
    ) -> Queue:
        """Declare a queue. If the queue exists with the same settings, return it.

        Args:
            name: name of the queue; empty to let the broker choose a name.
            durable: whether the queue survives a restart, if there is a store.
            exclusive: whether only `owner` may use the queue; the queue is then deleted when the owner ends.
            auto_delete: whether the queue is deleted when its last consumer ends.
            number: number of the queue in the message store; 0 for a new queue.
            prefix: start of a name that the broker chooses.

        Raises:
            ChannelException: 403 if the name is reserved. 405 if the queue belongs to another connection. 406 if the
                queue exists with other settings, if the arguments are refused, or if the maximum number of queues is
                reached.
        """
        arguments = dict(arguments or {})
        check_depth(f"queue '{name}'", arguments)
        if name in self.queues:
            queue = self.queue(name, owner)
            check_same(
                f"queue '{name}'",
                durable=(durable, queue.durable),
                exclusive=(exclusive, queue.exclusive_owner is not None),
                auto_delete=(auto_delete, queue.auto_delete),
                arguments=(arguments, queue.arguments),
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
        if self._store is not None and durable and not exclusive and not number:
            number = self._store.number_of(name, auto_delete, arguments)
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
        self.router.version += 1
        return queue

    def delete_queue(self, queue: Queue, on_deleted: Callable[[int], None] | None = None) -> int:
        """Delete a queue with its messages and bindings. Return the number of messages that were ready.

        Args:
            on_deleted: called before the consumers are cancelled, with the number of messages that were ready. As in
                RabbitMQ, clients get ``Queue.Delete-Ok`` first and then ``Basic.Cancel``.
        """
        if queue.is_deleted:
            return 0
        if self.queues.get(queue.name) is queue:
            del self.queues[queue.name]
        self.router.version += 1
        # Otherwise the cached targets would keep the deleted queue in memory.
        self.router.targets.clear()
        if queue.number and self._store is not None:
            self._store.queue_gone(queue.name)
        self.topology.unbind_everywhere(queue)
        count = queue.delete()
        if on_deleted is not None:
            on_deleted(count)
        self.slices.run(queue.dispatcher.cancel_all_in_steps())
        return count

    def unused(self, queue: Queue) -> None:
        _log.info("queue '%s' is deleted: unused for %s s", queue.name, queue.options.expires)
        self.delete_queue(queue)

    # Ends of consumers, connections and channels.

    def consumer_gone(self, queue: Queue) -> None:
        """Record that a consumer has ended. If this was the last consumer of an auto-delete queue, delete the queue."""
        if queue.auto_delete and queue.dispatcher.was_used and not queue.dispatcher.consumers:
            self.delete_queue(queue)

    def owner_gone(self, owner: object) -> None:
        """Delete the exclusive queues of a connection that has ended."""
        queues = [queue for queue in self.queues.values() if queue.exclusive_owner is owner]
        for queue in queues:
            # Other connections can declare queues with these names now, even before these queues are deleted.
            del self.queues[queue.name]
        self.router.version += 1
        self.slices.run(self._delete_in_steps(queues))

    def _delete_in_steps(self, queues: Iterable[Queue]) -> Iterator[None]:
        for queue in queues:
            self.delete_queue(queue)
            yield

    def source_gone(self, source: FlowSource) -> None:
        """Record that a channel has ended."""
        if self.observer is not None:
            self.observer.gone(source)
        if self.settings.flow_scope is FlowScope.PUBLISHERS:
            for queue in self.queues.values():
                queue.flows.forget(source)

    def apply_rules(self, queue: Queue) -> None:
        """Compute the limits of a queue again (D4).

        Raises:
            ChannelException: 406 if the arguments and the policies of the queue contradict each other.
        """
        assert queue.rule is not None
        queue.change(queue.rule.limits(lambda: self.topology.inheritance(queue)))
        self.router.version += 1

    def apply_rules_in_steps(self) -> Iterator[None]:
        """Compute the limits of all queues again. Other work can run between two queues."""
        for queue in tuple(self.queues.values()):
            if not queue.is_deleted:
                self.apply_rules(queue)
                yield

    def _bindings_changed(self, destination: Queue | Exchange | None) -> None:
        if not self.rules.are_inherited:
            return
        if isinstance(destination, Queue):
            self.apply_rules(destination)
        else:
            is_running = bool(self._inheriting)
            # A queue that already waits keeps its place, so frequent changes cannot delay it forever.
            self._inheriting.update(dict.fromkeys(self.queues.values()))
            if not is_running:
                self.slices.run(self._inherit_in_steps())

    def _inherit_in_steps(self) -> Iterator[None]:
        try:
            while self._inheriting:
                queue, _ = self._inheriting.popitem(last=False)
                if not queue.is_deleted:
                    try:
                        self.apply_rules(queue)
                    except ChannelException as error:
                        _log.warning("queue '%s' keeps its limits: %s", queue.name, error)
                yield
        finally:
            # If an error ends this run, the next change of bindings has to start a new run.
            self._inheriting.clear()

    # Publishing.

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        properties: pamqp.commands.Basic.Properties | None = None,
    ) -> int:
        """Publish a message without a channel, so flow control does not delay it. Return how many queues get it.

        Raises:
            ChannelException: 403 if the exchange is internal. 404 if there is no such exchange. 406 if the message is
                too large, has an invalid ``expiration``, asks for copies (``CC``, ``BCC``) or direct replies, or
                would go to too many queues, or matches too many binding keys. 506 if a queue refuses the message.
        """
        self.router.check_size(len(body))
        target = Target(exchange, routing_key)
        self.router.resolve(target)
        header = encode_header(len(body), properties)
        check_properties(header)
        check_copies(header)
        address_reply(header, "")
        message = StoredMessage(target, header, body)
        queues = self.router.destinations(message, target)
        with self.dead_letters:
            refused = refusal(queues, message.size, has_line=False)
            if refused is not None:
                raise ChannelException(ReplyCode.RESOURCE_ERROR, refused.reason)
            # The caller cannot wait for `Queue.tick`, so all messages beyond the maximum of a queue are dropped now.
            for queue in queues:
                queue.enqueue(message, drops=sys.maxsize)
            for queue in queues:
                queue.after_publish(sys.maxsize)
        if self.journal is not None:
            self.journal.divide()
        return len(queues)

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """Admit waiting messages for which the queue now has room. Refuse messages that have waited too long."""
        with self.dead_letters:
            self.waiting.admit(queue, now)

    @property
    def window(self) -> int:
        return self.journal.window(self.queues.values()) if self.journal is not None else 0

    def relieve(self) -> None:
        """Evict bodies or drop messages if too many bytes are in memory (A1 A2)."""
        if self.journal is not None:
            self.journal.relieve(self.queues.values())

    def lost(self, message: StoredMessage) -> None:
        """Drop a message from all queues, because its body is damaged on disk and not in memory."""
        for queue in self.queues.values():
            queue.dropping.drop_lost(message)

    def died(self, queue: Queue, message: StoredMessage, reason: DropReason) -> None:
        self.dead_letters.died(queue, message, reason)

    def note_surplus(self, queue: Queue, on: bool) -> None:
        self.dead_letters.note_surplus(queue, on)


def _run(message: StoredMessage, callback: Callable[[], None]) -> None:
    """Call the callback immediately. Used without a journal, because every body is then in memory."""
    callback()


class _Sampling:
    """Calls an observer at the end of each of its periods."""

    def __init__(self, timers: Timers, observer: FlowObserver) -> None:
        self._timers = timers
        self._observer = observer

    def tick(self, now: float) -> None:
        self._observer.tick(now)
        self._timers.wake_at(self, now + self._observer.period)
