"""Use case 1 of QPID-942 (D6): a consumer comes late, lags behind its producer, goes away, and comes back.

It runs twice: without marks on the queue, and with marks. It draws the queue's depth. An argument names the file.
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

ORDERS, STOP, RESUME, CAPACITY = 500, 100, 60, 30
HIGHEST = STOP + CAPACITY
# In seconds: the time that the consumer needs for an order, and the time for which it is away.
HANDLING, AWAY = 0.002, 0.4


def publish(url: str) -> None:
    with Producer(url, routing_key="orders", capacity=CAPACITY) as producer:
        for number in range(ORDERS):
            producer.send(f"order {number}")


def consume(url: str, count: int) -> None:
    """Handle `count` orders and disconnect. Further orders that were delivered return to the queue."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=10)
        for method, _, _ in channel.consume("orders"):
            time.sleep(HANDLING)
            assert method.delivery_tag is not None
            channel.basic_ack(method.delivery_tag)
            count -= 1
            if not count:
                return


def run(arguments: dict[str, object]) -> DepthRecorder:
    with Broker() as broker:
        broker.declare_queue("orders", arguments=arguments)
        with DepthRecorder(broker, "orders") as recorder:
            producing = threading.Thread(target=publish, args=(broker.url,))
            producing.start()
            # The consumer comes late, when the producer has sent everything or is held.
            broker.wait_until(
                lambda b: b.queue("orders").flow_stopped or b.queue("orders").published == ORDERS, timeout=60
            )
            consume(broker.url, ORDERS // 4)
            time.sleep(AWAY)
            consume(broker.url, ORDERS - ORDERS // 4)
            producing.join(timeout=60)
        assert broker.queue("orders").acked == ORDERS
    return recorder


without = run({})
print("without flow control, the most that was in the queue:", without.peak_depth)
held = run({"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME})
print("with flow control:", held.peak_depth)
assert held.peak_depth <= HIGHEST
assert without.peak_depth == ORDERS

marks = {"highest": HIGHEST, "stop": STOP, "resume": RESUME}
picture = draw_depth(
    [
        DepthPanel("without flow control: what the consumer cannot keep up with is in the broker", without.samples),
        DepthPanel("with flow control: the producer waits", held.samples, held.peak_depth, marks),
    ],
    title="A consumer comes late, lags behind its producer, goes away, and comes back",
    made_by="examples/lagging_consumer.py",
)
path = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.gettempdir(), "lagging-consumer.svg")
path.write_text(picture, encoding="utf-8")
print("drawn:", path)
