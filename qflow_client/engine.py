"""The base class of engines, which run the `ProducerProtocol` of a producer for threads or for asyncio.

The application refers to a producer, and the producer refers to its engine. The I/O thread or the event loop refers to
the engine, and not to the producer. So a producer that the application drops without a close can be collected. The
engine then ends by itself (`abandon`): it admits no more messages, delivers the admitted ones, and disconnects.

A *step* is one change of the protocol's state (`step`, `try_step`). `after` passes a step's reports to the application.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4
from weakref import WeakSet, WeakValueDictionary

from qflow_client import telemetry
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry
from qflow_client.errors import ConfirmTimeout, NestedCall, UndeliveredMessages
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.forks import after_fork_in_child
from qflow_client.guard import NOT_TAKEN, Guard, NotTaken, is_inside
from qflow_client.logs import log
from qflow_client.message import Message
from qflow_client.receipt import Outcome, Receipt
from qflow_client.recovery import retries
from qflow_client.settings import ProducerSettings, WhenFlowed
from qflow_client.skin import CLOSED, Deliveries, Listeners, Subscription
from qflow_client.topology import Topology

if TYPE_CHECKING:
    from qflow_client.outbox.storage import Storage

__all__ = ["DROPPED", "BaseEngine", "watch_process"]

_T = TypeVar("_T")

_monotonic = time.monotonic

#: The reason why a dropped producer admits no messages.
DROPPED = "the producer was dropped without close()"


class BaseEngine(ABC):
    """The part of an engine that is the same for threads and for asyncio."""

    #: The state of the producer. Only steps and `admission.send_at_once` change this state.
    protocol: ProducerProtocol
    #: The lock that a thread has during a step.
    lock: Guard
    #: The object for the connection and its publishing channel; ``None`` before it is created.
    link: Any
    #: The thread or loop that calls callbacks; ``None`` before it is created.
    dispatcher: Any
    #: The event loop of an `AsyncProducer`; ``None`` before it connects, and always ``None`` for a `Producer`.
    loop: Any = None
    #: The class of the waiters, by which the engine wakes waiting calls.
    make_waiter: type[Any]

    def __init__(
        self,
        settings: ProducerSettings,
        on_delivery: Callable[[Receipt], object] | None,
        manager: FlowManager,
        topology: Topology | None,
    ) -> None:
        self.settings = settings
        self.topology = topology
        self._manager = manager
        #: The outbox; ``None`` if there is none.
        self.storage: Storage | None = None
        #: Calls the callback `on_delivery`; ``None`` without a callback.
        self.deliveries = None if on_delivery is None else Deliveries(on_delivery, self._reported)
        self.listeners: Listeners[Any] = Listeners(settings.name, settings.max_flow_events)
        #: Measures and traces messages; ``None`` until the producer is connected.
        self.observer: telemetry.Observer | None = None
        #: Unregisters the producer from its manager.
        self.unregister: Callable[[], object] = bool
        #: Detaches the producer's finalizer, so that the garbage collection of the producer does not call `abandon`.
        self.detach: Callable[[], object] = bool
        #: Whether the engine has begun to end: by `close`, by `abandon`, or in a forked child.
        self.ended = False
        #: Whether the application has dropped the producer without closing it.
        self.is_dropped = False
        #: Whether `_disown` was called, because this process is a forked child of the producer's process.
        self.is_copy = False
        self._pid = os.getpid()
        # Postponed steps, in the order of the calls of `put_off`.
        self._put_off: deque[Callable[[ProducerProtocol], object]] = deque()

    def _new_protocol(self, receipt_type: type[Receipt], line: Line | None) -> ProducerProtocol:
        now = _monotonic()
        self.protocol = ProducerProtocol(
            self.settings,
            id_prefix=f"{uuid4().hex[:16]}-",
            receipt_type=receipt_type,
            now=now,
            wall_offset=time.time() - now,
            line=line,
            retries=retries(self.settings),
        )
        if line is not None:
            self._use_line(line)
        return self.protocol

    def _use_line(self, line: Line) -> None:
        """Reject a line of another open producer, because each producer would admit the messages of both."""
        other = _lines.get(id(line))
        if other is not None and not other.ended and other.protocol.closed is None:
            raise ValueError("line: another open producer uses this object; give each producer a line of its own")
        _lines[id(line)] = self
        # In a forked child, calls of the parent's threads may stand in the line.
        line.clear()

    # Steps.

    def step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        """Execute a step of the protocol, and then call `kick`."""
        try:
            result = self.lock.take(lambda: step(self.protocol))
            self.kick()
            return result
        except BaseException:
            if not is_inside():
                self.recheck()
            raise

    def try_step(self, step: Callable[[ProducerProtocol], _T], deadline: float = 0.0) -> _T | NotTaken:
        """Execute a step for a call of the application. `Guard.try_take` describes the deadline and the result."""
        try:
            result = self.lock.try_take(lambda: step(self.protocol), deadline)
            if result is not NOT_TAKEN:
                self.kick()
            return result
        except BaseException:
            self.recheck()
            raise

    def ask(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Execute a step on this thread if that is possible now. Otherwise postpone the step."""
        if self._put_off or not self.may_step or self.try_step(step) is NOT_TAKEN:
            self.put_off(step)

    def put_off(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Execute a step later, on the I/O thread or the loop."""
        self._put_off.append(step)
        self.call_later(lambda: self.step(self.take_all_put_off))

    def take_all_put_off(self, protocol: ProducerProtocol) -> None:
        """Execute the postponed steps. Callers pass this method to `step`, because it changes the protocol's state."""
        while self._put_off:
            try:
                put_off = self._put_off.popleft()
            except IndexError:
                # Another thread took the last postponed step: an ending engine may call this method without the lock.
                return
            put_off(protocol)

    @property
    @abstractmethod
    def may_step(self) -> bool:
        """Whether this thread may execute steps."""

    def check_loop(  # noqa: B027  # there is no loop, unless a subclass has one
        self,
        payload: bytes | Message | None = None,
        exchange: str | None = None,
        routing_key: str | None = None,
        *,
        waits: bool = True,
    ) -> None:
        """Raise an error in an event loop other than the producer's, whose tasks the producer could not wake.

        Args:
            payload: message for the error; ``None`` for a call without a message.
            waits: False for a call that never waits, which is allowed while the producer's loop runs on another thread.

        Raises:
            ProducerClosed: the producer's loop is closed.
            WrongLoop: the running loop is not the producer's.
        """

    @abstractmethod
    def call_later(self, function: Callable[[], object]) -> None:
        """Return immediately, and let the I/O thread or the loop call a function soon."""

    @abstractmethod
    def kick(self) -> None:
        """Make the I/O thread or the loop write the output, and pass the protocol's reports to the application."""

    @abstractmethod
    def recheck(self) -> None:
        """Request a step. If an exception has interrupted the last step, the requested step first repairs the state."""

    @abstractmethod
    def close_later(self, deadline: float) -> None:
        """Begin to close, and return immediately. Later, log the messages that are not delivered by the deadline."""

    @property
    def last_failure(self) -> str:
        """The error of the last try to connect. Empty if no try has failed since the last connection."""
        return "" if self.link is None else self.link.last_failure

    def arm_timer(self) -> None:
        """If there is a rate limit, start the timer that lifts the hold ``rate`` when the next message is allowed."""
        if self.settings.rate is not None and self.link is not None:
            self.link.arm_timer()

    @property
    @abstractmethod
    def is_in_callback(self) -> bool:
        """Whether the caller is `on_delivery` or a flow callback. Always False without an `on_delivery`."""

    def admit(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        deadline: float = 0.0,
        *,
        spills: bool = False,
    ) -> Receipt | None:
        """Put a message into the window, or spill it into the outbox, if this is possible now.

        Args:
            deadline: as for `Guard.try_take`.
            spills: whether the outbox may take the message while the producer is flowed. The outbox does so if
                `when_flowed` is ``"spill"``. In a callback it always does, because senders may wait for the callback.

        Returns:
            The receipt; ``None`` if the message was not admitted. With an outbox the message may not be on disk yet.

        Raises:
            NestedCall: this thread is inside a step, or waited too long for the step of another thread.
        """
        storage = self.storage
        receipt: Receipt | NotTaken | None
        if storage is None:
            receipt = self.try_step(
                lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic()), deadline
            )
        else:
            spills = spills and (self.settings.when_flowed is WhenFlowed.SPILL or self.is_in_callback)
            receipt = self.try_step(
                lambda _protocol: storage.store.send(payload, exchange, routing_key, _monotonic(), spills=spills),
                deadline,
            )
        if receipt is NOT_TAKEN:
            raise NestedCall("a send", payload, exchange=exchange, routing_key=routing_key)
        return receipt

    # After a step.

    @abstractmethod
    def after(self) -> None:
        """Pass the protocol's reports to the application."""

    def take_news(self) -> tuple[list[Receipt], list[Any], list[LogEntry]]:
        """Remove and return settled receipts, waiters to wake, and log entries. No other step may run."""
        protocol = self.protocol
        reports = protocol.reports
        settled = protocol.take_settled(_monotonic()) if reports.settled else []
        wake, reports.wake = reports.wake, []
        logs, reports.logs = reports.logs, []
        return settled, wake, logs

    def call_listener(self, subscription: Subscription) -> None:
        """Schedule a call of a flow callback with the next event of its subscription."""

        def take() -> FlowEvent:
            event = self.lock.take(subscription.take)
            subscription.report()
            return event

        self.dispatcher.call_with_next(subscription.callback, take)

    def _reported(self, count: int) -> None:
        self.step(lambda protocol: protocol.reported(count, _monotonic()))

    def take_failures(self) -> tuple[list[Receipt], int]:
        """Remove and return the unseen failed receipts, and the number of dropped ones. No other step may run."""
        reports = self.protocol.reports
        return reports.take_failures(), reports.take_dropped()

    # Closing.

    def unflushed(self, timeout: float | None) -> ConfirmTimeout:
        unsettled = self.protocol.unsettled if self.storage is None else len(self.storage)
        return ConfirmTimeout(f"{unsettled} messages are not settled after {timeout:.3g} s", unsettled)

    def undelivered(self, failures: list[Receipt], dropped: int, left: Sequence[Receipt]) -> UndeliveredMessages | None:
        """Return the error for undelivered messages whose receipts the application has not seen.

        Args:
            failures, dropped: the result of `take_failures`.
            left: receipts that the end of the channel has settled, and settled receipts that `after` has not taken. If
                there is an `on_delivery`, the error also contains the failed receipts of `left`.
        """
        if self.deliveries is not None:
            failures += self.deliveries.undelivered(left)
        stored = 0 if self.storage is None else len(self.storage)
        if not (failures or dropped or stored):
            return None
        return UndeliveredMessages(failures, stored=stored, dropped=dropped)

    def abandon(self) -> None:
        """End the engine, because the garbage collector removes its producer.

        The producer's finalizer calls this method, on any thread and possibly inside a step. So it must not wait.
        """
        if self.ended or self.is_copy:
            return
        self.ended = self.is_dropped = True
        self._end_later()
        # Warn last, because a filter may turn the warning into an error.
        warnings.warn(f"{self.settings.name}: {DROPPED}", ResourceWarning, stacklevel=2)

    @abstractmethod
    def _end_later(self) -> None:
        """Return immediately, and let the engine deliver the admitted messages and then end."""

    @property
    def _reason(self) -> str:
        return DROPPED if self.is_dropped else CLOSED

    def _log_undelivered(self, undelivered: UndeliveredMessages | None) -> None:
        """Log undelivered messages, because there is no call that could raise the error."""
        if undelivered is not None:
            level, why = (logging.ERROR, DROPPED) if self.is_dropped else (logging.WARNING, "shut down")
            log(level, "%s: %s: %s", self.settings.name, why, undelivered)

    # Forks and the end of the process.

    @abstractmethod
    def forked(self) -> None:
        """Detach from all resources in a forked child, because they belong to the parent."""

    @abstractmethod
    def forgotten(self) -> None:
        """At the end of the process, end a producer that was not closed, and log its undelivered messages."""

    def _disown(self) -> None:
        """In a forked child, replace the protocol, which belongs to the parent, by a closed one.

        The parent will write the unwritten messages, so no unsettled message is safe to send again. This method reads
        the state without the lock, which another thread of the parent may have had during the fork.
        """
        self.is_copy = self.ended = True
        self.detach()
        self._manager.forked()
        pid, parent = os.getpid(), self._pid
        for receipt in (*self.protocol.unsettled_receipts, *(() if self.storage is None else self.storage.spilled)):
            # The broker's answers reach only the parent, so this process will never know the real outcome.
            receipt._reply = (0, f"this process, {pid}, is a child of process {parent}, which sent the message")
            receipt._outcome = Outcome.UNKNOWN
        now = _monotonic()
        own = ProducerProtocol(self.protocol.settings, id_prefix="", now=now, wall_offset=time.time() - now)
        reason = (
            f"the producer was made in process {parent}, and this is process {pid}: a child process cannot share a "
            "connection; make a producer in the child"
        )
        own.close(reason, now)
        self.protocol, self.storage = own, None

    def _log_forgotten(self, why: str = "the process ends, and the producer was not closed") -> None:
        failures, dropped = self.take_failures()
        if self.storage is None:
            failures += self.protocol.unsettled_receipts
        undelivered = self.undelivered(failures, dropped, self.protocol.reports.settled or ())
        if undelivered is not None:
            log(logging.ERROR, "%s: %s: %s", self.settings.name, why, undelivered)


_engines: WeakSet[BaseEngine] = WeakSet()
# The last engine that has used each line, by the id of the line.
_lines: WeakValueDictionary[int, BaseEngine] = WeakValueDictionary()


def watch_process(engine: BaseEngine) -> None:
    """Register an engine: `forked` is called after a fork, and `forgotten` at the end of the process."""
    _engines.add(engine)


def _call_each(action: Callable[[BaseEngine], None], words: str) -> None:
    for engine in tuple(_engines):
        try:
            action(engine)
        except BaseException as error:
            # An error of one producer, or an interrupt, must not prevent the calls for the other producers.
            log(logging.ERROR, f"%s: {words}", engine.settings.name, error=error)


def _after_fork_in_child() -> None:
    _call_each(lambda engine: engine.forked(), "the copy in a child process could not be closed")


after_fork_in_child(_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    _call_each(lambda engine: engine.forgotten(), "the producer could not be closed at the end of the process")
