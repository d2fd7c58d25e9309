"""Changes of an outbox that are not on disk yet: new and settled messages, positions, and calls of `Outbox.permit`.

Any thread may note changes. Only the thread that has access to the file writes the changes. Two rules make a write safe
to interrupt and to repeat:

1. A write moves the noted changes into its own lists, and empties these lists only after the transaction. If the write
   fails or is interrupted, the next write uses the same lists. Inserting or deleting a row twice changes nothing.
2. The first write after a failure recalculates the counts of messages and bytes.

A position shows how far a source of messages has been read (E13). A position belongs to the message with which it was
put, and one transaction writes both. A position without its message is not valid. The position of a source
is the last valid position that was put for it. If a message is withdrawn, the transaction that deletes it also writes
the previous position of its source. One previous position is enough, because only the message whose admission was
interrupted is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qflow_client.database import Database
from qflow_client.locks import Lock
from qflow_client.outbox import file as outboxfile
from qflow_client.position import Position

__all__ = ["Noted"]

_Value = int | str


class _Reached(NamedTuple):
    """A source's position on disk."""

    #: The sequence of the message with which the position was put; 0 if this message is unknown.
    sequence: int
    #: The position; ``None`` if the position was removed.
    value: _Value | None
    #: The previous position; ``None`` if there was none. Equal to `value` if `sequence` is 0.
    before: _Value | None


def _is_in(runs: Iterable[tuple[int, int]], sequence: int) -> bool:
    return any(first <= sequence <= last for first, last in runs)


