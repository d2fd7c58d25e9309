"""``qflow send``: a file's records, one message each."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from qflow_client import (
    ConfirmTimeout,
    FlowEvent,
    FlowEventKind,
    Message,
    NotDurable,
    Outbox,
    OutboxError,
    OutboxFull,
    Outcome,
    Position,
    Producer,
    ProducerClosed,
    ProducerFlowed,
    ProducerSettings,
    Receipt,
    SettingsError,
    UndeliveredMessages,
    WhenFlowed,
)
from qflow_client.cli import text
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.passwords import warn_of_url
from qflow_client.cli.records import BadRecord, Format, Place, Record, RecordSource
from qflow_client.cli.resuming import Reached, source_of
from qflow_client.cli.stopping import Stopped, Stopping

__all__ = ["Tally", "send"]

# Seconds that answers which are on their way may take once sending has been given up.
_GRACE = 2.0
# How many failed records are told of one by one.
_TOLD = 5
# How many records of a file are sent together.
_TOGETHER = 64
# Seconds after which a wait looks whether a record was refused meanwhile.
_LOOK = 0.1
# Seconds that the disk may take for a position that is put back. The end of the command tries again if it fails.
_DISK = 1.0
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
        left_failed: messages of an earlier run, from the outbox, that were not delivered.
        times_flowed: how often the producer became flowed.
        seconds_flowed: seconds that it was, by hold kind.
    """

    admitted: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    confirmed_up_to: int = 0
    confirmed_later: int = 0
    failures: list[str] = field(default_factory=list)
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
        """Take note of a record's outcome, in the order of the records."""
        outcome = receipt.outcome
        assert outcome is not None
        if outcome in (Outcome.CONFIRMED, Outcome.STORED):
            if self.failed:
                self.confirmed_later += 1
            else:
                self.confirmed_up_to = record.number
        self.outcomes[outcome] += 1
        # Asking for the error is what tells the producer that somebody has looked.
        error = receipt.error()
        if error is not None and outcome is not Outcome.STORED and len(self.failures) < _TOLD:
            self.failures.append(f"record {record.number} (line {record.line}): {error}")

    def left(self, receipts: Iterable[Receipt]) -> None:
        """Take note of what an earlier run had left in the outbox and was not delivered now: it is there no longer."""
        for receipt in receipts:
            if not receipt.is_stored:
                self.left_failed += 1
                if len(self.failures) < _TOLD:
                    self.failures.append(f"of an earlier run: {receipt.error()}")


