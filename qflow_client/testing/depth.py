"""Records the depth of a queue of an embedded broker over time, and draws the depth with the queue's thresholds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Self

from qflow_client.broker import Broker
from qflow_client.testing.pictures import svg

__all__ = ["DepthPanel", "DepthRecorder", "DepthSample", "draw_depth"]


@dataclass(frozen=True, slots=True)
class DepthSample:
    """The state of a queue at one moment.

    Attributes:
        at: time in seconds since the start of the recording.
        depth: number of ready and unacked messages.
        bytes: body bytes of the ready and unacked messages.
        on: whether the queue's flow state is ON, which means that the queue stops its producers.
    """

    at: float
    depth: int
    bytes: int
    on: bool


class DepthRecorder:
    """Records a queue of a running embedded broker during a `with` block.

    A thread takes a sample when the broker's state changes, and at the latest `PERIOD` seconds after the last sample.
    """

    #: Maximum seconds between two samples.
    PERIOD = 0.05

    def __init__(self, broker: Broker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._started = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"depth of {queue}", daemon=True)
        #: The samples, oldest first.
        self.samples: list[DepthSample] = []
        #: Peaks of the queue since its declaration, also between samples, in messages and in body bytes.
        self.peak_depth = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        # Take the first sample on this thread. If the queue does not exist, the caller gets the error.
        self._look(self._broker)
        self._thread.start()
        return self

    def __exit__(self, exc_type: object, *_error: object) -> None:
        self._is_over = True
        self._thread.join()
        if exc_type is None:
            self._look(self._broker)

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._broker.wait_until(self._look, self.PERIOD)
            except TimeoutError:
                # The next `wait_until` calls `_look` at its start.
                continue

    def _look(self, broker: Broker) -> bool:
        queue = broker.queue(self._queue)
        at = time.monotonic() - self._started
        self.samples.append(DepthSample(at, queue.depth, queue.bytes, queue.flow_stopped))
        self.peak_depth, self.peak_bytes = queue.peak_depth, queue.peak_bytes
        return self._is_over


@dataclass(frozen=True, slots=True)
class DepthPanel:
    """One diagram of a drawing, which shows the depth of a queue during one recording.

    Attributes:
        samples: samples of the recording, oldest first.
        peak: greatest depth of the queue, in messages or body bytes; ``None`` for the maximum of the samples.
        marks: names and values of horizontal lines. Only the names ``highest``, ``stop`` and ``resume`` have colours.
        of_bytes: whether the depth and all other values are in body bytes instead of messages.
    """

    title: str
    samples: Sequence[DepthSample]
    peak: int | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    of_bytes: bool = False

    def value(self, sample: DepthSample) -> int:
        """Return the depth in a sample, in messages or body bytes."""
        return sample.bytes if self.of_bytes else sample.depth

    def words(self, value: int) -> str:
        """Return a value with its unit as text."""
        return f"{value / 1e6:g} MB" if self.of_bytes else str(value)

    @property
    def highest(self) -> int:
        """The greatest depth of the queue, in messages or body bytes."""
        return max(map(self.value, self.samples)) if self.peak is None else self.peak


_WIDTH, _PANEL, _PLOT, _LEFT, _RIGHT = 760, 250, 168, 40, 112

_LIGHT = """\
.mark { stroke-width: 1.3; stroke-dasharray: 6 4 }
.highest { stroke: #8250df } .stop { stroke: #cf222e } .resume { stroke: #1a7f37 }
text.highest { fill: #8250df; stroke: none } text.stop { fill: #cf222e; stroke: none }
text.resume { fill: #1a7f37; stroke: none }
.depth { fill: none; stroke: #0969da; stroke-width: 1.8; stroke-linejoin: round }
.on { fill: #cf222e; opacity: 0.13 }"""

_DARK = """\
.highest { stroke: #c297ff } .stop { stroke: #ff7b72 } .resume { stroke: #56d364 }
text.highest { fill: #c297ff } text.stop { fill: #ff7b72 } text.resume { fill: #56d364 }
.depth { stroke: #79c0ff }
.on { fill: #ff7b72; opacity: 0.16 }"""

# Minimum pixels between two lines of text.
_LINE_HEIGHT = 14

# Possible distances in seconds between two ticks of the time axis.
_TICK_STEPS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOST_STEPS = 8


def draw_depth(panels: Sequence[DepthPanel], *, title: str, made_by: str) -> str:
    """Return an SVG with the panels below one another, with the same scales for time and depth.

    Args:
        panels: one or more panels, each with samples. The same panels always result in the same SVG.
        title: title of the drawing for screen readers, to which the peak of each panel is added.
        made_by: name of the program that creates the drawing, for a comment in the SVG.

    Raises:
        ValueError: there is no panel, or a panel has no samples.
    """
    if not panels or not all(panel.samples for panel in panels):
        raise ValueError("there is nothing to draw: give at least one panel, and samples for each panel")
    seconds = max(max(panel.samples[-1].at for panel in panels), 0.001)
    highest = max(max(panel.highest, *panel.marks.values(), 1) if panel.marks else panel.highest for panel in panels)
    parts = []
    for number, panel in enumerate(panels):
        parts += _panel(panel, 14 + number * _PANEL, seconds, max(1, highest) * 1.12)
    height = 14 + len(panels) * _PANEL + 6
    unit = "body bytes" if panels[0].of_bytes else "messages"
    notes = [f"blue: depth in {unit}"]
    if any(sample.on for panel in panels for sample in panel.samples):
        notes.append("red background: the flow state is ON")
    if any("highest" in panel.marks for panel in panels):
        notes.append("highest: the stop threshold and all capacities")
    parts.append(f'<text class="small" x="{_LEFT}" y="{height - 12}">{"; ".join(notes)}</text>')
    peaks = "; ".join(f"{panel.title}: peak {panel.words(panel.highest)}" for panel in panels)
    return svg(_WIDTH, height, parts, title=f"{title}. {peaks}", made_by=made_by, light=_LIGHT, dark=_DARK)


def _panel(panel: DepthPanel, top: int, seconds: float, most: float) -> list[str]:
    right = _WIDTH - _RIGHT

    def x(at: float) -> float:
        return round(_LEFT + at / seconds * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(top + 36 + _PLOT - value / most * _PLOT, 1)

    parts = [f'<text class="title" x="{_LEFT}" y="{top + 16}">{escape(panel.title)}</text>']
    for begin, end in _spans(panel.samples):
        parts.append(
            f'<rect class="on" x="{x(begin)}" y="{y(most)}" width="{round(x(end) - x(begin), 1)}" height="{_PLOT}"/>'
        )
    parts.append(f'<path class="grid" d="M{_LEFT} {y(most)}V{y(0)}H{right}"/>')
    above = y(most)
    for name, value in sorted(panel.marks.items(), key=lambda mark: -mark[1]):
        kind = escape(name)
        parts.append(f'<path class="mark {kind}" d="M{_LEFT} {y(value)}H{right}"/>')
        # Horizontal lines may be close together, but their names must not overlap.
        above = max(y(value) + 4, above + _LINE_HEIGHT)
        parts.append(f'<text class="{kind}" x="{right + 6}" y="{above}">{panel.words(value)} {kind}</text>')
    parts.append(f'<text class="small" x="{_LEFT - 6}" y="{y(0) + 4}" text-anchor="end">0</text>')
    first, *others = _thinned(panel, seconds)
    # Draw the depth in each sample as a horizontal line to the time of the next sample.
    steps = "".join(f"H{x(sample.at)}V{y(panel.value(sample))}" for sample in others)
    parts.append(f'<path class="depth" d="M{x(first.at)} {y(panel.value(first))}{steps}"/>')
    top_sample = max(panel.samples, key=panel.value)
    # If the peak is near the right edge, write its text to the left of the peak.
    anchor, shift = ("end", -4) if x(top_sample.at) > right - 90 else ("start", 4)
    parts.append(
        f'<text x="{x(top_sample.at) + shift}" y="{y(panel.highest) - 5}" text-anchor="{anchor}">'
        f"peak {panel.words(panel.highest)}</text>"
    )
    step = next((step for step in _TICK_STEPS if seconds / step <= _MOST_STEPS), seconds / _MOST_STEPS)
    for tick in range(int(seconds / step) + 1):
        parts.append(
            f'<text class="small" x="{x(tick * step)}" y="{y(0) + 18}" text-anchor="middle">{tick * step:g} s</text>'
        )
    return parts


def _spans(samples: Sequence[DepthSample]) -> list[tuple[float, float]]:
    """Return the start and end of each period in which the flow state was ON."""
    spans = []
    since = None
    for sample in samples:
        if sample.on and since is None:
            since = sample.at
        elif not sample.on and since is not None:
            spans.append((since, sample.at))
            since = None
    if since is not None:
        spans.append((since, samples[-1].at))
    return spans


def _thinned(panel: DepthPanel, seconds: float) -> list[DepthSample]:
    """Return the first, lowest, highest and last sample of each 1.5 pixels of width. More samples are not visible."""
    groups: dict[int, list[DepthSample]] = {}
    for sample in panel.samples:
        groups.setdefault(int(sample.at / seconds * 400), []).append(sample)
    kept: list[DepthSample] = []
    for group in groups.values():
        chosen = {group[0], group[-1], min(group, key=panel.value), max(group, key=panel.value)}
        kept += sorted(chosen, key=lambda sample: sample.at)
    return kept
