"""OpenTelemetry: what producers measure, and the spans of messages.

Metrics are read from the producers when somebody collects them. The durations of messages and their counts by
destination are kept by an `Observer`, which a producer has only while an SDK is there to collect them, or while it
traces. So without an SDK nothing is done for a message. Only opentelemetry-api is needed, and only by processes that
make a producer.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from qflow_client.events import HoldKind
from qflow_client.flow import Gate, WindowLimiter
from qflow_client.forks import after_fork_in_child
from qflow_client.logs import log
from qflow_client.message import Message, copy_position
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Observation
    from opentelemetry.trace import Span

__all__ = [
    "MAX_DESTINATIONS",
    "SCHEMA_URL",
    "Observer",
    "RelayMetrics",
    "Tracer",
    "destination_name",
    "peer_of",
    "unwatch",
    "watch",
]

#: The semantic conventions that names and attributes are taken from; those for messaging are in development.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

#: Destinations of a producer that are told apart; what goes to further ones is counted without a name, because routing
#: keys can be as many as messages.
MAX_DESTINATIONS = 32

# Seconds between two records for the same destination and outcome: to record costs more than to send.
_RECORD_PERIOD = 0.01

# The buckets that the conventions ask for, in seconds.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

_OPERATION = {"messaging.operation.name": "send", "messaging.operation.type": "send"}

_DELIVERED = (Outcome.CONFIRMED, Outcome.SENT)

_monotonic = time.monotonic


class _Outbound(Protocol):
    begun: int


class _Controller(Protocol):
    waiting: int


class _Admission(Protocol):
    observer: Any


class _Line(Protocol):
    flowed_errors: dict[str, int]


class _Watched(Protocol):
    """What is read of a producer's protocol."""

    gate: Gate
    window: WindowLimiter

    @property
    def admission(self) -> _Admission: ...

    @property
    def line(self) -> _Line: ...

    @property
    def controller(self) -> _Controller: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def unsettled(self) -> int: ...


def _version() -> str:
    # Not imported by name: the package's face knows all, and nothing below knows it.
    return str(import_module("qflow_client").__version__)


def destination_name(exchange: str, routing_key: str) -> str:
    """``messaging.destination.name`` of a publish, as the conventions for RabbitMQ have it."""
    return ":".join(filter(None, (exchange, routing_key))) or "amq.default"


def peer_of(sock: Any) -> tuple[str, int] | None:
    """Return the address and the port at the other end of a socket; ``None`` if it has none, or none any more."""
    try:
        address, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return None
    return address, port


def _server(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "server.address": parts.hostname or "localhost",
        "server.port": parts.port or (5671 if parts.scheme == "amqps" else 5672),
    }


class _Span:
    """The span of one message, until it has ended."""

    __slots__ = ("fresh", "span")

    def __init__(self, span: Span) -> None:
        self.span: Span | None = span
        # Whether the message is still to be given to `send`; later it is another message.
        self.fresh = True


class _Traced(Message):
    """A message with a span."""

    __slots__ = ("trace",)

    trace: _Span


