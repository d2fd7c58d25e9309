"""The interfaces of the core for plug-ins: a message store, a flow log, rate limits, and servers of other protocols.

The core calls these interfaces and does not import their implementations. `qflow_client.broker.core.overflow` has the
interface of overflow policies, and `qflow_client.broker.core.limits` the interface of the rules for queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from qflow_client.broker.core.entries import (
    BodyPager,
    Completion,
    DroppableEntries,
    QueueView,
    StoredMessage,
)
from qflow_client.flow import FlowSource

__all__ = ["Disk", "FlowObserver", "Front", "Journal", "PublishMeter", "Timed", "TopologyJournal"]


class Timed(Protocol):
    """An object that `Timers` calls at certain times."""

    def tick(self, now: float) -> None:
        """Do all work that is due at the time `now`."""


class TopologyJournal(Protocol):
    """Records changes of the topology (durable queues, exchanges and bindings) for the disk."""

    def number_of(self, name: str, auto_delete: bool, arguments: dict[str, object]) -> int:
        """Record a new durable queue, and return its new number.

        Raises:
            ChannelException: 406 if the arguments cannot be stored.
        """

    def queue_gone(self, name: str) -> None:
        """Record that a durable queue was deleted, with its bindings."""

    def messages_leave(self, number: int) -> None:
        """Record that messages are still leaving the deleted queue with this number."""

    def exchange(self, name: str, kind: str, auto_delete: bool, internal: bool, arguments: dict[str, object]) -> None:
        """Record a new durable exchange.

        Raises:
            ChannelException: 406 if the arguments cannot be stored.
        """

    def exchange_gone(self, name: str) -> None:
        """Record that a durable exchange was deleted, with its bindings."""

    def binding(
        self,
        source: str,
        kind: str,
        destination: str,
        routing_key: str,
        arguments: dict[str, object],
        *,
        gone: bool = False,
    ) -> None:
        """Record that a binding between two durable objects was added or removed.

        Raises:
            ChannelException: 406 if the arguments cannot be stored.
        """


class Journal(Protocol):
    """Counts the bytes of messages in memory, and with a store collects the changes for the disk."""

    #: Whether records are written to disk. If not, the journal only counts memory.
    has_store: bool
    #: Maximum bytes of messages in memory (A1); 0 for no limit.
    limit: int
    #: Body bytes that wait to be written to disk.
    backlog_size: int
    #: Maximum of `backlog_size` in bytes. Above this maximum, publishing connections are not read.
    max_backlog: int
    #: Bytes of incoming bodies and open transactions.
    unfinished: int
    #: Bytes of messages that wait for room in a queue.
    waiting: int
    #: Bytes of output that slow clients have not read.
    buffered: int

    @property
    def topology(self) -> TopologyJournal:
        """Records changes of the topology for the disk."""

    def enter(self, number: int, message: StoredMessage, completion: Completion | None) -> None:
        """Record that a message has entered a queue.

        Args:
            number: number of the queue in the store; 0 if the queue does not survive a restart.
            message: the message. If the message and the queue survive a restart, the confirm waits for the disk.
            completion: the confirm of the message; ``None`` if the message has no confirm.
        """

    def leave(self, number: int, message: StoredMessage) -> None:
        """Record that a message has left a queue, or undo `hold`.

        Args:
            number: number of the queue in the store; 0 if the queue does not survive a restart, and 0 to undo `hold`.
        """

    def hold(self, message: StoredMessage) -> None:
        """Keep a message until `leave` is called with number 0, even if the message leaves its queues."""

    def want(self, messages: Iterable[StoredMessage], reader: Callable[[], bool]) -> None:
        """Read bodies of messages from the disk.

        Args:
            messages: the messages. Messages whose body is in memory, damaged on disk, or being read are skipped.
            reader: called after each read of bodies, also after a failed read, until `reader` returns True.
        """

    def when_read(self, message: StoredMessage, callback: Callable[[], None]) -> None:
        """Call a function when the body of a message is in memory, or is known to be damaged on disk."""

    def make_pager(self) -> BodyPager:
        """Create the object that decides which bodies of a queue with the policy `flow_to_disk` stay in memory."""

    def make_droppable(self) -> DroppableEntries:
        """Create a container for the entries of a queue that may be dropped to free memory."""

    def divide(self) -> None:
        """Record the end of an operation, such as a publish. A batch of records never ends within an operation."""

    def when_durable(self, callback: Callable[[], None], *, topology_only: bool = False) -> bool:
        """Call a function when all records so far, or with `topology_only` those of the topology, are on disk.

        If these records are on disk already, return False and do not call the function.
        """

    @property
    def held(self) -> int:
        """Bytes in memory, including `unfinished`, `waiting` and `buffered`, except bodies that are being evicted."""

    def window(self, queues: Iterable[QueueView]) -> int:
        """Return the maximum body bytes that each queue may read from the disk before they are delivered (A3)."""

    def relieve(self, queues: Iterable[QueueView]) -> None:
        """Evict bodies or drop messages if too many bytes are in memory (A1 A2 A3)."""


class FlowObserver(Protocol):
    """Observes messages, flow states, blocked (flowed) channels and withheld confirms."""

    #: Seconds between two calls of `tick`.
    period: float

    def tick(self, now: float) -> None:
        """Called at the end of each period, and when the broker stops."""

    def arrived(self, queue: QueueView, source: FlowSource | None, size: int) -> None:
        """Record that a message has entered a queue. `source` is the publishing channel; ``None`` if there is none."""

    def left(self, queue: QueueView, size: int) -> None:
        """Record that a message has left a queue."""

    def turned_on(self, queue: QueueView) -> None:
        """Record that the queue has turned ON: a flow state is ON, and no flow state was ON before."""

    def turned_off(self, queue: QueueView) -> None:
        """Record that the queue has turned OFF: no flow state is ON any more. The queue then withholds no confirms."""

    def keeps_confirms(self, queue: QueueView, source: FlowSource | None) -> None:
        """Record that the queue withholds the confirm of a message (C5)."""

    def lets_confirms_go(self, queue: QueueView) -> None:
        """Record that the queue withholds no confirms any more."""

    def deleted(self, queue: QueueView) -> None:
        """Record that the queue was deleted, with its messages. No other method is called for this queue any more."""

    def blocked(self, source: FlowSource, queue: str, reason: str) -> None:
        """Record that a queue, or the controller `reason` if `queue` is empty, blocks a channel."""

    def unblocked(self, source: FlowSource, queue: str, reason: str) -> None:
        """Record that a queue, or the controller `reason` if `queue` is empty, unblocks a channel."""

    def gone(self, source: FlowSource) -> None:
        """Record that a channel has ended."""


class PublishMeter(Protocol):
    """Counts the published messages of clients, and can block (flow) the clients' channels.

    To install a meter, set `VirtualHost.meter`. Call `Controls.limit_rates` each time the truth value of the meter
    changes. Messages that the embedding program publishes with `VirtualHost.publish` are not counted.
    """

    def __bool__(self) -> bool:
        """Whether `take` has to be called for published messages."""

    def take(self, source: FlowSource, size: int, exchange: str, queues: Iterable[str], user: str, now: float) -> Any:
        """Count a published message.

        Args:
            source: the publishing channel.
            size: body bytes.
            exchange: name of the exchange.
            queues: names of the destination queues.
            user: user of the connection.
            now: monotonic seconds.
        """


class Disk(Protocol):
    """Writes the records of the journal, on its own threads."""

    async def start(self) -> None:
        """Open the store, and restore its contents."""

    async def watch(self) -> None:
        """Start to watch the free space of the disk. Called after the broker has started to listen."""

    async def stop(self) -> None:
        """Write the remaining records, and close the store."""

    def flush(self) -> None:
        """Start to write the pending records, without waiting."""

    def when_durable(self, *, topology_only: bool = False) -> Future[None]:
        """Return a future that is done when all records so far are on disk, see `Journal.when_durable`."""

    def read_now(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Read the bodies of the messages with these numbers, on the calling thread. Damaged bodies are omitted."""


class Front(Protocol):
    """Serves a broker to clients of another protocol, on the broker's loop."""

    async def start(self) -> None:
        """Start to listen."""

    async def stop(self) -> None:
        """Stop listening, and end the requests that are running."""
