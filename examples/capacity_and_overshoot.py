"""The capacities of the producers limit the depth of a queue beyond its stop threshold: 100 + 50 + 15 is 165 (C6)."""

from __future__ import annotations

import threading

from qflow_client import FlowControlTimeout, Producer
from qflow_client.broker import Broker

STOP, RESUME, CAPACITIES = 100, 70, (50, 15)

# This example reads the depth of the queue, so it always starts its own broker. The queue holds producers by late
# confirms.
with Broker(enforcement="completion") as broker:
    broker.declare_queue("orders", arguments={"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME})
    producers = [Producer(broker.url, routing_key="orders", capacity=capacity) for capacity in CAPACITIES]

    def publish_until_held(producer: Producer) -> None:
        """Publish until a send waits for 0.5 s. Without a consumer the queue soon has the whole capacity."""
        while True:
            try:
                producer.send(b"x", timeout=0.5)
            except FlowControlTimeout as error:
                # Print the line in one call, because the other thread prints, too.
                print(f"capacity {producer.capacity}: {error}\n", end="")
                return

    threads = [threading.Thread(target=publish_until_held, args=(producer,)) for producer in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    worst = STOP + sum(CAPACITIES)
    broker.wait_until(lambda b: b.queue("orders").depth == worst)
    queue = broker.queue("orders")
    print(f"stop threshold {STOP}, deepest {queue.peak_depth}, worst case {worst}")
    assert queue.peak_depth == worst
    assert [producer.unsettled for producer in producers] == list(CAPACITIES)

    # When the queue has room, the windows have room.
    broker.purge("orders")
    for producer in producers:
        producer.flush(timeout=10)
        assert producer.available == producer.capacity
        producer.close()
    print("all confirmed once the queue had drained")
