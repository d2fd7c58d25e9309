"""Executes the steps of a `Producer` on any thread. A step changes the state of the `ProducerProtocol`.

The module `guard` explains why steps never overlap. Only the I/O thread uses the socket. The engine opens and closes
the connection and the outbox, and lets threads wait. It passes flow events and receipts to the callback thread.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from _thread import start_new_thread
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from qflow_client import telemetry
from qflow_client.core import calls
from qflow_client.core.calls import Call, resume
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket
from qflow_client.credentials import Credentials
from qflow_client.engine import BaseEngine, watch_process
from qflow_client.errors import ConnectionFailed, NestedCall, UndeliveredMessages
from qflow_client.events import FlowEvent
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import NOT_TAKEN, Guard, NotTaken
from qflow_client.logs import write_log
from qflow_client.message import Message
from qflow_client.receipt import Receipt
from qflow_client.recovery import Reconnection, hosts_in_order
from qflow_client.renewal import Asker
from qflow_client.settings import ProducerSettings
from qflow_client.skin import (
    BRIEF,
    CLOSED,
    deadline_of,
    good_bye_until,
    none_of,
    report_undelivered,
)
from qflow_client.sync.connection import SharedLink, TappedConnection
from qflow_client.sync.dispatcher import Dispatcher
from qflow_client.sync.latch import Latch
from qflow_client.sync.link import Link, parameters
from qflow_client.sync.receipt import SyncReceipt
from qflow_client.topology import Topology

if TYPE_CHECKING:
    from qflow_client.outbox.writer import StoreStep

__all__ = ["Engine", "Waiter"]

_T = TypeVar("_T")

# The result of `_pass_on`: the waiters to wake, and the entries to log.
_News = tuple[list[Any], list[Any]]

# Maximum seconds that the process waits at its end for a producer that was not closed.
_AT_EXIT = 1.0

# Seconds after which the start of a thread is tried again.
_NEXT_TRY = 1.0

_monotonic = time.monotonic


class Waiter:
    """Lets one thread wait until `set` is called. Cheaper than `threading.Event`."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return

    def wait_until(self, deadline: float) -> None:
        """Wait until `set` is called, or until a deadline in seconds of `time.monotonic`."""
        self._lock.acquire(timeout=max(0.0, min(deadline - _monotonic(), threading.TIMEOUT_MAX)))


