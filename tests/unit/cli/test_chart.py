from __future__ import annotations

import io

import pytest
from rich.console import Console

from qflow_client.cli.chart import DepthChart, level


@pytest.mark.parametrize(
    ("value", "row", "character"),
    [(0, 0, " "), (0.1, 0, "▁"), (5, 0, "▄"), (10, 0, "█"), (10, 1, " "), (15, 1, "▄"), (99, 3, "█")],
)
def test_the_bars_of_the_depth_chart_are_drawn_in_eighths_of_a_row(value: float, row: int, character: str) -> None:
    assert level(value, row, 10) == character


def drawn(chart: DepthChart, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(chart)
    return capture.get().splitlines()


def test_the_depth_chart_labels_thresholds_at_their_height_and_shows_the_newest_depth_at_the_right() -> None:
    chart = DepthChart([(0, 0), (10, 100)], {100: "stop", 50: "resume"}, resume=50, stop=100, height=4)
    assert drawn(chart, 20) == [
        " stop 100 ┤╌╌╌╌╌╌╌╌▄",
        "          │        █",
        "resume 50 ┤╌╌╌╌╌╌╌╌█",
        "          │        █",
    ]


def test_the_depth_chart_omits_the_oldest_samples_if_there_are_too_many() -> None:
    chart = DepthChart([(0, 8)] * 50 + [(0, 0)], {8: "stop"}, resume=4, stop=8, height=2)
    assert drawn(chart, 20)[1] == "       │" + "█" * 11 + " "
