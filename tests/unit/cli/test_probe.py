"""The readiness probe of a command."""

from __future__ import annotations

import socket
import threading
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import pytest

from qflow_client.cli.errors import CommandError
from qflow_client.cli.probe import _MOST, readiness_probe
from qflow_client.health import Health


class Ready:
    name = "relay"

    def health(self) -> Health:
        return Health("ready", (), None, 0, 0, False)


def ask(url: str, method: str = "GET") -> HTTPResponse:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.request(method, "/")
    return connection.getresponse()


def test_E12_the_readiness_endpoint_answers_again_after_a_failure_to_start_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def start_none_for_requests(thread: threading.Thread) -> None:
        if thread.name != "qflow-readiness":
            raise RuntimeError("can't start new thread")
        start(thread)

    with readiness_probe(Ready(), "127.0.0.1", 0) as url:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_none_for_requests)
            for _ in range(_MOST + 1):
                with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=20) as probe:
                    # The connection is closed without an answer.
                    assert probe.recv(1) == b""
        assert ask(url).status == 200


def test_E12_the_readiness_endpoint_answers_head_requests() -> None:
    with readiness_probe(Ready(), "127.0.0.1", 0) as url:
        answer = ask(url, "HEAD")
        assert (answer.status, answer.read()) == (200, b"")
        assert answer.headers["Content-Length"] == str(len(ask(url).read()))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
def test_E12_the_readiness_endpoint_can_listen_on_ipv6() -> None:
    with readiness_probe(Ready(), "::1", 0) as url:
        assert url.startswith("http://[::1]:")
        assert ask(url).status == 200


@pytest.mark.parametrize(("host", "port"), [("nowhere.invalid", 0), ("a" * 64 + ".example", 0), ("127.0.0.1", 70_000)])
def test_E12_an_error_reports_a_readiness_address_that_does_not_exist(host: str, port: int) -> None:
    with (
        pytest.raises(CommandError, match=f"^cannot answer readiness probes on {host}:{port}: "),
        readiness_probe(Ready(), host, port),
    ):
        pass
