"""`Producer`: for threads."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pika

from qflow_client import telemetry
from qflow_client.core import steps
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.steps import Refusal, Steps, resume
from qflow_client.errors import (
    ConnectionFailed,
    NestedCall,
    ProducerClosed,
    SettingsError,
    UndeliveredMessages,
)
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import Guard, check_can_wait, is_inside
from qflow_client.logs import write_log
from qflow_client.manager import flow_manager
from qflow_client.message import Message, as_body
from qflow_client.producer import BaseProducer
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings, check_timeout
from qflow_client.skin import (
    BRIEF,
    CLOSED,
    DEFAULT,
    check_many,
    good_bye_until,
    keeping,
    kinds_of,
    leave_word,
    limit_of,
    log_forgotten,
    none_of,
    protocol_options,
    unflushed,
    watch_process,
)
from qflow_client.sync.connection import SharedLink, TappedConnection
from qflow_client.sync.dispatcher import Dispatcher
from qflow_client.sync.latch import Latch
from qflow_client.sync.link import Link, parameters
from qflow_client.sync.receipt import SyncReceipt

if TYPE_CHECKING:
    from qflow_client.keeper import StoringStep

__all__ = ["Producer"]

_T = TypeVar("_T")

# How many messages of a `send_many` are put into the outbox before it waits for the disk.
_AT_ONCE = 64

# Seconds that the end of the process waits for a producer that was not closed.
_AT_EXIT = 1.0

_monotonic = time.monotonic


def _deadline(timeout: float | None) -> float:
    check_timeout(timeout)
    return math.inf if timeout is None else _monotonic() + timeout


class _Waiter:
    """Wakes one thread; cheaper than an event."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # A second time changes nothing.
            return

    def wait_until(self, deadline: float) -> None:
        """Wait until it is set, or until a time."""
        self._lock.acquire(timeout=max(0.0, min(deadline - _monotonic(), threading.TIMEOUT_MAX)))


