"""A chart of a queue's depth and thresholds over time, drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

__all__ = ["DepthChart", "level"]

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def level(value: float, row: int, step: float) -> str:
    """Return the character of one row in the bar for `value`. Row 0 is the lowest. A full row is `step` high."""
    filled = value / step - row
    # A value above 0 fills at least one eighth of row 0, so the bar is always visible.
    return _EIGHTHS[max(0, min(8, round(filled * 8) or (row == 0 < value)))]


class DepthChart:
    """Draws the depths of a queue as bars, one in each column. The latest column is on the right.

    Args:
        depths: minimum and maximum depth of each column. If there is too little room, the oldest columns are left out.
        marks: name of each threshold, by its depth. The row with this depth gets the name as its label.
        resume: depth up to which the rows of the chart are green.
        stop: depth up to which the rows above `resume` are yellow. The rows above `stop` are red.
    """

    def __init__(
        self, depths: Sequence[tuple[int, int]], marks: Mapping[int, str], *, resume: int, stop: int, height: int = 10
    ) -> None:
        self._depths = depths
        self._marks = marks
        self._resume = resume
        self._stop = stop
        self._height = height

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(30, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        top = max([1, *self._marks, *(highest for _, highest in self._depths)])
        step = top / (self._height - 0.5)
        # If several thresholds are in one row, the label of the row shows the highest threshold.
        rows = {min(self._height - 1, int(mark / step)): mark for mark in sorted(self._marks)}
        labels = {row: f"{self._marks[mark]} {mark:,}" for row, mark in rows.items()}
        margin = max([0, *map(len, labels.values())])
        columns = max(1, options.max_width - margin - 2)
        depths = list(self._depths)[-columns:]
        for row in reversed(range(self._height)):
            label = labels.get(row, "")
            yield Segment(f"{label:>{margin}} {'┤' if label else '│'}", Style(dim=not label))
            yield from self._row(row, step, [(0, 0)] * (columns - len(depths)) + depths, is_mark=bool(label))
            yield Segment.line()

    def _row(self, row: int, step: float, depths: Sequence[tuple[int, int]], *, is_mark: bool) -> Iterator[Segment]:
        top = (row + 1) * step
        colour = "green" if top <= self._resume else "yellow" if top <= self._stop + step / 2 else "red"
        # A bar is dim up to the minimum depth of its column, and bright between the minimum and the maximum.
        moved, stayed = Style(color=colour), Style(color=colour, dim=True)
        for lowest, highest in depths:
            character = level(highest, row, step)
            if character != " ":
                yield Segment(character, stayed if top <= lowest else moved)
            else:
                yield Segment("╌" if is_mark else " ", Style(dim=True))
