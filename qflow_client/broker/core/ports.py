"""The sockets of the core: what a message store, a flow log and a limit of rates plug into.

The core calls these and knows nothing behind them. `Journal` is informed of every message in a queue and of the
topology, and is asked for bodies that are not in memory; `FlowObserver` sees queues turn ON and OFF and channels being
flowed (blocked); `PublishMeter` sees every publish while it is truthy. Overflow policies plug into
`qflow_client.broker.core.overflow`, and the rules for queues into `qflow_client.broker.core.limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from qflow_client.broker.core.entries import (
    BodyPager,
    Completion,
    DroppableEntries,
    QueueView,
    StoredMessage,
)
from qflow_client.flow import FlowSource

__all__ = ["FlowObserver", "Journal", "PublishMeter", "Timed", "TopologyJournal"]


class Timed(Protocol):
    """Something that is due at a time."""

    def tick(self, now: float) -> None:
        """Do what was to be done by now."""


class TopologyJournal(Protocol):
    """Notes what is to be on disk of the topology."""

    def number_of(self, name: str, auto_delete: bool, arguments: dict[str, object]) -> int:
        """Note a new durable queue, and give it a number.

        Raises:
            ChannelException: 406; its arguments cannot be kept.
        """

    def queue_gone(self, name: str) -> None:
        """A durable queue is deleted, with its bindings."""

    def exchange(self, name: str, kind: str, auto_delete: bool, internal: bool, arguments: dict[str, object]) -> None:
        """There is a new durable exchange.

        Raises:
            ChannelException: 406; its arguments cannot be kept.
        """

    def exchange_gone(self, name: str) -> None:
        """A durable exchange is deleted, with its bindings."""

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
        """There is a binding of two durable ends, or no longer.

        Raises:
            ChannelException: 406; its arguments cannot be kept.
        """


class Journal(Protocol):
    """Counts the messages in memory, and knows which messages and which topology are to be on disk."""

    #: Whether anything is written; if not, it only counts what is in memory.
    has_store: bool
    #: Bytes of messages in memory (A1); 0 for any number.
    limit: int
    #: Body bytes that are to be written, or just are; above the second, publishers are not read.
    backlog_size: int
    max_backlog: int
    #: Bytes of what is in no queue yet: bodies that are coming in and open transactions; and publishes that wait.
    unfinished: int
    waiting: int
    #: Bytes that clients have not read, of those that are slow.
    buffered: int

    @property
    def topology(self) -> TopologyJournal:
        """Notes what is to be on disk of the topology."""

    # Messages.

    def enter(self, number: int, message: StoredMessage, completion: Completion | None) -> None:
        """A message is in a queue now.

        Args:
            number: of the queue in the store; 0 if the queue does not survive the broker.
            message: if both are to survive, its confirm waits until it is on disk.
            completion: that confirm; ``None`` if there is none.
        """

    def leave(self, number: int, message: StoredMessage) -> None:
        """A message has left a queue, or `hold` is taken back.

        Args:
            number: of the queue in the store; 0 if it does not survive the broker, or for a hold.
            message: which.
        """

    def hold(self, message: StoredMessage) -> None:
        """Keep a message that is in a queue, until `leave` is called for that."""

    def want(self, messages: Iterable[StoredMessage], reader: Callable[[], bool]) -> None:
        """Read bodies.

        Args:
            messages: which; those that are in memory, or are being read, are passed over.
            reader: called whenever some have been read, until it returns True.
        """

    def when_read(self, message: StoredMessage, callback: Callable[[], None]) -> None:
        """Call something when the body of a message is in memory."""

    def make_pager(self) -> BodyPager:
        """A pager for a queue that flows to disk."""

    def make_droppable(self) -> DroppableEntries:
        """A container for the entries of a queue that may be dropped for memory."""

    # Time and memory.

    def divide(self) -> None:
        """An operation is over: all that was noted may go to disk without what comes."""

    def when_durable(self, callback: Callable[[], None], *, topology_only: bool = False) -> bool:
        """Call something when all that was noted so far is on disk.

        Returns:
            Whether it will be called; if not, there is nothing to wait for.
        """

    @property
    def held(self) -> int:
        """Bytes in memory but for what is about to go."""

    def window(self, queues: Iterable[QueueView]) -> int:
        """Bytes of bodies that each queue may read ahead (A3)."""

    def relieve(self, queues: Iterable[QueueView]) -> None:
        """Keep the messages in memory within the limit (A1 A2 A3)."""


class FlowObserver(Protocol):
    """Sees what queues and channels do for flow control."""

    #: Seconds between two calls of `tick`.
    period: float

    def tick(self, now: float) -> None:
        """A period is over."""

    def arrived(self, queue: QueueView, source: FlowSource | None, size: int) -> None:
        """A message has entered a queue."""

    def left(self, queue: QueueView, size: int) -> None:
        """A message has left a queue."""

    def turned_on(self, queue: QueueView) -> None:
        """The queue's flow state is ON."""

    def turned_off(self, queue: QueueView) -> None:
        """The queue's flow state is OFF."""

    def keeps_confirms(self, queue: QueueView, source: FlowSource | None) -> None:
        """The queue keeps back the confirm of a message (C5)."""

    def lets_confirms_go(self, queue: QueueView) -> None:
        """The queue keeps no confirms back any more."""

    def deleted(self, queue: QueueView) -> None:
        """The queue is deleted."""

    def blocked(self, source: FlowSource, queue: str, reason: str) -> None:
        """A channel is flowed, by one more mark of a queue, or by something else."""

    def unblocked(self, source: FlowSource, queue: str, reason: str) -> None:
        """A channel is let go, by one mark of a queue, or by something else."""

    def gone(self, source: FlowSource) -> None:
        """A publishing channel has ended."""


class PublishMeter(Protocol):
    """Counts publishes, and may flow their channels."""

    def __bool__(self) -> bool:
        """Whether it is to be called at all."""

    def take(self, source: FlowSource, size: int, exchange: str, queues: Iterable[str], user: str, now: float) -> Any:
        """A message was published.

        Args:
            source: the channel.
            size: body bytes.
            exchange: where it was published.
            queues: where it came to.
            user: the connection's user.
            now: seconds of the clock.
        """
