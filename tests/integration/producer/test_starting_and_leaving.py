"""A producer starts without a broker, reports its health and shuts down within a time limit (E12)."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qflow_client import ConnectionFailed, FlowEventKind, Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker
from qflow_client.health import asgi_readiness, wsgi_readiness
from qflow_client.sync.link import Link

from .tools import PATIENCE, Flows, bodies, eventually, hold, unused_port, wait_closed, wait_held

LATER: dict[str, Any] = {"connect_in_background": True, "reconnect_delay": 0.02, "reconnect_delay_max": 0.1}


@pytest.fixture
def port() -> int:
    return unused_port()


def test_E12_a_producer_created_without_a_broker_connects_when_the_broker_starts(
    make_producer: Callable[..., Producer], port: int
) -> None:
    producer = make_producer(f"amqp://guest:guest@127.0.0.1:{port}/", declare="q", **LATER)
    health = producer.health()
    # By now it may have tried, and say why that failed.
    assert (health.state, health.is_ready, health.reasons[0]) == ("disconnected", False, "disconnected")
    flows = Flows(producer, kinds=["disconnected"])
    with Broker(port=port) as broker:
        producer.send(b"1", timeout=PATIENCE).result(PATIENCE)
        assert bodies(broker) == [b"1"]
        assert producer.health().state == "ready"
        assert not flows.events or flows.kinds[-1] == "unflowed"


def test_E12_with_an_outbox_a_producer_accepts_messages_before_it_is_connected(
    make_producer: Callable[..., Producer], port: int, tmp_path: Path
) -> None:
    settings = {"outbox": tmp_path / "outbox", "when_flowed": "spill"}
    producer = make_producer(f"amqp://guest:guest@127.0.0.1:{port}/", declare="q", **LATER, **settings)
    receipts = [producer.send(b"%d" % number, timeout=PATIENCE) for number in range(3)]
    assert producer.stored == 3
    assert producer.health().is_ready
    with Broker(port=port) as broker:
        for receipt in receipts:
            receipt.result(PATIENCE)
        assert bodies(broker) == [b"0", b"1", b"2"]


def test_E12_a_permanent_error_ends_a_producer_that_connects_in_the_background(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(broker.url.replace("guest:guest", "guest:wrong"), **LATER)
    wait_closed(producer)
    health = producer.health()
    assert health.state == "closed"
    assert "ACCESS_REFUSED" in health.reasons[0]
    assert "wrong" not in repr(health)
    with pytest.raises(ProducerClosed, match="the producer is not connected yet; connecting is not possible"):
        producer.send(b"1")


def test_E12_a_producer_that_has_not_connected_yet_can_be_closed_in_time(
    make_producer: Callable[..., Producer], port: int
) -> None:
    producer = make_producer(f"amqp://guest:guest@127.0.0.1:{port}/", **LATER)
    producer.close(timeout=0)
    assert producer.health().reasons == (producer.flow_state.closed,)


def test_E12_health_distinguishes_a_blocked_connection_from_a_burst_of_messages(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=1)
    broker.withhold_confirms()
    producer.send(b"1")
    with pytest.raises(Exception, match="flowed"):
        producer.send(b"2", timeout=0)
    assert producer.health().is_ready
    hold(broker, producer, "connection_blocked", reason="memory")
    health = producer.health()
    assert (health.state, health.is_ready, health.unsettled) == ("blocked", False, 1)
    assert health.reasons == ("connection_blocked: memory",)
    assert health.since is not None


def test_E12_the_readiness_application_works_with_asgi_and_wsgi(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(name="orders")

    def ask() -> tuple[int, dict[str, Any], bool]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(asgi_readiness(producer)({"type": "http"}, None, send))  # type: ignore[arg-type]  # a coroutine
        started: list[tuple[str, list[tuple[str, str]]]] = []
        body = b"".join(wsgi_readiness(producer)({}, lambda status, headers: started.append((status, headers))))
        assert sent[1]["body"] == body
        assert started[0][0].startswith(str(sent[0]["status"]))
        return sent[0]["status"], json.loads(body)["orders"], "retry-after" in dict(started[0][1])

    assert ask() == (200, {"state": "ready", "reasons": []}, False)
    producer.pause("for a test")
    eventually(lambda: producer.health().state == "blocked")
    assert ask() == (503, {"state": "blocked", "reasons": ["paused: for a test"]}, True)


def test_E12_close_takes_no_longer_than_the_setting_close_timeout(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(close_timeout=0.1)
    broker.withhold_confirms()
    producer.send(b"1")
    # Otherwise it would take 20 s.
    began = time.monotonic()
    with pytest.raises(UndeliveredMessages):
        producer.close()
    assert time.monotonic() - began < 15.0


def test_E12_shutdown_returns_immediately_and_admitted_messages_are_delivered(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer()
    broker.withhold_confirms()
    receipt = producer.send(b"1")
    producer.shutdown()
    wait_closed(producer)
    assert not receipt.done
    with pytest.raises(ProducerClosed):
        producer.send(b"2")
    broker.release_confirms()
    receipt.result(PATIENCE)
    producer.close(timeout=PATIENCE)
    broker.wait_until(lambda b: not b.connections())


def test_E12_close_after_shutdown_raises_the_error_for_undelivered_messages_once(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(close_timeout=0.3)
    broker.withhold_confirms()
    producer.send(b"1")
    producer.shutdown()
    # `shutdown` closes on another thread.
    eventually(lambda: producer._engine.ended, "the close has begun")
    with pytest.raises(UndeliveredMessages) as caught:
        producer.close()
    assert [message.body for message in caught.value.unknown] == [b"1"]
    producer.close()


def test_E12_close_after_shutdown_does_not_wait_while_the_interpreter_ends(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(broker.url, routing_key="q") as producer:
        broker.withhold_confirms()
        receipt = producer.send(b"1")
        producer.shutdown(timeout=PATIENCE)
        eventually(lambda: producer._engine.ended, "the close has begun")
        with monkeypatch.context() as ending:
            ending.setattr("qflow_client.sync.engine.BRIEF", PATIENCE)
            ending.setattr(sys, "is_finalizing", lambda: True)
            # No thread runs that could end the close.
            producer.close()
            assert not receipt.done
        broker.release_confirms()
    assert receipt.done


_PROGRAM = """
import signal, sys, time
from qflow_client import Producer, ProducerClosed
producer = Producer(sys.argv[1], routing_key="q", close_timeout=10.0)
signal.signal(signal.SIGTERM, lambda *_: producer.shutdown())
count = 0
try:
    while True:
        producer.send(b"%d" % count)
        count += 1
        if count == 100:
            print("ready", flush=True)
