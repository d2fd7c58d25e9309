"""What the producers for threads and for asyncio say and do alike, besides the protocol: their words, above all."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry, log_entry
from qflow_client.errors import ConfirmTimeout, ConnectionFailed, SettingsError, UndeliveredMessages
from qflow_client.events import FlowEvent, HoldKind
from qflow_client.flow import FlowManager, Line
from qflow_client.forks import after_fork_in_child
from qflow_client.logs import log, write_log
from qflow_client.receipt import Outcome, Receipt
from qflow_client.recovery import retries
from qflow_client.redaction import hide_password, shown
from qflow_client.settings import ProducerSettings, check_argument, check_timeout

if TYPE_CHECKING:
    from qflow_client.outbox.storage import Storage

__all__ = [
    "BRIEF",
    "CLOSED",
    "DEFAULT",
    "GIVEN_UP",
    "GOOD_BYE",
    "NOT_CONNECTED",
    "TLS_WRITE_CHUNK",
    "WRITE_CHUNK",
    "Deliveries",
    "Listeners",
    "Losses",
    "Subscription",
    "check_arguments",
    "check_many",
    "client_properties",
    "close_limit",
    "connection_failed",
    "disown",
    "good_bye_until",
    "keeping",
    "kinds_of",
    "leave_word",
    "limit_of",
    "log_connected_again",
    "log_failed_try",
    "log_forgotten",
    "lost",
    "no_answer",
    "no_confirms",
    "none_of",
    "protocol_options",
    "silent",
    "undelivered_of",
    "unflushed",
    "watch_process",
]


class _Default:
    """Stands for the setting where ``None`` has a meaning of its own."""

    def __repr__(self) -> str:
        return "<the setting>"


DEFAULT: Any = _Default()

# Seconds that the broker may take for an orderly good-bye, and running callbacks for their end: at the most, and when
# the time to wait is up.
GOOD_BYE = 3.0
BRIEF = 0.3

# Bytes that are offered to a socket at once. What the kernel has not taken, a stop can still hold back: a large chunk
# costs nothing but the memory to join it, below 128 KiB, which the C library would get from the kernel anew each time.
# TLS cannot take back a write that it has begun, so there a chunk is one record.
WRITE_CHUNK = 1 << 16
TLS_WRITE_CHUNK = 1 << 14

# What brokers show of a connection; with the address of our page once there is one.
_INFORMATION = "AMQP 0-9-1 producers that obey the broker's flow control"
# After how many receipts at the latest it is noted that `on_delivery` was told of them.
_TELL_AT_ONCE = 100

#: Why a producer that connects in the background is disconnected at first; a part of the error if it gives up.
NOT_CONNECTED = "it is not connected yet"

# Why a producer that was closed takes no more messages.
CLOSED = "the producer is closed"
# What became of what was unsettled when it was.
GIVEN_UP = "the producer was closed, and the broker's answer had not come in time"


def check_arguments(
    url: object,
    connection: object,
    on_delivery: object,
    on_flow: object,
    manager: object,
    declare: object,
    credentials: object,
) -> None:
    """Refuse what no producer can be made of.

    Raises:
        SettingsError: it is told of two connections, or is to declare something, or log in, on a shared one.
        TypeError: an argument is of the wrong type.
    """
    if connection is not None and url is not None:
        raise SettingsError("url and connection: a producer has a connection of its own, or a shared one; give one")
    if connection is not None and declare is not None:
        raise SettingsError("declare with connection: declare it with a channel of that connection")
    if connection is not None and credentials is not None:
        raise SettingsError("credentials with connection: that one is logged in; update its secret where it is made")
    check_argument("credentials", credentials, credentials is None or callable(credentials), "None or callable")
    check_argument("on_delivery", on_delivery, on_delivery is None or callable(on_delivery), "None or callable")
    check_argument("on_flow", on_flow, on_flow is None or callable(on_flow), "None or callable")
    check_argument("manager", manager, isinstance(manager, FlowManager), "a FlowManager")


def warn_in_loop(stacklevel: int) -> None:
    """Warn if an event loop runs on this thread, which a producer for threads would block.

    Args:
        stacklevel: as for `warnings.warn`, from here.
    """
    if (asyncio := sys.modules.get("asyncio")) is not None and asyncio._get_running_loop() is not None:
        words = "a Producer that waits blocks the event loop of this thread; use AsyncProducer there"
        warnings.warn(words, RuntimeWarning, stacklevel=stacklevel)


def protocol_options(settings: ProducerSettings, receipt_type: type[Receipt], line: Line | None) -> dict[str, Any]:
    """What a producer's protocol is made with, besides the settings."""
    now = time.monotonic()
    return {
        "id_prefix": f"{uuid4().hex[:16]}-",
        "receipt_type": receipt_type,
        "now": now,
        "wall_offset": time.time() - now,
        "line": line,
        "retries": retries(settings),
    }


