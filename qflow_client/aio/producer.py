"""`AsyncProducer` publishes messages from asyncio tasks.

`AsyncProducer` checks the arguments of calls, and admits a message immediately if there is room. The producer's
`Engine` connects, waits, writes and closes. `BaseProducer` has the common part of `Producer` and `AsyncProducer`.
"""

from __future__ import annotations

import sys
import time
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from threading import get_ident
from types import coroutine
from typing import Any, Self, Unpack

import aio_pika

from qflow_client.aio.connection import TappedConnection, TappedRobustConnection
from qflow_client.aio.engine import Engine
from qflow_client.aio.flow_events import FlowEvents
from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.aio.turn import Waiter
from qflow_client.core import calls
from qflow_client.credentials import Credentials
from qflow_client.errors import ProducerClosed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import LOOPS
from qflow_client.manager import flow_manager
from qflow_client.message import Message
from qflow_client.position import Position
from qflow_client.producer import CONNECT_FIRST, BaseProducer, resolve, split
from qflow_client.receipt import Receipt
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, SettingsKeywords, check_timeout
from qflow_client.skin import (
    DEFAULT,
    check_arguments,
    check_many,
    close_deadline,
    deadline_of,
    keep_admitted,
    keeping,
    limit_of,
    report_undelivered,
)
from qflow_client.topology import Queue, Topology

__all__ = ["AsyncProducer"]

# After this number of messages, `send_many` waits until they are on disk in the outbox.
_AT_ONCE = 500
# In Python 3.11, `_get_running_loop` makes a system call, which takes a tenth of the time of `send`.
_ASKING_IS_SLOW = sys.version_info < (3, 12)

_monotonic = time.monotonic


