"""Send messages, and read the outcome of each."""

from __future__ import annotations

import os
from contextlib import ExitStack

from qflow_client import Message, MessageReturned, Outcome, Producer
from qflow_client.broker import Broker

with ExitStack() as stack:
    url = os.environ.get("QFLOW_URL")
    if url is None:
        broker = stack.enter_context(Broker())
        broker.declare_queue("orders")
        url = broker.url

    with Producer(url, routing_key="orders") as producer:
        # `send` returns a receipt when the message is admitted. The broker's answer comes later.
        receipt = producer.send(b"a plain body")
        print("the broker says:", receipt.result(timeout=10))
        assert receipt.outcome is Outcome.CONFIRMED

        receipts = [
            producer.send(Message(b"an order", content_type="text/plain", headers={"number": n})) for n in range(1000)
        ]
        producer.flush(timeout=60)
        print(sum(receipt.delivered for receipt in receipts), "of", len(receipts), "confirmed")
        assert all(receipt.delivered for receipt in receipts)

        # The broker returns a message that no queue takes.
        lost = producer.send(b"to nobody", routing_key="no-such-queue")
        try:
            lost.result(timeout=10)
            raise AssertionError("the message was not returned")
        except MessageReturned as error:
            print("returned:", error.reply_code, error.reply_text)
        assert lost.outcome is Outcome.RETURNED
