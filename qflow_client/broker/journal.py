"""What is to be on disk, sans-I/O: noted as it happens, and taken in batches by who writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from qflow_client.broker.errors import ChannelException, ReplyCode
from qflow_client.fields import encode_table

if TYPE_CHECKING:
    from qflow_client.broker.entries import Completion
    from qflow_client.broker.exchange import Exchange
    from qflow_client.broker.message import StoredMessage
    from qflow_client.broker.queue import Queue

__all__ = ["Batch", "Change", "Found", "FoundMessage", "Journal", "Put", "Record"]


class Record:
    """What the journal knows of a message that is, or is to be, on disk.

    Args:
        number: of the message, above those of all that came before.
        completion: its confirm, which waits for the disk; ``None`` if there is none.
    """

    __slots__ = ("completion", "is_taken", "number", "queues")

    def __init__(self, number: int, completion: Completion | None = None) -> None:
        self.number = number
        self.completion = completion
        # Numbers of the durable queues that it is in.
        self.queues: list[int] = []
        # Whether a batch has it, or had.
        self.is_taken = False


class Put(NamedTuple):
    """A message to be written.

    Attributes:
        number: of the message.
        queues: numbers of the durable queues that it is in.
        at: seconds since 1970 when it came.
        names: the exchange and the routing key as short strings.
        header: the payload of its content header frame.
        body: the content.
    """

    number: int
    queues: list[int]
    at: float
    names: bytes
    header: bytes
    body: bytes


class Change(NamedTuple):
    """A change of the topology.

    Attributes:
        kind: ``queue``, ``exchange`` or ``binding``, and these with ``no_`` before them for what is gone.
        values: for the table of that kind, those that identify it first.
    """

    kind: str
    values: tuple[object, ...]


class FoundMessage(NamedTuple):
    """A message in a store.

    Attributes:
        number: of the message.
        queues: numbers of the queues that it is in.
        at: seconds since 1970 when it came.
        exchange: where it was published.
        routing_key: as published.
        header: the payload of its content header frame.
        body: the content.
    """

    number: int
    queues: list[int]
    at: float
    exchange: str
    routing_key: str
    header: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """What a store has when it is opened, but for the messages.

    Attributes:
        queues: number, name, whether it is deleted with its last consumer, arguments.
        exchanges: name, type, whether it is deleted with its last binding, whether it is internal, arguments.
        bindings: source, ``queue`` or ``exchange``, destination, routing key, arguments.
        last: the highest number of a message; 0 if there is none.
    """

    queues: list[tuple[int, str, bool, dict[str, Any]]]
    exchanges: list[tuple[str, str, bool, bool, dict[str, Any]]]
    bindings: list[tuple[str, str, str, str, dict[str, Any]]]
    last: int


@dataclass(slots=True)
class Batch:
    """What goes to disk in one transaction.

    Attributes:
        changes: of the topology, in their order.
        puts: messages that are new, in the order of their numbers.
        moves: queues of messages that are there and have left some of them, by number.
        removals: numbers of messages that are there and in no queue any more.
        completions: confirms that wait for it.
        callbacks: called when it is on disk.
    """

    changes: list[Change] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    moves: dict[int, list[int]] = field(default_factory=dict)
    removals: list[int] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its messages."""
        return sum(len(put.body) + len(put.header) for put in self.puts)


