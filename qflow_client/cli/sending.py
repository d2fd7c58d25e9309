"""One run of ``qflow send``: sends records, and tracks the outcome of each record.

If the producer has an outbox, the outbox keeps each record until it is delivered (``outbox_keep_undelivered``). Each
commit stores records, and the position in the input file after these records (E13). So if a run is killed, each record
up to the stored position is confirmed or in the outbox. The next run delivers the outbox, then later records.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from qflow_client import (
    ConfirmTimeout,
    Message,
    NotDurable,
    OutboxError,
    OutboxFull,
    Outcome,
    Position,
    Producer,
    ProducerClosed,
    ProducerFlowed,
    Receipt,
    UndeliveredMessages,
)
from qflow_client.cli import text
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.records import BadRecord, Record, RecordSource
from qflow_client.cli.resuming import Reached
from qflow_client.cli.stopping import Stopped, Stopping

__all__ = ["Sending", "Tally"]

# Maximum seconds for which `Sending.close` waits for the remaining answers of the broker.
_GRACE = 2.0
# Maximum number of undelivered messages whose error texts are kept and printed.
_MAX_REPORTED = 5
# Maximum number of records that are read and sent together. A batch with this number of bytes gets no more records,
# because all of its records are in memory.
_MAX_BATCH = 64
_MAX_BATCH_BYTES = 1 << 20
# Maximum seconds to send a batch of several records at the rate limit. A failure is noticed only after the batch.
_MAX_BATCH_SECONDS = 0.1
_MARK = "x-qflow-republished"


@dataclass(slots=True)
class Tally:
    """The result of a run so far.

    Attributes:
        admitted: number of records that the producer accepted.
        confirmed_up_to: highest record number up to which every record is skipped, confirmed or in the outbox.
        confirmed_later: how many records after the first failed record are confirmed or in the outbox.
        failures: error texts of the first undelivered messages, at most `_MAX_REPORTED`.
        failures_left_out: number of undelivered messages whose texts are not in `failures`.
        left_failed: number of messages that earlier runs left in the outbox, and that this run could not deliver.
        seconds_flowed: seconds for which each kind of hold held the producer.
    """

    admitted: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    confirmed_up_to: int = 0
    confirmed_later: int = 0
    failures: list[str] = field(default_factory=list)
    failures_left_out: int = 0
    left_failed: int = 0
    times_flowed: int = 0
    seconds_flowed: dict[str, float] = field(default_factory=dict)

    @property
    def confirmed(self) -> int:
        return self.outcomes[Outcome.CONFIRMED]

    @property
    def stored(self) -> int:
        """The number of records that stay in the outbox. The next producer with this outbox sends these records."""
        return self.outcomes[Outcome.STORED]

    @property
    def not_confirmed(self) -> dict[str, int]:
        return {outcome.value: n for outcome, n in self.outcomes.items() if outcome is not Outcome.CONFIRMED}

    @property
    def failed(self) -> int:
        """The number of settled records that are neither confirmed nor in the outbox."""
        return self.outcomes.total() - self.confirmed - self.stored

    def settle(self, record: Record, receipt: Receipt) -> None:
        """Count the outcome of a settled record. The records must come in order."""
        outcome = receipt.outcome
        assert outcome is not None
        if outcome in (Outcome.CONFIRMED, Outcome.STORED):
            if self.failed:
                self.confirmed_later += 1
            else:
                self.confirmed_up_to = record.number
        self.outcomes[outcome] += 1
        self._tell(f"record {record.number} (line {record.line})", receipt)

    def left(self, receipts: Iterable[Receipt]) -> None:
        """Count messages that an earlier run had left in the outbox, and that this run could not deliver."""
        for receipt in receipts:
            self.left_failed += 1
            self._tell("a message of an earlier run", receipt)

    def _tell(self, what: str, receipt: Receipt) -> None:
        # Report no message without a failure: it stays in the outbox only because the producer was closed.
        if receipt.failure is None:
            return
        if len(self.failures) < _MAX_REPORTED:
            self.failures.append(f"{what}: {receipt.error()}")
        else:
            self.failures_left_out += 1


class _Item(NamedTuple):
    """A record, the message to send, and the position after the record (None if the run stores no positions)."""

    record: Record
    message: bytes | Message
    position: Position | None


class Sending:
    """Sends records with a producer, and tracks their outcomes.

    Args:
        producer: producer that sends the records. `close` of this class closes the producer.
        skip: number of records to skip at the start of the file.
        source: name under which the outbox stores the position in the file; ``None`` if the run stores no positions.
        begins_anew: whether to start after `skip` records even if an earlier run has stored a position.
    """

    def __init__(
        self, producer: Producer, skip: int = 0, source: str | None = None, *, begins_anew: bool = False
    ) -> None:
        self.producer = producer
        self.tally = Tally(confirmed_up_to=skip)
        #: Number of the record after which this run continues an earlier run; 0 if it continues no earlier run.
        self.resumed_behind = 0
        self._source = source
        self._skip = skip
        self._begins_anew = begins_anew
        # Number of the last record that this run has read, and highest number of a record that earlier runs have sent.
        self._found = self._sent_before = 0
        # Sent records whose outcomes are not in the tally yet, in the order of the records.
        self._pending: deque[tuple[Record, Receipt]] = deque()
        # Receipts of undelivered messages that `account` has moved from `_pending` to the tally.
        self._failed: list[Receipt] = []
        # Locked while `close` runs. So a second call of `close` in another thread waits until the producer is closed.
        self._closing = threading.Lock()

    def send_all(self, records: RecordSource, stopping: Stopping) -> None:
        """Send every record, and wait for the confirms.

        Raises:
            BadRecord: a record cannot be read. All earlier records were sent, and no later record was sent.
            CommandError: a record was not sent or not confirmed, or the file has changed or has fewer than `skip`
                records. After a record that was not sent, no later record was sent.
            Stopped: a signal came before every record was confirmed.
        """
        self._resume(records)
        supply = iter(records)
        bad: BadRecord | None = None
        while bad is None:
            items, bad = self._read(supply, records, stopping)
            if not items and bad is None:
                break
            self._send(items, stopping)
        if bad is not None:
            self._flush()
            raise BadRecord(f"{bad}; this record and all after it were not sent") from bad
        found = self._found
        if found < self._skip:
            self.tally.confirmed_up_to = 0
            raise CommandError(f"--skip {self._skip}: the input has only {text.count(found, 'record')}; skip fewer")
        late = self._flush()
        if late is not None:
            state = self.producer.flow_state
            self.close()
            if self.account():
                flowed = f", {text.flow_line(state)}" if state.flowed else ""
                self._fail(stopping, f"not every record was confirmed: {late}{flowed}")
        if self.account():
            self._fail(stopping, "not every record was confirmed")

    def _resume(self, records: RecordSource) -> None:
        """Start after the records that an earlier run has sent, unless `_begins_anew` is True."""
        if self._source is None:
            return
        if self._begins_anew:
            # Records up to number `sent` may be second copies, so `_read` marks them. If `sent` is unknown, mark none.
            with suppress(CommandError, OutboxError):
                self._sent_before = self._stored_position(self._source, records).sent
            return
        try:
            reached = self._stored_position(self._source, records)
            records.resume(reached.place)
        except (CommandError, OutboxError) as error:
            raise CommandError(f"{error}; --from-start sends the whole file") from error
        self._sent_before = reached.sent
        self.resumed_behind = self.tally.confirmed_up_to = reached.place.number

    def _stored_position(self, source: str, records: RecordSource) -> Reached:
        return Reached.parse(self.producer.position(source), records.format, records.name)

    def _read(
        self, supply: Iterator[Record], records: RecordSource, stopping: Stopping
    ) -> tuple[list[_Item], BadRecord | None]:
        """Return the next records, and an error if the record after these records cannot be read.

        If the run stores positions, it reads records in batches, because the outbox stores a batch with one commit.
        Otherwise it reads one record at a time, because a slow source must not delay a record that has been read.
        """
        items: list[_Item] = []
        size = 0
        most = 1 if self._source is None else _MAX_BATCH
        rate = self.producer.settings.rate
        if rate is not None:
            most = max(1, min(most, int(rate * _MAX_BATCH_SECONDS)))
        while len(items) < most and size < _MAX_BATCH_BYTES:
            try:
                with stopping.breakable():
                    record = next(supply, None)
            except BadRecord as error:
                return items, error
            if record is None:
                break
            self._found = record.number
            if record.number <= self._skip:
                continue
            message = record.message if record.number > self._sent_before else _marked(record.message)
            position = None
            if self._source is not None:
                sent = max(record.number, self._sent_before)
                position = Position(self._source, str(Reached(records.format, records.place, sent)))
            items.append(_Item(record, message, position))
            size += len(message.body if isinstance(message, Message) else message)
        return items, None

    def _send(self, items: Sequence[_Item], stopping: Stopping) -> None:
        while items:
            error: Exception | None = None
            try:
                receipts: Sequence[Receipt] = self.producer.send_many(
                    [each.message if each.position is None else (each.message, each.position) for each in items]
                )
            except NotDurable as failure:
                # The last receipt belongs to the message that is not on disk. The producer still sends this message.
                receipts = failure.receipts
            except (OutboxFull, ProducerClosed, ProducerFlowed, TypeError, ValueError) as failure:
                receipts, error = getattr(failure, "receipts", ()), failure
            for each, receipt in zip(items, receipts, strict=False):
                self.tally.admitted += 1
                self._pending.append((each.record, receipt))
            if error is not None:
                if isinstance(error, ProducerClosed) and stopping.signal is not None:
                    raise Stopped from None
                code = ExitCode.FLOWED if isinstance(error, ProducerFlowed) else ExitCode.FAILED
                record = items[len(receipts)].record
                words = f"record {record.number} (line {record.line}) and all after it were not sent: {error}"
                raise CommandError(words, code) from error
            if self.account():
                self._fail(stopping, "not every record was confirmed; nothing more was sent")
            items = items[len(receipts) :]

    @staticmethod
    def _fail(stopping: Stopping, why: str) -> NoReturn:
        # After a signal, report the signal, because the signal may have caused the failure.
        if stopping.signal is not None:
            raise Stopped
        raise CommandError(why)

    def account(self) -> int:
        """Add the outcomes of settled receipts to the tally, and return how many messages are undelivered so far."""
        pending = self._pending
        while pending and pending[0][1].done:
            receipt = pending[0][1]
            if not receipt.delivered:
                self._failed.append(receipt)
            record, _ = pending.popleft()
            self.tally.settle(record, receipt)
        return self.tally.failed + self.tally.stored + self.tally.left_failed

    def _flush(self) -> ConfirmTimeout | None:
        """Wait until all messages are settled. Return the producer's error if this takes too long."""
        try:
            self.producer.flush()
        except ConfirmTimeout as error:
            return error
        except UndeliveredMessages as error:
            self.tally.left(self._of_earlier_runs(error))
        return None

    def _of_earlier_runs(self, error: UndeliveredMessages) -> list[Receipt]:
        """Return those receipts of `error` whose messages an earlier run had left in the outbox."""
        # Read `_pending` before `_failed`, because another thread may move a receipt from `_pending` to `_failed`.
        ours = {id(receipt) for _, receipt in tuple(self._pending)}
        ours.update(map(id, self._failed))
        return [receipt for receipt in error.receipts if id(receipt) not in ours]

    def close(self) -> None:
        """Wait a short time for the remaining answers, and close the producer. Any thread may call this method."""
        with self._closing:
            if self.producer.closed:
                return
            # Read the flow state before closing, so that the holds during the close do not count.
            state = self.producer.flow_state
            self.tally.times_flowed = state.times_flowed
            self.tally.seconds_flowed = dict(state.seconds_flowed)
            try:
                self.producer.close(timeout=_GRACE)
            except UndeliveredMessages as error:
                # Do not count messages without an answer: they stay in the outbox, and the next run sends them.
                self.tally.left(each for each in self._of_earlier_runs(error) if each.failure is not None)


def _marked(message: bytes | Message) -> Message:
    """Return the message with the header `_MARK`, because the broker may already have a copy of the message."""
    if isinstance(message, Message):
        return replace(message, headers={**(message.headers or {}), _MARK: True})
    return Message(message, headers={_MARK: True})
