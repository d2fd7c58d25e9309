"""Stop every producer of the process, and start them again."""

from __future__ import annotations

import os
from contextlib import ExitStack

from qflow_client import Producer, ProducerFlowed, flow_manager
from qflow_client.broker import Broker

with ExitStack() as stack:
    url = os.environ.get("QFLOW_URL")
    if url is None:
        broker = stack.enter_context(Broker())
        broker.declare_queue("orders")
        url = broker.url

    producers = [stack.enter_context(Producer(url, routing_key="orders", name=f"till {n}")) for n in range(3)]

    stopped = flow_manager.stop_all("stocktaking")
    print(f"{stopped} producers are stopped")
    assert stopped == len(producers)
    # A producer that is made later is stopped at once.
    producers.append(stack.enter_context(Producer(url, routing_key="orders", name="till 3")))
    for producer in producers:
        try:
            producer.send_nowait(b"x")
            raise AssertionError("sent although everything is stopped")
        except ProducerFlowed as error:
            holds = error.holds
        print(f"{producer.name} is held: {holds[0]}")
        assert holds[0].detail == "stocktaking"

    flow_manager.start_all()
    for producer in producers:
        producer.send(b"x").result(timeout=10)
    print("all of them send again")
