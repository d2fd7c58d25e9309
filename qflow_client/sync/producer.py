"""`Producer`: for threads."""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from qflow_client.errors import (
    ConfirmTimeout,
    ConnectionFailed,
    FlowControlTimeout,
    ProducerClosed,
    ProducerFlowed,
    UndeliveredMessages,
)
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import FlowManager, Line
from qflow_client.manager import flow_manager
from qflow_client.message import Message, as_body
from qflow_client.protocol import LogEntry, ProducerProtocol, SendTicket, write_log
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings, WhenFlowed, check_argument, check_timeout
from qflow_client.sync.dispatcher import Dispatcher
from qflow_client.sync.link import Link, parameters
from qflow_client.sync.receipt import SyncReceipt

__all__ = ["Producer"]

logger = logging.getLogger(__name__)


class _Default:
    """Stands for the setting where ``None`` has a meaning of its own."""

    def __repr__(self) -> str:
        return "<the setting>"


_DEFAULT: Any = _Default()

# Seconds that the broker may take for an orderly good-bye, and running callbacks for their end: at the most, and when
# the time to wait is up.
_GOOD_BYE = 3.0
_BRIEF = 0.3
# After how many receipts at the latest it is noted that `on_delivery` was told of them.
_TELL_AT_ONCE = 100
# Seconds without any answer of the broker, after which who must not wait for holds takes late ones for withheld.
_LULL = 0.5
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
        self._lock.release()

    def wait_until(self, deadline: float) -> bool:
        """Whether it was woken before a time."""
        return self._lock.acquire(timeout=max(0.0, min(deadline - _monotonic(), threading.TIMEOUT_MAX)))


