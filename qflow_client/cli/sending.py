"""One run of ``qflow send``: records go in, and each is accounted for.

The producer keeps everything in its outbox, if it has one, until it is delivered (``outbox_keep_undelivered``), and
stores how far the file was sent in the same commit as each record (E13). So a run may end anywhere: what it has sent is
confirmed or in the outbox, and the next run begins with the outbox and goes on behind the stored position.
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

# Seconds that answers which are on their way may take once sending has been given up.
_GRACE = 2.0
# How many failed records are told of one by one.
_TOLD = 5
# How many records of a file are sent together.
_TOGETHER = 64
# Seconds that those may take at a rate, so that it is seen soon what becomes of them.
_SPAN = 0.1
_MARK = "x-qflow-republished"


@dataclass(slots=True)
class Tally:
    """How far it got.

    Attributes:
        admitted: records that were taken for sending.
        outcomes: how many of them ended how.
        confirmed_up_to: the number of the last record before which, itself included, all are confirmed or stay in an
            outbox.
        confirmed_later: how many are confirmed behind one that is not.
        failures: the first records that were not delivered, as told to people.
        failures_left_out: how many more were not.
        left_failed: messages of an earlier run, from the outbox, that were not delivered.
        times_flowed: how often the producer became flowed.
        seconds_flowed: seconds that it was, by hold kind.
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
        """Records that the broker has confirmed."""
        return self.outcomes[Outcome.CONFIRMED]

    @property
    def stored(self) -> int:
        """Records that stay in the outbox: the next producer on it sends them."""
        return self.outcomes[Outcome.STORED]

    @property
    def not_confirmed(self) -> dict[str, int]:
        """How many records ended otherwise, by outcome."""
        return {outcome.value: n for outcome, n in self.outcomes.items() if outcome is not Outcome.CONFIRMED}

    @property
    def failed(self) -> int:
        """Records that were taken, and are neither confirmed nor in the outbox."""
        return self.outcomes.total() - self.confirmed - self.stored

    def settle(self, record: Record, receipt: Receipt) -> None:
        """Take note of a record's outcome, in the order of the records.

        Args:
            record: the record.
            receipt: of its message.
        """
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
        """Take note of what an earlier run had left in the outbox and was not delivered now."""
        for receipt in receipts:
            self.left_failed += 1
            self._tell("of an earlier run", receipt)

    def _tell(self, what: str, receipt: Receipt) -> None:
        # What stays in the outbox only because the producer was closed has not failed.
        if receipt.failure is None:
            return
        if len(self.failures) < _TOLD:
            self.failures.append(f"{what}: {receipt.error()}")
        else:
            self.failures_left_out += 1


class _Item(NamedTuple):
    """A record that is about to be sent; with how far the file is sent then, if that is stored."""

    record: Record
    message: bytes | Message
    position: Position | None


