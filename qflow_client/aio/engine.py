"""Runs the `ProducerProtocol` of an `AsyncProducer`. Only the producer's loop uses the socket.

A step is a change of the protocol's state (see `guard`). The engine opens and closes the connection and the outbox,
lets tasks wait, and schedules the application's callbacks on the loop.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from _thread import start_new_thread
from asyncio import Future, _get_running_loop
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from qflow_client import telemetry
from qflow_client.aio.asker import AsyncAsker
from qflow_client.aio.connection import TappedConnection, TappedRobustConnection
from qflow_client.aio.dispatcher import Dispatcher
from qflow_client.aio.link import Link
from qflow_client.aio.receipt import AsyncReceipt, wake_in_its_loop
from qflow_client.aio.threads import DISK_PATIENCE
from qflow_client.aio.turn import Turns, Waiter
from qflow_client.core import calls
from qflow_client.core.calls import Call
from qflow_client.credentials import Credentials
from qflow_client.engine import DROPPED, BaseEngine, watch_process
from qflow_client.errors import (
    ConnectionFailed,
    NestedCall,
    ProducerClosed,
    QflowError,
    UndeliveredMessages,
    WrongLoop,
)
from qflow_client.flow import FlowManager, Line
from qflow_client.guard import LOOPS
from qflow_client.locks import RLock
from qflow_client.logs import write_log
from qflow_client.message import Message
from qflow_client.receipt import Receipt
from qflow_client.recovery import Reconnection, hosts_in_order
from qflow_client.settings import ProducerSettings
from qflow_client.skin import (
    BRIEF,
    CLOSED,
    deadline_of,
    good_bye_until,
    none_of,
    report_undelivered,
)
from qflow_client.topology import Topology

if TYPE_CHECKING:
    from qflow_client.aio.outbox import Commits
    from qflow_client.outbox.writer import StoreStep

__all__ = ["Engine"]

_T = TypeVar("_T")

_monotonic = time.monotonic

# Seconds between two checks whether a dropped producer has ended.
_DROP_PERIOD = 1.0

_LOOP_CLOSED = "the event loop of the producer is closed; make a producer in the running loop"


async def _wait_until_done(task: asyncio.Task[None]) -> asyncio.CancelledError | None:
    """Wait until a task is done, even if the caller is cancelled several times. The first cancel also cancels the task.

    Returns:
        The `CancelledError` of the first cancel, which the caller must raise; ``None`` if the caller was not cancelled.
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


