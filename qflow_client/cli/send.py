"""``qflow send``: sends the records of a file, one message each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.table import Column
from rich.text import Text

from qflow_client import (
    FlowEvent,
    FlowEventKind,
    Outbox,
    Producer,
    ProducerSettings,
    SettingsError,
    WhenFlowed,
)
from qflow_client.cli import text
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json
from qflow_client.cli.passwords import warn_of_url
from qflow_client.cli.records import Format, Reading, RecordSource
from qflow_client.cli.resuming import source_of
from qflow_client.cli.sending import Sending, Tally
from qflow_client.cli.stopping import Stopped, Stopping
from qflow_client.redaction import printable

__all__ = ["send"]


# Width of a file's name in columns. With the bar and the largest size, a line then fits into 80 columns.
_NAME = 40


class _Bar(Progress):
    """A bar for the file, and below it the records and the hold. Both lines fit into 80 columns.

    It reads the position in the file whenever it is drawn. So reading need not report it.

    Args:
        source: the file.
        sending: the run.
        started: when it began, in seconds of `time.monotonic`.
        console: a terminal.
    """

    def __init__(self, source: RecordSource, sending: Sending, started: float, console: Console) -> None:
        self._source = source
        self._sending = sending
        self._started = started
        name = Column(no_wrap=True, overflow="ellipsis", max_width=_NAME)
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False, table_column=name)]
        columns += [SpinnerColumn()] if source.size is None else [BarColumn(bar_width=20), DownloadColumn()]
        super().__init__(*columns, console=console, transient=True)
        self.add_task(printable(PurePath(source.name).name), total=source.size)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            self.update(task.id, completed=self._source.position)
        yield from super().get_renderables()
        yield self._state()

    def _state(self) -> Text:
        confirmed = self._sending.tally.confirmed
        line = Text(f"{confirmed:,} confirmed", no_wrap=True, overflow="ellipsis")
        state = self._sending.producer.flow_state
        lasted = 0.0 if state.since is None else time.time() - state.since
        # The window fills and empties all the time, so it gets a colour only if it stays full. Then the rate is old.
        is_long = lasted >= 1
        if not is_long:
            line.append(f", {text.rate(confirmed, time.monotonic() - self._started)}")
        if self._sending.producer.closed:
            return line
        if not state.flowed:
            return line.append("  unflowed", style="green")
        first, *others = dict.fromkeys(hold.kind for hold in state.holds)
        line.append("  ").append(f"flowed by {first}", style="bold red" if is_long else "yellow")
        line.append(f" and {len(others)} more" if others else "")
        return line.append(f" for {text.seconds(lasted)}" if is_long else "")


@contextmanager
def _shown(source: RecordSource, sending: Sending, console: Console, started: float) -> Iterator[_Bar | None]:
    """Show the progress during the block: with a bar if there is a terminal."""
    if console.is_terminal:
        with _Bar(source, sending, started, console) as bar:
            yield bar
        return

    # Without a terminal there is no bar. But the user must learn of a long wait for the broker.
    def tell(event: FlowEvent) -> None:
        if event.kind is FlowEventKind.WAITING:
            waiting = f"qflow: still waiting after {text.seconds(event.seconds)}: {printable(str(event))}"
            console.print(waiting, highlight=False, markup=False, soft_wrap=True)

    unsubscribe = sending.producer.on_flow(tell)
    try:
        yield None
    finally:
        unsubscribe()


def _seconds(value: str) -> float | None:
    """Convert a number of seconds, or ``forever``."""
    if value.lower() in ("none", "forever"):
        return None
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither seconds nor 'forever'") from None


def _headers(given: Iterable[str]) -> dict[str, str]:
    """Return the headers of every message from ``NAME=VALUE`` texts."""
    headers = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise CommandError(f"--header {each!r}: it must be NAME=VALUE", ExitCode.USAGE)
        headers[name] = value
    return headers


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
    delimiter: Annotated[str, typer.Option(help="Between the fields of a CSV file; 'tab' for a tabulator.")] = ",",
    encoding: Annotated[str, typer.Option(help="Of a CSV file, such as latin-1.")] = "utf-8",
    message_id: Annotated[
        str | None,
        typer.Option("--message-id", metavar="COLUMN", help="The column, or the key in JSON, that has the message id."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="A header of every message; can be given again."),
    ] = None,
    mandatory: Annotated[
        bool | None,
        typer.Option("--mandatory/--no-mandatory", help="Whether a record that no queue takes is an error."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the broker's management shows.")] = None,
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
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no summary but --json.")] = False,
) -> None:
    """Send the records of a file, one message each, as fast as the broker allows.

    Settings that are not given here come from the environment (QFLOW_URL, QFLOW_ROUTING_KEY, QFLOW_CAPACITY, …) or from
    the URL's query.

    Exit codes: 0, every record is confirmed. 1, not every record is confirmed. 2, the command line or a setting is
    wrong. 3, a record was not sent because the producer was flowed for longer than --max-producer-flow-control-wait.
    130 and 143, interrupted.
    """
    # Only the given options are passed; all others come from elsewhere. The command always waits for the broker,
    # whatever the user's settings are. A record that is not delivered stays in the outbox, so that a kill at any time
    # loses no record.
    given: dict[str, Any] = {
        "when_flowed": WhenFlowed.BLOCK,
        "outbox_keep_undelivered": True,
        "exchange": exchange,
        "routing_key": routing_key,
        "mandatory": mandatory,
        "name": name,
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
        reading = Reading("\t" if delimiter == "tab" else delimiter, encoding, message_id, _headers(header or []))
        standard_input = None if sys.stdin is None else sys.stdin.buffer
        source = stack.enter_context(RecordSource(file, format, standard_input, reading))
        stopping = stack.enter_context(Stopping())
        position = None
        if settings.outbox_path is not None and source.can_resume:
            position = source_of(file, settings.exchange, settings.routing_key)
            if from_start:
                # Reset now. Otherwise, if this run is killed before its first record, the next run believes that all
                # was sent.
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
            # Count the records before the close. After the close a record may stay in the outbox without having been
            # refused.
            sending.account()
            sending.close()
        sending.account()
        took = time.monotonic() - started
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
    """Print the result of a run.

    Args:
        tally: result of the run.
        took: duration in seconds.
        failure: error that ended it early; ``None`` if there is none.
        outbox: path of the outbox.
        before: number of the last record that an earlier run had sent; ``None`` if no position is stored.
        as_json: whether to print JSON.
        quiet: whether to print nothing except JSON.
    """
    if as_json:
        print_json(
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
    for line in tally.failures:
        print(f"qflow: {line}", file=sys.stderr)
    if tally.failures_left_out:
        print(f"qflow: and {text.count(tally.failures_left_out, 'more record')}", file=sys.stderr)
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
            print(
                f"the next run goes on behind record {last:,}" if last else "the next run begins with the first record"
            )
        elif last and tally.stored:
            print(f"confirmed or there without a gap up to record {last:,}: --skip {last} goes on behind them")
        elif last:
            print(f"confirmed without a gap up to record {last:,}: --skip {last} goes on there")
        if later:
            print(
                f"confirmed behind the first gap: {text.count(later, 'record')}, which would come twice if sent again"
            )
