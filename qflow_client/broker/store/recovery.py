"""Restores the contents of a message store when the broker starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qflow_client.broker.core.entries import Address, StoredMessage
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.store.journal import Found, FoundMessage, Journal

__all__ = ["Recovery"]


class Recovery:
    """Restores one store: call `recover_topology`, `recover_messages` for all messages in parts, and then `finish`."""

    def __init__(self, host: VirtualHost, journal: Journal, wall_clock: Callable[[], float]) -> None:
        self._host = host
        self._journal = journal
        self._wall_clock = wall_clock
        # The restored queues. The keys are the numbers of the queues in the store.
        self._queues: dict[int, Queue] = {}
        # Numbers of the deleted queues, and the highest number of any queue in the store.
        self._deleted: set[int] = set()
        self._last_queue = 0
        #: Number of messages that are in a restored queue.
        self.restored = 0
        #: Numbers of messages whose queues are deleted.
        self.leftovers: list[int] = []
        #: Numbers of messages whose queues are neither restored nor deleted: the rows of their queues were damaged.
        self.lost: list[int] = []

    def recover_topology(self, found: Found) -> None:
        host = self._host
        self._deleted = found.deleted
        host.topology.is_recovering = True
        try:
            for name, kind, auto_delete, internal, arguments in found.exchanges:
                host.topology.declare_exchange(
                    name, kind, durable=True, auto_delete=auto_delete, internal=internal, arguments=arguments
                )
            for number, name, auto_delete, arguments in found.queues:
                self._queues[number] = host.declare_queue(
                    name, durable=True, auto_delete=auto_delete, arguments=arguments, number=number
                )
                self._last_queue = max(number, self._last_queue)
            for source, kind, name, routing_key, arguments in found.bindings:
                destination = host.queue(name) if kind == "queue" else host.router.exchange(name)
                host.topology.bind(destination, source, routing_key, arguments)
        finally:
            host.topology.is_recovering = False

    def recover_messages(self, messages: Iterable[FoundMessage]) -> None:
        """Put messages of a message store into their queues. The messages must be in the order of their numbers."""
        now = self._wall_clock()
        for each in messages:
            self._last_queue = max((self._last_queue, *each.queues))
            queues = [number for number in each.queues if number in self._queues]
            if not queues:
                (self.leftovers if self._deleted.issuperset(each.queues) else self.lost).append(each.number)
                continue
            self.restored += 1
            message = StoredMessage(Address(each.exchange, each.routing_key), each.header, each.body)
            self._journal.recovered(message, each.number, queues)
            for number in queues:
                self._queues[number].recover(message, max(0.0, now - each.at))

    def finish(self) -> None:
        """Drop the restored messages that have expired or exceed a queue's maximum."""
        self._journal.topology.go_on_from(max((self._last_queue, *self._deleted)))
        for queue in self._queues.values():
            queue.after_publish()
