"""The journal, sans-I/O: an account of all messages in memory, and what of them is to be on disk.

The journal is informed of each message that enters and leaves a queue. A persistent message in a durable queue gets a
number and waits for the next batch; if it leaves before a batch takes it, it never goes to disk. The keeper takes one
batch at a time and reports when it is written; then confirms and answers that waited for it are released. Each batch
holds what happened after the one before, so a store is always at a moment that was.

Bodies of queues that flow to disk are evicted when they are written, and read back when they are wanted. `Journal.held`
is what memory holds, bodies that are about to go excepted, and with what is in no queue yet, or is not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, NamedTuple

from qflow_client.broker.core.entries import Completion, QueueView, Record, StoredMessage
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.snapshots import MemorySnapshot
from qflow_client.broker.store.paging import Droppable, Pager, bring_back, relieve
from qflow_client.broker.store.topologylog import Change, TopologyLog

__all__ = ["Batch", "Found", "FoundMessage", "Journal", "Put"]

_log = get_logger(__name__)


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
        messages: that the puts are of.
        callbacks: called when it is on disk.
    """

    changes: list[Change] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    moves: dict[int, list[int]] = field(default_factory=dict)
    removals: list[int] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    messages: list[StoredMessage] = field(default_factory=list)
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its messages."""
        return sum(len(put.body) + len(put.header) for put in self.puts)


class Journal:
    """What changes of durable queues and exchanges, which messages are on disk, and what all of them take in memory.

    A message that leaves its queues before it was taken for writing never goes to disk. What comes to much is divided
    into batches as it is noted, between two operations, so that each batch is what happened after the one before.

    Args:
        wall_clock: seconds since 1970.
        has_store: whether anybody writes; if not, it only counts what is in memory.
        limit: bytes of messages in memory (A1); 0 for any number.
    """

    #: Bytes that a message takes in memory beside its body, about, with a header of as many bytes as the second says.
    OVERHEAD = 512
    SMALL_HEADER = 128
    #: Bytes that it takes in each queue but the first.
    ENTRY = 160
    #: Bytes of bodies that may wait to be written before publishers are no longer read.
    MAX_BACKLOG = 8 << 20
    #: Bytes of bodies that a queue reads ahead at most.
    MAX_WINDOW = 1 << 20
    #: Bytes of messages, with what they take beside their bodies, at which a batch is full.
    MAX_BATCH = 16 << 20

    def __init__(self, wall_clock: Callable[[], float], *, has_store: bool = True, limit: int = 0) -> None:
        self._wall_clock = wall_clock
        self.has_store = has_store
        self.limit = limit
        # Of all messages, bodies and what else they take; and of this, what is about to go.
        self.memory = 0
        self.peak_memory = 0
        self.evicting = 0
        # Of what is in no queue yet: bodies that are coming in and open transactions; and publishes that wait.
        self.unfinished = 0
        self.waiting = 0
        # What clients have not read, of those that are slow; and answers of the HTTP API.
        self.buffered = 0
        self.answers = 0
        # Above it bodies are evicted, so that there is room for what comes and what is read ahead.
        self.evict_above = limit * 3 // 4
        self.max_backlog = min(self.MAX_BACKLOG, limit // 8) if limit else self.MAX_BACKLOG
        # Messages whose bodies are to be read, those that are just being read, and what waits for them.
        self._wanted: dict[int, StoredMessage] = {}
        self._reading: dict[int, StoredMessage] = {}
        self._readers: list[Callable[[], bool]] = []
        # So far: bodies that were evicted, and read again.
        self.evicted = 0
        self.loaded = 0
        self._numbers = count(1)
        # What happened to queues, exchanges and bindings.
        self.topology = TopologyLog()
        # By number, in their order.
        self._puts: dict[int, tuple[StoredMessage, float]] = {}
        self._moves: dict[int, Record] = {}
        self._removals: list[int] = []
        self._callbacks: list[Callable[[], None]] = []
        # What the puts are together, as of `MAX_BATCH`; and full batches, which go to disk before all of these.
        self._pending = 0
        self._full: deque[Batch] = deque()
        # What is being written; None if nothing is.
        self._taken: Batch | None = None
        # Messages and body bytes that are to be written, or just are.
        self.backlog = 0
        self.backlog_size = 0
        # Called with a message whose body is damaged on disk; how many rows of the store are damaged.
        self.on_lost: Callable[[StoredMessage], None] | None = None
        self.damaged = 0
        # So far: messages on disk, and transactions.
        self.written = 0
        self.batches = 0

    def go_on_from(self, number: int, queue_number: int) -> None:
        """Give numbers above those that a store has already."""
        self._numbers = count(number + 1)
        self.topology.go_on_from(queue_number)

    # Messages.

    def enter(self, number: int, message: StoredMessage, completion: Completion | None) -> None:
        """A message is in a queue now.

        Args:
            number: of the queue in the store; 0 if the queue does not survive the broker.
            message: if both are to survive, its confirm waits until it is on disk.
            completion: that confirm; ``None`` if there is none.
        """
        record = message.record
        if record is None:
            record = message.record = Record()
            self._grow(self._cost_of(message))
        else:
            self.memory += self.ENTRY
        record.holders += 1
        if number and message.is_persistent:
            record.queues.append(number)
            if not record.number:
                self._put(message, record)
            if record.is_taken:
                self._moves[record.number] = record
            elif completion is not None and record.completion is None:
                record.completion = completion
                completion.holds += 1

    def _put(self, message: StoredMessage, record: Record) -> None:
        record.number = next(self._numbers)
        self._puts[record.number] = message, self._wall_clock()
        self.backlog += 1
        self.backlog_size += message.size
        self._pending += message.size + self.OVERHEAD

    def _cost_of(self, message: StoredMessage) -> int:
        """Bytes that a message takes in memory now."""
        large = len(message.header) - self.SMALL_HEADER
        return self.OVERHEAD + (large if large > 0 else 0) + (0 if message.body is None else message.size)

    def _grow(self, size: int) -> None:
        self.memory += size
        if self.memory > self.peak_memory:
            self.peak_memory = self.memory

    def hold(self, message: StoredMessage) -> None:
        """Somebody else needs a message that is in a queue, until `leave` is called without one."""
        assert message.record is not None
        message.record.holders += 1
        message.record.is_spooled = True
        self.memory += self.ENTRY

    def leave(self, number: int, message: StoredMessage) -> None:
        """A message has left the queue of that number in the store; 0 for any other, and to take `hold` back."""
        record = message.record
        assert record is not None
        record.holders -= 1
        if not record.holders:
            self.memory -= self._cost_of(message)
            self._no_longer_evicting(message, record)
            message.record = None
        else:
            self.memory -= self.ENTRY
            if record.aside:
                # Those that have it still may all give it.
                bring_back(message)
        if not record.number:
            return
        is_moved = number in record.queues
        if is_moved:
            record.queues.remove(number)
        if record.queues or (record.is_spooled and record.holders):
            if is_moved and record.is_taken:
                self._moves[record.number] = record
        elif record.is_taken:
            self._moves.pop(record.number, None)
            self._removals.append(record.number)
            record.number = 0
            # If a queue that does not survive has it still, it is on disk no more.
            record.is_taken = record.is_written = False
        else:
            del self._puts[record.number]
            record.number = 0
            self.backlog -= 1
            self.backlog_size -= message.size
            self._pending -= message.size + self.OVERHEAD
            if record.completion is not None:
                record.completion.release()
                record.completion = None

    # Bodies that are on disk and not in memory (A2).

    def make_pager(self) -> Pager:
        """A pager for a queue that flows to disk."""
        return Pager(self.evict)

    def make_droppable(self) -> Droppable:
        """A container for the entries of a queue that may be dropped for memory (A1)."""
        return Droppable()

    def window(self, queues: Iterable[QueueView]) -> int:
        """Bytes of bodies that each queue may read ahead: an eighth of the limit, in equal parts (A3)."""
        if not self.limit:
            return self.MAX_WINDOW
        readers = sum(queue.pager is not None and bool(queue.dispatcher.consumers) for queue in queues)
        return min(self.MAX_WINDOW, self.limit // 8 // max(1, readers))

    def relieve(self, queues: Iterable[QueueView]) -> None:
        """Keep the messages in memory within the limit, if there is one."""
        self.peak_memory = max(self.peak_memory, self._total)
        if self.limit:
            relieve(self, tuple(queues))

    def when_read(self, message: StoredMessage, callback: Callable[[], None]) -> None:
        """Call something when the body of a message, which must have a record, is in memory."""

        def look() -> bool:
            if message.body is None and not message.is_lost:
                self.want((message,), look)
            else:
                callback()
            return True

        look()

    def evict(self, message: StoredMessage) -> None:
        """Let memory be rid of a message's body, as soon as it is on disk."""
        record = message.record
        assert record is not None
        if message.body is None or record.is_evicting or not message.size:
            return
        record.is_spooled = True
        if record.is_written:
            self._drop_body(message)
            return
        record.is_evicting = True
        self.evicting += message.size
        if not record.number:
            self._put(message, record)

    def _drop_body(self, message: StoredMessage) -> None:
        message.body = None
        self.memory -= message.size
        self.evicted += 1

    def _no_longer_evicting(self, message: StoredMessage, record: Record) -> None:
        if record.is_evicting:
            record.is_evicting = False
            self.evicting -= message.size

    @property
    def _total(self) -> int:
        return self.memory + self.unfinished + self.waiting + self.buffered + self.answers

    @property
    def held(self) -> int:
        """Bytes in memory but for what is about to go."""
        return self._total - self.evicting

    def want(self, messages: Iterable[StoredMessage], reader: Callable[[], bool]) -> None:
        """Have bodies read.

        Args:
            messages: which; those that are in memory, or are being read, are passed over.
            reader: called whenever some have been read, until it says that it waits no more.
        """
        for message in messages:
            record = message.record
            if message.body is not None or record is None or record.is_lost:
                continue
            if record.number not in self._reading:
                self._wanted[record.number] = message
        self._readers.append(reader)

    @property
    def wants(self) -> bool:
        """Whether there are bodies to be read, and none are being read."""
        return bool(self._wanted) and not self._reading

    def take_wanted(self) -> list[int]:
        """The numbers of the messages whose bodies are to be read now; `came` tells them."""
        wanted, self._wanted = self._wanted, {}
        for number, message in wanted.items():
            if message.record is not None and message.record.number == number:
                self._reading[number] = message
        return list(self._reading)

    def came(self, bodies: Mapping[int, bytes | None]) -> None:
        """Bodies have been read.

        Args:
            bodies: by number of their messages; ``None`` for one that is damaged. A message that has left its queues
                meanwhile may be missing.
        """
        reading, self._reading = self._reading, {}
        lost = []
        for number, message in reading.items():
            body = bodies.get(number)
            record = message.record
            if body is not None and message.body is None and record is not None:
                message.body = body
                self.loaded += 1
                self._grow(message.size)
                bring_back(message)
            elif number in bodies and message.body is None and record is not None:
                record.is_lost = True
                lost.append(message)
        self.damaged += len(lost)
        for message in lost:
            if self.on_lost is not None:
                self.on_lost(message)
        readers, self._readers = self._readers, []
        for reader in readers:
            try:
                waits_no_more = reader()
            except Exception:
                # An error in one queue must not stop the others.
                _log.exception("a callback failed after bodies were read")
            else:
                if not waits_no_more:
                    self._readers.append(reader)

    def recovered(self, message: StoredMessage, number: int, queues: list[int]) -> None:
        """A message that is on disk is back in its queues.

        Args:
            message: which.
            number: of the message.
            queues: their numbers.
        """
        record = message.record = Record()
        record.number = number
        record.queues = queues
        record.holders = len(queues)
        record.is_taken = record.is_written = True
        self._grow(self._cost_of(message) + self.ENTRY * (len(queues) - 1))

    # To disk.

    def snapshot(self) -> MemorySnapshot:
        """A picture of memory and store."""
        return MemorySnapshot(
            limit=self.limit,
            bytes=self._total,
            peak=self.peak_memory,
            evicted=self.evicted,
            loaded=self.loaded,
            backlog=self.backlog,
            backlog_bytes=self.backlog_size,
            written=self.written,
            commits=self.batches,
            damaged=self.damaged,
        )

    @property
    def is_dirty(self) -> bool:
        """Whether there is anything to be taken."""
        return bool(
            self._full or self._puts or self._removals or self._moves or self.topology.changes or self._callbacks
        )

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
        if self.topology.changes or (not topology_only and (self._puts or self._removals or self._moves)):
            self._callbacks.append(callback)
            return True
        for batch in (*reversed(self._full), self._taken):
            if batch is not None and (batch.changes or not topology_only):
                batch.callbacks.append(callback)
                return True
        return False

    def divide(self) -> None:
        """An operation is over: all that was noted may go to disk without what comes, and does if that is much."""
        if self._pending >= self.MAX_BATCH:
            self._full.append(self._collect())

    def take(self) -> Batch:
        """What is to be written now; nothing else is taken until `written_down`."""
        assert self._taken is None
        self._taken = self._full.popleft() if self._full else self._collect()
        return self._taken

    def _collect(self) -> Batch:
        """All that was noted and is in no batch."""
        taken = Batch(changes=self.topology.take(), removals=self._removals, callbacks=self._callbacks)
        self._removals, self._callbacks = [], []
        for number, (message, at) in self._puts.items():
            record = message.record
            assert record is not None
            record.is_taken = True
            assert message.body is not None
            taken.messages.append(message)
            if record.completion is not None:
                taken.completions.append(record.completion)
                record.completion = None
            taken.puts.append(Put(number, record.queues.copy(), at, message.target.names, message.header, message.body))
        taken.moves = {number: record.queues.copy() for number, record in self._moves.items()}
        self._puts = {}
        self._moves = {}
        self._pending = 0
        return taken

    def written_down(self) -> None:
        """What was taken is on disk."""
        taken, self._taken = self._taken, None
        assert taken is not None
        self.batches += 1
        self.written += len(taken.puts)
        self.backlog -= len(taken.puts)
        self.backlog_size -= sum(len(put.body) for put in taken.puts)
        for message, put in zip(taken.messages, taken.puts, strict=True):
            record = message.record
            if record is None or record.number != put.number:
                continue
            record.is_written = True
            if record.is_evicting:
                self._no_longer_evicting(message, record)
                self._drop_body(message)
        for told in chain((completion.release for completion in taken.completions), taken.callbacks):
            try:
                told()
            except Exception:
                # An error in one connection must not stop the others.
                _log.exception("a callback failed after a commit")
