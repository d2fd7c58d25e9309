"""Wait with a deadline for a broker that says stop. After the deadline the message is not sent, and never will be."""

from __future__ import annotations

import time

from qflow_client import FlowControlTimeout, Producer, ProducerFlowed
from qflow_client.broker import Broker

# This example makes the broker stop its producers, so it always starts its own broker.
with Broker() as broker:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders") as producer:
        producer.send(b"before").result(timeout=10)
        events = producer.flow_events()
        broker.flow(False)
        # The producer is blocked (flowed) when it has read the broker's Channel.Flow.
        assert next(events).flowed

        began = time.monotonic()
        try:
            producer.send(b"late", timeout=0.5)
            raise AssertionError("sent although the broker said stop")
        except FlowControlTimeout as error:
            timeout = error
        print(timeout)
        assert time.monotonic() - began >= 0.5
        # The message was not sent, so the program may send it in another way.
        assert timeout.message == b"late"

        # This call does not wait.
        try:
            producer.send_nowait(b"not now")
            raise AssertionError("sent although the broker said stop")
        except ProducerFlowed as error:
            print(error)

        broker.flow(True)
        assert producer.wait_unflowed(timeout=10)
        producer.send(b"after").result(timeout=10)

    bodies = [message.body for message in broker.messages("orders")]
    print("in the queue:", bodies)
    assert bodies == [b"before", b"after"]
