from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import qflow_client.pika as pika
from qflow_client.broker import Broker
from tests.integration.producer.conftest import certificate as certificate
from tests.integration.producer.tools import Proxy, Wire


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def wire() -> Wire:
    """What `broker` saw and said."""
    return Wire()


@pytest.fixture
def broker(stack: ExitStack, wire: Wire) -> Broker:
    """A fresh broker with an empty queue ``q``."""
    broker = stack.enter_context(Broker(trace=wire))
    broker.declare_queue("q")
    return broker


@pytest.fixture
def proxy(broker: Broker, stack: ExitStack) -> Proxy:
    """A relay in front of `broker`."""
    proxy = Proxy(broker.port)
    stack.callback(proxy.close)
    return proxy


@pytest.fixture
def connect(broker: Broker, stack: ExitStack) -> Callable[..., pika.BlockingConnection]:
    """Connects to `broker`, or to another URL, with settings by name. The test need not close it."""

    def connect(url: str | None = None, **settings: Any) -> pika.BlockingConnection:
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        connection = pika.BlockingConnection(pika.URLParameters(f"{url or broker.url}?{query}"))
        stack.callback(lambda: connection.close() if connection.is_open else None)
        return connection

    return connect
