"""A streaming job is faster than the consumer of its queue. The job waits, and the queue keeps to its limit (C6)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pika
from pyspark.sql import SparkSession

from qflow_client.broker import Broker
from qflow_client.spark import check_java, register

ROWS, BATCHES = 2000, 5
STOP, RESUME, CAPACITY = 500, 350, 200

check_java()
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

with tempfile.TemporaryDirectory() as folder, Broker() as broker:
    broker.declare_queue("events", arguments={"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME})
    seen: dict[str, int] = {}
    repeats = 0

    def consume() -> None:
        """Start late, and take 1,500 messages a second. Count a message with a known message id as a repeat."""
        global repeats
        broker.wait_until(lambda b: b.queue("events").flow_stopped, timeout=600)
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=50)
            for method, properties, body in channel.consume("events"):
                assert method.delivery_tag is not None
                assert properties.message_id is not None
                repeats += properties.message_id in seen
                seen[properties.message_id] = int(body)
                if len(seen) % 15 == 0:
                    time.sleep(0.01)
                channel.basic_ack(method.delivery_tag)
                if len(seen) == ROWS * BATCHES:
                    break

    consumer = threading.Thread(target=consume)
    consumer.start()

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)

    # Each batch takes one file, and the rows of a file always have the same order. So if a batch is sent again, its
    # messages have the same ids, because the ids are made from the position.
    lines = Path(folder, "lines")
    lines.mkdir()
    for file in range(BATCHES):
        (lines / f"{file}.txt").write_text("".join(f"{file * ROWS + row}\n" for row in range(ROWS)))
    events = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(lines))

    query = (
        events.selectExpr("value as body")
        .writeStream.format("amqp")
        .options(url=broker.url, routingKey="events", capacity=CAPACITY, messageId="position")
        .options(summaryPath=f"{folder}/summary.jsonl", checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    consumer.join(300)

    for line in Path(folder, "summary.jsonl").read_text().splitlines():
        batch = json.loads(line)
        print(f"batch {batch['batch']}: {batch['rows']} rows, held for {batch['seconds_flowed']}")
    queue = broker.queue("events")
    print(f"peak {queue.peak_depth}, stop {STOP} + capacity {CAPACITY}; {repeats} repeats dropped")
    assert STOP < queue.peak_depth <= STOP + CAPACITY
    assert sorted(seen.values()) == list(range(ROWS * BATCHES))
    spark.stop()
