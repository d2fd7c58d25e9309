"""Measures all publishers on RabbitMQ and on this broker: one table and one picture for the documentation.

It takes about an hour on an idle machine, and with ``--quick`` a few minutes for a trial. The results are kept as JSON.
``--redraw`` makes the table and the picture again from the JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import peers as known
from benchmarks.embedded import DEFAULT_URL, EMBEDDED, broker_url
from benchmarks.report import document, formatted, summarize
from benchmarks.runner import Lost, Plan, measure
from benchmarks.wire import Wire
from qflow_client.testing.pictures import svg

__all__ = ["draw", "main", "tables"]

_DOCS = Path(__file__).parents[1] / "docs"
_PAGE = _DOCS / "benchmarks.md"
_PICTURE = _DOCS / "images" / "benchmarks.svg"
_MEASURED = _DOCS / "images" / "benchmarks.json"
# The lines of the page around the tables.
_BEGIN, _END = "<!-- overview: made by benchmarks.overview -->", "<!-- end of overview -->"

_SIZES = (100, 1024, 65_536, 1_048_576)
# Interval of messages whose confirm is timed in latency measurements.
_SAMPLE = 97
# Series of the picture, which has no room for all series.
_SHOWN = "rabbitmq confirmed"

# Style rules in addition to the rules of all pictures.
_LIGHT = """\
text { font-size: 12px }
.small { font-size: 11px }
.grid { stroke-dasharray: 3 3 }
.ours { fill: #0969da } .theirs { fill: #8c959f } .plain { fill: #bf8700 }"""
_DARK = ".ours { fill: #79c0ff } .theirs { fill: #7d8590 } .plain { fill: #d29922 }"


def run(url: str, broker: str, *, repeat: int, messages: int, sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Measure with one broker.

    Args:
        broker: name of the broker in the names of the series.
        repeat: number of rounds of the confirmed series; the other series have fewer rounds.
        messages: messages per run for fast peers.

    Returns:
        For each name of a series, the result of `document`.
    """
    peers = {name: peer for name in known.PEERS if (peer := known.load(name)) is not None}
    fewer = (repeat + 1) // 2
    confirmed = Plan(url, messages, tuple(sizes), 1000, repeat, confirmed=True)
    plans = {
        f"{broker} confirmed": confirmed,
        f"{broker} unconfirmed": replace(confirmed, repeat=fewer, confirmed=False),
        # The latency has a separate run, because timing the confirms reduces the rate.
        f"{broker} latency": replace(confirmed, sizes=tuple(sizes[:1]), repeat=fewer, sample=_SAMPLE),
    }
    with Wire(url) as wire:
        properties = wire.server_properties
    found = {}
    for name, plan in plans.items():
        failed: dict[tuple[str, int], Exception] = {}
        measurements = measure(plan, peers, partial(_say, name), failed)
        rows = summarize(tuple(known.PEERS), peers, measurements)
        words = [f"{peers[peer].title}, {_size(size)}: {error}" for (peer, size), error in failed.items()]
        found[name] = document(plan, peers, rows, measurements, properties) | {"failed": words}
    return found


def _say(series: str, text: str) -> None:
    print(f"{series}, {text}", file=sys.stderr, flush=True)


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and not size % unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _rows(series: Mapping[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in series["rows"]:
        found.setdefault(row["peer"], {})[row["size"]] = row
    return found


def tables(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables as Markdown, one for each series."""
    parts = []
    for name, series in measured.items():
        broker, settings = series["broker"], series["settings"]
        where = " ".join(broker.get(key, "") for key in ("product", "version")).strip() or "a broker without a name"
        head = f"{where}, {name.partition(' ')[2]}, window {settings['window']}, median of {settings['repeat']} rounds"
        by_peer = _rows(series)
        sizes = settings["sizes"]
        if settings["sample"]:
            cells = ["p50 ms", "p99 ms", "served least / mean"]
        else:
            cells = [f"{_size(size)}: msg/s (of plain)" for size in sizes] + [f"CPU s / 100k, {_size(sizes[0])}"]
        lines = [f"**{head}**", "", "| " + " | ".join(["publisher", *cells]) + " |", "|---" * (len(cells) + 1) + "|"]
        for rows in by_peer.values():
            first = rows[sizes[0]]
            if not first["installed"]:
                continue
            if settings["sample"]:
                values = [formatted(first[key], ".2f") for key in ("latency_p50", "latency_p99", "fairness")]
            else:
                values = [
                    f"{formatted(rows[size]['rate'], ',.0f')} ({formatted(rows[size]['to_plain'], '.2f')})"
                    for size in sizes
                ]
                values.append(formatted(first["cpu_per_100k"], ".2f"))
            lines.append("| " + " | ".join([first["title"], *values]) + " |")
        lines += [f"\nFailed: {words}" for words in series["failed"]]
        parts.append("\n".join(lines))
    machine = next(iter(measured.values()))
    said = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts.append(f"{machine['machine']['cpus']} CPUs, {machine['machine']['system']}; {said}.")
    return "\n\n".join(parts)


def draw(series: Mapping[str, Any]) -> str:
    """Return the picture as SVG: a panel for each body size, a bar for each publisher relative to the plain socket."""
    by_peer = {name: rows for name, rows in _rows(series).items() if next(iter(rows.values()))["installed"]}
    sizes = series["settings"]["sizes"]
    left, panel, gap, line, top = 310, 140, 66, 20, 46
    width = left + len(sizes) * (panel + gap)
    height = top + len(by_peer) * line + 40
    parts = []
    # Values above the plain socket are noise, but need space.
    most = max([1.0, *(row["to_plain"] or 0.0 for rows in by_peer.values() for row in rows.values())])
    for at, size in enumerate(sizes):
        x = left + at * (panel + gap)
        parts.append(f'<text class="title" x="{x}" y="{top - 18}">{_size(size)}</text>')
        end = round(x + panel / most, 1)
        parts.append(f'<path class="grid" d="M{end} {top - 8}V{top + len(by_peer) * line}"/>')
        for number, rows in enumerate(by_peer.values()):
            row = rows.get(size)
            ratio = row["to_plain"] if row is not None else None
            if row is None or ratio is None:
                continue
            kind = "plain" if row["peer"] == "plain" else "ours" if row["peer"].startswith("qflow") else "theirs"
            y = top + number * line
            bar = max(1.0, round(ratio / most * panel, 1))
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{bar}" height="{line - 7}" rx="2"/>')
            parts.append(f'<text class="small" x="{x + bar + 4}" y="{y + 11}">{row["rate"]:,.0f}</text>')
    for number, rows in enumerate(by_peer.values()):
        title = escape(next(iter(rows.values()))["title"])
        parts.append(f'<text x="{left - 10}" y="{top + number * line + 11}" text-anchor="end">{title}</text>')
    where = " ".join(series["broker"].get(key, "") for key in ("product", "version")).strip()
    legend = f"messages per second, confirmed, {where}; the length of a bar: of the plain socket in the same round"
    parts.append(f'<text class="small" x="14" y="{height - 14}">{escape(legend)}</text>')
    title = "Confirmed messages per second by publisher and size of body"
    return svg(width, height, parts, title=title, made_by="benchmarks.overview", light=_LIGHT, dark=_DARK)


def write(measured: Mapping[str, Mapping[str, Any]], page: Path, picture: Path) -> None:
    """Replace the tables in the page, and write the picture.

    Raises:
        ValueError: the page has no place for the tables.
    """
    text = page.read_text(encoding="utf-8")
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"{page}: it must contain the lines {_BEGIN!r} and {_END!r} exactly once")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    alt = "Bars: each publisher's confirmed messages per second as a part of what a plain socket does, for each size."
    made = f"![{alt}](images/{picture.name})\n\n{tables(measured)}"
    page.write_text(f"{before}{_BEGIN}\n\n{made}\n\n{_END}{after}", encoding="utf-8")
    picture.write_text(draw(measured.get(_SHOWN) or next(iter(measured.values()))), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.overview", description=__doc__)
    made.add_argument("--url", default=DEFAULT_URL, help="amqp:// URL of RabbitMQ (%(default)s)")
    made.add_argument("--repeat", type=int, default=7, help="rounds of the confirmed series (%(default)s)")
    made.add_argument("--messages", type=int, default=50_000, help="per run; slow peers get fewer (%(default)s)")
    made.add_argument("--quick", action="store_true", help="one round of few messages: its figures mean nothing")
    made.add_argument("--redraw", action="store_true", help="from what was measured before")
    made.add_argument("--page", type=Path, default=_PAGE, help="the page (%(default)s)")
    made.add_argument("--picture", type=Path, default=_PICTURE, help="the picture (%(default)s)")
    made.add_argument("--measured", type=Path, default=_MEASURED, help="what was measured, as JSON (%(default)s)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit code: 1 if messages were lost.
    """
    options = parser().parse_args(arguments)
    if options.redraw:
        measured = json.loads(options.measured.read_text(encoding="utf-8"))
    else:
        repeat, messages = (1, 500) if options.quick else (options.repeat, options.messages)
        measured = {}
        try:
            for where, broker in ((options.url, "rabbitmq"), (EMBEDDED, "embedded")):
                with broker_url(where) as url:
                    measured |= run(url, broker, repeat=repeat, messages=messages, sizes=_SIZES)
        except Lost as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        options.measured.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    write(measured, options.page, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