class Observer:
    """Watches the messages of one producer; the protocol calls it, and nobody at the same time.

    Args:
        protocol: the producer's.
        name: the producer's.
        url: of the broker.
        histogram: where durations go.
    """

    def __init__(self, protocol: _Watched, name: str, url: str, histogram: Histogram) -> None:
        self.protocol = protocol
        #: What every metric says of the producer.
        self.attributes: dict[str, Any] = {"messaging.system": "rabbitmq", "qflow.producer.name": name} | _server(url)
        #: When each unsettled message was given to `send`, in seconds, by its number.
        self.began: dict[int, float] = {}
        #: Settled messages by destination, ``None`` for those that are not told apart, and outcome.
        self.counts: dict[tuple[str | None, Outcome], int] = {}
        self._histogram = histogram
        # By exchange and routing key.
        self._destinations: dict[tuple[str, str], str] = {}
        # The longest durations that are not recorded yet, and when durations were recorded last.
        self._durations: dict[tuple[str | None, Outcome], float] = {}
        self._recorded_at = 0.0
        # Spans that are to end, the receipts, when, in nanoseconds since 1970, and their last attributes.
        self._spans: deque[tuple[Span, Receipt, int, Mapping[str, Any]]] = deque()
        #: Makes the spans of messages; ``None`` if they have none.
        self.tracer: Tracer | None = None
        #: The address and the port that the producer is connected to, or was last; ``None`` before.
        self.peer: tuple[str, int] | None = None

    def destination(self, exchange: str, routing_key: str) -> str | None:
        """The name by which a destination is told apart; ``None`` if there are too many."""
        name = self._destinations.get((exchange, routing_key))
        if name is None and len(self._destinations) < MAX_DESTINATIONS:
            name = self._destinations[exchange, routing_key] = destination_name(exchange, routing_key)
        return name

    def operation(self, destination: str | None, outcome: Outcome) -> dict[str, Any]:
        """The attributes of messages that ended alike."""
        attributes = self.attributes | _OPERATION
        if destination is not None:
            attributes["messaging.destination.name"] = destination
        if outcome not in _DELIVERED:
            attributes["error.type"] = outcome.value
        return attributes

    def settled(self, receipts: Sequence[Receipt], now: float) -> None:
        """Take note of receipts that were settled together.

        Args:
            receipts: in the order of admission.
            now: seconds.
        """
        forget = self.began.pop
        first = receipts[0]
        route, outcome = first._route, first._outcome
        kept = first._undelivered if outcome is Outcome.STORED else None
        began, alike = self.began.get(first._number), 0
        for receipt in receipts:
            if (
                receipt._route is not route
                or receipt._outcome is not outcome
                or (outcome is Outcome.STORED and receipt._undelivered is not kept)
            ):
                self._count(first, alike, began, now)
                first, route, outcome = receipt, receipt._route, receipt._outcome
                kept = first._undelivered if outcome is Outcome.STORED else None
                began, alike = self.began.get(first._number), 0
            forget(receipt._number, None)
            alike += 1
        self._count(first, alike, began, now)
        if self.tracer is not None:
            at = time.time_ns()
            for receipt in receipts:
                self._end_span_of(receipt._payload, receipt, at)

    def spilled(self, payload: bytes | Message, receipt: Receipt) -> None:
        """End the span of a message that was put into the outbox: what is sent later is read from there.

        Args:
            payload: what the application sent.
            receipt: its receipt.
        """
        self._end_span_of(payload, receipt, time.time_ns(), spilled=True)

    def _end_span_of(self, payload: object, receipt: Receipt, at: int, *, spilled: bool = False) -> None:
        if type(payload) is _Traced and payload.trace.span is not None:
            attributes: dict[str, Any] = {}
            if spilled:
                attributes["qflow.spilled"] = True
            elif self.peer is not None:
                attributes["network.peer.address"], attributes["network.peer.port"] = self.peer
            self._spans.append((payload.trace.span, receipt, at, attributes))
            payload.trace.span = None

    def _count(self, first: Receipt, count: int, began: float | None, now: float) -> None:
        """Count receipts that are alike; the first of them is the oldest."""
        # Alerts are for what was not delivered, also if it stays in the outbox.
        outcome = first._undelivered or first._outcome
        assert outcome is not None
        key = self.destination(first.exchange, first.routing_key), outcome
        self.counts[key] = self.counts.get(key, 0) + count
        # Nobody knows of what was sent before somebody watched.
        if began is not None and now - began > self._durations.get(key, -1.0):
            self._durations[key] = now - began

    def tell(self, *, now: float | None = None) -> None:
        """Record durations, if it is time, and end spans. For any thread, and without the producer's lock.

        Args:
            now: seconds; ``None`` to record whatever there is.
        """
        if self._durations and (now is None or now - self._recorded_at >= _RECORD_PERIOD):
            if now is not None:
                self._recorded_at = now
            for key in tuple(self._durations):
                seconds = self._durations.pop(key, None)
                if seconds is not None:
                    self._give(partial(self._histogram.record, seconds, self.operation(*key)))
        while self._spans:
            try:
                span, receipt, at, attributes = self._spans.popleft()
            except IndexError:
                # Another thread was faster.
                return
            self._give(partial(_end_span, span, receipt, at, attributes))

    def _give(self, call: Callable[[], object]) -> None:
        """Give something to the SDK. What that raises is neither the sender's concern nor the connection's."""
        try:
            call()
        except Exception as error:
            log(logging.ERROR, "%s: telemetry failed", self.attributes["qflow.producer.name"], error=error)


