"""``qflow report``: analyses flow logs, and recommends settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qflow_client.cli import text
from qflow_client.cli.errors import CommandError, ExitCode
from qflow_client.cli.output import AsJson, print_json, table_console
from qflow_client.redaction import printable
from qflow_client.report import FlowLogs, FlowReport, flow_report, to_parquet

__all__ = ["convert", "report"]

# Maximum number of rows of each table in the summary.
_ROWS = 10

_Logs = Annotated[
    list[Path],
    typer.Argument(
        metavar="LOG", help="One or more flow logs: a folder, or a file that ends with .jsonl, .jsonl.gz or .parquet."
    ),
]


def report(
    logs: _Logs,
    maximum: Annotated[
        int | None,
        typer.Option(
            metavar="MESSAGES",
            min=1,
            help="Recommend thresholds and capacities that keep each queue at or below this number of messages.",
        ),
    ] = None,
    delay: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Recommend thresholds and capacities that keep each message in a queue for at most this time.",
        ),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="NAME",
            help="Queue for the recommendations; can be repeated (default: all queues).",
        ),
    ] = None,
    round_trip: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            show_default=False,
            help="Seconds from a published message to its confirm in the replay (default: 0.005).",
        ),
    ] = 0.005,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for report.html and, if pyarrow is installed, the tables as Parquet files "
            "(default: no files).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Analyse flow logs, and recommend thresholds.

    The report shows which producers were blocked (flowed), for how long, and for which reason. It also shows the queue
    that blocked them, and the producers that had filled this queue.

    With --maximum or --delay the report also recommends settings that keep this limit: thresholds for queues, and
    capacities for producers. To find these values, the command replays the recorded messages through a queue of the
    broker with different values.

    Exit codes: 0 if the command succeeded; 1 if there is nothing to read; 2 if the command line is wrong.
    """
    for name, value in (("--delay", delay), ("--round-trip", round_trip)):
        if value is not None and not 0 < value < inf:
            raise typer.BadParameter(f"{value} must be a number of seconds, more than 0", param_hint=name)
    if queue and maximum is None and delay is None:
        raise typer.BadParameter(
            "give --maximum or --delay too; without them nothing is recommended", param_hint="--queue"
        )
    found = flow_report(logs, maximum=maximum, delay=delay, queues=queue or None, round_trip=round_trip)
    written = [] if output is None else found.write(output)
    if as_json:
        whole = asdict(found)
        del whole["advice"]
        print_json(whole)
        return
    console = table_console()
    _summary(console, found)
    if "advice" in found.tables and not found.advice and not found.no_advice:
        console.print(
            "\nno recommendation: the flow logs have no messages of a queue; log with qflow broker --flow-log"
        )
    if written:
        print(f"\n{printable(str(written[0]))}")
        if not written[1:]:
            print("the tables are not written as Parquet files, which needs pyarrow: pip install 'qflow-client[spark]'")


def convert(
    logs: _Logs,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Parquet file to write.")],
    as_json: AsJson = False,
) -> None:
    """Convert flow logs to one Parquet file.

    The Parquet file needs about a tenth of the space, and is faster to read.
    """
    if any(log.exists() and output.exists() and output.samefile(log) for log in logs):
        raise CommandError(f"--output {output}: this is one of the flow logs; name another file", ExitCode.USAGE)
    lines = to_parquet(FlowLogs(logs), output)
    if as_json:
        print_json({"lines": lines, "output": str(output)})
    else:
        print(f"{text.count(lines, 'line')} in {printable(str(output))}")


def _summary(console: Console, found: FlowReport) -> None:
    lines = text.count(sum(found.lines.values()), "line")
    span = "" if found.first is None or found.last is None else f" over {text.seconds(found.last - found.first)}"
    console.print(f"{lines}{span}")
    if found.lost:
        console.print(f"{text.count(found.lost, 'line')} lost before they were written: the disk was too slow")
    if found.unreadable:
        console.print(f"{text.count(found.unreadable, 'line')} could not be read")
    tables = found.tables
    _print(console, "Producers", sorted(tables["producers"], key=lambda row: -row["seconds_flowed"]), _PRODUCERS)
    _print(console, "Holds", sorted(tables["holds"], key=lambda row: -row["seconds"]), _HOLDS)
    _print(console, "Queues", tables["queues"], _QUEUES)
    _print(
        console,
        "Producers that waited, and producers that had filled the queue",
        sorted(tables["waits"], key=lambda row: -row["seconds"]),
        _WAITS,
    )
    for why in found.no_advice.values():
        console.print(f"\n{printable(why)}", markup=False)
    _print(console, "What to set", tables.get("advice", []), _ADVICE)
    _print(console, "Capacities", tables.get("capacities", []), ("queue", "producer", "capacity"))
    shown = [row for row in tables.get("replays", []) if row["what"] != "tried"]
    _print(console, "Results of the replays", shown, _REPLAYS)


_PRODUCERS = ("producer", "times_flowed", "seconds_flowed", "part_flowed", "seconds_p50", "seconds_p99", "seconds_max")
_HOLDS = (
    *("origin", "producer", "queue", "reason", "episodes", "seconds"),
    *("seconds_p50", "seconds_p99", "rate_before", "rate_after"),
)
_QUEUES = ("queue", "messages", "drain_rate", "depth_max", "stop", "resume", "times_on", "seconds_on", "overshoot_max")
_WAITS = ("queue", "reason", "waited", "filled", "seconds")
_ADVICE = ("queue", "stop", "resume", "capacity", "worst_case", "longest_delay")
_REPLAYS = ("queue", "what", "stop", "resume", "capacity", "depth_max", "times_on", "seconds_flowed", "seconds_full")


def _print(console: Console, title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    if not rows:
        return
    table = Table(title=f"\n{title}", title_justify="left", box=None)
    for column in columns:
        is_text = isinstance(rows[0][column], str)
        table.add_column(column.replace("_", "\n"), justify="left" if is_text else "right", no_wrap=True)
    for row in rows[:_ROWS]:
        # Use `Text`, because rich would interpret square brackets in a string as markup.
        table.add_row(*(Text(_cell(row[column])) for column in columns))
    console.print(table)
    if len(rows) > _ROWS:
        console.print(f"and {text.count(len(rows) - _ROWS, 'more row')}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))
