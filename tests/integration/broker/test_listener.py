"""E9: a listening socket with too many connections or without a free file descriptor."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from pathlib import Path

import pytest

from qflow_client.broker import Broker
from qflow_client.broker.core.listener import Listener
from tests.certificates import certify


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return certify(tmp_path)


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_E9_if_no_file_descriptor_is_free_the_broker_pauses_accepting_and_logs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Listener, "PAUSE", 0.01)
    tries = 0

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            if tries <= 20:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def main() -> None:
        done = asyncio.get_running_loop().create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transport.close()
                done.set_result(None)

        listener = Listener(Protocol, None, 1.0, 1)
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Exhausted)
            port = await listener.start("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(done, 60)
        writer.close()
        await listener.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    # Each pause ends with one attempt to accept.
    assert tries >= 21
    (record,) = caplog.records
    assert "Too many open files; raise the limit of open files (ulimit -n)" in record.getMessage()


def test_E9_with_too_many_unfinished_tls_handshakes_the_oldest_handshakes_are_aborted(
    certificate: tuple[Path, Path],
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    with Broker(ssl_context=context, max_unauthenticated=3, unauthenticated_timeout=600) as broker:
        silent = [socket.create_connection(("127.0.0.1", broker.port), timeout=60) for _ in range(5)]
        assert [is_cut(each) for each in silent[:2]] == [True, True]
        trusting = ssl.create_default_context(cafile=certificate[0])
        trusting.check_hostname = False
        with (
            socket.create_connection(("127.0.0.1", broker.port), timeout=60) as plain,
            trusting.wrap_socket(plain) as client,
        ):
            client.sendall(b"AMQP\0\0\x09\x01")
            assert client.recv(1) == b"\1"
        for each in silent:
            each.close()


def test_E9_the_timeout_for_unauthenticated_clients_includes_the_tls_handshake(certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    made: list[float] = []
    with Broker(ssl_context=context, unauthenticated_timeout=600) as broker:
        trusting = ssl.create_default_context(cafile=certificate[0])
        trusting.check_hostname = False
        listener = broker._server._listener
        assert listener is not None
        make_protocol = listener._make_protocol
        is_accepted = threading.Event()

        def make() -> asyncio.Protocol:
            protocol = make_protocol()
            is_accepted.set()
            return protocol

        listener._make_protocol = make
        before = broker._server.clock()
        with socket.create_connection(("127.0.0.1", broker.port), timeout=60) as plain:
            assert is_accepted.wait(60)
            after = broker._server.clock()
            with trusting.wrap_socket(plain):
                broker.wait_until(lambda broker: broker._server.connections, timeout=60)
                made += [connection.session.deadlines.open_by for connection in broker._server.connections]
        assert before + 600 <= made[0] <= after + 600
