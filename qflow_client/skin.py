"""The common behaviour and texts of the producers for threads and for asyncio, apart from the protocol."""

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
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry, log_entry
from qflow_client.errors import ConnectionFailed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent, HoldKind
from qflow_client.flow import FlowManager
from qflow_client.logs import log, write_log
from qflow_client.receipt import Receipt
from qflow_client.redaction import hide_password, shown
from qflow_client.settings import ProducerSettings, check_argument, check_timeout

if TYPE_CHECKING:
    pass

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
    "good_bye_until",
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
    "silent",
]


class _Default:
    """Stands for the value of the setting, because ``None`` has another meaning."""

    def __repr__(self) -> str:
        return "<the setting>"


DEFAULT: Any = _Default()

# Seconds that the broker may take to answer a close, and running callbacks to end: at most, and when the timeout is
# over.
GOOD_BYE = 3.0
BRIEF = 0.3

# Bytes that are passed to a socket in one call. Bytes that the kernel has not taken can still be withheld after a stop.
# A large chunk costs only the memory to join it. Above 128 KiB, the C library would request that memory from the kernel
# each time. A TLS write that has begun cannot be taken back, so with TLS a chunk is one record.
WRITE_CHUNK = 1 << 16
TLS_WRITE_CHUNK = 1 << 14

# Brokers show this text for a connection.
_INFORMATION = "AMQP 0-9-1 producers that obey the broker's flow control"
# After at most this many receipts it is recorded that `on_delivery` was called with them.
_REPORT_AT_ONCE = 100

#: Why a producer that connects in the background is disconnected at first. If it stops trying, this is a part of the
#: error.
NOT_CONNECTED = "the producer is not connected yet"

# Why a producer that was closed takes no more messages.
CLOSED = "the producer is closed"
# The reason for messages that were unsettled when the producer was closed.
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
    """Reject arguments that make no producer.

    Raises:
        SettingsError: there are two connections; or a shared connection with declarations or credentials.
        TypeError: an argument is of the wrong type.
    """
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
    """Reject a callback that would never run.

    Raises:
        TypeError: it is a coroutine function.
    """
    if inspect.iscoroutinefunction(callback):
        raise TypeError(
            f"{name}={shown(callback)}: it must be a plain function, because its result is not awaited; in asyncio it "
            "may start a task"
        )


def limit_of(timeout: float | None, settings: ProducerSettings) -> float | None:
    """Return the seconds that a call may take: the timeout of the call, or that of the settings."""
    return settings.max_producer_flow_control_wait if timeout is DEFAULT else timeout


def deadline_of(timeout: float | None) -> float:
    """Return the deadline of a call that begins now, in seconds.

    Args:
        timeout: seconds; ``None`` for no limit.

    Raises:
        TypeError, ValueError: it is not a number.
    """
    check_timeout(timeout)
    return math.inf if timeout is None else time.monotonic() + timeout


def close_deadline(timeout: float | None, settings: ProducerSettings) -> float:
    """Return the deadline of a close that begins now, in seconds, from the timeout of the call or from the settings.

    Raises:
        TypeError, ValueError: the timeout is not a number.
    """
    if timeout is DEFAULT:
        limits = (settings.close_timeout, settings.max_producer_flow_control_wait)
        timeout = min((limit for limit in limits if limit is not None), default=None)
    return deadline_of(timeout)