class _Drop:
    """Ends a producer that the application has dropped.

    Only the loop refers to this object. If the loop closes before the producer has ended, `__del__` ends the producer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_called = False

    def __call__(self) -> None:
        is_first, self._is_called = not self._is_called, True
        if self._engine.drop(is_first=is_first):
            asyncio.get_running_loop().call_later(_DROP_PERIOD, self)

    def __del__(self) -> None:
        self._engine.end_soon()


class Engine(BaseEngine):
    """The engine of one `AsyncProducer`. See `AsyncProducer` for the arguments."""

    lock = LOOPS
    make_waiter = Waiter

    def __init__(
        self,
        settings: ProducerSettings,
        on_delivery: Callable[[Receipt], object] | None,
        manager: FlowManager,
        connection: TappedConnection | TappedRobustConnection | None,
        line: Line | None,
        topology: Topology | None,
        credentials: Callable[[], Credentials | Awaitable[Credentials]] | None = None,
    ) -> None:
        super().__init__(settings, on_delivery, manager, topology)
        self._connection = connection
        self._credentials = credentials
        self.protocol = self._new_protocol(AsyncReceipt, line)
        if self.deliveries is not None:
            self.protocol.reports.settled = []
        # Lets tasks wait for the outbox's disk; set by `open` if there is an outbox.
        self._commits: Commits | None = None
        # Set when all parts of the producer have ended, and in a forked child.
        self._all_ended = asyncio.Event()
        #: The event loop of the producer; set by `open`.
        self.loop: asyncio.AbstractEventLoop | None = None
        #: The thread of the event loop; set by `open`.
        self.thread: int | None = None
        #: Calls the application's callbacks on the loop; set by `open`.
        self.dispatcher: Dispatcher | None = None
        #: Drives the calls that wait; set by `open`.
        self.turns: Turns | None = None
        #: The publishing channel; set when the producer is connected.
        self.link: Link | None = None
        # True while a call of `after` is scheduled on the loop.
        self._passes_on = False
        # Held in `_end_without_loop`. Reentrant, because a finalizer may interrupt this method and call it too.
        self._last_end = RLock()
        # The task that ends a dropped producer, or closes the producer for `close_later`.
        self._ending: asyncio.Task[None] | None = None
        # After `close_later`: the error for undelivered messages that no call of `close` has returned; otherwise None.
        self._unreturned: UndeliveredMessages | None = None

    async def open(self, connected: Callable[[], object]) -> None:
        """Open the outbox and connect. A producer can connect only once.

        Raises:
            ConnectionFailed, OutboxInUse, OutboxError, ProducerClosed, QflowError: as for `AsyncProducer.connect`.
        """
        if self.ended:
            raise ProducerClosed(CLOSED)
        if self.loop is not None:
            raise QflowError("connect() was called before, and a producer can connect only once; make another producer")
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise QflowError(
                "AsyncProducer needs a running event loop of asyncio, and none runs here; under trio use Producer in "
                "a thread"
            ) from None
        self.thread = threading.get_ident()
        self.dispatcher = Dispatcher(self.loop)
        self.turns = Turns(self.loop, lambda: self.protocol, self.kick, self.arm_timer)
        watch_process(self)
        try:
            if self.settings.outbox is not None:
                await self._open_outbox()
            link = await self._connect()
            if self.ended:
                # The producer was closed while it was connecting.
                await link.close(BRIEF)
                raise ProducerClosed(CLOSED)
            self.link = link
            if self.storage is not None:
                self.storage.begin_searches()
            peer = None if link.writer is None else link.writer.peer
            self.observer = telemetry.watch(self, self.protocol, self.settings, link.url, peer)
            connected()
            self.kick()
        except BaseException as error:
            self.ended = True
            try:
                why = str(error) or type(error).__name__
                self.protocol.close(f"the producer could not connect: {why}", _monotonic())
                self.unregister()
                # Ctrl-C may cause a GeneratorExit. After this error the loop does not run, so do not wait.
                if not isinstance(error, GeneratorExit):
                    await self._end(BRIEF)
            finally:
                if self.storage is not None:
                    self.storage.close(0.0)
            raise

    async def _open_outbox(self) -> None:
        # Import these modules only for an outbox, because they load SQLite.
        from qflow_client.aio.outbox import Commits, SpilledReceipt
        from qflow_client.outbox.storage import Storage

        assert self.loop is not None
        storage = Storage(self.settings)
        self._commits = commits = Commits(self.loop, storage)
        try:
            await commits.open()
            if self.ended:
                raise ProducerClosed(CLOSED)
            self.step(lambda protocol: storage.attach(protocol, SpilledReceipt, self._take, commits.committed))
            self.storage = storage
        except BaseException:
            # `attach` may have started the outbox's thread.
            storage.close(BRIEF)
            raise

    def _take(self, step: StoreStep) -> None:
        """Make the loop execute a step that the outbox's thread has requested."""

        def take() -> None:
            if self.storage is None:
                # In a forked child, the outbox belongs to the parent.
                return
            self.step(lambda _protocol: step(_monotonic()))
            self.arm_timer()

        assert self.loop is not None
        # If the loop is closed, `call_soon_threadsafe` raises RuntimeError. Then the step is not needed.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(take)

    async def _connect(self) -> Link:
        errors = []
        urls = hosts_in_order(self.settings)
        asker = None if self._credentials is None else AsyncAsker(self._credentials, self.settings.name)
        for host in range(len(urls) if self._connection is None else 1):
            reconnection = Reconnection(self.settings, urls, host, credentials_change=asker is not None)
            link = Link(reconnection, self._connection, self.protocol, self.after, self.topology, asker)
            try:
                await link.open()
            except ConnectionFailed as error:
                errors.append(error)
            else:
                return link
        raise none_of(errors)

    # Steps.

    @property
    def is_in_callback(self) -> bool:
        dispatcher = self.dispatcher
        # Check the thread, because another thread may send while a callback runs.
        return self.deliveries is not None and dispatcher is not None and dispatcher.is_running and self.may_step

    @property
    def may_step(self) -> bool:
        return self.loop is None or self.thread in (None, threading.get_ident())

    def check_loop(
        self,
        payload: bytes | Message | None = None,
        exchange: str | None = None,
        routing_key: str | None = None,
        *,
        waits: bool = True,
    ) -> None:
        loop, running = self.loop, _get_running_loop()
        if loop is None or running is loop or self._all_ended.is_set():
            return
        if loop.is_closed():
            if not self.ended:
                raise ProducerClosed(_LOOP_CLOSED, payload, exchange=exchange, routing_key=routing_key)
        elif running is not None and (waits or not loop.is_running()):
            raise WrongLoop(
                f"the producer belongs to the event loop in which it was connected, {loop!r}, and this is another one, "
                f"{running!r}; call it there, for example with asyncio.run_coroutine_threadsafe, or make a producer in "
                "this loop"
            )

    def call_later(self, function: Callable[[], object]) -> None:
        if self.loop is None:
            self._put_off.clear()
            raise NestedCall("a call")
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop is closed, so no postponed step will be executed.
            self._put_off.clear()

    def recheck(self) -> None:
        if self.loop is not None and not self.loop.is_closed() and not self._is_left_to_loop(self.recheck):
            self.loop.call_soon(self.step, lambda protocol: protocol.on_timer(_monotonic()))

    def arm_timer(self) -> None:
        if not self._is_left_to_loop(self.arm_timer):
            super().arm_timer()

    def _is_left_to_loop(self, function: Callable[[], object]) -> bool:
        """If this is not the loop's thread, make the loop call a function, and return True."""
        if self.may_step:
            return False
        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop is closed.
            return False
        return True

    def kick(self) -> None:
        if self._is_left_to_loop(self.kick):
            return
        if self.link is not None and self.protocol.has_output:
            writer = self.link.writer
            if writer is not None and not writer.awake:
                writer.wake()
        if self.loop is None or self.loop.is_closed():
            self.after()
        elif not self._passes_on and not (self.protocol.reports.is_empty and self.protocol.admission.observer is None):
            # Let the loop call `after`. If Ctrl-C interrupted a call of `after` here, wake-ups and logs would be lost.
            self.loop.call_soon(self.after)
            self._passes_on = True

    async def drive(self, call: Call[_T], waiter: Waiter) -> _T:
        """Run a call that waits, see `core.calls`. The producer need not be connected."""
        turns = self.turns or Turns(asyncio.get_running_loop(), lambda: self.protocol, self.kick, self.arm_timer)
        return await turns.drive(call, waiter)

    async def made_durable(self, receipt: Receipt, deadline: float) -> None:
        """Wait until a message is on disk, see `Commits.wait_durable`. Without an outbox, return immediately."""
        if self.storage is not None:
            assert self._commits is not None
            assert isinstance(receipt, AsyncReceipt)
            await self._commits.wait_durable(receipt, deadline)

    # The methods below run after a step.

    def after(self) -> None:
        self._passes_on = False
        protocol = self.protocol
        if protocol.admission.observer is not None:
            protocol.admission.observer.record(now=_monotonic())
        if protocol.reports.is_empty:
            return
        settled, wake, logs = LOOPS.take(self.take_news)
        running = _get_running_loop()
        for waiter in wake:
            if waiter.done():
                continue
            if type(waiter) is Future and waiter.get_loop() is not running:
                # A task of another loop waits for a receipt.
                wake_in_its_loop(waiter)
                continue
            try:
                waiter.set_result(None)
            except RuntimeError:
                # The producer's loop is closed, so its tasks do not wait. Other waiters may belong to other loops.
                if self.loop is None or not self.loop.is_closed():
                    raise
        write_log(logs)
        if self.loop is None or self.dispatcher is None or self.loop.is_closed():
            # Without a running loop, no callback can be called. The failed receipts are reported at the producer's end.
            if settled and self.deliveries is not None:
                self.deliveries.hand(settled)
            return
        if protocol.reports.events:
            self.listeners.pass_on(protocol, self.call_listener)
        if settled:
            assert self.deliveries is not None
            self.deliveries.hand(settled)
            self.dispatcher.call(self._deliver, settled)

    def _deliver(self, receipts: list[Receipt]) -> None:
        assert self.deliveries is not None
        error = self.deliveries.pass_on(receipts)
        if error is not None:
            # The exception of `sys.exit` in a callback must end the loop.
            raise error

    # Closing.

    async def close(self, deadline: float, *, waits_for_holds: bool = True) -> UndeliveredMessages | None:
        """Close the producer. The arguments and the result are as for `sync.engine.Engine.close`."""
        if self.loop is not None and not self.loop.is_closed():
            self.check_loop()
        if self.ended:
            LOOPS.take(lambda: self.protocol.close(CLOSED, _monotonic()))
            with suppress(TimeoutError):
                # The other close may end up to 0.6 seconds after its deadline.
                async with asyncio.timeout(None if deadline == math.inf else deadline + 4 * BRIEF - _monotonic()):
                    await self._all_ended.wait()
                    if self._ending is not None and not (self.is_copy or self._ending.done()):
                        await asyncio.wait((self._ending,))
            undelivered, self._unreturned = self._unreturned, None
            return undelivered
        self.ended = True
        return await self._close(deadline, waits_for_holds)

    def close_later(self, deadline: float) -> None:
        """Close in a separate task, and log messages that are not delivered."""

        async def close() -> None:
            if not self.ended:
                self._unreturned = await self.close(deadline)
                self._log_undelivered(self._unreturned)

        def start() -> None:
            # Keep a reference to the task, because the loop keeps none. A second task would only wait for this task.
            if self._ending is None and self.loop is not None:
                self._ending = self.loop.create_task(close())

        if self.loop is None:
            # The producer has not connected, and never will.
            self.ended = True
            return
        # If the loop is closed, `call_soon_threadsafe` raises RuntimeError. Then no task can run.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(start)

    async def _close(self, deadline: float, waits_for_holds: bool) -> UndeliveredMessages | None:
        error: BaseException | None = None
        waiter = Waiter()
        now = _monotonic()
        call = calls.close(self.protocol, waiter, deadline, now, self._reason, waits_for_holds=waits_for_holds)
        try:
            await self.drive(call, waiter)
            patience = good_bye_until(deadline)
        except BaseException as caught:
            error, patience = caught, BRIEF
        if isinstance(error, GeneratorExit):
            # After a GeneratorExit the loop does not run, so do not wait.
            self.unregister()
            raise error
        left = self.protocol.unsettled_receipts
        # End the producer in a separate task, so that a cancelled caller can still wait until the task ends.
        end_at = _monotonic() + DISK_PATIENCE
        ending = asyncio.create_task(self._end(patience, end_at if error is not None else max(end_at, deadline)))
        cancelled = await _wait_until_done(ending)
        error = error or cancelled
        undelivered = self.undelivered(*LOOPS.take(self.take_failures), left)
        if error is None and not ending.cancelled():
            error = ending.exception()
        if error is not None:
            report_undelivered(self.settings.name, error, undelivered)
            raise error
        return undelivered

    async def _end(self, patience: float, end_at: float = -math.inf) -> None:
        """End the channel and all parts of the producer. A cancelled call still ends all parts, but waits less.

        Args:
            patience: the longest wait for the broker's answer in seconds.
            end_at: when the outbox must be closed, in seconds of `time.monotonic`, but at least `BRIEF` s from now.
        """
        self.detach()
        try:
            if self.link is not None:
                await self.link.close(patience)
        finally:
            # Not before, because this lifts the hold of the manager, and would send messages that wait.
            self.unregister()
            self.after()
            if self.observer is not None:
                telemetry.unwatch(self.observer)
            write_log(self.listeners.end())
            if self.turns is not None:
                self.turns.end()
            try:
                if self.dispatcher is not None:
                    await self.dispatcher.stop()
            finally:
                ending = asyncio.current_task()
                is_cancelled = ending is not None and ending.cancelling()
                await self._end_storage(DISK_PATIENCE if is_cancelled else max(BRIEF, end_at - _monotonic()))

    async def _end_storage(self, patience: float) -> None:
        try:
            if self.storage is not None:
                assert self._commits is not None
                await self._commits.close(patience)
        finally:
            self._all_ended.set()

    # The methods below run after the application has dropped the producer.

    def _end_later(self) -> None:
        # If the loop is closed before it calls the `_Drop`, the deletion of the `_Drop` ends the producer.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_Drop(self))  # type: ignore[union-attr]  # the producer was connected

    def end_soon(self) -> None:
        """End a dropped producer whose loop is closed. Finalizers call this, so it must not wait for the disk."""
        if self.storage is None:
            self._end_without_loop(DROPPED)
        elif not self._all_ended.is_set():
            with suppress(RuntimeError):
                start_new_thread(self._end_without_loop, (DROPPED,))

    def drop(self, *, is_first: bool) -> bool:
        """In the first call, start a task that ends the dropped producer. Return False if the producer has ended."""
        if is_first:
            assert self.loop is not None
            self._ending = self.loop.create_task(self._end_dropped())
            self._ending.add_done_callback(self._after_dropped)
        return not self._all_ended.is_set()

    async def _end_dropped(self) -> None:
        deadline = deadline_of(self.settings.max_producer_flow_control_wait)
        self._log_undelivered(await self._close(deadline, waits_for_holds=True))

    def _after_dropped(self, _ending: object) -> None:
        if not self._all_ended.is_set():
            # The loop has ended, and has cancelled the task before the task began.
            self._end_without_loop(DROPPED)

    def _end_without_loop(self, *why: str) -> None:
        """Close the outbox, which another producer may need, and log the lost messages. A second call does nothing."""
        if self._all_ended.is_set():
            return
        # A thread of `end_soon` may be running this method. At the end of the process, wait for that thread.
        with self._last_end:
            if self._all_ended.is_set():
                return
            if self.storage is not None:
                self.storage.close(BRIEF)
            self.ended = True
            self._all_ended.set()
            self._log_forgotten(*why)

    # Forks and the end of the process.

    def forked(self) -> None:
        # The loop does not run in the child. Call no method of the loop, because it would wake the parent's loop.
        self.thread = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._unreturned = None
        self._disown()
        for events in tuple(self.listeners.iterators):
            events.forget()

    def forgotten(self) -> None:
        # No loop runs at the end of the process, so a normal close is not possible.
        if not self.ended or (self.is_dropped and not self._all_ended.is_set()):
            self._end_without_loop()
