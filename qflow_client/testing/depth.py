"""The depth of a queue over time: recorded from an embedded broker, and drawn between its marks."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import TracebackType
from typing import Self

from qflow_client.broker import Broker
from qflow_client.testing.pictures import svg

__all__ = ["DepthPanel", "DepthRecorder", "DepthSample", "draw_depth"]


@dataclass(frozen=True, slots=True)
class DepthSample:
    """A queue at one moment.

    Attributes:
        at: seconds since the recording began.
        depth: messages, ready and delivered-unacknowledged.
        bytes: body bytes of all of them.
        on: its flow state.
    """

    at: float
    depth: int
    bytes: int
    on: bool


class DepthRecorder:
    """Looks at a queue whenever its broker's state has changed, from a thread of its own, as long as the block lasts.

    Args:
        broker: an embedded broker that runs.
        queue: the name of one of its queues.
    """

    #: Seconds after which it looks even if nothing has happened.
    PERIOD = 0.05

    def __init__(self, broker: Broker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._started = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"depth of {queue}", daemon=True)
        #: What was seen, the oldest first.
        self.samples: list[DepthSample] = []
        #: The most messages, and body bytes, that there ever were, by the queue's own count: none escapes it.
        self.peak_depth = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        # A queue that is not there is its caller's business, not the thread's.
        self._look(self._broker)
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()
        if exc_type is None:
            self._look(self._broker)

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._broker.wait_until(self._look, self.PERIOD)
            except TimeoutError:
                # A quiet queue.
                continue

    def _look(self, broker: Broker) -> bool:
        queue = broker.queue(self._queue)
        at = time.monotonic() - self._started
        self.samples.append(DepthSample(at, queue.depth, queue.bytes, queue.flow_stopped))
        self.peak_depth, self.peak_bytes = queue.peak_depth, queue.peak_bytes
        return self._is_over


@dataclass(frozen=True, slots=True)
class DepthPanel:
    """One run in a picture.

    Attributes:
        title: what is special about it.
        samples: what was seen, the oldest first.
        peak: the most that there was; ``None`` for the most that was seen.
        marks: lines to be drawn, by name: ``highest``, ``stop`` and ``resume`` have colours.
        of_bytes: whether it is about body bytes; else about messages.
    """

    title: str
    samples: Sequence[DepthSample]
    peak: int | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    of_bytes: bool = False

    def value(self, sample: DepthSample) -> int:
        """What the line shows of a sample."""
        return sample.bytes if self.of_bytes else sample.depth

    def words(self, value: int) -> str:
        """A value for people."""
        return f"{value / 1e6:g} MB" if self.of_bytes else str(value)

    @property
    def highest(self) -> int:
        """The most that there was."""
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

# Between two lines of text.
_LINE = 14

# Seconds between two marks on the time axis.
_STEPS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOST_STEPS = 8


def draw_depth(panels: Sequence[DepthPanel], *, title: str, made_by: str) -> str:
    """Draw runs below one another, on the same scales.

    Args:
        panels: one or more, each with samples.
        title: what the picture shows, for those who do not see it. The peaks are added.
        made_by: the program that made it.

    Returns:
        The picture as SVG; the same for the same panels.

    Raises:
        ValueError: no panel, or one without samples.
    """
    if not panels or not all(panel.samples for panel in panels):
        raise ValueError("nothing to draw: there must be panels, each with samples")
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
        # Marks may lie closer together than lines of text can.
        above = max(y(value) + 4, above + _LINE)
        parts.append(f'<text class="{kind}" x="{right + 6}" y="{above}">{panel.words(value)} {kind}</text>')
    parts.append(f'<text class="small" x="{_LEFT - 6}" y="{y(0) + 4}" text-anchor="end">0</text>')
    first, *others = _thinned(panel, seconds)
    # What was seen holds until something else is.
    steps = "".join(f"H{x(sample.at)}V{y(panel.value(sample))}" for sample in others)
    parts.append(f'<path class="depth" d="M{x(first.at)} {y(panel.value(first))}{steps}"/>')
    top_sample = max(panel.samples, key=panel.value)
    # Near the right end the words would leave the plot.
    anchor, shift = ("end", -4) if x(top_sample.at) > right - 90 else ("start", 4)
    parts.append(
        f'<text x="{x(top_sample.at) + shift}" y="{y(panel.highest) - 5}" text-anchor="{anchor}">'
        f"peak {panel.words(panel.highest)}</text>"
    )
    step = next((step for step in _STEPS if seconds / step <= _MOST_STEPS), seconds / _MOST_STEPS)
    for tick in range(int(seconds / step) + 1):
        parts.append(
            f'<text class="small" x="{x(tick * step)}" y="{y(0) + 18}" text-anchor="middle">{tick * step:g} s</text>'
        )
    return parts


def _spans(samples: Sequence[DepthSample]) -> list[tuple[float, float]]:
    """From when to when the flow state was ON."""
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
    """The first, lowest, highest and last sample of every pixel and a half: what a line can show."""
    groups: dict[int, list[DepthSample]] = {}
    for sample in panel.samples:
        groups.setdefault(int(sample.at / seconds * 400), []).append(sample)
    kept: list[DepthSample] = []
    for group in groups.values():
        chosen = {group[0], group[-1], min(group, key=panel.value), max(group, key=panel.value)}
        kept += sorted(chosen, key=lambda sample: sample.at)
    return kept
