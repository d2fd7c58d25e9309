"""OpenTelemetry metrics of producers, and spans of messages.

Most metrics are read from the producers when an SDK collects them. An `Observer` measures durations of messages, and
counts the messages of each destination. A producer uses its observer if an SDK can collect metrics, or if the setting
`tracing` is on. Otherwise messages cause no additional work. The package opentelemetry-api is imported when the first
producer connects or the first relay is created. The SDK is not needed.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from qflow_client.events import HoldKind
from qflow_client.forks import after_fork_in_child
from qflow_client.locks import Lock, RLock
from qflow_client.logs import log
from qflow_client.message import Message, copy_position
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Observation
    from opentelemetry.trace import Span

    from qflow_client.core.protocol import ProducerProtocol

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

#: The version of OpenTelemetry's semantic conventions, as a URL. The conventions for messaging may still change.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

#: Maximum number of destinations of a producer that are counted separately. Further destinations are counted together,
#: because each message may have a different routing key.
MAX_DESTINATIONS = 32

# Minimum seconds between two reports of durations to the SDK, because a report takes longer than a `send`.
_RECORD_PERIOD = 0.01

# Minimum seconds between two log records about errors of the SDK, because the SDK may fail for every message.
_ERROR_PERIOD = 10.0

# The upper bounds of the histogram's buckets in seconds, from the semantic conventions.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

_OPERATION = {"messaging.operation.name": "send", "messaging.operation.type": "send"}

_DELIVERED = (Outcome.CONFIRMED, Outcome.SENT)

_monotonic = time.monotonic
_T = TypeVar("_T")


def _version() -> str:
    # Import the package dynamically, because modules must not import `__init__`, which refers to all modules.
    return str(import_module("qflow_client").__version__)


def destination_name(exchange: str, routing_key: str) -> str:
    """Return ``messaging.destination.name`` of a message, according to the conventions for RabbitMQ."""
    return ":".join(filter(None, (exchange, routing_key))) or "amq.default"


def peer_of(sock: Any) -> tuple[str, int] | None:
    """Return the remote address and port of a socket, or ``None`` if it is not connected."""
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
    """Keeps the span of a message until the message is settled or waits only on disk, or its `send` fails."""

    __slots__ = ("fresh", "span")

    def __init__(self, span: Span | None) -> None:
        self.span = span
        # True until the message is passed to `send`. If the message is passed to `send` again, it gets a new span.
        self.fresh = True


class _Traced(Message):
    __slots__ = ("trace",)

    trace: _Span


class Observer:
    """Measures the messages of one producer. Calls of `settled`, `spilled` and `failed_on_disk` never overlap."""

    def __init__(self, protocol: ProducerProtocol, name: str, url: str, histogram: Histogram) -> None:
        self.protocol = protocol
        #: The attributes of the producer in all metrics.
        self.attributes: dict[str, Any] = {"messaging.system": "rabbitmq", "qflow.producer.name": name} | _server(url)
        #: The time in seconds when each unsettled message was passed to `send`; the keys are message numbers.
        self.began: dict[int, float] = {}
        #: Number of settled messages by destination (``None`` for those that are counted together) and outcome.
        self.counts: dict[tuple[str | None, Outcome], int] = {}
        self._histogram = histogram
        # Destination names by exchange and routing key.
        self._destinations: dict[tuple[str, str], str] = {}
        # By destination and outcome, the longest duration that is not recorded yet.
        self._durations: dict[tuple[str | None, Outcome], float] = {}
        self._recorded_at = 0.0
        # Spans to end: the span, the receipt, the time in nanoseconds since 1970, and the attributes to add.
        self._spans: deque[tuple[Span, Receipt, int, Mapping[str, Any]]] = deque()
        # Number of errors of the SDK that are not logged yet, and the earliest time in seconds to log the next error.
        self._errors, self._log_error_at = 0, 0.0
        #: Creates the spans of messages; ``None`` if messages are not traced.
        self.tracer: Tracer | None = None
        #: The remote address and port of the present or last connection; ``None`` before the first connection.
        self.peer: tuple[str, int] | None = None
        #: Removes this observer when the garbage collector removes the producer; set by `watch`.
        self.finalizer: weakref.finalize[..., Any] | None = None

    def destination(self, exchange: str, routing_key: str) -> str | None:
        """Return the name of a destination, or ``None`` if the destination is not counted separately."""
        name = self._destinations.get((exchange, routing_key))
        if name is None and len(self._destinations) < MAX_DESTINATIONS:
            name = self._destinations[exchange, routing_key] = destination_name(exchange, routing_key)
        return name

    def operation(self, destination: str | None, outcome: Outcome) -> dict[str, Any]:
        """Return the attributes of messages with the same destination and outcome."""
        attributes = self.attributes | _OPERATION
        if destination is not None:
            attributes["messaging.destination.name"] = destination
        if outcome not in _DELIVERED:
            attributes["error.type"] = outcome.value
        return attributes

    def settled(self, receipts: Sequence[Receipt], now: float) -> None:
        """Record receipts that were settled together, usually in the order of admission."""
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
        """End the span of a message that waits in the outbox, because the outbox later returns it without its span."""
        self._end_span_of(payload, receipt, time.time_ns(), spilled=True)

    def failed_on_disk(self, receipt: Receipt) -> None:
        """Count a message of the outbox that was settled without admission. Its number is not a key of `began`."""
        self._count(receipt, 1, None, 0.0)

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
        """Count receipts with the same destination and outcome. `first` is one of them, usually the oldest."""
        # Count the failure of an undelivered message even if the message stays in the outbox, so that alerts see it.
        outcome = first._undelivered or first._outcome
        assert outcome is not None
        key = self.destination(first.exchange, first.routing_key), outcome
        self.counts[key] = self.counts.get(key, 0) + count
        # `began` is ``None`` if the producer did not use this observer yet when the message was passed to `send`.
        if began is not None and now - began > self._durations.get(key, -1.0):
            self._durations[key] = now - began

    def record(self, *, now: float | None = None) -> None:
        """Record durations if enough time has passed, and end spans. Any thread may call this method without a lock.

        Args:
            now: time of `time.monotonic` in seconds. ``None`` to record all durations now.
        """
        if self._durations and (now is None or now - self._recorded_at >= _RECORD_PERIOD):
            if now is not None:
                self._recorded_at = now
            for key in tuple(self._durations):
                seconds = self._durations.pop(key, None)
                if seconds is not None:
                    self.give(partial(self._histogram.record, seconds, self.operation(*key)))
        while self._spans:
            try:
                span, receipt, at, attributes = self._spans.popleft()
            except IndexError:
                # Another thread has taken the last span.
                return
            self.give(partial(_end_span, span, receipt, at, attributes))

    def give(self, call: Callable[[], _T]) -> _T | None:
        """Call the SDK, and log its errors, so that no error reaches the caller of `send` or the connection."""
        try:
            return call()
        except Exception as error:
            self._errors += 1
            now = _monotonic()
            if now >= self._log_error_at:
                self._log_error_at = now + _ERROR_PERIOD
                errors, self._errors = self._errors, 0
                words = "%s: telemetry failed (%d times since the last record); messages are not affected"
                log(logging.ERROR, words, self.attributes["qflow.producer.name"], errors, error=error)
            return None


def _end_span(span: Span, receipt: Receipt, at: int, attributes: Mapping[str, Any]) -> None:
    if span.is_recording():
        span.set_attributes(attributes)
        message_id, outcome = receipt.message_id, receipt._undelivered or receipt._outcome
        if message_id is not None:
            span.set_attribute("messaging.message.id", message_id)
        if outcome is not None and outcome not in _DELIVERED:
            _fail_span(span, outcome.value, receipt.describe())
    span.end(at)


def _end_refused(span: Span, error: BaseException) -> None:
    if span.is_recording():
        _fail_span(span, type(error).__name__, str(error))
    span.end()


def _fail_span(span: Span, kind: str, words: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, words))


class Tracer:
    """Creates the spans of a producer's messages."""

    def __init__(self, observer: Observer) -> None:
        from opentelemetry import propagate, trace

        self._observer = observer
        self._tracer = trace.get_tracer("qflow_client", _version(), schema_url=SCHEMA_URL)
        self._trace = trace
        self._propagate = propagate

    def wants(self, message: object) -> bool:
        """Return True if `send` must make a span. False for the first `send` of a message that `span` has yielded."""
        if type(message) is not _Traced or not message.trace.fresh:
            return True
        message.trace.fresh = False
        return False

    @contextmanager
    def span(self, payload: bytes | Message, exchange: str, routing_key: str) -> Iterator[Message]:
        """Create the span of a message that the ``with`` block sends. An error in the block ends the span.

        Yields:
            The message with its span. The headers contain the span's context, unless they already contained a context.
        """
        headers: Mapping[str, Any] = payload.headers or {} if isinstance(payload, Message) else {}
        carrier: dict[str, Any] = {}
        span = self._observer.give(partial(self._start, payload, headers, exchange, routing_key, carrier))
        message = _with_span(payload, span, {**headers, **carrier})
        try:
            yield message
        except BaseException as error:
            message.trace.span = None
            if getattr(error, "message", None) is message:
                # Let the error contain the application's message, and not the message with the span.
                error.message = payload  # type: ignore[attr-defined]  # a ProducerFlowed or ProducerClosed
            if span is not None:
                self._observer.give(partial(_end_refused, span, error))
            raise
        # If the message was spilled, end its span now, because the next call of `record` may come much later.
        self._observer.record(now=_monotonic())

    def _start(
        self,
        payload: bytes | Message,
        headers: Mapping[str, Any],
        exchange: str,
        routing_key: str,
        carrier: dict[str, Any],
    ) -> Span:
        observer, trace = self._observer, self._trace
        attributes = observer.attributes | _OPERATION
        attributes["messaging.destination.name"] = destination_name(exchange, routing_key)
        if routing_key:
            attributes["messaging.rabbitmq.destination.routing_key"] = routing_key
        if isinstance(payload, Message) and payload.correlation_id is not None:
            attributes["messaging.message.conversation_id"] = payload.correlation_id
        # If the application has added a trace context to the headers, this context belongs to the creation of the
        # message. Keep this context in the headers, and link the span to it.
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
        if not created:
            self._propagate.inject(carrier, context=trace.set_span_in_context(span))
        return span


