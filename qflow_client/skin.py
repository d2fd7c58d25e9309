"""Code outside `ProducerProtocol` that `Producer`, `AsyncProducer` and the drop-ins have in common.

The module checks arguments, computes deadlines, makes the texts of errors and logs, and passes flow events and receipts
to the application. No function of this module uses a socket or waits.
"""

from __future__ import annotations

import inspect
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry, log_entry
from qflow_client.errors import ConnectionFailed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent, HoldKind
from qflow_client.flow import FlowManager
from qflow_client.logs import log, write_log
from qflow_client.receipt import Receipt
from qflow_client.recovery import silent
from qflow_client.redaction import hide_password, shown
from qflow_client.settings import ProducerSettings, check_argument, check_timeout

__all__ = [
    "BRIEF",
    "CLOSED",
    "DEFAULT",
    "GIVEN_UP",
    "GOOD_BYE",
    "NOT_CONNECTED",
    "TLS_WRITE_CHUNK",
    "WRITE_CHUNK",
    "BaseFlowEvents",
    "Deliveries",
    "Listeners",
    "Losses",
    "Subscription",
    "check_arguments",
    "check_many",
    "client_properties",
    "close_deadline",
    "connection_failed",
    "deadline_of",
    "good_bye_until",
    "keep_admitted",
    "keeping",
    "kinds_of",
    "limit_of",
    "log_connected",
    "log_failed_try",
    "lost",
    "no_answer",
    "no_confirms",
    "none_of",
    "refuse_coroutine_function",
    "report_undelivered",
]


class _Default:
    """The default of `timeout` arguments, which stands for the value of a setting. ``None`` means no limit."""

    def __repr__(self) -> str:
        return "<the setting>"


DEFAULT: Any = _Default()

# `close` waits at most this number of seconds for the broker's answer, and then at most as long for flow callbacks.
GOOD_BYE = 3.0
# Maximum seconds of each wait if the timeout of `close` has expired, or if an error ends the producer. Up to three such
# waits and `sync.link._CUT_GRACE` follow each other, and `close` must return within a second after its timeout.
BRIEF = 0.2

# Maximum bytes of one write to a socket. The value is small, because written bytes cannot be kept back when the broker
# stops the channel. Above 128 KiB, the C library would request the memory of each chunk from the kernel, which is slow.
# With TLS, a chunk is at most one record, because a record that has begun cannot be withdrawn.
WRITE_CHUNK = 1 << 16
TLS_WRITE_CHUNK = 1 << 14

# The management pages of brokers show this text for each connection of this package.
_INFORMATION = "AMQP 0-9-1 producers that obey the broker's flow control"
# Maximum number of calls of `on_delivery` between two reports to the `ProducerProtocol`.
_REPORT_AT_ONCE = 100

#: The reason why a producer with `connect_in_background` is disconnected at first.
NOT_CONNECTED = "the producer is not connected yet"

# The text of the error of `send` after `close`.
CLOSED = "the producer is closed"
# The reason in the receipts of messages that were unsettled when the producer was closed.
GIVEN_UP = "the producer was closed, and the broker had not answered in time"


def check_arguments(
    url: object,
    connection: object,
    on_delivery: object,
    on_flow: object,
    manager: object,
    declare: object,
    credentials: object,
) -> None:
    """Check the arguments of a producer's constructor that are not settings."""
    if connection is not None and url is not None:
        raise SettingsError("url and connection: give only one; a producer has its own connection, or a shared one")
    if connection is not None and declare is not None:
        raise SettingsError("declare and connection: declare with a channel of that connection instead")
    if connection is not None and credentials is not None:
        raise SettingsError(
            "credentials and connection: that connection is already logged in; update its secret where it is made"
        )
    check_argument("credentials", credentials, credentials is None or callable(credentials), "None or callable")
    for name, callback in (("on_delivery", on_delivery), ("on_flow", on_flow)):
        check_argument(name, callback, callback is None or callable(callback), "None or callable")
        refuse_coroutine_function(name, callback)
    check_argument("manager", manager, isinstance(manager, FlowManager), "a FlowManager")


def refuse_coroutine_function(name: str, callback: object) -> None:
    """Reject a coroutine function, because its coroutine would never run."""
    if inspect.iscoroutinefunction(callback):
        raise TypeError(
            f"{name}={shown(callback)}: it must be a plain function, because its result is not awaited; in asyncio it "
            "may start a task"
        )


def limit_of(timeout: float | None, settings: ProducerSettings) -> float | None:
    """Return the maximum seconds of a call: `timeout`, or `max_producer_flow_control_wait` if it is `DEFAULT`."""
    return settings.max_producer_flow_control_wait if timeout is DEFAULT else timeout


