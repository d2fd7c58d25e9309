"""`AsyncProducer`: for asyncio tasks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import aio_pika

from qflow_client import telemetry
from qflow_client.aio.connection import TappedConnection, TappedRobustConnection
from qflow_client.aio.dispatcher import refuse_coroutine_function
from qflow_client.aio.engine import Engine
from qflow_client.aio.flow_events import FlowEvents
from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.aio.turn import Waiter
from qflow_client.core import calls
from qflow_client.core.calls import CannotWait, resume
from qflow_client.credentials import Credentials
from qflow_client.errors import ProducerClosed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import LOOPS, check_can_wait
from qflow_client.manager import flow_manager
from qflow_client.message import Message
from qflow_client.position import Position
from qflow_client.producer import BaseProducer, resolve, split
from qflow_client.receipt import Receipt
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, SettingsKeywords, check_timeout
from qflow_client.skin import (
    DEFAULT,
    check_arguments,
    check_many,
    close_limit,
    deadline_of,
    keep_admitted,
    keeping,
    leave_word,
    limit_of,
    unflushed,
)
from qflow_client.topology import Queue, Topology

__all__ = ["AsyncProducer"]

_monotonic = time.monotonic

_NOT_CONNECTED = "it is not connected yet; use async with, or await connect() first"
_LOOP_CLOSED = "its event loop is closed; make a producer in the loop that runs now"


class AsyncProducer(BaseProducer):
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Any number of tasks may use one.

    It connects when ``async with`` is entered, or by `connect`, once. It belongs to the loop that it connects in, and
    only `pause`, `resume` and the manager may be called from other threads. Leaving the block closes it. One that is
    connected and dropped without being closed issues a `ResourceWarning`, delivers what was admitted, and then ends its
    connection.

    An exception that leaves the block stays the one that is raised, and waits for no hold: not at all under
    ``channel_flow`` and ``connection_blocked``, under ``capacity`` and ``transport`` only while the broker goes on
    answering, otherwise as `close` does. What was not delivered is logged, noted on the exception, and in its attribute
    ``undelivered``, an `UndeliveredMessages`.

    Args:
        url: URL of the broker, or several to try in turn.
        connection: a connection from `connect_async`, on which it opens a channel of its own; ``None`` to have a
            connection of its own.
        on_delivery: called with every receipt once it is settled, as a call scheduled on the loop. With it, `flush` and
            `close` do not bring up again what it was told. It may `send_nowait`, which then waits for no turn.
        on_flow: called with every flow event from the first on, see `on_flow`.
        declare: what it declares when it connects, and after every reconnect, before it publishes: a `Topology`, a
            `Queue`, or a name, for a durable queue if there is no queue of that name; ``None`` for nothing.
        credentials: called before each connect for the `Credentials` to log in with, and again before those expire,
            which the broker is then given (``Connection.UpdateSecret``). A coroutine function is awaited in the loop;
            any other is called on a thread of its own, and may return an awaitable. Its time is part of
            `connect_timeout`. If it raises, the try to connect has failed. ``None`` to log in as the URL says.
        settings: settings that no keyword gives.
        line: the order in which waiting sends are served; first come, first served unless given (F4). A `WeightedLine`
            tells them apart by the `source` of `send`.
        manager: where it registers, to be stopped and started with all others; the process's own unless given.
        keywords: settings by name, see `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was made elsewhere.
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
        refuse_coroutine_function("on_delivery", on_delivery)
        if connection is not None and not isinstance(connection, (TappedConnection, TappedRobustConnection)):
            raise SettingsError(
                f"connection={shown(connection)}: on a connection made elsewhere Channel.Flow and confirms cannot be "
                "taken before aio-pika gets them; make it with qflow_client.connect_async(url)"
            )
        self._use_engine(Engine(loaded, on_delivery, manager, connection, line, Topology.of(declare), credentials))
        # Set once it is connected.
        self._tracer: telemetry.Tracer | None = None
        if on_flow is not None:
            self.on_flow(on_flow)

    async def connect(self) -> Self:
        """Connect and open the channel. ``async with`` does it by itself.

        Returns:
            The producer.

        Raises:
            ConnectionFailed: no host could be connected to. The producer is closed then.
            OutboxInUse, OutboxError: the outbox is used by another producer, or cannot be used; likewise.
            ProducerClosed: it was closed before.
            QflowError: it was called before.
        """
        await self._engine.open(self._connected)
        return self

    def _connected(self) -> None:
        """Called by the engine, which ends again if anything is raised."""
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
        """Admit a message, waiting while the producer is flowed (J7 A4 D1).

        A send that is cancelled is not sent, and never will be, unless it was admitted before the cancel: then the
        message is on its way, and `on_delivery`, `flush` or `close` tell if it fails.

        Args:
            message: the body, or a `Message` with properties.
            exchange: where to publish. Unless given, it is that of a `RoutedMessage`, and otherwise the setting.
            routing_key: with which key; likewise.
            timeout: seconds that it may stay blocked; ``None`` for ever, 0 not at all; the setting
                `max_producer_flow_control_wait` unless given.
            source: whose message it is, for a `WeightedLine`.
            position: how far the source of the message has been read, stored in the same commit of the outbox (E13);
                ``None`` for none. The message is written to the broker once it is on disk.

        Returns:
            Its receipt, as soon as it is admitted, which is before the broker's confirm.

        Raises:
            FlowControlTimeout: still flowed after `timeout`; the message was not sent and never will be.
            ProducerFlowed: flowed, and `when_flowed` is ``"raise"``; likewise.
            ProducerClosed: it was closed, or lost its connection, or never had one, or its loop is closed; likewise.
            OutboxFull: with an outbox that has no room; likewise.
            NotDurable: with an outbox: the message is admitted, and not on disk after `timeout`, or the disk failed.
            SettingsError: a position, and there is no outbox; likewise.
            TypeError: the message is of another type, or `timeout` is no number.
            ValueError: it cannot be encoded, or `timeout` is NaN.
        """
        if timeout is not DEFAULT and timeout != 0:
            check_timeout(timeout)
        payload: Any = message
        if type(message) is not bytes:
            payload, exchange, routing_key = resolve(message, exchange, routing_key)
        if position is not None:
            with self._stored_with(payload, position) as carried:
                return await self.send(
                    carried, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                )
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._engine.loop is not None and self._engine.loop.is_closed() and not self._engine.ended:
            # Nothing would ever write it.
            raise ProducerClosed(_LOOP_CLOSED, payload, exchange=exchange, routing_key=routing_key)
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return await self.send(
                    traced, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                )
        try:
            receipt = self._engine.protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                tapped = self._engine.link.tapped  # type: ignore[union-attr]  # it is open, or nothing would be admitted
                if not tapped.awake:  # type: ignore[union-attr]  # likewise
                    tapped.wake()  # type: ignore[union-attr]  # likewise
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        except BaseException:
            # An exception that a signal handler raises, such as KeyboardInterrupt, may have come before the wake.
            self._engine.recheck()
            raise
        check_can_wait("send()", payload, exchange, routing_key)
        timeout = limit_of(timeout, self.settings)
        deadline = deadline_of(timeout)
        receipt = self._engine.admit(payload, exchange, routing_key, spills=True)
        if receipt is None:
            if self._engine.turns is None:
                raise self._not_connected(payload, exchange, routing_key)
            cannot_wait = self._cannot_wait_in_send(timeout)
            if cannot_wait is None:
                receipt = await self._engine.turns.send(payload, exchange, routing_key, timeout, source)
            else:
                receipt = self._refuse(payload, exchange, routing_key, cannot_wait)
        return await self._made_durable(receipt, deadline)

    def _refuse(self, payload: bytes | Message, exchange: str, routing_key: str, cannot_wait: CannotWait) -> Receipt:
        """Refuse a message that was not admitted, unless a callback sends it."""
        if self._engine.dispatcher is None:
            raise self._not_connected(payload, exchange, routing_key)
        if not self._engine.is_in_callback:
            self._engine.arm_timer()
            raise self._refused(payload, exchange, routing_key, cannot_wait)
        ticket = self._make_ticket(payload, exchange, routing_key, 0.0, "", Waiter())
        try:
            _, receipt = self._engine.try_step(
                lambda _protocol: resume(self._send_call(ticket, cannot_wait, notices=False), None)
            )
        except BaseException:
            self._engine.ask(lambda protocol: protocol.line.give_up(ticket, _monotonic()))
            raise
        finally:
            self._engine.arm_timer()
        assert receipt is not None
        return receipt

    async def _made_durable(self, receipt: Receipt, deadline: float) -> AsyncReceipt:
        """Return the receipt once its message is on disk, if there is an outbox."""
        await self._engine.made_durable(receipt, deadline)
        return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make

    def send_nowait(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        source: str = "",
        position: Position | None = None,
    ) -> AsyncReceipt:
        """As `send`, but never wait; not to be awaited itself.

        With an outbox it keeps the loop for as long as it takes to have the message on disk.

        Args:
            message: the body, or a `Message` with properties.
            exchange: where to publish. Unless given, it is that of a `RoutedMessage`, and otherwise the setting.
            routing_key: with which key; likewise.
            source: as in `send`; what does not wait has no turn, so it changes nothing.
            position: as for `send`.

        Raises:
            ProducerFlowed: flowed; the message was not sent and never will be.
        """
        payload: Any = message
        if type(message) is not bytes:
            payload, exchange, routing_key = resolve(message, exchange, routing_key)
        if position is not None:
            with self._stored_with(payload, position) as carried:
                return self.send_nowait(carried, exchange=exchange, routing_key=routing_key, source=source)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._engine.loop is not None and self._engine.loop.is_closed() and not self._engine.ended:
            # Nothing would ever write it.
            raise ProducerClosed(_LOOP_CLOSED, payload, exchange=exchange, routing_key=routing_key)
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return self.send_nowait(traced, exchange=exchange, routing_key=routing_key)
        receipt: Receipt | None = None
        if self._engine.storage is None:
            try:
                receipt = self._engine.protocol.admission.send_at_once(payload, exchange, routing_key)
                if receipt is not None:
                    if not self._engine.link.tapped.awake:  # type: ignore[union-attr]  # it is open, or nothing would be admitted
                        self._engine.link.tapped.wake()  # type: ignore[union-attr]  # likewise
                    return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
            except BaseException:
                # As in `send`.
                self._engine.recheck()
                raise
        check_can_wait("send_nowait()", payload, exchange, routing_key)
        receipt = self._engine.admit(payload, exchange, routing_key)
        if receipt is None:
            receipt = self._refuse(payload, exchange, routing_key, self._cannot_wait_in_send_nowait())
        if self._engine.storage is not None:
            self._engine.storage.wait_durable(receipt, _monotonic())
        return receipt  # type: ignore[return-value]  # as above

    async def send_many(
        self,
        messages: Iterable[bytes | str | Message | tuple[bytes | str | Message, Position]],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[AsyncReceipt]:
        """`send` every message, in order, each as if it were alone.

        Whatever is raised, also by the iterable and by a cancel, has in its attribute ``receipts`` those of the
        messages before it: they were admitted, and are on their way. After `NotDurable` the last of them is that of the
        message itself, which was admitted, too. No message after that one was taken from the iterable.

        Args:
            messages: as for `send`; or pairs of a message and its position.
            exchange: where to publish, as for `send`.
            routing_key: with which key, as for `send`.
            timeout: seconds that each may stay blocked, as for `send`.
            source: whose messages they are, for a `WeightedLine`.

        Returns:
            Their receipts, once the last one is admitted.

        Raises:
            FlowControlTimeout, ProducerFlowed, ProducerClosed, SettingsError, TypeError, ValueError: as `send`.
        """
        check_many(messages, timeout)
        receipts: list[AsyncReceipt] = []
        if self._engine.loop is not None and self._engine.loop.is_closed() and not self._engine.ended:
            raise ProducerClosed(_LOOP_CLOSED)
        with keeping(receipts):
            if self._engine.storage is not None and self._tracer is None:
                # It brings SQLite with it.
                from qflow_client.aio.outbox import store_many

                options: Any = {"exchange": exchange, "routing_key": routing_key, "source": source}
                return await store_many(self, messages, receipts, limit_of(timeout, self.settings), options)
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

    @staticmethod
    def _not_connected(
        payload: bytes | Message | None = None, exchange: str | None = None, routing_key: str | None = None
    ) -> ProducerClosed:
        return ProducerClosed(_NOT_CONNECTED, payload, exchange=exchange, routing_key=routing_key)

    # Waiting.

    async def flush(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all that was admitted before is settled.

        Args:
            timeout: seconds; ``None`` for ever; the setting `max_producer_flow_control_wait` unless given.

        Raises:
            ConfirmTimeout: some is not; its outcome is not known yet.
            UndeliveredMessages: all is settled, and some of it, of which nobody has been told, was not delivered.
            ProducerClosed: it was made before this process was forked.
        """
        if self._engine.is_copy:
            raise ProducerClosed(str(self._protocol.closed))
        timeout = limit_of(timeout, self.settings)
        waiter = Waiter()
        if not await self._engine.drive(calls.flush(self._protocol, waiter, deadline_of(timeout)), waiter):
            raise unflushed(self._protocol, self._engine.storage, timeout)
        failures, dropped = LOOPS.take(self._engine.take_failures)
        if failures or dropped:
            raise UndeliveredMessages(failures, dropped=dropped)

    async def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until no hold is left.

        Args:
            timeout: seconds; ``None`` for ever.

        Returns:
            Whether none is.

        Raises:
            ProducerClosed: it is closed, so it never will be.
        """
        check_timeout(timeout)
        if self._engine.loop is None and not self._engine.ended:
            raise self._not_connected()
        waiter = Waiter()
        return await self._engine.drive(
            calls.wait_unflowed(self._protocol, waiter, deadline_of(timeout), _monotonic()), waiter
        )

    def on_flow(
        self, callback: Callable[[FlowEvent], object], *, kinds: Iterable[str] | None = None
    ) -> Callable[[], None]:
        refuse_coroutine_function("on_flow", callback)
        return super().on_flow(callback, kinds=kinds)

    def flow_events(self, *, kinds: Iterable[str] | None = None) -> AsyncIterator[FlowEvent]:
        """The flow events from now on; waits for the next one, and ends when the producer is closed.

        If it is not read, at most `max_flow_events` wait for it: then the oldest are dropped.

        Args:
            kinds: as for `on_flow`.
        """
        events = FlowEvents(self.name, self.settings.max_flow_events)
        self._add_events(events, kinds)
        return events

    # The end.

    async def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and end the channel, and the connection if it is the producer's own.

        When the time is up it returns within a second, whatever the broker and the network do.

        A second call waits for the end of the first and does nothing else. If the first is cancelled, the producer
        gives up what is unsettled at once and cuts the connection. What it gave up is logged, and is the attribute
        ``undelivered`` of the `asyncio.CancelledError`, which is raised when nothing of the producer runs any more,
        within a second.

        Args:
            timeout: seconds that messages may take to be settled; ``None`` for ever; the setting
                `close_timeout` unless given.

        Raises:
            UndeliveredMessages: some were not delivered, and nobody has been told. Nothing else is dropped.
        """
        undelivered = await self._engine.close(deadline_of(close_limit(timeout, self.settings)))
        if undelivered is not None:
            raise undelivered

    async def __aenter__(self) -> Self:
        if self._engine.loop is None:
            await self.connect()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            await self.close()
        else:
            deadline = deadline_of(close_limit(DEFAULT, self.settings))
            leave_word(self.settings.name, exc, await self._engine.close(deadline, waits_for_holds=False))