def _with_span(payload: bytes | Message, span: Span | None, headers: Mapping[str, Any]) -> _Traced:
    if isinstance(payload, Message):
        values = {name: getattr(payload, name) for name in Message.__dataclass_fields__}
    else:
        values = {"body": payload}
    message = _Traced(**(values | {"headers": headers or None}))
    object.__setattr__(message, "trace", _Span(span))
    copy_position(payload, message)
    return message


# Metrics that are read at each collection.

_Point = tuple[float, Mapping[str, Any]]
_Read = Callable[[Observer], Iterable[_Point]]


def _sent(observer: Observer) -> Iterator[_Point]:
    for (destination, outcome), count in tuple(observer.counts.items()):
        # A failed message was never written. A stored message is counted by the next producer, which sends it.
        if outcome not in (Outcome.FAILED, Outcome.STORED):
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
    # Read without the lock, so that producer and collection do not wait for each other. The values may be inconsistent.
    yield max(0, observer.protocol.in_flight), observer.attributes


def _waiting(observer: Observer) -> Iterator[_Point]:
    yield observer.protocol.controller.waiting, observer.attributes


_MESSAGES = "{message}"

# Name, unit, description and read function of counters. The counts never decrease, even when a producer is closed.
_COUNTERS: tuple[tuple[str, str, str, _Read], ...] = (
    ("messaging.client.sent.messages", _MESSAGES, "Messages that were written and are settled", _sent),
    ("qflow.producer.settled", _MESSAGES, "Messages by how they ended", _settled),
    ("qflow.producer.refusals", _MESSAGES, "Sends that were refused, by the oldest hold", _refusals),
    ("qflow.producer.flow_stops", "{stop}", "How often the producer became flowed", _flow_stops),
    ("qflow.producer.flowed.time", "s", "Time for which the producer was held, by kind of hold", _flowed_time),
)