def deadline_of(timeout: float | None) -> float:
    """Check a timeout, and return the deadline of a call that begins now, in seconds of `time.monotonic`."""
    check_timeout(timeout)
    return math.inf if timeout is None else time.monotonic() + timeout


def close_deadline(timeout: float | None, settings: ProducerSettings) -> float:
    """Return the deadline of a close that begins now. For `DEFAULT`, see the setting `close_timeout`."""
    if timeout is DEFAULT:
        limits = (settings.close_timeout, settings.max_producer_flow_control_wait)
        timeout = min((limit for limit in limits if limit is not None), default=None)
    return deadline_of(timeout)


def kinds_of(kinds: Iterable[str] | None) -> frozenset[str] | None:
    """Check and return the hold kinds of a listener; ``None`` for all."""
    if kinds is None:
        return None
    found = None if isinstance(kinds, str) else frozenset(kinds)
    if found is None or not all(isinstance(kind, str) for kind in found):
        raise TypeError(f"kinds={shown(kinds)}: it must be a collection of hold kinds, such as ('connection_blocked',)")
    unknown = sorted(found - frozenset(HoldKind))
    if unknown:
        raise ValueError(f"kinds: there is no hold kind {shown(unknown[0])}; the kinds are {', '.join(HoldKind)}")
    return found


class Losses:
    """Counts the flow events that were dropped because their reader is slow, and logs warnings.

    A warning is logged when the reader takes its next event, because more events may be dropped until then. If the
    reader stays too slow, the next warning follows after `limit` more dropped events.

    Args:
        limit: maximum number of events that wait for the reader.
        why: format string for the reason in the warning.
        arguments: the values for `why`; they are formatted when the log is written.
    """

    __slots__ = ("_arguments", "_count", "_limit", "_next", "_reported", "_text")

    def __init__(self, name: str, limit: int, why: str, *arguments: object) -> None:
        self._text = f"%s: %d flow events were dropped, because {why}; max_flow_events=%d"
        self._arguments = name, arguments
        self._limit = limit
        # Number of dropped events. Only the thread that puts events changes it.
        self._count = 0
        # Number of dropped events that were reported in the log.
        self._reported = 0
        # Number of unreported dropped events at which the next warning is logged.
        self._next = 1

    def add(self, count: int = 1) -> None:
        self._count += count

    def entry(self) -> LogEntry | None:
        """Return a warning about the events that were dropped since the last warning; ``None`` if there are none."""
        lost = self._count - self._reported
        if not lost:
            return None
        self._reported += lost
        name, arguments = self._arguments
        return log_entry(logging.WARNING, self._text, name, lost, *arguments, self._limit)

    def report(self, waiting: int) -> None:
        """After the reader has taken an event, log a warning if `_next` dropped events are unreported."""
        if self._count - self._reported >= self._next and (entry := self.entry()) is not None:
            self._next = self._limit
            write_log([entry])
        if not waiting:
            # The reader has caught up, so warn of the very next dropped event.
            self._next = 1


class Subscription:
    """The flow events that wait for one callback.

    Calls of `put` and `take` must not overlap.

    Args:
        kinds: the hold kinds of the callback's events; ``None`` for all kinds.
        limit: maximum number of events that wait for the callback.
    """

    def __init__(
        self, callback: Callable[[FlowEvent], object], kinds: frozenset[str] | None, name: str, limit: int
    ) -> None:
        self.callback = callback
        self.kinds = kinds
        #: Counts the events that were dropped because the callback is slow.
        self.losses = Losses(name, limit, "callback %r is slow", callback)
        self._limit = limit
        self._events: deque[FlowEvent] = deque()

    def put(self, event: FlowEvent) -> bool:
        """Append an event. If `limit` events wait already, drop the oldest event."""
        is_full = len(self._events) >= self._limit
        # Append first, so that an interrupt never leaves fewer events than scheduled calls.
        self._events.append(event)
        if is_full:
            self._events.popleft()
            self.losses.add()
        return not is_full

    def take(self) -> FlowEvent:
        return self._events.popleft()

    def report(self) -> None:
        """Log a warning about dropped events, see `Losses.report`. The caller has just called `take`."""
        self.losses.report(len(self._events))


class BaseFlowEvents:
    """The base class of the iterators over a producer's flow events.

    One thread at a time may call `put`. Another thread may take events meanwhile.
    """

    def __init__(self, name: str, limit: int, events: Any) -> None:
        self._limit = limit
        self._events = events
        #: Counts the events that were dropped because the reader is slow.
        self.losses = Losses(name, limit, "flow_events() is not read fast enough")

    def put(self, event: FlowEvent | None) -> None:
        """Append an event. If `limit` events wait already, drop the oldest event. ``None`` ends the iterator."""
        if event is not None and self._events.qsize() >= self._limit:
            # The reader may have emptied the queue after the call of `qsize`.
            with suppress(queue.Empty):
                self._events.get_nowait()
                self.losses.add()
        self._events.put_nowait(event)


