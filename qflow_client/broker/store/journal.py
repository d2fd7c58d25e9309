"""Counts the memory of all messages, and collects the changes to write to disk. No I/O.

A persistent message in a durable queue gets a number and waits for the next batch. If the message leaves its queues
before the batch is collected, it is never written to disk. The `Keeper` (`keeper.py`) takes one batch at a time, and
reports when the batch is on disk. The journal then releases the confirms and calls the callbacks that waited for this
batch. Each batch has all changes since the previous batch. So the store always has a state that the broker really had.

Queues with the policy `flow_to_disk` evict bodies. An evicted body is removed from memory when it is on disk, and is
read again when it is needed. `Journal.held` is the number of bytes in use, without the bodies that are being evicted.
It includes messages that are in no queue yet, output that clients have not read, and large answers of the HTTP API.
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
    """A message to write.

    Attributes:
        queues: numbers of the durable queues with the message; empty if the message is on disk only to evict its body.
        at: arrival time in seconds since 1970.
        names: the exchange and the routing key, each encoded as an AMQP short string.
        header: payload of the message's content header frame.
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
        queues: numbers of the queues that have the message.
        at: arrival time in seconds since 1970.
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
    """The contents of a store when it is opened, without the messages.

    Attributes:
        queues: number, name, auto-delete flag and arguments of each queue.
        exchanges: name, type, auto-delete flag, internal flag and arguments of each exchange.
        bindings: source, type of the destination, destination, routing key and arguments of each binding.
        deleted: numbers of deleted queues whose messages may be in the store.
        last: highest message number in the store; 0 if there are no messages.
    """

    queues: list[tuple[int, str, bool, dict[str, Any]]]
    exchanges: list[tuple[str, str, bool, bool, dict[str, Any]]]
    bindings: list[tuple[str, str, str, str, dict[str, Any]]]
    deleted: set[int]
    last: int