class Journal:
    """What changes of durable queues and exchanges, and of persistent messages in durable queues.

    A message that leaves its queues before it was taken for writing never goes to disk.

    Args:
        wall_clock: seconds since 1970.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._numbers = count(1)
        self._queue_numbers = count(1)
        self._changes: list[Change] = []
        # By number, in their order.
        self._puts: dict[int, tuple[StoredMessage, float]] = {}
        self._moves: dict[int, Record] = {}
        self._removals: list[int] = []
        self._callbacks: list[Callable[[], None]] = []
        # What is being written; None if nothing is.
        self._taken: Batch | None = None
        # Messages and body bytes that are to be written, or just are.
        self.backlog = 0
        self.backlog_size = 0
        # So far: messages on disk, and transactions.
        self.written = 0
        self.batches = 0

    def go_on_from(self, number: int, queue_number: int) -> None:
        """Give numbers above those that a store has already."""
        self._numbers = count(number + 1)
        self._queue_numbers = count(queue_number + 1)

    # Messages.

    def put(self, queue: Queue, message: StoredMessage, completion: Completion | None) -> None:
        """A persistent message is in a durable queue now.

        Args:
            queue: which has a number.
            message: whose confirm waits until it is on disk.
            completion: that confirm; ``None`` if there is none.
        """
        record = message.record
        if record is None:
            record = message.record = Record(next(self._numbers), completion)
            self._puts[record.number] = message, self._wall_clock()
            self.backlog += 1
            self.backlog_size += message.size
            if completion is not None:
                completion.holds += 1
        record.queues.append(queue.number)
        if record.is_taken:
            self._moves[record.number] = record

    def remove(self, queue: Queue, message: StoredMessage) -> None:
        """A message has left a durable queue; one that was not put changes nothing."""
        record = message.record
        if record is None:
            return
        record.queues.remove(queue.number)
        if record.is_taken:
            if record.queues:
                self._moves[record.number] = record
            else:
                self._moves.pop(record.number, None)
                self._removals.append(record.number)
            return
        if not record.queues:
            del self._puts[record.number]
            message.record = None
            self.backlog -= 1
            self.backlog_size -= message.size
            if record.completion is not None:
                record.completion.release()

    def recovered(self, message: StoredMessage, number: int, queues: list[int]) -> None:
        """A message that is on disk is back in its queues.

        Args:
            message: which.
            number: of the message.
            queues: their numbers.
        """
        record = message.record = Record(number)
        record.queues = queues
        record.is_taken = True

    # Topology.

    def number_of(self, name: str, auto_delete: bool, arguments: dict[str, object]) -> int:
        """Note a new durable queue.

        Returns:
            The number that it has in the store.

        Raises:
            ChannelException: 406; its arguments cannot be kept.
        """
        table = self._table(f"queue '{name}'", arguments)
        number = next(self._queue_numbers)
        self._changes.append(Change("queue", (number, name, auto_delete, table)))
        return number

    def queue_gone(self, queue: Queue) -> None:
        """A durable queue is deleted, with its bindings."""
        self._changes.append(Change("no_queue", (queue.name,)))

    def exchange(self, exchange: Exchange) -> None:
        """There is a new durable exchange.

        Raises:
            ChannelException: 406; its arguments cannot be kept.
        """
        table = self._table(f"exchange '{exchange.name}'", exchange.arguments)
        values = exchange.name, exchange.type.value, exchange.auto_delete, exchange.internal, table
        self._changes.append(Change("exchange", values))

    def exchange_gone(self, exchange: Exchange) -> None:
        """A durable exchange is deleted, with its bindings."""
        self._changes.append(Change("no_exchange", (exchange.name,)))

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

        Args:
            source: the exchange.
            kind: ``queue`` or ``exchange``: what the destination is.
            destination: its name.
            routing_key: the binding key.
            arguments: of the binding.
            gone: whether it is there no longer.

        Raises:
            ChannelException: 406; its arguments cannot be kept.
        """
        table = self._table(f"binding of '{destination}' to '{source}'", arguments)
        values = source, kind, destination, routing_key, table
        self._changes.append(Change("no_binding" if gone else "binding", values))

    @staticmethod
    def _table(what: str, arguments: dict[str, object]) -> bytes:
        try:
            return encode_table(arguments, "arguments")
        except (TypeError, ValueError) as error:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"{what} cannot be durable: {error}; leave that out"
            ) from None

    @property
    def mark(self) -> int:
        """What `take_back` goes back to."""
        return len(self._changes)

    def take_back(self, mark: int) -> None:
        """Forget the changes of the topology since a mark of this turn."""
        del self._changes[mark:]

    # To disk.

    @property
    def is_dirty(self) -> bool:
        """Whether there is anything to be taken."""
        return bool(self._puts or self._removals or self._moves or self._changes or self._callbacks)

    @property
    def is_idle(self) -> bool:
        """Whether everything is on disk."""
        return self._taken is None and not self.is_dirty

    def when_durable(self, callback: Callable[[], None], *, topology_only: bool = False) -> bool:
        """Have something called when all that was noted so far is on disk.

        Args:
            callback: what.
            topology_only: whether only changes of the topology are waited for.

        Returns:
            Whether it will be; if not, there is nothing to wait for.
        """
        taken = self._taken
        if self._changes or (not topology_only and (self._puts or self._removals or self._moves)):
            self._callbacks.append(callback)
        elif taken is not None and (taken.changes or not topology_only):
            taken.callbacks.append(callback)
        else:
            return False
        return True

    def take(self) -> Batch:
        """What is to be written now; nothing else is taken until `written_down` or `put_back`."""
        assert self._taken is None
        taken = self._taken = Batch(changes=self._changes, removals=self._removals, callbacks=self._callbacks)
        self._changes, self._removals, self._callbacks = [], [], []
        for number, (message, at) in self._puts.items():
            record = message.record
            assert record is not None
            record.is_taken = True
            if record.completion is not None:
                taken.completions.append(record.completion)
                record.completion = None
            taken.puts.append(Put(number, record.queues.copy(), at, message.target.names, message.header, message.body))
        taken.moves = {number: record.queues.copy() for number, record in self._moves.items()}
        self._puts = {}
        self._moves = {}
        return taken

    def written_down(self) -> None:
        """What was taken is on disk."""
        taken, self._taken = self._taken, None
        assert taken is not None
        self.batches += 1
        self.written += len(taken.puts)
        self.backlog -= len(taken.puts)
        self.backlog_size -= sum(len(put.body) for put in taken.puts)
        for completion in taken.completions:
            completion.release()
        for callback in taken.callbacks:
            callback()
