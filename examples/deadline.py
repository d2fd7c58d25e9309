"""Wait for a broker that says stop, but not for ever: what gave up was not sent, and never will be."""

from __future__ import annotations

import time

from qflow_client import FlowControlTimeout, Producer, ProducerFlowed
from qflow_client.broker import Broker

# It takes a broker that can be told to stop its producers, so this one always brings its own.
with Broker() as broker:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders") as producer:
        producer.send(b"before").result(timeout=10)
        events = producer.flow_events()
        broker.flow(False)
        # The producer is flowed once it has read the broker's Channel.Flow.
        assert next(events).flowed

        began = time.monotonic()
        try:
            producer.send(b"late", timeout=0.5)
            raise AssertionError("sent although the broker said stop")
        except FlowControlTimeout as error:
            timeout = error
        print(timeout)
        assert time.monotonic() - began >= 0.5
        # It was not sent, so it can be given to somebody else.
        assert timeout.message == b"late"

        # Not willing to wait at all.
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
