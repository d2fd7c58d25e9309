"""kombu's channel for py-amqp, with flow control: `basic_publish` waits while the channel is blocked (flowed)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

from amqp import spec
from amqp.exceptions import MessageNacked, RecoverableConnectionError
from kombu.exceptions import OperationalError
from kombu.transport import pyamqp
from vine import promise

from qflow_client.core import calls
from qflow_client.dropin import EncodedMessage, Flag
from qflow_client.errors import ConfirmTimeout, FlowControlTimeout, ProducerClosed
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.kombu.flow import ChannelFlow
from qflow_client.kombu.wire import Unanswered
from qflow_client.logs import log
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import WhenFlowed
from qflow_client.skin import DEFAULT, deadline_of

__all__ = ["PIPELINED", "Channel"]

#: With this value of ``confirm_publish``, `Channel.basic_publish` does not wait for the confirm of its message.
PIPELINED = "pipelined"

_monotonic = time.monotonic

# Methods that need no answer. `send_method` writes them even while the broker blocks the connection.
_UNANSWERED = frozenset(
    (spec.Basic.Ack, spec.Basic.Nack, spec.Basic.Reject, spec.Basic.RecoverAsync, spec.Channel.CloseOk)
)
# For these methods, the error of a timeout is a `TimeoutError`, which kombu treats as a lost connection.
_CLOSING_METHODS = frozenset((spec.Basic.Cancel, spec.Basic.CancelOk, spec.Channel.Close, spec.Channel.CloseOk))

# The names of kombu's exchanges for remote control end with this text.
_REMOTE_CONTROL = ".pidbox"


def refuse(cause: BaseException) -> NoReturn:
    """Raise an `OperationalError`, which users of kombu expect. After this error, kombu does not retry the call."""
    raise OperationalError(str(cause)) from cause


class Channel(pyamqp.Channel):
    """kombu's `Channel` for py-amqp, with flow control.

    The channel answers ``Channel.Flow``. While the channel is blocked (flowed), `basic_publish` waits for at most
    `max_producer_flow_control_wait` seconds. Causes of a block are ``Channel.Flow``, ``Connection.Blocked``, a full
    window, a rate limit, the `flow_manager` or a full socket.
    """

    # Attributes of py-amqp's class.
    connection: Any
    channel_id: Any
    is_open: bool
    _confirm_selected: bool

    def __init__(self, connection: Any, channel_id: Any = None, auto_decode: bool = True, on_open: Any = None) -> None:
        # The flow control of the channel; ``None`` while the channel is not open.
        self._flow: ChannelFlow | None = None
        super().__init__(connection, channel_id, auto_decode, on_open)
        # If `confirm_publish` is set, py-amqp hides the method `basic_publish` by an attribute. Remove the attribute.
        self.__dict__.pop("basic_publish", None)

    def open(self) -> Any:
        if not self.is_open:
            self.connection.transport.tap.expect(self.channel_id)
        return super().open()

    def _on_open_ok(self) -> None:
        connection = self.connection
        self._end_flow("the channel is opened again")
        self._flow = ChannelFlow(self, connection.flow_settings, connection.transport)
        super()._on_open_ok()

    def collect(self) -> None:
        self._end_flow("the channel is closed")
        super().collect()

    def _end_flow(self, reason: str) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            unsettled = flow.protocol.unsettled
            flow.end(reason)
            if unsettled:
                text = "%s: %d messages are not confirmed, and no call waits for them any more: %s"
                log(logging.WARNING, text, flow.name, unsettled, reason)

    def close(
        self, reply_code: int = 0, reply_text: str = "", method_sig: tuple[int, int] = (0, 0), argsig: str = "BsBB"
    ) -> Any:
        """Close the channel, as py-amqp does. With pipelined confirms, this method first calls `wait_for_confirms`.

        If the broker blocks the connection, the method does not wait. ``Channel.Close`` is sent later, when a
        read or a publish of the program receives ``Connection.Unblocked``.

        Raises:
            OperationalError: the call of `wait_for_confirms` failed. The channel is closed nevertheless.
        """
        connection = self.connection
        if self.is_open and connection is not None and connection.is_blocked:
            self.is_open = False
            # From now on py-amqp drops deliveries. The broker delivers these messages again after the close.
            self.is_closing = True
            self._end_flow("the channel is closed while the broker blocks the connection")
            connection.left.append(self)
            return None
        error = self.settle()
        try:
            result = super().close(reply_code, reply_text, method_sig, argsig)
        finally:
            if self.connection is None:
                # End the flow control even if the close failed, because py-amqp does not close the channel again.
                self._end_flow("the channel is closed")
        if error is not None:
            raise error
        return result

    def close_left(self) -> None:
        """Send the ``Channel.Close`` that `close` has postponed while the broker blocked the connection.

        This method can run during any read, so it must not wait. When the answer comes, py-amqp calls `collect`.
        """
        self.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        connection = self.connection
        super()._on_close(reply_code, reply_text, class_id, method_id)
        if self in connection.left:
            # Send no Channel.Close: the broker has already closed the channel, and would end the connection.
            connection.left.remove(self)
            self.collect()

    def settle(self) -> OperationalError | None:
        """Wait for pipelined confirms before a close. If messages were not delivered, log and return the error."""
        connection = self.connection
        flow = self._flow
        if not self.is_open or flow is None or connection is None or connection.confirm_publish != PIPELINED:
            return None
        if flow.has_given_up:
            # A publish has already timed out. kombu's pools close a connection after any error, so do not wait again.
            return None
        try:
            self.wait_for_confirms()
        except OperationalError as error:
            log(logging.WARNING, "%s: %s", flow.name, error)
            return error
        except connection.connection_errors + connection.channel_errors:
            pass
        return None

    def send_method(
        self,
        sig: Any,
        format: Any = None,
        args: Any = None,
        content: Any = None,
        wait: Any = None,
        callback: Any = None,
        returns_tuple: bool = False,
    ) -> Any:
        """Send a method like py-amqp. If it needs an answer, first wait while the broker blocks the connection."""
        connection = self.connection
        if sig not in _UNANSWERED and connection is not None:
            try:
                connection.await_unblocked()
            except FlowControlTimeout as error:
                if sig in _CLOSING_METHODS:
                    raise
                refuse(error)
            if sig == spec.Confirm.Select and self._flow is not None:
                self._flow.confirms_begin()
        return super().send_method(sig, format, args, content, wait, callback, returns_tuple)

    def wait(self, method: Any, callback: Any = None, timeout: Any = None, returns_tuple: bool = False) -> Any:
        """Wait for a method, as py-amqp does. `Connection.blocking_read` limits some of these waits."""
        connection = self.connection
        if connection is None:
            raise RecoverableConnectionError("connection already closed")
        try:
            with connection.awaiting():
                return super().wait(method, callback, timeout, returns_tuple)
        except Unanswered as error:
            # End the connection, because py-amqp would treat a late answer as the answer to another method.
            connection.collect()
            if method in _CLOSING_METHODS or connection.must_not_wait:
                # A Celery worker connects again after this error, but ends after an `OperationalError`.
                raise
            refuse(error)

    def basic_publish(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        argsig: str = "Bssbb",
    ) -> promise:
        """Publish a message, as py-amqp does. If the channel is blocked (flowed), wait first (J7 A4).

        Args:
            mandatory: whether the broker returns the message if no queue receives it.
            timeout: maximum seconds to wait while the channel is flowed, instead of `max_producer_flow_control_wait`.
            confirm_timeout: maximum seconds to wait for the confirm, instead of `timeout` or
                `max_producer_flow_control_wait`.

        Raises:
            OperationalError: the ``__cause__`` shows what happened to the message. FlowControlTimeout: the channel was
                still flowed after the timeout; the message was not sent and never will be. ProducerFlowed: the channel
                is blocked (flowed), and `when_flowed` or the event loop of kombu forbids a wait; the message was not
                sent. ConfirmTimeout: the message was written at least in part, and its outcome is unknown.
                MessageNacked: with pipelined confirms, earlier messages were nacked; this message was not sent.
            MessageNacked: the call waited for the confirm, and the broker did not accept the message.

        Returns:
            A promise that is already fulfilled, as with py-amqp.
        """
        connection = self.connection
        if not connection:
            raise RecoverableConnectionError("basic_publish: connection closed")
        confirms = connection.confirm_publish
        try:
            if confirms:
                connection.publisher = get_ident()
                self._select_confirms()
            receipt = self._send(msg, exchange, routing_key, mandatory, immediate, timeout, argsig)
            if confirms and confirms != PIPELINED:
                self._confirm(receipt, confirm_timeout or timeout)
        except OperationalError as error:
            # A Celery worker asks its neighbors when it starts, and would end after an error. So it could not consume
            # while the broker is blocked. But a `MessageNacked` reports earlier messages, which may be tasks.
            is_about_others = isinstance(error.__cause__, MessageNacked)
            if is_about_others or not ((exchange or "").endswith(_REMOTE_CONTROL) and connection.must_not_wait):
                raise
            log(logging.WARNING, "kombu: a message of remote control to %r may be lost: %s", exchange, error)
        return _kept()

    def basic_publish_confirm(self, *args: Any, **kwargs: Any) -> promise:
        """Publish like `basic_publish`, but wait for the confirm, whatever the value of ``confirm_publish`` is."""
        confirm_timeout = kwargs.pop("confirm_timeout", None)
        connection = self.connection
        if not connection:
            raise RecoverableConnectionError("basic_publish: connection closed")
        self._select_confirms()
        receipt = self._send(*args, **kwargs)
        self._confirm(receipt, confirm_timeout or kwargs.get("timeout"))
        return _kept()

    def _select_confirms(self) -> None:
        if not self._confirm_selected:
            self._confirm_selected = True
            try:
                self.confirm_select()
            except BaseException:
                self._confirm_selected = False
                raise

    def _send(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        argsig: str = "Bssbb",
    ) -> Receipt:
        connection = self.connection
        wire = connection.transport
        is_writable = wire.look()
        if wire.has_news:
            connection.hear()
        flow = self._open_flow()
        flow.look()
        if flow.protocol.reports.failures:
            self._raise_failures("they were published before; the message of this call was not sent")
        protocol = flow.protocol
        encoded = flow.encode(msg, exchange, routing_key, (mandatory, immediate), argsig, connection.frame_max)
        if protocol.unwritten:
            # Write the bytes that earlier calls could not write.
            flow.write()
        if not is_writable or wire.unwritten:
            protocol.hold(HoldKind.TRANSPORT, _monotonic(), detail="the socket takes no more bytes")
        elif not protocol.gate.is_open:
            protocol.lift(HoldKind.TRANSPORT, _monotonic())
        receipt = protocol.send(encoded, exchange or "", routing_key or "", _monotonic())
        if receipt is None:
            receipt = self._when_unflowed(flow, encoded, exchange or "", routing_key or "", timeout)
        flow.write()
        if protocol.unwritten:
            self._write_all(flow, encoded)
        return receipt

    def _open_flow(self) -> ChannelFlow:
        flow = self._flow
        if flow is None or flow.protocol.closed is not None:
            # If py-amqp has an unread frame that says why the channel is closed, py-amqp raises the error here.
            self._raise_closed()
        return flow

    def _raise_closed(self) -> NoReturn:
        connection = self.connection
        while connection is not None and connection.connected and connection.transport.has_frames:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0)
            connection = self.connection
        why = None if self._flow is None else self._flow.protocol.closed
        raise RecoverableConnectionError(f"basic_publish: {why or 'the channel or its connection is closed'}")

    def _when_unflowed(
        self, flow: ChannelFlow, encoded: EncodedMessage, exchange: str, routing_key: str, timeout: float | None
    ) -> Receipt:
        protocol, settings = flow.protocol, flow.settings
        if settings.when_flowed is WhenFlowed.RAISE or self.connection.must_not_wait:
            refuse(flow.flowed(encoded, exchange, routing_key))
        if timeout is None:
            timeout = settings.max_producer_flow_control_wait
        flow.has_given_up = True
        line, now, flag = protocol.line, _monotonic(), Flag()
        ticket = line.make_ticket(encoded, exchange, routing_key, now, timeout=timeout, waiter=flag)
        try:
            receipt = flow.drive(calls.send(line, ticket, now), flag, partial(self._turn, flow))
        except FlowControlTimeout as error:
            refuse(
                FlowControlTimeout(
                    error.holds,
                    error.waited,
                    encoded.body,
                    "set a longer max_producer_flow_control_wait to wait",
                    exchange=exchange,
                    routing_key=routing_key,
                )
            )
        except ProducerClosed:
            self._raise_closed()
        finally:
            line.give_up(ticket, _monotonic())
            flow.after()
        flow.has_given_up = False
        return receipt

    def _turn(self, flow: ChannelFlow, deadline: float) -> None:
        """Process I/O once. Wait for I/O at most until the deadline or the next timer of the protocol."""
        protocol = flow.protocol
        flow.look()
        at = protocol.next_timer(_monotonic())
        is_full = protocol.gate.is_held_by(HoldKind.TRANSPORT)
        connection = self.connection
        is_writable = connection.turn(deadline if at is None else min(deadline, at), is_full)
        if protocol.closed is not None:
            self._raise_closed()
        flow.look()
        if is_full and is_writable and not connection.transport.unwritten:
            protocol.lift(HoldKind.TRANSPORT, _monotonic())
        protocol.on_timer(_monotonic())
        if protocol.unwritten:
            flow.write()

    def _limit(self) -> float | None:
        wait: float | None = self.connection.flow_settings.max_producer_flow_control_wait
        return wait

    def _write_all(self, flow: ChannelFlow, encoded: EncodedMessage) -> None:
        wait = self._limit()
        deadline = deadline_of(wait)
        protocol = flow.protocol
        size = len(encoded.frames)
        while protocol.unwritten:
            if _monotonic() >= deadline:
                assert wait is not None
                refuse(
                    ConfirmTimeout(
                        f"{max(0, size - protocol.unwritten)} of {size} bytes of the message are written after "
                        f"{wait:.3g} s, and the broker reads no more; the rest stays first in line, so the message "
                        "may still arrive"
                    )
                )
            self._turn(flow, deadline)

    def _confirm(self, receipt: Receipt, timeout: float | None) -> None:
        """Wait for the confirm of a message. Raise the errors that `basic_publish` describes."""
        connection = self.connection
        if not receipt.done:
            flow = self._open_flow()
            wait = self._limit() if timeout is None else timeout
            deadline = math.inf if wait is None else _monotonic() + wait
            while not receipt.done:
                is_up = _monotonic() >= deadline
                if is_up or (flow.protocol.gate.is_held_by(HoldKind.CONNECTION_BLOCKED) and connection.must_not_wait):
                    waited = f"within {wait:.3g} s" if is_up else "yet"
                    flow.after()
                    refuse(ConfirmTimeout(f"no answer from the broker {waited} for {receipt.describe()}{flow.held}"))
                # Do not wait for room in the socket. No message waits to be sent, because each call of `basic_publish`
                # waits until its own message is sent.
                connection.turn(deadline, False)
                if flow.protocol.closed is not None:
                    self._raise_closed()
            flow.after()
        if receipt._outcome is Outcome.UNKNOWN:
            self._raise_closed()
        if connection.transport.has_news:
            # Let py-amqp handle the received frames, for example a returned message.
            connection.hear()
        if receipt._outcome is Outcome.NACKED:
            if self._flow is not None:
                self._flow.protocol.reports.forget_failures()
            raise MessageNacked()

    def _raise_failures(self, about: str) -> None:
        assert self._flow is not None
        reports = self._flow.protocol.reports
        count = len(reports.take_failures()) + reports.take_dropped()
        refuse(MessageNacked(f"the broker did not accept {count} messages: {about}"))

    def wait_for_confirms(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all published messages are confirmed.

        Args:
            timeout: maximum seconds; ``None`` for no limit. The default is the setting
                `max_producer_flow_control_wait`.

        Raises:
            OperationalError: the ``__cause__`` shows the reason. ConfirmTimeout: some messages are not confirmed; their
                outcome is unknown. MessageNacked: the broker did not accept some messages.
            TypeError, ValueError: `timeout` is not a number.
        """
        if timeout is DEFAULT:
            timeout = self._limit()
        deadline = deadline_of(timeout)
        flow = self._open_flow()
        flag = Flag()
        if not flow.drive(calls.flush(flow.protocol, flag, deadline), flag, partial(self._turn, flow)):
            unsettled = flow.protocol.unsettled
            flow.after()
            refuse(
                ConfirmTimeout(f"{unsettled} messages are not confirmed after {timeout:.3g} s{flow.held}", unsettled)
            )
        flow.after()
        if self.connection.transport.has_news:
            self.connection.hear()
        if flow.protocol.reports.failures:
            self._raise_failures("they were published before")

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Call a callback with each flow event, until the channel is closed. Return a function to remove the callback.

        Args:
            callback: function that is called when kombu reads or publishes. The function must not itself read or
                publish. Exceptions of the callback are logged.
        """
        return self._open_flow().listen(callback)

    @property
    def flow_state(self) -> FlowState:
        """The flow state of the channel: its holds, and how often and for how long it was blocked (flowed)."""
        flow = self._open_flow()
        self._look(flow)
        state = flow.protocol.flow_state(_monotonic())
        flow.after()
        return state

    def _look(self, flow: ChannelFlow) -> None:
        wire = self.connection.transport
        is_writable = wire.look()
        flow.look()
        protocol = flow.protocol
        if is_writable and not protocol.gate.is_open:
            flow.write()
        if is_writable and not protocol.gate.is_open and not wire.unwritten:
            protocol.lift(HoldKind.TRANSPORT, _monotonic())

    def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until the channel has no holds. Return False after the timeout.

        Args:
            timeout: maximum seconds; ``None`` for no limit.

        Raises:
            TypeError, ValueError: `timeout` is not a number.
        """
        deadline = deadline_of(timeout)
        if not self.flow_state.flowed:
            return True
        flow, flag = self._open_flow(), Flag()
        call = calls.wait_unflowed(flow.protocol, flag, deadline, _monotonic())
        return flow.drive(call, flag, partial(self._turn, flow))


def _kept() -> promise:
    made = promise()
    made()
    return made
