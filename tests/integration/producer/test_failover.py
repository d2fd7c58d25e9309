"""A producer with several hosts leaves a blocked or silent host and resends unsettled messages (E15)."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qflow_client import Producer
from qflow_client.amqp.frames import CONFIRM_SELECT_OK
from qflow_client.amqp.tap import Tap, TapChannel
from qflow_client.broker import Broker
from qflow_client.recovery import Watch
from qflow_client.returning import answers
from qflow_client.testing.proxy import FaultProxy
from qflow_client.upkeep import Upkeep
from tests.certificates import server_context
from tests.effort import EFFORT

from .test_recovery import marked
from .tools import PATIENCE, Flows, bodies, eventually, hold, start

FAST = {"reconnect_delay": 0.02, "liveness": 0.2}


@pytest.fixture
def other() -> Iterator[Broker]:
    with Broker() as broker:
        broker.declare_queue("q")
        yield broker


def test_E15_a_producer_leaves_a_host_that_blocks_it_and_resends_unsettled_messages_in_order(
    make_producer: Callable[..., Producer], broker: Broker, other: Broker
) -> None:
    producer = make_producer([broker.url, other.url], on_blocked="failover", failover_delay=0.1)
    producer.send(b"0").result(PATIENCE)
    broker.withhold_confirms()
    receipts = [producer.send(b"1"), producer.send(b"2")]
    broker.wait_until(lambda b: b.queue("q").depth == 3)
    broker.block("memory")
    for receipt in receipts:
        receipt.result(PATIENCE)
    producer.send(b"3", timeout=PATIENCE).result(PATIENCE)
    assert bodies(other) == [b"1", b"2", b"3"]
    assert marked(other) == [True, True, False]


@pytest.mark.parametrize("settings", [{}, {"on_blocked": "failover", "failover_delay": 0.01}], ids=["wait", "one host"])
def test_E15_a_producer_stays_on_a_host_that_blocks_it_if_there_is_no_other_host(
    make_producer: Callable[..., Producer], broker: Broker, settings: dict[str, object]
) -> None:
    producer = make_producer(broker.url, **settings)
    flows = Flows(producer, kinds=["disconnected"])
    hold(broker, producer, "connection_blocked")
    broker.unblock()
    producer.send(b"1", timeout=PATIENCE).result(PATIENCE)
    assert flows.events == []


def test_E15_a_producer_leaves_a_silent_host_with_overdue_confirms(
    make_producer: Callable[..., Producer], broker: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Watch.look

    def look_until_it_leaves(watch: Watch, now: float, **state: Any) -> str | None:
        decision = look(watch, now, **state)
        if decision:
            # On a slow machine, the other host may be silent for as long, so the producer would leave it, too.
            watch._liveness = None
        return decision

    monkeypatch.setattr(Watch, "look", look_until_it_leaves)
    with FaultProxy(broker.url) as proxy:
        producer = make_producer([proxy.url, other.url], **FAST)
        proxy.stall()
        producer.send(b"1").result(PATIENCE)
    assert bodies(other) == [b"1"]
    assert marked(other) == [True]


def test_E15_a_producer_stays_on_a_host_with_late_confirms_that_answers_the_liveness_probe(
    make_producer: Callable[..., Producer], broker: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[bytes] = []
    make_probe = Tap.probe

    def probe(tap: Tap, number: int) -> bytes:
        probes.append(make_probe(tap, number))
        return probes[-1]

    answers: list[bytes] = []
    take = Tap._take

    def listen(tap: Tap, channel: TapChannel, number: int, kind: int, start: int, stop: int, now: float) -> bool:
        if tap._splitter.data[start : start + 4] == CONFIRM_SELECT_OK:
            answers.append(CONFIRM_SELECT_OK)
        return take(tap, channel, number, kind, start, stop, now)

    look = Watch.look

    def look_and_be_patient(watch: Watch, now: float, **state: Any) -> str | None:
        decision = look(watch, now, **state)
        if decision == "":
            # On a slow machine, the answer to the probe takes longer.
            watch._liveness = PATIENCE
        return decision

    monkeypatch.setattr(Tap, "probe", probe)
    monkeypatch.setattr(Tap, "_take", listen)
    monkeypatch.setattr(Watch, "look", look_and_be_patient)
    producer = make_producer([broker.url, other.url], **FAST)
    broker.withhold_confirms()
    receipt = producer.send(b"1")
    eventually(lambda: answers)
    # On a slow machine, the next probe may follow.
    assert probes
    assert not receipt.done
    broker.release_confirms()
    receipt.result(PATIENCE)
    assert bodies(broker) == [b"1"]


@pytest.mark.parametrize(("liveness", "is_limited"), [(PATIENCE, True), (None, False)])
def test_E15_with_liveness_the_system_buffers_little_of_a_large_message(
    make_producer: Callable[..., Producer],
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    liveness: float | None,
    is_limited: bool,
) -> None:
    begin = Upkeep.begin
    limits: list[int] = []

    def begin_and_read_limit(upkeep: Upkeep, tap: Tap, pump: Any, sock: Any, now: float) -> None:
        begin(upkeep, tap, pump, sock, now)
        limits.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT))

    monkeypatch.setattr(Upkeep, "begin", begin_and_read_limit)
    make_producer(broker.url, liveness=liveness)
    assert [0 < limit < 1 << 18 for limit in limits] == [is_limited]


@pytest.mark.timeout(900)
def test_E15_a_producer_with_liveness_never_leaves_a_host_that_confirms_after_a_long_time(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    pause, times = (1.5, 400) if EFFORT == "nightly" else (0.1, 3)
    producer = make_producer(broker.url, **(FAST | {"liveness": 2.0}))
    flows = Flows(producer, kinds=["disconnected"])
    for number in range(times):
        broker.withhold_confirms()
        receipt = producer.send(b"%d" % number)
        with pytest.raises(TimeoutError):
            receipt.result(pause)
        broker.release_confirms()
        receipt.result(PATIENCE)
    assert bodies(broker) == [b"%d" % number for number in range(times)]
    assert flows.events == []


def test_E15_a_producer_that_returns_to_its_first_host_resends_unsettled_messages_in_order(
    make_producer: Callable[..., Producer], broker: Broker, other: Broker
) -> None:
    with FaultProxy(broker.url) as proxy:
        proxy.refuse()
        producer = make_producer([proxy.url, other.url], return_to_first=0.2, reconnect_delay=0.02)
        producer.send(b"0").result(PATIENCE)
        other.withhold_confirms()
        receipts = [producer.send(b"1"), producer.send(b"2")]
        other.wait_until(lambda b: b.queue("q").depth == 3)
        proxy.heal()
        for receipt in receipts:
            receipt.result(PATIENCE)
        producer.send(b"3", timeout=PATIENCE).result(PATIENCE)
        assert bodies(broker) == [b"1", b"2", b"3"]
        assert marked(broker) == [True, True, False]
        producer.close()


def test_E15_a_producer_does_not_return_while_its_first_host_does_not_answer(
    make_producer: Callable[..., Producer], broker: Broker, other: Broker
) -> None:
    with FaultProxy(broker.url) as proxy:
        proxy.refuse()
        # Each probe takes that long. On a slow machine so does a connection, and is tried again.
        settings = {"connect_timeout": 0.2, "connect_in_background": True, "reconnect_delay": 0.02}
        producer = make_producer([proxy.url, other.url], return_to_first=0.1, **settings)
        assert producer.wait_unflowed(PATIENCE)
        flows = Flows(producer, kinds=["disconnected"])
        before = proxy.accepted

        def accept_only(proxy: FaultProxy) -> None:
            proxy.heal()
            proxy.stall()

        # It takes connections, and the broker's answer does not come. No probe comes between the two steps.
        proxy.schedule([(0.0, accept_only)]).wait(PATIENCE)
        eventually(lambda: proxy.accepted >= before + 4)
        producer.send(b"1").result(PATIENCE)
        assert flows.events == []
        assert bodies(other) == [b"1"]
        producer.close()


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("broker", True),
        ("TLS", True),
        ("mutual TLS", True),
        ("alert", True),
        ("silent", False),
        ("closed", False),
        ("other", False),
    ],
)
def test_E15_the_probe_of_the_first_host_accepts_only_the_answer_of_an_amqp_broker(
    stack: ExitStack, certificate: tuple[Path, Path], server: str, expected: bool
) -> None:
    context = server_context(*certificate)
    if server in ("mutual TLS", "alert"):
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate[0])
    if server == "broker" or "TLS" in server:
        url = stack.enter_context(Broker(ssl_context=None if server == "broker" else context)).url
    else:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"{'amqps' if server == 'alert' else 'amqp'}://127.0.0.1:{listener.getsockname()[1]}"
        if server == "closed":
            listener.close()
        elif server == "alert":
            # So that the alert is a part of the handshake.
            context.maximum_version = ssl.TLSVersion.TLSv1_2

            def refuse() -> None:
                client, _ = listener.accept()
                with client, pytest.raises(ssl.SSLError):
                    context.wrap_socket(client, server_side=True)

            start(refuse)
        elif server == "other":

            def serve() -> None:
                client, _ = listener.accept()
                client.sendall(b"HTTP/1.1 400 Bad Request")
                client.close()

            start(serve)
    assert answers(url, 0.3 if server == "silent" else PATIENCE) is expected


def test_E15_the_probe_of_the_first_host_fails_if_the_broker_disconnects_during_the_handshake(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        client, _ = listener.accept()
        client.recv(1)
        client.close()

    start(serve)
    assert answers(f"amqps://127.0.0.1:{listener.getsockname()[1]}", PATIENCE) is False