@dataclass(slots=True)
class Batch:
    """The changes that one transaction writes to disk.

    Attributes:
        changes: changes of durable queues, exchanges and bindings, in the order in which they happened.
        puts: new messages, in the order of their numbers.
        moves: by message number, the new list of queue numbers of each stored message whose queues have changed.
        removals: numbers of stored messages to delete.
        completions: confirms that wait for this batch.
        messages: the messages of `puts`, in the same order.
        callbacks: functions to call when the batch is on disk.
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
        """Body and header bytes of all new messages."""
        return sum(len(put.body) + len(put.header) for put in self.puts)


class Journal:
    """Counts the memory of all messages, and keeps the changes that are not on disk yet.

    Args:
        wall_clock: function that returns seconds since 1970.
        has_store: False without a store. Then the journal only counts memory.
        limit: maximum bytes of messages in memory (A1); 0 for no limit.
    """

    #: Approximate bytes of a message in memory, without its body.
    OVERHEAD = 512
    #: Number of header bytes that `OVERHEAD` includes.
    SMALL_HEADER = 128
    #: Approximate bytes that a message needs in memory for each further queue that it is in.
    ENTRY = 160
    #: Maximum of `max_backlog` in bytes, see `ports.Journal`.
    MAX_BACKLOG = 8 << 20
    #: Maximum body bytes that a queue reads ahead from disk.
    MAX_WINDOW = 1 << 20
    #: A batch is full at this number of bytes, including the overhead of its messages, or at this number of moves.
    MAX_BATCH = 16 << 20
    MAX_MOVES = 10_000

    def __init__(self, wall_clock: Callable[[], float], *, has_store: bool = True, limit: int = 0) -> None:
        self._wall_clock = wall_clock
        self.has_store = has_store
        self.limit = limit
        # Approximate bytes in memory of all messages in queues, without evicted bodies.
        self.memory = 0
        self.peak_memory = 0
        # Body bytes that will be removed from memory when they are on disk.
        self.evicting = 0
        self.unfinished = 0
        self.waiting = 0
        self.buffered = 0
        # Bytes of large answers of the HTTP API.
        self.answers = 0
        # If `held` is above this number of bytes, bodies are evicted. The rest of `limit` is for new messages.
        self.evict_above = limit * 3 // 4
        self.max_backlog = min(self.MAX_BACKLOG, limit // 8) if limit else self.MAX_BACKLOG
        # Messages whose bodies have to be read, and messages whose bodies are being read. The keys are their numbers.
        self._wanted: dict[int, StoredMessage] = {}
        self._reading: dict[int, StoredMessage] = {}
        # Functions to call after each read. A function that returns True is removed.
        self._readers: list[Callable[[], bool]] = []
        self.evicted = 0
        self.loaded = 0
        self._numbers = count(1)
        self.topology = TopologyLog()
        # Changes that are in no batch yet; see `Batch`. The keys of `_puts` and `_moves` are message numbers.
        self._puts: dict[int, tuple[StoredMessage, float]] = {}
        self._moves: dict[int, Record] = {}
        self._removals: list[int] = []
        self._callbacks: list[Callable[[], None]] = []
        # Total body bytes and overhead of the messages in `_puts`. At `MAX_BATCH`, `divide` makes a full batch.
        self._pending = 0
        # Full batches, oldest first. They are written before the changes that are in no batch yet.
        self._full: deque[Batch] = deque()
        # The batch that is being written; None if no write is running.
        self._taken: Batch | None = None
        self.backlog = 0
        self.backlog_size = 0
        # Function that is called with a message whose body on disk is damaged.
        self.on_lost: Callable[[StoredMessage], None] | None = None
        self.damaged = 0
        self.written = 0
        self.batches = 0

    def go_on_from(self, number: int) -> None:
        """Give new messages numbers above `number`, which is the highest message number in the store."""
        self._numbers = count(number + 1)

    # Messages.

    def enter(self, number: int, message: StoredMessage, completion: Completion | None) -> None:
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
        """Return the bytes that a message now uses in memory."""
        large = len(message.header) - self.SMALL_HEADER
        return self.OVERHEAD + (large if large > 0 else 0) + (0 if message.body is None else message.size)

    def _grow(self, size: int) -> None:
        self.memory += size
        if self.memory > self.peak_memory:
            self.peak_memory = self.memory

    def hold(self, message: StoredMessage) -> None:
        assert message.record is not None
        message.record.holders += 1
        message.record.is_spooled = True
        self.memory += self.ENTRY

    def leave(self, number: int, message: StoredMessage) -> None:
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
                # If only this queue has prevented the drop of the message, the other queues can now drop it.
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
            # The next batch deletes the message from disk. If it has to be stored again, it gets a new number.
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

    # Bodies that are only on disk (A2).

    def make_pager(self) -> Pager:
        return Pager(self.evict)

    def make_droppable(self) -> Droppable:
        return Droppable()

    def window(self, queues: Iterable[QueueView]) -> int:
        """Return the maximum body bytes that each queue may read ahead. If there is a limit, queues share 1/8 of it."""
        if not self.limit:
            return self.MAX_WINDOW
        readers = sum(queue.pager is not None and bool(queue.dispatcher.consumers) for queue in queues)
        return min(self.MAX_WINDOW, self.limit // 8 // max(1, readers))

    def relieve(self, queues: Iterable[QueueView]) -> None:
        self.peak_memory = max(self.peak_memory, self._total)
        if self.limit:
            relieve(self, tuple(queues))

    def when_read(self, message: StoredMessage, callback: Callable[[], None]) -> None:
        def look() -> bool:
            if message.body is None and not message.is_lost:
                self.want((message,), look)
            else:
                callback()
            return True

        look()

    def evict(self, message: StoredMessage) -> None:
        """Remove a message's body from memory as soon as the body is on disk. If needed, write the message to disk."""
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
        return self._total - self.evicting

    def want(self, messages: Iterable[StoredMessage], reader: Callable[[], bool]) -> None:
        for message in messages:
            record = message.record
            if message.body is not None or record is None or record.is_lost:
                continue
            if record.number not in self._reading:
                self._wanted[record.number] = message
        self._readers.append(reader)

    @property
    def wants(self) -> bool:
        """Whether bodies have to be read, and no read is running."""
        return bool(self._wanted) and not self._reading

    def take_wanted(self) -> list[int]:
        """Return the numbers of the messages whose bodies the caller has to read. After the read, call `came`."""
        wanted, self._wanted = self._wanted, {}
        for number, message in wanted.items():
            if message.record is not None and message.record.number == number:
                self._reading[number] = message
        return list(self._reading)

    def came(self, bodies: Mapping[int, bytes | None]) -> None:
        """Put bodies into their messages after a read.

        `bodies` has the body of each message by number; ``None`` for a damaged body. It is empty if the read failed.
        It can lack messages that have left their queues.
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
                # Call the other readers nevertheless, because other queues or channels wait for them.
                _log.exception("a callback failed after bodies were read")
            else:
                if not waits_no_more:
                    self._readers.append(reader)

    def recovered(self, message: StoredMessage, number: int, queues: list[int]) -> None:
        """Create the `Record` of a message that is restored from disk, and count the memory of the message."""
        record = message.record = Record()
        record.number = number
        record.queues = queues
        record.holders = len(queues)
        record.is_taken = record.is_written = True
        self._grow(self._cost_of(message) + self.ENTRY * (len(queues) - 1))

    # Batches.

    def snapshot(self) -> MemorySnapshot:
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
        """Whether there are batches, changes or callbacks that `take` has not returned yet."""
        return bool(
            self._full or self._puts or self._removals or self._moves or self.topology.changes or self._callbacks
        )

    @property
    def is_idle(self) -> bool:
        """Whether all changes are on disk."""
        return self._taken is None and not self.is_dirty

    def when_durable(self, callback: Callable[[], None], *, topology_only: bool = False) -> bool:
        if self.topology.changes or (not topology_only and (self._puts or self._removals or self._moves)):
            self._callbacks.append(callback)
            return True
        for batch in (*reversed(self._full), self._taken):
            if batch is not None and (batch.changes or not topology_only):
                batch.callbacks.append(callback)
                return True
        return False

    def divide(self) -> None:
        if self._pending >= self.MAX_BATCH or len(self._moves) >= self.MAX_MOVES:
            self._full.append(self._collect())

    def take(self) -> Batch:
        """Return the batch to write now. After the write, call `written_down` before the next `take`."""
        assert self._taken is None
        self._taken = self._full.popleft() if self._full else self._collect()
        return self._taken

    def _collect(self) -> Batch:
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
        """Record that the batch from `take` is on disk."""
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
                # Call the other callbacks nevertheless, because other callers wait for them.
                _log.exception("a callback failed after a commit")