def _end_span(span: Span, receipt: Receipt, at: int, attributes: Mapping[str, Any]) -> None:
    if span.is_recording():
        span.set_attributes(attributes)
        message_id, outcome = receipt.message_id, receipt._undelivered or receipt._outcome
        if message_id is not None:
            span.set_attribute("messaging.message.id", message_id)
        if outcome is not None and outcome not in _DELIVERED:
            _fail_span(span, outcome.value, receipt.describe())
    span.end(at)


def _fail_span(span: Span, kind: str, words: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, words))


class Tracer:
    """Makes the spans of a producer's messages.

    Args:
        observer: ends them.
    """

    def __init__(self, observer: Observer) -> None:
        from opentelemetry import propagate, trace

        self._observer = observer
        self._tracer = trace.get_tracer("qflow_client", _version(), schema_url=SCHEMA_URL)
        self._trace = trace
        self._propagate = propagate

    def wants(self, message: object) -> bool:
        """Whether a message that is given to `send` is still to be traced, by way of `span`."""
        if type(message) is not _Traced or not message.trace.fresh:
            return True
        message.trace.fresh = False
        return False

    @contextmanager
    def span(self, payload: bytes | Message, exchange: str, routing_key: str) -> Iterator[Message]:
        """A block in which a message is admitted, or not.

        Args:
            payload: the message.
            exchange: where it goes.
            routing_key: with which key.

        Yields:
            The message with its span, and with the span's context in its headers.
        """
        headers: Mapping[str, Any] = payload.headers or {} if isinstance(payload, Message) else {}
        observer, trace = self._observer, self._trace
        attributes = observer.attributes | _OPERATION
        attributes["messaging.destination.name"] = destination_name(exchange, routing_key)
        if routing_key:
            attributes["messaging.rabbitmq.destination.routing_key"] = routing_key
        if isinstance(payload, Message) and payload.correlation_id is not None:
            attributes["messaging.message.conversation_id"] = payload.correlation_id
        # A context that the application has put there is that of the message's creation; it stays, and is linked.
        created = [name for name in self._propagate.get_global_textmap().fields if name in headers]
        links = []
        if created:
            context = trace.get_current_span(
                self._propagate.extract({name: str(headers[name]) for name in created})
            ).get_span_context()
            if context.is_valid:
                links.append(trace.Link(context))
        span = self._tracer.start_span(
            " ".join(filter(None, ("send", observer.destination(exchange, routing_key)))),
            kind=trace.SpanKind.CLIENT if created else trace.SpanKind.PRODUCER,
            attributes=attributes,
            links=links,
        )
        carrier: dict[str, Any] = {}
        if not created:
            self._propagate.inject(carrier, context=trace.set_span_in_context(span))
        message = _with_span(payload, span, {**headers, **carrier})
        try:
            yield message
        except BaseException as error:
            message.trace.span = None
            if getattr(error, "message", None) is message:
                # The application gets back what it gave.
                error.message = payload  # type: ignore[attr-defined]  # a ProducerFlowed or ProducerClosed
            if span.is_recording():
                _fail_span(span, type(error).__name__, str(error))
            span.end()
            raise
        # A message that was spilled has ended its span, and nothing else may happen for a while.
        observer.tell(now=_monotonic())


