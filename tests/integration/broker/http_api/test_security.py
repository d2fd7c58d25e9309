from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from qflow_client.broker.http.openapi import Operation
from qflow_client.broker.http.operations import api
from tests.certificates import certify

from .tools import Client

TOKEN = "correct-horse"
CHANGING = [operation for operation in api.operations if operation.method != "GET"]


@pytest.fixture(name="guarded")
def _guarded() -> Iterator[Broker]:
    with Broker(http_port=0, http_token=TOKEN) as broker:
        broker.declare_queue("orders")
        yield broker


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "broker.example", ""])
def test_an_http_host_that_is_not_a_loopback_address_requires_a_token(host: str) -> None:
    with pytest.raises(ValueError, match="is not a loopback address: set an http_token"):
        Broker(http_host=host, http_port=0)
    Broker(http_host=host, http_port=0, http_token=TOKEN)


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "with\nnewline", "pässwörter"])
def test_the_error_for_an_invalid_http_token_does_not_contain_the_token(token: str) -> None:
    with pytest.raises(ValueError, match="http_token must be at least 8") as caught:
        Broker(http_port=0, http_token=token)
    assert not token or token not in str(caught.value)


SHOWN: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer wrong-horse"},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": f"Bearer {TOKEN}x"},
    {"Authorization": "Bearer"},
    {"Authorization": TOKEN},
    {"Authorization": "Bearer \xff\xfe"},
    {"Cookie": f"token={TOKEN}"},
)


def path_of(operation: Operation) -> str:
    return operation.path.format(name="orders", id="x", scope="queue")


def test_requests_without_the_token_get_no_data_and_change_nothing(guarded: Broker) -> None:
    ask = Client(guarded)
    for operation in api.operations:
        # The token is checked in one place for all operations, so test all variants with one operation only.
        for shown in SHOWN if operation.name == api.operations[0].name else SHOWN[:2]:
            answer = ask(operation.method, path_of(operation), {}, headers=shown)
            if operation.is_public:
                assert answer.status == 200, operation
                assert "orders" not in answer.text, operation
            else:
                told = (answer.status, answer.fields, answer.headers["WWW-Authenticate"])
                assert told == (401, [], "Bearer"), (operation, shown)
        assert [queue.name for queue in guarded.queues()] == ["orders"], operation
        assert not guarded.producers_stopped, operation


def test_requests_with_the_token_are_accepted(guarded: Broker) -> None:
    ask = Client(guarded, {"Authorization": f"bearer {TOKEN}"})
    assert ask("GET", "/api/queues").json[0]["name"] == "orders"
    assert ask("GET", "/metrics").status == 200
    described = ask("GET", "/api/openapi.json").json
    assert described["paths"]["/api/queues"]["get"]["security"] == [{"token": []}]
    assert "401" in described["paths"]["/api/queues"]["get"]["responses"]
    assert "security" not in described["paths"]["/api/health"]["get"]


ELSEWHERE = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://127.0.0.1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_request_from_a_foreign_origin_changes_nothing(token: str | None) -> None:
    with Broker(http_port=0, http_token=token) as broker:
        broker.declare_queue("orders")
        ask = Client(broker, {"Authorization": f"Bearer {TOKEN}"})
        for operation in CHANGING:
            for headers in ELSEWHERE if operation is CHANGING[0] else (ELSEWHERE[0], ELSEWHERE[4]):
                answer = ask(operation.method, path_of(operation), {}, headers=headers)
                assert (answer.status, answer.fields) == (403, []), (operation, headers)
            assert [queue.name for queue in broker.queues()] == ["orders"], operation
            assert not broker.producers_stopped, operation


def test_a_request_from_the_same_origin_is_accepted(broker: Broker, ask: Client) -> None:
    own = {"Origin": broker.http_url, "Sec-Fetch-Site": "same-origin"}
    assert ask("POST", "/api/producers/stop", headers=own).status == 204
    assert broker.producers_stopped


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_request_body_with_the_content_type_of_a_form_is_answered_with_415(
    broker: Broker, ask: Client, kind: str
) -> None:
    """A form of another site can send such a request without a preflight request."""
    answer = ask("PUT", "/api/queues/q", {}, headers={"Content-Type": kind})
    assert (answer.status, answer.fields) == (415, [])
    assert broker.queues() == ()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", "", "192.0.2.1"])
def test_a_request_with_a_foreign_host_header_is_answered_with_403(ask: Client, host: str) -> None:
    """This prevents DNS rebinding: a page of evil.example sends a request when this name resolves to this machine."""
    for method, path in (("GET", "/api/queues"), ("POST", "/api/producers/stop"), ("GET", "/api/events")):
        assert ask(method, path, headers={"Host": host}).status == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:5", "[::1]:15672", "127.1.2.3"])
def test_requests_with_a_loopback_address_in_the_host_header_are_accepted(ask: Client, host: str) -> None:
    assert ask("GET", "/api/queues", headers={"Host": host}).status == 200


def test_response_headers_forbid_pages_of_other_origins_to_read_or_frame_a_response(ask: Client) -> None:
    for path in ("/api/queues", "/api/queues/none", "/nowhere"):
        headers = ask("GET", path, headers={"Origin": "http://evil.example"}).headers
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert ask("OPTIONS", "/api/queues/q", headers={"Origin": "http://evil.example"}).status == 405


def test_if_amqp_uses_tls_http_also_uses_tls(tmp_path: Path) -> None:
    certificate, key = certify(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    with Broker(ssl_context=server, http_port=0) as broker:
        assert broker.http_url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{broker.http_url}/api/health", context=context, timeout=20) as answer:
            assert answer.status == 200