class Sending:
    """One run: feeds a producer with records, and keeps account of them.

    Args:
        producer: what to send with; closed by `close`.
        skip: how many records to leave out at the beginning.
        source: the name of the file's position in the outbox; ``None`` if no position is stored.
        begins_anew: whether to begin at the first record behind `skip`, wherever the stored position is.
    """

    def __init__(
        self, producer: Producer, skip: int = 0, source: str | None = None, *, begins_anew: bool = False
    ) -> None:
        self.producer = producer
        self.tally = Tally(confirmed_up_to=skip)
        #: The number of the last record that an earlier run had sent; 0 if there is none.
        self.resumed_behind = 0
        self._source = source
        self._skip = skip
        self._begins_anew = begins_anew
        # The numbers of the last record that was found, and of the last that an earlier run may have sent.
        self._found = self._sent_before = 0
        # What is not accounted for, in the order of the records.
        self._pending: deque[tuple[Record, Receipt]] = deque()
        # What is accounted for and was not delivered.
        self._failed: list[Receipt] = []
        # Held while the producer is being closed, so that a second close waits for the first.
        self._closing = threading.Lock()

    def send_all(self, records: RecordSource, stopping: Stopping) -> None:
        """Send every record, and wait for the confirms.

        Raises:
            BadRecord: a record cannot be read. What came before was sent, nothing after it.
            CommandError: the broker did not take a record, or flow control took too long; likewise.
            Stopped: a signal came.
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
            raise BadRecord(f"{bad}; nothing from there on was sent") from bad
        found = self._found
        if found < self._skip:
            self.tally.confirmed_up_to = 0
            raise CommandError(f"--skip {self._skip}: the input has no more than {text.count(found, 'record')}")
        late = self._flush()
        if late is not None:
            state = self.producer.flow_state
            # What is on its way may still be answered.
            self.close()
            if self.account():
                flowed = f", {text.flow_line(state)}" if state.flowed else ""
                self._fail(stopping, f"not every record was confirmed: {late}{flowed}")
        if self.account():
            self._fail(stopping, "not every record was confirmed")

    def _resume(self, records: RecordSource) -> None:
        """Begin behind what an earlier run has sent.

        Raises:
            CommandError: the file is not the one that was sent then.
        """
        if self._source is None:
            return
        if self._begins_anew:
            # What was sent before may be in the broker all the same. A position that cannot be read says nothing of it.
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
        """Return the next records, and the error if the one behind them cannot be read.

        Those of a file come many at a time, because they share a commit of the outbox. Others may be long in coming.
        """
        items: list[_Item] = []
        most = 1 if self._source is None else _TOGETHER
        rate = self.producer.settings.rate
        if rate is not None:
            most = max(1, min(most, int(rate * _SPAN)))
        while len(items) < most:
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
        return items, None

    def _send(self, items: Sequence[_Item], stopping: Stopping) -> None:
        """Send records.

        Raises:
            CommandError, Stopped: as `send_all`.
        """
        while items:
            error: Exception | None = None
            try:
                receipts: Sequence[Receipt] = self.producer.send_many(
                    [each.message if each.position is None else (each.message, each.position) for each in items]
                )
            except NotDurable as failure:
                # The last of them is that of the message that is not on disk. It tells what becomes of the message.
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
                raise self._not_sent(items[len(receipts)].record, error, code) from error
            if self.account():
                self._fail(stopping, "not every record was confirmed; nothing more was sent")
            items = items[len(receipts) :]

    @staticmethod
    def _fail(stopping: Stopping, why: str) -> NoReturn:
        # What comes of having been stopped is no failure of its own.
        if stopping.signal is not None:
            raise Stopped
        raise CommandError(why)

    def _not_sent(self, record: Record, error: Exception, exit_code: ExitCode) -> CommandError:
        return CommandError(
            f"record {record.number} (line {record.line}) and all after it were not sent: {error}", exit_code
        )

    def account(self) -> int:
        """Account for what is settled.

        Returns:
            How many messages are known not to be delivered.
        """
        pending = self._pending
        while pending and pending[0][1].done:
            receipt = pending[0][1]
            if not receipt.delivered:
                self._failed.append(receipt)
            record, _ = pending.popleft()
            self.tally.settle(record, receipt)
        return self.tally.failed + self.tally.stored + self.tally.left_failed

    def _flush(self) -> ConfirmTimeout | None:
        """Wait for the confirms; return the error if they do not come in time."""
        try:
            self.producer.flush()
        except ConfirmTimeout as error:
            return error
        except UndeliveredMessages as error:
            self.tally.left(self._of_earlier_runs(error))
        return None

    def _of_earlier_runs(self, error: UndeliveredMessages) -> list[Receipt]:
        """The receipts of messages that were in the outbox; the tally tells of the others one by one."""
        # In this order, because the other thread moves them from the one to the other.
        ours = {id(receipt) for _, receipt in tuple(self._pending)}
        ours.update(map(id, self._failed))
        return [receipt for receipt in error.receipts if id(receipt) not in ours]

    def close(self) -> None:
        """Give what is on its way a moment, and end the connection. For any thread."""
        with self._closing:
            if self.producer.closed:
                return
            # Closing is a hold of its own.
            state = self.producer.flow_state
            self.tally.times_flowed = state.times_flowed
            self.tally.seconds_flowed = dict(state.seconds_flowed)
            try:
                self.producer.close(timeout=_GRACE)
            except UndeliveredMessages as error:
                # What the broker has not answered stays in the outbox, and the next run finds out.
                self.tally.left(each for each in self._of_earlier_runs(error) if each.failure is not None)


def _marked(message: bytes | Message) -> Message:
    """A record that may be in the broker already."""
    if isinstance(message, Message):
        return replace(message, headers={**(message.headers or {}), _MARK: True})
    return Message(message, headers={_MARK: True})