def kinds_of(kinds: Iterable[str] | None) -> frozenset[str] | None:
    """Check the hold kinds of a listener.

    Returns:
        The kinds; ``None`` for all.

    Raises:
        TypeError: they are not strings, or are a single string, which would be read as its letters.
        ValueError: one of them is not a hold kind, so its events would never come.
    """
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
    """Counts the flow events that a slow reader has lost, and warns of them.

    It warns when the reader takes its next event, because then the number of lost events is known. If the reader stays
    too slow, it warns again after as many losses as there may be waiting events.

    Args:
        name: the producer's.
        limit: the most events that may wait for the reader.
        why: why events are dropped, for people.
        arguments: the arguments of `why`; they are formatted when the log is written.
    """

    __slots__ = ("_arguments", "_count", "_limit", "_next", "_reported", "_text")

    def __init__(self, name: str, limit: int, why: str, *arguments: object) -> None:
        self._text = f"%s: %d flow events were dropped, because {why}; max_flow_events=%d"
        self._arguments = name, arguments
        self._limit = limit
        # How many events were dropped so far. Only the side that puts events changes this.
        self._count = 0
        # How many of them the log has reported.
        self._reported = 0
        # How many more events have to be dropped before the next warning.
        self._next = 1

    def add(self, count: int = 1) -> None:
        """Count dropped events."""
        self._count += count

    def entry(self) -> LogEntry | None:
        """Return the warning of the events that were dropped since the last warning; ``None`` if none were."""
        lost = self._count - self._reported
        if not lost:
            return None
        self._reported += lost
        name, arguments = self._arguments
        return log_entry(logging.WARNING, self._text, name, lost, *arguments, self._limit)

    def report(self, waiting: int) -> None:
        """Log the warning if it is time for it. The reader calls this when it has taken an event.

        Args:
            waiting: how many events wait for the reader now.
        """
        if self._count - self._reported >= self._next and (entry := self.entry()) is not None:
            self._next = self._limit
            write_log([entry])
        if not waiting:
            # The reader has caught up.
            self._next = 1


class Subscription:
    """The flow events that wait for one callback.

    The callback has to be called once for each event. Only one thread at a time may call `put` or `take`.

    Args:
        callback: the application's.
        kinds: the hold kinds of its events; ``None`` for all.
        name: the producer's.
        limit: the most events that may wait.
    """

    def __init__(
        self, callback: Callable[[FlowEvent], object], kinds: frozenset[str] | None, name: str, limit: int
    ) -> None:
        self.callback = callback
        self.kinds = kinds
        #: The events that the callback has lost.
        self.losses = Losses(name, limit, "callback %r is slow", callback)
        self._limit = limit
        self._events: deque[FlowEvent] = deque()

    def put(self, event: FlowEvent) -> bool:
        """Append an event. If too many events wait, it replaces the oldest one.

        Returns:
            Whether the callback has to be called once more.
        """
        is_full = len(self._events) >= self._limit
        # In this order, an interrupt never leaves fewer events than requested calls.
        self._events.append(event)
        if is_full:
            self._events.popleft()
            self.losses.add()
        return not is_full

    def take(self) -> FlowEvent:
        """Return the next event for a call of the callback."""
        return self._events.popleft()

    def report(self) -> None:
        """Warn of dropped events, if it is time for a warning. Called after `take`."""
        self.losses.report(len(self._events))


class BaseFlowEvents:
    """The flow events of a producer, in order, for a reader that takes them one by one.

    One thread at a time puts events, and another one may read them. There is no lock. If both threads take the last
    event at the same time, one of them finds an empty queue.

    Args:
        name: the producer's.
        limit: the most events that may wait for the reader.
        events: the queue.
    """

    def __init__(self, name: str, limit: int, events: Any) -> None:
        self._limit = limit
        self._events = events
        #: The events that the reader has lost.
        self.losses = Losses(name, limit, "flow_events() is not read fast enough")

    def put(self, event: FlowEvent | None) -> None:
        """Append an event. If too many events wait, it replaces the oldest one. ``None`` is the end, and comes last."""
        if event is not None and self._events.qsize() >= self._limit:
            # The reader may have taken it meanwhile.
            with suppress(queue.Empty):
                self._events.get_nowait()
                self.losses.add()
        self._events.put_nowait(event)


_Events = TypeVar("_Events", bound=BaseFlowEvents)


