"""`Outbox` keeps messages on disk until they are settled. It has no dependency on producers or event loops.

Changes (new and settled messages) are first noted in memory, which is fast and touches no disk. A commit writes all
noted changes in one transaction. A producer uses an outbox as follows:

1. Under its own lock, in the order of admission, `Outbox.put` notes a message and assigns a sequence number.
2. Without that lock, and before `send` returns, `Outbox.wait_durable` writes the message to disk, together with all
   messages that other threads have put meanwhile. An event loop runs `Outbox.commit` once for many messages, on another
   thread.
3. `Outbox.settle` notes that messages are settled, in any order. The next commit deletes them from the file. If the
   process dies before that commit, they are sent once more and marked.
4. A message may be written to the broker as soon as it is put. A message that must wait (``when_flowed="spill"``) is
   put with ``permit=False`` and uses no memory. To send such messages, `Outbox.read` the next ones, `Outbox.permit` all
   up to the last of them, `commit`, and only then write them. So the file shows after a crash whether a message may
   have been written, and may be a second copy.
5. After a start, before any new message, `Outbox.read` the remaining messages in order, batch by batch. Send each with
   `StoredMessage.to_send`, which adds the mark if it may be a second copy, and `settle` it as usual.
6. `Outbox.put` accepts a `Position`: how far the program has read the source of the message (E13). It is written in the
   same commit. A program that must not send a row twice without a mark writes such a message to the broker only when it
   is durable. Then a row after the position on disk was never written, and a row before it is marked.
7. If a message cannot be read, it is set aside. It stays in the file and keeps its room, and `Outbox.damaged` lists it.
   All other messages are sent. `Outbox.drop` removes it.

Invariants: sequences are assigned in order, and none is assigned twice, even across processes. All messages up to
`Outbox.durable` are on disk. Changes of a failed or interrupted commit stay noted, and the next commit writes them
again: inserting or deleting a row twice changes nothing. Only a thread that has access (`FileAccess`) uses the file.
Every wait has a deadline: for access, and for a lock that another process holds on the file.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
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

# When this many messages are settled, `wait_durable` deletes them, too.
_SETTLED_TOGETHER = 500
# Bytes that a message uses in addition to its own.
_ROW = 64
# The default of `max_bytes`.
_MAX_BYTES = 1 << 30

_T = TypeVar("_T")


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


class Outbox:
    """Messages on disk, in a file of SQLite. Any number of threads of one process may use it.

    Args:
        path: the path of the file, which is created if it does not exist. The lock is a file beside it, which stays.
        max_bytes: limit of the messages, including properties and 64 bytes for each; the file itself may be larger.
        synchronous: ``"normal"`` survives the death of the process, whatever its cause. ``"full"`` also survives the
            death of the machine, and waits for the disk with each commit.
        timeout: seconds to wait for a file that another process has locked.

    Raises:
        OutboxInUse: another process, or another producer in this one, uses it.
        OutboxError: the file cannot be opened, is damaged, or is not an outbox.
        ValueError: `synchronous` has another value, or `max_bytes` is not above 0.
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
        # A URL stays recognisable, and is rejected below.
        self.path = Path(path if is_url(path) else os.path.abspath(path))  # noqa: PTH100  # keeps links
        # Added to `time.monotonic`, it gives seconds since 1970. Within one process a change of the wall clock has no
        # effect. Between processes there is no other clock.
        self._wall_offset = time.time() - time.monotonic()
        self._opened_at = time.time()
        #: The limit of the bytes in it.
        self.max_bytes = max_bytes
        self._lock_file = LockFile(
            self.path,
            error=OutboxError,
            in_use=OutboxInUse,
            told=("another producer", "give each producer an outbox of its own"),
        )
        with ExitStack() as after_error:
            after_error.callback(self._lock_file.release)
            self._file = outboxfile.open_file(self.path, synchronous=synchronous, timeout=timeout)
            # Not by the garbage collector, so that a file that cannot be used is free immediately.
            after_error.callback(self._file.close)
            self._noted = Noted(self._file)
            aside = outboxfile.aside(self._file)
            after_error.pop_all()
        last = self._noted.last
        # Exclusive use of the file; has the last sequence that is on disk.
        self._access = FileAccess(self._file, last)
        # At opening, the last sequence, and the sequence up to which held messages might be written. Messages that
        # might be written then are second copies if they are sent now.
        self._written_before: tuple[int, int] = last, self._noted.permitted_durable
        # Why messages were set aside, by sequence.
        self._damaged: dict[int, str] = dict.fromkeys(aside, "it was set aside before")

    @property
    def last(self) -> int:
        """The last assigned sequence; 0 before the first."""
        return self._noted.last

    @property
    def durable(self) -> int:
        """The sequence up to which all messages are on disk."""
        return self._access.durable

    @property
    def size(self) -> int:
        """Bytes of the messages in it, including settled messages whose deletion is not committed."""
        return self._noted.size

    @property
    def left(self) -> int:
        """How many messages are not known to be settled, without damaged ones; inexact while other threads use it."""
        left = len(self) - self._noted.settled_count
        return left if left > 0 else 0

    @property
    def damaged(self) -> dict[int, str]:
        """The damaged messages and their errors, by sequence. They use their room, and are ignored otherwise.

        See `drop`.
        """
        return self._damaged.copy()

    def __len__(self) -> int:
        return self._noted.count - len(self._damaged)

    # Putting.

    def has_room(self, size: int, *, if_empty: bool = False) -> bool:
        """Return whether there is room for a body of this size in bytes; its properties may exceed `max_bytes`.

        Args:
            size: of the body.
            if_empty: whether there would be room if there were no other message.
        """
        return (0 if if_empty else self._noted.size) + size + _ROW <= self.max_bytes

    def full_error(self, size: int, payload: bytes | Message, exchange: str, routing_key: str) -> OutboxFull:
        """Return the error for a message for which there is no room."""
        taken = f"{self._noted.size} of at most {self.max_bytes} bytes are taken by {self._noted.count} messages"
        why = f"{self.path}: no room for a message of {size} bytes: {taken}"
        return OutboxFull(why, payload, exchange=exchange, routing_key=routing_key)

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
        """Record a message; it is durable after the next commit.

        Args:
            payload: the body, or a message with properties. If it has a message id, that id is used.
            exchange: its exchange.
            routing_key: its routing key.
            message_id: the id for a message without an id.
            permit: whether it may be written to a broker from now on; otherwise it is held until `permit` is called.
            overdraw: put it even if there is no room, because the caller has checked `has_room`.
            position: how far its source has been read, written in the same commit; ``None`` for none.

        Returns:
            Its sequence.

        Raises:
            OutboxFull: there is no room. A `commit` makes room if messages are settled.
            TypeError, ValueError: AMQP cannot represent it.
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
            raise self.full_error(size, payload, exchange, routing_key)
        return sequence

    def permit(self, sequence: int) -> None:
        """Allow held messages up to a sequence to be written to a broker, after the next commit.

        Args:
            sequence: the sequence of the last of them.
        """
        self._noted.permit(sequence)

    def settle(self, first: int, last: int | None = None) -> None:
        """Record that messages are settled. The next commit deletes them from the file.

        Args:
            first: the first sequence.
            last: the last sequence; ``None`` for `first` alone.
        """
        self._noted.settle(first, first if last is None else last)

    def withdraw(self, first: int, last: int) -> None:
        """Record that messages were put by mistake. They are deleted from the file, and their positions are withdrawn.

        Args:
            first: the first sequence.
            last: the last sequence. No message of the same source was put after it.
        """
        self._noted.withdraw(first, last)

    # Positions.

    def position(self, source: str) -> int | str | None:
        """Return how far a source has been read: the position of its last message that was put.

        Args:
            source: its name.

        Returns:
            The position; ``None`` if the source has none. It is written to disk together with its message.

        Raises:
            OutboxError: it is damaged.
        """
        if source in self._noted.damaged_sources:
            raise OutboxError(
                f"{self.path}: the position of source {source!r} is damaged; set it again with Outbox.set_position()"
            )
        return self._noted.position(source)

    def set_position(self, source: str, value: int | str | None, timeout: float | None = None) -> None:
        """Write the position of a source without a message, and all changes that were noted before.

        Args:
            source: its name.
            value: the position; ``None`` to forget the source.
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: it could not be written, or not in time.
            TypeError, ValueError: as for `Position`.
        """
        Position(source, 0 if value is None else value)

        def write() -> None:
            self._commit_if_dirty()
            self._noted.set_position(self._file, source, value)

        self._use_file(write, _deadline(timeout))

    # Committing.

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
        """Return when a message is on disk. Commit all noted changes, unless another thread has done so.

        Args:
            sequence: of the message.
            timeout: seconds to wait for other threads, and for a file that another process has locked. ``None`` waits
                without limit for other threads, and 10 seconds for another process.

        Raises:
            OutboxError: it could not be written, or not in time. It stays noted, and the next commit tries again.
        """
        if self._access.durable < sequence:
            noted = self._noted
            self._use_file(
                lambda: self._commit(all_of_it=noted.settled_count >= _SETTLED_TOGETHER), _deadline(timeout), sequence
            )

    def commit(self, timeout: float | None = None) -> int:
        """Write all noted changes to disk.

        Args:
            timeout: as for `wait_durable`.

        Returns:
            The last sequence that is durable.

        Raises:
            OutboxError: the changes could not be written, or not in time. They stay noted, and the next commit tries
                again.
        """
        self._use_file(self._commit_if_dirty, _deadline(timeout))
        return self._access.durable

    def _commit_if_dirty(self) -> None:
        if self.dirty:
            self._commit()

    def _commit(self, *, all_of_it: bool = True) -> None:
        """Write all noted changes, or only the messages."""
        self._access.durable = self._noted.write(self._file, all_of_it=all_of_it)

    # Reading.

    def read(self, after: int = 0, limit: int = 1000, max_bytes: int | None = None) -> list[StoredMessage]:
        """Return messages that are on disk and not known to be settled, in order.

        A damaged message is never among them: it is set aside, see `damaged`.

        Args:
            after: a sequence; only later messages are returned.
            limit: the most messages to return.
            max_bytes: how many bytes at most, but at least one message; ``None`` for no limit.

        Raises:
            OutboxError: the file cannot be read.
        """

        def read() -> list[StoredMessage]:
            self._commit_if_dirty()
            count = limit if max_bytes is None else outboxfile.how_many(self._file, after, limit, max_bytes)
            only = outboxfile.NOT_SET_ASIDE
            messages, damaged = outboxfile.read(self._file, after, count, self._written_before, only)
            if damaged:
                outboxfile.set_aside(self._file, damaged)
                self._damaged |= damaged
            return list(map(self._correct_time, messages))

        return self._use_file(read) or []

    def wall_time(self, now: float) -> float:
        """Convert a time of `time.monotonic` to seconds since 1970, as used for messages that this process puts."""
        return now + self._wall_offset

    def _correct_time(self, stored: StoredMessage) -> StoredMessage:
        """Give a message of an earlier process a time that is not after the opening of the outbox."""
        if stored.at <= self._opened_at or stored.sequence > self._written_before[0]:
            return stored
        return replace(stored, at=self._opened_at)

    def expire(self, before: float) -> list[StoredMessage]:
        """Remove messages that are too old to be sent.

        Args:
            before: seconds since 1970; messages that were put earlier are removed.

        Returns:
            The removed messages, in order. The next commit deletes them from the disk.

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
        """Remove a message in any state. The next commit deletes it.

        Args:
            sequence: of the message.

        Raises:
            OutboxError: it is not in the outbox, or the file cannot be read.
        """

        def check() -> None:
            self._commit_if_dirty()
            if not outboxfile.is_there(self._file, sequence):
                raise outboxfile.not_there(self._file, sequence)

        self._use_file(check)
        self.settle(sequence)
        self._damaged.pop(sequence, None)

    # Closing.

    def unwritten(self) -> dict[int, StoredMessage]:
        """Return the messages that are put and not on disk, by sequence.

        After a `close` that fails, they never will be on disk.
        """
        return self._noted.unwritten()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._lock_file.released

    def stop_waiting(self, timeout: float) -> None:
        """Limit how many more seconds commits of all threads wait for a file that another process has locked."""
        self._file.stop_at = _deadline(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Commit, and release the outbox for others. A second call does nothing.

        Args:
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: noted changes could not be written; the outbox is closed anyway, see `unwritten`. Or another
                thread was still writing at the deadline, and the outbox is not closed.
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

    def __exit__(self, *_error: object) -> None:
        self.close()

    @staticmethod
    def look(path: str | os.PathLike[str], after: int = 0, limit: int = 1000) -> list[StoredMessage]:
        """Return messages of an outbox, even while a producer uses it: as `read`, but without changes or locks.

        Damaged messages are left out, see `look_damaged`.

        Args:
            path: of the file.
            after: a sequence; only later messages are returned.
            limit: the most messages to return.

        Raises:
            OutboxError: there is no outbox, or it cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.look(file, after, limit)

    @staticmethod
    def look_damaged(path: str | os.PathLike[str]) -> dict[int, str]:
        """Return the damaged messages of an outbox and their errors, by sequence, even while a producer uses it.

        Args:
            path: of the file.

        Raises:
            OutboxError: there is no outbox, or it cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.look_damaged(file)

    @staticmethod
    def find(path: str | os.PathLike[str], sequence: int) -> StoredMessage:
        """Return one message of an outbox, even while a producer uses it.

        Args:
            path: of the file.
            sequence: of the message.

        Raises:
            OutboxError: it is not in the outbox, or cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.find(file, sequence)