class Noted:
    """The noted changes of one outbox."""

    def __init__(self, file: Database) -> None:
        # Guards the attributes that several threads use. The other attributes belong to the thread that writes.
        self.lock = Lock()
        #: The sequence of the last message, and the sequence up to which messages with ``permit=False`` may be sent.
        self.last, self._permitted = outboxfile.state(file)
        # The value of `_permitted` that is on disk.
        self.permitted_durable = self._permitted
        #: Messages that are not on disk, in order. A write moves them from `rows` to `inserting`.
        self.rows: list[outboxfile.Row] = []
        self.inserting: list[outboxfile.Row] = []
        # Settled messages that a write still has to delete, as pairs of first and last sequence. The write moves them
        # to `_deleting`.
        self._settled: list[tuple[int, int]] = []
        self._deleting: list[tuple[int, int]] = []
        #: The number of messages in `_settled`. A message that is settled twice may count twice.
        self.settled_count = 0
        #: The number and bytes of all messages in the file (even if settled), in `rows`, and in `inserting`.
        self.count, self.size = outboxfile.totals(file)
        # Whether `count` and `size` may be wrong after a failure or an interrupt.
        self._is_unsure = False
        # Positions that are not on disk; the keys are sequences. A position without a message in `rows` or `inserting`
        # is not valid.
        self._positions: dict[int, Position] = {}
        # For each source, its last position that is on disk. Only a thread with access to the file changes this dict.
        self._reached: dict[str, _Reached] = {}
        self.damaged_sources: set[str] = set()
        # Whether the file has a table of positions.
        self._has_table = outboxfile.has_positions(file)
        for source, value in (outboxfile.read_positions(file) if self._has_table else {}).items():
            if value is None:
                self.damaged_sources.add(source)
            else:
                self._reached[source] = _Reached(0, value, value)
        # Messages to delete together with their positions (`withdraw`), as pairs of first and last sequence.
        self._withdrawn: list[tuple[int, int]] = []

    @property
    def is_dirty(self) -> bool:
        """Whether a write would change anything on disk."""
        return bool(
            self.rows
            or self._settled
            or self._withdrawn
            or self.inserting
            or self._deleting
            or self._permitted != self.permitted_durable
        )

    def put(self, size: int, max_bytes: int | None, row: outboxfile.Content, position: Position | None = None) -> int:
        """Note a message of `size` bytes. Return its sequence, or 0 if the outbox would exceed `max_bytes` bytes."""
        put_with = 0
        try:
            with self.lock:
                if max_bytes is not None and self.size + size > max_bytes:
                    return 0
                # Increase `last` before adding the row: Ctrl-C may leave a sequence unused, but none is assigned twice.
                self.last = sequence = self.last + 1
                if position is not None:
                    put_with, self._positions[sequence] = sequence, position
                self.rows.append((sequence, size, *row))
                self.size += size
                self.count += 1
                return sequence
        except BaseException:
            # Ctrl-C may have come between adding the message and counting it.
            self._is_unsure = True
            if put_with and not any(row[0] == put_with for row in (*self.rows, *self.inserting)):
                # Ctrl-C may have come between adding the position and adding its message.
                self._positions.pop(put_with, None)
            raise

    def permit(self, sequence: int) -> None:
        """Record that messages with ``permit=False`` may be sent up to a sequence."""
        with self.lock:
            self._permitted = max(self._permitted, sequence)

    def withdraw(self, first: int, last: int) -> None:
        """Record that messages `first` to `last` are withdrawn. A write deletes them and their positions."""
        with self.lock:
            # This is a single operation, so Ctrl-C cannot interrupt it halfway.
            self._withdrawn.append((first, last))

    def settle(self, first: int, last: int) -> None:
        """Record that a range of messages is settled."""
        with self.lock:
            runs = self._settled
            if runs and runs[-1][1] == first - 1:
                runs[-1] = runs[-1][0], last
            else:
                runs.append((first, last))
            self.settled_count += last - first + 1

    def write(self, file: Database, *, all_of_it: bool) -> int:
        """Write new messages and positions, or with `all_of_it` all changes. Return the last sequence on disk."""
        freed_count = freed_size = 0
        with self.lock:
            self.inserting += self.rows
            self.rows = []
            last = self.last
            withdrawn = tuple(self._withdrawn)
            # A withdrawn message must be deleted in the same transaction that writes the previous position.
            all_of_it = all_of_it or bool(withdrawn)
            permitted = self.permitted_durable
            if all_of_it:
                self._deleting += self._settled
                self._settled = []
                self.settled_count = 0
                permitted = self._permitted
        rows = self.inserting
        reached = self._reach(rows, withdrawn) if self._positions or withdrawn else {}
        settled = (*self._deleting, *withdrawn) if all_of_it else ()
        try:
            if len(rows) == 1 and not all_of_it and not reached:
                # A single statement is a transaction by itself.
                file.execute(outboxfile.INSERT, *rows[0])
            else:
                with file.calling, file.transaction():
                    file.execute_many(outboxfile.INSERT, rows)
                    if reached:
                        self._write_positions(file, {source: at.value for source, at in reached.items()})
                    for run in settled:
                        count, size = outboxfile.take_out(file, *run)
                        freed_count += count
                        freed_size += size
                    if settled or permitted != self.permitted_durable:
                        outboxfile.write_state(file, last, permitted)
            if self._positions or reached:
                self._keep(reached, last)
                self._has_table = self._has_table or bool(reached)
            if withdrawn:
                with self.lock:
                    self._withdrawn = self._withdrawn[len(withdrawn) :]
            self.inserting = []
            if all_of_it:
                self._deleting = []
            self.permitted_durable = permitted
            self._count(file, freed_count, freed_size)
        except BaseException:
            self._is_unsure = True
            raise
        return last

    def position(self, source: str) -> _Value | None:
        """Return the last position of a source; ``None`` if there is none."""
        withdrawn = self._withdrawn
        # Use a copy, because other threads may put messages during the loop.
        for sequence, position in reversed(self._positions.copy().items()):
            if position.source == source and not _is_in(withdrawn, sequence):
                return position.value
        reached = self._reached.get(source)
        if reached is None:
            return None
        return reached.before if _is_in(withdrawn, reached.sequence) else reached.value

    def set_position(self, file: Database, source: str, value: _Value | None) -> None:
        """Write the position of a source to the file, without a message; ``None`` to forget the source."""
        with file.calling, file.transaction():
            self._write_positions(file, {source: value})
        self._has_table = True
        self._set_reached(source, _Reached(0, value, value))

    def _write_positions(self, file: Database, positions: Mapping[str, _Value | None]) -> None:
        if not self._has_table:
            file.execute(outboxfile.MAKE_POSITIONS)
        outboxfile.write_positions(file, positions)

    def _set_reached(self, source: str, reached: _Reached) -> None:
        if reached.value is None:
            self._reached.pop(source, None)
        else:
            self._reached[source] = reached
        self.damaged_sources.discard(source)

    def _reach(self, rows: Sequence[outboxfile.Row], withdrawn: Sequence[tuple[int, int]]) -> dict[str, _Reached]:
        """Return the positions that a write has to store; the keys are sources."""
        reached: dict[str, _Reached] = {}
        if withdrawn:
            # A withdrawal is rare, so it may take the time to check each source.
            reached = {
                source: _Reached(0, at.before, at.before)
                for source, at in self._reached.items()
                if _is_in(withdrawn, at.sequence)
            }
        for row in rows if self._positions else ():
            sequence = row[0]
            position = self._positions.get(sequence)
            if position is None or _is_in(withdrawn, sequence):
                continue
            before = reached.get(position.source) or self._reached.get(position.source)
            if before is None or before.sequence < sequence:
                reached[position.source] = _Reached(sequence, position.value, before and before.value)
        return reached

    def _keep(self, reached: dict[str, _Reached], last: int) -> None:
        """Record the positions that are on disk now. All messages up to the sequence `last` are on disk."""
        # Remove the noted positions last: if this call is interrupted, the next write needs them again.
        for source, at in reached.items():
            self._set_reached(source, at)
        for sequence in self._positions.copy():
            if sequence <= last:
                self._positions.pop(sequence, None)

    def _count(self, file: Database, freed_count: int, freed_size: int) -> None:
        """Update the counts after a write that removed `freed_count` messages of `freed_size` bytes from the file."""
        if self._is_unsure:
            count, size = outboxfile.totals(file)
            with self.lock:
                self.count = count + len(self.rows)
                self.size = size + sum(row[1] for row in self.rows)
            self._is_unsure = False
        elif freed_count:
            with self.lock:
                self.count -= freed_count
                self.size -= freed_size

    def unwritten(self) -> dict[int, outboxfile.StoredMessage]:
        """Return the unsettled messages that are noted and not on disk; the keys are sequences."""
        settled = self.settled()
        return {row[0]: outboxfile.as_stored(row) for row in self._rows() if row[0] not in settled}

    def settled(self) -> set[int]:
        """Return the sequences of settled and withdrawn messages that a write still has to delete."""
        with self.lock:
            runs = (*self._settled, *self._deleting, *self._withdrawn)
        return {sequence for first, last in runs for sequence in range(first, last + 1)}

    def _rows(self) -> list[outboxfile.Row]:
        with self.lock:
            return [*self.inserting, *self.rows]

    def give_up(self) -> None:
        """After the last write, subtract the messages that are not on disk from `count`."""
        self.count -= len(self._rows())
        self._positions.clear()

    def forget(self, count: int) -> None:
        """Forget all noted changes, because the file was deleted. Afterwards `count` is the number of messages."""
        with self.lock:
            self.rows, self.inserting = [], []
            self._settled, self._deleting, self._withdrawn = [], [], []
            self.settled_count, self.count = 0, count
