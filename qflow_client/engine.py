"""The base class of the objects that run a producer's protocol, for threads and for asyncio.

The application refers to a producer, and the producer refers to its engine. The I/O thread or the event loop refers
only to the engine. So if the application drops a producer without closing it, the producer can be collected. Its engine
then ends by itself: it admits nothing more, delivers the admitted messages, and closes the connection (`abandon`).

`step` takes each step of the protocol. After each step `after` passes on the protocol's reports.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from qflow_client import telemetry
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.reporting import LogEntry
from qflow_client.errors import NestedCall, UndeliveredMessages
from qflow_client.flow import FlowManager
from qflow_client.guard import NOT_TAKEN, Guard, NotTaken, is_inside
from qflow_client.logs import log
from qflow_client.message import Message
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings, WhenFlowed
from qflow_client.skin import Deliveries, Listeners, disown, undelivered_of
from qflow_client.topology import Topology

if TYPE_CHECKING:
    from qflow_client.outbox.storage import Storage

__all__ = ["DROPPED", "BaseEngine"]

_T = TypeVar("_T")

_monotonic = time.monotonic

#: Why a dropped producer admits nothing.
DROPPED = "the producer was dropped without close()"


class BaseEngine(ABC):
    """An engine without its I/O and its ways to wait.

    Args:
        settings: the producer's.
        on_delivery: called with every settled receipt; ``None`` for no call.
        manager: the producer registers with it.
        topology: declared on each connection; ``None`` for nothing.
    """

    #: The state. It is changed only by steps.
    protocol: ProducerProtocol
    #: Held for each step.
    lock: Guard

    def __init__(
        self,
        settings: ProducerSettings,
        on_delivery: Callable[[Receipt], object] | None,
        manager: FlowManager,
        topology: Topology | None,
    ) -> None:
        self.settings = settings
        #: Declared on each connection; ``None`` for nothing.
        self.topology = topology
        self._manager = manager
        #: The outbox; ``None`` without one.
        self.storage: Storage | None = None
        #: ``None`` without `on_delivery`.
        self.deliveries = None if on_delivery is None else Deliveries(on_delivery, self._reported)
        self.listeners: Listeners[Any] = Listeners(settings.name, settings.max_flow_events)
        #: Measures and traces messages; set when the producer is connected.
        self.observer: telemetry.Observer | None = None
        #: Removes the producer from its manager.
        self.unregister: Callable[[], object] = bool
        #: Detaches the finalizer, so that the collection of the producer has no effect.
        self.detach: Callable[[], object] = bool
        #: Whether the first close has begun.
        self.ended = False
        #: Whether the application has dropped the producer without closing it.
        self.is_dropped = False
        #: Whether this process is a fork of the process that made the producer.
        self.is_copy = False
        self._pid = os.getpid()
        # Steps that could not be taken, in the order in which they were requested.
        self._put_off: deque[Callable[[ProducerProtocol], object]] = deque()

    # Steps.

    def step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        """Take a step of the protocol, and do what follows."""
        try:
            result = self.lock.take(lambda: step(self.protocol))
            self.kick()
            return result
        except BaseException:
            if not is_inside():
                self.recheck()
            raise

    def try_step(self, step: Callable[[ProducerProtocol], _T], deadline: float = 0.0) -> _T | NotTaken:
        """Same as `step`, for a call of the application, which may hold a lock that another step waits for.

        Args:
            step: the step.
            deadline: as for `Guard.try_take`.

        Returns:
            As `Guard.try_take`.
        """
        try:
            result = self.lock.try_take(lambda: step(self.protocol), deadline)
            if result is not NOT_TAKEN:
                self.kick()
            return result
        except BaseException:
            self.recheck()
            raise

    def ask(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Take a step without waiting for its result. If it cannot be taken now, it is taken later, in order."""
        if self._put_off or not self.may_step or self.try_step(step) is NOT_TAKEN:
            self.put_off(step)

    def put_off(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Take a step later, on the I/O thread or in the loop."""
        self._put_off.append(step)
        self.call_later(self._take_put_off)

    def _take_put_off(self) -> None:
        self.step(self.take_all_put_off)

    def take_all_put_off(self, protocol: ProducerProtocol) -> None:
        """In a step, take the steps that could not be taken."""
        while self._put_off:
            try:
                put_off = self._put_off.popleft()
            except IndexError:
                # Another thread has taken it: one of the last steps may be taken without the lock.
                return
            put_off(protocol)

    @property
    @abstractmethod
    def may_step(self) -> bool:
        """Whether this thread may take steps at all."""

    @abstractmethod
    def call_later(self, function: Callable[[], object]) -> None:
        """Call a function on the I/O thread or in the loop."""

    @abstractmethod
    def kick(self) -> None:
        """Have the output written, and the protocol's reports passed on."""

    @abstractmethod
    def recheck(self) -> None:
        """Have a step taken, because an exception may have come before the follow-up of a step."""

    @abstractmethod
    def close_later(self, deadline: float) -> None:
        """Begin to close, and return immediately. Messages that are not delivered in the end are logged.

        Args:
            deadline: the end of the wait for unsettled messages, in seconds.
        """

    @property
    @abstractmethod
    def last_failure(self) -> str:
        """Why the last try to connect failed; empty if no try has failed since the last connection."""

    @property
    @abstractmethod
    def is_in_callback(self) -> bool:
        """Whether `on_delivery` or a flow callback makes the call. Always False without `on_delivery`."""

    def admit(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        deadline: float = 0.0,
        *,
        spills: bool = False,
    ) -> Receipt | None:
        """Admit a message, or put it into the outbox, if that is possible now.

        Args:
            payload: the message.
            exchange: the exchange.
            routing_key: the routing key.
            deadline: as for `Guard.try_take`.
            spills: whether it may be put into the outbox while the producer is flowed, if the settings allow that. The
                message of a callback always may, because other senders may be waiting for the callback to return.

        Returns:
            Its receipt; with an outbox the message is not on disk yet. ``None`` if nothing has changed.

        Raises:
            NestedCall: the step could not be taken.
        """
        storage = self.storage
        receipt: Receipt | NotTaken | None
        if storage is None:
            receipt = self.try_step(
                lambda protocol: protocol.admission.send(payload, exchange, routing_key, _monotonic()), deadline
            )
        else:
            spills = spills and (self.settings.when_flowed is WhenFlowed.SPILL or self.is_in_callback)
            receipt = self.try_step(
                lambda _protocol: storage.store.send(payload, exchange, routing_key, _monotonic(), spills=spills),
                deadline,
            )
        if receipt is NOT_TAKEN:
            raise NestedCall("a send", payload, exchange=exchange, routing_key=routing_key)
        return receipt

    # After a step.

    @abstractmethod
    def after(self) -> None:
        """Pass on the protocol's reports."""

    def take_news(self) -> tuple[list[Receipt], list[Any], list[LogEntry]]:
        """In a step, take the protocol's reports: settled receipts, waiters to wake, and log entries."""
        protocol = self.protocol
        reports = protocol.reports
        settled = protocol.take_settled(_monotonic()) if reports.settled else []
        wake, reports.wake = reports.wake, []
        logs, reports.logs = reports.logs, []
        return settled, wake, logs

    def _reported(self, count: int) -> None:
        self.step(lambda protocol: protocol.reported(count, _monotonic()))

    def take_failures(self) -> tuple[list[Receipt], int]:
        """In a step, take the failed receipts that the application has not seen, and the number of dropped ones."""
        reports = self.protocol.reports
        return reports.take_failures(), reports.take_dropped()

    # Closing.

    def undelivered(self, failures: list[Receipt], dropped: int, left: Sequence[Receipt]) -> UndeliveredMessages | None:
        """Return the error for the messages that were not delivered, without those that the application has seen.

        Args:
            failures: failed receipts that it has not seen.
            dropped: how many more were dropped.
            left: the receipts that were unsettled before the channel was ended.
        """
        if self.deliveries is not None:
            failures += self.deliveries.undelivered(left)
        return undelivered_of(failures, dropped, self.storage)

    def abandon(self) -> None:
        """End without the producer, which is collected.

        The producer's finalizer calls this, on any thread, possibly inside a step.
        """
        if self.ended or self.is_copy:
            return
        self.ended = self.is_dropped = True
        self._end_later()
        # This comes last, because a filter may turn the warning into an error.
        warnings.warn(f"{self.settings.name}: {DROPPED}", ResourceWarning, stacklevel=2)

    @abstractmethod
    def _end_later(self) -> None:
        """Deliver the admitted messages, and end, without waiting for that."""

    def _log_dropped(self, undelivered: UndeliveredMessages | None) -> None:
        if undelivered is not None:
            log(logging.ERROR, "%s: %s: %s", self.settings.name, DROPPED, undelivered)

    def disown(self) -> None:
        """In a child process, leave everything of this producer to the parent."""
        self.is_copy = self.ended = True
        self.detach()
        self._manager.forked()
        self.protocol, self.storage = disown(self.protocol, self.storage, self._pid), None
