"""The methods of a `Broker` that return its state as snapshots, or wait for a state."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Self

from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.embedding import EmbeddedBroker, on_loop
from qflow_client.broker.core.entries import QueueEntry
from qflow_client.broker.core.session import State
from qflow_client.broker.core.snapshots import (
    BindingSnapshot,
    BrokerMessage,
    ChannelSnapshot,
    ConnectionSnapshot,
    ExchangeSnapshot,
    QueueSnapshot,
    binding_snapshot,
    channel_snapshot,
    connection_snapshot,
    exchange_snapshot,
    message_copy,
    queue_snapshot,
)

__all__ = ["InspectableBroker"]


class InspectableBroker(EmbeddedBroker):
    """Shows the state of a broker.

    The methods ``each_...`` must be used on the broker's own loop. These methods yield one snapshot at a time. Each
    snapshot shows its object at the moment of the yield, so other work can run between two snapshots. Objects that are
    created during the iteration, or that are deleted or closed before their snapshot, can be missing.
    """

    @on_loop()
    def queue(self, name: str) -> QueueSnapshot:
        """A snapshot of one queue.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return queue_snapshot(self._host.queue(name))

    @on_loop()
    def queues(self) -> tuple[QueueSnapshot, ...]:
        """Snapshots of all queues, in the order in which they were declared."""
        return tuple(self.each_queue())

    def each_queue(self) -> Iterator[QueueSnapshot]:
        """Yield a snapshot of each queue, in the order in which the queues were declared."""
        return (queue_snapshot(queue) for queue in tuple(self._host.queues.values()) if not queue.is_deleted)

    def has_queue(self, name: str) -> bool:
        """Whether a queue with this name exists."""
        return name in self._host.queues

    @on_loop()
    def messages(self, queue: str) -> tuple[BrokerMessage, ...]:
        """Copies of the ready and the unacked messages of a queue, oldest first. Damaged messages are not included.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._copies(self._host.queue(queue).contents.oldest_first())

    def _copies(self, entries: Iterable[QueueEntry]) -> tuple[BrokerMessage, ...]:
        """Copy messages. Bodies that are not in memory are read from the disk on the calling thread."""
        found = tuple(entries)
        records = [entry.message.record for entry in found if entry.message.body is None]
        numbers = [record.number for record in records if record is not None]
        read = self._disk.read_now(numbers) if numbers and self._disk is not None else {}
        copies = []
        for entry in found:
            body, record = entry.message.body, entry.message.record
            if body is None and record is not None:
                # None if the body is damaged on disk. `read_now` logs the damage.
                body = read.get(record.number)
            if body is not None:
                copies.append(message_copy(entry, body))
        return tuple(copies)

    @on_loop()
    def connections(self) -> tuple[ConnectionSnapshot, ...]:
        """Snapshots of all connections, oldest first."""
        return tuple(self.each_connection())

    def each_connection(self) -> Iterator[ConnectionSnapshot]:
        """Yield a snapshot of each connection, oldest first."""
        sessions = self._server.sessions
        return (connection_snapshot(session) for session in sessions if session.state is not State.ENDED)

    @property
    def connection_count(self) -> int:
        """The number of connections."""
        return len(self._server.sessions)

    @on_loop()
    def channels(self) -> tuple[ChannelSnapshot, ...]:
        """Snapshots of all open channels."""
        return tuple(self.each_channel())

    def each_channel(self) -> Iterator[ChannelSnapshot]:
        """Yield a snapshot of each open channel."""
        return map(channel_snapshot, self._channels())

    def _channels(self) -> Iterator[Channel]:
        for session in self._server.sessions:
            for channel in tuple(session.channels.values()):
                if not channel.is_closing and session.state is not State.ENDED:
                    yield channel

    def producers(self) -> tuple[ChannelSnapshot, ...]:
        """Snapshots of the channels that have published, or are in confirm or transaction mode."""
        return tuple(channel for channel in self.channels() if channel.is_producer)

    @on_loop()
    def exchanges(self) -> tuple[ExchangeSnapshot, ...]:
        """Snapshots of all exchanges, the default exchange first."""
        return tuple(self.each_exchange())

    def each_exchange(self) -> Iterator[ExchangeSnapshot]:
        """Yield a snapshot of each exchange, the default exchange first."""
        exchanges = self._host.topology.exchanges
        return (exchange_snapshot(each) for each in tuple(exchanges.values()) if exchanges.get(each.name) is each)

    def has_exchange(self, name: str) -> bool:
        """Whether an exchange with this name exists."""
        return name in self._host.topology.exchanges

    @on_loop()
    def bindings(self) -> tuple[BindingSnapshot, ...]:
        """Snapshots of all bindings, grouped by exchange."""
        return tuple(self.each_binding())

    def each_binding(self) -> Iterator[BindingSnapshot]:
        """Yield a snapshot of each binding, grouped by exchange."""
        for exchange in tuple(self._host.topology.exchanges.values()):
            for binding in tuple(exchange.bindings.values()):
                # Skip bindings of deleted exchanges and destinations, which the broker removes little by little.
                is_deleted = exchange.is_deleted or binding.destination.is_deleted
                if not is_deleted and exchange.bindings.get(binding.key) is binding:
                    yield binding_snapshot(exchange, binding)

    @property
    @on_loop()
    def alarms(self) -> dict[str, str]:
        """The alarms that block all connections, each with its reason. `block` raises the alarm ``operator``."""
        return dict(self._controls.alarms)

    @property
    @on_loop()
    def sanctions(self) -> dict[str, int]:
        """For each kind of sanction, how often it was used against clients that ignored ``Channel.Flow`` (D8)."""
        return dict(self._controls.sanctions)

    @property
    def producers_stopped(self) -> bool:
        """Whether an operator has stopped all producers, including future ones (D5)."""
        return self._controls.producers_stopped

    # Waiting.

    @property
    def version(self) -> int:
        """A number that grows when the broker's state has changed."""
        return self._runner.version

    def wait_until(self, predicate: Callable[[Self], object], timeout: float = 30.0) -> None:
        """Wait until a condition is true. The condition is checked after each change of the broker's state.

        Args:
            predicate: function of the broker that returns whether the condition is true. It runs on the calling thread.
            timeout: seconds.

        Raises:
            TimeoutError: the condition did not become true; the text describes the queues and channels.
            RuntimeError: a task or the broker's loop called this method, which would block it; use `wait_until_async`.
            TypeError: the predicate is a coroutine function.
        """
        self._runner.wait_until(lambda: self._is_true(predicate), self._describe, timeout)

    async def wait_until_async(self, predicate: Callable[[Self], object], timeout: float = 30.0) -> None:
        """Wait as `wait_until` does, but without blocking the running event loop, even if it is the broker's loop.

        `predicate` is a plain function, and may run on another thread.

        Raises:
            TimeoutError: the condition did not become true; the text describes the queues and channels.
            TypeError: the predicate is a coroutine function.
        """
        await self._runner.wait_until_async(lambda: self._is_true(predicate), self._describe, timeout)

    def _is_true(self, predicate: Callable[[Self], object]) -> object:
        result = predicate(self)
        if inspect.iscoroutine(result):
            # A coroutine counts as true, so the wait would end immediately.
            result.close()
            raise TypeError("the predicate is a coroutine function, which is not awaited; use a plain function")
        return result

    async def wait_until_durable_async(self, *, topology_only: bool = False) -> None:
        """Wait until all durable changes made so far are on disk. Without a store, return immediately.

        This method can run on any loop. On the broker's own loop, the other methods do not wait for the disk.

        Args:
            topology_only: whether to wait only for changes of queues, exchanges and bindings.

        Raises:
            StoreError: the broker stopped before the changes were on disk.
            RuntimeError: the broker has a store and is not running.
        """
        disk = self._disk
        if disk is not None:
            when_durable = partial(disk.when_durable, topology_only=topology_only)
            await asyncio.wrap_future(self._call(when_durable, changes=True))

    def _describe(self) -> str:
        return "".join(f"\n  {each}" for each in (*self.queues(), *self.channels()))
