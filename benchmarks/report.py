"""The results of the measurements, for people and as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import qflow_client
from benchmarks.peers import Peer
from benchmarks.runner import Measurement, Plan, rates

__all__ = [
    "Bar",
    "Row",
    "aligned",
    "broker_name",
    "cells",
    "document",
    "formatted",
    "latency_percentile",
    "missed",
    "plain_table",
    "print_table",
    "show_progress",
    "summarize",
    "versions",
]

#: Names of the peers to compare with.
PLAIN = "plain"
PIKA_SELECT = "pika_select"
AIO_PIKA = "aiopika"


@dataclass(frozen=True, slots=True)
class Row:
    """One peer with one body size; values are medians over the rounds.

    Attributes:
        size: bytes of a body.
        installed: whether the peer's library is installed; if it is not, the other values are ``None``.
        count: number of messages in a run.
        rate: messages per second.
        slowest: messages per second in the worst round.
        fastest: messages per second in the best round.
        to_plain: rate divided by the plain socket's rate in the same round; ``None`` if the plain socket did not run.
        to_pika_select: rate divided by the rate of pika's `SelectConnection` in the same round; ``None`` if that peer
            did not run.
        to_aiopika: rate divided by the rate of aio-pika with a full window in the same round; ``None`` if that peer did
            not run.
        cpu_per_100k: CPU seconds of the client process for 100,000 messages.
        latency_p50: median milliseconds from publish to confirm of the sampled messages of all rounds.
        latency_p99: 99th percentile of the milliseconds from publish to confirm of the sampled messages.
        fairness: progress of the least served thread, divided by the mean progress.
    """

    peer: str
    title: str
    size: int
    installed: bool
    count: int | None = None
    rate: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    to_plain: float | None = None
    to_pika_select: float | None = None
    to_aiopika: float | None = None
    cpu_per_100k: float | None = None
    latency_p50: float | None = None
    latency_p99: float | None = None
    fairness: float | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """A minimum for a ratio.

    Attributes:
        size: bytes of a body.
        ratio: name of the ratio, an attribute of `Row`.
    """

    peer: str
    size: int
    ratio: str
    least: float

    def __str__(self) -> str:
        return f"{self.peer}, {self.size} bytes: {self.ratio} >= {self.least}"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    # The ratio is computed for each round, so that a disturbance of a few rounds has no effect.
    pairs = list(zip(ours, theirs, strict=False))
    return median(mine / other for mine, other in pairs) if pairs else None


def latency_percentile(measurements: Sequence[Measurement], part: float) -> float | None:
    """Return a percentile of the sampled latencies in milliseconds; ``None`` if nothing was sampled."""
    latencies = sorted(latency for each in measurements for latency in each.latencies)
    return latencies[min(len(latencies) - 1, int(part * len(latencies)))] * 1000 if latencies else None


def summarize(names: Sequence[str], peers: Mapping[str, Peer], measurements: Sequence[Measurement]) -> list[Row]:
    """Return a row for each requested peer, installed or not, and each size."""
    rows = []
    for size in dict.fromkeys(each.size for each in measurements):
        plain, select, aiopika = (rates(measurements, each, size) for each in (PLAIN, PIKA_SELECT, AIO_PIKA))
        for name in names:
            if name not in peers:
                rows.append(Row(name, name, size, installed=False))
                continue
            own = [each for each in measurements if each.peer == name and each.size == size]
            if not own:
                rows.append(Row(name, peers[name].title, size, installed=True))
                continue
            mine = rates(measurements, name, size)
            rows.append(
                Row(
                    name,
                    peers[name].title,
                    size,
                    installed=True,
                    count=own[0].count,
                    rate=median(mine),
                    slowest=min(mine),
                    fastest=max(mine),
                    to_plain=_ratio(mine, plain),
                    to_pika_select=_ratio(mine, select),
                    to_aiopika=_ratio(mine, aiopika),
                    cpu_per_100k=median(each.cpu_seconds / each.count for each in own) * 100_000,
                    latency_p50=latency_percentile(own, 0.50),
                    latency_p99=latency_percentile(own, 0.99),
                    fairness=median(fair) if (fair := [each.fairness for each in own if each.fairness]) else None,
                )
            )
    return rows


def missed(bars: Sequence[Bar], rows: Sequence[Row]) -> list[str]:
    """Return the missed minimums as text; a ratio that was not measured is missed."""
    found = {(row.peer, row.size): row for row in rows}
    words = []
    for bar in bars:
        row = found.get((bar.peer, bar.size))
        value = None if row is None else getattr(row, bar.ratio)
        if value is None:
            words.append(f"{bar}: not measured")
        elif value < bar.least:
            words.append(f"{bar}: {value:.3f}")
    return words


def versions(peers: Mapping[str, Peer]) -> dict[str, str]:
    found = {"python": platform.python_version(), "qflow_client": qflow_client.__version__}
    # Include the library that this package uses, even if it is not measured.
    for name in dict.fromkeys(["pika", *(peer.distribution for peer in peers.values())]):
        if name:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "unknown"
    return found


def broker_name(server_properties: Mapping[str, Any]) -> dict[str, str]:
    """Return product, version and platform from the broker's properties."""
    return {key: str(server_properties[key]) for key in ("product", "version", "platform") if key in server_properties}


