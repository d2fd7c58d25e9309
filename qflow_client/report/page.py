"""Converts a report to one self-contained HTML page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from qflow_client.report.tables import Row

if TYPE_CHECKING:
    from qflow_client.report.report import FlowReport

__all__ = ["page"]

# Maximum number of rows of each table on the page. The Parquet files of the report have all rows.
_ROWS = 50
# Maximum number of queues with a chart on the page. The deepest queues get the charts.
_CHARTS = 12

_HOLDS = (
    *("origin", "producer", "queue", "reason", "episodes", "unfinished", "seconds"),
    *("seconds_p50", "seconds_p99", "seconds_max", "rate_before", "rate_after"),
)
_WAITS = """<p class="note">The seconds for which a queue blocked (flowed) a producer are divided among all producers
that had published to the queue since it was last OFF, by the number of their messages.</p>"""

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #8889 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem } p.note { opacity: .75 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
div.wide { overflow-x: auto }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th.text, td.text { text-align: left } th { font-weight: 600 }
tr.advice td { font-weight: 600 }
.chart { background: #fff; color: #222; border-radius: 6px; padding: .5rem; margin: .6rem 0 }
dl { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem } dt { opacity: .75 } dd { margin: 0; font-size: 1.3rem }
"""

_SCRIPT = """
const colours = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#64748b"];
for (const chart of JSON.parse(document.getElementById("charts").textContent)) {
  const element = document.getElementById(chart.id);
  const series = chart.series.map((each, at) => ({
    label: each.label, stroke: each.colour || colours[at % colours.length], width: 1.5, scale: each.scale || "y",
    dash: each.dash, points: { show: chart.data[0].length < 60 },
  }));
  const axes = [{}, { label: chart.label, size: 70 }];
  if (chart.second) axes.push({ scale: "second", side: 1, label: chart.second, grid: { show: false }, size: 70 });
  const make = () => new uPlot({
    width: element.clientWidth - 16, height: 260, scales: { y: { range: (u, low, high) => [0, high * 1.05 || 1] },
      second: { range: (u, low, high) => [0, high * 1.05 || 1] } },
    series: [{}, ...series], axes,
  }, chart.data, element);
  let plot = make();
  addEventListener("resize", () => plot.setSize({ width: element.clientWidth - 16, height: 260 }));
}
"""


def page(report: FlowReport) -> str:
    """Return the report as an HTML page."""
    vendor = files("qflow_client.broker").joinpath("http", "console", "vendor", "uplot-1.6.32")
    style = vendor.joinpath("uPlot.min.css").read_text(encoding="utf-8")
    script = vendor.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8")
    charts: list[dict[str, Any]] = []
    parts = [
        "<h1>Flow report</h1>",
        _facts(report),
        _advice(report),
        _held_chart(report, charts),
        *_depth_charts(report, charts),
        "<h2>Holds of producers, by reason</h2>",
        _table(
            sorted(report.tables["holds"], key=lambda row: -row["seconds"]),
            _HOLDS,
        ),
        "<h2>Producers</h2>",
        _table(sorted(report.tables["producers"], key=lambda row: -row["seconds_flowed"])),
        "<h2>Producers that waited, and producers that had filled the queue</h2>",
        _WAITS,
        _table(sorted(report.tables["waits"], key=lambda row: -row["seconds"])),
        "<h2>Queues</h2>",
        _table(report.tables["queues"]),
    ]
    data = json.dumps(charts, separators=(",", ":")).replace("</", "<\\/")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width"><title>Flow report</title>',
            f"<style>{style}{_STYLE}</style></head><body>",
            *parts,
            f'<script type="application/json" id="charts">{data}</script>',
            f"<script>{script}</script><script>{_SCRIPT}</script></body></html>\n",
        ]
    )


