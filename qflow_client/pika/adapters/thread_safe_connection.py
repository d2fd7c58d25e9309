"""`pika.adapters.thread_safe_connection` of pika 1.5, with flow control: `basic_publish` waits for a limited time.

pika runs the connection on a separate thread, the IOLoop's thread. Only this thread changes a channel's holds, so no
lock is needed. A publishing thread passes its message to the IOLoop's thread (`_Publishing`). If there is
certainly room, the publishing thread continues immediately, as with pika. Otherwise the publishing thread waits until
the message is written, or gets an error.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import pika.adapters.thread_safe_connection as _pika  # type: ignore[import-untyped]  # the stubs are of pika 1.4
from pika import exceptions, validators

from qflow_client.errors import FlowControlTimeout, ProducerClosed
from qflow_client.events import FlowEvent, FlowState
from qflow_client.logs import log
from qflow_client.pika.adapters.select_connection import SelectConnection
from qflow_client.pika.connection import follow
from qflow_client.pika.flow import ChannelFlow, ConnectionFlow, Publish
from qflow_client.pika.mirror import mirror, passed_on
from qflow_client.receipt import Receipt
from qflow_client.settings import WhenFlowed

__all__ = ["Channel", "Connection", "SelectConnection"]

_monotonic = time.monotonic

# Seconds between two checks of a waiting thread: whether the IOLoop's thread is alive, and whether to log a notice.
_LOOK_AGAIN = 0.5
# Maximum seconds that the process waits at its end for unwritten and unconfirmed messages, and seconds between checks.
_AT_EXIT, _LOOK_AGAIN_AT_EXIT = 1.0, 0.005

# All channels of the process. The keys are their ids.
_channels: WeakValueDictionary[int, Channel] = WeakValueDictionary()


@atexit.register
def _at_exit() -> None:
    """Wait until messages are written and confirmed when the process ends, and log the messages that may be lost."""
    end = _monotonic() + _AT_EXIT
    # Other threads still run, and may make channels meanwhile.
    for reference in _channels.valuerefs():
        channel = reference()
        if channel is not None and channel.is_open:
            while channel.is_open and channel.unfinished and _monotonic() < end:
                time.sleep(_LOOK_AGAIN_AT_EXIT)
            if unfinished := channel.unfinished:
                text = "%s: messages may be lost at the end of the process: at least %d are not confirmed"
                log(logging.WARNING, text, channel.flow_control.name, unfinished)


class _Withdrawable(Publish):
    """A message that the publishing thread can withdraw by cancelling `future`, until admission starts `future`."""

    future: Future[None]

    def __init__(self, publish: Publish, future: Future[None]) -> None:
        self.__dict__.update(publish.__dict__, future=future)
        # Store the frames under another name, because this class has a property `frames`.
        self.__dict__["given"] = self.__dict__.pop("frames")

    @property
    def frames(self) -> bytes:  # type: ignore[override]  # admission reads the frames last
        if self.future.cancelled() or not self.future.set_running_or_notify_cancel():
            raise CancelledError
        frames: bytes = self.__dict__["given"]
        return frames


class _Publishing:
    """A call of `basic_publish` outside the IOLoop's thread. The calling thread uses `accept` and `wait`.

    The IOLoop's thread calls all other methods. The object is the waiter of its `SendTicket`. The step that admits the
    message also writes it and calls `set`. So `on_publish` is called before the broker's answer can be read.
    """

    def __init__(self, channel: Channel, publish: Publish, on_publish: Any) -> None:
        self._channel = channel
        self._flow = channel.flow_control
        self._publish = publish
        self._on_publish = on_publish
        # A future for the thread that waits; ``None`` if no thread waits. The future is running after the message is
        # admitted, and done when it is written or gets an error. To withdraw the message, the waiting thread cancels
        # the future.
        self._future: Future[None] | None = None
        # The `SendTicket` of the message; ``None`` while the message has no ticket.
        self._ticket: Any = None

    def accept(self) -> bool:
        """Send the message without waiting if there is certainly room. Otherwise return False.

        If the broker stops the channel before the message is sent, the message is sent when the broker restarts the
        channel. There are at most `capacity` such messages, and they have at most `max_unwritten_bytes` bytes together.
        """
        admission, accepted = self._flow.protocol.admission, self._channel.accepted
        window = admission.window
        if (
            not admission.gate.is_open
            or self._flow.protocol.controller.waiting
            or len(accepted) + window.used >= window.capacity
            or len(self._publish.frames) * window.capacity > self._flow.settings.max_unwritten_bytes
        ):
            return False
        accepted.append(self)
        try:
            self._channel.connection.add_callback_threadsafe(self.begin)
        except BaseException:
            accepted.remove(self)
            raise
        return True

    def wait(self, timeout: float | None) -> None:
        """Wait until the message is sent, for at most `timeout` seconds; ``None`` for no limit.

        Raises:
            FlowControlTimeout, ProducerFlowed: the message was not sent and never will be.
        """
        began = _monotonic()
        deadline = math.inf if timeout is None else began + timeout
        future = self._future = Future()
        self._publish = _Withdrawable(self._publish, future)
        connection = self._channel.connection
        connection.add_callback_threadsafe(self.begin)
        try:
            while True:
                now = _monotonic()
                try:
                    future.result(max(0.0, min(deadline - now, _LOOK_AGAIN)))
                    return
                except TimeoutError:
                    if future.done():
                        raise
                # If the connection is closed, `add_callback_threadsafe` raises the error that closed it.
                connection.add_callback_threadsafe(self._notice)
                if _monotonic() >= deadline and future.cancel():
                    exchange, routing_key, _ = self._publish.arguments
                    raise FlowControlTimeout(
                        self._flow.protocol.reports.holds,
                        _monotonic() - began,
                        self._publish.body,
                        "set a longer max_producer_flow_control_wait to wait",
                        exchange=exchange,
                        routing_key=routing_key,
                    )
        except BaseException:
            if future.cancel() and connection.is_open:
                connection.add_callback_threadsafe(self._give_up)
            raise

    def begin(self) -> None:
        """Send the message, or put it into the line of waiting messages."""
        if self._future is None:
            try:
                self._channel.accepted.remove(self)
            except ValueError:
                # The channel has ended, and `lose` has already handled the message.
                return
        elif self._future.cancelled():
            return
        try:
            self._begin()
        except Exception as error:
            self._end(error)

    def _begin(self) -> None:
        flow, publish, now = self._flow, self._publish, _monotonic()
        if not self._channel.is_open:
            raise self._channel.closing_error
        flow.look_at_transport(now)
        admission = flow.protocol.admission
        arguments = publish, *publish.arguments[:2], now
        if self._future is None and (receipt := admission.send(*arguments)) is not None:
            flow.write()
            self._channel.published(receipt, self._on_publish)
            return
        self._ticket = flow.protocol.line.make_ticket(*arguments, waiter=self)
        flow.protocol.line.stand_in_line(self._ticket, now)
        if not self._ticket.decided:
            if self._future is not None and flow.settings.when_flowed is WhenFlowed.RAISE:
                self._give_up()
                raise flow.flowed(publish, *publish.arguments[:2])
            flow.watch()
        flow.write()
        flow.look_at_transport(now)

    def set(self) -> None:
        """Finish the call, because the message was written, or got an error."""
        ticket = self._ticket
        if ticket.receipt is None:
            self._end(self._channel.closing_error if isinstance(ticket.error, ProducerClosed) else ticket.error)
            return
        self._end(None)
        self._channel.published(ticket.receipt, self._on_publish)

    def _end(self, error: BaseException | None) -> None:
        future = self._future
        if future is None:
            if error is not None:
                log(logging.WARNING, "%s: a message was not sent: %r", self._flow.name, error)
        elif error is None:
            future.set_result(None)
        elif not future.cancelled():
            future.set_exception(error)

    def lose(self) -> None:
        """Log that the accepted message was not sent, because the channel ended before `begin` was called."""
        self._end(self._channel.closing_error)

    def _notice(self) -> None:
        self._flow.protocol.line.notice(_monotonic())
        self._flow.after()

    def _give_up(self) -> None:
        if self._ticket is not None and self._flow.protocol.line.give_up(self._ticket, _monotonic()):
            self._flow.protocol.line.count_flowed_error()
            self._flow.write()


class Channel(_pika.Channel):  # type: ignore[misc]  # of no known type
    """pika's thread-safe `Channel`. While the channel is blocked (flowed), `basic_publish` waits for a limited time.

    The channel answers ``Channel.Flow``. Causes of a block are ``Channel.Flow``, ``Connection.Blocked``, a full
    window, a rate limit, the `flow_manager`, or more than `max_unwritten_bytes` in pika's transport.
    """

    connection: Connection
    #: Messages that were accepted and are neither sent nor in line yet; see `_Publishing.accept` (internal).
    accepted: deque[_Publishing]

    @property
    def flow_control(self) -> ChannelFlow:
        """The flow control of the channel (internal)."""
        flow: ChannelFlow = self._channel.flow_control
        return flow

    def basic_publish(
        self,
        exchange: Any,
        routing_key: Any,
        body: Any,
        properties: Any = None,
        mandatory: bool = False,
        on_publish: Any = None,
    ) -> None:
        """Publish a message like pika. If the channel is blocked (flowed), wait first (J7 A4).

        In a consumer's callback, this method waits at most half of ``work_queue_put_timeout``: pika reads nothing while
        its queue of callbacks is full.

        Raises:
            FlowControlTimeout: the channel was still flowed after `max_producer_flow_control_wait`. The message was not
                sent and never will be.
            ProducerFlowed: the channel is flowed, and `when_flowed` is ``"raise"`` or this is the IOLoop's thread. The
                message was not sent.
            ConnectionClosed, …: the connection has ended; the same error as pika's.
            ChannelWrongStateError, ChannelClosed, …: only the channel has ended. pika itself would only log the error.
        """
        if on_publish is not None:
            validators.require_callback(on_publish, "on_publish")
        connection = self.connection
        # Encode the message here, so that later changes by the caller have no effect.
        try:
            publish = self._channel.encode(exchange, routing_key, body, properties, mandatory)
        except exceptions.ChannelWrongStateError:
            # If the connection has ended, `add_callback_threadsafe` raises the error that ended it, as pika does.
            connection.add_callback_threadsafe(_nothing)
            raise self.closing_error.with_traceback(None) from None
        if connection.is_ioloop_thread:
            self.published(self.flow_control.send_nowait(publish), on_publish)
            return
        publishing = _Publishing(self, publish, on_publish)
        if not publishing.accept():
            publishing.wait(connection.limit(self.flow_control.settings))

    @property
    def unfinished(self) -> int:
        """Return the number of messages that are not written or not confirmed, at least approximately (internal)."""
        transport = self._channel.connection._transport
        is_unwritten = self.is_open and transport is not None and transport.get_write_buffer_size() > 0
        return max(len(self.accepted) + self.flow_control.protocol.unsettled, is_unwritten)

    @property
    def closing_error(self) -> BaseException:
        """Return the error for a channel that is not open (internal)."""
        return self.flow_control.closing_reason or exceptions.ChannelWrongStateError("Channel is closed.")

    def published(self, receipt: Receipt, on_publish: Any) -> None:
        """Call pika's `on_publish` for a message that has just been written (internal)."""
        tag = self.flow_control.delivery_tag(receipt._number)
        if on_publish is not None and tag is not None:
            try:
                on_publish(tag)
            except Exception as error:
                log(logging.ERROR, "a publish callback failed: %r", on_publish, error=error)

    def _ended(self, _channel: Any, _reason: Any) -> None:
        while self.accepted:
            self.accepted.popleft().lose()

    @property
    def next_publish_seq_no(self) -> int | None:
        """Return the sequence number of the next message, like pika."""
        flow = self.flow_control
        return flow.delivery_tag(flow.protocol.admission.next_number)

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> None:
        """Call a callback with each flow event, in order.

        Args:
            callback: called on the IOLoop's thread, so it must return quickly. If the callback calls a method that
                would have to wait, the called method raises an error.
        """
        self.connection.run(lambda: self.flow_control.listen(callback))

    @property
    def flow_state(self) -> FlowState:
        """The flow state of the channel: its holds, and how often and for how long it was blocked (flowed)."""
        state: FlowState = self.connection.run(self.flow_control.look)
        return state


