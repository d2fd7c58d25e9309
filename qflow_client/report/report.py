"""Creates the report with its tables and advice, and writes it to files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from qflow_client.report.advice import Advice, AdviceError, advise, samples_in, windows
from qflow_client.report.reading import FlowLogs
from qflow_client.report.replay import Sample
from qflow_client.report.tables import Row, Tables, bin_width, sum_up

__all__ = ["FlowReport", "flow_report", "make_report"]


@dataclass(frozen=True)
class FlowReport:
    """Shows which producers were held, where, why and for how long, and recommends settings.

    Attributes:
        tables: the rows of each table. The tables are ``holds``, ``producers``, ``queues``, ``publishers``, ``waits``,
            ``held_over_time`` and ``depth_over_time``. If advice was requested, there are also ``advice``,
            ``capacities`` and ``replays``. Durations are in seconds, and times in seconds since 1970.
        lines: number of read lines of each kind.
        lost: number of lines that a flow log dropped because the disk was too slow.
        unreadable: number of invalid lines. A killed process may leave an incomplete line.
        first: time of the first line in seconds since 1970; ``None`` if there are no lines.
        last: time of the last line in seconds since 1970; ``None`` if there are no lines.
        advice: recommended settings for each queue.
        no_advice: for each queue without advice, the reason.
    """

    tables: dict[str, list[Row]]
    lines: dict[str, int]
    lost: int
    unreadable: int
    first: float | None
    last: float | None
    advice: dict[str, Advice] = field(default_factory=dict)
    no_advice: dict[str, str] = field(default_factory=dict)

    def page(self) -> str:
        """Return the report as one self-contained HTML page with charts."""
        from qflow_client.report.page import page

        return page(self)

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write ``report.html`` and, if pyarrow is installed, a Parquet file for each table with rows.

        Args:
            folder: folder to write to, created if missing. Files of an earlier report are replaced or removed.

        Returns:
            The paths of the files. The first one is the page.

        Raises:
            OSError: a file cannot be written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        written = [path / "report.html"]
        written[0].write_text(self.page(), encoding="utf-8")
        for name, rows in self.tables.items():
            table = path / f"{name}.parquet"
            if rows and find_spec("pyarrow") is not None:
                import pyarrow
                import pyarrow.parquet

                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
                written.append(table)
            else:
                table.unlink(missing_ok=True)
        return written


def make_report(
    tables: Tables,
    samples: dict[str, list[Sample]] | None,
    *,
    maximum: int | None = None,
    delay: float | None = None,
    round_trip: float = 0.005,
) -> FlowReport:
    """Create a report from tables.

    Args:
        samples: samples to replay for each queue; ``None`` for no advice.
    """
    advice: dict[str, Advice] = {}
    no_advice: dict[str, str] = {}
    rows = tables.tables()
    if samples is not None:
        capacities = tables.capacities()
        for queue, found in sorted(samples.items()):
            try:
                advice[queue] = advise(
                    queue,
                    tables.queues[queue],
                    found,
                    tables.publishers(queue),
                    capacities,
                    maximum=maximum,
                    delay=delay,
                    round_trip=round_trip,
                )
            except AdviceError as error:
                no_advice[queue] = str(error)
        rows["advice"] = [each.row() for each in advice.values()]
        rows["capacities"] = [row for each in advice.values() for row in each.capacity_rows()]
        rows["replays"] = [row for each in advice.values() for row in each.replay_rows()]
    first, last = (None if at is None else at / 1_000_000 for at in (tables.first, tables.last))
    return FlowReport(
        rows, dict(sorted(tables.lines.items())), tables.lost, tables.unreadable, first, last, advice, no_advice
    )


def flow_report(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    maximum: int | None = None,
    delay: float | None = None,
    queues: Iterable[str] | None = None,
    round_trip: float = 0.005,
) -> FlowReport:
    """Create a report on flow logs. The used memory does not depend on the number of lines.

    The function reads the logs once. If advice is requested, it reads the logs a second time.

    Args:
        paths: folders of `FlowLog`, or files with the endings ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        maximum: recommend settings with which each queue has at most this number of messages (C6).
        delay: recommend settings with which a message is in a queue for at most this number of seconds.
        queues: queues for the advice; ``None`` for all queues whose depth was recorded.
        round_trip: seconds from a published message to its confirm in the replays.

    Raises:
        FlowLogError: there are no flow logs, or a path is wrong.
        ValueError: `maximum`, `delay` or `round_trip` is not more than 0.
    """
    logs = FlowLogs([paths] if isinstance(paths, (str, os.PathLike)) else paths)
    tables = sum_up(logs.lines(), bin_width(*logs.span()))
    tables.unreadable = logs.unreadable
    samples = None
    if maximum is not None or delay is not None:
        wanted = windows(tables, queues)
        samples = samples_in(logs.lines("depth"), wanted)
    return make_report(tables, samples, maximum=maximum, delay=delay, round_trip=round_trip)
