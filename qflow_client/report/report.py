"""Creates a report with tables and advice, and writes the report to files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from qflow_client.report.advice import Advice, AdviceError, advise, samples_in, windows
from qflow_client.report.reading import FlowLogError, FlowLogs
from qflow_client.report.replay import Sample
from qflow_client.report.tables import Row, Tables, bin_width, sum_up

__all__ = ["FlowReport", "flow_report", "make_report"]


@dataclass(frozen=True)
class FlowReport:
    """Shows which producers were blocked (flowed), why and for how long, and recommends settings.

    Attributes:
        tables: the rows of each table. The tables are ``holds``, ``producers``, ``queues``, ``publishers``, ``waits``,
            ``held_over_time`` and ``depth_over_time``. If advice was requested, the tables ``advice``, ``capacities``
            and ``replays`` are added. Durations are in seconds, and times in seconds since 1970.
        lines: number of valid lines of each kind in the flow logs.
        lost: number of lines that a flow log dropped because the disk was too slow.
        unreadable: number of invalid lines in the flow logs. A killed process may leave an incomplete line.
        first: time of the first line in seconds since 1970; ``None`` if there are no lines.
        last: time of the last line in seconds since 1970; ``None`` if there are no lines.
        advice: recommended settings for each queue that can keep the requested limits.
        no_advice: for each other queue, the reason why no settings are recommended.
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

        Return the paths of the written files. The first path is that of ``report.html``.

        Args:
            folder: folder for the files, created if missing. Files of an earlier report are replaced or removed.

        Raises:
            OSError: a file cannot be written.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        written = [path / "report.html"]
        written[0].write_text(self.page(), encoding="utf-8")
        # An earlier report in the folder may have tables that this report does not have.
        for name, rows in {"advice": [], "capacities": [], "replays": [], **self.tables}.items():
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
    """Create a report from tables, with advice from a replay of `samples`, if `samples` is not ``None``."""
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

    The function reads the logs once, and again for advice. It reads ``.gz`` files once more to find their last lines.

    Args:
        paths: folders of `FlowLog`, or files with the endings ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        maximum: recommend settings with which each queue has at most this number of messages (C6).
        delay: recommend settings with which a message is in a queue for at most this number of seconds.
        queues: names of the queues to recommend settings for; ``None`` for all queues with recorded messages.
        round_trip: seconds between the publishing of a message and its confirm in the replays.

    Raises:
        FlowLogError: there are no flow logs, a path is wrong, a file is damaged or no flow log, or pyarrow is missing.
        ValueError: advice is requested, and `maximum`, `delay` or `round_trip` is not more than 0.
    """
    logs = FlowLogs([paths] if isinstance(paths, (str, os.PathLike)) else paths)
    try:
        tables = sum_up(logs.lines(), bin_width(*logs.span()))
    except (AttributeError, KeyError, TypeError) as error:
        files = ", ".join(map(str, logs.files))
        raise FlowLogError(f"{files}: a line or row does not belong to a flow log: {error!r}") from error
    tables.unreadable = logs.unreadable
    samples = None
    if maximum is not None or delay is not None:
        wanted = windows(tables, queues)
        samples = samples_in(logs.lines("depth"), wanted)
    return make_report(tables, samples, maximum=maximum, delay=delay, round_trip=round_trip)
