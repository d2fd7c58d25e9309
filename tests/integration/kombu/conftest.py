from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, pools

from qflow_client import flow_manager
from qflow_client.broker import Broker
from qflow_client.kombu.flow import ChannelFlow
from qflow_client.kombu.transport import kept
from tests.integration.producer.conftest import certificate as certificate
from tests.integration.producer.tools import Proxy, Wire


@pytest.fixture(autouse=True, scope="module")
def _no_connection_is_left() -> Iterator[None]:
    yield
    pools.reset()
    for flow in flow_manager.resources:
        # Celery leaves open what its result backend and its pools have connected.
        assert isinstance(flow, ChannelFlow)
        if flow.channel.connection is not None:
            flow.channel.connection.collect()
    assert flow_manager.resources == ()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.callback(kept.cut)
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
def connect(broker: Broker, stack: ExitStack) -> Callable[..., Connection]:
    """Connects to `broker`, or to another URL, with transport options by name. The test need not close it."""

    def connect(url: str | None = None, **options: Any) -> Connection:
        parameters = {name: options.pop(name) for name in ("ssl", "heartbeat") if name in options}
        address = (url or broker.url).replace("amqp", "qflow")
        connection = Connection(address, transport_options=options, **parameters)
        stack.callback(connection.release)
        return connection.connect() and connection

    return connect
