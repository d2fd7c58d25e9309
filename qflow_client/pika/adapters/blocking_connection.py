"""`pika.adapters.blocking_connection` with flow control: `basic_publish` waits while a channel is blocked (flowed)."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import pika.adapters.blocking_connection as _pika
from pika import exceptions, spec
from pika.adapters.blocking_connection import ReturnedMessage

from qflow_client.core import calls
from qflow_client.dropin import Flag
from qflow_client.errors import ConfirmTimeout, FlowControlTimeout, ProducerClosed
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.logs import log
from qflow_client.pika.blocking_io import Connection, Turns
from qflow_client.pika.channel import Channel
from qflow_client.pika.flow import ChannelFlow, ConnectionFlow, Publish
from qflow_client.pika.mirror import mirror, passed_on
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import WhenFlowed, check_argument, check_timeout
from qflow_client.skin import DEFAULT

__all__ = ["BlockingChannel", "BlockingConnection", "ReturnedMessage"]

_monotonic = time.monotonic

# Seconds after which `close` ends the connection if the broker reads, but does not answer.
_MAX_SILENCE = 60.0
# Maximum seconds that the process waits at its end for pipelined confirms.
_AT_EXIT = 1.0
# In pipelined mode with at least this number of unconfirmed messages, the kernel collects small writes.
_MANY_UNCONFIRMED = 16

# The channels with pipelined confirms. The keys are their ids.
_pipelined: WeakValueDictionary[int, BlockingChannel] = WeakValueDictionary()


@atexit.register
def _at_exit() -> None:
    """Wait for pipelined confirms when the process ends, and log the messages that may be lost."""
    end = _monotonic() + _AT_EXIT
    # Daemon threads still run, and may make channels meanwhile.
    for reference in _pipelined.valuerefs():
        channel = reference()
        if channel is not None:
            channel._settle_at_exit(end)


class BlockingConnection(_pika.BlockingConnection):
    """pika's `BlockingConnection`. While a channel is blocked (flowed), its `basic_publish` waits for a limited time.

    Args:
        parameters: as for pika. The parameter classes of `qflow_client.pika` also have settings of flow control.
    """

    # Attributes of pika's class.
    _impl: Any

    def __init__(self, parameters: Any = None, _impl_class: Any = None) -> None:
        super().__init__(parameters, _impl_class or Connection)  # type: ignore[arg-type]  # it accepts a class
        self._turns = Turns(self)

    def _flush_output(self, *waiters: Any) -> None:
        ConnectionFlow.of(self._impl).check_process()
        if hasattr(self, "_turns"):
            self._turns.go_on_writing()
        super()._flush_output(*waiters)  # type: ignore[misc]  # private

    def channel(self, channel_number: int | None = None) -> BlockingChannel:
        """Open a channel like pika, with flow control."""
        channel: BlockingChannel = adopt(super().channel(channel_number))
        return channel

    def close(self, reply_code: int = 200, reply_text: str = "Normal shutdown") -> None:
        """Close the connection like pika. With pipelined confirms, first wait until all messages are settled.

        The wait for the confirms is limited to `max_producer_flow_control_wait` seconds. If the broker does not read,
        the wait for its answer to the close has the same limit, and the connection is then aborted. If the broker
        reads, but does not answer, the limit is at least 60 s.

        Raises:
            UnroutableError, NackError, ConfirmTimeout: as for `wait_for_confirms` of a channel. The connection is
                closed first.
            ConnectionBlockedTimeout: the connection was aborted.
        """
        error = None
        ConnectionFlow.of(self._impl).check_process()
        if self.is_open:
            wait = ConnectionFlow.of(self._impl).settings.max_producer_flow_control_wait
            end = math.inf if wait is None else _monotonic() + wait
            for channel in self._channels():
                error = channel._settle(end) or error
        with good_bye(self):
            super().close(reply_code, reply_text)
        if error is not None:
            raise error

    def _channels(self) -> Iterator[BlockingChannel]:
        for flow in tuple(ConnectionFlow.of(self._impl).channels.values()):
            if isinstance(flow.owner, BlockingChannel) and flow.owner.is_open:
                yield flow.owner

    def __exit__(self, exc_type: Any, value: Any, traceback: Any) -> None:
        if exc_type is not None and self.is_open:
            for channel in self._channels():
                channel._forsake(value)
            if ConnectionFlow.of(self._impl).blocked is not None:
                # The broker does not read, so do not wait for its answer to a close.
                text = (
                    "the connection is cut without a close, because the broker blocks it and the program leaves the "
                    "`with` block by %r"
                )
                log(logging.WARNING, text, value)
                cut(self)
                return
        super().__exit__(exc_type, value, traceback)


@contextmanager
def good_bye(connection: Any) -> Iterator[None]:
    """After `max_producer_flow_control_wait` seconds in ``with``, abort the connection if the broker reads nothing.

    If the broker reads, but is silent, abort the connection after the same time, or after 60 s if that is longer.
    """
    impl = connection._impl
    wait = ConnectionFlow.of(impl).settings.max_producer_flow_control_wait
    began = _monotonic()
    timer: Any = None

    def give_up() -> None:
        nonlocal timer
        timer = None
        if impl.is_closed:
            # The timer of another call of `close` has already ended the connection.
            return
        waited = _monotonic() - began
        if ConnectionFlow.of(impl).blocked is not None or Turns(connection).unwritten or waited >= _MAX_SILENCE:
            impl._terminate_stream(
                exceptions.ConnectionBlockedTimeout(
                    "the broker blocks the connection, takes no bytes, or is silent, and has not closed it within "
                    f"{waited:.3g} s"
                )
            )
        else:
            timer = impl.ioloop.call_later(_MAX_SILENCE - waited, give_up)

    if wait is not None and not impl.is_closed:
        timer = impl.ioloop.call_later(wait, give_up)
    try:
        yield
    finally:
        if timer is not None and not impl.is_closed:
            impl.ioloop.remove_timeout(timer)


def cut(connection: Any) -> None:
    """Abort a connection without a handshake, because the broker blocks it."""
    connection._impl._terminate_stream(exceptions.ConnectionBlockedTimeout("the broker blocks the connection"))
    with suppress(exceptions.ConnectionBlockedTimeout):
        connection._flush_output(connection._closed_result.is_ready)


class _FlowNotice:
    """A flow event that waits for `process_data_events`, like pika's own events."""

    def __init__(self, callback: Callable[[FlowEvent], object], event: FlowEvent) -> None:
        self._callback = callback
        self._event = event

    def dispatch(self) -> None:
        self._callback(self._event)


