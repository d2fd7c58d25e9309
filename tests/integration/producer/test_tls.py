from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from qflow_client import ConnectionFailed, FlowControlTimeout, Outcome, Producer
from qflow_client.broker import Broker
from qflow_client.sync.pika_io import _TapContext
from tests.certificates import server_context
from tests.effort import rounds

from .tools import (
    Proxy,
    Wire,
    bodies,
    eventually,
    fill_transport,
    send_until_heartbeat_with_a_full_socket,
    send_until_heartbeat_with_a_slow_peer,
    start,
    wait_done,
    wait_held,
)


@pytest.fixture
def tls_broker(make_broker: Callable[..., Broker], certificate: tuple[Path, Path]) -> Broker:
    return make_broker(ssl_context=server_context(*certificate))


@pytest.fixture
def trusting(certificate: tuple[Path, Path], skin: object) -> str:
    """What makes a URL trust the certificate; each library has words of its own for that."""
    if skin is not Producer:
        return f"cafile={quote(str(certificate[0]))}"
    options = {"ca_certs": str(certificate[0]), "cert_reqs": int(ssl.CERT_REQUIRED), "server_hostname": "127.0.0.1"}
    return f"ssl_options={quote(repr(options))}"


@pytest.fixture
def tls_producer(make_producer: Callable[..., Producer], tls_broker: Broker, trusting: str) -> Producer:
    return make_producer(f"{tls_broker.url}?{trusting}")


@pytest.fixture
def tls_proxy(tls_broker: Broker, stack: ExitStack) -> Proxy:
    proxy = Proxy(tls_broker.port)
    stack.callback(proxy.close)
    return proxy


def test_messages_of_all_sizes_arrive_over_tls(tls_producer: Producer, tls_broker: Broker) -> None:
    assert tls_broker.url.startswith("amqps://")
    sizes = [0, 1, 16_383, 16_384, 16_385, 131_064, 500_000, 3_000_000]
    receipts = [tls_producer.send(bytes(size)) for size in sizes]
    assert {receipt.result(timeout=20) for receipt in receipts} == {Outcome.CONFIRMED}
    assert [len(body) for body in bodies(tls_broker)] == sizes


def test_a_burst_of_messages_from_eight_threads_arrives_over_tls(tls_producer: Producer, tls_broker: Broker) -> None:
    count = rounds(500, least=200)
    jobs = [start(lambda t: [tls_producer.send(b"%d %d" % (t, n)) for n in range(count)], t) for t in range(8)]
    for job in jobs:
        job.result()
    tls_producer.flush(timeout=20)
    found = bodies(tls_broker)
    assert len(set(found)) == len(found) == 8 * count


def test_tls_connections_use_the_trust_store_of_the_system(
    make_producer: Callable[..., Producer],
    tls_broker: Broker,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert make_producer(tls_broker.url).send(b"").result(timeout=20) is Outcome.CONFIRMED


def test_a_broker_certificate_for_a_different_host_raises_a_clear_error(
    tls_broker: Broker, certificate: tuple[Path, Path]
) -> None:
    options = {"ca_certs": str(certificate[0]), "cert_reqs": int(ssl.CERT_REQUIRED), "server_hostname": "example.org"}
    url = f"{tls_broker.url}?ssl_options={quote(repr(options))}"
    with pytest.raises(ConnectionFailed, match=r"(?i)hostname mismatch|example\.org"):
        Producer(url, connect_timeout=10)


def test_connecting_without_tls_to_a_tls_port_or_with_tls_to_a_plain_port_raises_an_error(
    tls_broker: Broker, make_broker: Callable[..., Broker]
) -> None:
    with pytest.raises(ConnectionFailed):
        Producer(tls_broker.url.replace("amqps:", "amqp:"), connect_timeout=5)
    with pytest.raises(ConnectionFailed):
        Producer(make_broker().url.replace("amqp:", "amqps:"), connect_timeout=5)


def test_J7_channel_flow_is_obeyed_while_the_tls_socket_is_full(
    make_producer: Callable[..., Producer], tls_broker: Broker, tls_proxy: Proxy, trusting: str, wire: Wire
) -> None:
    producer = make_producer(f"{tls_proxy.url(tls_broker)}?{trusting}")
    tls_proxy.stop_reading()
    receipts = list(fill_transport(producer, size=100_000))
    tls_broker.flow(False)
    # The socket is full of a record that has begun; how much more the kernel takes of it meanwhile is its own affair.
    wait_held(producer, "channel_flow")
    tls_proxy.go_on_reading()
    wire.wait_for("in", "Channel.FlowOk")
    with pytest.raises(FlowControlTimeout, match="channel_flow"):
        producer.send(b"no", timeout=0.2)
    assert wire.came_between(wire.where("in", "Channel.FlowOk")[0]) == []
    came = tls_broker.queue("q").published
    eventually(lambda: producer.unsettled == len(receipts) - came, "all confirms")
    tls_broker.flow(True)
    producer.flush(timeout=20)
    assert [int(body[:8]) for body in bodies(tls_broker)] == list(range(len(receipts)))


def test_heartbeats_and_messages_are_interleaved_while_the_tls_socket_is_full(
    make_producer: Callable[..., Producer], tls_broker: Broker, tls_proxy: Proxy, trusting: str, wire: Wire
) -> None:
    producer = make_producer(f"{tls_proxy.url(tls_broker)}?{trusting}&heartbeat=1", max_unwritten_bytes=10_000)
    send_until_heartbeat_with_a_full_socket(producer, tls_broker, tls_proxy, wire, 100_000)


def test_heartbeats_are_sent_while_the_tls_socket_always_has_input(
    make_producer: Callable[..., Producer], tls_broker: Broker, tls_proxy: Proxy, trusting: str, wire: Wire
) -> None:
    producer = make_producer(f"{tls_proxy.url(tls_broker)}?{trusting}&heartbeat=1")
    send_until_heartbeat_with_a_slow_peer(producer, tls_broker, tls_proxy, wire, 150_000)


@pytest.mark.usefixtures("one_connection")
def test_a_tls_connection_that_is_cut_in_the_middle_settles_all_messages(
    make_producer: Callable[..., Producer], tls_broker: Broker, tls_proxy: Proxy, trusting: str
) -> None:
    producer = make_producer(f"{tls_proxy.url(tls_broker)}?{trusting}")
    tls_proxy.stop_reading()
    receipts = list(fill_transport(producer))
    tls_proxy.cut()
    wait_done(receipts)
    outcomes = [receipt.outcome for receipt in receipts]
    unknown = outcomes.count(Outcome.UNKNOWN)
    assert outcomes == [Outcome.UNKNOWN] * unknown + [Outcome.FAILED] * (len(outcomes) - unknown)
    assert 0 < unknown < len(outcomes)


def test_the_ssl_context_of_the_application_is_not_changed(certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    before = (context.sslsocket_class, context.verify_mode, context.check_hostname, context.options)
    tapped = _TapContext(context, None)  # type: ignore[arg-type]  # it is not used for anything here
    assert isinstance(tapped, ssl.SSLContext)
    assert (context.sslsocket_class, context.verify_mode, context.check_hostname, context.options) == before
    assert type(context) is ssl.SSLContext
    assert "wrap_socket" not in vars(context)
