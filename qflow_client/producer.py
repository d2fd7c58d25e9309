"""The methods that `Producer` and `AsyncProducer` have in common. None of these methods waits for the broker."""

from __future__ import annotations

import time
import weakref
from abc import ABC
from asyncio import _get_running_loop
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, NoReturn, TypeVar

from qflow_client.core import calls
from qflow_client.core.calls import CannotWait, resume
from qflow_client.core.limits import check_capacity
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.engine import BaseEngine
from qflow_client.errors import FlowControlTimeout, NestedCall, ProducerClosed, ProducerFlowed, SettingsError
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import FlowManager
from qflow_client.guard import NOT_TAKEN, check_can_wait
from qflow_client.health import Health
from qflow_client.message import Message, RoutedMessage, as_body, give_back, with_position
from qflow_client.position import Position
from qflow_client.receipt import Receipt
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, WhenFlowed, check_argument
from qflow_client.skin import CLOSED, DEFAULT, close_deadline, kinds_of, refuse_coroutine_function
from qflow_client.telemetry import Tracer

__all__ = ["CONNECT_FIRST", "BaseProducer", "resolve", "split"]

#: The reason why an `AsyncProducer` accepts no messages before it is connected.
CONNECT_FIRST = "the producer is not connected yet; use async with, or await connect() first"

# The errors of `send` and `send_nowait` for a message that must not wait. Each advice names a way to send the message.
_LONGER_WAITS = CannotWait(FlowControlTimeout, "set a longer timeout to wait")
_BLOCKING_WAITS = CannotWait(ProducerFlowed, "set when_flowed='block' to wait")
_SEND_WAITS = {
    WhenFlowed.BLOCK: CannotWait(ProducerFlowed, "call send() to wait"),
    WhenFlowed.RAISE: CannotWait(ProducerFlowed, f"call send() and {_BLOCKING_WAITS.advice}"),
    WhenFlowed.SPILL: CannotWait(ProducerFlowed, "call send() to put it into the outbox"),
}

_NO_OUTBOX = "the producer has no outbox to store a position in; make it with outbox='PATH'"

_monotonic = time.monotonic

_Receipt = TypeVar("_Receipt", bound=Receipt)


def resolve(
    message: bytes | str | Message, exchange: str | None, routing_key: str | None
) -> tuple[bytes | Message, str | None, str | None]:
    """Return the payload, exchange and routing key of a message. ``None`` stands for the value of the setting."""
    if type(message) is bytes:
        return message, exchange, routing_key
    if not isinstance(message, Message):
        return as_body(message), exchange, routing_key
    if isinstance(message, RoutedMessage):
        exchange = message.exchange if exchange is None else exchange
        routing_key = message.routing_key if routing_key is None else routing_key
    return message, exchange, routing_key


def split(
    message: bytes | str | Message | tuple[bytes | str | Message, Position],
) -> tuple[bytes | str | Message, Position | None]:
    """Split an element of `send_many` into the message and its position, which is ``None`` if there is none."""
    if not isinstance(message, tuple):
        return message, None
    if len(message) != 2 or not isinstance(message[1], Position):
        raise TypeError("messages: a tuple must be a message and its Position")
    return message


