"""Log holds and their reasons, and follow the advice of the report: the queue keeps to a maximum, and no send waits."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import pika

from qflow_client import FlowLog, Producer
from qflow_client.broker import Broker
from qflow_client.report import FlowReport, flow_report

# The maximum depth of the queue.
MAXIMUM = 500
BURST, BURSTS, RATE = 150, 4, 500.0


def consume(url: str, count: int) -> None:
    """Take `count` messages, not faster than `RATE`."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        while count:
            connection.sleep(1 / RATE)
            method, _, _ = channel.basic_get("orders", auto_ack=True)
            count -= method is not None


def work(folder: Path, stop: int, resume: int, capacities: Mapping[str, int]) -> FlowReport:
    """Two producers send bursts, faster than the consumer. The broker and both producers write a flow log."""
    with FlowLog(folder, period=0.1) as log, Broker(flow_log=log) as broker:
        marks = {"qpid.flow_stop_count": stop, "qpid.flow_resume_count": resume}
        broker.declare_queue("orders", arguments=marks)
        count = BURST * BURSTS * len(capacities)
        threads = [threading.Thread(target=consume, args=(broker.url, count))]

        def produce(name: str, capacity: int) -> None:
            with Producer(broker.url, routing_key="orders", name=name, capacity=capacity) as producer:
                log.watch(producer)
                for _ in range(BURSTS):
                    producer.send_many([b"order"] * BURST)
                    broker.wait_until(lambda broker: broker.queue("orders").depth == 0, timeout=100)

        threads += [threading.Thread(target=produce, args=item) for item in capacities.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"stop {stop}, resume {resume}, capacities {dict(capacities)}: peak {broker.queue('orders').peak_depth}")
    return flow_report(folder, maximum=MAXIMUM)


def held(report: FlowReport) -> float:
    """Return the seconds for which the broker held its publishers."""
    rows = report.tables["holds"]
    return float(sum(row["seconds"] for row in rows if row["origin"] == "broker" and row["reason"] == "channel_flow"))


with tempfile.TemporaryDirectory() as temporary:
    # If the argument names a file, the page of the first report is written there.
    before = work(Path(temporary, "before"), 20, 5, {"north": 100, "south": 100})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(before.page(), encoding="utf-8")
    advice = before.advice["orders"]
    print(f"advice for at most {MAXIMUM}: stop {advice.stop}, resume {advice.resume}, {dict(advice.capacities)}")
    after = work(Path(temporary, "after"), advice.stop, advice.resume, advice.capacities)
    print(f"held for {held(before):.2f} s before, and for {held(after):.2f} s after")
    assert after.tables["queues"][0]["depth_max"] <= MAXIMUM
    assert held(after) <= held(before)
