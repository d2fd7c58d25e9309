"""`Outbox` keeps messages on disk until they are settled. The class does not depend on producers or event loops.

Changes (new and settled messages) are first noted in memory, which is fast and touches no disk. A commit writes the
noted changes in one transaction. A producer uses an outbox as follows:

1. Under its own lock, the producer calls `Outbox.put`. This call notes a message and returns its *sequence*, a number.
2. Before `send` returns, the producer calls `Outbox.wait_durable` without its lock. This call writes the message to
   disk, together with all messages that other threads have put meanwhile. For a call on an event loop, or with a short
   deadline, another thread calls `Outbox.commit` instead, once for many messages.
3. `Outbox.settle` records settled messages, in any order. The next `Outbox.commit` deletes them. If the process dies
   before that commit, the next producer sends them again with a mark (the header ``x-qflow-republished``).
4. Most messages may be written to the broker as soon as they are put. A message with a position waits (see 6). A *held*
   message waits too: it could not be sent at once, so it was put with ``permit=False``. The producer reads held
   messages with `Outbox.read`, permits them with `Outbox.permit` and `Outbox.commit`, and then sends them. So after a
   crash, the file shows which messages may have been written. Only these messages may be second copies.
5. After a start, the producer calls `Outbox.read` for the remaining messages, in batches, and sends them before any new
   message. `StoredMessage.to_send` adds the mark if the message may be a second copy.
6. `Outbox.put` accepts a `Position`: how far the program has read the source of the message (E13). The same commit
   writes the message and the position. The producer sends the message only after that commit. So after a crash, the
   broker has no message that comes after the position on disk. Earlier messages get the mark if they are sent again.
7. A message that cannot be read is set aside. The message stays in the file and still uses its bytes. `Outbox.damaged`
   lists such messages, and `Outbox.drop` removes one. A damaged message does not stop the messages after it.

Invariants: Sequences are assigned in order, and never twice, even across processes. All unsettled messages up to
`Outbox.durable` are on disk. Changes of a failed or interrupted commit stay noted, and the next commit writes them
again. Only a thread that has access (`FileAccess`) uses the file. A caller can limit each wait for access, and for a
lock of another process on the file.
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
from qflow_client.database import BUSY, LockFile, OpenFiles, check_name
from qflow_client.message import Message
from qflow_client.outbox import file as outboxfile
from qflow_client.outbox.access import FileAccess
from qflow_client.outbox.errors import OutboxError, OutboxFull, OutboxInUse
from qflow_client.outbox.file import StoredMessage
from qflow_client.outbox.noted import Noted
from qflow_client.position import Position
from qflow_client.redaction import is_url, shown

__all__ = ["Outbox"]

# `wait_durable` also deletes settled messages if there are at least this many.
_SETTLED_TOGETHER = 500
# Bytes that a message uses in addition to its content.
_ROW = 64
_MAX_BYTES = 1 << 30

_T = TypeVar("_T")


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


class Outbox:
    """Messages on disk, in an SQLite file. Any number of threads of one process may use an `Outbox`.

    Args:
        path: the path of the file, which is created if necessary. The lock file beside it is never deleted.
        max_bytes: maximum bytes of all messages; each uses 64 bytes besides its content. The file may be larger.
        synchronous: with ``"normal"``, committed messages survive any death of the process. With ``"full"``, they also
            survive a crash of the machine, but each commit waits for the disk.
        timeout: maximum seconds to wait while the file is opened, if another process has locked it.

    Raises:
        OutboxInUse: another process, or another producer in this process, uses the outbox.
        OutboxError: the file cannot be opened, is damaged, or is not an outbox.
        ValueError: `synchronous` is neither ``"normal"`` nor ``"full"``, or `max_bytes` is not above 0.
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
        #: The absolute path of the file, because the process may change its working directory.
        # A URL stays unchanged, so that `LockFile` recognises and rejects it.
        self.path = Path(path if is_url(path) else os.path.abspath(path))  # noqa: PTH100  # does not follow links
        # The difference between seconds since 1970 and `time.monotonic`, for the times of messages. Computed once, so
        # that a later change of the wall clock has no effect.
        self._wall_offset = time.time() - time.monotonic()
        self._opened_at = time.time()
        self.max_bytes = max_bytes
        self._lock_file = LockFile(
            self.path,
            error=OutboxError,
            in_use=OutboxInUse,
            told=("another producer", "give each producer an outbox of its own"),
        )
        with ExitStack() as after_error:
            after_error.callback(self._lock_file.release)
            check_name(self.path, OutboxError, "producers")
            self._file = outboxfile.open_file(self.path, synchronous=synchronous, timeout=timeout)
            # After an error, close the file at once. Otherwise only the garbage collector would close it.
            after_error.callback(self._file.close)
            self._open_files = OpenFiles(self._file, self._lock_file)
            self._noted = Noted(self._file)
            aside = outboxfile.aside(self._file)
            after_error.pop_all()
        last = self._noted.last
        self._access = FileAccess(self._file, last)
        # The last sequence and the last permitted sequence at the opening. An earlier process may have sent messages up
        # to these sequences, so these messages may be second copies.
        self._written_before: tuple[int, int] = last, self._noted.permitted_durable
        # The unsettled messages of a deleted file, by sequence; known when the outbox is closed.
        self._lost: dict[int, StoredMessage] = {}
        #: Whether `close` has found that the file is deleted, and has not read its messages yet.
        self.is_lost = False
        # The sequence of each message that is set aside, and the reason.
        self._damaged: dict[int, str] = dict.fromkeys(aside, "it was set aside before")

    @property
    def last(self) -> int:
        """The last assigned sequence; 0 if no sequence was ever assigned."""
        return self._noted.last

    @property
    def durable(self) -> int:
        """The sequence up to which all unsettled messages are on disk."""
        return self._access.durable

    @property
    def size(self) -> int:
        """Bytes of all messages, including settled messages whose deletion is not committed."""
        return self._noted.size

    @property
    def left(self) -> int:
        """Number of unsettled messages that are not damaged; inexact while other threads use the outbox."""
        left = len(self) - self._noted.settled_count
        return left if left > 0 and not self._lost else 0

    @property
    def damaged(self) -> dict[int, str]:
        """The sequence and error of each damaged message. Such a message is never sent, and stays until `drop`."""
        return self._damaged.copy()

    def __len__(self) -> int:
        return self._noted.count - len(self._damaged)

    def has_room(self, size: int, *, if_empty: bool = False) -> bool:
        """Return True if a body of `size` bytes fits, without properties, whose size is not known yet.

        Args:
            if_empty: whether to check the room of an empty outbox instead, to find a body that never fits.
        """
        return (0 if if_empty else self._noted.size) + size + _ROW <= self.max_bytes

    def full_error(self, size: int, payload: bytes | Message, exchange: str, routing_key: str) -> OutboxFull:
        """Return the error for a message that does not fit into the outbox."""
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
        """Note a message, and return its sequence. The next commit writes the message to disk.

        Args:
            payload: the body, or a message with properties. The id of the message has precedence over `message_id`.
            message_id: the id for a message without an id.
            permit: whether the message may be written to a broker now. If False, `Outbox.permit` allows this later.
            overdraw: whether to ignore `max_bytes`, for callers that have checked `has_room` before.
            position: how far the source of the message has been read, or ``None``. The same commit writes the position.

        Raises:
            OutboxFull: there is no room. A `commit` makes room if messages were settled.
            TypeError, ValueError: AMQP cannot represent the message.
        """
        if position is not None and not isinstance(position, Position):
            raise TypeError(f"position must be a Position, not {type(position).__name__}: {shown(position)}")
        identity = encode_short_string(message_id, "message_id")
        if type(payload) is bytes:
            header, body = plain_content_header(len(payload), identity), payload
        else:
            message = payload if isinstance(payload, Message) else Message(payload)
            header, body = content_header(message, identity), message.body
        # A name that cannot be encoded must raise an error here: otherwise every later commit would fail.
        names = len(encode_short_string(exchange, "exchange")) + len(encode_short_string(routing_key, "routing_key"))
        size = len(header) + len(body) + names - 2 + _ROW
        at = self.wall_time(time.monotonic())
        row = 0 if permit else outboxfile.HELD, at, exchange, routing_key, header, body
        sequence = self._noted.put(size, None if overdraw else self.max_bytes, row, position)
        if not sequence:
            raise self.full_error(size, payload, exchange, routing_key)
        return sequence

    def permit(self, sequence: int) -> None:
        """Allow held messages up to a sequence to be written to a broker after the next `commit`."""
        self._noted.permit(sequence)

    def settle(self, first: int, last: int | None = None) -> None:
        """Settle messages `first` to `last` (``None``: only `first`). The next `commit` deletes these messages."""
        self._noted.settle(first, first if last is None else last)

    def withdraw(self, first: int, last: int) -> None:
        """Withdraw messages `first` to `last`. The next commit deletes them, and restores the previous positions.

        Messages after the sequence `last` must not have positions of the same sources.
        """
        self._noted.withdraw(first, last)

    def position(self, source: str) -> int | str | None:
        """Return how far a source has been read: its last position; ``None`` if there is none.

        The position may not be on disk yet.

        Raises:
            OutboxError: the position is damaged.
        """
        if source in self._noted.damaged_sources:
            raise OutboxError(
                f"{self.path}: the position of source {source!r} is damaged; set it again with Outbox.set_position()"
            )
        return self._noted.position(source)

    def set_position(self, source: str, value: int | str | None, timeout: float | None = None) -> None:
        """Write the position of a source to disk, without a message. All earlier changes are written first.

        Args:
            value: the position; ``None`` to forget the source.
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: the position could not be written, or not in time.
            TypeError, ValueError: as for `Position`.
        """
        Position(source, 0 if value is None else value)

        def write() -> None:
            self._check_file()
            self._commit_if_dirty()
            self._noted.set_position(self._file, source, value)

        self._use_file(write, _deadline(timeout))

    @property
    def dirty(self) -> bool:
        """Whether a commit would change anything on disk."""
        return self._noted.is_dirty

    def _use_file(self, action: Callable[[], _T], deadline: float = math.inf, sequence: float = math.inf) -> _T | None:
        """Same as `FileAccess.run`, but raise an `OutboxError` at the deadline."""
        try:
            return self._access.run(action, deadline, sequence)
        except TimeoutError:
            raise OutboxError(f"{self.path}: another thread is still writing to it") from None

    def wait_durable(self, sequence: int, timeout: float | None = None) -> None:
        """Wait until a message is on disk. If necessary, commit it together with all other noted messages.

        Args:
            timeout: seconds to wait for other threads, and for a file that another process has locked. With ``None``,
                the wait for other threads has no limit, and the wait for another process has a limit of 10 seconds.

        Raises:
            OutboxError: the write failed, or took too long. The message stays noted, and the next commit tries again.
        """
        if self._access.durable < sequence:
            noted = self._noted
            self._use_file(
                lambda: self._commit(all_of_it=noted.settled_count >= _SETTLED_TOGETHER), _deadline(timeout), sequence
            )

    def commit(self, timeout: float | None = None) -> int:
        """Write all noted changes to disk. Return the last sequence that is on disk.

        Args:
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: the write failed, or took too long. The changes stay noted, and the next commit tries again.
        """
        self._use_file(self._commit_if_dirty, _deadline(timeout))
        return self._access.durable

    def _commit_if_dirty(self) -> None:
        if self.dirty:
            self._commit()

    def _commit(self, *, all_of_it: bool = True) -> None:
        self._check_file()
        self._access.durable = self._noted.write(self._file, all_of_it=all_of_it)

    def _check_file(self) -> None:
        self._file.check_process()
        gone = self._open_files.first_gone()
        if gone == self.path:
            raise OutboxError(f"{self.path}: the file was deleted, moved or replaced while it is in use")
        if gone is not None:
            raise OutboxError(f"{gone} was deleted or replaced; close this producer, and make another")

    def _is_gone(self) -> bool:
        return self._open_files.first_gone() == self.path

    def read(self, after: int = 0, limit: int = 1000, max_bytes: int | None = None) -> list[StoredMessage]:
        """Commit, and then return messages that are not settled, in order.

        Damaged messages are not returned, but set aside (see `damaged`).

        Args:
            after: only messages with a higher sequence are returned.
            limit: maximum number of messages to return.
            max_bytes: maximum bytes of all returned messages; ``None`` for no limit. A single message may be larger.

        Raises:
            OutboxError: the commit fails, or the file cannot be read.
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
        """Convert a time of `time.monotonic` to seconds since 1970. `put` stores the converted time of each message."""
        return now + self._wall_offset

    def _correct_time(self, stored: StoredMessage) -> StoredMessage:
        """If a message of an earlier process seems to come from the future, use the time of the opening instead."""
        if stored.at <= self._opened_at or stored.sequence > self._written_before[0]:
            return stored
        return replace(stored, at=self._opened_at)

    def expire(self, before: float) -> list[StoredMessage]:
        """Remove messages that are too old to be sent.

        Args:
            before: seconds since 1970; messages that were put earlier are removed.

        Returns:
            The removed messages, in order. The next `commit` deletes them from disk.

        Raises:
            OutboxError: a commit fails, or the file cannot be read.
        """
        found: list[StoredMessage] = []
        while batch := [each for each in self.read(found[-1].sequence if found else 0) if each.at < before]:
            found += batch
        for each in found:
            self.settle(each.sequence)
        return found

    def drop(self, sequence: int) -> None:
        """Remove a message, even if it is damaged or held. The next `commit` deletes the message from the file.

        Raises:
            OutboxError: the message is not in the outbox, or the file cannot be read.
        """

        def check() -> None:
            self._commit_if_dirty()
            if not outboxfile.is_there(self._file, sequence):
                raise outboxfile.not_there(self._file, sequence)

        self._use_file(check)
        self.settle(sequence)
        self._damaged.pop(sequence, None)

    def unwritten(self) -> dict[int, StoredMessage]:
        """Return the unsettled messages that are noted and not on disk; the keys are sequences.

        After a failed `close`, these messages are not written any more. If the file was deleted, they are all unsettled
        messages.
        """
        return self._lost | self._noted.unwritten()

    @property
    def is_closed(self) -> bool:
        return self._lock_file.released

    def stop_waiting(self, timeout: float) -> None:
        """End every wait for a file that another process has locked, at most `timeout` seconds from now."""
        self._file.stop_at = _deadline(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Commit, and release the outbox for other producers. A second call does nothing.

        Args:
            timeout: as for `wait_durable`.

        Raises:
            OutboxError: noted changes could not be written. The outbox is closed (see `unwritten`), unless another
                thread was still writing at the deadline.
        """
        if not self.is_closed:
            self._use_file(self._close, _deadline(timeout))

    def _close(self) -> None:
        if self.is_closed:
            return
        try:
            if self._is_gone():
                self._lose()
            else:
                self._commit_if_dirty()
        except BaseException:
            self._noted.give_up()
            raise
        finally:
            try:
                self._file.close()
            finally:
                self._lock_file.release()

    def _lose(self) -> None:
        """Read the messages of a deleted file, because closing loses them. Raise an error if there are any."""
        self.is_lost, noted = True, self._noted
        settled = noted.settled()
        # Do not write the noted changes first, because the disk may be full.
        messages, _ = outboxfile.read(self._file, 0, noted.count, self._written_before, outboxfile.NOT_SET_ASIDE)
        self._lost = {each.sequence: each for each in messages if each.sequence not in settled} | noted.unwritten()
        self.is_lost = False
        noted.forget(len(self._damaged))
        if self._lost:
            words = "the file was deleted, moved or replaced"
            raise OutboxError(f"{self.path}: {words}, and {len(self._lost)} messages with it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @staticmethod
    def look(path: str | os.PathLike[str], after: int = 0, limit: int = 1000) -> list[StoredMessage]:
        """Return messages of an outbox, like `read`, but without changes or locks, even while a producer is using it.

        Damaged messages are left out, see `look_damaged`.

        Args:
            after: only messages with a higher sequence are returned.
            limit: maximum number of messages to return.

        Raises:
            OutboxError: there is no outbox, or it cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.look(file, after, limit)

    @staticmethod
    def look_damaged(path: str | os.PathLike[str]) -> dict[int, str]:
        """Return the sequence and the error of each damaged message, even while a producer is using the outbox.

        Raises:
            OutboxError: there is no outbox, or it cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.look_damaged(file)

    @staticmethod
    def find(path: str | os.PathLike[str], sequence: int) -> StoredMessage:
        """Return one message of an outbox, even while a producer is using the outbox.

        Raises:
            OutboxError: the message is not in the outbox, or cannot be read.
        """
        with outboxfile.open_to_look(path) as file:
            return outboxfile.find(file, sequence)