class _Item(NamedTuple):
    """A record that is about to be sent; with where it ends, and that as a position, if it is stored."""

    record: Record
    message: bytes | Message
    place: Place | None
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
        #: What need not be sent again.
        self.progress: Reached | None = None
        self.source = source
        self._skip = skip
        self._begins_anew = begins_anew
        # The numbers of the last record that was found, and of the last that an earlier run may have sent.
        self._found = self._sent_before = 0
        # What is not accounted for, in the order of the records, and where each record ends.
        self._pending: deque[tuple[Record, Receipt, Place | None]] = deque()
        # The position that was put back because a record behind it was not delivered; ``None`` if there is none.
        self._written_back: Reached | None = None
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
        if self.source is None:
            return
        self.progress = Reached(records.format, Place())
        if self._begins_anew:
            # What was sent before may be in the broker all the same. A position that cannot be read says nothing of it.
            with suppress(CommandError, OutboxError):
                stored = Reached.parse(self.producer.position(self.source), records.format, records.name)
                self._sent_before = stored.sent
                self.progress = replace(self.progress, sent=stored.sent)
            return
        try:
            progress = Reached.parse(self.producer.position(self.source), records.format, records.name)
            records.resume(progress.place)
        except (CommandError, OutboxError) as error:
            raise CommandError(f"{error}; --from-start sends the whole file") from error
        self.progress = progress
        self._sent_before = progress.sent
        self.resumed_behind = self.tally.confirmed_up_to = progress.place.number

    def _read(
        self, supply: Iterator[Record], records: RecordSource, stopping: Stopping
    ) -> tuple[list[_Item], BadRecord | None]:
        """Return the next records, and the error if the one behind them cannot be read.

        Those of a file come many at a time, because they share a commit of the outbox. Others may be long in coming.
        """
        items: list[_Item] = []
        most = 1 if self.source is None else _TOGETHER
        rate = self.producer.settings.rate
        if rate is not None:
            # Otherwise the first of them could be refused long before the last one is sent, and that is seen only then.
            most = max(1, min(most, int(rate * _LOOK)))
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
                if record.number == self._skip and self.progress is not None:
                    self.progress = replace(self.progress, place=records.place)
                continue
            message = record.message if record.number > self._sent_before else _marked(record.message)
            place = position = None
            if self.source is not None:
                place = records.place
                sent = max(record.number, self._sent_before)
                position = Position(self.source, str(Reached(records.format, place, sent)))
            items.append(_Item(record, message, place, position))
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
                self._pending.append((each.record, receipt, each.place))
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
        """Account for what is settled, and put the position back if a record was not delivered.

        Returns:
            How many messages are known not to be delivered.
        """
        pending = self._pending
        while pending and pending[0][1].done:
            receipt = pending[0][1]
            if not receipt.delivered:
                self._failed.append(receipt)
            record, _, place = pending.popleft()
            self.tally.settle(record, receipt)
            if self.progress is not None and place is not None:
                # What is behind a gap is sent again with it.
                reached = place if self.tally.confirmed_up_to == record.number else self.progress.place
                self.progress = Reached(self.progress.format, reached, max(record.number, self.progress.sent))
        behind = self._put_position_back()
        return self.tally.failed + self.tally.stored + self.tally.left_failed + behind

    def _put_position_back(self) -> int:
        """Write the position before the first record that was not delivered, if there is one and the outbox is open.

        Such a record has left the outbox, and the position in the file is behind it. Those before it are delivered or
        in the outbox. Nothing may be sent afterwards, because that would move the position forward again.

        Returns:
            How many of the unaccounted records were not delivered; 1 at the most.
        """
        if self.source is None or self.progress is None or self.producer.closed:
            return 0
        place, behind = self.progress.place, 0
        if not self.tally.failed:
            for _, receipt, end in self._pending:
                if receipt.done and not receipt.delivered and not receipt.is_stored:
                    behind = 1
                    break
                assert end is not None
                place = end
            if not behind:
                return 0
        sent = max(self._pending[-1][0].number if self._pending else 0, self.progress.sent)
        reached = Reached(self.progress.format, place, sent)
        if reached != self._written_back:
            storage = self.producer._engine.storage
            assert storage is not None
            # If it cannot be written now, the end of the command tries again, and tells of it.
            with suppress(OutboxError):
                storage.outbox.set_position(self.source, str(reached), _DISK)
                self._written_back = reached
        return behind

    def _flush(self) -> ConfirmTimeout | None:
        """Wait for the confirms; return the error if they do not come in time."""
        limit = self.producer.settings.max_producer_flow_control_wait
        left = math.inf if limit is None else limit
        end = time.monotonic() + left
        try:
            while self.source is not None and left > _LOOK:
                try:
                    self.producer.flush(_LOOK)
                except ConfirmTimeout:
                    self.account()
                    left = end - time.monotonic()
                else:
                    return None
            self.producer.flush(None if left == math.inf else max(0.0, left))
        except ConfirmTimeout as error:
            return ConfirmTimeout(f"{error.unsettled} messages are not settled after {limit:.3g} s", error.unsettled)
        except UndeliveredMessages as error:
            self._undelivered(error)
        return None

    def _undelivered(self, error: UndeliveredMessages) -> None:
        """The tally tells of each of ours; of others here."""
        # In this order, because the other thread moves them from the one to the other.
        ours = {id(receipt) for _, receipt, _ in tuple(self._pending)}
        ours.update(map(id, self._failed))
        self.tally.left(receipt for receipt in error.receipts if id(receipt) not in ours)

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
                self._undelivered(error)