# Name, unit, description and read function of gauges. A closed producer has no values in the gauges.
_GAUGES: tuple[tuple[str, str, str, _Read], ...] = (
    ("qflow.producer.holds", "{hold}", "Holds that are on the producer, by kind", _holds),
    ("qflow.producer.capacity", _MESSAGES, "The most unsettled messages there may be", _capacity),
    ("qflow.producer.available", _MESSAGES, "Messages that could be admitted before the window is full", _available),
    ("qflow.producer.unsettled", _MESSAGES, "Messages that are admitted and not settled", _unsettled),
    ("qflow.producer.in_flight", _MESSAGES, "Unsettled messages that are partly or fully written", _in_flight),
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
        # Reentrant, because the garbage collector may end a producer while this thread has the lock.
        self._lock = RLock()
        self._observers: set[Observer] = set()
        # The counts of ended producers, by instrument.
        self._past: dict[str, _Series] = {name: {} for name, _, _, _ in _COUNTERS}
        # The API creates proxies of instruments, so the application can set a meter provider later.
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
            # Older versions of the API cannot suggest buckets. With them, the application has to set the buckets.
            self.histogram = meter.create_histogram("messaging.client.operation.duration", "s", words)

    def _callback(self, read: _Read, past: _Series) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_options: CallbackOptions) -> list[Observation]:
            with self._lock:
                series = dict(past)
                # Use a copy, because the garbage collector may end a producer during the loop.
                for observer in tuple(self._observers):
                    # An SDK collects metrics now, so the producer has to use its observer.
                    observer.protocol.admission.observer = observer
                    observer.record()
                    _add(series, read(observer))
            return [self._api.Observation(value, attributes) for value, attributes in series.values()]

        return observe

    @property
    def has_sdk(self) -> bool:
        """Whether an SDK can collect metrics."""
        return not type(self._api.get_meter_provider()).__module__.startswith("opentelemetry.metrics")

    def add(self, observer: Observer) -> None:
        with self._lock:
            self._observers.add(observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer, but keep its counts. A second call with the same observer changes nothing."""
        with self._lock:
            if observer in self._observers:
                self._observers.remove(observer)
                observer.record()
                # Without an SDK, counts of 0 were never read. They would use memory for each name and address.
                keeps_zeros = self.has_sdk
                for name, _, _, read in _COUNTERS:
                    _add(self._past[name], (point for point in read(observer) if point[0] or keeps_zeros))

    def forget(self) -> None:
        """Forget the observers in a forked child, because the producers and their counts belong to the parent."""
        self._lock = RLock()
        for observer in self._observers:
            observer.protocol.admission.observer = None
        self._observers.clear()
        for past in self._past.values():
            past.clear()


_metrics: _Metrics | None = None
_making = Lock()


def watch(
    producer: object,
    protocol: ProducerProtocol,
    settings: ProducerSettings,
    url: str,
    peer: tuple[str, int] | None = None,
) -> Observer:
    """Measure a producer until `unwatch` is called, or until the garbage collector removes the producer."""
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
    observer.finalizer = weakref.finalize(producer, _metrics.remove, observer)
    observer.finalizer.atexit = False
    return observer


def unwatch(observer: Observer) -> None:
    """Stop measuring a producer that has ended."""
    if _metrics is not None:
        _metrics.remove(observer)
    if observer.finalizer is not None:
        # The finalizer refers to the observer, which with an outbox refers to the producer.
        observer.finalizer.detach()


class RelayMetrics:
    """The metrics of one outbox relay.

    Args:
        backlog: returns the number of waiting rows and the age of the oldest in seconds; ``None`` if both are unknown.
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
        self.backlog = backlog

    def begin(self) -> None:
        """Start to read the backlog at each collection of metrics."""
        global _backlogs
        with _making:
            if _backlogs is None:
                _backlogs = _Backlogs()
        _backlogs.relays[self] = self._attributes

    def end(self) -> None:
        if _backlogs is not None:
            _backlogs.relays.pop(self, None)

    def count(self, *, confirmed: int = 0, marked: int = 0, set_aside: int = 0, tenures: int = 0) -> None:
        for counter, number in (
            (self._confirmed, confirmed),
            (self._marked, marked),
            (self._set_aside, set_aside),
            (self._tenures, tenures),
        ):
            if number:
                counter.add(number, self._attributes)

    def change_partitions(self, by: int) -> None:
        """Add to the number of locked partitions. `by` is negative for unlocked partitions."""
        if by:
            self._partitions.add(by, self._attributes)


class _Backlogs:
    """The gauges for the backlogs of the relays in this process."""

    def __init__(self) -> None:
        from opentelemetry import metrics

        self._api = metrics
        #: The running relays with their attributes.
        self.relays: dict[RelayMetrics, Mapping[str, Any]] = {}
        meter = metrics.get_meter("qflow_client", _version(), schema_url=SCHEMA_URL)
        meter.create_observable_gauge("qflow.relay.depth", [self._callback(0)], "{row}", "Rows that wait")
        meter.create_observable_gauge(
            "qflow.relay.oldest.age", [self._callback(1)], "s", "Seconds for which the oldest row has waited"
        )

    def _callback(self, index: int) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_options: CallbackOptions) -> list[Observation]:
            found = [(relay.backlog(), attributes) for relay, attributes in tuple(self.relays.items())]
            return [self._api.Observation(each[index], attributes) for each, attributes in found if each is not None]

        return observe


_backlogs: _Backlogs | None = None


def _after_fork_in_child() -> None:
    global _making
    _making = Lock()
    if _metrics is not None:
        _metrics.forget()
    if _backlogs is not None:
        # The relays and their database connections belong to the parent.
        _backlogs.relays.clear()


after_fork_in_child(_after_fork_in_child)
