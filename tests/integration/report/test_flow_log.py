"""Producers and a broker write flow logs. With the advice of the report, the broker behaves as predicted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pika
import pytest

from qflow_client import AsyncProducer, FlowLog, Producer
from qflow_client.broker import Broker
from qflow_client.cli import main
from qflow_client.report import FlowReport, flow_report
from tests.integration.producer.tools import eventually

# Two producers with bursts, and a consumer that takes at most this many messages per second.
BURST = 150
BURSTS = 2
RATE = 600.0
NAMES = ("north", "south")


class Consumer:
    """Takes messages from a queue at a rate, on a thread of its own.

    It is the slower one on a slow machine, too: it takes only while the queue is ON, or nobody sends any more.
    """

    def __init__(self, broker: Broker, queue: str, count: int, sending: set[str]) -> None:
        self._left = count
        # Who is in a burst.
        self._sending = sending
        self._queue = queue
        self._broker = broker
        self._connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        channel = self._connection.channel()
        while self._left:
            eventually(lambda: self._broker.queue(self._queue).flow_stopped or not self._sending, timeout=60)
            time.sleep(1 / RATE)
            method, _, _ = channel.basic_get(self._queue)
            if method is not None:
                channel.basic_ack(method.delivery_tag or 0)
                self._left -= 1
        self._connection.close()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._left


def _work(folder: Path, stop: int, resume: int, capacities: Mapping[str, int]) -> tuple[FlowReport, int]:
    """Run the workload, and return its report and the most messages that there were in the queue."""
    with FlowLog(folder, period=0.1) as log, Broker(flow_log=log) as broker:
        marks = {"qpid.flow_stop_count": stop, "qpid.flow_resume_count": resume}
        broker.declare_queue("orders", arguments=marks)
        sending = set(NAMES)
        consumer = Consumer(broker, "orders", BURST * BURSTS * len(NAMES), sending)

        def produce(name: str) -> None:
            with Producer(broker.url, routing_key="orders", name=name, capacity=capacities[name]) as producer:
                log.watch(producer)
                for _ in range(BURSTS):
                    sending.add(name)
                    for _ in range(BURST):
                        producer.send(b"order")
                    sending.discard(name)
                    # The next burst comes when the consumer has caught up.
                    broker.wait_until(lambda broker: broker.queue("orders").depth == 0, 60)

        threads = [threading.Thread(target=produce, args=(name,), daemon=True) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        consumer.join()
        peak = broker.queue("orders").peak_depth
    return flow_report(folder, maximum=400), peak


def test_C6_with_the_advised_thresholds_a_queue_stays_below_the_maximum_and_should_hold_producers_less(
    tmp_path: Path,
) -> None:
    before, _ = _work(tmp_path / "before", 20, 5, dict.fromkeys(NAMES, 100))
    advice = before.advice["orders"]
    assert set(advice.capacities) == set(NAMES)
    assert advice.worst_case == 400
    assert advice.recorded is not None
    assert advice.expected.seconds_held < advice.recorded.seconds_held

    after, peak = _work(tmp_path / "after", advice.stop, advice.resume, advice.capacities)
    assert peak <= 400
    (queue,) = after.tables["queues"]
    assert queue["depth_max"] == peak
    assert queue["overshoot_max"] <= sum(advice.capacities.values())


def test_the_report_shows_that_the_flow_logs_of_producers_and_broker_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report, peak = _work(tmp_path, 20, 5, dict.fromkeys(NAMES, 30))
    assert report.lost == report.unreadable == 0
    (queue,) = report.tables["queues"]
    assert queue["messages"] == queue["left"] == BURST * BURSTS * len(NAMES)
    assert queue["depth_max"] == peak
    assert (queue["stop"], queue["resume"]) == (20, 5)
    assert 0 < queue["overshoot_max"] == peak - 20 <= 60
    assert {row["producer"]: row["messages"] for row in report.tables["publishers"]} == dict.fromkeys(
        NAMES, BURST * BURSTS
    )
    for name in NAMES:
        by = {
            row["origin"]: row
            for row in report.tables["holds"]
            if row["producer"] == name and row["reason"] == "channel_flow"
        }
        # Each Channel.Flow that was sent was heard, but for one that the end came before.
        assert by["broker"]["episodes"] - by["producer"]["episodes"] in (0, 1)
        assert by["broker"]["queue"] == by["producer"]["queue"] == "orders"
        waits = [row for row in report.tables["waits"] if row["waited"] == name and row["reason"] == "channel_flow"]
        assert {row["filled"] for row in waits} <= set(NAMES)
        assert sum(row["seconds"] for row in waits) == pytest.approx(by["broker"]["seconds"])
    assert main(["report", str(tmp_path), "--maximum", "400", "--delay", "1"]) == 0
    shown = capsys.readouterr().out
    for words in ("north", "orders", "channel_flow", "What to set", "Capacities", "Results of the replays"):
        assert words in shown
    assert main(["report", str(tmp_path), "--maximum", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "maximum=2 allows 2 messages" in said["no_advice"]["orders"]
    assert {row["queue"] for row in said["tables"]["queues"]} == {"orders"}
    # Without pyarrow the page is written, and a table of an earlier report does not stay beside it.
    monkeypatch.setattr("qflow_client.report.report.find_spec", lambda _name: None)
    output = tmp_path / "report"
    output.mkdir()
    for table in ("holds", "advice"):
        (output / f"{table}.parquet").touch()
    assert main(["report", str(tmp_path), "--output", str(output)]) == 0
    assert "needs pyarrow" in capsys.readouterr().out
    assert [path.name for path in output.iterdir()] == ["report.html"]
    assert "channel_flow" in (output / "report.html").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "there is no such file or folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--delay", "0"]) == 2


def test_the_flow_log_records_an_async_producer_like_a_threaded_one(tmp_path: Path) -> None:
    async def work() -> None:
        with FlowLog(tmp_path) as log:
            async with Broker() as broker:
                broker.declare_queue("orders")
                async with AsyncProducer(broker.url, routing_key="orders", name="east") as producer:
                    unwatch = log.watch(producer)
                    producer.pause("for lunch")
                    producer.resume()
                    await asyncio.sleep(0)
                    unwatch()
                    producer.pause()
                    producer.resume()

    asyncio.run(work())
    rows = flow_report(tmp_path).tables["holds"]
    assert [(row["producer"], row["reason"], row["episodes"]) for row in rows] == [("east", "paused", 1)]