def _with_span(payload: bytes | Message, span: Span, headers: Mapping[str, Any]) -> _Traced:
    if isinstance(payload, Message):
        values = {name: getattr(payload, name) for name in Message.__dataclass_fields__}
    else:
        values = {"body": payload}
    message = _Traced(**(values | {"headers": headers or None}))
    object.__setattr__(message, "trace", _Span(span))
    copy_position(payload, message)
    return message


# Metrics: what is read when somebody collects.

_Point = tuple[float, Mapping[str, Any]]
_Read = Callable[[Observer], Iterable[_Point]]


def _sent(observer: Observer) -> Iterator[_Point]:
    for (destination, outcome), count in tuple(observer.counts.items()):
        # What was never written was not sent.
        if outcome is not Outcome.FAILED:
            yield count, observer.operation(destination, outcome)


def _settled(observer: Observer) -> Iterator[_Point]:
    counts = dict.fromkeys(Outcome, 0)
    for (_, outcome), count in tuple(observer.counts.items()):
        counts[outcome] += count
    for outcome, count in counts.items():
        yield count, observer.attributes | {"qflow.outcome": outcome.value}


def _by_hold(observer: Observer, values: Mapping[str, float]) -> Iterator[_Point]:
    for kind, value in (dict.fromkeys(HoldKind, 0) | dict(values)).items():
        yield value, observer.attributes | {"qflow.hold.kind": str(kind)}


def _refusals(observer: Observer) -> Iterator[_Point]:
    return _by_hold(observer, observer.protocol.line.flowed_errors)


def _flow_stops(observer: Observer) -> Iterator[_Point]:
    yield observer.protocol.gate.times_closed, observer.attributes


def _flowed_time(observer: Observer) -> Iterator[_Point]:
    return _by_hold(observer, observer.protocol.gate.seconds_held(_monotonic()))


def _holds(observer: Observer) -> Iterator[_Point]:
    return _by_hold(observer, Counter(hold.kind for hold in observer.protocol.gate.holds))


def _capacity(observer: Observer) -> Iterator[_Point]:
    yield observer.protocol.window.capacity, observer.attributes


def _available(observer: Observer) -> Iterator[_Point]:
    window = observer.protocol.window
    yield max(0, window.capacity - window.used), observer.attributes


def _unsettled(observer: Observer) -> Iterator[_Point]:
    yield observer.protocol.unsettled, observer.attributes


def _in_flight(observer: Observer) -> Iterator[_Point]:
    # Read without the producer's lock, so that neither waits for the other; the parts may not fit for an instant.
    yield max(0, observer.protocol.in_flight), observer.attributes


def _waiting(observer: Observer) -> Iterator[_Point]:
    yield observer.protocol.controller.waiting, observer.attributes


_MESSAGES = "{message}"

# Name, unit, what it is, and how it is read. What these count never goes back, also when a producer is closed.
_COUNTERS: tuple[tuple[str, str, str, _Read], ...] = (
    ("messaging.client.sent.messages", _MESSAGES, "Messages that were written and are settled", _sent),
    ("qflow.producer.settled", _MESSAGES, "Messages by how they ended", _settled),
    ("qflow.producer.refusals", _MESSAGES, "Sends that were refused, by the oldest hold", _refusals),
    ("qflow.producer.flow_stops", "{stop}", "How often the producer became flowed", _flow_stops),
    ("qflow.producer.flowed.time", "s", "Time for which the producer was held, by kind of hold", _flowed_time),
)

