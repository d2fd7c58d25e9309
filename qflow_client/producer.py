"""The common methods of `Producer` and `AsyncProducer`, which do not wait."""

from __future__ import annotations

import time
import weakref
from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from qflow_client.core import calls
from qflow_client.core.calls import Call, CannotWait
from qflow_client.core.limits import check_capacity
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.tickets import SendTicket
from qflow_client.engine import BaseEngine
from qflow_client.errors import FlowControlTimeout, ProducerClosed, ProducerFlowed, SettingsError
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import FlowManager, Hold
from qflow_client.guard import NOT_TAKEN
from qflow_client.health import Health
from qflow_client.message import Message, RoutedMessage, as_body, give_back, with_position
from qflow_client.position import Position
from qflow_client.receipt import Receipt
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, WhenFlowed, check_argument
from qflow_client.skin import CLOSED, DEFAULT, close_limit, deadline_of, kinds_of

__all__ = ["BaseProducer", "resolve", "split"]

# Advice in the error if `send` fails without a wait.
_LONGER_WAITS = "set a longer timeout to wait"
_BLOCKING_WAITS = "set when_flowed='block' to wait"

_NO_OUTBOX = "the producer has no outbox to store a position in; make it with outbox='PATH'"

_monotonic = time.monotonic


def resolve(
    message: bytes | str | Message, exchange: str | None, routing_key: str | None
) -> tuple[bytes | Message, str | None, str | None]:
    """Return the payload, the exchange and the routing key of a message.

    Args:
        message: the message that the application has passed.
        exchange: exchange of the call. ``None`` for the exchange of a `RoutedMessage`.
        routing_key: routing key of the call. ``None`` for the routing key of a `RoutedMessage`.

    Returns:
        The payload, the exchange and the routing key. ``None`` means the value of the settings.

    Raises:
        TypeError: the message has another type.
    """
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
    """Return a message of `send_many` and its position, or ``None`` if it has no position.

    Raises:
        TypeError: the message is a tuple with other elements.
    """
    if not isinstance(message, tuple):
        return message, None
    if len(message) != 2 or not isinstance(message[1], Position):
        raise TypeError("messages: a tuple must be a message and its Position")
    return message


