"""`Producer` publishes messages from threads.

`Producer` checks the arguments of calls, and admits a message immediately if there is room. The producer's `Engine`
connects, waits, writes and closes. `BaseProducer` has the common part of `Producer` and `AsyncProducer`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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

# After this number of messages, `send_many` waits until they are on disk in the outbox.
_AT_ONCE = 64

_monotonic = time.monotonic


def _run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Generator[Any, Any, Any]:
    yield from ()
    return function(*arguments, **named)


class Producer(BaseProducer[SyncReceipt]):
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Threads can share a producer.

    The constructor connects. A producer has its own connection and I/O thread, unless `connection` is given. A
    ``with`` block closes the producer at its end. A producer that the application drops without closing issues a
    `ResourceWarning`, delivers the admitted messages, and then disconnects.

    If an exception leaves the ``with`` block, closing does not wait during the holds ``channel_flow``,
    ``connection_blocked``, ``disconnected`` and ``refused``. During the holds ``capacity`` and ``transport``, closing
    waits only while the broker still answers. Without any of these six holds, closing waits like `close`. Undelivered
    messages are logged, and the exception gets a note and the attribute ``undelivered``, an `UndeliveredMessages`.

    Args:
        url: URL of the broker, or several URLs to try one after the other.
        connection: a connection from `connect`, on which the producer opens a channel; ``None`` for its own connection.
        on_delivery: called with every settled receipt, on the producer's callback thread. `flush` and `close` raise no
            error for these receipts. If the callback is slower than the broker's confirms, the hold ``capacity``
            stops the producer. A `send` in the callback waits neither for other senders nor for other callbacks.
        on_flow: called with every flow event, even while connecting. The method `on_flow` adds further callbacks.
        declare: a `Topology`, a `Queue` or a queue name, declared each time before the producer opens its publishing
            channel. A name declares a durable queue if there is no queue of that name. ``None`` declares nothing.
        credentials: returns the `Credentials` for the login. The function is called on a separate thread before each
            try to connect. `connect_timeout` includes the time of this call. If the function raises an error, the try
            to connect fails. The function is called again before the credentials expire, and the broker gets the new
            credentials (``Connection.UpdateSecret``). With ``None`` the producer uses the credentials of the URL.
        settings: the settings. A setting in `keywords` replaces the value in `settings`.
        line: order of waiting calls of `send`, such as a `WeightedLine`; by default first come, first served (F4). Each
            producer needs a line of its own.
        manager: the `FlowManager` that can stop and start the producer; by default `flow_manager`, that of the process.
        keywords: settings by name, see `ProducerSettings`.

    Warns:
        RuntimeWarning: the constructor, or a `send` that waits, blocks a running event loop. Each producer warns only
            once.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was not made by `connect`.
        ConnectionFailed: no host accepted a connection, or no channel could be opened.
        OutboxInUse, OutboxError: the outbox is used by another producer, or cannot be used.
        TypeError: an argument has the wrong type.
        ValueError: another open producer uses `line`.
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
        # After an error or Ctrl-C in this block, `discard` closes the outbox and the connection.
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
        """Admit a message. Wait while the producer is blocked (flowed) (J7 A4 D1).

        Args:
            message: the body, or a `Message` with properties.
            exchange: the exchange; by default the exchange of a `RoutedMessage`, or the setting for other messages.
            routing_key: the routing key; by default the key of a `RoutedMessage`, or the setting for other messages.
            timeout: the longest wait in seconds; ``None`` for no limit, 0 for no wait. The default is the setting
                `max_producer_flow_control_wait`. With an outbox, the call can take up to 0.5 s longer. If the
                disk hangs and the timeout is 10 s or more, the call waits until the disk answers.
            source: a name for the origin of the message. A `WeightedLine` uses this name.
            position: how far the application has read its own input, for example a file; ``None`` for no position. The
                outbox stores message and position in one commit (E13), before the message is written to the broker.

        Returns:
            The receipt, when the message is admitted, and on disk if there is an outbox. The confirm comes later.

        Raises:
            FlowControlTimeout: the producer is still flowed after `timeout`; the message was not and will not be sent.
            ProducerFlowed: the producer is flowed, and `when_flowed` is ``"raise"``; the message was not sent.
            NestedCall: called where a wait might never end, for example in a finalizer (E2); the message was not sent.
            ProducerClosed: the producer is closed, or its lost connection is not replaced; the message was not sent.
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
        if position is not None or (self._tracer is not None and self._tracer.wants(payload)):
            with self._extended(payload, exchange, routing_key, position) as extended:
                return self.send(extended, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
        receipt: Receipt | None
        try:
            receipt = self._engine.protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                if not self._services.awake:
                    self._services.wake()
                return receipt  # type: ignore[return-value]  # the protocol makes receipts of this class
        except BaseException:
            # A signal handler may have raised an error, such as KeyboardInterrupt, before the I/O thread was woken.
            self._engine.recheck()
            raise
        timeout = limit_of(timeout, self.settings)
        deadline = deadline_of(timeout)
        cannot_wait = self._cannot_wait(timeout)
        if cannot_wait is None and self._protocol.line.tickets and self._engine.storage is None:
            # Other messages wait in line, so this message cannot be admitted now.
            check_can_wait("send()", payload, exchange, routing_key)
        else:
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

        An exception of this method or of the iterable has an attribute ``receipts``: a tuple with the receipts of the
        admitted messages. After `NotDurable`, the last receipt belongs to the message that is not on disk. After an
        exception, the method takes no further message from the iterable.

        Args:
            messages: messages as for `send`, or pairs of a message and its position.
            exchange: the exchange, as for `send`.
            routing_key: the routing key, as for `send`.
            timeout: the longest wait of each message in seconds, as for `send`.
            source: a name for the origin of the messages, as for `send`.

        Returns:
            The receipts of all messages, as soon as the last message is admitted.

        Raises:
            FlowControlTimeout, ProducerFlowed, ProducerClosed, OutboxFull, NotDurable: as for `send`.
            SettingsError, TypeError, ValueError: as for `send`.
        """
        check_many(messages, timeout)
        receipts: list[SyncReceipt] = []
        with keeping(receipts):
            if self._engine.storage is not None and isinstance(messages, (list, tuple)) and self._tracer is None:
                # Import this module only for an outbox, because it loads SQLite.
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
            # Send messages singly, because a generator may make a message only when the previous message is on disk.
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
        """Wait until all messages that were admitted before this call are settled.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit. By default `max_producer_flow_control_wait`.

        Raises:
            ConfirmTimeout: some messages are not settled after `timeout`; their outcome is not known yet.
            UndeliveredMessages: all are settled, but some were not delivered, and no earlier call has reported them.
                If several threads wait in `flush`, only one of them gets the error, with the messages of all threads.
            NestedCall: called where a wait might never end, for example in a finalizer (E2); nothing has changed.
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
        """Wait until there are no holds. In a callback, ignore the hold ``capacity`` if slow callbacks cause it.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Returns:
            True if there are no holds; False after the timeout.

        Raises:
            NestedCall: called where a wait might never end, for example in a finalizer (E2); nothing has changed.
            ProducerClosed: the producer is closed, so it will never send again.
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
        """Return an iterator over all later flow events.

        Args:
            kinds: as for `on_flow`.

        Returns:
            An iterator for one thread, which waits for the next event, and ends when the producer is closed. If more
            than `max_flow_events` events wait for the reader, the oldest events are dropped.
        """
        events = FlowEvents(self.name, self.settings.max_flow_events)
        self._add_events(events, kinds)
        return events

    # Closing.

    def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and close the channel. If the connection belongs to the producer, close the connection too.

        A second call only waits until the first call ends. Each call returns within a second after its timeout, even if
        the broker or the network does not answer.

        Args:
            timeout: maximum seconds to wait for unsettled messages; ``None`` for no limit. By default `close_timeout`.

        Raises:
            NestedCall: called where a wait might never end, for example in a finalizer (E2). If closing has already
                begun, another thread completes it, and logs the undelivered messages. The next call raises the error
                for them.
            UndeliveredMessages: some messages were not delivered, and no earlier call has reported them.
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
            try:
                report_undelivered(self.settings.name, error, self._engine.close(deadline, waits_for_holds=False))
            except NestedCall:
                # Close on another thread, which logs undelivered messages, unless `close` has already started a thread.
                self._engine.close_later(deadline)
