"""The HTTP API closes idle and unauthenticated connections, and connections beyond its limit."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import struct
from urllib.parse import urlsplit

import pytest

from qflow_client.broker import Broker
from qflow_client.broker.http.server import HttpServer


def address(broker: Broker) -> tuple[str, int]:
    parts = urlsplit(broker.http_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def connect(broker: Broker) -> socket.socket:
    return socket.create_connection(address(broker), timeout=30)


def is_closed(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


def ask_health(broker: Broker) -> None:
    asking = http.client.HTTPConnection(*address(broker), timeout=30)
    asking.request("GET", "/api/health")
    assert asking.getresponse().status == 200
    asking.close()


def test_a_request_whose_body_is_never_complete_gets_an_error(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpServer, "PATIENCE", 0.1)
    with connect(broker) as asking:
        asking.sendall(
            b"PUT /api/queues/q HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        answer = b""
        while b"the body is not complete after 0.1 s" not in answer and (received := asking.recv(4096)):
            answer += received
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("words", [b"", b"GET /api/queues HT", b"GET /api/queues HTTP/1.1\r\nHost: x\r\n"])
def test_an_http_connection_without_a_complete_request_is_closed_and_an_active_connection_stays_open(
    words, monkeypatch
):
    with Broker(http_port=0, unauthenticated_timeout=0.5) as broker:
        asking = http.client.HTTPConnection(*address(broker), timeout=30)

        def ask():
            asking.request("GET", "/api/queues")
            answer = asking.getresponse()
            assert (answer.status, answer.read()) == (200, b"[]")

        with monkeypatch.context() as patched:
            # The active connection has time for its first request.
            patched.setattr(HttpServer, "patience", 30.0)
            ask()
        for _ in range(2):
            with connect(broker) as stranger:
                stranger.sendall(words)
                # This waits longer than a connection without a request may stay open.
                assert is_closed(stranger)
            ask()
        asking.close()


def test_http_connections_beyond_the_limit_are_closed(monkeypatch, caplog):
    monkeypatch.setattr(HttpServer, "MAX_CONNECTIONS", 2)
    with Broker(http_port=0) as broker:
        kept = [http.client.HTTPConnection(*address(broker), timeout=30) for _ in range(2)]
        for each in kept:
            each.request("GET", "/api/queues")
            assert each.getresponse().read() == b"[]"
        with connect(broker) as stranger:
            assert is_closed(stranger)
        assert "HTTP: refused, there are 2 connections" in caplog.text
        kept[0].close()
        while True:
            # There is room when the broker has noticed the end of the connection.
            with connect(broker) as another:
                another.sendall(b"GET /api/queues HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                try:
                    if another.recv(12) == b"HTTP/1.1 200":
                        break
                except ConnectionError:
                    continue
        kept[1].close()


def test_requests_with_the_token_are_answered_even_if_unauthenticated_clients_fill_all_connections(monkeypatch):
    monkeypatch.setattr(HttpServer, "MAX_CONNECTIONS", 10)
    monkeypatch.setattr(HttpServer, "MAX_STRANGERS", 5, raising=False)
    token = {"Authorization": "Bearer a-long-token"}

    def ask(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> int:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status

    with Broker(http_port=0, http_token="a-long-token") as broker, contextlib.ExitStack() as opened:

        def open_connection() -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(*address(broker), timeout=30)
            opened.callback(connection.close)
            return connection

        early = open_connection()
        assert ask(early, "/api/queues", token) == 200
        for _ in range(20):
            assert ask(open_connection(), "/api/health", {}) == 200
            assert ask(open_connection(), "/api/queues", {"Authorization": "Bearer wrong"}) == 401
        assert ask(open_connection(), "/api/queues", token) == 200
        assert ask(early, "/api/queues", token) == 200


def nested(depth: int) -> bytes:
    """Return a field value that consists of `depth` nested tables."""
    value = b"V"
    for _ in range(depth):
        value = b"F" + (2 + len(value)).to_bytes(4, "big") + b"\1k" + value
    return value


#: Values that JSON cannot represent, and a table with the maximum depth.
STRANGE = {
    "nan": b"d" + struct.pack(">d", float("nan")),
    "inf": b"f" + struct.pack(">f", float("-inf")),
    "decimal": b"D" + struct.pack(">Bi", 255, -1),
    "time": b"T" + struct.pack(">Q", 253_402_300_799),
    "bytes": b"x\0\0\0\2\xff\0",
    "text": b"S\0\0\0\2\xff\0",
    "large": b"l" + b"\x7f" + b"\xff" * 7,
    "nothing": b"V",
    "deep": nested(99),
}


@pytest.mark.parametrize("depth", [0, 260])
def test_E9_client_properties_of_an_unauthenticated_amqp_client_do_not_break_http_responses(broker, ask, depth):
    fields = STRANGE | ({"deep": nested(depth)} if depth else {})
    table = b"".join(bytes((len(name),)) + name.encode() + value for name, value in fields.items())
    payload = b"\0\x0a\0\x0b" + len(table).to_bytes(4, "big") + table + b"\5PLAIN\0\0\0\x0c\0guest\0guest\5en_US"
    with socket.create_connection(("127.0.0.1", broker.port), timeout=30) as stranger:
        stranger.sendall(b"AMQP\0\0\x09\x01" + b"\1\0\0" + len(payload).to_bytes(4, "big") + payload + b"\xce")
        broker.wait_until(lambda b: b.connections() and b.connections()[0].bytes_received > len(payload))
        (told,) = ask("GET", "/api/connections").json
        assert set(told["clientProperties"]) == (set() if depth else set(STRANGE))
        assert ask("GET", "/metrics").status == 200


@pytest.mark.parametrize("token", [None, "0123456789abcdef"])
@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n%s: x\r\n\r\n" % (b"n" * 20_000),
        b"POST /api/definitions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
        b"POST /api/definitions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n%s"
        % b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
    ],
    ids=["version", "header", "chunks", "gzip"],
)
def test_malformed_requests_are_answered_with_a_client_error_and_leave_no_trace_in_the_log(words, token, caplog):
    with Broker(http_port=0, http_token=token) as broker, connect(broker) as stranger:
        stranger.sendall(words)
        answer = b"".join(iter(lambda: stranger.recv(65_536), b""))
        assert answer.split()[1] in (b"400", b"401")
        # A request after it shows that the other one is completely handled.
        ask_health(broker)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "words", [b"Content-Length: 500\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"], ids=["length", "chunks"]
)
def test_a_client_that_disconnects_within_the_body_of_a_request_leaves_no_trace_in_the_log(words, caplog):
    head = b"POST /api/definitions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with Broker(http_port=0) as broker:
        with connect(broker) as stranger:
            stranger.sendall(head + words)
            # The answer to a later request of another client shows that the broker has read these bytes.
            ask_health(broker)
        ask_health(broker)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