def _nothing() -> None:
    pass


class Connection(_pika.Connection):  # type: ignore[misc]  # of no known type
    """pika's thread-safe `Connection`. While a channel is blocked (flowed), publishing waits for a limited time."""

    # The thread of pika's IOLoop.
    _ioloop_ident: int | None = None

    def _on_connection_open(self, connection: Any) -> None:
        # pika calls this method on the IOLoop's thread, before it reads any data that follows Connection.OpenOk.
        self._ioloop_ident = get_ident()
        follow(connection)
        ConnectionFlow.of(connection).on_forked = self._leave_to_parent
        super()._on_connection_open(connection)

    def _leave_to_parent(self, reason: BaseException) -> None:
        # A thread of the parent may have held the lock, and would never release it in the child.
        self._channel_waiters_lock = threading.Lock()
        # With this reason, calls raise an error immediately. Otherwise they would wait for a thread of the parent.
        self._closed_reason = reason

    def channel(self, timeout: float | None = _pika.DEFAULT_RPC_TIMEOUT) -> Channel:
        """Open a channel like pika, with flow control."""
        channel: Any = super().channel(timeout)
        channel.__class__ = Channel
        channel.connection, channel.accepted = self, deque()
        _channels[id(channel)] = channel
        assert isinstance(channel, Channel)
        self.run(lambda: channel._channel.add_on_close_callback(channel._ended))
        return channel

    @property
    def is_ioloop_thread(self) -> bool:
        """Return True if this is the IOLoop's thread (internal)."""
        return self._ioloop_ident == get_ident()

    def limit(self, settings: Any) -> float | None:
        """Return the maximum seconds that this thread may wait, or ``None`` for no limit (internal)."""
        wait: float | None = settings.max_producer_flow_control_wait
        if self._is_pool_worker_thread():
            half: float = self._work_queue_put_timeout / 2
            return half if wait is None else min(wait, half)
        return wait

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function on the IOLoop's thread, or here if the connection is closed. Return its result (internal)."""
        if self.is_ioloop_thread or self.is_closed:
            return function()
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.add_callback_threadsafe(call)
        return future.result(_pika.DEFAULT_RPC_TIMEOUT)


def __getattr__(name: str) -> Any:
    return passed_on(_pika, name)


mirror(__name__, _pika)