def _marked(message: bytes | Message) -> Message:
    """A record that may be in the broker already."""
    headers = {_MARK: True}
    return replace(message, headers=headers) if isinstance(message, Message) else Message(message, headers=headers)


def _put_back(sending: Sending, outbox: Path) -> None:
    """Have the next run send again what was not delivered: the position of the last record that was sent is behind it.

    Raises:
        CommandError: the outbox cannot be written.
    """
    if sending.source is None or sending.progress is None or not sending.tally.failed:
        return
    try:
        with Outbox(outbox) as file:
            file.set_position(sending.source, str(sending.progress))
    except OutboxError as error:
        number = sending.progress.place.number
        raise CommandError(
            f"the next run would go on behind what was not delivered, so give it --skip {number}: {error}"
        ) from error


class _FlowColumn(ProgressColumn):
    """What a producer does right now."""

    def __init__(self, sending: Sending, started: float) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._sending = sending
        self._started = started

    def render(self, task: Task) -> Text:
        producer = self._sending.producer
        confirmed = self._sending.tally.confirmed
        line = Text(f"{confirmed:,} confirmed, {text.rate(confirmed, time.monotonic() - self._started)}  ")
        if producer.closed:
            return line
        state = producer.flow_state
        if state.since is None:
            return line.append("unflowed", style="green")
        # The window fills and empties all the time: worth a colour only if it lasts.
        lasted = time.time() - state.since
        line.append(text.flow_line(state), style="yellow" if lasted < 1 else "bold red")
        return line.append(f" for {text.seconds(lasted)}" if lasted >= 1 else "")


class _Bar(Progress):
    """Asks how much of a file is read whenever it is drawn, so that reading need not tell."""

    def __init__(self, source: RecordSource, *columns: ProgressColumn, console: Console, transient: bool) -> None:
        self._source = source
        super().__init__(*columns, console=console, transient=transient)
        self.add_task(PurePath(source.name).name, total=source.size)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            self.update(task.id, completed=self._source.position)
        yield from super().get_renderables()


@contextmanager
def _shown(source: RecordSource, sending: Sending, console: Console, started: float) -> Iterator[None]:
    """Show how far it is, for the time of the block."""
    if not console.is_terminal:
        # No bar; but whoever waits for a broker has to know.
        def tell(event: FlowEvent) -> None:
            if event.kind is FlowEventKind.WAITING:
                console.print(f"qflow: still waiting after {text.seconds(event.seconds)}: {event}", highlight=False)

        unsubscribe = sending.producer.on_flow(tell)
        try:
            yield
        finally:
            unsubscribe()
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description}")]
    columns += [SpinnerColumn()] if source.size is None else [BarColumn(bar_width=20), DownloadColumn()]
    with _Bar(source, *columns, _FlowColumn(sending, started), console=console, transient=True):
        yield


def _seconds(value: str) -> float | None:
    """Seconds, or ``forever``."""
    if value.lower() in ("none", "forever"):
        return None
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither seconds nor 'forever'") from None


