"""A process is killed with -9 while its producer is held. Its messages are on disk, and the next process sends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from qflow_client import Outbox, Producer
from qflow_client.broker import Broker

SENDER = """
import sys
from qflow_client import Producer

producer = Producer(sys.argv[1], routing_key="orders", outbox=sys.argv[2], when_flowed="spill")
producer.pause("as if the broker said stop")
for number in range(1000):
    producer.send(f"order {number}")
print("sent", flush=True)
sys.stdin.read()
"""

with Broker() as broker, tempfile.TemporaryDirectory() as folder:
    broker.declare_queue("orders")
    path = Path(folder) / "orders.outbox"
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, broker.url, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sent\n"
        os.kill(sender.pid, signal.SIGKILL)
    print("in the outbox of the dead process:", len(Outbox.look(path, limit=2000)))

    with Producer(broker.url, routing_key="orders", outbox=path) as producer:
        # The outbox sends the earlier messages first.
        producer.send("order 1000")
        producer.flush(timeout=30)
        print("in the outbox now:", producer.stored)

    bodies = [message.body.decode() for message in broker.messages("orders")]
    print("in the queue:", len(bodies), "messages, the last:", bodies[-1])
    assert bodies == [f"order {number}" for number in range(1001)]
