"""A program that publishes with pika, and the same program with a changed import, when the broker says stop."""

from __future__ import annotations

import threading
import time
from typing import Any

import pika

import qflow_client.pika
from qflow_client import FlowControlTimeout
from qflow_client.broker import Broker

COUNT = 300


def program(pika: Any, parameters: Any, queue: str) -> None:
    """Publish more messages than the queue should have. The program has no code for flow control."""
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        for number in range(COUNT):
            channel.basic_publish("", queue, b"%d" % number)
            connection.process_data_events(0.001)


with Broker() as broker:
    for queue in "before", "impatient", "patient":
        broker.declare_queue(queue, arguments={"qpid.flow_stop_count": 50, "qpid.flow_resume_count": 25})

    program(pika, pika.URLParameters(broker.url), "before")
    broker.wait_until(lambda broker: broker.queue("before").depth == COUNT)
    print(f"pika: {COUNT} messages in a queue that said stop after 50")

    # Only the import changes. The URL may set the time to wait.
    url = f"{broker.url}?max_producer_flow_control_wait=0.5"
    try:
        program(qflow_client.pika, qflow_client.pika.URLParameters(url), "impatient")
        raise AssertionError("published although the broker said stop")
    except FlowControlTimeout as error:
        print("nobody consumes:", error)
    depth = broker.queue("impatient").depth
    assert 50 < depth < COUNT

    # With a consumer the program waits and then continues.
    taken: list[bytes] = []

    def consume() -> None:
        # The consumer comes late.
        broker.wait_until(lambda broker: broker.queue("patient").flow_stopped, timeout=60)
        while len(taken) < COUNT:
            time.sleep(0.002)
            message = broker.get("patient")
            if message is not None:
                taken.append(message.body)

    consumer = threading.Thread(target=consume)
    consumer.start()
    program(qflow_client.pika, qflow_client.pika.URLParameters(broker.url), "patient")
    consumer.join(60)
    assert taken == [b"%d" % number for number in range(COUNT)]
    assert broker.queue("patient").flow_stopped_count
    print(f"somebody consumes: all {COUNT}, in order, never more than {broker.queue('patient').peak_depth} at a time")
