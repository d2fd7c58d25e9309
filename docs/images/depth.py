"""Draws ``depth.svg``: the depth of a queue between its thresholds, as the embedded broker measured it.

``python docs/images/depth.py`` runs the experiment, which takes a few seconds, and writes the picture beside itself.
Two producers of capacity 50 and 15 publish as fast as they may into a queue with a stop threshold of 100 messages and a
resume threshold of 70. A consumer comes late, and takes `RATE` messages a second.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path

from qflow_client import Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker, Enforcement

STOP, RESUME, CAPACITIES = 100, 70, (50, 15)
HIGHEST = STOP + sum(CAPACITIES)
# Messages per second, and seconds: how long the queue is left full, and how long the consumer works.
RATE, LATE, WORK = 250.0, 0.15, 1.15
QUEUE = "orders"

TITLES = {
    Enforcement.COMPLETION: "completion: confirms are held back, and the capacity of each producer is used up",
    Enforcement.CHANNEL_FLOW: "channel_flow: Channel.Flow(active=false), and what was on its way arrives still",
}

STYLE = """
  .card { fill: #f6f7f9; stroke: #d5d9e0 }
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 }
  .small { font-size: 12px; fill: #57606a }
  .grid { fill: none; stroke: #c3c9d2; stroke-width: 1 }
  .mark { stroke-width: 1.3; stroke-dasharray: 6 4 }
  .highest { stroke: #8250df } .stop { stroke: #cf222e } .resume { stroke: #1a7f37 }
  text.highest { fill: #8250df; stroke: none } text.stop { fill: #cf222e; stroke: none }
  text.resume { fill: #1a7f37; stroke: none }
  .depth { fill: none; stroke: #0969da; stroke-width: 1.8; stroke-linejoin: round }
  .on { fill: #cf222e; opacity: 0.13 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #22262f; stroke: #3b414d }
    text { fill: #e6edf3 }
    .small { fill: #a5adba }
    .grid { stroke: #454c59 }
    .highest { stroke: #c297ff } .stop { stroke: #ff7b72 } .resume { stroke: #56d364 }
    text.highest { fill: #c297ff } text.stop { fill: #ff7b72 } text.resume { fill: #56d364 }
    .depth { stroke: #79c0ff }
    .on { fill: #ff7b72; opacity: 0.16 }
  }
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """The queue at one moment.

    Attributes:
        at: seconds since the first message.
        depth: messages.
        on: the flow state.
    """

    at: float
    depth: int
    on: bool


def measure(enforcement: Enforcement) -> list[Sample]:
    """Run the experiment, and look at the queue whenever something has happened to it."""
    samples: list[Sample] = []
    started = 0.0

    def look(*_frame: object) -> None:
        queue = broker.queue(QUEUE)
        samples.append(Sample(time.monotonic() - started, queue.depth, queue.flow_stopped))

    def feed(producer: Producer) -> None:
        try:
            while True:
                producer.send(b"order", timeout=None)
        except ProducerClosed:
            return

    # Every frame on the broker's side is a moment to look at.
    broker = Broker(enforcement=enforcement, trace=lambda *frame: look(*frame) if started else None)
    with broker:
        broker.declare_queue(QUEUE, arguments={"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME})
        with ExitStack() as stack:
            producers = [Producer(broker.url, routing_key=QUEUE, capacity=capacity) for capacity in CAPACITIES]
            threads = [threading.Thread(target=feed, args=(producer,)) for producer in producers]
            started = time.monotonic()
            for thread in threads:
                thread.start()
                stack.callback(thread.join)
            for producer in producers:
                stack.callback(_close, producer)
            broker.wait_until(lambda broker: broker.queue(QUEUE).flow_stopped)
            _wait_until_still(broker)
            # A frame is told of before what it does.
            look()
            time.sleep(LATE)
            began = time.monotonic()
            taken = 0
            while (now := time.monotonic()) - began < WORK:
                if taken < (now - began) * RATE:
                    broker.get(QUEUE)
                    taken += 1
                    look()
                time.sleep(0.0005)
            ended = time.monotonic() - started
    return sorted((sample for sample in samples if sample.at <= ended), key=lambda sample: sample.at)


def _wait_until_still(broker: Broker) -> None:
    """Wait until no message has come for a twentieth of a second."""
    depth, since = 0, time.monotonic()
    while time.monotonic() - since < 0.05:
        now = broker.queue(QUEUE).depth
        if now != depth:
            depth, since = now, time.monotonic()
        time.sleep(0.005)


def _close(producer: Producer) -> None:
    try:
        producer.close(timeout=0)
    except UndeliveredMessages:
        # The run is over; what was under way is of no interest.
        pass


def draw(runs: dict[Enforcement, list[Sample]]) -> str:
    """The picture as SVG: one panel for each run."""
    width, panel, left, right = 760, 250, 40, 96
    seconds = max(samples[-1].at for samples in runs.values())
    parts = []
    for number, (enforcement, samples) in enumerate(runs.items()):
        top = 14 + number * panel

        def x(at: float) -> float:
            return round(left + at / seconds * (width - left - right), 1)

        def y(depth: float, top: int = top) -> float:
            return round(top + 204 - depth / 185 * 168, 1)

        parts.append(f'<text class="title" x="{left}" y="{top + 16}">{escape(TITLES[enforcement])}</text>')
        for begin, end in _spans(samples):
            parts.append(
                f'<rect class="on" x="{x(begin)}" y="{y(185)}" width="{round(x(end) - x(begin), 1)}" height="168"/>'
            )
        parts.append(f'<path class="grid" d="M{left} {y(185)}V{y(0)}H{width - right}"/>')
        for name, depth in (("highest", HIGHEST), ("stop", STOP), ("resume", RESUME)):
            parts.append(f'<path class="mark {name}" d="M{left} {y(depth)}H{width - right}"/>')
            label = f"{depth} {name}"
            parts.append(f'<text class="{name}" x="{width - right + 6}" y="{y(depth) + 4}">{label}</text>')
        parts.append(f'<text class="small" x="{left - 6}" y="{y(0) + 4}" text-anchor="end">0</text>')
        points = " ".join(f"{x(sample.at)},{y(sample.depth)}" for sample in _thinned(samples))
        parts.append(f'<polyline class="depth" points="{points}"/>')
        peak = max(samples, key=lambda sample: sample.depth)
        parts.append(f'<text x="{x(peak.at) + 4}" y="{y(peak.depth) - 5}">peak {peak.depth}</text>')
        for tick in range(int(seconds / 0.25) + 1):
            parts.append(
                f'<text class="small" x="{x(tick / 4)}" y="{y(0) + 18}" text-anchor="middle">{tick / 4:g} s</text>'
            )
    height = 14 + len(runs) * panel + 6
    parts.append(
        f'<text class="small" x="{left}" y="{height - 12}">blue: depth in messages; red background: the flow state is '
        f"ON; highest: the stop threshold and all capacities, {HIGHEST}</text>"
    )
    peaks = ", ".join(f"{max(s.depth for s in samples)} under {name.value}" for name, samples in runs.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        "<!-- Made by docs/images/depth.py from a run of the embedded broker. -->\n"
        f"<title>Depth of a queue with stop threshold {STOP} and resume threshold {RESUME}: peak {peaks}</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _spans(samples: list[Sample]) -> list[tuple[float, float]]:
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


def _thinned(samples: list[Sample]) -> list[Sample]:
    """The first, lowest, highest and last sample of every thousandth of a second: what a line can show."""
    kept: list[Sample] = []
    by_time: dict[int, list[Sample]] = {}
    for sample in samples:
        by_time.setdefault(int(sample.at * 1000), []).append(sample)
    for group in by_time.values():
        chosen = {group[0], group[-1], min(group, key=lambda s: s.depth), max(group, key=lambda s: s.depth)}
        kept += sorted(chosen, key=lambda sample: sample.at)
    return kept


if __name__ == "__main__":
    picture = draw({enforcement: measure(enforcement) for enforcement in TITLES})
    Path(__file__).with_name("depth.svg").write_text(picture, encoding="utf-8")