except ProducerClosed:
    print(count, flush=True)
"""


@pytest.mark.program
def test_E12_a_program_that_gets_sigterm_loses_no_message(broker: Broker) -> None:
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, broker.url], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert bodies(broker) == [b"%d" % number for number in range(int(out))]
    finally:
        process.kill()
        process.wait()


def test_an_on_flow_callback_passed_to_the_constructor_misses_no_flow_event(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    flows = Flows()
    broker.block("from the beginning")
    producer = make_producer(on_flow=flows)
    wait_held(producer, "connection_blocked")
    eventually(lambda: any(hold.kind == "connection_blocked" for event in flows.events for hold in event.holds))


def test_E12_the_first_event_of_a_producer_that_connects_in_the_background_is_flowed(
    make_producer: Callable[..., Producer], port: int, all_logs: Callable[[], str]
) -> None:
    flows = Flows()
    make_producer(f"amqp://guest:guest@127.0.0.1:{port}/", on_flow=flows, **LATER)
    flows.wait_for(FlowEventKind.FLOWED)
    assert flows.kinds == ["flowed"]
    with Broker(port=port):
        flows.wait_for(FlowEventKind.UNFLOWED)
        assert flows.kinds == ["flowed", "unflowed"]
        assert {event.hold.kind for event in flows.events if event.hold is not None} == {"disconnected"}
        eventually(lambda: "connected to amqp:" in all_logs())
        assert "connected again" not in all_logs()
    flows.wait_for(FlowEventKind.FLOWED, 2)
    with Broker(port=port):
        eventually(lambda: "connected again to amqp:" in all_logs())


def test_without_connect_in_background_connecting_causes_no_flow_event(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    flows = Flows()
    producer = make_producer(broker.url, on_flow=flows)
    producer.pause()
    flows.wait_for(FlowEventKind.FLOWED)
    assert flows.kinds == ["flowed"]


def test_E12_a_first_attempt_in_the_background_takes_no_longer_than_connect_timeout(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_channel, tries = Link._publish_on, []

    def publish_on(link: Link, connection: object) -> None:
        tries.append(connection)
        # As with a broker that never answers the first Channel.Open.
        if len(tries) > 1:
            open_channel(link, connection)

    monkeypatch.setattr(Link, "_publish_on", publish_on)
    with Producer(broker.url, routing_key="q", **(LATER | {"connect_timeout": 0.2})) as producer:
        producer.send(b"1", timeout=PATIENCE).result(PATIENCE)
    assert bodies(broker) == [b"1"]


def test_E12_a_process_ends_even_if_shutdown_cannot_start_a_thread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    with Producer(broker.url, routing_key="q") as producer:
        monkeypatch.setattr("qflow_client.sync.engine.start_new_thread", refuse)
        producer.shutdown(timeout=None)
        assert producer._engine._leaves_until is None


def test_a_producer_with_on_flow_that_could_not_be_created_leaves_no_thread(port: int) -> None:
    with pytest.raises(ConnectionFailed):
        Producer(f"amqp://guest:guest@127.0.0.1:{port}/", name="not-made", on_flow=print)
    eventually(lambda: "qflow-callbacks not-made" not in [thread.name for thread in threading.enumerate()])