class Producer:
    """Publishes to an AMQP 0-9-1 broker, never faster than the broker allows. Any number of threads may use one.

    It connects when it is made, and has a connection and an I/O thread of its own. Leaving a ``with`` block closes it.

    An exception that leaves the block stays the one that is raised, and waits for no hold: not at all under
    ``channel_flow`` and ``connection_blocked``, under ``capacity`` and ``transport`` only while the broker goes on
    answering, otherwise as `close` does. What was not delivered is logged, noted on the exception, and in its attribute
    ``undelivered``, an `UndeliveredMessages`.

    Args:
        url: URL of the broker, or several to try in turn.
        on_delivery: called with every receipt once it is settled, on the producer's callback thread. With it, `flush`
            and `close` do not bring up again what it was told. If it is slower than the broker's confirms, the producer
            is held by ``capacity``. It may `send`, which then waits neither for other senders nor for other callbacks.
        settings: settings that no keyword gives.
        line: the order in which waiting sends are served; first come, first served unless given (F4). A `WeightedLine`
            tells them apart by the `source` of `send`.
        manager: where it registers, to be stopped and started with all others; the process's own unless given.
        keywords: settings by name, see `ProducerSettings`.

    Raises:
        SettingsError: a setting has a value that is not allowed.
        ConnectionFailed: no host could be connected to.
        TypeError: another argument is of the wrong type.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        on_delivery: Callable[[Receipt], object] | None = None,
        settings: ProducerSettings | None = None,
        line: Line | None = None,
        manager: FlowManager = flow_manager,
        **keywords: Any,
    ) -> None:
        #: What was set, wherever it came from.
        self.settings = ProducerSettings.load(url, settings, **keywords)
        # As that, before anything is connected.
        check_argument("on_delivery", on_delivery, on_delivery is None or callable(on_delivery), "None or callable")
        check_argument("manager", manager, isinstance(manager, FlowManager), "a FlowManager")
        now = _monotonic()
        # Guards the protocol, the link's `awake`, and who listens.
        self._lock = threading.Lock()
        self._protocol = ProducerProtocol(
            self.settings,
            id_prefix=f"{uuid4().hex[:16]}-",
            receipt_type=SyncReceipt,
            now=now,
            wall_offset=time.time() - now,
            line=line,
        )
        self._exchange = self.settings.exchange
        self._routing_key = self.settings.routing_key
        self._on_delivery = on_delivery
        # What it is to be told, and is not told all of yet, and how many of the first part it was told.
        self._handed: deque[list[Receipt]] = deque()
        self._told_of_first = 0
        # Who is told of flow events. Of an iterator that nobody has any more, nothing is left.
        self._listeners: list[tuple[Callable[[], None], Callable[[FlowEvent], object]]] = []
        self._queues: weakref.WeakSet[queue.SimpleQueue[FlowEvent | None]] = weakref.WeakSet()
        # Set by the first close, and when that has come to its end.
        self._ended = False
        self._all_ended = threading.Event()
        # Where it was made, and whether this is a child of that process.
        self._pid = os.getpid()
        self._is_copy = False
        self._dispatcher = Dispatcher(f"qflow-callbacks {self.settings.name}")
        self._manager = manager
        self._link = self._connect()
        try:
            self._services = self._link.services
            if on_delivery is not None:
                self._protocol.settled = []
                self._dispatcher.start()
            manager.register(self)
            _producers.add(self)
        except BaseException:
            self._end(_BRIEF)
            raise

    def _connect(self) -> Link:
        errors = []
        # All that can be wrong with any of them is said before the first is tried.
        hosts = [(url, parameters(url, self.settings)) for url in self.settings.urls]
        for url, connect_to in hosts:
            link = Link(url, connect_to, self._protocol, self._lock, self._after)
            try:
                link.open(self.settings.connect_timeout)
            except ConnectionFailed as error:
                errors.append(error)
            else:
                return link
        raise (
            errors[0]
            if len(errors) == 1
            else ConnectionFailed(f"none of {len(errors)} hosts could be connected to: {'; '.join(map(str, errors))}")
        )

    # Sending.

    def send(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        timeout: float | None = _DEFAULT,
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
        if timeout is not _DEFAULT and timeout != 0:
            check_timeout(timeout)
        payload = message if type(message) is bytes or isinstance(message, Message) else as_body(message)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        services = self._services
        with self._lock:
            receipt = self._protocol.send(payload, exchange, routing_key, _monotonic())
            if receipt is not None:
                if services.awake:
                    return receipt  # type: ignore[return-value]  # the protocol makes what it was told to make
                services.awake = True
        if receipt is not None:
            services.wake()
            return receipt  # type: ignore[return-value]  # as above
        raises = self.settings.when_flowed is WhenFlowed.RAISE
        if timeout is _DEFAULT:
            timeout = self.settings.max_producer_flow_control_wait
        if raises or (timeout is not None and timeout < 0):
            timeout = 0
        try:
            return self._send_when_unflowed(payload, exchange, routing_key, timeout, source)
        except FlowControlTimeout as error:
            if raises:
                raise ProducerFlowed(error.holds, 0.0, error.message, "when_flowed='block' waits") from None
            raise

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
        try:
            return self.send(message, exchange=exchange, routing_key=routing_key, timeout=0, source=source)
        except FlowControlTimeout as error:
            raise ProducerFlowed(error.holds, 0.0, error.message, "send() waits") from None

    def _flowed(self, payload: Any) -> FlowControlTimeout:
        with self._lock:
            holds = self._protocol.holds
        self._after()
        if self.settings.rate is not None:
            self._link.arm_timer()
        return FlowControlTimeout(holds, 0.0, payload, "a longer timeout waits")

    def _send_when_unflowed(
        self, payload: bytes | Message, exchange: str, routing_key: str, timeout: float | None, source: str
    ) -> SyncReceipt:
        # Others may wait for the end of a callback.
        first = self._on_delivery is not None and self._dispatcher.is_current_thread
        if timeout == 0 and not first:
            raise self._flowed(payload)
        protocol = self._protocol
        waiter = _Waiter()
        ticket: SendTicket | None = None
        try:
            with self._lock:
                now = _monotonic()
                ticket = protocol.stand_in_line(
                    payload, exchange, routing_key, now, timeout=timeout, waiter=waiter, source=source, first=first
                )
                look_at = protocol.look_at(ticket, now)
            self._kick()
            if self.settings.rate is not None:
                self._link.arm_timer()
            while look_at is not None and not waiter.wait_until(look_at):
                with self._lock:
                    look_at = protocol.look_at(ticket, _monotonic())
                self._after()
        except BaseException:
            # Ctrl-C above all: what was not admitted is not sent.
            if ticket is not None:
                with self._lock:
                    protocol.give_up(ticket, _monotonic())
                self._kick()
            raise
        return self._admitted(ticket)

    @staticmethod
    def _admitted(ticket: SendTicket) -> SyncReceipt:
        if ticket.error is not None:
            raise ticket.error
        assert isinstance(ticket.receipt, SyncReceipt)
        return ticket.receipt

    def _kick(self) -> None:
        """Have the I/O thread write what there is, and tell whom there is to tell."""
        with self._lock:
            asleep = not self._services.awake and self._protocol.outbound.size > 0
            if asleep:
                self._services.awake = True
        if asleep:
            self._services.wake()
        self._after()

    def flush(self, timeout: float | None = _DEFAULT) -> None:
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
        if timeout is _DEFAULT:
            timeout = self.settings.max_producer_flow_control_wait
        if not self._wait(self._protocol.when_flushed, _deadline(timeout)):
            unsettled = self.unsettled
            assert timeout is not None
            raise ConfirmTimeout(f"{unsettled} messages are not settled after {timeout:.3g} s", unsettled)
        with self._lock:
            failures = self._protocol.take_failures()
        if failures:
            raise UndeliveredMessages(failures)

    def _wait(self, enroll: Callable[[_Waiter], bool], deadline: float) -> bool:
        """Wait for something of the protocol's, at most until a time; whether it came."""
        waiter = _Waiter()
        try:
            with self._lock:
                waits = enroll(waiter)
            # Whoever asks whether the window is full raises its hold, or lifts it.
            self._after()
            if waits:
                waiter.wait_until(deadline)
        finally:
            with self._lock:
                # Not what the waiter says: it may have come at the last moment, with the wake still on its way.
                came = not self._protocol.forget_waiter(waiter)
        return came

    # The window.

    @property
    def capacity(self) -> int:
        """The most unsettled messages there may be.

        It may be set at any time. A lower one cancels nothing: nothing is admitted until there is room (C6).

        Raises:
            SettingsError: it is set to what is not allowed.
        """
        return self._protocol.window.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        # The setting's own check and words.
        ProducerSettings(capacity=capacity)
        with self._lock:
            self._protocol.set_capacity(capacity, _monotonic())
        self._kick()

    @property
    def available(self) -> int:
        """How many messages could be admitted before the window is full; never below 0."""
        return max(0, self._protocol.window.capacity - self._protocol.window.used)

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return self._protocol.unsettled

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        with self._lock:
            return self._protocol.in_flight

    # Flow.

    @property
    def flow_state(self) -> FlowState:
        """Whether the producer is flowed, by what, since when and how often."""
        with self._lock:
            state = self._protocol.flow_state(_monotonic())
        self._after()
        return state

    def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until no hold is left.

        Args:
            timeout: seconds; ``None`` for ever.

        Returns:
            Whether none is.

        Raises:
            ProducerClosed: it is closed, so it never will be.
            TypeError, ValueError: `timeout` is no number.
        """

        def enroll(waiter: _Waiter) -> bool:
            waits = self._protocol.when_unflowed(waiter, _monotonic())
            if waits and self.settings.rate is not None:
                self._link.arm_timer()
            return waits

        deadline = _deadline(timeout)
        if self._protocol.closed is None and not self._wait(enroll, deadline):
            return False
        if self._protocol.closed is not None:
            raise ProducerClosed(self._protocol.closed)
        return True

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Have a callback called with every flow event, in order, on the producer's callback thread.

        Args:
            callback: may call any method of the producer. If it raises, that is logged.

        Returns:
            What to call to have it called no more.
        """

        def unsubscribe() -> None:
            with self._lock:
                # The same callback may be registered several times.
                self._listeners[:] = (each for each in self._listeners if each[0] is not unsubscribe)

        with self._lock:
            if not self._ended:
                self._dispatcher.start()
                self._listeners.append((unsubscribe, callback))
                self._listen()

        return unsubscribe

    def flow_events(self) -> Iterator[FlowEvent]:
        """The flow events from now on.

        Returns:
            An iterator for one thread, which blocks for the next event, and ends when the producer is closed.
        """
        events: queue.SimpleQueue[FlowEvent | None] = queue.SimpleQueue()
        with self._lock:
            if self._ended:
                events.put(None)
            else:
                self._queues.add(events)
                self._listen()
        return iter(events.get, None)

    def _listen(self) -> None:
        if self._protocol.events is None:
            self._protocol.events = []

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
        with self._lock:
            self._protocol.hold(kind, _monotonic(), source=source, detail=detail)
        self._after()

    def lift(self, kind: str, *, source: str) -> None:
        """Lift a hold; for managers. Applications use `resume`.

        Args:
            kind: why it was raised.
            source: who raised it.
        """
        with self._lock:
            self._protocol.lift(kind, _monotonic(), source=source)
        self._kick()

    # The end.

    @property
    def name(self) -> str:
        """What flow events, logs and the broker's management call it; the setting."""
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._protocol.closed is not None

    def close(self, timeout: float | None = _DEFAULT) -> None:
        """Flush, and end the connection. A second call waits for the end of the first and does nothing else.

        When the time is up it returns within a second, whatever the broker and the network do.

        Args:
            timeout: seconds that messages may take to be settled; ``None`` for ever; the setting
                `max_producer_flow_control_wait` unless given.

        Raises:
            UndeliveredMessages: some were not delivered, and nobody has been told. Nothing else is dropped.
            TypeError, ValueError: `timeout` is no number; nothing has happened.
        """
        if timeout is _DEFAULT:
            timeout = self.settings.max_producer_flow_control_wait
        failures = self._close(timeout)
        if failures:
            raise UndeliveredMessages(failures)

    def _close(self, timeout: float | None, *, waits_for_holds: bool = True) -> list[Receipt]:
        """Close it, and return what was not delivered and nobody has been told of."""
        deadline = _deadline(timeout)
        with self._lock:
            again = self._ended
            self._ended = True
            self._protocol.close("the producer is closed", _monotonic())
        if again:
            # A callback must not wait for the end of the callbacks.
            if not self._dispatcher.is_current_thread:
                self._all_ended.wait(min(deadline - _monotonic(), threading.TIMEOUT_MAX))
            return []
        try:
            self._kick()
            self._manager.unregister(self)
            if waits_for_holds:
                self._wait(self._protocol.when_flushed, deadline)
            else:
                self._flush_unheld(deadline)
            patience = max(_BRIEF, min(_GOOD_BYE, deadline - _monotonic()))
        except BaseException as error:
            # Ctrl-C above all.
            self._leave_word(error, self._end(_BRIEF))
            raise
        return self._end(patience, deadline if waits_for_holds else None)

    def _flush_unheld(self, deadline: float) -> None:
        """Wait until all is settled, but for no hold.

        A fast producer is held by ``capacity`` and ``transport`` most of the time, and waits for nothing but answers
        that are on their way; so they end the wait only if none comes for a while. ``paused`` and ``rate`` keep
        nothing back that is admitted.
        """
        protocol = self._protocol
        before = -1
        while (now := _monotonic()) < deadline:
            with self._lock:
                protocol.controller.look(now)
                late = any(map(protocol.gate.is_held_by, (HoldKind.CAPACITY, HoldKind.TRANSPORT)))
                unsettled = protocol.unsettled
                if protocol.outbound.stopped or (late and unsettled == before):
                    return
            before = unsettled
            if self._wait(protocol.when_flushed, min(deadline, now + _LULL)):
                return

    def _end(self, patience: float, deadline: float | None = None) -> list[Receipt]:
        """End the connection and the callbacks, and return what nobody has been told of.

        Args:
            patience: seconds that each may take.
            deadline: until when `on_delivery` may be told; ``None`` for `patience`.
        """
        with self._lock:
            left = self._protocol.unsettled_receipts
        try:
            self._link.close(patience)
        finally:
            self._after()
            with self._lock:
                failures = self._protocol.take_failures()
                queues = tuple(self._queues)
                self._queues.clear()
            for events in queues:
                events.put(None)
            if self._on_delivery is not None and deadline is not None:
                patience = min(max(_BRIEF, deadline - _monotonic()), threading.TIMEOUT_MAX)
            self._dispatcher.stop(patience)
            self._all_ended.set()
        if self._on_delivery is None:
            return failures
        # What it was to be told of, and has not been in time. What was left it was told, but nobody may have
        # been listening any more.
        late = [receipt for receipts in tuple(self._handed) for receipt in receipts][self._told_of_first :]
        untold = {id(receipt): receipt for receipt in (*late, *left) if receipt._failed and not receipt._seen}
        return sorted(untold.values(), key=lambda receipt: receipt._number)

    def _leave_word(self, error: BaseException, failures: list[Receipt]) -> None:
        """Say what was not delivered without taking an exception's place."""
        if failures:
            undelivered = UndeliveredMessages(failures)
            # Nobody reads the notes of a SystemExit.
            logger.error("%s: left by %s: %s", self.settings.name, type(error).__name__, undelivered)
            # An exception may refuse attributes.
            with suppress(Exception):
                error.add_note(f"qflow_client: {undelivered}")
                error.undelivered = undelivered  # type: ignore[attr-defined]

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
            self._leave_word(exc, self._close(timeout, waits_for_holds=False))

    def __repr__(self) -> str:
        state = "closed" if self.closed else "flowed" if not self._protocol.gate.is_open else "open"
        return f"<Producer {self.settings.name!r} {state} unsettled={self.unsettled}>"

    # Whatever changed the protocol calls this afterwards, without the lock.

    def _after(self) -> None:
        protocol = self._protocol
        if not protocol.wake and not protocol.events and not protocol.settled and not protocol.logs:
            return
        logs: list[LogEntry] = []
        with self._lock:
            settled: list[Receipt] = []
            if protocol.settled:
                settled = protocol.take_settled(_monotonic())
            wake, protocol.wake = protocol.wake, []
            if protocol.logs:
                logs, protocol.logs = protocol.logs, []
            events: list[FlowEvent] = []
            if protocol.events:
                events, protocol.events = protocol.events, []
            # In the order of the lock, so that two threads cannot swap what they tell.
            for event in events:
                for events_queue in self._queues:
                    events_queue.put(event)
                for _, listener in self._listeners:
                    self._dispatcher.call(listener, event)
            if settled:
                self._handed.append(settled)
                self._dispatcher.call(self._deliver, settled)
        for waiter in wake:
            waiter.set()
        # Last, because it may take its time.
        write_log(logs)

    def _deliver(self, receipts: list[Receipt]) -> None:
        assert self._on_delivery is not None
        told = 0
        for receipt in receipts:
            try:
                self._on_delivery(receipt)
            except BaseException:
                # The application's mistake, or its sys.exit, must not cost it the receipts that follow.
                logger.exception("on_delivery failed on %r", receipt)
            self._told_of_first += 1
            told += 1
            if told == _TELL_AT_ONCE:
                self._told(told)
                told = 0
        # In this order: what is told twice is not lost.
        self._told_of_first = 0
        self._handed.popleft()
        self._told(told)

    def _told(self, count: int) -> None:
        with self._lock:
            held = not self._protocol.gate.is_open
            self._protocol.told(count, _monotonic())
        if held:
            self._kick()

    # Forks and the end of the process.

    def _forked(self) -> None:
        """In a child process: everything of this producer is the parent's."""
        self._is_copy = self._ended = True
        self._link.forget()
        # Its threads may have held these, or been at work in it.
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        self._all_ended.set()
        for receipt in self._protocol.unsettled_receipts:
            # Nobody in this process will hear of it.
            receipt._reply = (0, f"process {os.getpid()} is a child of process {self._pid}, which sent it")
            receipt._outcome = Outcome.UNKNOWN
        now = _monotonic()
        self._protocol = ProducerProtocol(self.settings, id_prefix="", now=now, wall_offset=time.time() - now)
        self._protocol.close(
            f"it was made in process {self._pid}, and this is process {os.getpid()}: a connection cannot be shared "
            "with a child process; make a producer in the child",
            now,
        )
        self._listeners.clear()
        for events in self._queues:
            events.put(None)
        self._queues.clear()

    def _forgotten(self) -> None:
        """At the end of the process: say what is lost if it was not closed."""
        if self._ended:
            return
        self._flush_unheld(_monotonic() + _AT_EXIT)
        with self._lock:
            lost = [*self._protocol.take_failures(), *self._protocol.unsettled_receipts]
        if lost:
            logger.error(
                "%s: the process ends, and the producer was not closed: %s",
                self.settings.name,
                UndeliveredMessages(lost),
            )


_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for producer in tuple(_producers):
        producer._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    for producer in tuple(_producers):
        producer._forgotten()