def send(
    file: Annotated[
        str,
        typer.Argument(
            help="What to send; '-' for standard input. '.gz', and '.zip' with one file in it, are decompressed.",
        ),
    ] = "-",
    url: Annotated[
        str | None, typer.Option("--url", "-u", help="Where the broker is: amqp://user:password@host:port/vhost.")
    ] = None,
    exchange: Annotated[
        str | None, typer.Option("--exchange", "-e", help="Where to publish; '' is the default exchange.")
    ] = None,
    routing_key: Annotated[
        str | None,
        typer.Option("--routing-key", "-k", help="With which key; for the default exchange, the queue's name."),
    ] = None,
    declare: Annotated[
        bool,
        typer.Option("--declare", help="Declare the queue, durable, if it is not there."),
    ] = False,
    format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            help="lines: the bytes of each line. csv: each record as a JSON object, with names from the "
            "first row. jsonl: each line, checked to be JSON; blank lines are left out. By the file's ending "
            "unless given.",
        ),
    ] = None,
    capacity: Annotated[int | None, typer.Option(help="The most messages without an answer of the broker.")] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            "--max-producer-flow-control-wait",
            metavar="SECONDS",
            help="How long to wait while the broker says stop; 'forever' for no end.",
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="The most messages per second, on average.")] = None,
    rate_burst: Annotated[
        int | None,
        typer.Option(help="How many may go at once after a rest; what the rate gives in 50 ms unless given."),
    ] = None,
    outbox: Annotated[
        Path | None,
        typer.Option(
            help="Keep what is not confirmed in this file: what a run leaves there, the next one with it sends first. "
            "It then goes on behind the last record of FILE that was sent. Standard input begins anew each time."
        ),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Send all of FILE, whatever --outbox says was sent before.")
    ] = False,
    skip: Annotated[
        int | None,
        typer.Option(min=0, help="Leave out so many records at the beginning, whatever --outbox says was sent before."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no summary but --json.")] = False,
) -> None:
    """Send the records of a file, one message each, as fast as the broker allows.

    What is not said here is taken from the environment (QFLOW_URL, QFLOW_ROUTING_KEY, QFLOW_CAPACITY, …) or from the
    URL's query.

    Exit codes: 0, every record is confirmed. 1, not every record. 2, the command line or a setting is wrong. 3, a
    record was not sent: flowed for longer than --max-producer-flow-control-wait. 130 and 143, interrupted.
    """
    # Only what was given: what was not is looked for elsewhere. It waits, whatever producers are set to do.
    given: dict[str, Any] = {
        "when_flowed": WhenFlowed.BLOCK,
        "exchange": exchange,
        "routing_key": routing_key,
        "capacity": capacity,
        "rate": rate,
        "rate_burst": rate_burst,
        "outbox": outbox,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if wait is not None:
        given["max_producer_flow_control_wait"] = _seconds(wait)
    if not quiet:
        warn_of_url(url, "QFLOW_URL")
    settings = ProducerSettings.load(url, **given)
    if not settings.confirms:
        raise SettingsError("confirms=False: qflow send tells what the broker confirmed, so it needs confirms")
    if not settings.exchange and not settings.routing_key:
        raise CommandError("say where to: --routing-key QUEUE, or --exchange EXCHANGE", ExitCode.USAGE)
    if from_start and skip is not None:
        raise CommandError("--from-start leaves out nothing, and --skip does; leave one of them out", ExitCode.USAGE)
    if declare and settings.exchange:
        raise CommandError("--declare declares the queue of the default exchange; leave --exchange out", ExitCode.USAGE)
    console = Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        source = stack.enter_context(RecordSource(file, format, None if sys.stdin is None else sys.stdin.buffer))
        stopping = stack.enter_context(Stopping())
        position = None
        if settings.outbox_path is not None and source.can_resume:
            position = source_of(file, settings.exchange, settings.routing_key)
            if from_start:
                # Now, so that a run that is killed before its first record is not taken for one that has sent all.
                with Outbox(settings.outbox_path) as stored:
                    stored.set_position(position, None)
        try:
            with stopping.breakable():
                producer = Producer(url, declare=settings.routing_key if declare else None, **given)
        except Stopped:
            raise CommandError("interrupted before anything was sent", stopping.exit_code) from None
        sending = Sending(producer, skip or 0, position, begins_anew=from_start or skip is not None)
        stopping.on_stop(sending.close)
        started = time.monotonic()
        failure: CommandError | None = None
        try:
            with _shown(source, sending, console, started):
                sending.send_all(source, stopping)
        except CommandError as error:
            failure = error
        except Stopped:
            assert stopping.signal is not None
            failure = CommandError(f"interrupted by {stopping.signal.name}", stopping.exit_code)
        finally:
            # Before it waits for what is on its way, because it may be killed meanwhile.
            sending.account()
            sending.close()
        sending.account()
        took = time.monotonic() - started
        if settings.outbox_path is not None:
            try:
                _put_back(sending, Path(settings.outbox_path))
            except CommandError as error:
                print(f"qflow: {error}", file=sys.stderr)
        before = None if position is None else sending.resumed_behind
        _summarise(sending.tally, took, failure, settings.outbox, before, as_json=as_json, quiet=quiet)
    if failure is not None:
        raise failure


def _summarise(
    tally: Tally,
    took: float,
    failure: CommandError | None,
    outbox: object = None,
    before: int | None = None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tell what was sent.

    Args:
        tally: what.
        took: seconds.
        failure: what ended it early; ``None`` if nothing did.
        outbox: its path.
        before: the number of the last record that an earlier run had sent; ``None`` if no position is stored.
        as_json: whether to do so as JSON.
        quiet: whether to do so only as JSON.
    """
    if as_json:
        print(
            json.dumps(
                {
                    "complete": failure is None,
                    "error": None if failure is None else str(failure),
                    "resumed_behind_record": before,
                    "sent": tally.admitted,
                    "confirmed": tally.confirmed,
                    "not_confirmed": tally.not_confirmed,
                    "stored": tally.stored,
                    "confirmed_up_to_record": tally.confirmed_up_to,
                    "confirmed_behind_a_gap": tally.confirmed_later,
                    "seconds": round(took, 3),
                    "messages_per_second": round(tally.confirmed / took, 1) if took else None,
                    "times_flowed": tally.times_flowed,
                    "seconds_flowed": {kind: round(s, 3) for kind, s in tally.seconds_flowed.items()},
                }
            )
        )
    for line in tally.failures:
        print(f"qflow: {line}", file=sys.stderr)
    more = tally.failed + tally.left_failed - len(tally.failures)
    if more > 0:
        print(f"qflow: and {text.count(more, 'more record')}", file=sys.stderr)
    if as_json or quiet:
        return
    confirmed = text.count(tally.confirmed, "record")
    if before and not tally.admitted and failure is None:
        print(
            f"nothing is left to send: {text.count(before, 'record')} were sent before; --from-start sends them again"
        )
        return
    if before:
        print(f"went on behind record {before:,}, up to which an earlier run had sent all")
    print(f"{confirmed} confirmed in {text.seconds(took)}, {text.rate(tally.confirmed, took)}")
    if tally.times_flowed:
        print(f"flowed {text.count(tally.times_flowed, 'time')}: {text.by_hold(tally.seconds_flowed)}")
    else:
        print("never flowed")
    if failure is not None:
        if tally.failed:
            print(f"not confirmed: {', '.join(f'{n:,} {outcome}' for outcome, n in tally.not_confirmed.items())}")
        last, later = tally.confirmed_up_to, tally.confirmed_later
        if tally.stored:
            stored = text.count(tally.stored, "record")
            print(f"{stored} in {outbox}: the next run with it sends them, or qflow outbox drain")
        if before is not None:
            what = "sends again, with a mark, the records" if tally.failed else "goes on"
            behind = f"{what} behind record {last:,}" if last else "begins with the first record"
            print(f"the next run {behind}")
        elif last and tally.stored:
            print(f"confirmed or there without a gap up to record {last:,}: --skip {last} goes on behind them")
        elif last:
            print(f"confirmed without a gap up to record {last:,}: --skip {last} goes on there")
        if later:
            print(
                f"confirmed behind the first gap: {text.count(later, 'record')}, which would come twice if sent again"
            )
