"""The broker to embed: start, stop, inspect and control it, from any thread or from its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar
from urllib.parse import quote

import pamqp.commands

from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.channelflow import Discipline
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.entries import QueueEntry
from qflow_client.broker.core.errors import ReplyCode
from qflow_client.broker.core.exchange import Exchange
from qflow_client.broker.core.limits import Rules
from qflow_client.broker.core.passwords import is_hash
from qflow_client.broker.core.ports import Journal
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.runner import Runner
from qflow_client.broker.core.server import Server
from qflow_client.broker.core.session import Session
from qflow_client.broker.core.settings import Settings
from qflow_client.broker.core.snapshots import (
    BindingSnapshot,
    BrokerMessage,
    ChannelSnapshot,
    ConnectionSnapshot,
    ExchangeSnapshot,
    QueueSnapshot,
    binding_snapshots,
    channel_snapshot,
    connection_snapshot,
    exchange_snapshot,
    message_copy,
    queue_snapshot,
)
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["Broker", "Disk", "Front", "url_host"]

_Result = TypeVar("_Result")


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=_HasName)


def url_host(host: str) -> str:
    """Return a host as it is written in a URL. A wildcard such as ``0.0.0.0`` becomes a loopback address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


class Front(Protocol):
    """Serves a broker to clients of another protocol, on the broker's loop."""

    async def start(self) -> None:
        """Listen."""

    async def stop(self) -> None:
        """Stop listening, and end the requests that are running."""