class BaseProducer(ABC, Generic[_Receipt]):
    """The part of a producer that does not wait for the broker."""

    # Executes each change of the state of the `ProducerProtocol` as a *step* (`core.step`), except `send_at_once`.
    _engine: BaseEngine
    # Makes OpenTelemetry spans; ``None`` without tracing, and before the producer is connected.
    _tracer: Tracer | None = None

    def __init__(self, settings: ProducerSettings, manager: FlowManager) -> None:
        #: The settings, after keywords, URL and environment are merged.
        self.settings = settings
        self._exchange = settings.exchange
        self._routing_key = settings.routing_key
        self._manager = manager

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has a connection, and cannot be pickled or copied; make one in each process"
        )

    def _use_engine(self, engine: BaseEngine) -> None:
        """Set the engine, which must not refer to the producer. Otherwise a dropped producer would stay alive."""
        self._engine = engine
        producer, manager = weakref.ref(self), self._manager

        def unregister() -> None:
            if (found := producer()) is not None:
                manager.unregister(found)

        engine.unregister = unregister

    def _end_with(self, engine: BaseEngine) -> None:
        """End the engine when the producer is garbage-collected without a call of `close`."""
        finalizer = weakref.finalize(self, engine.abandon)
        # At the end of the process, `BaseEngine.forgotten` is called instead.
        finalizer.atexit = False
        # After a close, the engine detaches the finalizer, because it would keep the engine and its callbacks alive.
        engine.detach = finalizer.detach

    @property
    def _protocol(self) -> ProducerProtocol:
        return self._engine.protocol

    # Sending.

    def send_nowait(
        self,
        message: bytes | str | Message,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        source: str = "",
        position: Position | None = None,
    ) -> _Receipt:
        """Same as `send`, but never wait for admission. The method is not a coroutine, even in an `AsyncProducer`.

        With an outbox, the call blocks until the message is on disk. In an `AsyncProducer`, the call blocks the loop.

        Args:
            message: the body, or a `Message` with properties.
            exchange: the exchange; by default the exchange of a `RoutedMessage`, or else of the settings.
            routing_key: the routing key; by default the routing key of a `RoutedMessage`, or else of the settings.
            source: no effect, because the message does not wait in line.
            position: as for `send`.

        Returns:
            Receipt of the message.

        Raises:
            ProducerFlowed: the producer is flowed; the message was not sent and never will be.
            NestedCall: the call would wait for itself; the message was not sent and never will be (E2).
            ProducerClosed: the producer was never connected, or it or its loop is closed; the message was not sent.
            WrongLoop: the `AsyncProducer` belongs to another event loop that is not running; the message was not sent.
            OutboxFull, NotDurable, SettingsError: as for `send`.
            TypeError: the message has a type that is not accepted.
            ValueError: the message cannot be encoded.
        """
        payload: Any = message
        if type(message) is not bytes:
            payload, exchange, routing_key = resolve(message, exchange, routing_key)
        if exchange is None:
            exchange = self._exchange
        if routing_key is None:
            routing_key = self._routing_key
        engine = self._engine
        if engine.loop is not None and engine.loop is not _get_running_loop():
            engine.check_loop(payload, exchange, routing_key, waits=False)
        if position is not None or (self._tracer is not None and self._tracer.wants(payload)):
            with self._extended(payload, exchange, routing_key, position) as extended:
                return self.send_nowait(extended, exchange=exchange, routing_key=routing_key)
        receipt: Any = None
        if engine.storage is None:
            try:
                receipt = engine.protocol.admission.send_at_once(payload, exchange, routing_key)
                if receipt is not None:
                    link = engine.link
                    # Another thread may send before `connect` has set the link. Then `connect` wakes the writer later.
                    if link is not None and not link.writer.awake:
                        link.writer.wake()
                    return receipt  # type: ignore[no-any-return]  # the protocol creates receipts of this class
            except BaseException:
                # The exception may have left the state half changed. `recheck` requests a step that repairs the state.
                engine.recheck()
                raise
        receipt = self._admit(
            "send_nowait()", payload, exchange, routing_key, 0.0, _SEND_WAITS[self.settings.when_flowed]
        )
        if engine.storage is not None:
            engine.storage.wait_durable(receipt, _monotonic())
        return receipt  # type: ignore[no-any-return]  # the protocol creates receipts of this class

    def _cannot_wait(self, timeout: float | None) -> CannotWait | None:
        """Return the error of `send` for a message that cannot be admitted now; ``None`` if `send` waits instead."""
        if self.settings.when_flowed is WhenFlowed.RAISE:
            return _BLOCKING_WAITS
        return _LONGER_WAITS if timeout is not None and timeout <= 0 else None

    def _admit(
        self,
        call: str,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        deadline: float,
        cannot_wait: CannotWait | None,
        *,
        spills: bool = False,
    ) -> Receipt | None:
        """Admit a message in a step, because `send_at_once` could not admit it, or because there is an outbox.

        Args:
            call: name of the call, for errors.
            deadline, spills: as for `BaseEngine.admit`.
            cannot_wait: the error if the message cannot be admitted now; ``None`` if the message may wait in line.

        Returns:
            The receipt; ``None`` if the message has to wait in line.
        """
        check_can_wait(call, payload, exchange, routing_key)
        engine, line = self._engine, self._protocol.line
        receipt = engine.admit(payload, exchange, routing_key, deadline, spills=spills)
        if receipt is not None:
            return receipt
        if engine.dispatcher is None:
            raise ProducerClosed(CONNECT_FIRST, payload, exchange=exchange, routing_key=routing_key)
        if cannot_wait is None:
            return None
        if not engine.is_in_callback:
            engine.arm_timer()
            holds = engine.try_step(lambda protocol: protocol.line.count_flowed_error())
            if holds is NOT_TAKEN:
                holds = self._protocol.reports.holds
            advice = cannot_wait.advice
            raise cannot_wait.error(holds, 0.0, payload, advice, exchange=exchange, routing_key=routing_key)
        # Other senders may be waiting for the callback to return, so the callback's message goes before their messages.
        now, waiter = _monotonic(), engine.make_waiter()
        ticket = line.make_ticket(payload, exchange, routing_key, now, timeout=0.0, waiter=waiter, first=True)
        try:
            taken = engine.try_step(
                lambda _protocol: resume(calls.send(line, ticket, now, cannot_wait=cannot_wait), None)
            )
        except BaseException:
            ticket.claim(for_sender=True)
            engine.ask(lambda protocol: protocol.line.give_up(ticket, _monotonic()))
            raise
        finally:
            engine.arm_timer()
        if taken is NOT_TAKEN:
            raise NestedCall("a send", payload, exchange=exchange, routing_key=routing_key)
        return taken[1]

    def _extended(
        self, payload: bytes | Message, exchange: str, routing_key: str, position: Position | None
    ) -> AbstractContextManager[Message]:
        """Return a context manager that adds `position` to a message, or adds a span if `position` is ``None``."""
        if position is not None:
            return self._stored_with(payload, position)
        assert self._tracer is not None
        return self._tracer.span(payload, exchange, routing_key)

    # Positions.

    def _check_position(self, position: Position) -> None:
        """Raise `SettingsError` if there is no outbox, and `TypeError` if `position` is not a `Position`."""
        if not isinstance(position, Position):
            raise TypeError(f"position must be a Position, not {type(position).__name__}: {shown(position)}")
        if self.settings.outbox is None:
            raise SettingsError(f"position={position}: {_NO_OUTBOX}")

    @contextmanager
    def _stored_with(self, payload: bytes | Message, position: Position) -> Iterator[Message]:
        """Yield the message with the position. Errors of the ``with`` block contain the original message."""
        self._check_position(position)
        try:
            yield with_position(payload, position)
        except BaseException as error:
            give_back(error)
            raise

    def position(self, source: str) -> int | str | None:
        """Return the position of the last admitted message of a source (E13).

        After a restart, this is the position of the last message on disk. The program can continue after this position.

        Args:
            source: name of the source.

        Returns:
            The value of the `Position`; ``None`` if the outbox has no position of the source.

        Raises:
            SettingsError: there is no outbox.
            ProducerClosed: the producer is not connected yet, or was created before this process was forked.
            OutboxError: the position is damaged.
        """
        if self.settings.outbox is None:
            raise SettingsError(f"position({source!r}): {_NO_OUTBOX}")
        if self._engine.storage is None:
            raise ProducerClosed(self._protocol.closed or "the producer is not connected, so its outbox is not open")
        # If an exception has interrupted a `send`, `repair` undoes the `send`. If no step is possible, skip the repair.
        # The step must not be `on_timer`, which may discard bytes that the I/O thread is writing.
        self._engine.try_step(lambda protocol: protocol.repair())
        return self._engine.storage.outbox.position(source)

    # The window.

    @property
    def capacity(self) -> int:
        """The size of the window: the maximum number of unsettled messages, without those that wait on disk.

        The program may set this attribute at any time. A lower capacity cancels no message, but further messages wait
        for room (C6). With ``capacity="auto"`` this is the present window, until the program sets a number.

        Raises:
            SettingsError: the new value is not allowed.
        """
        return self._protocol.window.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        # Check the value here, because the step may run later, and its error would not reach the caller.
        check_capacity(capacity)
        self._engine.ask(lambda protocol: protocol.set_capacity(capacity, _monotonic()))

    @property
    def available(self) -> int:
        """The number of messages that can be admitted before the window is full; at least 0."""
        return max(0, self._protocol.window.capacity - self._protocol.window.used)

    @property
    def unsettled(self) -> int:
        """The number of unsettled messages in the window. Spilled messages on disk do not count, see `stored`."""
        return self._protocol.unsettled

    @property
    def stored(self) -> int:
        """The number of messages in the outbox, both in the window and waiting on disk; 0 without an outbox."""
        storage = self._engine.storage
        return 0 if storage is None else len(storage)

    @property
    def in_flight(self) -> int:
        """The number of unsettled messages that are at least partly written."""
        return self._protocol.in_flight

    # Flow.

    @property
    def flow_state(self) -> FlowState:
        """The flow state of the producer: its holds, and how often and for how long it was flowed."""
        state = self._engine.try_step(lambda protocol: protocol.flow_state(_monotonic()))
        return self._protocol.flow_seen(_monotonic()) if state is NOT_TAKEN else state

    def _wall_time(self, now: float) -> float:
        """Convert a time of `time.monotonic` to the time in flow events. A change of the wall clock changes neither."""
        return self._protocol.reports.wall_time(now)

    def health(self) -> Health:
        """The health of the producer, for probes and dashboards. Any thread may call this method (E12)."""
        return Health.of(
            self._protocol.flow_seen(_monotonic()),
            unsettled=self.unsettled,
            stored=self.stored,
            spills=self.settings.when_flowed is WhenFlowed.SPILL,
            last_failure=self._engine.last_failure,
        )

    def on_flow(
        self, callback: Callable[[FlowEvent], object], *, kinds: Iterable[str] | None = None
    ) -> Callable[[], None]:
        """Call a callback with each flow event, in order, on the callback thread or (with asyncio) on the loop.

        Args:
            callback: the callback, which may call any method of the producer. An exception of the callback is logged.
                If the callback is slow, at most `max_flow_events` events wait, and the oldest events are dropped.
            kinds: hold kinds of the events, such as ``("connection_blocked",)``; ``None`` for all kinds. With ``None``,
                a fast producer reports a hold of kind ``capacity`` in every burst.

        Returns:
            A function that unregisters the callback. Earlier events may still reach the callback.

        Raises:
            TypeError: `callback` is not callable or is a coroutine function, or `kinds` is not a collection of strings.
            ValueError: an element of `kinds` is not a hold kind.
        """
        check_argument("callback", callback, callable(callback), "callable")
        refuse_coroutine_function("on_flow", callback)
        wanted = kinds_of(kinds)
        # The functions below must not refer to the producer, because callbacks must not keep the producer alive.
        engine = self._engine

        def unsubscribe() -> None:
            engine.ask(lambda _protocol: engine.listeners.remove(unsubscribe))

        def add(protocol: ProducerProtocol) -> None:
            if not engine.ended:
                engine.listeners.add(protocol, unsubscribe, callback, wanted)

        self._listen(add)
        return unsubscribe

    def _listen(self, add: Callable[[ProducerProtocol], None]) -> None:
        self._engine.ask(add)

    def _add_events(self, events: Any, kinds: Iterable[str] | None) -> None:
        """Put all later flow events into the iterator `events`, and ``None`` when the producer ends."""
        wanted, engine = kinds_of(kinds), self._engine

        def add(protocol: ProducerProtocol) -> None:
            if engine.ended:
                events.put(None)
            else:
                engine.listeners.iterate(protocol, events, wanted)

        if engine.ended:
            # Put ``None`` without a step, because an ended producer may have no loop that could execute a step.
            events.put(None)
        else:
            engine.ask(add)

    def shutdown(self, timeout: float | None = DEFAULT) -> None:
        """Begin to close, and return immediately. Signal handlers may call this method (E12).

        From now on no message is admitted. Undelivered messages that the program has not seen are logged. A later
        `close`, such as that of a ``with`` block, waits until the producer has closed, and raises the error for these
        messages.

        Args:
            timeout: as for `close`.

        Raises:
            TypeError, ValueError: `timeout` is not a number. The producer stays open.
        """
        deadline = close_deadline(timeout, self.settings)
        self._engine.ask(lambda protocol: protocol.close(CLOSED, _monotonic()))
        self._engine.close_later(deadline)

    def pause(self, reason: str = "") -> None:
        """Raise the hold ``paused``, which stops `send` until `resume`. Admitted messages are still sent (D5).

        Args:
            reason: text for people, used as the detail of the hold.
        """
        self.hold(HoldKind.PAUSED, source="", detail=reason)

    def resume(self) -> None:
        """Lift the hold of `pause`. A hold of `FlowManager.stop_all` stays."""
        self.lift(HoldKind.PAUSED, source="")

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold. Any thread may call this method. Managers call this method; applications call `pause`."""
        self._engine.ask(lambda protocol: protocol.hold(kind, _monotonic(), source=source, detail=detail))

    def lift(self, kind: str, *, source: str) -> None:
        """Lift a hold. Any thread may call this method. Managers call this method; applications call `resume`."""
        self._engine.ask(lambda protocol: protocol.lift(kind, _monotonic(), source=source))

    # Closing.

    @property
    def name(self) -> str:
        """The setting ``name``, which flow events, logs and the broker's management show."""
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether the producer accepts no more messages."""
        return self._protocol.closed is not None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "flowed" if not self._protocol.gate.is_open else "open"
        return f"<{type(self).__name__} {self.settings.name!r} {state} unsettled={self.unsettled}>"