def document(
    plan: Plan,
    peers: Mapping[str, Peer],
    rows: Sequence[Row],
    measurements: Sequence[Measurement],
    server_properties: Mapping[str, Any],
) -> dict[str, Any]:
    """Return all results, for ``json.dumps``, without the password of the URL."""
    settings = asdict(plan)
    del settings["url"]
    return {
        "benchmark": "publish",
        "settings": settings,
        "versions": versions(peers),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "machine": platform.machine()},
        "broker": broker_name(server_properties),
        "rows": [asdict(row) for row in rows],
        "measurements": [_bare(each) | {"rate": each.rate} for each in measurements],
    }


def _bare(measurement: Measurement) -> dict[str, Any]:
    # Leave out the latencies, because the rows have the percentiles.
    values = asdict(measurement)
    del values["latencies"]
    return values


_HEADINGS = (
    "peer",
    "body",
    "messages",
    "msg/s",
    "lowest – highest",
    "/ plain",
    "/ pika select",
    "CPU s / 100k",
    "p50 ms",
    "p99 ms",
    "fairness",
)


def formatted(value: float | None, form: str) -> str:
    """Return a value in a format, or a dash for ``None``."""
    return "–" if value is None else format(value, form)


def cells(row: Row) -> tuple[str, ...]:
    if not row.installed:
        return (row.title, str(row.size), "not installed", *[""] * (len(_HEADINGS) - 3))
    return (
        row.title,
        str(row.size),
        formatted(row.count, ",d"),
        formatted(row.rate, ",.0f"),
        f"{formatted(row.slowest, ',.0f')} – {formatted(row.fastest, ',.0f')}",
        formatted(row.to_plain, ".3f"),
        formatted(row.to_pika_select, ".2f"),
        formatted(row.cpu_per_100k, ".2f"),
        formatted(row.latency_p50, ".2f"),
        formatted(row.latency_p99, ".2f"),
        formatted(row.fairness, ".2f"),
    )


def show_progress(text: str) -> None:
    """Show a text on the terminal, in place of the previous text. If standard error is no terminal, do nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print with rich if it is installed, and otherwise as plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(plain_table(title, rows))
        return
    table = Table(title=title)
    for at, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if at else "left")
    for at, row in enumerate(rows):
        table.add_row(*cells(row), end_section=at + 1 < len(rows) and rows[at + 1].size != row.size)
    # In a file or a pipe, a width of 80 columns would break every row.
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def plain_table(title: str, rows: Sequence[Row]) -> str:
    """Return the table without colours and lines."""
    return aligned(title, [_HEADINGS, *map(cells, rows)])


def aligned(title: str, lines: Sequence[tuple[str, ...]]) -> str:
    """Return lines of cells below a title. The first column is aligned to the left, all others to the right."""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        [
            title,
            *(
                "  ".join(
                    cell.ljust(width) if at == 0 else cell.rjust(width)
                    for at, (cell, width) in enumerate(zip(line, widths, strict=True))
                ).rstrip()
                for line in lines
            ),
        ]
    )
