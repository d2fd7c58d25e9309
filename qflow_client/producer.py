"""What `Producer` and `AsyncProducer` share: everything that neither waits nor does I/O."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from qflow_client import telemetry
from qflow_client.core.admission import SendTicket, check_capacity
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry
from qflow_client.core.steps import Refusal, Steps
from qflow_client.core.steps import send as send_steps
from qflow_client.errors import FlowControlTimeout, ProducerFlowed, UndeliveredMessages
from qflow_client.events import FlowEvent, FlowState, HoldKind
from qflow_client.flow import FlowManager
from qflow_client.guard import is_inside
from qflow_client.message import Message
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings, WhenFlowed, check_argument
from qflow_client.skin import (
    Deliveries,
    Listeners,
    check_arguments,
    disown,
    kinds_of,
    undelivered_of,
)

if TYPE_CHECKING:
    from qflow_client.keeper import Storage

__all__ = ["BaseProducer"]

_T = TypeVar("_T")
_Payload = bytes | Message

# What would not refuse a message that `send` refuses at once, as an error advises.
_LONGER_WAITS = "a longer timeout waits"
_BLOCKING_WAITS = "when_flowed='block' waits"

_monotonic = time.monotonic


class BaseProducer(ABC):
    """A producer without its I/O and its ways to wait."""

    #: What was set, wherever it came from.
    settings: ProducerSettings
    # The state. Each step of it is taken by `_step`.
    _protocol: ProducerProtocol

    def __init__(
        self,
        url: str | Sequence[str] | None,
        connection: object,
        on_delivery: Callable[[Receipt], object] | None,
        settings: ProducerSettings | None,
        manager: FlowManager,
        keywords: dict[str, Any],
    ) -> None:
        self.settings = ProducerSettings.load(url, settings, **keywords)
        check_arguments(url, connection, on_delivery, manager)
        self._exchange = self.settings.exchange
        self._routing_key = self.settings.routing_key
        # None unless admitted messages are kept on disk.
        self._storage: Storage | None = None
        # None without on_delivery.
        self._deliveries = None if on_delivery is None else Deliveries(on_delivery, self._told)
        self._listeners: Listeners[Any] = Listeners()
        self._manager = manager
        # Whether the first close has begun.
        self._ended = False
        # The process that made it, and whether this process is a fork of that one.
        self._pid = os.getpid()
        self._is_copy = False
        # Set once it is connected.
        self._observer: telemetry.Observer | None = None
        self._tracer: telemetry.Tracer | None = None

    # What differs.

    @abstractmethod
    def _step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        """Take a step of the protocol, and do what follows from it."""

    @abstractmethod
    def _ask(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Take a step without waiting for its result; where none can be taken, it is taken later."""

    @property
    @abstractmethod
    def _is_in_callback(self) -> bool:
        """Whether `on_delivery` or a flow callback makes the call, while there is an `on_delivery`."""

    # Sending.

    def _admit(self, payload: _Payload, exchange: str, routing_key: str, *, spills: bool = False) -> Receipt | None:
        """Admit a message, or put it into the outbox, if that is possible now.

        Args:
            payload: the message.
            exchange: where to publish.
            routing_key: with which key.
            spills: whether it may be put into the outbox while the producer is flowed. A callback's message is in any
                case, because other senders may wait for the callback to return.

        Returns:
            Its receipt, which with an outbox is not on disk yet; ``None`` if nothing has happened.
        """
        storage = self._storage
        if storage is None:
            return self._step(lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic()))
        spills = spills and (self.settings.when_flowed is WhenFlowed.SPILL or self._is_in_callback)
        return self._step(
            lambda _protocol: storage.protocol.store(payload, exchange, routing_key, _monotonic(), spills=spills)
        )

    def _make_ticket(
        self, payload: _Payload, exchange: str, routing_key: str, timeout: float | None, source: str, waiter: object
    ) -> SendTicket:
        """Make the ticket of a message that could not be admitted at once."""
        return self._protocol.admission.make_ticket(
            payload,
            exchange,
            routing_key,
            _monotonic(),
            timeout=timeout,
            waiter=waiter,
            source=source,
            first=self._is_in_callback,
        )

    def _send_steps(self, ticket: SendTicket, refusal: Refusal | None, *, notices: bool) -> Steps[Receipt]:
        return send_steps(self._protocol.admission, ticket, _monotonic(), refusal=refusal, notices=notices)

    def _refusal(self, timeout: float | None) -> Refusal | None:
        """Return the error of `send` for a message that cannot be admitted at once; ``None`` if it waits."""
        if self.settings.when_flowed is WhenFlowed.RAISE:
            return Refusal(ProducerFlowed, _BLOCKING_WAITS)
        if timeout is not None and timeout <= 0:
            return Refusal(FlowControlTimeout, _LONGER_WAITS)
        return None

    def _refusal_nowait(self) -> Refusal:
        """Return the error of `send_nowait` for a message that cannot be admitted at once."""
        match self.settings.when_flowed:
            case WhenFlowed.RAISE:
                advice = f"send() with {_BLOCKING_WAITS}"
            case WhenFlowed.SPILL:
                advice = "send() puts it into the outbox"
            case _:
                advice = "send() waits"
        return Refusal(ProducerFlowed, advice)

    # The window.

    @property
    def capacity(self) -> int:
        """The most unsettled messages there may be.

        It may be set at any time. A lower one cancels nothing: nothing is admitted until there is room (C6). With
        ``capacity="auto"`` it is what the producer has found so far, until a number is set, which then stays.

        Raises:
            SettingsError: it is set to what is not allowed.
        """
        return self._protocol.window.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        # Checked now: the caller would not see an error that is raised later.
        check_capacity(capacity)
        self._ask(lambda protocol: protocol.set_capacity(capacity, _monotonic()))

    @property
    def available(self) -> int:
        """How many messages could be admitted before the window is full; never below 0."""
        return max(0, self._protocol.window.capacity - self._protocol.window.used)

    @property
    def unsettled(self) -> int:
        """Messages that are admitted and not settled."""
        return self._protocol.unsettled

    @property
    def stored(self) -> int:
        """Messages in the outbox: those that are unsettled, and those that wait on disk; 0 without one."""
        return 0 if self._storage is None else len(self._storage)

    @property
    def in_flight(self) -> int:
        """The part of the unsettled messages that has begun to be written."""
        return self._protocol.in_flight

    # Flow.

    @property
    def flow_state(self) -> FlowState:
        """Whether the producer is flowed, by what, since when and how often."""
        if is_inside():
            return self._protocol.flow_seen(_monotonic())
        return self._step(lambda protocol: protocol.flow_state(_monotonic()))

    def on_flow(
        self, callback: Callable[[FlowEvent], object], *, kinds: Iterable[str] | None = None
    ) -> Callable[[], None]:
        """Call a callback with every flow event, in order, on the producer's callback thread, or scheduled on the loop.

        Args:
            callback: may call any method of the producer. If it raises, that is logged.
            kinds: the hold kinds to hear of, such as ``("connection_blocked",)``; ``None`` for all. A fast producer is
                held by ``capacity`` with every burst.

        Returns:
            Call it to end that.

        Raises:
            TypeError: `callback` cannot be called, or is a coroutine function, whose result an `AsyncProducer` would
                not await; or `kinds` are not words.
            ValueError: one of `kinds` is not a hold kind.
        """
        check_argument("callback", callback, callable(callback), "callable")
        wanted = kinds_of(kinds)

        def unsubscribe() -> None:
            self._ask(lambda _protocol: self._listeners.remove(unsubscribe))

        def add(protocol: ProducerProtocol) -> None:
            if not self._ended:
                self._listeners.add(protocol, unsubscribe, callback, wanted)

        self._listen(add)
        return unsubscribe

    def _listen(self, add: Callable[[ProducerProtocol], None]) -> None:
        """Take a step that adds a flow callback."""
        self._ask(add)

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
        """Raise a hold, on any thread; for managers. Applications use `pause`.

        Args:
            kind: why, as one word.
            source: who raises it.
            detail: what people should read.
        """
        self._ask(lambda protocol: protocol.hold(kind, _monotonic(), source=source, detail=detail))

    def lift(self, kind: str, *, source: str) -> None:
        """Lift a hold, on any thread; for managers. Applications use `resume`.

        Args:
            kind: why it was raised.
            source: who raised it.
        """
        self._ask(lambda protocol: protocol.lift(kind, _monotonic(), source=source))

    # The end.

    @property
    def name(self) -> str:
        """What flow events, logs and the broker's management call it; the setting."""
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether it takes no more messages."""
        return self._protocol.closed is not None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "flowed" if not self._protocol.gate.is_open else "open"
        return f"<{type(self).__name__} {self.settings.name!r} {state} unsettled={self.unsettled}>"

    def _undelivered(self, failures: list[Receipt], left: Sequence[Receipt]) -> UndeliveredMessages | None:
        """Return the error for the messages that were not delivered, without those that the application has seen.

        Args:
            failures: failed receipts that it has not seen.
            left: what was unsettled before the channel was ended.
        """
        if self._deliveries is not None:
            failures += self._deliveries.undelivered(left)
        return undelivered_of(failures, self._storage)

    # After a step.

    def _take_news(self) -> tuple[list[Receipt], list[Any], list[LogEntry]]:
        """Take what the protocol reports, in a step: settled receipts, waiters to wake, and log entries."""
        protocol = self._protocol
        reports = protocol.reports
        settled = protocol.take_settled(_monotonic()) if reports.settled else []
        wake, reports.wake = reports.wake, []
        logs, reports.logs = reports.logs, []
        return settled, wake, logs

    def _told(self, count: int) -> None:
        self._step(lambda protocol: protocol.told(count, _monotonic()))

    # Forks.

    def _disown(self) -> None:
        """In a child process: everything of this producer belongs to the parent."""
        self._is_copy = self._ended = True
        self._manager.forked()
        self._protocol, self._storage = disown(self._protocol, self._storage, self._pid), None
