"""`AsyncProducer`: for asyncio tasks."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aio_pika

from qflow_client import telemetry
from qflow_client.aio.connection import TappedConnection, TappedRobustConnection
from qflow_client.aio.dispatcher import Dispatcher, refuse_coroutine_function
from qflow_client.aio.link import Link
from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.aio.turn import Turns
from qflow_client.core.admission import SendTicket, check_capacity
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry
from qflow_client.errors import (
    ConnectionFailed,
    FlowControlTimeout,
    ProducerClosed,
    ProducerFlowed,
    QflowError,
    SettingsError,
    UndeliveredMessages,
)
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import FlowManager, Hold, Line
from qflow_client.guard import LOOPS, check_can_wait, is_inside
from qflow_client.logs import write_log
from qflow_client.manager import flow_manager
from qflow_client.message import Message, as_body
from qflow_client.receipt import Receipt
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, WhenFlowed, check_argument, check_timeout
from qflow_client.skin import (
    BLOCKING_WAITS,
    BRIEF,
    CLOSED,
    DEFAULT,
    LONGER_WAITS,
    LULL,
    Deliveries,
    Listeners,
    check_arguments,
    check_many,
    disown,
    gives_up,
    good_bye_until,
    instead_of_nowait,
    keeping,
    kinds_of,
    leave_word,
    limit_of,
    log_forgotten,
    none_of,
    protocol_options,
    undelivered_of,
    unflushed,
    watch_process,
)

if TYPE_CHECKING:
    from qflow_client.aio.outbox import Commits
    from qflow_client.outbox.storage import Storage
    from qflow_client.outbox.writer import StoreStep

__all__ = ["AsyncProducer"]

_T = TypeVar("_T")

_monotonic = time.monotonic

_LOOP_CLOSED = "its event loop is closed; make a producer in the loop that runs now"

# Seconds that the outbox may take to close after the deadline of a close, or after it is cancelled.
_DISK_PATIENCE = 0.6

# How many messages of a `send_many` are put into the outbox before it waits for the disk.
_AT_ONCE = 500


async def _wait_to_the_end(task: asyncio.Task[None]) -> asyncio.CancelledError | None:
    """Wait until a task is done, however often the caller is cancelled meanwhile. The first cancel cancels the task.

    Returns:
        The first cancel, for the caller to raise; ``None`` if there was none.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            if cancelled is None:
                task.cancel()
            cancelled = cancelled or error
    return cancelled