# Likewise; what these say ends with the producer.
_GAUGES: tuple[tuple[str, str, str, _Read], ...] = (
    ("qflow.producer.holds", "{hold}", "Holds that are on the producer, by kind", _holds),
    ("qflow.producer.capacity", _MESSAGES, "The most unsettled messages there may be", _capacity),
    ("qflow.producer.available", _MESSAGES, "Messages that could be admitted before the window is full", _available),
    ("qflow.producer.unsettled", _MESSAGES, "Messages that are admitted and not settled", _unsettled),
    ("qflow.producer.in_flight", _MESSAGES, "Unsettled messages of which something is written", _in_flight),
    ("qflow.producer.waiting", _MESSAGES, "Sends that wait to be admitted", _waiting),
)

_Series = dict[tuple[tuple[str, Any], ...], tuple[float, Mapping[str, Any]]]


def _add(series: _Series, points: Iterable[_Point]) -> None:
    for value, attributes in points:
        key = tuple(sorted(attributes.items()))
        series[key] = (series[key][0] + value if key in series else value, attributes)


class _Metrics:
    """The instruments of this process, and the observers that they read."""

    def __init__(self) -> None:
        from opentelemetry import metrics

        self._api = metrics
        # Reentrant, because the collector of garbage can end a producer at any point in here.
        self._lock = threading.RLock()
        self._observers: set[Observer] = set()
        # What producers that are gone have counted, by instrument.
        self._past: dict[str, _Series] = {name: {} for name, _, _, _ in _COUNTERS}
        # Proxies until the application sets a provider, if it does so later.
        meter = metrics.get_meter("qflow_client", _version(), schema_url=SCHEMA_URL)
        for name, unit, words, read in _COUNTERS:
            meter.create_observable_counter(name, [self._callback(read, self._past[name])], unit, words)
        for name, unit, words, read in _GAUGES:
            meter.create_observable_up_down_counter(name, [self._callback(read, {})], unit, words)
        words = "From the call of send until the message is settled"
        try:
            self.histogram = meter.create_histogram(
                "messaging.client.operation.duration", "s", words, explicit_bucket_boundaries_advisory=_BUCKETS
            )
        except TypeError:
            # An older API leaves the choice of buckets to the application alone.
            self.histogram = meter.create_histogram("messaging.client.operation.duration", "s", words)

    def _callback(self, read: _Read, past: _Series) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_options: CallbackOptions) -> list[Observation]:
            with self._lock:
                series = dict(past)
                # A copy, because the collector of garbage can end a producer in here.
                for observer in tuple(self._observers):
                    # Who collects is an SDK, maybe one that came after the producer.
                    observer.protocol.admission.observer = observer
                    observer.tell()
                    _add(series, read(observer))
            return [self._api.Observation(value, attributes) for value, attributes in series.values()]

        return observe

    @property
    def has_sdk(self) -> bool:
        """Whether an SDK is configured: the API's own providers collect nothing."""
        return not type(self._api.get_meter_provider()).__module__.startswith("opentelemetry.metrics")

    def add(self, observer: Observer) -> None:
        """Read an observer from now on."""
        with self._lock:
            self._observers.add(observer)

    def remove(self, observer: Observer) -> None:
        """Read an observer for the last time, and keep what it has counted; a second time changes nothing."""
        with self._lock:
            if observer in self._observers:
                self._observers.remove(observer)
                observer.tell()
                for name, _, _, read in _COUNTERS:
                    _add(self._past[name], read(observer))

    def forget(self) -> None:
        """In a child process: the producers are the parent's, and so is what they counted."""
        self._lock = threading.RLock()
        for observer in self._observers:
            observer.protocol.admission.observer = None
        self._observers.clear()
        for past in self._past.values():
            past.clear()


_metrics: _Metrics | None = None
_making = threading.Lock()