class Disk(Protocol):
    """Writes the records of the journal, on its own threads."""

    async def start(self) -> None:
        """Restore the contents of the store."""

    async def watch(self) -> None:
        """Start watching the disk. The broker listens now."""

    async def stop(self) -> None:
        """Write the remaining records."""

    def flush(self) -> None:
        """Start to write the pending records, without waiting."""

    def when_durable(self, *, topology_only: bool = False) -> Future[None]:
        """Return a future that is done when all records noted so far are on disk."""

    def read_now(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Read bodies of messages, by number, on the calling thread."""


class Broker:
    """An AMQP 0-9-1 broker in this process: the core, which a subclass or an application can extend.

    ``with broker:`` runs the broker on its own thread and event loop. ``async with broker:`` runs it on the running
    loop. Its methods may be called from any thread, and from the broker's own loop. A broker can be started only once.

    Args:
        settings: see `Settings`.
        rules: decide the limits of each queue; ``None`` for the same marks for all queues.
        journal: counts messages, and notes the records for the disk; ``None`` for neither.
        discipline: creates the object that decides about a client that ignores ``Channel.Flow``; ``None`` for no such
            object.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rules: Rules | None = None,
        journal: Journal | None = None,
        discipline: Callable[[Session], Discipline] | None = None,
    ) -> None:
        #: The settings as given, with the defaults.
        self.settings = settings
        self._host = VirtualHost(settings, journal=journal, rules=rules)
        self._controls = Controls(watches_publishes=settings.watches_publishes)
        self._server = Server(settings, self._host, self._controls, self._on_turn, discipline)
        # Whether the broker raised the memory alarm itself; False if an operator raised it.
        self._has_memory_alarm = False
        # Only set if there is a store.
        self._disk: Disk | None = None
        # Started after the broker listens, and stopped before it stops listening.
        self._fronts: list[Front] = []
        self._port: int | None = None
        self._started = AsyncExitStack()
        self._runner = Runner()

    # Starting and stopping.

    def __enter__(self) -> Self:
        self._check_fresh()
        self._runner.run(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runner.end(self._stop)

    async def __aenter__(self) -> Self:
        self._check_fresh()
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    def _check_fresh(self) -> None:
        if self._port is not None:
            raise RuntimeError("this broker has run already; make a new Broker")

    async def _start(self) -> None:
        # Everything that has started is stopped in reverse order: here if a later part fails to start, otherwise by
        # `_stop`.
        async with AsyncExitStack() as started:
            if self._disk is not None:
                await self._disk.start()
                started.push_async_callback(self._disk.stop)
            started.callback(self._runner.leave)
            started.callback(self._host.end_observing)
            self._port = await self._server.start()
            started.push_async_callback(self._server.stop)
            for front in self._fronts:
                await front.start()
                started.push_async_callback(front.stop)
            self._runner.enter()
            if self._disk is not None:
                await self._disk.watch()
            self._started = started.pop_all()

    async def _stop(self) -> None:
        await self._started.aclose()
        self._runner.changed()

    @property
    def port(self) -> int:
        """The port on which the broker listens.

        Raises:
            RuntimeError: the broker has not been started.
        """
        if self._port is None:
            raise RuntimeError("the broker is not running; use it in `with Broker() as broker:`")
        return self._port

    @property
    def url(self) -> str:
        """An AMQP URL with the name and password of the first user.

        The URL has no password if the broker knows only the password's hash.
        """
        user, password = next(iter(self.settings.users.items()))
        scheme = "amqp" if self.settings.ssl_context is None else "amqps"
        host = url_host(self.settings.host)
        names = quote(user, safe="") + ("" if is_hash(password) else f":{quote(password, safe='')}")
        return f"{scheme}://{names}@{host}:{self.port}/{quote(self.settings.virtual_host, safe='')}"

    # Calls from other threads.

    def _call(self, function: Callable[[], _Result], *, changes: bool = False, lasts: bool = False) -> _Result:
        """Run a function on the broker's loop. If this is that loop, or if no loop runs, call it directly.

        Args:
            function: the function to run.
            changes: whether the function changes the broker.
            lasts: whether the change has to be on disk before this method returns. On the loop itself it does not wait.
        """
        caller = threading.get_ident()
        durable: Future[None] | None = None

        def run() -> _Result:
            nonlocal durable
            result = function()
            if changes:
                self._server.touch()
            if lasts and self._disk is not None:
                when_durable = self._disk.when_durable(topology_only=True)
                durable = when_durable if threading.get_ident() != caller else None
            return result

        if changes and self._disk is not None and not self._runner.is_running:
            raise RuntimeError("a broker with a store can be changed only while it runs")
        result = self._runner.call(run)
        if durable is not None:
            durable.result()
        return result

    def _call_in_steps(self, steps: Iterator[object], *, lasts: bool = False) -> None:
        """Run a change in steps on the broker's loop; other work of the loop runs between the steps. See `_call`."""
        self._call(lambda: None, changes=True)
        self._runner.call_in_steps(steps)
        self._call(lambda: None, changes=True, lasts=lasts)

    def _on_turn(self) -> None:
        if self._disk is not None:
            self._disk.flush()
        journal = self._host.journal
        if journal is not None and journal.limit:
            self._check_memory(journal)
        self._runner.changed()

    def _check_memory(self, journal: Journal) -> None:
        """Raise the memory alarm when the limit is exceeded, and clear it when memory falls to 7/8 of the limit."""
        size = journal.held
        if "memory" not in self._controls.alarms:
            if size > journal.limit:
                self._has_memory_alarm = True
                self.raise_alarm("memory", f"{size} bytes of messages are in memory, of at most {journal.limit}")
        elif self._has_memory_alarm and size <= journal.limit // 8 * 7:
            self._has_memory_alarm = False
            self.clear_alarm("memory")

    def _on_trouble(self, name: str, reason: str | None) -> None:
        if not self._runner.is_running:
            # The broker is stopping, or has just started: there are no clients.
            return
        if reason is None:
            self.clear_alarm(name)
        else:
            self.raise_alarm(name, reason)

    # Inspecting.

    def queue(self, name: str) -> QueueSnapshot:
        """A snapshot of one queue.

        Args:
            name: name of the queue.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._call(lambda: queue_snapshot(self._host.queue(name)))

    def queues(self) -> tuple[QueueSnapshot, ...]:
        """Snapshots of all queues, in the order in which they were declared."""
        return self._call(lambda: tuple(queue_snapshot(queue) for queue in self._host.queues.values()))

    def connections(self) -> tuple[ConnectionSnapshot, ...]:
        """Snapshots of all connections, oldest first."""
        return self._call(lambda: tuple(connection_snapshot(session) for session in self._server.sessions))

    def channels(self) -> tuple[ChannelSnapshot, ...]:
        """Snapshots of all open channels: which are flowed, by which queues, how often, and for how long."""
        return self._call(lambda: tuple(channel_snapshot(channel) for channel in self._channels()))

    def producers(self) -> tuple[ChannelSnapshot, ...]:
        """The channels that publish, or that have selected confirms or transactions."""
        return tuple(channel for channel in self.channels() if channel.is_producer)

    def exchanges(self) -> tuple[ExchangeSnapshot, ...]:
        """Snapshots of all exchanges, the default exchange first."""
        return self._call(
            lambda: tuple(exchange_snapshot(exchange) for exchange in self._host.topology.exchanges.values())
        )

    def bindings(self) -> tuple[BindingSnapshot, ...]:
        """Snapshots of all bindings, grouped by exchange."""
        return self._call(
            lambda: tuple(
                binding
                for exchange in self._host.topology.exchanges.values()
                for binding in binding_snapshots(exchange)
            )
        )

    @property
    def producers_stopped(self) -> bool:
        """Whether an operator has stopped all producers, including future ones (D5)."""
        return self._controls.producers_stopped

    @property
    def version(self) -> int:
        """A number that grows with each change of the broker's state."""
        return self._runner.version

    def messages(self, queue: str) -> tuple[BrokerMessage, ...]:
        """Copies of all messages in a queue, ready and unacked, in the order of the queue.

        Args:
            queue: name of the queue.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._call(lambda: self._copies(self._host.queue(queue).contents.oldest_first()))

    def _copies(self, entries: Iterable[QueueEntry]) -> tuple[BrokerMessage, ...]:
        """Copy messages. Bodies that are not in memory are read from the disk on this thread."""
        found = tuple(entries)
        records = [each.message.record for each in found if each.message.body is None]
        numbers = [record.number for record in records if record is not None]
        bodies = self._disk.read_now(numbers) if numbers and self._disk is not None else {}
        copies = []
        for each in found:
            record = each.message.record
            body = each.message.body if record is None or each.message.body is not None else bodies.get(record.number)
            # If a body is damaged on disk, the store reports it in the log.
            if body is not None:
                copies.append(message_copy(each, body))
        return tuple(copies)

    def _channels(self) -> list[Channel]:
        return [
            channel
            for session in self._server.sessions
            for channel in session.channels.values()
            if not channel.is_closing
        ]

    # Waiting.

    def wait_until(self, predicate: Callable[[Self], object], timeout: float = 30.0) -> None:
        """Wait until a condition is true. The condition is checked after each change of the broker's state.

        Args:
            predicate: takes the broker and returns the condition; runs on the calling thread.
            timeout: seconds.

        Raises:
            TimeoutError: the condition did not become true; the text describes the queues and channels.
            RuntimeError: called in a task (such as an async test) or on the broker's loop, which it would block. Use
                `wait_until_async` there.
        """
        self._runner.wait_until(lambda: predicate(self), self._describe, timeout)

    async def wait_until_async(self, predicate: Callable[[Self], object], timeout: float = 30.0) -> None:
        """Do the work of `wait_until` on any event loop, including the broker's own.

        Args:
            predicate: takes the broker and returns the condition.
            timeout: seconds.

        Raises:
            TimeoutError: the condition did not become true; the text describes the queues and channels.
        """
        await self._runner.wait_until_async(lambda: predicate(self), self._describe, timeout)

    async def wait_until_durable_async(self, *, topology_only: bool = False) -> None:
        """Wait until all changes made so far that have to survive are on disk. Without a store, return immediately.

        Use it on the broker's own loop, where no other method waits for the disk, or on any other loop.

        Args:
            topology_only: whether to wait only for changes of queues, exchanges and bindings.

        Raises:
            StoreError: the broker stopped before.
        """
        disk = self._disk
        if disk is not None:
            when_durable = partial(disk.when_durable, topology_only=topology_only)
            await asyncio.wrap_future(self._call(when_durable, changes=True))

    def _describe(self) -> str:
        """Describe the queues and channels, one on each line."""
        return "".join(f"\n  {each}" for each in (*self.queues(), *self.channels()))

    # Queues, exchanges and messages.

    def declare_queue(
        self,
        name: str,
        *,
        arguments: Mapping[str, object] | None = None,
        durable: bool = False,
        auto_delete: bool = False,
    ) -> QueueSnapshot:
        """Declare a queue. If the queue exists with the same settings, return it.

        Args:
            name: name of the queue; empty to let the broker choose a name.
            arguments: arguments of the declaration, such as thresholds.
            durable: as in ``Queue.Declare``.
            auto_delete: as in ``Queue.Declare``.

        Returns:
            The queue as it is now.

        Raises:
            ChannelException: 406 if the queue exists with other settings, or if the broker refuses the arguments.
        """

        def declare() -> QueueSnapshot:
            queue = self._host.declare_queue(name, durable=durable, auto_delete=auto_delete, arguments=arguments)
            return queue_snapshot(queue)

        return self._call(declare, changes=True, lasts=True)

    def delete_queue(self, name: str) -> int:
        """Delete a queue.

        Args:
            name: name of the queue.

        Returns:
            The number of messages that were ready in the queue.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._call(lambda: self._host.delete_queue(self._host.queue(name)), changes=True, lasts=True)

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
        """Declare an exchange. If the exchange exists with the same settings, return it.

        Args:
            name: name of the exchange.
            type: type of the exchange.
            arguments: such as ``alternate-exchange``.
            durable: as in ``Exchange.Declare``.
            auto_delete: as in ``Exchange.Declare``.
            internal: as in ``Exchange.Declare``.

        Returns:
            The exchange as it is now.

        Raises:
            ChannelException: 403 if the name is reserved. 406 if the exchange exists with other settings.
            ConnectionException: 503 if the type does not exist.
        """

        def declare() -> ExchangeSnapshot:
            exchange = self._host.topology.declare_exchange(
                name, type, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
            )
            return exchange_snapshot(exchange)

        return self._call(declare, changes=True, lasts=True)

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange and its bindings.

        Args:
            name: name of the exchange.

        Raises:
            ChannelException: 403 for an exchange that every broker has; it cannot be deleted. 404 if the exchange does
                not exist.
        """
        self._call(
            lambda: self._host.topology.delete_exchange(self._host.router.exchange(name).name), changes=True, lasts=True
        )

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
            source: the exchange that gets the messages.
            destination: the queue or exchange that receives the messages from it.
            routing_key: the binding key.
            destination_type: whether the destination is a queue or an exchange.
            arguments: arguments of the binding, for headers exchanges.

        Raises:
            ChannelException: 403 for the default exchange. 404 if the queue or an exchange does not exist. 406 if the
                exchange cannot use the arguments.
        """
        self._call(
            lambda: self._host.topology.bind(self._end(destination, destination_type), source, routing_key, arguments),
            changes=True,
            lasts=True,
        )

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
            source: the exchange that gets the messages.
            destination: the queue or exchange that receives the messages from it.
            routing_key: the binding key.
            destination_type: whether the destination is a queue or an exchange.
            arguments: the arguments that the binding was made with.

        Raises:
            ChannelException: 403 for the default exchange. 404 if the queue or an exchange does not exist.
        """

        def unbind() -> None:
            exchange = self._host.topology.bindable_exchange(source)
            self._host.topology.unbind(self._end(destination, destination_type), exchange.name, routing_key, arguments)

        self._call(unbind, changes=True, lasts=True)

    def _end(self, name: str, kind: Literal["queue", "exchange"]) -> Queue | Exchange:
        return self._host.queue(name) if kind == "queue" else self._host.topology.bindable_exchange(name)

    def purge(self, queue: str) -> int:
        """Remove the ready messages of a queue.

        Args:
            queue: name of the queue.

        Returns:
            The number of messages that were removed.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """
        return self._call(lambda: self._host.queue(queue).purge(), changes=True)

    def get(self, queue: str) -> BrokerMessage | None:
        """Remove one message from a queue and return it.

        Args:
            queue: name of the queue.

        Returns:
            The message; ``None`` if none is ready.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """

        def get() -> BrokerMessage | None:
            entry = self._host.queue(queue).take(no_ack=True)
            if entry is None:
                return None
            copies = self._copies((entry,))
            if entry.message.body is None and self._host.journal is not None:
                self._host.journal.leave(0, entry.message)
            return copies[0] if copies else None

        return self._call(get, changes=True)

    def publish(
        self,
        body: bytes,
        routing_key: str,
        *,
        exchange: str = "",
        properties: pamqp.commands.Basic.Properties | None = None,
    ) -> int:
        """Publish a message from inside the broker. Flow control does not hold it back.

        It returns when the message is in its queues. With a store this is before the message is on disk;
        `wait_until_durable_async` waits for the disk.

        Args:
            body: body of the message.
            routing_key: the routing key; for the default exchange, the name of the queue.
            exchange: name of the exchange.
            properties: the basic properties; ``None`` for none.

        Returns:
            The number of queues that the message is in.

        Raises:
            ChannelException: 404 if the exchange does not exist. 506 if a queue refuses the message.
            TypeError: the body is not bytes.
        """
        if not isinstance(body, bytes):
            raise TypeError(f"body must be bytes, not {type(body).__name__}: {body!r:.40}")
        return self._call(lambda: self._host.publish(exchange, routing_key, body, properties), changes=True)

    # Controlling.

    @staticmethod
    def _named(what: str, found: Iterable[_Named], name: str | None) -> list[_Named]:
        """Return the object with this name, or all objects if the name is ``None``. Raise if no object has the name."""
        found = list(found)
        picked = [each for each in found if name is None or each.name == name]
        if name is not None and not picked:
            names = ", ".join(each.name for each in found) or "none"
            raise LookupError(f"there is no {what} {name!r}; the broker has: {names}")
        return picked

    def flow(self, active: bool, channel: str | None = None) -> None:
        """Stop or start producers, as an operator (D5). Producers that are held by queues stay held.

        The method returns before the clients have read the ``Channel.Flow``.

        Args:
            active: ``False`` stops the producers, ``True`` lets them publish.
            channel: name of one channel, which need not be a producer's. ``None`` for all producers, including future
                ones.

        Raises:
            LookupError: the channel does not exist.
        """

        def change() -> None:
            if channel is None:
                self._controls.producers_stopped = not active
            for each in self._named("channel", self._channels(), channel):
                if active:
                    each.flow.unblock(self._controls.operator)
                elif channel is not None or each.flow.is_producer:
                    each.flow.block(self._controls.operator)

        self._call(change, changes=True)

    def block(self, reason: str = "blocked by the operator", connection: str | None = None) -> None:
        """Send ``Connection.Blocked`` to each client that announced the capability.

        It is only a notice: the broker still accepts publishes.

        Args:
            reason: the text for the client.
            connection: name of one connection; ``None`` for all connections, including future ones.

        Raises:
            LookupError: the connection does not exist.
        """

        def change() -> None:
            if connection is None:
                self._controls.alarms[Controls.OPERATOR] = reason
            for session in self._named("connection", self._server.sessions, connection):
                session.block(reason, Controls.OPERATOR)

        self._call(change, changes=True)

    def unblock(self, connection: str | None = None) -> None:
        """Undo `block`.

        Args:
            connection: name of one connection; ``None`` for all.

        Raises:
            LookupError: the connection does not exist.
        """

        def change() -> None:
            if connection is None:
                self._controls.alarms.pop(Controls.OPERATOR, None)
            for session in self._named("connection", self._server.sessions, connection):
                session.unblock(Controls.OPERATOR)

        self._call(change, changes=True)

    @property
    def alarms(self) -> dict[str, str]:
        """The alarms that block all connections, with the reason for the clients; `block` is ``operator``."""
        return self._call(lambda: dict(self._controls.alarms))

    def raise_alarm(self, name: str, reason: str) -> None:
        """Send ``Connection.Blocked``, as RabbitMQ does when memory or disk space runs low.

        A client that announced the capability gets one notice for the first alarm. When the last alarm is cleared, it
        gets ``Connection.Unblocked``.

        Args:
            name: name of the alarm, such as ``"memory"`` or ``"disk"``. If the alarm is already raised, it gets the new
                reason.
            reason: the text for clients that connect later, or that are not blocked yet.

        Raises:
            ValueError: the name is empty, or reserved for `block`.
        """
        if not name or name == Controls.OPERATOR:
            raise ValueError(
                f"an alarm must have a name other than {Controls.OPERATOR!r}, which is reserved for block(): {name!r}"
            )

        def change() -> None:
            self._controls.alarms[name] = reason
            for session in self._server.sessions:
                session.block(reason, name)

        self._call(change, changes=True)

    def clear_alarm(self, name: str) -> None:
        """Undo `raise_alarm`. If the alarm is not raised, nothing changes.

        Args:
            name: name of the alarm.
        """

        def change() -> None:
            if name != Controls.OPERATOR:
                self._controls.alarms.pop(name, None)
                for session in self._server.sessions:
                    session.unblock(name)

        self._call(change, changes=True)

    @property
    def sanctions(self) -> dict[str, int]:
        """How often clients that ignored ``Channel.Flow`` were tarpitted or lost a channel or connection (D8)."""
        return self._call(lambda: dict(self._controls.sanctions))

    def withhold_confirms(self, queue: str | None = None) -> None:
        """Withhold all acks of publishes from now on. The messages are still enqueued.

        Args:
            queue: only for messages that go to this queue; ``None`` for all messages.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """

        def change() -> None:
            if queue is None:
                self._controls.withhold_confirms = True
            else:
                self._host.queue(queue).withhold()
                self._host.router.version += 1

        self._call(change, changes=True)

    def release_confirms(self, queue: str | None = None) -> None:
        """Send the withheld acks, and stop withholding.

        Args:
            queue: only for messages that went to this queue; ``None`` for all messages, including those that are
                withheld for one queue.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """

        def change() -> None:
            for each in self._host.queues.values() if queue is None else (self._host.queue(queue),):
                each.release_withheld()
            self._host.router.version += 1
            if queue is None:
                self._controls.withhold_confirms = False
                for session in self._server.sessions:
                    session.output.announce_confirms()

        self._call(change, changes=True)

    def nack_publishes(self, on: bool = True, queue: str | None = None) -> None:
        """Refuse publishes. In confirm mode the client gets ``Basic.Nack``; otherwise the channel is closed with 506.

        Args:
            on: whether to refuse published messages; ``False`` accepts them again.
            queue: only for messages that go to this queue; ``None`` for all messages. ``None`` with ``on=False`` also
                ends the refusal for single queues.

        Raises:
            ChannelException: 404 if the queue does not exist.
        """

        def change() -> None:
            if queue is not None:
                self._host.queue(queue).refuse(on)
            else:
                self._controls.refuse_publishes(on)
                for each in self._host.queues.values() if not on else ():
                    each.refuse(False)
            self._host.router.version += 1

        self._call(change, changes=True)

    def close_channels(
        self,
        code: int = ReplyCode.PRECONDITION_FAILED,
        text: str = "closed by the operator",
        channel: str | None = None,
    ) -> None:
        """Close channels with ``Channel.Close``.

        Args:
            code: the reply code.
            text: the reply text.
            channel: name of one channel; ``None`` for all.

        Raises:
            LookupError: the channel does not exist.
        """

        def change() -> None:
            for each in self._named("channel", self._channels(), channel):
                each.fail(code, text)

        self._call(change, changes=True)

    def close_connections(
        self,
        code: int = ReplyCode.CONNECTION_FORCED,
        text: str = "CONNECTION_FORCED - closed by the operator",
        connection: str | None = None,
    ) -> None:
        """Close connections with ``Connection.Close``.

        Args:
            code: the reply code.
            text: the reply text.
            connection: name of one connection; ``None`` for all.

        Raises:
            LookupError: the connection does not exist.
        """

        def change() -> None:
            for session in self._named("connection", self._server.sessions, connection):
                session.fail(code, text, self._server.clock())

        self._call(change, changes=True)

    def drop_connections(self, connection: str | None = None) -> None:
        """Drop connections without ``Connection.Close``, like a crash.

        Args:
            connection: name of one connection; ``None`` for all.

        Raises:
            LookupError: the connection does not exist.
        """

        def change() -> None:
            for each in self._named("connection", tuple(self._server.connections), connection):
                each.abort()

        self._call(change, changes=True)