class _FlowEvents:
    """The flow events of a producer, as they come."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[FlowEvent | None] = asyncio.Queue()

    def put(self, event: FlowEvent | None) -> None:
        """Append an event; ``None`` is the end."""
        self._events.put_nowait(event)

    def forget(self) -> None:
        """In a child process: end. The tasks that wait are the parent's."""
        self._events = asyncio.Queue()
        self.put(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FlowEvent:
        event = await self._events.get()
        if event is None:
            # For whoever asks again, or beside.
            self._events.put_nowait(None)
            raise StopAsyncIteration
        return event


class AsyncProducer:
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Any number of tasks may use one.

    It connects when ``async with`` is entered, or by `connect`, once. It belongs to the loop that it connects in, and
    only `pause`, `resume` and the manager may be called from other threads. Leaving the block closes it.

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
        settings: settings that no keyword gives.
        line: the order in which waiting sends are served; first come, first served unless given (F4). A `WeightedLine`
            tells them apart by the `source` of `send`.
        manager: where it registers, to be stopped and started with all others; the process's own unless given.
        keywords: settings by name, see `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was made elsewhere.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        connection: aio_pika.abc.AbstractConnection | None = None,
        on_delivery: Callable[[Receipt], object] | None = None,
        settings: ProducerSettings | None = None,
        line: Line | None = None,
        manager: FlowManager = flow_manager,
        **keywords: Any,
    ) -> None:
        self.settings = ProducerSettings.load(url, settings, **keywords)
        check_arguments(url, connection, on_delivery, manager)
        refuse_coroutine_function("on_delivery", on_delivery)
        if connection is not None and not isinstance(connection, (TappedConnection, TappedRobustConnection)):
            raise SettingsError(
                f"connection={shown(connection)}: on a connection made elsewhere Channel.Flow and confirms cannot be "
                "taken before aio-pika gets them; make it with qflow_client.connect_async(url)"
            )
        self._protocol = ProducerProtocol(self.settings, **protocol_options(self.settings, AsyncReceipt, line))
        # None unless admitted messages are kept on disk; set by `connect`.
        self._storage: Storage | None = None
        self._commits: Commits | None = None
        self._exchange = self.settings.exchange
        self._routing_key = self.settings.routing_key
        # None if nobody is to be told of receipts.
        self._deliveries = None if on_delivery is None else Deliveries(on_delivery, self._told)
        if self._deliveries is not None:
            self._protocol.reports.settled = []
        self._connection = connection
        self._manager = manager
        self._listeners: Listeners[_FlowEvents] = Listeners()
        self._ended = False
        # Set when the first close has come to its end.
        self._all_ended = asyncio.Event()
        # Where it was made, and whether this is a child of that process.
        self._pid = os.getpid()
        self._is_copy = False
        # The loop and its thread, and what runs there; set by `connect`.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._dispatcher: Dispatcher | None = None
        self._turns: Turns | None = None
        # Set once it is connected.
        self._link: Link | None = None
        self._observer: telemetry.Observer | None = None
        self._tracer: telemetry.Tracer | None = None

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
        if self._ended:
            raise ProducerClosed(CLOSED)
        if self._loop is not None:
            raise QflowError("connect() was called before: a producer connects once")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._dispatcher = Dispatcher(self._loop)
        self._turns = Turns(self._loop, lambda: self._protocol, self._kick, self._arm_timer)
        watch_process(self)
        try:
            if self.settings.outbox is not None:
                await self._open_outbox()
            link = await self._open()
            if self._ended:
                # Closed while it was connecting.
                await link.close(BRIEF)
                raise ProducerClosed(CLOSED)
            self._link = link
            if self._storage is not None:
                self._storage.start()
            self._observer = telemetry.watch(self, self._protocol, self.settings, link.url)
            self._tracer = self._observer.tracer
            self._manager.register(self)
            self._kick()
            return self
        except BaseException as error:
            self._ended = True
            try:
                self._protocol.close(f"it could not connect: {error}", _monotonic())
                self._manager.unregister(self)
                # Whoever has taken the loop away, by Ctrl-C, lets nobody wait any more.
                if not isinstance(error, GeneratorExit):
                    await self._end(BRIEF)
            finally:
                if self._storage is not None:
                    self._storage.close(0.0)
            raise

    async def _open_outbox(self) -> None:
        # They bring SQLite with them.
        from qflow_client.aio.outbox import Commits, SpilledReceipt
        from qflow_client.outbox.storage import Storage

        assert self._loop is not None
        storage = Storage(self.settings)
        self._commits = commits = Commits(self._loop, storage)
        try:
            await asyncio.to_thread(storage.open)
            if self._ended:
                raise ProducerClosed(CLOSED)
            self._step(lambda protocol: storage.attach(protocol, SpilledReceipt, self._take, commits.committed))
            self._storage = storage
        except BaseException:
            # A thread may still be opening it.
            storage.close(0.0)
            raise

    def _take(self, step: StoreStep) -> None:
        """Have the loop take a step for the outbox's thread."""

        def take() -> None:
            if self._storage is None:
                # A child of the process that this is of.
                return
            self._step(lambda _protocol: step(_monotonic()))
            self._arm_timer()

        assert self._loop is not None
        # A loop that is closed sends nothing.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(take)

    async def _open(self) -> Link:
        errors = []
        hosts = len(self.settings.urls) if self._connection is None else 1
        for host in range(hosts):
            link = Link(host, self._connection, self._protocol, self._after)
            try:
                await link.open()
            except ConnectionFailed as error:
                errors.append(error)
            else:
                return link
        raise none_of(errors)

    # Sending.

    async def send(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> AsyncReceipt:
        """Admit a message, waiting while the producer is flowed (J7 A4 D1).

        A send that is cancelled is not sent, and never will be, unless it was admitted before the cancel: then the
        message is on its way, and `on_delivery`, `flush` or `close` tell if it fails.

        Args:
            message: the body, or a `Message` with properties.
            exchange: where to publish; the setting unless given.
            routing_key: with which key; the setting unless given.
            timeout: seconds that it may stay blocked; ``None`` for ever, 0 not at all; the setting
                `max_producer_flow_control_wait` unless given.
            source: whose message it is, for a `WeightedLine`.

        Returns:
            Its receipt, as soon as it is admitted, which is before the broker's confirm.

        Raises:
            FlowControlTimeout: still flowed after `timeout`; the message was not sent and never will be.
            ProducerFlowed: flowed, and `when_flowed` is ``"raise"``; likewise.
            ProducerClosed: it was closed, or lost its connection, or never had one, or its loop is closed; likewise.
            OutboxFull: with an outbox that has no room; likewise.
            NotDurable: with an outbox: the message is admitted, and not on disk after `timeout`, or the disk failed.
            TypeError: the message is of another type, or `timeout` is no number.
            ValueError: it cannot be encoded, or `timeout` is NaN.
        """
        if timeout is not DEFAULT and timeout != 0:
            check_timeout(timeout)
        payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
        if self._loop is not None and self._loop.is_closed() and not self._ended:
            # Nothing would ever write it.
            raise ProducerClosed(_LOOP_CLOSED, payload)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return await self.send(
                    traced, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                )
        receipt = self._protocol.admission.send_at_once(payload, exchange, routing_key)
        if receipt is not None:
            tapped = self._link.tapped  # type: ignore[union-attr]  # it is open, or nothing would be admitted
            if not tapped.awake:  # type: ignore[union-attr]  # likewise
                tapped.wake()  # type: ignore[union-attr]  # likewise
            return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        check_can_wait("send()", payload)
        if self._storage is not None:
            stored = self._store(payload, exchange, routing_key, spills=True)
            if stored is not None:
                return await self._made_durable(stored, limit_of(timeout, self.settings))
        else:
            receipt = self._step(lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic()))
            if receipt is not None:
                return receipt  # type: ignore[return-value]  # as above
        if self.settings.when_flowed is WhenFlowed.RAISE:
            return self._send_or_refuse(payload, exchange, routing_key, ProducerFlowed, BLOCKING_WAITS)
        timeout = limit_of(timeout, self.settings)
        if timeout is not None and timeout <= 0:
            return self._send_or_refuse(payload, exchange, routing_key, FlowControlTimeout, LONGER_WAITS)
        if self._turns is None:
            raise self._not_connected(payload)
        began = _monotonic()
        receipt = self._admitted(await self._turns.wait(payload, exchange, routing_key, timeout, source))
        return receipt if self._storage is None else await self._made_durable(receipt, timeout, began)

    def _store(
        self, payload: bytes | Message, exchange: str, routing_key: str, *, spills: bool = False
    ) -> AsyncReceipt | None:
        """With an outbox: admit a message, or put it there, if that can be done now. It is not durable yet."""
        assert self._storage is not None
        spills = spills and self.settings.when_flowed is WhenFlowed.SPILL
        store = self._storage.store.send
        receipt = self._step(lambda _protocol: store(payload, exchange, routing_key, _monotonic(), spills=spills))
        return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make

    async def _made_durable(
        self, receipt: AsyncReceipt, timeout: float | None, began: float | None = None
    ) -> AsyncReceipt:
        """Return the receipt once its message is on disk; `timeout` counts from `began`, or from now."""
        assert self._commits is not None
        began = _monotonic() if began is None else began
        await self._commits.wait_durable(receipt, math.inf if timeout is None else began + timeout)
        return receipt

    def send_nowait(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        source: str = "",
    ) -> AsyncReceipt:
        """As `send`, but never wait; not to be awaited itself.

        With an outbox it keeps the loop for as long as it takes to have the message on disk.

        Args:
            message: the body, or a `Message` with properties.
            exchange: where to publish; the setting unless given.
            routing_key: with which key; the setting unless given.
            source: as in `send`; what does not wait has no turn, so it changes nothing.

        Raises:
            ProducerFlowed: flowed; the message was not sent and never will be.
        """
        payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
        if self._loop is not None and self._loop.is_closed() and not self._ended:
            # Nothing would ever write it.
            raise ProducerClosed(_LOOP_CLOSED, payload)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return self.send_nowait(traced, exchange=exchange, routing_key=routing_key)
        if self._storage is not None:
            check_can_wait("send_nowait()", payload)
            stored = self._store(payload, exchange, routing_key)
            if stored is not None:
                self._storage.wait_durable(stored, _monotonic())
                return stored
        else:
            receipt = self._protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is None:
                check_can_wait("send_nowait()", payload)
                receipt = self._step(
                    lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic())
                )
            elif not self._link.tapped.awake:  # type: ignore[union-attr]  # it is open, or nothing would be admitted
                self._link.tapped.wake()  # type: ignore[union-attr]  # likewise
            if receipt is not None:
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        advice = instead_of_nowait(self.settings.when_flowed)
        return self._send_or_refuse(payload, exchange, routing_key, ProducerFlowed, advice)

    async def send_many(
        self,
        messages: Iterable[bytes | str | Message],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[AsyncReceipt]:
        """`send` every message, in order, each as if it were alone.

        Whatever is raised, also by the iterable and by a cancel, has in its attribute ``receipts`` those of the
        messages before it: they were admitted, and are on their way. No message after that one was taken from the
        iterable.

        Args:
            messages: as for `send`.
            exchange: where to publish; the setting unless given.
            routing_key: with which key; the setting unless given.
            timeout: seconds that each may stay blocked, as for `send`.
            source: whose messages they are, for a `WeightedLine`.

        Returns:
            Their receipts, once the last one is admitted.

        Raises:
            FlowControlTimeout, ProducerFlowed, ProducerClosed, TypeError, ValueError: as `send`.
        """
        check_many(messages, timeout)
        receipts: list[AsyncReceipt] = []
        to = self._exchange if exchange is None else exchange
        key = self._routing_key if routing_key is None else routing_key
        if self._loop is not None and self._loop.is_closed() and not self._ended:
            raise ProducerClosed(_LOOP_CLOSED)
        with keeping(receipts):
            if self._storage is not None:
                await self._store_many(messages, receipts, to, key, timeout, source)
                return receipts
            for message in messages:
                receipt: Any = None
                if type(message) is bytes and self._tracer is None:
                    receipt = self._protocol.admission.send_at_once(message, to, key)
                if receipt is None:
                    receipt = await self.send(
                        message, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                    )
                else:
                    tapped = self._link.tapped  # type: ignore[union-attr]  # it is open, or nothing would be admitted
                    if not tapped.awake:  # type: ignore[union-attr]  # likewise
                        tapped.wake()  # type: ignore[union-attr]  # likewise
                receipts.append(receipt)
        return receipts

    async def _store_many(
        self,
        messages: Iterable[bytes | str | Message],
        receipts: list[AsyncReceipt],
        exchange: str,
        routing_key: str,
        timeout: float | None,
        source: str,
    ) -> None:
        """`send_many` with an outbox, which waits for the disk once for many of them."""
        limit = limit_of(timeout, self.settings)
        try:
            for message in messages:
                receipt = None
                if type(message) is bytes and self._tracer is None:
                    receipt = self._store(message, exchange, routing_key)
                if receipt is None:
                    receipt = await self.send(
                        message, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                    )
                receipts.append(receipt)
                if len(receipts) % _AT_ONCE == 0:
                    await self._made_durable(receipt, limit)
        except Exception:
            if receipts:
                await self._made_durable(receipts[-1], 0)
            raise
        if receipts:
            await self._made_durable(receipts[-1], limit)

    def _send_or_refuse(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        error_type: type[ProducerFlowed],
        advice: str,
    ) -> AsyncReceipt:
        """Refuse what was not admitted, unless a callback sends it, for whose end others may wait."""
        if self._loop is None or self._dispatcher is None:
            raise self._not_connected(payload)
        waiter = self._loop.create_future()

        def refuse(protocol: ProducerProtocol) -> tuple[Hold, ...]:
            protocol.admission.count_refusal()
            return protocol.reports.holds

        def stand_in_front(protocol: ProducerProtocol) -> SendTicket:
            now = _monotonic()
            ticket = protocol.admission.stand_in_line(
                payload, exchange, routing_key, now, timeout=0, waiter=waiter, first=True
            )
            try:
                protocol.admission.look_at(ticket, now)
            finally:
                protocol.admission.give_up(ticket, now)
            return ticket

        try:
            if self._deliveries is None or not self._dispatcher.is_running:
                raise error_type(self._step(refuse), 0.0, payload, advice)
            ticket = self._step(stand_in_front)
        except FlowControlTimeout as error:
            self._kick()
            raise error_type(error.holds, 0.0, payload, advice) from None
        finally:
            self._arm_timer()
        receipt = self._admitted(ticket)
        if self._storage is not None:
            self._storage.wait_durable(receipt, _monotonic())
        return receipt

    @staticmethod
    def _admitted(ticket: SendTicket) -> AsyncReceipt:
        if ticket.error is not None:
            raise ticket.error
        assert isinstance(ticket.receipt, AsyncReceipt)
        return ticket.receipt

    @staticmethod
    def _not_connected(payload: bytes | Message | None = None) -> ProducerClosed:
        return ProducerClosed("it is not connected yet; use async with, or await connect() first", payload)

    def _step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        """Take a step of the protocol that may let somebody go on, and do what follows from it."""
        result = LOOPS.take(lambda: step(self._protocol))
        self._kick()
        return result

    def _ask(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Take a step without waiting for its result; inside another step or on another thread, it is taken later."""
        if self._loop is None or (self._thread in (None, threading.get_ident()) and not is_inside()):
            self._step(step)
            return
        # A loop that is closed has nothing to hold.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._step, step)

    def _kick(self) -> None:
        """Have what there is written, and tell whom there is to tell."""
        if self._link is not None and self._protocol.unwritten > 0:
            tapped = self._link.tapped
            if tapped is not None and not tapped.awake:
                tapped.wake()
        self._after()

    def _arm_timer(self) -> None:
        """Have the protocol told when its time comes, if that can let anybody go on."""
        if self.settings.rate is not None and self._link is not None:
            self._link.arm_timer()

    async def flush(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all that was admitted before is settled.

        Args:
            timeout: seconds; ``None`` for ever; the setting `max_producer_flow_control_wait` unless given.

        Raises:
            ConfirmTimeout: some is not; its outcome is not known yet.
            UndeliveredMessages: all is settled, and some of it, of which nobody has been told, was not delivered.
            ProducerClosed: it was made in another process, of which this one is a fork.
        """
        if self._is_copy:
            raise ProducerClosed(str(self._protocol.closed))
        timeout = limit_of(timeout, self.settings)
        check_timeout(timeout)
        if not await self._wait(self._protocol.when_flushed, timeout):
            raise unflushed(self._protocol, self._storage, timeout)
        failures = LOOPS.take(self._protocol.reports.take_failures)
        if failures:
            raise UndeliveredMessages(failures)

    async def _wait(self, enroll: Callable[[asyncio.Future[None]], bool], timeout: float | None) -> bool:
        """Wait for something of the protocol's, at most so many seconds; whether it came."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever asks whether the window is full raises its hold, or lifts it.
        waits = self._step(lambda _protocol: enroll(waiter))
        if not waits:
            return True
        try:
            await asyncio.wait((waiter,), timeout=timeout)
            return waiter.done()
        finally:
            LOOPS.take(lambda: self._protocol.forget_waiter(waiter))

    # The window.

    @property
    def capacity(self) -> int:
        """The most unsettled messages there may be. A lower one cancels nothing (C6)."""
        return self._protocol.window.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        # Checked now: the caller would not see an error that the loop raises later.
        check_capacity(capacity)
        self._ask(lambda protocol: protocol.set_capacity(capacity, _monotonic()))

    @property
    def available(self) -> int:
        """How many messages could be admitted before the window is full; never below 0."""
        return max(0, self._protocol.window.capacity - self._protocol.window.used)

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return self._protocol.unsettled

    @property
    def stored(self) -> int:
        """Messages in the outbox: those that are unsettled, and those that wait on disk; 0 without one."""
        return 0 if self._storage is None else len(self._storage)

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        return self._protocol.in_flight

    # Flow.

    @property
    def flow_state(self) -> FlowState:
        """Whether the producer is flowed, by what, since when and how often."""
        if is_inside():
            return self._protocol.flow_seen(_monotonic())
        return self._step(lambda protocol: protocol.flow_state(_monotonic()))

    async def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until no hold is left.

        Args:
            timeout: seconds; ``None`` for ever.

        Returns:
            Whether none is.

        Raises:
            ProducerClosed: it is closed, so it never will be.
        """

        def enroll(waiter: asyncio.Future[None]) -> bool:
            waits = self._protocol.when_unflowed(waiter, _monotonic())
            if waits and self._loop is not None:
                # Which takes a step of its own.
                self._loop.call_soon(self._arm_timer)
            return waits

        check_timeout(timeout)
        if self._loop is None and not self._ended:
            raise self._not_connected()
        if self._protocol.closed is None and not await self._wait(enroll, timeout):
            return False
        if self._protocol.closed is not None:
            raise ProducerClosed(self._protocol.closed)
        return True

    def on_flow(
        self, callback: Callable[[FlowEvent], object], *, kinds: Iterable[str] | None = None
    ) -> Callable[[], None]:
        """Have a callback called with every flow event, in order, as a call scheduled on the loop.

        Args:
            callback: may call any method of the producer. If it raises, that is logged.
            kinds: the hold kinds to hear of, such as ``("connection_blocked",)``; ``None`` for all. A fast producer is
                held by ``capacity`` with every burst.

        Returns:
            What to call to have it called no more.

        Raises:
            TypeError: `callback` cannot be called, or is a coroutine function, whose result would not be awaited; or
                `kinds` are not words.
            ValueError: one of `kinds` is not a hold kind.
        """
        check_argument("callback", callback, callable(callback), "callable")
        refuse_coroutine_function("on_flow", callback)
        wanted = kinds_of(kinds)

        def unsubscribe() -> None:
            self._listeners.remove(unsubscribe)

        if not self._ended:
            self._listeners.add(self._protocol, unsubscribe, callback, wanted)

        return unsubscribe

    def flow_events(self, *, kinds: Iterable[str] | None = None) -> AsyncIterator[FlowEvent]:
        """The flow events from now on; waits for the next one, and ends when the producer is closed.

        Args:
            kinds: as for `on_flow`.
        """
        wanted = kinds_of(kinds)
        events = _FlowEvents()
        if self._ended:
            events.put(None)
        else:
            self._listeners.iterate(self._protocol, events, wanted)
        return events

    def pause(self, reason: str = "") -> None:
        """Hold the producer until `resume`. What is admitted already still leaves (D5)."""
        self.hold(HoldKind.PAUSED, source="", detail=reason)

    def resume(self) -> None:
        """Lift the hold of `pause`. One that the manager raised stays."""
        self.lift(HoldKind.PAUSED, source="")

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold; for managers. Applications use `pause`. From another thread, in the loop's next turn."""
        self._ask(lambda protocol: protocol.hold(kind, _monotonic(), source=source, detail=detail))

    def lift(self, kind: str, *, source: str) -> None:
        """Lift a hold; for managers. Applications use `resume`. From another thread, in the loop's next turn."""
        self._ask(lambda protocol: protocol.lift(kind, _monotonic(), source=source))

    # The end.

    @property
    def name(self) -> str:
        """The setting."""
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._protocol.closed is not None

    async def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and end the channel, and the connection if it is the producer's own.

        When the time is up it returns within a second, whatever the broker and the network do.

        A second call waits for the end of the first and does nothing else. If the first is cancelled, the producer
        gives up what is unsettled at once and cuts the connection. What it gave up is logged, and is the attribute
        ``undelivered`` of the `asyncio.CancelledError`, which is raised when nothing of the producer runs any more,
        within a second.

        Args:
            timeout: seconds that messages may take to be settled; ``None`` for ever; the setting
                `max_producer_flow_control_wait` unless given.

        Raises:
            UndeliveredMessages: some were not delivered, and nobody has been told. Nothing else is dropped.
        """
        timeout = limit_of(timeout, self.settings)
        check_timeout(timeout)
        undelivered = await self._close(timeout)
        if undelivered is not None:
            raise undelivered

    async def _close(self, timeout: float | None, *, waits_for_holds: bool = True) -> UndeliveredMessages | None:
        """Close it, and return what was not delivered and nobody has been told of."""
        deadline = math.inf if timeout is None else _monotonic() + timeout
        again = self._ended
        self._ended = True
        LOOPS.take(lambda: self._protocol.close(CLOSED, _monotonic()))
        if again:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._all_ended.wait()
            return None
        error: BaseException | None = None
        try:
            self._kick()
            self._manager.unregister(self)
            if waits_for_holds:
                await self._wait(self._protocol.when_flushed, timeout)
            else:
                await self._flush_unheld(deadline)
            patience = good_bye_until(deadline)
        except BaseException as caught:
            error, patience = caught, BRIEF
        if isinstance(error, GeneratorExit):
            # The loop is gone, so nothing can be waited for.
            raise error
        left = self._protocol.unsettled_receipts
        # In a task of its own: a caller that is cancelled waits for its end all the same.
        disk_patience = _DISK_PATIENCE if error is not None else max(_DISK_PATIENCE, deadline - _monotonic())
        ending = asyncio.create_task(self._end(patience, disk_patience=disk_patience))
        cancelled = await _wait_to_the_end(ending)
        error = error or cancelled
        undelivered = self._undelivered(left)
        if error is None and not ending.cancelled():
            error = ending.exception()
        if error is not None:
            leave_word(self.settings.name, error, undelivered)
            raise error
        return undelivered

    async def _flush_unheld(self, deadline: float) -> None:
        """Wait until all is settled, but for no hold."""
        before = -1
        while (now := _monotonic()) < deadline and not LOOPS.take(partial(gives_up, self._protocol, before, now)):
            before = self._protocol.unsettled
            if await self._wait(self._protocol.when_settled, min(deadline - now, LULL)):
                return

    async def _end(self, patience: float, *, disk_patience: float = _DISK_PATIENCE) -> None:
        """End the channel and all that belongs to the producer; also if it is cancelled, only sooner.

        Args:
            patience: seconds that the broker may take to answer.
            disk_patience: seconds that the outbox may take to close.
        """
        try:
            if self._link is not None:
                await self._link.close(patience)
        finally:
            self._after()
            if self._observer is not None:
                telemetry.unwatch(self._observer)
            self._listeners.end()
            if self._turns is not None:
                self._turns.end()
            try:
                if self._dispatcher is not None:
                    await self._dispatcher.stop()
            finally:
                ending = asyncio.current_task()
                await self._end_storage(_DISK_PATIENCE if ending is not None and ending.cancelling() else disk_patience)

    async def _end_storage(self, patience: float) -> None:
        """Close the outbox, if there is one, and wait until it is closed: others would find it in use.

        Args:
            patience: seconds to wait.
        """
        try:
            if self._storage is not None:
                # The threads of the loop's own executor may all wait for something.
                executor = ThreadPoolExecutor(1, "qflow-outbox-close")
                closing = asyncio.get_running_loop().run_in_executor(executor, self._storage.close, patience)
                executor.shutdown(wait=False)
                try:
                    # It keeps to `patience` by itself, unless the disk does not answer at all.
                    await asyncio.wait((closing,), timeout=None if patience == math.inf else patience + BRIEF)
                except asyncio.CancelledError:
                    await asyncio.wait((closing,), timeout=_DISK_PATIENCE)
                    raise
                if closing.done():
                    closing.result()
        finally:
            if self._commits is not None:
                self._commits.end()
            self._all_ended.set()

    def _undelivered(self, left: Sequence[Receipt]) -> UndeliveredMessages | None:
        """What was not delivered and the application has not been told of.

        Args:
            left: what was unsettled before the channel was ended.
        """
        failures = LOOPS.take(self._protocol.reports.take_failures)
        if self._deliveries is not None:
            failures += self._deliveries.undelivered(left)
        return undelivered_of(failures, self._storage)

    async def __aenter__(self) -> Self:
        if self._loop is None:
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
            timeout = self.settings.max_producer_flow_control_wait
            leave_word(self.settings.name, exc, await self._close(timeout, waits_for_holds=False))

    def __repr__(self) -> str:
        state = "closed" if self.closed else "flowed" if not self._protocol.gate.is_open else "open"
        return f"<AsyncProducer {self.settings.name!r} {state} unsettled={self.unsettled}>"

    # Whatever changed the protocol calls this afterwards. Nothing of the application's runs in it.

    def _after(self) -> None:
        protocol = self._protocol
        if protocol.admission.observer is not None:
            protocol.admission.observer.tell(now=_monotonic())
        if protocol.reports.is_empty:
            return
        settled, wake, logs = LOOPS.take(self._take_news)
        for waiter in wake:
            if not waiter.done():
                waiter.set_result(None)
        write_log(logs)
        if self._loop is None or self._dispatcher is None or self._loop.is_closed():
            # There are no turns of a loop. Events wait for the first.
            return
        if protocol.reports.events:
            self._listeners.tell(protocol, self._dispatcher.call)
        if settled:
            assert self._deliveries is not None
            self._deliveries.hand(settled)
            self._dispatcher.call(self._deliver, settled)

    def _take_news(self) -> tuple[list[Receipt], list[Any], list[LogEntry]]:
        protocol = self._protocol
        settled = protocol.take_settled(_monotonic()) if protocol.reports.settled else []
        wake, protocol.reports.wake = protocol.reports.wake, []
        logs, protocol.reports.logs = protocol.reports.logs, []
        return settled, wake, logs

    def _deliver(self, receipts: list[Receipt]) -> None:
        assert self._deliveries is not None
        error = self._deliveries.tell(receipts)
        if error is not None:
            # A sys.exit in a callback ends the loop.
            raise error

    def _told(self, count: int) -> None:
        self._step(lambda protocol: protocol.told(count, _monotonic()))

    # Forks and the end of the process.

    def _forked(self) -> None:
        """In a child process: everything of this producer is the parent's."""
        # What has the sockets lets go of them.
        self._is_copy = self._ended = True
        self._manager.forked()
        # The loop does not run here, and wakes the parent's.
        self._thread = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._protocol, self._storage = disown(self._protocol, self._storage, self._pid), None
        for events in tuple(self._listeners.iterators):
            events.forget()

    def _forgotten(self) -> None:
        """At the end of the process: say what is lost if it was not closed. No loop runs any more that could wait."""
        if not self._ended:
            if self._storage is not None:
                self._storage.close(BRIEF)
            log_forgotten(self._protocol, self._storage)
