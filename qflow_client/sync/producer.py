"""`Producer`: for threads."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pika

from qflow_client import telemetry
from qflow_client.core.admission import SendTicket, check_capacity
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry
from qflow_client.errors import (
    ConnectionFailed,
    FlowControlTimeout,
    NestedCall,
    ProducerClosed,
    ProducerFlowed,
    SettingsError,
    UndeliveredMessages,
)
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import FlowManager, Hold, Line
from qflow_client.guard import Guard, check_can_wait, is_inside
from qflow_client.logs import write_log
from qflow_client.manager import flow_manager
from qflow_client.message import Message, as_body
from qflow_client.receipt import Receipt
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
from qflow_client.sync.connection import SharedLink, TappedConnection
from qflow_client.sync.dispatcher import Dispatcher
from qflow_client.sync.latch import Latch
from qflow_client.sync.link import Link, parameters
from qflow_client.sync.receipt import SyncReceipt

if TYPE_CHECKING:
    from qflow_client.outbox.storage import Storage
    from qflow_client.outbox.writer import StoreStep

__all__ = ["Producer"]

_T = TypeVar("_T")


# How many messages are admitted in one go at the most: others want the lock, too.
_AT_ONCE = 64

# Seconds that the end of the process waits for a producer that was not closed.
_AT_EXIT = 1.0

_monotonic = time.monotonic


def _deadline(timeout: float | None) -> float:
    check_timeout(timeout)
    return math.inf if timeout is None else _monotonic() + timeout


class _Waiter:
    """Wakes one thread, once; cheaper than an event."""

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

    def wait_until(self, deadline: float) -> bool:
        """Whether it was woken before a time."""
        return self._lock.acquire(timeout=max(0.0, min(deadline - _monotonic(), threading.TIMEOUT_MAX)))


class Producer:
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
        #: What was set, wherever it came from.
        self.settings = ProducerSettings.load(url, settings, **keywords)
        check_arguments(url, connection, on_delivery, manager)
        if connection is not None and not isinstance(connection, TappedConnection):
            raise SettingsError(
                f"connection={type(connection).__name__}: on a connection made elsewhere Channel.Flow and confirms "
                "cannot be taken before pika gets them; make it with qflow_client.connect(url)"
            )
        # Guards the protocol, the link's `awake`, and who listens; one for all producers on a connection.
        self._lock = Guard() if connection is None else connection.carrier.lock
        # None unless admitted messages are kept on disk.
        self._storage: Storage | None = None
        self._exchange = self.settings.exchange
        self._routing_key = self.settings.routing_key
        # None if nobody is to be told of receipts.
        self._deliveries = None if on_delivery is None else Deliveries(on_delivery, self._told)
        self._listeners: Listeners[queue.SimpleQueue[FlowEvent | None]] = Listeners()
        # Set by the first close, and when that has come to its end.
        self._ended = False
        self._all_ended = Latch()
        # What was unsettled as its connection was ended.
        self._left: tuple[Receipt, ...] = ()
        # Where it was made, and whether this is a child of that process.
        self._pid = os.getpid()
        self._is_copy = False
        self._dispatcher = Dispatcher(f"qflow-callbacks {self.settings.name}")
        self._observer: telemetry.Observer | None = None
        self._manager = manager
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
        protocol = ProducerProtocol(self.settings, **protocol_options(self.settings, SyncReceipt, line))
        if self.settings.outbox is None:
            return protocol
        # They bring SQLite with them.
        from qflow_client.outbox.storage import Storage
        from qflow_client.sync.outbox import SpilledReceipt

        self._storage = Storage(self.settings)
        self._storage.open()
        self._storage.attach(protocol, SpilledReceipt, self._take)
        return protocol

    def _take(self, step: StoreStep) -> None:
        """Take a step for the outbox's thread."""
        self._step(lambda _protocol: step(_monotonic()))
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
            OutboxFull: with an outbox that has no room; likewise.
            NotDurable: with an outbox: the message is admitted, and not on disk after `timeout`, or the disk failed.
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
        try:
            receipt = self._protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                if not self._services.awake:
                    self._services.wake()
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        except BaseException:
            # What a signal handler raises, Ctrl-C above all, may have come before the wake.
            self._look_anew()
            raise
        check_can_wait("send()", payload)
        if self._storage is not None:
            stored = self._store(payload, exchange, routing_key, spills=True)
            if stored is not None:
                return self._made_durable(stored, _deadline(limit_of(timeout, self.settings)))
        else:
            receipt = self._step(lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic()))
            if receipt is not None:
                return receipt  # type: ignore[return-value]  # as above
        if self.settings.when_flowed is WhenFlowed.RAISE:
            return self._send_or_refuse(payload, exchange, routing_key, ProducerFlowed, BLOCKING_WAITS)
        timeout = limit_of(timeout, self.settings)
        if timeout is not None and timeout <= 0:
            return self._send_or_refuse(payload, exchange, routing_key, FlowControlTimeout, LONGER_WAITS)
        deadline = _deadline(timeout)
        receipt = self._send_when_unflowed(payload, exchange, routing_key, timeout, source)
        return receipt if self._storage is None else self._made_durable(receipt, deadline)

    def _store(
        self, payload: bytes | Message, exchange: str, routing_key: str, *, spills: bool = False
    ) -> SyncReceipt | None:
        """With an outbox: admit a message, or put it there, if that can be done now. It is not durable yet."""
        storage = self._storage
        assert storage is not None
        # A callback's, too: others may wait for its end.
        spills = spills and (
            self.settings.when_flowed is WhenFlowed.SPILL
            or (self._deliveries is not None and self._dispatcher.is_current_thread)
        )
        receipt = self._step(
            lambda _protocol: storage.store.send(payload, exchange, routing_key, _monotonic(), spills=spills)
        )
        return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make

    def _made_durable(self, receipt: SyncReceipt, deadline: float) -> SyncReceipt:
        """Return the receipt once its message is on disk."""
        assert self._storage is not None
        self._storage.wait_durable(receipt, deadline)
        return receipt

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
        if self._storage is not None:
            check_can_wait("send_nowait()", payload)
            stored = self._store(payload, exchange, routing_key)
            if stored is not None:
                return self._made_durable(stored, _monotonic())
        else:
            receipt = self._admit(payload, exchange, routing_key)
            if receipt is not None:
                return receipt
        advice = instead_of_nowait(self.settings.when_flowed)
        return self._send_or_refuse(payload, exchange, routing_key, ProducerFlowed, advice)

    def _admit(self, payload: bytes | Message, exchange: str, routing_key: str) -> SyncReceipt | None:
        """Admit a message, if that can be done now."""
        try:
            receipt = self._protocol.admission.send_at_once(payload, exchange, routing_key)
            if receipt is not None:
                if not self._services.awake:
                    self._services.wake()
                return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
        except BaseException:
            # As in `send`.
            self._look_anew()
            raise
        check_can_wait("send_nowait()", payload)
        return self._step(lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic()))  # type: ignore[return-value]  # as above

    def send_many(
        self,
        messages: Iterable[bytes | str | Message],
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = DEFAULT,
        source: str = "",
    ) -> list[SyncReceipt]:
        """`send` every message, in order, each as if it were alone. It costs less for a list or a tuple.

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
        with keeping(receipts):
            if isinstance(messages, (list, tuple)) and self._tracer is None:
                key = self._routing_key if routing_key is None else routing_key
                while len(receipts) < len(messages):
                    if not self._send_at_once(messages, exchange, key, receipts, timeout):
                        message = messages[len(receipts)]
                        receipts.append(
                            self.send(message, exchange=exchange, routing_key=key, timeout=timeout, source=source)
                        )
            else:
                # What is only to come must not be waited for, so each leaves before the next is taken.
                for message in messages:
                    receipts.append(
                        self.send(message, exchange=exchange, routing_key=routing_key, timeout=timeout, source=source)
                    )
        return receipts

    def _send_at_once(
        self,
        messages: Sequence[bytes | str | Message],
        exchange: str | None,
        routing_key: str,
        receipts: list[SyncReceipt],
        timeout: float | None,
    ) -> bool:
        """Admit the next of these messages, as many as can be now and are good for others; whether any were."""
        begin = len(receipts)
        deadline = _deadline(limit_of(timeout, self.settings))
        to = self._exchange if exchange is None else exchange

        def admit(protocol: ProducerProtocol) -> None:
            now = _monotonic()
            take = protocol.admission.send if self._storage is None else partial(self._storage.store.send, spills=False)
            for message in messages[begin : begin + _AT_ONCE]:
                payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
                receipt = take(payload, to, routing_key, now)
                if receipt is None:
                    return
                receipts.append(receipt)  # type: ignore[arg-type]  # the protocol makes what it was told to make

        try:
            self._step(admit)
        finally:
            if self._storage is not None and len(receipts) > begin:
                self._made_durable(receipts[-1], deadline)
        return len(receipts) > begin

    def _send_or_refuse(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        error_type: type[ProducerFlowed],
        advice: str,
    ) -> SyncReceipt:
        """Refuse what was not admitted, unless a callback sends it, for whose end others may wait."""

        def refuse(protocol: ProducerProtocol) -> tuple[Hold, ...]:
            protocol.admission.count_refusal()
            return protocol.reports.holds

        if self._deliveries is None or not self._dispatcher.is_current_thread:
            holds = self._step(refuse)
            self._arm_timer()
            raise error_type(holds, 0.0, payload, advice)
        try:
            receipt = self._send_when_unflowed(payload, exchange, routing_key, 0, "")
        except FlowControlTimeout as error:
            raise error_type(error.holds, 0.0, payload, advice) from None
        return receipt if self._storage is None else self._made_durable(receipt, _monotonic())

    def _send_when_unflowed(
        self, payload: bytes | Message, exchange: str, routing_key: str, timeout: float | None, source: str
    ) -> SyncReceipt:
        # Others may wait for the end of a callback.
        first = self._deliveries is not None and self._dispatcher.is_current_thread
        waiter = _Waiter()
        tickets: list[SendTicket] = []

        def stand_in_line(protocol: ProducerProtocol) -> float | None:
            now = _monotonic()
            tickets.append(
                protocol.admission.stand_in_line(
                    payload, exchange, routing_key, now, timeout=timeout, waiter=waiter, source=source, first=first
                )
            )
            return protocol.admission.look_at(tickets[0], now)

        try:
            look_at = self._step(stand_in_line)
            self._arm_timer()
            while look_at is not None and not waiter.wait_until(look_at):
                look_at = self._step(lambda protocol: protocol.admission.look_at(tickets[0], _monotonic()))
        except BaseException:
            # Ctrl-C above all: what was not admitted is not sent.
            self._step(lambda protocol: protocol.admission.give_up_of(waiter, tickets, _monotonic()))
            raise
        return self._admitted(tickets[0])

    @staticmethod
    def _admitted(ticket: SendTicket) -> SyncReceipt:
        if ticket.error is not None:
            raise ticket.error
        assert isinstance(ticket.receipt, SyncReceipt)
        return ticket.receipt

    def _step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        """Take a step of the protocol that may let somebody go on, and do what follows from it."""
        try:
            result = self._lock.take(lambda: step(self._protocol))
            self._kick()
            return result
        except NestedCall:
            raise
        except BaseException:
            self._look_anew()
            raise

    def _ask(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Take a step without waiting for its result; inside another step, the I/O thread takes it later."""
        if is_inside():
            self._services.add_callback_threadsafe(lambda: self._step(step))
        else:
            self._step(step)

    def _look_anew(self) -> None:
        """Have the I/O thread look at everything, because Ctrl-C may have come before anything that was to follow."""
        if not self._link.ended:
            self._link.look()
        elif not is_inside():
            self._lock.take(lambda: self._protocol.on_timer(_monotonic()))
            self._after()

    def _kick(self) -> None:
        """Have the I/O thread write what there is, and tell whom there is to tell."""
        protocol = self._protocol
        # As long as there is an I/O thread, that is for it, because no Ctrl-C comes there.
        if self._link.ended:
            self._after()
            return
        if not self._services.awake and protocol.unwritten > 0:
            self._services.wake()
        if not protocol.reports.is_empty:
            self._link.tell()

    def _arm_timer(self) -> None:
        """Have the protocol told when its time comes, if that can let anybody go on."""
        if self.settings.rate is not None:
            self._link.arm_timer()

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
        if not self._wait(self._protocol.when_flushed, _deadline(timeout)):
            raise unflushed(self._protocol, self._storage, timeout)
        failures = self._lock.take(self._protocol.reports.take_failures)
        if failures:
            raise UndeliveredMessages(failures)

    def _wait(self, enroll: Callable[[_Waiter], bool], deadline: float) -> bool:
        """Wait for something of the protocol's, at most until a time; whether it came."""
        waiter = _Waiter()
        try:
            # Whoever asks whether the window is full raises its hold, or lifts it.
            waits = self._step(lambda _protocol: enroll(waiter))
            if waits:
                waiter.wait_until(deadline)
        finally:
            # Not what the waiter says: it may have come at the last moment, with the wake still on its way.
            came = not self._lock.take(lambda: self._protocol.forget_waiter(waiter))
        return came

    # The window.

    @property
    def capacity(self) -> int:
        """The most unsettled messages there may be.

        It may be set at any time. A lower one cancels nothing: nothing is admitted until there is room (C6). With
        ``capacity="auto"`` it is what the producer has found so far, until a number is set, which then stays.

        Raises:
            SettingsError: it is set to what is not allowed.
        """
        return self._protocol.window.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        # Checked now: the caller would not see an error that the I/O thread raises later.
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
        in_callback = self._deliveries is not None and self._dispatcher.is_current_thread

        def enroll(waiter: _Waiter) -> bool:
            waits = self._protocol.when_unflowed(waiter, _monotonic(), in_callback=in_callback)
            if waits:
                self._arm_timer()
            return waits

        deadline = _deadline(timeout)
        check_can_wait("wait_unflowed()")
        if self._protocol.closed is None and not self._wait(enroll, deadline):
            return False
        if self._protocol.closed is not None:
            raise ProducerClosed(self._protocol.closed)
        return True

    def on_flow(
        self, callback: Callable[[FlowEvent], object], *, kinds: Iterable[str] | None = None
    ) -> Callable[[], None]:
        """Have a callback called with every flow event, in order, on the producer's callback thread.

        Args:
            callback: may call any method of the producer. If it raises, that is logged.
            kinds: the hold kinds to hear of, such as ``("connection_blocked",)``; ``None`` for all. A fast producer is
                held by ``capacity`` with every burst.

        Returns:
            What to call to have it called no more.

        Raises:
            TypeError: `callback` cannot be called, or `kinds` are not words.
            ValueError: one of `kinds` is not a hold kind.
        """
        check_argument("callback", callback, callable(callback), "callable")
        wanted = kinds_of(kinds)

        def unsubscribe() -> None:
            self._ask(lambda _protocol: self._listeners.remove(unsubscribe))

        def add(protocol: ProducerProtocol) -> None:
            if not self._ended:
                self._listeners.add(protocol, unsubscribe, callback, wanted)

        def listen() -> None:
            self._dispatcher.start()
            self._step(add)

        if is_inside():
            self._services.add_callback_threadsafe(listen)
        elif not self._ended:
            listen()
        return unsubscribe

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

    def pause(self, reason: str = "") -> None:
        """Hold the producer until `resume`. What is admitted already still leaves (D5).

        Args:
            reason: for people; it is the detail of the hold.
        """
        self.hold(HoldKind.PAUSED, source="", detail=reason)

    def resume(self) -> None:
        """Lift the hold of `pause`. One that the manager raised stays."""
        self.lift(HoldKind.PAUSED, source="")

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold; for managers. Applications use `pause`.

        Args:
            kind: why, as one word.
            source: who raises it.
            detail: what people should read.
        """
        self._ask(lambda protocol: protocol.hold(kind, _monotonic(), source=source, detail=detail))

    def lift(self, kind: str, *, source: str) -> None:
        """Lift a hold; for managers. Applications use `resume`.

        Args:
            kind: why it was raised.
            source: who raised it.
        """
        self._ask(lambda protocol: protocol.lift(kind, _monotonic(), source=source))

    # The end.

    @property
    def name(self) -> str:
        """What flow events, logs and the broker's management call it; the setting."""
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._protocol.closed is not None

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
        """Close it, and return what was not delivered and nobody has been told of."""
        deadline = _deadline(timeout)
        check_can_wait("close()")
        first = False

        def end() -> None:
            nonlocal first
            first = not self._ended
            self._ended = True

        try:
            self._lock.take(end)
            if first:
                self._step(lambda protocol: protocol.close(CLOSED, _monotonic()))
                self._manager.unregister(self)
                if waits_for_holds:
                    self._wait(self._protocol.when_flushed, deadline)
                else:
                    self._flush_unheld(deadline)
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

    def _flush_unheld(self, deadline: float) -> None:
        """Wait until all is settled, but for no hold."""
        before = -1
        while (now := _monotonic()) < deadline:
            if self._lock.take(partial(gives_up, self._protocol, before, now)):
                return
            before = self._protocol.unsettled
            if self._wait(self._protocol.when_settled, min(deadline, now + LULL)):
                return

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
                    self._storage.close(BRIEF if deadline is None else max(BRIEF, deadline - _monotonic()))
            finally:
                # Others wait for no more than that.
                self._all_ended.set()
        failures = self._lock.take(self._protocol.reports.take_failures)
        if self._deliveries is not None:
            failures += self._deliveries.undelivered(self._left)
        return undelivered_of(failures, self._storage)

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

    def __repr__(self) -> str:
        state = "closed" if self.closed else "flowed" if not self._protocol.gate.is_open else "open"
        return f"<Producer {self.settings.name!r} {state} unsettled={self.unsettled}>"

    # Whatever changed the protocol calls this afterwards, without the lock.

    def _after(self) -> None:
        protocol = self._protocol
        if protocol.admission.observer is not None:
            protocol.admission.observer.tell(now=_monotonic())
        if protocol.reports.is_empty:
            return
        wake, logs = self._lock.take(self._take_news)
        for waiter in wake:
            waiter.set()
        # Last, because it may take its time.
        write_log(logs)

    def _take_news(self) -> tuple[list[Any], list[LogEntry]]:
        """Report events and receipts; return the waiters to wake and the entries to log."""
        protocol = self._protocol
        settled = protocol.take_settled(_monotonic()) if protocol.reports.settled else []
        wake, protocol.reports.wake = protocol.reports.wake, []
        logs, protocol.reports.logs = protocol.reports.logs, []
        # In the order of the steps, so that two threads cannot swap what they tell.
        if protocol.reports.events:
            self._listeners.tell(protocol, self._dispatcher.call)
        if settled:
            assert self._deliveries is not None
            self._deliveries.hand(settled)
            self._dispatcher.call(self._deliveries.tell, settled)
        return wake, logs

    def _told(self, count: int) -> None:
        self._step(lambda protocol: protocol.told(count, _monotonic()))

    # Forks and the end of the process.

    def _forked(self) -> None:
        """In a child process: everything of this producer is the parent's."""
        self._is_copy = self._ended = True
        self._manager.forked()
        self._link.forget()
        # Its threads may have held these, or been at work in it.
        self._lock = Guard()
        self._all_ended = Latch()
        self._all_ended.set()
        self._protocol, self._storage = disown(self._protocol, self._storage, self._pid), None
        self._listeners.end()

    def _forgotten(self) -> None:
        """At the end of the process: say what is lost if it was not closed."""
        if self._ended:
            return
        self._flush_unheld(_monotonic() + _AT_EXIT)
        if self._storage is not None:
            self._storage.close(BRIEF)
        self._lock.take(lambda: log_forgotten(self._protocol, self._storage))