def limit_of(timeout: float | None, settings: ProducerSettings) -> float | None:
    """Seconds that a call may take; the setting unless they are given."""
    return settings.max_producer_flow_control_wait if timeout is DEFAULT else timeout


def deadline_of(timeout: float | None) -> float:
    """When a call that begins now has taken its time, in seconds.

    Args:
        timeout: seconds; ``None`` for ever.

    Raises:
        TypeError, ValueError: it is no number.
    """
    check_timeout(timeout)
    return math.inf if timeout is None else time.monotonic() + timeout


def close_limit(timeout: float | None, settings: ProducerSettings) -> float | None:
    """Seconds that a close may take; by the settings unless they are given."""
    if timeout is not DEFAULT:
        return timeout
    limits = (settings.close_timeout, settings.max_producer_flow_control_wait)
    return min((limit for limit in limits if limit is not None), default=None)


def kinds_of(kinds: Iterable[str] | None) -> frozenset[str] | None:
    """Check the hold kinds that a listener asks for.

    Returns:
        The kinds; ``None`` for all.

    Raises:
        TypeError: they are not words, or one word, which would be taken for its letters.
        ValueError: one of them is not a hold kind, so its events would never come.
    """
    if kinds is None:
        return None
    found = None if isinstance(kinds, str) else frozenset(kinds)
    if found is None or not all(isinstance(kind, str) for kind in found):
        raise TypeError(f"kinds={shown(kinds)}: it must be several hold kinds, such as ('connection_blocked',)")
    unknown = sorted(found - frozenset(HoldKind))
    if unknown:
        raise ValueError(f"kinds: there is no hold kind {shown(unknown[0])}; the kinds are {', '.join(HoldKind)}")
    return found


class Losses:
    """Counts the flow events that one reader has lost, because it is slow, and warns of them.

    It warns when the reader takes its next event, because then the number of lost events is known. If the reader stays
    too slow, it warns again after as many losses as events may wait.

    Args:
        name: the producer's.
        limit: the most events that may wait for the reader.
        why: why events are dropped, for people.
        arguments: of `why`; they are formatted where the log is written.
    """

    __slots__ = ("_arguments", "_count", "_limit", "_next", "_text", "_told")

    def __init__(self, name: str, limit: int, why: str, *arguments: object) -> None:
        self._text = f"%s: %d flow events were dropped, because {why}; max_flow_events=%d"
        self._arguments = name, arguments
        self._limit = limit
        # How many events were dropped so far. Only the side that puts events changes it.
        self._count = 0
        # Of how many of them the log tells.
        self._told = 0
        # How many more have to be dropped before the next warning.
        self._next = 1

    def add(self, count: int = 1) -> None:
        """Count events that were dropped."""
        self._count += count

    def entry(self) -> LogEntry | None:
        """Return the warning of the events that were dropped since the last one; ``None`` if none were."""
        lost = self._count - self._told
        if not lost:
            return None
        self._told += lost
        name, arguments = self._arguments
        return log_entry(logging.WARNING, self._text, name, lost, *arguments, self._limit)

    def report(self, waiting: int) -> None:
        """Log the warning if it is due. The reader calls it when it has taken an event.

        Args:
            waiting: how many events wait for the reader now.
        """
        if self._count - self._told >= self._next and (entry := self.entry()) is not None:
            self._next = self._limit
            write_log([entry])
        if not waiting:
            # It has caught up.
            self._next = 1