_Events = TypeVar("_Events", bound=BaseFlowEvents)


class Listeners(Generic[_Events]):
    """The callbacks and iterators for a producer's flow events. Calls of the methods must not run at the same time."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        # The subscriptions by the argument `key` of `add`. The callback is not the key: it may be registered twice.
        self._callbacks: dict[object, Subscription] = {}
        #: The iterators and their hold kinds. An iterator that the application has dropped is removed.
        self.iterators: WeakKeyDictionary[_Events, frozenset[str] | None] = WeakKeyDictionary()

    def add(
        self,
        protocol: ProducerProtocol,
        key: object,
        callback: Callable[[FlowEvent], object],
        kinds: frozenset[str] | None,
    ) -> None:
        """Register a callback for flow events. `key` identifies the callback for `remove`."""
        self._callbacks[key] = Subscription(callback, kinds, self._name, self._limit)
        self._listen(protocol)

    def remove(self, key: object) -> None:
        self._callbacks.pop(key, None)

    def iterate(self, protocol: ProducerProtocol, events: _Events, kinds: frozenset[str] | None) -> None:
        """Put all later events into an iterator. `kinds` is as for `add`."""
        self.iterators[events] = kinds
        self._listen(protocol)

    def _listen(self, protocol: ProducerProtocol) -> None:
        if protocol.reports.events is None:
            protocol.reports.events = []

    def pass_on(self, protocol: ProducerProtocol, call: Callable[[Subscription], object]) -> None:
        """Pass the recorded events to the callbacks and iterators. `call` schedules one call of a callback."""
        reports = protocol.reports
        events, reports.events = reports.events or (), []
        lost, reports.lost_events = reports.lost_events, {}
        if lost:
            readers = [(each.losses, kinds) for each, kinds in tuple(self.iterators.items())]
            readers += [(each.losses, each.kinds) for each in tuple(self._callbacks.values())]
            for losses, kinds in readers:
                losses.add(sum(count for kind, count in lost.items() if kinds is None or kind in kinds))
        for event in events:
            kind = None if event.hold is None else event.hold.kind
            for iterator, kinds in tuple(self.iterators.items()):
                if kinds is None or kind in kinds:
                    iterator.put(event)
            # Use a copy, because a callback may be registered during this loop.
            for subscription in tuple(self._callbacks.values()):
                if (subscription.kinds is None or kind in subscription.kinds) and subscription.put(event):
                    call(subscription)

    def end(self) -> list[LogEntry]:
        """End the iterators. Return log entries about dropped events that were not reported yet."""
        logs = []
        for iterator in tuple(self.iterators):
            if (entry := iterator.losses.entry()) is not None:
                logs.append(entry)
            iterator.put(None)
        self.iterators.clear()
        return logs


def client_properties(name: str) -> dict[str, Any]:
    """Return the client properties for a connection that the producer `name` makes."""
    version = str(import_module("qflow_client").__version__)
    # Without `information`, brokers would show the text of pika or aiormq.
    return {"connection_name": name, "product": "qflow_client", "version": version, "information": _INFORMATION}


def connection_failed(url: str, why: str) -> ConnectionFailed:
    """Return the error for a host to which no connection could be made."""
    return ConnectionFailed(f"{hide_password(url)}: {why}")


def no_answer(url: str, timeout: float) -> ConnectionFailed:
    """Return the error for a host that did not answer in time."""
    return connection_failed(url, silent(timeout))


def no_confirms(words: str) -> str:
    """Return the error text for a broker that does not support publisher confirms."""
    return f"publisher confirms are not available: {words}; set confirms=False to publish without them"


def none_of(errors: Sequence[ConnectionFailed]) -> ConnectionFailed:
    """Combine the errors of all hosts into one error, because no host opened a connection and a channel."""
    if len(errors) == 1:
        return errors[0]
    return ConnectionFailed(f"cannot connect to any of {len(errors)} hosts: {'; '.join(map(str, errors))}")


def lost(words: str) -> str:
    """Return the text for a producer that has lost its connection."""
    return f"the connection is lost: {words}"


def log_failed_try(name: str, url: str, why: str, pause: float) -> None:
    """Log that a try to connect has failed. `pause` is the time until the next try, in seconds."""
    log(logging.WARNING, "%s: no connection to %s: %s; the next try is in %.3g s", name, url, why, pause)


def log_connected(name: str, url: str, why: str) -> None:
    """Log that the producer is connected. `why` is why it was not connected before: a loss, or `NOT_CONNECTED`."""
    words = "%s: connected to %s" if why == NOT_CONNECTED else "%s: connected again to %s"
    log(logging.WARNING, words, name, url)


class Deliveries:
    """Passes settled receipts to `on_delivery`, and keeps the receipts that are not passed yet.

    Args:
        reported: called with the number of receipts that `on_delivery` got since the last call of `reported`.
    """

    def __init__(self, on_delivery: Callable[[Receipt], object], reported: Callable[[int], None]) -> None:
        self._on_delivery = on_delivery
        self._reported = reported
        # Lists with receipts that `on_delivery` has not got yet, in order.
        self._handed: deque[list[Receipt]] = deque()
        # Number of receipts of the first list that `on_delivery` has got.
        self._passed_of_first = 0

    def hand(self, receipts: list[Receipt]) -> None:
        """Add a list of receipts. The caller must then call `pass_on` with the lists in the same order."""
        self._handed.append(receipts)

    def pass_on(self, receipts: list[Receipt]) -> BaseException | None:
        """Call `on_delivery` with each receipt. Log the exceptions of `on_delivery`.

        Returns:
            The first exception that is not an `Exception`, such as the `SystemExit` of `sys.exit`; ``None`` for none.
        """
        left_by = None
        passed = 0
        for receipt in receipts:
            try:
                self._on_delivery(receipt)
            except BaseException as error:
                # An exception of the application, even `SystemExit`, must not prevent the following calls.
                log(logging.ERROR, "on_delivery failed on %r", receipt, error=error)
                if left_by is None and not isinstance(error, Exception):
                    left_by = error
            self._passed_of_first += 1
            passed += 1
            if passed == _REPORT_AT_ONCE:
                self._reported(passed)
                passed = 0
        # Set the count to 0 first: between these lines, `undelivered` may return too many receipts, but misses none.
        self._passed_of_first = 0
        self._handed.popleft()
        self._reported(passed)
        return left_by

    def undelivered(self, left: Sequence[Receipt]) -> list[Receipt]:
        """Return the failed receipts that `close` has to report, because `on_delivery` did not get them in time.

        Args:
            left: the receipts that the end of the connection has settled, perhaps too late for `on_delivery`.
        """
        late = [receipt for receipts in tuple(self._handed) for receipt in receipts][self._passed_of_first :]
        failed = {id(receipt): receipt for receipt in (*late, *left) if receipt._failed and not receipt._seen}
        return sorted(failed.values(), key=lambda receipt: receipt._number)


def good_bye_until(deadline: float) -> float:
    """Return the seconds to wait for a close: until `deadline`, at least `BRIEF`, at most `GOOD_BYE`."""
    return max(BRIEF, min(GOOD_BYE, deadline - time.monotonic()))


def check_many(messages: object, timeout: float | None) -> None:
    """Reject invalid arguments of `send_many` before any message is sent."""
    if isinstance(messages, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"messages: {type(messages).__name__} is one message; give several messages, or use send()")
    if timeout is not DEFAULT:
        check_timeout(timeout)


@contextmanager
def keeping(receipts: Sequence[Receipt]) -> Iterator[None]:
    """If the ``with`` block raises an exception, add to it the receipts that the block has put into `receipts`."""
    try:
        yield
    except BaseException as error:
        # Some exceptions reject new attributes.
        with suppress(Exception):
            error.add_note(f"qflow_client: {len(receipts)} messages were admitted; .receipts has their receipts")
            error.receipts = tuple(receipts)  # type: ignore[attr-defined]  # most exceptions accept new attributes
        raise


def keep_admitted(error: Exception, receipts: list[Any]) -> None:
    """If the error of `send` has a receipt (`NotDurable`), append the receipt, because the message is admitted."""
    receipt = getattr(error, "receipt", None)
    if receipt is not None:
        receipts.append(receipt)


def report_undelivered(name: str, error: BaseException, undelivered: UndeliveredMessages | None) -> None:
    """Log undelivered messages, and add them to the exception that has closed the producer.

    Args:
        error: the exception that leaves the producer's ``with`` block, or interrupts `close`.
        undelivered: the undelivered messages that no call has reported; ``None`` if there are none.
    """
    if undelivered is not None:
        # Log the text, because Python does not show the notes of a `SystemExit`.
        log(logging.ERROR, "%s: the producer was closed on %s: %s", name, type(error).__name__, undelivered)
        # Some exceptions reject new attributes.
        with suppress(Exception):
            error.add_note(f"qflow_client: {undelivered}")
            error.undelivered = undelivered  # type: ignore[attr-defined]