class Listeners(Generic[_Events]):
    """The listeners of a producer's flow events. The caller prevents concurrent calls.

    Args:
        name: the producer's.
        limit: the most events that may wait for one callback.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        # By the key for `remove`, because the same callback may be registered several times.
        self._callbacks: dict[object, Subscription] = {}
        #: Iterators to which no other code refers are removed.
        self.iterators: WeakKeyDictionary[_Events, frozenset[str] | None] = WeakKeyDictionary()

    def add(
        self,
        protocol: ProducerProtocol,
        key: object,
        callback: Callable[[FlowEvent], object],
        kinds: frozenset[str] | None,
    ) -> None:
        """Register a callback.

        Args:
            protocol: the producer's state.
            key: for `remove`.
            callback: the application's.
            kinds: the hold kinds of its events; ``None`` for all.
        """
        self._callbacks[key] = Subscription(callback, kinds, self._name, self._limit)
        self._listen(protocol)

    def remove(self, key: object) -> None:
        """Remove a callback; a second call changes nothing."""
        self._callbacks.pop(key, None)

    def iterate(self, protocol: ProducerProtocol, events: _Events, kinds: frozenset[str] | None) -> None:
        """Put events into an iterator, as `add` passes them to a callback."""
        self.iterators[events] = kinds
        self._listen(protocol)

    def _listen(self, protocol: ProducerProtocol) -> None:
        if protocol.reports.events is None:
            protocol.reports.events = []

    def pass_on(self, protocol: ProducerProtocol, call: Callable[[Subscription], object]) -> None:
        """Pass on the events.

        Args:
            protocol: the producer's state, which has events.
            call: schedules a call of a subscription's callback with the next waiting event.
        """
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
            # A callback may be registered inside this loop.
            for subscription in tuple(self._callbacks.values()):
                if (subscription.kinds is None or kind in subscription.kinds) and subscription.put(event):
                    call(subscription)

    def end(self) -> list[LogEntry]:
        """End the iterators.

        Returns:
            Log entries: warnings of lost events that were not reported yet.
        """
        logs = []
        for iterator in tuple(self.iterators):
            if (entry := iterator.losses.entry()) is not None:
                logs.append(entry)
            iterator.put(None)
        self.iterators.clear()
        return logs


def client_properties(name: str) -> dict[str, Any]:
    """Return the properties that an own connection announces."""
    version = str(import_module("qflow_client").__version__)
    # Otherwise brokers would show the information of the underlying library.
    return {"connection_name": name, "product": "qflow_client", "version": version, "information": _INFORMATION}


def connection_failed(url: str, why: str) -> ConnectionFailed:
    """Return the error for one host."""
    return ConnectionFailed(f"{hide_password(url)}: {why}")


def no_answer(url: str, timeout: float) -> ConnectionFailed:
    """Return the error for a host that did not answer in time."""
    return connection_failed(url, silent(timeout))


def silent(timeout: float) -> str:
    """Return the reason: the host did not answer in time."""
    return f"no answer within {timeout:.3g} s"


def no_confirms(words: str) -> str:
    """Return the reason for a channel that failed because the broker does not confirm."""
    return f"publisher confirms are not available: {words}; set confirms=False to publish without them"


def none_of(errors: Sequence[ConnectionFailed]) -> ConnectionFailed:
    """Return the error if no host could be connected to."""
    if len(errors) == 1:
        return errors[0]
    return ConnectionFailed(f"cannot connect to any of {len(errors)} hosts: {'; '.join(map(str, errors))}")


def lost(words: str) -> str:
    """Return why a producer whose connection ended takes no more messages."""
    return f"the connection is lost: {words}"


def log_failed_try(name: str, url: str, why: str, pause: float) -> None:
    """Log that a try to reconnect has failed."""
    log(logging.WARNING, "%s: no connection to %s: %s; the next try is in %.3g s", name, url, why, pause)


def log_connected(name: str, url: str, why: str) -> None:
    """Log that the producer is connected. `why` is the reason why it was not: `NOT_CONNECTED` before the first time."""
    words = "%s: connected to %s" if why == NOT_CONNECTED else "%s: connected again to %s"
    log(logging.WARNING, words, name, url)


class Deliveries:
    """Passes settled receipts to `on_delivery`, and remembers which were not passed yet.

    Args:
        on_delivery: the application's.
        reported: called with the number of receipts that were passed since the last call.
    """

    def __init__(self, on_delivery: Callable[[Receipt], object], reported: Callable[[int], None]) -> None:
        self._on_delivery = on_delivery
        self._reported = reported
        # The receipts that are not all passed yet, and how many of the first list were passed.
        self._handed: deque[list[Receipt]] = deque()
        self._passed_of_first = 0

    def hand(self, receipts: list[Receipt]) -> None:
        """Add receipts. `pass_on` must be called for them in the same order."""
        self._handed.append(receipts)

    def pass_on(self, receipts: list[Receipt]) -> BaseException | None:
        """Pass all of the receipts.

        Returns:
            The first exception that is not an `Exception`, for example of `sys.exit`; it is logged, too.
        """
        left_by = None
        passed = 0
        for receipt in receipts:
            try:
                self._on_delivery(receipt)
            except BaseException as error:
                # A mistake of the application, or its sys.exit, must not prevent the following receipts.
                log(logging.ERROR, "on_delivery failed on %r", receipt, error=error)
                if left_by is None and not isinstance(error, Exception):
                    left_by = error
            self._passed_of_first += 1
            passed += 1
            if passed == _REPORT_AT_ONCE:
                self._reported(passed)
                passed = 0
        # In this order, a receipt may be passed twice, but is never lost.
        self._passed_of_first = 0
        self._handed.popleft()
        self._reported(passed)
        return left_by

    def undelivered(self, left: Sequence[Receipt]) -> list[Receipt]:
        """Return the failures that `close` has to report, because they were not passed in time.

        Args:
            left: the receipts that were unsettled when the connection was ended. They were passed, but possibly too
                late.
        """
        late = [receipt for receipts in tuple(self._handed) for receipt in receipts][self._passed_of_first :]
        failed = {id(receipt): receipt for receipt in (*late, *left) if receipt._failed and not receipt._seen}
        return sorted(failed.values(), key=lambda receipt: receipt._number)


def good_bye_until(deadline: float) -> float:
    """Return the seconds that the end of the connection may take before a deadline."""
    return max(BRIEF, min(GOOD_BYE, deadline - time.monotonic()))


def check_many(messages: object, timeout: float | None) -> None:
    """Reject invalid arguments of `send_many` before any message is sent."""
    if isinstance(messages, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"messages: {type(messages).__name__} is one message; give several messages, or use send()")
    if timeout is not DEFAULT:
        check_timeout(timeout)


@contextmanager
def keeping(receipts: Sequence[Receipt]) -> Iterator[None]:
    """Add the receipts of the admitted messages to any exception, because the call does not return them then.

    Args:
        receipts: the receipts, which are added during the block.
    """
    try:
        yield
    except BaseException as error:
        # An exception may refuse attributes.
        with suppress(Exception):
            error.add_note(f"qflow_client: {len(receipts)} messages were admitted; .receipts has their receipts")
            error.receipts = tuple(receipts)  # type: ignore[attr-defined]  # of any exception
        raise


def keep_admitted(error: Exception, receipts: list[Any]) -> None:
    """Keep the receipt of a message that was admitted although its `send` has failed (`NotDurable`).

    Args:
        error: the error of `send`.
        receipts: those of the messages before it; the receipt is appended.
    """
    receipt = getattr(error, "receipt", None)
    if receipt is not None:
        receipts.append(receipt)


def report_undelivered(name: str, error: BaseException, undelivered: UndeliveredMessages | None) -> None:
    """Report undelivered messages without replacing an exception.

    Args:
        name: the producer's.
        error: the exception that is being raised.
        undelivered: the messages that were not delivered, and that no call has reported.
    """
    if undelivered is not None:
        # The notes of a SystemExit are not shown.
        log(logging.ERROR, "%s: the producer was closed on %s: %s", name, type(error).__name__, undelivered)
        # An exception may refuse attributes.
        with suppress(Exception):
            error.add_note(f"qflow_client: {undelivered}")
            error.undelivered = undelivered  # type: ignore[attr-defined]