class BaseProducer(ABC):
    """The part of a producer that does not wait."""

    # Executes all steps.
    _engine: BaseEngine

    def __init__(self, settings: ProducerSettings, manager: FlowManager) -> None:
        #: The settings, collected from all sources.
        self.settings = settings
        self._exchange = settings.exchange
        self._routing_key = settings.routing_key
        self._manager = manager

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has a connection, and cannot be pickled or copied; make one in each process"
        )

    def _use_engine(self, engine: BaseEngine) -> None:
        """Use an engine. The engine must not refer to the producer."""
        self._engine = engine
        producer, manager = weakref.ref(self), self._manager

        def unregister() -> None:
            if (found := producer()) is not None:
                manager.unregister(found)

        engine.unregister = unregister

    def _end_with(self, engine: BaseEngine) -> None:
        """End the engine when the producer is collected without a close."""
        finalizer = weakref.finalize(self, engine.abandon)
        # At the end of the process, `skin` closes the open producers.
        finalizer.atexit = False
        # The engine detaches the finalizer, which otherwise keeps the engine and the application's callbacks alive.
        engine.detach = finalizer.detach

    @property
    def _protocol(self) -> ProducerProtocol:
        return self._engine.protocol

    # Sending.

    def _make_ticket(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        timeout: float | None,
        source: str,
        waiter: object,
    ) -> SendTicket:
        """Create the ticket for a message that was not admitted immediately."""
        engine = self._engine
        first = engine.is_in_callback
        return engine.protocol.line.make_ticket(
            payload, exchange, routing_key, _monotonic(), timeout=timeout, waiter=waiter, source=source, first=first
        )

    def _send_call(self, ticket: SendTicket, cannot_wait: CannotWait | None, *, notices: bool) -> Call[Receipt]:
        return calls.send(self._engine.protocol.line, ticket, _monotonic(), cannot_wait=cannot_wait, notices=notices)

    def _refused(
        self, payload: bytes | Message, exchange: str, routing_key: str, cannot_wait: CannotWait
    ) -> ProducerFlowed:
        """Count a rejected message, and return its error."""

        def refuse(protocol: ProducerProtocol) -> tuple[Hold, ...]:
            protocol.line.count_flowed_error()
            return protocol.reports.holds

        holds = self._engine.try_step(refuse)
        if holds is NOT_TAKEN:
            holds = self._protocol.reports.holds
        return cannot_wait.error(holds, 0.0, payload, cannot_wait.advice, exchange=exchange, routing_key=routing_key)

    def _cannot_wait_in_send(self, timeout: float | None) -> CannotWait | None:
        """Return the error of `send` for a message that cannot be admitted immediately, or ``None`` if `send` waits."""
        if self.settings.when_flowed is WhenFlowed.RAISE:
            return CannotWait(ProducerFlowed, _BLOCKING_WAITS)
        if timeout is not None and timeout <= 0:
            return CannotWait(FlowControlTimeout, _LONGER_WAITS)
        return None

    def _cannot_wait_in_send_nowait(self) -> CannotWait:
        """Return the error of `send_nowait` for a message that cannot be admitted immediately."""
        match self.settings.when_flowed:
            case WhenFlowed.RAISE:
                advice = f"call send() and {_BLOCKING_WAITS}"
            case WhenFlowed.SPILL:
                advice = "call send() to put it into the outbox"
            case _:
                advice = "call send() to wait"
        return CannotWait(ProducerFlowed, advice)

    # Positions.

    def _check_position(self, position: Position) -> None:
        """Reject a position that cannot be stored.

        Raises:
            SettingsError: there is no outbox.
            TypeError: the position has another type.
        """
        if not isinstance(position, Position):
            raise TypeError(f"position must be a Position, not {type(position).__name__}: {shown(position)}")
        if self.settings.outbox is None:
            raise SettingsError(f"position={position}: {_NO_OUTBOX}")

    @contextmanager
    def _stored_with(self, payload: bytes | Message, position: Position) -> Iterator[Message]:
        """Run a block that sends a message with a position.

        Yields:
            The message with the position. Errors that leave the block contain the message without it.
        """
        self._check_position(position)
        try:
            yield with_position(payload, position)
        except BaseException as error:
            give_back(error)
            raise

    def position(self, source: str) -> int | str | None:
        """Return the position of the last admitted message of a source (E13).

        After a start this is the position of the last message on disk, so a program can continue after this position.

        Args:
            source: name of the source.

        Returns:
            The value of the `Position`; ``None`` if no message of the source had a position.

        Raises:
            SettingsError: there is no outbox.
            ProducerClosed: the producer is not connected yet, or was created before this process was forked.
            OutboxError: the position is damaged.
        """
        if self.settings.outbox is None:
            raise SettingsError(f"position({source!r}): {_NO_OUTBOX}")
        if self._engine.storage is None:
            raise ProducerClosed(self._protocol.closed or "the producer is not connected, so its outbox is not open")
        # If possible, first undo an interrupted `send`.
        self._engine.try_step(lambda protocol: protocol.on_timer(_monotonic()))
        return self._engine.storage.outbox.position(source)

    # The window.

    @property
    def capacity(self) -> int:
        """The maximum number of unsettled messages.

        It may be set at any time. A lower capacity cancels no message. It only prevents further messages until there is
        room (C6). With ``capacity="auto"`` this is the present window. If you set a number, it stays.

        Raises:
            SettingsError: the new value is not allowed.
        """
        return self._protocol.window.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        # Check the value here, because the caller would not see a later error.
        check_capacity(capacity)
        self._engine.ask(lambda protocol: protocol.set_capacity(capacity, _monotonic()))

    @property
    def available(self) -> int:
        """The number of messages that can be admitted before the window is full; at least 0."""
        return max(0, self._protocol.window.capacity - self._protocol.window.used)

    @property
    def unsettled(self) -> int:
        """The number of unsettled messages."""
        return self._protocol.unsettled

    @property
    def stored(self) -> int:
        """The number of messages in the outbox, unsettled or waiting on disk; 0 without an outbox."""
        storage = self._engine.storage
        return 0 if storage is None else len(storage)

    @property
    def in_flight(self) -> int:
        """The number of unsettled messages that are at least partly written."""
        return self._protocol.in_flight

    # Flow.

    @property
    def flow_state(self) -> FlowState:
        """Whether the producer is flowed, by which holds, since when and how often."""
        state = self._engine.try_step(lambda protocol: protocol.flow_state(_monotonic()))
        return self._protocol.flow_seen(_monotonic()) if state is NOT_TAKEN else state

    def health(self) -> Health:
        """The health of the producer, for probes and dashboards. Any thread may read it (E12)."""
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
            callback: the callback. It may call any method of the producer. If it raises an exception, the exception is
                logged. If it is slow, at most `max_flow_events` events wait, and further events replace the oldest
                ones.
            kinds: hold kinds of the events, such as ``("connection_blocked",)``; ``None`` for all kinds. A fast
                producer has a hold of kind ``capacity`` in every burst.

        Returns:
            A function that ends the calls. The callback still gets the waiting events.

        Raises:
            TypeError: `callback` is not callable, or is a coroutine function, which would never be awaited. Or `kinds`
                is not a collection of strings.
            ValueError: an element of `kinds` is not a hold kind.
        """
        check_argument("callback", callback, callable(callback), "callable")
        wanted = kinds_of(kinds)
        # Do not refer to the producer below, because its callbacks must not keep it alive.
        engine = self._engine

        def unsubscribe() -> None:
            engine.ask(lambda _protocol: engine.listeners.remove(unsubscribe))

        def add(protocol: ProducerProtocol) -> None:
            if not engine.ended:
                engine.listeners.add(protocol, unsubscribe, callback, wanted)

        self._listen(add)
        return unsubscribe

    def _listen(self, add: Callable[[ProducerProtocol], None]) -> None:
        """Execute a step that adds a flow callback."""
        self._engine.ask(add)

    def _add_events(self, events: Any, kinds: Iterable[str] | None) -> None:
        """Put all further flow events into a queue, and ``None`` at the end."""
        wanted, engine = kinds_of(kinds), self._engine

        def add(protocol: ProducerProtocol) -> None:
            if engine.ended:
                events.put(None)
            else:
                engine.listeners.iterate(protocol, events, wanted)

        if engine.ended:
            # There may be no loop for a step.
            events.put(None)
        else:
            engine.ask(add)

    def shutdown(self, timeout: float | None = DEFAULT) -> None:
        """Begin to close, and return immediately. Signal handlers may call it (E12).

        From now on no message is admitted. Messages that are not delivered are logged. A later `close`, such as that of
        a ``with`` block, waits for the end.

        Args:
            timeout: as for `close`.

        Raises:
            TypeError, ValueError: `timeout` is not a number. Nothing has changed.
        """
        deadline = deadline_of(close_limit(timeout, self.settings))
        self._engine.ask(lambda protocol: protocol.close(CLOSED, _monotonic()))
        self._engine.close_later(deadline)

    def pause(self, reason: str = "") -> None:
        """Hold the producer until `resume` is called. Admitted messages are still sent (D5).

        Args:
            reason: text for people, used as the detail of the hold.
        """
        self.hold(HoldKind.PAUSED, source="", detail=reason)

    def resume(self) -> None:
        """Lift the hold of `pause`. Holds of a manager stay."""
        self.lift(HoldKind.PAUSED, source="")

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold, on any thread. Managers use this method; applications use `pause`."""
        self._engine.ask(lambda protocol: protocol.hold(kind, _monotonic(), source=source, detail=detail))

    def lift(self, kind: str, *, source: str) -> None:
        """Lift a hold, on any thread. Managers use this method; applications use `resume`."""
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
