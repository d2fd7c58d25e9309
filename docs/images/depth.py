"""Draws ``depth.svg``: the depth of a queue between its thresholds, as the embedded broker measured it.

``python docs/images/depth.py`` runs the experiment, which takes a few seconds, and writes the picture beside itself.
Two producers of capacity 50 and 15 publish as fast as they may into a queue with a stop threshold of 100 messages and a
resume threshold of 70. A consumer comes late, and takes `RATE` messages a second.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

from qflow_client import Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker, Enforcement
from qflow_client.testing.depth import DepthPanel, DepthRecorder, draw_depth

STOP, RESUME, CAPACITIES = 100, 70, (50, 15)
MARKS = {"highest": STOP + sum(CAPACITIES), "stop": STOP, "resume": RESUME}
# Messages per second, and seconds: how long the queue is left full, and how long the consumer works.
RATE, LATE, WORK = 250.0, 0.15, 1.15
QUEUE = "orders"

TITLES = {
    Enforcement.COMPLETION: "completion: confirms are held back, and the capacity of each producer is used up",
    Enforcement.CHANNEL_FLOW: "channel_flow: Channel.Flow(active=false), and what was on its way arrives still",
}


def measure(enforcement: Enforcement) -> DepthRecorder:
    """Run the experiment."""

    def feed(producer: Producer) -> None:
        try:
            while True:
                producer.send(b"order", timeout=None)
        except ProducerClosed:
            return

    with Broker(enforcement=enforcement) as broker:
        broker.declare_queue(QUEUE, arguments={"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME})
        with ExitStack() as stack:
            producers = [Producer(broker.url, routing_key=QUEUE, capacity=capacity) for capacity in CAPACITIES]
            threads = [threading.Thread(target=feed, args=(producer,)) for producer in producers]
            with DepthRecorder(broker, QUEUE) as recorder:
                for thread in threads:
                    thread.start()
                    stack.callback(thread.join)
                for producer in producers:
                    stack.callback(_close, producer)
                broker.wait_until(lambda broker: broker.queue(QUEUE).flow_stopped)
                _wait_until_still(broker)
                time.sleep(LATE)
                began = time.monotonic()
                taken = 0
                while (now := time.monotonic()) - began < WORK:
                    if taken < (now - began) * RATE:
                        broker.get(QUEUE)
                        taken += 1
                    time.sleep(0.0005)
    return recorder


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


if __name__ == "__main__":
    panels = []
    for enforcement, words in TITLES.items():
        run = measure(enforcement)
        panels.append(DepthPanel(words, run.samples, run.peak_depth, MARKS))
    title = f"Depth of a queue with stop threshold {STOP} and resume threshold {RESUME}"
    picture = draw_depth(panels, title=title, made_by="docs/images/depth.py from runs of the embedded broker")
    Path(__file__).with_name("depth.svg").write_text(picture, encoding="utf-8")
