"""Trust in TLS: the producer verifies the broker, and the broker may require a client certificate."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from qflow_client import ConnectionFailed, Outcome, Producer
from qflow_client.broker import Broker
from tests.certificates import certify, server_context

from .tools import eventually, logged

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The client's certificate and key."""
    return certify(tmp_path_factory.mktemp("client"), "client", "DNS:client")


@pytest.fixture
def options(skin: Any) -> Callable[..., str]:
    """Makes what a URL says of TLS; each library has words of its own for it."""

    def options(trusted: Path, own: Pair | None = None) -> str:
        if skin is not Producer:
            names = {"cafile": trusted} | ({} if own is None else {"certfile": own[0], "keyfile": own[1]})
            return "&".join(f"{name}={quote(str(value))}" for name, value in names.items())
        said = {"ca_certs": str(trusted), "server_hostname": "127.0.0.1"}
        if own is not None:
            said |= {"certfile": str(own[0]), "keyfile": str(own[1])}
        return f"ssl_options={quote(repr(said))}"

    return options


@pytest.fixture
def wary(make_broker: Callable[..., Broker], certificate: Pair, client: Pair) -> Broker:
    """A broker that wants the client's certificate."""
    context = server_context(*certificate)
    context.load_verify_locations(client[0])
    context.verify_mode = ssl.CERT_REQUIRED
    return make_broker(ssl_context=context)


def test_a_producer_presents_its_certificate_to_a_broker_that_requires_one(
    make_producer: Callable[..., Producer], options: Callable[..., str], wary: Broker, certificate: Pair, client: Pair
) -> None:
    producer = make_producer(f"{wary.url}?{options(certificate[0], client)}")
    assert producer.send(b"x").result(timeout=20) is Outcome.CONFIRMED


def test_a_broker_that_requires_a_client_certificate_refuses_clients_without_one_or_with_a_wrong_one(
    skin: Any, options: Callable[..., str], wary: Broker, certificate: Pair, tmp_path: Path
) -> None:
    other = certify(tmp_path, "other", "DNS:other")
    for own in (None, other):
        with pytest.raises(ConnectionFailed):
            skin(f"{wary.url}?{options(certificate[0], own)}", connect_timeout=5)
    wary.wait_until(lambda broker: not broker.connections())


def test_a_producer_does_not_connect_to_a_broker_with_an_untrusted_certificate(skin: Any, wary: Broker) -> None:
    with pytest.raises(ConnectionFailed, match=r"(?i)certificate.verify.failed"):
        skin(wary.url)


def test_a_producer_does_not_connect_to_a_broker_whose_certificate_has_another_name(
    skin: Any, options: Callable[..., str], make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    elsewhere = certify(tmp_path, "elsewhere", "DNS:example.org")
    broker = make_broker(ssl_context=server_context(*elsewhere))
    with pytest.raises(ConnectionFailed, match=r"(?i)certificate.verify.failed|mismatch"):
        skin(f"{broker.url}?{options(elsewhere[0])}")


def test_a_producer_reads_the_files_of_certificates_again_when_it_reconnects(
    make_producer: Callable[..., Producer],
    options: Callable[..., str],
    make_broker: Callable[..., Broker],
    certificate: Pair,
    client: Pair,
    tmp_path: Path,
) -> None:
    broker = make_broker(ssl_context=server_context(*certificate))
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(certificate[0].read_bytes())
    producer = make_producer(f"{broker.url}?{options(trusted)}", reconnect_delay=0.01, reconnect_delay_max=0.02)

    def fails(words: str) -> bool:
        return words in producer.health().reasons[-1].lower().replace("_", " ")

    trusted.write_bytes(client[0].read_bytes())
    broker.drop_connections()
    eventually(lambda: producer.health().state == "disconnected" and fails("certificate verify failed"))
    trusted.write_bytes(certificate[0].read_bytes())
    assert producer.send(b"x", timeout=20).result(timeout=20) is Outcome.CONFIRMED


@pytest.mark.parametrize("content", [None, b""])
def test_a_producer_uses_the_certificates_that_it_has_read_if_it_cannot_read_the_files_when_it_reconnects(
    make_producer: Callable[..., Producer],
    options: Callable[..., str],
    wary: Broker,
    certificate: Pair,
    client: Pair,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(client[1].read_bytes())
    producer = make_producer(f"{wary.url}?{options(certificate[0], (client[0], key))}", reconnect_delay=0.01)
    if content is None:
        key.unlink()
    else:
        key.write_bytes(content)
    wary.drop_connections()
    assert producer.send(b"x", timeout=20).result(timeout=20) is Outcome.CONFIRMED
    assert any("the certificates that were read before are used again" in each for each in logged(caplog))
