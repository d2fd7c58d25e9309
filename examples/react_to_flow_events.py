"""Get an event when the broker stops the producer, with the reason and the duration."""

from __future__ import annotations

import threading

from qflow_client import FlowEvent, FlowEventKind, Producer
from qflow_client.broker import Broker

# This example makes the broker stop its producers, so it always starts its own broker.
with Broker() as broker:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders", name="till 7") as producer:
        events: list[FlowEvent] = []
        flowed, unflowed = threading.Event(), threading.Event()

        def on_flow(event: FlowEvent) -> None:
            """Called in order, on a thread of the producer. It may call any method of the producer."""
            print(event)
            events.append(event)
            if event.kind is FlowEventKind.FLOWED:
                flowed.set()
            if event.kind is FlowEventKind.UNFLOWED:
                unflowed.set()

        producer.send(b"first").result(timeout=10)
        unsubscribe = producer.on_flow(on_flow)

        broker.flow(False)
        assert flowed.wait(timeout=10)
        # This send waits until the broker says go.
        threading.Timer(0.3, broker.flow, args=(True,)).start()
        producer.send(b"second", timeout=10)
        assert unflowed.wait(timeout=10)
        unsubscribe()

        assert events[0].kind is FlowEventKind.FLOWED
        assert events[0].hold is not None
        assert events[0].hold.kind == "channel_flow"
        held = producer.flow_state.seconds_flowed["channel_flow"]
        print(f"held by channel_flow for {held:.3f} s in all")
        assert held > 0
