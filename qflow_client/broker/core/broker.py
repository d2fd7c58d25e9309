"""The broker to embed: start and stop, look and steer, from any thread or from its own event loop."""

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
    """A host as it stands in a URL; a loopback address in place of one that stands for all."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


class Front(Protocol):
    """Serves a broker to others than AMQP clients, on the broker's loop."""

    async def start(self) -> None:
        """Listen."""

    async def stop(self) -> None:
        """Stop listening, and end what is going on."""


class Disk(Protocol):
    """Writes what the journal notes, on threads of its own."""

    async def start(self) -> None:
        """Put everything that is on disk where it was."""

    async def watch(self) -> None:
        """The broker listens now."""

    async def stop(self) -> None:
        """Write what is left."""

    def flush(self) -> None:
        """Write what is to be written, without waiting for it."""

    def when_durable(self, *, topology_only: bool = False) -> Future[None]:
        """Done when all that was noted so far is on disk."""

    def read_now(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Bodies of messages, by number, on the thread that asks."""


class Broker:
    """An AMQP 0-9-1 broker in this process: the core, to which a subclass or an application adds what it needs.

    ``with broker:`` runs it on a thread and an event loop of its own, ``async with broker:`` on the running loop. Its
    methods may be called from any thread, and from the loop it runs on. A broker runs once.

    Args:
        settings: see `Settings`.
        rules: decide what is in force for each queue; ``None`` for the same marks for all.
        journal: counts messages, and notes what is to be on disk; ``None`` for neither.
        discipline: makes what decides about a client that does not heed ``Channel.Flow``; ``None`` if nothing does.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rules: Rules | None = None,
        journal: Journal | None = None,
        discipline: Callable[[Session], Discipline] | None = None,
    ) -> None:
        #: What it was given, and the defaults.
        self.settings = settings
        self._host = VirtualHost(settings, journal=journal, rules=rules)
        self._controls = Controls(watches_publishes=settings.watches_publishes)
        self._server = Server(settings, self._host, self._controls, self._on_turn, discipline)
        # Whether the alarm for memory is its own, and not an operator's.
        self._has_memory_alarm = False
        # Only set if there is a store.
        self._disk: Disk | None = None
        # Started after the broker listens, and stopped before it does not.
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
        # What has started is stopped in the reverse order: here if something else cannot start, else by `_stop`.
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
        """The port that it listens on.

        Raises:
            RuntimeError: it has not been started.
        """
        if self._port is None:
            raise RuntimeError("the broker does not run yet; use it in `with Broker() as broker:`")
        return self._port

    @property
    def url(self) -> str:
        """An AMQP URL with the first user's name and password; without the password if only its hash is known."""
        user, password = next(iter(self.settings.users.items()))
        scheme = "amqp" if self.settings.ssl_context is None else "amqps"
        host = url_host(self.settings.host)
        names = quote(user, safe="") + ("" if is_hash(password) else f":{quote(password, safe='')}")
        return f"{scheme}://{names}@{host}:{self.port}/{quote(self.settings.virtual_host, safe='')}"

    # From other threads.

    def _call(self, function: Callable[[], _Result], *, changes: bool = False, lasts: bool = False) -> _Result:
        """Run something on the broker's loop; here and now if this is it, or if there is none.

        Args:
            function: what.
            changes: whether it changes anything.
            lasts: whether it may be a change that is to be on disk before this returns. The loop itself cannot wait.
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
        """Take steps that change something on the broker's loop, in turns with what else it does; see `_call`."""
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
        """Raise the alarm when the limit is passed, and clear it below 7/8 of that."""
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
            # It ends, or has just begun: there are no clients.
            return
        if reason is None:
            self.clear_alarm(name)
        else:
            self.raise_alarm(name, reason)

    # Looking.

    def queue(self, name: str) -> QueueSnapshot:
        """A queue at this moment.

        Args:
            name: of the queue.

        Raises:
            ChannelException: 404; there is none.
        """
        return self._call(lambda: queue_snapshot(self._host.queue(name)))

    def queues(self) -> tuple[QueueSnapshot, ...]:
        """All queues at this moment, in the order in which they were made."""
        return self._call(lambda: tuple(queue_snapshot(queue) for queue in self._host.queues.values()))

    def connections(self) -> tuple[ConnectionSnapshot, ...]:
        """All connections at this moment, oldest first."""
        return self._call(lambda: tuple(connection_snapshot(session) for session in self._server.sessions))

    def channels(self) -> tuple[ChannelSnapshot, ...]:
        """All open channels at this moment: which are flowed, by which queues, how often, for how long."""
        return self._call(lambda: tuple(channel_snapshot(channel) for channel in self._channels()))

    def producers(self) -> tuple[ChannelSnapshot, ...]:
        """The channels that publish, or said that they will by selecting confirms or transactions."""
        return tuple(channel for channel in self.channels() if channel.is_producer)

    def exchanges(self) -> tuple[ExchangeSnapshot, ...]:
        """All exchanges at this moment, the default exchange first."""
        return self._call(
            lambda: tuple(exchange_snapshot(exchange) for exchange in self._host.topology.exchanges.values())
        )

    def bindings(self) -> tuple[BindingSnapshot, ...]:
        """All bindings at this moment, by exchange."""
        return self._call(
            lambda: tuple(
                binding
                for exchange in self._host.topology.exchanges.values()
                for binding in binding_snapshots(exchange)
            )
        )

    @property
    def producers_stopped(self) -> bool:
        """Whether an operator has stopped all producers, those to come too (D5)."""
        return self._controls.producers_stopped

    @property
    def version(self) -> int:
        """Goes up whenever anything has happened."""
        return self._runner.version

    def messages(self, queue: str) -> tuple[BrokerMessage, ...]:
        """Copies of all messages in a queue, ready and unacked, in its order.

        Args:
            queue: its name.

        Raises:
            ChannelException: 404; there is no such queue.
        """
        return self._call(lambda: self._copies(self._host.queue(queue).contents.oldest_first()))

    def _copies(self, entries: Iterable[QueueEntry]) -> tuple[BrokerMessage, ...]:
        """Copies of messages; the bodies that are not in memory are read here and now."""
        found = tuple(entries)
        records = [each.message.record for each in found if each.message.body is None]
        numbers = [record.number for record in records if record is not None]
        bodies = self._disk.read_now(numbers) if numbers and self._disk is not None else {}
        copies = []
        for each in found:
            record = each.message.record
            body = each.message.body if record is None or each.message.body is not None else bodies.get(record.number)
            # A body that is damaged on disk is reported in the log.
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
        """Wait for something to become true; it is looked at again whenever the broker's state has changed.

        Args:
            predicate: takes the broker; runs on the calling thread.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true; the text says what the broker looked like.
            RuntimeError: called in a task, as in an async test, or on the broker's loop, which it would block; there,
                use `wait_until_async`.
        """
        self._runner.wait_until(lambda: predicate(self), self._describe, timeout)

    async def wait_until_async(self, predicate: Callable[[Self], object], timeout: float = 30.0) -> None:
        """`wait_until` for the loop that the broker runs on, or any other.

        Args:
            predicate: takes the broker.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true; the text says what the broker looked like.
        """
        await self._runner.wait_until_async(lambda: predicate(self), self._describe, timeout)

    async def wait_until_durable_async(self, *, topology_only: bool = False) -> None:
        """Wait until all that was done so far, and is to survive, is on disk; at once without a store.

        For the loop that the broker runs on, where nothing but this can wait, or any other.

        Args:
            topology_only: whether only what was done to queues, exchanges and bindings is waited for.

        Raises:
            StoreError: the broker has ended before.
        """
        disk = self._disk
        if disk is not None:
            when_durable = partial(disk.when_durable, topology_only=topology_only)
            await asyncio.wrap_future(self._call(when_durable, changes=True))

    def _describe(self) -> str:
        """What it looks like: queues and channels, each on a line."""
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
        """Make a queue, or find the one that was declared alike.

        Args:
            name: empty for one of the broker's choice.
            arguments: thresholds and the like.
            durable: as in ``Queue.Declare``.
            auto_delete: as in ``Queue.Declare``.

        Returns:
            The queue as it is now.

        Raises:
            ChannelException: 406; it exists otherwise, or arguments are refused.
        """

        def declare() -> QueueSnapshot:
            queue = self._host.declare_queue(name, durable=durable, auto_delete=auto_delete, arguments=arguments)
            return queue_snapshot(queue)

        return self._call(declare, changes=True, lasts=True)

    def delete_queue(self, name: str) -> int:
        """Delete a queue.

        Args:
            name: of the queue.

        Returns:
            How many messages were ready in it.

        Raises:
            ChannelException: 404; there is none.
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
        """Make an exchange, or find the one that was declared alike.

        Args:
            name: of the exchange.
            type: of the exchange.
            arguments: such as ``alternate-exchange``.
            durable: as in ``Exchange.Declare``.
            auto_delete: as in ``Exchange.Declare``.
            internal: as in ``Exchange.Declare``.

        Returns:
            The exchange as it is now.

        Raises:
            ChannelException: 403; a name that is reserved. 406; it exists otherwise.
            ConnectionException: 503; there is no such type.
        """

        def declare() -> ExchangeSnapshot:
            exchange = self._host.topology.declare_exchange(
                name, type, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
            )
            return exchange_snapshot(exchange)

        return self._call(declare, changes=True, lasts=True)

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange with its bindings.

        Args:
            name: of the exchange.

        Raises:
            ChannelException: 403; every broker has it, and it stays. 404; there is none.
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
        """Bind a queue or an exchange to an exchange; once more changes nothing.

        Args:
            source: the exchange.
            destination: the queue, or the exchange.
            routing_key: the binding key.
            destination_type: which of them.
            arguments: for headers exchanges.

        Raises:
            ChannelException: 403; the default exchange. 404; there is no such queue or exchange. 406; arguments that
                the exchange cannot use.
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
        """Undo `bind`; a binding that does not exist is no error.

        Args:
            source: the exchange.
            destination: the queue, or the exchange.
            routing_key: the binding key.
            destination_type: which of them.
            arguments: as they were given.

        Raises:
            ChannelException: 403; the default exchange. 404; there is no such queue or exchange.
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
            queue: its name.

        Returns:
            How many there were.

        Raises:
            ChannelException: 404; there is no such queue.
        """
        return self._call(lambda: self._host.queue(queue).purge(), changes=True)

    def get(self, queue: str) -> BrokerMessage | None:
        """Take one message from a queue; it has left the queue then.

        Args:
            queue: its name.

        Returns:
            The message; ``None`` if none is ready.

        Raises:
            ChannelException: 404; there is no such queue.
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
        """Publish a message from inside the broker, which no flow state holds.

        It returns when the message is in its queues, which with a store is before it is on disk:
        `wait_until_durable_async` waits for that.

        Args:
            body: the content.
            routing_key: the queue's name for the default exchange.
            exchange: where to.
            properties: the basic properties; ``None`` for none.

        Returns:
            In how many queues it is now.

        Raises:
            ChannelException: 404; there is no such exchange. 506; a queue refuses it.
            TypeError: a body that is not bytes.
        """
        if not isinstance(body, bytes):
            raise TypeError(f"body must be bytes, not {type(body).__name__}: {body!r:.40}")
        return self._call(lambda: self._host.publish(exchange, routing_key, body, properties), changes=True)

    # Steering.

    @staticmethod
    def _named(what: str, found: Iterable[_Named], name: str | None) -> list[_Named]:
        """Those with a name, or all; there must be one with that name."""
        found = list(found)
        picked = [each for each in found if name is None or each.name == name]
        if name is not None and not picked:
            names = ", ".join(each.name for each in found) or "none"
            raise LookupError(f"there is no {what} {name!r}; there are: {names}")
        return picked

    def flow(self, active: bool, channel: str | None = None) -> None:
        """Stop or start producers, as an operator (D5); queues keep their holds.

        Returns before the clients have read it.

        Args:
            active: ``False`` flows, ``True`` lets go.
            channel: the name of one channel, of any kind; ``None`` for all that publish, and those that come to it
                later.

        Raises:
            LookupError: there is no such channel.
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
        """Send ``Connection.Blocked`` to clients that announced they understand.

        It is a notice only: the broker goes on taking what is published.

        Args:
            reason: for the client.
            connection: the name of one connection; ``None`` for all, and those that come later.

        Raises:
            LookupError: there is no such connection.
        """

        def change() -> None:
            if connection is None:
                self._controls.alarms[Controls.OPERATOR] = reason
            for session in self._named("connection", self._server.sessions, connection):
                session.block(reason, Controls.OPERATOR)

        self._call(change, changes=True)

    def unblock(self, connection: str | None = None) -> None:
        """Take `block` back.

        Args:
            connection: the name of one connection; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """

        def change() -> None:
            if connection is None:
                self._controls.alarms.pop(Controls.OPERATOR, None)
            for session in self._named("connection", self._server.sessions, connection):
                session.unblock(Controls.OPERATOR)

        self._call(change, changes=True)

    @property
    def alarms(self) -> dict[str, str]:
        """What blocks all connections, with the reason that clients are told: alarms, and ``operator`` for `block`."""
        return self._call(lambda: dict(self._controls.alarms))

    def raise_alarm(self, name: str, reason: str) -> None:
        """Send ``Connection.Blocked``, as RabbitMQ does when memory or disk space runs out.

        Clients that announced that they understand get it once, by the alarm that was raised first, and again when
        the last of several alarms is cleared.

        Args:
            name: of the alarm, such as ``"memory"`` or ``"disk"``; one that is raised already gets the new reason.
            reason: for clients that come later, or know of no alarm.

        Raises:
            ValueError: the name is empty, or `block`'s own.
        """
        if not name or name == Controls.OPERATOR:
            raise ValueError(
                f"an alarm must have a name, and not {Controls.OPERATOR!r}, which is for block(): {name!r}"
            )

        def change() -> None:
            self._controls.alarms[name] = reason
            for session in self._server.sessions:
                session.block(reason, name)

        self._call(change, changes=True)

    def clear_alarm(self, name: str) -> None:
        """Take `raise_alarm` back; one that is not raised changes nothing.

        Args:
            name: of the alarm.
        """

        def change() -> None:
            if name != Controls.OPERATOR:
                self._controls.alarms.pop(name, None)
                for session in self._server.sessions:
                    session.unblock(name)

        self._call(change, changes=True)

    @property
    def sanctions(self) -> dict[str, int]:
        """How often clients that do not listen were tarpitted, and lost a channel or their connection (D8)."""
        return self._call(lambda: dict(self._controls.sanctions))

    def withhold_confirms(self, queue: str | None = None) -> None:
        """Keep all acks of publishes back from now on; the messages are enqueued all the same.

        Args:
            queue: only of messages that go to this queue; ``None`` for all.

        Raises:
            ChannelException: 404; there is no such queue.
        """

        def change() -> None:
            if queue is None:
                self._controls.withhold_confirms = True
            else:
                self._host.queue(queue).withhold()
                self._host.router.version += 1

        self._call(change, changes=True)

    def release_confirms(self, queue: str | None = None) -> None:
        """Send the acks that were kept back, and go on sending them.

        Args:
            queue: only of messages that went to this queue; ``None`` for all, those kept for one queue too.

        Raises:
            ChannelException: 404; there is no such queue.
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
        """Refuse publishes while on: ``Basic.Nack`` in confirm mode, otherwise the channel is closed with 506.

        Args:
            on: ``False`` takes them again.
            queue: only what goes to this queue; ``None`` for everything, and ``False`` then lifts it for every queue.

        Raises:
            ChannelException: 404; there is no such queue.
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
            channel: the name of one channel; ``None`` for all.

        Raises:
            LookupError: there is no such channel.
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
            connection: the name of one connection; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """

        def change() -> None:
            for session in self._named("connection", self._server.sessions, connection):
                session.fail(code, text, self._server.clock())

        self._call(change, changes=True)

    def drop_connections(self, connection: str | None = None) -> None:
        """Cut connections without a word, as a crash would.

        Args:
            connection: the name of one connection; ``None`` for all.

        Raises:
            LookupError: there is no such connection.
        """

        def change() -> None:
            for each in self._named("connection", tuple(self._server.connections), connection):
                each.abort()

        self._call(change, changes=True)
