"""Flow control for a channel of aio-pika. `ChannelFlow` publishes with a `ProducerProtocol`.

aio-pika still manages connections, topology and consumers, and still restores channels. aio-pika's exchanges publish
with aiormq's ``basic_publish``, which `ChannelFlow` replaces. A `Tap` at the connection's socket, or a `QueueCarrier`,
handles the broker's confirms and returned messages, which aiormq does not see.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from aiormq import spec
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import (
    AMQPChannelError,
    AMQPConnectionError,
    ChannelInvalidStateError,
    DeliveryError,
    PublishError,
)

from qflow_client.aio.dispatcher import Dispatcher
from qflow_client.aio.turn import Deadlines, Turns, Waiter, wake_at
from qflow_client.aio_pika.encoding import MessageEncoder, make_message_id
from qflow_client.aio_pika.returns import Expected, Returns
from qflow_client.core import calls
from qflow_client.core.step import step
from qflow_client.dropin import (
    ADDRESSING,
    RECONNECTING,
    RETRYING,
    DropIn,
    DropInFlow,
    EncodedMessage,
    EncodedProtocol,
    RepeatableMessage,
)
from qflow_client.errors import ConfirmTimeout, FlowControlTimeout, ProducerClosed
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import Hold
from qflow_client.manager import flow_manager
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import OnDisconnect, ProducerSettings, WhenFlowed, check_timeout
from qflow_client.skin import refuse_coroutine_function

__all__ = ["AIO_PIKA", "AIO_PIKA_ROBUST", "ChannelFlow"]

#: The settings that a robust connection of aio-pika accepts.
AIO_PIKA_ROBUST = DropIn(
    "aio-pika",
    frozenset({"name"}),
    dict.fromkeys(ADDRESSING, "pass it to publish()")
    | {
        "confirms": "call channel(publisher_confirms=…) instead",
        "message_ids": "aio-pika adds a message id to every message that has none",
        "max_failed_bytes": "publish() itself raises an error for a message that is not delivered",
        "connect_timeout": "use aio-pika's connect(timeout=…)",
        **dict.fromkeys(RECONNECTING[1:], "connect_robust() itself reconnects, after its reconnect_interval"),
        **dict.fromkeys(
            RETRYING,
            "the program itself must publish again, as with aio-pika",
        ),
        "tracing": "instrument aio-pika itself: opentelemetry-instrumentation-aio-pika",
        "url": "pass it to connect() as the first argument",
    },
)
#: The settings that a connection of aio-pika accepts if it is not robust.
AIO_PIKA = replace(
    AIO_PIKA_ROBUST,
    not_taken={**AIO_PIKA_ROBUST.not_taken, "on_disconnect": "only connect_robust() reconnects"},
)

_BASIC_PUBLISH = 60, 40
_STOPPED_READING = (
    "aiormq stopped reading: its tasks were cancelled, as at the end of asyncio.run(), or the broker sent nothing, not "
    "even heartbeats"
)
# If more bytes than this are unwritten after a read, write them before the tasks that the read woke publish more.
_SEPARATE_WRITE = 1 << 13

_monotonic = time.monotonic


class _Protocol(EncodedProtocol):
    def __init__(self, settings: ProducerSettings, **options: Any) -> None:
        super().__init__(settings, **options)
        # Returned messages for `Returns.tell`: the method, the payload of the header frame, and the body.
        self.returned: list[tuple[spec.Basic.Return, bytes, bytes]] = []

    def on_return(self, code: int, text: str, exchange: str, routing_key: str, header: bytes, body: bytes) -> None:
        method = spec.Basic.Return(reply_code=code, reply_text=text, exchange=exchange, routing_key=routing_key)
        self.returned.append((method, header, body))

    @step
    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        is_certain = self.settings.confirms or not self.written
        if self.is_idle and is_certain and method != _BASIC_PUBLISH:
            # No message is affected, and the call of the refused method raises the error. Without confirms this is not
            # certain: the broker may have discarded written messages that came after the refused method.
            self.forget_past()
        # `_on_close` settles the messages, because their error is known only when aiormq has ended its channel.
        self.channel.disconnect(f"the broker closed the channel: {code} {text}", now)


class ChannelFlow(DropInFlow):
    """Flow control for one channel of aio-pika. After each loss, a robust channel uses a new channel of aiormq.

    Args:
        restores: whether aio-pika replaces a lost channel of aiormq and repeats its declarations.
        is_closing: returns True if the program has closed the connection.
    """

    protocol: _Protocol

    def __init__(
        self, settings: ProducerSettings, *, confirms: bool, restores: bool, is_closing: Callable[[], bool]
    ) -> None:
        changes: dict[str, Any] = {} if confirms else {"confirms": False}
        if not confirms and settings.capacity == "auto":
            # Without confirms, the broker's latency is unknown, so the window cannot adapt its size.
            changes["capacity"] = settings.capacity_max
        super().__init__(settings, "aio-pika channel", protocol=_Protocol, **changes)
        self._is_named = self.name != "aio-pika channel"
        self._confirms = confirms
        self._restores = restores
        # Whether messages of a lost connection are sent again.
        self._republishes = restores and settings.on_disconnect is OnDisconnect.REPUBLISH
        self._is_closing = is_closing
        #: Whether the program has closed the channel or the connection. False again if the channel is opened again.
        self.left = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._dispatcher = Dispatcher(self._loop)
        # aiormq's newest channel, even after its end; ``None`` before the first `opened`.
        self._channel: Any = None
        # The `TapTransport` or `QueueCarrier` of aiormq's newest channel.
        self._tapped: Any = None
        self._was_open = False
        # The number of aiormq's channel while the channel is attached to the tap; otherwise ``None``.
        self._number: int | None = None
        # Number of messages that aiormq itself had published on its channel before `opened` was called.
        self._before = 0
        # Encodes the messages for aiormq's newest channel; set by `opened`.
        self._encoder: MessageEncoder
        self._returns = Returns()
        # The error that ended aiormq's newest channel. Publishing calls that used the channel raise this error.
        self._reason: BaseException | None = None
        # True while a call of `after` is scheduled on the loop.
        self._passes_on = False
        # The timer for the next `on_timer` of the protocol; ``None`` without a timer.
        self._timer: asyncio.TimerHandle | None = None
        # The deadlines of the publishing calls that have no `timeout`.
        self._deadlines = Deadlines(self._loop, settings.max_producer_flow_control_wait)
        self._turns = Turns(self._loop, lambda: self.protocol, self._kick, self._arm)

    def opened(self, tapped: Any, underlay: Any) -> None:
        """Start flow control on an open channel. If it replaces a lost channel, messages wait for a call of `restored`.

        `underlay` is aio-pika's `UnderlayChannel`: aiormq's channel, and aio-pika's callback for its close.
        """
        self.left = False
        channel = underlay.channel
        number: int = channel.number
        amqp = channel.connection
        tapped.tap.heartbeat = float(amqp.heartbeat_timeout)
        tapped.tap.frame_max = amqp.connection_tune.frame_max
        self._tapped, self._channel, self._number = tapped, channel, number
        self._before = channel.delivery_tag
        self._encoder = MessageEncoder(channel)
        protocol = self.protocol
        if not self._is_named:
            protocol.reports.name = f"aio-pika channel {number}"
            protocol.settings = protocol.settings.replace(name=protocol.reports.name)
        now = _monotonic()
        restores, self._was_open = self._restores and self._was_open, True
        protocol.channel_opened(number, amqp.connection_tune.frame_max, now, restores=restores)
        tapped.tap.attach(number, protocol, now)
        tapped.add_after(self._after_io)
        channel.basic_publish = partial(self.basic_publish, channel)
        # Put `ended` before aio-pika's close callback. So publishing tasks get the error first, as with aio-pika.
        ended, told = partial(self._on_close, channel), underlay.close_callback
        closing = channel.closing
        if closing is channel.closing:
            moved = closing.remove_done_callback(told)
            closing.add_done_callback(ended)
            if moved:
                closing.add_done_callback(told)
        else:
            # In newer versions of aiormq, each read of `closing` returns a new future, which is done too late: after
            # all other futures of the channel. So add `ended` to another future of the channel.
            channel.create_future().add_done_callback(ended)
        flow_manager.register(self)
        self._after_io()
        tapped.pump()

    @property
    def is_stuck(self) -> bool:
        """Whether the broker reads no bytes from the connection now."""
        return self._number is not None and (self._tapped.tap.is_blocked or self._tapped.full)

    def restored(self) -> None:
        """Send the messages that waited until aio-pika had repeated the declarations on the new channel."""
        self.protocol.restored(_monotonic())
        self._kick()

    def _on_close(self, channel: Any, closing: asyncio.Future[Any]) -> None:
        if channel is not self._channel or self._number is None:
            return
        number, self._number = self._number, None
        self.left = self.left or self._is_closing()
        error: BaseException | None = None if closing.cancelled() else closing.exception()
        if isinstance(error, asyncio.CancelledError):
            # A task would seem to be cancelled if its `publish` raised this error.
            error = None if self.left else AMQPConnectionError(_STOPPED_READING)
        elif type(error) is Exception:
            # aiormq's error, without a text, if it notices the end of the data before it waits for the next frame.
            error = None if self.left else AMQPConnectionError("the broker closed the socket")
        self._reason = error
        tapped = self._tapped
        tapped.tap.detach(number)
        tapped.remove_after(self._after_io)
        words = "the channel was closed" if error is None else f"the channel was closed: {error!r}"
        if self.left:
            self.protocol.forget_past()
        # If a channel ends while it is being restored, aio-pika opens it again, as after a lost connection.
        is_lost = self.protocol.channel.is_restoring or not isinstance(error, AMQPChannelError)
        if is_lost and self.republishes:
            ended = [each for each in self.protocol.unsettled_receipts if each._waiter and each._waiter.done()]
            self.protocol.abandon(ended, words, _monotonic())
            # The connection is shared with other channels, whose messages may have caused the loss.
            self.protocol.connection_lost(words, _monotonic(), reconnects=True, shared=True)
        else:
            self.protocol.channel_ended(words, _monotonic())
        self.after()
        # Write the rest of a partly written frame.
        tapped.pump()
        if not self._comes_back:
            self.ended()

    @property
    def channel(self) -> Any:
        """The newest channel of aiormq, even after its end."""
        return self._channel

    @property
    def republishes(self) -> bool:
        """Whether messages wait until a lost channel is replaced. If so, unconfirmed messages are sent again."""
        return self._republishes and self._comes_back

    @property
    def _comes_back(self) -> bool:
        """Whether aio-pika will open a new channel of aiormq when the present channel is lost."""
        return self._restores and not self.left

    def ended(self) -> None:
        """End flow control, because aio-pika opens no new channel. If the program opens one, `opened` is called."""
        flow_manager.unregister(self)
        if self._number is None and self.protocol.unsettled:
            self.protocol.channel_ended("the channel is closed", _monotonic())
        self.protocol.line.give_up_all("the channel is closed", _monotonic())
        self.protocol.waiters.end_unflowed()
        self.after()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deadlines.end()
        self._turns.end()

    async def basic_publish(
        self,
        channel: Any,
        body: bytes,
        *,
        exchange: str = "",
        routing_key: str = "",
        properties: spec.Basic.Properties | None = None,
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        wait: bool = True,
    ) -> spec.Basic.Ack | DeliveredMessage | None:
        """Publish a message like aiormq. If the channel is blocked (flowed), wait first (J7 A4).

        Args:
            mandatory: whether the broker returns the message if no queue receives it.
            timeout: the longest time of the whole call in seconds. With ``None`` the setting
                `max_producer_flow_control_wait` applies twice: to the wait while the channel is blocked, and to the
                wait for the confirm.
            wait: without confirms, whether to wait until the message is written.

        Raises:
            FlowControlTimeout: no byte of the message was written in time. The message will never be sent.
            ProducerFlowed: the channel is flowed, and `when_flowed` is ``"raise"``. The message was not sent.
            ConfirmTimeout: the message was written at least in part. The broker did not confirm it in time, or did not
                read all of it in time. The outcome is unknown.
            DeliveryError, PublishError, ChannelInvalidStateError, …: as for aiormq.
        """
        encoder = self._encoder if channel is self._channel else MessageEncoder(channel)
        method = encoder.method(exchange, routing_key, mandatory, immediate)
        if properties is None:
            properties = spec.Basic.Properties(delivery_mode=1)
        message_id = properties.message_id
        if not message_id:
            message_id = properties.message_id = make_message_id()
        if timeout is not None and timeout <= 0:
            error = FlowControlTimeout(
                self.protocol.reports.holds, 0.0, body, exchange=exchange, routing_key=routing_key
            )
            # The channel may have no hold, so the text must not call the channel flowed.
            error.args = (f"the message was not sent, because timeout={timeout!r} leaves no time; set a longer one",)
            raise error
        if channel.is_closed and not self.republishes:
            raise ChannelInvalidStateError(f"{channel!r} closed")
        message = RepeatableMessage(encoder.frames(method, properties, body), body)
        try:
            return await self._publish(message, exchange, routing_key, message_id if mandatory else None, timeout, wait)
        except asyncio.CancelledError:
            # When a channel closes, aiormq cancels the tasks of its consumers. In such a task, raise the reason for the
            # close. The method is private, and some versions of aiormq do not have it.
            translate = getattr(channel, "_raise_on_channel_close", None)
            if translate is None:
                raise
            async with translate():
                raise

    async def _publish(
        self,
        message: EncodedMessage,
        exchange: str,
        routing_key: str,
        mandatory: str | None,
        timeout: float | None,
        wait: bool,
    ) -> spec.Basic.Ack | DeliveredMessage | None:
        """Publish an encoded message. `mandatory` is the message id of a mandatory message; otherwise ``None``."""
        began = now = _monotonic()
        expected: Expected | None = None
        if mandatory is not None and self._confirms:
            expected = Expected(self._loop.create_future(), exchange, routing_key)
            # Do this before the wait in line, because uvloop may read the answer before it resumes this task.
            self._returns.expect(mandatory, expected)
        try:
            receipt = self.protocol.send(message, exchange, routing_key, now)
            if receipt is None:
                limit = self.settings.max_producer_flow_control_wait if timeout is None else timeout
                receipt = await self._when_unflowed(message, exchange, routing_key, limit, expected)
                if timeout is None:
                    now = _monotonic()
            tapped = self._tapped
            if not self._confirms:
                tapped.pump()
                if receipt._outcome is not None or not wait:
                    # Let other tasks run, as aiormq does.
                    await asyncio.sleep(0)
                    return None
            elif not tapped.awake:
                tapped.wake()
            if receipt._outcome is None:
                settled: asyncio.Future[Any] = self._loop.create_future() if expected is None else expected.settled
                receipt._waiter = settled
                timer = None
                try:
                    if timeout is None:
                        self._deadlines.add(settled, now)
                    else:
                        timer = wake_at(self._loop, now + timeout, settled)
                    await settled
                except asyncio.CancelledError:
                    self._end_wait(receipt)
                    raise
                finally:
                    if timer is None:
                        self._deadlines.remove(settled)
                    else:
                        timer.cancel()
        finally:
            if mandatory is not None and expected is not None:
                self._returns.forget(mandatory, expected)
        if expected is not None and (answer := expected.answer) is not None:
            if isinstance(answer, PublishError):
                raise answer
            return answer
        return self._verdict(receipt, began, message.body)

    async def _when_unflowed(
        self,
        message: EncodedMessage,
        exchange: str,
        routing_key: str,
        timeout: float | None,
        expected: Expected | None,
    ) -> Receipt:
        if self.settings.when_flowed is WhenFlowed.RAISE:
            raise self.flowed(message, exchange, routing_key)
        try:
            ticket, call = self._turns.begin(message, exchange, routing_key, timeout)
            if expected is not None:
                expected.ticket = ticket
            return await call
        except FlowControlTimeout as error:
            raise FlowControlTimeout(
                error.holds,
                error.waited,
                message.body,
                "set a longer timeout, or a longer max_producer_flow_control_wait, to wait",
                exchange=exchange,
                routing_key=routing_key,
            ) from None
        except ProducerClosed:
            if self.left:
                raise ChannelInvalidStateError(f"{self._channel!r} closed") from None
            raise self._ended_by() from None

    def _ended_by(self) -> BaseException:
        """Return the error for messages whose channel of aiormq has ended."""
        return self._reason or ChannelInvalidStateError(f"{self._channel!r} closed")

    def _end_wait(self, receipt: Receipt) -> bool:
        """Withdraw a message because its call of `publish` ends. Return True if no byte of the message was written."""
        if self.protocol.withdraw(receipt, _monotonic()):
            self._kick()
            return True
        if receipt._outcome is None and self._number is None:
            # The message was written on a lost channel, and was waiting to be sent again.
            self.protocol.abandon((receipt,), "publish() has ended", _monotonic())
        return False

    def _verdict(self, receipt: Receipt, began: float, body: bytes) -> spec.Basic.Ack | None:
        match receipt._outcome:
            case Outcome.CONFIRMED:
                return spec.Basic.Ack(delivery_tag=self._before + receipt._tag)
            case Outcome.SENT:
                return None
            case Outcome.NACKED:
                raise DeliveryError(None, spec.Basic.Nack(delivery_tag=self._before + receipt._tag))
            case None:
                raise self._too_late(receipt, began, body)
        raise self._ended_by()

    def _too_late(self, receipt: Receipt, began: float, body: bytes) -> Exception:
        waited = _monotonic() - began
        holds, held = self.protocol.reports.holds, self.held
        if self._end_wait(receipt):
            self.protocol.line.count_flowed_error()
            socket = Hold(HoldKind.TRANSPORT, since=time.time() - waited, detail="the socket takes no bytes")
            return FlowControlTimeout(
                holds or (socket,),
                waited,
                body,
                "set a longer timeout, or a longer max_producer_flow_control_wait, to wait",
                exchange=receipt.exchange,
                routing_key=receipt.routing_key,
            )
        if receipt._outcome is not None:
            return ConfirmTimeout(
                f"the connection was lost before the broker answered, and the message could not be sent again within "
                f"{waited:.3g} s; it may have arrived: {receipt.describe()}{held}"
            )
        if receipt._tag > self.protocol.written:
            return ConfirmTimeout(
                f"only a part of the message is written after {waited:.3g} s, and the broker reads no more; the rest "
                f"stays first in line, so the message may still arrive: {receipt.describe()}{self.held}"
            )
        return ConfirmTimeout(f"no answer from the broker within {waited:.3g} s for {receipt.describe()}{self.held}")

    def after(self) -> None:
        """Report returned messages, wake waiters, write log entries, and report flow events."""
        self._passes_on = False
        protocol = self.protocol
        if protocol.returned:
            returned, protocol.returned = protocol.returned, []
            for method, header, body in returned:
                self._returns.tell(method, header, body, self._channel, self.name)
        # Clear the list after all waiters are woken. So an interrupt loses no wake-up, but may repeat some.
        for waiter in protocol.reports.wake:
            if not waiter.done():
                waiter.set_result(None)
        protocol.reports.wake = []
        if protocol.reports.failures:
            # Forget the failures, because the publishing tasks raise the errors of failed messages.
            protocol.reports.forget_failures()
        if protocol.reports.logs or protocol.reports.events:
            super().after()

    def _tell(self, listener: Callable[[FlowEvent], object], event: FlowEvent) -> None:
        self._dispatcher.call(listener, event)

    def _after_io(self) -> bool:
        """Call `after`, which wakes tasks. Return True if the output must be written before these tasks run."""
        self.after()
        if self.settings.rate is not None:
            self._arm()
        protocol = self.protocol
        # Write the answer to a stop (``Channel.Flow``) at once, and the answer to a restart with the waiting messages.
        return protocol.unwritten > _SEPARATE_WRITE or (protocol.is_stopped and protocol.has_answer)

    def _kick(self) -> None:
        """Make the loop write the waiting bytes and call `after`."""
        if self._number is not None and self.protocol.unwritten > 0 and not self._tapped.awake:
            self._tapped.wake()
        if self._loop.is_closed():
            self.after()
        elif not self._passes_on:
            # Do not call `after` directly: an interrupt of the direct call would lose log lines and delay wake-ups.
            self._loop.call_soon(self.after)
            self._passes_on = True

    def _arm(self) -> None:
        now = _monotonic()
        at = self.protocol.next_timer(now)
        if at is not None and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.protocol.on_timer(_monotonic())
        self._kick()
        self._arm()

    def _call(self, function: Callable[[], None]) -> None:
        def call() -> None:
            function()
            self._kick()

        if self._thread == threading.get_ident():
            call()
            return
        # If the loop is closed, this call raises RuntimeError. Ignore it: no message is sent, so no hold is needed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]:
        """Register a callback, which the event loop calls with each flow event."""
        refuse_coroutine_function("on_flow", callback)
        return self.listen(callback)

    def look(self) -> FlowState:
        state = self.protocol.flow_state(_monotonic())
        self.after()
        return state

    async def wait_unflowed(self, timeout: float | None) -> bool:
        """Wait until there are no holds, for at most `timeout` seconds. Return False after the timeout."""
        check_timeout(timeout)
        if self._number is None and not self._comes_back:
            raise ChannelInvalidStateError(f"{self._channel!r} closed")
        waiter = Waiter()
        now = _monotonic()
        deadline = math.inf if timeout is None else now + timeout
        unflowed = await self._turns.drive(calls.wait_unflowed(self.protocol, waiter, deadline, now), waiter)
        if self._number is None and not self._comes_back:
            raise self._ended_by()
        return unflowed
