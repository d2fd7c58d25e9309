"""The broker that embeds: start and stop, look and steer, from any thread or from its own event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack, cast
from urllib.parse import quote

import pamqp.commands

from qflow_client.broker.channel import Channel
from qflow_client.broker.controls import Controls
from qflow_client.broker.errors import ReplyCode
from qflow_client.broker.server import Server
from qflow_client.broker.settings import BrokerOptions, BrokerSettings
from qflow_client.broker.snapshots import (
    BrokerMessage,
    ChannelSnapshot,
    ConnectionSnapshot,
    QueueSnapshot,
    channel_snapshot,
    connection_snapshot,
    message_copy,
    queue_snapshot,
)
from qflow_client.broker.virtualhost import VirtualHost

__all__ = ["Broker"]

_Result = TypeVar("_Result")


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=_HasName)


class Broker:
    """An AMQP 0-9-1 broker in this process.

    ``with Broker() as broker:`` runs it on a thread and an event loop of its own, ``async with Broker() as broker:`` on
    the running loop. Its methods may be called from any thread, and from the loop it runs on. A broker runs once.

    Args:
        **options: see `BrokerSettings`.

    Raises:
        TypeError: a setting of the wrong type, or one that does not exist.
        ValueError: a setting that is not allowed; the text names it, its value and what is allowed.
    """

    def __init__(self, **options: Unpack[BrokerOptions]) -> None:
        #: What it was given, and the defaults.
        self.settings = BrokerSettings(**cast(dict[str, Any], options))
        self._host = VirtualHost(self.settings)
        self._controls = Controls()
        self._server = Server(self.settings, self._host, self._controls, self._on_change)
        self._port: int | None = None
        # The loop it runs on, and the thread of that loop; None before and after. Held: no call comes to the loop while
        # it is being taken away, or that call would be waited for without end.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._loop_lock = threading.RLock()
        # Only set in `with`: the thread that runs the loop.
        self._thread: threading.Thread | None = None
        # Only set in `with`: done when that thread may end.
        self._stopped: asyncio.Future[None] | None = None
        # Goes up whenever anything has happened; guarded by the condition.
        self._version = 0
        self._changed = threading.Condition()
        self._async_waiters: set[asyncio.Future[None]] = set()

    # Starting and stopping.

    def __enter__(self) -> Self:
        self._check_fresh()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="qflow-broker", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop, thread = self._loop, self._thread
        assert thread is not None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), loop).result()
        thread.join()

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

    def _run(self, started: Future[None]) -> None:
        async def main() -> None:
            try:
                await self._start()
            except BaseException as error:
                started.set_exception(error)
                return
            self._stopped = asyncio.get_running_loop().create_future()
            started.set_result(None)
            await self._stopped

        asyncio.run(main())

    async def _start(self) -> None:
        self._port = await self._server.start()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    async def _stop(self) -> None:
        await self._server.stop()
        with self._loop_lock:
            self._loop = None
        self._on_change()
        if self._stopped is not None:
            self._stopped.set_result(None)

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
        """An AMQP URL with the first user's name and password."""
        user, password = next(iter(self.settings.users.items()))
        scheme = "amqp" if self.settings.ssl_context is None else "amqps"
        host = "127.0.0.1" if self.settings.host in ("", "0.0.0.0") else self.settings.host
        host = f"[{host}]" if ":" in host else host
        names = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"{scheme}://{names}@{host}:{self.port}/{quote(self.settings.virtual_host, safe='')}"

    # From other threads.

    def _call(self, function: Callable[[], _Result], *, changes: bool = False) -> _Result:
        """Run something on the broker's loop; here and now if this is it, or if there is none."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                done.set_exception(error)
            else:
                if changes:
                    self._server.touch()
                done.set_result(result)

        with self._loop_lock:
            loop = self._loop if threading.get_ident() != self._loop_thread else None
            if loop is not None:
                loop.call_soon_threadsafe(run)
        if loop is None:
            run()
        return done.result()

    def _on_change(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        for waiter in tuple(self._async_waiters):
            if not waiter.done():
                waiter.set_result(None)

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
        """All open channels at this moment: who is flowed, by which queues, how often, for how long."""
        return self._call(lambda: tuple(channel_snapshot(channel) for channel in self._channels()))

    def producers(self) -> tuple[ChannelSnapshot, ...]:
        """The channels that publish, or said that they will by selecting confirms or transactions."""
        return tuple(channel for channel in self.channels() if channel.is_producer)

    def messages(self, queue: str) -> tuple[BrokerMessage, ...]:
        """Copies of all messages in a queue, ready and unacked, in its order.

        Args:
            queue: its name.

        Raises:
            ChannelException: 404; there is no such queue.
        """
        return self._call(lambda: tuple(message_copy(entry) for entry in self._host.queue(queue).oldest_first()))

    def _channels(self) -> list[Channel]:
        return [
            channel
            for session in self._server.sessions
            for channel in session.channels.values()
            if not channel.is_closing
        ]

    # Waiting.

    def wait_until(self, predicate: Callable[[Broker], object], timeout: float = 10.0) -> None:
        """Wait for something to become true; it is looked at again whenever the broker's state has changed.

        Args:
            predicate: takes the broker; runs on the calling thread.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true; the text says what the broker looked like.
            RuntimeError: called on the broker's own loop, which it would block; there, use `wait_until_async`.
        """
        if self._loop is not None and threading.get_ident() == self._loop_thread:
            raise RuntimeError(
                "wait_until would block the loop that the broker runs on; await wait_until_async instead"
            )
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                version = self._version
            if predicate(self):
                return
            if not self._await_change(version, end):
                raise TimeoutError(self._not_reached(timeout))

    def _await_change(self, version: int, end: float) -> bool:
        """Wait until anything has happened since a version; ``False`` if it is `end` first, or already."""
        with self._changed:
            left = end - time.monotonic()
            return left > 0 and self._changed.wait_for(lambda: self._version != version, left)

    async def wait_until_async(self, predicate: Callable[[Broker], object], timeout: float = 10.0) -> None:
        """`wait_until` for the loop that the broker runs on, or any other.

        Args:
            predicate: takes the broker.
            timeout: seconds.

        Raises:
            TimeoutError: it did not become true; the text says what the broker looked like.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            await asyncio.to_thread(self.wait_until, predicate, timeout)
            return
        end = loop.time() + timeout
        while not predicate(self):
            waiter: asyncio.Future[None] = loop.create_future()
            self._async_waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, max(0.0, end - loop.time()))
            except TimeoutError:
                raise TimeoutError(self._not_reached(timeout)) from None
            finally:
                self._async_waiters.discard(waiter)

    def _not_reached(self, timeout: float) -> str:
        lines = [f"not reached within {timeout} s; the broker is at:"]
        lines += [f"  {queue}" for queue in self.queues()]
        lines += [f"  {channel}" for channel in self.channels()]
        return "\n".join(lines)

    # Queues and messages.

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

        return self._call(declare, changes=True)

    def delete_queue(self, name: str) -> int:
        """Delete a queue.

        Args:
            name: of the queue.

        Returns:
            How many messages were ready in it.

        Raises:
            ChannelException: 404; there is none.
        """
        return self._call(lambda: self._host.delete_queue(self._host.queue(name)), changes=True)

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
            return message_copy(entry) if entry is not None else None

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

        It returns when the message is in its queues.

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
        """Stop or start producers, as an operator (D5); queues go on holding whom they hold.

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
                    each.unblock(self._controls.operator)
                elif channel is not None or each.is_producer:
                    each.block(self._controls.operator)

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
                self._controls.blocked = reason
            for session in self._named("connection", self._server.sessions, connection):
                session.block(reason)

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
                self._controls.blocked = None
            for session in self._named("connection", self._server.sessions, connection):
                session.unblock()

        self._call(change, changes=True)

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
                found = self._host.queue(queue)
                if found.withheld is None:
                    found.withheld = []
                self._host.version += 1

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
            self._host.version += 1
            if queue is None:
                self._controls.withhold_confirms = False
                for session in self._server.sessions:
                    session.announce_confirms()

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
            if queue is None:
                self._controls.nack_publishes = on
            for each in self._host.queues.values() if queue is None else (self._host.queue(queue),):
                each.is_refusing = on and queue is not None
            self._host.version += 1

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