_CallbackResult: Any = _pika._CallbackResult  # type: ignore[attr-defined]  # private


class _Unused(_CallbackResult):  # type: ignore[misc]  # of no known type
    """Replaces pika's record of the broker's answer, because this package matches answers by delivery tags."""

    def set_value_once(self, *_arguments: Any, **_keywords: Any) -> None:
        pass


class BlockingChannel(_pika.BlockingChannel):
    """pika's `BlockingChannel`. While the channel is blocked (flowed), `basic_publish` waits for a limited time.

    The channel answers ``Channel.Flow``. Causes of a block are ``Channel.Flow``, ``Connection.Blocked``, a full
    window, a rate limit, the `flow_manager` or a full socket. While `basic_publish` waits, all I/O continues, such as
    heartbeats and acks. As with pika, `BlockingConnection.process_data_events` calls the application's callbacks later.
    """

    # Attributes of pika's class.
    _impl: Any
    _connection: Any
    _OnMessageConfirmationReportArgs: Any
    _add_pending_event: Any
    _puback_return: ReturnedMessage | None
    # Whether `basic_publish` returns before its message is confirmed. If so, later calls report failed messages.
    _is_pipelined = False

    if TYPE_CHECKING:
        # The callbacks get a channel of this class, and may name it in their annotations.
        def add_on_return_callback(
            self, callback: Callable[[BlockingChannel, spec.Basic.Return, spec.BasicProperties, bytes], object]
        ) -> None: ...
        def basic_consume(
            self,
            queue: str,
            on_message_callback: Callable[[BlockingChannel, spec.Basic.Deliver, spec.BasicProperties, bytes], object],
            auto_ack: bool = False,
            exclusive: bool = False,
            consumer_tag: str | None = None,
            arguments: Mapping[str, Any] | None = None,
        ) -> str: ...

    def __init__(self, channel_impl: Any, connection: Any) -> None:
        super().__init__(channel_impl, connection)
        self._adopted()

    def _adopted(self) -> None:
        flow: ChannelFlow = self._impl.flow_control
        flow.owner = self
        self._flow = flow
        self._turns: Turns = getattr(self._connection, "_turns", None) or Turns(self._connection)
        self._message_confirmation_result = _Unused(self._OnMessageConfirmationReportArgs)

    def basic_publish(
        self,
        exchange: str,
        routing_key: str,
        body: str | bytes,
        properties: spec.BasicProperties | None = None,
        mandatory: bool = False,
    ) -> None:
        """Publish a message like pika. If the channel is blocked (flowed), wait first (J7 A4).

        Raises:
            FlowControlTimeout: the channel was still flowed after `max_producer_flow_control_wait`. The message was not
                sent and never will be.
            ProducerFlowed: the channel is flowed, and `when_flowed` is ``"raise"``. The message was not sent.
            ConfirmTimeout: the message was written at least in part. Within `max_producer_flow_control_wait` the broker
                did not confirm it, or did not read all of it. The outcome is unknown.
            UnroutableError, NackError: as for pika. With pipelined confirms, these errors are about earlier messages,
                and the message of this call was not sent.
        """
        flow, turns = self._flow, self._turns
        if self._is_pipelined and flow.closing_reason is not None:
            # An earlier call may have detected the end of the channel without raising an error.
            self._check_open()
        publish = self._impl.encode(exchange, routing_key, body, properties, mandatory)
        exchange, routing_key, _ = publish.arguments
        protocol = flow.protocol
        if self._is_pipelined and (protocol.reports.failures or flow.returned):
            self._raise_failures("earlier messages; the message of this call was not sent")
        is_writable = turns.now()
        if self._impl.is_closed or self._connection._closed_result.ready:
            self._check_open()
        if not is_writable:
            self._look_at_transport(is_writable)
        elif not protocol.gate.is_open:
            protocol.lift(HoldKind.TRANSPORT, _monotonic())
        receipt = protocol.send(publish, exchange, routing_key, _monotonic())
        if receipt is None:
            receipt = self._when_unflowed(publish)
        services = turns.services
        if services is not None:
            if self._is_pipelined:
                services.cork(protocol.window.used >= _MANY_UNCONFIRMED)
            services.eager = True
            try:
                flow.write()
            finally:
                services.eager = False
        else:
            flow.write()
        if turns.unwritten:
            self._write_all(len(publish.frames))
            if not self._is_pipelined:
                self._check_open()
        if not self._is_pipelined and flow.confirms:
            self._confirm(receipt, publish)

    def _check_open(self) -> None:
        """If the channel or the connection has ended, raise the same error as pika."""
        closed = self._connection._closed_result
        if closed.ready:
            try:
                raise closed.value.error
            finally:
                self._connection._cleanup()
        if self.is_closed:
            reason = self._flow.closing_reason
            if isinstance(reason, exceptions.ChannelClosedByBroker):
                # Drop the traceback, which would grow with each call and keep the refused messages in memory.
                raise reason.with_traceback(None)
            self._impl._raise_if_not_open()

    def _look_at_transport(self, is_writable: bool) -> None:
        protocol = self._flow.protocol
        now = _monotonic()
        if is_writable:
            protocol.lift(HoldKind.TRANSPORT, now)
        else:
            protocol.hold(HoldKind.TRANSPORT, now, detail="the socket takes no more bytes")
            self._turns.when_writable()

    def _when_unflowed(self, publish: Publish) -> Receipt:
        protocol = self._flow.protocol
        settings = self._flow.settings
        exchange, routing_key, _ = publish.arguments
        if settings.when_flowed is WhenFlowed.RAISE:
            raise self._flow.flowed(publish, exchange, routing_key)
        line, now, flag = protocol.line, _monotonic(), Flag()
        ticket = line.make_ticket(
            publish, exchange, routing_key, now, timeout=settings.max_producer_flow_control_wait, waiter=flag
        )
        try:
            return self._flow.drive(calls.send(line, ticket, now), flag, self._turn)
        except FlowControlTimeout as error:
            raise FlowControlTimeout(
                error.holds,
                error.waited,
                publish.body,
                "set a longer max_producer_flow_control_wait to wait",
                exchange=exchange,
                routing_key=routing_key,
            ) from None
        except ProducerClosed:
            self._check_open()
            raise
        except exceptions.AMQPError as error:
            if self._is_pipelined and ticket.receipt is not None:
                # The message was admitted before the end of the channel. A later call raises the error.
                self._flow.unraised = error
                return ticket.receipt
            raise
        finally:
            line.give_up(ticket, _monotonic())
            self._flow.write()

    def _turn(self, deadline: float) -> None:
        """Process I/O until an event happens, or until the deadline."""
        protocol = self._flow.protocol
        at = protocol.next_timer(_monotonic())
        self._turns.until(deadline if at is None else min(deadline, at))
        self._check_open()
        if protocol.gate.is_held_by(HoldKind.TRANSPORT):
            self._look_at_transport(self._turns.now())
        protocol.on_timer(_monotonic())
        self._flow.write()

    def _deadline(self, timeout: float | None = DEFAULT) -> tuple[float | None, float]:
        if timeout is DEFAULT:
            timeout = self._flow.settings.max_producer_flow_control_wait
        check_timeout(timeout)
        return timeout, math.inf if timeout is None else _monotonic() + timeout

    def _write_all(self, size: int) -> None:
        wait, deadline = self._deadline()
        while (unwritten := self._turns.unwritten) and not self._connection.is_closed:
            if _monotonic() >= deadline:
                raise ConfirmTimeout(
                    f"{max(0, size - unwritten)} of {size} bytes of the message are written after {wait:.3g} s, and "
                    "the broker reads no more; the rest stays first in line, so the message may still arrive"
                )
            self._turns.until(deadline)

    def _confirm(self, receipt: Receipt, publish: Publish) -> None:
        """Wait for the confirm of a message, and raise the same errors as pika."""
        if not receipt.done:
            wait, deadline = self._deadline()
            while not receipt.done and not self.is_closed:
                if _monotonic() >= deadline:
                    raise ConfirmTimeout(
                        f"no answer from the broker within {wait:.3g} s for {receipt.describe()}{self._flow.held}"
                    )
                self._turns.until(deadline)
            self._flow.after()
        if not receipt.done or receipt._outcome is Outcome.UNKNOWN:
            self._check_open()
        # Ignore late returns of earlier messages. The calls that published these messages have raised `ConfirmTimeout`.
        returned = [each for each in self._flow.returned if _is_of(each, publish)]
        self._flow.returned.clear()
        if receipt.outcome is Outcome.NACKED:
            raise exceptions.NackError(returned)
        if returned:
            raise exceptions.UnroutableError(returned)

    def _on_puback_message_returned(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        super()._on_puback_message_returned(channel, method, properties, body)  # type: ignore[misc]  # private
        assert self._puback_return is not None
        self._flow.returned.append(self._puback_return)
        self._puback_return = None

    def confirm_delivery(self, pipelined: bool = False, republish: BlockingChannel | None = None) -> None:
        """Start confirm mode like pika.

        Args:
            pipelined: if True, `basic_publish` returns when the message is written. At most `capacity` messages are
                unconfirmed at the same time. If a message is returned or nacked, the next `basic_publish`,
                `wait_for_confirms` or `close` raises an error. If a call of `basic_publish` raises any other error than
                `ConfirmTimeout`, the message of this call was not sent.
            republish: an ended channel with pipelined confirms, whose connection was lost. The unconfirmed messages of
                the ended channel are published on this channel, in order, before all other messages. Messages that may
                have arrived get the header `REPUBLISHED`. If this call raises an error, the ended channel still has its
                messages. After ``KeyboardInterrupt`` one of the two channels has the messages.

        Raises:
            TypeError: `republish` is not a channel of this class.
            ValueError: `republish` is open, was closed by the broker, or had no pipelined confirms. The error is also
                raised if this channel is already in confirm mode, or `pipelined` is False.
        """
        if republish is not None:
            self._check_republish(republish, pipelined)
        super().confirm_delivery()
        self._is_pipelined = self._flow.keeps_unconfirmed = pipelined
        if pipelined:
            self._user = threading.current_thread()
            _pipelined[id(self)] = self
        if republish is not None:
            self._flow.take_over(republish._flow)

    def _check_republish(self, ended: BlockingChannel, pipelined: bool) -> None:
        check_argument("republish", ended, isinstance(ended, BlockingChannel), "a BlockingChannel of qflow_client.pika")
        closed = ended._flow.closing_reason
        if not pipelined or self._flow.confirms:
            raise ValueError("republish needs pipelined=True, in the first confirm_delivery() of the channel")
        if ended.is_open:
            raise ValueError(f"republish takes a channel whose connection has ended, and {ended!r} is open")
        if isinstance(closed, exceptions.ChannelClosedByBroker):
            raise ValueError(
                f"republish takes a channel whose connection has ended, but the broker closed {ended!r}: {closed}; the "
                "cause is one of its `unconfirmed` messages, and the broker would close the next channel too"
            )
        if ended._flow.protocol.closed is not None:
            raise ValueError(
                f"republish takes a channel with pipelined confirms, and only once; {ended!r} has nothing to publish"
            )

    def wait_for_confirms(self, timeout: float | None = DEFAULT) -> None:
        """Wait until all published messages are confirmed.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit. The default is
                `max_producer_flow_control_wait`.

        Raises:
            ConfirmTimeout: some messages are not confirmed in time. The outcome of these messages is unknown.
            NackError: messages were not delivered. They are in the attribute `messages`, with their ``Basic.Publish``.
                If some of them were not nacked, the notes of the error show their number and describe the first.
            UnroutableError: mandatory messages have reached no queue. They are in the attribute `messages`.
            TypeError, ValueError: `timeout` is not a number.
        """
        wait, deadline = self._deadline(timeout)
        protocol = self._flow.protocol
        if not self.is_open:
            self._check_open()
        flag = Flag()
        if not self._flow.drive(calls.flush(protocol, flag, deadline), flag, self._turn):
            assert wait is not None
            raise ConfirmTimeout(
                f"{protocol.unsettled} messages are not confirmed after {wait:.3g} s{self._flow.held}",
                protocol.unsettled,
            )
        self._raise_failures("messages that were published before")

    @property
    def unconfirmed(self) -> tuple[ReturnedMessage, ...]:
        """The messages that were published in confirm mode and have no answer, in the order of publishing.

        The messages of a closed channel stay unconfirmed. Each message has its ``Basic.Publish``, properties and body.
        """
        protocol = self._flow.protocol
        receipts = [*protocol.reports.failures, *protocol.unsettled_receipts]
        return tuple(_published(each) for each in receipts if each._outcome in (None, Outcome.UNKNOWN))

    def _raise_failures(self, about: str) -> None:
        error: exceptions.NackError | exceptions.UnroutableError
        others: list[Receipt] = []
        if self._flow.protocol.reports.failures:
            failures = self._flow.protocol.reports.take_failures()
            error = exceptions.NackError([_published(each) for each in failures])
            others = [each for each in failures if each._outcome is not Outcome.NACKED]
            # Reset the number of failures that were dropped because of `max_failed_bytes`. pika's error cannot contain
            # this number, and the first drop was logged.
            self._flow.protocol.reports.take_dropped()
        elif self._flow.returned:
            returned, self._flow.returned = self._flow.returned, []
            error = exceptions.UnroutableError(returned)
        else:
            return
        error.add_note(f"this error is about {about}")
        if others:
            error.add_note(f"{len(others)} of them were not nacked: {others[0].describe()}")
        raise error

    def _settle(self, end: float = math.inf) -> Exception | None:
        """Wait until all messages are settled. Return the error of undelivered messages. A second call does nothing."""
        if not self._is_pipelined:
            return None
        self._is_pipelined = False
        deadline = min(end, self._deadline()[1])
        try:
            self.wait_for_confirms(None if deadline == math.inf else max(0.0, deadline - _monotonic()))
        except (ConfirmTimeout, exceptions.NackError, exceptions.UnroutableError) as error:
            return error
        return None

    def _settle_at_exit(self, end: float) -> None:
        """Wait until `end` for the confirms of this thread. Log the messages of any thread that may be lost."""
        # If the channel is closed, the program knows the reason, unless no call has raised it.
        if not self._is_pipelined or not (self.is_open or (self._flow.unraised and self.unconfirmed)):
            return
        unsettled = self._flow.protocol.unsettled
        why: object = None
        if self._user.is_alive() and self._user is not threading.current_thread():
            # Two threads cannot use one connection.
            why = f"another thread uses the channel, and {unsettled} messages are not confirmed" if unsettled else None
        else:
            try:
                why = self._settle(end)
            except Exception as error:
                why = error
        if why is not None:
            log(logging.WARNING, "%s: messages may be lost at the end of the process: %s", self._flow.name, why)

    def __del__(self) -> None:
        if self._is_pipelined and self.is_open and (unsettled := self._flow.protocol.unsettled):
            text = "%s: %d messages may be lost, because the channel was not closed"
            log(logging.WARNING, text, self._flow.name, unsettled)

    def _forsake(self, value: object) -> None:
        """After an exception, log the number of unconfirmed messages. `close` then does not wait for their confirms."""
        if self._is_pipelined and self._flow.protocol.unsettled:
            log(
                logging.WARNING,
                "%d messages are not confirmed, and the channel does not wait for them, because the program leaves the "
                "`with` block by %r; see `unconfirmed`",
                self._flow.protocol.unsettled,
                value,
            )
        self._is_pipelined = False

    def close(self, reply_code: int = 0, reply_text: str = "Normal shutdown") -> None:
        """Close the channel like pika. With pipelined confirms, first wait until all messages are settled.

        Raises:
            UnroutableError, NackError, ConfirmTimeout: as for `wait_for_confirms`. The channel is closed first.
            ConnectionBlockedTimeout: the broker does not read or does not answer, so the connection was aborted.
        """
        error = self._settle() if self.is_open else None
        with good_bye(self._connection):
            super().close(reply_code, reply_text)
        if error is not None:
            raise error

    def __exit__(self, exc_type: Any, value: Any, traceback: Any) -> None:
        if exc_type is not None:
            self._forsake(value)
            if ConnectionFlow.of(self._impl.connection).blocked is not None:
                # Do not close the channel, because the broker would not read the close.
                return
        super().__exit__(exc_type, value, traceback)

    def add_on_flow_callback(self, callback: Callable[[FlowEvent], object]) -> None:
        """Call a callback with each flow event, in order.

        Args:
            callback: called in `BlockingConnection.process_data_events`, `BlockingConnection.sleep` and
                `start_consuming`, like all callbacks of pika. The callback may call any method.
        """
        self._flow.listen(lambda event: self._add_pending_event(_FlowNotice(callback, event)))

    @property
    def flow_state(self) -> FlowState:
        """The flow state of the channel: its holds, and how often and for how long it was blocked (flowed)."""
        if self.is_open:
            self._look_at_transport(self._turns.now())
        state = self._flow.protocol.flow_state(_monotonic())
        self._flow.after()
        return state

    def wait_unflowed(self, timeout: float | None = None) -> bool:
        """Wait until there are no holds. I/O continues during the wait. Return False after the timeout.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Raises:
            ChannelClosed, ChannelWrongStateError, ConnectionClosed: as for pika's methods.
            TypeError, ValueError: `timeout` is not a number.
        """
        _, deadline = self._deadline(timeout)
        if not self.flow_state.flowed:
            return True
        self._check_open()
        flag = Flag()
        call = calls.wait_unflowed(self._flow.protocol, flag, deadline, _monotonic())
        return self._flow.drive(call, flag, self._turn)


def _published(receipt: Receipt) -> ReturnedMessage:
    publish = receipt._payload
    assert isinstance(publish, Publish)
    method: Any = publish.method
    return ReturnedMessage(method, publish.basic_properties or spec.BasicProperties(), publish.body)


def _is_of(returned: ReturnedMessage, publish: Publish) -> bool:
    method = returned.method
    exchange, routing_key, _ = publish.arguments
    return (method.exchange, method.routing_key, returned.body) == (exchange, routing_key, publish.body)


def adopt(channel: Any) -> Any:
    """Add flow control to a channel of pika that is open and not in confirm mode (internal)."""
    if not isinstance(channel._impl, Channel):
        channel._impl.__class__ = Channel
        channel._impl.adopt()
    channel.__class__ = BlockingChannel
    channel._adopted()
    return channel


def __getattr__(name: str) -> Any:
    return passed_on(_pika, name)


mirror(__name__, _pika)