class Engine(BaseEngine):
    """The threads, the connection and the outbox of one `Producer`. See `Producer` for the arguments."""

    make_waiter = Waiter

    def __init__(
        self,
        settings: ProducerSettings,
        on_delivery: Callable[[Receipt], object] | None,
        manager: FlowManager,
        connection: TappedConnection | None,
        topology: Topology | None,
        credentials: Callable[[], Credentials] | None = None,
    ) -> None:
        super().__init__(settings, on_delivery, manager, topology)
        self._connection = connection
        self._asker = None if credentials is None else Asker(credentials, settings.name)
        #: Guards `protocol` and `listeners`. All producers on a shared connection use the lock of its `Carrier`.
        self.lock = Guard() if connection is None else connection.carrier.lock
        #: Calls the application's callbacks.
        self.dispatcher = Dispatcher(f"qflow-callbacks {settings.name}")
        # Set when all parts of the producer have ended, and in a forked child.
        self._all_ended = Latch()
        # At its end, the process waits until this deadline for a close on another thread; ``None`` if there is none.
        self._leaves_until: float | None = None
        # After a close on another thread: the error for undelivered messages that no call of `close` has returned.
        self._unreturned: UndeliveredMessages | None = None
        # The receipts that were unsettled when `end` was first called.
        self._left: tuple[Receipt, ...] = ()
        self._has_warned = False
        #: The producer's own connection, or its channel on a shared connection; set by `open`.
        self.link: Link | SharedLink | None = None

    def warn_in_loop(self, stacklevel: int) -> None:
        """Warn once if an event loop runs on this thread, because a producer for threads would block the loop."""
        if not self._has_warned and _get_running_loop() is not None:
            self._has_warned = True
            words = "a Producer that waits blocks the event loop of this thread; use AsyncProducer there"
            warnings.warn(words, RuntimeWarning, stacklevel=stacklevel)

    def open(self, line: Line | None, on_flow: Callable[[FlowEvent], object] | None) -> None:
        """Connect. If there are callbacks, start the callback thread. After an error, the caller must call `discard`.

        Args:
            line, on_flow: as for `Producer`.

        Raises:
            ConnectionFailed: no host accepted a connection, or no channel could be opened.
        """
        self.protocol = self._make_protocol(line)
        if on_flow is not None:
            self.listeners.add(self.protocol, on_flow, on_flow, None)
            self.dispatcher.start()
        self.link = link = self._connect()
        if self.storage is not None:
            self.storage.begin_searches()
        self.observer = telemetry.watch(self, self.protocol, self.settings, link.url, link.services.peer)
        if self.deliveries is not None:
            self.protocol.reports.settled = []
            self.dispatcher.start()
        watch_process(self)

    def discard(self) -> None:
        """End everything that a failed `open` has started."""
        self.ended = True
        try:
            if self.link is not None:
                self.end(BRIEF)
            else:
                self.dispatcher.stop(BRIEF)
        finally:
            if self.storage is not None:
                self.storage.close(BRIEF)

    def _make_protocol(self, line: Line | None) -> ProducerProtocol:
        protocol = self._new_protocol(SyncReceipt, line)
        if self.settings.outbox is None:
            return protocol
        # Import these modules only for an outbox, because they load SQLite.
        from qflow_client.outbox.storage import Storage
        from qflow_client.sync.outbox import SpilledReceipt

        self.storage = Storage(self.settings)
        self.storage.open_in_time()
        self.storage.attach(protocol, SpilledReceipt, self._take)
        return protocol

    def _take(self, step: StoreStep) -> None:
        """Execute a step that the outbox's thread has requested."""
        self.step(lambda _protocol: step(_monotonic()))
        self.arm_timer()

    def _connect(self) -> Link | SharedLink:
        if self._connection is not None:
            shared = SharedLink(self._connection, self.protocol, self.after)
            shared.open(self.settings.connect_timeout)
            return shared
        errors = []
        # Parse all URLs first, so that an invalid URL is an error even if an earlier host works.
        urls = hosts_in_order(self.settings)
        hosts = [parameters(url, self.settings) for url in urls]
        for host in range(len(hosts)):
            reconnection = Reconnection(self.settings, urls, host, credentials_change=self._asker is not None)
            link = Link(hosts, reconnection, self.protocol, self.lock, self.after, self.topology, self._asker)
            try:
                link.open(self.settings.connect_timeout)
                return link
            except ConnectionFailed as error:
                errors.append(error)
            except BaseException:
                link.close(BRIEF)
                raise
        raise none_of(errors)

    # Steps.

    @property
    def is_in_callback(self) -> bool:
        return self.deliveries is not None and self.dispatcher.is_current_thread

    @property
    def may_step(self) -> bool:
        return True

    def call_later(self, function: Callable[[], object]) -> None:
        assert self.link is not None
        self.link.services.add_callback_threadsafe(function)

    def put_off(self, step: Callable[[ProducerProtocol], object]) -> None:
        if self._all_ended.is_set:
            # A closed producer needs no steps, and postponed steps could accumulate.
            return
        super().put_off(step)
        assert self.link is not None
        if self.link.ended:
            # No I/O thread will execute the step, so try it now. If that fails, the next `ask` or `close` tries again.
            self.try_step(self.take_all_put_off)

    def recheck(self) -> None:
        link = self.link
        if link is None:
            return
        if not link.ended:
            link.look()
        elif self.lock.try_take(lambda: self.protocol.on_timer(_monotonic())) is not NOT_TAKEN:
            self._after(self.lock.try_take)

    def kick(self) -> None:
        link, protocol = self.link, self.protocol
        # While the I/O thread runs, it passes on events and receipts, because Ctrl-C cannot interrupt the I/O thread.
        if link is None or link.ended:
            self._after(self.lock.try_take)
            return
        if not link.services.awake and protocol.has_output:
            link.services.wake()
        if not protocol.reports.is_empty:
            link.call_after()

    def drive(
        self, call: Call[_T], waiter: Waiter, deadline: float | None, ticket: SendTicket | None = None
    ) -> _T | NotTaken:
        """Run a call that waits, see `core.calls`.

        Args:
            deadline: as for `Guard.try_take`. ``None`` (no limit) is allowed only on threads of this package.
            ticket: the ticket of a call of `send`; ``None`` for other calls. An error withdraws the ticket.

        Returns:
            The result of the call; `NOT_TAKEN` if a step could not be executed. Then the ticket's message is not sent.
        """

        def resume_call(*, begins: bool = False) -> tuple[float | None, _T | None] | NotTaken:
            def step(_protocol: ProducerProtocol) -> tuple[float | None, _T | None]:
                return resume(call, None if begins else _monotonic())

            return self.step(step) if deadline is None else self.try_step(step, deadline)

        def undo(protocol: ProducerProtocol) -> None:
            if ticket is None:
                protocol.waiters.forget(waiter)
            else:
                protocol.line.give_up(ticket, _monotonic())

        try:
            now = resume_call(begins=True)
            self.arm_timer()
            while now is not NOT_TAKEN and now[0] is not None:
                waiter.wait_until(now[0])
                if ticket is not None and ticket.is_admitted:
                    # The usual case. `resume_call` would only return this receipt.
                    return ticket.receipt  # type: ignore[return-value]  # the result of `calls.send`
                before, now = now, resume_call()
                if now is NOT_TAKEN and ticket is not None and not ticket.claim(for_sender=True):
                    # A step on another thread has admitted the message, or is about to admit it.
                    receipt: Any = ticket.receipt
                    now = before if receipt is None or receipt._number == 0 else (None, receipt)
        except BaseException:
            if ticket is not None:
                ticket.claim(for_sender=True)
            self.ask(undo)
            raise
        if now is NOT_TAKEN:
            self.put_off(undo)
            return NOT_TAKEN
        return now[1]  # type: ignore[return-value]  # the call has ended

    def send(
        self, payload: bytes | Message, exchange: str, routing_key: str, timeout: float | None, source: str
    ) -> Receipt:
        """Wait in line until a message is admitted. The arguments are those of `SendLine.make_ticket`."""
        self.warn_in_loop(stacklevel=4)
        line, now, waiter, first = self.protocol.line, _monotonic(), Waiter(), self.is_in_callback
        ticket = line.make_ticket(
            payload, exchange, routing_key, now, timeout=timeout, waiter=waiter, source=source, first=first
        )
        receipt = self.drive(calls.send(line, ticket, now), waiter, ticket.deadline, ticket)
        if receipt is NOT_TAKEN:
            raise NestedCall("a send", payload, exchange=exchange, routing_key=routing_key)
        return receipt

    # The methods of this section run after a step. Only `_pass_on` and postponed steps run under the lock.

    def after(self) -> None:
        if self._put_off and self.link is not None and self.link.ended:
            # The I/O thread is ending, and will not execute the postponed steps, so execute them here.
            self.lock.take(lambda: self.take_all_put_off(self.protocol))
        self._after(self.lock.take)

    def _after(self, take: Callable[[Callable[[], _News]], _News | NotTaken]) -> None:
        protocol = self.protocol
        if protocol.admission.observer is not None:
            protocol.admission.observer.record(now=_monotonic())
        if protocol.reports.is_empty:
            return
        news = take(self._pass_on)
        if news is NOT_TAKEN:
            # The events and receipts stay in `protocol.reports`, and are passed on after the next step.
            return
        wake, logs = news
        for waiter in wake:
            waiter.set()
        # Wake the waiters before the logging, because logging may be slow.
        write_log(logs)

    def _pass_on(self) -> _News:
        """Pass on events and receipts, and return the waiters to wake and the entries to log."""
        settled, wake, logs = self.take_news()
        # Pass events and receipts on under the lock, so that their order is the order of the steps.
        if self.protocol.reports.events:
            self.listeners.pass_on(self.protocol, self.call_listener)
        if settled:
            assert self.deliveries is not None
            self.deliveries.hand(settled)
            self.dispatcher.call(self.deliveries.pass_on, settled)
        return wake, logs

    # Closing.

    def close(self, deadline: float, *, waits_for_holds: bool = True) -> UndeliveredMessages | None:
        """Close the producer. A second call waits for the end of the first call.

        Args:
            deadline: the end of the wait for unsettled messages, in seconds of `time.monotonic`.
            waits_for_holds: False to stop waiting early if a hold delays messages, or if the broker stops answering.

        Returns:
            The error for messages that were not delivered. ``None`` if there are none, or if an earlier call of `close`
            has returned the error.
        """
        if sys.is_finalizing():
            # While the interpreter ends, no other thread runs, so do not wait.
            deadline = min(deadline, _monotonic())
        first = False

        def begin() -> bool:
            nonlocal first
            first = self._begin_to_close()
            return first

        waiter = Waiter()
        call = calls.close(self.protocol, waiter, deadline, _monotonic(), CLOSED, waits_for_holds=waits_for_holds)
        try:
            begun = self.lock.try_take(begin, deadline)
            if begun is True:
                if self.drive(call, waiter, deadline) is not NOT_TAKEN:
                    return self.end(good_bye_until(deadline), deadline if waits_for_holds else None)
                begun, self._leaves_until = NOT_TAKEN, deadline
                self._on_own_thread(lambda: self._finish(deadline))
        except BaseException as error:
            if first:
                report_undelivered(self.settings.name, error, self.end(BRIEF))
            raise
        if begun is NOT_TAKEN:
            raise NestedCall("close()")
        # A callback must not wait for the end of its own thread. While the interpreter ends, no other thread runs.
        if not (self.dispatcher.is_current_thread or sys.is_finalizing()):
            # `end` may take four brief waits after the deadline of the other close.
            self._all_ended.wait(deadline + 4 * BRIEF - _monotonic())
        undelivered, self._unreturned = self._unreturned, None
        return undelivered

    def _begin_to_close(self) -> bool:
        """Record that the close has begun. Return True for the first call. This method runs inside a step."""
        was_ended, self.ended = self.ended, True
        return not was_ended

    def close_later(self, deadline: float) -> None:
        """Close on a separate thread. When the process ends, it waits for this thread, at most until the deadline."""

        def close() -> None:
            if self.lock.take(self._begin_to_close):
                self._finish(deadline)

        self._leaves_until = deadline
        self._on_own_thread(close)

    def _finish(self, deadline: float) -> None:
        """Wait for the messages, and end the connection, on a thread of this package."""
        try:
            waiter = Waiter()
            call = calls.close(self.protocol, waiter, deadline, _monotonic(), self._reason, waits_for_holds=True)
            self.drive(call, waiter, None)
            undelivered = self._unreturned = self._end(good_bye_until(deadline), deadline, self.lock.take)
        finally:
            self._all_ended.set()
        self._log_undelivered(undelivered)

    def _on_own_thread(self, close: Callable[[], None]) -> None:
        """Run `close` on a new thread. Signal handlers and finalizers may call this method."""

        def begin(start_thread: Callable[[], object]) -> None:
            try:
                start_thread()
            except RuntimeError:
                # No thread can start while the process is ending, so there is no close to wait for.
                self._leaves_until = None
                if self.link is not None and not sys.is_finalizing():
                    # The process has too many threads, so try again later.
                    later = self.link.services.call_later
                    self.call_later(lambda: later(_NEXT_TRY, again))

        def again() -> None:
            self._on_own_thread(close)

        thread = threading.Thread(target=close, name=f"qflow-end {self.settings.name}", daemon=True)
        # A signal handler must not call `threading.Thread.start`, which waits for the new thread.
        begin(lambda: start_new_thread(begin, (thread.start,)))

    def end(self, patience: float, deadline: float | None = None) -> UndeliveredMessages | None:
        """Call `_end`, and wake the other threads that wait in `close`. After Ctrl-C, `close` calls it again."""
        try:
            return self._end(patience, deadline, self._take_last)
        finally:
            self._all_ended.set()

    def _end(
        self, patience: float, deadline: float | None, take: Callable[[Callable[[], Any]], Any]
    ) -> UndeliveredMessages | None:
        """End the connection, the callback thread and the outbox.

        Args:
            patience: the longest wait in seconds, once for the connection, and once for the callback thread.
            deadline: when the waits for `on_delivery` and the outbox end, in seconds of `time.monotonic`. ``None`` to
                wait `patience` seconds for `on_delivery` and `BRIEF` seconds for the outbox.
            take: executes the final steps.

        Returns:
            The error for messages that were not delivered; ``None`` if there are none.
        """
        assert self.link is not None
        try:
            # If Ctrl-C has interrupted an earlier call of `_end`, keep the receipts that the earlier call has found.
            self._left = self._left or take(lambda: self.protocol.unsettled_receipts)
            self.detach()
            try:
                self.link.close(patience)
            finally:
                # Not before, because this lifts the hold of the manager, and would send messages that wait.
                self.unregister()
                self._after(take)
                if self.observer is not None:
                    telemetry.unwatch(self.observer)
                self._end_listeners(take)
                if self.deliveries is not None and deadline is not None:
                    patience = min(max(BRIEF, deadline - _monotonic()), threading.TIMEOUT_MAX)
                self.dispatcher.stop(patience)
        finally:
            if self.storage is not None:
                self.storage.close(BRIEF if deadline is None else max(BRIEF, deadline - _monotonic()))
        failures, dropped = take(self._take_last_failures)
        return self.undelivered(failures, dropped, self._left)

    def _take_last_failures(self) -> tuple[list[Receipt], int]:
        failures, dropped = self.take_failures()
        if self.storage is None:
            # Only the I/O thread knows which bytes are written, so only this thread settles the last messages. If this
            # thread is stuck, or has stopped because the process is ending, some messages are still unsettled here.
            failures += [receipt for receipt in self._left if not receipt.done]
        return failures, dropped

    def _end_listeners(self, take: Callable[[Callable[[], Any]], Any]) -> None:
        try:
            take(lambda: self.take_all_put_off(self.protocol))
        finally:
            write_log(take(self.listeners.end))

    def _take_last(self, step: Callable[[], _T]) -> _T:
        """Execute one of the final steps, without the lock if another thread keeps the lock too long."""
        result = self.lock.try_take(step)
        return step() if result is NOT_TAKEN else result

    def _end_later(self) -> None:
        deadline = deadline_of(self.settings.max_producer_flow_control_wait)
        self._on_own_thread(lambda: self._finish(deadline))

    # Forks and the end of the process.

    def forked(self) -> None:
        if self.link is not None:
            self.link.forget()
        # Replace the locks, because another thread of the parent may have locked them before the fork.
        self.lock = Guard()
        self._all_ended = Latch()
        self._all_ended.set()
        self._unreturned = None
        self._disown()
        self.listeners.end()

    def forgotten(self) -> None:
        if self._leaves_until is not None and not self.is_copy:
            self._all_ended.wait(self._leaves_until - _monotonic())
        if self.is_copy or self._all_ended.is_set or (self.ended and not self.is_dropped):
            return
        waiter = Waiter()
        now = _monotonic()
        self.drive(calls.drain(self.protocol, waiter, now + _AT_EXIT, now), waiter, now + _AT_EXIT)
        # A later exit handler may still send, so the outbox stays open, unless the disk fails or does not answer.
        if self.storage is not None and not self.storage.commit(BRIEF):
            self.storage.close(BRIEF)
        self._take_last(self._log_forgotten)
        # After `detach`, garbage collection does not close the producer. Exit handlers still can.
        self.detach()
