"""What is noted of an outbox in memory, and not on disk yet: new messages, settled messages, permissions.

Any thread notes; the thread that has access to the file writes. Two rules make a write safe to interrupt and to repeat:

1. A write first moves what is noted into lists of its own, and empties those only after the transaction. A write that
   fails or is interrupted leaves them, and the next one takes them again. To insert or to delete a row a second time
   changes nothing.
2. What is counted beside the file (messages, bytes) is counted anew by the next write after any failure.
"""

from __future__ import annotations

import threading

from qflow_client.database import Database
from qflow_client.outbox import file as outboxfile

__all__ = ["Noted"]


class Noted:
    """The notes of one outbox.

    Args:
        file: the file, as it is at opening.
    """

    def __init__(self, file: Database) -> None:
        # Guards everything below but `inserting` and `deleting`.
        self.lock = threading.Lock()
        #: The sequence of the message that was put last; up to where held messages may be written.
        self.last, self._permitted = outboxfile.state(file)
        # What the file says of that.
        self.permitted_durable = self._permitted
        #: Messages that are put and not on disk, in order; and those of them that a write has taken.
        self.rows: list[outboxfile.Row] = []
        self.inserting: list[outboxfile.Row] = []
        # Messages that are settled and still in the file: first and last of each run; and the runs that a write has
        # taken.
        self._settled: list[tuple[int, int]] = []
        self._deleting: list[tuple[int, int]] = []
        #: How many messages are settled and not taken by a write, at the most.
        self.settled_count = 0
        #: Messages, and their bytes: those in the file, and those that are noted.
        self.count, self.size = outboxfile.totals(file)
        # Whether a failure or an interrupt may have left these two wrong.
        self._is_unsure = False

    @property
    def is_dirty(self) -> bool:
        """Whether a write would change anything on disk."""
        return bool(
            self.rows or self._settled or self.inserting or self._deleting or self._permitted != self.permitted_durable
        )

    def put(self, size: int, max_bytes: int | None, row: outboxfile.Content) -> int:
        """Note a message.

        Args:
            size: bytes that it counts for.
            max_bytes: the most bytes that there may be; ``None`` for any number.
            row: the message, without its sequence and size.

        Returns:
            Its sequence; 0 if there is no room.
        """
        try:
            with self.lock:
                if max_bytes is not None and self.size + size > max_bytes:
                    return 0
                # In this order: Ctrl-C may leave a sequence without a message, but never give one to two.
                self.last = sequence = self.last + 1
                self.rows.append((sequence, size, *row))
                self.size += size
                self.count += 1
                return sequence
        except BaseException:
            # It may have come between the message and its count.
            self._is_unsure = True
            raise

    def permit(self, sequence: int) -> None:
        """Note that held messages up to one may be written to a broker."""
        with self.lock:
            self._permitted = max(self._permitted, sequence)

    def settle(self, first: int, last: int) -> None:
        """Note that the messages from one to another are settled."""
        with self.lock:
            runs = self._settled
            if runs and runs[-1][1] == first - 1:
                runs[-1] = runs[-1][0], last
            else:
                runs.append((first, last))
            self.settled_count += last - first + 1

    def write(self, file: Database, *, all_of_it: bool) -> int:
        """Write everything that is noted; or only the messages.

        Returns:
            The last sequence that is on disk then.
        """
        freed_count = freed_size = 0
        with self.lock:
            self.inserting += self.rows
            self.rows = []
            last = self.last
            permitted = self.permitted_durable
            if all_of_it:
                self._deleting += self._settled
                self._settled = []
                self.settled_count = 0
                permitted = self._permitted
        rows = self.inserting
        settled = self._deleting if all_of_it else ()
        try:
            if len(rows) == 1 and not all_of_it:
                # A statement is a transaction of its own.
                file.execute(outboxfile.INSERT, *rows[0])
            else:
                with file.transaction():
                    file.execute_many(outboxfile.INSERT, rows)
                    for run in settled:
                        count, size = outboxfile.take_out(file, *run)
                        freed_count += count
                        freed_size += size
                    if settled or permitted != self.permitted_durable:
                        outboxfile.write_state(file, last, permitted)
            self.inserting = []
            if all_of_it:
                self._deleting = []
            self.permitted_durable = permitted
            self._count(file, freed_count, freed_size)
        except BaseException:
            self._is_unsure = True
            raise
        return last

    def _count(self, file: Database, freed_count: int, freed_size: int) -> None:
        """Count after a write, by which so many messages and bytes have left the file."""
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
        """The messages that are put and not on disk, by sequence."""
        with self.lock:
            rows = [*self.inserting, *self.rows]
        return {row[0]: outboxfile.as_stored(row) for row in rows}

    def give_up(self) -> None:
        """Count the messages no more that are not on disk: nothing will write them."""
        self.count -= len(self.unwritten())
