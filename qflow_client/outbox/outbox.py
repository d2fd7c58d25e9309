"""`Outbox`: messages on disk until they are settled. It knows nothing of producers and event loops.

What a thread puts or settles is first noted in memory, which is quick and touches no disk. A commit writes everything
that is noted in one transaction. So a producer uses an outbox in this way:

1. Under its own lock, in the order of admission, `Outbox.put` notes a message and gives it a sequence number.
2. Without that lock, and before `send` returns, `Outbox.wait_durable` has it written to disk, together with everything
   that others have put meanwhile. An event loop has `Outbox.commit` run once for many messages, on another thread.
3. `Outbox.settle` notes that messages are settled, in any order. They leave the file with the next commit. A message
   that is settled and still in the file when the process dies is sent once more, and marked.
4. A message may be written to the broker as soon as it is put. A message that is to wait first
   (``when_flowed="spill"``) is put with ``permit=False`` and holds nothing in memory. To send such messages:
   `Outbox.read` the next, `Outbox.permit` all up to the last of them, `commit`, and only then write. So the file says
   of each message that is found after a crash whether it may have been written, and may be a second copy.
5. After a start, before anything new: `Outbox.read` what is left, batch by batch, in order; send each with
   `StoredMessage.to_send`, which adds the mark if it may be a second copy; `settle` as ever.
6. `Outbox.put` may be given a `Position`: how far the program has read the source of the message (E13). It is written
   in the same commit. A program that must not send a row twice without a mark writes such a message to the broker only
   once it is durable: then a row behind the position on disk was never written, and one before it is marked.
7. A message that cannot be read is set aside by the first read that meets it. It stays in the file and keeps its room,
   and `Outbox.damaged` names it. All others go on without it until `Outbox.drop` removes it.

Invariants: sequences are given in order, and none is given twice, also across processes. Everything up to
`Outbox.durable` is on disk. What a failed or interrupted commit has taken stays noted, and the next commit takes it
again: inserting or deleting a row twice changes nothing. Only a thread that has access (`FileAccess`) uses the file.
Every wait has a deadline: for access, and for a lock that another process holds on the file.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from qflow_client.amqp.fields import encode_short_string
from qflow_client.amqp.frames import content_header, plain_content_header
from qflow_client.database import BUSY, LockFile
from qflow_client.message import Message
from qflow_client.outbox import file as outboxfile
from qflow_client.outbox.access import FileAccess
from qflow_client.outbox.errors import OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.noted import Noted
from qflow_client.position import Position
from qflow_client.redaction import is_url, shown

__all__ = ["Outbox"]

# Messages that are settled before `wait_durable` takes them out, too.
_SETTLED_TOGETHER = 500
# Bytes that a message takes besides its own.
_ROW = 64
# The default for the most bytes of messages in an outbox.
_MAX_BYTES = 1 << 30

_T = TypeVar("_T")


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


class Outbox:
    """Messages on disk, in a file of SQLite. For any number of threads of one process.

    Args:
        path: of the file; made if there is none. Its lock is a file beside it, which stays.
        max_bytes: of the messages in it, properties and 64 bytes each included; the file itself may be somewhat larger.
        synchronous: ``"normal"`` survives the death of the process, however it comes; ``"full"`` also that of the
            machine, and waits for the disk with each commit.
        timeout: seconds to wait for a file that another process has locked.

    Raises:
        OutboxInUse: another process, or another producer in this one, uses it.
        OutboxError: the file cannot be opened, is damaged, or is something else.
        ValueError: `synchronous` is neither, or `max_bytes` is not above 0.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = _MAX_BYTES,
        synchronous: str = "normal",
        timeout: float = BUSY,
    ) -> None:
        if synchronous not in ("normal", "full"):
            raise ValueError(f"synchronous must be 'normal' or 'full', not {shown(synchronous)}")
        if not max_bytes > 0:
            raise ValueError(f"max_bytes must be more than 0, not {shown(max_bytes)}")
        #: The absolute path of the file: the process may change its folder.
        # A URL stays recognisable, and is refused below.
        self.path = Path(path if is_url(path) else os.path.abspath(path))  # noqa: PTH100  # keeps links
        # What to add to `time.monotonic` for seconds since 1970. Within one process a change of the wall clock does not
        # count; between processes there is no other clock.
        self._wall_offset = time.time() - time.monotonic()
        self._opened_at = time.time()
        #: The most bytes that may be in it.
        self.max_bytes = max_bytes
        self._lock_file = LockFile(
            self.path,
            error=OutboxError,
            in_use=OutboxInUse,
            told=("another producer", "give each producer an outbox of its own"),
        )
        try:
            self._file = outboxfile.open_file(self.path, synchronous=synchronous, timeout=timeout)
            try:
                self._noted = Noted(self._file)
                aside = outboxfile.aside(self._file)
            except BaseException:
                # Not by the collector: a file that cannot be used is to be free at once.
                self._file.close()
                raise
        except BaseException:
            self._lock_file.release()
            raise
        last = self._noted.last
        # Exclusive use of the file; it knows the last sequence that is on disk.
        self._access = FileAccess(self._file, last)
        # At opening, the last sequence, and up to where held messages might be written. A message that might be written
        # then is a second copy if it is sent now.
        self._written_before: tuple[int, int] = last, self._noted.permitted_durable
        # By sequence, why it was set aside.
        self._damaged: dict[int, str] = dict.fromkeys(aside, "it was set aside before")

    @property
    def last(self) -> int:
        """The sequence that was given last; 0 before any."""
        return self._noted.last

    @property
    def durable(self) -> int:
        """The last sequence up to which everything that was put is on disk."""
        return self._access.durable

    @property
    def size(self) -> int:
        """Bytes of the messages in it: those that are put, and those whose settling is not committed."""
        return self._noted.size

    @property
    def left(self) -> int:
        """Messages in it that are not known to be settled, damaged ones apart; about, while others use it."""
        left = len(self) - self._noted.settled_count
        return left if left > 0 else 0

    @property
    def damaged(self) -> dict[int, str]:
        """The messages that were found damaged, and why, by sequence. They take their room, and count for nothing else.

        See `drop`.
        """
        return self._damaged.copy()

    def __len__(self) -> int:
        return self._noted.count - len(self._damaged)

    # In.

    def has_room(self, size: int) -> bool:
        """Whether there is room for a body of so many bytes; its properties may go beyond `max_bytes`."""
        return self._noted.size + size + _ROW <= self.max_bytes

    def check_room(self, size: int, *, waits: bool) -> None:
        """Refuse a message for which there is no room.

        Args:
            size: of its body.
            waits: whether it can wait until there is.

        Raises:
            OutboxFull: there is none now, if it cannot wait; or there never will be.
        """
        if not self.has_room(size) and (not waits or size + _ROW > self.max_bytes):
            raise OutboxFull(self._describe_full(size))

    def _describe_full(self, size: int) -> str:
        return (
            f"{self.path}: no room for a message of {size} bytes: {self._noted.size} of at most {self.max_bytes} bytes "
            f"are taken by {self._noted.count} messages"
        )

    def put(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        message_id: str,
        *,
        permit: bool = True,
        overdraw: bool = False,
        position: Position | None = None,
    ) -> int:
        """Note a message; it is durable with the next commit.

        Args:
            payload: the body, or a message with properties. Its own message id, if it has one, counts.
            exchange: where it is to be published.
            routing_key: with which key.
            message_id: for a message without.
            permit: whether it may be written to a broker from now on; else it is held until `permit`.
            overdraw: take it even if there is no room, because `has_room` was asked.
            position: how far its source has been read; written in the same commit. ``None`` for none.

        Returns:
            Its sequence.

        Raises:
            OutboxFull: there is no room. With `commit`, what was settled makes some.
            TypeError, ValueError: what AMQP cannot carry.
        """
        if position is not None and not isinstance(position, Position):
            raise TypeError(f"position must be a Position, not {type(position).__name__}: {shown(position)}")
        identity = encode_short_string(message_id, "message_id")
        if type(payload) is bytes:
            header, body = plain_content_header(len(payload), identity), payload
        else:
            message = payload if isinstance(payload, Message) else Message(payload)
            header, body = content_header(message, identity), message.body
        size = len(header) + len(body) + len(exchange) + len(routing_key) + _ROW
        at = self.wall_time(time.monotonic())
        row = 0 if permit else outboxfile.HELD, at, exchange, routing_key, header, body
        sequence = self._noted.put(size, None if overdraw else self.max_bytes, row, position)
        if not sequence:
            raise OutboxFull(self._describe_full(size), payload, exchange=exchange, routing_key=routing_key)
        return sequence

    def permit(self, sequence: int) -> None:
        """Allow held messages up to one to be written to a broker, once that is committed.

        Args:
            sequence: of the last of them.
        """
        self._noted.permit(sequence)

    def settle(self, first: int, last: int | None = None) -> None:
        """Note that messages are settled; they leave the file with the next commit.

        Args:
            first: the sequence of the first.
            last: that of the last; ``None`` for the first alone.
        """
        self._noted.settle(first, first if last is None else last)

    def withdraw(self, first: int, last: int) -> None:
        """Note that messages were put by mistake: they leave the file, and their positions do not count.

        Args:
            first: the sequence of the first.
            last: that of the last. No message of the same source was put after it.
        """
        self._noted.withdraw(first, last)

    # Positions.

    def position(self, source: str) -> int | str | None:
        """How far a source has been read: the position of the last of its messages that was put.

        Args:
            source: its name.

        Returns:
            The position, which is on disk once that message is; ``None`` if it has none.

        Raises:
            OutboxError: it is damaged.
        """
        if source in self._noted.damaged_sources:
            raise OutboxError(
                f"{self.path}: the position of source {source!r} is damaged; Outbox.set_position() gives it another"
            )
        return self._noted.position(source)

    def set_position(self, source: str, value: int | str | None, timeout: float | None = None) -> None:
        """Write the position of a source without a message, and everything that is noted before it.

        Args:
            source: its name.
            value: the position; ``None`` to forget the source.
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: it could not be written, or not in time.
            TypeError, ValueError: as `Position`.
        """
        Position(source, 0 if value is None else value)

        def write() -> None:
            self._commit_if_dirty()
            self._noted.set_position(self._file, source, value)

        self._use_file(write, _deadline(timeout))

    # To the disk.

    @property
    def dirty(self) -> bool:
        """Whether a commit would change anything on disk."""
        return self._noted.is_dirty

    def _use_file(self, action: Callable[[], _T], deadline: float = math.inf, sequence: float = math.inf) -> _T | None:
        """Call an action with exclusive access to the file, unless a sequence is on disk already.

        Raises:
            OutboxError: the deadline has passed.
        """
        try:
            return self._access.run(action, deadline, sequence)
        except TimeoutError:
            raise OutboxError(f"{self.path}: another thread is still writing to it") from None

    def wait_durable(self, sequence: int, timeout: float | None = None) -> None:
        """Return when a message is on disk: commit it with all that is noted, unless another thread just did.

        Args:
            sequence: of the message.
            timeout: seconds to wait for other threads, and for a file that another process has locked; ``None`` for as
                long as other threads take, and for 10 seconds.

        Raises:
            OutboxError: it could not be written, or not in time. It stays noted, and the next commit tries again.
        """
        if self._access.durable < sequence:
            self._use_file(self._commit_rows, _deadline(timeout), sequence)

    def _commit_rows(self) -> None:
        self._commit(all_of_it=self._noted.settled_count >= _SETTLED_TOGETHER)

    def commit(self, timeout: float | None = None) -> int:
        """Write everything that is noted to disk.

        Args:
            timeout: as for `wait_durable`.

        Returns:
            The last sequence that is durable.

        Raises:
            OutboxError: it could not be written, or not in time. It stays noted, and the next commit tries again.
        """
        self._use_file(self._commit_if_dirty, _deadline(timeout))
        return self._access.durable

    def _commit_if_dirty(self) -> None:
        if self.dirty:
            self._commit()

    def _commit(self, *, all_of_it: bool = True) -> None:
        """Write everything that is noted; or only the messages."""
        self._access.durable = self._noted.write(self._file, all_of_it=all_of_it)

    # Out.

    def read(self, after: int = 0, limit: int = 1000, max_bytes: int | None = None) -> list[StoredMessage]:
        """Messages that are on disk and not known to be settled, in order.

        One that is damaged is not among them, and never will be: it is set aside, see `damaged`.

        Args:
            after: a sequence; those behind it.
            limit: how many at the most.
            max_bytes: how many bytes at the most, but always one message; ``None`` for no limit.

        Raises:
            OutboxError: the file cannot be read.
        """
        found: list[StoredMessage] = []

        def read() -> None:
            self._commit_if_dirty()
            count = limit if max_bytes is None else outboxfile.how_many(self._file, after, limit, max_bytes)
            only = outboxfile.NOT_SET_ASIDE
            messages, damaged = outboxfile.read(self._file, after, count, self._written_before, only)
            if damaged:
                outboxfile.set_aside(self._file, damaged)
                self._damaged |= damaged
            found.extend(map(self._correct_time, messages))

        self._use_file(read)
        return found

    def wall_time(self, now: float) -> float:
        """Return a time of `time.monotonic` in seconds since 1970, as messages have it that are put in this process."""
        return now + self._wall_offset

    def _correct_time(self, stored: StoredMessage) -> StoredMessage:
        """Return a message that an earlier process put, by a clock that was ahead of this one's, as put at opening."""
        if stored.at <= self._opened_at or stored.sequence > self._written_before[0]:
            return stored
        return replace(stored, at=self._opened_at)

    def expire(self, before: float) -> list[StoredMessage]:
        """Take out messages that are too old to be sent.

        Args:
            before: seconds since 1970; those that were put earlier.

        Returns:
            The messages that were taken out, in order. They leave the disk with the next commit.

        Raises:
            OutboxError: the file cannot be read.
        """
        found: list[StoredMessage] = []
        while batch := [each for each in self.read(found[-1].sequence if found else 0) if each.at < before]:
            found += batch
        for each in found:
            self.settle(each.sequence)
        return found

    def drop(self, sequence: int) -> None:
        """Take a message out, whatever it is; it is gone with the next commit.

        Args:
            sequence: of the message.

        Raises:
            OutboxError: it is not there, or the file cannot be read.
        """

        def check() -> None:
            self._commit_if_dirty()
            if not outboxfile.is_there(self._file, sequence):
                raise outboxfile.not_there(self._file, sequence)

        self._use_file(check)
        self.settle(sequence)
        self._damaged.pop(sequence, None)

    # The end.

    def unwritten(self) -> dict[int, StoredMessage]:
        """The messages that are put and not on disk, by sequence. After a `close` that fails they never will be."""
        return self._noted.unwritten()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._lock_file.released

    def stop_waiting(self, timeout: float) -> None:
        """Have commits of all threads wait for a file that another process has locked so many seconds more at most."""
        self._file.stop_at = _deadline(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Commit, and let others have it. A second call does nothing.

        Args:
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: what is noted could not be written; it is closed all the same, see `unwritten`. Or another
                thread was still writing when the time was up, and it is not closed.
        """
        if not self.is_closed:
            self._use_file(self._close, _deadline(timeout))

    def _close(self) -> None:
        if self.is_closed:
            return
        try:
            self._commit_if_dirty()
        except BaseException:
            self._noted.give_up()
            raise
        finally:
            try:
                self._file.close()
            finally:
                self._lock_file.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def look(path: str | os.PathLike[str], after: int = 0, limit: int = 1000) -> list[StoredMessage]:
        """What is in an outbox, also while a producer uses it: as `read`, and nothing is changed or locked.

        Damaged messages are left out, see `look_damaged`.

        Args:
            path: of the file.
            after: a sequence; those behind it.
            limit: how many at the most.

        Raises:
            OutboxError: there is none, or it cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.look(file, after, limit)

    @staticmethod
    def look_damaged(path: str | os.PathLike[str]) -> dict[int, str]:
        """The damaged messages in an outbox, and what is wrong with each, by sequence; also while a producer uses it.

        Args:
            path: of the file.

        Raises:
            OutboxError: there is none, or it cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.look_damaged(file)

    @staticmethod
    def find(path: str | os.PathLike[str], sequence: int) -> StoredMessage:
        """One message of an outbox, also while a producer uses it.

        Args:
            path: of the file.
            sequence: of the message.

        Raises:
            OutboxError: it is not there, or cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.find(file, sequence)
