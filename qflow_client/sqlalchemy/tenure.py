"""A tenure is the work of a relay with one database session and one producer, until an error or the relay's end.

After an error, the relay begins a new tenure. At its end, a tenure first closes the producer, so that no more messages
of this tenure can be sent. Last, it closes the session, which unlocks the partitions. The next tenure, in this or in
another relay, reads the table from the first row. So each rule below applies only within one tenure:

- A row is *permitted* before it is published. `Session.read` stores the id up to which rows of a partition may be sent.
  The id is on disk before the first of these rows is passed to the producer. A tenure first reads the stored id. It
  sends rows up to this id with the header of a second copy. An earlier tenure cannot have sent rows above this id.
- One transaction deletes confirmed rows, and permits further rows (`Session.read`).
- One thread passes the rows of a partition to the producer in the order in which the session reads them. The producer
  keeps that order, even if its own connection is lost.
- Before the tenure passes a row to the producer, it checks when the database last answered. After more than
  ``silence_of(lease)`` seconds without an answer, another relay may have the partition, so the tenure ends.

There are never more unsettled rows than the producer's window allows. While the producer has a hold that is not in
`_HARMLESS`, the tenure reads no rows.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice

from qflow_client.amqp.frames import FrameError, add_header
from qflow_client.errors import ProducerFlowed, UndeliveredMessages
from qflow_client.events import HoldKind
from qflow_client.message import REPUBLISHED, Message, decode_message, republished
from qflow_client.receipt import Outcome, Receipt
from qflow_client.redaction import printable
from qflow_client.sqlalchemy.sessions import FULL_PERIOD, LOOK, Aside, RelayError, Row, Session, silence_of
from qflow_client.sync import Producer
from qflow_client.telemetry import RelayMetrics

__all__ = ["RelayCounts", "Tenure", "Waker"]

# Maximum number of rows that one `Session.read` returns.
_PAGE = 1000
# If more rows exist, the relay reads them when this fraction of the window is free.
_MIN_FREE_WINDOW = 0.25
# Maximum seconds for which confirmed rows wait for the next read, which deletes them too.
_LINGER = 0.02
# Seconds between two checks whether the producer's holds are lifted.
_RETRY = 0.02
# These checks continue for this number of seconds after the thread was woken, for example by a flow event.
_RETRY_FOR = 0.2
# Minimum seconds between two polls if no commit wakes the relay.
_SHORTEST_POLL = 0.01
# Maximum number of holds that a relay shows in `application_name`, which PostgreSQL cuts after 63 bytes.
_MAX_SHOWN_HOLDS = 2
# During these holds a relay still reads rows, within its capacity and rate.
_HARMLESS = (HoldKind.CAPACITY, HoldKind.RATE, HoldKind.TRANSPORT)
# Messages with these outcomes go to the table of failed rows, because the broker would usually refuse them again.
_POISON = (Outcome.RETURNED, Outcome.REJECTED)

_monotonic = time.monotonic

logger = logging.getLogger("qflow_client")


class RelayCounts:
    """The counts of a relay since it was created.

    Attributes:
        confirmed: number of rows that the broker has confirmed, and that the relay has then deleted.
        marked: number of rows that were sent with the header of a possible second copy.
        set_aside: number of rows that were moved to the table of failed rows.
        tenures: how often the relay has begun to work, at its start and after errors.
    """

    def __init__(self, metrics: RelayMetrics) -> None:
        self._metrics = metrics
        self.confirmed = 0
        self.marked = 0
        self.set_aside = 0
        self.tenures = 0

    def count(self, **numbers: int) -> None:
        """Add numbers to the counts and to the metrics."""
        for name, number in numbers.items():
            setattr(self, name, getattr(self, name) + number)
        self._metrics.count(**numbers)

    def __repr__(self) -> str:
        names = ("confirmed", "marked", "set_aside", "tenures")
        return f"RelayCounts({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


class Waker:
    """Two connected sockets. A byte in `socket` ends a wait of the relay's thread."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.socket.setblocking(False)
        self._other.setblocking(False)

    def wake(self) -> None:
        """Wake the relay's thread. Any thread may call this method."""
        # If the socket is full, the bytes in it wake the thread, so no further byte is needed.
        with suppress(OSError):
            self._other.send(b"\0")

    def clear(self) -> bool:
        """Remove the bytes that `wake` has sent. Return True if there were bytes."""
        has_come = False
        with suppress(OSError):
            while self.socket.recv(4096):
                has_come = True
        return has_come

    def close(self) -> None:
        self.socket.close()
        self._other.close()