class AsyncProducer(BaseProducer[AsyncReceipt]):
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Tasks can share a producer.

    A producer connects once, when ``async with`` is entered or `connect` is called. A producer belongs to the loop in
    which it connects. In another running loop, the methods that wait raise `WrongLoop`, because the producer cannot
    wake tasks of that loop. Any thread may call `send_nowait`, `pause` and `resume`, and use the manager. An
    ``async with`` block closes the producer at its end. A connected producer that the application drops without closing
    issues a `ResourceWarning`, delivers the admitted messages, and then disconnects.

    If an exception leaves the ``async with`` block, closing does not wait during the holds ``channel_flow``,
    ``connection_blocked``, ``disconnected`` and ``refused``. During the holds ``capacity`` and ``transport``, closing
    waits only while the broker still answers. Without any of these six holds, closing waits like `close`. Undelivered
    messages are logged, and the exception gets a note and the attribute ``undelivered``, an `UndeliveredMessages`.

    Args:
        url: URL of the broker, or several URLs to try one after the other.
        connection: a connection from `connect_async` for the producer's channel; ``None`` for its own connection.
        on_delivery: called on the loop with every settled receipt. `flush` and `close` do not report these receipts
            again. A message that the callback sends with `send_nowait` goes before waiting messages.
        on_flow: called with every flow event, even while connecting. The method `on_flow` adds further callbacks.
        declare: what to declare before each opening of the channel: a `Topology`, a `Queue`, or a queue name. A
            name declares a durable queue if there is no queue of that name. ``None`` declares nothing.
        credentials: returns the `Credentials` for the login. The function is called before each attempt to connect. A
            coroutine function runs in the loop. Any other function is called on a separate thread, and may return an
            awaitable. `connect_timeout` includes the time of this call. If the function raises an error, the attempt to
            connect fails. The function is called again before the credentials expire, and the broker gets the new
            credentials (``Connection.UpdateSecret``). With ``None`` the producer uses the credentials of the URL.
        settings: the settings. A setting in `keywords` replaces the value in `settings`.
        line: order of waiting calls of `send`, such as a `WeightedLine`; by default first come, first served (F4). Each
            producer needs a line of its own.
        manager: can stop and start all of its producers together; by default the manager of the process.
        keywords: settings by name, see `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was not made by `connect_async`.
        ValueError: another open producer uses `line`.
    """

    _engine: Engine

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        connection: aio_pika.abc.AbstractConnection | None = None,
        on_delivery: Callable[[Receipt], object] | None = None,
        on_flow: Callable[[FlowEvent], object] | None = None,
        declare: Topology | Queue | str | None = None,
        credentials: Callable[[], Credentials | Awaitable[Credentials]] | None = None,
        settings: ProducerSettings | None = None,
        line: Line | None = None,
        manager: FlowManager = flow_manager,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        loaded = ProducerSettings.load(url, settings, **keywords)
        super().__init__(loaded, manager)
        check_arguments(url, connection, on_delivery, on_flow, manager, declare, credentials)
        if connection is not None and not isinstance(connection, (TappedConnection, TappedRobustConnection)):
            raise SettingsError(
                f"connection={shown(connection)}: make it with qflow_client.connect_async(url); on any other "
                "connection aio-pika reads Channel.Flow and confirms before the producer can"
            )
        self._use_engine(Engine(loaded, on_delivery, manager, connection, line, Topology.of(declare), credentials))
        if on_flow is not None:
            self.on_flow(on_flow)

    async def connect(self) -> Self:
        """Connect and open the channel. ``async with`` calls this method.

        Returns:
            The producer.

        Raises:
            ConnectionFailed: connecting failed with every host. After this error, the producer is closed.
            OutboxInUse, OutboxError: the outbox is in use or cannot be used. After this error, the producer is closed.
            ProducerClosed: the producer was closed before or during this call.
            QflowError: the method was called before, or no event loop of asyncio is running.
        """
        await self._engine.open(self._connected)
        return self

    def _connected(self) -> None:
        """Called by the engine when the producer is connected. If this method raises an error, the engine ends."""
        engine = self._engine
        assert engine.observer is not None
        self._tracer = engine.observer.tracer
        self._end_with(engine)
        self._manager.register(self)

    # Sending.

    async def send(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
        position: Position | None = None,
    ) -> AsyncReceipt:
        """Admit a message. Wait while the producer is blocked (flowed) (J7 A4 D1).

        If the call is cancelled before the message is admitted, the message will not be sent. If the message was
        admitted before the cancel, it will be sent. `on_delivery`, `flush` or `close` reports a failed delivery.

        Args:
            message: the body, or a `Message` with properties.
            exchange: the exchange; by default the exchange of a `RoutedMessage`, or the setting for other messages.
            routing_key: the routing key; by default the key of a `RoutedMessage`, or the setting for other messages.
            timeout: the longest wait in seconds; ``None`` for no limit, 0 for no wait. The default is the setting
                `max_producer_flow_control_wait`. With an outbox, the call can take up to 0.5 s longer, because it waits
                until the message is on disk.
            source: a name for the origin of the message. A `WeightedLine` uses this name.
            position: how far the application has read its own input, for example a file; ``None`` for no position. The
                outbox stores message and position in one commit (E13), before the message is written to the broker.

        Returns:
            The receipt, when the message is admitted, and on disk if there is an outbox. The confirm comes later.

        Raises:
            FlowControlTimeout: the producer is still flowed after `timeout`; the message was not and will not be sent.
            ProducerFlowed: the producer is flowed, and `when_flowed` is ``"raise"``; the message was not sent.
            ProducerClosed: the producer was never connected, is closed, or cannot connect again, or its loop is closed;
                the message was not sent.
            WrongLoop: the producer belongs to another event loop; the message was not sent.
            OutboxFull: the outbox has no room; the message was not sent.
            NotDurable: the message is admitted, but was not written to disk in time, or the disk failed.
            SettingsError: a position is given, but there is no outbox; the message was not sent.
            TypeError: the message has a type that is not accepted, or `timeout` is not a number.
            ValueError: the message cannot be encoded, or `timeout` is NaN.
        """
        if timeout is not DEFAULT and timeout != 0:
            check_timeout(timeout)
        payload: Any = message
        if type(message) is not bytes:
            payload, exchange, routing_key = resolve(message, exchange, routing_key)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        engine = self._engine
        if (
            engine.thread != get_ident() or not engine.loop.is_running()  # type: ignore[union-attr]  # it has a thread
            if _ASKING_IS_SLOW
            else engine.loop is not _get_running_loop()
        ):
            engine.check_loop(payload, exchange, routing_key)
        if position is not None or (self._tracer is not None and self._tracer.wants(payload)):
            with self._extended(payload, exchange, routing_key, position) as extended:
                return await self.send(
                    extended, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                )
        try:
            receipt = engine.protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                link = engine.link
                # A signal handler may send before `connect` has set the link. In this case `connect` wakes the writer.
                if link is not None and not link.writer.awake:  # type: ignore[union-attr]  # admitted, so there is a writer
                    link.writer.wake()  # type: ignore[union-attr]  # likewise
                return receipt  # type: ignore[return-value]  # the protocol makes receipts of this class
        except BaseException:
            # A signal handler may have raised an error, such as KeyboardInterrupt, before the call of `wake`.
            engine.recheck()
            raise
        timeout = limit_of(timeout, self.settings)
        deadline = deadline_of(timeout)
        cannot_wait = self._cannot_wait(timeout)
        admitted = self._admit("send()", payload, exchange, routing_key, deadline, cannot_wait, spills=True)
        if admitted is None:
            assert engine.turns is not None
            _ticket, call = engine.turns.begin(payload, exchange, routing_key, timeout, source)
            admitted = await call
        await engine.made_durable(admitted, deadline)
        return admitted  # type: ignore[return-value]  # as above

    async def send_many(
        self,
        messages: Iterable[bytes | str | Message | tuple[bytes | str | Message, Position]],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[AsyncReceipt]:
        """Call `send` for every message, in order.

        An exception of this method or of the iterable has an attribute ``receipts``: a tuple with the receipts of the
        admitted messages. A `CancelledError` also has this attribute. After `NotDurable`, the last receipt belongs to
        the message that is not on disk. No further message was taken from the iterable.

        Args:
            messages: messages as for `send`, or pairs of a message and its position.
            exchange: the exchange, as for `send`.
            routing_key: the routing key, as for `send`.
            timeout: the longest wait of each message in seconds, as for `send`.
            source: a name for the origin of the messages, as for `send`.

        Returns:
            The receipts of all messages, as soon as the last message is admitted.

        Raises:
            FlowControlTimeout, ProducerFlowed, ProducerClosed, WrongLoop, OutboxFull, NotDurable: as for `send`.
            SettingsError, TypeError, ValueError: as for `send`.
        """
        check_many(messages, timeout)
        receipts: list[AsyncReceipt] = []
        self._engine.check_loop()
        with keeping(receipts):
            if self._engine.storage is not None and self._tracer is None:
                # Import this module only for an outbox, because it loads SQLite.
                from qflow_client.storing import store_many

                await coroutine(store_many)(
                    self,
                    messages,
                    receipts,
                    limit_of(timeout, self.settings),
                    {"exchange": exchange, "routing_key": routing_key, "source": source},
                    at_once=_AT_ONCE,
                    wait_durable=self._engine.made_durable,
                    run=lambda function, *arguments, **named: function(*arguments, **named).__await__(),
                )
                return receipts
            for each in messages:
                message, position = split(each) if isinstance(each, tuple) else (each, None)
                try:
                    receipt = await self.send(
                        message,
                        exchange=exchange,
                        routing_key=routing_key,
                        timeout=timeout,
                        source=source,
                        position=position,
                    )
                except Exception as error:
                    keep_admitted(error, receipts)
                    raise
                receipts.append(receipt)
        return receipts

    # Waiting.

    async def flush(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all messages that were admitted before this call are settled.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit. By default `max_producer_flow_control_wait`.

        Raises:
            ConfirmTimeout: some messages are not settled after `timeout`; their outcome is not known yet.
            UndeliveredMessages: all messages are settled, but some were not delivered, and no call has reported them.
            ProducerClosed: the producer was made before this process was forked, or its loop is closed.
            WrongLoop: the producer belongs to another event loop.
        """
        if self._engine.is_copy:
            raise ProducerClosed(str(self._protocol.closed))
        self._engine.check_loop()
        timeout = limit_of(timeout, self.settings)
        waiter = Waiter()
        if not await self._engine.drive(calls.flush(self._protocol, waiter, deadline_of(timeout)), waiter):
            raise self._engine.unflushed(timeout)
        failures, dropped = LOOPS.take(self._engine.take_failures)
        if failures or dropped:
            raise UndeliveredMessages(failures, dropped=dropped)

    async def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until there are no holds.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Returns:
            True if there are no holds; False after the timeout.

        Raises:
            ProducerClosed: the producer or its loop is closed, or the producer was never connected.
            WrongLoop: the producer belongs to another event loop.
        """
        check_timeout(timeout)
        if self._engine.loop is None and not self._engine.ended:
            raise ProducerClosed(CONNECT_FIRST)
        self._engine.check_loop()
        waiter = Waiter()
        return await self._engine.drive(
            calls.wait_unflowed(self._protocol, waiter, deadline_of(timeout), _monotonic()), waiter
        )

    def flow_events(self, *, kinds: Iterable[str] | None = None) -> AsyncIterator[FlowEvent]:
        """Return an iterator over all later flow events. The iterator ends when the producer is closed.

        If more than `max_flow_events` events wait for the reader, the oldest events are dropped.

        Args:
            kinds: as for `on_flow`.
        """
        events = FlowEvents(self.name, self.settings.max_flow_events, self._engine.check_loop)
        self._add_events(events, kinds)
        if self._engine.loop is not None and self._engine.loop.is_closed():
            # In a closed loop there are no more events, and `close` cannot end the iteration.
            events.put(None)
        return events

    # Closing.

    async def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and close the channel. If the connection belongs to the producer, close the connection too.

        The call returns within a second after the timeout, even if the broker or the network does not answer. A second
        call only waits until the first call ends. If the first call is cancelled, the producer no longer waits for
        confirms, and aborts the connection. The unsettled messages are logged, and are in the attribute ``undelivered``
        of the `asyncio.CancelledError`. The call raises this error when the producer has ended, within a second.

        Args:
            timeout: maximum seconds to wait for unsettled messages; ``None`` for no limit. By default `close_timeout`.

        Raises:
            UndeliveredMessages: some messages were not delivered, and no earlier call has reported them.
            WrongLoop: the producer belongs to another event loop.
        """
        undelivered = await self._engine.close(close_deadline(timeout, self.settings))
        if undelivered is not None:
            raise undelivered

    async def __aenter__(self) -> Self:
        if self._engine.loop is None:
            await self.connect()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            await self.close()
        else:
            deadline = close_deadline(DEFAULT, self.settings)
            report_undelivered(self.settings.name, error, await self._engine.close(deadline, waits_for_holds=False))
