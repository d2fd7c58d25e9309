"""Use case 2 of QPID-942 (D6): one of two subscribers never acks. Its queue is limited. The other gets all news (D10).

It runs twice: without a policy, and with one. It draws the depth of the queue that is not acked. An argument names the
file.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import pika

from qflow_client import Producer
from qflow_client.broker import ApplyTo, Broker, Policy, PolicyDefinition, QueuePolicy
from qflow_client.testing.depth import DepthPanel, DepthRecorder, draw_depth

NEWS, STOP, RESUME, CAPACITY = 500, 100, 60, 30
HIGHEST = STOP + CAPACITY
# Seconds for which a queue may hold all producers. After that it drops its oldest messages.
PATIENCE = 0.5

POLICY = Policy(
    "news",
    PolicyDefinition(flow_stop_count=STOP, flow_resume_count=RESUME, max_flow_wait=PATIENCE, then=QueuePolicy.RING),
    pattern="^amq.fanout$",
    apply_to=ApplyTo.EXCHANGES,
)


def subscribe(url: str, queue: str, *, acks: bool, count: int) -> None:
    """Take `count` messages."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for method, _, _ in channel.consume(queue):
            if acks:
                assert method.delivery_tag is not None
                channel.basic_ack(method.delivery_tag)
            count -= 1
            if not count:
                return


def run(policies: list[Policy]) -> DepthRecorder:
    with Broker(policies=policies) as broker:
        for queue in ("acked", "unacked"):
            broker.declare_queue(queue)
            broker.bind("amq.fanout", queue)
        with DepthRecorder(broker, "unacked") as recorder:
            subscribers = [
                threading.Thread(target=subscribe, args=(broker.url, queue), kwargs={"acks": acks, "count": NEWS})
                for queue, acks in (("acked", True), ("unacked", False))
            ]
            for subscriber in subscribers:
                subscriber.start()
            with Producer(broker.url, exchange="amq.fanout", capacity=CAPACITY) as producer:
                for number in range(NEWS):
                    producer.send(f"news {number}")
            broker.wait_until(lambda b: b.queue("acked").acked == NEWS, timeout=60)
            depth = broker.queue("unacked").depth
        for subscriber in subscribers:
            subscriber.join(timeout=60)
        print("not acked:", depth, "dropped:", broker.queue("unacked").dropped)
    return recorder


without = run([])
print("without flow control, the most that was in the queue:", without.peak_depth)
assert without.peak_depth == NEWS
held = run([POLICY])
print("with flow control:", held.peak_depth)
assert held.peak_depth <= HIGHEST

marks = {"highest": HIGHEST, "stop": STOP, "resume": RESUME}
picture = draw_depth(
    [
        DepthPanel("without flow control: all that one subscriber does not ack stays", without.samples),
        DepthPanel(
            f"with flow control: it holds the producer for {PATIENCE:g} s, then it drops its oldest",
            held.samples,
            held.peak_depth,
            marks,
        ),
    ],
    title="The queue of a subscriber that never acks",
    made_by="examples/unacked_subscriber.py",
)
path = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.gettempdir(), "unacked-subscriber.svg")
path.write_text(picture, encoding="utf-8")
print("drawn:", path)
