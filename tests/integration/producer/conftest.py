from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qflow_client import Producer, UndeliveredMessages, flow_manager
from qflow_client.broker import Broker

from .tools import PATIENCE, Proxy, Wire


def _ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("qflow-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert _ours() == []
    yield
    for thread in _ours():
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert flow_manager.resources == ()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def wire() -> Wire:
    """What `broker` saw and said."""
    return Wire()


@pytest.fixture
def make_broker(stack: ExitStack, wire: Wire) -> Callable[..., Broker]:
    """Makes a broker with an empty queue ``q``; takes the broker's options, and the arguments of the queue."""

    def make(*, arguments: dict[str, object] | None = None, **options: Any) -> Broker:
        broker = stack.enter_context(Broker(**({"trace": wire} | options)))
        broker.declare_queue("q", arguments=arguments)
        return broker

    return make


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    """A fresh broker with an empty queue ``q``."""
    return make_broker()


@pytest.fixture
def make_producer(stack: ExitStack, request: pytest.FixtureRequest) -> Callable[..., Producer]:
    """Makes a producer for queue ``q`` of `broker`, or of the URL given. The test need not close it."""

    def make(url: Any = None, **settings: Any) -> Producer:
        if url is None:
            url = request.getfixturevalue("broker").url
        producer = Producer(url, **({"routing_key": "q"} | settings))
        stack.callback(_close, producer)
        return producer

    return make


def _close(producer: Producer) -> None:
    try:
        producer.close(timeout=0)
    except UndeliveredMessages:
        # The test has seen what it wanted to see.
        pass


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    """A producer for queue ``q`` of `broker`."""
    return make_producer()


@pytest.fixture
def proxy(broker: Broker, stack: ExitStack) -> Proxy:
    """A relay in front of `broker`."""
    proxy = Proxy(broker.port)
    stack.callback(proxy.close)
    return proxy


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    # fmt: off
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "-keyout", str(key), "-out", str(certificate),
        ],
        check=True,
        capture_output=True,
    )
    # fmt: on
    return certificate, key
