"""Displays a run of the demonstration, and the audit of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qflow_client.cli import text
from qflow_client.cli.chart import DepthChart
from qflow_client.cli.demo.audit import BY_THE_BROKER, AuditLine, ProducerTally, Run

__all__ = ["Scene", "audit_table", "progress_line"]

# A rate is the average over this number of seconds.
_WINDOW = 2.0


class _Rate:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, number: int, now: float) -> float:
        """Record the number at time `now`, and return by how much the number grows per second."""
        self._seen.append((now, number))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        return (number - before) / (now - then) if now > then else 0.0


@dataclass(slots=True)
class Scene:
    """The live view of the demonstration."""

    enforcement: str
    # Minimum and maximum depth for each column of the chart.
    _depths: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=400))
    _rates: dict[str, _Rate] = field(default_factory=dict)

    def add_column(self, depths: Sequence[int]) -> None:
        """Add the next column of the chart. `depths` must not be empty."""
        self._depths.append((min(depths), max(depths)))

    def render(self, run: Run, note: str, seconds: float) -> RenderableType:
        """Return the current view. `seconds` is the duration of the run so far."""
        queue = run.queue
        chart = DepthChart(
            self._depths,
            {run.highest_allowed: "worst case", queue.stop: "stop", queue.resume: "resume"},
            resume=queue.resume,
            stop=queue.stop,
        )
        state = Text.assemble(
            f"depth {queue.depth:>4}   peak {queue.peak_depth:>4}   flow state ",
            ("ON ", "bold red") if queue.flow_stopped else ("OFF", "bold green"),
            f"   turned ON {queue.flow_stopped_count:,} times",
        )
        done = Table.grid(padding=(0, 1), expand=True)
        done.add_column(no_wrap=True)
        done.add_column(ratio=1)
        done.add_column(no_wrap=True, justify="right")
        done.add_row(
            "consumed",
            ProgressBar(total=run.messages, completed=run.consumer.consumed),
            f"{run.consumer.consumed:,} of {run.messages:,}",
        )
        return Group(
            Panel(
                Group(chart, state),
                title=f"queue of flights, enforcement {self.enforcement}",
                subtitle=f"{note}, {seconds:.0f} s",
                border_style="dim",
            ),
            self._table(run, seconds),
            done,
        )

    def _table(self, run: Run, now: float) -> Table:
        table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
        table.add_column("", no_wrap=True)
        for name in ("messages", "msg/s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("now held by", no_wrap=True, min_width=len(", ".join(BY_THE_BROKER)))
        for kind in BY_THE_BROKER:
            # The seconds for which holds of this kind held each producer.
            table.add_column(kind, justify="right", no_wrap=True)
        for producer in run.producers:
            held = [text.seconds(producer.seconds_flowed.get(kind, 0.0)) for kind in BY_THE_BROKER]
            table.add_row(
                producer.name,
                f"{producer.confirmed:,}",
                self._rate(producer.name, producer.confirmed, now),
                _state(producer),
                *held,
            )
        table.add_row(
            "consumer",
            f"{run.consumer.consumed:,}",
            self._rate("consumer", run.consumer.consumed, now),
            "",
            *("" for _ in BY_THE_BROKER),
        )
        return table

    def _rate(self, name: str, number: int, now: float) -> str:
        return f"{self._rates.setdefault(name, _Rate()).of(number, now):,.0f}"


def _state(producer: ProducerTally) -> Text:
    if not producer.holds:
        return Text("nothing", style="green")
    return Text(", ".join(producer.holds), style="red", overflow="ellipsis")


def progress_line(run: Run, note: str, seconds: float) -> str:
    """Return the state of the run in one line, for output that is not a terminal."""
    states = "".join(
        f"; {producer.name} {'flowed by ' + ', '.join(producer.holds) if producer.holds else 'unflowed'}"
        for producer in run.producers
    )
    queue = run.queue
    return (
        f"{seconds:3.0f} s  {note}: {run.consumer.consumed:,} of {run.messages:,} consumed; depth {queue.depth}, "
        f"peak {queue.peak_depth}, {'ON' if queue.flow_stopped else 'OFF'}{states}"
    )


def audit_table(lines: Sequence[AuditLine]) -> Table:
    """Return the audit as a table for people."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(justify="right")
    for line in lines:
        table.add_row(
            Text("ok", style="green") if line.passed else Text("FAILED", style="bold red"),
            line.statement,
            Text(line.measured if line.passed else f"{line.measured}: {line.difference}"),
        )
    return table