class Tenure:
    """One tenure. `lease` and `poll` are seconds, as for `OutboxRelay`.

    Only `settled` and `silence` may run on other threads.
    """

    def __init__(
        self,
        session: Session,
        counts: RelayCounts,
        metrics: RelayMetrics,
        waker: Waker,
        *,
        lease: float,
        poll: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._session = session
        self._counts = counts
        self._metrics = metrics
        self._waker = waker
        self._lease = lease
        self._poll = poll
        self._is_stopping = is_stopping
        #: The partitions that this relay has locked.
        self.mine: set[int] = set()
        # The planned change: partitions to unlock and to lock, both empty for a full sweep. None if nothing is planned.
        self._change: tuple[set[int], set[int]] | None = None
        # No full sweep is planned before this time.
        self._sweep_at = 0.0
        # When a message was last settled, or the last full sweep was planned.
        self._progress_at = 0.0
        # For each partition, the id up to which an earlier tenure may have sent rows. Empty after these rows are read.
        self._doubt: dict[int, int] = {}
        # Permitted rows that are not passed to the producer yet.
        self._pending: deque[Row] = deque()
        self._in_flight: dict[Receipt, Row] = {}
        # Settled receipts that `_collect` has not handled yet. The producer's callback thread adds them.
        self._settled: deque[Receipt] = deque()
        # Time when the thread was last woken.
        self._woken_at = 0.0
        # This number of settled receipts wakes the thread.
        self._wake_at = 1
        self._gone: list[int] = []
        self._oldest_gone_at = 0.0
        self._aside: list[Aside] = []
        # Text for a `RelayError` about the first settled message that is neither confirmed nor in `_aside`.
        self._failure: str | None = None
        # Whether all existing rows have been read. If so, the next read is at `_read_at`.
        self._is_dry = False
        self._pause = _SHORTEST_POLL
        self._read_at = 0.0
        self._look_at = 0.0
        # The text that was last passed to `Session.say`.
        self._said = ""
        self._answered_at = _monotonic()
        # When the producer was first seen without a channel after its newest one; infinity while a channel is open.
        self._lost_at = math.inf

    @property
    def silence(self) -> float:
        """Seconds since the start of the last statement that the database has answered."""
        return _monotonic() - self._answered_at

    def settled(self, receipt: Receipt) -> None:
        """Record a settled receipt. The producer's callback thread calls this method."""
        self._settled.append(receipt)
        if len(self._settled) >= self._wake_at:
            self._waker.wake()

    def run(self, producer: Producer) -> None:
        """Work until the relay stops or there is an error.

        Raises:
            RelayError: a message was not confirmed, or the database or the broker could not be reached for too long.
            Exception: an error of the database driver, or of the producer.
        """
        self._session.say("")
        unsubscribe = producer.on_flow(lambda _event: self._waker.wake(), kinds=set(HoldKind) - {HoldKind.CAPACITY})
        self._session.join()
        try:
            while True:
                if self._waker.clear():
                    self._woken_at = _monotonic()
                self._collect()
                if self._is_stopping():
                    self._drain()
                    return
                self._look_around(producer)
                if self._pending:
                    self._send(producer)
                next_read = self._next_read(producer)
                if next_read is not None and next_read <= _monotonic() and self._read(producer):
                    continue
                self._rest(producer)
        finally:
            unsubscribe()

    def _collect(self) -> None:
        """Decide for each settled message whether to delete its row, to move the row, or to end the tenure."""
        settled = self._settled
        if settled:
            self._progress_at = _monotonic()
        for _ in range(len(settled)):
            receipt = settled.popleft()
            row = self._in_flight.pop(receipt, None)
            if row is not None:
                self._sort(receipt, row)
        if self._failure is not None:
            raise RelayError(self._failure)

    def _sort(self, receipt: Receipt, row: Row) -> None:
        outcome = receipt.outcome
        if outcome is Outcome.CONFIRMED:
            if not self._gone:
                self._oldest_gone_at = _monotonic()
            self._gone.append(row.id)
        elif outcome in _POISON or receipt.costs_connection:
            self._set_aside(row, receipt.describe(), may_have_arrived=receipt.may_have_arrived)
        elif self._failure is None:
            self._failure = f"row {row.id} was not confirmed, and will be sent again: {receipt.describe()}"

    def _set_aside(self, row: Row, reply: str, *, may_have_arrived: bool) -> None:
        properties = row.properties
        if may_have_arrived:
            # If the message is moved back to the outbox (`Outbox.retry`), it is sent as a second copy.
            properties = add_header(properties, REPUBLISHED, True)
        self._aside.append(Aside(row.id, properties, printable(reply)))

    def _look_around(self, producer: Producer) -> None:
        """Check the producer's connection, the partitions that belong to this relay, and the time for a full sweep."""
        now = _monotonic()
        # The hold ``disconnected`` is no measure, because it stays on an open channel while the producer searches for a
        # message that costs the connection.
        channel = producer._protocol.channel
        if channel.number is not None:
            self._lost_at = math.inf
        elif self._lost_at == math.inf or channel.opened_at > self._lost_at:
            self._lost_at = now
        elif now - self._lost_at > self._lease / 2:
            raise RelayError("the broker could not be reached for half of the lease; other relays may reach it")
        if now >= self._look_at:
            self._look_at = now + LOOK
            self._say(hold.kind for hold in producer.flow_state.holds)
            if self._change is None:
                due = self._session.due()
                self._answered_at = now
                if due != self.mine:
                    self._change = self.mine - due, due - self.mine
        if self._change is None and now >= self._sweep_at and self._session.is_full_due():
            # A full sweep (see `postgresql`) may begin only when no row is unsettled, like a partition change.
            self._change = set(), set()
            self._progress_at = now
        if self._change is not None and not self._in_flight and not self._pending:
            self._change_partitions()
        elif self._change == (set(), set()) and now - self._progress_at > LOOK:
            # The broker does not confirm a message, for example of a queue without a leader. Send the other rows.
            self._change = None
            self._sweep_at = now + FULL_PERIOD

    def _say(self, holds: Iterable[str]) -> None:
        words = ", ".join(islice(holds, _MAX_SHOWN_HOLDS))
        if words != self._said:
            self._session.say(words)
            self._said = words

    def _change_partitions(self) -> None:
        assert self._change is not None
        leaving, coming = self._change
        self._change = None
        self._write()
        if leaving:
            self._give_up(leaving)
        taken = self._session.take(coming) if coming else {}
        self._metrics.change_partitions(len(taken))
        self.mine |= set(taken)
        self._doubt.update(taken)
        if taken or not coming:
            self._session.start_over()
            self._is_dry = False

    def _give_up(self, leaving: set[int]) -> None:
        """Unlock partitions that have no unsettled messages.

        All rows that this tenure has sent in these partitions are settled and removed. But rows that an earlier tenure
        may have sent can remain. `_doubt` has the highest possible id of these rows, and the session stores this id.
        """
        self._session.give_up({partition: self._doubt.pop(partition, 0) for partition in leaving})
        self.mine -= leaving
        self._metrics.change_partitions(-len(leaving))

    def _next_read(self, producer: Producer) -> float | None:
        """Return the time of the next read; ``None`` if a hold, a full window or other pending work prevents it."""
        if not self.mine or self._change is not None or self._pending or self._is_held(producer):
            return None
        room = self._room(producer)
        if room <= 0 or not (self._is_dry or room >= self._least_room(producer) or not self._in_flight):
            return None
        return self._read_at if self._is_dry else 0.0

    def _is_held(self, producer: Producer) -> bool:
        return any(hold.kind not in _HARMLESS for hold in producer.flow_state.holds)

    def _room(self, producer: Producer) -> int:
        return min(_PAGE, producer.available, producer.capacity - len(self._in_flight))

    def _least_room(self, producer: Producer) -> int:
        return max(1, int(producer.capacity * _MIN_FREE_WINDOW))

    def _read(self, producer: Producer) -> bool:
        """Read rows, and pass them to the producer. Return True if there were rows."""
        limit = self._room(producer)
        began = _monotonic()
        rows = self._session.read(limit, self._gone)
        self._deleted()
        self._answered_at = began
        if not self._session.has_more:
            self._is_dry = True
            self._pause = min(self._poll, _SHORTEST_POLL if rows else 2 * self._pause)
            self._read_at = began + (self._poll if self._session.is_notified else self._pause)
        else:
            self._is_dry = False
        if not rows:
            return False
        if not self._session.is_full:
            # The full sweep has ended, so all rows that existed when the partitions were locked have been read.
            self._doubt.clear()
        self._pending.extend(rows)
        self._send(producer)
        return True

    def _send(self, producer: Producer) -> None:
        pending, in_flight, doubt = self._pending, self._in_flight, self._doubt
        end = self._answered_at + silence_of(self._lease)
        marked = 0
        while pending:
            row = pending[0]
            try:
                message: Message = decode_message(row.properties, row.body)
            except FrameError as error:
                pending.popleft()
                self._set_aside(row, f"it is damaged: {error}", may_have_arrived=False)
                continue
            is_doubtful = row.id <= doubt.get(row.partition, 0)
            if is_doubtful:
                message = republished(message)
            if _monotonic() > end:
                raise RelayError("the database has not answered for almost the whole lease")
            try:
                receipt = producer.send_nowait(message, exchange=row.exchange, routing_key=row.routing_key)
            except ProducerFlowed:
                break
            except ValueError as error:
                pending.popleft()
                self._set_aside(row, f"it cannot be encoded: {error}", may_have_arrived=is_doubtful)
                continue
            in_flight[receipt] = row
            marked += is_doubtful
            pending.popleft()
        self._counts.count(marked=marked)

    def _write(self) -> None:
        """Delete the confirmed rows, and move the rows in `_aside` to the table of failed rows."""
        began = _monotonic()
        if self._aside:
            self._session.set_aside(self._aside)
            self._counts.count(set_aside=len(self._aside))
            for row in self._aside:
                logger.warning("outbox relay: row %d is set aside: %s", row.id, row.reply)
            self._aside.clear()
        if self._gone:
            self._session.delete(self._gone)
            self._deleted()
        self._answered_at = began

    def _deleted(self) -> None:
        """Count the confirmed rows that were deleted."""
        if self._gone:
            self._counts.count(confirmed=len(self._gone))
            self._gone.clear()

    def _rest(self, producer: Producer) -> None:
        """If due, ping the database, and delete or move settled rows. Then wait for a commit, `wake` or a deadline."""
        now = _monotonic()
        if now - self._answered_at > self._lease / 4:
            self._session.ping()
            self._answered_at = now
        if self._aside or (self._gone and now - self._oldest_gone_at >= _LINGER):
            self._write()
        until = [self._look_at, now + self._lease / 4]
        if self._gone:
            until.append(self._oldest_gone_at + _LINGER)
        next_read = self._next_read(producer)
        if next_read is not None:
            until.append(next_read)
        is_held = self._is_held(producer)
        # Check the producer again soon. After a flow event, the producer may still be flowed for a moment. No event
        # comes when the rate or the socket allows more messages.
        if (is_held and now - self._woken_at < _RETRY_FOR) or (self._pending and not is_held):
            until.append(now + _RETRY)
        needed = len(self._in_flight)
        if not self._is_dry:
            needed = min(needed, self._least_room(producer) - self._room(producer))
        self._wake_at = max(1, needed)
        if self._in_flight and len(self._settled) >= self._wake_at:
            return
        if self._session.wait(self._waker.socket, max(0.0, min(until) - now)):
            self._is_dry, self._read_at = False, 0.0

    def _drain(self) -> None:
        """Wait for confirms for at most half of the lease, so that the next tenure need not send second copies."""
        self._pending.clear()
        until = _monotonic() + self._lease / 2
        while self._in_flight and _monotonic() < until:
            self._wake_at = max(1, len(self._in_flight))
            if len(self._settled) < self._wake_at:
                self._session.wait(self._waker.socket, 0.1)
                self._waker.clear()
            self._collect()
            self._session.ping()
        self._write()
        if not self._in_flight:
            self._give_up(set(self.mine))

    def end(self, producer: Producer | None) -> None:
        """Close the producer, so that it sends no more messages. Delete or move settled rows. Close the session."""
        try:
            if producer is not None:
                with suppress(UndeliveredMessages):
                    producer.close(timeout=0)
                for receipt, row in self._in_flight.items():
                    self._sort(receipt, row)
                self._in_flight.clear()
                if self._gone or self._aside:
                    # If the session has failed, the rows stay, and the next tenure sends them as second copies.
                    with suppress(Exception):
                        self._write()
        finally:
            self._session.close()
            self._metrics.change_partitions(-len(self.mine))
            self.mine.clear()