class Producer(BaseProducer):
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Any number of threads may use one.

    It connects when it is made, and has a connection and an I/O thread of its own, unless it is given one of `connect`.
    Leaving a ``with`` block closes it.

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
        settings: settings that no keyword gives.
        line: the order in which waiting sends are served; first come, first served unless given (F4). A `WeightedLine`
            tells them apart by the `source` of `send`.
        manager: where it registers, to be stopped and started with all others; the process's own unless given.
        keywords: settings by name, see `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed, or the connection was made elsewhere.
        ConnectionFailed: no host could be connected to.
        TypeError: another argument is of the wrong type.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        connection: pika.BlockingConnection | None = None,
        on_delivery: Callable[[Receipt], object] | None = None,
        settings: ProducerSettings | None = None,
        line: Line | None = None,
        manager: FlowManager = flow_manager,
        **keywords: Any,
    ) -> None:
        super().__init__(url, connection, on_delivery, settings, manager, keywords)
        if connection is not None and not isinstance(connection, TappedConnection):
            raise SettingsError(
                f"connection={type(connection).__name__}: on a connection made elsewhere Channel.Flow and confirms "
                "cannot be taken before pika gets them; make it with qflow_client.connect(url)"
            )
        # Guards the protocol, the link's `awake`, and the listeners; one for all producers on a connection.
        self._lock = Guard() if connection is None else connection.carrier.lock
        # Set when the first close has come to its end.
        self._all_ended = Latch()
        # What was unsettled as its connection was ended.
        self._left: tuple[Receipt, ...] = ()
        self._dispatcher = Dispatcher(f"qflow-callbacks {self.settings.name}")
        # Ctrl-C can come anywhere, and must not leave a lock or a connection behind.
        try:
            self._protocol = self._make_protocol(line)
            self._link = self._connect(connection)
            self._services = self._link.services
            if self._storage is not None:
                self._storage.start()
            self._observer = telemetry.watch(self, self._protocol, self.settings, self._link.url)
            self._tracer = self._observer.tracer
            if self._deliveries is not None:
                self._protocol.reports.settled = []
                self._dispatcher.start()
            manager.register(self)
            watch_process(self)
        except BaseException:
            try:
                if hasattr(self, "_link"):
                    self._end(BRIEF)
            finally:
                if self._storage is not None:
                    self._storage.close(BRIEF)
            raise

    def _make_protocol(self, line: Line | None) -> ProducerProtocol:
        options = protocol_options(self.settings, SyncReceipt, line)
        if self.settings.outbox is None:
            return ProducerProtocol(self.settings, **options)
        # They bring SQLite with them.
        from qflow_client.keeper import Storage
        from qflow_client.sync.storing import SpilledReceipt

        self._storage = Storage(self.settings)
        self._storage.open(self._take, spilled_type=SpilledReceipt, **options)
        return self._storage.protocol

    def _take(self, step: StoringStep) -> None:
        """Take a step for the outbox's thread."""
        storage = self._storage
        assert storage is not None
        self._step(lambda _protocol: step(storage.protocol, _monotonic()))
        self._arm_timer()

    def _connect(self, connection: TappedConnection | None) -> Link | SharedLink:
        if connection is not None:
            shared = SharedLink(connection, self._protocol, self._after)
            shared.open(self.settings.connect_timeout)
            return shared
        errors = []
        # All that can be wrong with any of them is said before the first is tried.
        hosts = [parameters(url, self.settings) for url in self.settings.urls]
        for host in range(len(hosts)):
            link = Link(hosts, host, self._protocol, self._lock, self._after)
            try:
                link.open(self.settings.connect_timeout)
                return link
            except ConnectionFailed as error:
                errors.append(error)
            except BaseException:
                link.close(BRIEF)
                raise
        raise none_of(errors)

    # Sending.

    def send(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> SyncReceipt:
        """Admit a message, waiting while the producer is flowed (J7 A4 D1).

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
            ProducerClosed: it was closed, or lost its connection; likewise.
            TypeError: the message is of another type, or `timeout` is no number.
            ValueError: it cannot be encoded, or `timeout` is NaN.
        """
        if timeout is not DEFAULT and timeout != 0:
            check_timeout(timeout)
        payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return self.send(traced, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
        receipt: Receipt | None
        try:
            receipt = self._protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                if not self._services.awake:
                    self._services.wake()
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        except BaseException:
            # An exception that a signal handler raises, such as KeyboardInterrupt, may have come before the wake.
            self._recheck()
            raise
        check_can_wait("send()", payload)
        receipt = self._admit(payload, exchange, routing_key, spills=True)
        if receipt is None:
            timeout = limit_of(timeout, self.settings)
            receipt = self._wait_in_line(payload, exchange, routing_key, timeout, source, self._refusal(timeout))
        return self._made_durable(receipt)

    def _wait_in_line(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        timeout: float | None,
        source: str,
        refusal: Refusal | None,
    ) -> Receipt:
        """Wait until a message is admitted, or refuse it."""
        waiter = _Waiter()
        if refusal is not None:
            timeout = 0.0
        ticket = self._make_ticket(payload, exchange, routing_key, timeout, source, waiter)
        return self._drive(
            self._send_steps(ticket, refusal, notices=True),
            waiter,
            lambda protocol: protocol.admission.give_up(ticket, _monotonic()),
        )

    def _drive(self, call: Steps[_T], waiter: _Waiter, undo: Callable[[ProducerProtocol], object] | None = None) -> _T:
        """Run a call that waits, see `core.steps`.

        Args:
            call: the call.
            waiter: its waiter.
            undo: takes it back if something is raised; by default, `waiter` is forgotten.
        """
        try:
            until, result = self._step(lambda _protocol: resume(call, None))
            self._arm_timer()
            while until is not None:
                waiter.wait_until(until)
                until, result = self._step(lambda _protocol: resume(call, _monotonic()))
        except BaseException:
            self._step(undo or (lambda protocol: protocol.forget_waiter(waiter)))
            raise
        return result  # type: ignore[return-value]  # the call has ended

    def _made_durable(self, receipt: Receipt) -> SyncReceipt:
        """Return the receipt once its message is on disk, if there is an outbox."""
        if self._storage is not None:
            self._storage.wait_durable(receipt)
        return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make

    def send_nowait(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        source: str = "",
    ) -> SyncReceipt:
        """As `send`, but never wait.

        Args:
            message: the body, or a `Message` with properties.
            exchange: where to publish; the setting unless given.
            routing_key: with which key; the setting unless given.
            source: as in `send`; what does not wait has no turn, so it changes nothing.

        Returns:
            Its receipt.

        Raises:
            ProducerFlowed: flowed; the message was not sent and never will be.
            ProducerClosed: it was closed, or lost its connection; likewise.
            TypeError: the message is of another type.
            ValueError: it cannot be encoded.
        """
        payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        if self._tracer is not None and self._tracer.wants(payload):
            with self._tracer.span(payload, exchange, routing_key) as traced:
                return self.send_nowait(traced, exchange=exchange, routing_key=routing_key)
        receipt: Receipt | None = None
        if self._storage is None:
            try:
                receipt = self._protocol.admission.send_at_once(payload, exchange, routing_key)
                if receipt is not None:
                    if not self._services.awake:
                        self._services.wake()
                    return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
            except BaseException:
                # As in `send`.
                self._recheck()
                raise
        check_can_wait("send_nowait()", payload)
        receipt = self._admit(payload, exchange, routing_key)
        if receipt is None:
            receipt = self._wait_in_line(payload, exchange, routing_key, 0.0, source, self._refusal_nowait())
        return self._made_durable(receipt)

    def send_many(
        self,
        messages: Iterable[bytes | str | Message],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[SyncReceipt]:
        """`send` every message, in order, each as if it were alone.

        Whatever is raised, also by the iterable, has in its attribute ``receipts`` those of the messages before it:
        they were admitted, and are on their way. No message after that one was taken from the iterable.

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
        receipts: list[SyncReceipt] = []
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        with keeping(receipts):
            if self._storage is not None and isinstance(messages, (list, tuple)) and self._tracer is None:
                self._store_many(messages, receipts, exchange, routing_key, timeout, source)
                return receipts
            # Other iterables may make each message when the one before it is on disk.
            for message in messages:
                receipts.append(
                    self.send(message, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
                )
        return receipts

    def _store_many(
        self,
        messages: Sequence[bytes | str | Message],
        receipts: list[SyncReceipt],
        exchange: str,
        routing_key: str,
        timeout: float | None,
        source: str,
    ) -> None:
        """`send_many` with an outbox. It waits for the disk once for many messages."""
        durable = 0
        try:
            for message in messages:
                payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
                receipt: Any = self._admit(payload, exchange, routing_key)
                if receipt is None:
                    receipt = self.send(
                        payload, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source
                    )
                    durable = len(receipts) + 1
                receipts.append(receipt)
                if len(receipts) >= durable + _AT_ONCE:
                    durable = len(receipts)
                    self._made_durable(receipt)
        finally:
            if len(receipts) > durable:
                self._made_durable(receipts[-1])

    # Steps.

    @property
    def _is_in_callback(self) -> bool:
        return self._deliveries is not None and self._dispatcher.is_current_thread

    def _step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        try:
            result = self._lock.take(lambda: step(self._protocol))
            self._kick()
            return result
        except NestedCall:
            raise
        except BaseException:
            self._recheck()
            raise

    def _ask(self, step: Callable[[ProducerProtocol], object]) -> None:
        if is_inside():
            self._services.add_callback_threadsafe(lambda: self._step(step))
        else:
            self._step(step)

    def _recheck(self) -> None:
        """Have the I/O thread take a step, because an exception may have come before what was to follow from one."""
        if not self._link.ended:
            self._link.look()
        elif not is_inside():
            self._lock.take(lambda: self._protocol.on_timer(_monotonic()))
            self._after()

    def _kick(self) -> None:
        """Have the I/O thread write, and pass on what the protocol reports."""
        protocol = self._protocol
        # As long as there is an I/O thread, that is its task, because no Ctrl-C comes there.
        if self._link.ended:
            self._after()
            return
        if not self._services.awake and protocol.unwritten > 0:
            self._services.wake()
        if not protocol.reports.is_empty:
            self._link.tell()

    def _arm_timer(self) -> None:
        """Have the protocol called when its time comes, if time alone can lift a hold."""
        if self.settings.rate is not None:
            self._link.arm_timer()

    # Waiting.

    def flush(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all that was admitted before is settled.

        Args:
            timeout: seconds; ``None`` for ever; the setting `max_producer_flow_control_wait` unless given.

        Raises:
            ConfirmTimeout: some is not; its outcome is not known yet.
            UndeliveredMessages: all is settled, and some of it, of which nobody has been told, was not delivered.
                Whoever sent it: of several threads that flush, the first gets the failures of all, and no other does.
            ProducerClosed: it was made in another process, of which this one is a fork.
            TypeError, ValueError: `timeout` is no number.
        """
        if self._is_copy:
            raise ProducerClosed(str(self._protocol.closed))
        check_can_wait("flush()")
        timeout = limit_of(timeout, self.settings)
        waiter = _Waiter()
        if not self._drive(steps.flush(self._protocol, waiter, _deadline(timeout)), waiter):
            raise unflushed(self._protocol, self._storage, timeout)
        failures = self._lock.take(self._protocol.reports.take_failures)
        if failures:
            raise UndeliveredMessages(failures)

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
        deadline = _deadline(timeout)
        check_can_wait("wait_unflowed()")
        waiter, in_callback = _Waiter(), self._is_in_callback
        return self._drive(
            steps.wait_unflowed(self._protocol, waiter, deadline, _monotonic(), in_callback=in_callback), waiter
        )

    def _listen(self, add: Callable[[ProducerProtocol], None]) -> None:
        def listen() -> None:
            self._dispatcher.start()
            self._step(add)

        if is_inside():
            self._services.add_callback_threadsafe(listen)
        elif not self._ended:
            listen()

    def flow_events(self, *, kinds: Iterable[str] | None = None) -> Iterator[FlowEvent]:
        """The flow events from now on.

        Args:
            kinds: as for `on_flow`.

        Returns:
            An iterator for one thread, which blocks for the next event, and ends when the producer is closed.
        """
        wanted = kinds_of(kinds)
        events: queue.SimpleQueue[FlowEvent | None] = queue.SimpleQueue()

        def listen(protocol: ProducerProtocol) -> None:
            if self._ended:
                events.put(None)
            else:
                self._listeners.iterate(protocol, events, wanted)

        self._ask(listen)
        return iter(events.get, None)

    # The end.

    def close(self, timeout: float | None = DEFAULT) -> None:
        """Flush, and end the connection. A second call waits for the end of the first and does nothing else.

        When the time is up it returns within a second, whatever the broker and the network do.

        Args:
            timeout: seconds that messages may take to be settled; ``None`` for ever; the setting
                `max_producer_flow_control_wait` unless given.

        Raises:
            UndeliveredMessages: some were not delivered, and nobody has been told. Nothing else is dropped.
            TypeError, ValueError: `timeout` is no number; nothing has happened.
        """
        timeout = limit_of(timeout, self.settings)
        undelivered = self._close(timeout)
        if undelivered is not None:
            raise undelivered

    def _close(self, timeout: float | None, *, waits_for_holds: bool = True) -> UndeliveredMessages | None:
        """Close it, and return the error for what was not delivered."""
        deadline = _deadline(timeout)
        check_can_wait("close()")
        first = False

        def begin() -> None:
            nonlocal first
            first = not self._ended
            self._ended = True

        waiter = _Waiter()
        call = steps.close(self._protocol, waiter, deadline, _monotonic(), CLOSED, waits_for_holds=waits_for_holds)
        try:
            self._lock.take(begin)
            if first:
                self._manager.unregister(self)
                self._drive(call, waiter)
                return self._end(good_bye_until(deadline), deadline if waits_for_holds else None)
        except BaseException as error:
            # Ctrl-C above all.
            if first:
                leave_word(self.settings.name, error, self._end(BRIEF))
            raise
        # A callback must not wait for the end of the callbacks.
        if not self._dispatcher.is_current_thread:
            self._all_ended.wait(deadline - _monotonic())
        return None

    def _end(self, patience: float, deadline: float | None = None) -> UndeliveredMessages | None:
        """End the connection and the callbacks, and return what nobody has been told of.

        Args:
            patience: seconds that each may take.
            deadline: until when `on_delivery` may be told; ``None`` for `patience`.
        """
        # Again, after Ctrl-C: what the first time has found is as true.
        try:
            self._left = self._left or self._lock.take(lambda: self._protocol.unsettled_receipts)
            # Once more, after Ctrl-C.
            self._manager.unregister(self)
            try:
                self._link.close(patience)
            finally:
                self._after()
                if self._observer is not None:
                    telemetry.unwatch(self._observer)
                self._lock.take(self._listeners.end)
                if self._deliveries is not None and deadline is not None:
                    patience = min(max(BRIEF, deadline - _monotonic()), threading.TIMEOUT_MAX)
                self._dispatcher.stop(patience)
        finally:
            try:
                if self._storage is not None:
                    self._storage.close(BRIEF)
            finally:
                # Others wait for no more than that.
                self._all_ended.set()
        failures = self._lock.take(self._protocol.reports.take_failures)
        return self._undelivered(failures, self._left)

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
            timeout = self.settings.max_producer_flow_control_wait
            leave_word(self.settings.name, exc, self._close(timeout, waits_for_holds=False))

    # After a step, without the lock.

    def _after(self) -> None:
        protocol = self._protocol
        if protocol.admission.observer is not None:
            protocol.admission.observer.tell(now=_monotonic())
        if protocol.reports.is_empty:
            return
        wake, logs = self._lock.take(self._pass_on)
        for waiter in wake:
            waiter.set()
        # Last, because it may take its time.
        write_log(logs)

    def _pass_on(self) -> tuple[list[Any], list[Any]]:
        """Pass on events and receipts, and return the waiters to wake and the entries to log."""
        settled, wake, logs = self._take_news()
        # In the order of the steps, so that two threads cannot swap what they pass on.
        if self._protocol.reports.events:
            self._listeners.tell(self._protocol, self._dispatcher.call)
        if settled:
            assert self._deliveries is not None
            self._deliveries.hand(settled)
            self._dispatcher.call(self._deliveries.tell, settled)
        return wake, logs

    # Forks and the end of the process.

    def _forked(self) -> None:
        self._link.forget()
        # The parent's threads may have held these, or been at work in it.
        self._lock = Guard()
        self._all_ended = Latch()
        self._all_ended.set()
        self._disown()
        self._listeners.end()

    def _forgotten(self) -> None:
        """At the end of the process: log what is lost if it was not closed."""
        if self._ended:
            return
        waiter = _Waiter()
        now = _monotonic()
        self._drive(steps.drain(self._protocol, waiter, now + _AT_EXIT, now), waiter)
        if self._storage is not None:
            self._storage.close(BRIEF)
        self._lock.take(lambda: log_forgotten(self._protocol, self._storage))
