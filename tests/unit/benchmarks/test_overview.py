"""The tables and the picture of `benchmarks.overview`. Measured values are not tested."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import overview
from benchmarks.report import document, summarize
from benchmarks.runner import Measurement, Plan

NAMES = ("plain", "qflow", "pika_select", "kombu")
PLAN = Plan("amqp://u:secret@host/", 1000, (100, 65_536), 1000, 1, confirmed=True)


class Stub:
    distribution = ""
    varies = False

    def __init__(self, title: str) -> None:
        self.title = title

    def run(self, job: object) -> Any:
        raise NotImplementedError


def measured() -> dict[str, Any]:
    peers: Any = {name: Stub(f"the <{name}>") for name in NAMES[:3]}
    series = {}
    for name, plan in {"rabbitmq confirmed": PLAN, "rabbitmq latency": replace(PLAN, sizes=(100,), sample=7)}.items():
        runs = [
            Measurement(peer, size, 0, 1000, seconds, 0.5, (0.001, 0.002) if plan.sample else ())
            for size in plan.sizes
            for peer, seconds in (("plain", 0.01), ("qflow", 0.0125), ("pika_select", 0.04))
            if (peer, size) != ("pika_select", 65_536)
        ]
        rows = summarize(NAMES, peers, runs)
        made = document(plan, peers, rows, runs, {"product": "RabbitMQ", "version": "3.10.8"})
        series[name] = made | {"failed": ["the <pika_select>, 64 KiB: no room"]}
    # The document as it is read from the file.
    found: dict[str, Any] = json.loads(json.dumps(series))
    return found


def test_the_overview_tables_have_a_row_for_each_measured_client_and_list_failures() -> None:
    text = overview.tables(measured())
    rates, latency = text.split("**RabbitMQ 3.10.8, latency")
    assert "**RabbitMQ 3.10.8, confirmed, window 1000, median of 1 rounds**" in rates
    assert "| publisher | 100 B: msg/s (of plain) | 64 KiB: msg/s (of plain) | CPU s / 100k, 100 B |" in rates
    assert "| the <qflow> | 80,000 (0.80) | 80,000 (0.80) | 50.00 |" in rates
    assert "| the <pika_select> | 25,000 (0.25) | – (–) | 50.00 |" in rates
    assert "Failed: the <pika_select>, 64 KiB: no room" in rates
    assert "| the <qflow> | 2.00 | 2.00 | – |" in latency
    # One library is not installed, and one is not measured.
    assert "kombu" not in text
    assert "secret" not in text


def test_the_overview_picture_has_a_bar_for_each_client_in_proportion_to_the_plain_socket() -> None:
    root = ET.fromstring(overview.draw(measured()["rabbitmq confirmed"]))
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    bars = [
        (bar.get("class"), float(bar.get("width", "")))
        for bar in root.iterfind("svg:rect", namespace)
        if bar.get("class") != "card"
    ]
    assert bars == [("plain", 140), ("ours", 112), ("theirs", 35), ("plain", 140), ("ours", 112)]
    texts = [text.text for text in root.iterfind("svg:text", namespace)]
    assert {"100 B", "64 KiB", "80,000", "the <qflow>"} <= set(texts)


def test_writing_the_section_of_the_page_again_replaces_it(tmp_path: Path) -> None:
    page, picture, kept = tmp_path / "page.md", tmp_path / "picture.svg", tmp_path / "measured.json"
    page.write_text("before\n\n<!-- overview: made by benchmarks.overview -->\nold\n<!-- end of overview -->\nafter\n")
    kept.write_text(json.dumps(measured()))
    arguments = ["--redraw", "--page", str(page), "--picture", str(picture), "--measured", str(kept)]
    assert overview.main(arguments) == 0
    once = page.read_text()
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("<!-- end of overview -->\nafter\n")
    assert "(images/picture.svg)" in once
    assert overview.main(arguments) == 0
    assert page.read_text() == once
    page.write_text("no place for it")
    with pytest.raises(ValueError, match="exactly once"):
        overview.main(arguments)


def test_the_benchmark_page_has_the_section_that_the_overview_replaces() -> None:
    text = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text.count(overview._BEGIN) == text.count(overview._END) == 1