def _when(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _facts(report: FlowReport) -> str:
    flowed = sum(row["seconds_flowed"] for row in report.tables["producers"])
    facts = {
        "from": _when(report.first),
        "to": _when(report.last),
        "lines": f"{sum(report.lines.values()):,}",
        "producers flowed": f"{len(report.tables['producers']):,}",
        "seconds flowed": f"{flowed:,.1f}",
    }
    if report.lost:
        facts["lines lost"] = f"{report.lost:,}"
    if report.unreadable:
        facts["lines unreadable"] = f"{report.unreadable:,}"
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in facts.items())}</dl>"


def _advice(report: FlowReport) -> str:
    if not report.advice and not report.no_advice:
        return ""
    parts = ["<h2>What to set</h2>"]
    parts += [f"<p>{escape(why)}</p>" for why in report.no_advice.values()]
    if report.advice:
        parts.append(_table(report.tables["advice"]))
        parts.append("<h2>Capacities to set</h2>")
        parts.append(_table(report.tables["capacities"]))
        parts.append("<h2>Results of the replays</h2>")
        parts.append(
            '<p class="note">The recorded arrivals, replayed through the broker’s queue. The row “recorded” has the '
            "thresholds of the queue at that time.</p>"
        )
        parts.append(_table(report.tables["replays"]))
    return "\n".join(parts)


def _chart(charts: list[dict[str, Any]], title: str, chart: dict[str, Any]) -> str:
    chart["id"] = f"chart-{len(charts)}"
    charts.append(chart)
    return f'<h2>{escape(title)}</h2><div class="chart" id="{chart["id"]}"></div>'


def _held_chart(report: FlowReport, charts: list[dict[str, Any]]) -> str:
    held: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for row in report.tables["held_over_time"]:
        label = row["reason"] if row["origin"] == "producer" else f"{row['reason']} (broker)"
        held[label][row["at"]] += row["seconds"]
    if not held:
        return ""
    times = sorted({at for points in held.values() for at in points})
    labels = sorted(held, key=lambda label: -sum(held[label].values()))
    data = [times, *([held[label].get(at, 0.0) for at in times] for label in labels)]
    chart = {"label": "seconds held", "series": [{"label": label} for label in labels], "data": data}
    return _chart(charts, "Seconds held, by reason", chart)


def _depth_charts(report: FlowReport, charts: list[dict[str, Any]]) -> Iterable[str]:
    marks = {row["queue"]: row["stop"] for row in report.tables["queues"]}
    points: dict[str, list[Row]] = defaultdict(list)
    for row in report.tables["depth_over_time"]:
        points[row["queue"]].append(row)
    deepest = sorted(points, key=lambda queue: -max(row["depth_max"] for row in points[queue]))
    for queue in deepest[:_CHARTS]:
        rows = points[queue]
        series: list[dict[str, Any]] = [
            {"label": "depth"},
            {"label": "seconds for which it held producers", "scale": "second", "colour": "#d97706"},
        ]
        data: list[list[float]] = [
            [row["at"] for row in rows],
            [row["depth_max"] for row in rows],
            [row["seconds_held"] for row in rows],
        ]
        if marks.get(queue):
            series.append({"label": "stop threshold", "colour": "#dc2626", "dash": [6, 4]})
            data.append([marks[queue]] * len(rows))
        yield _chart(
            charts,
            f"Queue {queue}",
            {"label": "messages", "second": "seconds held", "series": series, "data": data},
        )


def _table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    if not rows:
        return "<p>No data.</p>"
    names = columns or tuple(rows[0])
    texts = {name for name in names if isinstance(rows[0][name], str)}

    def cell(tag: str, name: str, text: str) -> str:
        kind = ' class="text"' if name in texts else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", name, name.replace("_", " ")) for name in names)
    body = ""
    for row in rows[:_ROWS]:
        kind = ' class="advice"' if row.get("what") == "advice" else ""
        body += f"<tr{kind}>{''.join(cell('td', name, _text(row[name])) for name in names)}</tr>"
    more = f"<p class='note'>and {len(rows) - _ROWS:,} more</p>" if len(rows) > _ROWS else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
