"""``qflow send``: sends each record of a file as one message."""

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


# Maximum number of characters of the file's name. With this limit the name, the bar and the size fit into 80 columns.
_NAME = 40


class _Bar(Progress):
    """Two lines of up to 80 columns: a progress bar, and the number of confirmed records with the flow state."""

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
        # Many holds end soon, such as a full window. So a hold is red, and replaces the rate, only after a second.
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
    if console.is_terminal:
        with _Bar(source, sending, started, console) as bar:
            yield bar
        return

    # Without a terminal there is no bar. So print a line whenever the producer reports that it still waits.
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
    if value.lower() in ("none", "forever"):
        return None
    try:
        return float(value)
    except ValueError:
        raise CommandError(
            f"--max-producer-flow-control-wait {value!r} is neither a number of seconds nor 'forever'", ExitCode.USAGE
        ) from None


def _headers(given: Iterable[str]) -> dict[str, str]:
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
            metavar="FILE",
            show_default=False,
            help="File to send; '-' is standard input (default: -). The command decompresses a .gz file, and a "
            ".zip file that contains one file.",
        ),
    ] = "-",
    url: Annotated[str | None, typer.Option("--url", "-u", metavar="URL", help=text.URL_HELP)] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            "--exchange", "-e", metavar="NAME", help="Exchange to publish to (default: '', the default exchange)."
        ),
    ] = None,
    routing_key: Annotated[
        str | None,
        typer.Option(
            "--routing-key",
            "-k",
            metavar="KEY",
            help="Routing key of the messages. For the default exchange it is the name of the queue (default: '').",
        ),
    ] = None,
    declare: Annotated[
        bool,
        typer.Option("--declare", help="Declare the queue as durable if it does not exist."),
    ] = False,
    format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            help="Format of the records. lines: each line is a message. csv: each row is a message, a JSON object with "
            "the names of the first row. jsonl: each line that is not blank is a message, and must be JSON "
            "(default: by the ending of FILE, or lines).",
        ),
    ] = None,
    delimiter: Annotated[
        str,
        typer.Option(
            metavar="CHARACTER",
            show_default=False,
            help="Delimiter of the fields in a CSV file; 'tab' is a tabulator (default: ,).",
        ),
    ] = ",",
    encoding: Annotated[
        str,
        typer.Option(
            metavar="NAME", show_default=False, help="Encoding of a CSV file, such as latin-1 (default: utf-8)."
        ),
    ] = "utf-8",
    message_id: Annotated[
        str | None,
        typer.Option(
            "--message-id",
            metavar="COLUMN",
            help="CSV column or JSON key with the message id (default: the producer creates the ids).",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="NAME=VALUE",
            help="Header of every message; can be repeated (default: no header).",
        ),
    ] = None,
    mandatory: Annotated[
        bool | None,
        typer.Option(
            "--mandatory/--no-mandatory",
            help="Whether a record that no queue receives is an error (default: --mandatory).",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the producer in the broker's management (default: producer)."),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Maximum number of messages without an answer from the broker (default: 1000)."
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            "--max-producer-flow-control-wait",
            metavar="SECONDS",
            help="Maximum seconds to wait while the producer is blocked (flowed) (default: 60; forever: no limit).",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Maximum number of messages per second, on average (default: no limit)."),
    ] = None,
    rate_burst: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="Number of messages that may be sent together after an idle time "
            "(default: as many as --rate allows in 50 ms).",
        ),
    ] = None,
    outbox: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File that stores the unconfirmed messages and the position in the input. The next run with this file "
            "first sends the stored messages. Then it continues after the last record that was sent, except with "
            "standard input (default: no outbox).",
        ),
    ] = None,
    from_start: Annotated[
        bool,
        typer.Option("--from-start", help="Send all records, even if the outbox has a position in the input."),
    ] = False,
    skip: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=0,
            help="Number of records to skip at the beginning, even if the outbox has another position in the input "
            "(default: the position in the outbox, or 0).",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress and, except with --json, no summary.")
    ] = False,
) -> None:
    """Send the records of a file, each as one message.

    The command sends as fast as the broker allows, and waits for the confirms. The other settings come from the
    environment (QFLOW_URL, QFLOW_ROUTING_KEY, QFLOW_CAPACITY, …) or from the query of the URL.

    Exit codes: 0 if every record is confirmed; 1 if a record is not confirmed; 2 if the command line or a setting is
    wrong; 3 if the producer was blocked (flowed) for longer than --max-producer-flow-control-wait; 130 or 143 after
    Ctrl-C or SIGTERM.
    """
    # Other settings come from the environment and the URL. The first two are fixed: the command always waits for the
    # broker, and the outbox keeps each record until its delivery.
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
        warn_of_url(url)
    settings = ProducerSettings.load(url, **given)
    if not settings.confirms:
        raise SettingsError(
            "confirms=False: qflow send needs confirms, because it reports what the broker confirmed; set confirms=True"
        )
    if not settings.exchange and not settings.routing_key:
        raise CommandError("no destination is given: use --routing-key QUEUE, or --exchange EXCHANGE", ExitCode.USAGE)
    if from_start and skip is not None:
        raise CommandError("--from-start and --skip cannot be combined; use one of them", ExitCode.USAGE)
    if declare and settings.exchange:
        raise CommandError(
            "--declare declares a queue, and works only with the default exchange; do not set an exchange",
            ExitCode.USAGE,
        )
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
                # Delete the old position now, so that the next run does not use it if this run is killed early.
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
    """Print the result of a run, which began after record number `before` (``None`` if the run stores no position)."""
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
        print(f"qflow: {printable(line)}", file=sys.stderr)
    if tally.failures_left_out:
        print(f"qflow: and {text.count(tally.failures_left_out, 'more record')}", file=sys.stderr)
    if as_json or quiet:
        return
    confirmed = text.count(tally.confirmed, "record")
    if before and not tally.admitted and failure is None:
        print(f"nothing is left to send: {text.count(before, 'record')} sent by an earlier run; --from-start sends all")
        return
    if before:
        print(f"continued after record {before:,}; an earlier run had sent the records up to it")
    print(f"{confirmed} confirmed in {text.seconds(took)}, {text.rate(tally.confirmed, took)}")
    if tally.times_flowed:
        by_hold = text.by_hold(tally.seconds_flowed)
        print(f"blocked (flowed) {text.count(tally.times_flowed, 'time')}" + (f": {by_hold}" if by_hold else ""))
    else:
        print("never blocked (flowed)")
    if failure is not None:
        if tally.failed:
            print(f"not confirmed: {', '.join(f'{n:,} {outcome}' for outcome, n in tally.not_confirmed.items())}")
        last, later = tally.confirmed_up_to, tally.confirmed_later
        if tally.stored:
            stored = text.count(tally.stored, "record")
            print(f"{stored} in the outbox {outbox}: the next run with it, or qflow outbox drain, sends what is there")
        if before is not None:
            print(
                f"the next run continues after record {last:,}" if last else "the next run begins with the first record"
            )
        elif last:
            print(f"the records up to {last:,} need not be sent again: --skip {last} continues after them")
        if later:
            print(
                f"confirmed after the first gap: {text.count(later, 'record')}, which would arrive twice if sent again"
            )
