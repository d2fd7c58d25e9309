from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import aiormq
import pytest
from pika.heartbeat import HeartbeatChecker

from qflow_client import Outcome, Producer, ProducerClosed
from qflow_client.broker import Broker
from qflow_client.testing.proxy import FaultProxy

from .tools import PATIENCE, Proxy, SteadyClock, Wire, bodies, fill_transport, holds, start, wait_held, wait_in_line


class Silence:
    """Says when the libraries lose patience with a peer that is silent, which else takes pika 12 s and aiormq 6 s.

    Until then they have as much patience as ever, whatever heartbeat there is.
    """

    # How often pika looks whether it is time.
    _TICK = 0.05

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # By the port of the peer: connections that were made before then have waited long enough.
        self._over: dict[int | None, float] = {}
        kind: Any = HeartbeatChecker
        name = "_Connection__heartbeat_grace_timeout"
        wait, look = kind._start_check_timer, kind._check_heartbeat

        def start_check_timer(checker: Any) -> None:
            _, seconds = vars(checker).setdefault("_grace", (time.monotonic(), checker._check_interval))
            checker._check_interval, checker._looks_at = self._TICK, time.monotonic() + seconds
            wait(checker)

        def check_heartbeat(checker: Any) -> None:
            began, _ = checker._grace
            if time.monotonic() >= checker._looks_at or self._is_over(checker._connection.params.port, began):
                look(checker)
            else:
                checker._check_timer = checker._connection._adapter_call_later(self._TICK, checker._check_heartbeat)

        def grace(connection: Any) -> float:
            began, seconds = vars(connection)["_grace"]
            return 0.01 if self._is_over(connection.url.port, began) else float(seconds)

        def set_grace(connection: Any, seconds: float) -> None:
            vars(connection)["_grace"] = time.monotonic(), seconds
            # A connection that ends after the test finds its own value, because the property is gone then.
            vars(connection)[name] = seconds

        monkeypatch.setattr(HeartbeatChecker, "_start_check_timer", start_check_timer)
        monkeypatch.setattr(HeartbeatChecker, "_check_heartbeat", check_heartbeat)
        monkeypatch.setattr(aiormq.Connection, name, property(grace, set_grace), raising=False)

    def _is_over(self, port: int | None, began: float) -> bool:
        return began < self._over.get(port, 0.0)

    def is_over(self, port: int) -> None:
        """Let them find the peers silent to whom they are connected at that port."""
        self._over[port] = time.monotonic()


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    return Silence(monkeypatch)


@pytest.mark.usefixtures("one_connection")
def test_heartbeats_continue_while_a_producer_is_idle_or_flowed_and_detect_a_dead_peer(
    make_producer: Callable[..., Producer], broker: Broker, proxy: Proxy, wire: Wire, silence: Silence
) -> None:
    """All cases run at the same time, because with a heartbeat of 1 s the broker detects a dead peer after 2 s."""
    broker._server.clock = SteadyClock()
    url = f"{broker.url}?heartbeat=1"
    stopped = make_producer(url)
    broker.flow(False, broker.producers()[0].name)
    wait_held(stopped, "channel_flow")
    idle, full = make_producer(url), make_producer(url, capacity=1)
    idle.send(b"").result(timeout=20)
    # It hears nothing but confirms, which the tap takes out: pika must not take the broker for dead.
    busy = make_producer(url, rate=50)
    # Behind the proxy nothing passes any more, and no socket is closed.
    dead = make_producer(f"{proxy.url(broker)}?heartbeat=1")
    connections = [connection.name for connection in broker.connections()[:4]]
    proxy.freeze()
    list(fill_transport(dead))
    # This one's first message stays unconfirmed, because its queue is ON.
    broker.declare_queue("held", arguments={"qpid.flow_stop_count": 1, "x-qflow-enforcement": "completion"})
    broker.publish(b"", "held")
    full.send(b"", routing_key="held")
    waiting = [start(producer.send, b"waits", timeout=None) for producer in (stopped, full, dead)]
    for producer in (stopped, full, dead):
        wait_in_line(producer, 1)

    def beats() -> list[int]:
        found = [connection for way, connection, _, name in wire.frames if (way, name) == ("in", "Heartbeat")]
        return [found.count(connection) for connection in connections]

    began = time.monotonic()
    while min(beats()) < 2 or len(broker.connections()) > len(connections):
        busy.send(b"").result(timeout=20)
        assert time.monotonic() < began + 3 * PATIENCE
    silence.is_over(proxy.port)
    assert isinstance(waiting[2].wait(), ProducerClosed)
    with pytest.raises(ProducerClosed, match="heartbeat"):
        dead.send(b"later")

    assert [connection.name for connection in broker.connections()] == connections
    assert all(job.is_alive() for job in waiting[:2])
    broker.flow(True, broker.producers()[0].name)
    broker.purge("held")
    for job in waiting[:2]:
        assert job.result().result(timeout=20) is Outcome.CONFIRMED
    for producer in (idle, busy):
        assert producer.send(b"").result(timeout=20) is Outcome.CONFIRMED


def test_a_dead_connection_of_a_flowed_producer_is_detected_by_heartbeats_and_replaced(
    make_producer: Callable[..., Producer], make_broker: Callable[..., Broker], stack: ExitStack, silence: Silence
) -> None:
    waiting = []
    for flowed in (False, True):
        broker = make_broker()
        broker._server.clock = SteadyClock()
        proxy = stack.enter_context(FaultProxy(broker.url))
        producer = make_producer(f"{proxy.url}?heartbeat=1", reconnect_delay=0.02)
        assert producer.send(b"first").result(timeout=PATIENCE) is Outcome.CONFIRMED
        proxy.cut()
        assert producer.send(b"second", timeout=PATIENCE).result(timeout=PATIENCE) is Outcome.CONFIRMED
        if flowed:
            broker.flow(False, broker.producers()[-1].name)
            wait_held(producer, "channel_flow")
        proxy.black_hole(connection=proxy.connections[-1].number)
        silence.is_over(proxy.port)
        waiting.append((broker, proxy, producer, start(producer.send, b"third", timeout=None)))
    for broker, proxy, producer, third in waiting:
        # Whatever was said on the old connection ends with it.
        assert third.result(timeout=30).result(timeout=30) is Outcome.CONFIRMED
        assert holds(producer) == []
        assert bodies(broker) == [b"first", b"second", b"third"]
        assert proxy.accepted == 3


def test_a_connection_that_is_found_dead_while_it_opens_is_a_failed_attempt(
    make_producer: Callable[..., Producer], broker: Broker, silence: Silence
) -> None:
    with FaultProxy(broker.url) as proxy:
        proxy.stall()
        producer = make_producer(f"{proxy.url}?heartbeat=1", connect_in_background=True)
        proxy.wait_until(lambda p: p.connections)
        # aiormq finds the connection dead as soon as it is open, because its age is the time of its last frame.
        silence.is_over(proxy.port)
        proxy.heal()
        assert producer.send(b"1").result(PATIENCE) is Outcome.CONFIRMED
