"""The base class of engines, which run the protocol of a producer for threads or for asyncio.

The application refers to a producer, and the producer refers to its engine. The I/O thread or the event loop refers
only to the engine. So if the application drops a producer without closing it, the producer can be collected. Its engine
then ends by itself (`abandon`). It admits no more messages, delivers the admitted messages, and closes the connection.

`step` executes each step of the protocol. After each step, `after` passes on the protocol's reports.
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

#: The reason why a dropped producer admits no messages.
DROPPED = "the producer was dropped without close()"


class BaseEngine(ABC):
    """The part of an engine that does no I/O and does not wait.

    Args:
        settings: settings of the producer.
        on_delivery: called with each settled receipt; ``None`` for no calls.
        manager: manager with which the producer registers.
        topology: objects to declare on each connection; ``None`` for none.
    """

    #: The state. Only steps change it.
    protocol: ProducerProtocol
    #: Locked during each step.
    lock: Guard

    def __init__(
        self,
        settings: ProducerSettings,
        on_delivery: Callable[[Receipt], object] | None,
        manager: FlowManager,
        topology: Topology | None,
    ) -> None:
        self.settings = settings
        #: Objects to declare on each connection; ``None`` for none.
        self.topology = topology
        self._manager = manager
        #: The outbox; ``None`` if there is none.
        self.storage: Storage | None = None
        #: Calls `on_delivery`; ``None`` if there is none.
        self.deliveries = None if on_delivery is None else Deliveries(on_delivery, self._reported)
        self.listeners: Listeners[Any] = Listeners(settings.name, settings.max_flow_events)
        #: Measures and traces messages. Set when the producer is connected.
        self.observer: telemetry.Observer | None = None
        #: Unregisters the producer from its manager.
        self.unregister: Callable[[], object] = bool
        #: Detaches the finalizer, so that the collection of the producer has no effect.
        self.detach: Callable[[], object] = bool
        #: Whether the first close has begun.
        self.ended = False
        #: Whether the application has dropped the producer without closing it.
        self.is_dropped = False
        #: Whether this process is a forked child of the process that created the producer.
        self.is_copy = False
        self._pid = os.getpid()
        # Postponed steps, in the order of their requests.
        self._put_off: deque[Callable[[ProducerProtocol], object]] = deque()

    # Steps.

    def step(self, step: Callable[[ProducerProtocol], _T]) -> _T:
        """Execute a step of the protocol, and handle the consequences."""
        try:
            result = self.lock.take(lambda: step(self.protocol))
            self.kick()
            return result
        except BaseException:
            if not is_inside():
                self.recheck()
            raise

    def try_step(self, step: Callable[[ProducerProtocol], _T], deadline: float = 0.0) -> _T | NotTaken:
        """Execute a step for a call of the application. The application may have a lock for which another step waits.

        Args:
            step: the step.
            deadline: as for `Guard.try_take`.

        Returns:
            The result of `Guard.try_take`.
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
        """Execute a step without waiting for its result. If this is not possible now, execute it later, in order."""
        if self._put_off or not self.may_step or self.try_step(step) is NOT_TAKEN:
            self.put_off(step)

    def put_off(self, step: Callable[[ProducerProtocol], object]) -> None:
        """Execute a step later, on the I/O thread or the loop."""
        self._put_off.append(step)
        self.call_later(self._take_put_off)

    def _take_put_off(self) -> None:
        self.step(self.take_all_put_off)

    def take_all_put_off(self, protocol: ProducerProtocol) -> None:
        """Execute the postponed steps. This method is itself a step."""
        while self._put_off:
            try:
                put_off = self._put_off.popleft()
            except IndexError:
                # Another thread has executed the step. The last steps may be executed without the lock.
                return
            put_off(protocol)

    @property
    @abstractmethod
    def may_step(self) -> bool:
        """Whether this thread may execute steps."""

    @abstractmethod
    def call_later(self, function: Callable[[], object]) -> None:
        """Call a function on the I/O thread or the loop."""

    @abstractmethod
    def kick(self) -> None:
        """Make the I/O thread or the loop write the output and pass on the protocol's reports."""

    @abstractmethod
    def recheck(self) -> None:
        """Request an empty step, because an exception may have prevented the end of an earlier step."""

    @abstractmethod
    def close_later(self, deadline: float) -> None:
        """Begin to close, and return immediately. Log the messages that are not delivered.

        Args:
            deadline: time until which to wait for unsettled messages in seconds.
        """

    @property
    @abstractmethod
    def last_failure(self) -> str:
        """The error of the last try to connect. Empty if no try has failed since the last connection."""

    @property
    @abstractmethod
    def is_in_callback(self) -> bool:
        """Whether this call comes from `on_delivery` or a flow callback. Always False without `on_delivery`."""

    def admit(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        deadline: float = 0.0,
        *,
        spills: bool = False,
    ) -> Receipt | None:
        """Admit a message, or put it into the outbox, if this is possible now.

        Args:
            deadline: as for `Guard.try_take`.
            spills: whether to put the message into the outbox while the producer is flowed, if the settings allow this.
                A message of a callback is always put there, because other senders may wait for the callback to return.

        Returns:
            The receipt. With an outbox the message may not be on disk yet. ``None`` if the message was not admitted.

        Raises:
            NestedCall: the step could not be executed.
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
        """Take the protocol's reports in a step: settled receipts, waiters to wake, and log entries."""
        protocol = self.protocol
        reports = protocol.reports
        settled = protocol.take_settled(_monotonic()) if reports.settled else []
        wake, reports.wake = reports.wake, []
        logs, reports.logs = reports.logs, []
        return settled, wake, logs

    def _reported(self, count: int) -> None:
        self.step(lambda protocol: protocol.reported(count, _monotonic()))

    def take_failures(self) -> tuple[list[Receipt], int]:
        """Take the failed receipts that the application has not seen, and the number of dropped ones, in a step."""
        reports = self.protocol.reports
        return reports.take_failures(), reports.take_dropped()

    # Closing.

    def undelivered(self, failures: list[Receipt], dropped: int, left: Sequence[Receipt]) -> UndeliveredMessages | None:
        """Return the error for undelivered messages whose receipts the application has not seen.

        Args:
            failures: failed receipts that the application has not seen.
            dropped: number of further failed receipts, which were dropped.
            left: receipts that were unsettled before the end of the channel.
        """
        if self.deliveries is not None:
            failures += self.deliveries.undelivered(left)
        return undelivered_of(failures, dropped, self.storage)

    def abandon(self) -> None:
        """End the engine of a collected producer.

        The producer's finalizer calls this method, on any thread and possibly inside a step.
        """
        if self.ended or self.is_copy:
            return
        self.ended = self.is_dropped = True
        self._end_later()
        # Warn last, because a filter may turn the warning into an error.
        warnings.warn(f"{self.settings.name}: {DROPPED}", ResourceWarning, stacklevel=2)

    @abstractmethod
    def _end_later(self) -> None:
        """Start to deliver the admitted messages and to end, and return immediately."""

    def _log_dropped(self, undelivered: UndeliveredMessages | None) -> None:
        if undelivered is not None:
            log(logging.ERROR, "%s: %s: %s", self.settings.name, DROPPED, undelivered)

    def disown(self) -> None:
        """Detach from all resources in a forked child, because they belong to the parent."""
        self.is_copy = self.ended = True
        self.detach()
        self._manager.forked()
        self.protocol, self.storage = disown(self.protocol, self.storage, self._pid), None
