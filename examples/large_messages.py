"""Use case 3 of QPID-942 (D6): large messages that no consumer can process. Their bytes are limited until a purge.

It runs twice: without a capacity of the queue, and with one. It draws the queue's body bytes. An argument names the
file.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import pika

from qflow_client import Producer
from qflow_client.broker import Broker
from qflow_client.testing.depth import DepthPanel, DepthRecorder, draw_depth

IMAGES, SIZE = 40, 100_000
QUEUE_CAPACITY, RESUME, CAPACITY_BYTES = 1_000_000, 500_000, 300_000
HIGHEST = QUEUE_CAPACITY + CAPACITY_BYTES
# In seconds: the time of a failed attempt, and the time after which an operator purges the queue.
ATTEMPT, OPERATOR = 0.02, 0.3


def fail_to_process(url: str, is_over: threading.Event) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        for method, _, _ in channel.consume("images", inactivity_timeout=ATTEMPT):
            if method is not None and method.delivery_tag is not None:
                time.sleep(ATTEMPT)
                channel.basic_reject(method.delivery_tag, requeue=True)
            if is_over.is_set():
                return


def publish(url: str) -> None:
    with Producer(url, routing_key="images", capacity_bytes=CAPACITY_BYTES) as producer:
        for _ in range(IMAGES):
            producer.send(bytes(SIZE))


def run(arguments: dict[str, object]) -> DepthRecorder:
    with Broker() as broker:
        broker.declare_queue("images", arguments=arguments)
        is_over = threading.Event()
        threads = [
            threading.Thread(target=fail_to_process, args=(broker.url, is_over)),
            threading.Thread(target=publish, args=(broker.url,)),
        ]
        with DepthRecorder(broker, "images") as recorder:
            for thread in threads:
                thread.start()
            # One message stays with the consumer.
            while broker.queue("images").published < IMAGES or broker.queue("images").depth > 1:
                # Wait until the producer has sent everything or is held. Only the failed attempts continue.
                broker.wait_until(
                    lambda b: b.queue("images").flow_stopped or b.queue("images").published == IMAGES, timeout=60
                )
                time.sleep(OPERATOR)
                broker.purge("images")
        is_over.set()
        for thread in threads:
            thread.join(timeout=60)
        assert broker.queue("images").acked == 0
    return recorder


without = run({})
print("without flow control, the most bytes that were in the queue:", without.peak_bytes)
held = run({"x-qpid-capacity": QUEUE_CAPACITY, "x-qpid-flow-resume-capacity": RESUME})
print("with flow control:", held.peak_bytes)
assert held.peak_bytes <= HIGHEST
assert without.peak_bytes == IMAGES * SIZE

marks = {"highest": HIGHEST, "stop": QUEUE_CAPACITY, "resume": RESUME}
picture = draw_depth(
    [
        DepthPanel(
            "without flow control: all of a burst is in the broker",
            without.samples,
            without.peak_bytes,
            of_bytes=True,
        ),
        DepthPanel(
            "with flow control: no more of it than the queue's capacity, and what is on its way",
            held.samples,
            held.peak_bytes,
            marks,
            True,
        ),
    ],
    title="Large messages that no consumer can process",
    made_by="examples/large_messages.py",
)
path = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.gettempdir(), "large-messages.svg")
path.write_text(picture, encoding="utf-8")
print("drawn:", path)
