"""`Producer`: for threads."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import pika

from qflow_client.core import calls
from qflow_client.core.calls import CannotWait
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.credentials import Credentials
from qflow_client.errors import NestedCall, ProducerClosed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import check_can_wait, is_inside
from qflow_client.manager import flow_manager
from qflow_client.message import Message
from qflow_client.position import Position
from qflow_client.producer import BaseProducer, resolve, split
from qflow_client.receipt import Receipt
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
    warn_in_loop,
)
from qflow_client.sync.connection import TappedConnection
from qflow_client.sync.engine import Engine, Waiter
from qflow_client.sync.flow_events import FlowEvents
from qflow_client.sync.receipt import SyncReceipt
from qflow_client.topology import Queue, Topology

__all__ = ["Producer"]

_monotonic = time.monotonic


class Producer(BaseProducer):
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Any number of threads may use one.

    It connects when it is made, and has a connection and an I/O thread of its own, unless it is given one of `connect`.
    Leaving a ``with`` block closes it. One that is dropped without being closed issues a `ResourceWarning`, delivers
    what was admitted, and then ends its connection.

    An exception that leaves the block stays the one that is raised, and waits for no hold: not at all under
    ``channel_flow`` and ``connection_blocked``, under ``capacity`` and ``transport`` only while the broker goes on
    answering, otherwise as `close` does. What was not delivered is logged, noted on the exception, and in its attribute
    ``undelivered``, an `UndeliveredMessages`.

    Args:
        url: URL of the broker, or several to try in turn.
        connection: a connection from `connect`, on which it opens a channel of its own; ``None`` to have a connection
            of its own.
        on_delivery: called with every receipt once it is settled, on the producer's callback thread. With it, `flush`
            and `close` do not bring up again what it was told. If it is slower than the broker's confirms, the producer
            is held by ``capacity``. It may `send`, which then waits neither for other senders nor for other callbacks.
        on_flow: called with every flow event from the first on, see `on_flow`.
        declare: what it declares when it connects, and after every reconnect, before it publishes: a `Topology`, a
            `Queue`, or a name, for a durable queue if there is no queue of that name; ``None`` for nothing.
        credentials: called before each connect for the `Credentials` to log in with, and again before those expire,
            which the broker is then given (``Connection.UpdateSecret``). It is called on a thread of its own, and its
            time is part of `connect_timeout`. If it raises, the try to connect has failed. ``None`` to log in as the
            URL says.
        settings: settings that no keyword gives.
        line: the order in which waiting sends are served; first come, first served unless given (F4). A `WeightedLine`
            tells them apart by the `source` of `send`.
        manager: where it registers, to be stopped and started with all others; the process's own unless given.
        keywords: settings by name, see `ProducerSettings`.

    Warns:
        RuntimeWarning: it is made where an event loop runs, which it would block.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was made elsewhere.
        ConnectionFailed: no host could be connected to.
        TypeError: another argument is of the wrong type.
    """

    _engine: Engine

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        connection: pika.BlockingConnection | None = None,
        on_delivery: Callable[[Receipt], object] | None = None,
        on_flow: Callable[[FlowEvent], object] | None = None,
        declare: Topology | Queue | str | None = None,
        credentials: Callable[[], Credentials] | None = None,
        settings: ProducerSettings | None = None,
        line: Line | None = None,
        manager: FlowManager = flow_manager,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        loaded = ProducerSettings.load(url, settings, **keywords)
        super().__init__(loaded, manager)
        check_arguments(url, connection, on_delivery, on_flow, manager, declare, credentials)
        if inspect.iscoroutinefunction(credentials):
            raise TypeError("credentials: it must be a plain function; only AsyncProducer awaits what it returns")
        if connection is not None and not isinstance(connection, TappedConnection):
            raise SettingsError(
                f"connection={type(connection).__name__}: on a connection made elsewhere Channel.Flow and confirms "
                "cannot be taken before pika gets them; make it with qflow_client.connect(url)"
            )
        warn_in_loop(stacklevel=3)
        engine = Engine(loaded, on_delivery, manager, connection, Topology.of(declare), credentials)
        # Ctrl-C can come anywhere, and must not leave a lock or a connection behind.
        try:
            engine.open(line, on_flow)
            assert engine.link is not None
            assert engine.observer is not None
            self._use_engine(engine)
            self._end_with(engine)
            self._services = engine.link.services
            self._tracer = engine.observer.tracer
            manager.register(self)
        except BaseException:
            engine.discard()
            raise

    # Sending.

    def send(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
        position: Position | None = None,
    ) -> SyncReceipt:
        """Admit a message, waiting while the producer is flowed (J7 A4 D1).

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
            ProducerClosed: it was closed, or lost its connection; likewise.
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
                return self.send(carried, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return self.send(traced, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
        receipt: Receipt | None
        try:
            receipt = self._engine.protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                if not self._services.awake:
                    self._services.wake()
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        except BaseException:
            # An exception that a signal handler raises, such as KeyboardInterrupt, may have come before the wake.
            self._engine.recheck()
            raise
        check_can_wait("send()", payload, exchange, routing_key)
        timeout = limit_of(timeout, self.settings)
        deadline = deadline_of(timeout)
        receipt = self._engine.admit(payload, exchange, routing_key, deadline, spills=True)
        if receipt is None:
            receipt = self._wait_in_line(
                payload, exchange, routing_key, timeout, source, self._cannot_wait_in_send(timeout)
            )
        return self._made_durable(receipt, deadline)

    def _wait_in_line(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        timeout: float | None,
        source: str,
        cannot_wait: CannotWait | None,
    ) -> Receipt:
        """Wait until a message is admitted, or refuse it."""
        if cannot_wait is not None:
            timeout = 0.0
            if not self._engine.is_in_callback:
                self._engine.arm_timer()
                raise self._refused(payload, exchange, routing_key, cannot_wait)
        waiter = Waiter()
        ticket = self._make_ticket(payload, exchange, routing_key, timeout, source, waiter)
        try:
            return self._engine.drive(
                self._send_call(ticket, cannot_wait, notices=True), waiter, ticket.deadline, ticket
            )
        except NestedCall:
            raise NestedCall("a send", payload, exchange=exchange, routing_key=routing_key) from None

    def _made_durable(self, receipt: Receipt, deadline: float) -> SyncReceipt:
        """Return the receipt once its message is on disk, if there is an outbox."""
        if self._engine.storage is not None:
            self._engine.storage.wait_durable(receipt, deadline)
        return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make

    def send_nowait(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        source: str = "",
        position: Position | None = None,
    ) -> SyncReceipt:
        """As `send`, but never wait.

        Args:
            message: the body, or a `Message` with properties.
            exchange: where to publish. Unless given, it is that of a `RoutedMessage`, and otherwise the setting.
            routing_key: with which key; likewise.
            source: as in `send`; what does not wait has no turn, so it changes nothing.
            position: as for `send`.

        Returns:
            Its receipt.

        Raises:
            ProducerFlowed: flowed; the message was not sent and never will be.
            ProducerClosed: it was closed, or lost its connection; likewise.
            TypeError: the message is of another type.
            ValueError: it cannot be encoded.
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
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return self.send_nowait(traced, exchange=exchange, routing_key=routing_key)
        receipt: Receipt | None = None
        if self._engine.storage is None:
            try:
                receipt = self._engine.protocol.admission.send_at_once(payload, exchange, routing_key)
                if receipt is not None:
                    if not self._services.awake:
                        self._services.wake()
                    return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
            except BaseException:
                # As in `send`.
                self._engine.recheck()
                raise
        check_can_wait("send_nowait()", payload, exchange, routing_key)
        receipt = self._engine.admit(payload, exchange, routing_key)
        if receipt is None:
            receipt = self._wait_in_line(
                payload, exchange, routing_key, 0.0, source, self._cannot_wait_in_send_nowait()
            )
        return self._made_durable(receipt, _monotonic())

    def send_many(
        self,
        messages: Iterable[bytes | str | Message | tuple[bytes | str | Message, Position]],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[SyncReceipt]:
        """`send` every message, in order, each as if it were alone.

        Whatever is raised, also by the iterable, has in its attribute ``receipts`` those of the messages before it:
        they were admitted, and are on their way. After `NotDurable` the last of them is that of the message itself,
        which was admitted, too. No message after that one was taken from the iterable.

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
        receipts: list[SyncReceipt] = []
        with keeping(receipts):
            if self._engine.storage is not None and isinstance(messages, (list, tuple)) and self._tracer is None:
                # It brings SQLite with it.
                from qflow_client.sync.outbox import store_many

                options: Any = {"exchange": exchange, "routing_key": routing_key, "source": source}
                return store_many(self, messages, receipts, limit_of(timeout, self.settings), options)
            # Other iterables may make each message when the one before it is on disk.
            for each in messages:
                message, position = split(each) if isinstance(each, tuple) else (each, None)
                try:
                    receipt = self.send(
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

    def flush(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all that was admitted before is settled.

        Args:
            timeout: seconds; ``None`` for ever; the setting `max_producer_flow_control_wait` unless given.

        Raises:
            ConfirmTimeout: some is not; its outcome is not known yet.
            UndeliveredMessages: all is settled, and some of it, of which nobody has been told, was not delivered.
                Whoever sent it: of several threads that flush, the first gets the failures of all, and no other does.
            ProducerClosed: it was made before this process was forked.
            TypeError, ValueError: `timeout` is no number.
        """
        if self._engine.is_copy:
            raise ProducerClosed(str(self._protocol.closed))
        check_can_wait("flush()")
        timeout = limit_of(timeout, self.settings)
        waiter = Waiter()
        deadline = deadline_of(timeout)
        if not self._engine.drive(calls.flush(self._protocol, waiter, deadline), waiter, deadline):
            raise unflushed(self._protocol, self._engine.storage, timeout)
        failures, dropped = self._engine.lock.try_take(self._engine.take_failures)
        if failures or dropped:
            raise UndeliveredMessages(failures, dropped=dropped)

    def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until no hold is left; in a callback, none but that for callbacks that are slower than confirms.

        Args:
            timeout: seconds; ``None`` for ever.

        Returns:
            Whether that is so.

        Raises:
            ProducerClosed: it is closed, so it never will be.
            TypeError, ValueError: `timeout` is no number.
        """
        deadline = deadline_of(timeout)
        check_can_wait("wait_unflowed()")
        waiter, in_callback = Waiter(), self._engine.is_in_callback
        return self._engine.drive(
            calls.wait_unflowed(self._protocol, waiter, deadline, _monotonic(), in_callback=in_callback),
            waiter,
            deadline,
        )

    def _listen(self, add: Callable[[ProducerProtocol], None]) -> None:
        engine = self._engine

        def listen() -> None:
            engine.dispatcher.start()
            engine.ask(add)

        if is_inside():
            engine.call_later(listen)
        elif not engine.ended:
            listen()

    def flow_events(self, *, kinds: Iterable[str] | None = None) -> Iterator[FlowEvent]:
        """The flow events from now on.

        Args:
            kinds: as for `on_flow`.

        Returns:
            An iterator for one thread, which blocks for the next event, and ends when the producer is closed. If it is
            not read, at most `max_flow_events` wait for it: then the oldest are dropped.
        """
        events = FlowEvents(self.name, self.settings.max_flow_events)
        self._add_events(events, kinds)
        return events

    # The end.

    def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and end the connection. A second call waits for the end of the first and does nothing else.

        When the time is up it returns within a second, whatever the broker and the network do.

        Args:
            timeout: seconds that messages may take to be settled; ``None`` for ever; the setting
                `close_timeout` unless given.

        Raises:
            UndeliveredMessages: some were not delivered, and nobody has been told. Nothing else is dropped.
            TypeError, ValueError: `timeout` is no number; nothing has happened.
        """
        deadline = deadline_of(close_limit(timeout, self.settings))
        check_can_wait("close()")
        undelivered = self._engine.close(deadline)
        if undelivered is not None:
            raise undelivered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
        else:
            deadline = deadline_of(close_limit(DEFAULT, self.settings))
            check_can_wait("close()")
            leave_word(self.settings.name, exc, self._engine.close(deadline, waits_for_holds=False))