class Subscription:
    """The flow events that wait for one callback.

    A call of the callback is due for each of them. Only one thread at a time may put or take.

    Args:
        callback: the application's.
        kinds: the hold kinds that it is told of; ``None`` for all.
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
        """Append an event, in the place of the oldest one if too many wait.

        Returns:
            Whether one more call is due.
        """
        is_full = len(self._events) >= self._limit
        # In this order, an interrupt never leaves fewer events than calls that are due.
        self._events.append(event)
        if is_full:
            self._events.popleft()
            self.losses.add()
        return not is_full

    def take(self) -> FlowEvent:
        """Return the next event, for a call that is due."""
        return self._events.popleft()

    def report(self) -> None:
        """Warn of events that were dropped, if that is due. Called after `take`."""
        self.losses.report(len(self._events))


class _FlowEvents(Protocol):
    """The flow events of a producer, for a reader that takes them one by one."""

    losses: Losses

    def put(self, event: FlowEvent | None, /) -> object: ...


_Events = TypeVar("_Events", bound=_FlowEvents)


class Listeners(Generic[_Events]):
    """Who is told of a producer's flow events. Whoever calls sees to it that nobody else does at the same time.

    Args:
        name: the producer's.
        limit: the most events that may wait for one callback.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        # By what ends it, because the same callback may be registered several times.
        self._callbacks: dict[object, Subscription] = {}
        #: Of an iterator that nobody has any more, nothing is left.
        self.iterators: WeakKeyDictionary[_Events, frozenset[str] | None] = WeakKeyDictionary()

    def add(
        self,
        protocol: ProducerProtocol,
        key: object,
        callback: Callable[[FlowEvent], object],
        kinds: frozenset[str] | None,
    ) -> None:
        """Have a callback called.

        Args:
            protocol: the producer's state.
            key: for `remove`.
            callback: the application's.
            kinds: the hold kinds it is told of; ``None`` for all.
        """
        self._callbacks[key] = Subscription(callback, kinds, self._name, self._limit)
        self._listen(protocol)

    def remove(self, key: object) -> None:
        """Have it called no more; a second time changes nothing."""
        self._callbacks.pop(key, None)

    def iterate(self, protocol: ProducerProtocol, events: _Events, kinds: frozenset[str] | None) -> None:
        """Have events put, as `add` has them told."""
        self.iterators[events] = kinds
        self._listen(protocol)

    def _listen(self, protocol: ProducerProtocol) -> None:
        if protocol.reports.events is None:
            protocol.reports.events = []

    def tell(self, protocol: ProducerProtocol, call: Callable[[Subscription], object]) -> None:
        """Tell of what there is to tell.

        Args:
            protocol: the producer's state, which has events.
            call: has the callback of a subscription called with the next event that waits for it.
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
            # One may come from inside this.
            for subscription in tuple(self._callbacks.values()):
                if (subscription.kinds is None or kind in subscription.kinds) and subscription.put(event):
                    call(subscription)

    def end(self) -> list[LogEntry]:
        """End the iterators.

        Returns:
            What to log: the events that those iterators have lost whose readers were not warned of it.
        """
        logs = []
        for iterator in tuple(self.iterators):
            if (entry := iterator.losses.entry()) is not None:
                logs.append(entry)
            iterator.put(None)
        self.iterators.clear()
        return logs


def client_properties(name: str) -> dict[str, Any]:
    """What a connection of our own says of itself."""
    version = str(import_module("qflow_client").__version__)
    # Otherwise brokers would show the page of the library below.
    return {"connection_name": name, "product": "qflow_client", "version": version, "information": _INFORMATION}


def connection_failed(url: str, why: str) -> ConnectionFailed:
    """One host could not be connected to."""
    return ConnectionFailed(f"{hide_password(url)}: {why}")


def no_answer(url: str, timeout: float) -> ConnectionFailed:
    """It took longer than it may."""
    return connection_failed(url, silent(timeout))


def silent(timeout: float) -> str:
    """Why there is no connection: it took longer than it may."""
    return f"no answer within {timeout:.3g} s"


def no_confirms(words: str) -> str:
    """Why there is no channel: the broker does not confirm."""
    return f"publisher confirms cannot be had: {words}; confirms=False does without"


def none_of(errors: Sequence[ConnectionFailed]) -> ConnectionFailed:
    """No host could be connected to."""
    if len(errors) == 1:
        return errors[0]
    return ConnectionFailed(f"none of {len(errors)} hosts could be connected to: {'; '.join(map(str, errors))}")


def lost(words: str) -> str:
    """Why a producer whose connection ended takes no more messages."""
    return f"the connection is lost: {words}"


def log_failed_try(name: str, url: str, why: str, pause: float) -> None:
    """Say that the connection is not back yet."""
    log(logging.WARNING, "%s: no connection to %s: %s; the next try is in %.3g s", name, url, why, pause)


def log_connected_again(name: str, url: str) -> None:
    """Say that the connection is back."""
    log(logging.WARNING, "%s: connected again to %s", name, url)


def disown(protocol: ProducerProtocol, storage: Storage | None, pid: int) -> ProducerProtocol:
    """What a producer has in a forked child instead of its state, which is the parent's; it was never open.

    The parent is about to write what is not written, so none of what is unsettled is safe to send again. Its state is
    only looked at: another thread may have been in the middle of changing it, with a lock held that nobody lets go of
    here.

    Args:
        protocol: the parent's.
        storage: likewise; ``None`` without an outbox.
        pid: of the parent.
    """
    for receipt in (*protocol.unsettled_receipts, *(() if storage is None else storage.spilled)):
        # Nobody in this process will hear of it.
        receipt._reply = (0, f"process {os.getpid()} is a child of process {pid}, which sent it")
        receipt._outcome = Outcome.UNKNOWN
    now = time.monotonic()
    own = ProducerProtocol(protocol.settings, id_prefix="", now=now, wall_offset=time.time() - now)
    reason = (
        f"it was made in process {pid}, and this is process {os.getpid()}: a connection cannot be shared with a child "
        "process; make a producer in the child"
    )
    own.close(reason, now)
    return own


class Deliveries:
    """Tells `on_delivery` of settled receipts, and knows of which it was not told yet.

    Args:
        on_delivery: the application's.
        told: called with how many receipts it was told of since the last call.
    """

    def __init__(self, on_delivery: Callable[[Receipt], object], told: Callable[[int], None]) -> None:
        self._on_delivery = on_delivery
        self._told = told
        # What it is to be told, and is not told all of yet, and how many of the first part it was told.
        self._handed: deque[list[Receipt]] = deque()
        self._told_of_first = 0

    def hand(self, receipts: list[Receipt]) -> None:
        """Take receipts, for which `tell` will be called in the same order."""
        self._handed.append(receipts)

    def tell(self, receipts: list[Receipt]) -> BaseException | None:
        """Tell of all of them.

        Returns:
            The first that was raised and is no `Exception`, such as by `sys.exit`; it is logged, too.
        """
        left_by = None
        told = 0
        for receipt in receipts:
            try:
                self._on_delivery(receipt)
            except BaseException as error:
                # The application's mistake, or its sys.exit, must not cost it the receipts that follow.
                log(logging.ERROR, "on_delivery failed on %r", receipt, error=error)
                if left_by is None and not isinstance(error, Exception):
                    left_by = error
            self._told_of_first += 1
            told += 1
            if told == _TELL_AT_ONCE:
                self._told(told)
                told = 0
        # In this order: what is told twice is not lost.
        self._told_of_first = 0
        self._handed.popleft()
        self._told(told)
        return left_by

    def undelivered(self, left: Sequence[Receipt]) -> list[Receipt]:
        """What close has to bring up: failures of which nobody was told in time.

        Args:
            left: what was unsettled when the connection was ended. It was told, but nobody may have been listening any
                more.
        """
        late = [receipt for receipts in tuple(self._handed) for receipt in receipts][self._told_of_first :]
        failed = {id(receipt): receipt for receipt in (*late, *left) if receipt._failed and not receipt._seen}
        return sorted(failed.values(), key=lambda receipt: receipt._number)


def unflushed(protocol: ProducerProtocol, outbox: Sized | None, timeout: float | None) -> ConfirmTimeout:
    """Not all was settled in time.

    Args:
        protocol: the producer's state.
        outbox: its outbox, if it has one.
        timeout: seconds that it might take.
    """
    unsettled = protocol.unsettled if outbox is None else len(outbox)
    return ConfirmTimeout(f"{unsettled} messages are not settled after {timeout:.3g} s", unsettled)


def good_bye_until(deadline: float) -> float:
    """Seconds that the end of the connection may take when there is time for it until a deadline."""
    return max(BRIEF, min(GOOD_BYE, deadline - time.monotonic()))


def check_many(messages: object, timeout: float | None) -> None:
    """Refuse what `send_many` cannot mean, before anything is sent."""
    if isinstance(messages, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"messages: {type(messages).__name__} is one message, which send() sends; give several")
    if timeout is not DEFAULT:
        check_timeout(timeout)


@contextmanager
def keeping(receipts: Sequence[Receipt]) -> Iterator[None]:
    """Add the receipts of the messages that were admitted to any exception, because the call does not return them then.

    Args:
        receipts: grows meanwhile.
    """
    try:
        yield
    except BaseException as error:
        # An exception may refuse attributes.
        with suppress(Exception):
            error.add_note(f"qflow_client: {len(receipts)} messages were admitted; .receipts has theirs")
            error.receipts = tuple(receipts)  # type: ignore[attr-defined]  # of any exception
        raise


def keep_admitted(error: Exception, receipts: list[Any]) -> None:
    """Keep the receipt of a message that was admitted although its `send` has failed (`NotDurable`).

    Args:
        error: what `send` has raised.
        receipts: those of the messages before it; gets that of the message.
    """
    receipt = getattr(error, "receipt", None)
    if receipt is not None:
        receipts.append(receipt)


def undelivered_of(failures: Sequence[Receipt], dropped: int, outbox: Sized | None) -> UndeliveredMessages | None:
    """What a producer that has ended did not deliver; ``None`` if there is nothing to tell.

    Args:
        failures: what nobody has been told of.
        dropped: how many more failures were dropped.
        outbox: its outbox, if it has one.
    """
    stored = 0 if outbox is None else len(outbox)
    if failures or dropped or stored:
        return UndeliveredMessages(failures, stored=stored, dropped=dropped)
    return None


def leave_word(name: str, error: BaseException, undelivered: UndeliveredMessages | None) -> None:
    """Say what was not delivered without taking an exception's place.

    Args:
        name: the producer's.
        error: the exception that goes its way.
        undelivered: what was lost by it, and nobody has been told of.
    """
    if undelivered is not None:
        # Nobody reads the notes of a SystemExit.
        log(logging.ERROR, "%s: left by %s: %s", name, type(error).__name__, undelivered)
        # An exception may refuse attributes.
        with suppress(Exception):
            error.add_note(f"qflow_client: {undelivered}")
            error.undelivered = undelivered  # type: ignore[attr-defined]


def log_forgotten(protocol: ProducerProtocol, outbox: Sized | None) -> None:
    """Log what was not delivered by a producer that was not closed when the process ended."""
    failures = protocol.reports.take_failures()
    if outbox is None:
        failures += protocol.unsettled_receipts
    undelivered = undelivered_of(failures, protocol.reports.take_dropped(), outbox)
    if undelivered is not None:
        words = "%s: the process ends, and the producer was not closed: %s"
        log(logging.ERROR, words, protocol.settings.name, undelivered)


# The fork and the end of the process.


class _Engine(Protocol):
    settings: ProducerSettings

    def forked(self) -> None:
        """In a child process: everything of this producer belongs to the parent."""

    def forgotten(self) -> None:
        """At the end of the process: log what is lost if the producer was not closed."""


_engines: WeakSet[_Engine] = WeakSet()


def watch_process(engine: _Engine) -> None:
    """Call an engine after a fork and at the end of the process, as long as it exists."""
    _engines.add(engine)


def _call_each(action: Callable[[_Engine], None], words: str) -> None:
    """Call an action with every engine, also if it fails for some of them."""
    for engine in tuple(_engines):
        try:
            action(engine)
        except BaseException as error:
            # An interrupt, too, must not cost the other producers their end.
            log(logging.ERROR, f"%s: {words}", engine.settings.name, error=error)


def _after_fork_in_child() -> None:
    _call_each(lambda engine: engine.forked(), "could not be disowned in a child process")


after_fork_in_child(_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    _call_each(lambda engine: engine.forgotten(), "could not be ended at the end of the process")
