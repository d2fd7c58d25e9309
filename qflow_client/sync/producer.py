"""`Producer` publishes from threads."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

import pika

from qflow_client.core import calls
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.credentials import Credentials
from qflow_client.errors import NestedCall, ProducerClosed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import NOT_TAKEN, check_can_wait, is_inside
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
    close_deadline,
    deadline_of,
    keep_admitted,
    keeping,
    limit_of,
    report_undelivered,
)
from qflow_client.sync.connection import TappedConnection
from qflow_client.sync.engine import Engine, Waiter
from qflow_client.sync.flow_events import FlowEvents
from qflow_client.sync.receipt import SyncReceipt
from qflow_client.topology import Queue, Topology

__all__ = ["Producer"]

# How many messages of a `send_many` are put into the outbox before it waits for the disk.
_AT_ONCE = 64

_monotonic = time.monotonic


def _run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Generator[Any, Any, Any]:
    # With a `yield`, so that it is a generator.
    yield from ()
    return function(*arguments, **named)


class Producer(BaseProducer[SyncReceipt]):
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Threads can share a producer.

    It connects when it is made. It has its own connection and I/O thread, unless it gets a connection of `connect`.
    Leaving a ``with`` block closes it. A producer that is dropped without being closed issues a `ResourceWarning`,
    delivers the admitted messages, and then ends its connection.

    If an exception leaves the ``with`` block, that exception is raised, and closing does not wait for holds. Under
    ``channel_flow`` and ``connection_blocked`` it does not wait at all. Under ``capacity`` and ``transport`` it waits
    only while the broker continues to answer. Otherwise it waits like `close`. Messages that were not delivered are
    logged and noted on the exception. Its attribute ``undelivered`` is an `UndeliveredMessages` with them.

    Args:
        url: URL of the broker, or several to try in turn.
        connection: a connection from `connect`, on which the producer opens its own channel; ``None`` for its own
            connection.
        on_delivery: called with every settled receipt, on the producer's callback thread. `flush` and `close` do not
            report these receipts again. If it is slower than the broker's confirms, the producer is held by
            ``capacity``. It may call `send`, which then waits neither for other senders nor for other callbacks.
        on_flow: called with every flow event from the first on, see `on_flow`.
        declare: declared on each new connection before the producer publishes: a `Topology`, a `Queue`, or a name. A
            name declares a durable queue if there is no queue of that name. ``None`` declares nothing.
        credentials: returns the `Credentials` for the login. It is called before each connect, and again before the
            credentials expire; then the broker gets the new ones (``Connection.UpdateSecret``). It is called on a
            separate thread, and the duration of the call is part of `connect_timeout`. If it raises, the try to connect
            has failed. ``None`` uses the credentials of the URL.
        settings: settings for all that the keywords do not give.
        line: the order in which waiting calls of `send` are served; by default first come, first served (F4). A
            `WeightedLine` distinguishes them by the `source` of `send`.
        manager: the manager with which the producer registers, to be stopped and started with all others; by default
            that of the process.
        keywords: settings by name, see `ProducerSettings`.

    Warns:
        RuntimeWarning: it is made in the thread of a running event loop, or a `send` waits there, which blocks the
            loop. Each producer warns once.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was not made by `connect`.
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
            raise TypeError("credentials: it must be a plain function; only AsyncProducer accepts a coroutine function")
        if connection is not None and not isinstance(connection, TappedConnection):
            raise SettingsError(
                f"connection={type(connection).__name__}: make it with qflow_client.connect(url); on any other "
                "connection pika reads Channel.Flow and confirms before the producer can"
            )
        engine = Engine(loaded, on_delivery, manager, connection, Topology.of(declare), credentials)
        engine.warn_in_loop(stacklevel=3)
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
        """Admit a message. Wait while the producer is flowed (J7 A4 D1).

        Args:
            message: the body, or a `Message` with properties.
            exchange: the exchange; by default that of a `RoutedMessage`, for other messages the setting.
            routing_key: the routing key; the same default.
            timeout: seconds that it may stay blocked; ``None`` for no limit, 0 to raise immediately. The default is the
                setting `max_producer_flow_control_wait`.
            source: the source of the message, for a `WeightedLine`.
            position: how far the source of the message has been read, stored in the same commit of the outbox (E13);
                ``None`` for none. The message is written to the broker only when it is on disk.

        Returns:
            Its receipt, as soon as the message is admitted. The broker's confirm comes later.

        Raises:
            FlowControlTimeout: still flowed after `timeout`; the message was not sent and never will be.
            ProducerFlowed: flowed, and `when_flowed` is ``"raise"``; the message was not sent.
            NestedCall: the call would wait for itself; the message was not sent and never will be (E2).
            ProducerClosed: the producer was closed, or lost its connection; the message was not sent.
            OutboxFull: the outbox has no room; the message was not sent.
            NotDurable: the message is admitted, but is not on disk after `timeout`, or the disk failed.
            SettingsError: there is a position, but no outbox; the message was not sent.
            TypeError: the message is of another type, or `timeout` is not a number.
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
        if position is not None or (self._tracer is not None and self._tracer.wants(payload)):
            with self._extended(payload, exchange, routing_key, position) as extended:
                return self.send(extended, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
        receipt: Receipt | None
        try:
            receipt = self._engine.protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                if not self._services.awake:
                    self._services.wake()
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        except BaseException:
            # An exception of a signal handler, such as KeyboardInterrupt, may have come before the wake-up.
            self._engine.recheck()
            raise
        timeout = limit_of(timeout, self.settings)
        deadline = deadline_of(timeout)
        cannot_wait = self._cannot_wait(timeout)
        receipt = self._admit("send()", payload, exchange, routing_key, deadline, cannot_wait, spills=True)
        if receipt is None:
            receipt = self._engine.send(payload, exchange, routing_key, timeout, source)
        if self._engine.storage is not None:
            self._engine.storage.wait_durable(receipt, deadline)
        return receipt  # type: ignore[return-value]  # as above

    def send_many(
        self,
        messages: Iterable[bytes | str | Message | tuple[bytes | str | Message, Position]],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[SyncReceipt]:
        """Call `send` for every message, in order.

        Every exception, even if the iterable raises it, has an attribute ``receipts`` with the receipts of the messages
        that were admitted before. These messages will be sent. After `NotDurable` the last receipt belongs to the
        message that failed, because it was admitted, too. No further message was taken from the iterable.

        Args:
            messages: messages as for `send`, or pairs of a message and its position.
            exchange: the exchange, as for `send`.
            routing_key: the routing key, as for `send`.
            timeout: seconds that each may stay blocked, as for `send`.
            source: the source of the messages, for a `WeightedLine`.

        Returns:
            Their receipts, when the last message is admitted.

        Raises:
            FlowControlTimeout, ProducerFlowed, ProducerClosed, SettingsError, TypeError, ValueError: as `send`.
        """
        check_many(messages, timeout)
        receipts: list[SyncReceipt] = []
        with keeping(receipts):
            if self._engine.storage is not None and isinstance(messages, (list, tuple)) and self._tracer is None:
                # This module imports SQLite.
                from qflow_client.storing import store_many

                for _ in store_many(
                    self,
                    messages,
                    receipts,
                    limit_of(timeout, self.settings),
                    {"exchange": exchange, "routing_key": routing_key, "source": source},
                    at_once=_AT_ONCE,
                    wait_durable=self._engine.storage.wait_durable,
                    run=_run,
                ):
                    """It yields nothing."""
                return receipts
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
        """Wait until all messages that were admitted before are settled.

        Args:
            timeout: seconds; ``None`` for no limit. The default is the setting `max_producer_flow_control_wait`.

        Raises:
            ConfirmTimeout: some messages are not settled; their outcome is not known yet.
            UndeliveredMessages: all messages are settled, but some were not delivered, and no call has reported them.
                The failures of all threads are reported together: if several threads flush, only the first gets them.
            NestedCall: the call would wait for itself; nothing has changed (E2).
            ProducerClosed: the producer was made before this process was forked.
            TypeError, ValueError: `timeout` is not a number.
        """
        if self._engine.is_copy:
            raise ProducerClosed(str(self._protocol.closed))
        check_can_wait("flush()")
        timeout = limit_of(timeout, self.settings)
        waiter = Waiter()
        deadline = deadline_of(timeout)
        is_flushed = self._engine.drive(calls.flush(self._protocol, waiter, deadline), waiter, deadline)
        if not is_flushed:
            raise self._engine.unflushed(timeout)
        taken = is_flushed if is_flushed is NOT_TAKEN else self._engine.lock.try_take(self._engine.take_failures)
        if taken is NOT_TAKEN:
            raise NestedCall("flush()")
        failures, dropped = taken
        if failures or dropped:
            raise UndeliveredMessages(failures, dropped=dropped)

    def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until there are no holds. In a callback, ignore the hold for callbacks that are slower than confirms.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            True if there are no holds; False after the timeout.

        Raises:
            NestedCall: the call would wait for itself; nothing has changed (E2).
            ProducerClosed: the producer is closed and will never be unflowed.
            TypeError, ValueError: `timeout` is not a number.
        """
        deadline = deadline_of(timeout)
        check_can_wait("wait_unflowed()")
        waiter, in_callback = Waiter(), self._engine.is_in_callback
        call = calls.wait_unflowed(self._protocol, waiter, deadline, _monotonic(), in_callback=in_callback)
        is_unflowed = self._engine.drive(call, waiter, deadline)
        if is_unflowed is NOT_TAKEN:
            raise NestedCall("wait_unflowed()")
        return is_unflowed

    def _listen(self, add: Callable[[ProducerProtocol], None]) -> None:
        engine = self._engine
        if is_inside():
            engine.call_later(engine.dispatcher.start)
        elif engine.ended:
            return
        else:
            engine.dispatcher.start()
        engine.ask(add)

    def flow_events(self, *, kinds: Iterable[str] | None = None) -> Iterator[FlowEvent]:
        """Return an iterator over the flow events from now on.

        Args:
            kinds: as for `on_flow`.

        Returns:
            An iterator for one thread. It blocks for the next event, and ends when the producer is closed. At most
            `max_flow_events` wait for the reader; then the oldest are dropped.
        """
        events = FlowEvents(self.name, self.settings.max_flow_events)
        self._add_events(events, kinds)
        return events

    # Closing.

    def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and end the connection. A second call only waits for the end of the first.

        After the timeout it returns within a second, whatever the broker and the network do.

        Args:
            timeout: seconds that messages may take to be settled; ``None`` for no limit. The default is the setting
                `close_timeout`.

        Raises:
            NestedCall: the call would wait for itself (E2). If the close has begun, another thread completes it and
                logs the messages that were not delivered.
            UndeliveredMessages: some messages were not delivered, and no call has reported them. No other messages are
                lost.
            TypeError, ValueError: `timeout` is not a number; nothing has changed.
        """
        deadline = close_deadline(timeout, self.settings)
        check_can_wait("close()")
        undelivered = self._engine.close(deadline)
        if undelivered is not None:
            raise undelivered

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self.close()
        else:
            deadline = close_deadline(DEFAULT, self.settings)
            check_can_wait("close()")
            # After a `NestedCall` the remaining ones are logged.
            with suppress(NestedCall):
                report_undelivered(self.settings.name, error, self._engine.close(deadline, waits_for_holds=False))