def watch(
    producer: object, protocol: _Watched, settings: ProducerSettings, url: str, peer: tuple[str, int] | None = None
) -> Observer:
    """Measure a producer from now on, until `unwatch` is called or it is gone, and trace its messages if it is set to.

    Args:
        producer: the producer; it is not kept alive.
        protocol: the producer's.
        settings: the producer's.
        url: of the broker.
        peer: the address and the port that it is connected to, see `Observer.peer`.
    """
    global _metrics
    with _making:
        if _metrics is None:
            _metrics = _Metrics()
    observer = Observer(protocol, settings.name, url, _metrics.histogram)
    observer.peer = peer
    if settings.tracing:
        observer.tracer = Tracer(observer)
    if settings.tracing or _metrics.has_sdk:
        protocol.admission.observer = observer
    _metrics.add(observer)
    weakref.finalize(producer, _metrics.remove, observer).atexit = False
    return observer


def unwatch(observer: Observer) -> None:
    """The producer has come to its end."""
    if _metrics is not None:
        _metrics.remove(observer)


class RelayMetrics:
    """What one outbox relay counts.

    Args:
        name: of its producer.
        backlog: returns how many rows wait, and for how many seconds the oldest has; ``None`` if that is not known.
    """

    def __init__(self, name: str, backlog: Callable[[], tuple[float, float] | None]) -> None:
        from opentelemetry import metrics

        meter = metrics.get_meter("qflow_client", _version(), schema_url=SCHEMA_URL)
        self._attributes = {"qflow.producer.name": name}
        rows = "{row}"
        self._confirmed = meter.create_counter("qflow.relay.confirmed", rows, "Rows that the broker has confirmed")
        self._marked = meter.create_counter("qflow.relay.marked", rows, "Rows sent with the mark of a second copy")
        self._set_aside = meter.create_counter("qflow.relay.set_aside", rows, "Rows that the broker would not take")
        self._tenures = meter.create_counter("qflow.relay.tenures", "{tenure}", "How often the relay began to work")
        self._partitions = meter.create_up_down_counter(
            "qflow.relay.partitions", "{partition}", "Partitions that the relay works on"
        )
        self._backlog = backlog

    def begin(self) -> None:
        """Have the backlog read by each collection, until `end`."""
        global _backlogs
        with _making:
            if _backlogs is None:
                _backlogs = _Backlogs()
        _backlogs.relays[self] = self._attributes

    def end(self) -> None:
        """Have the backlog read no more."""
        if _backlogs is not None:
            _backlogs.relays.pop(self, None)

    def read(self) -> tuple[float, float] | None:
        """Return the backlog."""
        return self._backlog()

    def count(self, *, confirmed: int = 0, marked: int = 0, set_aside: int = 0, tenures: int = 0) -> None:
        """Count rows, and beginnings."""
        for counter, number in (
            (self._confirmed, confirmed),
            (self._marked, marked),
            (self._set_aside, set_aside),
            (self._tenures, tenures),
        ):
            if number:
                counter.add(number, self._attributes)

    def change_partitions(self, by: int) -> None:
        """Count partitions that were taken, or given up."""
        if by:
            self._partitions.add(by, self._attributes)


class _Backlogs:
    """The gauges of what waits for the relays of this process."""

    def __init__(self) -> None:
        from opentelemetry import metrics

        self._api = metrics
        #: The relays that run, and their attributes.
        self.relays: dict[RelayMetrics, Mapping[str, Any]] = {}
        meter = metrics.get_meter("qflow_client", _version(), schema_url=SCHEMA_URL)
        meter.create_observable_gauge("qflow.relay.depth", [self._callback(0)], "{row}", "Rows that wait")
        meter.create_observable_gauge(
            "qflow.relay.oldest.age", [self._callback(1)], "s", "Seconds for which the oldest row has waited"
        )

    def _callback(self, index: int) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_options: CallbackOptions) -> list[Observation]:
            found = [(relay.read(), attributes) for relay, attributes in tuple(self.relays.items())]
            return [self._api.Observation(each[index], attributes) for each, attributes in found if each is not None]

        return observe


_backlogs: _Backlogs | None = None


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()
    if _metrics is not None:
        _metrics.forget()
    if _backlogs is not None:
        # The database connections are the parent's.
        _backlogs.relays.clear()


after_fork_in_child(_after_fork_in_child)
